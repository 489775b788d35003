"""Where time, disk, network and threads enter: a Protocol and the real one each, passed in through constructors."""

from pushrep.seams.clock import SYSTEM_CLOCK, Clock, SystemClock
from pushrep.seams.directory_watch import Watch
from pushrep.seams.file_witness import FileWitness
from pushrep.seams.filesystem import (
    REAL_FILESYSTEM,
    DiskUsage,
    File,
    Filesystem,
    LockHeld,
    RealFilesystem,
    read_whole,
    write_atomic,
    write_whole,
)
from pushrep.seams.network import (
    READABLE,
    REAL_NETWORK,
    WRITABLE,
    Listener,
    Network,
    Poller,
    Ready,
    RealNetwork,
    Socket,
)
from pushrep.seams.threads import (
    SYSTEM_THREADS,
    Condition,
    Event,
    SharedByProcess,
    Thread,
    Threads,
    shared_by_process,
)

__all__ = [
    "READABLE",
    "REAL_FILESYSTEM",
    "REAL_NETWORK",
    "SYSTEM_CLOCK",
    "SYSTEM_THREADS",
    "WRITABLE",
    "Clock",
    "Condition",
    "DiskUsage",
    "Event",
    "File",
    "FileWitness",
    "Filesystem",
    "Listener",
    "LockHeld",
    "Network",
    "Poller",
    "Ready",
    "RealFilesystem",
    "RealNetwork",
    "SharedByProcess",
    "Socket",
    "SystemClock",
    "Thread",
    "Threads",
    "Watch",
    "read_whole",
    "shared_by_process",
    "write_atomic",
    "write_whole",
]
