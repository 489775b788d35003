"""filter_replays: the streaming operator. Its marks are in Spark's state store, and so in the query's checkpoint.

    rows ─▶ pack ─▶ observed ─▶ chunks by (topic, pid, source partition) ─▶ state ─▶ observed ─▶ unpack ─▶ rows
            mapInArrow                    shuffle               transformWithState              mapInArrow

Rows are sent as chunks (row_chunks.py), so that each column keeps its type and value, and Spark's operator does not
convert each cell. The operator decides a pair's chunks of one batch by the same ReplayFilter as all other consumers
(row_chunks.py). The state of a pair is the versioned bytes of its marks, and their startpoint epoch (decide.py); that
of a topic's own chunk is the carrier by which they were made. Rows without metadata are in separate chunks; the
operator passes them on and stores nothing for them, so the source is read once.

Spark's operator has two interfaces: rows, and pandas frames. This uses pandas frames: each returned frame, of about
_FRAME_BYTES, becomes a record batch. The interface of rows makes one record batch of all rows of a pair, which must
stay below 2 GiB. Spark 3.5 lacks transformWithState; there `applyInPandasWithState` is used.
All rows of a pair in one batch must fit into a worker's memory: give the source a limit per trigger.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pandas as pd
import pyarrow as pa
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, GroupedData, SparkSession

from filtering.carrier import CarrierCheck
from filtering.errors import WrongCarrier
from filtering.marks import UNKNOWN, HighwaterMarks
from spark_jobs.batch_marks import BatchMarks, MarksKey
from spark_jobs.columns import FilterRule, SourcePosition
from spark_jobs.decide import Epoch, looks_unlikely, merged_marks
from spark_jobs.errors import MarksMissing, SparkUnfit
from spark_jobs.frame import KEY, checked_marks, keyed_frame
from spark_jobs.operator_counts import (
    DECIDED,
    DECIDED_ARROW,
    METRICS,
    Reports,
    handed_on,
    observed_after,
    observed_before,
    warn_of_no_metadata,
)
from spark_jobs.row_chunks import (
    CARRIER,
    CHUNK_BYTES,
    PACKED,
    PairChunk,
    PairMarks,
    PairName,
    decide_pair,
    is_outside,
    pack_rows,
    unpack_rows,
)
from spark_jobs.row_decision import quiet_filter
from spark_jobs.sinks.hadoop import HadoopDirectory
from spark_jobs.spark_internals import map_in_arrow, release, too_old, use_driver_python

try:
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
except ModuleNotFoundError:  # Spark 3.5
    StatefulProcessor = object  # type: ignore[assignment, misc]
    StatefulProcessorHandle = Any  # type: ignore[assignment, misc]

_LOG = logging.getLogger(__name__)
STATE = "epoch bigint, marks binary"
_STATE_NAME = "marks"
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
    """One group's chunks (PACKED) → its output (DECIDED), and the pair's marks after it."""
    if is_outside(name.source_partition):
        return outside_frames(frames), known
    kept, after, counts = decide_pair(name, _chunks(frames), known, rule, now_ms=now_ms)
    unlikely = rule.may_be_chance and bool(looks_unlikely(after.marks).any())
    return _frames(kept, reports.of(name, counts, is_unlikely=unlikely)), after


def check_carrier(topic: str, frames: Iterable[pd.DataFrame], known: bytes | None) -> bytes | None:
    """A topic's own chunks, and the carrier that its state has → the one to keep. Raises WrongCarrier."""
    chunks = pd.concat(frames)
    carrier = bytes(chunks["places"].iloc[0])
    if known not in {None, carrier}:
        why = (
            f"in this query's state of topic {topic}: its marks are of metadata that were there. If that was wrong, "
            f"and it is {carrier.decode()!r} from now on, begin with a fresh checkpoint"
        )
        raise WrongCarrier(carrier.decode(), str(known, "utf-8"), why)
    return carrier if chunks["first_offset"].any() else known


def warn_of_none(topic: str, frames: Iterable[pd.DataFrame], rule: FilterRule) -> None:
    """Warn, in the worker's log, of a topic of a batch frame in which no row has metadata."""
    if not pd.concat(frames)["first_offset"].any():
        CarrierCheck(_LOG, topic, rule.carrier_name, rule.wanted).look(1, 1, lambda _: 0)


