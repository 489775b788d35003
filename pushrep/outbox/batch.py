"""Records on their way into the log: the open batch, the receipts for it, and the bytes that may wait in memory.

    PendingBatch  the columns of a batch that is not sealed yet; keys hold offsets, so they are packed when it is sealed
    Receipt       (batch, index): the answer for one record; a batch is decided once, for all its records
    budget        back-pressure over all partitions: an open batch takes bytes in slices and gives them back once it is
                  written or has failed, so most records need no call to the budget

Columns other than `values` may be shorter than it: records beyond a column's end have the default (no key, no headers,
the time when the batch was begun, this outbox's own metadata), so that a plain record costs one list append.

Awaiting receipts in an event loop takes no thread for each, and one wake-up of the loop for many batches:

    task ─ await receipt ─▶ a future in `_waiting[batch]`        the batch is sealed at the end of the loop's iteration,
                                                                 with everything that was appended in it
    writer ─ batch decided ─▶ `_decided` ─ one call_soon_threadsafe ─▶ the loop resolves STEP futures an iteration

The futures of one batch may be many thousands: they are resolved in steps, so that other tasks run in between.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from filtering import KEY_BYTES, METADATA_HEADER, StreamMetadata, pack_keys
from pushrep.env import Clock
from pushrep.errors import ForkedProcess, checked_timeout
from pushrep.outbox.columns import Columns, Headers
from pushrep.outbox.errors import DeliveryFailed, ReceiptTimeout
from pushrep.outbox.positions import Pair, Run
from pushrep.records import Codec, HeaderColumn, RecordBatch, encode_batch
from pushrep.records.encoder import given_columns, header_columns, header_rows

if TYPE_CHECKING:
    import asyncio


class Budget:
    """`limit` bytes to share. Thread-safe."""

    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit = limit
        self._free = limit
        self._lock = threading.Lock()  # `with condition` could stay locked after Ctrl-C
        self._changed = threading.Condition(self._lock)
        self._clock = clock
        self._calls: list[Callable[[], object]] = []

    @property
    def taken(self) -> int:
        """Bytes in use now."""
        return self.limit - self._free

    def try_take(self, wanted: int, at_least: int) -> int:
        """`wanted` bytes, or what is left if that is `at_least`; else 0. Never waits."""
        with self._lock:
            taken = min(wanted, self._free)
            if taken < at_least:
                return 0
            self._free -= taken
            return taken

    def give(self, size: int) -> None:
        """Give back bytes that are no longer in memory."""
        if size:
            with self._lock:
                self._free += size
                self._changed.notify_all()
                calls, self._calls = self._calls, []
            for call in calls:
                call()

    def when_given(self, call: Callable[[], object]) -> None:
        """Call `call()` once, in the thread that next gives bytes back; it must neither wait nor raise."""
        with self._lock:
            self._calls.append(call)

    def wait_for(self, size: int, deadline_ms: int) -> bool:
        """Wait until `size` bytes were free, at most to `deadline_ms` of the monotonic clock; True if they were."""
        with self._lock:
            while self._free < size:
                left_ms = deadline_ms - self._clock.monotonic_ms()
                if left_ms <= 0:
                    return False
                self._changed.wait(left_ms / 1000)
            return True


_LOG = logging.getLogger("pushrep.outbox")


class Latch:
    """Opens once. It is a single lock, without an Event's Python code: Ctrl-C in a waiter cannot block the thread that
    opens it.
    """

    __slots__ = ("_shut",)

    def __init__(self) -> None:
        self._shut = threading.Lock()
        self._shut.acquire()

    def open(self) -> None:
        """Release all present and future waiters. Called once."""
        self._shut.release()

    def wait(self, timeout: float | None) -> bool:
        """True once it is open; False after `timeout` seconds."""
        if self._shut.acquire(timeout=-1 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)):
            self._shut.release()
            return True
        return False


class BatchOwner(Protocol):
    """What a batch needs of the PartitionAppender that it waits in."""

    name: str
    topic: str
    partition: int
    owner_pid: int
    lock: threading.Lock

    def latch_for(self, batch: "PendingBatch") -> Latch | None:
        """Request the batch's flush and return the latch to wait for; None if the batch is decided."""
        ...

    def request_flush(self, batch: "PendingBatch") -> None:
        """Have it written soon, without waiting for its linger time."""
        ...


