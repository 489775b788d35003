"""How new is the newest record of a sealed segment? By its time index, as far as the batches bear it out.

    .timeindex   ... | time, rel |        the newest entry is believed only if the batch that ends with that offset has
    .log         ...... | batch | .. |    just that time; what stands behind it is read, so an index that lost its last
                        ^ read from here  entries is made good; else the whole segment is read

A flipped bit in an index must not make records old: retention deletes by this answer.
"""

from functools import partial
from pathlib import Path

from pushrep.env import File, Filesystem
from pushrep.log.directory_files import read_cleaned_offset
from pushrep.log.errors import CorruptBatch
from pushrep.log.indexes import IndexFile
from pushrep.log.retention import SealedSegment
from pushrep.log.segment import OFFSET_ENTRY, TIME_ENTRY
from pushrep.log.segment_files import INDEX_SUFFIX, TIME_INDEX_SUFFIX, segment_path
from pushrep.log.walk import CleanEnd, ScanRange, WholeBatch, from_index_entry, scan


def newest_timestamp_ms(filesystem: Filesystem, directory: Path, segment: SealedSegment) -> int:
    """The newest timestamp in the segment, -1 if it has none. Raises CorruptBatch where it can't be read, OSError."""
    path = segment_path(directory, segment.base_offset)
    file = filesystem.open(path, writable=False)
    try:
        newest = -1
        for step in scan(file, _believed(filesystem, directory, segment, file)):
            if isinstance(step, WholeBatch):
                newest = max(newest, step.batch.header.max_timestamp_ms)
            elif not isinstance(step, CleanEnd):
                raise CorruptBatch(step.next_offset, path, step.position, step.reason)
        return newest
    finally:
        file.close()


def _believed(filesystem: Filesystem, directory: Path, segment: SealedSegment, file: File) -> ScanRange:
    """From the batch of the newest time entry on, if it is what the entry says; else the whole segment."""
    base = segment.base_offset
    cleaned_offset = partial(read_cleaned_offset, directory, filesystem)
    whole = ScanRange(base_offset=base, end_offset=segment.end_offset, cleaned_offset=cleaned_offset)
    time = IndexFile(filesystem, segment_path(directory, base, TIME_INDEX_SUFFIX), TIME_ENTRY).last
    if time is None:
        return whole
    index = IndexFile(filesystem, segment_path(directory, base, INDEX_SUFFIX), OFFSET_ENTRY)
    for step in scan(file, from_index_entry(file, whole, index.floor(time[1]))):
        if not isinstance(step, WholeBatch):
            break
        header = step.batch.header
        if header.last_offset - base < time[1]:
            continue
        if header.base_offset - base <= time[1] and header.max_timestamp_ms == time[0]:  # some brokers name the record
            return whole._replace(position=step.position, next_offset=header.base_offset)
        break
    return whole
