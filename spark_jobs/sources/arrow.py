"""Record batches in, Arrow batches out, with no Python per record (headers excepted).

A batch's values lie between other fields of its payload; Arrow wants them side by side:

    payload   ..|key|..|value 0|......|value 1|..        a BinaryArray over it with the offsets
    offsets        s0      e0     s1      e1             s0 e0 s1 e1 has the values in its even slots, the gaps in
    take(0, 2, ...)                                      its odd ones; `take` of the even slots copies them in C++

The columns are those of Spark's Kafka source, timestamps in microseconds as Spark keeps them.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)
from pyspark.sql.types import (
    TimestampType as SparkTimestamp,
)

from pushrep.records import RecordBatch, TimestampType
from pushrep.records.columns import RecordColumns
from spark_jobs.decide import EPOCH_COLUMNS

# The JVM holds one Arrow batch while Python builds the next; between 4,000 and 65,000 rows the speed is the same.
ROWS_MAX = 16_384
BYTES_MAX = 8 << 20
Column: TypeAlias = Any  # an Arrow array: the published type stubs know too little of its constructors
_MICROS_LIMIT_MS = (2**63 - 1) // 1000

_HEADER = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
_ARROW_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def source_schema(*, include_headers: bool, include_epochs: bool = False) -> StructType:
    """The columns of Spark's Kafka source; `headers` only if asked for, as there. The two epochs are the last."""
    fields = [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", SparkTimestamp()),
        StructField("timestampType", IntegerType()),
    ]
    if include_headers:
        fields.append(StructField("headers", ArrayType(_HEADER)))
    if include_epochs:
        fields += [StructField(name, LongType()) for name in EPOCH_COLUMNS]
    return StructType(fields)


class _Part(NamedTuple):
    key: Column
    value: Column
    offset: Column
    timestamp: Column
    timestamp_type: Column
    headers: Column | None


class ArrowWriter:
    """Turns the batches of one topic-partition into Arrow batches of `schema`, several to one."""

    def __init__(
        self,
        topic: str,
        partition: int,
        schema: pa.Schema,
        *,
        include_headers: bool,
        epochs: tuple[int, ...] = (),
    ) -> None:
        self._schema, self._include_headers = schema, include_headers
        self._epochs = [_Constant(epoch, pa.int64()) for epoch in epochs]
        self._topic, self._partition = _Constant(topic, pa.string()), _Constant(partition, pa.int32())
        self._types = {int(kind): _Constant(int(kind), pa.int32()) for kind in TimestampType}

    def convert(self, batches: Iterable[RecordBatch], start: int, end: int) -> Iterator[pa.RecordBatch]:
        """The records with offsets in [start, end), in order; control batches hold none."""
        waiting: list[_Part] = []
        rows = size = 0
        for batch in batches:
            if batch.header.is_control:
                continue
            columns = batch.columns()
            part = self._part(columns, int(batch.header.timestamp_type), start, end)
            count, part_bytes = len(part.offset), len(columns.payload)
            if count == 0:
                continue
            if waiting and (rows + count > ROWS_MAX or size + part_bytes > BYTES_MAX):
                yield self._joined(waiting, rows)
                waiting, rows, size = [], 0, 0
            waiting.append(part)
            rows += count
            size += part_bytes
        if waiting:
            yield self._joined(waiting, rows)

    def _part(self, columns: RecordColumns, timestamp_type: int, start: int, end: int) -> _Part:
        first, last = (int(row) for row in np.searchsorted(columns.offsets, (start, end)))
        rows = slice(first, last)
        payload = pa.py_buffer(columns.payload)
        return _Part(
            binary_array(payload, columns.key_start[rows], columns.key_length[rows]),
            binary_array(payload, columns.value_start[rows], columns.value_length[rows]),
            pa.array(columns.offsets[rows]),
            timestamp_array(columns.timestamps_ms[rows]),
            self._types[timestamp_type].array(last - first),
            headers_array(columns, payload, rows) if self._include_headers else None,
        )

    def _joined(self, parts: list[_Part], rows: int) -> pa.RecordBatch:
        whole = parts[0]
        if len(parts) > 1:
            columns = zip(*parts, strict=True)
            whole = _Part(*(None if column[0] is None else pa.concat_arrays(column) for column in columns))
        arrays = [
            whole.key,
            whole.value,
            self._topic.array(rows),
            self._partition.array(rows),
            whole.offset,
            whole.timestamp,
            whole.timestamp_type,
        ]
        if self._include_headers:
            arrays.append(whole.headers)
        arrays += [epoch.array(rows) for epoch in self._epochs]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


