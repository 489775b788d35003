"""The apply job in one session: sources, values, carriers, refusals. Its process is killed in test_apply_process.py."""

import io
import json
import signal
import sqlite3
import sys
import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import fastavro
import pytest

from filtering import PairSplit, StreamMetadata
from pushrep import Outbox
from pushrep.cli import main as cli_main
from pushrep.log import SegmentLog
from pushrep.startpoints import Startpoint, StartpointStore
from spark_jobs.errors import BadJobOption, CantReplace, MarksOfAnotherQuery, SparkJobError
from spark_jobs.jobs.command import Reporter, one_line
from spark_jobs.jobs.options import ApplyOptions
from spark_jobs.jobs.pipeline import apply_in
from spark_jobs.sinks.idempotent_sink import TableNotOurs
from tests.spark.replay.repair_program import STEPS, die_at
from tests.spark_programs import QUIET, SparkPrograms, kill_session, said

pytestmark = pytest.mark.spark

PROGRAM = Path(__file__).with_name("repair_program.py")

SCHEMA = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "who", "type": ["null", "string"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}


def encoded(number):
    out = io.BytesIO()
    fastavro.schemaless_writer(out, SCHEMA, {"id": number, "who": None if number % 3 else "x", "at": 1_700_000_000_000})
    return out.getvalue()


@pytest.fixture
def outbox(tmp_path):
    """append(values, first): to both partitions, from source offset `first` on, as a producer that was restarted."""

    def append(values, first=0, carrier="key"):
        with Outbox.open(tmp_path / "outbox", topic="orders", partitions=2, producer="p", carrier=carrier) as box:
            for partition in range(2):
                box.append_many(partition, values, metadata=StreamMetadata(5, partition, first))

    return append


@pytest.fixture
def run(spark, tmp_path):
    """Run the job; answers its events."""

    def apply(name="a", **options):
        given = {
            "topic": "orders",
            "path": str(tmp_path / "outbox"),
            "sink": str(tmp_path / "table"),
            "checkpoint": str(tmp_path / f"checkpoint-{name}"),
            "marks": str(tmp_path / "marks"),
            "max_records_per_trigger": 100,
        } | options
        apply.given = given
        events = tmp_path / "events.jsonl"
        events.unlink(missing_ok=True)
        with Reporter.open(str(events)) as reporter:
            apply_in(spark, ApplyOptions(**given), reporter)
        return [json.loads(line) for line in events.read_text().splitlines()]

    return apply


@pytest.mark.parametrize("carrier", [pytest.param("key", marks=pytest.mark.long), "header"])  # each other job: key
def test_avro_values_become_columns_once(spark, run, outbox, tmp_path, carrier):
    values = [encoded(n) for n in range(50)]
    outbox(values[:30], 0, carrier)
    outbox(values[10:], 10, carrier)
    options = {"value_format": "avro", "value_schema": json.dumps(SCHEMA), "keep": ("partition",), "carrier": carrier}
    first = run(**options)
    assert [e["event"] for e in first] == ["started", *["batch"] * (len(first) - 2), "stopped"]
    assert first[-1] == {"event": "stopped", "batches": len(first) - 2, "kept": 100}
    assert sum(e["dropped"] for e in first[1:-1]) == 40
    assert [e["event"] for e in run(**options)] == ["started", "stopped"], "all is read: nothing more to do"
    outbox([encoded(n) for n in range(45, 60)], 45, carrier)
    run(**options)
    table = spark.read.parquet(str(tmp_path / "table"))
    assert [(f.name, f.dataType.simpleString()) for f in table.schema][:4] == [
        ("id", "bigint"),
        ("who", "string"),
        ("at", "timestamp"),
        ("partition", "int"),
    ]
    rows = sorted((r["partition"], r["id"], r["who"], r["at"].year) for r in table.collect())
    assert rows == [(p, n, None if n % 3 else "x", 2023) for p in range(2) for n in range(60)]


