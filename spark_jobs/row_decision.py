"""Decides the rows of a batch one by one: the rule over Arrow columns, in Spark's Python workers. No Spark.

    whole log partitions, each in log order ─▶ cut by (topic, partition) ─▶ a ReplayFilter each, over its marks
                                                                                    │
        its log offsets that drop, as bitmaps, an Arrow batch at a time ◀───────────┤
        what it holds, counts, and the marks of the pairs that came ◀───────────────┘ (at the end)

Both are sent as rows of DECIDED, which `decided` puts together again on the driver.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from filtering.errors import shown_partition
from filtering.marks import UNKNOWN, HighwaterMarks
from filtering.replay_filter import ReplayFilter
from filtering.stream_metadata import OFFSET_MAX
from spark_jobs.batch_marks import MarksKey
from spark_jobs.columns import FilterRule
from spark_jobs.decide import (
    BITMAP_WORDS,
    Bitmaps,
    Epoch,
    Numbers,
    PartitionRows,
    PartitionVerdict,
    Stretches,
    epochs_mixed,
    merged_marks,
)
from spark_jobs.errors import FrameUnusable

DECIDED = (
    "topic string, partition int, number bigint, words array<bigint>, startpoint_epoch bigint, marks_epoch bigint, "
    "start bigint, `end` bigint, rows bigint, unkeyed bigint, dropped_rows bigint, late bigint, jumped bigint, "
    "marks binary"
)
"""A row is a bitmap (`number` and `words`), or everything else that was found of a log partition."""
_DECIDED_FIELDS: Any = [
    ("topic", pa.string()),
    ("partition", pa.int32()),
    ("number", pa.int64()),
    ("words", pa.list_(pa.int64())),
    *((name, pa.int64()) for name in ("startpoint_epoch", "marks_epoch", "start", "end", "rows", "unkeyed")),
    *((name, pa.int64()) for name in ("dropped_rows", "late", "jumped")),
    ("marks", pa.binary()),
]
_DECIDED = pa.schema(_DECIDED_FIELDS)

_Where = tuple[str | None, int]


@dataclass(slots=True)
class _PartitionState:
    epoch: Epoch
    filter: ReplayFilter
    start: int
    last: int
    rows: int = 0


def decide_rows(
    batches: Iterable[pa.RecordBatch],
    before: Mapping[MarksKey, HighwaterMarks],
    rule: FilterRule,
) -> Iterator[pa.RecordBatch]:
    """Rows (key, topic, partition, offset[, epochs]), log partitions whole and in log order → DECIDED.

    `before` are the marks before the batch. Raises FrameUnusable.
    """
    quiet_filter()
    marks = {key: own.with_window(rule.window) for key, own in before.items()}
    states: dict[_Where, _PartitionState] = {}
    for batch in batches:
        key, topic, partition, offset, *epoch_columns = batch.columns
        check_places(topic, partition, offset)
        offsets = np.asarray(offset).astype(np.int64)
        for where, rows in log_partitions(topic, np.asarray(partition).astype(np.int64)):
            name, number = str(where[0]), where[1]
            own = offsets if rows is None else offsets[rows]
            epoch = only_epoch(where, epoch_columns, rows)
            if (state := states.get(where)) is None:
                filter_ = rule.new_filter(_starting_marks(marks, name, number, epoch))
                state = states[where] = _PartitionState(epoch, filter_, int(own[0]), -1)
            if state.epoch != epoch:
                raise epochs_mixed(*where, (state.epoch.startpoint, epoch.startpoint))
            check_once(*where, own, state.last)
            state.last, state.rows = int(own[-1]), state.rows + len(own)
            passes = state.filter.admit_batch(key if rows is None else key.take(rows), number)
            if not passes.all():
                yield _bitmap_rows(where, Bitmaps.of(_stretches_of(own, ~passes)))
    yield pa.RecordBatch.from_pylist([_fields_of(where, state) for where, state in states.items()], schema=_DECIDED)


def decided(table: Any) -> list[PartitionRows]:
    """An Arrow table of DECIDED rows → what each log partition holds, and what drops of it."""
    is_bitmap = table["number"].is_valid()
    names = ("topic", "partition", "number")
    topics, partitions, numbers = (table[name].filter(is_bitmap).to_pylist() for name in names)
    words = table["words"].filter(is_bitmap).combine_chunks().flatten().to_numpy().reshape(-1, BITMAP_WORDS)
    places: dict[tuple[str, int], list[int]] = {}
    for place, where in enumerate(zip(topics, partitions, strict=True)):
        places.setdefault(where, []).append(place)
    all_numbers = np.array(numbers, np.int64)
    found = []
    for row in table.filter(table["number"].is_null()).to_pylist():
        own = places.get((row["topic"], row["partition"]), [])
        dropped = Bitmaps(all_numbers[own], words[own]).merged()
        verdict = PartitionVerdict(dropped, *(row.pop(name) for name in ("dropped_rows", "late", "jumped")))
        facts = {name: value for name, value in row.items() if name not in ("number", "words", "marks")}
        found.append(PartitionRows(**facts, marks=HighwaterMarks.from_bytes(row["marks"]), verdict=verdict))
    return found


def _stretches_of(offsets: Numbers, gone: npt.NDArray[np.bool_]) -> Stretches:
    """Ascending log offsets → those that are gone, as stretches without a hole."""
    own = offsets[gone]
    breaks = np.flatnonzero(np.diff(own) != 1)
    return Stretches(own[np.append(0, breaks + 1)], own[np.append(breaks, len(own) - 1)] + 1)


def _bitmap_rows(where: _Where, bitmaps: Bitmaps) -> pa.RecordBatch:
    count = len(bitmaps.numbers)
    columns: dict[str, Any] = {
        "topic": pa.array([where[0]] * count, pa.string()),
        "partition": pa.array([where[1]] * count, pa.int32()),
        "number": pa.array(bitmaps.numbers),
        "words": pa.array(list(bitmaps.words), pa.list_(pa.int64())),
    }
    arrays = [columns.get(name, pa.nulls(count, kind)) for name, kind in _DECIDED_FIELDS]
    return pa.RecordBatch.from_arrays(arrays, schema=_DECIDED)


def _fields_of(where: _Where, state: _PartitionState) -> dict[str, Any]:
    counts = state.filter.counts
    return {
        "topic": where[0],
        "partition": where[1],
        "startpoint_epoch": state.epoch.startpoint,
        "marks_epoch": state.epoch.marks,
        "start": state.start,
        "end": state.last + 1,
        "rows": state.rows,
        "unkeyed": counts.unkeyed + counts.other_pids,
        "dropped_rows": counts.dropped,
        "late": counts.late,
        "jumped": min(counts.jumped, OFFSET_MAX),
        "marks": _marks_of_pairs(state.filter.marks(), *state.filter.pairs).to_bytes(),
    }


def _marks_of_pairs(marks: HighwaterMarks, pids: Numbers, partitions: Numbers) -> HighwaterMarks:
    found = marks.find(pids, partitions)
    keep = np.zeros(len(marks), np.bool_)
    keep[found[found >= 0]] = True
    return marks.without_rows(np.flatnonzero(~keep))


def _starting_marks(
    before: Mapping[MarksKey, HighwaterMarks], topic: str, partition: int, epoch: Epoch
) -> HighwaterMarks:
    """The marks before the rows of one log partition in this epoch.

    They are those that `carried` gives for the pairs of this partition, and for pairs whose partition is not known. The
    marks of other partitions' pairs are left out; a pair in two partitions is found when the partitions are merged.
    """
    parts = []
    for key, marks in before.items():
        if key.topic == topic and key.startpoint_epoch >= epoch.marks:
            here = np.isin(marks.to_columns().destination_partitions, [partition, UNKNOWN])
            parts.append(marks.without_rows(np.flatnonzero(~here)))
    return merged_marks(parts)


def log_partitions(topic: Any, partitions: Numbers) -> Iterator[tuple[_Where, Numbers | None]]:
    """(topic, partition) → its rows in order; None means all rows: there is only one log partition.

    `topic` is an Arrow string column.
    """
    if not len(partitions):
        return
    dictionary = topic.dictionary_encode()
    names = dictionary.dictionary.to_pylist()
    codes = partitions
    if len(names) > 1:
        codes = (np.asarray(dictionary.indices).astype(np.int64) << 32) | partitions
    if (codes == codes[0]).all():
        yield (names[0], int(partitions[0])), None
        return
    order = np.argsort(codes, kind="stable")
    together = codes[order]
    cuts = [0, *(np.flatnonzero(together[1:] != together[:-1]) + 1).tolist(), len(order)]
    for low, high in pairwise(cuts):
        code = int(together[low])
        yield (names[code >> 32 if len(names) > 1 else 0], code & 0xFFFFFFFF), order[low:high]


def check_places(topic: Any, partition: Any, offset: Any) -> None:
    """Every row must say where it lies. Raises FrameUnusable naming the column."""
    for column, values in (("topic", topic), ("partition", partition), ("offset", offset)):
        if values.null_count:
            raise FrameUnusable(
                f"column {column!r}: a row has a null there; the filter needs topic, partition and offset of each row"
            )


def only_epoch(name: _Where, columns: list[Any], rows: Numbers | None) -> Epoch:
    """The epoch of these rows, which all have the same. Raises FrameUnusable."""
    if not columns:
        return Epoch()
    startpoints, marks = (np.asarray(column if rows is None else column.take(pa.array(rows))) for column in columns)
    if startpoints.min() != startpoints.max() or marks.min() != marks.max():
        raise epochs_mixed(*name, np.unique(startpoints).tolist())
    return Epoch(int(startpoints[0]), int(marks[0]))


def check_once(topic: str | None, partition: int, offsets: Numbers, before: int = -1) -> None:
    """Log offsets in ascending order, all above `before`, must differ: nobody can say which of two rows is meant.

    Usual causes: dumps of a log that overlap, or rows that were multiplied before the filter. Raises FrameUnusable.
    """
    twice = np.flatnonzero(np.diff(offsets, prepend=before) == 0)
    if len(twice):
        where = f"partition {shown_partition(partition)} of {topic if topic is not None else 'the topic'}"
        raise FrameUnusable(
            f"log offset {offsets[twice[0]]} of {where} stands twice in the frame; where dumps overlap, filter "
            'frame.dropDuplicates(["topic", "partition", "offset"]), and make several rows of one behind the filter'
        )


def quiet_filter() -> None:
    """Keep workers from logging the pairs of which every row was dropped: the driver logs those of the whole batch."""
    logging.getLogger("filtering.replay_filter").setLevel(logging.ERROR)
