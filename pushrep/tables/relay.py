"""TableRelay: brings each committed row of a topic into the outbox, once.

    begin batch n + 1   committed in the database, with its snapshot
    read, append        page by page; each record has the header event-id, `<epoch>-<batch>-<row id>`
    wait                until all of it is on disk, and acknowledged
    close batch n + 1   in the database, with the deletion of its rows

Killed between any two of these, the next start finds an open batch in the database, reads the same rows by its
snapshot, and leaves out those whose event-id is in the outbox's logs already. If the logs and the state in the
database do not continue each other, because one of both was restored, it stops by name (pushrep/tables/decide.py).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, Self

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from filtering import tracing
from filtering.closing import FirstErrorRaised
from filtering.retry import Backoff
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import BadArgument
from pushrep.log import SegmentLog
from pushrep.log.directory_id import read_directory_id
from pushrep.outbox import Outbox, Receipt
from pushrep.outbox.columns import Header
from pushrep.outbox.errors import (
    BufferFull,
    DeliveryFailed,
    LogStopped,
    NotEnoughReplicas,
    ReceiptTimeout,
    RecordRefused,
)
from pushrep.outbox.relay_note import RelayNote
from pushrep.outbox.status import PAUSE_MS, RelayStatus, TableRows
from pushrep.records.encoder import HeaderColumn, header_rows
from pushrep.settings import whole_number
from pushrep.tables.database import Holder, Page, RelayDatabase, RelayState, first_line, is_away
from pushrep.tables.decide import EVENT_ID, BatchState, EventId, NotContinued, RelayedLog, judge
from pushrep.tables.errors import (
    AnotherRelay,
    DatabaseFailed,
    DatabaseMoved,
    DatabaseWentBack,
    OutboxWentBack,
    RowRefused,
    StateChanged,
)
from pushrep.tables.outbox_table import CREATED, OutboxTable, headers_of

_LOG = logging.getLogger("pushrep.tables")
_AGAIN = Backoff(first_s=0.2, longest_s=5.0, least=0.5)
_ON_REFUSED = ("stop", "park")
_MAY_PASS = (DeliveryFailed, LogStopped, NotEnoughReplicas, OSError)
"""Errors of an outbox that pass: its disk, too few replicas. The relay then looks which rows were appended."""
_WAITS = "the outbox has not acknowledged what was appended: pushrep status {}"
_PAGE_ROWS, _PAGE_BYTES = 8192, 8 << 20
_RECEIPT_S, _STOPS_S, _LOOK_S = 0.5, 0.5, 0.02
_CHUNK_BYTES = 4 << 20
WATCH_S = 5.0


class TableRelay(FirstErrorRaised):
    """Relays the rows of the outbox's topic into `outbox`, in a thread of its own from `start` to `close`, or in the
    caller's by `run`. A context manager, too: close it before the outbox.

    dsn: SQLAlchemy's URL of the database: postgresql://USER@HOST/DATABASE or sqlite:///FILE.
    outbox: open, with `carrier="header"`, since the key is the service's. table: the OutboxTable, or its name; given
    the table itself, a commit of this process wakes the relay. poll_ms: how often it looks otherwise.
    on_refused: what happens to a row that the outbox refuses: "stop", or "park": it moves to `<table>_parked`.
    Raises BadArgument.
    """

    def __init__(
        self,
        outbox: Outbox,
        dsn: str,
        *,
        table: OutboxTable | str = "pushrep_outbox",
        poll_ms: int = 100,
        on_refused: str = "stop",
    ) -> None:
        if outbox.identity.carrier != "header":
            raise BadArgument("outbox", "its carrier is 'key', and the key of a row is the service's: make it 'header'")
        if on_refused not in _ON_REFUSED:
            raise BadArgument("on_refused", f"{on_refused!r} is neither 'stop' nor 'park'")
        whole_number("poll_ms", poll_ms, 1, 3_600_000)
        self.outbox, self.topic = outbox, outbox.identity.topic
        self._table, self._poll_s, self._on_refused = table, poll_ms / 1000, on_refused
        name = table.name if isinstance(table, OutboxTable) else table
        self._database = RelayDatabase(dsn, name, self.topic)
        self._stop, self._woken = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._relayed, self._trouble = 0, _Trouble()
        self._failure: Exception | None = None
        self._seen: TableRows | None = None
        self._unseen = _Trouble()
        self._asked_s: float | None = None
        self._looking, self._is_over = threading.Lock(), False
        self._watched = self.outbox.facts.relays
        self._closed: RelayState | None = None  # while no batch is open
        self._noted_s = 0.0

    def start(self) -> Self:
        """Relay in a thread. What ends it is in `status()`, and raised by `close`."""
        self._watched.append(self._seen_status)
        self._thread = threading.Thread(target=self._run_in_thread, name="pushrep-table-relay", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """End behind the page that is being appended; the next start goes on there. Raises what stopped it."""
        self._stop.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._watched.remove(self._seen_status)
            if (failure := self._failure) is not None:
                self._failure = None
                raise failure

    def __enter__(self) -> Self:
        return self.start()

    def run(self, stop: threading.Event | None = None) -> None:
        """Relay until `stop` is set, or `close` is called. Tries again while the database is away or the outbox takes
        nothing. Raises the errors of this room, and NotLeader once another member leads.
        """
        if stop is not None:
            self._stop = stop
        table = self._table if isinstance(self._table, OutboxTable) else None
        if table is not None:
            table.when_committed(self.topic, self._woken.set)
        logs = self.outbox.facts.logs
        ended, self._is_over = threading.Event(), False
        # Apart from the relay, which may wait for the outbox or for the database.
        threading.Thread(target=self._watch, args=(ended,), name="pushrep-table-watch", daemon=True).start()
        if self._thread is None:  # else it is shown since `start`, and until `close` also what stopped it
            self._watched.append(self._seen_status)
        try:
            self._run_on(logs)
        finally:
            ended.set()
            if self._seen is None and not self._stop.is_set():
                self._look()  # what stopped it before the first look is shown with the rows that wait
            self._is_over = True
            if self._thread is None:
                self._watched.remove(self._seen_status)
            if table is not None:
                table.stop_waking(self.topic, self._woken.set)
            if self._looking.acquire(timeout=WATCH_S):  # else the database hangs, and who looks closes it afterwards
                self._looking.release()
                self._database.close()

    def status(self) -> RelayStatus:
        """What waits, how much was relayed by this object, and what is in the way. Asks the database while the relay
        runs; `Outbox.status` shows what it said some seconds ago.
        """
        self._look()
        return self._seen_status()

    def _seen_status(self) -> RelayStatus:
        trouble = self._trouble if self._trouble.why else self._unseen
        if not trouble.why and (asked_s := self._asked_s) is not None and time.monotonic() - asked_s > PAUSE_MS / 1000:
            waits_ms = int(1000 * (time.monotonic() - asked_s))
            trouble = _Trouble("the database does not answer", time.time_ns() // 1_000_000 - waits_ms)
        is_stopped = self._failure is not None
        return RelayStatus(self.topic, self._relayed, self._seen, trouble.why or None, trouble.since_ms, is_stopped)

    def _look(self) -> float:
        """Ask the database what waits, while the relay runs; returns how long it took, in seconds."""
        with self._looking:
            began_s = time.monotonic()
            if not self._is_over:
                self._asked_s = began_s
                try:
                    self._seen = self._database.rows()
                    self._unseen = _Trouble()
                except SQLAlchemyError as error:
                    self._seen, self._unseen = None, self._unseen.goes_on(first_line(error))
                finally:
                    self._asked_s = None
            if self._is_over:
                self._database.close()
            return time.monotonic() - began_s

    def _watch(self, ended: threading.Event) -> None:
        """Look every few seconds, until the relay ended. Counting many rows takes at most a tenth of the time."""
        while not ended.wait(max(WATCH_S, 9 * self._look())):
            pass

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except Exception as failure:  # noqa: BLE001 - `close` raises it
            self._trouble = _Trouble().goes_on(str(failure))
            self._failure = failure
            _LOG.error("the relay of topic %s has stopped: %s", self.topic, failure)

    def _run_on(self, logs: Mapping[int, SegmentLog]) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                state, appended = self._resume(logs)
                failures, self._trouble = 0, _Trouble()
                _LOG.info("the relay of topic %s goes on behind batch %d", self.topic, state.batch.batch)
                while True:
                    state, appended = self._relay_one(state, appended, logs), {}
            except _Stopping:
                if (closed := self._closed) is not None:
                    with suppress(OSError):  # what is kept stays so until the next start
                        self.outbox.facts.relay_notes.write(RelayNote(closed.batch.epoch, closed.batch.batch, {}))
                return
            except (DBAPIError, StateChanged, *_MAY_PASS) as error:  # then `_resume` finds out
                if isinstance(error, DBAPIError) and not is_away(error):
                    raise DatabaseFailed(f"the database: {first_line(error)}") from error
                failures += 1
                self._trouble = self._trouble.goes_on(first_line(error))
                _LOG.warning("the relay of topic %s tries again: %s", self.topic, self._trouble.why)
                self._stop.wait(_AGAIN.pause_s(failures))

    def _resume(self, logs: Mapping[int, SegmentLog]) -> tuple[RelayState, Mapping[int, frozenset[int]]]:
        """The state to go on from, and the rows of its open batch that are in the logs already."""
        self._closed = None
        system_id, holder = self._database.check(), holder_of(self.outbox)
        known, notes = self._database.state(), self.outbox.facts.relay_notes
        state = first_state(holder, system_id, logs, epoch=1) if known is None else known
        mine, place = state.holder, str(self.outbox.directory)
        if mine.outbox_id != holder.outbox_id:
            raise AnotherRelay(self.topic, mine.outbox_id, f"and this is outbox {holder.outbox_id}")
        if state.system_id != system_id:
            why = f"the relay's state was made in database {state.system_id}, and this is {system_id}"
            raise DatabaseMoved(self.topic, why, place)
        self._wait_for(self.outbox.flush)  # what an earlier try appended is in the logs, or never will be
        ends: Mapping[int, int] = {} if known is None else known.batch.ends
        found = {n: log_state(log, ends.get(n, 0)) for n, log in logs.items()}
        verdict = judge(state.batch, found, notes.closed)
        if isinstance(verdict, NotContinued):
            raise (OutboxWentBack if verdict.outbox_is_old else DatabaseWentBack)(self.topic, verdict.why, place)
        if known is None:
            self._database.create(state)
        elif mine != holder:
            if not holder.may_follow(mine):
                grant = f"grant {mine.generation}.{mine.leader_epoch}"
                where = f"directory {mine.directory_id}" if mine.directory_id else f"the member that leads by {grant}"
                raise AnotherRelay(self.topic, mine.outbox_id, f"by {where}")
            newer = replace(state, holder=holder)
            self._database.change(state, newer)
            state = newer
        closed = state.batch.batch - state.batch.is_open
        notes.write(RelayNote(state.batch.epoch, closed, state.batch.ends))
        return state, verdict.appended

    def _relay_one(
        self, state: RelayState, appended: Mapping[int, frozenset[int]], logs: Mapping[int, SegmentLog]
    ) -> RelayState:
        """Relay the open batch; without one begin one, once rows wait."""
        self._raise_if_stopping()
        after_id = 0
        while not state.batch.is_open:
            self._woken.clear()
            self._note(state, logs)
            self._closed = None  # a begin that fails may have been committed
            if (begun := self._database.begin_batch(state)) is None:
                self._closed = state
                self._wait_to_look()
            else:
                state, after_id = begun
        with tracing.TracedBatch("pushrep", "relay", "send", self.topic) as span:
            return self._relay_open(state, after_id, appended, logs, span)

    def _relay_open(
        self,
        state: RelayState,
        after_id: int,
        appended: Mapping[int, frozenset[int]],
        logs: Mapping[int, SegmentLog],
        span: tracing.TracedBatch,
    ) -> RelayState:
        """Relay the open batch, and close it."""
        refused: dict[int, str] = {}
        count = last_id = 0
        reading = self._database.reading(state, rows_max=_PAGE_ROWS, bytes_max=_PAGE_BYTES)
        with reading as read, ThreadPoolExecutor(1, "pushrep-table-read") as reader:
            page, is_last = reader.submit(read, after_id).result()
            first_id = page.id[0] if page.id else 0
            while page.id:
                self._raise_if_stopping()
                last_id = page.id[-1]
                following = None if is_last else reader.submit(read, last_id)
                time.sleep(0)  # the reader asks, before this thread keeps the interpreter for itself
                count += len(page.id)
                if span.is_traced:
                    span.add(map(headers_of, page.headers))
                self._append(state.batch, self._missing(page, appended, refused), refused)
                if following is None:
                    break
                page, is_last = following.result()
        ends = self._wait_until_safe(logs)
        self._closed = closed = self._database.close_batch(state, (first_id, last_id), ends, refused)
        self._relayed += count - len(refused)
        return closed

    def _note(self, state: RelayState, logs: Mapping[int, SegmentLog]) -> None:
        """Let retention have what is in the logs, every few seconds: no batch is open."""
        if (now_s := time.monotonic()) < self._noted_s + WATCH_S:
            return
        self._noted_s = now_s
        note = RelayNote(state.batch.epoch, state.batch.batch, {n: log.log_end_offset for n, log in logs.items()})
        if note != (notes := self.outbox.facts.relay_notes).note:
            notes.write(note)

    def _missing(self, page: Page, appended: Mapping[int, frozenset[int]], refused: dict[int, str]) -> Page:
        """The rows of the page that are not in the logs yet. `refused` gets those that were refused when the batch was
        appended first: rows behind them are there.
        """
        if not any(appended.values()):
            return page
        newest = {partition: max(rows) for partition, rows in appended.items() if rows}
        left = []
        for at, (row_id, partition) in enumerate(zip(page.id, page.partition, strict=True)):
            if row_id in appended.get(partition, ()):
                continue
            if row_id < newest.get(partition, 0):
                refused[row_id] = self._refused(row_id, "it was refused when the batch was appended first")
            else:
                left.append(at)
        return page.rows(left)

    def _wait_to_look(self) -> None:
        """Wait until a commit wakes it, or it is time to look again. Setting `stop` of `run` does not wake it."""
        looks_s = time.monotonic() + self._poll_s
        while not self._stop.is_set():
            left_s = looks_s - time.monotonic()
            if left_s <= 0 or self._woken.wait(min(_STOPS_S, left_s)):
                break
        self._raise_if_stopping()

    def _raise_if_stopping(self) -> None:
        if self._stop.is_set():
            raise _Stopping

    def _append(self, batch: BatchState, page: Page, refused: dict[int, str]) -> None:
        """Append the rows, and wait until they are there; those that are refused go into `refused`, with why.

        A partition gets its next rows once the ones before are there: if an append fails, none behind it is in the log.
        Raises RowRefused, and what an append raises.
        """
        chunk_bytes = min(_CHUNK_BYTES, self.outbox.facts.budget.limit // 4)
        waiting = {partition: deque(chunks_of(part, chunk_bytes)) for partition, part in _by_partition(page).items()}
        while waiting:
            receipts = []
            for partition, chunks in list(waiting.items()):
                chunk = chunks.popleft()
                try:
                    receipts.append(self._append_chunk(batch, partition, chunk))
                except (RecordRefused, ValueError) as error:
                    if len(chunk.id) == 1:
                        refused[chunk.id[0]] = self._refused(chunk.id[0], str(error))
                    else:  # one of them: each alone
                        chunks.extendleft(chunk.rows([at]) for at in reversed(range(len(chunk.id))))
                if not chunks:
                    del waiting[partition]
            for receipt in receipts:
                self._wait_for(receipt.result)

    def _append_chunk(self, batch: BatchState, partition: int, rows: Page) -> Receipt:
        if partition not in range(self.outbox.identity.partitions):
            raise RecordRefused("partition", f"the outbox has {self.outbox.identity.partitions}, counted from 0")
        now_ms = time.time_ns() // 1_000_000
        times = [now_ms if given is None else given for given in rows.timestamp_ms]
        headers = _headers(batch, rows)
        while True:
            try:
                return self.outbox.append_serialized_many(
                    partition, rows.value, keys=rows.key, headers=headers, timestamps_ms=times
                )
            except BufferFull:
                self._raise_if_stopping()

    def _wait_for(self, answer: Callable[[float], object]) -> None:
        """Ask until it answers within the seconds that it is given. Raises what it raises."""
        while True:
            try:
                answer(_RECEIPT_S)
            except ReceiptTimeout:
                self._wait_on()
            else:
                self._trouble = _Trouble()
                return

    def _wait_on(self) -> None:
        self._raise_if_stopping()
        self._trouble = self._trouble.goes_on(_WAITS.format(self.outbox.directory))

    def _refused(self, row_id: int, why: str) -> str:
        if self._on_refused == "stop":
            raise RowRefused(self.topic, row_id, why)
        _LOG.warning("row %d of topic %s is parked: %s", row_id, self.topic, why)
        return why

    def _wait_until_safe(self, logs: Mapping[int, SegmentLog]) -> dict[int, int]:
        """Until all that was appended is on disk and acknowledged; returns the logs' ends. Raises what failed."""
        self._wait_for(self.outbox.flush)
        ends = {n: log.log_end_offset for n, log in logs.items()}
        replication = self.outbox.facts.replication
        if replication is not None and replication.needs_all:
            while any(logs[n].stable_offset < end for n, end in ends.items()):
                self._wait_on()
                self._stop.wait(_LOOK_S)
        self._trouble = _Trouble()
        return ends


