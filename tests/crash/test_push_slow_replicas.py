"""A replica that was away for long, and one that is stopped, with a leader that has acks LOCAL; all are processes.

The tests check offsets and the order of events; memory is the leader's resident size as the system reports it.
"""

import signal
from pathlib import Path

import pytest

from tests.crash.test_outbox_replicas_kill import Process, Three, record_bytes

MB = 1_000_000
PRODUCER = """
import sys, threading
from pushrep import Acks, Durability, LogConfig, Outbox, OutboxConfig
from pushrep.replicate.settings import PushSettings

directory, *replicas = sys.argv[1:]
pause = threading.Event()
values = [bytes([n % 251]) * 1000 for n in range(1000)]

def lags():
    return {address: (lag.records, lag.in_sync) for address, lag in outbox.lag().items()}

def say(*words):
    print(*words, flush=True)

with Outbox.open(
    directory, "orders", 1, "billing", replicas=replicas, acks=Acks.LOCAL, durability=Durability.BUFFERED,
    config=OutboxConfig(
        min_insync_replicas=2, open_timeout_s=30, replica_lag_max_ms=300, log_config=LogConfig(preallocate_bytes=0),
        push=PushSettings(backoff_min_ms=5, backoff_max_ms=100, buffer_bytes_max=8 << 20, request_bytes_max=256 <<
        10),
    ),
) as outbox:
    say("open")
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "append":
            for _ in range(int(rest[0])):
                end = outbox.append_many(0, values).result() + len(values)
            say("appended", end)
        elif word == "level":
            for _ in range(1000):  # then it says how far they are, to be asked again
                if all(lags()[address] == (0, 1) for address in rest):
                    break
                pause.wait(0.01)
            say("level", *(records + 1 - in_sync for records, in_sync in lags().values()))
"""


class Slow(Three):
    """A leader that executes commands line by line, and its two replicas."""

    def produce(self):
        command = ("-c", PRODUCER, str(self.root / "outbox"))
        self.producer = Process(*command, *self.addresses.values(), has_input=True)
        self.producer.wait_for("open")
        return self.producer

    def tell(self, word, *more):
        """Send a command, and wait for its answer, which is returned."""
        said = len(self.producer.said(SAYS[word]))
        self.producer.process.stdin.write(" ".join([word, *map(str, more)]) + "\n")
        self.producer.process.stdin.flush()
        return [int(number) for number in self.producer.wait_for(SAYS[word], said + 1)[1:]]

    def append(self, megabytes):
        for at in range(0, megabytes, 20):
            self.tell("append", min(20, megabytes - at))

    def level(self, *indexes):
        """Wait until these replicas have everything; returns how many records each of all lacks."""
        for _ in range(100):
            lacking = self.tell("level", *(self.addresses[index] for index in indexes))
            if not any(lacking[index - 1] for index in indexes):
                return lacking
        return pytest.fail(f"{indexes} never had everything: {lacking}")

    def peak_bytes(self):
        """The most that the leader's process ever had in memory."""
        status = Path(f"/proc/{self.producer.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) << 10

    def signal(self, index, number):
        self.nodes[index].process.send_signal(number)

    def stop(self):
        for node in self.nodes.values():
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGCONT)
        super().stop()


SAYS = {"append": "appended", "level": "level"}


@pytest.fixture
def slow(tmp_path):
    made = Slow(tmp_path)
    yield made
    made.stop()


def assert_copies_are_equal(slow):
    slow.producer.end()
    for node in slow.nodes.values():
        node.end()
    own = record_bytes(slow.root / "outbox" / "orders-0")
    for copy in slow.copies():
        assert record_bytes(copy) == own, "byte for byte"


@pytest.mark.slow
def test_a_replica_that_was_away_catches_up_without_the_leaders_memory_rising(slow, torture):
    megabytes = torture.count(80, 3000)
    slow.produce()
    slow.append(2)
    slow.level(1, 2)
    slow.nodes[2].end(kill=True)
    slow.append(megabytes)
    slow.level(1)
    before = slow.peak_bytes()
    slow.serve(2)
    slow.level(1, 2)
    assert slow.peak_bytes() - before < 40 * MB, "what was missing came out of the log, a request at a time"
    if not torture.is_long:
        assert_copies_are_equal(slow)


@pytest.mark.slow
def test_a_slow_replica_slows_neither_the_other_nor_a_leader_with_local(slow, torture):
    slow.produce()
    slow.append(2)
    slow.level(1, 2)
    slow.signal(2, signal.SIGSTOP)  # it takes what the system's buffers take, and answers nothing
    for _ in range(torture.count(2, 10)):
        slow.append(16)
        first, second = slow.level(1)
        assert first == 0, "the other has everything"
        assert second >= 16_000, "while it had none of it"
    slow.signal(2, signal.SIGCONT)
    slow.level(1, 2)
    assert_copies_are_equal(slow)
