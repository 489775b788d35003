"""`pushrep startpoint ...` as a user types it: its output, its JSON, its refusals and exit codes."""

import json
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from click.testing import CliRunner

from pushrep.cli import main as cli_main
from pushrep.cli.common import parse_duration_s
from pushrep.cli.startpoint import startpoint as command
from pushrep.cli.startpoint_options import parse_place, place_text
from pushrep.log import SegmentLog
from pushrep.replay import ReplayClient
from pushrep.startpoints import Startpoint, StartpointFailed, StartpointStore
from tests.support.simulated_disk import SimulatedClock

T0 = int(datetime(2013, 7, 4, 12, tzinfo=UTC).timestamp() * 1000)
RECORDS = 60


@pytest.fixture
def out(tmp_path):
    """Two partitions, a record a minute from noon to one o'clock."""
    for n in range(2):
        with SegmentLog.open(tmp_path / "out" / f"orders-{n}") as log:
            log.append([b"x"] * RECORDS, timestamps_ms=[T0 + 60_000 * k for k in range(RECORDS)])
    return tmp_path / "out"


@pytest.fixture
def store(out):
    return StartpointStore.open(out / "startpoints")


@pytest.fixture
def run(capsys):
    """Run `pushrep startpoint ...`; (exit code, standard output, standard error)."""

    def command(*arguments):
        code = cli_main.run(["startpoint", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def read_all(out):
    """Let the consumer billing read and commit everything."""
    with ReplayClient(out).subscribe("orders", consumer="billing") as consumer:
        while consumer.poll():
            consumer.commit()


def set_(run, out, *words, topic="orders", consumer="billing"):
    return run("set", out, topic, "--consumer", consumer, "--reason", "go", "--author", "ann", *words)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("earliest", Startpoint.earliest()),
        ("LATEST", Startpoint.latest()),
        ("bootstrap", Startpoint.bootstrap()),
        ("0", Startpoint.specific(0)),
        ("1234", Startpoint.specific(1234)),
        ("2013-07-04T12:00", Startpoint.timestamp(T0)),
        ("2013-07-04T14:00+02:00", Startpoint.timestamp(T0)),
        (f"@{T0}", Startpoint.timestamp(T0)),
        ("-90s", Startpoint.relative(ms=-90_000)),
        ("-2d", Startpoint.relative(ms=-2 * 86_400_000)),
        ("-1000", Startpoint.relative(records=-1000)),
        ("+1", Startpoint.relative(records=1)),
    ],
)
def test_places_are_read(text, meant):
    assert parse_place(text) == meant
    assert place_text(meant)


@pytest.mark.parametrize("text", ["", "noon", "-1y", "1h", "-0", "--1", "2013-13-01", str(1 << 63), "@x", "-0s"])
def test_what_is_no_place_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 - the words are shown by the command's own test
        parse_place(text)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("12h", 43_200), ("2d", 172_800)])
def test_durations_are_read(text, seconds):
    assert parse_duration_s(text) == seconds


def test_a_dry_run_shows_and_writes_nothing(run, out):
    read_all(out)
    code, said, _ = run(
        "set", out, "orders", "--consumer", "billing", "--to", "2013-07-04T12:50", "--dry-run", "--json"
    )
    assert code == 0
    first, second, last = lines(said)
    assert (first["partition"], first["checkpoint"], first["offset"], first["read_again"]) == (0, 60, 50, 10)
    assert (second["log_start"], second["log_end"], second["passed_by"]) == (0, 60, 0)
    assert last == {"sequence": None, "dry_run": True}
    code, said, _ = set_(run, out, "--to", "+5", "--dry-run")
    assert (code, "FAILS" in said, "offset 65 is beyond the end" in said) == (0, True, True)
    assert run("history", out)[1] == ""


@pytest.mark.parametrize(
    ("place", "again", "passed", "told"),
    [
        ("latest", 0, None, "all 120 records"),
        ("earliest", None, 0, "check the name"),
        ("15", None, None, "30 of 120 records"),
    ],
)
def test_of_a_consumer_without_a_checkpoint_unknown_is_said_as_unknown(run, out, place, again, passed, told):
    """A typing error in its name is enough; "skipped 0" would be a lie."""
    wanted = ("set", out, "orders", "--consumer", "biling", "--to", place, "--dry-run")
    code, said, _ = run(*wanted)
    assert code == 0
    (unknown,) = [line for line in said.splitlines() if line.startswith("no checkpoint of biling is known here: ")]
    assert told in unknown
    cells = [line.replace("│", " ").split()[-2:] for line in said.splitlines() if "[0, 60)" in line]
    assert cells == [["unknown" if one is None else str(one) for one in (again, passed)]] * 2
    first, *_ = lines(run(*wanted, "--json")[1])
    assert (first["read_again"], first["passed_by"]) == (again, passed)


