"""The records of one batch as columns of Python objects; a `Record` is put together when it is asked for.

Who drops a record before taking the next has one at a time, and the garbage collector, which counts what was made and
not dropped, never has to look.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import length_hint
from typing import TypeAlias, TypeVar, Union

from pushrep.records.model import Header, Record, TimestampType

T = TypeVar("T")
Column: TypeAlias = Union[Sequence[T], "repeat[T]"]
"""One for each record, or endlessly what all have."""


class RecordRows:
    """The fields of records side by side. `offsets` ascend, and say how many there are."""

    __slots__ = ("_columns", "offsets")

    def __init__(  # noqa: PLR0913, PLR0917 - the fields of a record
        self,
        offsets: Sequence[int],
        timestamps_ms: Column[int],
        timestamp_type: Column[TimestampType],
        keys: Column[bytes | None],
        values: Column[bytes | None],
        headers: Column[tuple[Header, ...]],
    ) -> None:
        self.offsets = offsets
        self._columns = (timestamps_ms, timestamp_type, keys, values, headers)

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Record]:
        return self.beside(iter(self.offsets))

    def beside(self, offsets: Iterator[int]) -> Iterator[Record]:
        """All records, each as one is taken from `offsets`, a new iterator of the offsets here."""
        # What `Record._make` does, without its Python frame: two thirds of its time.
        return map(tuple.__new__, repeat(Record), zip(offsets, *self._columns, strict=False))

    def between(self, start: int, end: int) -> "RecordRows":
        """Those with offsets in [start, end)."""
        first, behind = bisect_left(self.offsets, start), bisect_left(self.offsets, end)
        if behind - first == len(self.offsets):
            return self
        chosen = slice(first, behind)
        columns = [column if isinstance(column, repeat) else column[chosen] for column in self._columns]
        return RecordRows(self.offsets[chosen], *columns)  # type: ignore[arg-type]  # each of its own kind


class RecordCursor:
    """Records that are taken from `records` one by one. `position`: behind the last one that was, `start` before.

    Taking one costs nothing here: how many are left is known to the iterator of their offsets.
    """

    __slots__ = ("_left", "_offsets", "_start", "records")

    def __init__(self, start: int, rows: RecordRows | None = None) -> None:
        """Without rows there is nothing to take."""
        self._start = start
        self._offsets: Sequence[int] = rows.offsets if rows is not None else ()
        self._left = iter(self._offsets)
        self.records: Iterator[Record] = rows.beside(self._left) if rows is not None else iter(())

    @property
    def position(self) -> int:
        """An offset."""
        taken = len(self._offsets) - length_hint(self._left)
        return self._offsets[taken - 1] + 1 if taken else self._start
