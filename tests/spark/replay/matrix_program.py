"""The cells of one release in one Spark: their queries run beside each other, are killed by one kill -9, and run again.

python matrix_program.py <place> <settings: JSON>       settings: see matrix.py
    first    every query stops: inside its second batch, with its rows on the way into the sink, or where its cell says
             so; a JSON line tells which do so and which failed; then this process waits to be killed
    again    every query goes on to the end; a JSON line a cell tells which rows its sink held before, and holds now

A cell is (form, carrier, sink), or with n behind it: stopped behind the nth write of its driver (write_points.py), from
its first batch on; 0: in a task that writes rows of its second batch.
"""

import contextlib
import json
import re
import sqlite3
import sys
import threading
import time
from pathlib import Path

from sessions import quiet_session
from write_points import behind_each_write

AT = "at struct<producer: string, file: bigint, row: bigint>"
COLUMNS = (
    "key binary, value binary, topic string, partition int, offset bigint, "
    "headers array<struct<key: string, value: binary>>"
)
ROWS = ("topic", "partition", "offset")
GATE_S = 1700
BESIDE = 3
"""So many queries work at a time; those that wait to be killed work no more."""


def main(place, told):
    from spark_jobs.spark_internals import use_driver_python

    told = json.loads(told)
    spark = session(place, told)
    use_driver_python(spark)
    cells = [Cell(spark, place, told, *cell) for cell in told["cells"]]
    try:
        if told["mode"] == "first":
            with behind_each_write(lambda what: written(spark, cells, what)):
                first(cells)
        else:
            again(cells)
    finally:
        spark.stop()


def say(**what):
    print(json.dumps(what), flush=True)  # noqa: T201 - its answer


def first(cells):
    """Wait until all queries are inside their second batch, or have failed; then wait to be killed."""
    deadline_s, left = time.monotonic() + GATE_S, list(cells)
    while left and time.monotonic() < deadline_s:
        for cell in left[:BESIDE]:
            cell.begin()
        left = [cell for cell in left if not (cell.waits() or cell.failed())]
        time.sleep(0.2)
    failed = {cell.name: cell.failed() for cell in cells if cell.failed()}
    say(failed=failed, waits={cell.name: cell.stopped_behind for cell in cells if cell.waits()})
    time.sleep(GATE_S)


def written(spark, cells, what):
    """Tell the cell whose query, or job, runs in this thread."""
    query_id = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
    for cell in cells:
        if cell.runs_in(threading.current_thread(), query_id):
            cell.has_written(what)


def again(cells):
    for number, cell in enumerate(cells):
        for soon in cells[number : number + BESIDE]:
            soon.begin()
        cell.end()


def session(place, told):
    rocksdb = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    more = {"spark_driver_memory": "2g", "spark_sql_streaming_stateStore_providerClass": rocksdb}
    if any(cell[2] == "catalog" for cell in told["cells"]):  # whose tables outlive a kill
        more |= {"spark_sql_catalogImplementation": "hive", "spark_hadoop_hive_exec_scratchdir": f"{place}/hive"}
    # More threads than cores: most of them wait.
    return quiet_session(place, told["jars"], 16, tables=told["tables"], **more)


