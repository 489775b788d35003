"""A stream that a startpoint sends back, into a Delta and an Iceberg table, killed around its commits.

python tables_program.py <place> <jars> <format> <die at: before, after or ->

    batch 0   log offsets  0 ..  9                     batch 2   5 .. 14 again, in a new epoch, with other values
    batch 1               10 .. 19, five are replays   batch 3   15 .. 24, of which 15 .. 19 again

`before` ends the process by SIGKILL on the way into the commit of batch 2, `after` behind it and before its marks.
`restored`: no startpoint; parts of a query over Delta are restored, and a JSON line says what happened to each.
"""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

from releases_program import applied
from sessions import quiet_session

COLUMNS = (
    "key binary, value string, topic string, partition int, offset bigint, startpoint_epoch bigint, marks_epoch bigint"
)
SOURCES = [*range(10), *range(5, 15), *range(15, 20)]
"""The source offset of each log offset: from 10 to 14 stand replays of 5 to 9."""
KEPT = [n for n in range(25) if not 10 <= n < 15]
BATCHES = ((0, 10, 0, "old"), (10, 20, 0, "old"), (5, 15, 7, "new"), (15, 25, 7, "new"))
EXPECTED = [(n, ("old" if n < 5 else "new") + str(n)) for n in KEPT]


def main(place, jars, form, die_at):
    spark = quiet_session(place, Path(jars).glob("*.jar"), 1, tables=True)
    try:
        print(restored(spark, place) if die_at == "restored" else through(spark, place, form, die_at))  # noqa: T201 - its answer
    finally:
        spark.stop()


def log(spark, start, end, epoch, text):
    from filtering import StreamMetadata

    rows = [
        (StreamMetadata(-7, 0, SOURCES[n]).pack(), f"{text}{n}", "t", 0, n, epoch, epoch) for n in range(start, end)
    ]
    return spark.createDataFrame(rows, COLUMNS).coalesce(1)


def through(spark, place, form, die_at):
    """The stream into the table, to its end or to where it dies; then what a look at the table gives."""
    from spark_jobs import FileMarks, ReplayFilteredBatches, idempotent_table
    from spark_jobs.jobs.pipeline import Sink
    from spark_jobs.replacing import Replacing

    name = f"{place}/delta-table" if form == "delta" else "ice.db.orders"
    if not Path(place, form, "3").exists():
        for n, batch in enumerate(BATCHES):
            log(spark, *batch).write.mode("overwrite").parquet(f"{place}/{form}/{n}")

    def records(session, where):
        frame = session.read.parquet(*(f"{place}/{form}/{n}" for n in range(2)))
        return frame.where(f"offset >= {where.start} and offset < {where.end}")

    class Dying(FileMarks):
        def write(self, marks, *, keep):
            # Before batch 2 is handled, its marks before are written: at the place where it reads again.
            written = self.batches(marks.query_id)
            if die_at == "after" and marks.batch_id == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            super().write(marks, keep=keep)
            if die_at == "before" and marks.batch_id == 1 and 1 in written:
                os.kill(os.getpid(), signal.SIGKILL)

    sink = idempotent_table(name, form)
    marks = Dying(f"{place}/{form}-marks")
    once = ReplayFilteredBatches(Columns(sink), marks, replacing=Replacing(sink, records))
    events = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(f"{place}/{form}/*")
    writer = events.writeStream.foreachBatch(once).option("checkpointLocation", f"{place}/{form}-checkpoint")
    writer.trigger(availableNow=True).start().awaitTermination()
    query_id = marks.owner()
    replaced = marks.read(query_id, 2).replaced
    assert [one[:4] for one in replaced] in ([("t", 0, 5, 15)], []), replaced
    table = f"delta.`{name}`" if form == "delta" else name
    assert rows_of(spark.table(table)) == EXPECTED
    looked = Sink(name, None, form, {})
    assert list(looked.held("t", {0: 5})[0]) == [n for n in KEPT if n >= 5], "a preview tells its rows"
    looked.close()
    every_version(spark, form, table)
    rolled_back(spark, sink, table, query_id)
    # The apply job, which begins a table of its own: of Delta by a relative path, which Delta itself takes for a name.
    own = os.path.relpath(f"{place}/job-table") if form == "delta" else "ice.db.applied"
    return applied(spark, f"{place}/{form}-job", own, form)


class Columns:
    """The sink, with the columns that a table is to have."""

    def __init__(self, sink):
        self._sink = sink
        self.expect, self.drop_from, self.last_batch = sink.expect, sink.drop_from, sink.last_batch

    def __call__(self, rows, batch_id):
        self._sink(rows.select("topic", "partition", "offset", "value"), batch_id)

    def replace(self, rows, batch_id, ranges):
        self._sink.replace(rows.select("topic", "partition", "offset", "value"), batch_id, ranges)


