"""Standbys with processes: three members, each a node and a service that stands by. No operator acts.

The client of the test is the service's producer: each leader continues after the last number in its log
(`last_metadata`), so that each number is in the log once in the end.
"""

import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path

import pytest
from aiokafka.record.memory_records import MemoryRecords

from pushrep.outbox.standby import members_at
from tests.crash.test_failover_kill import Proxy
from tests.crash.test_outbox_replicas_kill import Process, record_bytes
from tests.ports import reserve
from tests.programs import PUSHREP

WAIT_S = 120
TAKEOVER_MS = 2_000
ROUNDS = 300
TURNS = 10
PRESSURE = Path("/proc/pressure")
FAULTS = (
    "service", "machine", "node", "close", "pause", "to", "from", "cut", "pair", "pair", "alone", "EIO", "ENOSPC",
    "transfer",
)  # fmt: skip

DISK = """
import errno, os
from pathlib import Path
from pushrep.env.filesystem import RealFile

def failing(call, name):
    def called(file, *given):
        if file.path.suffix == ".log" and FAULT.exists() and FAULT.read_text() == name:
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)), str(file.path))
        return call(file, *given)
    return called

RealFile.sync, RealFile.write_at = failing(RealFile.sync, "EIO"), failing(RealFile.write_at, "ENOSPC")
"""
"""A machine's disk: while the file FAULT names an error, syncs or writes of segments fail with it."""
NODE = """
from pushrep.cli.main import main
main()
"""

SERVICE = """
import functools, socket, sys, threading, time
from filtering import StreamMetadata
from pushrep import LogConfig, Outbox, OutboxConfig, PushrepError
from pushrep.outbox import DeliveryFailed, NotEnoughReplicas
from pushrep.replicate.settings import PushSettings
from pushrep.election.errors import NotLeader
from pushrep.election.standby import StandbyState

SOURCE = 4711
data, takeover_ms, address, *ships_to = sys.argv[1:]
socket.create_connection = functools.partial(socket.create_connection, source_address=(address, 0))

def say(*words):
    with speaking:  # states are told by other threads
        print(*words, "over", flush=True)  # a line that a kill cut off has no end

speaking = threading.Lock()

stop, told = threading.Event(), []
threading.Thread(target=lambda: (told.append(sys.stdin.read()), stop.set()), daemon=True).start()

def lead(outbox):
    number = outbox.last_metadata(SOURCE, 0)
    number = -1 if number is None else number
    say("leads", outbox.facts.replication.grant.epoch, number + 1)
    while not stop.is_set():
        wanted = number + 1
        try:
            receipt = outbox.append(0, b"%d" % wanted, metadata=StreamMetadata(SOURCE, 0, wanted))
            say("acked", receipt.result(), wanted, outbox.facts.replication.grant.epoch, time.monotonic())
            number = wanted
        except NotEnoughReplicas:
            pass
        stop.wait(0.01)
    if not told[0]:
        return
    if "kafka" in settings:
        outbox.wait_shipped(60)
    while any(lag.records or not lag.in_sync for lag in replicas_of(outbox)):
        threading.Event().wait(0.02)
    say("even")

def replicas_of(outbox):
    return [lag for name, lag in outbox.lag().items() if not name.startswith("kafka:")]

settings = {}
if ships_to:
    from pushrep import KafkaDestination
    settings["kafka"] = KafkaDestination(bootstrap_servers=ships_to[0], topic=ships_to[1], retry_backoff_ms=20)

while not stop.is_set():
    try:
        outbox = Outbox.stand_by(
            data, "orders", 1, "billing", cancel=stop, on_state=lambda state, why: say(state.value, why),
            config=OutboxConfig(
                takeover_after_ms=int(takeover_ms), takeover_pause_ms=0, linger_ms=0, replica_lag_max_ms=500,
                log_config=LogConfig(preallocate_bytes=0), push=PushSettings(backoff_min_ms=5, backoff_max_ms=100),
            ),
            **settings,
        )
        with outbox:
            lead(outbox)
    except (PushrepError, OSError) as error:
        say("lost", type(error).__name__, error)
    except BaseException as error:  # what no service expects: the test shows it
        say("died", repr(error))
        raise
"""


