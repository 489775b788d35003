"""A disk in memory that forgets what was never synced: `Filesystem` for tests, every fault from one seed.

      write_at ──▶ cache ──(sync)──▶ disk          what read_at sees is the cache
      create, rename, remove ──▶ names ──(sync_directory)──▶ names on disk

    lose_power()   unsynced writes: any of them, in any order, torn at any byte; of each directory's unsynced
                   name changes a prefix in order (journalling file systems keep that order)
    crash()        the process only: the cache stays, shared mappings too; locks are freed, open files are dead
    power_after(n) the n-th next call raises PowerLost, and every later one, until lose_power() is called
    fail_sync()    the next sync raises EIO, and what it should have written never reaches the disk, although
                   reads go on showing it: so Linux behaves (Rebello et al., USENIX ATC 2020)
    capacity       bytes in all files together, without holes; a write above it stores what fits, then raises
                   `full_errno`: ENOSPC, or EDQUOT where a quota is what is used up; `usage` shows it
    read_only      the file system was remounted under its writers: whatever would change it raises EROFS
    sync_ms        what a sync costs on the simulated clock
    copy(a, b)     what `cp -a a b` makes: other files with the same bytes
    move(a, b)     what `mv a b` by somebody else does: whoever holds a directory of it goes on there
    place_file     what somebody else writes: another file, also where one of ours stands
    cut(a, size)   what `truncate` by somebody else does
    has_witnesses  False: nothing distinguishes a file from its copy, as with FUSE
    syncs_whole    True: `whole_sync` is there; else every file and directory is synced by name, so that one that was
                   forgotten shows

    place_link, place_pipe    what somebody else has put under a name of ours

Left out: sectors (a write is torn at any byte, which includes them), order between directories, permissions, links to
directories, and mappings other than a shared one that dies with the power.

`SimulatedClock` stands until it is advanced.
"""

import errno
import mmap
import os
import random
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pushrep.env import DiskUsage, File, FileWitness, LockHeld
from pushrep.env.filesystem import (
    HOLE_BYTES_MAX,
    IS_DIRECTORY,
    IS_LINK,
    IS_NO_FILE,
    LEADS_NOWHERE,
    Buffer,
    mostly_hole,
)
from pushrep.log.directory import _OPEN


class SimulatedClock:
    """Both of `Clock`'s times; `advance` moves them, `set_wall` lets the wall clock jump, as real ones do."""

    def __init__(self, wall_ms: int = 1_700_000_000_000) -> None:
        self._wall_ms, self._monotonic_ms = wall_ms, 0

    def wall_ms(self) -> int:
        return self._wall_ms

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    def boot_ms(self) -> int:
        return self._monotonic_ms

    def advance(self, ms: int) -> None:
        """Let `ms` pass on both clocks."""
        if ms < 0:
            raise ValueError(f"time does not go back: advance({ms})")
        self._wall_ms += ms
        self._monotonic_ms += ms

    def set_wall(self, wall_ms: int) -> None:
        """Set the wall clock, back too; durations do not see it."""
        self._wall_ms = wall_ms


@dataclass(slots=True)
class Write:
    """Bytes at a position; or, with `size`, a new length of the file."""

    position: int
    data: bytes
    size: int | None = None

    def apply(self, contents: bytearray) -> None:
        """Do it to these contents; a gap before `position` becomes zeros."""
        if self.size is not None:
            _resize(contents, self.size)
            return
        if len(contents) < self.position:
            _resize(contents, self.position)
        contents[self.position : self.position + len(self.data)] = self.data