class _Trouble(NamedTuple):
    """What is in the way, and since when; "" and None: nothing is."""

    why: str = ""
    since_ms: int | None = None

    def goes_on(self, why: str) -> "_Trouble":
        """The same trouble, of which the newest reason is known; or one that begins now."""
        return _Trouble(why, time.time_ns() // 1_000_000 if self.since_ms is None else self.since_ms)


class _Stopping(Exception):
    """The relay was asked to end."""


def holder_of(outbox: Outbox) -> Holder:
    """Who this outbox is as a relay's holder: with replicas its grant, without them its directory, of which a copy has
    another id. Raises NotEnoughReplicas while it leads by no grant.
    """
    replication = outbox.facts.replication
    if replication is not None:
        if (grant := replication.grant) is None:  # another member may lead
            needed = outbox.identity.min_insync_replicas
            raise NotEnoughReplicas(outbox.identity.topic, in_sync=1, needed=needed)
        return Holder(outbox.identity.outbox_id, "", grant.generation, grant.epoch)
    found, _ = read_directory_id(outbox.directory, REAL_FILESYSTEM)
    return Holder(outbox.identity.outbox_id, "" if found is None else found.directory_id.hex, 0, 0)


def first_state(holder: Holder, system_id: str, logs: Mapping[int, SegmentLog], *, epoch: int) -> RelayState:
    """The state of an epoch before its first batch: whatever is in the logs is of others."""
    ends = {n: log.log_end_offset for n, log in logs.items()}
    return RelayState(holder, system_id, BatchState(epoch, 0, False, ends), None, None, 0)


def event_ids(log: SegmentLog, start: int) -> Iterator[EventId]:
    """Those of the log's records from offset `start` on, as far as they are there."""
    if start < log.log_end_offset:
        for record in log.records(max(start, log.log_start_offset)):
            if (found := EventId.parse(dict(record.headers).get(EVENT_ID))) is not None:
                yield found


def log_state(log: SegmentLog, end: int) -> RelayedLog:
    """What a log holds of the relay's from offset `end` on: the rows of its newest batch."""
    newest: tuple[int, int] | None = None
    rows: set[int] = set()
    for found in event_ids(log, end):
        if newest is None or found[:2] > newest:
            newest = found[:2]
            rows.clear()
        if found[:2] == newest:
            rows.add(found.row_id)
    return RelayedLog(log.log_start_offset, log.log_end_offset, newest, frozenset(rows))


def _headers(batch: BatchState, rows: Page) -> list[HeaderColumn] | list[tuple[Header, ...]]:
    of_batch = str(EventId(batch.epoch, batch.batch, 0)).encode()[:-1]
    own = [
        HeaderColumn(EVENT_ID, [b"%b%d" % (of_batch, row_id) for row_id in rows.id]),
        HeaderColumn(CREATED, list(map(str.encode, rows.created))),
    ]
    if rows.headers.count(None) == len(rows.headers):
        return own
    return [(*headers_of(given), *mine) for given, mine in zip(rows.headers, header_rows(own), strict=True)]


def _by_partition(page: Page) -> dict[int, Page]:
    partitions = set(page.partition)
    if len(partitions) < 2:  # then no row is looked at
        return dict.fromkeys(partitions, page)
    places: dict[int, list[int]] = {}
    for at, partition in enumerate(page.partition):
        places.setdefault(partition, []).append(at)
    return {partition: page.rows(some) for partition, some in places.items()}


def chunks_of(rows: Page, bytes_max: int) -> Iterator[Page]:
    """Rows of one append: together at most `bytes_max`, or one alone."""
    if sum(rows.size_bytes) <= bytes_max:
        yield rows
        return
    start, size = 0, 0
    for at, row_bytes in enumerate(rows.size_bytes):
        if at > start and size + row_bytes > bytes_max:
            yield rows.rows(range(start, at))
            start, size = at, 0
        size += row_bytes
    yield rows.rows(range(start, len(rows.id)))
