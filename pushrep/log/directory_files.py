"""The files of a directory of logs: the names of logs and of their files, and the small text files beside them.

The name of a log is the name of its directory, as Kafka lays it out: `<topic>-<partition>`. The topic's rule stands in
pushrep/topic_id_partition.py; a partition is a decimal number below 2**31 without leading zeros, so that a name and its
parts say the same.

A directory may hold worker slots, an outbox each, made by Outbox.open_slot. Read-only tools see all slots as one
directory: each log of a topic has a number among all slots, of 31 bits like a partition.

    <directory>/slot-0/outbox.json, orders-0, ...    log                      its number
               /slot-7/outbox.json, orders-0, ...    orders-3, without slots  3                      shown as orders-3
                                                     slot-7/orders-3          1 << 30 | 7 << 20 | 3  as slot-7/orders-3

An outbox has at most 2**20 partitions, a directory at most 1,000 slots.

The files of one log: a few per segment, named as by Kafka, and what recovery kept aside.

    00000000000000001042.log             batches; the number is the base offset of the first, 20 digits
    00000000000000001042.index           .timeindex, both rebuilt from the .log at need
    00000000000000001042.seal            what the segment was when it was rolled; see seals.py
    00000000000000001042.log.4096.cut    what was cut off from byte 4096 on; `.log.cut` for a whole file
                                         .corrupt in place of .cut: what was set aside because it is damaged
    00000000000000001042.log.4096.cut.part   .log.repair: an unfinished copy; the next opening removes it
    00000000000000001042.log.4096.cut.moving   an unfinished move of a tail on a full disk; the next opening goes on
    00000000000000001042.log.swap        a broker's, which was to replace this segment and perhaps the next ones

Other files of a broker (.snapshot, .txnindex, .deleted, .cleaned) are neither read nor removed.

Checkpoints of a directory of logs: one number per log, in Kafka's own text format.

    recovery-point-offset-checkpoint    first offset not known to be on disk when it was written
    log-start-offset-checkpoint         first readable offset
    replication-offset-checkpoint       high watermark
    cleaner-offset-checkpoint           a broker's: its cleaner has compacted the listed logs, which are refused
    given-up-offset-checkpoint          ours: offsets from the log's end up to here named other records (directory.py)

    0                          version
    3                          lines that follow
    orders 0 1042              topic partition offset
    orders 1 977
    #crc32c# 0 2774019836      ours: CRC-32C of every byte above, as an entry of a topic that can't exist

Kafka reads to the end of the file and wants every line to be an entry and the count to be right (`CheckpointFile`,
`OffsetCheckpointFile`), so it ignores no line; but it looks up only its own topics, and no topic's name contains `#`. A
second file for the CRC would need a second rename, and a crash between the two would look like damage. Two `#` in the
name: no single flipped bit turns it into a topic's name.
A file without the CRC line is Kafka's own; only its form is checked. A bad file counts as absent: its logs are scanned
from their start instead.

The clean marker: which logs were closed with every byte flushed, so that opening them needs no scan.

    .pushrep_cleanshutdown           text, like a checkpoint
    0                                version
    3                                lines that follow
    orders-0 1042 88120 3            log, end offset, bytes of its last segment, leader epoch (-1: none yet)
    orders-1 977 81004 3
    #crc32c# 2774019836              CRC-32C of every byte above, always there

Written by the last close of a directory, read and removed (directory synced) by the first open before any log is
loaded: a process that dies in between leaves none. A bad one counts as absent. Kafka's own marker
(`.kafka_cleanshutdown`) says only that the stop was clean; our lines show also whether a log changed since.

The file of a log's leader epochs; the list itself is `pushrep.records.leader_epochs`.

    leader-epoch-checkpoint            Kafka's text: version 0, count, then `epoch startOffset` per line
    leader-epoch-checkpoint.crc32c     ours: `<crc of the file> <crc of the file before it>`, 8 hexadecimal digits each

Kafka reads every line as an epoch, so the CRC is in a second file. It is written first and holds the old file's CRC,
too, so that between the two renames either file is good. A file with another CRC counts as absent, also when Kafka
rewrote it: the batches' headers hold the epochs, and a scan restores the list.

`partition.metadata`: which log this is, in Kafka's format with a line of ours below.

    version: 0
    topic_id: 1Kz0qS9WRXC6kV2F0h0v8g      the uuid's 16 bytes in unpadded URL-safe base64, as Kafka's `Uuid` writes it
    crc32c: 546c8642                      ours: CRC-32C of the bytes above, 8 hexadecimal digits

Kafka reads only the first two lines (`PartitionMetadataFile`). A file without the third is Kafka's own; it ends right
after the id.
A bad file is an error, and never counts as absent: with a new id every record would look new to the filter.

`DirectoryLock`: of a directory of logs: one writer, by flock on `.lock`, which holds its pid and is never removed.
"""

