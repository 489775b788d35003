"""The 20-byte key, one at a time and by the column."""

import pickle

import numpy as np
import pyarrow as pa
import pytest

from filtering import (
    KEY_BYTES,
    METADATA_HEADER,
    BadFilterSetting,
    NotStreamMetadata,
    StreamMetadata,
    pack_keys,
    parse_keys,
)

KEY = StreamMetadata(-7334467018974291969, 1, 0)
PACKED = bytes.fromhex("9a36bd1b1d3817ff000000010000000000000000")


def test_the_published_vector_packs_and_unpacks():
    assert KEY.pack() == PACKED, "the key must stay byte-compatible with SQE"
    assert StreamMetadata.unpack(PACKED) == KEY
    assert (KEY_BYTES, METADATA_HEADER) == (20, "stream-metadata")


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (None, "null"),
        ("text", "str, not bytes"),
        (b"", "0 bytes long"),
        (PACKED[:19], "19 bytes long"),
        (PACKED + b"\0", "21 bytes long"),
        (PACKED[:8] + b"\xff\xff\xff\xff" + PACKED[12:], "negative partition -1"),
        (PACKED[:8] + b"\x80\0\0\0" + PACKED[12:], "negative partition -2147483648"),
        (PACKED[:12] + b"\xff" * 8, "negative offset -1"),
    ],
)
def test_whatever_is_no_metadata_is_refused_with_the_reason(key, why):
    with pytest.raises(NotStreamMetadata, match=why) as refusal:
        StreamMetadata.unpack(key)
    assert why in refusal.value.why
    assert StreamMetadata.try_unpack(key) is None


@pytest.mark.parametrize("key", [bytearray(PACKED), memoryview(PACKED), memoryview(PACKED * 2)[:20]])
def test_every_kind_of_bytes_unpacks(key):
    assert StreamMetadata.unpack(key) == KEY


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ((2**63, 0, 0), "pid"),
        ((-(2**63) - 1, 0, 0), "pid"),
        ((0, -1, 0), "partition"),
        ((0, 2**31, 0), "partition"),
        ((0, 0, -1), "offset"),
        ((0, 0, 2**63), "offset"),
        ((0, 0, 1.5), "offset"),
        (("7", 0, 0), "pid"),
    ],
)
def test_a_part_that_does_not_fit_is_named(parts, field):
    with pytest.raises(BadFilterSetting) as refusal:
        StreamMetadata(*parts)
    assert refusal.value.setting == field
    assert f"{field}=" in str(refusal.value)


def test_errors_survive_pickle_with_their_fields():
    error = pickle.loads(pickle.dumps(BadFilterSetting("offset", -1, "in [0, 2^63)")))
    assert (error.setting, error.value, error.allowed) == ("offset", -1, "in [0, 2^63)")
    assert "offset=-1" in str(error)


def test_it_orders_by_pid_partition_offset_and_numpy_integers_become_plain_ones():
    assert StreamMetadata(1, 2, 3) < StreamMetadata(1, 2, 4) < StreamMetadata(1, 3, 0) < StreamMetadata(2, 0, 0)
    assert type(StreamMetadata(np.int64(1), np.int32(2), np.uint8(3)).offset) is int


def test_consecutive_keys_are_packed_at_once():
    packed = pack_keys(-5, 3, 10, 4)
    assert packed == b"".join(StreamMetadata(-5, 3, offset).pack() for offset in range(10, 14))
    assert pack_keys(-5, 3, 10, 0) == b""
    assert StreamMetadata.unpack(pack_keys(1, 1, 2**63 - 1, 1)).offset == 2**63 - 1


@pytest.mark.parametrize(("first", "count", "field"), [(-1, 1, "offset"), (2**63 - 1, 2, "offset"), (0, -1, "count")])
def test_consecutive_keys_out_of_range_are_refused(first, count, field):
    with pytest.raises(BadFilterSetting) as refusal:
        pack_keys(1, 1, first, count)
    assert refusal.value.setting == field


COLUMN = [
    None,
    pack_keys(-5, 3, 10, 1),
    b"x" * 30,
    pack_keys(-5, 3, 11, 1),
    b"",
    pack_keys(2**62, 0, 7, 1),
    b"\xff" * 20,
]
VALID = [False, True, False, True, False, True, False]
OFFSETS = [10, 11, 7]


