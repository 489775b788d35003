"""The 20-byte key: where a record first lived.

     0               8          12              20   big-endian, signed
    | pid i64       | partition | offset i64    |
                      i32: the source partition, the source offset

Exactly 20 bytes, no magic, no version: byte-compatible with JW Player's SQE, whose consumers read the same keys.
Partition and offset are never negative: compared as bytes -1 stands above every offset, so after
one such key every record of its (PID, partition) would count as a replay. So bytes 8 and 12 are below 0x80; Spark's
column expressions (spark_jobs/columns.py) test the same.
Format: docs/internals/formats/stream-metadata-key.md.

Arrow binary columns are read through their buffers, so that this package needs no Arrow library:

    binary / large_binary     | validity bits | offsets i32 / i64 (n + 1) | data |
    fixed_size_binary[w]      | validity bits | data: n x w               |

A slice keeps its parent's buffers and says where it begins by `.offset`; a validity bit of 0 is a null, bits count
from the lowest. Source: the Arrow columnar format, version 1.5, "Variable-size Binary Layout".
"""

import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from filtering.errors import BadFilterSetting, NotStreamMetadata

Rows = npt.NDArray[np.uint8]
Present = npt.NDArray[np.bool_]

_OFFSET_TYPES: "dict[str, np.dtype[Any]]" = {"binary": np.dtype("<i4"), "large_binary": np.dtype("<i8")}
_FIXED = "fixed_size_binary["


def _unsupported(what: str) -> BadFilterSetting:
    forms = (
        "n x 20 contiguous bytes, a uint8 array of shape (n, 20), an Arrow binary, large_binary or fixed_size_binary "
        "array, or a sequence of bytes and None"
    )
    return BadFilterSetting("keys", what, forms)


def rows_of_arrow(keys: Any, width: int) -> tuple[Rows, Present | None]:
    """The column as bytes of shape (n, width), and which rows hold exactly `width` bytes (None: all of them).

    All other rows are zeros. Raises BadFilterSetting for a column that holds no bytes.
    """
    if not hasattr(keys, "iterchunks"):
        return _rows_of_array(keys, width)
    parts = [_rows_of_array(chunk, width) for chunk in keys.iterchunks()]
    if len(parts) == 1:
        return parts[0]
    if all(present is None for _, present in parts):
        return np.concatenate([np.empty((0, width), np.uint8), *(rows for rows, _ in parts)]), None
    presents = [np.ones(len(rows), np.bool_) if present is None else present for rows, present in parts]
    return np.concatenate([rows for rows, _ in parts]), np.concatenate(presents)


def _rows_of_array(array: Any, width: int) -> tuple[Rows, Present | None]:
    kind, count = str(array.type), len(array)
    if kind == "null" or count == 0:
        return np.zeros((count, width), np.uint8), np.zeros(count, np.bool_) if count else None
    if kind.startswith(_FIXED):
        return _fixed(array, int(kind[len(_FIXED) : -1]), width)
    if kind in _OFFSET_TYPES:
        return _variable(array, _OFFSET_TYPES[kind], width)
    raise _unsupported(f"an Arrow column of {kind}")


def _fixed(array: Any, own_width: int, width: int) -> tuple[Rows, Present | None]:
    count = len(array)
    validity, data = array.buffers()
    if own_width != width:
        return np.zeros((count, width), np.uint8), np.zeros(count, np.bool_)
    start = array.offset * width
    rows = np.frombuffer(data, np.uint8)[start : start + count * width].reshape(count, width)
    return rows, _validity(array, validity)


def _variable(array: Any, offset_type: "np.dtype[Any]", width: int) -> tuple[Rows, Present | None]:
    count = len(array)
    validity, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, offset_type)[array.offset : array.offset + count + 1].astype(np.int64, copy=False)
    content = np.frombuffer(data if data is not None else b"", np.uint8)
    present = _validity(array, validity)
    fits = (bounds[1:] - bounds[:-1]) == width
    if present is None and fits.all():
        return content[bounds[0] : bounds[-1]].reshape(count, width), None
    present = fits if present is None else present & fits
    rows = np.zeros((count, width), np.uint8)
    if present.any():
        # Every start position seen as one element of `width` bytes: a gather without a Python step per row.
        windows = np.ndarray((len(content) - width + 1,), np.dtype((np.void, width)), content.data, strides=(1,))
        rows[present] = windows[bounds[:-1][present]].view(np.uint8).reshape(-1, width)
    return rows, present


