"""The upstream positions of a partition: which it may take next, which its log holds, and the file that keeps them.

    pair = (PID, source partition)        positions of a pair: strictly rising from open to close
    after a failure                       the first one that failed comes next, and no later one before it

A reader's filter drops each record that is not above the pair's highest offset. So if a record overtakes an earlier
one, the filter drops the earlier one, and a hole can't be filled once the offset after it is in. Positions may fall
only when the outbox is opened again: it takes any first position of a pair, and they rise from there. A producer that
starts from a saved position sends records again, and the filter drops the second copies.

    <topic>-<n>/outbox-positions       big-endian; a file that is not whole counts as absent, and is built from the log
    0   magic 8, "pushpos" and a zero
    8   version u32 = 1
    12  carrier u32: 0 key, 1 header
    16  end offset i64: the positions of all records below are in here
    24  leader epoch i32 of the last of them
    28  length u32 of what follows, but for the CRC
    32  the positions as HighwaterMarks (docs/internals/formats/marks.md)
    ..  CRC-32C u32 of all before

With the file, opening a large outbox need not read its logs. It is a secondary index of the log (see
pushrep/log/retention.py): the appender adds the positions that it wrote, and they count once the log has
flushed that far. Only records that nobody added are read from the log, a whole batch at a time and with no Python
object per record. A replica's node adds nothing; a service that stands by beside it does (PositionsFollower), so that
it has little to read when it takes over.
"""

import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from filtering import KEY_BYTES, METADATA_HEADER, FilteringError, HighwaterMarks, StreamMetadata, parse_keys
from filtering.rule import group_pairs
from pushrep.crc32c import crc32c_value
from pushrep.env import Clock, Filesystem, read_whole, write_atomic
from pushrep.errors import PushrepError
from pushrep.log import SegmentLog
from pushrep.log.directory_files import read_leader_epochs
from pushrep.log.reader import LogReader
from pushrep.log.retention import judge
from pushrep.outbox.errors import MetadataGap, MetadataNotRising, RecordRefused
from pushrep.records import RecordBatch
from pushrep.records.columns import RecordColumns
from pushrep.records.leader_epochs import LeaderEpochs

Pair = tuple[int, int]
_OFFSETS = 1 << 63


class Run:
    """Records `start` to `start + records` of a batch carry source offsets `offset`, `offset + 1`, ... of one pair."""

    __slots__ = ("offset", "partition", "pid", "records", "start")

    def __init__(self, start: int, records: int, metadata: StreamMetadata) -> None:
        self.start, self.records = start, records
        self.pid, self.partition, self.offset = metadata.pid, metadata.partition, metadata.offset

    @property
    def last_offset(self) -> int:
        return self.offset + self.records - 1

    def continues_with(self, start: int, metadata: StreamMetadata) -> bool:
        """Whether a record at `start` with this position is the run's next."""
        return (
            start == self.start + self.records
            and metadata.offset == self.offset + self.records
            and metadata.pid == self.pid
            and metadata.partition == self.partition
        )


