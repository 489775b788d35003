"""The simulated network behaves like a network, and injects exactly the configured faults."""

from uuid import UUID

import pytest

from pushrep.election.grants import Grant, Member
from pushrep.env import REAL_NETWORK
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.records import encode_batch
from pushrep.replicate.leading import Leading
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.settings import PushSettings, Replica
from pushrep.replicate.sockets import Address
from tests.support.network_examiner import examine_network
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk
from tests.support.simulated_network import KEEPALIVE_MS, SimulatedNetwork
from tests.support.simulated_threads import NothingHappens

PORT = 7000
SMALL = LogConfig(preallocate_bytes=0)


def test_the_real_network_passes_the_examiner():
    examine_network(REAL_NETWORK, "127.0.0.1")


@pytest.mark.parametrize("seed", range(10))
def test_the_simulated_network_passes_the_examiner(seed):
    network = SimulatedNetwork(seed, SimulatedClock())
    examine_network(network.machine("a").start(), "a")


class Two:
    """A connection between machines a and b, `here` and `there`."""

    def __init__(self, seed=1, delay_ms=5):
        self.clock = SimulatedClock()
        self.network = SimulatedNetwork(seed, self.clock, delay_ms=delay_ms)
        self.a, self.b = self.network.machine("a"), self.network.machine("b")
        listener = self.b.start().listen(("b", PORT))
        self.here = self.a.start().connect(("b", PORT), 10)
        self.there, _ = listener.accept()


def read(sock, size=100, timeout_s=None):
    buffer = memoryview(bytearray(size))
    sock.settimeout(timeout_s)
    return bytes(buffer[: sock.recv_into(buffer)])


def test_a_block_holds_one_way_and_what_was_sent_comes_after_it():
    two = Two()
    two.network.block("a", "b")
    two.here.send(memoryview(b"held"))
    two.there.send(memoryview(b"the other way"))
    assert two.here.recv_into(memoryview(bytearray(3))) == 3
    with pytest.raises(TimeoutError):
        read(two.there, timeout_s=60)
    with pytest.raises(TimeoutError):
        two.a.process.connect(("b", PORT), 1)
    two.network.unblock("a", "b")
    assert b"held".startswith(read(two.there))


def test_a_cut_breaks_both_ends():
    two = Two()
    two.network.cut("b", "a")
    two.clock.advance(5)
    for end in (two.here, two.there):
        with pytest.raises(ConnectionResetError):
            read(end)


def test_of_a_killed_process_everything_arrives_that_it_had_sent():
    two = Two()
    two.there.send(memoryview(b"last"))
    two.b.kill()
    found = b""
    while part := read(two.here, timeout_s=10):
        found += part
    assert found == b"last"
    two.b.start()
    with pytest.raises(ConnectionRefusedError):
        two.a.process.connect(("b", PORT), 1)


def test_of_a_lost_machine_nothing_is_heard_until_keepalive_or_a_send_to_its_next_life():
    two = Two(delay_ms=0)
    two.b.lose_power()
    with pytest.raises(TimeoutError):
        read(two.here, timeout_s=1)
    two.b.start()
    two.here.send(memoryview(b"are you there"))
    with pytest.raises(ConnectionResetError):
        read(two.here, timeout_s=1)
    two = Two()
    two.b.lose_power()
    with pytest.raises(ConnectionResetError):
        read(two.here)
    assert two.clock.monotonic_ms() >= KEEPALIVE_MS


def test_connections_overtake_each_other_and_a_stream_never_itself():
    orders = set()
    for seed in range(30):
        two = Two(seed, delay_ms=50)
        two.b.process.listeners.clear()
        listener = two.b.process.listen(("b", PORT))
        second = two.a.process.connect(("b", PORT), 10)
        other, _ = listener.accept()
        for number in b"12":
            two.here.send(memoryview(bytes([number])))
        second.send(memoryview(b"x"))
        two.there.setblocking(False)
        other.setblocking(False)
        seen = b""
        while len(seen) < 3:
            two.clock.advance(1)
            for sock in (two.there, other):
                if sock.is_readable():
                    buffer = memoryview(bytearray(1))
                    sock.recv_into(buffer)
                    seen += bytes(buffer)
        orders.add(seen)
    assert {order.replace(b"x", b"") for order in orders} == {b"12"}
    assert len(orders) > 1, "some overtook"


def test_a_killed_process_runs_no_further_and_a_paused_one_later():
    clock = SimulatedClock()
    network = SimulatedNetwork(3, clock)
    told = []
    for name in ("paused", "killed", "well"):
        process = network.machine(name).start()

        def count(name=name, process=process):
            for _ in range(3):
                process.sleep(0.01)
                told.append(name)

        process.thread(count, "count").start()
    network.machine("paused").process.is_paused = True
    while "killed" not in told:
        assert network.step()
    network.machine("killed").kill()
    while network.step():
        pass
    assert told.count("well") == 3
    assert told.count("killed") == 1
    assert "paused" not in told
    network.machine("paused").process.is_paused = False
    while network.step():
        pass
    assert told.count("paused") == 3
    with pytest.raises(NothingHappens):
        network.machine("well").process.event().wait()


@pytest.mark.parametrize("linger_ms", [0, 5])
def test_a_leader_whose_replica_is_dead_rests_between_its_attempts(linger_ms):
    """A worker that spins meanwhile would take a whole processor."""
    clock = SimulatedClock()
    network = SimulatedNetwork(5, clock)
    disk, other = SimulatedDisk(1, clock=clock), SimulatedDisk(2, clock=clock)
    node = NodeSettings(address=Address("b", PORT), allow=frozenset({"any"}), plain_off_loopback=True, log_config=SMALL)
    ReplicaNode("/b", node, filesystem=other, clock=clock, network=network.machine("b").start())
    grant = Grant(
        outbox_id=UUID(int=1),
        epoch=256,
        leader=0,
        members=(Member(0), Member(1, f"b:{PORT}")),
        min_insync_replicas=2,
        members_epoch=256,
        pid_epoch=0,
        topic_id=UUID(int=2),
        topic="t",
        partitions=1,
        carrier="key",
    )
    log = SegmentLog.open("/a/t-0", SMALL, log_id=UUID(int=2), has_replicas=True, filesystem=disk, clock=clock)
    settings = PushSettings(network=network.machine("a").start(), linger_ms=linger_ms, shutdown_timeout_ms=100)
    leading = Leading(
        grant.outbox_id,
        grant,
        {0: log},
        [Replica(1, node.address)],
        durability=Durability.BUFFERED,
        settings=settings,
        clock=clock,
    )
    leading.start()
    append(log, leading, clock)
    while log.high_watermark < 1:
        assert network.step()
    append(log, leading, clock)
    network.machine("b").kill()
    append(log, leading, clock)
    steps, until_ms = network.scheduler.steps, clock.monotonic_ms() + 20_000
    while clock.monotonic_ms() < until_ms:
        assert network.step()
    assert network.scheduler.steps - steps < 1_000, "it looks again and again at what has not changed"
    leading.close()
    log.close()


def append(log, leading, clock):
    batch = encode_batch([b"value"], timestamps_ms=1)
    leading.partitions[0].on_append(log.append(batch).base_offset, [batch], clock.monotonic_ms())
