"""Consumer groups under kill -9 at each step from pending to consumed: applied once, never lost, never twice."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from filtering import StreamMetadata
from filtering.consumers.commits import decode
from filtering.consumers.confluent_client import ask_partitions
from pushrep.startpoints import Applied, Consumed, Startpoint, StartpointStore, Written
from tests.kafka.group_startpoint_program import STEPS
from tests.kafka.plain_client import create_topic, plain_producer

pytestmark = [pytest.mark.java, pytest.mark.slow]

WAIT_S = 120
_names = (f"group-kills-{number}" for number in itertools.count())


@pytest.fixture
def member(broker, tmp_path):
    """Start one; at the end none is left."""
    started = []

    def start(client, topic, end, step="none"):
        program = Path(__file__).with_name("group_startpoint_program.py")
        out = tmp_path / f"{topic}-{len(started)}"
        words = (client, broker.bootstrap_servers, topic, tmp_path / topic, out, end, step)
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        process = subprocess.Popen([sys.executable, str(program), *map(str, words)], env=environment)
        process.seen = lambda: [int(line) for line in out.read_text().splitlines()] if out.exists() else []
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(WAIT_S)


def fill(broker, topic, start, end):
    producer = plain_producer(broker.bootstrap_servers, enable_idempotence=True)
    for offset in range(start, end):
        producer.produce(topic, key=StreamMetadata(7, 0, offset).pack(), value=b"v", partition=0)
    assert producer.flush(WAIT_S) == 0


def until(happened, process):
    deadline_s = time.monotonic() + WAIT_S
    while process.poll() is None and not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def committed(broker, topic):
    from confluent_kafka import Consumer, TopicPartition

    client = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": topic, "log_level": 0})
    try:
        [found] = ask_partitions(lambda left_s: client.committed([TopicPartition(topic, 0)], left_s))
    finally:
        client.close()
    return found.offset, decode(found.metadata).startpoint


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("client", ["confluent", "aiokafka"])
def test_rules_2_and_3_a_member_killed_at_each_step_applies_once(broker, member, tmp_path, torture, client):
    """The startpoint is "latest": a second resolution would find another end, because the log grows after each step."""
    lives = list(itertools.product(("live", "start"), STEPS))
    for moment, step in lives if torture.is_long else [torture.random(client).choice(lives)]:
        create_topic(broker.bootstrap_servers, topic := next(_names))
        fill(broker, topic, 0, 40)
        store = StartpointStore.open(tmp_path / topic)
        if moment == "start":
            first = member(client, topic, 40)
            assert first.wait(WAIT_S) == 0
            sequence = store.write(topic, topic, 0, Startpoint.latest(), "only what is new")
        killed = member(client, topic, 10**9, step)
        if moment == "live":
            until(lambda: committed(broker, topic)[0] == 40, killed)
            sequence = store.write(topic, topic, 0, Startpoint.latest(), "only what is new")
        until(lambda: any(isinstance(fact, Applied) for fact in store.history()), killed)  # noqa: B023
        fill(broker, topic, 40, 45)
        assert killed.wait(WAIT_S) == -signal.SIGKILL, f"{step}: it ended by itself"
        told = f"{client} {moment} {step} seed {torture.seed}"
        before = [fact.offset for fact in store.history() if isinstance(fact, Applied)]
        assert before == ([] if step == "pending" else [40]), told
        offset, carried = committed(broker, topic)
        assert (carried == sequence) == (step in {"committed", "consumed"}), told
        later = member(client, topic, 50)
        until(lambda: any(isinstance(fact, Applied) for fact in store.history()), later)  # noqa: B023
        fill(broker, topic, 45, 50)
        assert later.wait(WAIT_S) == 0, told
        [applied] = [fact for fact in store.history() if isinstance(fact, Applied)]
        begins = offset if carried == sequence else applied.offset
        assert applied.offset == (before[0] if before else applied.end), told
        assert later.seen() == list(range(begins, 50)), told
        assert [type(fact) for fact in store.history()] == [Written, Applied, Consumed], told
        assert committed(broker, topic) == (50, sequence), told
        if torture.is_long:
            again = member(client, topic, 50)
            assert again.wait(WAIT_S) == 0, told
            assert again.seen() == [], told
