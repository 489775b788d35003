"""The positions that a log holds, kept beside it, so that opening a large outbox does not read it all again.

    <topic>-<n>/outbox-positions       big-endian; a file that is not whole counts as absent, and is built from the log
    0   magic 8, "pushpos" and a zero
    8   version u32 = 1
    12  carrier u32: 0 key, 1 header
    16  end offset i64: the positions of all records below are in here
    24  leader epoch i32 of the last of them
    28  length u32 of what follows, but for the CRC
    32  the positions as HighwaterMarks (docs/formats/marks.md)
    ..  CRC-32C u32 of all before

A store derived from the log (pushrep/log/derived.py). The appender adds what it wrote, with the positions that it
knows anyway; they count once the log has flushed that far. Only what nobody added is read from the log.
"""

import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import google_crc32c

from filtering import FilteringError, HighwaterMarks
from pushrep.env import Filesystem, read_whole, write_atomic
from pushrep.errors import PushrepError
from pushrep.outbox.positions import highest_positions
from pushrep.outbox.source_order import Pair
from pushrep.records import RecordBatch

_LOG = logging.getLogger("pushrep.outbox")

POSITIONS_NAME = "outbox-positions"
VERSION = 1
FILE_BYTES_MAX = 1 << 30

_MAGIC = b"pushpos\0"
_HEAD = struct.Struct(">8sIIqiI")
_CRC = struct.Struct(">I")
assert _HEAD.size == 32, "docs/formats/outbox-positions.md promises 32 bytes"


class Positions(NamedTuple):
    """What a file says: the highest source offset of each pair in the records below `end_offset`."""

    end_offset: int
    leader_epoch: int
    highest: dict[Pair, int]


class _Noted(NamedTuple):
    """Records [start, end) of one batch that was written, and the highest source offsets in it."""

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
    return head + marks + _CRC.pack(google_crc32c.value(head + marks))


def decode_positions(data: bytes, carrier: str) -> Positions:
    """What the bytes say. Raises ValueError with the reason for those that don't say it, or of another carrier."""
    if len(data) < _HEAD.size + _CRC.size:
        raise ValueError(f"{len(data)} bytes are too few")
    magic, version, carried, end_offset, epoch, size = _HEAD.unpack_from(data)
    if (magic, version) != (_MAGIC, VERSION):
        raise ValueError(f"magic {magic!r} and version {version} are not {_MAGIC!r} and {VERSION}")
    if len(data) != _HEAD.size + size + _CRC.size:
        raise ValueError(f"{len(data)} bytes do not hold {size}")
    if _CRC.unpack_from(data, len(data) - _CRC.size)[0] != google_crc32c.value(data[: -_CRC.size]):
        raise ValueError("its CRC does not match")
    if carried != int(carrier == "header"):
        raise ValueError("it tells of another carrier")
    columns = HighwaterMarks.from_bytes(data[_HEAD.size : -_CRC.size]).to_columns()
    pairs = zip(columns.pids.tolist(), columns.partitions.tolist(), strict=True)
    return Positions(end_offset, epoch, dict(zip(pairs, columns.offsets.tolist(), strict=True)))


class PositionsStore:
    """One partition's. Thread-safe; `positions` of an appender begin as a copy of what it knows."""

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
        """The positions of all records below are known and flushed."""
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

    def knows_any(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Those of the pairs that have a record in the log."""
        with self._lock:
            known = self._known.highest
            return [pair for pair in pairs if pair in known]

    def follow(self, flushed_offset: Callable[[], int]) -> None:
        """The log is open; what is noted from now on counts as it is flushed."""
        self._flushed = flushed_offset

    def add(self, start: int, end: int, leader_epoch: int, highest: Iterable[tuple[Pair, int]]) -> None:
        """Records [start, end) were written; the highest source offset of each pair in them."""
        with self._lock:
            self._ahead.append(_Noted(start, end, leader_epoch, list(highest)))
            self._absorb()

    def dispatch(self, batch: RecordBatch) -> None:
        with self._lock:
            highest = highest_positions([batch], self._carrier)
            self._raise_to(batch.header.next_offset, batch.header.leader_epoch, highest.items())

    def cut_to(self, offset: int) -> None:
        """Everything is forgotten: of a pair only the highest offset is known, not what was highest before."""
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
        if known.end_offset != self._saved:  # written without the lock: appends go on
            write_atomic(self._filesystem, self._path, [encode_positions(known, self._carrier)])
            self._saved = known.end_offset

    def _absorb(self) -> None:
        """Take what was noted, in order and without a hole, as far as the log is flushed."""
        if not self._ahead:
            return
        try:
            flushed = self._flushed()
        except PushrepError:  # closed: what it flushed at the end, it tells by itself
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
        while self._ahead and self._ahead[0].end <= end:
            self._ahead.popleft()

    def _read(self) -> Positions:
        try:
            data = read_whole(self._filesystem, self._path, FILE_BYTES_MAX)
            if data is not None:
                return decode_positions(data, self._carrier)
        except (ValueError, FilteringError) as error:
            _LOG.warning("%s counts as absent, it is built from the log: %s", self._path, error)
        return Positions(0, -1, {})
