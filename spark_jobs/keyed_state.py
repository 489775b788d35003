"""filter_replays: the streaming operator, whose marks live in Spark's state store and so in the query's checkpoint.

    rows ─┬─ no metadata, other PIDs ───────────────────────────────────────────────┬─▶ rows
          └─ pack ─▶ blobs by (topic, pid, source partition) ─▶ state ─▶ unpack ────┘
             mapInArrow              shuffle            transformWithState

Rows travel to the operator as blobs, Arrow IPC streams of at most about BLOB_BYTES, so that every column keeps its
type and its value whatever it is, and no row is taken apart. The operator brings a pair's rows of one batch into log
order, decides by the same ReplayFilter as everyone, and remembers the pair's marks as their own versioned bytes, with
the startpoint epoch that they are of (mark_epochs.py).
All of a pair's rows of one batch must fit into a worker's memory: give the source a limit per trigger. The two ways
read the source once each.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, GroupedData
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from filtering.highwater import HighwaterMarks
from filtering.stream_metadata import parse_keys
from spark_jobs.batch_marks import MarksKey
from spark_jobs.errors import SparkJobError
from spark_jobs.mark_epochs import EPOCH_COLUMNS, Epoch
from spark_jobs.slice_filter import FilterRule, only_epoch
from spark_jobs.slice_scan import KEY, governed, keyed_frame

BLOB_BYTES = 1 << 20

_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_PAIR = ("topic", "pid", "source_partition")
_PACKED = "topic string, pid bigint, source_partition int, rows binary"
_PACKED_FIELDS: Any = [
    ("topic", pa.string()),
    ("pid", pa.int64()),
    ("source_partition", pa.int32()),
    ("rows", pa.binary()),
]
_PACKED_ARROW = pa.schema(_PACKED_FIELDS)
_STATE = "epoch bigint, marks binary"
_MARKED = f"topic string, pid bigint, source_partition int, {_STATE}"


class StateStoreUnfit(SparkJobError):
    """Spark keeps state with a provider on which transformWithState does not run: set the one the message names."""

    def __init__(self, provider: str) -> None:
        super().__init__(f"{_PROVIDER} is {provider}: filter_replays needs {_ROCKSDB}; set it before the query starts")
        self.provider = provider


def filter_replays(  # noqa: PLR0913 - the rule's settings, by name
    df: DataFrame,
    *,
    carrier: str = "key",
    window: int = 0,
    only_pids: Iterable[int] | None = None,
    ttl_s: float | None = None,
    marks: Mapping[MarksKey, HighwaterMarks] | None = None,
) -> DataFrame:
    """The rows of `df` that are no replays, in no particular order.

    `df` needs the columns topic, partition, offset, and that of its carrier: key or headers.

    A streaming frame keeps its marks in the checkpoint of the query that it becomes part of, a batch frame forgets
    them. `marks`, as `{MarksKey(topic): HighwaterMarks}`, are where to begin: of a stream, for its first batch ever.
    `ttl_s` is judged against the batch's own timestamp, which a re-run repeats, when a pair's next row comes.
    Raises StateStoreUnfit, FrameUnusable, CarrierUnusable, BadFilterSetting; PairSplit inside the query.
    """
    pids = None if only_pids is None else frozenset(only_pids)
    rule = FilterRule(carrier=carrier, window=window, only_pids=pids, ttl_s=ttl_s)
    keyed = keyed_frame(df, rule)
    ours = governed(F.col(KEY), rule)
    packed = keyed.where(ours).mapInArrow(pack_rows, _PACKED).groupBy(*_PAIR)
    kept = _in_stream(df, packed, rule, marks or {}) if df.isStreaming else _in_batch(packed, rule, marks or {})
    return kept.mapInArrow(unpack_rows, df.schema).unionByName(keyed.where(~ours).drop(KEY))


def _in_stream(
    df: DataFrame, packed: GroupedData, rule: FilterRule, marks: Mapping[MarksKey, HighwaterMarks]
) -> DataFrame:
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
        PairProcessor(rule), "rows binary", outputMode="Append", timeMode=time_mode, initialState=initial
    )


def _in_batch(packed: GroupedData, rule: FilterRule, marks: Mapping[MarksKey, HighwaterMarks]) -> DataFrame:
    newest_first = sorted(marks.items(), key=lambda item: item[0], reverse=True)

    def decide(key: tuple[Any, ...], frame: pd.DataFrame) -> pd.DataFrame:
        topic, pid, partition = key[0], int(key[1]), int(key[2])
        begin = (
            PairMarks(k.startpoint_epoch, m) for k, m in newest_first if k.topic == topic and m.get(pid, partition)
        )
        kept, _ = decide_pair(frame["rows"], next(begin, PairMarks()), rule, now_ms=None)
        return pd.DataFrame({"rows": kept})

    return packed.applyInPandas(decide, "rows binary")


class PairMarks(NamedTuple):
    """Marks that hold one pair (and maybe others), and the startpoint epoch of the rows that they come from."""

    epoch: int = 0
    marks: HighwaterMarks = HighwaterMarks()


class PairProcessor(StatefulProcessor):
    """Spark's state of one (topic, pid, source partition): the bytes of marks that hold this pair alone."""

    def __init__(self, rule: FilterRule) -> None:
        self._rule = rule

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._marks = handle.getValueState("marks", _STATE)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:  # noqa: ARG002, N802, N803 - Spark's names
        now_ms = None if self._rule.ttl_s is None else int(timerValues.getCurrentProcessingTimeInMs())
        state = self._marks.get()
        known = PairMarks() if state is None else PairMarks(state[0], HighwaterMarks.from_bytes(bytes(state[1])))
        blobs = (blob for frame in rows for blob in frame["rows"])
        kept, known = decide_pair(blobs, known, self._rule, now_ms=now_ms)
        self._marks.update((known.epoch, known.marks.to_bytes()))
        yield pd.DataFrame({"rows": kept})

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:  # noqa: ARG002, N802, N803 - Spark's names
        self._marks.update((int(initialState["epoch"].iloc[0]), bytes(initialState["marks"].iloc[0])))

    def close(self) -> None:
        """Nothing is held."""


