"""`pushrep marks` over each kind of store: show, export, import."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

pytest.importorskip("pyspark")

from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from filtering import ReplayFilter, StreamMetadata, sqe_producer_id
from filtering.marks import HighwaterMarks
from filtering.stream_metadata import OFFSET_MAX, PARTITION_MAX
from pushrep.log import SegmentLog
from spark_jobs.batch_marks import BatchMarks, LogRange, MarksFenced, MarksKey, MarksStoreDamaged, RowCounts
from spark_jobs.decide import Epoch, carried
from spark_jobs.file_marks import FileMarks
from spark_jobs.marks_command import marks, sqe_marks
from spark_jobs.sql import SqlTable


def batch(number, offset, query="q"):
    held = HighwaterMarks.from_columns([7], [1], [offset])
    return BatchMarks(query, number, (LogRange("orders", 0, 0, offset + 1),), {MarksKey("orders"): held})


def run(*arguments, code=0):
    answer = CliRunner().invoke(marks, list(map(str, arguments)))
    assert answer.exit_code == code, answer.output
    return answer.output


@pytest.fixture
def local(tmp_path):
    store = FileMarks(tmp_path / "marks")
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
    (mark,) = told["last"]["marks"]
    assert (mark["topic"], mark["startpoint_epoch"], mark["pid"], mark["partition"], mark["offset"]) == (
        "orders",
        0,
        7,
        1,
        9,
    )
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
    store = FileMarks(tmp_path / "fresh")
    assert store.owner() == "q"
    assert store.read("q", 1) == replace(batch(1, 9), first=2)
    assert "has marks of query q" in run("import", tmp_path / "fresh", tmp_path / "out", code=1)
    assert "File exists" in run("export", *place, tmp_path / "out", code=1)


def test_a_job_s_marks_are_found_by_the_url_that_it_may_have(local):
    assert run("show", f"file://{local}").splitlines()[1:] == run("show", local).splitlines()[1:]


def test_a_running_query_can_be_looked_at_and_its_marks_are_not_changed_unseen(local):
    store = FileMarks(local)
    assert store.owner() == "q"
    run("show", local)
    store.write(batch(2, 12), keep=9)
    run("import", local, "--pair", "7:1=3", "--replace")
    with pytest.raises(MarksFenced):
        store.write(batch(3, 13), keep=9)


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


def test_one_pair_is_changed_and_forgotten(local):
    held = HighwaterMarks.from_columns([7, 8], [1, 0], [9, 5], [0, 2])
    replacing = {"replaced": (LogRange("orders", 0, 0, 5),), "counts": RowCounts(11, 9, 1, 1, 0, 4)}
    last = BatchMarks("q", 2, (LogRange("orders", 0, 0, 11),), {MarksKey("orders"): held}, **replacing)
    FileMarks(local).write(last, keep=9)

    def offsets():
        found = json.loads(run("show", local, "--json"))["last"]["marks"]
        return {mark["pid"]: mark["offset"] for mark in found}

    assert offsets() == {7: 9, 8: 5}
    change = ("import", local, "--pair", "8:0=4")
    assert "change them with --replace (--dry-run shows)" in run(*change, code=1)
    told = run(*change, "--replace", "--dry-run")
    assert told == "  orders pid 8 partition 0: 5 -> 4\ndry run: nothing was written\n"
    assert offsets() == {7: 9, 8: 5}
    assert "batch 2 of query q has these marks now" in run(*change, "--replace")
    assert offsets() == {7: 9, 8: 4}
    changed = FileMarks(local).read("q", 2)
    assert replace(changed, marks=last.marks) == last, "the batch is still done, with what it replaced and counted"
    assert changed.marks[MarksKey("orders")].get(8, 0).destination_partition is None, "it goes on wherever it is met"
    assert "pid 8 partition 0: 4 -> none" in run("import", local, "--pair", "8:0=-1", "--replace")
    assert offsets() == {7: 9}
    assert "say --topic: it is one of orders" in run(*change, "--topic", "other", "--replace", code=1)
    assert "has no mark of pid 8 partition 0" in run("import", local, "--pair", "8:0=-1", "--replace", code=1)
    for wrong in (
        ("--pair", "8"),
        ("--pair", f"8:{2**31}=1"),
        ("--pair", "8:0"),
        (),
        ("--empty", "--pair", "8:0=1"),
        ("--empty", "--topic", "orders"),
    ):
        run("import", local, *wrong, code=2)


def test_one_pair_into_an_empty_store_is_adopted(tmp_path):
    made = ("import", tmp_path / "fresh", "--pair", "-7:1=16")
    assert "--topic" in run(*made, code=1)
    assert json.loads(run(*made, "--topic", "orders", "--json"))["adopt"] == "imported:0"
    store = FileMarks(tmp_path / "fresh")
    assert store.read("imported", 0).marks[MarksKey("orders")].get(-7, 1).offset == 16
    assert "nothing to make empty" in run("import", tmp_path / "other", "--empty", code=1)


def test_marks_are_made_empty_or_replaced_by_an_export(local, tmp_path):
    run("export", local, tmp_path / "before")
    assert "orders pid 7 partition 1: 9 -> none" in run("import", local, "--empty", "--replace")
    assert FileMarks(local).read("q", 1) == replace(batch(1, 9), marks={})
    told = json.loads(run("import", local, tmp_path / "before", "--replace", "--json"))
    assert (told["before"], told["marks"]) == (0, 1)
    assert FileMarks(local).read("q", 1) == batch(1, 9)


def test_an_export_goes_into_a_database_too(local, tmp_path):
    run("export", local, tmp_path / "out")
    url = f"sqlite:{tmp_path / 'new.db'}"
    run("import", url, tmp_path / "out", "--table", "orders")
    assert SqlTable(url, "orders").read("q", 1) == replace(batch(1, 9), first=2)
    told = run("import", url, "--table", "orders", "--empty", "--replace", code=1)
    assert "a database commits marks with their rows" in told


def test_what_a_batch_kept_and_dropped_is_shown_and_unknown_is_not_0(local):
    counted = replace(batch(2, 12), counts=RowCounts(21_312, 10, 21_300, 2, 0, None))
    FileMarks(local).write(counted, keep=9)
    lines = run("show", local).splitlines()
    assert lines[1].split() == ["batch", "rows", "kept", "dropped", "gaps", "without", "metadata", "late"]
    assert lines[3].split() == ["1", *["unknown"] * 6]
    assert lines[4].split() == ["2", "21,312", "10", "21,300", "unknown", "2", "0"]
    told = json.loads(run("show", local, "--json"))["counts"]
    assert [(one["batch"], one["dropped"]) for one in told] == [(0, None), (1, None), (2, 21_300)]
    assert "batch 0 read orders-0 [0, 5)" in run("show", local, "--batch", 0)


@pytest.mark.parametrize("offset", [9, 7, 12])
def test_a_pair_that_is_set_keeps_what_its_window_has_seen_and_all_below_another_mark_is_seen(local, tmp_path, offset):
    seen = ReplayFilter(window=4)
    for n in (5, 6, 9):
        assert seen.admit(StreamMetadata(8, 0, n).pack(), 3)
    held = seen.marks(now_ms=77)
    store = FileMarks(local)
    store.write(BatchMarks("q", 2, marks={MarksKey("orders"): held}), keep=9)
    run("import", local, "--pair", f"8:0={offset}", "--replace")
    store = FileMarks(local)
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
    store = FileMarks(local)
    store.write(BatchMarks("q", 2, marks=marks_), keep=9)
    run("import", local, "--pair", "8:0=9", "--replace")
    store = FileMarks(local)
    found = store.read("q", 2).marks
    seen = HighwaterMarks.from_columns([8], [0], [10], [1])
    assert carried(found, "orders", {1: Epoch(5, 5)}, seen).get(8, 0).offset == 9
    assert carried(found, "orders", {0: Epoch()}, seen).get(8, 0).offset == 9
    run("import", local, "--pair", "8:0=-1", "--replace")
    shown = json.loads(run("show", local, "--json"))["last"]["marks"]
    assert {mark["pid"] for mark in shown} == {7, 9}


@pytest.mark.parametrize(("name", "again"), [("orders", "Orders"), ('"my" orders', '"My" orders')])
def test_a_table_of_sqlite_is_found_by_its_name_in_any_case_and_with_quotes(tmp_path, name, again):
    """Else a fresh checkpoint would fill a table that belongs to another query."""
    first, second = (SqlTable(f"sqlite:{tmp_path / 'shop.db'}", one) for one in (name, again))
    adopted = replace(batch(0, 4), first=1)
    first.write(adopted, keep=9)
    assert (first.owner(), second.owner(), second.read("q", 0)) == ("q", "q", adopted)


def sqe_json(held, *, signed=False):
    """As SQE writes it; each held is (pid, partition): (offset, seconds or None)."""
    told = {
        f"{pid if signed else pid % 2**64:x}-{partition:x}": {"watermark": offset, "timestamp": seconds}
        for (pid, partition), (offset, seconds) in held.items()
    }
    return json.dumps({"highWatermarks": told}).encode()


SQE_MARKS = st.dictionaries(
    st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, PARTITION_MAX)),
    st.tuples(st.integers(0, OFFSET_MAX), st.none() | st.integers(0, 2**40)),
    max_size=9,
)


@given(SQE_MARKS, st.booleans())
def test_sqe_s_json_is_the_marks_that_it_says(held, signed):
    read = {pair: (mark.offset, mark.advanced_ms) for pair, mark in sqe_marks(sqe_json(held, signed=signed)).items()}
    assert read == {
        pair: (offset, None if seconds is None else seconds * 1000) for pair, (offset, seconds) in held.items()
    }


NAMES = st.sampled_from(["highWatermarks", "watermark", "timestamp", "1-1", "-a-b"])
LEAVES = st.none() | st.booleans() | st.floats() | st.integers() | st.text()
JSON = st.recursive(LEAVES, lambda one: st.lists(one, max_size=3) | st.dictionaries(NAMES, one))


@given(st.binary(max_size=60) | JSON.map(lambda told: json.dumps(told).encode()))
def test_whatever_else_stands_there_is_refused_by_name_or_is_marks(data):
    try:
        found = sqe_marks(data)
    except MarksStoreDamaged:
        return
    assert found == HighwaterMarks.from_bytes(found.to_bytes())


@pytest.mark.parametrize(
    ("held", "named"),
    [
        (b"{}", "no object highWatermarks"),
        (b'{"highWatermarks": {"7-1": {"watermark": -1}}}', "'7-1'"),
        (b'{"highWatermarks": {"7-1": {"watermark": true}}}', "'7-1'"),
        (b'{"highWatermarks": {"7-1": {"watermark": 1.5}}}', "'7-1'"),
        (b'{"highWatermarks": {"7-1": {"watermark": 1, "timestamp": NaN}}}', "'7-1'"),
        (b'{"highWatermarks": {"7": {"watermark": 1}}}', "'7'"),
        (b'{"highWatermarks": {"7-80000000": {"watermark": 1}}}', "out of range"),
        (b'{"highWatermarks": {"-8000000000000001-1": {"watermark": 1}}}', "out of range"),
        (b'{"highWatermarks": {"a-1": {"watermark": 1}, "A-1": {"watermark": 2}}}', "stands twice"),
        (b'{"highWatermarks": {"a-1": {"watermark": 1}, "a-1": {"watermark": 2}}}', "stands twice"),
        (b"[" * 100_000, "no JSON"),
    ],
)
def test_marks_of_sqe_that_can_t_be_right_are_refused_by_name(held, named):
    with pytest.raises(MarksStoreDamaged, match=named):
        sqe_marks(held)


def test_sqe_s_marks_are_imported_and_adopted(tmp_path):
    """The contract's vector: its 64 bits stand in the file without a sign."""
    pid = sqe_producer_id("test-topo", "test-stream", "brokerspath")
    file = tmp_path / "sqe.json"
    file.write_bytes(b'{"highWatermarks": {"9a36bd1b1d3817ff-1": {"watermark": 41, "timestamp": 1700000000}}}')
    assert "say --topic" in run("import", tmp_path / "new", file, code=2)
    told = run("import", tmp_path / "new", file, "--topic", "orders")
    assert f"orders pid {pid} partition 1: none -> 41" in told
    assert "--adopt imported:0" in told
    held = FileMarks(tmp_path / "new").read("imported", 0)
    assert held.marks[MarksKey("orders")].get(pid, 1).advanced_ms == 1_700_000_000_000
    file.write_bytes(b'{"highWatermarks": []}')
    assert "no object highWatermarks" in run("import", tmp_path / "other", file, "--topic", "orders", code=1)
    assert not (tmp_path / "other").exists()


def test_a_checkpoint_that_is_none_is_refused(tmp_path):
    assert "--batch belongs to" in run("import", tmp_path / "new", "--empty", "--batch", 1, code=2)
    assert "give one of" in run("import", tmp_path / "new", "--empty", "--from-checkpoint", tmp_path, code=2)
