"""The file of a log's leader epochs; the list itself is `pushrep.records.leader_epochs`.

    leader-epoch-checkpoint            Kafka's text: version 0, count, then `epoch startOffset` per line
    leader-epoch-checkpoint.crc32c     ours: `<crc of the file> <crc of the file before it>`, 8 hexadecimal digits each

Every line of Kafka's file is an epoch to its reader, so the CRC lies beside it. It is written first and still admits
the file that stands, so that between the two renames either is good. A file whose CRC it does not know counts as
absent, as one that Kafka rewrote does; the batches' headers hold the epochs, and a scan brings the list back.
"""

import logging
import re
from pathlib import Path

import google_crc32c

from pushrep.log.checkpoints import OFFSET_MAX, BadCheckpoint, decimal, read_bounded, split_lines
from pushrep.records.leader_epochs import EPOCH_MAX, UNDEFINED, LeaderEpochs
from pushrep.seams import REAL_FILESYSTEM, Filesystem, write_atomic, write_whole

__all__ = [
    "EPOCH_MAX",
    "LEADER_EPOCHS_CRC_NAME",
    "LEADER_EPOCHS_NAME",
    "UNDEFINED",
    "LeaderEpochs",
    "decode_leader_epochs",
    "encode_leader_epochs",
    "read_leader_epochs",
    "write_leader_epochs",
]

_LOG = logging.getLogger("pushrep.log")

LEADER_EPOCHS_NAME = "leader-epoch-checkpoint"
LEADER_EPOCHS_CRC_NAME = "leader-epoch-checkpoint.crc32c"

_VERSION = 0
_CRC_FILE = re.compile(rb"([0-9a-f]{8}) ([0-9a-f]{8})\n")


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


def write_first_epochs(log_directory: Path, epochs: LeaderEpochs, filesystem: Filesystem) -> None:
    """The same in a directory that has no list yet, and whose names the caller syncs."""
    data = encode_leader_epochs(epochs)
    crc = google_crc32c.value(data)
    write_whole(filesystem, log_directory / LEADER_EPOCHS_CRC_NAME, b"%08x %08x\n" % (crc, crc))
    write_whole(filesystem, log_directory / LEADER_EPOCHS_NAME, data)


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
