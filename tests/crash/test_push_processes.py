"""Three processes, a leader and two replicas: killed, stopped and promoted in turn; nothing acknowledged is lost.

m = 2 of 3, records in the page cache: kill -9 takes no acknowledged one. Who leads next is the member with the highest
(epoch, end) of those that are asked, as an operator would choose.
"""

import os
import signal
import threading
import time
from pathlib import Path
from uuid import uuid4

import pytest

from pushrep.election.epochs import granted_end
from pushrep.election.grants import next_ballot
from pushrep.log import SegmentLog
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.sockets import Address
from pushrep.wire.push_messages import DescribeLogRequest, DescribeLogResponse
from tests.kafka.cluster import missing
from tests.kafka.dump_tool import dump_segments
from tests.ports import reserve
from tests.programs import PythonProgram

PROGRAM = Path(__file__).with_name("leading_program.py")
WAIT_S = 120
KINDS = ("kill replica", "promote", "kill leader", "pause")


class Lines:
    """The output of a process, read by a thread."""

    def __init__(self, process):
        self.process, self.lines = process, []
        self._changed = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait_for(self, what, count=1):
        """Wait until so many lines begin with `what`."""

        def found():
            return sum(line.startswith(what) for line in self.lines) >= count or self._over

        with self._changed:
            assert self._changed.wait_for(found, WAIT_S), f"{what!r} never came: {self.lines[-5:]}"
        assert sum(line.startswith(what) for line in self.lines) >= count, f"it ended: {self.lines[-5:]}"

    def join(self):
        self._thread.join(WAIT_S)
        return self.lines


class Three:
    """Members 0, 1 and 2, each with its directory; one leads, the others serve."""

    program_path = PROGRAM

    def __init__(self, root):
        self.root, self.outbox_id = root, uuid4()
        self.epoch, self.leader = 0, 0
        self.nodes, self.ports = {}, [reserve() for _ in range(3)]
        self.addresses = [Address(*held.getsockname()) for held in self.ports]
        self.program = None
        self.acked = {}
        for index in (1, 2):
            self.serve(index)
        self.lead(0)

    def directory(self, index):
        return self.root / f"member-{index}" / str(self.outbox_id)

    def serve(self, index):
        process = PythonProgram(
            *("-m", "pushrep.cli.main", "replica", "serve", str(self.root / f"member-{index}")),
            *("--listen", str(self.addresses[index]), "--allow", str(self.outbox_id)),
        )
        self.nodes[index] = process
        line = process.stdout.readline()
        assert line.startswith("listening on "), f"member {index} said {line!r}"

    def lead(self, index):
        self.leader, self.epoch = index, next_ballot(index, self.epoch)
        self.directory(index).mkdir(parents=True, exist_ok=True)
        replicas = [f"{other}={self.addresses[other]}" for other in sorted(self.nodes)]
        process = PythonProgram(
            *(str(self.program_path), str(self.directory(index)), str(self.outbox_id), str(self.epoch), *replicas),
            has_input=True,
        )
        self.program = Lines(process)
        self.program.wait_for("leads")

    def wait_for_acks(self, count):
        self.program.wait_for("acked", sum(line.startswith("acked") for line in self.program.lines) + count)

    def kill_replica(self, index):
        self.nodes[index].kill()
        self.reap(self.nodes.pop(index))

    def pause_replica(self, index, seconds):
        """SIGSTOP: the process exists and does nothing, while the system's socket buffers fill."""
        self.nodes[index].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.nodes[index].send_signal(signal.SIGCONT)

    def kill_leader(self):
        self.program.process.kill()
        self.take_acked()

    def take_acked(self):
        self.program.process.stdin.close()
        for line in self.program.join():
            if line.startswith("acked "):
                _, offset, value = line.split(" ")
                assert self.acked.setdefault(int(offset), value) == value, f"offset {offset} was acknowledged twice"
        self.reap(self.program.process)

    def promote(self):
        """The member that is ahead leads; the old leader serves."""
        ends = {index: self.granted_end(index) for index in self.nodes}
        ahead = max(ends, key=ends.get)
        old = self.leader
        node = self.nodes.pop(ahead)
        node.terminate()
        self.reap(node)
        self.serve(old)
        self.lead(ahead)

    def granted_end(self, index):
        with ReplicaClient(self.addresses[index]) as client:
            answer = client.ask(DescribeLogRequest(outbox_id=self.outbox_id), DescribeLogResponse)
        return granted_end(answer.logs[0].log_ends(), None) if answer.logs else (-1, 0)

    @staticmethod
    def reap(process):
        assert process.wait(WAIT_S) is not None
        process.stdout.close()

    def finish(self):
        """Check that all logs are equal; then all processes stop in order."""
        self.program.process.stdin.close()
        self.program.wait_for("ends")
        self.take_acked()
        self.stop()

    def stop(self):
        self.program.process.stdin.close()  # else another test would be blamed for what a failed one left
        for process in [*self.nodes.values(), self.program.process]:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
                self.reap(process)
        for held in self.ports:
            held.close()


@pytest.fixture
def three(tmp_path):
    made = Three(tmp_path)
    yield made
    made.stop()


def record_bytes(directory):
    return b"".join(path.read_bytes() for path in sorted(directory.glob("*.log")))


def values_of(directory):
    with SegmentLog.open_reader(directory, isolation="written") as reader:
        return {record.offset: record.value for record in reader.records(reader.log_start_offset)}


@pytest.mark.slow
def test_killed_stopped_and_promoted_members_lose_nothing_that_was_acknowledged(three, torture):
    random = torture.random("push processes")
    for number in range(torture.count(4, 30)):
        three.wait_for_acks(200)
        kind = KINDS[number] if number < len(KINDS) else random.choice(KINDS)  # each once, then whatever is drawn
        victim = random.choice(sorted(three.nodes))
        if kind == "kill replica":
            three.kill_replica(victim)
            three.wait_for_acks(100)  # two of three go on, once the third has left the in-sync set
            three.serve(victim)
        elif kind == "pause":
            three.pause_replica(victim, 0.5)
        else:
            three.kill_leader()
            if kind == "promote":
                three.promote()
            else:
                three.lead(three.leader)
    three.wait_for_acks(100)
    three.finish()
    held = {index: three.directory(index) / "orders-0" for index in (0, 1, 2)}
    values = values_of(held[0])
    assert len(three.acked) > 500
    lost = {offset: value for offset, value in three.acked.items() if not values[offset].startswith(value.encode())}
    assert not lost, f"acknowledged and not there: {lost}"
    assert record_bytes(held[0]) == record_bytes(held[1]) == record_bytes(held[2]), "byte for byte"


@pytest.mark.java
@pytest.mark.slow
def test_kafkas_own_tool_reads_a_replicas_log(three):
    if why := missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    three.wait_for_acks(300)
    three.finish()
    for dump in dump_segments(*(three.directory(index) / "orders-0" for index in (1, 2))):
        assert not dump.objections
        assert not dump.has_holes
        assert sum(batch["count"] for batch in dump.batches) > 300
