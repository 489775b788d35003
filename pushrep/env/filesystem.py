"""The disk as a parameter: the calls that a log needs; each documents what is durable when it returns.

Nothing is durable until `File.sync` (its bytes) and `Filesystem.sync_directory` (its name) returned. Positions and
sizes are bytes. Every call raises `OSError` with the path; `write_at` writes everything or raises.

`open` opens a plain file, or raises at once, with the path:

    under the name there is      to be read                      to be written, locked, mapped for writing
    a plain file                 opened                          opened
    a symbolic link to one       opened                          ELOOP: nothing is ever written through a link
    a link that leads nowhere    ELOOP, never ENOENT             ELOOP
    a directory                  EISDIR                          EISDIR
    a pipe, socket, device       EINVAL, nothing waits for it    EINVAL
    a file that is mostly hole   EFBIG                           opened: the writer may cut it

The last: at least HOLE_BYTES_MAX that were never written, far beyond space allocated ahead, so that a scan would not
end.

A directory that is held stays the one it was, whatever is done to its name:

    mv data data.old; mkdir data        data/orders-0/... of the holder is in data.old; the new data is not touched

Paths below it are looked up from its descriptor (openat(2) and its like), by everybody who uses the same `Filesystem`.

Root makes files and directories for the owner of the directory in which it makes them: one that belonged to root would
lock a service of another user out.

A FileWitness distinguishes a file from a copy of it: a number that the file system gives a new file, and never
again.

    inode number + generation (ioctl FS_IOC_GETVERSION)     ext4, xfs, btrfs, f2fs
    inode number + birth time (statx)                       tmpfs, NFS 4.2 where its server says it, those above
    neither, or a file system whose inode numbers change    None: FUSE, 9p, overlay, SMB, FAT

The inode number alone is not enough: a file system reuses the number of a removed file, often for the next one.
Sources: ioctl_iflags(2), statx(2), statfs(2), linux/magic.h.

A WholeSync brings everything that any process wrote to one file system to disk, by one call: syncfs(2). It is there if
the system reports whether that succeeded: Linux 5.8 and later, on file systems that are known to sync data and names by
it. Its error names no file, and it waits for others' writes. So it is used only where all files are needed, or none.

A lock is two: a flock, which excludes others, and on the file `<name>.held` a record lock of the open file
(F_OFD_SETLK), which shows that it is held. Only of the second one can be asked who has it without taking it: a reader
that tried the flock would refuse a process that opens just then. Both are the kernel's, so they hold between
containers, where neither pids nor /proc mean the same. Source: fcntl_locking(2).

A Watch reports writes to a directory's files by any process: inotify(7), where the system has it. It reports
neither the written bytes, nor syncs, nor writes through a mapping.
"""

import ctypes
import errno
import mmap
import os
import re
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol, Self, TypeAlias, cast

from pushrep.errors import PushrepError

try:
    import fcntl
except ModuleNotFoundError:  # no Linux: see REAL_FILESYSTEM
    fcntl = None  # type: ignore[assignment]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_GET_VERSION = 0x80087601  # _IOR('v', 1, long); the kernel fills in 4 bytes
_SYNCS_WHOLE = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994})  # ext4, xfs, btrfs, f2fs, tmpfs
_SYNCFS_SAYS_ERRORS = (5, 8)
_RECORD_LOCK = struct.Struct("hhqqi0q")  # struct flock: type, whence, start, length (0: to the end), pid
_AT_EMPTY_PATH, _STATX_BTIME = 0x1000, 0x800
_BTIME_AT = 80  # of struct statx: seconds i64, nanoseconds u32
_WITHOUT_LASTING_NUMBERS = frozenset(
    {
        0x65735546,  # FUSE, virtiofs too
        0x01021997,  # 9p
        0x794C7630,  # overlay: its numbers last only where all layers lie on one file system
        0x786F4256,  # vboxsf
        0xFF534D42,  # SMB
        0xFE534D42,
        0x517B,
        0x4D44,  # FAT
        0x2011BAB0,  # exFAT
    }
)


class FileWitness(NamedTuple):
    """The identity of one file in its file system. At least one of `generation` and `birth_ns` is set.

    generation: that of the inode number. birth_ns: when it was made, since 1970 UTC. links: how many names it has.
    """

    inode: int
    generation: int | None
    birth_ns: int | None
    links: int = 1