import base64
import binascii
import errno
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import TypeVar
from uuid import UUID

from filtering.errors import PARTITION_BITS, SLOT_BIT, shown_partition
from pushrep.crc32c import crc32c_value
from pushrep.env import (
    REAL_FILESYSTEM,
    SYSTEM_CLOCK,
    Filesystem,
    LockHeld,
    put_in_place,
    read_whole,
    write_atomic,
)
from pushrep.errors import checked_path
from pushrep.log.disk import ManyFiles
from pushrep.log.errors import CompactedLog, CorruptPartitionMetadata, InvalidLogName, LogLocked, NotALog
from pushrep.records.header import OFFSET_MAX
from pushrep.records.leader_epochs import EPOCH_MAX, LeaderEpochs
from pushrep.topic_id_partition import PARTITION_MAX, topic_fault

_LOG = logging.getLogger("pushrep.log")
_T = TypeVar("_T")

_NAME = re.compile(r"([a-zA-Z0-9._-]+)-(0|[1-9][0-9]{0,9})")


def log_name(topic: str, partition: int) -> str:
    """The directory name of one partition's log. Raises InvalidLogName."""
    name = f"{topic}-{partition}"
    if (why := topic_fault(topic)) is not None:
        raise InvalidLogName(name, why)
    if not 0 <= partition <= PARTITION_MAX:
        raise InvalidLogName(name, f"a partition is a number from 0 to {PARTITION_MAX}")
    return name


@lru_cache(1 << 14)  # called for every log at every checkpoint: ten thousand take 10 ms, cached 1 ms
def parse_log_name(name: str) -> tuple[str, int]:
    """(topic, partition) of a directory name. Raises InvalidLogName."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise InvalidLogName(name, "a topic of a-z A-Z 0-9 . _ - and a partition number are wanted")
    topic, partition = match[1], int(match[2])
    log_name(topic, partition)
    return topic, partition


def real_log_path(directory: Path | str) -> Path:
    """The log's path with links resolved, so that writers and readers use the same lock and files.

    A link to a log needs the log's own name. Raises InvalidLogName for another one, and for names of no log.
    """
    given = checked_path("directory", directory)
    real = Path(os.path.realpath(given))
    parse_log_name(real.name if given.name in {"", ".."} else given.name)
    if given.name not in {"", "..", real.name}:
        raise InvalidLogName(given.name, f"it is a link to {real}, which has another name, and a log has only one")
    return real


def list_logs(directory: Path | str, filesystem: Filesystem = REAL_FILESYSTEM) -> list[tuple[str, int]]:
    """(topic, partition) of every log in a directory of logs, sorted; by their names alone. Raises NotALog.

    Takes no lock and opens nothing: a log counts when its name is there.
    """
    directory = Path(directory)
    try:
        names = filesystem.list(directory)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotALog(directory, error.strerror or "no such directory") from error
    return sorted(parse_log_name(name) for name in names if is_log_name(name))


def is_log_name(name: str) -> bool:
    """Whether a directory of this name is a log's."""
    try:
        parse_log_name(name)
    except InvalidLogName:
        return False  # our own files, Kafka's "-delete" and "-future" directories, other files
    return True


CRC_TOPIC = "#crc32c#"
# 100,000 logs with names of the longest kind make 28 MB; neither we nor Kafka write larger ones.
FILE_BYTES_MAX = 64 * 1024 * 1024


