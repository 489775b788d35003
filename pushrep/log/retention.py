"""Retention: which old records are needed, and the passes that remove the others.

    floor = min( stable offset,                          unflushed or unreplicated records
                 every holder's lowest needed offset,    a destination, a replica in the in-sync set
                 every lease's offset,                   a reader of the past
                 every derived store's end )

    pass    floor ─ deletable ─▶ a few segments ─▶ derived stores synced ─▶ log start checkpointed
            ─▶ files removed, oldest first ─▶ directory synced

One pass at a time, and no lease begins during a pass, so that no records are removed that a lease has just begun to
hold. A crash after the checkpoint leaves files below the log start; the next opening removes them.

`deletable` decides from facts, without touching a file, which old segments may go.

    bases      0        1000       2000       3000 (active)
               |--------|----------|----------|-----....
    kept from       ^ 700 log start       ^ floor 2600: min(stable offset, what holders, leases and derived stores need)
    may go     .......  ...................                  oldest first, up to the first that has to stay

    ends above the floor                                          stays, and with it all behind it
    ends at or below the log start                                goes: nobody may read it any more
    its newest record is older than retention_ms                  goes
    the log without it still has retention_bytes                  goes
    none of these, or a rule is off (None)                        stays, and with it all behind it

The active segment stays until it is rolled; one whose newest record is older than retention_ms is rolled by the pass.

Source: Kafka's UnifiedLog.deleteOldSegments. By which time a segment ages:

    its newest record's time is      by
    from 1970 to in an hour          it
    -1, or further in the future     the newest of: the file's time, the times of its records that are no such ones
    not to be read                   nothing: it stays, for an operator to look at

Removal by time rests, for min(retention_ms, 24 h) of the machine's own time, if the wall clock may be wrong:

    the wall clock was set by more than a minute     seen against the time since the machine started, at each pass and
                                                     over restarts of the process
    an opening beyond all records of the log, and    a clock that was wrong when the machine started, or a log that was
    beyond the last look, by more than retention_ms  not open for so long

The rest of that time is kept beside the published state. Size, `purge` and a full disk remove segments nonetheless.

`Leases`: a reader of the past says from which offset on it needs the log, and retention keeps that for it, for a while.

    acquire ──▶ held ── renew (the offset rises) ──▶ held ── release ──▶ gone
                  │
                  └── not renewed for lease_max_s, or the disk is too full ──▶ broken: the reader is notified

A broken lease holds nothing. Its reader may go on, and gets OffsetOutOfRange for removed records.

`BackgroundTasks`: a log's work beside reading and writing: watching the disk, derived stores, retention.

    after a background flush     look at the disk (a look a second serves all logs), dispatch to derived stores
    after a roll                 with the next flush, a pass of retention: a segment may be old enough
    every five minutes           while there is retention or a lease: run a pass
    before an append             only while the disk is too full: look again, refuse

    level      ROOM   TIGHT           PRESSED, FULL                                FULL
    done       -      (disk.py)       leases are broken, a pass of retention       appends are refused

A simulated clock gets no thread: its log calls `after_flush` itself, in the appending thread.

Secondary indexes (derived stores): data computed from a log's records, in step with it through crashes and cuts.

    log     0 ─────────────────── flushed ──── end        given in order, whole batches, never above the flushed offset
    store   0 ──────── end_offset ┄┄┄▶                    the store itself says where to go on after a restart

At open, before anything else looks at the log (the log ends at `end`, begins at `start`):

    the store                                                     what is done
    holds nothing                                                 kept; given the batches from the log's start on
    holds something, the log has no record, and ends elsewhere    destroyed
    ends above `end`                                              cut to `end`, judged again
    its last record's leader epoch is not the log's there         cut to where that epoch of the log began, judged again
                                                                  - or destroyed, if the log begins no earlier
    else                                                          kept; given the batches from its own end on

Cutting a log cuts the stores first: after a crash in between a store may lack records, but never has too many. Model:
RocketMQ's consume queue and index, which are dispatched from the commit log and truncated with it.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from pushrep.env import Clock, Filesystem, file_size
from pushrep.errors import ForkedProcess, PushrepError
from pushrep.log.config import DiskLimits, LogConfig
from pushrep.log.directory import DirectoryView
from pushrep.log.directory_files import segment_path
from pushrep.log.disk import LOOK_MS, DiskLevel, DiskWatch, above_limit
from pushrep.log.errors import LeaseBroken, OffsetOutOfRange, StillNeeded, is_reading_short
from pushrep.log.flush_scheduler import Flusher
from pushrep.log.published import ClockNote
from pushrep.log.reader import BatchReader, Bounds
from pushrep.log.segment import AHEAD_MS, SealedSegment, is_believed, newest_timestamp_ms
from pushrep.records import RecordBatch
from pushrep.records.leader_epochs import LeaderEpochs

_LOG = logging.getLogger("pushrep.log")


class DerivedStore(Protocol):
    """Data computed from a log. Calls to one store never overlap; its OSError is raised by the log's caller."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    @property
    def end_offset(self) -> int:
        """It holds everything below; 0 if it holds nothing. May rise without `dispatch`, if the store learns records
        elsewhere.
        """
        ...

    @property
    def last(self) -> tuple[int, int] | None:
        """(offset, leader epoch) of its last record; None if it holds nothing."""
        ...

    def cut_to(self, offset: int) -> None:
        """Forget all from `offset` on, durably, and more if need be: `end_offset` is at most `offset` then."""
        ...

    def destroy(self) -> None:
        """Forget everything, durably; `end_offset` is 0 then."""
        ...

    def dispatch(self, batch: RecordBatch) -> None:
        """Add the next batch; records that it holds already change nothing."""
        ...

    def sync(self) -> None:
        """Bring it to disk, because the log may be about to remove the records."""
        ...