class PendingBatch:
    """Records of one partition that will be one record batch. Changed under its appender's lock alone, until it is
    decided.
    """

    __slots__ = (
        "appender",
        "base_offset",
        "calls",
        "failure",
        "headers",
        "keys",
        "opened_ms",
        "opened_s",
        "reserved_bytes",
        "runs",
        "seen",
        "timestamps_ms",
        "values",
        "waiters",
    )  # fmt: skip

    def __init__(self, appender: BatchOwner, opened_ms: int, opened_s: float) -> None:
        """opened_s: of `perf_counter`, for durations."""
        self.appender = appender
        self.opened_ms, self.opened_s = opened_ms, opened_s
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] = []
        self.headers: list[Headers] | list[HeaderColumn] = []  # columns while every record has the same names
        self.timestamps_ms: list[int] = []
        self.runs: list[Run] = []  # upstream metadata, ascending, disjoint; between them: our own
        self.reserved_bytes = 0  # bytes taken from the budget
        self.base_offset = -1
        self.failure: tuple[BaseException, bool] | None = None  # (why, may be delivered)
        self.seen = False  # a caller has received the failure
        self.waiters: Latch | None = None
        self.calls: list[Callable[[], object]] = []  # called once it is decided

    @property
    def decided(self) -> bool:
        return self.base_offset >= 0 or self.failure is not None

    def extend(self, columns: Columns, start: int, end: int) -> int:
        """Add the records `start` to `end` of the columns; return the first one's index in the batch."""
        index = len(self.values)
        runs, last_records = len(self.runs), self.runs[-1].records if self.runs else 0
        try:
            self._extend_columns(index, columns, start, end)
        except BaseException:  # Ctrl-C: an extra entry in one column would shift to the next record
            self._cut_columns(index, runs, last_records)
            raise
        self.values += columns.values[start:end]
        return index

    def _extend_columns(self, index: int, columns: Columns, start: int, end: int) -> None:
        if columns.keys is not None:
            _pad(self.keys, index, None)
            self.keys += columns.keys[start:end]
        if columns.headers is not None:
            self._extend_headers(index, columns.headers, start, end)
        if columns.timestamps_ms is not None:
            _pad(self.timestamps_ms, index, self.opened_ms)
            self.timestamps_ms += columns.timestamps_ms[start:end]
        metadata = columns.metadata
        if isinstance(metadata, StreamMetadata):
            first = metadata
            if start:
                first = StreamMetadata(metadata.pid, metadata.partition, metadata.offset + start)
            self._add_run(index, end - start, first)
        elif metadata is not None:
            for at, position in enumerate(metadata[start:end], start=index):
                self._add_run(at, 1, position)

    def _extend_headers(
        self, index: int, headers: Sequence[Headers] | Sequence[HeaderColumn], start: int, end: int
    ) -> None:
        columns, mine = given_columns(headers), given_columns(self.headers)
        if columns is None:
            self.headers = self._header_rows(index)
            self.headers += headers[start:end]  # type: ignore[arg-type] # no columns
        elif index == 0:
            self.headers = [HeaderColumn(name, [*values[start:end]]) for name, values in columns]
        elif mine and [one.name for one in mine] == [one.name for one in columns] and len(mine[0].values) == index:
            for (_, kept), (_, values) in zip(mine, columns, strict=True):
                kept.extend(values[start:end])  # type: ignore[arg-type, union-attr] # the lists of above
        else:
            self.headers = self._header_rows(index)
            self.headers += header_rows([HeaderColumn(name, values[start:end]) for name, values in columns])

    def _header_rows(self, count: int) -> list[Headers]:
        """The headers of each of the first `count` records."""
        columns = given_columns(self.headers)
        rows = self.headers if columns is None else header_rows(columns)
        return _padded(rows, count, ())

    def _cut_columns(self, index: int, runs: int, last_records: int) -> None:
        columns = given_columns(self.headers)
        headers = [self.headers] if columns is None else [one.values for one in columns]
        for column in (self.keys, self.timestamps_ms, *headers):
            del column[index:]
        del self.runs[runs:]
        if self.runs:
            self.runs[-1].records = last_records

    def add(self, value: bytes, timestamp_ms: int | None, metadata: StreamMetadata | None) -> int:
        """Add one record without key and headers; return its index. As `extend`, in half the time."""
        index = len(self.values)
        runs, last_records = len(self.runs), self.runs[-1].records if self.runs else 0
        try:
            if timestamp_ms is not None:
                times = self.timestamps_ms
                if len(times) != index:
                    _pad(times, index, self.opened_ms)
                times.append(timestamp_ms)
            if metadata is not None:
                self._add_run(index, 1, metadata)
        except BaseException:
            self._cut_columns(index, runs, last_records)
            raise
        self.values.append(value)
        return index

    def _add_run(self, start: int, records: int, metadata: StreamMetadata) -> None:
        if self.runs and self.runs[-1].continues_with(start, metadata):
            self.runs[-1].records += records
        else:
            self.runs.append(Run(start, records, metadata))

    def seal(self, base_offset: int, *, pid: int, partition: int, carrier: str, codec: Codec) -> RecordBatch:
        """Encode the record batch for `base_offset`, the log's end offset. Changes nothing, so it can be called
        again.
        """
        count = len(self.values)
        packed = b"".join(self._packed_metadata(base_offset, pid, partition))
        times: int | list[int] = self.opened_ms
        if self.timestamps_ms:
            times = _padded(self.timestamps_ms, count, self.opened_ms)
        columns, rows = self._sealed_headers(count)
        keys: bytes | list[bytes | None] | None = packed
        if carrier == "header":
            keys = _padded(self.keys, count, None) if self.keys else None
            if rows is None:
                columns = [*columns, HeaderColumn(METADATA_HEADER, packed)]
            else:
                metadata = (packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES))
                rows = [(*own, (METADATA_HEADER, one)) for own, one in zip(rows, metadata, strict=True)]
        headers = rows or columns or None
        return encode_batch(
            self.values, keys=keys, headers=headers, timestamps_ms=times, codec=codec, base_offset=base_offset
        )

    def _sealed_headers(self, count: int) -> tuple[Sequence[HeaderColumn], list[Headers] | None]:
        """As columns, or else for each record."""
        if not self.headers:
            return [], None
        columns = given_columns(self.headers)
        if columns is not None and len(columns[0].values) == count:
            return columns, None
        rows = self._header_rows(count)
        columns = header_columns(rows)
        return ([], rows) if columns is None else (columns, None)

    def _packed_metadata(self, base_offset: int, pid: int, partition: int) -> Iterator[bytes]:
        at = 0
        for run in self.runs:
            if at < run.start:
                yield pack_keys(pid, partition, base_offset + at, run.start - at)
            if run.records == 1:  # interleaved pairs: one struct.pack is cheaper than a numpy array
                yield StreamMetadata(run.pid, run.partition, run.offset).pack()
            else:
                yield pack_keys(run.pid, run.partition, run.offset, run.records)
            at = run.start + run.records
        if at < len(self.values):
            yield pack_keys(pid, partition, base_offset + at, len(self.values) - at)

    def last_own_index(self) -> int:
        """The index of the last record that carries this outbox's own metadata, -1 if none does."""
        last = len(self.values) - 1
        for run in reversed(self.runs):
            if run.start + run.records - 1 < last:
                break
            last = run.start - 1
        return last

    def last_positions(self, base_offset: int, pid: int, partition: int) -> list[tuple[Pair, int]]:
        """Each run's (PID, source partition) and last source offset; for our own PID the last log offset that carries
        it.
        """
        noted = [((run.pid, run.partition), run.last_offset) for run in self.runs]
        if (own_last := self.last_own_index()) >= 0:
            noted.append(((pid, partition), base_offset + own_last))
        return noted

    def drop_records(self) -> None:
        """Free the records of a decided batch, which its receipts may outlive for long."""
        self.values, self.keys, self.headers, self.timestamps_ms, self.runs = [], [], [], [], []

    def wait(self, timeout: float | None) -> bool:
        """Wait until the batch is decided, sealing it at once if it lingers. False after `timeout` seconds."""
        if self.decided:
            return True
        checked_timeout(timeout)
        self._refuse_in_fork()
        latch = self.appender.latch_for(self)
        return latch is None or latch.wait(timeout)

    def when_decided(self, call: Callable[[], object]) -> None:
        """Call `call()` in the thread that decides the batch; at once, in this thread, if it is decided already."""
        self._refuse_in_fork()
        with self.appender.lock:
            if not self.decided:
                self.calls.append(call)
                return
        call()

    def _refuse_in_fork(self) -> None:
        if os.getpid() != (owner_pid := self.appender.owner_pid):
            raise ForkedProcess(f"the outbox of {self.appender.name}", owner_pid=owner_pid, pid=os.getpid())

    def announce(self) -> None:
        """Wake all waiters and make the calls. The batch is decided, so nobody adds to it or to `calls` any more."""
        if self.waiters is not None:
            self.waiters.open()
        for call in self.calls:
            try:
                call()
            except Exception:  # noqa: BLE001 - a caller's own mistake must not stop the writer
                _LOG.exception("a callback of a receipt of %s failed", self.appender.name)
        self.calls = []

    def raise_failure(self, delivered: int = 0) -> None:
        """Raise `DeliveryFailed` if the batch failed. delivered: how many records of the same call are in the log
        before it.
        """
        if self.failure is not None:
            self.seen = True
            cause, may_be_delivered = self.failure
            raise DeliveryFailed(
                topic=self.appender.topic,
                partition=self.appender.partition,
                may_be_delivered=may_be_delivered,
                reason=str(cause) or repr(cause),
                delivered=delivered,
            ) from cause


