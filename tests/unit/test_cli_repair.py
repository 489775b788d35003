"""`pushrep startpoint repair`: what it shows of the sink, the logs and the marks, what it writes, what it refuses."""

import json
import sqlite3
from contextlib import closing
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from filtering import StreamMetadata
from pushrep.cli import main as cli_main
from pushrep.cli.startpoint_options import facts_of
from pushrep.log import SegmentLog
from pushrep.replay import ReplayClient
from pushrep.startpoints import Reader, Startpoint, StartpointStore, State, Target
from spark_jobs.jobs.pipeline import Sink

NOON_MS = int(datetime(2013, 7, 4, 12, tzinfo=UTC).timestamp() * 1000)
RECORDS = 60
PID = 5


def source_offset(offset):
    """Records 40 to 49 are those of 30 to 39 once more."""
    return offset - 10 if 40 <= offset < 50 else offset


HELD = [n for n in range(RECORDS) if not 40 <= n < 50]
"""The records that a filter keeps, and so the rows of a table."""


@pytest.fixture
def out(tmp_path):
    """Two partitions, a record a minute from noon to one o'clock; billing has read all of them."""
    for n in range(2):
        keys = [StreamMetadata(PID, n, source_offset(k)).pack() for k in range(RECORDS)]
        with SegmentLog.open(tmp_path / "out" / f"orders-{n}") as log:
            log.append([b"x"] * RECORDS, keys=keys, timestamps_ms=[NOON_MS + 60_000 * k for k in range(RECORDS)])
    with ReplayClient(tmp_path / "out").subscribe("orders", consumer="billing") as consumer:
        while consumer.poll():
            consumer.commit()
    return tmp_path / "out"


@pytest.fixture
def store(out):
    return StartpointStore.open(out / "startpoints")


def fill(place, kind, held):
    """A table as the apply job leaves it; the options that name it."""
    rows = [("orders", partition, offset, offset // 20) for partition in range(2) for offset in held]
    if kind == "path":
        names = ["topic", "partition", "offset", "batch_id"]
        table = pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows])
        batches = ds.partitioning(pa.schema([("batch_id", pa.int64())]), flavor="hive")
        ds.write_dataset(table, place / "table", format="parquet", partitioning=batches)
        return ["--sink", place / "table"]
    with closing(sqlite3.connect(place / "orders.db")) as database:
        database.execute('CREATE TABLE orders (topic, "partition", "offset", pushrep_batch)')
        database.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", rows)
        database.commit()
    return ["--sink", f"sqlite:{place / 'orders.db'}", "--table", "orders"]


@pytest.fixture(params=["path", "database"])
def sink(request, tmp_path):
    return fill(tmp_path, request.param, HELD)