def _validity(array: Any, validity: Any) -> Present | None:
    if validity is None or array.null_count == 0:
        return None
    start, count = array.offset, len(array)
    octets = np.frombuffer(validity, np.uint8)[start // 8 : (start + count + 7) // 8]
    return np.unpackbits(octets, bitorder="little")[start % 8 : start % 8 + count].astype(np.bool_)


METADATA_HEADER = "stream-metadata"
KEY_BYTES = 20
PARTITION_MAX = 2**31 - 1
OFFSET_MAX = 2**63 - 1
_PID_MIN = -(2**63)

_KEY = struct.Struct(">qiq")
assert _KEY.size == KEY_BYTES, "docs/internals/formats/stream-metadata-key.md promises 20 bytes"
_KEY_ROW = np.dtype([("pid", ">i8"), ("partition", ">i4"), ("offset", ">i8")])
assert _KEY_ROW.itemsize == KEY_BYTES, "the array form reads the same 20 bytes"

_NO_KEY = b"\xff" * KEY_BYTES  # partition and offset -1: stands where a sequence holds no key
_RANGES = (
    ("pid", _PID_MIN, 2**63 - 1, "a signed 64-bit number"),
    ("partition", 0, PARTITION_MAX, "in [0, 2^31)"),
    ("offset", 0, OFFSET_MAX, "in [0, 2^63)"),
)


@dataclass(frozen=True, slots=True, order=True)
class StreamMetadata:
    """Names one source record: the producer's `pid`, its source `partition` and its source `offset`.

    Raises BadFilterSetting for a part that does not fit its field.
    """

    pid: int
    partition: int
    offset: int

    def __post_init__(self) -> None:
        # One is made for every record that is sent: numbers that fit take the short way.
        if type(self.pid) is type(self.partition) is type(self.offset) is int and (
            _PID_MIN <= self.pid <= OFFSET_MAX
            and 0 <= self.partition <= PARTITION_MAX
            and 0 <= self.offset <= OFFSET_MAX
        ):
            return
        for field, low, high, allowed in _RANGES:
            value = getattr(self, field)
            try:
                number = operator.index(value)
            except TypeError:
                raise BadFilterSetting(field, value, allowed) from None
            if not low <= number <= high:
                raise BadFilterSetting(field, value, allowed)
            if number is not value:
                object.__setattr__(self, field, number)  # a numpy integer came in; keep Python's

    def pack(self) -> bytes:
        """The 20 bytes that travel as key, or as value of the header `stream-metadata`."""
        return _KEY.pack(self.pid, self.partition, self.offset)

    @classmethod
    def unpack(cls, key: object) -> "StreamMetadata":
        """Read 20 bytes; raises NotStreamMetadata with the reason for anything else, null and negatives included."""
        data = _bytes_of(key)
        if data is None:
            raise NotStreamMetadata("null" if key is None else f"{type(key).__name__}, not bytes")
        if len(data) != KEY_BYTES:
            raise NotStreamMetadata(f"{len(data)} bytes long, not {KEY_BYTES}")
        pid, partition, offset = _KEY.unpack(data)
        if partition < 0:
            raise NotStreamMetadata(f"negative partition {partition}")
        if offset < 0:
            raise NotStreamMetadata(f"negative offset {offset}")
        return cls(pid, partition, offset)

    @classmethod
    def try_unpack(cls, key: object) -> "StreamMetadata | None":
        """Read 20 bytes; None for whatever `unpack` refuses. Never raises."""
        try:
            return cls.unpack(key)
        except NotStreamMetadata:
            return None


class Keys(NamedTuple):
    """A column of keys as numpy arrays of one length; where `valid` is False the other three mean nothing."""

    pids: npt.NDArray[np.int64]
    partitions: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    valid: npt.NDArray[np.bool_]


def pack_keys(pid: int, partition: int, first_offset: int, count: int) -> bytes:
    """`count` keys of consecutive source offsets from `first_offset` on, contiguous: count x 20 bytes."""
    if count < 0:
        raise BadFilterSetting("count", count, "not negative")
    first = StreamMetadata(pid, partition, first_offset)
    if count == 0:
        return b""
    StreamMetadata(pid, partition, first_offset + count - 1)
    rows = np.empty(count, _KEY_ROW)
    rows["pid"] = first.pid
    rows["partition"] = first.partition
    rows["offset"] = np.arange(count, dtype=np.int64) + first.offset
    return rows.tobytes()


def parse_keys(keys: Any) -> Keys:
    """Read a column of keys without a Python step per row where the input is contiguous.

    `keys`: n x 20 contiguous bytes · uint8 array of shape (n, 20) · Arrow binary, large_binary or fixed_size_binary
    array or chunked array (slices respected) · sequence of bytes and None · `Keys`, given back as they are.
    A null, another length, a negative partition or offset makes a row invalid. Raises BadFilterSetting for other forms.
    """
    if isinstance(keys, Keys):
        return keys
    rows, present = _rows(keys)
    fields = rows.view(_KEY_ROW).reshape(-1) if len(rows) else np.empty(0, _KEY_ROW)
    partitions = fields["partition"].astype(np.int64)
    offsets = fields["offset"].astype(np.int64)
    # One comparison for both signs: the sign bit of the OR is set where either is negative.
    valid = (partitions | offsets) >= 0
    if present is not None:
        valid &= present
    return Keys(fields["pid"].astype(np.int64), partitions, offsets, valid)


_Rows = tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_] | None]


