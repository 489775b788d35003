"""Marks and startpoints: which marks a partition has after a startpoint moved it. Pure.

    marks after batch 7    (orders, 0): pairs of partitions 0 and 1
    batch 8                partition 1 comes in epoch 5: startpoint 5 moved it
      it inherits          (orders, 0): those of partition 0    (orders, 5): those of partition 1, as they were
      it resets marks      (orders, 0): those of partition 0    (orders, 5): what partition 1 holds from here on
      a table is replaced  (orders, 0): those of partition 0    (orders, 5): those of partition 1, as they were where it
                                                                             reads again (replacing.py)

A pair lives in one partition of the destination, so a partition's marks move as a whole, and no pair is under two
epochs. The column startpoint_epoch names the startpoint that a row's run started from. Of the startpoints before it,
marks_epoch names the newest that reset marks: so a reset is not missed if no row came between two startpoints.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from filtering.errors import shown_partition
from filtering.marks import UNKNOWN, HighwaterMarks
from spark_jobs.batch_marks import MarksKey
from spark_jobs.errors import FrameUnusable

EPOCH_COLUMNS = ("startpoint_epoch", "marks_epoch")

Numbers = npt.NDArray[np.int64]


def epochs_mixed(topic: str | None, partition: int, epochs: Iterable[int]) -> FrameUnusable:
    """The refusal of a log partition that came in two startpoint epochs at once."""
    found = ", ".join(map(str, sorted(set(epochs))))
    where = f"partition {shown_partition(partition)} of {topic if topic is not None else 'the topic'}"
    return FrameUnusable(
        f"{where} came in the startpoint epochs {found} at once; a batch of the source has one. "
        "Filter the frame once for each, in ascending order, or drop the columns startpoint_epoch and marks_epoch"
    )


class Epoch(NamedTuple):
    """The startpoint that a partition's run began with, and the newest one up to it that reset marks; 0: none."""

    startpoint: int = 0
    marks: int = 0


def carried(
    before: Mapping[MarksKey, HighwaterMarks], topic: str, epochs: Mapping[int, Epoch], seen: HighwaterMarks
) -> HighwaterMarks:
    """The marks with which a topic's partitions continue, of all epochs, without those that a startpoint has reset.

    `seen`: the pairs of the batch. Raises PairSplit.
    """
    going_on = HighwaterMarks()
    for key in sorted(key for key in before if key.topic == topic):
        marks = before[key]
        begun_anew = [partition for partition, epoch in epochs.items() if key.startpoint_epoch < epoch.marks]
        if begun_anew:
            marks = marks.without_rows(np.flatnonzero(np.isin(_destinations(marks, seen), begun_anew)))
        going_on = going_on.merge(marks)
    return going_on


def taken_back(
    before: Mapping[MarksKey, HighwaterMarks],
    topic: str,
    epochs: Mapping[int, Epoch],
    seen: HighwaterMarks,
    as_of: Callable[[int, HighwaterMarks], HighwaterMarks],
) -> Mapping[MarksKey, HighwaterMarks]:
    """All marks; of the topic's partitions whose marks `carried` would forget, those that `as_of` makes of them.

    They are under each partition's epoch. `before` itself if nothing would be forgotten. seen: the pairs of the batch.
    """
    old: dict[int, HighwaterMarks] = {}
    for key in (key for key in before if key.topic == topic):
        for partition, epoch in epochs.items():
            if key.startpoint_epoch < epoch.marks:
                elsewhere = np.flatnonzero(_destinations(before[key], seen) != partition)
                old[partition] = old.get(partition, HighwaterMarks()).merge(before[key].without_rows(elsewhere))
    found = dict(before)
    forgotten = {partition: marks for partition, marks in old.items() if len(marks)}
    for partition, marks in forgotten.items():
        columns = marks.to_columns()
        for key in [key for key in found if key.topic == topic]:
            rows = found[key].find(columns.pids, columns.partitions)
            found[key] = found[key].without_rows(rows[rows >= 0])
        now = MarksKey(topic, epochs[partition].startpoint)
        found[now] = found.get(now, HighwaterMarks()).merge(as_of(partition, marks))
    return {key: marks for key, marks in found.items() if len(marks)} if forgotten else before


def lowered(marks: HighwaterMarks, lowest: HighwaterMarks) -> HighwaterMarks:
    """The marks as they were before the filter kept the rows that the table holds. Without a window.

    lowest: the lowest source offset of each pair among the table's rows that are to be read again.

    The rows that the filter kept of a pair ascend, so before them the mark was below the lowest. The mark of a pair
    without such rows does not change.
    """
    columns, held = marks.with_window(0).to_columns(), lowest.to_columns()
    rows = marks.find(held.pids, held.partitions)
    offsets = columns.offsets.copy()
    offsets[rows[rows >= 0]] = np.minimum(offsets[rows[rows >= 0]], held.offsets[rows >= 0] - 1)
    known = offsets >= 0
    return HighwaterMarks.from_columns(
        columns.pids[known],
        columns.partitions[known],
        offsets[known],
        columns.destination_partitions[known],
        advanced_ms=columns.advanced_ms[known],
    )


def by_epoch(
    after: HighwaterMarks, before: Mapping[MarksKey, HighwaterMarks], topic: str, epochs: Mapping[int, Epoch]
) -> dict[MarksKey, HighwaterMarks]:
    """The topic's marks after the batch, each under the epoch of its partition."""
    own = {key: marks for key, marks in before.items() if key.topic == topic}
    now = {epoch.startpoint for epoch in epochs.values()}
    if len(now) == 1 and {key.startpoint_epoch for key in own} <= now:
        return {MarksKey(topic, now.pop()): after}
    found: dict[MarksKey, HighwaterMarks] = {}
    here = np.isin(after.to_columns().destination_partitions, list(epochs))
    for key, marks in own.items():  # of partitions that this batch has nothing of
        columns = marks.to_columns()
        rows = after.find(columns.pids, columns.partitions)
        elsewhere = (rows >= 0) & ~here[rows] if len(here) else np.zeros(len(rows), np.bool_)
        found[key] = marks.without_rows(np.flatnonzero(~elsewhere))
    for startpoint in sorted(now):
        partitions = [partition for partition, epoch in epochs.items() if epoch.startpoint == startpoint]
        theirs = np.isin(after.to_columns().destination_partitions, partitions)
        key = MarksKey(topic, startpoint)
        found[key] = found.get(key, HighwaterMarks()).merge(after.without_rows(np.flatnonzero(~theirs)))
    return found


def _destinations(marks: HighwaterMarks, seen: HighwaterMarks) -> Numbers:
    """Each pair's destination partition; if its mark has none, the one in which the batch has the pair."""
    columns, destinations = marks.to_columns(), seen.to_columns().destination_partitions
    rows = seen.find(columns.pids, columns.partitions)
    here = (
        np.where(rows >= 0, destinations[rows], UNKNOWN) if len(destinations) else np.full(len(rows), UNKNOWN, np.int64)
    )
    known: Numbers = np.where(columns.destination_partitions == UNKNOWN, here, columns.destination_partitions)
    return known
