"""apply-checkpoint on checkpoints as Spark writes them: what is appended, what is refused, and what a kill leaves.

The files are those of Spark 4.2 (offset log versions 1 and 2) and 3.5. In tests/spark/test_checkpoint_restart.py Spark
itself continues from the appended batch.
"""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
import pyarrow.dataset as ds
from click.testing import CliRunner

from filtering import HighwaterMarks
from pushrep.cli.startpoint import startpoint as command
from pushrep.log import SegmentLog
from pushrep.startpoints import (
    Applied,
    Consumed,
    Startpoint,
    StartpointStore,
    Written,
)
from spark_jobs import checkpoint_append, checkpoint_apply, job_sink
from spark_jobs.batch_marks import BatchMarks, MarksKey, SentBack
from spark_jobs.checkpoint_apply import CheckpointPlace, MarksPlace, apply
from spark_jobs.checkpoint_files import QueryRunning
from spark_jobs.marks import LocalMarks
from spark_jobs.sql import SqlTable

QUERY = "fa65e115-7f2a-4c9d-9dee-2da8e3a7fe49"
METADATA = '{"batchWatermarkMs":0,"batchTimestampMs":1795281360609,"conf":{"spark.sql.shuffle.partitions":"2"}}'
KAFKA = '{"orders":{"0":180,"1":175}}'


def make(place: Path, *offsets: str, version=1, batches=3):
    """A checkpoint as Spark leaves it: each batch's offsets, by source, and a commit for each."""
    for kind in ("offsets", "commits"):
        (place / kind).mkdir(parents=True)
    (place / "metadata").write_text(json.dumps({"id": QUERY}))
    for batch in range(batches):
        lines = [f"{n}:{text}" if version == 2 else text for n, text in enumerate(offsets)]
        (place / "offsets" / str(batch)).write_text("\n".join([f"v{version}", METADATA, *lines]))
        state = ',"stateUniqueIds":{}' if version == 2 else ""
        (place / "commits" / str(batch)).write_text(f'v{version}\n{{"nextBatchWatermarkMs":0{state}}}')
    return place


def make_files(place, log_offset=2, version=1):
    """The checkpoint of a file source that has read three batches of one file each, changed at 1000, 2000 and 3000
    ms.
    """
    make(place, json.dumps({"logOffset": log_offset}, separators=(",", ":")), version=version)
    (place / "sources" / "0").mkdir(parents=True)
    for n in range(3):
        entry = {"path": f"file:///in/{n}.txt", "timestamp": 1000 * (n + 1), "batchId": n}
        (place / "sources" / "0" / str(n)).write_text(f"v1\n{json.dumps(entry)}")
    return place


@pytest.fixture
def cp(tmp_path):
    return tmp_path / "cp"


def run(cp, *words, stopped=True, reason=True):
    given = ["apply-checkpoint", str(cp), "--watch-s", "0", *map(str, words)]
    given += ["--stopped"] * stopped + ["--reason", "wrong rates", "--author", "ann"] * reason
    return CliRunner().invoke(command, given)


def offsets(cp, batch, source=0):
    return (cp / "offsets" / str(batch)).read_text().split("\n")[2 + source]


def test_kafka_offsets_are_moved_by_one_pair(cp):
    make(cp, KAFKA)
    answer = run(cp, "--to", 120, "--partition", 1)
    assert answer.exit_code == 0, answer.output
    assert offsets(cp, 3) == '{"orders":{"0":180,"1":120}}'
    assert (cp / "offsets" / "3").read_text().startswith(f"v1\n{METADATA}\n")
    assert (cp / "commits" / "3").read_bytes() == (cp / "commits" / "2").read_bytes()
    assert not (cp / "offsets" / "4").exists()
    written, applied, consumed = StartpointStore.open(f"{cp}-startpoints").history()
    assert isinstance(written, Written)
    assert isinstance(applied, Applied)
    assert isinstance(consumed, Consumed)
    assert (written.author, written.reason, applied.offset) == ("ann", "wrong rates", 120), "who, why and where"


def test_offset_log_version_2_and_several_sources(cp):
    make(cp, KAFKA, '{"rates":{"0":9}}', version=2)
    answer = run(cp, "--to", -5)
    assert (answer.exit_code, "say which one, --source" in answer.output) == (1, True)
    assert run(cp, "--to", -5, "--source", 1).exit_code == 0
    assert (cp / "offsets" / "3").read_text() == f'v2\n{METADATA}\n0:{KAFKA}\n1:{{"rates":{{"0":4}}}}'
    assert (cp / "commits" / "3").read_text() == 'v2\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{}}'


def test_a_kafka_source_of_several_topics(cp):
    make(cp, '{"a":{"0":5},"b":{"0":7,"1":8}}')
    assert "say which one, --topic" in run(cp, "--to", 1).output
    assert run(cp, "--to", 1, "--topic", "b").exit_code == 0
    assert offsets(cp, 3) == '{"a":{"0":5},"b":{"0":1,"1":1}}'