class Cell:
    """One form over one carrier into one sink, from its own checkpoint."""

    def __init__(self, spark, place, told, form, carrier, sink, *write):
        self.name, self.form, self.carrier, self.sink = "/".join([form, carrier, sink, *write]), form, carrier, sink
        self.stops = told["mode"] == "first"
        self.write = int(*write) if write else None
        self.stopped_behind, self._writes = None, 0
        self._spark, self._source, self._postgresql = spark, told["source"], told["postgresql"]
        self._relayed = "-".join([told["relayed"], *write])
        self._place = Path(place) / self.name.replace(" ", "-").replace("/", "-")
        self._place.mkdir(parents=True, exist_ok=True)
        release = spark.version.replace(".", "_")  # one database holds the tables of all releases
        self._table = f"{self._place.name.replace('-', '_').lower()}_{release}"
        self._waits, self._error, self._query, self._seen = threading.Event(), None, None, None
        self._job, self._marks = None, None

    def waits(self):
        return self._waits.is_set() or (self._place / "waits").exists()

    def failed(self):
        """Why, in a line; None while it runs."""
        if self._error is None and self._query is not None and not self._query.isActive and not self.waits():
            self._error = self._query.exception() or "it ended by itself"
        return None if self._error is None else line_of(self._error)

    def begin(self):
        """Start it, if it has not been."""
        if self._query is not None or self._error is not None:
            return
        try:
            if self._seen is None and not self.stops:
                self._seen = self._seen_rows()
            self._query = self._start()
        except Exception as error:  # noqa: BLE001 - what a release refuses by name is its answer
            self._error = error

    def end(self):
        """Run the query to its end. If it fails, it is started once more, as a supervisor would, and that is
        reported.
        """
        failed = None
        for _ in range(2):
            try:
                if self._query is not None:
                    self._query.awaitTermination()
                    rows = sorted(map(list, self._rows()))
                    return say(cell=self.name, seen=self._seen, rows=rows, failed=failed)
            except Exception as error:  # noqa: BLE001 - one cell's failure is its own
                self._error = error
            failed, self._query, self._error = line_of(self._error), None, None
            self.begin()
        return say(cell=self.name, error=failed)

    def _events(self):
        from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

        reader = self._spark.readStream.format(self._source["format"]).options(**self._source["options"])
        if self._source["format"] != "kafka":
            reader = reader.schema(COLUMNS)
        events = reader.load()
        if self.carrier == "position":
            events = events.withColumn("at", F.from_json(F.col("value").cast("string"), AT)["at"])
        return events

    def _carrier(self):
        from spark_jobs import SourcePosition

        if self.carrier != "position":
            return self.carrier
        return SourcePosition(producer="at.producer", position={"at.file": 20, "at.row": 40})

    def _start(self):
        from spark_jobs import FileMarks, ReplayFilteredBatches, filter_replays

        if self.form == "relay":
            return self._relay()
        if self.form == "operator":
            kept = filter_replays(self._events(), carrier=self._carrier()).select(*ROWS)
            if self.stops:
                kept = self.stopped_in_a_task(kept)
            writer = kept.writeStream.option("checkpointLocation", f"{self._place}/checkpoint")
            writer = writer.trigger(availableNow=True)
            if self.sink == "iceberg":
                self._spark.sql("CREATE NAMESPACE IF NOT EXISTS ice.db")
                columns = "topic string, partition int, offset bigint"
                self._spark.sql(f"CREATE TABLE IF NOT EXISTS ice.db.{self._table} ({columns}) USING iceberg")
                return writer.format("iceberg").toTable(f"ice.db.{self._table}")
            return writer.format("delta" if self.sink == "delta" else "parquet").start(f"{self._place}/table")
        sink = self._sink()
        marks = sink if self.sink in {"sqlite", "postgresql"} else FileMarks(self._place / "marks")
        self._marks = marks
        once = ReplayFilteredBatches(Stopping(sink, self), marks, carrier=self._carrier())
        writer = self._events().writeStream.foreachBatch(once)
        return writer.option("checkpointLocation", f"{self._place}/checkpoint").trigger(availableNow=True).start()

    def _relay(self):
        """Run the relay job in a thread; it stops when its second batch is half sent."""
        from spark_jobs.jobs import pipeline, relaying
        from spark_jobs.jobs.relaying import RelayOptions

        # Its signals are the main thread's, and nobody sends any.
        pipeline._signals = lambda: contextlib.nullcontext(threading.Event())
        send, cut = relaying.Sending.send, self._source["cut"]

        def send_half(sending, rows):
            if rows.where(f"offset >= {cut}").isEmpty():
                return send(sending, rows)
            send(sending, rows.where(f"offset < {cut * 3 // 2}"))
            return self.stop_here()

        if self.stops and self.write is None:
            relaying.Sending.send = send_half
        servers = self._source["options"]["kafka.bootstrap.servers"]
        options = RelayOptions(
            topic=self._source["options"]["subscribe"],
            source="kafka",
            source_options={"kafka.bootstrap.servers": servers, "startingOffsets": "earliest"},
            max_records_per_trigger=int(self._source["options"]["maxOffsetsPerTrigger"]),
            application="matrix",
            to_topic=self._relayed,
            checkpoint=f"{self._place}/checkpoint",
            marks=f"{self._place}/marks",
        )
        self._job = Relay(self._spark, options)
        self._job.start()
        return self._job

    def _sink(self):
        from spark_jobs import idempotent_table
        from spark_jobs.sql import SqlTable

        if self.sink == "sqlite":
            return SqlTable(f"sqlite:{self._place}/table.db", "found")
        if self.sink == "postgresql":
            return SqlTable(self._postgresql, self._table)
        if self.sink == "catalog":
            return idempotent_table(self._table)
        if self.sink == "iceberg":
            return idempotent_table(f"ice.db.{self._table}", "iceberg")
        return idempotent_table(f"{self._place}/table", "delta" if self.sink == "delta" else "parquet")

    def stopped_in_a_task(self, rows):
        place, cut = str(self._place), self._source["cut"]
        return rows.mapInArrow(lambda batches: stopping(batches, place, cut), rows.schema)

    def runs_in(self, thread, query_id):
        """Whether this is its job's thread, or the query of its checkpoint."""
        metadata = self._place / "checkpoint" / "metadata"
        return thread is self._job or (query_id is not None and metadata.exists() and query_id in metadata.read_text())

    def has_written(self, what):
        """Stop behind the write that the cell is for."""
        self._writes += 1
        if self._writes == self.write:
            self.stopped_behind = what
            self.stop_here()

    def stop_here(self):
        self._waits.set()
        time.sleep(GATE_S)

    def _seen_rows(self):
        """The rows that a reader saw before this start."""
        try:
            return sorted(map(list, self._rows()))
        except Exception:  # noqa: BLE001 - there is no table yet
            return []

    def _rows(self):
        if self.sink == "topic":
            return []  # whoever reads it looks
        if self.sink == "sqlite":
            with contextlib.closing(sqlite3.connect(self._place / "table.db")) as database:
                return database.execute("select partition, offset from found").fetchall()
        if self.sink == "postgresql":
            import psycopg

            with psycopg.connect(self._postgresql) as database:
                return database.execute(f'select partition, "offset" from {self._table}').fetchall()
        if self.sink in {"catalog", "iceberg"}:
            name = self._table if self.sink == "catalog" else f"ice.db.{self._table}"
            self._spark.catalog.refreshTable(name)  # each session remembers what it has seen of a table
            found = self._spark.table(name)
        else:
            found = self._spark.read.format("delta" if self.sink == "delta" else "parquet").load(f"{self._place}/table")
        return [(row["partition"], row["offset"]) for row in found.select("partition", "offset").collect()]


