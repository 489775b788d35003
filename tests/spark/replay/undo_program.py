"""A repair of an apply job over a topic, into a Delta or an Iceberg table, and its undo, killed around its commit.

python undo_program.py <place> <jars> <format> <servers> <topic> <step: one of STEPS>

    offsets   0 .. 19, of which 10 .. 14 are replays of 5 .. 9; two batches
    repair    from 7 on, rows from 17 on stay; then 20 .. 22 are new
    undo      7 .. 16 as they were; 20 .. 22 stay
"""

import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path

from sessions import quiet_session
from tables_program import versions

SOURCES = [*range(10), *range(5, 15), *range(15, 18)]
KEPT = [n for n in range(23) if not 10 <= n < 15]
REPAIRED = {n for n in KEPT if 7 <= n < 17}


class Job:
    """The apply job, its table, and the commands."""

    def __init__(self, spark, place, form, servers, topic):
        self.spark, self.place, self.form, self.servers, self.topic = spark, place, form, servers, topic
        self.sink = f"{place}/undone" if form == "delta" else "ice.db.undone"
        self.table = f"delta.`{self.sink}`" if form == "delta" else self.sink
        self.checkpoint = f"{place}/checkpoint"
        self.conf = {name: value for name, value in spark.sparkContext.getConf().getAll() if "sql" in name}

    def run(self):
        from spark_jobs.jobs.options import ApplyOptions
        from spark_jobs.jobs.pipeline import apply_in
        from spark_jobs.jobs.reporting import Reporter

        options = ApplyOptions(
            topic=self.topic, source="kafka", source_options={"kafka.bootstrap.servers": self.servers}, sink=self.sink,
            sink_format=self.form, checkpoint=self.checkpoint, marks=f"{self.checkpoint}-marks", value_format="string",
            keep=("topic", "partition", "offset"), max_records_per_trigger=10,
        )  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()), Reporter.open("-") as reporter:
            apply_in(self.spark, options, reporter)

    def command(self, what, *words):
        """Run the command; returns its exit code, and its output in one line."""
        from pushrep.cli import main as cli

        given = ["startpoint", what, self.checkpoint, *map(str, words), "--sink", self.sink, "--format", self.form]
        given += [word for name, value in self.conf.items() for word in ("--conf", f"{name}={value}")]
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
            code = cli.run([*given, "--reason", "worse"])
        return code, " ".join(said.getvalue().split())

    def repair(self):
        """The rows that its preview tells."""
        words = ("--to", 7, "--replace-until", 17, "--reset-marks", "--stopped", "--watch-s", 0, "--json")
        code, said = self.command("apply-checkpoint", *words)
        assert code == 0, said
        return json.loads(said.partition("}")[0] + "}")["rows"]

    def rows(self):
        """offset -> batch, without duplicates."""
        found = self.spark.table(self.table).select("offset", "batch_id").collect()
        assert len({row[0] for row in found}) == len(found), found
        return dict(sorted(tuple(row) for row in found))

    def said_by_commits(self):
        """The metadata of each commit of the table."""
        if self.form == "delta":
            return [row["userMetadata"] for row in self.spark.sql(f"DESCRIBE HISTORY {self.table}").collect()]
        return [row[0] for row in self.spark.sql(f"SELECT summary['pushrep'] FROM {self.table}.snapshots").collect()]

    def produce(self, start, end):
        from confluent_kafka import Producer

        from filtering import StreamMetadata

        producer = Producer({"bootstrap.servers": self.servers, "log_level": 0})
        for n in range(start, end):
            producer.produce(self.topic, b"%d" % n, StreamMetadata(7, 0, SOURCES[n]).pack(), partition=0)
        assert producer.flush(60) == 0

    def keep(self, *found):
        Path(self.place, "rows.json").write_text(json.dumps(found), encoding="utf-8")

    def kept(self):
        told = json.loads(Path(self.place, "rows.json").read_text(encoding="utf-8"))
        return [{int(n): batch for n, batch in one.items()} for one in told]

    def forget_versions(self):
        """As a table's clean-up does with versions that are too old."""
        if self.form == "delta":
            self.spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
            self.spark.sql(f"VACUUM {self.table} RETAIN 0 HOURS")
        else:
            (now,) = self.spark.sql("SELECT string(now())").first()
            self.spark.sql(f"CALL ice.system.expire_snapshots('db.undone', TIMESTAMP '{now}', 1)")

    def undo_dying(self, *, before):
        """Ends this process, around the commit of undo-repair."""
        from spark_jobs.sinks.catalog_table import CatalogTable

        undo = CatalogTable.undo

        def dying(table, *args):
            if not before:
                undo(table, *args)
            os.kill(os.getpid(), signal.SIGKILL)

        CatalogTable.undo = dying
        self.command("undo-repair")


