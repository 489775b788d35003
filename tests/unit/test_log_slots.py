"""Worker slots of one directory, seen as one by what only looks: commands, replays, startpoints, consumers."""

import json

import pytest

from filtering import ReplayFilter, StreamMetadata
from filtering.errors import shown_partition
from pushrep import LogConfig, Outbox, OutboxConfig, ReplayClient, ReplayRequest, SegmentLog
from pushrep.cli import main as cli_main
from pushrep.log.directory_files import (
    in_its_slot,
    log_at,
    parse_shown_name,
    parse_shown_partition,
    readable_logs,
    shown_name,
)
from pushrep.log.errors import InvalidLogName
from pushrep.replay import TO_END, ReplayRefused

WAIT_S = 60
VALUES = {
    f"slot-{slot}/orders-{n}": [b"%d of slot %d, %d" % (i, slot, n) for i in range(5)]
    for slot in (0, 7)
    for n in (0, 1)
}


@pytest.fixture
def workers(tmp_path):
    """Two slots with two partitions of five records each, one batch a file; no process has them open."""
    for name, values in VALUES.items():
        slot, _, log = name.partition("/")
        with Outbox.open(
            tmp_path / slot,
            "orders",
            2,
            "web-shop",
            config=OutboxConfig(log_config=LogConfig(segment_bytes=200, retention_ms=-1)),
        ) as outbox:
            for i, value in enumerate(values):
                outbox.append(int(log[-1]), value, timestamp_ms=1000 + i).result(WAIT_S)
    return tmp_path


@pytest.fixture
def run(capsys):
    """Run `pushrep ...`, which has to answer the code; what it printed."""

    def command(*arguments, code=0):
        assert cli_main.run([str(argument) for argument in arguments]) == code, capsys.readouterr()
        printed = capsys.readouterr()
        return printed.out if code == 0 else printed.err

    return command


def rows_of(printed):
    return [json.loads(line) for line in printed.splitlines()]


def test_each_log_has_a_number_and_a_name_of_its_own():
    names = ["orders-0", "orders-3", "slot-0/orders-0", "slot-7/orders-3", "slot-999/orders-1048575"]
    numbers = [parse_shown_name(name)[1] for name in names]
    assert [shown_name("orders", number) for number in numbers] == names
    assert [in_its_slot(number) for number in numbers] == [0, 3, 0, 3, 1048575]
    assert [parse_shown_partition(shown_partition(number)) for number in numbers] == numbers
    assert len(set(numbers)) == len(numbers)
    assert max(numbers) < 1 << 31, "Spark's column and Kafka's field have 31 bits"
    for bad in (
        "slot-1000/orders-0",
        "slot-01/orders-0",
        "slots/orders-0",
        "slot-1/orders",
        "slot-1/orders-1048576",
        "/a-0",
    ):
        with pytest.raises(InvalidLogName):
            parse_shown_name(bad)


def test_ls_describe_and_verify_take_every_log_of_every_slot_or_one_by_name(workers, run):
    for command, key in ((("ls",), "name"), (("describe",), "log"), (("verify",), "log")):
        found = [json.loads(line)[key] for line in run("log", *command, workers, "--json").splitlines()]
        assert found == list(VALUES), command
        one = run("log", *command, workers / "slot-7", "--json").splitlines()
        assert [json.loads(line)[key] for line in one] == ["orders-0", "orders-1"]
    assert json.loads(run("log", "describe", workers / "slot-7", "orders-1", "--json"))["log"] == "orders-1"
    assert all(name in run("log", "ls", workers) for name in VALUES)
    segment = min((workers / "slot-7" / "orders-1").glob("*.log"))
    segment.write_bytes(b"\xff" * segment.stat().st_size)
    assert cli_main.run(["log", "verify", str(workers)]) == 1


def test_status_says_which_slot_it_is(workers, run):
    slots = [str(workers / slot) for slot in sorted({name.partition("/")[0] for name in VALUES})]
    shown = run("status", workers)
    assert [line.partition(":")[0] for line in shown.splitlines() if "outbox of topic" in line] == slots
    assert [one["place"] for one in json.loads(run("status", workers, "--json"))["places"]] == slots


def test_purge_takes_every_slot_or_one(workers, run):
    found = [
        json.loads(line)
        for line in run("log", "purge", workers, "--before", "2030-01-01", "--dry-run", "--json").splitlines()
    ]
    assert [one["log"] for one in found] == list(VALUES)
    assert all(one["segments"] for one in found)
    run("log", "purge", workers / "slot-7", "orders-1", "--before", "3")
    starts = {one["name"]: one["log_start_offset"] for one in rows_of(run("log", "ls", workers, "--json"))}
    assert {name for name, start in starts.items() if start} == {"slot-7/orders-1"}
    run("log", "purge", workers, "--before", "2030-01-01")
    starts = [json.loads(line)["log_start_offset"] for line in run("log", "ls", workers, "--json").splitlines()]
    assert all(starts)


