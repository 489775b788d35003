"""Rows as one binary each: how filter_replays hands them to Python. Spark packs by built-in functions, numpy opens.

    | nulls | numbers, 4 or 8 bytes each | lengths, 4 bytes each | the bytes of each binary and string, one by one |
      int32: a bit for each column, set where it is null; then it is 0, or empty; all numbers are big-endian

Spark writes rows to Arrow value by value, and after each row it adds up the bytes of all columns. Both cost by the
column, and this makes them one (benchmarks/NOTES.md). Booleans, whole numbers, dates, timestamps, binaries and strings
are packed, COLUMNS_MAX of them; any other column stays beside them as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql import types as T  # noqa: N812 - Spark's own habit

from spark_jobs.columns import number_bytes
from spark_jobs.spark_internals import arrow_schema

ROW = "_pushrep_row"
COLUMNS_MAX = 31


class _Number(NamedTuple):
    """A column as a number of `size` bytes: by which SQL, and what numpy makes of it again."""

    sql: str
    size: int
    dtype: type[np.generic]


_NUMBERS: Mapping[type[T.DataType], _Number] = {
    T.BooleanType: _Number("cast({} as int)", 4, np.bool_),
    T.ByteType: _Number("cast({} as int)", 4, np.int8),
    T.ShortType: _Number("cast({} as int)", 4, np.int16),
    T.IntegerType: _Number("{}", 4, np.int32),
    T.DateType: _Number("unix_date({})", 4, np.int32),
    T.LongType: _Number("{}", 8, np.int64),
    T.TimestampType: _Number("unix_micros({})", 8, np.int64),
}


class _Column(NamedTuple):
    """A packed column; `number` is None for bytes."""

    name: str
    arrow: Any
    number: _Number | None

    @property
    def sql_name(self) -> str:
        return f"`{self.name.replace('`', '``')}`"


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the columns of a frame are: `names`, in the frame's order, and those that are packed, numbers first."""

    names: tuple[str, ...]
    numbers: tuple[_Column, ...]
    texts: tuple[_Column, ...]

    @property
    def head(self) -> np.dtype[np.void]:
        """What is in front of the bytes: `f0` are the nulls, then a field for each column."""
        sizes = [column.number.size if column.number else 4 for column in (*self.numbers, *self.texts)]
        return np.dtype([(f"f{place}", f">i{size}") for place, size in enumerate((4, *sizes))])


def row_layout(schema: T.StructType, names: list[str]) -> RowLayout:
    """How rows of this schema are packed, and which of its columns, its first ones, come out again."""
    packable = [field for field in schema if type(field.dataType) in _NUMBERS or _is_text(field.dataType)]
    arrow = arrow_schema(T.StructType(packable[:COLUMNS_MAX]))
    columns = [
        _Column(field.name, arrow.field(place).type, _NUMBERS.get(type(field.dataType)))
        for place, field in enumerate(packable[:COLUMNS_MAX])
    ]
    numbers, texts = (tuple(c for c in columns if (c.number is None) == is_text) for is_text in (False, True))
    return RowLayout(tuple(names), numbers, texts)


def _is_text(kind: T.DataType) -> bool:
    """Exactly these: a string with a collation or a length of its own is another type."""
    return kind in (T.BinaryType(), T.StringType())


def packed_frame(df: DataFrame, layout: RowLayout) -> DataFrame:
    """The columns that are not packed, then ROW."""
    as_bytes = number_bytes(df.sparkSession)
    columns = (*layout.numbers, *layout.texts)
    nulls = " | ".join(f"shiftleft(cast({c.sql_name} is null as int), {bit})" for bit, c in enumerate(columns))
    numbers = [(c.number.sql.format(c.sql_name), c.number.size) for c in layout.numbers if c.number]
    lengths = [(f"octet_length({c.sql_name})", 4) for c in layout.texts]
    head = [(nulls or "0", 4), *((f"coalesce({sql}, 0)", size) for sql, size in (*numbers, *lengths))]
    texts = [F.expr(f"coalesce(cast({c.sql_name} as binary), X'')") for c in layout.texts]
    row = F.concat(*(as_bytes(sql, size) for sql, size in head), *texts)
    return df.withColumn(ROW, row).drop(*(c.name for c in columns))


