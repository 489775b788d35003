"""Checkpoints of a directory of logs: one number per log, in Kafka's own text format.

    recovery-point-offset-checkpoint    first offset not known to be on disk when it was written
    log-start-offset-checkpoint         first readable offset
    replication-offset-checkpoint       high watermark
    cleaner-offset-checkpoint           Kafka's cleaner went over everything below: offsets may be missing there
    given-up-offset-checkpoint          ours: offsets from the log's end up to here named other records (given_up.py)

    0                          version
    3                          lines that follow
    orders 0 1042              topic partition offset
    orders 1 977
    #crc32c# 0 2774019836      ours: CRC-32C of every byte above, as an entry of a topic that can't exist

Kafka reads to the end of the file and wants every line to be an entry and the count to be right (`CheckpointFile`,
`OffsetCheckpointFile`), so there is no place that its reader ignores; but it looks up only topics that it holds, and
no topic may contain `#`. A file beside it would need two renames, and a crash between them would look like damage.
Two `#` in the name: no single flipped bit turns it into a topic's name.
A file without that line is Kafka's own and is read by its form alone. A bad file counts as absent: its logs are
scanned from their start instead.
"""

import errno
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import google_crc32c

from pushrep.log.log_names import is_topic, log_name, parse_log_name
from pushrep.seams import REAL_FILESYSTEM, Filesystem, read_whole, write_atomic
from pushrep.topic_id_partition import PARTITION_MAX

_LOG = logging.getLogger("pushrep.log")

VERSION = 0
OFFSET_MAX = 2**63 - 1
CRC_TOPIC = "#crc32c#"
# 100,000 logs with names of the longest kind make 28 MB; what is larger was not written by us or by Kafka.
FILE_BYTES_MAX = 64 * 1024 * 1024


class Checkpoint(Enum):
    """The files, by what their number is; numbers that change together are written in this order."""

    GIVEN_UP = "given-up-offset-checkpoint"
    """First, because it tells what the others forget when they are lowered."""
    RECOVERY_POINT = "recovery-point-offset-checkpoint"
    LOG_START_OFFSET = "log-start-offset-checkpoint"
    HIGH_WATERMARK = "replication-offset-checkpoint"
    CLEANED_OFFSET = "cleaner-offset-checkpoint"
    """Made by brokers only; we read it, and lower its number when a log is cut below it."""


class BadCheckpoint(ValueError):
    """The bytes are no checkpoint; `read_checkpoint` answers as if the file were absent."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """What a directory's files say, by name of the log; a log that a file does not list is not in its map."""

    recovery_points: Mapping[str, int] = field(default_factory=dict)
    log_start_offsets: Mapping[str, int] = field(default_factory=dict)
    high_watermarks: Mapping[str, int] = field(default_factory=dict)
    cleaned_offsets: Mapping[str, int] = field(default_factory=dict)
    given_up_offsets: Mapping[str, int] = field(default_factory=dict)


def encode_checkpoint(offsets: Mapping[str, int]) -> bytes:
    """The file's bytes for {name of the log: offset}, in the order of topic and partition."""
    parts = sorted((*parse_log_name(name), offset) for name, offset in offsets.items())
    lines = [f"{topic} {partition} {offset}\n" for topic, partition, offset in parts]
    body = f"{VERSION}\n{len(lines) + 1}\n{''.join(lines)}".encode("ascii")
    return body + _crc_line(body)


def decode_checkpoint(data: bytes) -> dict[str, int]:
    """{name of the log: offset} of a file that we or Kafka wrote. Raises BadCheckpoint."""
    lines = split_lines(data, VERSION)
    if lines and lines[-1].startswith(CRC_TOPIC):
        crc_at = len(data) - len(lines[-1]) - 1
        if data[crc_at:] != _crc_line(data[:crc_at]):
            raise BadCheckpoint("its CRC does not match")
        lines.pop()
    offsets: dict[str, int] = {}
    for line in lines:
        name, offset = _entry(line)
        if name in offsets:
            raise BadCheckpoint(f"{name} is listed twice")
        offsets[name] = offset
    return offsets