def _rows(keys: Any) -> _Rows:
    """Any supported column → its bytes as (n, 20) and which rows hold a key of that length (None: all of them)."""
    if isinstance(keys, bytes | bytearray | memoryview):
        return _rows_of_buffer(np.frombuffer(keys, np.uint8)), None
    if isinstance(keys, np.ndarray) and keys.dtype == np.uint8:
        return _rows_of_buffer(keys), None
    if hasattr(keys, "buffers") or hasattr(keys, "iterchunks"):  # of Arrow: an array, a chunked one
        return rows_of_arrow(keys, KEY_BYTES)
    if isinstance(keys, str) or not hasattr(keys, "__iter__"):
        raise _unsupported(type(keys).__name__)
    if isinstance(keys, np.ndarray) and keys.dtype != np.object_:
        raise _unsupported(f"a numpy array of {keys.dtype}")
    return _rows_of_sequence(keys if isinstance(keys, list | tuple) else list(keys))


def _rows_of_buffer(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    if data.ndim == 2 and data.shape[1] == KEY_BYTES:
        return np.ascontiguousarray(data)
    if data.ndim != 1 or len(data) % KEY_BYTES:
        raise _unsupported(f"bytes of shape {data.shape}, no multiple of {KEY_BYTES}")
    return np.ascontiguousarray(data).reshape(-1, KEY_BYTES)


def _rows_of_sequence(keys: Sequence[Any]) -> _Rows:
    if set(map(type, keys)) <= {bytes} and set(map(len, keys)) <= {KEY_BYTES}:
        return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES), None
    found = [_bytes_of(key) for key in keys]
    present = np.array([data is not None and len(data) == KEY_BYTES for data in found], np.bool_)
    joined = b"".join(data if data is not None and len(data) == KEY_BYTES else _NO_KEY for data in found)
    return np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES), present


def _bytes_of(key: object) -> bytes | None:
    if isinstance(key, bytes):
        return key
    try:
        return memoryview(key).tobytes()  # type: ignore[arg-type]
    except TypeError:
        return None


POSITION_BITS = 63
"""Of a source offset: a signed 64-bit number that is never negative."""


class PositionBits:
    """A position of several numbers as one source offset, for records whose producer writes no stream metadata.

        PositionBits(19, 32, 12)        binlog file, place in it, row of the event
        bit   62        44 43          12 11         0
             | file (19)  | place (32)   | row (12)   |      the first part counts most, bit 62 is its highest

    bits: how many each part has, at most 63 in all. Of two positions the larger one, compared part by part, has the
    larger offset. Other widths would give other offsets, and old marks would lie: they are chosen once and for all.
    Raises BadFilterSetting.
    """

    __slots__ = ("bits",)

    def __init__(self, *bits: int) -> None:
        if not bits or any(type(size) is not int or size < 1 for size in bits) or sum(bits) > POSITION_BITS:
            raise BadFilterSetting("bits", bits, f"for each part a whole number from 1 on, {POSITION_BITS} in all")
        self.bits = bits

    def pack(self, *parts: int) -> int:
        """The source offset of a position. Raises BadFilterSetting for a part that is no number of its bits."""
        if len(parts) != len(self.bits):
            raise BadFilterSetting("parts", parts, f"{len(self.bits)} numbers")
        offset = 0
        for part, size in zip(parts, self.bits, strict=True):
            number = operator.index(part)
            if not 0 <= number < 1 << size:
                raise BadFilterSetting("part", number, f"in [0, 2^{size})")
            offset = offset << size | number
        return offset

    def unpack(self, offset: int) -> tuple[int, ...]:
        """The parts again, of a mark's offset for instance."""
        parts: list[int] = []
        for size in reversed(self.bits):
            parts.append(offset & ((1 << size) - 1))
            offset >>= size
        return tuple(reversed(parts))
