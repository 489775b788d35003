"""One partition of an outbox: an open batch that records are added to, full ones behind it, and the log they go to.

    append ─▶ open ──(full, lingered, flushed)──▶ full ──(a writer: seal at the log's end, append, flush)──▶ decided
              has `free_bytes` of the budget left; a record that needs more takes the slow path

`lock` guards the queues. At most one writer works on an appender at a time, so batches reach the log in the records'
order. If a batch fails, everything behind it fails too: later records must not reach the log first. With acks=ALL a
written batch waits for its replicas (partition_replicas.py) before it is decided, and keeps its bytes.

A failure of the disk stops the log. Appends then raise LogStopped, and a disk thread opens the log again in place, as
after a crash: within a second and, if that fails, again and again, at least every minute. With replicas the outbox then
leads by a new grant, because other members may hold records that this log has lost.

A closed or forked outbox has `Refusing` instead, which raises before it takes a lock: a forked child has no
writers, and any lock may have been held at the moment of the fork.

All outboxes of a process share two kinds of threads: writers, which seal and write, and a timer, which ends lingering.
Both sleep while nothing happens, and neither is woken per record: a writer once per round of an appender, the timer
once per linger time while batches are being opened.
"""

import logging
import os
import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from time import monotonic, perf_counter
from typing import NamedTuple, NoReturn

from filtering import StreamMetadata
from filtering.retry import Backoff
from pushrep.election.errors import NotLeader
from pushrep.env import Clock, shared_by_process
from pushrep.errors import PushrepError
from pushrep.log import AppendFailed, Durability, LogClosed, LogDamaged, LogEndMoved, LogPoisoned, SegmentLog
from pushrep.log.disk import Durations
from pushrep.log.flush_scheduler import process_flusher
from pushrep.outbox.batch import Budget, Latch, ManyReceipt, PendingBatch, Receipt
from pushrep.outbox.columns import Columns
from pushrep.outbox.errors import DeliveryFailed, LogStopped, ReceiptTimeout
from pushrep.outbox.identity import OutboxIdentity
from pushrep.outbox.partition_replicas import PartitionReplicas, Waiting
from pushrep.outbox.positions import PositionsStore, SourceOrder
from pushrep.outbox.settings import OutboxSettings
from pushrep.records import RecordBatch
from pushrep.status.value import REQUEST_BOUNDS_S

_LOG = logging.getLogger("pushrep.outbox")

_REOPEN = Backoff(first_s=1.0, longest_s=60.0, least=0.5)
_LOOK_MS = 100  # between looks at the clock while a log is stopped
_FIRST_SLICE_BYTES = 4096  # then it doubles, so that many idle partitions hold little
_ROUND_BYTES = 4 << 20  # what one flush covers at most, so that a long queue is not flushed at its end only


class AppendCounts:
    """Counters of one partition's appender, raised once a batch by one thread at a time.

    size_bytes: of record batches. failed: records by the error's name. appended, acknowledged: from a batch's first
    record to the log, and to its receipts.
    """

    __slots__ = ("acknowledged", "appended", "batches", "failed", "records", "size_bytes")

    def __init__(self) -> None:
        self.records = self.batches = self.size_bytes = 0
        self.failed: Counter[str] = Counter()
        self.appended, self.acknowledged = Durations(REQUEST_BOUNDS_S), Durations(REQUEST_BOUNDS_S)


class StoppedLog(NamedTuple):
    """Why a log takes nothing: since its first refused append, wall clock. last_ms: the newest one."""

    partition: int
    since_ms: int
    last_ms: int
    why: str


class Shared(NamedTuple):
    """What an outbox's appenders share. `submit` gives a writer a round, `opened(batch)` starts the linger timer."""

    identity: OutboxIdentity
    pid: int
    settings: OutboxSettings
    budget: Budget
    clock: Clock
    submit: Callable[[Callable[[], None]], object]
    opened: Callable[[PendingBatch], None]