class Machines:
    """Three or more machines, each with a node and a service. ships_to: brokers and a topic.

    The services of each machine connect to nodes from another loopback address, so that a proxy can cut each link
    alone.
    """

    def __init__(self, root, stack, count=3, ships_to=(), takeover_ms=TAKEOVER_MS, spares=0):
        self.takeover_ms = takeover_ms
        self.root, self.acked, self.led, self.count, self.ships_to = root, {}, {}, count, ships_to
        self.times = []  # when a record was acknowledged, and in which epoch
        ports = [stack.enter_context(reserve()) for _ in range(count + spares)]
        self.proxies = []
        for port in ports:
            self.proxies.append(Proxy())
            stack.callback(self.proxies[-1].close)
            self.proxies[-1].port = port.getsockname()[1]
        self.addresses = [one.address for one in self.proxies]
        self.nodes, self.services, self.ended = {}, {}, []
        stack.callback(self.stop)
        for index in range(count + spares):
            self.serve(index)

    def data(self, index):
        return self.root / f"data-{index}"

    def disk(self, index):
        """The file that says what its disk does, and the program text by which it does it."""
        fault = self.root / f"fault-{index}"
        return fault, f"from pathlib import Path\nFAULT = Path({str(fault)!r})\n{DISK}"

    def serve(self, index):
        command = ("-c", self.disk(index)[1] + NODE, "replica", "serve", str(self.data(index)))
        self.nodes[index] = Process(*command, "--listen", f"127.0.0.1:{self.proxies[index].port}", "--allow", "any")
        self.nodes[index].wait_for("listening")

    def run(self, index):
        self.services[index] = Process(
            *(
                "-c",
                self.disk(index)[1] + SERVICE,
                str(self.data(index)),
                str(self.takeover_ms),
                self.home(index),
                *self.ships_to,
            ),
            has_input=True,
        )

    @staticmethod
    def home(index):
        """The address that the machine's service connects from."""
        return f"127.0.0.{2 + index}"

    def hold(self, service, node, *ways):
        """On the link from the service of one machine to the node of another one."""
        self.proxies[node].hold(*ways, peer=self.home(service))

    def heal(self):
        for index, one in enumerate(self.proxies):
            one.heal()
            self.disk(index)[0].unlink(missing_ok=True)

    def create(self):
        command = [PUSHREP, "outbox", "create", self.data(0), "--topic", "orders"]
        listed = ",".join(self.addresses[: self.count])
        made = subprocess.run([*command, "--members", listed], capture_output=True, text=True)
        assert made.returncode == 0, made.stderr

    def grant(self, index):
        """The newest grant of a machine's member."""
        (member,) = members_at(self.data(index))
        return member.directory, member.kept.grant

    def members(self, leader):
        """The machines that are members, by the grant of the one that leads."""
        return [self.addresses.index(one.address) for one in self.grant(leader)[1].members]

    def change(self, leader, draw):
        """Begin to add the machine that is no member, or to remove one that does not lead; a change that was cut short
        is asked for again. It is refused where too few are well.
        """
        home, grant = self.grant(leader)
        listed, before = {*grant.members}, {*grant.previous_members}
        if coming := listed - before if before else set():
            what = ("add", home, coming.pop().address)
        elif going := before - listed:
            what = ("remove", home, str(going.pop().index))
        elif len(listed) == self.count:
            spare = draw.choice(sorted({*self.addresses} - {one.address for one in listed}))
            what = ("add", home, spare)
        else:
            what = ("remove", home, str(draw.choice([one.index for one in grant.members if one.index != grant.leader])))
        return subprocess.Popen([PUSHREP, "replica", *what, "--timeout", "20"], stderr=subprocess.PIPE, text=True)

    def leader(self):
        """The one that acknowledges now."""
        pause = threading.Event()
        counts = {index: one.counts["acked"] for index, one in self.services.items()}
        for _ in range(WAIT_S * 20):
            for index, one in self.services.items():
                if one.process.poll() is None and one.counts["acked"] > counts[index]:
                    return index
            pause.wait(0.05)
        raise AssertionError({index: one.lines[-5:] for index, one in self.services.items()})

    @contextmanager
    def taken_over(self, leader):
        """Another instance acknowledges within T + 5 s of the block's beginning, by its own word of when it did. The
        time in which the machine let processes wait is not counted, whichever processes these were.
        """
        began_s, waited_s = time.monotonic(), stood_still_s()
        yield
        waited_s = stood_still_s() - waited_s
        others = [one for index, one in self.services.items() if index != leader]
        told = [float(line[3]) for one in others for line in one.said("acked") if line[-1] == "over"]
        took_s = min(at_s for at_s in told if at_s > began_s) - began_s
        print(f"another acknowledged after {took_s:.1f} s; the machine let some wait for {waited_s:.1f} s")  # noqa: T201
        assert took_s - waited_s <= self.takeover_ms / 1000 + 5

    def acknowledge(self, count):
        """Wait until so many more records are acknowledged, by any leader; returns the one that acknowledged last."""
        leader = None
        while count > 0 or leader is None:
            before = sum(one.counts["acked"] for one in self.services.values())
            leader = self.leader()
            count -= sum(one.counts["acked"] for one in self.services.values()) - before
        return leader

    def kill_service(self, index):
        """kill -9; its output is checked at the end."""
        self.services[index].end(kill=True)
        self.ended.append(self.services.pop(index))

    def note(self, process):
        assert not process.said("died")
        for line in process.said("leads"):
            epoch = int(line[0])
            assert epoch not in self.led, f"epoch {epoch} was led twice"
            self.led[epoch] = process
        for line in process.said("acked"):
            if line[-1] == "over":
                offset, number, epoch = map(int, line[:3])
                assert self.acked.setdefault(offset, number) == number, f"offset {offset} was acknowledged twice"
                is_own = self.led.setdefault(epoch, process) is process  # a lead may go on under another number
                assert is_own, f"{number} was acknowledged in epoch {epoch}, which another led"
                self.times.append((float(line[3]), epoch))

    def finish(self, leader):
        """All members hold the same bytes, with everything that was acknowledged, each number once and in order."""
        for index in sorted(self.services, key=lambda index: index == leader):  # the standbys first: nobody takes over
            if index == leader:
                self.services[index].process.stdin.write("until all are even")
            self.services[index].process.stdin.close()
            self.services[index].process.wait(WAIT_S)
        self.services[leader].wait_for("even")
        for one in (*self.ended, *self.services.values()):
            one.end()
            self.note(one)
        for node in self.nodes.values():
            node.end()
        (log,) = self.data(leader).glob("*/orders-0")
        found = records_of(log)
        assert found.items() >= self.acked.items(), "what was acknowledged is there"
        assert list(found.values()) == list(range(len(found))), "each number once, in order"
        for index in self.members(leader):
            assert record_bytes(self.data(index) / log.parent.name / log.name) == record_bytes(log), f"member {index}"

    def takeovers_s(self):
        """The time without acknowledgements before another leader. A leader that was stopped prints later what it
        acknowledged.
        """
        first, last = {}, {}
        for at_s, epoch in sorted(self.times):
            first.setdefault(epoch, at_s)
            last[epoch] = max((one for one, of in self.times if of <= epoch and one < first[epoch]), default=at_s)
        return [first[epoch] - last[epoch] for before, epoch in pairwise(sorted(first)) if before % 256 != epoch % 256]

    def stop(self):
        for process in (*self.services.values(), *self.nodes.values()):
            if process.process.stdout is not None and not process.process.stdout.closed:
                with suppress(OSError):
                    process.process.send_signal(signal.SIGCONT)
                process.end(kill=True)