@pytest.fixture
def repair(capsys, out):
    """Run it for billing; (exit code, standard output, standard error)."""

    def command(*words, topic="orders"):
        given = ["startpoint", "repair", out, topic, "--consumer", "billing", "--reason", "rates", "--author", "ann"]
        code = cli_main.run([*map(str, given), *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_the_preview_tells_rows_and_records_and_writes_nothing(repair, sink, store):
    words = ("--from", "2013-07-04T12:25", "--to", "2013-07-04T12:45", *sink, "--dry-run")
    code, said, _ = repair(*words, "--json")
    assert code == 0
    *parts, last = lines(said)
    assert [(p["partition"], p["start"], p["end"], p["stood_at"], p["rows"], p["read_again"]) for p in parts] == [
        (0, 25, 45, 60, 15, 35),
        (1, 25, 45, 60, 15, 35),
    ], "rows 25 to 39 stand; 40 to 44 were replays"
    assert last == {"sequences": None, "dry_run": True}
    code, said, _ = repair(*words)
    assert code == 0
    assert "[25, 45)" in said
    assert "nothing was written" in said
    assert store.history() == []


def test_a_consumer_that_the_store_does_not_know_is_named_on_standard_error(repair, sink, out, capsys):
    words = ("--from", "25", *sink, "--dry-run", "--json")
    assert repair(*words)[2] == ""
    command = ["startpoint", "repair", out, "orders", "--consumer", "biling", *words]
    assert cli_main.run(list(map(str, command))) == 0, "a job that has just begun has no position either"
    assert "biling has no position in the store yet: check that --consumer" in capsys.readouterr().err


def test_the_sink_is_asked_once_for_all_partitions(repair, sink, monkeypatch):
    """For a table of Delta or Iceberg each request is two Spark jobs over the whole table."""
    asked, held = [], Sink.held
    monkeypatch.setattr(Sink, "held", lambda *given: asked.append(given) or held(*given))
    code, _, said = repair("--from", "25", *sink, "--dry-run")
    assert (code, len(asked)) == (0, 1), said


@pytest.mark.parametrize("topic", ["2024", "007", "3e2", "orders"])
def test_a_topic_that_looks_like_a_number_is_a_text_in_a_directory_s_name_too(tmp_path, topic):
    """The apply job's `--partition-by topic`."""
    other = {"topic": f"{topic}0", "partition": 0, "offset": 9, "batch_id": 0}
    rows = [other, *({"topic": topic, "partition": 0, "offset": n, "batch_id": n // 3} for n in range(6))]
    names = ds.partitioning(pa.schema([("batch_id", pa.int64()), ("topic", pa.string())]), flavor="hive")
    ds.write_dataset(pa.Table.from_pylist(rows), tmp_path / "table", format="parquet", partitioning=names)
    sink = Sink(str(tmp_path / "table"), None, "parquet", {})
    assert {one: list(held) for one, held in sink.held(topic, {0: 2}).items()} == {0: [2, 3, 4, 5]}


def test_it_writes_what_it_showed_in_one_step_with_its_reason(repair, sink, store):
    code, said, _ = repair("--from", "2013-07-04T12:25", "--to", "2013-07-04T12:45", *sink)
    assert (code, said.splitlines()[-1]) == (0, "written: startpoint 1, startpoint 2; billing applies them")
    first, second = store.history()
    for n, written in enumerate((first, second)):
        assert written.target == Target("billing", "orders", n)
        assert written.startpoint == Startpoint.specific(25, reset_marks=True, replace_until=45)
        assert (written.author, written.reason) == ("ann", "rates")
    assert first.created_ms == second.created_ms
    lines_of_journal = (store.place / "startpoints.journal").read_bytes().splitlines()
    assert len(lines_of_journal) == 2, "the head, and one transaction"


def test_without_to_all_rows_go_and_only_the_partition_that_is_named(repair, sink, store):
    code, _, _ = repair("--from", "25", *sink, topic="orders-1")
    (written,) = store.history()
    assert (code, written.target.partition) == (0, 1)
    assert written.startpoint == Startpoint.specific(25, reset_marks=True)


REFUSED = [
    (["--from", "25"], "Missing option '--sink'"),
    (["--from", "latest", "--sink", "./t"], "can't be used for a repair"),
    (["--from", "25", "--sink", "./nowhere"], "can't be read"),
    *((["--from", "25", "--sink", f"{kind}://bucket/orders"], f"{kind} is no file system") for kind in ("s3a", "gs")),
    (["--from", "25", "--sink", "./t", "--format", "json"], "json is neither parquet nor orc"),
    (["--from", "25", "--sink", "./t", "--conf", "spark.jars"], "--conf spark.jars: give NAME=VALUE"),
    (["--from", "25", "--sink", "orders"], "exchanges whole batches only"),
    (["--from", "25", "--sink", "mysql://x/y"], "mysql"),
    (["--from", "25", "--sink", "postgresql://127.0.0.1:1/x", "--table", "orders"], "127.0.0.1"),
    (["--from", "100", "--sink", "SINK"], "beyond the end"),
    (["--from", "2013-07-04T14:00", "--sink", "SINK"], "has read no record from --from on"),
    (["--from", "25", "--to", "20", "--sink", "SINK"], "has read no record between --from and --to"),
]


def test_what_can_not_be_is_refused_before_anything_is_written(repair, store, tmp_path):
    _, table = fill(tmp_path, "path", HELD)
    for words, why in REFUSED:
        code, _, said = repair(*(table if word == "SINK" else word for word in words))
        assert (code != 0, why in said, "Traceback" in said) == (True, True, False), said
    assert store.history() == []


def test_a_sink_without_such_rows_is_not_the_job_s(repair, store, tmp_path):
    code, _, said = repair("--from", "25", *fill(tmp_path, "database", range(20)))
    assert (code, "check that --sink is the job's" in said) == (1, True)
    assert store.history() == []


def test_an_end_beyond_where_the_job_stands_is_shown_as_what_will_be_done(repair, sink, store):
    code, said, _ = repair("--from", "25", "--to", "2013-07-04T14:00", *sink)
    assert (code, "[25, 60)" in said) == (0, True), said
    code, said, _ = repair("--from", "20", "--to", "60", *sink, "--dry-run", topic="orders-0")
    assert (code, "pending" in said) == (1, False), said
    assert store.history()[0].startpoint == Startpoint.specific(25, reset_marks=True, replace_until=60)


def test_one_that_is_not_through_is_not_passed_by(repair, sink, store, out):
    assert repair("--from", "20", *sink)[0] == 0
    code, _, said = repair("--from", "10", *sink)
    assert (code, "startpoint 1 is pending" in said) == (1, True)
    for n in range(2):
        claim = store.claim("billing", "orders", n)
        with SegmentLog.open_reader(out / f"orders-{n}") as log:
            store.apply(claim, facts_of(log), position=60)
        if n == 0:
            code, _, said = repair("--from", "10", *sink)
            assert (code, "startpoint 1 is applied: let the job read on, and call again" in said) == (1, True), said
        store.commit(claim, 30, sequence=n + 1)
        store.consume(claim, n + 1)
    assert repair("--from", "30", *sink, "--dry-run")[0] == 0, "from the checkpoint on"
    code, _, said = repair("--from", "31", *sink)
    assert (code, "reads again up to 60 for startpoint 1" in said) == (1, True)
    code, _, said = repair("--from", "10", "--to", "15", *sink)
    assert (code, "without --to" in said) == (1, True), "what the first one was to replace would stay"
    assert repair("--from", "10", *sink)[0] == 0, "further back and to the end covers it"
    assert store.event_log().state(3) is State.PENDING


def test_a_failed_one_is_replaced_by_the_next(repair, sink, store, out):
    store.write("billing", "orders", 0, Startpoint.specific(500), "a typo")
    with SegmentLog.open_reader(out / "orders-0") as log, pytest.raises(Exception, match="beyond the end"):
        store.apply(store.claim("billing", "orders", 0), facts_of(log))
    assert repair("--from", "25", *sink)[0] == 0
    assert store.reader_state(2, Reader("billing", "orders", 0)).state is State.PENDING
