"""Where time, disk, network and threads enter: a Protocol and the real one each, passed in through constructors."""

from pushrep.env.clock import SYSTEM_CLOCK, Clock, SystemClock
from pushrep.env.directory_watch import Watch
from pushrep.env.file_witness import FileWitness
from pushrep.env.filesystem import (
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
from pushrep.env.network import (
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
from pushrep.env.threads import (
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