class CheckpointFile(Enum):
    """The checkpoint files; numbers that change together are written in this order."""

    __hash__ = object.__hash__  # Enum's own hashes the name in Python, for every remembered number

    GIVEN_UP = "given-up-offset-checkpoint"
    """First, because it keeps what is lost when the others are lowered."""
    RECOVERY_POINT = "recovery-point-offset-checkpoint"
    LOG_START_OFFSET = "log-start-offset-checkpoint"
    HIGH_WATERMARK = "replication-offset-checkpoint"


CLEANER_CHECKPOINT_NAME = "cleaner-offset-checkpoint"
"""Made by brokers only, for the logs that their cleaner has compacted."""


class BadLogFile(ValueError):
    """The bytes are no checkpoint, or no seal; mostly the file then counts as absent."""


def encode_checkpoint(offsets: Mapping[str, int]) -> bytes:
    """The file's bytes for {name of the log: offset}, in the order of topic and partition."""
    parts = sorted((*parse_log_name(name), offset) for name, offset in offsets.items())
    lines = [f"{topic} {partition} {offset}\n" for topic, partition, offset in parts]
    body = f"{_VERSION}\n{len(lines) + 1}\n{''.join(lines)}".encode("ascii")
    return body + _checkpoint_crc(body)


def decode_checkpoint(data: bytes) -> dict[str, int]:
    """{name of the log: offset} of a file that we or Kafka wrote. Raises BadLogFile."""
    lines = split_lines(data, _VERSION)
    if lines and lines[-1].startswith(CRC_TOPIC):
        crc_at = len(data) - len(lines[-1]) - 1
        if data[crc_at:] != _checkpoint_crc(data[:crc_at]):
            raise BadLogFile("its CRC does not match")
        lines.pop()
    offsets: dict[str, int] = {}
    for line in lines:
        name, offset = _checkpoint_entry(line)
        if name in offsets:
            raise BadLogFile(f"{name} is listed twice")
        offsets[name] = offset
    return offsets


def read_checkpoint(
    directory: Path, checkpoint: CheckpointFile, filesystem: Filesystem = REAL_FILESYSTEM
) -> dict[str, int]:
    """{name of the log: offset}; empty if the file is absent or bad, which is logged as a warning."""
    return _read_offsets(directory / checkpoint.value, filesystem)


def _read_offsets(path: Path, filesystem: Filesystem) -> dict[str, int]:
    return _decoded(path, filesystem, decode_checkpoint) or {}


def _decoded(path: Path, filesystem: Filesystem, decode: Callable[[bytes], _T]) -> _T | None:
    """The content of a small file; None if it is absent or bad, which is logged as a warning."""
    try:
        data = read_bounded(path, filesystem)
        return decode(data) if data is not None else None
    except BadLogFile as error:
        _LOG.warning("%s counts as absent: %s", path, error)
        return None


def compacted_logs(directory: Path, filesystem: Filesystem = REAL_FILESYSTEM) -> dict[str, int]:
    """{name of the log: end of what Kafka's cleaner compacted} of a directory of logs; offsets are missing there."""
    return {log: to for log, to in _read_offsets(directory / CLEANER_CHECKPOINT_NAME, filesystem).items() if to}


def refuse_compacted(log: Path, filesystem: Filesystem = REAL_FILESYSTEM) -> None:
    """Raise CompactedLog for a log that Kafka's cleaner went over."""
    if (to := compacted_logs(log.parent, filesystem).get(log.name)) is not None:
        raise CompactedLog(log, to)


def write_checkpoint(
    directory: Path, checkpoint: CheckpointFile, offsets: Mapping[str, int], filesystem: Filesystem = REAL_FILESYSTEM
) -> None:
    """Replace the file; it is on disk when this returns. Raises OSError; then the old file is still there."""
    write_atomic(filesystem, directory / checkpoint.value, [encode_checkpoint(offsets)])


def read_bounded(path: Path, filesystem: Filesystem, bytes_max: int = FILE_BYTES_MAX) -> bytes | None:
    """The bytes of a small file, None if it is absent. Raises BadLogFile for one that is far too large."""
    try:
        return read_whole(filesystem, path, bytes_max)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise BadLogFile(error.strerror) from error
        raise


