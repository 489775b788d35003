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

A record without a timestamp (-1), or with one in the future, is not old. Source: Kafka's UnifiedLog.deleteOldSegments.

`Leases`: a reader of the past says from which offset on it needs the log, and retention keeps that for it, for a while.

    acquire ──▶ held ── renew (the offset rises) ──▶ held ── release ──▶ gone
                  │
                  └── not renewed for lease_max_s, or the disk is too full ──▶ broken: the reader is notified

A broken lease holds nothing. Its reader may go on, and gets OffsetOutOfRange for removed records.

`BackgroundTasks`: a log's work beside reading and writing: watching the disk, derived stores, retention.

    after a background flush     look at the disk (a look a second serves all logs), dispatch to derived stores
    after a roll                 with the next flush, a pass of retention: a segment may be old enough
    every retention_check_ms     while there is retention or a lease: run a pass
    before an append             only while the disk is too full: look again, refuse

    level      ROOM   TIGHT           PRESSED, FULL                                FULL
    done       -      (disk_space)    leases are broken, a pass of retention       appends are refused

A simulated clock gets no thread: its log calls `after_flush` itself, in the appending thread.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from pushrep.env import Clock, Filesystem
from pushrep.errors import ForkedProcess, PushrepError
from pushrep.log.config import DiskLimits, LogConfig
from pushrep.log.directory_files import segment_path
from pushrep.log.disk_space import LOOK_MS, DiskAboveLimit, DiskHeadroom, DiskLevel, DiskWatch
from pushrep.log.errors import LeaseBroken, OffsetOutOfRange, StillNeeded
from pushrep.log.flush_scheduler import Flusher
from pushrep.log.reader import BatchReader, Bounds
from pushrep.log.secondary_indexes import DerivedStores
from pushrep.log.segment import SealedSegment, newest_timestamp_ms

_LOG = logging.getLogger("pushrep.log")

OnLeaseBroken = Callable[[str], None]
"""Called with the reason when a lease is broken; in any thread, and it must not wait for the log."""