@pytest.mark.parametrize("version", [1, 2])
def test_files_get_the_pair_twice_since_spark_asks_for_the_last_range_again(cp, version):
    make_files(cp, version=version)
    assert run(cp, "--to", 1).exit_code == 0
    expected = '{"logOffset":0}' if version == 1 else '0:{"logOffset":0}'
    assert offsets(cp, 3) == offsets(cp, 4) == expected
    assert (cp / "commits" / "4").exists()


GOLDEN = Path(__file__).parents[1] / "conformance" / "golden" / "checkpoints"


@pytest.mark.parametrize("release", ["spark-3.5.9", "spark-4.2.0"])
def test_checkpoints_that_spark_wrote(cp, release):
    """Checkpoints of a file source that read three files: of 3.5.9 with its only log version, of 4.2.0 with version 2
    of both logs.
    """
    shutil.copytree(GOLDEN / release, cp)
    before = (cp / "offsets" / "2").read_text()
    assert run(cp, "--to", 1).exit_code == 0
    for batch in ("3", "4"):
        assert (cp / "offsets" / batch).read_text() == before.replace('{"logOffset":2}', '{"logOffset":0}')
        assert (cp / "commits" / batch).read_bytes() == (cp / "commits" / "2").read_bytes()


@pytest.mark.parametrize(
    ("words", "log_offset"), [("@2000", 0), ("@2001", 1), ("earliest", -1), ("latest", 2), ("-2", 0)]
)
def test_files_by_the_time_they_were_changed(cp, words, log_offset):
    make_files(cp)
    answer = run(cp, "--to", words)
    assert answer.exit_code == 0, answer.output
    assert json.loads(offsets(cp, 3)) == {"logOffset": log_offset}


def make_logs(cp, tmp_path):
    """The checkpoint of a source pushrep that has read a log of 50 records, one each millisecond; returns what it
    logged.
    """
    with SegmentLog.open(tmp_path / "out" / "orders-0") as log:
        log.append([b"x"] * 50, timestamps_ms=range(50))
        log_id = str(log.log_id)
    position = {"epoch": 0, "offset": 50, "log": log_id}
    logged = {"version": 1, "topic": "orders", "partitions": {"0": position}, "start": {"0": 0}}
    make(cp, json.dumps(logged))
    return logged


def test_logs_resolve_what_is_wished(cp, tmp_path):
    logged = make_logs(cp, tmp_path)
    position = logged["partitions"]["0"]
    assert "--logs" in run(cp, "--to", "@20").output
    assert run(cp, "--to", "@20", "--logs", tmp_path / "out").exit_code == 0
    assert json.loads(offsets(cp, 3)) == logged | {"partitions": {"0": position | {"offset": 20}}, "start": {}}
    answer = run(cp, "--to", 51, "--logs", tmp_path / "out")
    assert (answer.exit_code, "beyond the end" in answer.output) == (1, True)
    (tmp_path / "out" / "orders-0").rename(tmp_path / "aside")
    SegmentLog.open(tmp_path / "out" / "orders-0").close()
    assert "the query read" in run(cp, "--to", 0, "--logs", tmp_path / "out").output


def test_a_query_that_follows_startpoints_needs_none_of_this(cp, tmp_path):
    position = {"epoch": 3, "offset": 50, "log": "x"}
    make(cp, json.dumps({"version": 1, "topic": "orders", "partitions": {"0": position}, "start": {}}))
    assert "startpoint set is enough" in run(cp, "--to", 0, "--logs", tmp_path).output


def test_what_waits_in_a_store_is_applied(cp, tmp_path):
    make(cp, KAFKA)
    store = StartpointStore.open(tmp_path / "store")
    named = ("--store", tmp_path / "store", "--consumer", "billing")
    assert "no startpoint waits for billing at orders" in run(cp, *named).output
    store.write("billing", "orders", 0, Startpoint.specific(100), "said before")
    store.write(None, "orders", 1, Startpoint.relative(records=-75), "for everyone")
    assert run(cp, *named).exit_code == 0
    assert offsets(cp, 3) == '{"orders":{"0":100,"1":100}}'
    assert store.read("billing", "orders", 0) is None
    assert store.read("other", "orders", 1) is not None, "taken from no other"
    assert "no startpoint waits" in run(cp, *named).output, "once"