def split_lines(data: bytes, version: int) -> list[str]:
    """The entry lines of a text file of version, count and entries, as Kafka's `CheckpointFile` writes it.

    Raises BadLogFile for another version, a wrong count, a last line without its end, and bytes beyond ASCII.
    """
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError as error:
        raise BadLogFile(f"byte {error.start} is not ASCII") from error
    lines = text.split("\n")  # not splitlines(), which splits at other control characters, too
    if len(lines) < 3 or lines[-1] != "":
        raise BadLogFile("it is cut off")
    if lines[0] != str(version):
        raise BadLogFile(f"version {lines[0]!r} where {version} is read")
    entries = lines[2:-1]
    if lines[1] != str(len(entries)):
        raise BadLogFile(f"it announces {lines[1]!r} lines and has {len(entries)}")
    return entries


def decimal(text: str, largest: int) -> int:
    """A number from 0 to `largest` in its only valid form. Raises BadLogFile."""
    if not (text.isascii() and text.isdigit() and (text[0] != "0" or text == "0") and int(text) <= largest):
        raise BadLogFile(f"{text!r} is no number from 0 to {largest}")
    return int(text)


def _checkpoint_entry(line: str) -> tuple[str, int]:
    parts = line.split(" ")
    if len(parts) != 3 or topic_fault(parts[0]) is not None:
        raise BadLogFile(f"{line!r} is not: topic partition offset")
    return log_name(parts[0], decimal(parts[1], PARTITION_MAX)), decimal(parts[2], OFFSET_MAX)


def _checkpoint_crc(body: bytes) -> bytes:
    return b"%s 0 %d\n" % (CRC_TOPIC.encode("ascii"), crc32c_value(body))


CLEAN_MARKER_NAME = ".pushrep_cleanshutdown"


@dataclass(frozen=True, slots=True)
class CleanLog:
    """A log as it was closed: its end offset, the bytes of its last segment, its leader epoch (-1: none yet)."""

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
    body = f"{_VERSION}\n{len(lines) + 1}\n{''.join(lines)}".encode("ascii")
    return body + _marker_crc(body)


def decode_clean_marker(data: bytes) -> dict[str, CleanLog]:
    """{name of the log: how it was left}. Raises BadLogFile."""
    lines = split_lines(data, _VERSION)
    crc_at = len(data) - len(lines[-1]) - 1 if lines else len(data)
    if data[crc_at:] != _marker_crc(data[:crc_at]):
        raise BadLogFile("its CRC does not match")
    return dict(_marker_entry(line) for line in lines[:-1])


def read_clean_marker(directory: Path, filesystem: Filesystem) -> dict[str, CleanLog]:
    """{name of the log: how it was left}; empty if the file is absent or bad, which is logged as a warning."""
    return _decoded(directory / CLEAN_MARKER_NAME, filesystem, decode_clean_marker) or {}


def remove_clean_marker(directory: Path, filesystem: Filesystem) -> None:
    """Remove the marker durably, so that a crash from now on shows. No marker is fine."""
    path = directory / CLEAN_MARKER_NAME
    if filesystem.exists(path):
        filesystem.remove(path)
        filesystem.sync_directory(directory)


def write_clean_marker(directory: Path, logs: Mapping[str, CleanLog], filesystem: Filesystem) -> None:
    """Write the marker; on disk when this returns. Call it last, after every log is flushed."""
    write_atomic(filesystem, directory / CLEAN_MARKER_NAME, [encode_clean_marker(logs)])


def _marker_entry(line: str) -> tuple[str, CleanLog]:
    parts = line.split(" ")
    if len(parts) != 4:
        raise BadLogFile(f"{line!r} is not: log, end offset, bytes, leader epoch")
    try:
        parse_log_name(parts[0])
    except InvalidLogName as error:
        raise BadLogFile(str(error)) from error
    epoch = -1 if parts[3] == "-1" else decimal(parts[3], EPOCH_MAX)
    return parts[0], CleanLog(decimal(parts[1], OFFSET_MAX), decimal(parts[2], OFFSET_MAX), epoch)


