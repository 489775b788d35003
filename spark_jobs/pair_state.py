"""The state of one pair in a stream: by transformWithState, and where Spark lacks that by groups with a state.

A pair's chunks come as pandas frames, are decided, and are handed on in frames of about _FRAME_BYTES.
Both keep the pair's marks as their own versioned bytes, with the startpoint epoch that they are of.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pandas as pd

from filtering.marks import UNKNOWN, HighwaterMarks
from spark_jobs.filter_settings import FilterRule, looks_unlikely
from spark_jobs.mark_epochs import Epoch
from spark_jobs.operator_counts import Reports, handed_on
from spark_jobs.pair_decision import PairChunk, PairMarks, PairName, decide_pair
from spark_jobs.row_chunks import CHUNK_BYTES, is_outside
from spark_jobs.slice_filter import quiet_filter

try:
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
except ModuleNotFoundError:  # Spark 3.5
    StatefulProcessor = object  # type: ignore[assignment, misc]
    StatefulProcessorHandle = Any  # type: ignore[assignment, misc]

STATE = "epoch bigint, marks binary"
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
    unlikely = rule.may_be_chance and bool(looks_unlikely(answer.after.marks).any())
    return _frames(answer.kept, reports.of(name, answer.counts, is_unlikely=unlikely)), answer.after


def outside_frames(frames: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Chunks of rows that the rule is not for → all of their data."""
    return (handed_on(frame["data"].tolist()) for frame in frames)


def _chunks(frames: Iterable[pd.DataFrame]) -> Iterator[PairChunk]:
    for frame in frames:
        columns = (frame[name] for name in ("partition", "startpoint_epoch", "marks_epoch", "first_offset"))
        for partition, startpoint, marks, first, places, data in zip(
            *columns, frame["places"], frame["data"], strict=True
        ):
            yield PairChunk(int(partition), Epoch(int(startpoint), int(marks)), int(first), places, data)


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


class PairProcessor(StatefulProcessor):
    """Spark's state of one (topic, pid, source partition): the bytes of marks that hold this pair alone."""

    def __init__(self, rule: FilterRule) -> None:
        self._rule = rule

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle, self._marks = handle, handle.getValueState("marks", STATE)
        self._reports = Reports()
        quiet_filter()

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:  # noqa: N802, N803 - Spark's names
        name = PairName(key[0], int(key[1]), int(key[2]))
        if is_outside(name.source_partition):
            yield from outside_frames(rows)
            return
        now_ms = None if self._rule.ttl_s is None else int(timerValues.getCurrentProcessingTimeInMs())
        state = self._marks.get()
        known = PairMarks() if state is None else PairMarks(state[0], HighwaterMarks.from_bytes(bytes(state[1])))
        frames, after = decided_frames(name, rows, known, self._rule, self._reports, now_ms=now_ms)
        self._marks.update((after.epoch, after.marks.to_bytes()))
        if state is None and now_ms is not None:
            self._look_again(after.marks, now_ms)
        yield from frames

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:  # noqa: ARG002, N802, N803 - Spark's names
        """At the end of a batch: a pair that has expired is no state any more."""
        state = self._marks.get()
        if state is not None and self._rule.ttl_s is not None:
            now_ms = int(timerValues.getCurrentProcessingTimeInMs())
            marks = HighwaterMarks.from_bytes(bytes(state[1])).without_expired(now_ms=now_ms, ttl_s=self._rule.ttl_s)
            if len(marks):
                self._look_again(marks, now_ms)
            else:
                self._marks.clear()
        yield from ()

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:  # noqa: ARG002, N802, N803 - Spark's names
        packed = bytes(initialState["marks"].iloc[0])
        self._marks.update((int(initialState["epoch"].iloc[0]), packed))
        if self._rule.ttl_s is not None:
            self._look_again(HighwaterMarks.from_bytes(packed), int(timerValues.getCurrentProcessingTimeInMs()))

    def _look_again(self, marks: HighwaterMarks, now_ms: int) -> None:
        """Set this pair's timer, of which it has one: when its marks expire, unless they rise till then."""
        assert self._rule.ttl_s is not None, "without it nothing expires, and Spark has no time for us"
        advanced_ms = int(marks.to_columns().advanced_ms.max(initial=UNKNOWN))
        since_ms = now_ms if advanced_ms == UNKNOWN else advanced_ms
        self._handle.registerTimer(max(now_ms, since_ms + int(self._rule.ttl_s * 1000)) + 1)

    def close(self) -> None:
        """Nothing is held."""


def deciding_with_state(rule: FilterRule) -> Callable[[Any, Iterable[pd.DataFrame], Any], Iterator[pd.DataFrame]]:
    """The same for `applyInPandasWithState`, which Spark 3.5 has already."""

    def decide(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        quiet_filter()
        now_ms = None if rule.ttl_s is None else int(state.getCurrentProcessingTimeMs())
        known = PairMarks(state.get[0], HighwaterMarks.from_bytes(bytes(state.get[1]))) if state.exists else PairMarks()
        if state.hasTimedOut:
            assert rule.ttl_s is not None, "without it nothing has a timeout"
            after = known._replace(marks=known.marks.without_expired(now_ms=now_ms or 0, ttl_s=rule.ttl_s))
            if not len(after.marks):
                state.remove()
                return
        else:
            name = PairName(key[0], int(key[1]), int(key[2]))
            decided, after = decided_frames(name, frames, known, rule, Reports(), now_ms=now_ms)
            yield from decided
            if is_outside(name.source_partition):
                return
        state.update((after.epoch, after.marks.to_bytes()))
        if rule.ttl_s is not None:
            advanced_ms = int(after.marks.to_columns().advanced_ms.max(initial=UNKNOWN))
            since_ms = now_ms if advanced_ms == UNKNOWN else advanced_ms
            state.setTimeoutDuration(max(0, (since_ms or 0) + int(rule.ttl_s * 1000) - (now_ms or 0)) + 1)

    return decide