def test_past_a_pair_that_somebody_wrote_into_a_second_partition(spark, run, tmp_path):
    """Spark runs the batch that was stopped again and again: the record has to stay out of it."""

    def append(partition, *records):
        with SegmentLog.open(tmp_path / "outbox" / f"orders-{partition}") as log:
            log.append([b"%d" % offset for _, offset in records], keys=[key for key, _ in records])

    own = [[(StreamMetadata(5, n, offset).pack(), offset) for offset in range(10)] for n in range(2)]
    append(0, *own[0], (None, 77))
    append(1, *own[1], own[0][4])
    keep = {"keep": ("partition", "offset")}
    for options in (keep, keep | {"leave_out": "partition = 9"}):
        with pytest.raises(PairSplit, match="source partition 0"):
            run(**options)
    for condition in ("nothing = 1", "partition", "partition =", ""):
        with pytest.raises(BadJobOption, match="--leave-out"):
            run(**keep, leave_out=condition)
    stray = f"partition = 1 and hex(substring(key, 1, 12)) = '{own[0][0][0][:12].hex().upper()}'"
    events = run(**keep, leave_out=stray)
    assert (events[-1]["kept"], events[1]["unkeyed"]) == (20, 1)
    append(1, *own[1][5:])
    assert run(**keep)[-1]["kept"] == 0, "behind it the job needs the option no more"
    rows = spark.read.parquet(str(tmp_path / "table")).select("partition", "offset").collect()
    assert sorted(map(tuple, rows)) == [(n, offset) for n in range(2) for offset in range(11 - n)]


def test_rows_and_marks_go_into_one_database(run, outbox, tmp_path):
    """Contract "Marks stores": "SQL (staging table, one transaction ...)", as the apply job uses it."""
    outbox([b"%d" % n for n in range(30)])
    outbox([b"%d" % n for n in range(10, 40)], 10)
    place = tmp_path / "orders.db"
    options = {"sink": f"sqlite:{place}", "sink_table": "orders", "marks": "", "value_format": "string"}
    given = options | {"keep": ("topic", "partition", "offset"), "max_records_per_trigger": 80}
    events = run(**given)
    assert events[-1]["kept"] == 80
    assert sum(event["dropped"] for event in events[1:-1]) == 40
    with closing(sqlite3.connect(place)) as database:
        rows = database.execute('SELECT "partition", value FROM orders ORDER BY "partition", "offset"').fetchall()
        assert rows == [(partition, str(n)) for partition in range(2) for n in range(40)]
        assert database.execute("SELECT max(batch_id) FROM orders_marks").fetchone()[0] == len(events) - 3
        assert database.execute("SELECT count(*) FROM orders_staging").fetchone() == (0,)
    assert not (tmp_path / "marks").exists()
    assert [e["event"] for e in run(**given)] == ["started", "stopped"]
    with pytest.raises(MarksOfAnotherQuery, match=r"orders\.db table orders"):
        run("fresh", **given)


@pytest.fixture
def elsewhere(spark, tmp_path):
    """A directory on a file system of Spark's that is no path of this machine, and where the test finds it."""
    (tmp_path / "elsewhere").mkdir()
    mount = "fs.viewfs.mounttable.elsewhere.link./jobs"
    hadoop = spark._jsc.hadoopConfiguration()
    hadoop.set(mount, (tmp_path / "elsewhere").as_uri())
    yield "viewfs://elsewhere/jobs", tmp_path / "elsewhere"
    hadoop.unset(mount)


def test_marks_lie_as_files_beside_a_checkpoint_on_spark_s_own_file_system(spark, run, outbox, tmp_path, elsewhere):
    """Contract, where marks live: "one file per batch beside the checkpoint on Spark's own file system"."""
    url, directory = elsewhere
    place = {"checkpoint": f"{url}/checkpoint", "marks": f"{url}/checkpoint-marks"}
    place |= {"value_format": "string", "max_records_per_trigger": 80}
    outbox([b"%d" % n for n in range(30)])
    outbox([b"%d" % n for n in range(10, 40)], 10)
    first = run(**place)
    assert (first[-1]["kept"], sum(event["dropped"] for event in first[1:-1])) == (80, 40)
    batches = first[-1]["batches"]
    marks = sorted(file.name.split("-")[1] for file in (directory / "checkpoint-marks").glob("*.marks"))
    assert marks == [str(n) for n in range(batches)]
    for log in ("offsets", "commits"):  # the checkpoint goes back by a batch
        for file in (directory / "checkpoint" / log).glob(f"*{batches - 1}*"):
            file.unlink()
    outbox([b"%d" % n for n in range(35, 50)], 35)
    second = run(**place)
    assert second[1]["batch"] == batches - 1
    rows = spark.read.parquet(str(tmp_path / "table")).select("value").collect()
    assert sorted(int(row.value) for row in rows) == sorted([*range(50)] * 2)


