"""`pushrep outbox` and `pushrep ship` as an operator types them: what they print in both forms, and how they end."""

import json
import re
import signal
import sys
import threading

import pytest

from pushrep import LogConfig, Outbox, OutboxConfig
from pushrep.cli import main as cli_main
from pushrep.cli import outbox as command
from pushrep.env import REAL_FILESYSTEM
from pushrep.kafka import recovery, sink
from pushrep.kafka.progress import read_progress
from pushrep.outbox import StandbyCancelled, rebase
from pushrep.outbox.identity import read_identity
from tests.unit.gated_disk import until
from tests.unit.simulated_brokers import SimulatedBrokers

WAIT_S = 60
CONFIG = OutboxConfig(log_config=LogConfig(preallocate_bytes=0, flush_ms=10))


@pytest.fixture
def run(capsys):
    """Run `pushrep ...` in this process: (exit code, standard output, standard error)."""

    def pushrep(*arguments):
        capsys.readouterr()
        code = cli_main.run([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return pushrep


@pytest.fixture
def directory(tmp_path):
    """An outbox that nobody has open: two partitions of ten records, a second apart; the fourth of each is larger."""
    with Outbox.open(tmp_path / "outbox", "orders", 2, "shop", config=CONFIG) as outbox:
        for partition in range(2):
            values = [b"%d" % n if n != 3 else bytes(500) for n in range(10)]
            outbox.append_many(partition, values, timestamps_ms=[1_000 * n for n in range(10)])
    return tmp_path / "outbox"


@pytest.fixture
def brokers(monkeypatch):
    with SimulatedBrokers(partitions=2) as made:
        for module in (sink, recovery, rebase):
            monkeypatch.setattr(module, "look_at_topic", made.facts)
        yield made


def skipped(directory):
    return [(*one[:2], one.end) for one in read_progress(REAL_FILESYSTEM, directory)["orders"].skipped]


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        (["4"], [(0, 4, None)]),
        (["4", "--partition", "1"], [(1, 4, None)]),
        (["2-4", "--partition", "1"], [(1, 2, 5)]),
        (["--before", "1970-01-01T00:00:02"], [(0, 0, 2), (1, 0, 2)]),
        (["--after", "1970-01-01T00:00:08Z"], [(0, 9, None), (1, 9, None)]),
        (["--larger-than", "400", "--partition", "0"], [(0, 3, None)]),
        (["--after", "1970-01-01T00:00:01", "--before", "1970-01-01T00:00:03"], [(0, 2, None), (1, 2, None)]),
    ],
    ids=str,
)
def test_what_is_not_to_be_shipped_is_said_and_kept(run, directory, words, gone):
    skip = ("outbox", "skip", *words, "--directory", directory, "--reason", "bad", "--json")
    code, said, _ = run(*skip)
    told = json.loads(said)
    assert (code, told["reason"]) == (0, "bad")
    assert [(one["partition"], one["offset"], one["end"]) for one in told["skipped"]] == skipped(directory) == gone
    assert json.loads(run(*skip)[1])["skipped"] == [], "repeated, it changes nothing"
    assert skipped(directory) == gone


