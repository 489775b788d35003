"""A Spark driver that follows startpoints, and is killed by kill -9 with its JVM and workers, at a named step.

python startpoint_program.py <logs> <state> [<step> <sequence>]

Batches are written to <state>/table/<batch>.json, and replaced if they run again; the checkpoint is beside it. STEPS
are in the order in which a startpoint reaches them. A step is counted in the process that executes it, and only for
startpoint `sequence`.
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from examples.demo.processes import processes

STEPS = ("pending", "applied", "planned", "handled", "committed", "stored", "consumed")
PROGRESS_NAME = "progress.json"


def kill_session():
    """kill -9 for everything in this session: the driver first, which would fail without its JVM, ourselves last."""
    session = os.getsid(0)
    mine = (one.pid for one in processes() if one.session == session)
    for pid in sorted(mine, key=lambda pid: (pid == os.getpid(), pid != session)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def follow(spark, logs, state, how, handled=lambda _epochs: None):
    """Run the query to its end; `handled` gets the epochs in each batch, behind its rows."""

    def handle(rows, batch_id):
        found = [(row.partition, row.offset, row.startpoint_epoch) for row in rows.collect()]
        replace(state / "table" / f"{batch_id}.json", sorted(found))
        handled({epoch for _, _, epoch in found})

    (state / "table").mkdir(parents=True, exist_ok=True)
    options = {"path": str(logs), "topic": "orders", "startingStartpoint": "billing", "maxRecordsPerTrigger": "40"}
    writer = spark.readStream.format("pushrep").options(**options).load().writeStream.foreachBatch(handle)
    query = writer.option("checkpointLocation", str(state / "checkpoint")).trigger(**how).start()
    query.awaitTermination()
    replace(state / PROGRESS_NAME, query.lastProgress and json.loads(query.lastProgress.json)["sources"])


def main():
    from pyspark.sql import SparkSession

    from pushrep.startpoints import StartpointStore
    from spark_jobs.sources.datasource import PushrepDataSource, PushrepStreamReader

    logs, state = Path(sys.argv[1]), Path(sys.argv[2])
    step, deadly = (sys.argv[3], int(sys.argv[4])) if len(sys.argv) > 3 else ("none", 0)

    consume = StartpointStore.consume

    def killing(store, claim, sequence):
        if step == "stored" and sequence == deadly:
            kill_session()
        consume(store, claim, sequence)
        if step == "consumed" and sequence == deadly:
            kill_session()

    class KillingReader(PushrepStreamReader):
        def latestOffset(self, start, limit):  # noqa: N802 - Spark's name
            StartpointStore.consume = killing  # in the process that Spark runs readers in
            is_written = StartpointStore.open(logs / "startpoints").event_log().written(deadly) is not None
            if (step == "pending" and is_written) or (step == "committed" and deadly in epochs(start)):
                kill_session()
            end = super().latestOffset(start, limit)
            if step == "applied" and deadly in epochs(end):
                kill_session()
            return end

        def partitions(self, start, end):
            if step == "planned" and deadly in epochs(end):
                kill_session()
            return super().partitions(start, end)

    class KillingSource(PushrepDataSource):
        def streamReader(self, schema):  # noqa: N802 - Spark's name
            return KillingReader(self._checked(schema), schema)

    def handled(found):
        if step == "handled" and deadly in found:
            kill_session()

    spark = SparkSession.builder.appName("startpoints").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    spark.dataSource.register(KillingSource)
    follow(spark, logs, state, {"processingTime": "50 milliseconds"}, handled)


def epochs(logged):
    return {entry["epoch"] for entry in logged.get("partitions", {}).values()}


def replace(path, value):
    path.with_suffix(".tmp").write_text(json.dumps(value))
    path.with_suffix(".tmp").rename(path)


if __name__ == "__main__":
    main()