def test_rule_9_what_would_be_dropped_is_told_before_anything_is_written(run, out, monkeypatch):
    def refuse(*_words, **_named):
        raise StartpointFailed("nobody", 1, "the disk is full")

    read_all(out)
    monkeypatch.setattr(StartpointStore, "write", refuse)
    code, said, errors = set_(run, out, "--to", "2013-07-04T12:50")
    assert (code, "the disk is full" in errors) == (1, True)
    assert "would be dropped: orders-1 [50, 60)" in said


def test_rule_9_where_no_log_tells_how_far_a_consumer_is_that_is_told(run, out):
    """A group of Kafka keeps its positions there."""
    code, said, _ = set_(run, out, "--to", "-1h", "--unchecked", topic="payments")
    assert (code, "no log here to find the position of billing at payments" in said) == (0, True)
    code, said, _ = set_(run, out, "--to", "-1h", "--unchecked", "--reset-marks", topic="payments")
    assert (code, "no log here" in said) == (0, False)


def test_set_tells_what_a_filter_would_drop_and_writes(run, out, store):
    read_all(out)
    code, said, _ = set_(run, out, "--to", "2013-07-04T12:50", "--ttl", "30m")
    assert code == 0
    assert "20 offsets would be read again" in said
    assert "would be dropped: orders-0 [50, 60)\nwould be dropped: orders-1 [50, 60)" in said
    assert "--reset-marks" in said
    assert "startpoint 1 is written: billing at orders" in said
    (written,) = store.history()
    assert (written.author, written.reason, written.ttl_s) == ("ann", "go", 1800)
    code, said, _ = set_(run, out, "--to", "2013-07-04T12:50", "--reset-marks", "--ttl", "never", topic="orders-1")
    assert (code, "--reset-marks" in said) == (0, False)
    written = store.history()[1]
    assert (written.target.partition, written.startpoint.reset_marks, written.ttl_s) == (1, True, None)


def test_set_refuses_what_would_fail_unless_told(run, out, store):
    code, _, said = set_(run, out, "--to", "61", topic="orders-1")
    assert code == 1
    assert "orders-1: offset 61 is beyond the end: the log holds [0, 60)" in said
    code, _, said = set_(run, out, "--to", "1", topic="oders-1")
    assert (code, "holds no log of oders-1" in said) == (1, True)
    assert store.history() == []
    assert set_(run, out, "--to", "61", "--out-of-range", "latest", topic="orders-1")[0] == 0
    assert set_(run, out, "--to", "61", "--unchecked", topic="orders-1")[0] == 0
    assert set_(run, out, "--to", "61", "--unchecked", topic="payments")[0] == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--to", "noon"], "--to"),
        (["--to", "1", "--ttl", "soon"], "--ttl"),
        (["--to", "1", "--every-consumer"], "--every-consumer"),
        ([], "--to"),
    ],
)
def test_wrong_usage_names_the_option(run, out, words, told):
    code, _, said = set_(run, out, *words)
    assert (code, told in said) == (2, True), said


def test_a_reason_is_asked_for(run, out):
    code, _, said = run("set", out, "orders", "--consumer", "billing", "--to", "1")
    assert (code, "--reason" in said) == (2, True)
    code, _, said = run("set", out, "orders", "--consumer", "billing", "--to", "1", "--reason", " ")
    assert (code, "reason" in said) == (1, True)


def test_a_terminal_is_asked_for_the_reason(out, store, monkeypatch):
    runner = CliRunner()
    monkeypatch.setattr("pushrep.cli.startpoint_options._is_terminal", lambda: True)
    done = runner.invoke(command, ["set", str(out), "orders", "--consumer", "billing", "--to", "1"], input="because\n")
    assert done.exit_code == 0, done.output
    assert store.history()[0].reason == "because"


