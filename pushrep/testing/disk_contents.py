"""What a simulated disk holds, twice: as processes see it, and as it would be after the power went."""

import mmap
from dataclasses import dataclass, field
from typing import Any


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
        """Its process died: what it had written there stays, and what its remains still write is not seen."""
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