REFUSED = {
    "no such directory": (shutil.rmtree, "there is no such directory"),
    "no checkpoint": (lambda cp: (cp / "metadata").unlink(), "it has no file metadata"),
    "nothing planned": (lambda cp: shutil.rmtree(cp / "offsets"), "no batch was ever planned"),
    "state": (lambda cp: touch(cp / "state" / "0" / "0" / "1.delta"), "holds state of a stateful query"),
    "state ids": (lambda cp: commit(cp, '{"stateUniqueIds":{"0":[["a"]]}}'), "holds state of a stateful query"),
    "uncommitted": (lambda cp: (cp / "commits" / "2").unlink(), "batch 2 is planned and not committed"),
    "another version": (lambda cp: (cp / "offsets" / "2").write_text("v3\n{}\n{}"), "no offsets of version v1 or v2"),
    "another source": (lambda cp: (cp / "offsets" / "2").write_text('v1\n{}\n{"rate":1}'), "none of pushrep, Kafka or"),
    "a bad commit": (lambda cp: (cp / "commits" / "2").write_text("v7\n{}"), "a commit of version 'v7'"),
    "no source": (lambda cp: (cp / "offsets" / "2").write_text("v1\n{}\n-"), "the query has the sources none"),
}


def touch(path):
    path.parent.mkdir(parents=True)
    path.write_text("x")


def commit(cp, text):
    (cp / "commits" / "2").write_text(f"v2\n{text}")


@pytest.mark.parametrize("case", REFUSED)
def test_refused(cp, case):
    break_it, said = REFUSED[case]
    make(cp, KAFKA)
    break_it(cp)
    before = contents(cp.parent)
    answer = run(cp, "--to", 5)
    assert (answer.exit_code, said in " ".join(answer.output.split())) == (1, True), answer.output
    assert contents(cp.parent) == before, "nothing was written"


def contents(place):
    return {file: file.read_bytes() for file in place.rglob("*") if file.is_file()}


@pytest.mark.parametrize("words", ["earliest", "latest", "bootstrap", "@5", "-1h"])
def test_what_only_the_broker_knows_is_refused_for_kafka(cp, words):
    make(cp, KAFKA)
    before = contents(cp.parent)
    answer = run(cp, "--to", words)
    assert (answer.exit_code, "needs the broker" in answer.output) == (1, True)
    assert contents(cp.parent) == before


def test_the_operator_says_stopped_and_why(cp):
    make(cp, KAFKA)
    before = contents(cp.parent)
    for answer in (run(cp, "--to", 5, stopped=False), run(cp, "--to", 5, reason=False)):
        assert answer.exit_code == 2
    assert "give --stopped" in run(cp, "--to", 5, stopped=False).output
    assert "is not a local directory" in run("hdfs://h/cp", "--to", 5).output
    assert contents(cp.parent) == before


def test_a_dry_run_writes_nothing_and_needs_no_reason(cp):
    make(cp, KAFKA)
    before = contents(cp.parent)
    answer = run(cp, "--to", 120, "--dry-run", stopped=False, reason=False)
    assert (answer.exit_code, "dry run: nothing was written" in answer.output) == (0, True)
    told = [json.loads(line) for line in run(cp, "--to", 120, "--dry-run", "--json").output.splitlines()]
    assert [(row["partition"], row["before"], row["after"]) for row in told[:2]] == [(0, 180, 120), (1, 175, 120)]
    assert contents(cp.parent) == before


def waiting(cp, tmp_path, offset=100, **fields):
    store = StartpointStore.open(tmp_path / "store")
    store.write("billing", "orders", None, Startpoint.specific(offset, **fields), "said before")
    return store, CheckpointPlace(checkpoint=cp, consumer="billing")


def test_a_query_that_runs_changes_files_while_they_are_watched(cp, tmp_path):
    make(cp, KAFKA)
    store, place = waiting(cp, tmp_path)
    watched = []

    def a_batch_meanwhile(seconds):
        watched.append(seconds)
        (cp / "offsets" / "3").write_text("planned by the query")

    with pytest.raises(QueryRunning, match="files changed meanwhile"):
        apply(place, store, sleep=a_batch_meanwhile)
    assert watched == [30.0], "so long if nobody says otherwise"
    assert (cp / "offsets" / "3").read_text() == "planned by the query"


def test_files_are_created_never_replaced(cp, tmp_path, monkeypatch):
    make(cp, KAFKA)
    store, place = waiting(cp, tmp_path)
    real = checkpoint_append.create

    def late(path, text, scratch):
        if path.name == "3":
            path.write_text("planned by the query after all")
        real(path, text, scratch)

    monkeypatch.setattr(checkpoint_append, "create", late)
    with pytest.raises(QueryRunning, match=r"offsets/3 was written"):
        apply(place, store, sleep=lambda _s: None)
    assert (cp / "offsets" / "3").read_text() == "planned by the query after all"
    assert not (cp / "commits" / "3").exists()


def test_the_backup_restores(cp):
    make_files(cp)
    before = contents(cp)
    assert run(cp, "--to", 0).exit_code == 0
    assert contents(cp) != before
    shutil.rmtree(cp)
    backup = cp.with_name("cp-before-3")
    shutil.copytree(backup, cp)
    (cp / checkpoint_append.NOTES_NAME).unlink()
    assert contents(cp) == before
    answer = run(cp, "--to", 2)
    assert (answer.exit_code, "move it away" in answer.output) == (1, True), "it is not done again by its old notes"
    backup.rename(cp.with_name("aside"))
    assert run(cp, "--to", 2).exit_code == 0
    assert offsets(cp, 3) == '{"logOffset":1}'