def _witness(fd: int) -> FileWitness | None:
    found = os.fstat(fd)
    if sys.platform == "linux":
        if not _numbers_last(fd):
            return None
        generation, birth_ns = _generation(fd), _birth_ns(fd)
    else:
        birth_s = getattr(found, "st_birthtime", None)
        generation, birth_ns = None, None if birth_s is None else int(birth_s * 1e9)
    if generation is None and birth_ns is None:
        return None
    return FileWitness(found.st_ino, generation, birth_ns, found.st_nlink)


def _numbers_last(fd: int) -> bool:
    return sys.platform != "linux" or _type_of(fd) not in _WITHOUT_LASTING_NUMBERS


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _type_of(fd: int) -> int:
    """The file system's `f_type`; 0 if the system does not tell it."""
    answer = ctypes.create_string_buffer(256)
    if _libc().fstatfs(fd, answer):
        return 0
    return int(ctypes.c_long.from_buffer(answer).value) & 0xFFFFFFFF


def _generation(fd: int) -> int | None:
    try:
        answer = fcntl.ioctl(fd, _GET_VERSION, bytes(8))
    except OSError:  # ENOTTY: this file system keeps none
        return None
    generation: int = struct.unpack_from("=I", answer)[0]
    return generation or None  # 0: this file system does not count


def _birth_ns(fd: int) -> int | None:
    answer = ctypes.create_string_buffer(256)
    try:
        failed = _libc().statx(fd, b"", _AT_EMPTY_PATH, _STATX_BTIME, answer)
    except AttributeError:  # a C library from before 2018
        return None
    mask: int = struct.unpack_from("=I", answer.raw)[0]
    if failed or not mask & _STATX_BTIME:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", answer.raw, _BTIME_AT)
    return int(seconds) * 10**9 + int(nanoseconds)


@cache
def syncfs_says_errors() -> bool:
    """Whether this kernel's syncfs reports errors of writing back, as fsync does (Linux 5.8)."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if sys.platform != "linux" or release is None or not hasattr(_libc(), "syncfs"):
        return False
    return (int(release[1]), int(release[2])) >= _SYNCFS_SAYS_ERRORS


class WholeSync(Protocol):
    """See the file's map."""

    def sync(self) -> None:
        """Bring everything that was written to the file system to disk.

        Raises OSError, also for a write that failed since this object was made: then it is unknown what the disk holds.
        """
        ...

    def close(self) -> None: ...


class _SyncFs:
    """Uses a descriptor opened before the writes: the kernel reports to it failures since then."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor, self._path = descriptor, path

    def sync(self) -> None:
        if _libc().syncfs(self._descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(self._path))

    def close(self) -> None:
        os.close(self._descriptor)


_IN_MODIFY = 0x0000_0002
_EVENTS_BYTES = 4096
_WATCHES_MAX = 32
"""The most watches in one process: a user has 128 for all programs."""


class Watch(Protocol):
    """See the file's map. `fileno`: of a descriptor that is readable once something was written since `has_changed`."""

    def fileno(self) -> int: ...
    def has_changed(self) -> bool:
        """Whether something was written since the last call. Never waits."""
        ...

    def close(self) -> None: ...


class Inotify:
    """A watch of one directory."""

    _open = 0

    def __init__(self, descriptor: int) -> None:
        """Use `watch_directory`."""
        self._descriptor = descriptor
        self._lock = threading.Lock()  # a closed descriptor's number may be another file's
        Inotify._open += 1

    @classmethod
    def has_room(cls) -> bool:
        """Whether this process may have another one."""
        return cls._open < _WATCHES_MAX

    def fileno(self) -> int:
        return self._descriptor

    def has_changed(self) -> bool:
        is_news = False
        with self._lock, suppress(OSError):  # there is nothing, or it was closed
            while os.read(self._descriptor, _EVENTS_BYTES):
                is_news = True
        return is_news

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
                Inotify._open -= 1

    def __del__(self) -> None:
        self.close()  # a replay that has ended need not be closed


