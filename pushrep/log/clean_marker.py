"""The clean marker: which logs were closed with every byte flushed, so that opening them needs no scan.

    .pushrep_cleanshutdown           text, like a checkpoint
    0                                version
    3                                lines that follow
    orders-0 1042 88120 3            log, end offset, bytes of its last segment, leader epoch (-1: none yet)
    orders-1 977 81004 3
    #crc32c# 2774019836              CRC-32C of every byte above, always there

Written by the last close of a directory, read and removed (directory synced) by the first open before any log is
loaded: a process that dies in between leaves none. A bad one counts as absent. Kafka's own marker
(`.kafka_cleanshutdown`) says only that all was well; by our lines a log that changed since is found out.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

from pushrep.log.checkpoints import CRC_TOPIC, OFFSET_MAX, BadCheckpoint, decimal, read_bounded, split_lines
from pushrep.log.errors import InvalidLogName
from pushrep.log.log_names import parse_log_name
from pushrep.seams import Filesystem, write_atomic

_LOG = logging.getLogger("pushrep.log")

CLEAN_MARKER_NAME = ".pushrep_cleanshutdown"
VERSION = 0
EPOCH_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class CleanLog:
    """How a log was left: its end offset, the size of its last segment in bytes, its leader epoch (-1: none yet)."""

    end_offset: int
    last_segment_bytes: int
    leader_epoch: int

    def __post_init__(self) -> None:
        if not (0 <= self.end_offset <= OFFSET_MAX and 0 <= self.last_segment_bytes <= OFFSET_MAX):
            raise ValueError(f"a log ends at an offset and at a position from 0 to {OFFSET_MAX}: {self}")
        if not -1 <= self.leader_epoch <= EPOCH_MAX:
            raise ValueError(f"a leader epoch is a number from -1 to {EPOCH_MAX}: {self}")


def encode_clean_marker(logs: Mapping[str, CleanLog]) -> bytes:
    """The file's bytes for {name of the log: how it was left}, sorted by topic and partition."""
    lines = [
        f"{name} {log.end_offset} {log.last_segment_bytes} {log.leader_epoch}\n"
        for name, log in sorted(logs.items(), key=lambda item: parse_log_name(item[0]))
    ]
    body = f"{VERSION}\n{len(lines) + 1}\n{''.join(lines)}".encode("ascii")
    return body + _crc_line(body)


def decode_clean_marker(data: bytes) -> dict[str, CleanLog]:
    """{name of the log: how it was left}. Raises BadCheckpoint."""
    lines = split_lines(data, VERSION)
    crc_at = len(data) - len(lines[-1]) - 1 if lines else len(data)
    if data[crc_at:] != _crc_line(data[:crc_at]):
        raise BadCheckpoint("its CRC does not match")
    return dict(_entry(line) for line in lines[:-1])


def read_clean_marker(directory: Path, filesystem: Filesystem) -> dict[str, CleanLog]:
    """{name of the log: how it was left}; empty if the file is absent or bad, which is logged as a warning."""
    path = directory / CLEAN_MARKER_NAME
    try:
        data = read_bounded(path, filesystem)
        return decode_clean_marker(data) if data is not None else {}
    except BadCheckpoint as error:
        _LOG.warning("%s counts as absent: %s", path, error)
        return {}


def remove_clean_marker(directory: Path, filesystem: Filesystem) -> None:
    """Take the marker away, durably: from here on a crash must look like one. No marker is fine."""
    path = directory / CLEAN_MARKER_NAME
    if filesystem.exists(path):
        filesystem.remove(path)
        filesystem.sync_directory(directory)


def write_clean_marker(directory: Path, logs: Mapping[str, CleanLog], filesystem: Filesystem) -> None:
    """Write the marker; on disk under its name when this returns. Call it last, after every log is flushed."""
    write_atomic(filesystem, directory / CLEAN_MARKER_NAME, [encode_clean_marker(logs)])


def _entry(line: str) -> tuple[str, CleanLog]:
    parts = line.split(" ")
    if len(parts) != 4:
        raise BadCheckpoint(f"{line!r} is not: log, end offset, bytes, leader epoch")
    try:
        parse_log_name(parts[0])
    except InvalidLogName as error:
        raise BadCheckpoint(str(error)) from error
    epoch = -1 if parts[3] == "-1" else decimal(parts[3], EPOCH_MAX)
    return parts[0], CleanLog(decimal(parts[1], OFFSET_MAX), decimal(parts[2], OFFSET_MAX), epoch)


def _crc_line(body: bytes) -> bytes:
    return b"%s %d\n" % (CRC_TOPIC.encode("ascii"), google_crc32c.value(body))
