"""A pair's chunks as Spark's doors for pandas hand them over, decided, and handed on as they want it back."""

from collections.abc import Iterable, Iterator

import pandas as pd

from spark_jobs.mark_epochs import Epoch
from spark_jobs.operator_counts import Reports, handed_on
from spark_jobs.pair_decision import Chunk, PairMarks, PairName, decide_pair
from spark_jobs.row_chunks import CHUNK_BYTES, is_outside
from spark_jobs.slice_filter import FilterRule

_FRAME_BYTES = 16 * CHUNK_BYTES


def decided_frames(  # noqa: PLR0913 - a pair, what is known of it, and the rule
    name: PairName,
    frames: Iterable[pd.DataFrame],
    known: PairMarks,
    rule: FilterRule,
    reports: Reports,
    *,
    now_ms: int | None,
) -> tuple[Iterator[pd.DataFrame], PairMarks]:
    """One group's chunks (PACKED) → what it hands on (DECIDED), and the pair's marks after it."""
    if is_outside(name.source_partition):
        return outside_frames(frames), known
    answer = decide_pair(name, _chunks(frames), known, rule, now_ms=now_ms)
    return _frames(answer.kept, reports.of(name, answer.counts)), answer.after


def outside_frames(frames: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Chunks of rows that the rule is not for → all of their data."""
    return (handed_on(frame["data"].tolist()) for frame in frames)


def _chunks(frames: Iterable[pd.DataFrame]) -> Iterator[Chunk]:
    for frame in frames:
        columns = (frame[name] for name in ("partition", "startpoint_epoch", "marks_epoch", "first_offset"))
        for partition, startpoint, marks, first, places, data in zip(
            *columns, frame["places"], frame["data"], strict=True
        ):
            yield Chunk(int(partition), Epoch(int(startpoint), int(marks)), int(first), places, data)


def _frames(kept: Iterator[bytes], report: str) -> Iterator[pd.DataFrame]:
    """Data in frames of about _FRAME_BYTES; the report rides on the first, which is there even if nothing passed."""
    waiting: list[bytes | None] = []
    waiting_bytes, told = 0, False
    for data in kept:
        waiting.append(data)
        waiting_bytes += len(data)
        if waiting_bytes >= _FRAME_BYTES:
            yield handed_on(waiting, None if told else report)
            waiting, waiting_bytes, told = [], 0, True
    if waiting or not told:
        yield handed_on(waiting or [None], None if told else report)
