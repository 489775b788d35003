"""What can be made again from the batches of a log alone: its indexes and its list of leader epochs."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

from pushrep.env import Filesystem
from pushrep.log.config import LogConfig
from pushrep.log.directory_files import read_cleaned_offset
from pushrep.log.indexes import IndexFile
from pushrep.log.segment import OFFSET_ENTRY, TIME_ENTRY, Segment
from pushrep.log.segment_files import INDEX_SUFFIX, REPAIR_SUFFIX, TIME_INDEX_SUFFIX, list_segments, segment_path
from pushrep.log.verify import segment_name
from pushrep.log.walk import CleanEnd, ScanRange, WholeBatch, scan, scan_runs
from pushrep.records.leader_epochs import LeaderEpochs


def rebuild_indexes(
    filesystem: Filesystem, log: Path, bases: Sequence[int] | None = None, config: LogConfig | None = None
) -> list[str]:
    """Make the indexes of these segments (None: of all) anew; the names of the files, which are on disk then.

    For who holds the log's lock. An index ends where bytes are no batch. Raises OSError.
    """
    everything, names = list_segments(filesystem, log), []
    for base in everything if bases is None else bases:
        following = next((other for other in everything if other > base), None)
        segment = Segment(filesystem, log, base, config or LogConfig())
        try:
            _fill(segment, following)
        finally:
            segment.close()
        names += [segment_name(base, INDEX_SUFFIX), segment_name(base, TIME_INDEX_SUFFIX)]
    if names:
        filesystem.sync_directory(log)
    return names


@contextmanager
def new_indexes(
    filesystem: Filesystem, log: Path, base: int, following: int, config: LogConfig
) -> Iterator[Callable[[], None]]:
    """The indexes of a sealed segment, made beside the old ones and on disk; call what is given to put them there.

    Raises OSError; what was not put is removed.
    """
    pairs = [
        (path.with_name(path.name + REPAIR_SUFFIX), path)
        for path in (segment_path(log, base, suffix) for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX))
    ]
    segment = Segment(filesystem, log, base, config)
    try:
        segment.index = IndexFile(filesystem, pairs[0][0], OFFSET_ENTRY)
        segment.time_index = IndexFile(filesystem, pairs[1][0], TIME_ENTRY)
        _fill(segment, following)

        def put() -> None:
            for made, path in pairs:
                filesystem.rename(made, path)
            filesystem.sync_directory(log)

        yield put
    finally:
        segment.close()
        for made, _ in pairs:
            if filesystem.exists(made):
                filesystem.remove(made)


def _fill(segment: Segment, following: int | None) -> None:
    segment.index.keep(0)
    segment.time_index.keep(0)
    for _ in segment.walk(0, following):
        pass
    segment.note_time()
    segment.sync_indexes()


def rebuild_suspect_indexes(filesystem: Filesystem, log: Path, suspects: Collection[int], config: LogConfig) -> None:
    """Make the indexes of those segments anew whose batches are whole: the others' are no worse than their batches.

    For who holds the log's lock and has nothing open. Raises OSError.
    """
    bases = list_segments(filesystem, log)
    for base, following in pairwise([*bases, None]):
        if base is None or base not in suspects:
            continue
        what = ScanRange(
            base_offset=base, end_offset=following, cleaned_offset=partial(read_cleaned_offset, log, filesystem)
        )
        file = filesystem.open(segment_path(log, base), writable=False)
        try:
            *_, end = scan_runs(file, what)
        finally:
            file.close()
        if isinstance(end, CleanEnd):
            rebuild_indexes(filesystem, log, [base], config)


def epochs_of_batches(filesystem: Filesystem, log: Path) -> LeaderEpochs:
    """The leader epochs as the headers of the whole batches tell them."""
    epochs = LeaderEpochs()
    cleaned_offset = read_cleaned_offset(log, filesystem)
    for base in list_segments(filesystem, log):
        file = filesystem.open(segment_path(log, base), writable=False)
        try:
            for step in scan(file, ScanRange(base_offset=base, cleaned_offset=cleaned_offset)):
                if isinstance(step, WholeBatch):
                    epochs = epochs.assigned(max(0, step.batch.header.leader_epoch), step.batch.header.base_offset)
        finally:
            file.close()
    return epochs