@pytest.mark.parametrize("source", ["kafka", "files", "pushrep", "union"])
def test_the_backup_moved_back_is_a_checkpoint_that_can_be_moved_again(cp, tmp_path, source):
    """The backup has the notes of the earlier call, which must not disturb the next ones."""
    named, line = [], 0
    if source == "files":
        make_files(cp)
    elif source == "pushrep":
        make_logs(cp, tmp_path)
        named = ["--logs", tmp_path / "out"]
    else:
        make(cp, KAFKA, KAFKA)
        named, line = ["--source", int(source == "union")], int(source == "union")
    moved = []
    for place in (0, 1, 1):
        answer = run(cp, "--to", place, *named)
        assert answer.exit_code == 0, answer.output
        moved.append(offsets(cp, 3, line))
        shutil.rmtree(cp)
        cp.with_name("cp-before-3").rename(cp)
    assert moved[0] != moved[1] == moved[2]


def test_a_refused_request_leaves_nothing_for_the_next_call(cp, monkeypatch):
    make(cp, KAFKA)

    def a_batch_meanwhile(_seconds):
        (cp / "offsets" / "3").write_text("planned by the query")

    with monkeypatch.context() as patch:
        patch.setitem(apply.__kwdefaults__, "sleep", a_batch_meanwhile)
        answer = run(cp, "--to", 0)
    assert (answer.exit_code, "files changed" in answer.output) == (1, True), answer.output
    assert StartpointStore.open(f"{cp}-startpoints").history() == [], "nothing waits"
    (cp / "offsets" / "3").unlink()
    assert run(cp, "--to", 95, "--partition", 1).exit_code == 0
    assert offsets(cp, 3) == '{"orders":{"0":180,"1":95}}', "only what this call asked for"


def test_a_request_moves_nothing_else_that_waits(cp):
    make(cp, KAFKA)
    StartpointStore.open(f"{cp}-startpoints").write(QUERY, "orders", 0, Startpoint.specific(3), "said before")
    answer = run(cp, "--to", 95, "--partition", 1)
    assert answer.exit_code == 0, answer.output
    assert offsets(cp, 3) == '{"orders":{"0":180,"1":95}}'
    assert run(cp).exit_code == 0, "what waited is for a call without --to"
    assert offsets(cp, 4) == '{"orders":{"0":3,"1":95}}'


def test_what_was_not_shown_is_not_moved(cp, tmp_path):
    make(cp, KAFKA)
    store, place = waiting(cp, tmp_path)
    before = contents(cp)

    def written_meanwhile(_seconds):
        store.write("billing", "orders", 1, Startpoint.specific(9), "newer")

    with pytest.raises(checkpoint_apply.PlanChanged, match=r"partitions 0 .* 1 "):
        apply(place, store, sleep=written_meanwhile)
    assert contents(cp) == before
    assert not any(isinstance(fact, Applied) for fact in store.history())


def test_a_partition_that_the_query_never_read_is_refused_before_the_watch(cp):
    make(cp, KAFKA)
    before = contents(cp.parent)
    answer = run(cp, "--to", 5, "--partition", 2, "--watch-s", 600)
    assert (answer.exit_code, "partitions 0, 1 of orders, not 2" in answer.output) == (1, True), answer.output
    assert run(cp, "--watch-s", 600).exit_code == 1, "and so is a call for which nothing waits"
    assert contents(cp.parent) == before


def test_records_forward_are_not_judged_by_an_end_that_nobody_asked_for(cp):
    make(cp, KAFKA)
    assert run(cp, "--to", "+5", "--out-of-range", "latest").exit_code == 0
    assert offsets(cp, 3) == '{"orders":{"0":185,"1":180}}'


@pytest.mark.parametrize("policy", ["earliest", "latest"])
def test_a_policy_that_needs_the_broker_is_refused_as_its_word_for_to_is(cp, policy):
    """It took offset 0 and the query's own position for the topic's ends."""
    make(cp, KAFKA)
    before = contents(cp.parent)
    answer = run(cp, "--to", -178, "--out-of-range", policy)
    said = f"offset -3 of partition 1 is below 0, and only the broker knows the topic's {policy} offset"
    assert (answer.exit_code, said in answer.output) == (1, True), answer.output
    assert contents(cp.parent) == before


@pytest.mark.parametrize("words", [("--partition", 1), ("--reset-marks",), ("--out-of-range", "latest")])
def test_an_option_of_to_is_not_dropped_where_what_waits_is_applied(cp, tmp_path, words):
    make(cp, KAFKA)
    waiting(cp, tmp_path)
    before = contents(cp.parent)
    answer = run(cp, "--store", tmp_path / "store", "--consumer", "billing", *words)
    assert (answer.exit_code, f"{words[0]} is for --to" in answer.output) == (2, True), answer.output
    assert contents(cp.parent) == before


