"""Where time and disk enter: a Protocol and the real one each, passed in through constructors."""

from pushrep.seams.clock import SYSTEM_CLOCK, Clock, SystemClock
from pushrep.seams.filesystem import (
    REAL_FILESYSTEM,
    DiskUsage,
    File,
    Filesystem,
    LockHeld,
    RealFilesystem,
    read_whole,
    write_atomic,
)

__all__ = [
    "REAL_FILESYSTEM",
    "SYSTEM_CLOCK",
    "Clock",
    "DiskUsage",
    "File",
    "Filesystem",
    "LockHeld",
    "RealFilesystem",
    "SystemClock",
    "read_whole",
    "write_atomic",
]
