"""Given-up offsets: a reader may have seen what they named, and the log gives them to other records.

    0 ............. log end ............... given up ..............
      records     | given out once, gone  | never given out
                    given out again by the next appends

A replay filter that knows such an offset drops the second record for ever. So whoever takes records off the end of a
log first notes, on disk, how far they were seen; an outbox that opens its logs and finds an end below that number goes
on under another PID (pushrep/outbox/epoch.py) and strikes it out. What "seen" means is decided here and nowhere else:

    records go by                                 the log ended at           noted
    truncate_to, repair's cut                     its end                    always: who reads `written` saw the end
    quarantine, recovery, repair's splice, a      what was seen of it        if the new end lies below: a torn tail that
      directory restored from an older copy                                  was never flushed is nobody's loss
    a directory that was removed                  what was seen of it        always

What was seen of a log: the highest of what its writer published as stable (at any start of the machine: false alarms
cost a PID), its recovery point, its line of the clean marker, and the ends of its derived stores. All of these rise
only behind a sync that succeeded, and readers go no further.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from pushrep.env import Filesystem
from pushrep.log.directory_files import (
    BadCheckpoint,
    CheckpointFile,
    CleanLog,
    decode_checkpoint,
    is_log_name,
    read_bounded,
)
from pushrep.log.published import PublishedState
from pushrep.records.header import OFFSET_MAX

_LOG = logging.getLogger("pushrep.log")


def seen_to(published: PublishedState | None, clean: CleanLog | None, recovery_point: int | None) -> int:
    """The end of what a reader may have seen, by what is noted beside the log; 0 if nothing is."""
    stable = 0 if published is None else published.stable_offset
    return max(stable, 0 if clean is None else clean.end_offset, recovery_point or 0)


def seen_of_removed(
    names: set[str], clean: Mapping[str, CleanLog], recovery_points: Mapping[str, int]
) -> dict[str, int]:
    """{log: the end of what was seen} of logs that files tell of and whose directories are not among `names`."""
    removed = (clean.keys() | recovery_points.keys()) - names
    seen = {name: seen_to(None, clean.get(name), recovery_points.get(name)) for name in removed}
    return {name: end for name, end in seen.items() if end}


def read_given_up(directory: Path, names: set[str], filesystem: Filesystem) -> dict[str, int]:
    """{log: the offset below which it gave offsets up}; a bad file may have told of any, so every log has the highest.

    Other checkpoints count as absent then. This one may not: what it forgets would be given out a second time.
    """
    path = directory / CheckpointFile.GIVEN_UP.value
    try:
        data = read_bounded(path, filesystem)
        return decode_checkpoint(data) if data is not None else {}
    except BadCheckpoint as error:
        _LOG.warning("%s is damaged, so every log here may have given up offsets: %s", path, error)
        return {name: OFFSET_MAX for name in names if is_log_name(name)}
