"""What a log with replicas lost of what it held: known when it is opened, noted until push has filled it again.

    | records ... | x damaged, or gone |                 unfilled: the end of what was known to be there
                  ^ the log ends here  ^ high watermark checkpoint; with damage, whatever was told as on disk

The caller notes it (promises.json): until the log ends there again its member counts for nothing. Of what a scan would
find behind damage nothing is believed that was not known to be on disk.
"""

from typing import NamedTuple

from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import CheckpointFile
from pushrep.log.segment_log import SegmentLog


class HeldTo(NamedTuple):
    """What is noted beside a log that is not open: its checkpoint, and the end of what its readers were told."""

    high_watermark: int
    seen: int


def held_to(directory: LogDirectory, name: str) -> HeldTo:
    """Ask before the log is opened: opening lowers what it does not find."""
    return HeldTo(directory.checkpointed(CheckpointFile.HIGH_WATERMARK, name) or 0, directory.seen_to(name))


def lost_behind(log: SegmentLog, held: HeldTo) -> int | None:
    """Up to where a log that was just opened held records that it lost; None if it lost none."""
    known = held.high_watermark
    if log.damaged_from is not None:
        known = max(known, held.seen, log.log_end_offset + 1)
    return known if known > log.log_end_offset else None
