"""Record batches as Arrow, without Spark: the same records, whatever they hold, and nothing of control batches."""

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from pushrep.records import Codec, RecordBatch, encode_batch
from spark_jobs.sources import arrow
from spark_jobs.sources.arrow import ArrowWriter, source_schema

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MS_2000 = 946_684_800_000

FIELDS = st.none() | st.binary(max_size=200)
HEADERS = st.lists(st.tuples(st.text(max_size=5), FIELDS), max_size=4)
RECORDS = st.lists(st.tuples(FIELDS, FIELDS, HEADERS, st.integers(-MS_2000, 2 * MS_2000)), min_size=1, max_size=40)


def encode(records, base_offset: int = 0, codec: Codec = Codec.NONE) -> RecordBatch:
    keys, values, headers, times = (list(column) for column in zip(*records, strict=True))
    return encode_batch(values, keys=keys, headers=headers, timestamps_ms=times, base_offset=base_offset, codec=codec)


def convert(batches, start: int = 0, end: int = 2**62, *, include_headers: bool = True) -> list[dict]:
    schema = to_arrow_schema(source_schema(include_headers=include_headers), timezone="UTC")
    converted = list(ArrowWriter("orders", 3, schema, include_headers=include_headers).convert(batches, start, end))
    for batch in converted:
        batch.validate(full=True)
        assert batch.schema.equals(schema), "Spark compares the schema of what it is handed"
    return [row for batch in converted for row in batch.to_pylist()]


def expected(batches, start: int, end: int) -> list[dict]:
    return [
        {
            "key": record.key,
            "value": record.value,
            "topic": "orders",
            "partition": 3,
            "offset": record.offset,
            "timestamp": EPOCH + timedelta(milliseconds=record.timestamp_ms),
            "timestampType": int(record.timestamp_type),
            "headers": [{"key": name, "value": value} for name, value in record.headers] or None,
        }
        for batch in batches
        for record in batch.records()
        if start <= record.offset < end
    ]


@given(st.lists(RECORDS, min_size=1, max_size=4), st.sampled_from(Codec), st.data())
def test_arrow_rows_are_the_records(parts, codec, data):
    batches, base = [], data.draw(st.integers(0, 2**40))
    first = base
    for records in parts:
        batches.append(encode(records, base, codec))
        base = batches[-1].header.next_offset
    start = data.draw(st.integers(first, base))
    end = data.draw(st.integers(start, base))
    assert convert(batches, start, end) == expected(batches, start, end)


def test_without_headers_there_is_no_such_column():
    (row,) = convert([encode([(b"k", b"v", [("h", b"x")], 5)])], include_headers=False)
    assert set(row) == {"key", "value", "topic", "partition", "offset", "timestamp", "timestampType"}


def test_a_control_batch_holds_no_records():
    data = bytearray(encode([(b"k", b"v", [], 5)], base_offset=1).data)
    data[22] |= 0x20  # bit 5 of the attributes, bytes 21 and 22
    batches = [encode([(b"a", b"1", [], 5)]), RecordBatch(data), encode([(b"b", b"2", [], 5)], base_offset=2)]
    assert batches[1].header.is_control
    assert [row["offset"] for row in convert(batches)] == [0, 2]


def test_many_small_batches_become_few_arrow_batches(monkeypatch):
    monkeypatch.setattr(arrow, "ROWS_MAX", 10)
    batches = [encode([(None, b"v", [], 5)] * 4, base_offset=4 * n) for n in range(6)]
    schema = to_arrow_schema(source_schema(include_headers=False), timezone="UTC")
    converted = list(ArrowWriter("orders", 0, schema, include_headers=False).convert(batches, 1, 22))
    assert [batch.num_rows for batch in converted] == [7, 8, 6]
    assert [offset for batch in converted for offset in batch["offset"].to_pylist()] == list(range(1, 22))


@pytest.mark.parametrize("ms", [2**62 - 1, -(2**62)])
def test_a_time_that_spark_can_not_hold_is_null(ms):
    batch = encode([(None, b"v", [], ms), (None, b"w", [], 7)])
    schema = to_arrow_schema(source_schema(include_headers=False), timezone="UTC")
    (converted,) = ArrowWriter("orders", 0, schema, include_headers=False).convert([batch], 0, 2)
    assert converted["timestamp"].cast(pa.int64()).to_pylist() == [None, 7000]


def test_a_header_name_that_is_no_text_is_mended_not_refused():
    batch = encode([(None, b"v", [("name", b"x")], 5)])
    data = bytearray(batch.data)
    at = data.index(b"name")
    data[at : at + 4] = b"n\xff\xfee"
    (row,) = convert([RecordBatch(data)])
    assert row["headers"] == [{"key": "n\ufffd\ufffde", "value": b"x"}]
