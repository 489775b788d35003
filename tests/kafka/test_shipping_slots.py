"""Workers with slots and a real broker: the others ship what a dead one left, until somebody opens its slot."""

import contextlib
import json
import os
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from pushrep.log.inspection import lock_holder
from pushrep.outbox.slots import take_back
from pushrep.status import Problem
from tests.integration.outboxes import wait_until
from tests.kafka.plain_client import consume, create_topic
from tests.programs import PUSHREP, PythonProgram

pytestmark = [pytest.mark.java, pytest.mark.slow]
WAIT_S = 120

WORKER = """
import sys
from pushrep import Outbox, OutboxConfig
from pushrep.kafka import KafkaDestination
directory, topic, servers = sys.argv[1:]
kafka = KafkaDestination(bootstrap_servers=servers)
config = OutboxConfig(open_timeout_s=0.2)
with Outbox.open_slot(directory, topic, 2, "shop", slots=4, kafka=kafka, config=config) as own:
    print(own.directory.name, flush=True)
    for line in sys.stdin:
        partition, value, ahead_ms = line.split()
        later = None if ahead_ms == "0" else int(ahead_ms)
        own.append(int(partition), value.encode(), timestamp_ms=later).result(60)
        print("on disk", flush=True)
"""


class Worker:
    """A process with a slot of its own."""

    def kill(self):
        self.process.kill()
        self.process.wait(WAIT_S)

    def __init__(self, directory, topic, servers):
        self.process = PythonProgram("-c", WORKER, directory, topic, servers, has_input=True)
        self.slot = self.process.stdout.readline().strip()

    def append(self, partition, value, timestamp_ms=0):
        self.process.stdin.write(f"{partition} {value} {timestamp_ms}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "on disk\n"


@pytest.fixture
def workers(broker, tmp_path):
    """Starts a worker; servers: of its own, to leave records behind."""
    create_topic(broker.bootstrap_servers, topic := tmp_path.name.replace("_", "-"), partitions=2)
    with contextlib.ExitStack() as stack:

        def start(servers=broker.bootstrap_servers):
            worker = Worker(tmp_path / "workers", topic, servers)
            stack.enter_context(worker.process)
            stack.callback(worker.process.kill)
            return worker

        start.topic, start.directory = topic, tmp_path / "workers"
        yield start


def problems(directory):
    done = subprocess.run([PUSHREP, "status", directory, "--json"], capture_output=True, text=True, timeout=WAIT_S)
    return done.returncode, [one for place in json.loads(done.stdout)["places"] for one in place["problems"]]


def values_in(broker, topic):
    return Counter(seen.value.decode() for n in range(2) for seen in consume(broker.bootstrap_servers, topic, n))


def age(directory):
    """Let the slot's files be of a minute ago."""
    for path in [directory, *directory.rglob("*")]:
        os.utime(path, (time.time() - 60,) * 2)


def test_faults_b8_fewer_workers_ship_what_the_others_left_and_give_a_slot_up_to_whoever_opens_it(broker, workers):
    nobody = "127.0.0.1:1"
    first, second, third = workers(), workers(nobody), workers(nobody)
    assert [one.slot for one in (first, second, third)] == ["slot-0", "slot-1", "slot-2"]
    slot = Path(workers.directory) / "slot-2"
    for number in range(10):
        third.append(number % 2, f"third-{number}")
    for one in (first, third):
        one.kill()
    # Nobody who could ship: the second worker reaches no broker.
    age(slot)
    code, [waiting] = problems(slot)
    assert (code, waiting["problem"], waiting["subject"], waiting["blocks"]) == (1, "slot_waits", "slot-2", "shipping")
    assert "10 records are not shipped" in waiting["why"]
    assert time.time() * 1000 - 120_000 < waiting["since_ms"] < time.time() * 1000

    fourth = workers()
    assert fourth.slot == "slot-0", "a used slot first"
    wait_until(lambda: sum(values_in(broker, workers.topic).values()) >= 10, "the slot is shipped", every_s=0.2)
    assert values_in(broker, workers.topic) == Counter(f"third-{number}" for number in range(10))
    wait_until(lambda: lock_holder(slot) is None, "it is given up")
    assert problems(slot) == (0, [])

    # A record that the broker refuses keeps the slot in the other worker's hands.
    fifth = workers(nobody)
    assert fifth.slot == "slot-2"
    fifth.append(0, "late", int((time.time() + 7200) * 1000))
    fifth.append(1, "well")
    fifth.kill()
    wait_until(lambda: lock_holder(slot) == fourth.process.pid, "another worker has it")
    wait_until(lambda: values_in(broker, workers.topic)["well"] == 1, "its other partition goes on", every_s=0.2)
    began_s = time.monotonic()
    take_back(slot)
    assert time.monotonic() - began_s < 2
    sixth = workers()
    assert sixth.slot == "slot-2"
    for one in (fourth, second, sixth):
        one.append(0, f"of-{one.slot}")
    wait_until(lambda: values_in(broker, workers.topic)["of-slot-0"] == 1, "all ship their own", every_s=0.2)

    # Without any worker, by the command that the problem names.
    for one in (second, fourth, sixth):
        one.kill()
    command = Problem("slot_waits", "slot-1", "").as_dict(str(slot.with_name("slot-1")))["command"]
    program, *arguments = command.replace("HOST:9092", broker.bootstrap_servers).split()
    done = subprocess.run([PUSHREP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert (program, done.returncode) == ("pushrep", 0), done.stdout
    assert values_in(broker, workers.topic)["of-slot-1"] == 1
