"""Where does a sealed segment end? Told by its last index entry and a few headers, not by a scan of it.

    .index       ... | rel, pos |           .log   ... | batch | batch | batch | end of the file
                       `------ pos ------------------> header, header, header: the offset behind the last
    .timeindex   ... | time, rel |                     none of them is newer

Opening a log asks this of every segment that it does not scan, so it has to cost as little as opening three files. It
says nothing about the bytes between the headers: a read or `pushrep log verify` checks those. What a sealed segment's
indexes have to end with is known: an entry once more than index_interval_bytes lie behind the last one, and the newest
time. So one that was emptied or cut short gets no answer here, and the walk that follows makes it whole.
"""

import struct
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from pushrep.log.segment import OFFSET_ENTRY, TIME_ENTRY
from pushrep.log.segment_files import INDEX_SUFFIX, TIME_INDEX_SUFFIX, segment_path
from pushrep.log.walk import ScanRange, from_index_entry, scan_headers
from pushrep.seams import File, Filesystem

_HOPS_MAX = 64  # an entry covers 4 KiB or a batch: with more headers than this to read, a scan costs no more


class _Last(NamedTuple):
    """What stands at the end of an index: its newest entry, None if it is empty."""

    entry: tuple[int, int] | None


def sealed_end(filesystem: Filesystem, directory: Path, what: ScanRange, index_interval_bytes: int) -> int | None:
    """The offset behind the last batch of a segment whose indexes reach to its end; None if headers alone don't tell.

    Raises OSError.
    """
    times = _last(filesystem, segment_path(directory, what.base_offset, TIME_INDEX_SUFFIX), TIME_ENTRY)
    offsets = _last(filesystem, segment_path(directory, what.base_offset, INDEX_SUFFIX), OFFSET_ENTRY)
    if times is None or offsets is None:
        return None
    log = filesystem.open(segment_path(directory, what.base_offset), writable=False)
    try:
        begun = from_index_entry(log, what, offsets.entry)
        if offsets.entry is not None and begun is what:
            return None
        return _end(log, begun, times.entry or (-1, -1), index_interval_bytes)
    finally:
        log.close()


def _last(filesystem: Filesystem, path: Path, entry: struct.Struct) -> _Last | None:
    """None if there is no such file, or its end is no whole entry."""
    try:
        file = filesystem.open(path, writable=False)
    except FileNotFoundError:
        return None
    try:
        size = file.size()
        if size == 0:
            return _Last(None)
        data = b"" if size % entry.size else file.read_at(entry.size, size - entry.size)
    finally:
        file.close()
    if len(data) < entry.size:
        return None
    first, second = entry.unpack(data)
    return _Last((first, second))


def _end(log: File, begun: ScanRange, newest: tuple[int, int], interval_bytes: int) -> int | None:
    """From header to header up to the end of the file, as far as a few of them reach."""
    end, before, expected = begun.position, begun.position, begun.first_offset
    for position, _, next_offset, size, _, _, newest_ms in islice(scan_headers(log, begun), _HOPS_MAX):
        if newest_ms > newest[0]:
            return None
        before, end, expected = position, position + size, next_offset
    if end != log.size() or expected is None:
        return None
    # An entry was due for the last one, or the newest time is of a batch that the segment does not hold.
    is_short = before - begun.position > interval_bytes or newest[1] >= expected - begun.base_offset
    return None if is_short else expected