def watch_directory(path: Path | str) -> Inotify | None:
    """A watch; None where the system has none, or no more: the caller has to look now and then."""
    if not Inotify.has_room() or not hasattr(_libc(), "inotify_init1"):
        return None
    descriptor = _libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        return None
    if _libc().inotify_add_watch(descriptor, os.fsencode(path), ctypes.c_uint32(_IN_MODIFY)) < 0:
        os.close(descriptor)
        return None
    return Inotify(descriptor)


Buffer: TypeAlias = bytes | bytearray | memoryview | mmap.mmap
"""What can be written: anything with bytes in one piece."""

HOLE_BYTES_MAX = 256 << 20
"""Copies that leave zeros out have holes of as much as was allocated ahead, 16 MiB by default."""

NO_PLAIN_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.EFBIG})
"""Errors of an open that mean that the name is no plain file's; the disk and the process are well."""

IS_LINK = "it is a symbolic link, and nothing is written through one"
LEADS_NOWHERE = "it is a symbolic link that leads nowhere"
IS_DIRECTORY = "it is a directory, where a file is expected"
IS_NO_FILE = "it is a pipe, a socket or a device, where a file is expected"


class DiskUsage(NamedTuple):
    """Used and total bytes of a path's file system, as by `df`: neither includes what is reserved for root."""

    used_bytes: int
    total_bytes: int

    @property
    def used_percent(self) -> float:
        """0 to 100; a file system without size is full."""
        return 100 * self.used_bytes / self.total_bytes if self.total_bytes else 100.0

    @property
    def free_bytes(self) -> int:
        """What may still be written."""
        return self.total_bytes - self.used_bytes


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

    def modified_ms(self) -> int:
        """When it was written last, by the file system: milliseconds since 1970; anybody may set it."""
        ...

    def named_size(self, *, by_path: bool = False) -> int | None:
        """Its size if the name by which it was opened still leads to it, else None; two microseconds. by_path: the
        whole path, not from the directory that is held. Raises OSError.

        On file systems without lasting inode numbers any file of that name counts as it.
        """
        ...

    def has_hole(self, size: int) -> bool:
        """Whether something below `size` was never written, or is zeros that the file system stores as that."""
        ...

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

    def hold(self, directory: Path) -> Callable[[], None]:
        """Until the returned function is called, paths at and below `directory` are this very directory's, wherever it
        is moved. Raises OSError.
        """
        ...

    def open(self, path: Path, *, create: bool = False, writable: bool = True) -> File:
        """A plain file; see the module for what is refused. FileNotFoundError only if the name is free."""
        ...

    def list(self, directory: Path) -> list[str]:
        """Names in the directory, sorted."""
        ...

    def exists(self, path: Path) -> bool:
        """Whether the name is taken, by anything, also a dangling link."""
        ...

    def make_directory(self, path: Path) -> None:
        """With its missing parents; the new names are synced. An existing directory is fine."""
        ...

    def make_directories(self, paths: Iterable[Path]) -> None:
        """Several, whose parents exist; each parent is synced once, after all of them."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; replaces the target, unless that is a link (ELOOP). The caller syncs the directory."""
        ...

    def remove(self, path: Path) -> None: ...
    def sync_directory(self, directory: Path) -> None: ...
    def whole_sync(self, directory: Path) -> WholeSync | None:
        """Of the file system that holds `directory`, made before the writes that it syncs; None: sync each file."""
        ...

    def lock(self, path: Path) -> File:
        """Take an exclusive flock, write our pid into the file; LockHeld at once if it is taken. close() frees it."""
        ...

    def is_locked(self, path: Path) -> bool | None:
        """Whether a process of any container has taken that lock; None: the file system does not tell. Takes none."""
        ...

    def map_shared(self, path: Path, size: int, *, writable: bool) -> mmap.mmap:
        """A shared mapping of the first `size` bytes; a writer's file is made and zero-filled first."""
        ...

    def watch(self, directory: Path) -> Watch | None:
        """A watch of writes to its files; None where there is none: the caller has to look now and then."""
        ...

    def usage(self, path: Path) -> DiskUsage:
        """The usage of the file system of `path`, which exists; takes microseconds, reads no disk."""
        ...

    def witness(self, path: Path) -> FileWitness | None:
        """What distinguishes the file at `path` from its copies, also once it is renamed; None where nothing does."""
        ...