class _Constant:
    """A column of one value, made once and handed out by its length."""

    def __init__(self, value: object, arrow_type: pa.DataType) -> None:
        self._value, self._type = value, arrow_type
        self._array: Column = pa.array([], arrow_type)

    def array(self, count: int) -> Column:
        if len(self._array) < count:
            scalar: Any = pa.scalar(self._value, self._type)
            self._array = pa.repeat(scalar, count)
        return self._array.slice(0, count)


def binary_array(payload: pa.Buffer, starts: Any, lengths: Any) -> Column:
    """The pieces `payload[start : start + length]` as one compact array; a length below 0 is null."""
    count = len(starts)
    if count == 0 or lengths.max() < 0:
        return pa.nulls(count, pa.binary())
    present = lengths >= 0
    whole = bool(present.all())
    if not whole:
        starts, lengths = starts[present], lengths[present]
    edges = np.empty((len(starts), 2), np.int32)
    edges[:, 0] = starts
    edges[:, 1] = starts + lengths
    offsets = pa.py_buffer(edges.data)
    slots: Column = pa.Array.from_buffers(pa.binary(), edges.size - 1, [None, offsets, payload])
    if whole:
        return slots.take(pa.array(np.arange(0, edges.size, 2, dtype=np.int32)))
    # The null slots take nothing: their index is masked.
    indices = np.zeros(count, np.int32)
    indices[present] = np.arange(0, edges.size, 2, dtype=np.int32)
    return slots.take(pa.array(indices, mask=~present))


def timestamp_array(timestamps_ms: Any) -> Column:
    """Milliseconds since 1970 as Spark's microseconds; null where they don't fit into 64 bits."""
    micros = timestamps_ms * 1000
    mask = None
    if len(timestamps_ms) and not -_MICROS_LIMIT_MS <= timestamps_ms.min() <= timestamps_ms.max() <= _MICROS_LIMIT_MS:
        mask = (timestamps_ms < -_MICROS_LIMIT_MS) | (timestamps_ms > _MICROS_LIMIT_MS)
    return pa.array(micros, pa.int64(), mask=mask).view(pa.timestamp("us", "UTC"))


def headers_array(columns: RecordColumns, payload: pa.Buffer, rows: slice) -> Column:
    """The headers of these rows as lists of (key, value); null for a record without any, as Spark's Kafka source."""
    counts, headers = columns.headers_count[rows], columns.headers
    first, last = np.searchsorted(headers.record, (rows.start, rows.stop))
    flat = slice(int(first), int(last))
    pairs: Column = pa.StructArray.from_arrays(
        [
            _names(binary_array(payload, headers.name_start[flat], headers.name_length[flat])),
            binary_array(payload, headers.value_start[flat], headers.value_length[flat]),
        ],
        fields=list(_ARROW_HEADERS.value_type),
    )
    edges = np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
    offsets: Column = pa.array(edges)
    return pa.ListArray.from_arrays(offsets, pairs, type=_ARROW_HEADERS, mask=pa.array(counts == 0))


def _names(utf8: Column) -> Column:
    try:
        return utf8.cast(pa.string())
    except pa.ArrowInvalid:
        # What is not UTF-8 is replaced, as Kafka's own clients and RecordBatch.records() do.
        return pa.array([name.decode("utf-8", "replace") for name in utf8.to_pylist()], pa.string())
