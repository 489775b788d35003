"""The core of each form with whatever release of Spark this Python has: every record once. A JSON line tells what ran.

python releases_program.py <place> [<address of a Spark Connect server>]
"""

import json
import sys
from pathlib import Path

COLUMNS = "key binary, value string, topic string, partition int, offset bigint"


def main(place, remote=None):
    from spark_jobs.spark_internals import release

    spark = classic() if remote is None else connected(remote)
    done = {"release": ".".join(map(str, release()))}
    try:
        for form in (frames, batches, operator, applied, source) if remote is None else (source, operator, served):
            done[form.__name__] = form(spark, place)
            print(form.__name__, done[form.__name__], file=sys.stderr, flush=True)  # noqa: T201 - how far it came
    finally:
        print(json.dumps(done), flush=True)  # noqa: T201 - its answer
        spark.stop()


def classic():
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.sql.shuffle.partitions", "2")
    builder = builder.config("spark.python.authenticate.socketTimeout", "120s")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    builder = builder.config(
        "spark.sql.streaming.stateStore.providerClass",
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    )
    spark = builder.config("spark.sql.streaming.noDataMicroBatches.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def connected(remote):
    from pyspark.sql import SparkSession

    return SparkSession.builder.remote(remote).getOrCreate()


def log(first, sources):
    """Rows of one pair: these source offsets, from log offset `first` on; and one without metadata."""
    from filtering import StreamMetadata

    rows = [(StreamMetadata(-7, 0, s).pack(), f"v{s}", "t", 0, first + n) for n, s in enumerate(sources)]
    return [*rows, (b"business", f"u{first}", "t", 0, first + len(rows))]


def values(frame):
    return sorted(row.value for row in frame.select("value").collect())


def frames(spark, place):
    """filter_frame: by runs, row by row, with a window; the operator's rule on a batch frame; columns."""
    from spark_jobs import filter_frame, filter_replays, stream_metadata_columns, with_stream_metadata
    from spark_jobs.batch_marks import MarksKey

    rows = log(0, [0, 1, 2, 5, 1, 2, 3, 6])
    frame = spark.createDataFrame(rows, COLUMNS).coalesce(1)
    kept = sorted([f"v{n}" for n in (0, 1, 2, 5, 6)] + ["u0"])
    result = filter_frame(frame)
    assert values(result.rows) == kept
    assert (result.counts().kept, result.counts().dropped) == (5, 3)
    by_row = filter_frame(frame, window=2)
    assert values(by_row.rows) == sorted([*kept, "v3"])
    assert by_row.counts().late == 2
    assert values(filter_replays(frame)) == kept
    assert values(filter_replays(frame, marks={MarksKey("t"): result.marks[MarksKey("t")]})) == ["u0"]
    pid, partition, offset = stream_metadata_columns("key")
    first = frame.select(pid, partition, offset).where("source_offset = 5").first()
    assert tuple(first) == (-7, 0, 5)
    made = with_stream_metadata(frame.drop("key").selectExpr("*", "0 as sp"), 9, "sp", "offset")
    assert bytes(made.first().key).hex() == "0000000000000009" + "00000000" + "0" * 16
    listed = filter_frame(spark.sql("select unhex('00') key, 'x' value, 't' topic, 0 partition, 0L offset"))
    assert values(listed.rows) == ["x"]
    return "ran"


def stream(spark, place, name, batches):
    """A stream of files, one a batch."""
    for n, rows in enumerate(batches):
        target = f"{place}/{name}/{n}"
        spark.createDataFrame(rows, COLUMNS).coalesce(1).write.parquet(target)
    return spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(f"{place}/{name}/*")


def run(writer, checkpoint):
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def batches(spark, place):
    """foreachBatch, with the marks in a log, by runs and row by row; skipped and on again from the same checkpoint."""
    from spark_jobs import FileMarks, ReplayFilteredBatches, idempotent_table

    crossing = [0, 1, 2, 1, 3, 2, 4]
    events = stream(spark, place, "batches", [log(0, [0, 1, 2]), log(10, crossing)])
    for name, rule in (("runs", {}), ("rows", {"window": 1})):
        marks = FileMarks(f"{place}/{name}-marks")
        once = ReplayFilteredBatches(idempotent_table(f"{place}/{name}-table"), marks, **rule)
        run(events.writeStream.foreachBatch(once), f"{place}/{name}-checkpoint")
        assert marks.batches(marks.owner()) == [0, 1]
        told = once.last_counts
        assert (told.rows, told.kept, told.dropped) == (8, 2, 5)
        found = values(spark.read.parquet(f"{place}/{name}-table"))
        assert found == sorted([f"v{n}" for n in range(5)] + ["u0", "u10"])
    return "ran"


def patiently(writer, checkpoint):
    """Run again if Spark's 10 s for the start of the handler's Python were not enough; that time can't be set."""
    for _ in range(5):
        try:
            return run(writer, checkpoint)
        except Exception as error:  # as text, from the server
            if "failed to connect back" not in str(error):
                raise
            told = error
    raise told


def served(spark, place):
    """foreachBatch over Spark Connect, which runs the handler beside the server; unsupported calls are refused by
    name.
    """
    import sqlite3

    from spark_jobs import FileMarks, ReplayFilteredBatches, idempotent_table
    from spark_jobs.sql import SqlTable

    events = stream(spark, place, "served", [log(0, [0, 1, 2]), log(10, [0, 1, 2, 1, 3, 2, 4])])
    kept = sorted([f"v{n}" for n in range(5)] + ["u0", "u10"])
    sql = SqlTable(f"sqlite:{place}/served.db", "orders")
    once = ReplayFilteredBatches(
        lambda rows, number: sql(rows.select("topic", "partition", "offset", "value"), number), sql
    )
    patiently(events.writeStream.foreachBatch(once), f"{place}/served-sql")
    with sqlite3.connect(f"{place}/served.db") as database:
        assert sorted(row[0] for row in database.execute("select value from orders")) == kept
    once = ReplayFilteredBatches(idempotent_table("served"), FileMarks(f"{place}/served-marks"), window=1)
    patiently(events.writeStream.foreachBatch(once), f"{place}/served-catalog")
    assert values(spark.table("served")) == kept
    once = ReplayFilteredBatches(idempotent_table(f"{place}/served-table"), FileMarks(f"{place}/path-marks"))
    try:
        patiently(events.writeStream.foreachBatch(once), f"{place}/served-path")
    except Exception as error:  # as text, from the handler's Python
        if "not over Spark Connect; name a catalog table or a database" not in str(error):
            raise
        return "ran"
    raise AssertionError("a path was written")


def operator(spark, place):
    """filter_replays in a stream that is stopped and continued."""
    from spark_jobs import filter_replays
    from spark_jobs.operator_counts import operator_counts

    for n in range(2):
        events = stream(spark, place, f"operator/{n}", [log(10 * n, [0, 1, 2] if n == 0 else [1, 2, 3, 2])])
        events = spark.readStream.schema(COLUMNS).parquet(f"{place}/operator/*/*")
        writer = filter_replays(events).writeStream.format("parquet").option("path", f"{place}/operator-table")
        query = run(writer, f"{place}/operator-checkpoint")
        counts = operator_counts(query.lastProgress)
        assert (counts.rows, counts.kept, counts.dropped) == ((4, 3, 0), (5, 1, 3))[n]
    assert values(spark.read.parquet(f"{place}/operator-table")) == ["u0", "u10", "v0", "v1", "v2", "v3"]
    return "ran"


def source(spark, place):
    """The source pushrep, as a batch; its stream, or by which name it is refused."""
    from filtering import StreamMetadata
    from pushrep.log import SegmentLog
    from spark_jobs import filter_frame, register_sources
    from spark_jobs.errors import SparkUnfit

    with SegmentLog.open(Path(place) / "logs" / "orders-0") as made:
        made.append([b"a", b"b", b"a"], keys=[StreamMetadata(1, 0, n).pack() for n in (0, 1, 0)])
    try:
        register_sources(spark)
    except SparkUnfit as error:
        return str(error)
    options = {"path": f"{place}/logs", "topic": "orders"}
    rows = filter_frame(spark.read.format("pushrep").options(**options).load()).rows
    assert sorted(bytes(row.value) for row in rows.collect()) == [b"a", b"b"]
    try:
        events = spark.readStream.format("pushrep").options(**options).load()
        run(events.writeStream.format("noop"), f"{place}/source-checkpoint")
    except Exception as error:  # as text, from a worker
        if "SparkUnfit" not in str(error):
            raise
        return "a stream of source pushrep needs Spark 4.2"
    return "ran"


def applied(spark, place, sink=None, sink_format="parquet"):
    """The apply job's own steps, over files in place of a topic."""
    from spark_jobs.jobs.command import Reporter
    from spark_jobs.jobs.options import ApplyOptions
    from spark_jobs.jobs.pipeline import apply_in

    rows = [(key, value.encode(), *where) for key, value, *where in log(0, [0, 1, 0])]
    columns = "key binary, value binary, topic string, partition int, offset bigint"
    spark.createDataFrame(rows, columns).coalesce(1).write.parquet(f"{place}/applied/0")
    spark.conf.set("spark.sql.streaming.schemaInference", "true")
    options = ApplyOptions(
        topic="t",
        source="parquet",
        source_options={"path": f"{place}/applied/0"},
        checkpoint=f"{place}/applied-checkpoint",
        marks=f"{place}/applied-marks",
        sink=sink or f"{place}/applied-table",
        sink_format=sink_format,
        value_format="string",
        keep=("topic", "partition", "offset"),
    )
    apply_in(spark, options, Reporter(None))
    name = f"delta.`{Path(sink).resolve()}`" if sink_format == "delta" else sink
    found = spark.read.parquet(options.sink) if sink is None else spark.table(name)
    assert values(found) == ["u0", "v0", "v1"]
    return "ran"


if __name__ == "__main__":
    main(*sys.argv[1:])