def read_checkpoint(
    directory: Path, checkpoint: Checkpoint, filesystem: Filesystem = REAL_FILESYSTEM
) -> dict[str, int]:
    """{name of the log: offset}; empty if the file is absent or bad, which is logged as a warning."""
    path = directory / checkpoint.value
    try:
        data = read_bounded(path, filesystem)
        return decode_checkpoint(data) if data is not None else {}
    except BadCheckpoint as error:
        _LOG.warning("%s counts as absent: %s", path, error)
        return {}


def read_cleaned_offset(log: Path, filesystem: Filesystem = REAL_FILESYSTEM) -> int:
    """Kafka's cleaner may have taken offsets of the log at `log` below this; 0 for a log that it never saw."""
    return read_checkpoint(log.parent, Checkpoint.CLEANED_OFFSET, filesystem).get(log.name, 0)


def read_checkpoints(directory: Path | str, filesystem: Filesystem = REAL_FILESYSTEM) -> Checkpoints:
    """All of the files, for readers beside a writer: no lock, and each file is a whole one, old or new."""
    directory = Path(directory)
    return Checkpoints(
        recovery_points=read_checkpoint(directory, Checkpoint.RECOVERY_POINT, filesystem),
        log_start_offsets=read_checkpoint(directory, Checkpoint.LOG_START_OFFSET, filesystem),
        high_watermarks=read_checkpoint(directory, Checkpoint.HIGH_WATERMARK, filesystem),
        cleaned_offsets=read_checkpoint(directory, Checkpoint.CLEANED_OFFSET, filesystem),
        given_up_offsets=read_checkpoint(directory, Checkpoint.GIVEN_UP, filesystem),
    )


def write_checkpoint(
    directory: Path, checkpoint: Checkpoint, offsets: Mapping[str, int], filesystem: Filesystem = REAL_FILESYSTEM
) -> None:
    """Replace the file; it is on disk under its name when this returns. Raises OSError, the old file then stands."""
    write_atomic(filesystem, directory / checkpoint.value, [encode_checkpoint(offsets)])


def read_bounded(path: Path, filesystem: Filesystem) -> bytes | None:
    """The bytes of a small file, None if it is absent. Raises BadCheckpoint for one that is far too large."""
    try:
        return read_whole(filesystem, path, FILE_BYTES_MAX)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise BadCheckpoint(error.strerror) from error
        raise


def split_lines(data: bytes, version: int) -> list[str]:
    """The entry lines of a text file of version, count and entries, as Kafka's `CheckpointFile` writes it.

    Raises BadCheckpoint for another version, a wrong count, a last line without its end, and bytes beyond ASCII.
    """
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError as error:
        raise BadCheckpoint(f"byte {error.start} is not ASCII") from error
    lines = text.split("\n")  # not splitlines(): it takes other control characters for the end of a line, too
    if len(lines) < 3 or lines[-1] != "":
        raise BadCheckpoint("it is cut off")
    if lines[0] != str(version):
        raise BadCheckpoint(f"version {lines[0]!r} where {version} is read")
    entries = lines[2:-1]
    if lines[1] != str(len(entries)):
        raise BadCheckpoint(f"it announces {lines[1]!r} lines and has {len(entries)}")
    return entries


def decimal(text: str, largest: int) -> int:
    """A number from 0 to `largest` in the one way it is written. Raises BadCheckpoint."""
    if not (text.isascii() and text.isdigit() and (text[0] != "0" or text == "0") and int(text) <= largest):
        raise BadCheckpoint(f"{text!r} is no number from 0 to {largest}")
    return int(text)


def _entry(line: str) -> tuple[str, int]:
    parts = line.split(" ")
    if len(parts) != 3 or not is_topic(parts[0]):
        raise BadCheckpoint(f"{line!r} is not: topic partition offset")
    return log_name(parts[0], decimal(parts[1], PARTITION_MAX)), decimal(parts[2], OFFSET_MAX)


def _crc_line(body: bytes) -> bytes:
    return b"%s 0 %d\n" % (CRC_TOPIC.encode("ascii"), google_crc32c.value(body))