def stood_still_s():
    """How long, since the machine was started, some process waited for a processor, the disk or memory, or the host
    stopped the whole machine. The kernel counts it (PSI), so it does not depend on how often it is read.
    """
    stalls = [re.search(r"some .*total=(\d+)", (PRESSURE / name).read_text()) for name in ("cpu", "io", "memory")]
    stolen_s = int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")
    return max(stolen_s / os.cpu_count(), *(int(found[1]) / 1e6 for found in stalls))


def records_of(log):
    """Offset: number, of all records, as a reader that is not ours finds them in the files."""
    found = {}
    for path in sorted(log.glob("*.log")):
        data, end = path.read_bytes(), 0
        while size := int.from_bytes(data[end + 8 : end + 12]):  # behind the last batch there may be room, which is 0
            end += 12 + size
        batches = MemoryRecords(data[:end])
        while (batch := batches.next_batch()) is not None:
            assert batch.validate_crc(), f"{path}: the batch at {batch.base_offset}"
            for record in batch:
                assert record.offset == len(found), "no hole, and none twice"
                found[record.offset] = int(record.value)
    return found


@pytest.fixture
def trio(tmp_path):
    with ExitStack() as stack:
        yield Machines(tmp_path, stack)


@pytest.mark.slow
def test_a_killed_leader_is_replaced_by_a_standby_and_nothing_acknowledged_is_lost(trio):
    """kill -9 of the leading service, then of the next one with its node: each time another service takes over."""
    for index in range(3):
        trio.run(index)
    trio.services[1].wait_for("waiting")
    trio.create()
    first = trio.leader()
    trio.services[first].wait_for_more("acked", 20)
    trio.kill_service(first)
    second = trio.leader()
    assert second != first
    trio.services[second].wait_for_more("acked", 20)
    trio.run(first)  # it stands by again
    trio.services[first].wait_for("standing_by")
    trio.kill_service(second)
    trio.nodes[second].end(kill=True)
    third = trio.leader()
    trio.services[third].wait_for_more("acked", 20)
    trio.serve(second)
    trio.finish(third)
    assert len(trio.led) >= 3