def test_other_forms_of_values(spark, run, outbox, tmp_path):
    outbox([json.dumps({"a": n, "b": {"c": str(n)}}).encode() for n in range(5)])
    run(value_format="json", value_schema="a int, b struct<c: string>", keep=("offset",))
    assert sorted(tuple(r) for r in spark.read.parquet(str(tmp_path / "table")).select("a", "b.c", "offset").collect())[
        ::2
    ] == [(n, str(n), n) for n in range(5)]
    for name, kind in (("string", "string"), ("binary", "binary")):
        sink = str(tmp_path / f"table-{name}")
        run(name, value_format=name, keep=("topic", "timestamp"), sink=sink, marks=str(tmp_path / f"marks-{name}"))
        read = spark.read.parquet(sink)
        assert read.count() == 10
        assert dict(read.dtypes) == {"value": kind, "topic": "string", "timestamp": "timestamp", "batch_id": "int"}


def test_a_value_that_cannot_be_read_stops_the_job_and_names_the_record(spark, run, outbox, tmp_path):
    outbox([encoded(1), b"\xff\xff", encoded(2)])
    options = {"value_format": "avro", "value_schema": json.dumps(SCHEMA), "max_records_per_trigger": None}
    with pytest.raises(Exception, match="offset 1") as failed:
        run(**options)
    line = one_line(failed.value)
    assert "\n" not in line
    assert line.startswith("the value of topic orders, partition ")
    assert not [p for p in (tmp_path / "table").iterdir() if p.name.startswith("batch_id")], "nothing of it is written"


def test_broken_json_stops_the_job_too(run, outbox):
    outbox([b'{"a": 1}', b'{"a": '])
    with pytest.raises(Exception, match=r"(?i)malformed"):
        run(value_format="json", value_schema="a int")


def test_a_fresh_checkpoint_is_refused_until_it_adopts(spark, run, outbox, tmp_path):
    outbox([b"%d" % n for n in range(100)])
    query = run(value_format="string")[0]["query"]
    with pytest.raises(SparkJobError, match=rf"adopt=\('{query}', 1\)"):
        run("b", value_format="string")
    with pytest.raises(TableNotOurs, match=query):
        run("c", value_format="string", marks=str(tmp_path / "other-marks"))
    outbox([b"%d" % n for n in range(90, 130)], 90)
    assert run("d", value_format="string", adopt=(query, 0))[-1]["kept"] == 260 - 100
    values = [r["value"] for r in spark.read.parquet(str(tmp_path / "table")).collect()]
    assert sorted(values, key=int) == sorted([str(n) for n in range(130)] * 2, key=int)


def test_a_checkpoint_rolled_back_by_hand_leaves_the_same_table(spark, run, outbox, tmp_path):
    outbox([b"%d" % n for n in range(100)])
    outbox([b"%d" % n for n in range(50, 150)], 50)
    run(value_format="string", keep=("partition",), max_records_per_trigger=150)
    checkpoint = tmp_path / "checkpoint-a"

    def forget(kind, first):
        for file in (checkpoint / kind).iterdir():
            number = file.name.removeprefix(".").removesuffix(".crc")
            if number.isdigit() and int(number) >= first:
                file.unlink()

    def table():
        rows = spark.read.parquet(str(tmp_path / "table")).select("partition", "value", "batch_id").collect()
        return sorted((r["partition"], int(r["value"])) for r in rows), {r["batch_id"] for r in rows}

    expected = [(partition, n) for partition in range(2) for n in range(150)]
    assert table()[0] == expected

    forget("commits", 2)  # as a crash leaves it: the same batch again
    events = run(value_format="string", keep=("partition",))
    assert next(e["skipped"] for e in events if e["event"] == "batch") is True
    assert table()[0] == expected

    forget("commits", 1)
    forget("offsets", 1)  # and now Spark plans batch 1 and what follows anew, with other ranges
    events = run(value_format="string", keep=("partition",), max_records_per_trigger=300)
    assert [e["batch"] for e in events if e["event"] == "batch"] == [1]
    assert table()[0] == expected
    assert table()[1] <= {0, 1}, "no batch of the time before stands beside them"


