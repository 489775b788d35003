"""Failover with processes: the leader is killed, a replica is promoted, the service opens there, the old leader
follows.

Three nodes (`pushrep replica serve`), a producer that leads from one directory after the other, and a proxy before each
node that can cut its connections. In the end all records that ALL acknowledged are there, and the three logs are equal.
"""

import random
import shutil
import signal
import socket
import subprocess
import threading
from contextlib import suppress

import pytest

from pushrep.env import REAL_FILESYSTEM
from pushrep.log import SegmentLog
from pushrep.outbox import read_identity
from pushrep.outbox.directory_handover import adopt
from tests.crash.test_outbox_replicas_kill import Process, missing, record_bytes
from tests.ports import reserve
from tests.programs import PUSHREP

WAIT_S = 120

PRODUCER = """
import sys, threading
from collections import deque
from pushrep import Acks, LogConfig, Outbox, OutboxConfig, PushrepError
from pushrep.outbox import DeliveryFailed, NotEnoughReplicas
from pushrep.replicate.settings import PushSettings

directory, first, *replicas = sys.argv[1:]
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()

def say(*words):
    print(*words, "over", flush=True)  # a line that a kill cut off has no end

def settle():
    while pending:
        value, receipt = pending.popleft()
        try:
            say("acked", receipt.result(), value)
        except DeliveryFailed as error:
            say("failed", value, type(error.__cause__).__name__)

pending, number = deque(), int(first)
try:
    outbox = Outbox.open(
        directory, "orders", 1, "billing", replicas=replicas, acks=Acks.ALL,
        config=OutboxConfig(
            linger_ms=1, replica_lag_max_ms=300, delivery_timeout_ms=2000, open_timeout_s=60,
            log_config=LogConfig(preallocate_bytes=0), push=PushSettings(backoff_min_ms=5, backoff_max_ms=100,
            request_timeout_ms=10_000),
        ),
    )
except (OSError, PushrepError) as error:
    say("refused", type(error).__name__, error)
    sys.exit(3)
with outbox:
    say("open", outbox.log(0).log_end_offset)
    while not stop.is_set():
        try:
            while len(pending) < 20:
                pending.append((number, outbox.append(0, b"%d-" % number + b"x" * (number * 37 % 300))))
                number += 1
            value, receipt = pending.popleft()
            say("acked", receipt.result(), value)
            stop.wait(0.003)
        except (NotEnoughReplicas, DeliveryFailed):
            settle()
            stop.wait(0.01)
        except PushrepError as error:
            say("refused", type(error).__name__, error)
            sys.exit(3)
    settle()
    while any(lag.records or not lag.in_sync for lag in outbox.lag().values()):
        threading.Event().wait(0.02)
    say("even", outbox.log(0).log_end_offset)
"""


class Proxy:
    """Passes bytes on to a port, until its connections are cut; new ones pass again.

    What goes a held way, "to" the port or "from" it, waits: of everybody, or of one peer, by the address it comes from.
    """

    def __init__(self):
        self._held, self._free = {}, threading.Condition()
        self.port = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                ours, (peer, _) = self._listener.accept()
                try:
                    theirs = socket.create_connection(("127.0.0.1", self.port), WAIT_S)
                    theirs.settimeout(None)
                except OSError:
                    ours.close()
                    continue
                self._open |= {ours, theirs}
                for way, source, target in (("to", ours, theirs), ("from", theirs, ours)):
                    threading.Thread(target=self._pass_on, args=(peer, way, source, target), daemon=True).start()

    def _pass_on(self, peer, way, source, target):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                with self._free:
                    self._free.wait_for(lambda: all(way not in self._held.get(one, ()) for one in (peer, None)))
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._open.discard(source)
        source.close()  # each thread its own; the other one wakes up and closes the other

    def hold(self, *ways, peer=None):
        """From now on nothing goes these ways, of this peer or of everybody."""
        with self._free:
            self._held[peer] = ways

    def heal(self):
        """Open all links. Connections that were held back are cut, because no process waits for their answers any
        more.
        """
        with self._free:
            had, self._held = any(self._held.values()), {}
            self._free.notify_all()
        if had:
            self.cut()

    def cut(self):
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self):
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.heal()
        self.cut()