@dataclass(slots=True, eq=False)
class Inode:
    """One file's contents, twice: as the cache shows them and as the disk holds them."""

    cache: bytearray = field(default_factory=bytearray)
    disk: bytearray = field(default_factory=bytearray)
    unsynced: list[Write] = field(default_factory=list)
    mapping: mmap.mmap | None = None
    locked_by: Any = None  # the open file that has it
    hole_bytes: int = 0  # what `truncate` grew it by takes no room
    generation: int = 0  # no two files ever have the same
    leads_to: str | None = None  # of a symbolic link, as a whole path
    is_pipe: bool = False
    modified_ms: int = 0  # by the wall clock

    def write(self, write: Write) -> None:
        """Into the cache; the disk has it after `sync`."""
        write.apply(self.cache)
        self.unsynced.append(write)

    def write_tracking_holes(self, write: Write, *, hole: bool) -> None:
        """`write`, and what it does to the holes; `hole`: a growth that takes no room."""
        filled, before = self.filled_by(write), len(self.cache)
        self.write(write)
        growth = len(self.cache) - before
        self.hole_bytes = max(0, self.hole_bytes + growth) if hole or growth < 0 else self.hole_bytes - filled

    def filled_by(self, write: Write) -> int:
        """How many bytes of holes it fills, which need room: a write before the end is taken for one into a hole."""
        behind_the_end = max(0, write.position + len(write.data) - len(self.cache))
        return min(self.hole_bytes, max(0, len(write.data) - behind_the_end))

    def keep_mapping(self) -> None:
        """Its process died: what it had written to the mapping stays; later writes through it are not seen."""
        if self.mapping is not None:
            left, self.mapping = self.mapping, mmap.mmap(-1, len(self.mapping))
            self.mapping[:] = left[:]

    def sync(self) -> None:
        """Every write so far reaches the disk."""
        for write in self.unsynced:
            write.apply(self.disk)
        self.unsynced.clear()


@dataclass(slots=True)
class DirectoryEntries:
    """One directory: name to inode, as processes see it and as the disk has it, and the changes between the two."""

    now: dict[str, Inode] = field(default_factory=dict)
    disk: dict[str, Inode] = field(default_factory=dict)
    unsynced: list[dict[str, Inode | None]] = field(default_factory=list)  # one atomic change each; None removes

    def change(self, change: dict[str, Inode | None]) -> None:
        """One atomic change for processes; None removes a name."""
        _apply_names(self.now, change)
        self.unsynced.append(change)

    def keep(self, count: int) -> None:
        """The first `count` unsynced changes reached the disk."""
        for change in self.unsynced[:count]:
            _apply_names(self.disk, change)
        del self.unsynced[:count]


def _resize(contents: bytearray, size: int) -> None:
    if size < len(contents):
        del contents[size:]
    else:
        contents.extend(bytes(size - len(contents)))


def _apply_names(names: dict[str, Inode], change: dict[str, Inode | None]) -> None:
    for name, inode in change.items():
        if inode is None:
            names.pop(name, None)
    names.update({name: inode for name, inode in change.items() if inode is not None})


_ENDLESS_BYTES = 1 << 62  # what `usage` says of a disk without `capacity_bytes`


class PowerLost(Exception):
    """The simulated machine is off; nothing can be read or written until `SimulatedDisk.lose_power` was called."""