class Lease:
    """Keeps all from `offset` on from being removed. Made by `SegmentLog.acquire_lease`; a context manager."""

    def __init__(self, leases: "Leases", name: str, offset: int, on_broken: OnLeaseBroken | None) -> None:
        self.name = name
        self._leases, self._on_broken = leases, on_broken
        self._offset = offset
        self._broken: str | None = None
        self.renewed_ms = 0

    @property
    def offset(self) -> int:
        """The first offset that it holds."""
        return self._offset

    @property
    def broken(self) -> str | None:
        """Why it was broken; None while it holds."""
        return self._broken

    def renew(self, offset: int | None = None) -> None:
        """Go on holding, from `offset` on (None: as before; never lower).

        Raises LeaseBroken; in a fork of the process that took it ForkedProcess, as `release` does.
        """
        self._leases.renew(self, offset)

    def release(self) -> None:
        """End the lease. A second call is fine, also for a broken lease."""
        self._leases.release(self)

    def moved_to(self, offset: int, now_ms: int) -> None:
        """For Leases."""
        self._offset, self.renewed_ms = max(self._offset, offset), now_ms

    def break_for(self, reason: str) -> None:
        """For Leases; calls the holder back, and logs what that raises."""
        self._broken = reason
        _LOG.warning("the lease of %s from offset %d on is broken: %s", self.name, self._offset, reason)
        if self._on_broken is not None:
            try:
                self._on_broken(reason)
            except Exception:  # noqa: BLE001 - whatever it is, it is the holder's own
                _LOG.exception("%s could not be notified that its lease is broken", self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = f"broken: {self._broken}" if self._broken else f"from {self._offset} on"
        return f"<Lease {self.name} {state}>"


class Leases:
    """The leases of one log. Thread-safe."""

    def __init__(self, clock: Clock, max_s: int) -> None:
        self._clock, self._max_s = clock, max_s
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
            lease.moved_to(offset, self._clock.monotonic_ms())
            self._held.add(lease)
        return lease

    def renew(self, lease: Lease, offset: int | None) -> None:
        """See Lease.renew."""
        self._check_fork(lease)
        with self._lock:
            if lease not in self._held:
                raise LeaseBroken(lease.name, lease.broken or "it was released")
            lease.moved_to(lease.offset if offset is None else offset, self._clock.monotonic_ms())

    def release(self, lease: Lease) -> None:
        """See Lease.release."""
        self._check_fork(lease)
        with self._lock:
            self._held.discard(lease)

    def expire(self) -> None:
        """Break the leases that were not renewed in time."""
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            late = [lease for lease in self._held if now_ms - lease.renewed_ms > self._max_s * 1000]
            self._held.difference_update(late)
        for lease in late:
            lease.break_for(f"it was not renewed for {self._max_s} s")

    def break_all(self, reason: str) -> None:
        """Break every lease, and notify its holder with the reason."""
        with self._lock:
            held, self._held = self._held, set()
        for lease in held:
            lease.break_for(reason)

    def _check_fork(self, lease: Lease) -> None:
        """A forked child's copy holds nothing, and a thread of the parent may have held its lock at the fork."""
        if os.getpid() != self._owner_pid:
            raise ForkedProcess(f"the lease of {lease.name}", owner_pid=self._owner_pid, pid=os.getpid())


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionFacts:
    """The facts for retention at one moment. floor: the first needed offset.

    log_bytes: of the whole log, the active segment included.
    """

    log_start_offset: int
    floor: int
    log_bytes: int
    now_ms: int
    retention_ms: int | None = None
    retention_bytes: int | None = None


def deletable(
    sealed: Sequence[SealedSegment], facts: RetentionFacts, newest_ms: Callable[[SealedSegment], int]
) -> Iterator[SealedSegment]:
    """The sealed segments, oldest first, that nobody needs and no rule keeps. Decides; deletes nothing.

    `newest_ms` gives the newest timestamp of a segment; it is called only if the time decides.
    """
    left_bytes = facts.log_bytes
    for segment in sealed:
        if segment.end_offset > facts.floor:
            return
        left_bytes -= segment.size_bytes
        if not (
            segment.end_offset <= facts.log_start_offset
            or (facts.retention_bytes is not None and left_bytes >= facts.retention_bytes)
            or (facts.retention_ms is not None and _is_older(newest_ms(segment), facts))
        ):
            return
        yield segment


def _is_older(newest_ms: int, facts: RetentionFacts) -> bool:
    assert facts.retention_ms is not None
    return 0 <= newest_ms < facts.now_ms - facts.retention_ms


def purgeable(
    sealed: Sequence[SealedSegment],
    floor: int,
    newest_ms: Callable[[SealedSegment], int],
    *,
    before_offset: int | None = None,
    before_ms: int | None = None,
) -> Iterator[SealedSegment]:
    """The sealed segments, oldest first, that an operator wants removed and nobody needs. Decides; deletes nothing.

    A segment goes if it ends at or below `before_offset`, or if its newest record is older than `before_ms`. The first
    one that has to stay keeps all after it.
    """
    for segment in sealed:
        is_old = before_offset is not None and segment.end_offset <= before_offset
        if not is_old and before_ms is not None:
            is_old = 0 <= newest_ms(segment) < before_ms
        if not is_old or segment.end_offset > floor:
            return
        yield segment


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


class KeptLog(Protocol):
    """What retention needs of a log's writer."""

    @property
    def stable_offset(self) -> int: ...
    def bounds(self) -> Bounds: ...
    def bases(self, *, fresh: bool) -> Sequence[int]: ...
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
        directory: Path,
        reserve: DiskHeadroom,
        filesystem: Filesystem,
        clock: Clock,
    ) -> None:
        self._log, self._reader, self._derived, self._config = log, reader, derived, config
        self._directory, self._reserve, self._filesystem, self._clock = directory, reserve, filesystem, clock
        self._lock = threading.RLock()
        self._holders: dict[str, NeededFrom] = {}
        self._leases = Leases(clock, config.lease_max_s)
        self._sizes: dict[int, int] = {}
        self._newest_ms: dict[int, int] = {}

    @property
    def has_work(self) -> bool:
        """Whether passes have to run: there is a rule, or a lease that may expire."""
        return self._config.retention != (None, None) or len(self._leases) > 0

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases that keep segments from being removed."""
        return tuple(self._leases)

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
            bounds = self._log.bounds()
            if not bounds.start <= offset <= bounds.end:
                raise OffsetOutOfRange(offset, *bounds)
            return self._leases.acquire(name, offset, on_broken)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For a cut of the log: in this context nothing is removed and no derived store gets batches."""
        with self._lock, self._derived.lock:
            yield

    def break_leases(self, reason: str) -> None:
        """End every lease; their holders are notified."""
        self._leases.break_all(reason)

    def forget(self) -> None:
        """Forget the remembered sizes and times of segments: the log is about to be cut."""
        with self._lock:
            self._sizes.clear()
            self._newest_ms.clear()

    def run(self) -> tuple[int, ...]:
        """One pass of retention: base offsets of the segments that were removed, at most `retention_files`.

        Raises OSError, CorruptBatch for a segment whose times can't be read: it stays, for an operator to look at.
        """
        with self._lock:
            self._leases.expire()
            if not self._log.is_writable:
                return ()
            sealed = self._sealed()
            if not sealed:
                return ()
            chosen = list(islice(deletable(sealed, self._facts(sealed), self._newest), self._config.retention_files))
            if not chosen:
                return ()
            _LOG.info("%s: retention removes the segments %s", self._directory, [s.base_offset for s in chosen])
            return self._move_log_start(chosen[-1].end_offset)

    def purge(self, before_offset: int) -> int:
        """Remove the whole segments that end at or below `before_offset`; the log start offset then.

        Raises OffsetOutOfRange, StillNeeded, OSError.
        """
        with self._lock:
            bounds = self._log.bounds()
            if not bounds.start <= before_offset <= bounds.end:
                raise OffsetOutOfRange(before_offset, *bounds)
            start = max((base for base in self._log.bases(fresh=True) if base <= before_offset), default=bounds.start)
            return self._cut_below(max(start, bounds.start))

    def purge_old(
        self, *, before_offset: int | None = None, before_ms: int | None = None, dry_run: bool = False
    ) -> Purged:
        """Remove the whole segments below an offset, or with only records older than `before_ms`, that nobody needs.

        dry_run: say which they are. Raises OSError.
        """
        with self._lock:
            self._leases.expire()
            self._bring_derived_up()
            needed_from, by = self._floor()
            sealed, limits = self._sealed(), {"before_offset": before_offset, "before_ms": before_ms}
            chosen = tuple(purgeable(sealed, needed_from, self._newest, **limits))
            wanted = tuple(purgeable(sealed, self._log.bounds().end, self._newest, **limits))
            if chosen and not dry_run:
                self._move_log_start(chosen[-1].end_offset)
            is_held = len(wanted) > len(chosen)
            return Purged(
                segments=chosen,
                log_start_offset=chosen[-1].end_offset if chosen else self._log.bounds().start,
                kept_by=by if is_held else None,
                needed_from=needed_from if is_held else None,
            )

    def delete_records(self, before_offset: int) -> int:
        """Let the log start at `before_offset`, and remove the segments below it; the log start offset then.

        Raises OffsetOutOfRange, StillNeeded, OSError.
        """
        with self._lock:
            bounds = self._log.bounds()
            if not bounds.start <= before_offset <= bounds.end:
                raise OffsetOutOfRange(before_offset, *bounds)
            return self._cut_below(before_offset)

    def _cut_below(self, offset: int) -> int:
        start = self._log.bounds().start
        if offset > start:
            self._leases.expire()
            self._bring_derived_up()
            needed_from, by = self._floor()
            if offset > needed_from:
                raise StillNeeded(offset, needed_from, by)
            self._move_log_start(offset)
        return self._log.bounds().start

    def _move_log_start(self, offset: int) -> tuple[int, ...]:
        # Soon only the derived stores hold anything of these records. A full disk must not stop what frees it.
        self._reserve.call(self._derived.sync)
        gone = self._log.move_log_start(offset)
        for base in gone:
            self._sizes.pop(base, None)
            self._newest_ms.pop(base, None)
        return gone

    def _sealed(self) -> list[SealedSegment]:
        pairs = pairwise(self._log.bases(fresh=True))
        return [SealedSegment(base, next_base, self._size(base)) for base, next_base in pairs]

    def _facts(self, sealed: Sequence[SealedSegment]) -> RetentionFacts:
        retention_ms, retention_bytes = self._config.retention
        active = self._log.bases(fresh=True)[-1]
        self._sizes.pop(active, None)  # it grows
        self._bring_derived_up()
        facts = RetentionFacts(
            log_start_offset=self._log.bounds().start,
            floor=self._floor()[0],
            log_bytes=sum(segment.size_bytes for segment in sealed) + self._size(active),
            now_ms=self._clock.wall_ms(),
            retention_ms=retention_ms,
            retention_bytes=retention_bytes,
        )
        self._sizes.pop(active, None)
        return facts

    def _floor(self) -> tuple[int, str]:
        """(the lowest offset that is needed, the name of what needs it)."""
        needs = [(self._log.stable_offset, "the stable offset")]
        for name, needed_from in self._holders.items():
            offset = needed_from()
            if offset is not None:
                needs.append((offset, name))
        needs += [(lease.offset, f"the lease of {lease.name}") for lease in self._leases]
        if (lowest := self._derived.lowest_end()) is not None:
            needs.append(lowest)
        return min(needs)

    def _bring_derived_up(self) -> None:
        if self._derived:
            bounds = self._log.bounds()
            self._derived.dispatch(self._reader, Bounds(bounds.start, self._log.stable_offset))

    def _newest(self, segment: SealedSegment) -> int:
        base = segment.base_offset
        if base not in self._newest_ms:
            try:
                self._newest_ms[base] = newest_timestamp_ms(self._filesystem, self._directory, segment)
            except (PushrepError, OSError) as error:
                _LOG.warning("%s: a segment can't be read, so it stays: %s", self._directory, error)
                self._newest_ms[base] = -1
        return self._newest_ms[base]

    def _size(self, base: int) -> int:
        if base not in self._sizes:
            file = self._filesystem.open(segment_path(self._directory, base), writable=False)
            try:
                self._sizes[base] = file.size()
            finally:
                file.close()
        return self._sizes[base]


