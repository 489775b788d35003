"""A Spark driver that takes orders: a JSON object a line on standard input, an answer a line on standard output.

python spark_driver_program.py <master> <jars> <scratch>

One session serves all tests of a module. What is run is what users run: their foreachBatch with ReplayFilteredBatches
or their query behind filter_replays, into an idempotent table of (topic, partition, offset, batch_id).
"""

import io
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

ANSWER = "answer "
GATE_S = 120


def waits_at(gate, batches):
    """Called in a worker: reports that the task runs, and waits until the gate is open."""
    # This process was forked by the worker daemon, and that by a server whose command line names the executor.
    server = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
    parents = [int(word) for word in Path(f"/proc/{server}/cmdline").read_text().split("\0") if word.isdigit()]
    for number, batch in enumerate(batches):
        if number == 0 and not (gate / "open").exists():
            aside = gate / f".{os.getpid()}-{time.monotonic_ns()}"
            aside.write_text(json.dumps(parents))
            aside.rename(gate / f"waits{aside.name}")
            deadline_s = time.monotonic() + GATE_S
            while not (gate / "open").exists() and time.monotonic() < deadline_s:
                time.sleep(0.01)
        yield batch


class Handler:
    """A user's handler: an idempotent table; with a gate its tasks wait there."""

    def __init__(self, table, adopt, gate):
        from spark_jobs import idempotent_table

        self._table, self._gate = idempotent_table(str(table), adopt=adopt), gate
        self.expect, self.drop_from = self._table.expect, self._table.drop_from

    def __call__(self, rows, batch_id):
        rows = rows.select("topic", "partition", "offset")
        if self._gate is not None:
            gate = Path(self._gate)
            rows = rows.mapInArrow(lambda batches: waits_at(gate, batches), rows.schema)
        self._table(rows, batch_id)


def killed_before_marks(store, batch_id, jvm):
    """The store of a query that fails after it has written the rows of this batch, and before their marks.

    jvm: it is killed with the driver; None: no process is killed.
    """
    write = store.write

    def die(marks, *, keep):
        if marks.batch_id == batch_id:
            if jvm is None:
                raise RuntimeError("it ends here")
            for pid in (jvm, os.getpid()):
                os.kill(pid, signal.SIGKILL)
        write(marks, keep=keep)

    store.write = die
    return store


class Driver:
    """The orders."""

    def __init__(self, master, jars, scratch):
        from pyspark.sql import SparkSession

        from spark_jobs import register_sources

        provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        settings = {
            "spark.jars": jars,
            "spark.ui.enabled": "false",
            # A file system by a name that is none of this machine's: viewfs://all/elsewhere
            "spark.hadoop.fs.viewfs.mounttable.all.link./elsewhere": Path(f"{scratch}-elsewhere").as_uri(),
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "1g",
            "spark.local.dir": scratch,
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.streaming.noDataMicroBatches.enabled": "false",
            "spark.sql.streaming.pollingDelay": "100ms",  # a query that follows its topics asks again behind it
            "spark.sql.streaming.stateStore.providerClass": provider,
            "spark.executorEnv.PYTHONPATH": ":".join(sys.path),
        }
        Path(f"{scratch}-elsewhere").mkdir(exist_ok=True)
        builder = SparkSession.builder.master(master)
        for name, value in settings.items():
            builder = builder.config(name, value)
        self.spark = builder.getOrCreate()
        self.spark.sparkContext.setLogLevel("OFF")
        register_sources(self.spark)
        self.queries = {}

    def start(
        self,
        place,
        options,
        form="batches",
        source="kafka",
        trigger=None,
        rule=None,
        adopt=None,
        marks=None,
        table=None,
        gate=None,
        die_at=None,
        killed=False,
    ):
        """A query over a topic or a log; what it writes is in `<place>/table`."""
        from spark_jobs import FileMarks, ReplayFilteredBatches, filter_replays

        place = Path(place)
        adopt = None if adopt is None else tuple(adopt)
        frame = self.spark.readStream.format(source).options(**options).load()
        handler = Handler(table or place / "table", adopt if form == "batches" else None, gate)
        store = FileMarks(marks or place / "marks")
        if form == "operator":
            inherited = None if adopt is None else store.read(*adopt).marks
            frame = filter_replays(frame, marks=inherited, **(rule or {}))
        else:
            if die_at is not None:
                jvm = self.spark.sparkContext._gateway.proc.pid if killed else None
                store = killed_before_marks(store, die_at, jvm)
            handler = ReplayFilteredBatches(handler, store, adopt=adopt, **(rule or {}))
        writer = frame.writeStream.foreachBatch(handler).option("checkpointLocation", str(place / "checkpoint"))
        query = writer.trigger(**(trigger or {"availableNow": True})).start()
        self.queries[str(place)] = query
        return str(query.id)

    def finish(self, place):
        """Wait for its end; its id."""
        query = self.queries.pop(place)
        query.awaitTermination()
        return str(query.id)

    def run(self, place, **more):
        """`start` and `finish`."""
        self.start(place, **more)
        return self.finish(place)

    def catch_up(self, place):
        """Wait until all records of the topics are in the table."""
        self.queries[place].processAllAvailable()

    def stop(self, place):
        """The end of a query that follows its topics."""
        self.queries[place].stop()
        return self.finish(place)

    def backfill(self, place, options, form="batches", rule=None):
        """A batch frame of the same topics, without a query."""
        from spark_jobs import filter_frame, filter_replays

        frame = self.spark.read.format("kafka").options(**options).load()
        rule = rule or {}
        kept = filter_replays(frame, **rule) if form == "operator" else filter_frame(frame, **rule).rows
        kept.select("topic", "partition", "offset").write.parquet(f"{place}/table/batch_id=0")

    def job(self, name, arguments):
        """Run a job's command in this session: (exit code, all of its output and of its log)."""
        from importlib import import_module

        from click.testing import CliRunner

        logged = logging.StreamHandler(io.StringIO())
        logging.getLogger("spark_jobs").addHandler(logged)
        done = CliRunner().invoke(import_module(f"spark_jobs.jobs.{name}").main, arguments)
        logging.getLogger("spark_jobs").removeHandler(logged)
        return [done.exit_code, done.output + logged.stream.getvalue()]


def tell(answer):
    sys.stdout.write(ANSWER + json.dumps(answer) + "\n")
    sys.stdout.flush()


def main():
    driver = Driver(*sys.argv[1:4])
    tell({"is": "ready"})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = {"is": getattr(driver, order.pop("do"))(**order)}
        except Exception as error:  # noqa: BLE001 - an answer like any other
            answer = {"error": f"{type(error).__name__}: {error}"}
        tell(answer)
    driver.spark.stop()


if __name__ == "__main__":
    main()