def judge(end_offset: int, last: tuple[int, int] | None, log: Bounds, epochs: LeaderEpochs) -> int | None:
    """Where to cut a store in this state beside a log with these bounds; see the file's map. None: it is kept. 0: it is
    destroyed.
    """
    if end_offset == 0:
        return None
    if log.start == log.end != end_offset:
        return 0
    if end_offset > log.end:
        return log.end
    if last is None or not last[0] < end_offset:
        return 0  # the store contradicts itself
    offset, epoch = last
    if offset < log.start or epochs.epoch_of(offset) in {epoch, -1}:
        return None  # the log has no epoch for removed records
    began = max((start for _, start in epochs.entries if start <= offset), default=0)
    return began if began > log.start else 0


class DerivedStores:
    """The stores of one log. Thread-safe. `lock` is held while the log is cut, so that no store gets a batch then."""

    def __init__(self, stores: Sequence[DerivedStore]) -> None:
        self._stores = tuple(stores)
        self.lock = threading.RLock()

    def __bool__(self) -> bool:
        return bool(self._stores)

    def lowest_end(self) -> tuple[int, str] | None:
        """(end, name) of the store with the lowest end; None without stores."""
        return min(((store.end_offset, f"the derived store {store.name}") for store in self._stores), default=None)

    def highest_end(self) -> int:
        """The highest end of a store, 0 without stores: the log was flushed at least so far."""
        return max((store.end_offset for store in self._stores), default=0)

    def settle(self, log: Bounds, epochs: LeaderEpochs) -> None:
        """Cut or destroy stores that do not agree with the log. Raises PushrepError, OSError."""
        for store in self._stores:
            while (offset := judge(store.end_offset, store.last, log, epochs)) is not None:
                _cut(store, offset)

    def cut_to(self, offset: int) -> None:
        """The log is about to be cut there. Raises PushrepError, OSError."""
        with self.lock:
            for store in self._stores:
                if store.end_offset > offset:
                    _cut(store, offset)

    def dispatch(self, reader: BatchReader, log: Bounds) -> None:
        """Dispatch to each store the whole batches in `log` that it lacks. Raises CorruptBatch, OSError, the store's
        errors.
        """
        with self.lock:
            for store in self._stores:
                start = max(store.end_offset, log.start)
                if start >= log.end:
                    continue
                for batch in reader.batches(start, log.end):
                    if batch.header.next_offset > log.end:
                        break
                    if batch.header.next_offset > store.end_offset:
                        store.dispatch(batch)

    def sync(self) -> None:
        """Sync all stores."""
        with self.lock:
            for store in self._stores:
                store.sync()