def test_list_and_show_tell_who_stands_where(run, out, store):
    set_(run, out, "--to", "30")
    set_(run, out, "--to", "10", topic="orders-0")
    set_(run, out, "--to", "20", topic="orders-0")
    with ReplayClient(out).subscribe("orders", consumer="billing") as consumer:
        consumer.poll()
        consumer.commit()
        consumer.poll()
    found = {row["sequence"]: row for row in lines(run("list", out, "--all", "--json")[1])}
    assert {n: (row["state"], row["superseded_by"]) for n, row in found.items()} == {
        3: ("consumed", None),
        2: ("pending", 3),
        1: ("pending", None),
    }
    assert found[1]["readers"] == [
        {"consumer": "billing", "partition": 1, "task": None, "state": "consumed", "offset": 30, "failure": None}
    ]
    said = run("list", out)[1]
    assert "1 consumed; others pending" in said
    assert "offset 20" not in said, "it is over"
    assert "superseded by 3" in run("list", out, "--all")[1]
    code, said, _ = run("show", out, 1)
    assert code == 0
    assert "billing at orders-1: consumed, at offset 30 of [0, 60)" in said
    assert "by ann: go" in said
    code, _, said = run("show", out, 9)
    assert (code, "no startpoint 9" in said) == (1, True)
    assert lines(run("show", out, 3, "--json")[1])[0]["state"] == "consumed"
    assert run("list", out, "--topic", "payments", "--all")[1] == "no startpoints\n"
    assert "billing" not in run("list", out, "--consumer", "audit")[1]


def test_cancel(run, out):
    for _ in range(3):
        set_(run, out, "--to", "30")
    assert run("cancel", out, 1, 3, "--reason", "typo")[:2] == (0, "cancelled: 1, 3\n")
    code, _, said = run("cancel", out, 3, "--reason", "typo")
    assert (code, "cancelled already" in said) == (1, True)
    assert lines(run("cancel", out, "--all", "--reason", "over", "--json")[1]) == [{"cancelled": [2]}]
    assert run("cancel", out, "--all", "--reason", "over")[1] == "cancelled: none\n"
    assert run("cancel", out, "--reason", "what?")[0] == 2
    assert run("cancel", out, 1, "--all", "--reason", "what?")[0] == 2


def test_history_tells_all_in_order(run, out, store):
    set_(run, out, "--to", "30")
    with ReplayClient(out).subscribe("orders", consumer="billing") as consumer:
        consumer.poll()
        consumer.commit()
    set_(run, out, "--to", "61", "--unchecked", topic="orders-1")
    again = ReplayClient(out).subscribe("orders", consumer="billing")
    with again as consumer, pytest.raises(StartpointFailed, match="beyond the end"):
        consumer.poll()
    run("cancel", out, 2, "--reason", "typo", "--author", "bob")
    words = [line.split()[3] for line in run("history", out)[1].splitlines()]
    assert words == ["written", "applied", "applied", "consumed", "consumed", "written", "failed", "cancelled"]
    assert [row["event"] for row in lines(run("history", out, "--json")[1])] == words
    assert "by bob: typo" in run("history", out, "--consumer", "billing")[1]
    assert run("history", out, "--consumer", "audit")[1] == ""
    assert run("history", out, "--topic", "payments")[1] == ""


def exported(run, out, *words):
    code, said, error = run("export", out, "orders", "--consumer", "billing", *words)
    assert code == 0, error
    (options,) = lines(said)
    return {name: json.loads(text) if text.startswith("{") else text for name, text in options.items()}


def test_export_speaks_as_sparks_sources_do(run, out, store):
    assert exported(run, out) == {"startingOffsets": {"orders": {"0": -2, "1": -2}}}
    assert exported(run, out, "--default", "latest", "--partitions", 3)["startingOffsets"]["orders"]["2"] == -1
    set_(run, out, "--to", "30", topic="orders-0")
    assert exported(run, out) == {"startingOffsets": {"orders": {"0": 30, "1": -2}}}
    set_(run, out, "--to", "2013-07-04T12:50")
    assert exported(run, out) == {
        "startingOffsetsByTimestamp": {"orders": {"0": T0 + 50 * 60_000, "1": T0 + 50 * 60_000}},
        "startingOffsetsByTimestampStrategy": "error",
    }
    read_all(out)
    assert exported(run, out) == {"startingOffsets": {"orders": {"0": 60, "1": 60}}}, "the consumer's checkpoint"
    set_(run, out, "--to", "-7", topic="orders-1")
    assert exported(run, out, "--remove") == {"startingOffsets": {"orders": {"0": 60, "1": 53}}}
    assert exported(run, out) == {"startingOffsets": {"orders": {"0": 60, "1": 60}}}, "consumed by the export"