def _marker_crc(body: bytes) -> bytes:
    return b"%s %d\n" % (CRC_TOPIC.encode("ascii"), crc32c_value(body))


LEADER_EPOCHS_NAME = "leader-epoch-checkpoint"
LEADER_EPOCHS_CRC_NAME = "leader-epoch-checkpoint.crc32c"

_VERSION = 0
_CRC_FILE = re.compile(rb"([0-9a-f]{8}) ([0-9a-f]{8})\n")


def encode_leader_epochs(epochs: LeaderEpochs) -> bytes:
    """The bytes of Kafka's file."""
    lines = "".join(f"{epoch} {start}\n" for epoch, start in epochs.entries)
    return f"{_VERSION}\n{len(epochs.entries)}\n{lines}".encode("ascii")


def decode_leader_epochs(data: bytes) -> LeaderEpochs:
    """The list in Kafka's file. Raises BadLogFile."""
    entries = []
    for line in split_lines(data, _VERSION):
        parts = line.split(" ")
        if len(parts) != 2:
            raise BadLogFile(f"{line!r} is not: epoch startOffset")
        entries.append((decimal(parts[0], EPOCH_MAX), decimal(parts[1], OFFSET_MAX)))
    try:
        return LeaderEpochs(tuple(entries))
    except ValueError as error:
        raise BadLogFile(str(error)) from error


def read_leader_epochs(log_directory: Path, filesystem: Filesystem = REAL_FILESYSTEM) -> LeaderEpochs | None:
    """The log's list; None if it is absent or bad (logged as a warning): then the batches' headers are scanned."""

    def decode_known(data: bytes) -> LeaderEpochs:
        if crc32c_value(data) not in _known_crcs(log_directory, filesystem):
            raise BadLogFile(f"its CRC is not in {LEADER_EPOCHS_CRC_NAME}")
        return decode_leader_epochs(data)

    return _decoded(log_directory / LEADER_EPOCHS_NAME, filesystem, decode_known)


def write_leader_epochs(log_directory: Path, epochs: LeaderEpochs, filesystem: Filesystem = REAL_FILESYSTEM) -> None:
    """Replace the file; on disk under its name when this returns. Raises OSError, the old file then stands."""
    with ManyFiles(filesystem, SYSTEM_CLOCK, [log_directory]) as files:
        write_lists_of_epochs({log_directory: epochs}, files, filesystem)


def write_lists_of_epochs(lists: Mapping[Path, LeaderEpochs], files: ManyFiles, filesystem: Filesystem) -> None:
    """The same for many logs, by directory. Raises OSError; then each log has either the old or the new file."""
    known: list[Path] = []
    written: list[tuple[Path, bytes]] = []
    for directory, epochs in lists.items():
        # A bad old file must stay bad until it is replaced, so its CRC is kept only if it was valid.
        standing = _standing_crc(directory, filesystem)
        is_known = standing in _known_crcs(directory, filesystem)
        known += [directory] if is_known else []
        written += [(directory / name, data) for name, data in epochs_files(epochs, standing if is_known else None)]
    files.write_beside(written)
    for directory in lists:
        put_in_place(filesystem, directory / LEADER_EPOCHS_CRC_NAME)
    if known:  # others count as absent anyway, so the order does not matter
        files.sync_directories(known)
    for directory in lists:
        put_in_place(filesystem, directory / LEADER_EPOCHS_NAME)
    files.sync_directories(list(lists))


def epochs_files(epochs: LeaderEpochs, crc_before: int | None = None) -> tuple[tuple[str, bytes], tuple[str, bytes]]:
    """(name, contents) of the CRC and of the list, in the order in which they get their names.

    crc_before: of the list that stands; None if there is none that counts.
    """
    data = encode_leader_epochs(epochs)
    crc = crc32c_value(data)
    before = crc if crc_before is None else crc_before
    return (LEADER_EPOCHS_CRC_NAME, b"%08x %08x\n" % (crc, before)), (LEADER_EPOCHS_NAME, data)


