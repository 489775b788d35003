"""Decides one pair's chunks of one batch, in whatever order they came: the rule over their places. No Spark.

    chunks in any order ─▶ by first log offset ─▶ one array of source offsets in log order ─▶ ReplayFilter
                                                                                                  │
    data of chunks that pass whole, as it came · data of the others, cut down ◀── passes, a row ──┘

Chunks of one log partition may overlap if the frame was shuffled before. Then their rows are sorted by log offset: a
row passes iff its source offset is above the mark and above those of its pair's rows before it in the log.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from filtering.marks import HighwaterMarks
from filtering.replay_filter import FilterCounts
from filtering.stream_metadata import Keys
from spark_jobs.filter_settings import FilterRule
from spark_jobs.mark_epochs import Epoch, EpochsMixed
from spark_jobs.row_chunks import closed, opened, places_of
from spark_jobs.row_decision import check_once


class PairName(NamedTuple):
    """A pair inside its destination topic."""

    topic: str
    pid: int
    source_partition: int


class PairChunk(NamedTuple):
    """Some rows of one pair, in log order (row_chunks.py)."""

    partition: int
    epoch: Epoch
    first_offset: int
    places: bytes
    data: bytes


class PairMarks(NamedTuple):
    """Marks that hold one pair (and maybe others), and the startpoint epoch of the rows that raised them."""

    epoch: int = 0
    marks: HighwaterMarks = HighwaterMarks()


class PairAnswer(NamedTuple):
    """`kept`: the data of the rows that pass, chunk by chunk, in log order; read it once."""

    kept: Iterator[bytes]
    after: PairMarks
    counts: FilterCounts


def decide_pair(
    name: PairName, chunks: Iterable[PairChunk], known: PairMarks, rule: FilterRule, *, now_ms: int | None
) -> PairAnswer:
    """Which rows of one pair's chunks pass, and its marks after them; `known` are those before.

    `now_ms`: the time of the batch, at whose end `ttl_s` is judged; None: nothing expires.
    Raises PairSplit, EpochsMixed, LogRowTwice.
    """
    in_order = sorted(chunks, key=lambda chunk: (chunk.partition, chunk.first_offset))
    epoch = _epoch_of(name, in_order)
    marks = known.marks if known.epoch >= epoch.marks else HighwaterMarks()
    places = [places_of(chunk.places) for chunk in in_order]
    log_offsets, source_offsets = (np.concatenate(column) for column in zip(*places, strict=True))
    sizes = np.array([len(own) for own, _ in places])
    partitions = np.repeat(np.array([chunk.partition for chunk in in_order]), sizes)
    # In several partitions the order does not matter: the filter refuses the pair.
    order = None if (log_offsets[1:] > log_offsets[:-1]).all() else np.lexsort((log_offsets, partitions))
    count = len(source_offsets)
    filter_ = rule.new_filter(marks)
    passes = filter_.admit_batch(
        Keys(
            np.full(count, name.pid, np.int64),
            np.full(count, name.source_partition, np.int64),
            source_offsets if order is None else source_offsets[order],
            np.ones(count, np.bool_),
        ),
        partitions if order is None else partitions[order],
    )
    if order is not None:
        check_once(name.topic, in_order[0].partition, log_offsets[order])
        passes = passes[np.argsort(order)]
    after = PairMarks(epoch.startpoint, filter_.marks(now_ms))
    counts = filter_.counts if rule.counts_gaps else replace(filter_.counts, jumped=0)
    return PairAnswer(_kept(in_order, sizes.tolist(), passes), after, counts)


def _epoch_of(name: PairName, chunks: list[PairChunk]) -> Epoch:
    """The epoch of the first log partition. A pair in a second one is refused before this matters."""
    partition, epoch = chunks[0].partition, chunks[0].epoch
    epochs = {chunk.epoch for chunk in chunks if chunk.partition == partition}
    if len(epochs) > 1:
        raise EpochsMixed(name.topic, partition, (e.startpoint for e in epochs))
    return epoch


def _kept(chunks: list[PairChunk], sizes: list[int], passes: npt.NDArray[np.bool_]) -> Iterator[bytes]:
    low = 0
    for chunk, size in zip(chunks, sizes, strict=True):
        own = passes[low : low + size]
        low += size
        if own.all():
            yield chunk.data
        elif own.any():
            yield closed(opened(chunk.data).filter(pa.array(own)))