def test_what_was_given_up_is_told_in_words(run, directory):
    where = ("--directory", directory, "--reason", "bad")
    assert run("outbox", "skip", "4", *where)[1] == "offset 4 of partition 0 will not be shipped: bad\n"
    assert run("outbox", "skip", "6-8", *where)[1] == "offset 6 to 8 of partition 0 will not be shipped: bad\n"
    assert run("outbox", "skip", "4", *where)[:2] == (
        0, "nothing is given up: no such records are left, or they are already\n",
    )  # fmt: skip
    code, said, _ = run("outbox", "skip", "all", "--directory", directory, "--topic", "orders")
    assert (code, said) == (0, "nothing is shipped to topic orders any more, and no records are kept for it\n")
    assert read_progress(REAL_FILESYSTEM, directory) == {}


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ([], 2, "name records: OFFSET, FIRST-LAST, --before, --after or --larger-than"),
        (["all"], 2, "name the topic: skip all --topic TOPIC"),
        (["x"], 2, "'x' is neither an offset, nor FIRST-LAST, nor all"),
        (["5-4"], 2, "'5-4' is neither"),
        (["5-"], 2, "'5-' is neither"),
        (["5-x"], 2, "'5-x' is neither"),
        (["--before", "soon"], 2, "--before"),
        (["--after", "soon"], 2, "--after"),
        (["4", "--partition", "2"], 1, "partition: 2 is not one of the 2"),
        (["10"], 1, "10 is not among those that are still to be shipped, from 0 to 9 of partition 0"),
    ],
    ids=str,
)
def test_what_names_no_record_is_refused_and_changes_nothing(run, directory, words, code, told):
    got, said, error = run("outbox", "skip", *words, "--directory", directory, "--reason", "bad")
    assert (got, said) == (code, "")
    assert told in error
    assert read_progress(REAL_FILESYSTEM, directory) == {}


def test_a_reason_is_needed(run, directory):
    code, _, error = run("outbox", "skip", "4", "--directory", directory)
    assert (code, "reason" in error) == (1, True)


def test_ship_tells_what_it_shipped_and_leaves_the_rest_after_its_time(run, brokers, directory):
    ship = ("ship", directory, "--bootstrap-servers", brokers.servers)
    brokers.topic[1].leader = None
    code, _, error = run(*ship, "--timeout", "0.5")
    assert code == 1
    assert re.search(r"\d+ records were not acknowledged by the topic within 0\.5 s", error), error
    brokers.topic[1].leader = 1
    code, said, _ = run(*ship, "--json")
    told = json.loads(said)
    assert (code, told.pop("seconds") > 0) == (0, True)
    assert told.pop("shipped") in {10, 20}, "what was left"
    assert told == {"topic": "orders", "log_end_offsets": [10, 10]}
    code, said, _ = run(*ship, "--timeout", "60")
    assert code == 0
    assert said.startswith("0 records shipped to orders in 0.")
    assert [len(one.records()) for one in brokers.topic] == [10, 10]


def test_ship_goes_through_the_slots_of_workers(run, brokers, tmp_path):
    for _ in range(2):
        with Outbox.open_slot(tmp_path / "slots", "orders", 1, "shop", config=CONFIG) as outbox:
            outbox.append(0, b"left")
    ship = ("ship", tmp_path / "slots", "--bootstrap-servers", brokers.servers, "--topic", "orders")
    code, said, _ = run(*ship, "--json")
    assert (code, json.loads(said)["slot"], json.loads(said)["shipped"]) == (0, "slot-0", 2)
    assert run(*ship)[1].startswith("slot-0: 0 records shipped to orders in ")


def test_parked_records_are_listed_and_sent_again_or_done(run, brokers, directory):
    for one in brokers.topic:
        one.refuses = lambda record: "it is bad" if len(record.value) == 500 else None
    code, _, error = run("ship", directory, "--bootstrap-servers", brokers.servers, "--on-refused", "park")
    assert (code, "topic orders refused offset 3 of partition" in error) == (1, True), error
    listed = json.loads(run("outbox", "parked", "list", "--directory", directory, "--json")[1])["parked"]
    assert sorted((one["number"], one["partition"], one["offset"]) for one in listed) in (
        [(0, 0, 3), (1, 1, 3)], [(0, 1, 3), (1, 0, 3)],
    )  # fmt: skip
    head, *rows = run("outbox", "parked", "list", "--directory", directory)[1].splitlines()
    assert head.split() == ["offset", "topic", "partition", "its", "offset", "parked", "error"]
    assert [row.split()[:4] for row in rows] == [
        [str(one["number"]), "orders", str(one["partition"]), "3"] for one in listed
    ]
    assert all("it is bad" in row for row in rows)
    code, said, _ = run("outbox", "parked", "resend", "0", "--directory", directory)
    assert (code, said) == (0, f"appended to partition {listed[0]['partition']} at offset 10\n")
    assert run("outbox", "parked", "done", "1", "--directory", directory)[:2] == (0, "1 parked records are done\n")
    assert json.loads(run("outbox", "parked", "done", "1", "--directory", directory, "--json")[1]) == {"done": [1]}
    assert run("outbox", "parked", "list", "--directory", directory)[1] == "no record is parked\n"
    for one in brokers.topic:
        one.refuses = lambda _record: None
    assert run("ship", directory, "--bootstrap-servers", brokers.servers)[0] == 0
    assert sum(len(one.records()) for one in brokers.topic) == 19
    assert run("outbox", "parked", "resend", "7", "--directory", directory)[0] == 1