@pytest.mark.parametrize("name", [".0.3b0f2c9e-5f0d-4c3a-9a38-3d5d0a8f2f11.tmp", "0.tmp"])
def test_what_a_kill_left_of_the_very_first_plan_is_no_obstacle(spark, run, outbox, tmp_path, name):
    """Spark's own half-written file of `offsets`; it refuses a directory that is not empty. Others are not ours."""
    outbox([b"%d" % n for n in range(10)])
    offsets = tmp_path / "checkpoint-a" / "offsets"
    offsets.mkdir(parents=True)
    (offsets.parent / "metadata").write_text('{"id":"fa65e115-7f2a-4c9d-9dee-2da8e3a7fe49"}')
    (offsets / name).write_text("v1\n")
    if name.startswith("."):
        assert run(value_format="string", keep=("partition",))[-1]["kept"] == 20
        assert not (offsets / name).exists()
    else:
        with pytest.raises(Exception, match="LOCATION_NOT_EMPTY"):
            run(value_format="string", keep=("partition",))
        assert (offsets / name).exists()


def test_into_a_catalog_table(spark, run, outbox, tmp_path):
    outbox([b"%d" % n for n in range(50)])
    run(value_format="string", sink="applied_orders", sink_format="orc")
    assert spark.table("applied_orders").count() == 100
    spark.sql("drop table applied_orders")


REREAD = {"consumer": "billing", "value_format": "string", "max_records_per_trigger": 400}


def append_with_replays(outbox):
    """Each partition's log: 0 to 29, then 10 to 39, then 15 to 49: offset 40 is 20 once more, 50 the first 30."""
    for first, end in ((0, 30), (10, 40), (15, 50)):
        outbox([b"%d" % n for n in range(first, end)], first)


def send_back(tmp_path, offset, partition=None):
    with StartpointStore.open(tmp_path / "outbox" / "startpoints") as store:
        return store.write("billing", "orders", partition, Startpoint.specific(offset, reset_marks=True), "wrong rates")


class Table:
    """The job's table of one kind: its options, its rows, the command that repairs it."""

    def __init__(self, spark, place, kind):
        self.spark, self.place, self.kind = spark, place, kind
        database = {"sink": f"sqlite:{place / 'orders.db'}", "sink_table": "orders", "marks": ""}
        self.options = REREAD | {"keep": ("topic", "partition", "offset")} | (database if kind == "database" else {})

    def found(self):
        """All there is of partition, offset, value, batch."""
        if self.kind == "database":
            with closing(sqlite3.connect(self.place / "orders.db")) as database:
                return database.execute('SELECT "partition", "offset", value, pushrep_batch FROM orders').fetchall()
        names = ["partition", "offset", "value", "batch_id"]
        return [tuple(r) for r in self.spark.read.parquet(str(self.place / "table")).select(names).collect()]

    def rows(self):
        """(partition, offset) -> (value, batch), without duplicates."""
        found = self.found()
        assert len({row[:2] for row in found}) == len(found)
        return {row[:2]: row[2:] for row in found}

    def repair(self, *words, topic="orders"):
        sink = ["--sink", self.place / "table"]
        if self.kind == "database":
            sink = ["--sink", self.options["sink"], "--table", "orders"]
        command = ["startpoint", "repair", self.place / "outbox", topic, "--consumer", "billing", "--reason", "rates"]
        assert cli_main.run([*map(str, command), *map(str, (*words, *sink))]) == 0

    def answer(self):
        """The expected rows, by SQL over the log: each record where it is first. (partition, offset) -> value."""
        with closing(sqlite3.connect(":memory:")) as judge:
            judge.execute('CREATE TABLE log ("partition", "offset", source, value)')
            for n in range(2):
                with SegmentLog.open_reader(self.place / "outbox" / f"orders-{n}") as log:
                    records = [
                        (n, one.offset, StreamMetadata.unpack(one.key).offset, one.value.decode())
                        for one in log.records(0)
                    ]
                judge.executemany("INSERT INTO log VALUES (?, ?, ?, ?)", records)
            found = judge.execute(
                'SELECT "partition", min("offset"), value FROM log GROUP BY "partition", source'
            ).fetchall()
        return {row[:2]: row[2] for row in found}


