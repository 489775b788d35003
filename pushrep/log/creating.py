"""Making many logs at once: what each needs is written, then synced together, and the directory above once.

    <directory>/<topic>-<n>/                        all made, then <directory> synced once
                   /partition.metadata     sync  ┐
                   /00000000000000000000.*       │  in this order, many logs beside each other (disk_threads.py);
                   /leader-epoch-checkpoint  sync┘  the log's own directory is synced once behind them

Each is then an empty log that was closed clean, and its opening writes nothing. A crash in between leaves some of the
names, from the front: the opening of such a log makes the rest, one sync after the other.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from uuid import UUID

from pushrep.env import Filesystem, write_whole
from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import PARTITION_METADATA_NAME, encode_partition_metadata, write_first_epochs
from pushrep.log.disk_threads import run_beside_each_other
from pushrep.log.segment_files import INDEX_SUFFIX, LOG_SUFFIX, TIME_INDEX_SUFFIX, segment_path
from pushrep.records.leader_epochs import LeaderEpochs


def create_logs(held: LogDirectory, wanted: Mapping[str, UUID]) -> None:
    """Make these logs, each with its id, where nothing is under their names; on disk when this returns.

    Raises OSError: some may be made then, and some in part. LogLocked for one that is open.
    """
    missing = {name: log_id for name, log_id in wanted.items() if held.forget_missing(name)}
    paths = [held.path / name for name in missing]
    held.filesystem.make_directories(paths)
    calls = [partial(_fill, held.filesystem, held.path / name, log_id) for name, log_id in missing.items()]
    run_beside_each_other(held.filesystem, held.clock, held.path, calls)
    held.note_created(missing)


def _fill(filesystem: Filesystem, path: Path, log_id: UUID) -> None:
    write_whole(filesystem, path / PARTITION_METADATA_NAME, encode_partition_metadata(log_id))
    for suffix in (LOG_SUFFIX, TIME_INDEX_SUFFIX, INDEX_SUFFIX):
        filesystem.open(segment_path(path, 0, suffix), create=True).close()
    write_first_epochs(path, LeaderEpochs().assigned(0, 0), filesystem)
    filesystem.sync_directory(path)