class SimulatedDisk:
    """A `Filesystem` whose every fault comes from `seed`; see the file's map for what it does and leaves out."""

    def __init__(self, seed: int = 0, *, clock: SimulatedClock | None = None, sync_ms: int = 0) -> None:
        self.seed, self.sync_ms = seed, sync_ms
        self.clock = clock or SimulatedClock()
        self.capacity_bytes: int | None = None
        self.full_errno = errno.ENOSPC
        self.read_only = False
        self.has_witnesses = True
        self.syncs_whole = False
        self.steps = 0
        self._random = random.Random(seed)
        self._directories: dict[str, DirectoryEntries] = {"/": DirectoryEntries()}  # by text: a Path takes long to hash
        self.power_at: int | None = None
        self.interrupt_at: int | None = None
        """The step at which the power goes; None: it stays. See `power_after`."""
        self.is_off = False
        """Every call raises PowerLost: set when the power goes, or by a test for what runs on in an ended process."""
        self._failing_syncs = self._good_syncs = 0
        self._failing_writes = 0
        self._boot = 0
        self._made_files = 0
        self._held: set[str] = set()
        self._moved: dict[str, str] = {}  # where a held directory is now

    # ---- faults

    def power_after(self, steps: int) -> None:
        """Let the power go at the `steps`-th call from now; a write or sync that it hits may be done in part."""
        self.power_at = self.steps + steps

    def interrupt_after(self, steps: int) -> None:
        """Ctrl-C comes as the `steps`-th call from now begins."""
        self.interrupt_at = self.steps + steps

    def lose_power(self) -> None:
        """Power off and on: what was not synced survives in part, by the seed; open files and mappings are dead."""
        for names in self._directories.values():
            names.keep(self._random.randint(0, len(names.unsynced)))
            names.unsynced.clear()
            names.now = dict(names.disk)
        for inode in {id(i): i for names in self._directories.values() for i in names.now.values()}.values():
            self._tear(inode)
            inode.mapping = None
        self.crash()
        self.power_at, self.is_off = None, False
        self._failing_syncs = self._failing_writes = 0

    def crash(self) -> None:
        """End the process: locks are freed and open files dead, but the machine keeps every write."""
        self._boot += 1
        self._held.clear()
        self._moved.clear()
        _OPEN.after_fork_in_child()  # else logs would close each other's files in the end
        for names in self._directories.values():
            for inode in names.now.values():
                inode.locked_by = None
                inode.keep_mapping()

    def fail_sync(self, count: int = 1, *, after: int = 0) -> None:
        """After `after` more syncs of files the next `count` raise EIO and lose what they should have written."""
        self._failing_syncs, self._good_syncs = count, after

    def fail_write(self, count: int = 1) -> None:
        """The next `count` writes raise EIO after storing a part by the seed."""
        self._failing_writes = count

    def flip_bit(self, path: Path, bit: int) -> None:
        """Damage a file on the disk and in the cache: bit 0 is the highest of byte 0."""
        inode = self._inode(path)
        for contents in (inode.cache, inode.disk):
            if bit // 8 < len(contents):
                contents[bit // 8] ^= 0x80 >> (bit % 8)

    def names(self, directory: Path, *, synced: bool = False) -> list[str] | None:
        """A directory's files as processes see them; `synced`: as the disk has them. None: there is no directory."""
        entries = self._directories.get(str(directory))
        return None if entries is None else list(entries.disk if synced else entries.now)

    def contents(self, path: Path, *, synced: bool = False) -> bytes:
        """A file's bytes as processes see them; `synced`: those that the disk holds, whether or not its directory was
        synced. Raises FileNotFoundError.
        """
        inode = self._inode(path)
        return bytes(inode.disk if synced else inode.cache)

    def copy(self, source: Path, target: Path) -> None:
        """A whole directory again below another name, on disk, with every file as processes see it now."""
        below = {path: names for path, names in self._directories.items() if f"{path}/".startswith(f"{source}/")}
        for path, names in below.items():
            copied = DirectoryEntries()
            for name, inode in names.now.items():
                copied.now[name] = other = self._new_inode()
                other.cache = bytearray(inode.cache if inode.mapping is None else inode.mapping[: len(inode.cache)])
                other.disk, other.hole_bytes = bytearray(other.cache), inode.hole_bytes
            copied.disk = dict(copied.now)
            self._directories[str(target) + path[len(str(source)) :]] = copied

    def move(self, source: Path, target: Path) -> None:
        """A directory gets another path, at once on disk."""
        old, new = str(source), str(target)
        for path in [path for path in self._directories if f"{path}/".startswith(f"{old}/")]:
            self._directories[new + path[len(old) :]] = self._directories.pop(path)
        for path in self._held:
            if f"{(now := self._moved.get(path, path))}/".startswith(f"{old}/"):
                self._moved[path] = new + now[len(old) :]

    def place_file(self, path: Path, contents: bytes) -> None:
        """Another file under this name, at once on disk, with its directories."""
        for parent in path.parents:
            self._directories.setdefault(str(parent), DirectoryEntries())
        inode = self._new_inode()
        inode.cache, inode.disk = bytearray(contents), bytearray(contents)
        self._place_odd(path, inode)

    def cut(self, path: Path, size: int) -> None:
        """Cut or grow the file, at once on disk."""
        inode = self._inode(path)
        for contents in (inode.cache, inode.disk):
            _resize(contents, size)
        inode.unsynced.clear()
        inode.hole_bytes = 0

    def unlink(self, path: Path) -> None:
        """Somebody else removes the name, at once on disk."""
        self._place_odd(path, None)

    def remove_tree(self, directory: Path) -> None:
        """As `rm -r` and a sync."""
        for path in [path for path in self._directories if f"{path}/".startswith(f"{directory}/")]:
            del self._directories[path]

    def place_link(self, path: Path, target: Path) -> None:
        """A symbolic link to `target`, which may be missing; at once on disk."""
        self._place_odd(path, Inode(leads_to=str(target)))

    def place_pipe(self, path: Path) -> None:
        """A named pipe: who opened one for reading would wait; at once on disk."""
        self._place_odd(path, Inode(is_pipe=True))

    def _place_odd(self, path: Path, inode: Inode | None) -> None:
        names, name = self._place(path)
        names.change({name: inode})
        names.keep(len(names.unsynced))

    # ---- Filesystem

    def hold(self, directory: Path) -> Callable[[], None]:
        self._held.add(str(directory))

        def let_go() -> None:
            self._held.discard(str(directory))
            self._moved.pop(str(directory), None)

        return let_go

    def open(self, path: Path, *, create: bool = False, writable: bool = True) -> File:
        self._step()
        asked, path = path, self._where(path)
        if self.read_only and (create or writable):
            raise _error(errno.EROFS, path)
        names, name = self._place(path)
        inode = names.now.get(name)
        if inode is not None and inode.leads_to is not None:
            if create or writable:
                raise OSError(errno.ELOOP, IS_LINK, str(path))
            names, name = self._place(Path(inode.leads_to))
            inode = names.now.get(name)
            if inode is None:
                raise OSError(errno.ELOOP, LEADS_NOWHERE, str(path))
        if inode is None:
            if str(path) in self._directories:
                raise OSError(errno.EISDIR, IS_DIRECTORY, str(path))
            if not create:
                raise _error(errno.ENOENT, path)
            inode = self._new_inode()
            names.change({name: inode})
        if inode.is_pipe:
            raise OSError(errno.EINVAL, IS_NO_FILE, str(path))
        if inode.hole_bytes >= HOLE_BYTES_MAX and not writable:
            raise OSError(errno.EFBIG, mostly_hole(len(inode.cache), inode.hole_bytes), str(path))
        return _SimulatedFile(self, inode, asked, writable=writable)

    def list(self, directory: Path) -> list[str]:
        self._step()
        directory = self._where(directory)
        names = self._directories.get(str(directory))
        if names is None:
            raise _error(errno.ENOENT, directory)
        below = [name for parent, name in map(_split, self._directories) if parent == str(directory) and name]
        return sorted([*names.now, *below])

    def exists(self, path: Path) -> bool:
        self._step()
        path = self._where(path)
        parent, name = _split(str(path))
        return str(path) in self._directories or (parent in self._directories and name in self._directories[parent].now)

    def make_directory(self, path: Path) -> None:
        self._step()
        path = self._where(path)
        if str(path) in self._directories:
            return
        self._refuse_read_only(path)
        for missing in (path, *path.parents):
            parent, name = _split(str(missing))
            if parent in self._directories and name in self._directories[parent].now:
                raise _error(errno.EEXIST, missing)
            self._directories.setdefault(str(missing), DirectoryEntries())

    def make_directories(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self.make_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        source, target = self._where(source), self._where(target)
        inode = self._inode(source)
        self._refuse_read_only(source)
        (old_names, old), (new_names, new) = self._place(source), self._place(target)
        if new in new_names.now and new_names.now[new].leads_to is not None:
            raise OSError(errno.ELOOP, IS_LINK, str(target))
        if old_names is new_names:
            old_names.change({old: None, new: inode})
            return
        new_names.change({new: inode})
        old_names.change({old: None})

    def remove(self, path: Path) -> None:
        self._step()
        path = self._where(path)
        self._inode(path)
        self._refuse_read_only(path)
        names, name = self._place(path)
        names.change({name: None})

    def sync_directory(self, directory: Path) -> None:
        self._step()
        directory = self._where(directory)
        names = self._directories.get(str(directory))
        if names is None:
            raise _error(errno.ENOENT, directory)
        if names.unsynced:
            self._refuse_read_only(directory)
        names.keep(len(names.unsynced))

    def whole_sync(self, directory: Path) -> "_SimulatedWholeSync | None":
        self._step()
        return _SimulatedWholeSync(self) if self.syncs_whole else None

    def sync_all(self) -> None:
        """Every file, then every name, one after the other: the power may go in between."""
        inodes = {id(one): one for names in self._directories.values() for one in names.now.values()}
        for inode in inodes.values():
            if inode.unsynced:
                self._syncing(inode)
        for directory in list(self._directories):
            self.sync_directory(Path(directory))

    def lock(self, path: Path) -> File:
        file = self.open(path, create=True)
        assert isinstance(file, _SimulatedFile)
        with ExitStack() as undone:
            undone.callback(file.close)
            if file.inode.locked_by is not None:
                text = bytes(file.inode.cache).strip()
                raise LockHeld(path, int(text) if text.isdigit() else None)
            pid = b"%10d\n" % os.getpid()  # one length: a pid must not change what a seed draws
            file.write_at(pid, 0)  # over the old one, as the real one does: a full disk can be opened
            file.truncate(len(pid))
            undone.pop_all()
        file.inode.locked_by = file
        return file

    def is_locked(self, path: Path) -> bool:
        return self.exists(path) and self._inode(path).locked_by is not None

    def map_shared(self, path: Path, size: int, *, writable: bool) -> mmap.mmap:
        file = self.open(path, create=writable, writable=writable)
        assert isinstance(file, _SimulatedFile)
        inode = file.inode
        if writable:
            file.allocate(size)
        elif file.size() < size:
            raise ValueError("mmap length is greater than file size")
        if inode.mapping is None or len(inode.mapping) < size:
            grown = mmap.mmap(-1, size)
            kept = inode.mapping[:] if inode.mapping is not None else bytes(inode.cache[:size])
            grown[: len(kept)] = kept
            inode.mapping = grown
        return inode.mapping

    def set_modified(self, path: Path, modified_ms: int) -> None:
        """What `touch` does."""
        self._inode(path).modified_ms = modified_ms

    def watch(self, directory: Path) -> None:
        """None: writes are not reported."""

    def usage(self, path: Path) -> DiskUsage:
        self._step()
        path = self._where(path)
        if str(path) not in self._directories:
            self._inode(path)
        return DiskUsage(self.used_bytes(), _ENDLESS_BYTES if self.capacity_bytes is None else self.capacity_bytes)

    def witness(self, path: Path) -> FileWitness | None:
        self._step()
        path = self._where(path)
        inode = self._inode(path)
        # Numbers come again soon, as they do on real ones: only the generation differs.
        return FileWitness(inode.generation % 3, inode.generation, None) if self.has_witnesses else None

    # ---- inside

    def _where(self, path: Path) -> Path:
        """Where a path leads now: a directory that is held may have been moved."""
        for held, now in self._moved.items():
            if f"{path}/".startswith(f"{held}/"):
                return Path(now + str(path)[len(held) :])
        return path

    def _new_inode(self) -> Inode:
        self._made_files += 1
        return Inode(generation=self._made_files, modified_ms=self.clock.wall_ms())

    def _step(self) -> None:
        if self.is_off:
            raise PowerLost
        self.steps += 1
        if self.steps == self.interrupt_at:
            raise KeyboardInterrupt
        if self.power_at is not None and self.steps >= self.power_at:
            self.is_off = True
            raise PowerLost

    def _refuse_read_only(self, path: Path) -> None:
        if self.read_only:
            raise _error(errno.EROFS, path)

    def _place(self, path: Path) -> tuple[DirectoryEntries, str]:
        """(the directory's names, the name in it)."""
        parent, name = _split(str(path))
        try:
            return self._directories[parent], name
        except KeyError:
            raise _error(errno.ENOENT, path.parent) from None

    def _inode(self, path: Path) -> Inode:
        names, name = self._place(path)
        try:
            return names.now[name]
        except KeyError:
            raise _error(errno.ENOENT, path) from None

    def used_bytes(self) -> int:
        """Of `capacity_bytes`: all files as processes see them, without holes."""
        inodes = {id(i): i for names in self._directories.values() for i in names.now.values()}
        return sum(len(inode.cache) - inode.hole_bytes for inode in inodes.values())

    def _tear(self, inode: Inode) -> None:
        """What an unsynced file looks like after the power came back: any subset of its writes, any order, torn."""
        survivors = [write for write in inode.unsynced if self._random.random() < 0.5]
        self._random.shuffle(survivors)
        for write in survivors:
            if write.size is None and self._random.random() < 0.5:
                write = Write(write.position, write.data[: self._random.randint(0, len(write.data))])  # noqa: PLW2901
            write.apply(inode.disk)
        inode.unsynced.clear()
        inode.cache = bytearray(inode.disk)
        inode.hole_bytes = min(inode.hole_bytes, len(inode.cache))

    def _writing(self, inode: Inode, write: Write, *, hole: bool = False) -> None:
        """One write or change of length, with whatever fault is due."""
        try:
            self._step()
        except PowerLost:
            if self._random.random() < 0.5:
                inode.write_tracking_holes(write, hole=hole)
            raise
        if self.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if self._failing_writes:
            self._failing_writes -= 1
            if write.data:
                inode.write(Write(write.position, write.data[: self._random.randrange(len(write.data))]))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        end = write.size if write.size is not None else write.position + len(write.data)
        growth = end - len(inode.cache)
        room = None if hole else self._room_bytes()
        if room is not None and growth > room:
            fits = max(0, len(inode.cache) + room - write.position)
            if write.data and fits:
                inode.write(Write(write.position, write.data[:fits]))
            raise OSError(self.full_errno, os.strerror(self.full_errno))
        if room is not None and max(growth, 0) + inode.filled_by(write) > room:
            raise OSError(self.full_errno, os.strerror(self.full_errno))
        inode.write_tracking_holes(write, hole=hole)
        inode.modified_ms = self.clock.wall_ms()

    def _room_bytes(self) -> int | None:
        return None if self.capacity_bytes is None else max(0, self.capacity_bytes - self.used_bytes())

    def _syncing(self, inode: Inode) -> None:
        self._step()
        if self.read_only and inode.unsynced:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        self.clock.advance(self.sync_ms)
        if self._failing_syncs and self._good_syncs:
            self._good_syncs -= 1
        elif self._failing_syncs:
            self._failing_syncs -= 1
            inode.unsynced.clear()  # the pages count as clean from now on, and the disk never saw them
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        inode.sync()


class _SimulatedWholeSync:
    """See `WholeSync`."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk

    def sync(self) -> None:
        self._disk.sync_all()

    def close(self) -> None:
        """There is nothing to give back."""


class _SimulatedFile:
    """An open file; dead after a crash, as a descriptor is."""

    __slots__ = ("_boot", "_closed", "_disk", "_writable", "inode", "path")

    def __init__(self, disk: SimulatedDisk, inode: Inode, path: Path, *, writable: bool) -> None:
        self._disk, self.inode, self.path, self._writable = disk, inode, path, writable
        self._boot, self._closed = disk._boot, False

    def _alive(self, *, writing: bool = False) -> Self:
        if self._closed or self._boot != self._disk._boot or (writing and not self._writable):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(self.path))
        return self

    def read_at(self, size: int, position: int) -> bytes:
        self._alive()._disk._step()
        if position < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return bytes(self.inode.cache[position : position + size])

    def write_at(self, data: Buffer, position: int) -> None:
        self._alive(writing=True)._disk._writing(self.inode, Write(position, bytes(data)))

    def size(self) -> int:
        self._alive()._disk._step()
        return len(self.inode.cache)

    def modified_ms(self) -> int:
        return self._alive().inode.modified_ms

    def named_size(self, *, by_path: bool = False) -> int | None:
        if self._disk.is_off:
            raise PowerLost
        names, name = self._disk._place(self.path if by_path else self._disk._where(self.path))
        return len(self.inode.cache) if names.now.get(name) is self.inode else None

    def has_hole(self, size: int) -> bool:
        return len(self.inode.cache) < size or bytes(64) in self.inode.cache[:size]

    def truncate(self, size: int) -> None:
        self._alive(writing=True)._disk._writing(self.inode, Write(0, b"", size), hole=size > len(self.inode.cache))

    def allocate(self, size: int) -> None:
        if size > len(self._alive(writing=True).inode.cache):
            self._disk._writing(self.inode, Write(0, b"", size))

    def sync(self) -> None:
        self._alive()._disk._syncing(self.inode)

    def drop_cache(self) -> None:
        self._alive()._disk._step()
        if not self.inode.unsynced:  # dirty pages stay, as with posix_fadvise
            self.inode.cache = bytearray(self.inode.disk)

    def fileno(self) -> int:
        raise OSError(errno.ENOTSUP, "a simulated file has no descriptor", str(self.path))

    def close(self) -> None:
        self._closed = True
        if self.inode.locked_by is self:
            self.inode.locked_by = None


def _split(path: str) -> tuple[str, str]:
    """(parent, name) of an absolute path; the root's name is empty."""
    at = path.rfind("/")
    return path[:at] or "/", path[at + 1 :]


def _error(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), str(path))  # Python makes it FileNotFoundError and so on, by the code