def test_a_checkpoint_may_be_the_directory_one_is_in(cp, monkeypatch):
    make(cp, KAFKA)
    for here, words in ((cp, "."), (cp / "offsets", "..")):
        monkeypatch.chdir(here)
        assert run(words, "--to", 5, "--dry-run").exit_code == 0
    monkeypatch.chdir(cp)
    assert run(".", "--to", 5).exit_code == 0
    assert {place.name for place in cp.parent.iterdir()} == {"cp", "cp-before-3", "cp-startpoints"}


@pytest.mark.parametrize(("again", "code"), [(5, 0), (9, 1)], ids=["the same call", "another request"])
def test_a_request_beside_an_interrupted_call_is_never_dropped_in_silence(cp, monkeypatch, again, code):
    make(cp, KAFKA)
    with monkeypatch.context() as patch:
        stop_after(1, patch)
        assert run(cp, "--to", 5).exit_code != 0
    answer = run(cp, "--to", again)
    assert (answer.exit_code, "is not done yet" in answer.output) == (code, bool(code)), answer.output
    assert offsets(cp, 3) == '{"orders":{"0":5,"1":5}}'
    assert not (cp / "offsets" / "4").exists()


def marks_of(store, batches=3):
    """Let a store keep the marks of so many batches of the query, as a filter would."""
    marks = {
        MarksKey("orders"): HighwaterMarks.from_columns([5, 5], [0, 1], [90, 91], [0, 1]),
        MarksKey("rates"): HighwaterMarks.from_columns([5], [0], [70], [0]),
    }
    for batch in range(batches):
        if isinstance(store, SqlTable):
            store.stage_nothing(QUERY, batch)
        store.write(BatchMarks(QUERY, batch, (), marks), keep=99)


def local_marks_of(location, batches=3):
    with LocalMarks(location) as store:
        marks_of(store, batches)


def carried_and_reset(cp, store, *named):
    """Move the query with the marks in `store`, which the options name; then once more, with a reset."""
    make(cp, KAFKA)
    marks_of(store)
    store.close()
    answer = run(cp, "--to", 100, "--partition", 1, *named)
    assert "would drop [100, 175) as seen" in " ".join(answer.output.split()), answer.output
    assert run(cp, "--to", 50, "--partition", 1, "--reset-marks", *named).exit_code == 0
    kept, reset = store.read(QUERY, 3), store.read(QUERY, 4)
    assert kept.marks == reset.marks == store.read(QUERY, 2).marks, "for whoever replaces rows"
    assert (kept.sent_back, reset.sent_back) == ((), (SentBack("orders", 1, 1, 100),))
    store.close()
    assert run(cp, "--to", 20, "--reset-marks", *named).exit_code == 0
    sent_back = store.read(QUERY, 5).sent_back
    assert sent_back == (SentBack("orders", 0, 2, 180), SentBack("orders", 1, 2, 50)), "numbered behind those of before"
    store.close()
    for place in (5, 15):
        assert run(cp, "--to", place, "--partition", 1, *named).exit_code == 0
    assert store.read(QUERY, 7).sent_back[1] == SentBack("orders", 1, 2, 50, 20), "what it had read stays"
    assert store.owner() == QUERY
    notes = Path(f"{cp}-before-4", "startpoints.json").read_text()
    assert store.location in json.loads(notes)["marks"]


def test_rule_9_marks_outside_are_carried_or_reset_in_the_same_run(cp):
    """The filter reads the marks of the batch before: the appended batch has its own."""
    with LocalMarks(f"{cp}-marks") as store:
        carried_and_reset(cp, store)


def test_rule_9_so_are_marks_beside_rows_in_a_database(cp, tmp_path):
    url = f"sqlite:{tmp_path / 'shop.db'}"
    carried_and_reset(cp, SqlTable(url, "orders"), "--marks", url, "--table", "orders")