class OpenedRows:
    """The columns of a batch of packed rows. A column is made when it is asked for."""

    def __init__(self, layout: RowLayout, batch: pa.RecordBatch) -> None:
        self._layout, self._batch = layout, batch
        packed: Any = batch.column(ROW)
        self._is_large = pa.types.is_large_binary(packed.type)
        _, offsets, data = packed.buffers()
        edges: npt.NDArray[Any] = np.frombuffer(offsets, np.int64 if self._is_large else np.int32)
        self._edges = edges[packed.offset : packed.offset + len(packed) + 1]
        self._data = data
        self._heads = self._taken(self._edges[:-1], layout.head.itemsize).view(layout.head)

    def column(self, name: str) -> Any:
        """One column, as it was before it was packed."""
        for place, column in enumerate((*self._layout.numbers, *self._layout.texts)):
            if column.name == name:
                return self._number(place, column) if column.number else self._text(place, column)
        return self._batch.column(name)

    def rows(self) -> pa.RecordBatch:
        """The rows as they were, the layout's names only."""
        packed = {column.name for column in (*self._layout.numbers, *self._layout.texts)}
        beside = iter(self._batch.columns)
        arrays = [self.column(name) if name in packed else next(beside) for name in self._layout.names]
        return pa.RecordBatch.from_arrays(arrays, list(self._layout.names))

    @cached_property
    def _nulls(self) -> npt.NDArray[np.int32] | None:
        nulls = self._heads["f0"].astype(np.int32)
        return nulls if nulls.any() else None

    def _mask(self, place: int) -> npt.NDArray[np.bool_] | None:
        """Which rows are null in a column; None if none is."""
        mask = None if self._nulls is None else (self._nulls >> place & 1).astype(np.bool_)
        return mask if mask is not None and mask.any() else None

    def _number(self, place: int, column: _Column) -> Any:
        assert column.number is not None, "it is one of the numbers"
        values = self._heads[f"f{place + 1}"].astype(column.number.dtype)
        return pa.array(values, mask=self._mask(place)).view(column.arrow)

    def _text(self, place: int, column: _Column) -> Any:
        """A copy of these bytes of each row."""
        kind = column.arrow
        if self._is_large:
            kind = pa.large_binary() if pa.types.is_binary(kind) else pa.large_string()
        begins, lengths = self._spans[place - len(self._layout.numbers)]
        mask, count = self._mask(place), len(begins)
        if mask is None and count and (size := int(lengths[0])) and (lengths == size).all():
            # Of one size, as metadata and the names of one topic: a third of the time.
            edges: Any = np.arange(count + 1, dtype=self._edges.dtype) * size
            data: Any = self._taken(begins, size).view(np.uint8)
            return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(edges), pa.py_buffer(data)])
        # Each of them, then what lies behind it, as far as the next one: of these, every second.
        both: Any = np.append(np.stack([begins, begins + lengths], axis=1), self._edges[-1:])
        every = pa.Array.from_buffers(kind, 2 * count, [None, pa.py_buffer(both), self._data])
        own: Any = pa.array(np.arange(0, 2 * count, 2), mask=mask)
        return every.take(own)

    @cached_property
    def _spans(self) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Where each of the texts begins, and its length, a row each."""
        spans, begins = [], self._edges[:-1] + self._edges.dtype.type(self._layout.head.itemsize)
        for place in range(len(self._layout.texts)):
            lengths = self._heads[f"f{1 + len(self._layout.numbers) + place}"].astype(self._edges.dtype)
            spans.append((begins, lengths))
            begins = begins + lengths
        return spans

    def _taken(self, begins: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
        """A copy of `size` bytes from each of these places: of a view for every byte, those that are asked for."""
        every: Any = np.ndarray(max(0, len(self._data) - size + 1), f"V{size}", self._data, strides=(1,))
        return np.asarray(every[begins])
