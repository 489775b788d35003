"""A real Spark driver under kill -9: at each step from pending to consumed, and at random while it is sent about."""

import json
import signal
import sys
import time
from collections import defaultdict
from itertools import groupby
from pathlib import Path

import pytest

from pushrep.log import SegmentLog
from pushrep.startpoints import Applied, Consumed, Reader, Startpoint, StartpointStore
from spark_jobs import register_sources
from tests.spark.startpoint_program import STEPS, follow
from tests.spark_programs import SparkPrograms, kill_session, said

pytestmark = [pytest.mark.spark, pytest.mark.slow]

COUNT = 30
WAIT_S = 180


@pytest.fixture
def logs(tmp_path):
    for partition in range(2):
        append(tmp_path / "logs", partition, COUNT)
    return tmp_path / "logs"


@pytest.fixture
def store(logs):
    return StartpointStore.open(logs / "startpoints")


def append(logs, partition, count):
    with SegmentLog.open(logs / f"orders-{partition}") as log:
        log.append([b"x"] * count)


@pytest.fixture
def start(tmp_path, logs):
    """Start the driver; at the end none is left."""
    quiet = ("spark.ui.enabled=false", "spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1")
    submit = " ".join(["--master local[1] --driver-memory 1g", *(f"--conf {setting}" for setting in quiet)])
    program = Path(__file__).with_name("startpoint_program.py")
    with SparkPrograms(tmp_path, submit) as programs:
        yield lambda *words: programs.start([sys.executable, program, logs, tmp_path / "state", *words])


@pytest.fixture
def goes_on(spark, logs, tmp_path):
    """Another driver reads to the end."""
    register_sources(spark)
    return lambda: follow(spark, logs, tmp_path / "state", {"availableNow": True})


def table(tmp_path):
    """The content of the batches, in order, by partition: (epoch, offset)."""
    read = defaultdict(list)
    for file in sorted((tmp_path / "state" / "table").glob("*.json"), key=lambda path: int(path.stem)):
        for partition, offset, epoch in json.loads(file.read_text()):
            read[partition].append((epoch, offset))
    return read


def run(epoch, start, end):
    return [(epoch, offset) for offset in range(start, end)]


@pytest.mark.timeout(1800)
def test_rule_2_a_driver_killed_at_each_step_applies_once_and_keeps_the_offset(
    start, goes_on, logs, store, tmp_path, torture
):
    """Partition 0 is sent ten records back, partition 1 to the latest of that moment; the log grows after each kill."""
    steps = STEPS if torture.is_long else (torture.random("steps").choice(STEPS),)
    expected = {n: run(0, 0, COUNT) for n in range(2)}
    end = COUNT
    for number, step in enumerate(steps):
        latest, back = 2 * number + 1, 2 * number + 2
        killed = start(step, back)
        if number == 0:
            until((tmp_path / "state" / "checkpoint" / "commits" / "1").exists, killed)  # two batches hold all
        assert store.write("billing", "orders", 1, Startpoint.latest(), "only what is new") == latest
        assert store.write("billing", "orders", 0, Startpoint.relative(records=-10), "ten records again") == back
        killed.communicate(timeout=WAIT_S)
        kill_session(killed)
        assert killed.returncode == -signal.SIGKILL, f"{step}: it ended by itself: {said(killed)}"
        append(logs, 0, 5)
        append(logs, 1, 5)
        goes_on()
        expected[0] += run(back, end - 10, end + 5)
        facts = [fact for fact in store.history() if isinstance(fact, Applied) and fact.sequence in (back, latest)]
        applied_at = {fact.sequence: fact for fact in facts}
        assert len(facts) == 2, f"{step}: each is applied once"
        assert applied_at[back].offset == end - 10, step
        # Killed before it was applied, it may be resolved in the second run; the latest of that moment is the new end.
        assert applied_at[latest].offset == applied_at[latest].end, step
        assert applied_at[latest].end in ({end, end + 5} if step == "pending" else {end}), f"{step}: resolved anew"
        expected[1] += run(latest, applied_at[latest].offset, end + 5)
        assert table(tmp_path) == expected, f"after a kill at {step}"
        consumed = [fact.sequence for fact in store.history() if isinstance(fact, Consumed)]
        assert consumed.count(back) == 1, step
        end += 5
    sources = json.loads((tmp_path / "state" / "progress.json").read_text())
    assert sources[0]["endOffset"]["partitions"]["0"]["epoch"] == back, "the query's progress shows it"


@pytest.mark.timeout(3600)
def test_a_stream_sent_back_and_forth_live_and_killed_at_random_reads_what_a_model_says(
    start, goes_on, logs, store, tmp_path, torture
):
    """Each run of a partition begins at its startpoint's offset and continues without gap or repeat, up to the next
    one.
    """
    if not torture.is_long:
        pytest.skip("a long form alone: every kill costs a start of Spark")
    chance, places = torture.random("live"), {}
    for _ in range(12):
        driver = start()
        for _ in range(chance.randint(1, 12)):
            partition, place = chance.randrange(2), chance.randrange(COUNT)
            if chance.random() < 0.5:
                append(logs, partition, chance.randint(1, 6))
            else:
                places[store.write("billing", "orders", partition, Startpoint.specific(place), "go")] = place
            # No synchronisation: kills and wishes are meant to meet anywhere.
            time.sleep(chance.random() * 3)
            assert driver.poll() is None, f"it ended by itself: {said(driver)}"
        kill_session(driver)
    for _ in range(2):  # the store's checkpoint follows Spark's: the second run tells it the end
        goes_on()
    ends = ends_of(logs)
    for partition, read in sorted(table(tmp_path).items()):
        runs = [(epoch, [offset for _, offset in rows]) for epoch, rows in groupby(read, key=lambda row: row[0])]
        assert [epoch for epoch, _ in runs] == sorted({epoch for epoch, _ in runs}), "an epoch never comes again"
        for epoch, offsets in runs:
            assert offsets == list(range(places.get(epoch, 0), offsets[-1] + 1)), f"seed {torture.seed}"
        newest = store.checkpoint(Reader("billing", "orders", partition))
        assert runs[-1][1][-1] + 1 == newest.offset == ends[partition]
        mine = [fact.sequence for fact in applied(store) if fact.reader.partition == partition]
        assert len(mine) == len(set(mine)), "each is applied once"
        assert {epoch for epoch, _ in runs} - {0} <= set(mine)
        assert newest.sequence == max(mine, default=0), "and the newest is not lost"


def until(happened, process):
    deadline = time.monotonic() + WAIT_S
    while not happened():
        assert process.poll() is None, f"the driver ended by itself: {said(process)}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def applied(store):
    return [fact for fact in store.history() if isinstance(fact, Applied)]


def ends_of(logs):
    ends = []
    for partition in range(2):
        with SegmentLog.open_reader(logs / f"orders-{partition}") as reader:
            ends.append(reader.log_end_offset)
    return ends