def killed_before(job):
    job.produce(0, 20)
    job.run()
    first = job.rows()
    assert list(first) == [n for n in KEPT if n < 20]
    assert "no partition of orders was sent back" in job.command("undo-repair")[1]
    assert job.repair() == len(REPAIRED), "the preview looks at the table"
    code, said = job.command("undo-repair")
    assert (code, "is read again up to 20 and stands at 7" in said) == (1, True), said
    job.run()
    job.produce(20, 23)
    job.run()
    second = job.rows()
    assert list(second) == KEPT
    assert {n for n in first if second[n] != first[n]} == REPAIRED
    code, said = job.command("undo-repair", "--dry-run", "--json")
    assert (code, said) == (0, '{"partition": 0, "rows_go": 5, "rows_come_back": 5} {"written": false}')
    job.keep(first, second)
    job.undo_dying(before=True)


def killed_behind(job):
    assert job.rows() == job.kept()[1], "until its commit nothing is changed"
    job.undo_dying(before=False)


def again(job):
    first, second = job.kept()
    wanted = {n: first[n] if n in REPAIRED else second[n] for n in KEPT}
    assert job.rows() == wanted
    said_before = job.said_by_commits()
    assert len([text for text in said_before if text and '"reason":"worse"' in text]) == 1, "who did it, and why"
    code, said = job.command("undo-repair")
    assert (code, "is undone already" in said) == (0, True), said
    assert job.said_by_commits() == said_before, "its commit is in"
    job.run()
    assert job.rows() == wanted, "the query goes on from where it stands"
    job.produce(22, 23)
    job.run()
    assert job.rows() == wanted, "and knows what it has seen"
    job.repair()
    job.run()
    third = job.rows()
    assert {n for n in wanted if third[n] != wanted[n]} == REPAIRED, "it can be repaired again"
    for version in versions(job.spark, job.form, job.table):
        rows = version.select("offset", "batch_id").collect()
        assert len({first[n] != batch for n, batch in rows if 7 <= n < 10}) < 2, "a reader saw half of it"
    job.spark.sql(f"DELETE FROM {job.table} WHERE batch_id = {wanted[22]}")
    job.spark.stop()
    code, said = job.command("undo-repair")  # in a Spark of its own
    assert (code, "came after the repair: it may have changed its rows. Nothing" in said) == (1, True), said


def forgotten(job):
    job.repair()
    job.run()
    rows = job.rows()
    job.forget_versions()
    for ignored in ("false", "true"):
        job.spark.conf.set("spark.sql.files.ignoreMissingFiles", ignored)
        code, said = job.command("undo-repair")
        assert (code, job.rows()) == (1, rows), said
        assert ("does not exist" if job.form == "delta" else "its history") in said, said


STEPS = {"killed before": killed_before, "killed behind": killed_behind, "again": again, "forgotten": forgotten}


def main(place, jars, form, servers, topic, step):
    # Jobs write in a copy of the session: Iceberg's cache in this one would not see it.
    uncached = {"spark.sql.catalog.ice.cache-enabled": "false"}
    spark = quiet_session(place, Path(jars).glob("*.jar"), 1, tables=True, **uncached)
    try:
        STEPS[step](Job(spark, place, form, servers, topic))
    finally:
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