class SourceOrder:
    """The positions taken by one partition of an outbox since it was opened."""

    __slots__ = ("_accepted", "_gaps", "_own_pid", "_partition", "_partitions")

    def __init__(self, *, own_pid: int, partition: int, partitions: int) -> None:
        self._own_pid, self._partition, self._partitions = own_pid, partition, partitions
        self._accepted: dict[Pair, int] = {}  # highest offset taken
        self._gaps: dict[Pair, tuple[int, str]] = {}  # first offset that failed and was not appended again, and why

    def accept(self, metadata: StreamMetadata, count: int = 1) -> None:
        """Accept `metadata` and the `count - 1` offsets after it, or raise `RecordRefused` and accept none."""
        pair = (metadata.pid, metadata.partition)
        offset = metadata.offset
        last = self._accepted.get(pair)
        if last is None:
            self._check_pair(metadata)
        if self._gaps and (gap := self._gaps.get(pair)) is not None and offset > gap[0]:
            raise MetadataGap(pid=pair[0], partition=pair[1], failed=gap[0], got=offset, reason=gap[1])
        if last is not None and offset <= last:
            raise MetadataNotRising(pid=pair[0], partition=pair[1], last=last, got=offset)
        if offset + count > _OFFSETS:
            raise RecordRefused("metadata", f"{count} source offsets from {offset} on exceed 64 bits")
        self._accepted[pair] = offset + count - 1
        if self._gaps:
            self._gaps.pop(pair, None)

    def accept_all(self, metadata: Sequence[StreamMetadata]) -> None:
        """Accept the positions in their order, or raise `RecordRefused` and accept none."""
        accepted, gaps = dict(self._accepted), dict(self._gaps)
        try:
            for position in metadata:
                self.accept(position)
        except RecordRefused:
            self._accepted, self._gaps = accepted, gaps
            raise

    def failed(self, runs: Iterable[Run], reason: str) -> None:
        """These positions did not reach the log: the first of each pair has to be appended next."""
        for run in runs:
            pair = (run.pid, run.partition)
            if run.offset < self._gaps.get(pair, (_OFFSETS, ""))[0]:
                self._gaps[pair] = (run.offset, reason)
                self._accepted[pair] = run.offset - 1

    def interrupted(self, metadata: StreamMetadata | Sequence[StreamMetadata] | None, start: int, end: int) -> None:
        """Ctrl-C stopped the append before the records `start` to `end` were in a batch: their positions have to come
        next.
        """
        if isinstance(metadata, StreamMetadata):
            first = StreamMetadata(metadata.pid, metadata.partition, metadata.offset + start)
            self.failed([Run(0, end - start, first)], "interrupted")
        elif metadata is not None:
            self.failed([Run(0, 1, position) for position in metadata[start:end]], "interrupted")

    def change_pid(self, own_pid: int) -> None:
        """From now on the outbox has another PID."""
        self._own_pid = own_pid

    def _check_pair(self, metadata: StreamMetadata) -> None:
        if metadata.pid == self._own_pid:
            raise RecordRefused(
                "metadata", f"PID {metadata.pid} is this outbox's own, which numbers records by their log offset"
            )
        if (wanted := metadata.partition % self._partitions) != self._partition:
            raise RecordRefused(
                "metadata",
                f"source partition {metadata.partition} belongs to partition {wanted} of {self._partitions} "
                f"(source partition mod partitions), not to {self._partition}",
            )


_NAME = np.frombuffer(METADATA_HEADER.encode(), np.uint8)


def highest_positions(batches: Iterable[RecordBatch], carrier: str) -> dict[Pair, int]:
    """(pid, source partition) -> highest source offset in the batches; records without metadata count for nothing."""
    highest: dict[Pair, int] = {}
    for batch in batches:
        if batch.header.is_control:
            continue
        keys = parse_keys(packed_metadata(batch.columns(), carrier))
        if not keys.valid.any():
            continue
        groups = group_pairs(keys.pids[keys.valid], keys.partitions[keys.valid])
        maxima = np.maximum.reduceat(groups.together(keys.offsets[keys.valid]), groups.starts)
        for pid, partition, offset in zip(
            groups.pids.tolist(), groups.partitions.tolist(), maxima.tolist(), strict=True
        ):
            if highest.get((pid, partition), -1) < offset:
                highest[pid, partition] = offset
    return highest


def packed_metadata(columns: RecordColumns, carrier: str) -> npt.NDArray[np.uint8]:
    """The 20 bytes of every record that has them, in log order: shape (n, 20), not yet checked for being metadata."""
    is_key = columns.key_length == KEY_BYTES
    starts = columns.key_start[is_key] if carrier == "key" else _last_header_starts(columns)
    payload = np.frombuffer(columns.payload, np.uint8)
    return _pieces(payload, starts, KEY_BYTES)


def _last_header_starts(columns: RecordColumns) -> npt.NDArray[np.int32]:
    """The position of the value of each record's last `stream-metadata` header, where the value has 20 bytes."""
    headers = columns.headers
    payload = np.frombuffer(columns.payload, np.uint8)
    rows = np.flatnonzero(headers.name_length == len(_NAME))
    names = _pieces(payload, headers.name_start[rows], len(_NAME))
    rows = rows[(names == _NAME).all(axis=1)]
    record = headers.record[rows]
    if not len(rows):
        return np.empty(0, np.int32)
    rows = rows[np.append(record[1:] != record[:-1], True)]
    starts: npt.NDArray[np.int32] = headers.value_start[rows[headers.value_length[rows] == KEY_BYTES]]
    return starts