RESTORED = ("table", "checkpoint", "marks")
"""The parts, each a directory; the files that are read stay where they are."""


def restored(spark, place):
    """Which parts are the copies of after two batches, the others those of after four -> what a start makes of it."""
    from spark_jobs import FileMarks, ReplayFilteredBatches, idempotent_table

    place = Path(place, "restored")

    def run(where):
        once = ReplayFilteredBatches(Columns(idempotent_table(f"{where}/table", "delta")), FileMarks(where / "marks"))
        events = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(f"{place}/log/*")
        writer = events.writeStream.foreachBatch(once).option("checkpointLocation", f"{where}/checkpoint")
        writer.trigger(availableNow=True).start().awaitTermination()

    def rows(where):
        return rows_of(spark.read.format("delta").load(f"{where}/table"))

    for n in range(5):
        log(spark, 5 * n, 5 * n + 5, 0, "r").write.parquet(f"{place}/log/{n}")
        if n in {1, 3}:
            run(place / "building")
            shutil.copytree(place / "building", place / ("old" if n == 1 else "new"))
    told = {}
    for number in range(1, 2 ** len(RESTORED)):
        old = [part for bit, part in enumerate(RESTORED) if number >> bit & 1]
        where = place / "_".join(old)
        for part in RESTORED:
            shutil.copytree(place / ("old" if part in old else "new") / part, where / part)
        before = rows(where)
        try:
            run(where)
        except Exception as error:  # noqa: BLE001 - Spark's, around the filter's own
            assert rows(where) == before, "a refusal changes nothing"
            told[", ".join(old)] = re.search(r"errors\.(\w+)", str(error))[1]
        else:
            told[", ".join(old)] = "goes on" if rows(where) == [(n, f"r{n}") for n in KEPT] else "WRONG"
    return json.dumps(told)


def rows_of(frame):
    return sorted((row["offset"], row["value"]) for row in frame.select("offset", "value").collect())


def versions(spark, form, table):
    """How many, and each as a frame."""
    if form == "delta":
        found = [row["version"] for row in spark.sql(f"DESCRIBE HISTORY {table}").collect()]
    else:
        found = [row[0] for row in spark.sql(f"SELECT snapshot_id FROM {table}.snapshots").collect()]
    return [spark.sql(f"SELECT * FROM {table} VERSION AS OF {one}") for one in sorted(found)]


def every_version(spark, form, table):
    """The allowed states for a reader: each row once, and of a repaired batch all new rows or none."""
    whole = [n for n in KEPT if n < 10], [n for n in KEPT if n < 20], KEPT
    for version in versions(spark, form, table):
        rows = rows_of(version)
        assert [n for n, _ in rows] in ([], *whole), rows
        for start, end in ((5, 15), (15, 20)):
            assert len({value[:3] for n, value in rows if start <= n < end}) <= 1, rows


def rolled_back(spark, sink, table, query_id):
    """Batch 3 once more: as it was; with other ranges; and a way back over batch 2."""
    from spark_jobs.batch_marks import LogRange
    from spark_jobs.errors import CheckpointWentBack

    form = "delta" if table.startswith("delta.") else "iceberg"
    before = len(versions(spark, form, table))
    batch = log(spark, 15, 25, 7, "late").select("topic", "partition", "offset", "value")
    for number, start in ((4, 25), (4, 25)):
        sink.expect(query_id, number, (LogRange("t", 0, start, 25, 7),))
        sink(batch.where("offset < 0"), number)
    after = len(versions(spark, form, table))
    assert after - before == 1, "a batch that is in is not written again"
    other = batch.selectExpr("topic", "partition", "offset + 10 as offset", "value")
    sink.expect(query_id, 4, (LogRange("t", 0, 25, 35, 7),))
    sink(other, 4)
    assert rows_of(spark.table(table))[-10:] == [(n + 10, f"late{n}") for n in range(15, 25)], "rolled back: other rows"
    sink.expect(query_id, 2, (LogRange("t", 0, 5, 12, 7),))
    held = rows_of(spark.table(table))
    for way_back in (lambda: sink(batch, 2), lambda: sink.drop_from(2)):
        try:
            way_back()
        except CheckpointWentBack:
            assert rows_of(spark.table(table)) == held, "refused, and yet rows are gone"
        else:
            raise AssertionError("a way back over replaced rows was taken")


if __name__ == "__main__":
    main(*sys.argv[1:])