class _Held:
    """A directory's descriptor, closed with the last reference: no call goes on in another file of the same number."""

    def __init__(self, fd: int | None) -> None:
        self.fd, self.users = fd, 0
        self._inode = self._look()

    @property
    def is_open(self) -> bool:
        """False if somebody has closed all descriptors of this process, as a daemon does when it starts."""
        return self._look() == self._inode

    def _look(self) -> tuple[int, int] | None:
        with suppress(OSError):
            if self.fd is not None:
                found = os.fstat(self.fd)
                return found.st_dev, found.st_ino
        return None

    def __del__(self) -> None:
        if self.fd is not None and self.is_open:
            os.close(self.fd)


_BY_PATH = _Held(None)


class _Place(NamedTuple):
    """Where a path leads: a name, below a directory that is held. path: for people."""

    name: str
    held: _Held
    path: Path

    def open(self, flags: int, mode: int = 0o777) -> int:
        """As os.open. Raises OSError with the path."""
        try:
            return os.open(self.name, flags | os.O_CLOEXEC, mode, dir_fd=self.held.fd)
        except OSError as error:
            raise _named(error, self.path) from error

    def exists(self) -> bool:
        """Raises OSError."""
        try:
            os.lstat(self.name, dir_fd=self.held.fd)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def make(self) -> None:
        """Make a directory; an existing one is fine. Raises OSError with the path."""
        try:
            os.mkdir(self.name, dir_fd=self.held.fd)
        except OSError as error:
            if not isinstance(error, FileExistsError) or not self.is_directory():
                raise _named(error, self.path) from error
        else:
            if os.geteuid() == 0:
                with self.opened() as fd:
                    self.give_away(fd)

    def is_directory(self) -> bool:
        with suppress(OSError):
            return stat.S_ISDIR(os.stat(self.name, dir_fd=self.held.fd).st_mode)
        return False

    def is_link(self) -> bool:
        with suppress(OSError):
            return stat.S_ISLNK(os.lstat(self.name, dir_fd=self.held.fd).st_mode)
        return False

    @contextmanager
    def opened(self, flags: int = _DIRECTORY) -> Iterator[int]:
        """A descriptor for the block: of a directory. Raises OSError with the path."""
        fd = self.open(flags)
        try:
            yield fd
        finally:
            os.close(fd)

    def give_away(self, fd: int) -> None:
        """Give what root has just made there to the directory's owner. Raises OSError."""
        above = os.stat(Path(self.name).parent, dir_fd=self.held.fd)
        if above.st_uid and os.fstat(fd).st_uid == 0:
            os.fchown(fd, above.st_uid, above.st_gid)


_NOWHERE = _Place("", _BY_PATH, Path())