def test_a_directory_that_is_named_like_a_log_is_purged_as_what_it_is(workers, run):
    named = workers.rename(workers.with_name("workers-0"))
    found = run("log", "purge", named, "--before", "2030-01-01", "--dry-run", "--json").splitlines()
    assert [json.loads(line)["log"] for line in found] == list(VALUES)


def test_read_names_the_slot_of_each_record(workers, run):
    rows = rows_of(run("replay", workers, "orders"))
    held = {}
    for row in rows:
        held.setdefault(f"{row['slot']}/orders-{row['partition']}", []).append(row["value"].encode())
    assert held == VALUES
    assert run("replay", workers, "slot-7/orders-1", "--format", "raw").split("\n")[:-1] == [
        v.decode() for v in VALUES["slot-7/orders-1"]
    ]
    assert len(run("replay", workers, "orders-1", "--format", "raw").splitlines()) == 10
    assert "slot-7/1" in run("replay", workers, "orders", "--format", "table")


def test_replay_goes_through_the_slots_or_takes_one(workers, run):
    rows = rows_of(run("replay", workers, "orders-1"))
    assert [(row["slot"], row["partition"], row["value"].encode()) for row in rows] == [
        (name.partition("/")[0], 1, value) for name, values in VALUES.items() if name.endswith("-1") for value in values
    ]
    one = run("replay", workers, "slot-7/orders-1", "--from", "3", "--format", "raw").splitlines()
    assert one == [value.decode() for value in VALUES["slot-7/orders-1"][3:]]
    for options in (["--from", "3"], ["--follow"], ["--until", "3"]):
        said = run("replay", workers, "orders-1", *options, code=2)
        assert "give one of slot-0/orders-1, slot-7/orders-1" in said
    with ReplayClient(workers) as client:
        assert [one.name for one in client.recordings()] == list(VALUES)
        with client.replay(ReplayRequest("slot-7/orders-0", length=TO_END)) as replay:
            assert [record.value for record in replay] == VALUES["slot-7/orders-0"]
        with pytest.raises(ReplayRefused, match="there is no recording orders-0"):
            client.replay(ReplayRequest("orders-0"))


def keys_of(workers):
    return {
        shown_name(*log): [record.key for record in SegmentLog.open_reader(log_at(workers, *log)).records(0)]
        for log in readable_logs(workers)
    }


def test_a_filter_keeps_the_slots_apart(workers):
    keys = keys_of(workers)
    assert len({StreamMetadata.unpack(key).pid for ours in keys.values() for key in ours}) == 2, "a PID each"
    seen = ReplayFilter()
    assert all(seen.admit(key) for ours in keys.values() for key in ours), "the same offsets of another slot are new"
    assert not any(seen.admit(key) for ours in keys.values() for key in ours), "and all of them replayed are not"


def poll_all(consumer):
    found = {}
    while batches := [batch for batch in consumer.poll() if batch.records]:
        for batch in batches:
            found.setdefault(shown_name("orders", batch.partition), []).extend(record.value for record in batch.records)
    return found


def test_a_consumer_reads_all_slots_and_a_startpoint_moves_one(workers, run):
    with ReplayClient(workers).subscribe("orders", consumer="sums") as consumer:
        assert poll_all(consumer) == VALUES
        consumer.commit()
    said = run(
        "startpoint", "set", workers, "slot-7/orders-1", "--consumer", "sums", "--to", "3", "--reason", "wrong since"
    )
    assert "sums at slot-7/orders-1" in said
    assert "slot-7/orders-1" in run("startpoint", "list", workers)
    with ReplayClient(workers).subscribe("orders", consumer="sums") as consumer:
        assert poll_all(consumer) == {"slot-7/orders-1": VALUES["slot-7/orders-1"][3:]}
    run("startpoint", "set", workers, "orders", "--consumer", "others", "--to", "4", "--reason", "all of them")
    with ReplayClient(workers) as client, client.subscribe("orders", consumer="others") as consumer:
        assert poll_all(consumer) == {name: values[4:] for name, values in VALUES.items()}
    options = json.loads(run("startpoint", "export", workers, "orders", "--consumer", "others"))
    offsets = json.loads(options["startingOffsets"])["orders"]
    assert {shown_partition(int(number)) for number in offsets} == {"slot-0/0", "slot-0/1", "slot-7/0", "slot-7/1"}