def _cut(store: DerivedStore, offset: int) -> None:
    if offset:
        store.cut_to(offset)
    else:
        store.destroy()
    if store.end_offset > offset:
        what = f"cut to {offset}" if offset else "destroyed"
        raise PushrepError(
            f"the derived store {store.name} still ends at {store.end_offset} after it was {what}: remove its "
            "files, it is built anew when the log is opened"
        )


REST_MS = 86_400_000
_SET_MS = 60_000
"""A clock that was set by no more than this is an ordinary one."""
WHY_HELD = (
    "the wall clock was set by more than a minute, or was beyond all records, by more than retention_ms, when the log "
    "was opened"
)
OnLeaseBroken = Callable[[str], None]
"""Called with the reason when a lease is broken; in any thread, and it must not wait for the log."""


class Lease:
    """Keeps all from `offset` on from being removed. Made by `SegmentLog.acquire_lease`; a context manager.

    broken: why it was broken; None while it holds.
    """

    def __init__(self, leases: "Leases", name: str, offset: int, on_broken: OnLeaseBroken | None) -> None:
        self.name, self.offset = name, offset
        self.broken: str | None = None
        self.on_broken, self.renewed_ms = on_broken, leases.clock.monotonic_ms()
        self._leases = leases

    def renew(self, offset: int | None = None) -> None:
        """Go on holding, from `offset` on (None: as before; never lower).

        Raises LeaseBroken; in a fork of the process that took it ForkedProcess, as `release` does.
        """
        with self._leases.held_for(self) as held:
            if self not in held:
                raise LeaseBroken(self.name, self.broken or "it was released")
            self.offset = self.offset if offset is None else max(self.offset, offset)
            self.renewed_ms = self._leases.clock.monotonic_ms()

    def release(self) -> None:
        """End the lease. A second call is fine, also for a broken lease."""
        with self._leases.held_for(self) as held:
            held.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class Leases:
    """The leases of one log. Thread-safe."""

    def __init__(self, clock: Clock, max_s: int) -> None:
        self.clock, self._max_s = clock, max_s
        self._lock = threading.Lock()
        self._held: set[Lease] = set()
        self._owner_pid = os.getpid()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Lease]:
        with self._lock:
            return iter(tuple(self._held))

    def acquire(self, name: str, offset: int, on_broken: OnLeaseBroken | None = None) -> Lease:
        """A lease from `offset` on, which the caller has checked to be in the log."""
        lease = Lease(self, name, offset, on_broken)
        with self._lock:
            self._held.add(lease)
        return lease

    @contextmanager
    def held_for(self, lease: Lease) -> Iterator[set[Lease]]:
        """The leases that hold, for that one to change. A forked child's copy holds nothing, and a thread of the parent
        may have held its lock at the fork: there it raises ForkedProcess.
        """
        if os.getpid() != self._owner_pid:
            raise ForkedProcess(f"the lease of {lease.name}", owner_pid=self._owner_pid, pid=os.getpid())
        with self._lock:
            yield self._held

    def break_all(self, reason: str, *, is_late: bool = False) -> None:
        """Break every lease, or those that were not renewed in time, and notify their holders with the reason."""
        since_ms = self.clock.monotonic_ms() - self._max_s * 1000
        with self._lock:
            broken = [lease for lease in self._held if not is_late or lease.renewed_ms < since_ms]
            self._held.difference_update(broken)
        for lease in broken:
            lease.broken = reason
            _LOG.warning("the lease of %s from offset %d on is broken: %s", lease.name, lease.offset, reason)
            if lease.on_broken is not None:
                try:
                    lease.on_broken(reason)
                except Exception:  # noqa: BLE001 - whatever it is, it is the holder's own
                    _LOG.exception("%s could not be notified that its lease is broken", lease.name)

    def expire(self) -> None:
        """Break the leases that were not renewed in time."""
        self.break_all(f"it was not renewed for {self._max_s} s", is_late=True)