def _pieces(data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.uint8]:
    """`width` bytes from each of `starts` on, as rows. Decoding the batch has checked the positions."""
    if not len(starts):
        return np.empty((0, width), np.uint8)
    # Overlapping windows are a view, so only the taken rows are copied: twice as fast as indexing by a matrix.
    windows = as_strided(data, (len(data) - width + 1, width), (1, 1), writeable=False)
    rows: npt.NDArray[np.uint8] = windows[starts]
    return rows


_LOG = logging.getLogger("pushrep.outbox")

POSITIONS_NAME = "outbox-positions"
VERSION = 1
FILE_BYTES_MAX = 1 << 30
_FOLLOW_S = 2.0

_MAGIC = b"pushpos\0"
_HEAD = struct.Struct(">8sIIqiI")
_CRC = struct.Struct(">I")
assert _HEAD.size == 32, "docs/internals/formats/outbox-positions.md promises 32 bytes"


class Positions(NamedTuple):
    """A file's content: the highest source offset of each pair in the records below `end_offset`."""

    end_offset: int
    leader_epoch: int
    highest: dict[Pair, int]


class _Noted(NamedTuple):
    """Records [start, end) of a written batch, and the highest source offsets in it."""

    start: int
    end: int
    leader_epoch: int
    highest: list[tuple[Pair, int]]


def encode_positions(positions: Positions, carrier: str) -> bytes:
    """The file's bytes."""
    pairs = list(positions.highest)
    marks = HighwaterMarks.from_columns(
        [pair[0] for pair in pairs], [pair[1] for pair in pairs], list(positions.highest.values())
    ).to_bytes()
    carried = int(carrier == "header")
    head = _HEAD.pack(_MAGIC, VERSION, carried, positions.end_offset, positions.leader_epoch, len(marks))
    return head + marks + _CRC.pack(crc32c_value(head + marks))


def decode_positions(data: bytes, carrier: str) -> Positions:
    """Decode the file's bytes. Raises ValueError, with the reason, for damaged ones and those of another carrier."""
    if len(data) < _HEAD.size + _CRC.size:
        raise ValueError(f"{len(data)} bytes are too few")
    magic, version, carried, end_offset, epoch, size = _HEAD.unpack_from(data)
    if (magic, version) != (_MAGIC, VERSION):
        raise ValueError(f"magic {magic!r} and version {version} are not {_MAGIC!r} and {VERSION}")
    if len(data) != _HEAD.size + size + _CRC.size:
        raise ValueError(f"{len(data)} bytes do not hold {size}")
    if _CRC.unpack_from(data, len(data) - _CRC.size)[0] != crc32c_value(data[: -_CRC.size]):
        raise ValueError("its CRC does not match")
    if carried != int(carrier == "header"):
        raise ValueError("it is of another carrier")
    columns = HighwaterMarks.from_bytes(data[_HEAD.size : -_CRC.size]).to_columns()
    pairs = zip(columns.pids.tolist(), columns.partitions.tolist(), strict=True)
    return Positions(end_offset, epoch, dict(zip(pairs, columns.offsets.tolist(), strict=True)))


