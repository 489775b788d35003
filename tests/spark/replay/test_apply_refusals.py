"""What the apply command refuses after Spark has started and before the query: one line, exit code 1, nothing left
behind.
"""

import os

import pytest
from click.testing import CliRunner

from filtering import StreamMetadata
from pushrep import Outbox
from pushrep.log import SegmentLog
from spark_jobs.batch_marks import BatchMarks
from spark_jobs.file_marks import FileMarks
from spark_jobs.jobs.apply import main

pytestmark = pytest.mark.spark

HOLDS = "; the log holds [3, 10); give an offset of these, -2 (earliest) or -1 (latest)"
REFUSED = {
    "a start below the log start": (
        ["--starting-offsets", '{"t": {"0": 2, "1": -2}}'],
        "option startingOffsets: offset 2 of partition 0 is below the log start" + HOLDS,
    ),
    "a start beyond the end": (
        ["--starting-offsets", '{"t": {"0": 11, "1": -2}}'],
        "option startingOffsets: offset 11 of partition 0 is beyond the end" + HOLDS,
    ),
    "a partition left out": (["--starting-offsets", '{"t": {"0": 3}}'], "name every partition; missing: 1"),
    "no schema of Spark's": (
        ["--value-format", "json", "--value-schema", "{tmp}/broken.ddl"],
        "--value-schema: is no schema of Spark",
    ),
    "a file above the checkpoint": (
        ["--checkpoint", "{tmp}/fields.ddl/c"],
        "--checkpoint='{tmp}/fields.ddl/c': {tmp}/fields.ddl is a file",
    ),
    "a file as sink": (["--sink", "{tmp}/fields.ddl"], "--sink='{tmp}/fields.ddl': {tmp}/fields.ddl is a file"),
    "a column that records lack": (["--keep", "topic,colour"], "--keep: records have no column 'colour', only key, "),
    "the value kept as well": (["--keep", "value"], "--keep: value is also a column of the value"),
    "a partition by no field of a JSON schema": (
        ["--value-format", "json", "--value-schema", "{tmp}/fields.ddl", "--partition-by", "day"],
        "--partition-by='day': there is no such column; there are a, b, topic, partition, offset, timestamp",
    ),
    "a field that the table has itself": (
        ["--value-format", "json", "--value-schema", "{tmp}/batch_id.ddl"],
        "column='Batch_ID': the table has a column of this name for the number of the batch",
    ),
    "a database that is not there": (
        ["--sink", "sqlite:{tmp}/no/d.db", "--table", "t"],
        "/no/d.db table t': unable to open database",
    ),
    "a database that does not answer": (
        ["--sink", "postgresql://u:secret@127.0.0.1:9/d", "--table", "t"],
        "--sink='postgresql://127.0.0.1/d table t': connection failed",
    ),
    "a table that others wrote": (["--sink", "{tmp}/theirs"], "table {tmp}/theirs holds 'data.parquet', which this"),
    "a table of another query": (
        ["--sink", "{tmp}/owned"],
        "table {tmp}/owned is written by query other, this is query <new>: a fresh checkpoint would write",
    ),
    "a catalog table of another shape": (
        ["--sink", "other_shape"],
        "--sink='other_shape': the table has the columns x, batch_id, the rows value, topic, partition, offset, ",
    ),
    "a name that is none": (["--sink", "no name"], "--sink='no name': "),
    "a file system that nobody knows": (["--sink", "foo://h/x"], "--sink='foo://h/x': No FileSystem for scheme"),
    "marks of another query": (
        ["--marks", "{tmp}/marked"],
        "marks at {tmp}/marked belong to query other (last batch 4), this is query <new>",
    ),
    "marks that were never there to adopt": (
        ["--adopt", "other:3"],
        "lack batch 3 of query other: it has none of this",
    ),
    "a source that is not there": (["--source", "kafka2", "--path", ""], "kafka2"),
}


@pytest.fixture(scope="module")
def places(spark, tmp_path_factory):
    """Logs of t, [3, 10) in partition 0; schemas; tables and marks of others."""
    tmp = tmp_path_factory.mktemp("places")
    with Outbox.open(tmp / "logs", topic="t", partitions=2, producer="p") as box:
        for number in range(10):
            box.append_many(0, [b"{}"], metadata=StreamMetadata(5, 0, number)).result(timeout=120)
    with SegmentLog.open(tmp / "logs" / "t-0") as log:
        assert log.delete_records(3) == 3
    (tmp / "broken.ddl").write_text("a in")
    (tmp / "fields.ddl").write_text("a int, b array<string>")
    (tmp / "batch_id.ddl").write_text("Batch_ID int")
    (tmp / "theirs").mkdir()
    (tmp / "theirs" / "data.parquet").write_text("x")
    (tmp / "owned" / "_pushrep").mkdir(parents=True)
    (tmp / "owned" / "_pushrep" / "owners-1.json").write_text('{"version": 1, "queries": [["other", 0]]}')
    marks = FileMarks(tmp / "marked")
    marks.write(BatchMarks("other", 4, (), {}), keep=2)
    spark.range(0).selectExpr("id as x", "id as batch_id").write.saveAsTable("other_shape")
    yield str(tmp)
    spark.sql("drop table other_shape")


@pytest.fixture
def command(places, spark):
    """Run the command as a user types it, in the session of the tests."""

    def run(*more):
        given = ["--topic", "t", "--path", "{tmp}/logs", "--sink", "{tmp}/table", "--checkpoint", "{tmp}/checkpoint"]
        if "kafka2" in more:
            given, more = [*given[:2], *given[4:]], more[:2]
        return CliRunner().invoke(main, [text.replace("{tmp}", places) for text in (*given, *more)])

    return run


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_option_and_leave_nothing_behind(command, places, case):
    arguments, why = REFUSED[case]
    there = set(os.listdir(places))
    answer = command(*arguments)
    assert (answer.exit_code, why.replace("{tmp}", places) in answer.output) == (1, True), answer.output
    said = [line for line in answer.output.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, answer.output
    assert "Traceback" not in answer.output
    assert "secret" not in answer.output
    assert "\tat " not in answer.output, "no stack of Java"
    assert set(os.listdir(places)) == there, "neither checkpoint nor table nor marks were made"


def test_beside_a_session_nobody_asks_which_java_another_would_have(command, places, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", places)
    answer = command("--sink", "no name")
    assert "--sink='no name': " in answer.output, "what only Spark knows comes behind what Java is asked"