class RealFile:
    """A file descriptor with pread and pwrite."""

    __slots__ = ("_fd", "_inode", "_place", "path")

    def __init__(self, fd: int, path: Path, place: _Place | None = None) -> None:
        self._fd, self.path = fd, path
        self._place = _Place(str(path), _BY_PATH, path) if place is None else place
        self._inode: tuple[int, int] | None = None  # its file system and number, once asked for

    def read_at(self, size: int, position: int) -> bytes:
        try:
            data = os.pread(self._fd, size, position)
            if len(data) == size or not data:
                return data
            parts = [data]  # a signal or the 2 GiB limit of one call cut it short, or the file ends
            got = len(data)
            while got < size and (data := os.pread(self._fd, size - got, position + got)):
                parts.append(data)
                got += len(data)
        except OSError as error:
            raise _named(error, self.path) from error
        return b"".join(parts)

    def write_at(self, data: Buffer, position: int) -> None:
        view = memoryview(data).cast("B")
        try:
            written = os.pwrite(self._fd, view, position)
            while written < len(view):
                written += os.pwrite(self._fd, view[written:], position + written)
        except OSError as error:
            raise _named(error, self.path) from error

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def modified_ms(self) -> int:
        return os.fstat(self._fd).st_mtime_ns // 1_000_000

    def named_size(self, *, by_path: bool = False) -> int | None:
        name, held, path = self._place
        try:
            found = os.lstat(path) if by_path else os.lstat(name, dir_fd=held.fd)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if self._inode is None:
            own = os.fstat(self._fd)
            self._inode = (own.st_dev, own.st_ino) if _numbers_last(self._fd) else (0, 0)
        return found.st_size if self._inode in {(found.st_dev, found.st_ino), (0, 0)} else None

    def has_hole(self, size: int) -> bool:
        try:
            return os.lseek(self._fd, 0, os.SEEK_HOLE) < size
        except OSError:  # ENXIO: the file is empty. EINVAL: the file system does not tell
            return self.size() < size

    def truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise _named(error, self.path) from error

    def allocate(self, size: int) -> None:
        have = self.size()
        if size > have:
            try:
                os.posix_fallocate(self._fd, have, size - have)
            except OSError as error:
                raise _named(error, self.path) from error

    def sync(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise _named(error, self.path) from error

    def drop_cache(self) -> None:
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._place = _NOWHERE  # else its file system could not be unmounted
            os.close(fd)


class _LockFile(RealFile):
    """The file of a lock, with what shows others that it is held."""

    __slots__ = ("shown",)

    def __init__(self, fd: int, path: Path, place: _Place) -> None:
        super().__init__(fd, path, place)
        self.shown = RealFile(-1, _shown(path))

    def close(self) -> None:
        super().close()
        self.shown.close()


class RealFilesystem:
    """The operating system's, on POSIX."""

    _held: dict[str, _Held]

    def __new__(cls, *_given: object, **_named: object) -> Self:
        """A subclass has its own arguments."""
        made = super().__new__(cls)
        made._held = {}
        return made

    def hold(self, directory: Path) -> Callable[[], None]:
        held = self._held.get(str(directory))
        if held is None:
            held = self._held[str(directory)] = _Held(self._place(directory).open(_DIRECTORY))
        held.users += 1
        return partial(self._let_go, str(directory), held)

    def _let_go(self, directory: str, held: _Held) -> None:
        held.users -= 1
        if not held.users and self._held.get(directory) is held:
            del self._held[directory]

    def open(self, path: Path, *, create: bool = False, writable: bool = True) -> File:
        place = self._place(path)
        return RealFile(_open_plain(place, create=create, writable=writable), path, place)

    def list(self, directory: Path) -> list[str]:
        with self._place(directory).opened() as fd:
            return sorted(os.listdir(fd))

    def exists(self, path: Path) -> bool:
        return self._place(path).exists()

    def make_directory(self, path: Path) -> None:
        missing: list[_Place] = []
        for one in (path, *path.parents):
            place = self._place(one)
            if place.is_directory() or (missing and place.exists()):
                break
            missing.append(place)
        for place in reversed(missing):
            place.make()
        for place in missing:
            self.sync_directory(place.path.parent)

    def make_directories(self, paths: Iterable[Path]) -> None:
        parents: dict[Path, None] = {}
        for path in paths:
            if not (place := self._place(path)).is_directory():
                place.make()
                parents[path.parent] = None
        for parent in parents:
            self.sync_directory(parent)

    def rename(self, source: Path, target: Path) -> None:
        old, new = self._place(source), self._place(target)
        if new.is_link():
            raise OSError(errno.ELOOP, IS_LINK, str(target))
        try:
            os.replace(old.name, new.name, src_dir_fd=old.held.fd, dst_dir_fd=new.held.fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(source), None, str(target)) from error

    def remove(self, path: Path) -> None:
        place = self._place(path)
        try:
            os.unlink(place.name, dir_fd=place.held.fd)
        except OSError as error:
            raise _named(error, path) from error

    def sync_directory(self, directory: Path) -> None:
        with self._place(directory).opened() as fd:
            os.fsync(fd)

    def whole_sync(self, directory: Path) -> WholeSync | None:
        if not syncfs_says_errors():
            return None
        fd = self._place(directory).open(_DIRECTORY)
        if _type_of(fd) not in _SYNCS_WHOLE:
            os.close(fd)
            return None
        return _SyncFs(fd, directory)

    def watch(self, directory: Path) -> Watch | None:
        name, held, path = self._place(directory)
        return watch_directory(path if held.fd is None else f"/proc/self/fd/{held.fd}/{name}")

    def witness(self, path: Path) -> FileWitness | None:
        with self._place(path).opened(os.O_RDONLY | os.O_NOFOLLOW) as fd:
            return _witness(fd)

    def lock(self, path: Path) -> File:
        place = self._place(path)
        file = _LockFile(_open_plain(place, create=True, writable=True), path, place)
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            pid = b"%d\n" % os.getpid()
            file.write_at(pid, 0)  # over the old one, whose block exists, so that it works on a full disk
            file.truncate(len(pid))
            shown = self._place(_shown(path))
            file.shown = RealFile(_open_plain(shown, create=True, writable=True), shown.path, shown)
            _record_lock(file.shown.fileno(), fcntl.F_OFD_SETLK, fcntl.F_WRLCK)
        except BlockingIOError as error:
            text = file.read_at(32, 0).strip()
            file.close()
            raise LockHeld(path, int(text) if text.isdigit() else None) from error
        except BaseException:
            file.close()  # an open descriptor would keep this process itself from the lock
            raise
        return file

    def is_locked(self, path: Path) -> bool | None:
        try:
            fd = _open_plain(self._place(_shown(path)), create=False, writable=False)
        except FileNotFoundError:
            return False
        try:
            found = _record_lock(fd, fcntl.F_OFD_GETLK, fcntl.F_RDLCK)
        finally:
            os.close(fd)
        return None if found is None else found != fcntl.F_UNLCK

    def map_shared(self, path: Path, size: int, *, writable: bool) -> mmap.mmap:
        fd = _open_plain(self._place(path), create=writable, writable=writable)
        try:
            if writable and os.fstat(fd).st_size < size:
                os.posix_fallocate(fd, 0, size)
            return mmap.mmap(fd, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        except OSError as error:
            raise _named(error, path) from error
        finally:
            os.close(fd)

    def usage(self, path: Path) -> DiskUsage:
        # A pipe that somebody put in the directory's place would keep the open waiting for a writer.
        with self._place(path).opened(os.O_RDONLY | os.O_NONBLOCK) as fd:
            found = os.statvfs(fd)
        used_blocks = found.f_blocks - found.f_bfree
        return DiskUsage(used_blocks * found.f_frsize, (used_blocks + found.f_bavail) * found.f_frsize)

    def _place(self, path: Path) -> _Place:
        text = str(path)
        at = len(text) if self._held else 0
        while at > 0:
            held = self._held.get(text[:at])
            if held is not None:
                return _Place(text[at + 1 :] or ".", held, path)
            at = text.rfind("/", 0, at)
        return _Place(text, _BY_PATH, path)


def _record_lock(fd: int, command: int, kind: int) -> int | None:
    """Set or ask for a record lock of the whole file; the kind that stands in its way, None without such locks."""
    try:
        answer = fcntl.fcntl(fd, command, _RECORD_LOCK.pack(kind, 0, 0, 0, 0))
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}:
            raise
        return None
    found: int = _RECORD_LOCK.unpack(answer)[0]
    return found


def _shown(path: Path) -> Path:
    return path.with_name(path.name + ".held")


def mostly_hole(size: int, missing: int) -> str:
    """Why a file with so many bytes that were never written is refused."""
    return f"it claims {size} bytes, {missing} of which were never written"


_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY  # for any kind of file: no wait, no controlling terminal
_WRITE = _READ | os.O_RDWR | os.O_NOFOLLOW


def _open_plain(place: _Place, *, create: bool, writable: bool) -> int:
    """A descriptor of a plain file; see the module for what is refused."""
    flags = _WRITE if writable or create else _READ
    try:
        fd = place.open(flags | os.O_CREAT if create else flags, 0o644)
    except OSError as error:
        _raise_in_words(error, place)
        raise  # not from itself: a cycle would keep every frame, and so the caller's objects, until the collector runs
    try:
        if create and os.geteuid() == 0:
            place.give_away(fd)
        why = _no_plain_file(fd, writable=writable)
    except BaseException:
        os.close(fd)
        raise
    if why is not None:
        os.close(fd)
        raise OSError(*why, str(place.path))
    return fd


def _raise_in_words(error: OSError, place: _Place) -> None:
    """Raise another error if the system's does not tell what is under the name; else return, to raise the original."""
    path = str(place.path)
    if error.errno in {errno.ENOENT, errno.ELOOP} and place.is_link():
        why = LEADS_NOWHERE if error.errno == errno.ENOENT else IS_LINK
        raise OSError(errno.ELOOP, why, path) from error
    if error.errno == errno.EISDIR:
        raise OSError(errno.EISDIR, IS_DIRECTORY, path) from error
    if error.errno == errno.ENXIO:  # a socket, or a device without a driver
        raise OSError(errno.EINVAL, IS_NO_FILE, path) from error


def _no_plain_file(fd: int, *, writable: bool) -> tuple[int, str] | None:
    """Why the opened file is refused; None if it is not."""
    found = os.fstat(fd)
    if stat.S_ISDIR(found.st_mode):
        return errno.EISDIR, IS_DIRECTORY
    if not stat.S_ISREG(found.st_mode):
        return errno.EINVAL, IS_NO_FILE
    missing = found.st_size - 512 * found.st_blocks
    if (
        writable
        or missing < HOLE_BYTES_MAX
        or (missing := min(missing, _hole_bytes(fd, found.st_size))) < HOLE_BYTES_MAX
    ):
        return None
    return errno.EFBIG, mostly_hole(found.st_size, missing)


def _hole_bytes(fd: int, size: int) -> int:
    """Bytes in holes, up to the limit. Not by counting blocks, because compressed files have fewer, too."""
    holes = position = begins = 0
    try:
        while position < size and holes < HOLE_BYTES_MAX:
            begins = os.lseek(fd, position, os.SEEK_HOLE)
            position = os.lseek(fd, begins, os.SEEK_DATA)
            holes += position - begins
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return holes + max(0, size - begins)  # a hole to the end
    return holes


def _named(error: OSError, path: Path) -> OSError:
    """The same error, with the file's name: calls by descriptor leave it out."""
    return OSError(error.errno, error.strerror, str(path))


def write_atomic(filesystem: Filesystem, path: Path, parts: Iterable[Buffer]) -> None:
    """Replace `path` by these bytes; a crash leaves the old file or the new one (temp, sync, rename, sync the name)."""
    write_beside(filesystem, path, b"".join(bytes(p) for p in parts))
    put_in_place(filesystem, path)
    filesystem.sync_directory(path.parent)


def write_beside(filesystem: Filesystem, path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write the new content of `path` under a temporary name, for `put_in_place`. sync: bring it to disk."""
    with closing(filesystem.open(_temporary(path), create=True)) as file:
        file.truncate(0)
        file.write_at(data, 0)
        if sync:
            file.sync()


def put_in_place(filesystem: Filesystem, path: Path) -> None:
    """Rename the synced temporary file to `path`; the caller syncs the directory."""
    filesystem.rename(_temporary(path), path)


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def read_whole(filesystem: Filesystem, path: Path, size_max: int) -> bytes | None:
    """The file's bytes; None if there is no such file. Raises OSError(EFBIG) above `size_max` before reading."""
    try:
        file = filesystem.open(path, writable=False)
    except FileNotFoundError:
        return None
    with closing(file):
        if (size := file.size()) > size_max:
            raise OSError(errno.EFBIG, f"{size} bytes where at most {size_max} are expected", str(path))
        return file.read_at(size, 0)


def file_size(filesystem: Filesystem, path: Path) -> int | None:
    """Bytes of a file; None if it is not there, or no file. Raises OSError."""
    try:
        with closing(filesystem.open(path, writable=False)) as file:
            return file.size()
    except (FileNotFoundError, IsADirectoryError):
        return None


class _NeedsLinux:
    """Stands for the filesystem where it can't be: everything that needs no log can be imported there and works."""

    def __getattr__(self, name: str) -> NoReturn:
        raise PushrepError(
            f"a log is kept on Linux only, this is {sys.platform}: filter, partitioner and pushrep.testing work here"
        )


_HAS_LINUX = fcntl is not None and hasattr(os, "posix_fallocate") and hasattr(os, "fdatasync")
REAL_FILESYSTEM: Filesystem = RealFilesystem() if _HAS_LINUX else cast("Filesystem", _NeedsLinux())