def values(rows):
    return {place: value for place, (value, _) in rows.items()}


@pytest.fixture(params=["path", "database"])
def table(request, spark, tmp_path):
    return Table(spark, tmp_path, request.param)


def test_a_repair_replaces_exactly_the_rows_from_where_to_where_it_says(run, outbox, table, tmp_path):
    """A repair by the command: rows after its --to stay, later rows are new, and the store has where the run ended."""
    append_with_replays(outbox)
    run(**table.options)
    first = table.rows()
    assert values(first) == table.answer()
    last_batch = max(batch for _, batch in first.values())
    table.repair("--from", "25", "--to", "70")
    outbox([b"%d" % n for n in range(45, 60)], 45)  # at 95 to 109, of which 45 to 49 are replays
    with Looks(partial(rows_below_95, table) if table.kind == "database" else None) as looks:
        run(**table.options | {"max_records_per_trigger": 86})  # two batches: from 25 and from 68
    assert looks.found in ({len(first)}, set()), "a reader saw half of it"
    second = table.rows()
    assert values(second) == table.answer()
    again = {place for place, (_, batch) in second.items() if batch > last_batch and place[1] < 95}
    assert again == {(partition, n) for partition, n in first if 25 <= n < 70}
    with StartpointStore.open(tmp_path / "outbox" / "startpoints") as store:
        assert [one.offset for one in store.checkpoints()] == [110, 110], "a run that ends by itself says where"
    table.repair("--from", "96", topic="orders-1")
    run(**table.options)
    third = table.rows()
    assert values(third) == values(second)
    again = {place for place in third if third[place] != second[place]}
    assert again == {(partition, n) for partition, n in third if partition == 1 and n >= 96}


def rows_below_95(table):
    with closing(sqlite3.connect(table.place / "orders.db", timeout=60)) as database:
        return database.execute('SELECT count(*) FROM orders WHERE "offset" < 95').fetchone()[0]


class Looks:
    """A thread that reads a database all the while with `look`, and keeps the results. None: it reads nothing."""

    def __init__(self, look):
        self.found, self._ended, self._look = set(), threading.Event(), look
        self._thread = threading.Thread(target=self._go_on)

    def _go_on(self):
        while self._look is not None and not self._ended.wait(0.001):
            self.found.add(self._look())

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()


@pytest.mark.timeout(900)
def test_a_repair_is_gone_on_with_from_wherever_the_job_was_killed(run, outbox, table, tmp_path, torture, monkeypatch):
    """kill -9 at each step of replacing rows, then the job again; the short form fails at one step of one kind."""
    if not torture.is_long and table.kind != torture.random("kind").choice(list(STEPS)):
        pytest.skip("the other kind of table in the short form")
    append_with_replays(outbox)
    run(**table.options)
    options = {name: value for name, value in run.given.items() if name != "max_records_per_trigger"}
    chance = torture.random(table.kind)
    steps = list(STEPS[table.kind])
    for step in steps if torture.is_long else [chance.choice(steps)]:
        before = table.rows()
        last_batch = max(batch for _, batch in before.values())
        start, end = chance.randrange(30), chance.randrange(40, 95)
        table.repair("--from", start, "--to", end)
        if torture.is_long:
            killed_at(step, tmp_path, options)
        else:
            with monkeypatch.context() as patch:
                die_at(table.kind, step, ends_here, patch.setattr)
                with pytest.raises(RuntimeError, match="it ends here"):
                    run(**options)
        if table.kind == "database":
            assert values(table.rows()) == table.answer(), f"{step}: a reader saw half of it"
        run(**table.options)
        after = table.rows()
        assert values(after) == table.answer(), f"{step} [{start}, {end}), seed {torture.seed}"
        again = {place for place, (_, batch) in after.items() if batch > last_batch}
        assert again == {place for place in before if start <= place[1] < end}, f"{step}, seed {torture.seed}"


