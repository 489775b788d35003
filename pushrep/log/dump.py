"""The content of a log's files, entry by entry: what Kafka's DumpLogSegments shows, in its words.

    .log                              DumpedBatch ... then one ScanEnd; every batch that is shown passed every check
    .index  .timeindex                DumpedEntry
    checkpoints, clean marker,
    leader epochs, partition.metadata DumpedLine, or BadFile

Kafka's tool goes on after a batch with a wrong CRC. This one stops there and says so, as all our readers do.
"""

import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pushrep.env import REAL_FILESYSTEM
from pushrep.log.directory_files import (
    CLEAN_MARKER_NAME,
    CLEANER_CHECKPOINT_NAME,
    INDEX_SUFFIX,
    LEADER_EPOCHS_NAME,
    LOG_SUFFIX,
    PARTITION_METADATA_NAME,
    TIME_INDEX_SUFFIX,
    BadLogFile,
    CheckpointFile,
    compacted_logs,
    decode_checkpoint,
    decode_clean_marker,
    decode_leader_epochs,
    decode_partition_metadata,
    list_segments,
    read_bounded,
    segment_path,
)
from pushrep.log.errors import NotALog
from pushrep.log.indexes import parse_index
from pushrep.log.inspection import checked_log, is_log, read_state
from pushrep.log.verify import Expected
from pushrep.log.walk import CleanEnd, Damage, ScanEnd, ScanRange, WholeBatch, scan, scan_over_holes
from pushrep.records import RecordBatch, UnsupportedCodec

OFFSET_LIMIT = (1 << 63) - 1
_DELETE_HORIZON_BIT = 0x40
_CONTROL = struct.Struct(">hh")
_END_TXN = struct.Struct(">hi")
_CONTROL_TYPES = {0: "ABORT", 1: "COMMIT"}


@dataclass(frozen=True, slots=True)
class DumpedBatch:
    """A whole batch and the byte where it begins."""

    position: int
    batch: RecordBatch

    @property
    def codec(self) -> str:
        """Its compression, as Kafka spells it."""
        try:
            return self.batch.header.codec.name.lower()
        except UnsupportedCodec as error:
            return str(error)

    @property
    def delete_horizon_ms(self) -> int | None:
        """When a compacting broker may drop its tombstones; stored in place of the base timestamp."""
        header = self.batch.header
        return header.base_timestamp_ms if header.attributes & _DELETE_HORIZON_BIT else None

    @property
    def last_sequence(self) -> int:
        """The sequence of its last record; -1 without an idempotent producer. Sequences wrap after 2**31 - 1."""
        header = self.batch.header
        if header.base_sequence < 0:
            return -1
        return (header.base_sequence + header.last_offset_delta) & 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class DumpedEnd:
    """How a segment file ends; `rest_bytes` follow the last whole batch."""

    end: ScanEnd
    rest_bytes: int

    @property
    def is_clean(self) -> bool:
        """Nothing follows but zeros allocated ahead."""
        return isinstance(self.end, CleanEnd)


@dataclass(frozen=True, slots=True)
class DumpedHole:
    """The offsets [start, end) are missing before the whole batch at `position`: a broker's cleaner took them, or they
    were lost.
    """

    position: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class DumpedEntry:
    """An index entry with the whole offset: (offset, position), or (offset, timestamp) of a time index."""

    offset: int
    position: int | None
    timestamp_ms: int | None


@dataclass(frozen=True, slots=True)
class DumpedLine:
    """A line of a small text file, decoded."""

    text: str


@dataclass(frozen=True, slots=True)
class BadFile:
    """The file can't be what its name says."""

    reason: str


Dumped = DumpedBatch | DumpedHole | DumpedEnd | DumpedEntry | DumpedLine | BadFile


@dataclass(frozen=True, slots=True)
class OffsetWindow:
    """Selects the entries for offsets in [start, end)."""

    start: int = 0
    end: int = OFFSET_LIMIT


def files_to_dump(path: Path, window: OffsetWindow, *, indexes: bool) -> list[Path]:
    """The files of a log that hold offsets of the window, or the one file `path`. Raises NotALog."""
    if not is_log(path):
        if not path.is_file():
            raise NotALog(path, "name a log or one of its files")
        return [path]
    log = checked_log(path)
    bases = list_segments(REAL_FILESYSTEM, log)
    ends = [*bases[1:], OFFSET_LIMIT]
    chosen = [base for base, end in zip(bases, ends, strict=True) if base < window.end and end > window.start]
    suffixes = (LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX) if indexes else (LOG_SUFFIX,)
    paths = [segment_path(log, base, suffix) for base in chosen for suffix in suffixes]
    return [file for file in paths if REAL_FILESYSTEM.exists(file)]


def dump_file(path: Path, window: OffsetWindow) -> Iterator[Dumped]:
    """Decode a file by its name. Raises NotALog for a name that no file of a log has, OSError."""
    suffix = path.suffix
    if suffix in {LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX} and path.stem.isdigit():
        base = int(path.stem)
        if suffix == LOG_SUFFIX:
            return _batches(path, base, window)
        return _entries(path, base, window)
    if path.name in _DECODERS:
        return _lines(path)
    raise NotALog(path, f"no file of a log is named so; known are <20 digits>.log .index .timeindex, {_KNOWN_NAMES}")