def deletable(  # noqa: PLR0913 - the rules, each with its limit
    sealed: Sequence[SealedSegment],
    floor: int,
    newest_ms: Callable[[SealedSegment], int],
    *,
    before_offset: int = 0,
    before_ms: int = 0,
    excess_bytes: int = -1,
) -> Iterator[SealedSegment]:
    """The sealed segments, oldest first, that are to go and that nobody needs. Decides; deletes nothing.

    A segment goes if it ends at or below `before_offset`, if its newest record is older than `before_ms`, or if it lies
    in the first `excess_bytes` of the log. The first one that has to stay keeps all after it. floor: the first needed
    offset. newest_ms: gives the newest timestamp of a segment; it is called only if the time decides.
    """
    for segment in sealed:
        excess_bytes -= segment.size_bytes
        is_due = segment.end_offset <= before_offset or excess_bytes >= 0
        if segment.end_offset > floor or not (is_due or (before_ms and 0 <= newest_ms(segment) < before_ms)):
            return
        yield segment


class ClockWatch:
    """Whether removal by time rests for one log. Not thread-safe."""

    def __init__(self, view: DirectoryView, clock: Clock) -> None:
        self._view, self._clock, self._note = view, clock, view.clock_note

    def was_away(self, longer_ms: int) -> bool:
        """Whether the last look, if there was one, is longer ago by the wall clock."""
        return self._note is None or self._clock.wall_ms() - self._note.boot_ms - self._note.offset_ms > longer_ms

    def look(self, rest_ms: int, *, is_beyond: bool = False) -> int:
        """How long it has rested, -1 if it does not. rest_ms: how long it rests. is_beyond: as the log was opened."""
        boot_ms, note = self._clock.boot_ms(), self._note
        offset_ms, rested_ms = self._clock.wall_ms() - boot_ms, -1
        if note is not None:
            rested_ms = note.rested_ms + (boot_ms - note.boot_ms if note.is_of_boot and note.rested_ms >= 0 else 0)
            if note.is_of_boot and abs(offset_ms - note.offset_ms) > _SET_MS:
                rested_ms = 0
        if rested_ms >= rest_ms:
            rested_ms = -1
        if is_beyond and rested_ms < 0:
            rested_ms = 0
        self._note = ClockNote(rested_ms, boot_ms, offset_ms)
        self._view.keep_clock_note(self._note)
        return rested_ms


NeededFrom = Callable[[], int | None]
"""Returns the lowest offset that a holder needs, None for none. It must not wait for the log, nor call it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """The whole segments that `purge_old` removed, or would.

    kept_by: the reader that needs other old segments, which stay; None: there is none.
    """

    segments: tuple[SealedSegment, ...]
    log_start_offset: int
    kept_by: str | None
    needed_from: int | None

    @property
    def size_bytes(self) -> int:
        """The bytes of the segments."""
        return sum(segment.size_bytes for segment in self.segments)


class RetentionHeld(NamedTuple):
    """Removal by time rests. Unix times, by the clock that may be wrong."""

    since_ms: int
    until_ms: int


class KeptLog(Protocol):
    """What retention needs of a log's writer."""

    @property
    def stable_offset(self) -> int: ...
    @property
    def newest_timestamp_ms(self) -> int:
        """Of the newest segment; -1: it has none."""
        ...

    def bounds(self) -> Bounds: ...
    def bases(self, *, fresh: bool) -> Sequence[int]: ...
    def roll(self) -> None: ...
    def move_log_start(self, offset: int) -> tuple[int, ...]: ...
    @property
    def is_writable(self) -> bool:
        """Neither closed nor poisoned nor damaged."""
        ...


