"""The headers of all records of a batch as flat columns: round k reads the k-th header of every record that has one."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pushrep.records.errors import CorruptRecordBatch
from pushrep.records.varint import read_varint
from pushrep.records.varint_arrays import Bytes, Ints, read_varints

Positions: TypeAlias = NDArray[np.int32]

_ROUNDS_MAX = 32  # a record with more headers is read alone: a round costs the same for one record as for a thousand


@dataclass(frozen=True, slots=True, eq=False)
class HeaderColumns:
    """`m` headers, those of one record together and in order; a value length of -1 is null. Positions as the records'.

    `record` is the row of each header's record, ascending. Names are UTF-8 as they stand in the batch.
    """

    record: Positions
    name_start: Positions
    name_length: Positions
    value_start: Positions
    value_length: Positions

    def __len__(self) -> int:
        return len(self.record)


def read_header_columns(data: Bytes, payload: memoryview, counts: Ints, starts: Ints, ends: Ints) -> HeaderColumns:
    """Read them all and check that each record ends behind its last; raises CorruptRecordBatch."""
    if (counts < 0).any() or (2 * counts > ends - starts).any():  # a header takes two bytes: no name, no value
        raise CorruptRecordBatch("a record claims more headers than it has bytes, or less than none")
    firsts = np.cumsum(counts) - counts
    total = int(counts.sum())
    fields = np.empty((4, total), np.int32)
    at = starts.copy()
    rows = np.flatnonzero(counts)
    for turn in range(_ROUNDS_MAX):
        rows = rows[counts[rows] > turn]
        if not rows.size:
            break
        at[rows] = _read_round(data, at[rows], ends[rows], fields, firsts[rows] + turn)
    for row in rows[counts[rows] > _ROUNDS_MAX]:
        todo = range(int(firsts[row]) + _ROUNDS_MAX, int(firsts[row] + counts[row]))
        at[row] = _read_one(payload, int(at[row]), int(ends[row]), fields, todo)
    if (at != ends).any():
        raise CorruptRecordBatch(f"record {int((at != ends).argmax())} does not end behind its last field")
    return HeaderColumns(np.repeat(np.arange(len(counts), dtype=np.int32), counts), *fields)


def _read_round(data: Bytes, at: Ints, ends: Ints, fields: Positions, to: Ints) -> Ints:
    for start_field, length_min in ((0, 0), (2, -1)):  # a name is never null
        if (at >= ends).any():
            raise CorruptRecordBatch("a record ends inside its headers")
        lengths, at = read_varints(data, at)
        if (lengths < length_min).any() or (at + lengths > ends).any():
            raise CorruptRecordBatch("a header's name or value is longer than its record")
        fields[start_field, to] = at
        fields[start_field + 1, to] = lengths
        at = at + np.maximum(lengths, 0)
    return at


def _read_one(payload: memoryview, at: int, end: int, fields: Positions, todo: range) -> int:
    record = payload[at:end].tobytes()
    position = 0
    try:
        for index in todo:
            for start_field, length_min in ((0, 0), (2, -1)):
                length, position = read_varint(record, position)
                if not length_min <= length <= len(record) - position:
                    raise CorruptRecordBatch("a header's name or value is longer than its record")
                fields[start_field, index] = at + position
                fields[start_field + 1, index] = length
                position += max(length, 0)
    except IndexError:
        raise CorruptRecordBatch("a record ends inside its headers") from None
    return at + position
