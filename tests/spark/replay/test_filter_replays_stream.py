"""The operator form in a stream: state in the checkpoint, restarts, refusals. Files stand for triggers."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from filtering import HighwaterMarks, StreamMetadata
from spark_jobs import filter_replays
from spark_jobs.batch_marks import MarksKey
from spark_jobs.keyed_state import StateStoreUnfit

pytestmark = pytest.mark.spark

ARROW = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
SCHEMA = (
    "key binary, value string, topic string, partition int, offset bigint, "
    "headers array<struct<key: string, value: binary>>"
)


@pytest.fixture
def query(spark, tmp_path):
    """Writes rows as one trigger's file and runs the query over what is there; answers the ids that came out of it."""
    source, sink = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    number = 0

    def run(rows, carrier="key", **rule):
        nonlocal number
        cells = [dict(zip(ARROW.names, row.cells(carrier), strict=True)) for row in rows]
        for cell in cells:
            cell["headers"] = cell["headers"] and [{"key": k, "value": v} for k, v in cell["headers"]]
        pq.write_table(pa.Table.from_pylist(cells, schema=ARROW), source / f"{number:05}.parquet")
        number += 1
        before = _written(sink)
        stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(source))
        kept = filter_replays(stream, carrier=carrier, **rule).select("value")
        writer = kept.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start(str(sink)).awaitTermination()
        after = _written(sink)
        assert len(after) == len(set(after)), "a row came out twice"
        return set(after) - set(before)

    return run


def _written(sink):
    return [v for f in sink.glob("*.parquet") for v in pq.read_table(f)["value"].to_pylist()] if sink.exists() else []


@pytest.mark.parametrize(("carrier", "window"), [("key", 0), ("header", 6)])
def test_restarts_go_on_with_the_marks_in_the_checkpoint(query, logs, carrier, window):
    rows = [row for seed in range(200, 212) for row in logs.random_topic(seed)]
    model = logs.Model(window)
    for n, batch in enumerate(logs.in_batches(rows, 3, seed=5)):
        import random

        random.Random(n).shuffle(batch)  # the operator itself brings a pair's rows into log order
        assert query(batch, carrier, window=window) == model.kept(batch), f"batch {n}"


def test_marks_can_be_inherited(query, logs):
    rows = [logs.Row("t", 0, n, StreamMetadata(5, p, 7 + n), None, f"{p}-{n}") for n in range(4) for p in range(2)]
    marks = {MarksKey("t"): HighwaterMarks.from_columns([5, 5, 6], [0, 3, 0], [8, 1, 1], [0, 0, 0])}
    assert query(rows[:4], marks=marks) == {"1-0", "1-1"}
    assert query(rows[4:], marks=marks) == {row.id for row in rows[4:]}


def test_marks_expire_by_the_batch_s_own_time(query, logs):
    row = logs.Row("t", 0, 0, StreamMetadata(5, 1, 7), None, "a")
    assert query([row], ttl_s=3600) == {"a"}
    assert query([logs.Row("t", 0, 1, StreamMetadata(5, 1, 7), None, "b")], ttl_s=3600) == set()
    assert query([logs.Row("t", 0, 2, StreamMetadata(5, 1, 7), None, "c")], ttl_s=0.001) == {"c"}


def test_another_state_store_is_refused_by_name(spark, tmp_path):
    stream = spark.readStream.schema(SCHEMA).parquet(str(tmp_path))
    name = "spark.sql.streaming.stateStore.providerClass"
    rocks = spark.conf.get(name)
    spark.conf.set(name, "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider")
    try:
        with pytest.raises(StateStoreUnfit, match=r"RocksDBStateStoreProvider; set it before"):
            filter_replays(stream)
    finally:
        spark.conf.set(name, rocks)
