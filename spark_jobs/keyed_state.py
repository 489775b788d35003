"""filter_replays: the streaming operator, whose marks live in Spark's state store and so in the query's checkpoint.

    rows ─▶ pack ─▶ observed ─▶ chunks by (topic, pid, source partition) ─▶ state ─▶ observed ─▶ unpack ─▶ rows
            mapInArrow                    shuffle               transformWithState              mapInArrow

Rows travel as chunks (row_chunks.py), so that every column keeps its type and its value whatever it is, and no row is
taken apart on the way: Spark's door into the operator converts cell by cell. The operator decides a pair's chunks of
one batch by the same ReplayFilter as everyone (pair_decision.py) and remembers the pair's marks as their own versioned
bytes, with the startpoint epoch that they are of (mark_epochs.py). Rows without metadata go around the rule in chunks
of their own, of which the operator hands on every one and remembers nothing; so the source is read once.

Of Spark's two doors this is the one of pandas frames: a frame handed back becomes a record batch of its own, where the
door of rows makes one of all that a pair gives, which must stay below 2 GiB.
All of a pair's rows of one batch must fit into a worker's memory: give the source a limit per trigger.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, GroupedData

from filtering.marks import HighwaterMarks
from spark_jobs.batch_marks import MarksKey
from spark_jobs.errors import SparkJobError
from spark_jobs.filter_settings import FilterRule, TtlTooShort, check_ttl
from spark_jobs.operator_counts import (
    DECIDED,
    DECIDED_ARROW,
    METRICS,
    Reports,
    observed_after,
    observed_before,
)
from spark_jobs.pair_decision import PairMarks, PairName
from spark_jobs.pair_state import STATE, PairProcessor, decided_frames, deciding_with_state
from spark_jobs.row_chunks import PACKED, Packing, pack_rows, unpack_rows
from spark_jobs.slice_scan import KEY, keyed_frame
from spark_jobs.source_position import SourcePosition
from spark_jobs.spark_internals import SparkTooOld, release

__all__ = ["StateStoreUnfit", "TtlTooShort", "filter_replays"]

_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_PAIR = ("topic", "pid", "source_partition")
_MARKED = f"topic string, pid bigint, source_partition int, {STATE}"


class StateStoreUnfit(SparkJobError):
    """Spark keeps state with a provider on which transformWithState does not run: set the one the message names."""

    def __init__(self, provider: str) -> None:
        super().__init__(f"{_PROVIDER} is {provider}: filter_replays needs {_ROCKSDB}; set it before the query starts")
        self.provider = provider


def filter_replays(  # noqa: PLR0913 - the rule's settings, by name
    df: DataFrame,
    *,
    carrier: str | SourcePosition = "key",
    window: int = 0,
    only_pids: Iterable[int] | None = None,
    ttl_s: float | None = None,
    retention_ms: int | None = None,
    marks: Mapping[MarksKey, HighwaterMarks] | None = None,
    metrics: str = METRICS,
) -> DataFrame:
    """The rows of `df` that are no replays, in no particular order.

    `df` needs the columns topic, partition, offset, and those of its carrier: key or headers, or what a
    `SourcePosition` names.

    A streaming frame keeps its marks in the checkpoint of the query that it becomes part of, a batch frame forgets
    them. `marks`, as `{MarksKey(topic): HighwaterMarks}`, are where to begin: of a stream, for its first batch ever.
    `ttl_s` is judged at the end of each batch against its own timestamp, which a re-run repeats; a pair that expired is
    no state any more. It needs `retention_ms`, the topic's retention.ms (-1: for ever), and must not be shorter; 0
    takes any.
    `metrics` names what the query's progress tells of it (`operator_counts`); two filters in one query need two names.
    Raises StateStoreUnfit, TtlTooShort, FrameUnusable, CarrierUnusable, PositionUnfit, BadFilterSetting; inside the
    query PairSplit.
    """
    pids = None if only_pids is None else frozenset(only_pids)
    rule = FilterRule(carrier=carrier, window=window, only_pids=pids, ttl_s=ttl_s)
    check_ttl(ttl_s, retention_ms)
    keyed, packing = _packing(df, rule)

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return pack_rows(batches, packing)

    packed = observed_before(keyed.mapInArrow(pack, PACKED), metrics).groupBy(*_PAIR)
    decided = _in_stream(df, packed, rule, marks or {}) if df.isStreaming else _in_batch(packed, rule, marks or {})
    kept = observed_after(decided, metrics).where("data is not null")
    return kept.mapInArrow(unpack_rows, df.schema)


def _packing(df: DataFrame, rule: FilterRule) -> tuple[DataFrame, Packing]:
    keyed = keyed_frame(df, rule)
    if rule.carrier == "key":  # its bytes are there already, among the frame's own columns
        return keyed.drop(KEY), Packing("key", travels=True, only_pids=rule.only_pids)
    return keyed, Packing(KEY, only_pids=rule.only_pids)


def _in_stream(
    df: DataFrame, packed: GroupedData, rule: FilterRule, marks: Mapping[MarksKey, HighwaterMarks]
) -> DataFrame:
    if not hasattr(packed, "transformWithStateInPandas"):
        if any(len(m) for m in marks.values()):
            raise SparkTooOld("a stream that begins with marks (marks=)", "4.0")
        timeout = "NoTimeout" if rule.ttl_s is None else "ProcessingTimeTimeout"
        return packed.applyInPandasWithState(deciding_with_state(rule), DECIDED, STATE, "append", timeout)
    provider = df.sparkSession.conf.get(_PROVIDER) or ""
    if provider != _ROCKSDB:
        raise StateStoreUnfit(provider)
    initial = None
    if any(len(m) for m in marks.values()):
        rows = [
            (topic, *pair, known.epoch, known.marks.to_bytes()) for (topic, *pair), known in _by_pair(marks).items()
        ]
        initial = df.sparkSession.createDataFrame(rows, _MARKED).groupBy(*_PAIR)
    # Processing time only where it is asked for: with it Spark runs a batch for every trigger, rows or not.
    time_mode = "None" if rule.ttl_s is None else "ProcessingTime"
    return packed.transformWithStateInPandas(
        PairProcessor(rule), DECIDED, outputMode="Append", timeMode=time_mode, initialState=initial
    )


def _in_batch(packed: GroupedData, rule: FilterRule, marks: Mapping[MarksKey, HighwaterMarks]) -> DataFrame:
    newest_first = sorted(marks.items(), key=lambda item: item[0], reverse=True)

    def decided(key: Iterable[Any], frames: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        name = PairName(*key)
        begin = (
            PairMarks(k.startpoint_epoch, m)
            for k, m in newest_first
            if k.topic == name.topic and m.get(name.pid, name.source_partition)
        )
        return decided_frames(name, frames, next(begin, PairMarks()), rule, Reports(), now_ms=None)[0]

    def decide(key: tuple[Any, ...], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        kept = decided((scalar.as_py() for scalar in key), (batch.to_pandas() for batch in batches))
        yield from (pa.RecordBatch.from_pandas(frame, DECIDED_ARROW, preserve_index=False) for frame in kept)

    def decide_whole(key: tuple[Any, ...], frame: pd.DataFrame) -> pd.DataFrame:
        topic, pid, source_partition = key
        return pd.concat(decided((topic, int(pid), int(source_partition)), [frame]))

    if release() < (4, 1):  # where a function is handed all of a pair at once
        return packed.applyInPandas(decide_whole, DECIDED)
    return packed.applyInArrow(decide, DECIDED)


def _by_pair(marks: Mapping[MarksKey, HighwaterMarks]) -> dict[tuple[str, int, int], PairMarks]:
    """(topic, pid, source partition) → its marks, of the newest epoch if it stands in several."""
    return {
        (key.topic, *pair): PairMarks(key.startpoint_epoch, single)
        for key, topic_marks in sorted(marks.items(), key=lambda item: item[0])
        for pair, single in _singles(topic_marks)
    }


def _singles(marks: HighwaterMarks) -> Iterator[tuple[tuple[int, int], HighwaterMarks]]:
    """Each pair's marks alone."""
    columns = marks.to_columns()
    for row, (pair, _) in enumerate(marks.items()):
        yield (
            pair,
            HighwaterMarks.from_columns(
                *(column[row : row + 1] for column in columns[:4]),
                advanced_ms=columns.advanced_ms[row : row + 1],
                bitmaps=columns.bitmaps[row : row + 1],
                window=columns.window,
            ),
        )