class Relay(threading.Thread):
    """The job as a query is asked."""

    def __init__(self, spark, options):
        super().__init__(daemon=True)
        self._spark, self._options, self._error = spark, options, None

    def run(self):
        from spark_jobs.jobs.command import Reporter
        from spark_jobs.jobs.relaying import relay_in

        try:
            with Reporter.open(None) as reporter:
                relay_in(self._spark, self._options, reporter)
        except Exception as error:  # noqa: BLE001 - the answer of who asks
            self._error = error

    @property
    def isActive(self):  # noqa: N802 - Spark's own name
        return self.is_alive()

    def exception(self):
        return self._error

    def awaitTermination(self):  # noqa: N802
        self.join()
        if self._error is not None:
            raise self._error


class Stopping:
    """The handler; where its cell names no write it stops in its second batch with its rows written, its marks not."""

    def __init__(self, sink, cell):
        self._sink, self._cell = sink, cell
        if hasattr(sink, "expect"):
            self.expect = sink.expect

    def __call__(self, rows, batch_id):
        rows, stops = rows.select(*ROWS), self._cell.stops and batch_id == 1
        if stops and self._cell.write == 0:
            rows = self._cell.stopped_in_a_task(rows)
        self._sink(rows, batch_id)
        if stops and self._cell.write is None:
            self._cell.stop_here()


def stopping(batches, place, cut):
    """A task of the sink, which stops where the second batch's rows come."""
    import pyarrow.compute as pc

    for batch in batches:
        if batch.num_rows and pc.max(batch.column("offset")).as_py() >= cut:
            yield batch.slice(0, batch.num_rows // 2)
            (Path(place) / "waits").touch()
            time.sleep(GATE_S)
        yield batch


def line_of(error):
    """The line of a stack trace with the error, without parts that differ from run to run."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {re.sub(r'[0-9a-f]{8}-[-0-9a-f]{27}', '...', first)[:300]}"


if __name__ == "__main__":
    main(*sys.argv[1:])