class Retention:
    """Holders, leases and retention of one log. Thread-safe."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a log stands on
        self,
        log: KeptLog,
        reader: BatchReader,
        derived: DerivedStores,
        config: LogConfig,
        view: DirectoryView,
        filesystem: Filesystem,
        clock: Clock,
    ) -> None:
        self._log, self._reader, self._derived, self._config = log, reader, derived, config
        self._directory, self._reserve, self._filesystem, self._clock = view.path, view.reserve, filesystem, clock
        self._watch = ClockWatch(view, clock)
        self.held: RetentionHeld | None = None
        """Whether removal by time rests, as the last pass found it."""
        self._lock = threading.RLock()
        self._holders: dict[str, NeededFrom] = {}
        self.leases = Leases(clock, config.lease_max_s)
        """The leases that keep segments from being removed."""
        self._sizes: dict[int, int] = {}
        self._newest_ms: dict[int, int | None] = {}  # None: it can't be read
        self._file_ms: dict[int, int] = {}

    def begin(self) -> None:
        """The log is open: look at the clocks. Raises OSError."""
        with self._lock:
            self._look_at_clocks(is_opening=True)

    def configure(self, config: LogConfig) -> None:
        """The next pass goes by these settings."""
        with self._lock:
            self._config = config

    @property
    def has_work(self) -> bool:
        """Whether passes have to run: there is a rule, or a lease that may expire."""
        return self._config.retention != (None, None) or bool(self.leases)

    def hold(self, name: str, needed_from: NeededFrom) -> None:
        """Keep everything from `needed_from()` on, until `drop(name)`. ValueError if the name is taken."""
        with self._lock:
            if name in self._holders:
                raise ValueError(f"{name} holds the log already: drop it first, by its name")
            self._holders[name] = needed_from

    def drop(self, name: str) -> None:
        """Remove a holder. ValueError if there is none of that name."""
        with self._lock:
            if self._holders.pop(name, None) is None:
                raise ValueError(f"nobody of the name {name!r} holds the log; there are {sorted(self._holders)}")

    def acquire_lease(self, name: str, offset: int, on_broken: OnLeaseBroken | None) -> Lease:
        """Hold everything from `offset` on. Raises OffsetOutOfRange."""
        with self._lock:
            self._checked(offset)
            return self.leases.acquire(name, offset, on_broken)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For a cut of the log: in this context nothing is removed and no derived store gets batches."""
        with self._lock, self._derived.lock:
            yield

    def forget(self) -> None:
        """Forget the remembered sizes and times of segments: the log is about to be cut."""
        with self._lock:
            self._sizes.clear()
            self._newest_ms.clear()
            self._file_ms.clear()

    def run(self) -> tuple[int, ...]:
        """One pass of retention: base offsets of the segments that were removed, at most `retention_files`.

        Raises OSError, CorruptBatch for a segment whose times can't be read: it stays, for an operator to look at.
        """
        with self._lock:
            self.leases.expire()
            if not self._log.is_writable:
                return ()
            self._look_at_clocks()
            self._roll_if_expired()
            sealed = self._sealed()
            if not sealed:
                return ()
            self.bring_derived_up()
            due = deletable(sealed, self._floor()[0], self._dated_ms, **self._limits(sealed))
            chosen = list(islice(due, self._config.retention_files))
            if not chosen:
                return ()
            _LOG.info("%s: retention removes the segments %s", self._directory, [s.base_offset for s in chosen])
            return self._move_log_start(chosen[-1].end_offset)

    def _roll_if_expired(self) -> None:
        """A newest segment whose records are all too old goes like any other: else few records would stay for ever."""
        retention_ms, now_ms = self._config.retention[0], self._clock.wall_ms()
        active, end = self._log.bases(fresh=True)[-1], self._log.bounds().end
        if retention_ms is None or self.held is not None or active == end:
            return
        if self._active_ms(active) >= now_ms - retention_ms:
            return
        self.bring_derived_up()
        if self._floor()[0] >= end:  # else it stays in any case
            self._log.roll()

    def purge(self, before_offset: int, *, inside: bool = False) -> int:
        """Remove the whole segments that end at or below `before_offset`; the log start offset then.

        inside: the log then starts at `before_offset`, also inside of a segment. Raises OffsetOutOfRange, StillNeeded,
        OSError.
        """
        with self._lock:
            start, bases = before_offset, self._log.bases(fresh=True)
            bounds = self._checked(before_offset)
            if not inside:
                start = max((base for base in bases if base <= start), default=bounds.start)
            if start > bounds.start:
                self.leases.expire()
                self.bring_derived_up()
                needed_from, by = self._floor()
                if start > needed_from:
                    raise StillNeeded(start, needed_from, by)
            is_left = len(bases) > 1 and bases[1] <= bounds.start  # by a call that failed once the start had moved
            if start > bounds.start or is_left:
                self._move_log_start(start)
            return self._log.bounds().start

    def _checked(self, offset: int) -> Bounds:
        bounds = self._log.bounds()
        if not bounds.start <= offset <= bounds.end:
            raise OffsetOutOfRange(offset, *bounds)
        return bounds

    def purge_old(
        self, *, before_offset: int | None = None, before_ms: int | None = None, dry_run: bool = False
    ) -> Purged:
        """Remove the whole segments below an offset, or with only records older than `before_ms`, that nobody needs.

        dry_run: say which they are. Raises OSError.
        """
        with self._lock:
            self.leases.expire()
            self.bring_derived_up()
            needed_from, by = self._floor()
            sealed, limits = self._sealed(), {"before_offset": before_offset or 0, "before_ms": before_ms or 0}
            chosen = tuple(deletable(sealed, needed_from, self._dated_ms, **limits))
            wanted = tuple(deletable(sealed, self._log.bounds().end, self._dated_ms, **limits))
            if chosen and not dry_run:
                self._move_log_start(chosen[-1].end_offset)
            is_held = len(wanted) > len(chosen)
            return Purged(
                segments=chosen,
                log_start_offset=chosen[-1].end_offset if chosen else self._log.bounds().start,
                kept_by=by if is_held else None,
                needed_from=needed_from if is_held else None,
            )

    def _move_log_start(self, offset: int) -> tuple[int, ...]:
        # Soon only the derived stores hold anything of these records. A full disk must not stop what frees it.
        self._reserve.call(self._derived.sync)
        gone = self._log.move_log_start(offset)
        for base in gone:
            self._sizes.pop(base, None)
            self._newest_ms.pop(base, None)
            self._file_ms.pop(base, None)
        return gone

    def _sealed(self) -> list[SealedSegment]:
        pairs = pairwise(self._log.bases(fresh=True))
        return [SealedSegment(base, next_base, self._size(base)) for base, next_base in pairs]

    def _limits(self, sealed: Sequence[SealedSegment]) -> dict[str, int]:
        """What `deletable` goes by now."""
        retention_ms, retention_bytes = self._config.retention
        limits = {"before_offset": self._log.bounds().start}
        if retention_ms is not None and self.held is None:
            limits["before_ms"] = max(0, self._clock.wall_ms() - retention_ms)
        if retention_bytes is not None:
            active = segment_path(self._directory, self._log.bases(fresh=True)[-1])
            active_bytes = file_size(self._filesystem, active) or 0
            limits["excess_bytes"] = sum(one.size_bytes for one in sealed) + active_bytes - retention_bytes
        return limits

    def _floor(self) -> tuple[int, str]:
        """(the lowest offset that is needed, the name of what needs it)."""
        needs = [(self._log.stable_offset, "the stable offset")]
        for name, needed_from in self._holders.items():
            offset = needed_from()
            if offset is not None:
                needs.append((offset, name))
        needs += [(lease.offset, f"the lease of {lease.name}") for lease in self.leases]
        if (lowest := self._derived.lowest_end()) is not None:
            needs.append(lowest)
        return min(needs)

    def bring_derived_up(self) -> None:
        """Give the derived stores the stable batches that they lack. Raises as DerivedStores.dispatch."""
        if self._derived:
            self._derived.dispatch(self._reader, Bounds(self._log.bounds().start, self._log.stable_offset))

    def _dated_ms(self, segment: SealedSegment) -> int:
        """The time by which a segment ages; -1 if it can't be read."""
        base, now_ms = segment.base_offset, self._clock.wall_ms()
        try:
            if base not in self._newest_ms:
                self._newest_ms[base] = newest_timestamp_ms(self._filesystem, self._directory, segment)
            newest_ms = self._newest_ms[base]
            if newest_ms is None or is_believed(newest_ms, now_ms):
                return -1 if newest_ms is None else newest_ms
            if base not in self._file_ms:
                limit_ms = now_ms + AHEAD_MS
                believed_ms = newest_timestamp_ms(self._filesystem, self._directory, segment, limit_ms=limit_ms)
                self._file_ms[base] = max(self._file_time_ms(base), believed_ms)
            return self._file_ms[base]
        except (PushrepError, OSError) as error:
            _LOG.warning("%s: a segment can't be read, so it stays: %s", self._directory, error)
            if not is_reading_short(error):
                self._newest_ms[base] = None
            return -1

    def _look_at_clocks(self, *, is_opening: bool = False) -> None:
        retention_ms = self._config.retention[0]
        if retention_ms is None:
            return
        rest_ms = min(retention_ms, REST_MS)
        is_beyond = is_opening and self._watch.was_away(retention_ms) and self._is_beyond_all(retention_ms)
        rested_ms = self._watch.look(rest_ms, is_beyond=is_beyond)
        was, self.held = self.held, None
        if rested_ms >= 0:
            since_ms = self._clock.wall_ms() - rested_ms
            self.held = RetentionHeld(since_ms, since_ms + rest_ms)
            if was is None:
                left_s = (rest_ms - rested_ms) // 1000
                _LOG.warning("%s: nothing is removed by time for %d s: %s", self._directory, left_s, WHY_HELD)

    def _is_beyond_all(self, retention_ms: int) -> bool:
        """Whether the log has records, and the clock stands beyond all of them by more than `retention_ms`."""
        oldest_ms, bounds = self._clock.wall_ms() - retention_ms, self._log.bounds()
        active = self._log.bases(fresh=True)[-1]
        if bounds.start == bounds.end or (active < bounds.end and self._active_ms(active) >= oldest_ms):
            return False
        return all(0 <= self._dated_ms(one) < oldest_ms for one in self._sealed() if one.end_offset > bounds.start)

    def _active_ms(self, active: int) -> int:
        """The time by which the newest segment ages: as a sealed one, its file's if the records' is not believed."""
        newest_ms = self._log.newest_timestamp_ms
        return newest_ms if is_believed(newest_ms, self._clock.wall_ms()) else self._file_time_ms(active)

    def _file_time_ms(self, base: int) -> int:
        with closing(self._filesystem.open(segment_path(self._directory, base), writable=False)) as file:
            return file.modified_ms()

    def _size(self, base: int) -> int:
        if base not in self._sizes:
            self._sizes[base] = file_size(self._filesystem, segment_path(self._directory, base)) or 0
        return self._sizes[base]