def _standing_crc(log_directory: Path, filesystem: Filesystem) -> int:
    """The old list's CRC; -1, which is no CRC, if there is no valid one."""
    try:
        data = read_bounded(log_directory / LEADER_EPOCHS_NAME, filesystem)
    except BadLogFile:
        return -1
    return int(crc32c_value(data)) if data is not None else -1


def _known_crcs(log_directory: Path, filesystem: Filesystem) -> frozenset[int]:
    try:
        data = read_bounded(log_directory / LEADER_EPOCHS_CRC_NAME, filesystem)
    except BadLogFile:
        data = None
    match = _CRC_FILE.fullmatch(data or b"")
    return frozenset(int(crc, 16) for crc in match.groups()) if match is not None else frozenset()


PARTITION_METADATA_NAME = "partition.metadata"
_FORM = re.compile(rb"version: 0\ntopic_id: ([A-Za-z0-9_-]{22})(?:\n(?:crc32c: ([0-9a-f]{8})\n)?)?")


def encode_partition_metadata(topic_id: UUID) -> bytes:
    """The file's bytes. The zero uuid means "no id" to Kafka: ValueError."""
    if topic_id.int == 0:
        raise ValueError("the zero uuid is no topic id")
    body = b"version: 0\ntopic_id: %s\n" % base64.urlsafe_b64encode(topic_id.bytes).rstrip(b"=")
    return body + b"crc32c: %08x\n" % crc32c_value(body)


def decode_partition_metadata(data: bytes) -> UUID:
    """The topic id in a file that we or Kafka wrote. Raises ValueError with the reason."""
    match = _FORM.fullmatch(data)
    if match is None:
        raise ValueError("not the lines version, topic_id and crc32c")
    if match[2] is not None and int(match[2], 16) != crc32c_value(data[: match.end(1) + 1]):
        raise ValueError("its CRC does not match")
    try:
        topic_id = UUID(bytes=base64.urlsafe_b64decode(match[1] + b"=="))
    except (binascii.Error, ValueError) as error:
        raise ValueError("its topic_id is no uuid in base64") from error
    if topic_id.int == 0:
        raise ValueError("its topic_id is zero")
    return topic_id


def read_partition_metadata(log_directory: Path, filesystem: Filesystem = REAL_FILESYSTEM) -> UUID | None:
    """The log's id; None if it has no file yet. Raises CorruptPartitionMetadata."""
    path = log_directory / PARTITION_METADATA_NAME
    try:
        data = read_bounded(path, filesystem)
        return decode_partition_metadata(data) if data is not None else None
    except ValueError as error:
        raise CorruptPartitionMetadata(path, f"is damaged ({error})") from error


def write_partition_metadata(log_directory: Path, topic_id: UUID, filesystem: Filesystem = REAL_FILESYSTEM) -> None:
    """Write the file, once, when the log is made; on disk when this returns."""
    write_atomic(filesystem, log_directory / PARTITION_METADATA_NAME, [encode_partition_metadata(topic_id)])


LOCK_NAME = ".lock"
# Kafka locks a file of this name with a record lock, which flock does not see: no broker may run on this directory.


class DirectoryLock:
    """The lock of the directory at `path`, which is made if it is missing, and held: until `close` its path leads to
    this very directory. Raises LogLocked, NotALog.
    """

    def __init__(self, path: Path, filesystem: Filesystem) -> None:
        with _in_words(path):
            filesystem.make_directory(path)
            with ExitStack() as undone:
                self._let_go = undone.callback(filesystem.hold(path))
                self._file = filesystem.lock(path / LOCK_NAME)
                undone.pop_all()

    @property
    def is_open(self) -> bool:
        """Whether this process still has its descriptor."""
        try:
            self._file.size()
        except OSError:
            return False
        return True

    @property
    def is_in_place(self) -> bool:
        """Whether others find this lock at the directory's path. Raises OSError."""
        return self._file.named_size(by_path=True) is not None

    def close(self) -> None:
        """Free the lock; a second call does nothing."""
        self._file.close()
        self.let_go()

    def let_go(self) -> None:
        """Look paths at the directory up by name again; for a lock whose descriptors somebody else has closed."""
        self._let_go()
        self._let_go = lambda: None


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    try:
        yield
    except LockHeld as error:
        raise LogLocked(path, error.pid) from error
    except (FileExistsError, NotADirectoryError) as error:
        raise NotALog(path, "it is a file, or one of its parents is") from error
    except PermissionError as error:
        raise NotALog(path, "it may not be written by this user") from error
    except OSError as error:
        if error.errno not in {errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG}:
            raise  # a fault of the disk or the process, not of the path
        named = f"{error.filename}: " if error.filename == str(path / LOCK_NAME) else ""
        raise NotALog(path, f"{named}{error.strerror}") from error


LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX = ".log", ".index", ".timeindex"
SEAL_SUFFIX = ".seal"
CUT_SUFFIX, CORRUPT_SUFFIX = ".cut", ".corrupt"
PART_SUFFIX, REPAIR_SUFFIX = ".part", ".repair"
MOVING_SUFFIX = ".moving"

_SEGMENT = re.compile(r"([0-9]{20})\.log")
_SWAP = re.compile(r"[0-9]{20}\.log\.swap")
_HALF_MADE = re.compile(r"[0-9]{20}\.(?:(?:log|index|timeindex)\.repair|log\.[0-9]+\.(?:cut|corrupt)\.part)")
_MOVING = re.compile(r"([0-9]{20}\.log)\.([0-9]+)\.cut\.moving")
_OF_A_SEGMENT = re.compile(r"([0-9]{20})\.(?:index|timeindex|seal)")


@lru_cache(maxsize=4096)  # making a Path takes 3 µs, and a read needs several
def segment_path(directory: Path, base_offset: int, suffix: str = LOG_SUFFIX) -> Path:
    """The file of the segment that begins with `base_offset`."""
    return directory / f"{base_offset:020d}{suffix}"


def list_segments(filesystem: Filesystem, directory: Path) -> list[int]:
    """Base offsets of the segments in the directory, ascending."""
    return segments_in(filesystem.list(directory))


def segments_in(names: Iterable[str]) -> list[int]:
    """Base offsets of the segments among the names of a directory, which are sorted."""
    return [int(match[1]) for name in names if (match := _SEGMENT.fullmatch(name))]


def orphan_indexes_in(names: Iterable[str]) -> list[str]:
    """Names of index files and seals whose segment is gone: a crash came between their removals."""
    bases = set(segments_in(names := list(names)))
    return [name for name in names if (match := _OF_A_SEGMENT.fullmatch(name)) and int(match[1]) not in bases]


def swaps_in(names: Iterable[str]) -> list[str]:
    """Names of compacted segments that a broker was about to rename over others when it stopped."""
    return [name for name in names if _SWAP.fullmatch(name)]


def half_made_in(names: Iterable[str]) -> list[str]:
    """Names of unfinished copies; their originals are still there."""
    return [name for name in names if _HALF_MADE.fullmatch(name)]


