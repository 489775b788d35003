"""Cutting a log's end off: cut means cut, by ftruncate and fsync of the file and of the directory.

    1000.log | ..... | bad ......     2000.log     3000.log
                     ^ position
    1. the bytes from `position` on are copied to 1000.log.<position>.cut.part, synced, and renamed to .cut
    2. 3000.log, then 2000.log are renamed to .log.cut, newest first: a crash in between leaves contiguous names
    3. 1000.log is truncated and synced, the directory is synced

Nothing is thrown away but indexes (they can be rebuilt). The copy comes first: a disk without room for it refuses the
cut before anything has changed. It is exact to the byte; zeros at its end, mostly space that was allocated ahead, are a
hole in the file and take no room. A cut that was stopped and is done again finds its copy and makes no second one.
"""

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

from pushrep.log.errors import NoRoomToCut
from pushrep.log.seals import remove_seals
from pushrep.log.segment_files import (
    CUT_SUFFIX,
    INDEX_SUFFIX,
    PART_SUFFIX,
    SEAL_SUFFIX,
    TIME_INDEX_SUFFIX,
    free_name,
    segment_path,
    taken_names,
)
from pushrep.log.walk import WINDOW_BYTES
from pushrep.seams import File, Filesystem


def move_aside(
    filesystem: Filesystem, directory: Path, bases: Sequence[int], *, keep: bool = True, suffix: str = CUT_SUFFIX
) -> tuple[list[str], int]:
    """Rename whole segments, newest first, and remove their indexes; (names that hold them now, their bytes).

    Without `keep` the segments are removed: they hold nothing that was ever acknowledged.
    """
    kept, size_bytes = [], 0
    remove_seals(filesystem, directory, bases)
    for base in sorted(bases, reverse=True):
        path = segment_path(directory, base)
        size = _size(filesystem, path)
        size_bytes += size
        if size and keep:
            target = free_name(filesystem, path.with_name(path.name + suffix))
            filesystem.rename(path, target)
            kept.append(target.name)
        else:
            filesystem.remove(path)
        _remove_indexes(filesystem, directory, base)
    if bases:
        filesystem.sync_directory(directory)
    return kept, size_bytes


def remove_segments(filesystem: Filesystem, directory: Path, bases: Sequence[int]) -> None:
    """Remove whole segments below the log start, oldest first: a crash in between leaves contiguous names."""
    for base in sorted(bases):
        path = segment_path(directory, base)
        if filesystem.exists(path):
            filesystem.remove(path)
        _remove_indexes(filesystem, directory, base)
    if bases:
        filesystem.sync_directory(directory)


def keep_range(  # noqa: PLR0913 - a range of a file, and where it goes
    filesystem: Filesystem, path: Path, file: File, position: int, end: int | None = None, *, suffix: str = CUT_SUFFIX
) -> str | None:
    """Copy the bytes [position, end) of `file` (None: to its end) into `<path>.<position><suffix>`; that file's name.

    None if there are no such bytes. It is on disk under its name when this returns, and no other file is replaced.
    Raises NoRoomToCut on a full disk, OSError; nothing of the copy remains then.
    """
    end = file.size() if end is None else end
    if end <= position:
        return None
    path = path.with_name(f"{path.name}.{position}{suffix}")
    target = free_name(filesystem, path)
    for kept in taken_names(filesystem, path):
        if _holds(filesystem, kept, file, position, end):
            return kept.name  # by a cut that was stopped before it came to the log itself
    part = path.with_name(path.name + PART_SUFFIX)
    try:
        _copy(filesystem, part, file, position, end)
    except OSError as error:
        if filesystem.exists(part):
            filesystem.remove(part)
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise NoRoomToCut(path, end - position, error) from error
        raise
    filesystem.rename(part, target)
    filesystem.sync_directory(path.parent)
    return target.name


def _copy(filesystem: Filesystem, target: Path, file: File, position: int, end: int) -> None:
    copy = filesystem.open(target, create=True)
    try:
        copy.truncate(0)
        for start, data in _pieces(file, position, end):
            if data.count(0) != len(data):  # else a hole
                copy.write_at(data.rstrip(b"\0"), start - position)
        copy.truncate(end - position)
        copy.sync()
    finally:
        copy.close()


def _holds(filesystem: Filesystem, kept: Path, file: File, position: int, end: int) -> bool:
    """Whether `kept` has just these bytes."""
    other = filesystem.open(kept, writable=False)
    try:
        return other.size() == end - position and all(
            other.read_at(len(data), start - position) == data for start, data in _pieces(file, position, end)
        )
    finally:
        other.close()


def _pieces(file: File, position: int, end: int) -> Iterator[tuple[int, bytes]]:
    for start in range(position, end, WINDOW_BYTES):
        yield start, file.read_at(min(WINDOW_BYTES, end - start), start)


def _remove_indexes(filesystem: Filesystem, directory: Path, base: int) -> None:
    for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX, SEAL_SUFFIX):
        index = segment_path(directory, base, suffix)
        if filesystem.exists(index):
            filesystem.remove(index)


def _size(filesystem: Filesystem, path: Path) -> int:
    file = filesystem.open(path, writable=False)
    try:
        return file.size()
    finally:
        file.close()