@pytest.mark.parametrize(
    ("writes", "told"),
    [
        ([("orders-0", "30"), ("orders-1", "2013-07-04T12:50")], "can't mix"),
        ([("orders-0", "-7")], "needs a checkpoint"),
        ([("orders", "2013-07-04T12:50", "earliest")], "these startpoints have --out-of-range earliest"),
        (
            [("orders-0", "2013-07-04T12:50", "error"), ("orders-1", "2013-07-04T12:50", "latest")],
            "these startpoints have --out-of-range error, latest",
        ),
    ],
)
def test_export_refuses_what_spark_can_not_say(run, out, writes, told):
    for topic, place, *policy in writes:
        set_(run, out, "--to", place, "--unchecked", *(f"--out-of-range={one}" for one in policy), topic=topic)
    code, _, said = run("export", out, "orders", "--consumer", "billing")
    assert (code, told in said) == (1, True), said


@pytest.mark.parametrize(("place", "offset"), [("earliest", -2), ("bootstrap", -2), ("latest", -1)])
def test_export_says_an_end_of_the_log_in_kafkas_numbers(run, out, place, offset):
    set_(run, out, "--to", place, topic="orders-0")
    default = "earliest" if offset == -1 else "latest"
    other = {"earliest": -2, "latest": -1}[default]
    assert exported(run, out, "--default", default)["startingOffsets"]["orders"] == {"0": offset, "1": other}


def test_export_counts_a_time_ago_from_when_it_was_set(run, out, store):
    set_(run, out, "--to", "-90s", "--unchecked", "--out-of-range", "latest")
    (state, _) = (store.read("billing", "orders", n) for n in range(2))
    at_ms = state.written.created_ms - 90_000
    assert exported(run, out) == {
        "startingOffsetsByTimestamp": {"orders": {"0": at_ms, "1": at_ms}},
        "startingOffsetsByTimestampStrategy": "latest",
    }


def test_export_refuses_one_that_failed(run, out):
    set_(run, out, "--to", "61", "--unchecked", topic="orders-1")
    with ReplayClient(out).subscribe("orders", consumer="billing") as consumer, pytest.raises(StartpointFailed):
        consumer.poll()
    code, _, said = run("export", out, "orders", "--consumer", "billing")
    assert (code, "startpoint 1 failed at orders-1: " in said, "cancel it first" in said) == (1, True, True), said


def test_history_tells_what_expired(run, out):
    set_(run, out, "--to", "7", "--ttl", "90s")
    StartpointStore.open(out / "startpoints", clock=SimulatedClock(wall_ms=4_000_000_000_000)).sweep()
    assert run("history", out)[1].splitlines()[-1].endswith(" 1 expired")


def test_export_refuses_an_unknown_topic(run, out):
    code, _, said = run("export", out, "payments", "--consumer", "billing")
    assert (code, "--partitions" in said) == (1, True)


def test_a_store_elsewhere(run, out, tmp_path):
    assert set_(run, out, "--to", "1", "--store", tmp_path / "elsewhere")[0] == 0
    assert run("history", out)[1] == ""
    assert run("history", out, "--store", tmp_path / "elsewhere")[1] != ""
    code, _, said = set_(run, out, "--to", "1", "--store", "kafka:startpoints")
    assert (code, "give the brokers, --bootstrap-servers" in said) == (2, True)
    code, _, said = set_(run, out, "--to", "1", "--bootstrap-servers", "localhost:9092")
    assert (code, "are for --store kafka:TOPIC" in said) == (2, True)


def test_as_a_process_of_its_own(out):
    def pushrep(*words):
        return subprocess.run(
            [sys.executable, "-W", "error", "-m", "pushrep.cli.main", "startpoint", *map(str, words)],
            capture_output=True,
            text=True,
            timeout=120,
        )

    done = pushrep("set", out, "orders", "--consumer", "billing", "--to", "earliest", "--reason", "go", "--json")
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout)[-1] == {"sequence": 1, "dry_run": False}
    done = pushrep("cancel", out, "7", "--reason", "typo")
    assert (done.returncode, done.stderr) == (1, "error: there is no startpoint 7: look with list\n")