def decide_pair(
    blobs: Iterable[bytes], known: PairMarks, rule: FilterRule, *, now_ms: int | None
) -> tuple[list[bytes], PairMarks]:
    """One pair's rows of one batch, in any order → blobs of those that pass, and the pair's marks after them.

    Raises EpochsMixed.
    """
    table = pa.concat_tables(pa.ipc.open_stream(blob).read_all() for blob in blobs)
    table = table.sort_by([("partition", "ascending"), ("offset", "ascending")])
    epoch = _epoch_of(table)
    marks = known.marks if known.epoch >= epoch.marks else HighwaterMarks()
    if rule.ttl_s is not None and now_ms is not None:
        marks = marks.without_expired(now_ms=now_ms, ttl_s=rule.ttl_s)
    filter_ = rule.new_filter(marks)
    passes = filter_.admit_batch(table[KEY], table["partition"].to_numpy())
    kept = table.drop_columns([KEY]).filter(cast("Any", pa.array(passes)))
    return list(_blobs(kept)), PairMarks(epoch.startpoint, filter_.marks(now_ms))


def _epoch_of(table: pa.Table) -> Epoch:
    columns = [table[name].combine_chunks().fill_null(0) for name in EPOCH_COLUMNS if name in table.column_names]
    return only_epoch((None, table["partition"][0].as_py()), columns, None)


def pack_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Keyed rows → blobs by pair; every row must have metadata."""
    for batch in batches:
        if not batch.num_rows:
            continue
        keys = parse_keys(batch.column(KEY))
        topics = batch.column("topic").dictionary_encode()
        codes = np.asarray(topics.indices).astype(np.int64)
        order = np.lexsort((keys.partitions, keys.pids, codes))
        same = (np.diff(x[order]) == 0 for x in (codes, keys.pids, keys.partitions))
        cuts = np.flatnonzero(~np.logical_and.reduce(list(same))) + 1
        packed: list[dict[str, Any]] = []
        for low, high in pairwise([0, *cuts.tolist(), len(order)]):
            first = order[low]
            own = pa.Table.from_batches([batch.take(cast("Any", pa.array(np.sort(order[low:high]))))])
            pair = {
                "topic": topics.dictionary[int(codes[first])].as_py(),
                "pid": int(keys.pids[first]),
                "source_partition": int(keys.partitions[first]),
            }
            packed.extend(pair | {"rows": blob} for blob in _blobs(own))
        yield pa.RecordBatch.from_pylist(packed, schema=_PACKED_ARROW)


def unpack_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Blobs → the rows in them."""
    for batch in batches:
        for blob in batch.column("rows"):
            yield from pa.ipc.open_stream(blob.as_buffer())


def _blobs(table: pa.Table) -> Iterator[bytes]:
    """A table as IPC streams of about BLOB_BYTES each; none for no rows."""
    rows_each = max(1, table.num_rows * BLOB_BYTES // max(table.nbytes, 1))
    for start in range(0, table.num_rows, rows_each):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.slice(start, rows_each).combine_chunks())
        yield sink.getvalue().to_pybytes()


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
