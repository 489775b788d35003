"""How full may the disk be, what does a log do at each level, and which blocks are reserved for a full disk?

    used      0 ... 75 ......... 85 ......... 90 ... 100 %        (LogConfig: disk_warn_percent and so on)
    and free    < 40       < 20       < 10 GiB                    (LogConfig: disk_warn_free_bytes and so on)
    level       ROOM    TIGHT       PRESSED      FULL
                        a warning   leases are   appends are refused, too; until it is below PRESSED again
                                    broken, retention runs at once

A limit is reached when both hold: the percentage rules on a disk of less than some 100 GiB, the free bytes on a larger
one, which at 90 % may have a terabyte left.

    level before   below TIGHT   TIGHT    PRESSED    FULL
    ROOM           ROOM          TIGHT    PRESSED    FULL
    TIGHT          ROOM          TIGHT    PRESSED    FULL
    PRESSED        ROOM          TIGHT    PRESSED    FULL
    FULL           ROOM          TIGHT    FULL       FULL

FULL alone depends on the level before: a log that accepted appends again at 89.9 % would soon refuse them again. On a
disk without free blocks the system refuses the write, whatever the level (AppendFailed).

`disk_level` is the table, `DiskWatch` asks the system, once a second at most for all logs of a directory.
`DiskHeadroom` reserves a few blocks, so that operations which free space work on a full disk:

    <directory of logs>/.pushrep_reserve     64 KiB and 128 bytes a log, allocated, never read

    truncate, purge, retention, opening, closing ─ write a checkpoint beside the old one ─▶ no room?
        ─▶ give the reserve up ─▶ write again, rename: the old file's blocks are free ─▶ take the reserve back

Without it an operator could not even cut a log, because the checkpoints have to be lowered first. Appends never use it.
If it could not be made, or another program took the blocks, the error says what to do.
"""

import errno
import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, TypeVar

from pushrep.env import Clock, DiskUsage, Filesystem
from pushrep.env.filesystem import NO_PLAIN_FILE
from pushrep.log.config import DiskLimits
from pushrep.log.errors import AppendFailed, NoRoomToCut

_LOG = logging.getLogger("pushrep.log")


class DiskLevel(IntEnum):
    """How full the disk is, by a log's own limits; a higher level includes what the lower ones do."""

    ROOM = 0
    """Nothing to do."""
    TIGHT = 1
    """A warning is logged."""
    PRESSED = 2
    """Leases are broken and retention runs at once."""
    FULL = 3
    """Appends are refused."""


class DiskAboveLimit(AppendFailed):
    """The disk is fuller than the log's settings allow: free space, or change the limits, and append again.

    `usage` gives used and total bytes; appends are taken again below the pressed limit of `limits`.
    """

    def __init__(self, path: Path, usage: DiskUsage, limits: DiskLimits) -> None:
        remedy = (
            f"free space (pushrep log purge, retention_ms) until it is below disk_pressed_percent="
            f"{limits.pressed_percent} or has more than disk_pressed_free_bytes={limits.pressed_free_bytes}, or set "
            f"disk_refuse_percent={limits.refuse_percent} higher or disk_refuse_free_bytes={limits.refuse_free_bytes} "
            "lower"
        )
        used = f"{usage.used_bytes} of {usage.total_bytes} bytes are used, {usage.used_percent:.1f} %"
        super().__init__(path, OSError(errno.ENOSPC, f"the disk is too full: {used}"), remedy)
        self.usage, self.limits = usage, limits


def disk_level(before: DiskLevel, usage: DiskUsage, limits: DiskLimits) -> DiskLevel:
    """The level at this usage, coming from level `before`."""
    used, free = usage.used_percent, usage.free_bytes
    if used >= limits.refuse_percent and free <= limits.refuse_free_bytes:
        return DiskLevel.FULL
    if used >= limits.pressed_percent and free <= limits.pressed_free_bytes:
        return DiskLevel.FULL if before is DiskLevel.FULL else DiskLevel.PRESSED
    is_tight = used >= limits.warn_percent and free <= limits.warn_free_bytes
    return DiskLevel.TIGHT if is_tight else DiskLevel.ROOM


LOOK_MS = 1000

_WHAT_HAPPENS = {
    DiskLevel.TIGHT: "free space soon",
    DiskLevel.PRESSED: "leases are broken and retention runs now",
    DiskLevel.FULL: "appends are refused",
}


SYNC_BOUNDS_S = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""A disk with a battery-backed cache syncs in 0.1 ms, an SSD in 1 ms, a spinning disk in 10 ms; above 1 s something is
wrong.
"""


class Durations:
    """A histogram of durations with these upper bounds; the last class has none. Only one thread adds."""

    def __init__(self, bounds_s: Sequence[float] = SYNC_BOUNDS_S) -> None:
        self.bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one more."""
        self._counts[bisect_left(self.bounds_s, seconds)] += 1
        self._sum_s += seconds

    def read(self) -> tuple[tuple[int, ...], float]:
        """The count of each class, and the sum of all seconds."""
        return tuple(self._counts), self._sum_s