_CHECK_MS = 300_000
DERIVED_SYNC_MS = 10_000
"""How often changed derived stores are synced, beside after a roll: after a kill they read at most so much again."""


class BackgroundTasks:
    """One log's background tasks. Thread-safe. `check_disk`, `acquire_lease` and `about_to_cut` raise PushrepError and
    OSError; the others log those. Other errors of a holder or a derived store are raised, and the flusher logs them.
    """

    def __init__(self, watch: DiskWatch, limits: DiskLimits, derived: DerivedStores, clock: Clock) -> None:
        self._watch, self._limits, self._derived = watch, limits, derived
        self._clock, self._synced_ms = clock, clock.monotonic_ms()
        self._level = DiskLevel.ROOM
        self._rolled = False
        self._flusher: Flusher | None = None

    def begin(self, retention: Retention, flusher: Flusher | None) -> None:
        """The log is open. flusher: None on a simulated clock."""
        self.retention, self._flusher = retention, flusher
        if flusher is not None:
            flusher.attach(self)
        retention.begin()
        self._level = self._watch.level(self._limits)
        self._schedule_next()

    def configure(self, config: LogConfig) -> None:
        """Go on with these settings: look at the disk, and run a pass soon."""
        self._limits = config.disk_limits
        self.retention.configure(config)
        self._level = self._watch.level(self._limits, max_age_ms=0)
        if self._flusher is not None:
            self._flusher.soon(self, 0)

    def end(self) -> None:
        """The log is about to be closed: when this returns, no pass runs."""
        if self._flusher is not None:
            self._flusher.detach(self)

    def check_disk(self) -> None:
        """Raise AppendFailed while the disk is too full for appends; else this costs one comparison."""
        if self._level is DiskLevel.FULL:
            self._level = self._watch.level(self._limits, max_age_ms=0)
            if self._level is DiskLevel.FULL:
                raise above_limit(self._watch.path, self._watch.usage, self._limits)

    def acquire_lease(self, name: str, offset: int, on_broken: OnLeaseBroken | None) -> Lease:
        """See Retention. Raises LeaseBroken if the disk is so full that the lease would be broken at once."""
        if self._watch.level(self._limits) >= DiskLevel.PRESSED:
            raise LeaseBroken(name, self._too_full())
        lease = self.retention.acquire_lease(name, offset, on_broken)
        self._schedule_next()
        return lease

    def about_to_cut(self, offset: int) -> None:
        """The log will end at `offset`: cut the derived stores first. Raises PushrepError, OSError."""
        self.retention.forget()
        self._derived.cut_to(offset)

    def rolled(self) -> None:
        """A segment was sealed. Called under the writer's lock, so the work is left to the next flush."""
        self._rolled = True
        self._synced_ms = -DERIVED_SYNC_MS

    def after_flush(self) -> None:
        """After a flush: dispatch new records to derived stores, check the disk, and run a pass if one is due."""
        try:
            self._level = self._watch.level(self._limits, max_age_ms=LOOK_MS)
            self._notify()
            if self._level >= DiskLevel.PRESSED:
                self.retention.leases.break_all(self._too_full())
            if self._level >= DiskLevel.PRESSED or (
                self.retention.has_work and (self._rolled or self._flusher is None)
            ):
                self._rolled = False
                self._run()
        except (OSError, PushrepError) as error:
            _LOG.warning("%s: put off: %s", self._watch.path, error)

    def flush_in_background(self) -> None:
        """The flusher's call: run a due pass."""
        try:
            self.after_flush()
            self._run()
        except (OSError, PushrepError) as error:
            _LOG.warning("%s: retention is put off: %s", self._watch.path, error)
        finally:
            self._schedule_next()

    def sync_derived(self) -> None:
        """The log was closed completely flushed: bring the derived stores up to its end, and sync them."""
        try:
            self._notify()
            self._derived.sync()
        except (OSError, PushrepError) as error:  # the log is safe; the next opening dispatches what they lack
            _LOG.warning("%s: a derived store stays behind until the log is opened again: %s", self._watch.path, error)

    def _run(self) -> None:
        if self.retention.run() and self._flusher is not None:
            self._flusher.soon(self, 0)  # there may be more to remove; other logs' flushes come first

    def _notify(self) -> None:
        if self._derived:
            self.retention.bring_derived_up()
            now_ms = self._clock.monotonic_ms()
            if now_ms - self._synced_ms >= DERIVED_SYNC_MS:
                self._synced_ms = now_ms
                self._derived.sync()

    def _too_full(self) -> str:
        usage, limits = self._watch.usage, self._limits
        return (
            f"the disk is {usage.used_percent:.1f} % full and has {usage.free_bytes} bytes free, the limit is "
            f"disk_pressed_percent={limits.pressed_percent} and disk_pressed_free_bytes={limits.pressed_free_bytes}"
        )

    def _schedule_next(self) -> None:
        if self._flusher is not None and self.retention.has_work:
            self._flusher.soon(self, _CHECK_MS)