def test_rebase_says_what_it_would_do_and_does_it(run, brokers, directory):
    """Another instance wrote in the place of two records."""
    identity = read_identity(REAL_FILESYSTEM, directory)
    from filtering import StreamMetadata

    for offset in (4, 5):
        brokers.topic[0].write(b"another", keys=[StreamMetadata(identity.pid, 0, offset).pack()])
    command = ("outbox", "rebase", directory, "--bootstrap-servers", brokers.servers)
    code, said, _ = run(*command, "--dry-run")
    *again, total = said.splitlines()
    assert code == 0
    assert all(
        re.match(r"partition [01]: \d+ records \[.*\) would be appended again as \[10, \d+\)", one) for one in again
    )
    assert total == "20 records in all, under a new PID; readers of the log would see them twice"
    planned = json.loads(run(*command, "--dry-run", "--json")[1])
    assert (planned["topic"], planned["dry_run"], planned["lost"]) == ("orders", True, {})
    assert {int(n): one["again"] for n, one in planned["partitions"].items()} == {0: [[0, 10]], 1: [[0, 10]]}
    assert read_identity(REAL_FILESYSTEM, directory) == identity, "a dry run changes nothing"
    code, said, _ = run(*command)
    assert (code, said.splitlines()[-1]) == (
        0, f"{planned['records']} records were appended again; a new PID begins with the next start",
    )  # fmt: skip
    assert read_identity(REAL_FILESYSTEM, directory).pid != identity.pid
    assert run("ship", directory, "--bootstrap-servers", brokers.servers)[0] == 0


def test_repartition_tells_the_new_pid(run, brokers, directory):
    assert run("ship", directory, "--bootstrap-servers", brokers.servers)[0] == 0
    old = read_identity(REAL_FILESYSTEM, directory)
    code, said, _ = run("outbox", "repartition", directory, "--json")
    new = read_identity(REAL_FILESYSTEM, directory)
    assert (code, json.loads(said)) == (0, {"pid": new.pid, "pid_epoch": new.pid_epoch})
    assert new.pid != old.pid
    code, said, _ = run("outbox", "repartition", directory, "--topic", "orders")
    new = read_identity(REAL_FILESYSTEM, directory)
    wanted = f"the next start uses PID {new.pid}, epoch {new.pid_epoch}, and all partitions of the topic\n"
    assert (code, said) == (0, wanted)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["hold"], 2, "give one of --for DURATION, --end and --show"),
        (["hold", "--end", "--show"], 2, "give one of"),
        (["hold", "--for", "1h", "--end", "--reason", "x"], 2, "give one of"),
        (["hold", "--for", "1h"], 2, "give --reason TEXT"),
        (["hold", "--for", "1h", "--reason", " "], 2, "give --reason TEXT"),
        (["hold", "--show"], 1, "holds no outbox that has a leader"),
        (["transfer"], 1, "holds no outbox that has a leader"),
        (["transfer", "--to", "256"], 2, "--to"),
    ],
    ids=str,
)
def test_who_holds_or_transfers_nothing_is_told(run, directory, words, code, told):
    name, *more = words
    got, said, error = run("outbox", name, directory, *more)
    assert (got, said) == (code, "")
    assert told in " ".join(error.split())


