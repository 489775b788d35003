"""Cutting a log's end off: cut means cut, by ftruncate and fsync of the file and of the directory.

    1000.log | ..... | bad ......     2000.log     3000.log
                     ^ position
    1. 3000.log, then 2000.log are renamed to .log.cut, newest first: a crash in between leaves contiguous names
    2. the bytes from `position` on are copied to 1000.log.<position>.cut and synced
    3. 1000.log is truncated and synced, the directory is synced

Nothing is thrown away but zeros and indexes (they can be rebuilt).
"""

from collections.abc import Sequence
from pathlib import Path

from pushrep.log.scan import WINDOW_BYTES
from pushrep.log.segment_files import (
    CUT_SUFFIX,
    INDEX_SUFFIX,
    TIME_INDEX_SUFFIX,
    free_name,
    segment_path,
)
from pushrep.seams import File, Filesystem


def move_aside(
    filesystem: Filesystem, directory: Path, bases: Sequence[int], *, keep: bool = True, suffix: str = CUT_SUFFIX
) -> tuple[list[str], int]:
    """Rename whole segments, newest first, and remove their indexes; (names that hold them now, their bytes).

    Without `keep` the segments are removed: they hold nothing that was ever acknowledged.
    """
    kept, size_bytes = [], 0
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


def keep_tail(filesystem: Filesystem, path: Path, file: File, position: int, *, suffix: str = CUT_SUFFIX) -> str | None:
    """Copy the bytes from `position` on, but for zeros at their end, into a `.cut` file; its name, None if all zero."""
    end = _end_of_data(file, position)
    if end == position:
        return None
    target = free_name(filesystem, path.with_name(f"{path.name}.{position}{suffix}"))
    kept = filesystem.open(target, create=True)
    try:
        for start in range(position, end, WINDOW_BYTES):
            kept.write_at(file.read_at(min(WINDOW_BYTES, end - start), start), start - position)
        kept.sync()
    finally:
        kept.close()
    filesystem.sync_directory(path.parent)
    return target.name


def _remove_indexes(filesystem: Filesystem, directory: Path, base: int) -> None:
    for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX):
        index = segment_path(directory, base, suffix)
        if filesystem.exists(index):
            filesystem.remove(index)


def _end_of_data(file: File, position: int) -> int:
    end = file.size()
    while end > position:
        start = max(position, end - WINDOW_BYTES)
        data = file.read_at(end - start, start).rstrip(b"\0")
        if data:
            return start + len(data)
        end = start
    return end


def _size(filesystem: Filesystem, path: Path) -> int:
    file = filesystem.open(path, writable=False)
    try:
        return file.size()
    finally:
        file.close()