def test_a_reset_shows_how_many_rows_of_the_job_s_table_go_and_refuses_one_that_can_not(cp, tmp_path):
    """The job's marks are in its database, so --sink is all that has to be given."""
    make(cp, KAFKA)
    url = f"sqlite:{tmp_path / 'shop.db'}"
    marks_of(SqlTable(url, "orders"))
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        database.execute('CREATE TABLE orders (topic, "partition", "offset", pushrep_query, pushrep_batch)')
        held = [("orders", partition, offset) for partition, end in ((0, 180), (1, 160)) for offset in range(0, end, 2)]
        database.executemany("INSERT INTO orders VALUES (?, ?, ?, 'q', 0)", held)
        database.commit()
    words = ("--to", 100, "--reset-marks", "--sink", url, "--table", "orders")
    told = [json.loads(line) for line in run(cp, *words, "--dry-run", "--json").output.splitlines()]
    assert [(one["partition"], one["rows"]) for one in told[:-1]] == [(0, 40), (1, 30)]
    for wrong, why in (
        ("mysql://x/y", "mysql"),
        ("orders", "exchanges whole batches only"),
        (f"{tmp_path}/none", "can't be read"),
    ):
        answer = run(cp, "--to", 100, "--reset-marks", "--marks", url, "--table", "orders", "--sink", wrong)
        assert (answer.exit_code, why in answer.output) == (1, True), answer.output
    assert not (cp / "offsets" / "3").exists()
    answer = run(cp, *words)
    assert (answer.exit_code, "partition 1: 30 rows are replaced" in answer.output) == (0, True), answer.output
    sent_back = SqlTable(url, "orders").read(QUERY, 3).sent_back
    assert sent_back == (SentBack("orders", 0, 1, 180), SentBack("orders", 1, 1, 175))
    assert run(cp, "--to", 100, "--sink", url, "--table", "orders").exit_code == 2, "without a reset no row goes"


def test_rows_are_not_replaced_by_marks_with_a_window(cp):
    """The job would compute the marks of before, can't, and would stop at each start."""
    make(cp, KAFKA)
    local_marks_of(f"{cp}-marks")
    with LocalMarks(f"{cp}-marks") as store:
        last = store.read(QUERY, 2)
        windowed = {key: held.with_window(8) for key, held in last.marks.items()}
        store.write(dataclasses.replace(last, marks=windowed), keep=9)
    before = contents(cp)
    answer = run(cp, "--to", 100, "--reset-marks", "--sink", "./t")
    assert (answer.exit_code, "with a window the earlier marks can't be computed" in answer.output) == (1, True)
    assert contents(cp) == before
    assert StartpointStore.open(f"{cp}-startpoints").history() == []
    assert run(cp, "--to", 100, "--reset-marks").exit_code == 0, "a filter that replaces nothing begins without marks"


def test_rows_from_where_it_says_on_stay_and_what_can_not_be_honoured_is_refused_first(cp, tmp_path):
    make(cp, KAFKA)
    local_marks_of(f"{cp}-marks")
    again = ("--to", 100, "--reset-marks", "--partition", 0)
    for words, why in (
        ((*again, "--replace-until", 100), "give an offset above 100"),
        (("--to", "-50", "--reset-marks", "--replace-until", 170), "it is for an offset"),
        (("--to", 100, "--replace-until", 170), "is for --to OFFSET --reset-marks"),
        (("--replace-until", 170), "is for --to OFFSET --reset-marks"),
    ):
        answer = run(cp, *words)
        assert (answer.exit_code, why in " ".join(answer.output.split())) == (2, True), answer.output
    table = tmp_path / "table"
    held = {"topic": ["orders"] * 180, "partition": [0] * 180, "offset": list(range(180))}
    ds.write_dataset(pa.table(held), table, format="parquet")
    told = run(cp, *again, "--replace-until", 150, "--sink", table, "--dry-run", "--json").output.splitlines()
    assert (json.loads(told[0])["rows"], json.loads(told[0])["replace_until"]) == (50, 150)
    assert run(cp, *again, "--replace-until", 150).exit_code == 0
    with LocalMarks(f"{cp}-marks") as store:
        assert store.read(QUERY, 3).sent_back == (SentBack("orders", 0, 1, 180, replace_until=150),)
    assert json.loads(Path(f"{cp}-before-3", "startpoints.json").read_text())["moves"] == [
        [0, 180, 100, 1, True, None, 150]
    ]
    answer = run(cp, "--to", 50, "--reset-marks", "--partition", 0, "--replace-until", 60)
    said = " ".join(answer.output.split())
    assert (answer.exit_code, "read again up to 180, and it stands at 100" in said) == (1, True), said
    assert run(cp, "--to", 50, "--reset-marks", "--partition", 0).exit_code == 0, "to the end covers it"
    assert not (cp / "offsets" / "5").exists()


def test_a_sink_that_keeps_no_rows_of_before_has_no_undo(cp, tmp_path):
    """It is refused before anything is read, with the alternative."""
    make(cp, KAFKA)
    for sink in (f"sqlite:{tmp_path / 'shop.db'}", f"{tmp_path}/table", "orders"):
        answer = CliRunner().invoke(command, ["undo-repair", str(cp), "--sink", sink, "--reason", "why"])
        said = " ".join(answer.output.split())
        assert (answer.exit_code, "keeps no rows of before" in said, "restore a copy" in said) == (1, True, True), said
    assert not (tmp_path / "shop.db").exists()


