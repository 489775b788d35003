"""What every `Filesystem` must do, asked of any of them: the real one and the simulated one answer alike."""

import errno
import os
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Protocol

from pushrep.env import Filesystem, LockHeld, file_size, read_whole, write_atomic
from pushrep.env.filesystem import HOLE_BYTES_MAX


class Intruder(Protocol):
    """Puts what is no plain file under a name, as somebody else may: no `Filesystem` makes such things itself."""

    def place_link(self, path: Path, target: Path) -> None:
        """A symbolic link to `target`, which may be missing."""
        ...

    def place_pipe(self, path: Path) -> None:
        """A named pipe."""
        ...

    def place_file(self, path: Path, contents: bytes) -> None:
        """Another file under the name, with its directories."""
        ...

    def move(self, source: Path, target: Path) -> None:
        """A directory."""
        ...

    def unlink(self, path: Path) -> None:
        """A file's name."""
        ...

    def cut(self, path: Path, size: int) -> None:
        """A file."""
        ...


class RealIntruder:
    """By the operating system."""

    def place_link(self, path: Path, target: Path) -> None:
        """A symbolic link to `target`, which may be missing."""
        path.symlink_to(target)

    def place_pipe(self, path: Path) -> None:
        """A named pipe."""
        os.mkfifo(path)

    def place_file(self, path: Path, contents: bytes) -> None:
        """Another file under the name, with its directories."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(contents)

    def move(self, source: Path, target: Path) -> None:
        """A directory."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """A file's name."""
        path.unlink()

    def cut(self, path: Path, size: int) -> None:
        """A file."""
        os.truncate(path, size)


def examine_filesystem(filesystem: Filesystem, directory: Path, intruder: Intruder | None = None) -> None:
    """Raise AssertionError naming the first promise of `Filesystem` or `File` that does not hold below `directory`.

    What is promised of links and pipes is looked at only with an `intruder` that can place them.
    """
    filesystem.make_directory(directory)
    for examine in (_files, _names, _whole_files, _locks, _mappings, _watches, _room, _holes, _witnesses):
        place = directory / examine.__name__.strip("_")
        filesystem.make_directory(place)
        examine(filesystem, place)
    if intruder is not None:
        filesystem.make_directory(directory / "odd")
        _odd_files(filesystem, directory / "odd", intruder)
        filesystem.make_directory(directory / "mine")
        _held(filesystem, directory / "mine", intruder)
        _named(filesystem, directory / "mine", intruder)


def _files(fs: Filesystem, directory: Path) -> None:
    with closing(fs.open(directory / "f", create=True)) as file:
        _equal("an empty file's size", file.size(), 0)
        _equal("a read behind the end", file.read_at(10, 5), b"")
        file.write_at(b"abc", 0)
        file.write_at(memoryview(b"xyz"), 5)
        _equal("a hole reads as zeros", file.read_at(100, 0), b"abc\0\0xyz")
        _equal("a read in the middle", file.read_at(3, 1), b"bc\0")
        file.truncate(2)
        _equal("truncate cuts", file.read_at(100, 0), b"ab")
        file.truncate(4)
        _equal("truncate grows with zeros", file.read_at(100, 0), b"ab\0\0")
        file.allocate(3)
        _equal("allocate never shrinks", file.size(), 4)
        file.allocate(6)
        _equal("allocate grows with zeros", file.read_at(100, 0), b"ab\0\0\0\0")
        file.sync()
        file.drop_cache()
        _equal("synced bytes survive a dropped cache", file.read_at(100, 0), b"ab\0\0\0\0")
    with closing(fs.open(directory / "f", writable=False)) as file:
        _equal("another open sees the bytes", file.read_at(2, 0), b"ab")
        _refused("a write through a read-only file", lambda: file.write_at(b"x", 0), errno.EBADF)
        _refused("growing a read-only file", lambda: file.allocate(100), errno.EBADF)
    _refused("reading what was closed", lambda: file.read_at(1, 0), errno.EBADF)
    _refused("writing what was closed", lambda: file.write_at(b"x", 0), errno.EBADF)
    _refused("cutting what was closed", lambda: file.truncate(0), errno.EBADF)


