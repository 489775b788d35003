"""What a log does beside reading and writing: it watches the disk, tells derived stores, runs retention.

    after a background flush     look at the disk (a look a second serves all logs), tell derived stores
    after a roll                 with the next flush, a pass of retention: a segment may have come of age
    every retention_check_ms     while there is retention or a lease: run a pass
    before an append             only while the disk is too full: look again, refuse

    level      ROOM   TIGHT           PRESSED, FULL                                FULL
    done       -      (disk_space)    leases are broken, a pass of retention       appends are refused

A simulated clock gets no thread: its log calls `after_flush` itself, in the appending thread.
"""

import logging
from typing import Protocol

from pushrep.env import Clock
from pushrep.errors import PushrepError
from pushrep.log.config import DiskLimits
from pushrep.log.derived import DerivedStores
from pushrep.log.disk_space import LOOK_MS, DiskAboveLimit, DiskLevel, DiskWatch
from pushrep.log.errors import LeaseBroken
from pushrep.log.flusher import Flusher
from pushrep.log.keeping import Keeper
from pushrep.log.leases import Lease, Told
from pushrep.log.reading import BatchReader, Bounds

_LOG = logging.getLogger("pushrep.log")


DERIVED_SYNC_MS = 10_000
"""Derived stores come to disk so often while they change, and after a roll: what a kill makes them read again."""


class Attended(Protocol):
    """The writer, as its housekeeping sees it."""

    @property
    def stable_offset(self) -> int: ...
    def bounds(self) -> Bounds: ...


class Housekeeping:
    """One log's. Thread-safe; nothing but `check_room` and `about_to_cut` raises: who calls has done its work.

    What a holder or a derived store raises that is neither OSError nor ours gets through; the flusher logs it.
    """

    def __init__(
        self, watch: DiskWatch, limits: DiskLimits, derived: DerivedStores, check_ms: int, clock: Clock
    ) -> None:
        self._watch, self._limits, self._derived, self._check_ms = watch, limits, derived, check_ms
        self._clock, self._synced_ms = clock, clock.monotonic_ms()
        self._level = DiskLevel.ROOM
        self._rolled = False
        self._log: Attended | None = None
        self._flusher: Flusher | None = None

    def begin(self, log: Attended, reader: BatchReader, keeper: Keeper, flusher: Flusher | None) -> None:
        """The log is open. `flusher` is None on a simulated clock."""
        self._log, self._reader, self.keeper, self._flusher = log, reader, keeper, flusher
        if flusher is not None:
            flusher.attach(self)
        self._level = self._watch.level(self._limits)
        self._come_again()

    def end(self) -> None:
        """The log is about to be closed: no pass runs after this, leases end."""
        if self._log is None:
            return
        if self._flusher is not None:
            self._flusher.detach(self)
        self.keeper.break_leases("the log was closed")

    def check_room(self) -> None:
        """Raise DiskAboveLimit while the disk is too full for appends. Costs one comparison while it is not."""
        if self._level is DiskLevel.FULL:
            self._level = self._watch.level(self._limits, max_age_ms=0)
            if self._level is DiskLevel.FULL:
                raise DiskAboveLimit(self._watch.path, self._watch.usage, self._limits)

    def acquire_lease(self, name: str, offset: int, told: Told | None) -> Lease:
        """See Keeper. Raises LeaseBroken where the disk is so full that it would be broken at once."""
        if self._watch.level(self._limits) >= DiskLevel.PRESSED:
            raise LeaseBroken(name, self._too_full())
        lease = self.keeper.acquire_lease(name, offset, told)
        self._come_again()
        return lease

    def about_to_cut(self, offset: int) -> None:
        """The log will end at `offset`: what is derived from it goes first. Raises DerivedStoreFailed, OSError."""
        if self._log is not None:
            self.keeper.forget()
        self._derived.cut_to(offset)

    def rolled(self) -> None:
        """A segment was sealed; called under the writer's lock, so nothing is done before the next flush."""
        self._rolled = True
        self._synced_ms = -DERIVED_SYNC_MS

    def after_flush(self) -> None:
        """More is on disk: tell it, and see whether there is still room."""
        try:
            self._level = self._watch.level(self._limits, max_age_ms=LOOK_MS)
            self._tell()
            if self._level >= DiskLevel.PRESSED:
                self.keeper.break_leases(self._too_full())
            if self._level >= DiskLevel.PRESSED or (self.keeper.has_work and (self._rolled or self._flusher is None)):
                self._rolled = False
                self._run()
        except (OSError, PushrepError) as error:
            _LOG.warning("%s: put off: %s", self._watch.path, error)

    def flush_in_background(self) -> None:
        """The flusher's call: a pass that is due."""
        try:
            self.after_flush()
            self._run()
        except (OSError, PushrepError) as error:
            _LOG.warning("%s: retention is put off: %s", self._watch.path, error)
        finally:
            self._come_again()

    def tell_all(self) -> None:
        """The log was closed with all of it flushed: the stores are brought up to its end, and to disk."""
        try:
            self._tell()
            self._derived.sync()
        except (OSError, PushrepError) as error:  # the log is safe; the next opening tells them what they lack
            _LOG.warning("%s: a derived store stays behind until the log is opened again: %s", self._watch.path, error)

    def _run(self) -> None:
        if self.keeper.run() and self._flusher is not None:
            self._flusher.soon(self, 0)  # there may be more; flushes of other logs come first

    def _tell(self) -> None:
        assert self._log is not None
        if self._derived:
            self._derived.tell(self._reader, Bounds(self._log.bounds().start, self._log.stable_offset))
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

    def _come_again(self) -> None:
        if self._flusher is not None and self.keeper.has_work:
            self._flusher.soon(self, self._check_ms)