class PositionsStore:
    """The positions of one partition's log. Thread-safe. An appender begins with a copy of them (`highest`)."""

    name = POSITIONS_NAME

    def __init__(self, path: Path, carrier: str, filesystem: Filesystem) -> None:
        """`path` is the file; its directory need not be there yet. Raises OSError."""
        self._path, self._carrier, self._filesystem = path, carrier, filesystem
        self._lock = threading.Lock()
        self._ahead: deque[_Noted] = deque()
        self._flushed: Callable[[], int] = lambda: 0
        self._known = self._read()
        self._saved = self._known.end_offset

    @property
    def end_offset(self) -> int:
        """The positions of all records below this offset are known, and those records are flushed."""
        with self._lock:
            self._absorb()
            return self._known.end_offset

    @property
    def last(self) -> tuple[int, int] | None:
        known = self._known
        return (known.end_offset - 1, known.leader_epoch) if known.end_offset else None

    @property
    def highest(self) -> dict[Pair, int]:
        """(pid, source partition) -> highest source offset; a copy."""
        with self._lock:
            return dict(self._known.highest)

    def follow(self, flushed_offset: Callable[[], int]) -> None:
        """The log is open; from now on added records count once they are below `flushed_offset()`."""
        self._flushed = flushed_offset

    def add(self, start: int, end: int, leader_epoch: int, highest: Iterable[tuple[Pair, int]]) -> None:
        """Records [start, end) were written. highest: the highest source offset of each pair in them."""
        with self._lock:
            self._ahead.append(_Noted(start, end, leader_epoch, list(highest)))
            self._absorb()

    def forget_ahead(self) -> None:
        """The log was opened again in place: what was added and is not in it now is lost."""
        with self._lock:
            self._ahead.clear()

    def dispatch(self, batch: RecordBatch) -> None:
        with self._lock:
            highest = highest_positions([batch], self._carrier)
            self._raise_to(batch.header.next_offset, batch.header.leader_epoch, highest.items())

    def cut_to(self, offset: int) -> None:
        """Forget everything: of a pair only the highest offset is known, not the one before it."""
        if self.end_offset > offset:
            self.destroy()

    def destroy(self) -> None:
        with self._lock:
            self._ahead.clear()
            self._known, self._saved = Positions(0, -1, {}), 0
            if self._filesystem.exists(self._path):
                self._filesystem.remove(self._path)
                self._filesystem.sync_directory(self._path.parent)

    def sync(self) -> None:
        with self._lock:
            self._absorb()
            known = self._known._replace(highest=dict(self._known.highest))
        if known.end_offset != self._saved:  # written without the lock, so that appends go on
            write_atomic(self._filesystem, self._path, [encode_positions(known, self._carrier)])
            self._saved = known.end_offset

    def _absorb(self) -> None:
        """Add what was noted, in order and without a hole, as far as the log is flushed."""
        if not self._ahead:
            return
        try:
            flushed = self._flushed()
        except PushrepError:  # closed: the log itself passes on what it flushed last
            return
        while self._ahead and self._ahead[0].end <= flushed and self._ahead[0].start <= self._known.end_offset:
            noted = self._ahead.popleft()
            if noted.end > self._known.end_offset:
                self._raise_to(noted.end, noted.leader_epoch, noted.highest)

    def _raise_to(self, end: int, leader_epoch: int, highest: Iterable[tuple[Pair, int]]) -> None:
        known = self._known.highest
        for pair, offset in highest:
            if known.get(pair, -1) < offset:
                known[pair] = offset
        self._known = Positions(end, leader_epoch, known)

    def _read(self) -> Positions:
        try:
            data = read_whole(self._filesystem, self._path, FILE_BYTES_MAX)
            if data is not None:
                return decode_positions(data, self._carrier)
        except (ValueError, FilteringError) as error:
            _LOG.warning("%s counts as absent, it is built from the log: %s", self._path, error)
        return Positions(0, -1, {})


class PositionsFollower:
    """Keeps the positions of a replica's logs, beside the node that has them open, in a thread until `stop`.

    Only records below the stable offset count. It reads for at most half of the time, because a log may be long.
    """

    def __init__(self, logs: Sequence[Path], carrier: str, filesystem: Filesystem, clock: Clock) -> None:
        self._logs, self._carrier, self._filesystem, self._clock = logs, carrier, filesystem, clock
        self._followed: dict[Path, tuple[LogReader, PositionsStore]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pushrep-positions", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """When this returns, everything that it read is in the files. It waits for one batch at most."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            began_ms = self._clock.monotonic_ms()
            for path in self._logs:
                if self._stop.is_set():
                    break
                try:
                    self._catch_up(path)
                except (OSError, PushrepError) as error:  # the node has cut it, for example; it is opened again
                    _LOG.debug("%s: its positions are not read now: %s", path, error)
                    self._close(path)
            pause_s = max(_FOLLOW_S, (self._clock.monotonic_ms() - began_ms) / 1000)
        for path in self._logs:
            self._close(path)

    def _catch_up(self, path: Path) -> None:
        if path not in self._followed:
            store = PositionsStore(path / POSITIONS_NAME, self._carrier, self._filesystem)
            self._followed[path] = SegmentLog.open_reader(path, filesystem=self._filesystem), store
        log, store = self._followed[path]
        bounds = log.bounds()
        if store.end_offset >= bounds.end:  # nothing is new, or no node runs to publish the log's end
            return
        epochs = read_leader_epochs(path, self._filesystem) or LeaderEpochs()
        if judge(store.end_offset, store.last, bounds, epochs) is not None:
            store.destroy()
        for batch in log.batches(max(store.end_offset, bounds.start), bounds.end):
            if self._stop.is_set() or batch.header.next_offset > bounds.end:
                break
            store.dispatch(batch)
        store.sync()

    def _close(self, path: Path) -> None:
        log, _ = self._followed.pop(path, (None, None))
        if log is not None:
            log.close()