def killed_at(step, place, options):
    with SparkPrograms(place, f"--master local[1] --driver-memory 1g {QUIET}") as programs:
        killed = programs.start([sys.executable, PROGRAM, json.dumps(options), step])
        killed.communicate(timeout=600)
        assert killed.returncode == -signal.SIGKILL, f"{step}: {said(killed)}"
        kill_session(killed)


def ends_here():
    raise RuntimeError("it ends here")


def test_a_startpoint_without_a_reset_behind_one_with_takes_no_row_away(run, outbox, tmp_path):
    """The rows that it reads again are dropped as replays, so the rows in the table stay."""
    place = tmp_path / "orders.db"
    options = REREAD | {
        "sink": f"sqlite:{place}",
        "sink_table": "orders",
        "marks": "",
        "keep": ("topic", "partition", "offset"),
    }
    outbox([b"%d" % n for n in range(30)])
    run(**options)
    send_back(tmp_path, 20)
    run(**options)
    with StartpointStore.open(tmp_path / "outbox" / "startpoints") as store:
        store.write("billing", "orders", None, Startpoint.specific(10), "a look")
    run(**options)
    with closing(sqlite3.connect(place)) as database:
        assert database.execute("SELECT count(*), count(DISTINCT value) FROM orders").fetchone() == (60, 30)


def test_rows_that_were_removed_by_hand_are_not_taken_for_replays(run, outbox, tmp_path):
    outbox([b"%d" % n for n in range(30)])
    options = REREAD | {"sink": f"sqlite:{tmp_path / 'orders.db'}", "sink_table": "orders", "marks": ""}
    options["keep"] = ("topic", "partition", "offset")
    run(**options)
    with closing(sqlite3.connect(tmp_path / "orders.db")) as database:
        database.execute('DELETE FROM orders WHERE "offset" >= 20')
        database.commit()
    send_back(tmp_path, 20)
    with pytest.raises(CantReplace, match="no row of them is in the table"):
        run(**options)
    run(**options | {"append_only": True})
    with closing(sqlite3.connect(tmp_path / "orders.db")) as database:
        assert database.execute("SELECT count(*), count(DISTINCT value) FROM orders").fetchone() == (60, 30)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"path": None}, "--path"),
        ({"source": "kafka"}, "belongs to source pushrep"),
        ({"trigger": "soon"}, r"--trigger='soon'.*available-now"),
        ({"value_format": "avro"}, "value-schema: format avro needs a schema"),
        ({"value_format": "string", "value_schema": "{}"}, "takes no schema"),
        ({"value_format": "avro", "value_schema": "{"}, "no JSON"),
        ({"value_format": "avro", "value_schema": '"long"'}, "an Avro record is expected"),
        ({"value_format": "avro", "value_schema": json.dumps(SCHEMA), "keep": ("id",)}, "keep: id is also a column"),
        ({"keep": ("colour",)}, "no column 'colour'"),
        ({"topic": "nope"}, "nope"),
        ({"value_format": "json", "value_schema": "a in"}, "no schema of Spark"),
        (
            {"source": "kafka", "path": None, "source_options": {"failOnDataLoss": "false"}},
            "failOnDataLoss",
        ),
    ],
)
def test_refusals_name_the_option(run, outbox, wrong, why):
    outbox([b"1"])
    with pytest.raises(Exception, match=why) as refused:
        run(**wrong)
    assert "\n" not in one_line(refused.value)


def test_kafka_gets_its_own_names_and_reads_committed_records():
    options = ApplyOptions(
        topic="t", sink="/s", checkpoint="c", marks="m", source="kafka", max_records_per_trigger=5, carrier="header"
    )
    assert options.reader_options() == {
        "subscribe": "t",
        "startingOffsets": "earliest",
        "kafka.isolation.level": "read_committed",
        "maxOffsetsPerTrigger": "5",
        "includeHeaders": "true",
    }
    with pytest.raises(BadJobOption, match="--trigger"):
        ApplyOptions(topic="t", sink="/s", checkpoint="c", marks="m", source="kafka", trigger="")