@pytest.mark.slow
def test_a_leader_that_stood_still_finds_another_one_and_stands_by_again(trio):
    """SIGSTOP for longer than the limit, then SIGCONT: it acknowledges nothing of an epoch in which another leads."""
    for index in range(3):
        trio.run(index)
    trio.create()
    first = trio.leader()
    trio.services[first].process.send_signal(signal.SIGSTOP)
    while (second := trio.leader()) == first:
        pass  # acknowledged before it stood still, and read only now
    trio.services[first].process.send_signal(signal.SIGCONT)
    trio.services[first].wait_for("lost")
    trio.services[first].wait_for("deposed")
    trio.services[second].wait_for_more("acked", 20)
    trio.finish(second)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["service", "machine", "pause"])
def test_another_acknowledges_in_time(trio, fault, torture):
    """Again and again: kill -9 of the leading service, of its node too, SIGSTOP beyond the limit with a return."""
    if not torture.is_long:
        pytest.skip("the tests above are the short form; how long they take is the machine's affair")
    if not PRESSURE.exists():
        pytest.skip("this kernel does not count for how long processes wait (PSI)")
    for index in range(3):
        trio.run(index)
    trio.create()
    for _ in range(TURNS):
        leader = trio.acknowledge(20)
        waits = trio.services[leader].counts["standing_by"]
        for index in {0, 1, 2} - {leader}:
            trio.services[index].wait_for("standing_by")
        with trio.taken_over(leader):
            begin(trio, leader, fault, torture.random(fault))
            trio.leader()
        if fault == "machine":
            trio.serve(leader)
        if fault == "pause":
            trio.services[leader].process.send_signal(signal.SIGCONT)
            trio.services[leader].wait_for("standing_by", waits + 1)
        else:
            trio.run(leader)
    trio.finish(trio.leader())