DERIVED_SYNC_MS = 10_000
"""How often changed derived stores are synced, beside after a roll: after a kill they read at most so much again."""


class MaintainedLog(Protocol):
    """The writer, as BackgroundTasks see it."""

    @property
    def stable_offset(self) -> int: ...
    def bounds(self) -> Bounds: ...


class BackgroundTasks:
    """One log's background tasks. Thread-safe. `check_disk`, `acquire_lease` and `about_to_cut` raise PushrepError and
    OSError; the others log those. Other errors of a holder or a derived store are raised, and the flusher logs them.
    """

    def __init__(
        self, watch: DiskWatch, limits: DiskLimits, derived: DerivedStores, check_ms: int, clock: Clock
    ) -> None:
        self._watch, self._limits, self._derived, self._check_ms = watch, limits, derived, check_ms
        self._clock, self._synced_ms = clock, clock.monotonic_ms()
        self._level = DiskLevel.ROOM
        self._rolled = False
        self._log: MaintainedLog | None = None
        self._flusher: Flusher | None = None

    def begin(self, log: MaintainedLog, reader: BatchReader, retention: Retention, flusher: Flusher | None) -> None:
        """The log is open. flusher: None on a simulated clock."""
        self._log, self._reader, self.retention, self._flusher = log, reader, retention, flusher
        if flusher is not None:
            flusher.attach(self)
        self._level = self._watch.level(self._limits)
        self._schedule_next()

    def end(self) -> None:
        """The log is about to be closed: when this returns, no pass runs, and all leases are broken."""
        if self._log is None:
            return
        if self._flusher is not None:
            self._flusher.detach(self)
        self.retention.break_leases("the log was closed")

    def check_disk(self) -> None:
        """Raise DiskAboveLimit while the disk is too full for appends; else this costs one comparison."""
        if self._level is DiskLevel.FULL:
            self._level = self._watch.level(self._limits, max_age_ms=0)
            if self._level is DiskLevel.FULL:
                raise DiskAboveLimit(self._watch.path, self._watch.usage, self._limits)

    def acquire_lease(self, name: str, offset: int, on_broken: OnLeaseBroken | None) -> Lease:
        """See Retention. Raises LeaseBroken if the disk is so full that the lease would be broken at once."""
        if self._watch.level(self._limits) >= DiskLevel.PRESSED:
            raise LeaseBroken(name, self._too_full())
        lease = self.retention.acquire_lease(name, offset, on_broken)
        self._schedule_next()
        return lease

    def about_to_cut(self, offset: int) -> None:
        """The log will end at `offset`: cut the derived stores first. Raises DerivedStoreFailed, OSError."""
        if self._log is not None:
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
                self.retention.break_leases(self._too_full())
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
        assert self._log is not None
        if self._derived:
            self._derived.dispatch(self._reader, Bounds(self._log.bounds().start, self._log.stable_offset))
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
            self._flusher.soon(self, self._check_ms)