def test_a_repair_that_is_not_read_through_is_not_undone(cp, tmp_path, monkeypatch):
    """Refused before a Spark is started to look at the table."""
    monkeypatch.setattr(job_sink.Sink, "_session", lambda _: pytest.fail("Spark was asked"))
    make(cp, KAFKA)

    def refused():
        words = ["undo-repair", str(cp), "--sink", f"{tmp_path}/table", "--format", "delta", "--dry-run"]
        answer = CliRunner().invoke(command, words)
        assert answer.exit_code == 1, answer.output
        return " ".join(answer.output.split())

    assert "say where they lie, --marks. Nothing was written" in refused()
    local_marks_of(f"{cp}-marks")
    assert "no partition of orders was sent back with --reset-marks" in refused()
    assert run(cp, "--to", 100, "--reset-marks", "--partition", 0).exit_code == 0
    assert "partition 0 is read again up to 180 and stands at 100: let the job read to there" in refused()


def test_what_only_a_job_that_follows_startpoints_can_honour_is_refused(cp, tmp_path):
    make(cp, KAFKA)
    local_marks_of(f"{cp}-marks")
    with StartpointStore.open(tmp_path / "store") as store:
        store.write("billing", "orders", 0, Startpoint.specific(9, reset_marks=True, append_only=True), "why")
    answer = run(cp, "--store", tmp_path / "store", "--consumer", "billing")
    assert (answer.exit_code, "startpoint 1 is append-only" in answer.output) == (1, True), answer.output
    assert not (cp / "offsets" / "3").exists()


