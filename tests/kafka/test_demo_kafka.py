"""`make demo-kafka` as a user runs it, with fewer flights and one kill of each: the same programs, the same check.

Only the long form kills the apply job, too: tests/spark/test_demo.py kills one in the same way, and
tests/spark/replay/test_sql_table.py stops one that writes to PostgreSQL at each statement.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from tests.kafka.cluster import missing

pytest.importorskip("pyspark")

from confluent_kafka import KafkaException

from examples.demo.kafka.__main__ import require_tools
from examples.demo.kafka.topics import Ends, TopicsNotMade, make_topics
from examples.demo.shell import DemoUnavailable
from tests.programs import mentioning
from tests.spark_programs import QUICK_DEMO

pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
FLIGHTS = 3000
JARS = ("--kafka-jars", str(ROOT / ".cache/kafka/libs"), "--connector", str(ROOT / ".cache/spark-kafka/libs"))
# Slow enough that a busy machine finds the producer alive at its kill, fast enough to be done when Spark has started.
# By this seed jobs die early in a batch: one that is faster than the batch before it does not escape.
SHORT = ("--limit", str(FLIGHTS), "--rate", "300", "--kills", "1", "--seed", "20130103")


SPARED = """\
from dataclasses import replace
drawn = plan.KafkaPlan.draw
plan.KafkaPlan.draw = lambda *given: replace(drawn(*given), apply_kill=plan.InsideBatch(1_000_000, 0.5))
"""


def command(out, *options, kills_apply=True):
    program = f"{QUICK_DEMO}{'' if kills_apply else SPARED}"
    program += "from examples.demo.kafka.__main__ import demo_kafka; demo_kafka()"
    return [sys.executable, "-c", program, "--out", str(out), *SHORT, *JARS, *options]


@pytest.fixture
def out(tool_or_skip, tmp_path):
    tool_or_skip(missing())
    try:
        require_tools(brokers=None, database=None, kafka_jars=Path(JARS[1]), connector=Path(JARS[3]))
    except DemoUnavailable as error:
        tool_or_skip(str(error))
    return tmp_path / "demo-kafka-out"


def full_run(out, databases, *, kills_apply):
    done = subprocess.run(
        command(out, "--json", kills_apply=kills_apply), capture_output=True, text=True, env=databases
    )
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"
    told = json.loads(done.stdout)
    assert told == json.loads((out / "summary.json").read_text())
    assert (told["flights"], told["kept"]) == (FLIGHTS, FLIGHTS)
    assert (told["missing"], told["twice"], told["foreign"], told["misplaced"], told["carriers_wrong"]) == (
        0,
        0,
        0,
        0,
        [],
    )
    assert [told[f"{name}_kills"] for name in ("producer", "broker", "relay", "apply")] == [1, 1, 1, kills_apply]
    assert told["relay_dropped"] == told["first_copies"] == told["first"] - FLIGHTS
    assert told["apply_dropped"] == told["second_copies"] == told["second"] - FLIGHTS
    assert told["first_copies"] > 20, "the producer's kill must make records enter twice"
    page = (out / "report.html").read_text()
    assert "Every flight is in the table once and in order" in page
    assert 'src="http' not in page, "self-contained"
    marks = re.findall(r'class="kill"[^>]*>\d (\w+)', page)
    twice = ["producer", "relay", *["apply"] * kills_apply]
    assert sorted(marks) == sorted([*twice * 2, "broker"]), "by event time, and in the run"
    assert not (out / "scratch").exists()


def interrupted_run(out, databases):
    """Press Ctrl-C when broker and database are up; returns the output."""
    said = []
    with subprocess.Popen(
        command(out), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=databases
    ) as demo:
        try:
            for line in demo.stdout:
                # What is being printed when Ctrl-C comes may be printed twice.
                is_first = not any("have started" in before for before in said)
                said.append(line)
                if is_first and "have started" in line:
                    demo.send_signal(signal.SIGINT)
        finally:
            demo.kill()
    assert demo.returncode == 130, said
    return "".join(said)


@pytest.fixture
def place():
    """The directory of PostgreSQL's files. It is not below pytest's directory, because root runs it as another user."""
    with tempfile.TemporaryDirectory(prefix="pushrep-t-") as directory:
        yield Path(directory)


def test_flights_come_out_once_and_in_order_and_ctrl_c_leaves_nothing(out, place, torture):
    """Item "make demo-kafka": producer, broker and both Spark jobs killed, checked by SQL against the original.

    Ctrl-C is for the long form, and for the demo without Kafka.
    """
    databases = os.environ | {"TMPDIR": str(place)}
    full_run(out, databases, kills_apply=torture.is_long)
    assert mentioning(out) + mentioning(place) == [], "a program was left behind"
    if torture.is_long:
        said = interrupted_run(out, databases)
        assert "replacing what the last demo left" in said
        assert "nothing is left running" in said
        assert mentioning(out) + mentioning(place) == [], "a program was left behind"
        assert not (out / "report.html").exists(), "the old report would tell of another run"
    # Where the system has no directory for it, the package of PostgreSQL's programs keeps its lock there.
    assert {one.name for one in place.iterdir()} <= {".lockfile"}, "a database was left behind"


def test_topics_are_made_once_and_their_ends_told(broker):
    names = [f"demo-{os.getpid()}-{n}" for n in range(2)]
    make_topics(broker.bootstrap_servers, names, 3)
    ends = Ends(broker.bootstrap_servers, dict.fromkeys(names, 3))
    # A broker names a partition a moment before it leads it.
    for attempt in Retrying(
        stop=stop_after_delay(60), wait=wait_fixed(0.1), retry=retry_if_exception_type(KafkaException)
    ):
        with attempt:
            assert ends.ask() == {name: [0, 0, 0] for name in names}
    ends.close()
    with pytest.raises(TopicsNotMade, match="already exists"):
        make_topics(broker.bootstrap_servers, names[:1], 3)