@pytest.mark.slow
def test_a_leader_whose_disk_is_full_gives_way_to_one_with_room_and_stands_by_again(tmp_path, torture):
    """A small file system under the first member's node, which the test fills."""
    place = tmp_path / "data-0"
    place.mkdir()
    with ExitStack() as stack:
        mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", place]
        mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
        stack.callback(subprocess.run, ["umount", place], check=True, timeout=WAIT_S)
        machines = Machines(tmp_path, stack)
        machines.create()
        machines.run(0)
        machines.services[0].wait_for_more("acked", 20)
        for index in (1, 2):
            machines.run(index)
            machines.services[index].wait_for("standing_by")
        told = len(machines.services[0].said("standing_by"))
        with machines.taken_over(0) if torture.is_long and PRESSURE.exists() else nullcontext():
            (place / "filler").write_bytes(bytes(int(0.97 * shutil.disk_usage(place).free)))
            machines.services[0].wait_for("lost")
            machines.services[0].wait_for("standing_by", told + 1)
            assert "too full" in " ".join(machines.services[0].said("standing_by")[told])
            second = machines.leader()
        assert second != 0
        (place / "filler").unlink()
        machines.services[second].wait_for_more("acked", 20)
        machines.finish(second)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 5])
def test_rounds_of_faults_lose_nothing(count, tmp_path, torture):
    """Kills, pauses, cut links, one way or both, failing and full disks, leads that are handed over, members that are
    added, removed and come back, drawn from a seed: after each, some service acknowledges again, within T + 5 s.
    """
    with ExitStack() as stack:
        machines, draw = Machines(tmp_path, stack, count, spares=1), torture.random(count)
        if torture.is_long:
            print(rounds_of_faults(machines, draw))  # noqa: T201 - for who ran it
        elif count == 3:
            print(rounds_of_faults(machines, draw, 4, ["EIO", "transfer", "ENOSPC", "close"]))  # noqa: T201
        else:
            pytest.skip("three members are the short form")