class Receipt:
    """The result of `append`: the record's offset, once it is durable as the outbox promises."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: PendingBatch, index: int) -> None:
        self._batch, self._index = batch, index

    def done(self) -> bool:
        """Whether `result` would answer at once."""
        return self._batch.decided

    def result(self, timeout: float | None = None) -> int:
        """The record's log offset, once the outbox's acks and durability hold; waits up to `timeout` seconds.

        Waiting seals a lingering batch at once. Raises `DeliveryFailed`, whose `may_be_delivered` says whether the
        record may still be in the log, and `ReceiptTimeout` if neither is known in time.
        """
        batch = self._batch
        if not batch.wait(timeout) and timeout is not None:
            raise ReceiptTimeout(timeout)
        batch.raise_failure()
        return batch.base_offset + self._index

    def add_done_callback(self, callback: Callable[["Receipt"], object]) -> None:
        """Call `callback(receipt)` once the receipt is done: in a thread of the outbox, or at once if it is.

        The callback must be quick and must not wait, because other records wait for that thread. Its error is
        logged. A batch that lingers is still written after `linger_ms`, not sooner. Raises `ForkedProcess`.
        """
        self._batch.when_decided(partial(callback, self))

    def __await__(self) -> Generator[Any, None, int]:
        """`offset = await receipt`, in a task of asyncio or uvloop, any number of times: suspends the task alone.

        Raises `DeliveryFailed` as `result` does. A cancelled await says in a note that the record may still be
        delivered; the receipt can be awaited again.
        """
        return _awaited(self._batch, self._index)

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._batch.failure else "done"
        return f"<Receipt {self._batch.appender.name} {state}>"


def _awaited(batch: PendingBatch, index: int) -> Generator[Any, None, int]:
    """The record's offset, once it is decided. It keeps no reference to the receipt: garbage collection stops the loop
    and, where ten thousand tasks wait, visits everything that they reference.
    """
    if not batch.decided:
        loop = receipts_of_running_loop()
        future = loop.future_of(batch)
        try:
            yield from future
        except BaseException as error:
            loop.gave_up(batch, future, error)
            raise
    batch.raise_failure()
    return batch.base_offset + index


class ManyReceipt(Receipt):
    """The result of `append_many`: one answer for all its records, which have consecutive offsets."""

    __slots__ = ("_parts", "count")

    def __init__(self, parts: list[tuple[PendingBatch, int, int]]) -> None:
        super().__init__(parts[0][0], parts[0][1])
        self._parts = parts  # (batch, index of the first record in it, records)
        self.count = sum(part[2] for part in parts)  # the last record's offset is result() + count - 1

    def done(self) -> bool:
        return all(batch.decided for batch, _, _ in self._parts)

    def __await__(self) -> Generator[Any, None, int]:
        for batch, index, _ in self._parts:
            with suppress(DeliveryFailed):  # `result` raises it, with how many came before
                yield from _awaited(batch, index)
        return self.result(0)

    def add_done_callback(self, callback: Callable[[Receipt], object]) -> None:
        self._call_when_decided(callback, 0)

    def _call_when_decided(self, callback: Callable[[Receipt], object], part: int) -> None:
        while part < len(self._parts) and self._parts[part][0].decided:
            part += 1
        if part == len(self._parts):
            callback(self)
        else:
            self._parts[part][0].when_decided(partial(self._call_when_decided, callback, part))

    def result(self, timeout: float | None = None) -> int:
        """The first record's log offset, once all of them are acknowledged.

        Raises as `Receipt.result` does; `delivered` of `DeliveryFailed` counts the records that are in the log
        before the first that failed.
        """
        deadline = None if timeout is None else monotonic() + timeout
        delivered = 0
        for batch, _, count in self._parts:
            if not batch.wait(None if deadline is None else max(0.0, deadline - monotonic())) and timeout is not None:
                raise ReceiptTimeout(timeout)
            batch.raise_failure(delivered)
            delivered += count
        return self._batch.base_offset + self._index


def _pad(column: list[Any], length: int, default: object) -> None:
    if len(column) < length:
        column.extend([default] * (length - len(column)))


def _padded(column: list[Any], length: int, default: object) -> list[Any]:
    return column if len(column) == length else column + [default] * (length - len(column))


STEP = 256  # futures resolved in one iteration: their tasks run in the next one, a few milliseconds at most


class LoopReceipts:
    """The batches that tasks of one event loop wait for. All but `_on_decided` runs in the loop's thread."""

    def __init__(self, loop: "asyncio.AbstractEventLoop") -> None:
        self._loop = loop
        self._waiting: dict[PendingBatch, dict[asyncio.Future[None], None]] = {}
        self._to_seal: dict[PendingBatch, None] = {}
        self._resolving: deque[asyncio.Future[None]] = deque()
        self._lock = threading.Lock()  # guards `_decided` and `_is_called`
        self._decided: list[PendingBatch] = []
        self._is_called = False

    def future_of(self, batch: PendingBatch) -> "asyncio.Future[None]":
        """A future that is done once the batch is decided; the batch is not decided yet. A caller that stops waiting
        calls `gave_up`. A plain future, no coroutine: with ten thousand waiting, each full garbage collection visits
        every object.
        """
        future = self._loop.create_future()
        futures = self._waiting.get(batch)
        if futures is None:
            batch.when_decided(partial(self._on_decided, batch))  # runs after the code below: it goes through the loop
            futures = self._waiting[batch] = {}
            if not self._to_seal:
                self._loop.call_soon(self._seal)
            self._to_seal[batch] = None
        futures[future] = None
        return future

    def gave_up(self, batch: PendingBatch, future: "asyncio.Future[None]", error: BaseException) -> None:
        """A cancelled wait does not stop the records: a note on the error says so."""
        if (futures := self._waiting.get(batch)) is not None:
            futures.pop(future, None)
        import asyncio  # noqa: PLC0415 - loaded already by who awaits

        if isinstance(error, asyncio.CancelledError):
            error.add_note(
                f"the record is on its way to {batch.appender.name} and may still be delivered: await its receipt again"
            )

    def _seal(self) -> None:
        batches, self._to_seal = self._to_seal, {}
        for batch in batches:
            batch.appender.request_flush(batch)

    def _on_decided(self, batch: PendingBatch) -> None:
        """Runs in the thread that decides the batch."""
        with self._lock:
            self._decided.append(batch)
            if self._is_called:
                return
            self._is_called = True
        call_in_loop(self._loop, self._resolve)

    def _resolve(self) -> None:
        with self._lock:
            decided, self._decided = self._decided, []
            self._is_called = False
        is_under_way = bool(self._resolving)
        for batch in decided:
            self._resolving.extend(self._waiting.pop(batch, ()))
        if not is_under_way:
            self._resolve_some()

    def _resolve_some(self) -> None:
        for _ in range(min(STEP, len(self._resolving))):
            future = self._resolving.popleft()
            if not future.done():
                future.set_result(None)
        if self._resolving:
            self._loop.call_soon(self._resolve_some)


def call_in_loop(loop: "asyncio.AbstractEventLoop", call: Callable[[], object]) -> None:
    """Schedule `call` in the loop's thread. If the loop is closed, nobody waits in it, and nothing is called."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        if not loop.is_closed():
            raise


_OF_LOOP: "WeakKeyDictionary[asyncio.AbstractEventLoop, LoopReceipts]" = WeakKeyDictionary()
_OF_LOOP_LOCK = threading.Lock()


def receipts_of_running_loop() -> LoopReceipts:
    """Raises RuntimeError outside of a running asyncio (or uvloop) loop."""
    import asyncio  # noqa: PLC0415 - it would cost a service without a loop

    loop = asyncio.get_running_loop()
    with _OF_LOOP_LOCK:
        found = _OF_LOOP.get(loop)
        if found is None:
            found = _OF_LOOP[loop] = LoopReceipts(loop)
        return found
