"""Where does a sealed segment end? Told by its last index entry and a few headers, not by a scan of it.

    .index   ... | rel, pos |               .log   ... | batch | batch | batch | end of the file
                   `---------- pos ------------------> header, header, header: the offset behind the last

Opening a log asks this of every segment that it does not scan, so it has to cost as little as opening two files. It
says nothing about the bytes between the headers: a read or `pushrep log verify` checks those.
"""

from pathlib import Path

from pushrep.log.segment import OFFSET_ENTRY
from pushrep.log.segment_files import INDEX_SUFFIX, TIME_INDEX_SUFFIX, segment_path
from pushrep.records import HEADER_BYTES, BatchHeader, CorruptRecordBatch
from pushrep.seams import File, Filesystem

_HOPS_MAX = 64  # an entry covers 4 KiB or a batch: with more headers than this to read, a scan costs no more


def sealed_end(filesystem: Filesystem, directory: Path, base: int) -> int | None:
    """The offset behind the last batch of a segment that has both indexes; None if headers alone don't tell.

    Raises OSError.
    """
    if not filesystem.exists(segment_path(directory, base, TIME_INDEX_SUFFIX)):
        return None
    try:
        index = filesystem.open(segment_path(directory, base, INDEX_SUFFIX), writable=False)
    except FileNotFoundError:
        return None
    try:
        entries = index.size() // OFFSET_ENTRY.size
        last = index.read_at(OFFSET_ENTRY.size, (entries - 1) * OFFSET_ENTRY.size) if entries else b""
    finally:
        index.close()
    relative, position = OFFSET_ENTRY.unpack(last) if len(last) == OFFSET_ENTRY.size else (None, 0)
    if position < 0:
        return None
    log = filesystem.open(segment_path(directory, base), writable=False)
    try:
        return _hop(log, base, position, relative)
    finally:
        log.close()


def _hop(log: File, base: int, position: int, relative_last: int | None) -> int | None:
    """From header to header up to the end of the file; the first has to end with the offset that the index told."""
    size, expected = log.size(), base
    for _ in range(_HOPS_MAX):
        if position == size:
            return expected
        try:
            header = BatchHeader.parse(log.read_at(HEADER_BYTES, position))
        except CorruptRecordBatch:
            return None
        if header.base_offset < expected or (relative_last is not None and header.last_offset - base != relative_last):
            return None
        position, expected, relative_last = position + header.size_bytes, header.next_offset, None
    return None
