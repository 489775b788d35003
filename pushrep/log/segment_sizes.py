"""How many bytes of a log lie behind an offset, by the names and sizes of its segments and one look into an index."""

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pushrep.log.indexes import IndexFile
from pushrep.log.segment import OFFSET_ENTRY
from pushrep.log.segment_files import INDEX_SUFFIX, segment_path
from pushrep.seams import Filesystem


def size_of_sealed(filesystem: Filesystem, directory: Path, bases: Sequence[int], offset: int) -> int:
    """Bytes from `offset` on in the segments that begin at `bases` and are not written to any more.

    Too many by an entry of the index at most; a segment that is removed meanwhile counts nothing. Raises OSError.
    """
    first = max(0, bisect_right(bases, offset) - 1)
    size = 0
    for base in bases[first:]:
        with suppress(FileNotFoundError):
            file = filesystem.open(segment_path(directory, base), writable=False)
            try:
                size += file.size()
            finally:
                file.close()
    if bases and offset > bases[first]:
        index = IndexFile(filesystem, segment_path(directory, bases[first], INDEX_SUFFIX), OFFSET_ENTRY)
        entry = index.floor(offset - 1 - bases[first])
        size -= max(0, entry[1]) if entry is not None else 0  # a bad one only makes it less exact
    return max(0, size)