def _names(fs: Filesystem, directory: Path) -> None:
    _refused("opening what is not there", lambda: fs.open(directory / "none"), errno.ENOENT)
    _refused("listing what is not there", lambda: fs.list(directory / "none"), errno.ENOENT)
    _refused("removing what is not there", lambda: fs.remove(directory / "none"), errno.ENOENT)
    for name in ("b", "a"):
        fs.open(directory / name, create=True).close()
    fs.make_directory(directory / "c" / "d")
    fs.make_directory(directory / "c" / "d")
    _equal("names come sorted, directories with them", fs.list(directory), ["a", "b", "c"])
    several = [directory / "c" / "d", directory / "c" / "e"]
    fs.make_directories(several)
    fs.make_directories(several)
    _equal("several directories, made twice", fs.list(directory / "c"), ["d", "e"])
    with closing(fs.open(directory / "a")) as file:
        file.write_at(b"1", 0)
        fs.rename(directory / "a", directory / "b")
        _equal("an open file goes on under its new name", file.read_at(9, 0), b"1")
    _equal("rename replaces its target", fs.list(directory), ["b", "c"])
    _refused("a rename of what is not there", lambda: fs.rename(directory / "a", directory / "b"), errno.ENOENT)
    _equal("the old name is gone", fs.exists(directory / "a"), False)
    fs.sync_directory(directory)
    fs.remove(directory / "b")
    _equal("a removed name is gone", fs.exists(directory / "b"), False)
    _equal("a directory exists", fs.exists(directory / "c"), True)


def _whole_files(fs: Filesystem, directory: Path) -> None:
    path = directory / "f"
    _equal("no file reads as None", read_whole(fs, path, 10), None)
    write_atomic(fs, path, [b"one", b"two"])
    write_atomic(fs, path, [b"three"])
    _equal("the last whole write is there", read_whole(fs, path, 10), b"three")
    _refused("a file above its limit", lambda: read_whole(fs, path, 4), errno.EFBIG)
    _equal("no temporary file stays", fs.list(directory), ["f"])


def _locks(fs: Filesystem, directory: Path) -> None:
    _equal("a lock that nobody took is free", fs.is_locked(directory / "lock"), False)
    held = fs.lock(directory / "lock")
    _equal("a held lock is seen", fs.is_locked(directory / "lock"), True)
    try:
        fs.lock(directory / "lock").close()
    except LockHeld as error:
        _equal("a held lock names its holder", error.pid, os.getpid())
    else:
        raise AssertionError("a lock was given twice")
    _equal("who is refused frees nothing", fs.is_locked(directory / "lock"), True)
    held.close()
    _equal("a lock that was given back is free", fs.is_locked(directory / "lock"), False)
    fs.lock(directory / "lock").close()


def _mappings(fs: Filesystem, directory: Path) -> None:
    _refused("mapping what is not there", lambda: fs.map_shared(directory / "none", 16, writable=False), errno.ENOENT)
    writer = fs.map_shared(directory / "m", 4096, writable=True)
    _equal("a new mapping is zeros", writer[:4], b"\0\0\0\0")
    writer[:4] = b"abcd"
    reader = fs.map_shared(directory / "m", 4096, writable=False)
    _equal("a reader's mapping shows it", reader[:4], b"abcd")
    writer[:4] = b"efgh"
    _equal("and goes on showing it", reader[:4], b"efgh")


def _watches(fs: Filesystem, directory: Path) -> None:
    watch = fs.watch(directory)
    if watch is None:  # None is right where there is no such watch
        return
    with closing(watch), closing(fs.open(directory / "w", create=True)) as file:
        _equal("silence before a write", watch.has_changed(), False)
        file.write_at(b"x", 0)
        _equal("a write is heard", watch.has_changed(), True)
        _equal("and once", watch.has_changed(), False)


