"""Keeping: who needs the past of a log, and the passes that remove the rest of it.

    floor = min( stable offset,                          what is neither flushed nor replicated
                 every holder's lowest needed offset,    a destination, a replica in the in-sync set
                 every lease's offset,                   a reader of the past
                 every derived store's end )

    pass    floor ─ deletable (retention.py) ─▶ a few segments ─▶ derived stores synced ─▶ log start checkpointed
            ─▶ files removed, oldest first ─▶ directory synced

One pass at a time, and no lease is taken meanwhile: what a lease was granted for is not removed behind its back. A
crash after the checkpoint leaves files below the log start; the next opening removes them.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Protocol

from pushrep.env import Clock, Filesystem
from pushrep.errors import PushrepError
from pushrep.log.config import LogConfig
from pushrep.log.derived import DerivedStores
from pushrep.log.errors import OffsetOutOfRange, StillNeeded
from pushrep.log.leases import Lease, Leases, Told
from pushrep.log.reading import BatchReader, Bounds
from pushrep.log.retention import Keeping, SealedSegment, deletable, purgeable
from pushrep.log.segment_files import segment_path
from pushrep.log.segment_times import newest_timestamp_ms

_LOG = logging.getLogger("pushrep.log")

NeededFrom = Callable[[], int | None]
"""A holder's answer: the lowest offset that it needs, None if nothing. It must not wait for the log, nor call it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """Whole segments that `purge_old` removed, or would remove. `kept_by`: who needs what else is as old, if so."""

    segments: tuple[SealedSegment, ...]
    log_start_offset: int
    kept_by: str | None
    needed_from: int | None

    @property
    def size_bytes(self) -> int:
        """Of the segments."""
        return sum(segment.size_bytes for segment in self.segments)


class KeptLog(Protocol):
    """The writer of a log, as far as keeping needs it."""

    @property
    def stable_offset(self) -> int: ...
    def bounds(self) -> Bounds: ...
    def bases(self, *, fresh: bool) -> Sequence[int]: ...
    def move_log_start(self, offset: int) -> tuple[int, ...]: ...
    @property
    def is_writable(self) -> bool:
        """Neither closed nor poisoned nor damaged."""
        ...


class Keeper:
    """Holders, leases and retention of one log. Thread-safe."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a log stands on
        self,
        log: KeptLog,
        reader: BatchReader,
        derived: DerivedStores,
        config: LogConfig,
        directory: Path,
        filesystem: Filesystem,
        clock: Clock,
    ) -> None:
        self._log, self._reader, self._derived, self._config = log, reader, derived, config
        self._directory, self._filesystem, self._clock = directory, filesystem, clock
        self._lock = threading.RLock()
        self._holders: dict[str, NeededFrom] = {}
        self._leases = Leases(clock, config.lease_max_s)
        self._sizes: dict[int, int] = {}
        self._newest_ms: dict[int, int] = {}

    @property
    def has_work(self) -> bool:
        """Whether it has to look now and then: something may come of age."""
        config = self._config
        return config.retention_ms is not None or config.retention_bytes is not None or len(self._leases) > 0

    def hold(self, name: str, needed_from: NeededFrom) -> None:
        """Remove nothing from what `needed_from()` answers on, until `drop(name)`. ValueError if the name is taken."""
        with self._lock:
            if name in self._holders:
                raise ValueError(f"{name} holds the log already: drop it first, by its name")
            self._holders[name] = needed_from

    def drop(self, name: str) -> None:
        """The holder needs nothing any more, by an operator's word. ValueError if there is none of that name."""
        with self._lock:
            if self._holders.pop(name, None) is None:
                raise ValueError(f"nobody of the name {name!r} holds the log; there are {sorted(self._holders)}")

    def acquire_lease(self, name: str, offset: int, told: Told | None) -> Lease:
        """Hold everything from `offset` on. Raises OffsetOutOfRange."""
        with self._lock:
            bounds = self._log.bounds()
            if not bounds.start <= offset <= bounds.end:
                raise OffsetOutOfRange(offset, *bounds)
            return self._leases.acquire(name, offset, told)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is removed, and no derived store told, by anyone else meanwhile: the log is about to be cut."""
        with self._lock, self._derived.lock:
            yield

    def break_leases(self, reason: str) -> None:
        """End every lease; their holders are told."""
        self._leases.break_all(reason)

    def forget(self) -> None:
        """The log is about to be cut: what was remembered of its segments may not hold."""
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
            chosen = list(islice(deletable(sealed, self._keeping(sealed), self._newest), self._config.retention_files))
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
        self._derived.sync()  # what they know of the records is about to be all that is left of them
        gone = self._log.move_log_start(offset)
        for base in gone:
            self._sizes.pop(base, None)
            self._newest_ms.pop(base, None)
        return gone

    def _sealed(self) -> list[SealedSegment]:
        pairs = pairwise(self._log.bases(fresh=True))
        return [SealedSegment(base, next_base, self._size(base)) for base, next_base in pairs]

    def _keeping(self, sealed: Sequence[SealedSegment]) -> Keeping:
        config = self._config
        active = self._log.bases(fresh=True)[-1]
        self._sizes.pop(active, None)  # it grows
        self._bring_derived_up()
        keeping = Keeping(
            log_start_offset=self._log.bounds().start,
            floor=self._floor()[0],
            log_bytes=sum(segment.size_bytes for segment in sealed) + self._size(active),
            now_ms=self._clock.wall_ms(),
            retention_ms=config.retention_ms,
            retention_bytes=config.retention_bytes,
        )
        self._sizes.pop(active, None)
        return keeping

    def _floor(self) -> tuple[int, str]:
        """(the lowest offset that is needed, who needs it)."""
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
            self._derived.tell(self._reader, Bounds(bounds.start, self._log.stable_offset))

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
