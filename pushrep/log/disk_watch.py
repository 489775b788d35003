"""Looks how full the disk of a directory of logs is: one look a second at most serves all its logs.

usage (statvfs) ─ disk_level (disk_space.py) ─▶ level, by the limits that a log has set
                                                a rise is logged once, not once per log
"""

import logging
import threading
from pathlib import Path

from pushrep.log.disk_space import DiskLevel, DiskLimits, disk_level
from pushrep.seams import Clock, DiskUsage, Filesystem

_LOG = logging.getLogger("pushrep.log")

LOOK_MS = 1000

_WHAT_HAPPENS = {
    DiskLevel.TIGHT: "free space soon",
    DiskLevel.PRESSED: "leases are broken and retention runs now",
    DiskLevel.FULL: "appends are refused",
}


class DiskWatch:
    """The level of one disk by any limits. Thread-safe."""

    def __init__(self, path: Path, filesystem: Filesystem, clock: Clock) -> None:
        self.path, self._filesystem, self._clock = path, filesystem, clock
        self._lock = threading.Lock()
        self._looked_ms: int | None = None
        self._usage = DiskUsage(0, 1)
        self._levels: dict[DiskLimits, DiskLevel] = {}

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
            level = self._levels[limits] = disk_level(before, self._usage.used_percent, limits)
            if level > before:
                used = f"{self._usage.used_bytes} of {self._usage.total_bytes} bytes, {self._usage.used_percent:.1f} %"
                _LOG.warning("the disk of %s is filling (%s): %s", self.path, used, _WHAT_HAPPENS[level])
            return level

    def _look(self) -> None:
        try:
            self._usage = self._filesystem.usage(self.path)
        except OSError as error:
            _LOG.warning("%s: can't tell how full the disk is: %s", self.path, error)
