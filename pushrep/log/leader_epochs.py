"""Which leader epoch wrote which offsets: the list behind truncation by epoch (KIP-101, KIP-279).

    epochs      3        5            6
    offsets  |--------|------------|-------->      an epoch ends where the next one starts, the last at the log's end
             0        40           95       LEO
    entries  (3, 0)   (5, 40)      (6, 95)

    leader-epoch-checkpoint            Kafka's text: version 0, count, then `epoch startOffset` per line
    leader-epoch-checkpoint.crc32c     ours: `<crc of the file> <crc of the file before it>`, 8 hexadecimal digits each

Every line of Kafka's file is an epoch to its reader, so the CRC lies beside it. It is written first and still admits
the file that stands, so that between the two renames either is good. A file whose CRC it does not know counts as
absent, as one that Kafka rewrote does; the batches' headers hold the epochs, and a scan brings the list back.
Invariant: epochs and start offsets both ascend strictly. The value is immutable; a change answers a new one.
"""

import logging
import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import google_crc32c

from pushrep.log.checkpoints import OFFSET_MAX, BadCheckpoint, decimal, read_bounded, split_lines
from pushrep.seams import REAL_FILESYSTEM, Filesystem, write_atomic

_LOG = logging.getLogger("pushrep.log")

LEADER_EPOCHS_NAME = "leader-epoch-checkpoint"
LEADER_EPOCHS_CRC_NAME = "leader-epoch-checkpoint.crc32c"
EPOCH_MAX = 2**31 - 1
UNDEFINED = (-1, -1)
"""What Kafka answers where nothing is known: UNDEFINED_EPOCH, UNDEFINED_EPOCH_OFFSET."""

_VERSION = 0
_CRC_FILE = re.compile(rb"([0-9a-f]{8}) ([0-9a-f]{8})\n")


