"""Looks how full the disk of a directory of logs is: one look a second at most serves all its logs.

usage (statvfs) ─ disk_level (disk_space.py) ─▶ level, by the limits that a log has set
                                                a rise is logged once, not once per log
"""

import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from pushrep.log.disk_space import DiskLevel, DiskLimits, disk_level
from pushrep.seams import Clock, DiskUsage, Filesystem

_LOG = logging.getLogger("pushrep.log")

LOOK_MS = 1000

_WHAT_HAPPENS = {
    DiskLevel.TIGHT: "free space soon",
    DiskLevel.PRESSED: "leases are broken and retention runs now",
    DiskLevel.FULL: "appends are refused",
}


SYNC_BOUNDS_S = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""A disk with a battery syncs in 0.1 ms, a good one in 1 ms, a spinning one in 10 ms; above 1 s something is ill."""


class SyncTimes:
    """How long syncs took, counted in classes with the upper bounds SYNC_BOUNDS_S; the last class has none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(SYNC_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        with self._lock:
            self._counts[bisect_left(SYNC_BOUNDS_S, seconds)] += 1
            self._sum_s += seconds

    def read(self) -> tuple[tuple[int, ...], float]:
        """How many are in each class, and the seconds of all together."""
        with self._lock:
            return tuple(self._counts), self._sum_s


class DiskStatus(NamedTuple):
    """The file system that logs lie on, by its mount point. level: the worst by the limits of any of its logs."""

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
        self.syncs = SyncTimes()

    def timed(self, sync: Callable[[], None]) -> None:
        """Sync, and count how long that took; one that fails is counted as well. Raises as `sync`."""
        started_s = perf_counter()
        try:
            sync()
        finally:
            self.syncs.add(perf_counter() - started_s)

    def look(self) -> DiskUsage:
        """How full it is now; as it was last seen if it does not answer."""
        with self._lock:
            self._look()
            return self._usage

    def status(self) -> DiskStatus:
        """How full it is now, and what its logs do about it."""
        usage = self.look()
        with self._lock:
            limits = tuple(self._levels)
        level = max((self.level(one) for one in limits), default=DiskLevel.ROOM)
        return DiskStatus(mount_of(self.path), usage.used_bytes, usage.total_bytes, level)

    @property
    def usage(self) -> DiskUsage:
        """As it was last seen."""
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
            _LOG.warning("%s: can't tell how full the disk is: %s", self.path, error)


def mount_of(path: Path) -> str:
    """Where the file system of `path` is mounted."""
    at = Path(os.path.realpath(path))
    while not at.is_mount():
        at = at.parent
    return str(at)