def _room(fs: Filesystem, directory: Path) -> None:
    _refused("the room around what is not there", lambda: fs.usage(directory / "none"), errno.ENOENT)
    usage = fs.usage(directory)
    _equal("used bytes lie within the total", 0 <= usage.used_bytes <= usage.total_bytes, True)
    _equal("there is a total", usage.total_bytes > 0, True)
    fs.open(directory / "f", create=True).close()
    _equal("a file shows the same total", fs.usage(directory / "f").total_bytes > 0, True)


def _witnesses(fs: Filesystem, directory: Path) -> None:
    _refused("the witness of what is not there", lambda: fs.witness(directory / "none"), errno.ENOENT)
    for name in ("original", "copy"):
        with closing(fs.open(directory / name, create=True)) as file:
            file.write_at(b"the same bytes", 0)
    original = fs.witness(directory / "original")
    if original is None:  # None is right where nothing distinguishes a file from its copy
        _equal("no witness of any file", fs.witness(directory / "copy"), None)
        return
    _equal("a file has one name", original.links, 1)
    _equal("one half beside the inode", original.generation is None and original.birth_ns is None, False)
    _equal("a copy has another witness", fs.witness(directory / "copy") == original, False)
    with closing(fs.open(directory / "original")) as file:
        file.write_at(b"other bytes", 0)
        file.sync()
    fs.rename(directory / "original", directory / "renamed")
    fs.sync_directory(directory)
    _equal("it lasts while the file is written and renamed", fs.witness(directory / "renamed"), original)
    fs.remove(directory / "renamed")
    fs.open(directory / "renamed", create=True).close()
    _equal("a new file of its name has another", fs.witness(directory / "renamed") == original, False)


def _holes(fs: Filesystem, directory: Path) -> None:
    with closing(fs.open(directory / "f", create=True)) as file:
        file.write_at(b"x", 0)
        file.truncate(HOLE_BYTES_MAX)
    fs.open(directory / "f", writable=False).close()
    with closing(fs.open(directory / "f")) as file:
        file.truncate(HOLE_BYTES_MAX + (1 << 20))
    _refused("a file that is mostly hole", lambda: fs.open(directory / "f", writable=False), errno.EFBIG)
    with closing(fs.open(directory / "f")) as file:
        file.write_at(b"x", HOLE_BYTES_MAX + (1 << 20))
    _refused("a file with a hole in its middle", lambda: fs.open(directory / "f", writable=False), errno.EFBIG)
    with closing(fs.open(directory / "f")) as file:
        file.truncate(1)
    fs.open(directory / "f", writable=False).close()
    fs.remove(directory / "f")


def _odd_files(fs: Filesystem, directory: Path, intruder: Intruder) -> None:
    other = directory / "other"
    with closing(fs.open(other, create=True)) as file:
        file.write_at(b"another's", 0)
    intruder.place_link(directory / "link", other)
    intruder.place_link(directory / "dangling", directory / "nothing")
    intruder.place_pipe(directory / "pipe")
    fs.make_directory(directory / "directory")
    _equal("a link to a file is read", read_whole(fs, directory / "link", 9), b"another's")
    _equal("and has its size", file_size(fs, directory / "link"), 9)
    _equal("a directory has none", file_size(fs, directory / "directory"), None)
    _equal("nor what is not there", file_size(fs, directory / "none"), None)
    _equal("the room at a pipe is told at once", fs.usage(directory / "pipe").total_bytes > 0, True)
    for name, read, write in (
        ("link", None, errno.ELOOP),
        ("dangling", errno.ELOOP, errno.ELOOP),
        ("pipe", errno.EINVAL, errno.EINVAL),
        ("directory", errno.EISDIR, errno.EISDIR),
    ):
        path = directory / name
        _equal(f"the name of a {name} is taken", fs.exists(path), True)
        if read is not None:
            _refused(f"reading a {name}", partial(fs.open, path, writable=False), read)
            _refused(f"mapping a {name}", partial(fs.map_shared, path, 16, writable=False), read)
        _refused(f"opening a {name} to write", partial(fs.open, path), write)
        _refused(f"making a {name}", partial(fs.open, path, create=True), write)
        _refused(f"locking a {name}", partial(fs.lock, path), write)
        _refused(f"mapping a {name} to write", partial(fs.map_shared, path, 16, writable=True), write)
    _equal("nothing was made where a link leads", fs.exists(directory / "nothing"), False)
    for name in ("link", "dangling"):
        _refused(f"replacing a {name}", partial(write_atomic, fs, directory / name, [b"x"]), errno.ELOOP)
    with closing(fs.open(other, writable=False)) as file:
        _equal("what a link leads to is as it was", file.read_at(99, 0), b"another's")
    for name in ("link", "dangling", "pipe"):
        fs.remove(directory / name)
    _equal("removing a link removes nothing else", fs.exists(other), True)