def test_marks_of_an_interrupted_call_are_named_again(cp, tmp_path, monkeypatch):
    """The notes have the place of the marks, but not how to connect; other marks are refused."""
    make(cp, KAFKA)
    url = f"sqlite:{tmp_path / 'shop.db'}"
    marks_of(SqlTable(url, "orders"))
    named = ("--marks", url, "--table", "orders")
    monkeypatch.setattr(checkpoint_append, "move_marks", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    run(cp, "--to", 50, *named)
    monkeypatch.undo()
    assert not (cp / "offsets" / "3").exists()
    assert "name them again, --marks" in run(cp, "--to", 50).output
    local_marks_of(f"{cp}-marks")
    assert "name these again, --marks" in run(cp, "--to", 50).output
    assert run(cp, "--to", 50, *named).exit_code == 0
    assert SqlTable(url, "orders").batches(QUERY) == [0, 1, 2, 3]


def test_marks_that_are_not_those_of_the_checkpoint_are_refused(cp):
    make(cp, KAFKA)
    local_marks_of(f"{cp}-marks", batches=2)
    assert "lack batch 2 of query" in run(cp, "--to", 5).output
    assert not (cp / "offsets" / "3").exists()


def test_marks_that_can_not_be_moved_along_are_refused_by_name(cp, tmp_path):
    make(cp, KAFKA)
    assert "none are named: say where they lie, --marks" in run(cp, "--to", 5, "--reset-marks").output
    for named, told in (
        (("--marks", tmp_path), "name the directory that the job has as --marks"),
        (("--marks", tmp_path / "none"), "name the directory that the job has as --marks"),
        (("--marks", "postgresql://db/shop"), "needs --table"),
        (("--marks", "kafka:marks"), "--bootstrap-servers"),
        (("--table", "orders"), "--table needs --marks DATABASE"),
        (("--bootstrap-servers", "broker:9092"), "are for --store kafka:TOPIC"),
    ):
        answer = run(cp, "--to", 5, *named)
        assert (answer.exit_code, told in " ".join(answer.output.split())) in {(1, True), (2, True)}, answer.output
    assert [place.name for place in tmp_path.iterdir()] == ["cp"], "and nothing is made anywhere"
    assert not (cp / "offsets" / "3").exists()


@pytest.fixture
def appended(cp, tmp_path, monkeypatch):
    """A call that was killed between the pair and the store's word for it."""
    make(cp, KAFKA)
    local_marks_of(f"{cp}-marks")
    store, _ = waiting(cp, tmp_path)
    place = CheckpointPlace(checkpoint=cp, consumer="billing", marks=MarksPlace(f"{cp}-marks"))
    with monkeypatch.context() as patched:
        patched.setattr(store, "consume", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            apply(place, store, sleep=lambda _s: None)
    return store, place


def test_what_was_written_since_a_killed_call_does_not_keep_its_pair_unfinished(cp, appended):
    """Rule 3: `consumed` names only that sequence; the newer one is applied by the next call."""
    store, place = appended
    store.write("billing", "orders", None, Startpoint.specific(50), "newer")
    assert [apply(place, store, sleep=lambda _s: None).first for _ in range(2)] == [3, 4]
    assert offsets(cp, 4) == '{"orders":{"0":50,"1":50}}'
    assert [fact.sequence for fact in store.history() if isinstance(fact, Consumed)] == [1, 1, 2, 2]


def test_a_killed_calls_pair_that_spark_has_purged_since_is_only_recorded(cp, appended):
    """The query was started, and is a hundred batches further: neither its files nor its marks are touched."""
    store, place = appended
    with LocalMarks(f"{cp}-marks") as marks:
        for batch in range(4, 9):
            for kind in ("offsets", "commits"):
                shutil.copy(cp / kind / "3", cp / kind / str(batch))
            marks.write(BatchMarks(QUERY, batch, (), marks.read(QUERY, 3).marks), keep=99)
    for batch, kind in itertools.product(range(5), ("offsets", "commits")):
        (cp / kind / str(batch)).unlink()
    before = contents(cp)
    apply(place, store, sleep=lambda _s: None)
    assert contents(cp) == before
    with LocalMarks(f"{cp}-marks") as marks:
        assert marks.batches(QUERY) == list(range(9))
    assert store.read("billing", "orders", 0) is None


@pytest.mark.parametrize("written", [1, 3], ids=["the first offsets", "the second offsets"])
def test_a_query_that_was_started_on_half_a_pair_of_files_has_finished_it(cp, tmp_path, monkeypatch, written):
    """The query committed our batch itself, with its metadata; the next call only has to record that."""
    make_files(cp)
    store = StartpointStore.open(tmp_path / "store")
    store.write("billing", "files-0", 0, Startpoint.specific(1), "again")
    place = CheckpointPlace(checkpoint=cp, consumer="billing")
    stop_after(written, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        apply(place, store, sleep=lambda _s: None)
    monkeypatch.undo()
    last = max(int(file.name) for file in (cp / "offsets").iterdir())
    assert not (cp / "commits" / str(last)).exists()
    (cp / "commits" / str(last)).write_text('v1\n{"nextBatchWatermarkMs":7}')
    assert apply(place, store, sleep=lambda _s: None).first == 3
    assert (cp / "commits" / str(last)).read_text() == 'v1\n{"nextBatchWatermarkMs":7}'
    assert sorted(int(file.name) for file in (cp / "commits").iterdir()) == list(range(5))
    assert offsets(cp, 3) == offsets(cp, 4) == '{"logOffset":0}'
    assert store.read("billing", "files-0", 0) is None


def stop_after(count, monkeypatch):
    """Let an `apply` be killed behind so many of the pair's files."""
    real, numbers = checkpoint_append.create, itertools.count()

    def create(path, text, scratch):
        if path.parent.name in {"offsets", "commits"} and next(numbers) == count:
            raise KeyboardInterrupt
        real(path, text, scratch)

    monkeypatch.setattr(checkpoint_append, "create", create)


STEPS = 200


@pytest.mark.parametrize("source", ["kafka", "files"])
def test_killed_anywhere_the_same_call_finishes_it_once(cp, tmp_path, source, torture):
    """kill -9 at each call that creates, renames or links a file; afterwards everything is whole, or the next call
    finishes it.
    """
    finished, at = False, 1 + torture.random(source).randrange(torture.count(4, 1))
    while not finished and at < STEPS:
        place = tmp_path / str(at)
        here = make(place / "cp", KAFKA) if source == "kafka" else make_files(place / "cp")
        local_marks_of(place / "cp-marks")
        topic = "orders" if source == "kafka" else "files-0"
        store = StartpointStore.open(place / "store")
        store.write("billing", topic, 0, Startpoint.specific(1, reset_marks=True), "again")
        where = CheckpointPlace(checkpoint=here, consumer="billing", marks=MarksPlace(str(place / "cp-marks")))
        finished = in_child(lambda: apply(where, store, sleep=lambda _s: None), at)  # noqa: B023 - called at once
        pair = apply(where, store, sleep=lambda _s: None) if store.read("billing", topic, 0) else None
        assert pair is None or pair.first == 3, at
        count = 1 if source == "kafka" else 2
        assert sorted(int(file.name) for file in (here / "offsets").iterdir()) == list(range(3 + count)), at
        assert sorted(int(file.name) for file in (here / "commits").iterdir()) == list(range(3 + count)), at
        moved = json.loads(offsets(here, 3))
        assert moved == ({"orders": {"0": 1, "1": 175}} if source == "kafka" else {"logOffset": 0}), at
        with LocalMarks(place / "cp-marks") as marks:
            left = marks.read(QUERY, 2 + count)
        assert left.sent_back == ((SentBack("orders", 0, 1, 180),) if source == "kafka" else ()), at
        assert bool(left.marks) == (source == "kafka"), f"{at}: a source without partitions begins without any marks"
        facts = [type(fact) for fact in store.history()]
        assert (facts.count(Applied), facts.count(Consumed)) == (1, 1), at
        at += torture.count(4, 1)
    assert finished, "the last child must get to its end"


def in_child(work, at):
    """Run `work` in a forked child that is killed at its `at`-th change of a name; whether it got to its end."""
    child = os.fork()
    if child == 0:
        try:
            calls = itertools.count(1)
            for name in ("link", "rename", "replace", "unlink", "mkdir"):
                setattr(os, name, _dying(getattr(os, name), lambda: next(calls) == at))
            work()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), f"the child failed with {code}"
    return code == 0


def _dying(call, is_last):
    def counted(*words, **named):
        if is_last():
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*words, **named)

    return counted