class Trio:
    """Three members, each with a node. Member 0 leads first, from the directory `outbox`."""

    def __init__(self, root):
        self.root, self.leader, self.producer, self.acked, self.next_number = root, 0, None, {}, 0
        self.nodes, self.proxies = {}, [Proxy() for _ in range(3)]
        self.ports = [reserve() for _ in range(3)]
        for index in range(3):
            self.serve(index)
        self.produce()
        self.outbox_id = read_identity(REAL_FILESYSTEM, root / "outbox").outbox_id

    def serve(self, index):
        port = self.proxies[index].port = self.ports[index].getsockname()[1]
        command = ("-m", "pushrep.cli.main", "replica", "serve", str(self.root / f"data-{index}"))
        self.nodes[index] = Process(*command, "--listen", f"127.0.0.1:{port}", "--allow", "any")
        self.nodes[index].wait_for("listening")

    def directory(self, index):
        member = self.root / f"data-{index}" / getattr(self, "outbox_id", "none")
        return member if member.exists() else self.root / "outbox"

    @staticmethod
    def run(*arguments):
        command = [PUSHREP, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)

    def start_producer(self, index, *others):
        others = [self.proxies[other].address for other in (others or {0, 1, 2} - {index})]
        arguments = (str(self.directory(index)), str(self.next_number), *others)
        return Process("-c", PRODUCER, *arguments, has_input=True)

    def produce(self, *others):
        self.producer = self.start_producer(self.leader, *others)
        try:
            self.producer.wait_for("open")
        except AssertionError as error:
            error.add_note(f"member {self.leader}, exit code {self.producer.process.poll()}: {self.producer.lines}")
            raise

    def kill_leader(self):
        self.producer.end(kill=True)
        self.note()

    def note(self):
        """Store what was acknowledged. The numbers of the next producer begin above all that this producer may have
        appended.
        """
        for words in self.producer.said("acked"):
            if words[-1:] == ["over"]:
                offset, value = int(words[0]), int(words[1])
                assert self.acked.setdefault(offset, value) == value, f"offset {offset} was acknowledged twice"
        self.next_number = max([*self.acked.values(), self.next_number]) + 1000

    def promote(self, index):
        """Promote, once no member had contact with the dead leader for so long that it counts as dead."""
        options = ("--catch-up", "--timeout-s", 60, "--leader-alive-ms", 1000)
        command = ("promote", self.directory(index), *options)
        while (done := self.run(*command)).returncode:
            assert "may lead on" in done.stderr, done.stderr
        assert f"member {index} leads outbox {self.outbox_id}" in done.stdout
        self.leader = index

    def take_the_old_leader_in(self):
        if (self.root / "outbox").exists():
            adopt(self.root / "data-0", self.root / "outbox")

    def finish(self, *others):
        """Check that all members hold the same bytes, and that no acknowledged record is missing."""
        self.producer.process.stdin.close()
        self.producer.wait_for("even")
        self.producer.process.wait(WAIT_S)
        self.note()
        for node in self.nodes.values():
            node.end()
        own = record_bytes(self.directory(self.leader) / "orders-0")
        for index in (self.leader, *others) if others else range(3):
            log = self.directory(index) / "orders-0"
            assert not missing(log, self.acked), f"member {index}"
            assert record_bytes(log) == own, f"member {index}"
            with SegmentLog.open_reader(log, isolation="written") as reader:
                numbers = [record.value.split(b"-")[0] for record in reader.records(0)]
            assert len(numbers) == len(set(numbers)), "nothing is there twice"

    def stop(self):
        for process in (self.producer, *self.nodes.values()):
            if process is not None and process.process.stdout is not None and not process.process.stdout.closed:
                with suppress(OSError):
                    process.process.send_signal(signal.SIGCONT)
                process.end(kill=True)
        for held in (*self.proxies, *self.ports):
            held.close()


@pytest.fixture
def trio(tmp_path):
    made = Trio(tmp_path)
    yield made
    made.stop()


@pytest.mark.slow
def test_a_killed_leader_is_replaced_and_follows_with_the_same_bytes(trio):
    """A record acknowledged with ALL survives the loss of any m - 1 members, the promotion and the old one's return."""
    trio.producer.wait_for_more("acked", 200)
    trio.kill_leader()
    assert len(trio.acked) >= 200
    trio.promote(1)
    old = trio.start_producer(0)
    assert old.wait_for("refused")[1] == "NotLeader", old.lines
    old.end()
    trio.take_the_old_leader_in()
    trio.produce()
    trio.producer.wait_for_more("acked", 200)
    trio.finish()


@pytest.mark.slow
def test_two_of_three_that_are_lost_for_good_are_replaced_by_the_command_that_is_printed(trio):
    """The service and two nodes are killed, the nodes' disks are gone: what ALL acknowledged is on the third."""
    trio.producer.wait_for_more("acked", 50)
    trio.kill_leader()
    for index in (1, 2):
        trio.nodes[index].end(kill=True)
        shutil.rmtree(trio.root / f"data-{index}")
    home = trio.root / "outbox"
    refused = trio.run("promote", home, "--timeout-s", "5")
    assert refused.returncode == 1
    printed = refused.stderr[refused.stderr.index("pushrep promote") :].split()
    for index in (3, 4):
        trio.proxies.append(Proxy())
        trio.ports.append(reserve())
        trio.serve(index)
        printed[printed.index("HOST:PORT")] = trio.proxies[index].address
    done = trio.run(*printed[1:])
    assert done.returncode == 0, done.stderr
    trio.produce(3, 4)
    trio.producer.wait_for_more("acked", 50)
    trio.finish(3, 4)


@pytest.mark.slow
def test_rounds_of_kills_stops_and_cuts_lose_nothing(request, torture):
    """kill -9 of any of the three, promotion, re-joining, SIGSTOP, cut connections: in an order that a seed draws."""
    if not torture.is_long:
        pytest.skip("one failover in the test above is the short form")
    trio = request.getfixturevalue("trio")
    draw = random.Random(torture.seed)
    done = []
    for number in range(30):
        trio.producer.wait_for_more("acked", 50)
        action = "leader" if number == 0 else draw.choice(("leader", "node", "stop", "cut"))
        replicas = [index for index in range(3) if index != trio.leader]
        if action == "leader":
            trio.kill_leader()
            trio.promote(draw.choice(replicas))
            trio.take_the_old_leader_in()
            trio.produce()
        elif action == "node":
            index = draw.randrange(3)  # the leader's machine has one, too
            trio.nodes[index].end(kill=True)
            trio.producer.wait_for_more("acked", 50)
            trio.serve(index)
        elif action == "stop":
            process = trio.nodes[draw.choice(replicas)].process
            process.send_signal(signal.SIGSTOP)
            trio.producer.wait_for_more("acked", 50)
            process.send_signal(signal.SIGCONT)
        else:
            for index in draw.sample(replicas, draw.randint(1, 2)):
                trio.proxies[index].cut()
        done.append(action)
    trio.producer.wait_for_more("acked", 50)
    trio.finish()
    assert "leader" in done
    assert len(trio.acked) > 1000
