"""`pushrep marks` over each kind of store: show, export, import, reset."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

pytest.importorskip("pyspark")

from click.testing import CliRunner

from filtering import ReplayFilter, StreamMetadata
from filtering.marks import HighwaterMarks
from pushrep.log import SegmentLog
from spark_jobs.batch_marks import BatchMarks, LogRange, MarksKey
from spark_jobs.mark_epochs import Epoch, carried
from spark_jobs.marks import LocalMarks
from spark_jobs.marks_command import marks
from spark_jobs.sql.table import SqlTable


def batch(number, offset, query="q"):
    held = HighwaterMarks.from_columns([7], [1], [offset])
    return BatchMarks(query, number, (LogRange("orders", 0, 0, offset + 1),), {MarksKey("orders"): held})


def run(*arguments, code=0, given=None):
    answer = CliRunner().invoke(marks, list(map(str, arguments)), input=given)
    assert answer.exit_code == code, answer.output
    return answer.output


@pytest.fixture
def local(tmp_path):
    with LocalMarks(tmp_path / "marks") as store:
        store.write(batch(0, 4), keep=9)
        store.write(batch(1, 9), keep=9)
    return tmp_path / "marks"


@pytest.fixture
def table(tmp_path):
    """The table as ReplayFilteredBatches leaves it, without rows."""
    url = f"sqlite:{tmp_path / 'shop.db'}"
    store = SqlTable(url, "orders")
    store.drop_from("q", 0)  # makes the table
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        for number, offset in ((0, 4), (1, 9)):
            row = ("q", number, batch(number, offset).to_bytes())
            connection.execute("INSERT INTO orders_marks (query_id, batch_id, marks) VALUES (?, ?, ?)", row)
        connection.commit()
    return (url, "--table", "orders")


@pytest.fixture(params=["local", "table"])
def place(request):
    found = request.getfixturevalue(request.param)
    return found if isinstance(found, tuple) else (found,)


def test_show(place):
    told = json.loads(run("show", *place, "--json"))
    assert (told["query"], told["batches"], told["last"]["batch"]) == ("q", [0, 1], 1)
    assert told["last"]["marks"] == [
        {"topic": "orders", "startpoint_epoch": 0, "pid": 7, "partition": 1, "offset": 9},
    ]
    text = run("show", *place)
    assert "query q, batches 0 to 1" in text
    assert "batch 1 read orders-0 [0, 10)" in text
    assert "orders pid 7 partition 1: offset 9" in text


def test_an_export_is_imported_and_adopted(place, tmp_path):
    run("export", *place, tmp_path / "old", "--batch", "0")
    assert BatchMarks.from_bytes((tmp_path / "old").read_bytes()) == batch(0, 4)
    run("export", *place, tmp_path / "out")
    told = json.loads(run("import", tmp_path / "fresh", tmp_path / "out", "--json"))
    assert told["adopt"] == "q:1"
    with LocalMarks(tmp_path / "fresh") as store:
        assert store.owner() == "q"
        assert store.read("q", 1) == batch(1, 9)
    assert "has marks of query q" in run("import", tmp_path / "fresh", tmp_path / "out", code=1)
    assert "name a new file" in run("export", *place, tmp_path / "out", code=1)


def test_reset_asks_and_exports_before(place, tmp_path):
    assert "forget batches 0 to 1 of query q" in run("reset", *place, "--export", tmp_path / "no", code=1, given="n\n")
    assert not (tmp_path / "no").exists()
    assert json.loads(run("show", *place, "--json"))["batches"] == [0, 1]
    run("reset", *place, "--export", tmp_path / "out", "--yes")
    assert BatchMarks.from_bytes((tmp_path / "out").read_bytes()) == batch(1, 9)
    assert "it holds no marks" in run("show", *place, code=1)


def test_a_reset_store_is_anybodys(local, tmp_path):
    run("reset", local, "--export", tmp_path / "out", "--yes")
    with LocalMarks(local) as store:
        assert (store.owner(), store.batches("q")) == (None, [])


def test_a_job_s_marks_are_found_by_the_url_that_it_may_have(local):
    assert run("show", f"file://{local}").splitlines()[1:] == run("show", local).splitlines()[1:]


def test_a_running_query_keeps_its_marks(local):
    with LocalMarks(local) as store:
        store.owner()
        assert "is open in this very process" in run("show", local, code=1)


def test_places_without_marks_are_refused_and_none_are_made(tmp_path):
    with SegmentLog.open(tmp_path / "logs" / "orders-0"):
        pass
    for arguments in (
        (tmp_path / "none",),
        (tmp_path / "logs",),
        (f"sqlite:{tmp_path / 'none.db'}", "--table", "t"),
        (f"sqlite:{tmp_path / 'none.db'}",),
        (tmp_path / "none", "--table", "t"),
    ):
        assert run("show", *arguments, code=1).startswith("Error: marks at")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]


def test_a_damaged_export_is_refused(local, tmp_path):
    run("export", local, tmp_path / "out")
    data = bytearray((tmp_path / "out").read_bytes())
    data[20] ^= 1
    (tmp_path / "out").write_bytes(data)
    assert "corrupt" in run("import", tmp_path / "fresh", tmp_path / "out", code=1)
    assert not (tmp_path / "fresh").exists()


def test_one_pair_is_shown_set_and_forgotten(local, tmp_path):
    held = HighwaterMarks.from_columns([7, 8], [1, 0], [9, 5], [0, 2])
    with LocalMarks(local) as store:
        replacing = {"replaced": (LogRange("orders", 0, 0, 5),)}
        store.write(
            BatchMarks("q", 2, (LogRange("orders", 0, 0, 11),), {MarksKey("orders"): held}, **replacing), keep=9
        )
    one = ("--pid", 8, "--partition", 0)

    def offsets(*pair):
        found = json.loads(run("show", local, *pair, "--json"))["last"]["marks"]
        return {mark["pid"]: mark["offset"] for mark in found}

    assert (offsets(), offsets(*one)) == ({7: 9, 8: 5}, {8: 5})
    assert "orders pid 8 partition 0: set to 4" in run(
        "set", local, *one, "--offset", 4, "--export", tmp_path / "before.marks"
    )
    assert BatchMarks.from_bytes((tmp_path / "before.marks").read_bytes()).marks == {MarksKey("orders"): held}
    assert offsets() == {7: 9, 8: 4}
    with LocalMarks(local) as store:
        changed = store.read("q", 2)
    assert changed.ranges == (LogRange("orders", 0, 0, 11),), "the batch is still done"
    assert changed.replaced == replacing["replaced"], "and so is what it replaced"
    assert changed.marks[MarksKey("orders")].get(8, 0).destination_partition is None, "it goes on wherever it is met"
    run("set", local, *one, "--offset", -1, "--export", tmp_path / "second.marks")
    assert offsets() == {7: 9}
    assert "pid 8 partition 0: no mark" in run("show", local, *one)
    run("set", local, *one, "--topic", "other", "--offset", 1, "--export", tmp_path / "third.marks", code=1)
    for half in (("show", local, "--pid", 7), ("set", local, "--pid", 7, "--offset", 1, "--export", tmp_path / "x")):
        run(*half, code=2)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("offset", [9, 7, 12])
def test_a_pair_that_is_set_keeps_what_its_window_has_seen_and_all_below_another_mark_is_seen(local, tmp_path, offset):
    seen = ReplayFilter(window=4)
    for n in (5, 6, 9):
        assert seen.admit(StreamMetadata(8, 0, n).pack(), 3)
    held = seen.marks(now_ms=77)
    with LocalMarks(local) as store:
        store.write(BatchMarks("q", 2, marks={MarksKey("orders"): held}), keep=9)
    run("set", local, "--pid", 8, "--partition", 0, "--offset", offset, "--export", tmp_path / "before.marks")
    with LocalMarks(local) as store:
        found = store.read("q", 2).marks[MarksKey("orders")]
    after = ReplayFilter(found, window=4)
    passes = [n for n in range(14) if after.admit(StreamMetadata(8, 0, n).pack(), 5)]
    assert passes == {9: [7, 8, *range(10, 14)], 7: [*range(8, 14)], 12: [13]}[offset]
    assert found.get(8, 0).advanced_ms == (77 if offset == 9 else None)


@pytest.mark.parametrize("known", [True, False])
def test_a_pair_that_is_set_goes_on_in_a_partition_that_a_startpoint_had_reset(local, tmp_path, known):
    """Startpoint 5 had reset the marks of orders-1; pair 8 was in orders-0 so far, or nowhere."""
    old = HighwaterMarks.from_columns([7, 8] if known else [7], [0, 0] if known else [0], [3, 9] if known else [3], 0)
    marks_ = {MarksKey("orders"): old, MarksKey("orders", 5): HighwaterMarks.from_columns([9], [1], [2], [1])}
    with LocalMarks(local) as store:
        store.write(BatchMarks("q", 2, marks=marks_), keep=9)
    run("set", local, "--pid", 8, "--partition", 0, "--offset", 9, "--export", tmp_path / "before.marks")
    with LocalMarks(local) as store:
        found = store.read("q", 2).marks
    seen = HighwaterMarks.from_columns([8], [0], [10], [1])
    assert carried(found, "orders", {1: Epoch(5, 5)}, seen).get(8, 0).offset == 9
    assert carried(found, "orders", {0: Epoch()}, seen).get(8, 0).offset == 9
    run("set", local, "--pid", 8, "--partition", 0, "--offset", -1, "--export", tmp_path / "second.marks")
    shown = json.loads(run("show", local, "--json"))["last"]["marks"]
    assert {mark["pid"] for mark in shown} == {7, 9}


def test_a_pair_that_can_not_be_set_is_refused_with_the_reason_and_nothing_is_exported(local, table, tmp_path):
    with LocalMarks(tmp_path / "unkeyed") as store:
        store.write(BatchMarks("q", 0, (LogRange("orders", 0, 0, 5),)), keep=9)
    one = ("--pid", 7, "--offset", 3, "--export", tmp_path / "before.marks")
    assert "no single pair is set" in run("set", table[0], "--partition", 1, *one, code=1)
    assert "batch 0 of query q has seen no pair" in run("set", tmp_path / "unkeyed", "--partition", 1, *one, code=1)
    assert "2147483648 is not in the range" in run("set", local, "--partition", 2**31, *one, code=2)
    forget = ("--pid", 12345, "--partition", 1, "--offset", -1, "--export", tmp_path / "before.marks")
    assert "has no mark of pid 12345 partition 1: nothing was changed" in run("set", local, *forget, code=1)
    assert not (tmp_path / "before.marks").exists()
    run("set", local, "--partition", 1, *one)


@pytest.mark.parametrize(("name", "again"), [("orders", "Orders"), ('"my" orders', '"My" orders')])
def test_a_table_of_sqlite_is_found_by_its_name_in_any_case_and_with_quotes(tmp_path, name, again):
    """Else a fresh checkpoint would fill a table that belongs to another query."""
    first, second = (SqlTable(f"sqlite:{tmp_path / 'shop.db'}", one) for one in (name, again))
    adopted = replace(batch(0, 4), first=1)
    first.write(adopted, keep=9)
    assert (first.owner(), second.owner(), second.read("q", 0)) == ("q", "q", adopted)