def control_type(key: bytes | None, value: bytes | None) -> tuple[str, int | None]:
    """(kind, coordinator epoch) of a control record: ABORT or COMMIT end a transaction, others have a number."""
    if key is None or len(key) < _CONTROL.size:
        return "UNKNOWN", None
    number = _CONTROL.unpack_from(key)[1]
    if number not in _CONTROL_TYPES or value is None or len(value) < _END_TXN.size:
        return _CONTROL_TYPES.get(number, str(number)), None
    return _CONTROL_TYPES[number], _END_TXN.unpack_from(value)[1]


def _batches(path: Path, base: int, window: OffsetWindow) -> Iterator[DumpedBatch | DumpedHole | DumpedEnd | BadFile]:
    missing, following, limit = _beside(path, base)  # before it is read: a writer may go on in the next one
    if missing is not None and window.start < base:
        yield BadFile(missing)
    with closing(REAL_FILESYSTEM.open(path, writable=False)) as file:
        log = path.resolve().parent
        is_compacted = log.name in compacted_logs(log.parent, REAL_FILESYSTEM)
        what = ScanRange(base_offset=base, may_lack_records=is_compacted)
        for step in scan_over_holes(file, what, scan) if is_compacted else scan(file, what):
            if is_compacted and isinstance(step, Damage) and step.goes_on_at is not None:
                if step.goes_on_at > window.start and step.next_offset < window.end:
                    yield DumpedHole(step.position, step.next_offset, step.goes_on_at)
                continue
            if not isinstance(step, WholeBatch):
                yield DumpedEnd(step, max(0, file.size() - step.position))
                if following not in {None, step.next_offset} and isinstance(step, CleanEnd):
                    yield BadFile(f"it ends at offset {step.next_offset}, the next file begins at {following}")
                return
            header = step.batch.header
            if header.base_offset >= window.end:
                return
            if header.next_offset > window.start:
                yield DumpedBatch(step.position, step.batch)
            if limit is not None and header.next_offset >= limit:
                return


def _beside(path: Path, base: int) -> tuple[str | None, int | None, int | None]:
    """What is missing before a segment that is the log's first, if that does not begin there; the base offset of the
    next one; without one, where to stop beside a running writer, which goes on writing after it.
    """
    log = path.resolve().parent
    if not is_log(log):
        return None, None, None
    bases, state, missing = list_segments(REAL_FILESYSTEM, log), read_state(log), None
    if base == bases[0] and state.log_start_offset is not None and state.log_start_offset < base:
        missing = f"the log starts at offset {state.log_start_offset}, its first file is missing"
    following = min((one for one in bases if one > base), default=None)
    return missing, following, Expected.of(state).below if state.is_live and following is None else None


def _entries(path: Path, base: int, window: OffsetWindow) -> Iterator[DumpedEntry | BadFile]:
    with closing(REAL_FILESYSTEM.open(path, writable=False)) as file:
        entries = parse_index(path.suffix, file.read_at(file.size(), 0))
    is_offsets = path.suffix == INDEX_SUFFIX
    for key, value in zip(entries.keys, entries.values, strict=True):
        entry = DumpedEntry(base + key, value, None) if is_offsets else DumpedEntry(base + value, None, key)
        if window.start <= entry.offset < window.end:
            yield entry
    if entries.rest_bytes:
        yield BadFile(f"{entries.rest_bytes} bytes at its end are no entry")


def _lines(path: Path) -> Iterator[DumpedLine | BadFile]:
    try:
        data = read_bounded(path, REAL_FILESYSTEM)
        lines = _DECODERS[path.name](b"" if data is None else data)
    except ValueError as error:  # BadLogFile is one
        yield BadFile(str(error))
        return
    for line in lines:
        yield DumpedLine(line)


def _checkpoint_lines(data: bytes) -> list[str]:
    return [f"{name}: {offset}" for name, offset in decode_checkpoint(data).items()]


_DECODERS: dict[str, Callable[[bytes], list[str]]] = {
    **{checkpoint.value: _checkpoint_lines for checkpoint in CheckpointFile},
    CLEANER_CHECKPOINT_NAME: _checkpoint_lines,
    CLEAN_MARKER_NAME: lambda data: [
        f"{name}: endOffset: {log.end_offset} lastSegmentBytes: {log.last_segment_bytes} leaderEpoch: "
        f"{log.leader_epoch}"
        for name, log in decode_clean_marker(data).items()
    ],
    LEADER_EPOCHS_NAME: lambda data: [
        f"epoch: {epoch} startOffset: {start}" for epoch, start in decode_leader_epochs(data).entries
    ],
    PARTITION_METADATA_NAME: lambda data: [f"topic_id: {decode_partition_metadata(data)}"],
}
_KNOWN_NAMES = ", ".join(_DECODERS)
assert issubclass(BadLogFile, ValueError)