def moved_from(names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """{name of a file that takes a tail: (segment, byte that the tail begins with)}; see cut_files.py."""
    return {name: (match[1], int(match[2])) for name in names if (match := _MOVING.fullmatch(name))}


def taken_names(filesystem: Filesystem, path: Path) -> Iterator[Path]:
    """`path`, `path.1` and so on, as far as they exist."""
    candidate, number = path, 0
    while filesystem.exists(candidate):
        yield candidate
        number += 1
        candidate = path.with_name(f"{path.name}.{number}")


def free_name(filesystem: Filesystem, path: Path) -> Path:
    """`path`, or the first of `path.1`, `path.2` ... that is free: files kept aside are never overwritten."""
    number = sum(1 for _ in taken_names(filesystem, path))
    return path.with_name(f"{path.name}.{number}") if number else path


OUTBOX_FILE_NAME = "outbox.json"
SLOTS_MAX = 1000
_SLOT_NAME = re.compile(r"slot-(0|[1-9][0-9]{0,2})")
assert SLOT_BIT >> PARTITION_BITS >= SLOTS_MAX, "slot numbers must not reach the bit that marks them"


def slot_path(directory: Path, slot: int) -> Path:
    """Where the outbox of a slot is."""
    return directory / f"slot-{slot}"


def is_slot_name(name: str) -> bool:
    """Whether a directory of that name is a slot."""
    return _SLOT_NAME.fullmatch(name) is not None


def slot_directories(directory: Path | str, filesystem: Filesystem = REAL_FILESYSTEM) -> list[Path]:
    """The slots in which an outbox was made, by their number; empty for a directory that has none."""
    return [slot_path(Path(directory), slot) for slot in _slots(Path(directory), filesystem)]


def is_slot(directory: Path) -> bool:
    """Whether the directory is a slot in which an outbox was made."""
    return is_slot_name(directory.name) and (directory / OUTBOX_FILE_NAME).exists()


def outboxes_at(directory: Path | str) -> list[Path]:
    """The slots below a directory, or the directory itself if it has none."""
    return slot_directories(directory) or [Path(directory)]


def readable_logs(directory: Path | str, filesystem: Filesystem = REAL_FILESYSTEM) -> list[tuple[str, int]]:
    """(topic, number) of every log in a directory of logs, or in its slots, sorted. Raises NotALog."""
    parent = checked_path("directory", directory)
    slots = _slots(parent, filesystem)
    if not slots:
        return list_logs(parent, filesystem)
    found = []
    for slot in slots:
        try:
            logs = list_logs(slot_path(parent, slot), filesystem)
        except NotALog:
            continue  # removed meanwhile
        found += [(topic, SLOT_BIT | slot << PARTITION_BITS | n) for topic, n in logs if not n >> PARTITION_BITS]
    return sorted(found)


def log_at(directory: Path | str, topic: str, number: int) -> Path:
    """The path of the log of this number. Raises InvalidLogName."""
    return Path(directory) / shown_name(topic, number)


def shown_name(topic: str, number: int) -> str:
    """The log's name for people, which is its path below the directory. Raises InvalidLogName."""
    slot, slash, _ = shown_partition(number).rpartition("/")
    return f"{slot}{slash}{log_name(topic, in_its_slot(number))}"


def in_its_slot(number: int) -> int:
    """The partition of that number's log in the outbox of its slot, or without slots."""
    return number % (1 << PARTITION_BITS) if SLOT_BIT <= number < 2 * SLOT_BIT else number


def parse_shown_partition(text: str) -> int:
    """The number of `3`, or `slot-7/3`. Raises InvalidLogName."""
    slot, slash, partition = text.rpartition("/")
    return parse_shown_name(f"{slot}{slash}t-{partition}")[1]


def parse_shown_name(text: str) -> tuple[str, int]:
    """(topic, number) of `<topic>-<n>` or `slot-<m>/<topic>-<n>`. Raises InvalidLogName."""
    slot, slash, name = text.rpartition("/")
    if not slash:
        return parse_log_name(text)
    match = _SLOT_NAME.fullmatch(slot)
    topic, partition = parse_log_name(name)
    if match is None or partition >> PARTITION_BITS:
        raise InvalidLogName(text, "slot-<m>/<topic>-<n> is wanted")
    return topic, SLOT_BIT | int(match[1]) << PARTITION_BITS | partition


def is_named(log: tuple[str, int], text: str) -> bool:
    """Whether `<topic>-<n>` or `slot-<m>/<topic>-<n>` names the log; without a slot it names that of every slot."""
    name = shown_name(*log)
    return text in {name, name.rpartition("/")[2]}


def shown_below(directory: Path | str, log: Path) -> str:
    """The displayed name of a log found below `directory`: with its slot, unless `directory` is the slot."""
    is_slot = is_slot_name(log.parent.name) and Path(directory) == log.parent.parent
    return f"{log.parent.name}/{log.name}" if is_slot else log.name


def _slots(directory: Path, filesystem: Filesystem) -> list[int]:
    try:
        matches = [match for name in filesystem.list(directory) if (match := _SLOT_NAME.fullmatch(name))]
    except OSError:
        return []
    slots = sorted(int(match[1]) for match in matches)
    return [slot for slot in slots if filesystem.exists(slot_path(directory, slot) / OUTBOX_FILE_NAME)]
