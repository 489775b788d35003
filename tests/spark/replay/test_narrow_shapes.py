"""Streams of many shapes: read narrowly or whole, the first pass sees the very rows that the second one hands on."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

from filtering.stream_metadata import StreamMetadata
from spark_jobs.columns import FilterRule
from spark_jobs.frame import by_runs, keyed_frame
from spark_jobs.spark_internals import column_pruned

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("generated_code")]

SCHEMA = "key binary, value string, offset bigint, extra int, topic string, partition int"
ORDINARY, RARE = {}, {}  # name: what is done before foreachBatch, and whether it is read narrowly
ORDINARY["files of two schemas in directories of partitions"] = (lambda s: s, True)
ORDINARY["another column as the offset"] = (
    lambda s: s.withColumnRenamed("offset", "o").withColumn("offset", F.col("o") + 5).drop("o"),
    True,
)
ORDINARY["two streams"] = (lambda s: s.where("offset < 5").union(s.where("offset > 12")), False)
RARE["a column that old files lack"] = (lambda s: s.where("extra is null or extra < 5"), True)
RARE["names in another case"] = (lambda s: s.withColumnRenamed("value", "VALUE"), True)
RARE["the batch's time"] = (lambda s: s.where("current_timestamp() > timestamp'2020-01-01'"), True)
RARE["the file's name"] = (lambda s: s.select("*", "_metadata.file_name").where("file_name like '1%'"), True)
RARE["one directory"] = (lambda s: s.where("partition = 1"), True)
RARE["a watermark"] = (
    lambda s: s.withColumn("at", F.timestamp_millis("offset")).withWatermark("at", "1 hour"),
    False,
)
RARE["identities drawn"] = (lambda s: s.withColumn("id", F.expr("uuid()")).where("id is not null"), False)


def write_log(directory):
    """Two partitions, two files each: the older one lacks a column, and writes another's name in another case."""
    for partition in (0, 1):
        place = directory / "topic=t" / f"partition={partition}"
        place.mkdir(parents=True)
        for n in range(2):
            keys = [StreamMetadata(7, partition, 10 * n + i).pack() for i in range(10)]
            columns = {
                "key" if n else "KEY": pa.array(keys, pa.binary()),
                "value": pa.array([f"{partition}-{n}-{i}" for i in range(10)]),
                "offset": pa.array(range(10 * n, 10 * n + 10), pa.int64()),
            }
            if n:
                columns["extra"] = pa.array([None if i % 2 else i for i in range(10)], pa.int32())
            pq.write_table(pa.table(columns), place / f"{n}.parquet")


def test_the_narrow_frame_has_the_rows_of_the_batch_whatever_was_done_before(spark, tmp_path, torture):
    """Contract: two passes over one batch; where Spark's plan is not known to give the same rows, the frame stays."""
    write_log(tmp_path / "log")
    found = {}

    def looking(shape):
        def look(df, _):
            pruned, rule = column_pruned(df), FilterRule()
            found[shape] = pruned is not df
            one, other = (
                sorted(frame.select("topic", "partition", "offset", "value", "key").collect()) for frame in (pruned, df)
            )
            assert one == other
            assert len(one) > 0
            one, other = (
                {(s.topic, s.partition, s.start, s.end, s.rows, s.marks) for s in by_runs(keyed_frame(f, rule), rule)}
                for f in (pruned, df)
            )
            assert one == other

        return look

    shapes = ORDINARY | RARE if torture.is_long else ORDINARY
    for number, (shape, (what, _)) in enumerate(shapes.items()):
        stream = what(spark.readStream.schema(SCHEMA).parquet(str(tmp_path / "log")))
        writer = stream.writeStream.foreachBatch(looking(shape))
        writer = writer.option("checkpointLocation", str(tmp_path / f"c{number}"))
        writer.trigger(availableNow=True).start().awaitTermination()
    assert found == {shape: narrow for shape, (_, narrow) in shapes.items()}