class DiskStatus(NamedTuple):
    """The file system of logs, by its mount point. level: the worst by the limits of any of its logs."""

    mount: str
    used_bytes: int
    size_bytes: int
    level: DiskLevel


class DiskWatch:
    """The level of one disk by any limits. Thread-safe."""

    def __init__(self, path: Path, filesystem: Filesystem, clock: Clock) -> None:
        self.path, self._filesystem, self._clock = path, filesystem, clock
        self._lock = threading.Lock()
        self._looked_ms: int | None = None
        self._usage = DiskUsage(0, 1)
        self._levels: dict[DiskLimits, DiskLevel] = {}
        self.syncs = Durations()
        self._syncs_lock = threading.Lock()

    def timed(self, sync: Callable[[], None]) -> None:
        """Call `sync` and count its duration, also if it fails. Raises as `sync`."""
        started_s = perf_counter()
        try:
            sync()
        finally:
            with self._syncs_lock:
                self.syncs.add(perf_counter() - started_s)

    def look(self) -> DiskUsage:
        """Ask the system how full it is; the last usage if the disk does not answer."""
        with self._lock:
            self._look()
            return self._usage

    def status(self) -> DiskStatus:
        """How full it is now, and the level that its logs are at."""
        usage = self.look()
        with self._lock:
            limits = tuple(self._levels)
        level = max((self.level(one) for one in limits), default=DiskLevel.ROOM)
        return DiskStatus(mount_of(self.path), usage.used_bytes, usage.total_bytes, level)

    @property
    def usage(self) -> DiskUsage:
        """The usage as of the last look."""
        return self._usage

    def level(self, limits: DiskLimits, *, max_age_ms: int = LOOK_MS) -> DiskLevel:
        """The level now, by a look that is at most `max_age_ms` old. A disk that can't be asked keeps its level."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            if self._looked_ms is None or now_ms - self._looked_ms >= max_age_ms:
                self._looked_ms = now_ms
                self._look()
            before = self._levels.get(limits, DiskLevel.ROOM)
            level = self._levels[limits] = disk_level(before, self._usage, limits)
            if level > before:
                used = f"{self._usage.used_bytes} of {self._usage.total_bytes} bytes, {self._usage.used_percent:.1f} %"
                _LOG.warning("the disk of %s is filling (%s): %s", self.path, used, _WHAT_HAPPENS[level])
            return level

    def _look(self) -> None:
        try:
            self._usage = self._filesystem.usage(self.path)
        except OSError as error:
            _LOG.warning("%s: how full the disk is can't be read: %s", self.path, error)


def mount_of(path: Path) -> str:
    """Where the file system of `path` is mounted."""
    at = Path(os.path.realpath(path))
    while not at.is_mount():
        at = at.parent
    return str(at)


RESERVE_NAME = ".pushrep_reserve"
RESERVE_BYTES_MIN = 64 << 10  # sixteen blocks: each small file needs one, and the directory may need one for a name
_BYTES_A_LOG = 128  # two lines in each file that lists all logs: in the old file and in the new one

_PARTS = 16

_Answer = TypeVar("_Answer")


class DiskHeadroom:
    """The disk reserve of one directory of logs, for the holder of its lock. Thread-safe."""

    def __init__(self, directory: Path, filesystem: Filesystem, logs: int) -> None:
        self._path, self._filesystem = directory / RESERVE_NAME, filesystem
        self._size_bytes = RESERVE_BYTES_MIN + _BYTES_A_LOG * logs
        self._lock = threading.Lock()  # not held during `write`, which takes other locks
        self._users = 0
        self._fill()

    def call(self, write: Callable[[], _Answer]) -> _Answer:
        """Call `write` and return its result; if the disk is full, free the reserve and call it again.

        So `write` must be repeatable. Raises what it raises; ENOSPC and EDQUOT (as OSError, or as NoRoomToCut) only
        from the second call.
        """
        try:
            return write()
        except (OSError, NoRoomToCut) as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT} or not self._begin():
                raise
        try:
            return write()
        finally:
            self._end()

    def _begin(self) -> bool:
        """Free the reserve; False if there is none."""
        with self._lock:
            if not self._users and not self._empty():
                return False
            self._users += 1
            return True

    def _end(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._fill()

    def _empty(self) -> bool:
        with suppress(OSError):
            file = self._filesystem.open(self._path)
            try:
                if file.size():
                    file.truncate(0)
                    return True
            finally:
                file.close()
        return False

    def _fill(self) -> None:
        """Allocate as much of the reserve as fits; the next opening or use tries again. Raises OSError for a path that
        can't be a plain file.
        """
        try:
            file = self._filesystem.open(self._path, create=True)
        except OSError as error:
            if error.errno in NO_PLAIN_FILE:
                raise
            return
        try:
            # In steps: if another program took a block meanwhile, most of the reserve still fits.
            for part in range(_PARTS, 0, -1):
                with suppress(OSError):
                    file.allocate(self._size_bytes * part // _PARTS)
                    return
        finally:
            file.close()