def forms_of_the_column():
    binary, large = pa.array(COLUMN, pa.binary()), pa.array(COLUMN, pa.large_binary())
    padded = pa.array([b"left out", *COLUMN, None, b"left out"], pa.binary())
    fixed_rows = [key if key is not None and len(key) == 20 else None for key in COLUMN]
    yield "list", COLUMN
    yield "tuple", tuple(COLUMN)
    yield "numpy objects", np.array(COLUMN, object)
    yield "bytearrays", [None if key is None else bytearray(key) for key in COLUMN]
    yield "memoryviews", [None if key is None else memoryview(key) for key in COLUMN]
    yield "binary", binary
    yield "large_binary", large
    yield "slice of binary", padded[1:8]
    yield "slice of large_binary", pa.array([None, *COLUMN], pa.large_binary())[1:]
    yield "fixed_size_binary", pa.array(fixed_rows, pa.binary(20))
    yield "slice of fixed_size_binary", pa.array([None, PACKED, *fixed_rows, PACKED], pa.binary(20))[2:9]
    yield "chunked", pa.chunked_array([binary[:2], binary[2:2], binary[2:]])
    yield "chunked large_binary", pa.chunked_array([large[:5], large[5:]])
    yield "one chunk", pa.chunked_array([binary])


@pytest.mark.parametrize("form", [form for form, _ in forms_of_the_column()])
def test_a_column_is_read_alike_in_every_form(form):
    keys = parse_keys(dict(forms_of_the_column())[form])
    assert keys.valid.tolist() == VALID
    assert keys.offsets[keys.valid].tolist() == OFFSETS
    assert keys.pids[keys.valid].tolist() == [-5, -5, 2**62]
    assert keys.partitions[keys.valid].tolist() == [3, 3, 0]


def contiguous_forms():
    packed = pack_keys(9, 4, 100, 5)
    keys = [packed[i : i + 20] for i in range(0, 100, 20)]
    square = np.frombuffer(packed, np.uint8).reshape(-1, 20)
    yield "bytes", packed
    yield "bytearray", bytearray(packed)
    yield "memoryview", memoryview(packed)
    yield "uint8 (n, 20)", square
    yield "uint8 strided", np.repeat(square, 2, axis=0)[::2]
    yield "uint8 columns of a wider array", np.hstack([square, square])[:, 20:]
    yield "uint8 flat", square.reshape(-1)
    yield "list", keys
    yield "binary", pa.array(keys, pa.binary())
    yield "binary slice", pa.array([PACKED, *keys, PACKED], pa.binary())[1:6]
    yield "fixed_size_binary", pa.array(keys, pa.binary(20))
    yield "chunked", pa.chunked_array([pa.array(keys[:2]), pa.array(keys[2:])])


@pytest.mark.parametrize("form", [form for form, _ in contiguous_forms()])
def test_contiguous_columns_are_read_alike(form):
    keys = parse_keys(dict(contiguous_forms())[form])
    assert keys.valid.all()
    assert keys.offsets.tolist() == [100, 101, 102, 103, 104]
    assert set(keys.pids.tolist()) == {9}
    assert parse_keys(keys) is keys


@pytest.mark.parametrize(
    "empty",
    [b"", [], np.empty((0, 20), np.uint8), pa.array([], pa.binary()), pa.chunked_array([], pa.binary()), pa.nulls(0)],
    ids=lambda value: type(value).__name__,
)
def test_an_empty_column_gives_empty_arrays(empty):
    keys = parse_keys(empty)
    assert [len(column) for column in keys] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "column",
    [pa.nulls(3), pa.array([None] * 3, pa.binary()), pa.array([b"abc"] * 3, pa.binary(3)), [None] * 3, ["a", 1, 2.5]],
    ids=["null", "nulls", "other width", "Nones", "no bytes"],
)
def test_a_column_without_any_metadata_is_all_invalid(column):
    assert parse_keys(column).valid.tolist() == [False] * 3


@pytest.mark.parametrize("offset_type", [np.int32, np.int64])
def test_a_null_is_no_key_even_if_twenty_bytes_lie_under_it(offset_type):
    kind = pa.binary() if offset_type is np.int32 else pa.large_binary()
    buffers = [bytes([0b101]), np.array([0, 20, 40, 60], offset_type).tobytes(), PACKED * 3]
    column = pa.Array.from_buffers(kind, 3, [pa.py_buffer(buffer) for buffer in buffers])
    assert column.to_pylist() == [PACKED, None, PACKED]
    assert parse_keys(column).valid.tolist() == [True, False, True]
    assert parse_keys(column[1:]).valid.tolist() == [False, True]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (b"x" * 21, "no multiple of 20"),
        (np.zeros((3, 19), np.uint8), r"shape \(3, 19\)"),
        (np.zeros(3, np.int64), "int64"),
        (pa.array(["text"]), "string"),
        (pa.array([1, 2]), "int64"),
        ("text", "str"),
        (7, "int"),
    ],
)
def test_a_column_that_holds_no_bytes_is_refused_by_name(keys, named):
    with pytest.raises(BadFilterSetting, match=named):
        parse_keys(keys)
