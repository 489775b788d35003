"""Disk comes through the door: the few calls a log needs, each with its durability said.

Nothing is durable until `File.sync` (its bytes) and `Filesystem.sync_directory` (its name) returned. Positions and
sizes are bytes. Every call raises `OSError` with the path; `write_at` writes everything or raises.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from pushrep.seams.directory_watch import Watch, watch_directory

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap.mmap
"""What can be written: anything with bytes in one piece."""


class DiskUsage(NamedTuple):
    """Room of the file system that holds a path. What only root may fill counts in neither number, as `df` counts."""

    used_bytes: int
    total_bytes: int

    @property
    def used_percent(self) -> float:
        """0 to 100; a file system without size is full."""
        return 100 * self.used_bytes / self.total_bytes if self.total_bytes else 100.0


class LockHeld(OSError):
    """Another process holds the lock; `pid` is what it wrote into the file, None if it could not be read."""

    def __init__(self, path: Path, pid: int | None) -> None:
        super().__init__(errno.EWOULDBLOCK, f"locked by process {pid if pid is not None else 'unknown'}", str(path))
        self.path, self.pid = path, pid


class File(Protocol):
    """An open file without a cursor: callers name the position of every read and write."""

    def read_at(self, size: int, position: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        ...

    def write_at(self, data: Buffer, position: int) -> None:
        """Write all of `data`, or raise; after a raise any part of it may have been written."""
        ...

    def size(self) -> int: ...
    def truncate(self, size: int) -> None: ...
    def allocate(self, size: int) -> None:
        """Grow the file to `size` with zeros whose blocks are reserved; never shrinks."""
        ...

    def sync(self) -> None:
        """fdatasync: contents and size are on disk when this returns."""
        ...

    def drop_cache(self) -> None:
        """Ask that the next read comes from the disk, not from memory."""
        ...

    def fileno(self) -> int:
        """For sendfile and its like."""
        ...

    def close(self) -> None: ...


class Filesystem(Protocol):
    """The directory calls a log needs. Paths are absolute or relative to the process's own directory."""

    def open(self, path: Path, *, create: bool = False, writable: bool = True) -> File: ...
    def list(self, directory: Path) -> list[str]:
        """Names in the directory, sorted."""
        ...

    def exists(self, path: Path) -> bool: ...
    def make_directory(self, path: Path) -> None:
        """With its missing parents; the new names are synced. An existing directory is fine."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; replaces the target. The caller syncs the directory."""
        ...

    def remove(self, path: Path) -> None: ...
    def sync_directory(self, directory: Path) -> None: ...
    def lock(self, path: Path) -> File:
        """Take an exclusive flock, write our pid into the file; LockHeld at once if it is taken. close() frees it."""
        ...

    def map_shared(self, path: Path, size: int, *, writable: bool) -> mmap.mmap:
        """A shared mapping of the first `size` bytes; a writer's file is made and zero-filled first."""
        ...

    def watch(self, directory: Path) -> Watch | None:
        """Hears of writes to its files; None where nobody tells, and who wants to know has to look."""
        ...

    def usage(self, path: Path) -> DiskUsage:
        """How full the file system is that holds `path`, which exists; microseconds, no disk is read."""
        ...


class RealFile:
    """A file descriptor with pread and pwrite."""

    __slots__ = ("_fd", "path")

    def __init__(self, fd: int, path: Path) -> None:
        self._fd, self.path = fd, path

    def read_at(self, size: int, position: int) -> bytes:
        data = os.pread(self._fd, size, position)
        if len(data) == size or not data:
            return data
        parts = [data]  # a signal or the 2 GiB limit of one call cut it short, or the file ends
        got = len(data)
        while got < size and (data := os.pread(self._fd, size - got, position + got)):
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def write_at(self, data: Buffer, position: int) -> None:
        view = memoryview(data).cast("B")
        written = os.pwrite(self._fd, view, position)
        while written < len(view):
            written += os.pwrite(self._fd, view[written:], position + written)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def allocate(self, size: int) -> None:
        have = self.size()
        if size > have:
            os.posix_fallocate(self._fd, have, size - have)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def drop_cache(self) -> None:
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class RealFilesystem:
    """The operating system's, on POSIX."""

    def open(self, path: Path, *, create: bool = False, writable: bool = True) -> File:
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return RealFile(os.open(path, flags, 0o644), path)

    def list(self, directory: Path) -> list[str]:
        return sorted(os.listdir(directory))

    def exists(self, path: Path) -> bool:
        return path.exists()

    def make_directory(self, path: Path) -> None:
        if path.is_dir():
            return
        missing = [p for p in (path, *path.parents) if not p.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for made in missing:
            self.sync_directory(made.parent)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def remove(self, path: Path) -> None:
        path.unlink()

    def sync_directory(self, directory: Path) -> None:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, path: Path) -> File:
        file = RealFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), path)
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            pid = b"%d\n" % os.getpid()
            file.write_at(pid, 0)  # over the old one, whose block is there: a full disk can be opened
            file.truncate(len(pid))
        except BlockingIOError as error:
            text = file.read_at(32, 0).strip()
            file.close()
            raise LockHeld(path, int(text) if text.isdigit() else None) from error
        except BaseException:
            file.close()  # a descriptor left behind would keep the lock from this very process
            raise
        return file

    def map_shared(self, path: Path, size: int, *, writable: bool) -> mmap.mmap:
        with path.open("r+b" if writable and path.exists() else "w+b" if writable else "rb") as file:
            if writable and os.fstat(file.fileno()).st_size < size:
                os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)

    def watch(self, directory: Path) -> Watch | None:
        return watch_directory(directory)

    def usage(self, path: Path) -> DiskUsage:
        found = os.statvfs(path)
        used_blocks = found.f_blocks - found.f_bfree
        return DiskUsage(used_blocks * found.f_frsize, (used_blocks + found.f_bavail) * found.f_frsize)


def write_atomic(filesystem: Filesystem, path: Path, parts: Iterable[Buffer]) -> None:
    """Replace `path` by these bytes; a crash leaves the old file or the new one (temp, sync, rename, sync the name)."""
    temp = path.with_name(path.name + ".tmp")
    data = b"".join(bytes(p) for p in parts)
    file = filesystem.open(temp, create=True)
    try:
        file.truncate(0)
        file.write_at(data, 0)
        file.sync()
    finally:
        file.close()
    filesystem.rename(temp, path)
    filesystem.sync_directory(path.parent)


def read_whole(filesystem: Filesystem, path: Path, size_max: int) -> bytes | None:
    """The file's bytes; None if there is no such file. Raises OSError(EFBIG) above `size_max` before reading."""
    try:
        file = filesystem.open(path, writable=False)
    except FileNotFoundError:
        return None
    try:
        if (size := file.size()) > size_max:
            raise OSError(errno.EFBIG, f"{size} bytes where at most {size_max} are expected", str(path))
        return file.read_at(size, 0)
    finally:
        file.close()


REAL_FILESYSTEM: Filesystem = RealFilesystem()