def outside_frames(frames: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Chunks of rows without metadata, or of other PIDs → all of their data."""
    return (handed_on(frame["data"].tolist()) for frame in frames)


def _chunks(frames: Iterable[pd.DataFrame]) -> Iterator[PairChunk]:
    for frame in frames:
        columns = (frame[name] for name in ("partition", "startpoint_epoch", "marks_epoch", "first_offset"))
        for partition, startpoint, marks, first, places, data in zip(
            *columns, frame["places"], frame["data"], strict=True
        ):
            yield PairChunk(int(partition), Epoch(int(startpoint), int(marks)), int(first), places, data)


def _frames(kept: Iterator[bytes], report: str) -> Iterator[pd.DataFrame]:
    """Data in frames of about _FRAME_BYTES. The first has the report, and is given even if no row passed."""
    waiting: list[bytes | None] = []
    waiting_bytes, reported = 0, False
    for data in kept:
        waiting.append(data)
        waiting_bytes += len(data)
        if waiting_bytes >= _FRAME_BYTES:
            yield handed_on(waiting, None if reported else report)
            waiting, waiting_bytes, reported = [], 0, True
    if waiting or not reported:
        yield handed_on(waiting or [None], None if reported else report)


class PairProcessor(StatefulProcessor):
    """Spark's processor of one (topic, pid, source partition). Its state is the bytes of marks with this pair alone."""

    def __init__(self, rule: FilterRule) -> None:
        self._rule = rule

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle, self._marks = handle, handle.getValueState(_STATE_NAME, STATE)
        self._reports = Reports()
        quiet_filter()

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:  # noqa: N802, N803 - Spark's names
        name = PairName(key[0], int(key[1]), int(key[2]))
        if name.source_partition == CARRIER:
            state = self._marks.get()
            carrier = check_carrier(name.topic, rows, None if state is None else bytes(state[1]))
            if state is None and carrier is not None:
                self._marks.update((0, carrier))
            return
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
        """Called at the end of a batch: remove the state of a pair that has expired, else set its timer again."""
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
        assert self._rule.ttl_s is not None, "without ttl_s nothing expires, and the time mode is None"
        self._handle.registerTimer(expires_ms(marks, now_ms, self._rule.ttl_s))

    def close(self) -> None:
        """There is nothing to close."""


def expires_ms(marks: HighwaterMarks, now_ms: int, ttl_s: float) -> int:
    """When a pair's marks expire, unless they rise until then: the time of its only timer."""
    advanced_ms = int(marks.to_columns().advanced_ms.max(initial=UNKNOWN))
    since_ms = now_ms if advanced_ms == UNKNOWN else advanced_ms
    return max(now_ms, since_ms + int(ttl_s * 1000)) + 1


def deciding_with_state(rule: FilterRule) -> Callable[[Any, Iterable[pd.DataFrame], Any], Iterator[pd.DataFrame]]:
    """The function for `applyInPandasWithState`, which does the same as PairProcessor in Spark 3.5."""

    def decide(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        quiet_filter()
        if int(key[2]) == CARRIER:
            carrier = check_carrier(key[0], frames, bytes(state.get[1]) if state.exists else None)
            if carrier is not None:
                state.update((0, carrier))
            return
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
            state.setTimeoutDuration(expires_ms(after.marks, now_ms or 0, rule.ttl_s) - (now_ms or 0))

    return decide


_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_PAIR = ("topic", "pid", "source_partition")
_MARKED = f"topic string, pid bigint, source_partition int, {STATE}"


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
    """The rows of `df` that are not replays, in no particular order.

    `df` needs the columns topic, partition, offset, and those of its carrier: key or headers, or the columns that a
    `SourcePosition` names.

    The marks of a streaming frame are stored in the checkpoint of its query; those of a batch frame are not stored.
    marks: the marks to begin with, `{MarksKey(topic): HighwaterMarks}`; a stream uses them in its first batch only.
    ttl_s: at the end of each batch, pairs whose mark has not risen for so long before the batch's timestamp are removed
        from the state. A re-run of the batch has the same timestamp. It needs `retention_ms`, the topic's retention.ms
        (-1: unlimited), and must not be shorter than that; with 0 any ttl_s is accepted.
    metrics: the name in the query's progress (`operator_counts`); two filters in one query need two names.
    carrier: kept in the state with the marks; another one at a restart stops the query. The first batch of a topic
        without metadata is warned of once: of a stream when Spark reports its progress, of a batch frame in a worker's
        log.
    Raises SparkUnfit, FrameUnusable, BadFilterSetting; inside the
    query PairSplit, WrongCarrier.
    """
    rule = FilterRule(carrier=carrier, window=window, only_pids=only_pids, ttl_s=ttl_s, retention_ms=retention_ms)
    marks = checked_marks(marks)
    use_driver_python(df.sparkSession)
    keyed, key, travels = keyed_frame(df, rule), KEY, rule.carrier == "key"
    if travels:  # the column `key` of the frame has the bytes already
        keyed, key = keyed.drop(KEY), "key"

    carrier_name = rule.carrier_name

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        number = None if context is None else context.getLocalProperty("streaming.sql.batchId")
        is_first = number in {None, "0"}
        return pack_rows(
            batches, key, travels=travels, only_pids=rule.only_pids, carrier=carrier_name, is_first=is_first
        )

    packed = observed_before(map_in_arrow(keyed, pack, PACKED), metrics, rule).groupBy(*_PAIR)
    if df.isStreaming:
        warn_of_no_metadata(df.sparkSession)
    decided = _in_stream(df, packed, rule, marks) if df.isStreaming else _in_batch(packed, rule, marks)
    kept = observed_after(decided, metrics).where("data is not null")
    return kept.mapInArrow(unpack_rows, df.schema)


def _in_stream(
    df: DataFrame, packed: GroupedData, rule: FilterRule, marks: Mapping[MarksKey, HighwaterMarks]
) -> DataFrame:
    if not hasattr(packed, "transformWithStateInPandas"):
        if any(len(m) for m in marks.values()):
            raise too_old("a stream that begins with marks (marks=)", "4.0")
        timeout = "NoTimeout" if rule.ttl_s is None else "ProcessingTimeTimeout"
        return packed.applyInPandasWithState(deciding_with_state(rule), DECIDED, STATE, "append", timeout)
    provider = df.sparkSession.conf.get(_PROVIDER) or ""
    if provider != _ROCKSDB:
        raise SparkUnfit(f"{_PROVIDER} is {provider}: filter_replays needs {_ROCKSDB}; set it before the query starts")
    initial = None
    if any(len(m) for m in marks.values()):
        rows = [
            (topic, *pair, known.epoch, known.marks.to_bytes()) for (topic, *pair), known in _by_pair(marks).items()
        ]
        initial = df.sparkSession.createDataFrame(rows, _MARKED).groupBy(*_PAIR)
    # With time mode ProcessingTime Spark runs a batch at every trigger, even without rows: only use it with ttl_s.
    time_mode = "None" if rule.ttl_s is None else "ProcessingTime"
    return packed.transformWithStateInPandas(
        PairProcessor(rule), DECIDED, outputMode="Append", timeMode=time_mode, initialState=initial
    )


def _in_batch(packed: GroupedData, rule: FilterRule, marks: Mapping[MarksKey, HighwaterMarks]) -> DataFrame:
    newest_first = sorted(marks.items(), key=lambda item: item[0], reverse=True)

    def decided(key: Iterable[Any], frames: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        name = PairName(*key)
        if name.source_partition == CARRIER:
            warn_of_none(name.topic, frames, rule)
            return iter([handed_on([None])])
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

    if release() < (4, 1):  # older releases pass all rows of a pair to the function at once
        return packed.applyInPandas(decide_whole, DECIDED)
    return packed.applyInArrow(decide, DECIDED)


def stored_marks(spark: SparkSession, checkpoint: str, batch_id: int | None = None) -> BatchMarks:
    """The marks in the checkpoint of a query with this filter, as of a batch; None: of the last whose state is whole.

    The state of a batch that its handler did not read whole is not, and no later batch can run (SPARK-52008).
    Raises SparkUnfit, MarksMissing.
    """
    if release() < (4, 0):
        raise too_old("the state of a checkpoint", "4.0")
    directory = HadoopDirectory(spark, checkpoint)
    committed = sorted(int(name) for name in directory.names("commits") if name.isdigit())
    if not committed:
        raise MarksMissing(f"{checkpoint}: it is no checkpoint of a query that has finished a batch")
    query_id = str(json.loads(directory.read("metadata"))["id"])
    unread: list[str] = []
    assert spark.streams.active is not None, "asked for, since it makes what Spark's reader of a state reports to"
    for number in reversed(committed) if batch_id is None else [batch_id]:
        state = spark.read.format("statestore").option("stateVarName", _STATE_NAME).option("batchId", number)
        try:
            rows = state.load(checkpoint).select("key.*", "value.*").collect()
        except (PySparkException, Py4JJavaError) as error:
            unread.append(f"batch {number}: {' '.join(str(error).splitlines()[:2])}")
            continue
        if unread:
            _LOG.warning("the state of batch %d is not whole: the marks are those as of batch %d", number + 1, number)
        return _marks_of_state(query_id, number, rows)
    raise MarksMissing(f"{checkpoint}: no whole state of filter_replays was found ({'; '.join(unread)})")


def _marks_of_state(query_id: str, number: int, rows: Iterable[Any]) -> BatchMarks:
    parts: dict[MarksKey, list[HighwaterMarks]] = {}
    carriers = set()
    for row in rows:
        if row["source_partition"] == CARRIER:
            carriers.add(bytes(row["marks"]).decode())
        else:
            key = MarksKey(row["topic"], row["epoch"])
            parts.setdefault(key, []).append(HighwaterMarks.from_bytes(bytes(row["marks"])))
    marks = {key: merged_marks(own) for key, own in parts.items()}
    return BatchMarks(query_id, number, marks=marks, carrier=carriers.pop() if len(carriers) == 1 else None)


def _by_pair(marks: Mapping[MarksKey, HighwaterMarks]) -> dict[tuple[str, int, int], PairMarks]:
    """(topic, pid, source partition) → its marks alone; those of the newest epoch if it has marks in several."""
    found = {}
    for key, own in sorted(marks.items(), key=lambda item: item[0]):
        columns = own.to_columns()
        for row, (pair, _) in enumerate(own.items()):
            single = HighwaterMarks.from_columns(
                *(column[row : row + 1] for column in columns[:4]),
                advanced_ms=columns.advanced_ms[row : row + 1],
                bitmaps=columns.bitmaps[row : row + 1],
                window=columns.window,
            )
            found[key.topic, *pair] = PairMarks(key.startpoint_epoch, single)
    return found