class PartitionAppender:
    """See the file's map. The caller of `add_one`, `add_many` and `add_within_free_bytes` holds `lock`."""

    def __init__(
        self, log: SegmentLog, shared: Shared, store: PositionsStore, replicas: PartitionReplicas | None = None
    ) -> None:
        self.log, self.topic, self.partition = log, log.topic, log.partition
        self.name = f"{log.topic}-{log.partition}"
        self.owner_pid = os.getpid()
        self.lock = threading.Lock()
        self.free_bytes = 0  # bytes of the budget that the open batch holds and has not used
        self.open: PendingBatch | None = None
        self.counts = AppendCounts()
        self.opened_ms = shared.clock.wall_ms()
        """When its log was opened, or opened again."""
        self.stopped: StoppedLog | None = None
        """From the first append that the log refused to the next success; a damaged log says so itself."""
        self._store, self._replicas = store, replicas
        self._write_lock = threading.Lock() if replicas is None else replicas.write_lock  # for a round
        self.positions = store.highest  # (pid, source partition) -> highest source offset in the log
        # The base of our next batch. Not the log's end: once the log is cut, our PID names other records below this
        # offset.
        self._next_offset = log.log_end_offset
        self._shared, self._settings, self._pid = shared, shared.settings, shared.pid
        self._batch_bytes = shared.settings.config.log_config.batch_target_bytes
        self._order = SourceOrder(own_pid=shared.pid, partition=log.partition, partitions=shared.identity.partitions)
        self._full: deque[PendingBatch] = deque()
        self._writing: list[PendingBatch] = []
        self._with_writer = self._is_in_round = False
        self._flush_requested = False
        self._refusal: Callable[[], Exception] | None = None
        self._first_failed: PendingBatch | None = None
        self._stopped: BaseException | None = None  # by this failure
        self._reopenings = self._reopen_ms = 0
        # Offsets that were acknowledged before they were on disk: lost by failures, and perhaps lost by the last one.
        self._lost: list[tuple[int, int]] = []
        self._maybe_lost: list[tuple[int, int]] = []
        self._flusher = process_flusher()
        log.when_stopped(self._on_stopped)
        self._refuse_if_damaged()

    # -- adding ----------------------------------------------------------------------------------------------------

    def add_one(self, record: Columns) -> Receipt | None:
        """Append one record; None if the budget has no free bytes for it now. Raises `RecordRefused` and the appender's
        refusal.
        """
        self._check_takes()
        batch = self._batch_with_free_bytes(record.size_bytes)
        if batch is None:
            return None
        if isinstance(record.metadata, StreamMetadata):
            self._order.accept(record.metadata)
        self.free_bytes -= record.size_bytes
        try:
            return Receipt(batch, batch.extend(record, 0, 1))
        except BaseException:
            self._order.interrupted(record.metadata, 0, 1)
            raise

    def _check_takes(self) -> None:
        refusal = None if self._replicas is None else self._replicas.refusal()
        if isinstance(refusal, NotLeader):  # whatever else is wrong: its service ends here
            raise refusal
        if self._refusal is not None:
            raise self._refusal()
        if self._stopped is not None:
            raise self._log_stopped()
        if refusal is not None:
            raise refusal

    def add_within_free_bytes(self, value: bytes, timestamp_ms: int | None, metadata: StreamMetadata | None) -> Receipt:
        """Append a record that fits into `free_bytes`, which the caller then lowers. Raises `RecordRefused`."""
        batch = self.open
        assert batch is not None, "free bytes are those of the open batch"
        if metadata is not None:
            self._order.accept(metadata)
        try:
            return Receipt(batch, batch.add(value, timestamp_ms, metadata))
        except BaseException:
            self._order.interrupted(metadata, 0, 1)
            raise

    def add_many(self, columns: Columns) -> ManyReceipt:
        """Append all records or, if it raises, none. The caller has taken their `size_bytes` from the budget."""
        self._check_takes()
        count = len(columns.values)
        if isinstance(columns.metadata, StreamMetadata):
            self._order.accept(columns.metadata, count)
        elif columns.metadata is not None:
            self._order.accept_all(columns.metadata)
        lingering = self.open
        parts: list[tuple[PendingBatch, int, int]] = []
        try:
            self._spread(columns, parts)
        except BaseException:
            self._order.interrupted(columns.metadata, sum(records for _, _, records in parts), count)
            raise
        # The parts share a receipt, which waits for the last one: one sync for all of them costs least.
        self._flush_requested |= len(parts) > 1 and self._settings.durability is Durability.FLUSHED
        if self.open is not lingering and not self._flush_requested:
            self._linger(self.open)
        if self._full or self._flush_requested:
            self._call_writer()  # at the end: a writer called earlier would write the first part alone
        return ManyReceipt(parts)

    def _spread(self, columns: Columns, parts: list[tuple[PendingBatch, int, int]]) -> None:
        """Put the records into batches; `parts` gets (batch, index of the first record in it, records)."""
        ends, count, start = columns.ends, len(columns.values), 0
        while start < count:
            used = 0 if self.open is None else self.open.reserved_bytes - self.free_bytes
            end = bisect_right(ends, ends[start] + self._batch_bytes - used, lo=start + 1) - 1
            if end == start and used:
                self._close_open()
                continue
            end = max(end, start + 1)
            batch = self.open or self._new_batch()
            parts.append((batch, batch.extend(columns, start, end), end - start))
            batch.reserved_bytes += ends[end] - ends[start]  # `free_bytes` stays: the caller took these
            start = end

    def _batch_with_free_bytes(self, size: int) -> PendingBatch | None:
        """The open batch with `size` free bytes, or a new one if it is full; None if the budget is spent."""
        batch_bytes = self._batch_bytes
        if self.open is not None and self.open.reserved_bytes - self.free_bytes + size > batch_bytes:
            self._close_open()
            if self._full:
                self._call_writer()
        missing = size - self.free_bytes
        if missing <= 0:
            return self.open
        held = 0 if self.open is None else self.open.reserved_bytes
        wanted = max(missing, min(max(held, _FIRST_SLICE_BYTES), batch_bytes - held))
        granted = self._shared.budget.try_take(wanted, missing)
        if not granted:
            return None
        batch = self.open
        if batch is None:
            batch = self._new_batch()
            self._linger(batch)
        batch.reserved_bytes += granted
        self.free_bytes += granted
        return batch

    def _new_batch(self) -> PendingBatch:
        batch = self.open = PendingBatch(self, self._shared.clock.wall_ms(), perf_counter())
        return batch

    def _linger(self, batch: PendingBatch | None) -> None:
        if batch is not None and self._settings.config.linger_ms == 0:
            self._request_flush(batch)
        elif batch is not None:
            self._shared.opened(batch)

    def _close_open(self) -> None:
        """Move the open batch to the full ones and its unused bytes to the budget. The caller then calls a writer."""
        batch, free_bytes = self.open, self.free_bytes
        self.open, self.free_bytes, self._flush_requested = None, 0, False
        # No call stands before this one: Ctrl-C there would leave the batch in neither place, a hole in the log.
        if batch is not None and batch.values:
            self._full.append(batch)
            batch.reserved_bytes -= free_bytes
            self._shared.budget.give(free_bytes)
        elif batch is not None:  # its first record was refused
            self._shared.budget.give(batch.reserved_bytes)

    def _call_writer(self) -> None:
        if not self._with_writer:
            self._with_writer = True
            try:
                self._shared.submit(self.write_round)
            except BaseException:  # Ctrl-C: perhaps no writer was called, so the next append calls again
                self._with_writer = False
                raise

    # -- requests from outside ---------------------------------------------------------------------------------------

    def request_flush(self, batch: PendingBatch | None = None) -> None:
        """Seal the open batch as soon as a writer is free, but only if it is `batch` (None: any)."""
        with self.lock:
            self._request_flush(batch)

    def _request_flush(self, batch: PendingBatch | None) -> None:
        if self.open is not None and (batch is None or batch is self.open):
            self._flush_requested = True
        if self._full or self._flush_requested:
            self._call_writer()

    def latch_for(self, batch: PendingBatch) -> Latch | None:
        """Request the flush of `batch` and return the latch that opens when it is decided; None if it is decided."""
        with self.lock:
            if batch.decided:
                return None
            self._request_flush(batch)
            if batch.waiters is None:
                batch.waiters = Latch()
            return batch.waiters

    def pending(self) -> list[PendingBatch]:
        """Every batch that is not decided yet, in log order."""
        with self.lock:
            waiting = [] if self._replicas is None else [held.batch for held in self._replicas.waiting]
            # An open batch whose first record was refused is empty: it is dropped, and never decided.
            lingering = [] if self.open is None or not self.open.values else [self.open]
            return [*waiting, *self._writing, *self._full, *lingering]

    def waits_since_s(self) -> tuple[float, str] | None:
        """Since when (perf_counter) the oldest batch that lingers no more waits, and for what; None: none waits."""
        with self.lock:
            if self._replicas is not None and self._replicas.waiting:
                return self._replicas.waiting[0].batch.opened_s, "in-sync members"
            first = next(iter((*self._writing, *self._full)), None)
            return None if first is None else (first.opened_s, "the disk")

    def unseen_failure(self) -> PendingBatch | None:
        """The first failed batch whose failure no caller received; None when called again, until another fails."""
        with self.lock:
            batch, self._first_failed = self._first_failed, None
            return batch if batch is not None and not batch.seen else None

    def refuse(self, refusal: Callable[[], Exception]) -> None:
        """From now on every append raises `refusal()`. Records appended before are still written."""
        with self.lock:
            self._refusal = refusal
            self._note(refusal())
            self._close_open()
            if self._full:
                self._call_writer()

    def _stop_for(self, reason: str) -> None:
        if self._refusal is None:
            self._refusal = lambda: LogStopped(self.topic, self.partition, reason)

    def _refuse_if_damaged(self) -> None:
        if (damaged_from := self.log.damaged_from) is not None:
            self._stop_for(f"its log is damaged from offset {damaged_from} on, repair it")

    def give_up(self, failure: Exception) -> None:
        """Fail all undecided batches: those that a writer holds may still be delivered, the others will not be."""
        with self.lock:
            held, self._writing = self._writing, []
            if self._replicas is not None:
                held = [*(waiting.batch for waiting in self._replicas.remove_all()), *held]
            done = [*held, *self._take_waiting()]
            for at, batch in enumerate(done):
                self._fail(batch, failure, may_be_delivered=at < len(held))
                self._order.failed(batch.runs, str(failure) or repr(failure))
        self._release(done)

    # -- a log that a failure has stopped --------------------------------------------------------------------------

    def _on_stopped(self, failure: BaseException) -> None:
        _LOG.error("%s takes no records, and is opened again as soon as that works: %s", self.name, failure)
        self._stopped, self._reopenings = failure, 0
        self._note(failure)
        if self._settings.durability is Durability.BUFFERED:
            self._maybe_lost = [(self.log.flushed_offset, self._next_offset)]
        self._flusher.attach(self)
        self._reopen_later()

    def _reopen_later(self) -> None:
        self._reopenings += 1
        self._reopen_ms = self._shared.clock.monotonic_ms() + int(1000 * _REOPEN.pause_s(self._reopenings))
        self._flusher.soon(self, _LOOK_MS)

    def flush_in_background(self) -> None:
        """The flusher's call: a disk thread opens the log again when that is due."""
        if self._shared.clock.monotonic_ms() < self._reopen_ms:
            self._flusher.soon(self, _LOOK_MS)
        else:
            self._shared.submit(self._reopen)

    def _reopen(self) -> None:
        replicas = self._replicas
        try:
            with self._write_lock:  # rounds are refused until `_go_on`
                self._fail_waiting_for_replicas()
                self.log.reopen()
                self._store.forget_ahead()
                is_whole = self.log.damaged_from is None and self.log.log_end_offset == self._next_offset
                if replicas is None or is_whole:
                    self._go_on()
            if replicas is not None and not is_whole:
                replicas.lead_anew(self._go_on)
        except LogClosed:
            return
        except Exception as error:  # noqa: BLE001 - whatever it is: nobody else would try again
            if self._stopped is not None:
                self._reopen_later()
            _LOG.warning("%s can't be opened again yet: %s", self.name, error)

    def _fail_waiting_for_replicas(self) -> None:
        if self._replicas is None:
            return
        with self.lock:
            waiting = [one.batch for one in self._replicas.remove_all()]
            for batch in waiting:
                self._fail(batch, self._log_stopped(), may_be_delivered=True)
        self._release(waiting)

    def _log_stopped(self) -> LogStopped:
        why = str(self._stopped) or repr(self._stopped)
        return LogStopped(self.topic, self.partition, why, "it is opened again as soon as the disk works")

    def _go_on(self) -> None:
        """The log is open again, with what members have of it. The caller holds the write lock."""
        with self.lock:
            end, before, self._next_offset = self.log.log_end_offset, self._next_offset, self.log.log_end_offset
            self.opened_ms = self._shared.clock.wall_ms()
            self.positions = self._store.highest
            if self._settings.durability is Durability.BUFFERED:
                self._lost += [(end, before)] if end < before else []
                self._maybe_lost = []
            self._refuse_if_damaged()
            self._stopped = self.log.stopped_by
            self.stopped = None if self._stopped is None else self.stopped
        if self._replicas is not None and (led := self._replicas.led) is not None:
            led.on_flush(self.log.flushed_offset)
        _LOG.warning("%s was opened again after a failure: %s", self.name, self.log.recovery)

    def raise_lost(self) -> None:
        """Raise `DeliveryFailed`, once, for records that were acknowledged as BUFFERED and that a failed sync lost."""
        with self.lock:
            lost = [f"{start} to {end - 1}" for start, end in (*self._lost, *self._maybe_lost) if start < end]
            self._lost, self._maybe_lost = [], []
        if lost:
            reason = f"offsets {', '.join(lost)} were acknowledged as BUFFERED, and a sync failed"
            may_be = self._stopped is not None
            raise DeliveryFailed(topic=self.topic, partition=self.partition, may_be_delivered=may_be, reason=reason)

    def end(self) -> None:
        """From now on the log is not opened again after a failure."""
        with suppress(LogClosed):  # closed by hand: it calls nobody any more
            self.log.when_stopped(lambda _failure: None)
        self._flusher.detach(self)

    def expire(self, since_ms: int, failure: Exception) -> None:
        """Fail the batches that wait for replicas since then: they are in the log, and may still be delivered."""
        replicas = self._replicas
        if replicas is None or not replicas.waiting:
            return
        with self.lock:
            late = [waiting.batch for waiting in replicas.remove_expired(since_ms)]
            for batch in late:
                self._fail(batch, failure, may_be_delivered=True)
        self._release(late)

    def _replicated(self, waiting: Waiting, failure: Exception | None) -> None:
        """Called by `Leading` once enough members hold the batch, or with the `failure` why they may never."""
        batch = waiting.batch
        with self.lock:
            if batch.decided:
                return  # `expire` or `give_up` failed it first
            assert self._replicas is not None, "it waited for them"
            self._replicas.remove(waiting)
            if failure is None:
                batch.base_offset = waiting.base_offset
                self.counts.acknowledged.add(perf_counter() - batch.opened_s)
            else:
                self._fail(batch, failure, may_be_delivered=True)
        self._release([batch])

    # -- writing: one writer at a time -----------------------------------------------------------------------------

    def write_round(self) -> None:
        """A writer's turn: seal and write what waits, decide it, and call a writer again for what came meanwhile."""
        with self.lock:
            if self._is_in_round:  # a second call after Ctrl-C
                return
            self._is_in_round = True
            if self._flush_requested:
                self._close_open()
            size = 0
            while self._full and size < _ROUND_BYTES:
                batch = self._full.popleft()
                size += batch.reserved_bytes
                self._writing.append(batch)
            round_ = list(self._writing)
        if round_:
            with self._write_lock:
                self._write(round_)
        with self.lock:
            self._with_writer = self._is_in_round = False
            if self._full or self._flush_requested:
                self._call_writer()

    def is_idle_within(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the round that is being written; whether none is any more."""
        if not self._write_lock.acquire(timeout=timeout_s):
            return False
        self._write_lock.release()
        return True

    def _write(self, round_: list[PendingBatch]) -> None:
        replicas = self._replicas
        refusal: Exception | None = self._log_stopped() if self._stopped is not None else None
        if refusal is None and replicas is not None:
            refusal = replicas.refusal()
        if refusal is not None:
            self._decide(round_, [], 0, refusal, 0)
            return
        bases: list[int] = []
        sealed, in_log, failure = self._append_to_log(round_, bases)
        epoch = sealed[-1].header.leader_epoch if sealed else 0
        led = None if replicas is None else replicas.led
        if led is not None and sealed:  # before the flush: other disks work at the same time
            led.on_append(bases[0], sealed, self._shared.clock.monotonic_ms())
        if bases and self._settings.durability is Durability.FLUSHED:
            try:
                self.log.flush()
                if led is not None:
                    led.on_flush(self.log.flushed_offset)
            except Exception as error:  # noqa: BLE001
                failure, bases = error, []
        if failure is None:
            self.stopped = None
        elif isinstance(failure, AppendFailed | LogPoisoned | LogEndMoved):  # else it is the record's, or known
            self._note(failure)
        self._decide(round_, bases, in_log, failure, epoch)

    def _note(self, failure: BaseException) -> None:
        now_ms, before = self._shared.clock.wall_ms(), self.stopped
        cause = failure.cause if isinstance(failure, LogPoisoned) else failure
        why = str(cause).removeprefix(f"{getattr(cause, 'path', '')}: ")  # the partition says where
        self.stopped = StoppedLog(self.partition, before.since_ms if before else now_ms, now_ms, why)

    @property
    def is_refusing(self) -> bool:
        """Whether every append is refused, whatever the replicas say."""
        return self._refusal is not None or self._stopped is not None

    def _append_to_log(
        self, round_: list[PendingBatch], bases: list[int]
    ) -> tuple[list[RecordBatch], int, Exception | None]:
        """Returns the batches that were appended, how many may be in the log, and the error; `bases` gets their
        offsets.
        """
        codec, carrier, counts = self._settings.config.log_config.codec, self._shared.identity.carrier, self.counts
        done: list[RecordBatch] = []
        base = 0
        try:
            for batch in round_:
                base = self._next_offset
                sealed = batch.seal(base, pid=self._pid, partition=self.partition, carrier=carrier, codec=codec)
                self.log.append(sealed, durability=Durability.BUFFERED, base_offset=base)
                self._next_offset += len(batch.values)
                counts.records += len(batch.values)
                counts.size_bytes += len(sealed.data)
                done.append(sealed)
                bases.append(base)
        except LogEndMoved as error:
            return done, len(done), error  # something else cut it, or appended to it
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the receipts' answer
            in_log = len(done)
            if self._ends_above(base):  # a log takes a batch whole or not at all
                in_log += 1
                self._next_offset = base + len(batch.values)
            return done, in_log, error
        return done, len(done), None

    def reset_to_log_end(self) -> None:
        """Records were fetched into the log from another member, while nothing was appended here."""
        self._next_offset = self.log.log_end_offset

    def change_pid(self, pid: int) -> None:
        """Records without metadata that are sealed from now on are of this PID."""
        with self._write_lock:  # no batch is sealed without its positions being noted
            self.begin_pid(pid)

    def begin_pid(self, pid: int) -> None:
        """As `change_pid`, for a caller that holds the write lock."""
        self._pid = pid
        self._order.change_pid(pid)

    def last_position(self, pid: int, partition: int) -> int | None:
        """The highest source offset of the pair in the log; raises `LogStopped` if the log was cut meanwhile."""
        wanted = self._next_offset  # read first: a writer may raise both meanwhile
        if (end := self.log.log_end_offset) < wanted:
            raise LogStopped(self.topic, self.partition, f"its log was cut at {end}")
        return self.positions.get((pid, partition))

    def _ends_above(self, offset: int) -> bool:
        try:
            return self.log.log_end_offset > offset
        except PushrepError:  # closed meanwhile: it may hold the batch
            return True

    def _decide(
        self, round_: list[PendingBatch], bases: list[int], in_log: int, failure: Exception | None, epoch: int
    ) -> None:
        """Resolve the batches that have a base; fail the others, of which those before `in_log` may be delivered."""
        with self.lock:
            if not self._writing:
                return  # `give_up` has failed them
            self._writing = []
            done, failed, waiting = round_[: len(bases)], round_[len(bases) :], []
            now_s, counts = perf_counter(), self.counts
            counts.batches += len(done)
            for batch, base in zip(done, bases, strict=True):
                self._note_positions(batch, base, epoch)
                counts.appended.add(now_s - batch.opened_s)
            if done and self._replicas is not None and self._replicas.needs_all:
                waiting, done = self._replicas.hold(done, bases), []
            for batch, base in zip(done, bases, strict=False):
                batch.base_offset = base
                counts.acknowledged.add(now_s - batch.opened_s)
            if failure is not None:
                failed = [*failed, *self._take_waiting()]
                for at, batch in enumerate(failed, start=len(bases)):
                    self._fail(batch, failure, may_be_delivered=at < in_log)
                    self._order.failed(batch.runs, str(failure) or repr(failure))
                if isinstance(failure, LogDamaged | LogClosed | LogEndMoved):
                    self._stop_for(str(failure))
        self._release([*done, *failed])
        for one in waiting:
            one.led.when_replicated(one.end_offset, partial(self._replicated, one))

    def _take_waiting(self) -> list[PendingBatch]:
        self._close_open()
        waiting, self._full = list(self._full), deque()
        return waiting

    def _fail(self, batch: PendingBatch, failure: Exception, *, may_be_delivered: bool) -> None:
        batch.failure = (failure, may_be_delivered)
        self.counts.failed[type(failure).__name__] += len(batch.values)
        if self._first_failed is None or self._first_failed.seen:
            self._first_failed = batch

    def _note_positions(self, batch: PendingBatch, base: int, epoch: int) -> None:
        noted = batch.last_positions(base, self._pid, self.partition)
        positions = self.positions
        for pair, offset in noted:
            if positions.get(pair, -1) < offset:
                positions[pair] = offset
        self._store.add(base, base + len(batch.values), epoch, noted)

    def _release(self, decided: list[PendingBatch]) -> None:
        for batch in decided:
            self._shared.budget.give(batch.reserved_bytes)
            batch.drop_records()
            batch.announce()


class Refusing:
    """Every look-up and every access to an attribute raises `refusal()`."""

    def __init__(self, refusal: Callable[[], Exception]) -> None:
        self._refusal = refusal

    def __getitem__(self, partition: int) -> NoReturn:
        raise self._refusal()

    def __getattr__(self, name: str) -> NoReturn:
        raise self._refusal()


def pending_in(appenders: Iterable[PartitionAppender]) -> list[PendingBatch]:
    """Every batch that is not decided yet."""
    return [batch for appender in appenders for batch in appender.pending()]


def decided_by(deadline_s: float | None, batches: Iterable[PendingBatch]) -> bool:
    """Wait; whether all are decided by then, on the monotonic clock. None: wait without a limit."""
    return all(batch.wait(None if deadline_s is None else max(0.0, deadline_s - monotonic())) for batch in batches)


def raise_unseen_failure(appenders: Sequence[PartitionAppender]) -> None:
    """Raise `DeliveryFailed` for the first failure that no receipt was asked about; the others count as raised."""
    failed = [batch for appender in appenders if (batch := appender.unseen_failure()) is not None]
    for batch in failed:
        batch.raise_failure()
    for appender in appenders:
        appender.raise_lost()


def flush_appenders(appenders: Sequence[PartitionAppender], timeout: float | None) -> None:
    """Return when everything appended before is on disk. Raises `DeliveryFailed`, `ReceiptTimeout`, `LogClosed`."""
    for appender in appenders:
        appender.request_flush()
    deadline_s = None if timeout is None else monotonic() + timeout
    if not decided_by(deadline_s, pending_in(appenders)) and timeout is not None:
        raise ReceiptTimeout(timeout)
    raise_unseen_failure(appenders)
    for appender in appenders:
        appender.log.flush()


BUFFERED_AT_ONCE = 4  # rounds without a sync are work for the processor: more threads only queue for the interpreter


class LingerTimer:
    """Seals a batch `linger_ms` after it was begun, unless it was full before; for all outboxes that linger so long."""

    def __init__(self, linger_ms: int, clock: Clock) -> None:
        self._linger_ms, self._clock = linger_ms, clock
        # In order, as all linger alike. A queue in C: Ctrl-C in the appending thread can't leave it locked.
        self._due: SimpleQueue[tuple[int, PendingBatch] | None] = SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pushrep-linger-{linger_ms}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread; open batches stay as they are."""
        self._stop.set()
        self._due.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def opened(self, batch: PendingBatch) -> None:
        """A batch was begun now."""
        self._due.put((self._clock.monotonic_ms() + self._linger_ms, batch))

    def _run(self) -> None:
        while (due := self._due.get()) is not None:
            due_ms, batch = due
            while (wait_ms := due_ms - self._clock.monotonic_ms()) > 0 and not batch.decided:
                if self._stop.wait(wait_ms / 1000):
                    return
            batch.appender.request_flush(batch)


LINGER_TIMERS = shared_by_process(LingerTimer.end)
"""By (linger_ms, clock); a timer ends with the last outbox that has it."""
