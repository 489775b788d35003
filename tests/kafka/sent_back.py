"""A query over a Kafka topic and an apply job, sent back between their runs, in a Spark with the connector."""

import sqlite3
from contextlib import closing


def runs_of(spark, place, servers, topic):
    """The offsets that each run of the query read, and the apply job's table."""
    from pushrep.startpoints import Startpoint, StartpointStore
    from spark_jobs.checkpoint_apply import CheckpointPlace, apply

    options = {"kafka.bootstrap.servers": servers, "subscribe": topic, "startingOffsets": "earliest"}
    frame = spark.readStream.format("kafka").options(**options).load()

    def run():
        read = []
        writer = frame.writeStream.foreachBatch(
            lambda rows, _: read.extend(sorted((row.partition, row.offset) for row in rows.collect()))
        )
        writer = writer.option("checkpointLocation", str(place / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()
        return read

    runs = [run()]
    store = StartpointStore.open(place / "store")
    for partition, startpoint in ((1, Startpoint.specific(3)), (0, Startpoint.relative(records=-2))):
        store.write("billing", topic, partition, startpoint, "again")
        apply(CheckpointPlace(checkpoint=place / "checkpoint", consumer="billing"), store, sleep=lambda _s: None)
        runs.append(run())
    return [*runs, run(), applied(spark, place, servers, topic, store)]


def applied(spark, place, servers, topic, store):
    """The apply job's rows after partition 1 was sent back to offset 4, where all that stood was wrong."""
    from pushrep.startpoints import Startpoint
    from spark_jobs.checkpoint_apply import CheckpointPlace, MarksPlace, apply
    from spark_jobs.jobs.options import ApplyOptions
    from spark_jobs.jobs.pipeline import apply_in
    from spark_jobs.jobs.reporting import Reporter

    url, checkpoint = f"sqlite:{place / 'orders.db'}", place / "job-checkpoint"
    options = ApplyOptions(
        topic=topic,
        source="kafka",
        source_options={"kafka.bootstrap.servers": servers},
        sink=url,
        sink_table="orders",
        checkpoint=str(checkpoint),
        marks="",
        value_format="string",
        keep=("topic", "partition", "offset"),
    )

    def run():
        with Reporter.open(str(place / "events")) as reporter:
            apply_in(spark, options, reporter)

    run()
    with closing(sqlite3.connect(place / "orders.db")) as database:
        database.execute("UPDATE orders SET value = 'wrong'")
        database.commit()
    store.write("orders-job", topic, 1, Startpoint.specific(4, reset_marks=True), "again")
    where = CheckpointPlace(checkpoint=checkpoint, consumer="orders-job", marks=MarksPlace(url, "orders"))
    apply(where, store, sleep=lambda _s: None)
    run()
    with closing(sqlite3.connect(place / "orders.db")) as database:
        return database.execute('SELECT "partition", "offset", value FROM orders ORDER BY 1, 2').fetchall()