@dataclass(frozen=True, slots=True)
class LeaderEpochs:
    """(epoch, start offset) of every leader epoch of a log, oldest first. Raises ValueError if they do not ascend."""

    entries: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for epoch, start in self.entries:
            if not (0 <= epoch <= EPOCH_MAX and 0 <= start <= OFFSET_MAX):
                raise ValueError(f"no leader epoch: {epoch} from offset {start}")
        for before, after in pairwise(self.entries):
            if not (before[0] < after[0] and before[1] < after[1]):
                raise ValueError(f"leader epochs must ascend with their offsets: {after} follows {before}")

    @property
    def latest_epoch(self) -> int:
        """The newest epoch, -1 before the first."""
        return self.entries[-1][0] if self.entries else -1

    def epoch_of(self, offset: int) -> int:
        """The epoch that wrote `offset`, -1 if it lies below the first entry."""
        at = bisect_right(self.entries, offset, key=lambda entry: entry[1])
        return self.entries[at - 1][0] if at else -1

    def contradiction(self, offset: int, epoch: int) -> str | None:
        """Why a batch at `offset` can't be of `epoch`, in words; None if it can, or if the list begins behind it."""
        newest = self.entries[-1] if self.entries else (epoch, offset)
        known = newest[0] if offset >= newest[1] else self.epoch_of(offset)
        if known in {epoch, -1}:
            return None
        return f"leader epoch {epoch}, the checkpoint says {known}"

    def end_of(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """(largest epoch at or below `epoch`, where it ends): up to there a follower with that epoch agrees with us.

        The answer of OffsetsForLeaderEpoch: an unknown newer epoch is UNDEFINED; one older than the first entry
        answers itself and the first entry's start (Kafka's LeaderEpochFileCache.endOffsetFor).
        """
        if epoch < 0 or epoch > self.latest_epoch:
            return UNDEFINED
        if epoch == self.latest_epoch:
            return epoch, log_end_offset
        above = bisect_right(self.entries, epoch, key=lambda entry: entry[0])
        return (self.entries[above - 1][0] if above else epoch), self.entries[above][1]

    def assigned(self, epoch: int, start_offset: int) -> Self:
        """With a batch of `epoch` at `start_offset`; the same object if that is no news.

        Entries that contradict it, at or above the epoch or the offset, give way: what was written last is the log.
        """
        if self.entries and epoch == self.latest_epoch and start_offset >= self.entries[-1][1]:
            return self
        kept = (entry for entry in self.entries if entry[0] < epoch and entry[1] < start_offset)
        return type(self)((*kept, (epoch, start_offset)))

    def cut_from(self, end_offset: int) -> Self:
        """Without the epochs that start at or above `end_offset`, for a log that was cut there."""
        count = bisect_left(self.entries, end_offset, key=lambda entry: entry[1])
        return self if count == len(self.entries) else type(self)(self.entries[:count])

    def cut_below(self, start_offset: int) -> Self:
        """Without the epochs that end at or below `start_offset`; the one that holds it then starts there."""
        count = bisect_right(self.entries, start_offset, key=lambda entry: entry[1])
        if count == 0 or (count == 1 and self.entries[0][1] == start_offset):
            return self
        return type(self)(((self.entries[count - 1][0], start_offset), *self.entries[count:]))


def encode_leader_epochs(epochs: LeaderEpochs) -> bytes:
    """The bytes of Kafka's file."""
    lines = "".join(f"{epoch} {start}\n" for epoch, start in epochs.entries)
    return f"{_VERSION}\n{len(epochs.entries)}\n{lines}".encode("ascii")


def decode_leader_epochs(data: bytes) -> LeaderEpochs:
    """The list in Kafka's file. Raises BadCheckpoint."""
    entries = []
    for line in split_lines(data, _VERSION):
        parts = line.split(" ")
        if len(parts) != 2:
            raise BadCheckpoint(f"{line!r} is not: epoch startOffset")
        entries.append((decimal(parts[0], EPOCH_MAX), decimal(parts[1], OFFSET_MAX)))
    try:
        return LeaderEpochs(tuple(entries))
    except ValueError as error:
        raise BadCheckpoint(str(error)) from error


def read_leader_epochs(log_directory: Path, filesystem: Filesystem = REAL_FILESYSTEM) -> LeaderEpochs | None:
    """The list kept with a log; None if it is absent or bad (logged as a warning): the batches' headers tell then."""
    path = log_directory / LEADER_EPOCHS_NAME
    try:
        data = read_bounded(path, filesystem)
        return _decode_known(data, _known_crcs(log_directory, filesystem)) if data is not None else None
    except BadCheckpoint as error:
        _LOG.warning("%s counts as absent: %s", path, error)
        return None


def write_leader_epochs(log_directory: Path, epochs: LeaderEpochs, filesystem: Filesystem = REAL_FILESYSTEM) -> None:
    """Replace the file; on disk under its name when this returns. Raises OSError, the old file then stands."""
    data = encode_leader_epochs(epochs)
    crc = google_crc32c.value(data)
    # A standing file that is bad must stay bad until it is replaced: its CRC is admitted only if it was known.
    standing = _standing_crc(log_directory, filesystem)
    before = standing if standing in _known_crcs(log_directory, filesystem) else crc
    write_atomic(filesystem, log_directory / LEADER_EPOCHS_CRC_NAME, [b"%08x %08x\n" % (crc, before)])
    write_atomic(filesystem, log_directory / LEADER_EPOCHS_NAME, [data])


def _decode_known(data: bytes, crcs: frozenset[int]) -> LeaderEpochs:
    if google_crc32c.value(data) not in crcs:
        raise BadCheckpoint(f"its CRC is not in {LEADER_EPOCHS_CRC_NAME}")
    return decode_leader_epochs(data)


def _standing_crc(log_directory: Path, filesystem: Filesystem) -> int:
    """-1, which is no CRC, if there is no file that could be kept."""
    try:
        data = read_bounded(log_directory / LEADER_EPOCHS_NAME, filesystem)
    except BadCheckpoint:
        return -1
    return int(google_crc32c.value(data)) if data is not None else -1


def _known_crcs(log_directory: Path, filesystem: Filesystem) -> frozenset[int]:
    try:
        data = read_bounded(log_directory / LEADER_EPOCHS_CRC_NAME, filesystem)
    except BadCheckpoint:
        data = None
    match = _CRC_FILE.fullmatch(data or b"")
    return frozenset(int(crc, 16) for crc in match.groups()) if match is not None else frozenset()