# -- pushrep outbox run ------------------------------------------------------------------------------------------------


@pytest.fixture
def led(tmp_path, monkeypatch, run):
    """Run COMMAND while this process leads: first an outbox without members, then nobody's turn comes."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    turns, states = [1], []

    def stand_by(directory, topic, _partitions, producer, *, on_state, cancel, **_settings):
        if not turns:
            raise StandbyCancelled(str(directory))
        turns.pop()
        states.append((on_state, cancel))
        return Outbox.open(directory, topic, 2, producer, config=CONFIG)

    monkeypatch.setattr(Outbox, "stand_by", stand_by)

    def lead(program, *options):
        turns[:] = [1]
        words = ("outbox", "run", tmp_path / "data", "orders", *options, "--", sys.executable, "-u", "-c", program)
        try:
            code, _, error = run(*words)
        except SystemExit as ended:
            code, error = ended.code, ""
        return code, error

    lead.states = states
    return lead


def values(tmp_path):
    with Outbox.open(tmp_path / "data", "orders", 2, "pushrep-run", config=CONFIG) as outbox:
        return [[record.value for record in outbox.log(n).records(0)] for n in range(2)]


ECHO = """
import os, sys
sys.stderr = open(sys.argv[1] if len(sys.argv) > 1 else os.devnull, "a")
begin = int(os.environ["PUSHREP_LINE"]) + 1
for line in range(begin, begin + 3):
    print("line", line)
answers = [input() for _ in range(3)]
open("ANSWERS", "a").write("".join(f"{one}\\n" for one in answers))
sys.exit(7)
"""


def test_each_line_is_appended_and_answered_and_the_command_s_exit_code_is_ours(led, tmp_path):
    told = tmp_path / "answers"
    program = ECHO.replace("ANSWERS", str(told))
    assert led(program)[0] == 7
    assert told.read_text().splitlines() == ["1 1 0", "2 0 0", "3 1 1"]
    assert led(program)[0] == 7, "the next run goes on with the next line"
    assert told.read_text().splitlines()[3:] == ["4 0 1", "5 1 2", "6 0 2"]
    assert values(tmp_path) == [[b"line 2", b"line 4", b"line 6"], [b"line 1", b"line 3", b"line 5"]]


def test_a_command_that_reads_nothing_and_prints_nothing_is_no_trouble(led, tmp_path):
    assert led("import sys; sys.stdin.close(); [print(n) for n in range(100)]")[0] == 0
    assert sum(map(len, values(tmp_path))) == 100
    assert led("import os; assert os.environ['PUSHREP_EPOCH'] == '-1'")[0] == 0


def test_a_line_that_is_too_long_ends_the_command_and_is_named(led, tmp_path):
    code, error = led("import time; print('short'); print('x' * 3_000_000); time.sleep(600)")
    assert (code, "line 2: is longer than" in error) == (1, True), error
    assert values(tmp_path) == [[], [b"short"]]


@pytest.mark.parametrize("how", ["stop", "deposed"])
def test_a_command_is_ended_when_this_process_is_to_end_or_another_one_leads(led, tmp_path, monkeypatch, how):
    monkeypatch.setattr(command, "_END_S", 0.2)
    ready = tmp_path / "ready"
    program = f"""
import signal, time
signal.signal(signal.SIGTERM, lambda *_: None)
print("one")
open({str(ready)!r}, "w").close()
while True:
    time.sleep(600)
"""

    def end():
        until(ready.exists, "the command runs")
        on_state, cancel = led.states[-1]
        if how == "stop":
            cancel.set()
        else:
            on_state(command.StandbyState.DEPOSED, "another leads")

    ending = threading.Thread(target=end)
    ending.start()
    assert led(program) == (0, ""), "one that takes no SIGTERM is killed"
    ending.join()
    assert values(tmp_path) == [[], [b"one"]]