def rounds_of_faults(machines, draw, rounds=ROUNDS, faults_of=None):
    """In each round as many members as the majority allows have a fault. Returns a report. faults_of: the fault of each
    round's leader, instead of drawn ones.
    """
    everybody = range(len(machines.addresses))
    for index in everybody:
        machines.run(index)
    machines.create()
    changes, slowest_s = 0, 0.0
    stalled_s = stood_still_s if PRESSURE.exists() else time.monotonic  # without it no round counts as slow
    for number in range(rounds):
        leader = machines.acknowledge(20)
        members = machines.members(leader)
        others = draw.sample([one for one in members if one != leader], (len(members) - 1) // 2)
        at = [leader, *others][: len(others)] if draw.random() < 0.6 else others
        faults = [(index, draw.choice(FAULTS)) for index in at]
        changing = None
        if len(everybody) > machines.count and (faults_of or draw.random() < 0.4):
            changing = machines.change(leader, draw)
        if faults_of:  # a change is cut short in the rounds that are drawn
            assert changing.wait(WAIT_S) == 0, changing.stderr.read()
            faults = [(leader, faults_of[number])]
        print(f"round {number}: {leader} leads {members}, {faults}, {changing and changing.args}")  # noqa: T201 - shown if it fails
        began_s, waited_s = time.monotonic(), stalled_s()
        for index, fault in faults:
            begin(machines, index, fault, draw)
        machines.acknowledge(20)
        slowest_s = max(slowest_s, time.monotonic() - began_s - (stalled_s() - waited_s))
        for index, fault in faults:
            if fault == "pause":
                machines.services[index].process.send_signal(signal.SIGCONT)
        machines.heal()
        for index, _ in faults:
            if machines.nodes[index].process.poll() is not None:
                machines.serve(index)
            if index not in machines.services:
                machines.run(index)
        if changing is not None:
            changes += changing.wait(WAIT_S) == 0
            changing.stderr.close()
    machines.finish(machines.leader())
    gaps_s = sorted(machines.takeovers_s())
    assert len(gaps_s) > rounds // 8
    assert slowest_s <= machines.takeover_ms / 1000 + 5 + 1, "a second for twenty records"
    return (
        f"{rounds} rounds, {len(machines.acked)} records acknowledged under {len(machines.led)} leads, {len(gaps_s)} "
        f"takeovers of p50 {statistics.median(gaps_s):.1f} s, longest {gaps_s[-1]:.1f} s, {changes} changes of "
        f"members; twenty records took {slowest_s:.1f} s at most: nothing lost"
    )


def begin(machines, index, fault, draw):
    """A fault of one machine: its service, its node, both, or links of it."""
    if fault in {"service", "machine"}:
        machines.kill_service(index)
    if fault in {"node", "machine"}:
        machines.nodes[index].end(kill=True)
    if fault in {"EIO", "ENOSPC"}:
        machines.disk(index)[0].write_text(fault)
    if fault == "transfer":
        subprocess.run([PUSHREP, "outbox", "transfer", machines.data(index)], capture_output=True, check=False)
    if fault == "close":
        machines.services[index].end()
        machines.ended.append(machines.services.pop(index))
    if fault == "pause":
        machines.services[index].process.send_signal(signal.SIGSTOP)
    if fault in {"to", "from"}:
        machines.proxies[index].hold(fault)
    if fault == "cut":
        machines.proxies[index].cut()
    others = [one for one in range(machines.count) if one != index]
    if fault == "pair":
        other, ways = draw.choice(others), draw.choice((("to",), ("from",), ("to", "from")))
        for service, node in draw.choice((((index, other),), ((other, index),), ((index, other), (other, index)))):
            machines.hold(service, node, *ways)
    if fault == "alone":
        for other in others:
            machines.hold(index, other, "to", "from")
            machines.hold(other, index, "to", "from")


RUNNER = """
import os
from pushrep.cli.main import main
os.dup2(1, 2)  # what the command says, and its runner
main()
"""
COMMAND = """
import os, sys
number = int(os.environ["PUSHREP_LINE"])
while True:
    number += 1
    print(number, flush=True)
    answer = sys.stdin.readline()
    if not answer.endswith("\\n"):
        break
    print("acked", *answer.split(), "over", file=sys.stderr, flush=True)
"""


@pytest.mark.slow
def test_a_command_runs_where_its_instance_leads_and_goes_on_at_the_next_line(trio):
    """`pushrep outbox run`, killed with -9: another one starts its command, which prints the line behind the last."""
    leader, acked = kill_a_runner(trio)
    trio.stop()
    (log,) = trio.data(leader).glob("*/orders-0")
    found = records_of(log)
    assert found.items() >= acked.items()
    assert list(found.values()) == list(range(1, len(found) + 1))


def kill_a_runner(trio, *options):
    """Kill the leading one of three runners. Returns the next leader, and the acknowledged lines by offset."""

    def run(index):
        more = ("--takeover-after-ms", str(TAKEOVER_MS), "--", sys.executable, "-c", COMMAND)
        trio.services[index] = Process("-c", RUNNER, "outbox", "run", str(trio.data(index)), "orders", *options, *more)

    trio.create()
    for index in range(3):
        run(index)
    first = trio.leader()
    trio.services[first].wait_for_more("acked", 20)
    trio.kill_service(first)
    second = trio.leader()
    assert second != first
    trio.services[second].wait_for_more("acked", 20)
    acked = (line for one in (*trio.ended, trio.services[second]) for line in one.said("acked"))
    return second, {int(line[2]): int(line[0]) for line in acked}