def _held(fs: Filesystem, directory: Path, intruder: Intruder) -> None:
    home, log = directory / "home", directory / "home" / "log"
    fs.make_directory(log)
    let_go = fs.hold(home)
    with closing(fs.open(log / "f", create=True)) as file:
        intruder.move(home, directory / "moved")
        intruder.place_file(log / "f", b"another's")
        file.write_at(b"mine", 0)
        _equal("an open file below a moved directory has its name", file.named_size(), 4)
        _equal("and not at its whole path", file.named_size(by_path=True), None)
    _equal("what is read is the moved one's", read_whole(fs, log / "f", 99), b"mine")
    write_atomic(fs, log / "g", [b"new"])
    fs.make_directories([home / "other"])
    fs.make_directory(home / "deep" / "er")
    fs.map_shared(log / "m", 16, writable=True)[:1] = b"m"
    fs.lock(home / "lock").close()
    fs.rename(log / "g", home / "h")
    fs.remove(log / "f")
    fs.sync_directory(home)
    made = fs.list(home)
    _equal("the directory itself", {"deep", "h", "lock", "log", "other"} <= set(made), True)
    _equal("a directory in it", fs.list(log), ["m"])
    _equal("a removed name", fs.exists(log / "f"), False)
    _equal("a file has a witness, or none has", fs.witness(home / "h") is None, fs.witness(log / "m") is None)
    _equal("there is room", fs.usage(log).total_bytes > 0, True)
    _refused("what only the other one has", lambda: fs.open(log / "f"), errno.ENOENT)
    let_go()
    _equal("what stands in its place was not touched", fs.list(log), ["f"])
    _equal("nor was its file", read_whole(fs, log / "f", 99), b"another's")
    _equal("all of it is in the moved one", fs.list(directory / "moved"), made)


def _named(fs: Filesystem, directory: Path, intruder: Intruder) -> None:
    path = directory / "f"
    with closing(fs.open(path, create=True)) as file:
        file.write_at(b"12345", 0)
        for by_path in (False, True):
            _equal("a file has its name and size", file.named_size(by_path=by_path), 5)
        _equal("no hole in what was written", file.has_hole(5), False)
        intruder.cut(path, 0)
        _equal("a size that somebody else made", file.named_size(), 0)
        file.write_at(b"12345", 1 << 20)
        _equal("the hole that a cut leaves is seen", file.has_hole((1 << 20) + 5), True)
        intruder.unlink(path)
        _equal("a name that is gone", file.named_size(), None)
        intruder.place_file(path, b"12345")
        _equal("a name that is another's", file.named_size(), None)
        fs.rename(path, directory / "other")
        _equal("which was renamed", file.named_size(), None)


def _equal(promise: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise AssertionError(f"{promise}: {got!r} instead of {wanted!r}")


def _refused(what: str, call: Callable[[], object], code: int) -> None:
    try:
        call()
    except OSError as error:
        _equal(f"{what}: errno", error.errno, code)
        _equal(f"{what}: the error names a file", error.filename is not None, True)
    else:
        raise AssertionError(f"{what} was not refused")
