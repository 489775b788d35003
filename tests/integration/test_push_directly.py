"""An append sends its own request where nothing else waits to be sent: in whose thread, and what goes wrong there."""

import threading
from dataclasses import replace

import pytest

from pushrep.election.epochs import LogEnds
from pushrep.election.messages import PushSessionEndReason, batches_of
from pushrep.env import REAL_NETWORK, SYSTEM_CLOCK
from pushrep.records.leader_epochs import LeaderEpochs
from tests.integration.conftest import QUICK, WAIT_S, succeed


class NotedSocket:
    """A socket that notes which threads send."""

    def __init__(self, sock, senders):
        self._sock, self._senders = sock, senders

    def sendmsg(self, buffers, /):
        self._senders.append(threading.current_thread().name)
        return self._sock.sendmsg(buffers)

    def __getattr__(self, name):
        return getattr(self._sock, name)


class NotedNetwork:
    """The system's network, with noted sockets."""

    threads, listen, poller = REAL_NETWORK.threads, REAL_NETWORK.listen, REAL_NETWORK.poller

    def __init__(self):
        self.senders = []

    def connect(self, address, timeout_s):
        return NotedSocket(REAL_NETWORK.connect(address, timeout_s), self.senders)


def led_by(world, replicas, network=REAL_NETWORK, **settings):
    settings = replace(QUICK, network=network, **settings)
    service = world.service([replica.replica for replica in replicas], settings=settings)
    service.leading.manager.startup()
    for replica in replicas:
        start_session(service, replica)
    service.append(b"first")
    service.wait_for_all()
    return service


def start_session(service, replica):
    """Start a session as a driver does, to an empty log."""
    led = service.leading.partitions[0]
    session = led.start_session(replica.replica, replica.replica_epoch, 1, LogEnds(0, 0, LeaderEpochs()))
    service.leading.manager.start_push(led.tp, session)


def log_bytes(service):
    return b"".join(bytes(batch.data) for batch in service.logs[0].batches(0))


def has_all(service):
    end = service.logs[0].log_end_offset
    return lambda parts: any(offsets_of(part)[-1:] == [end] for part in parts)


def offsets_of(part):
    """The end offsets of the batches."""
    return [batch.next_offset for batch in batches_of(part.records[0])[0]] if part.records else []


def test_a_record_alone_leaves_in_the_thread_that_appends_it(world, scripted):
    network, replicas = NotedNetwork(), [scripted(1), scripted(2)]
    service = led_by(world, replicas, network, watermark_linger_ms=60_000)
    here = threading.current_thread().name
    for _ in range(1000):  # once is enough: a worker may still be at the answer before
        network.senders.clear()
        service.append(b"alone")
        service.wait_for_all()
        assert len(network.senders) == 2, "its answer needs no other request"
        if network.senders == [here, here]:
            return
    pytest.fail("the worker sent them all")


def test_h2_a_watermark_waits_for_records_only_where_they_came_soon_behind_the_one_before(world, scripted):
    """Alone at once where that waited in vain; the next one waits again if records do come."""
    replica, hour_ms = scripted(), 3_600_000
    service = led_by(world, [replica], watermark_linger_ms=hour_ms)
    pusher = service.leading.manager._pushes[service.leading.partitions[0].tp][1].pusher
    service.append(b"second")
    service.wait_for_all()
    assert [part.high_watermark for part in replica.requests][-1] == 1, "2 waits for records"
    pusher.alone_ms = SYSTEM_CLOCK.monotonic_ms() - hour_ms - 1  # long before these, one went alone
    service.append(b"third")
    *_, with_records, alone = replica.wait_for(lambda parts: parts[-1].high_watermark == 3)
    assert with_records.records
    assert not alone.records
    service.append(b"fourth, soon behind it")
    service.wait_for_all()
    assert pusher.alone_ms is None
    assert [part.high_watermark for part in replica.requests][-1] == 3, "4 waits for records"


def test_a2_what_waits_is_not_overtaken_by_who_appends(world, scripted):
    """More than may be in flight, and more than the system's buffers take, before the first answer."""
    replica = scripted()
    service = led_by(world, [replica], requests_in_flight_max=3)
    replica.gate.clear()
    for number in range(12):
        service.append(bytes([number]) * 1_000_000)
    replica.gate.set()
    service.wait_for_all()
    assert replica.records() == log_bytes(service), "each byte once, in the log's order"


def test_a3_an_append_does_not_wait_for_a_replica_that_takes_nothing(world, scripted):
    """With LOCAL the append only waits for the log; the rest is pushed when the replica reads again."""
    replica = scripted()
    service = led_by(world, [replica])
    replica.gate.clear()
    sent = replica.frames
    service.append(b"held back")
    replica.wait_for(lambda _: replica.frames > sent)  # its one thread stands at the gate now, and reads nothing
    for number in range(16):
        service.append(bytes([number]) * 1_000_000)
    (progress,) = service.leading.partitions[0].leader.sessions.values()
    assert progress.acknowledged < service.logs[0].log_end_offset
    replica.gate.set()
    service.wait_for_all()
    assert replica.records() == log_bytes(service)


def test_small_records_that_come_behind_two_requests_go_together(world, scripted):
    """A replica carries out one while the other is at hand; each of the rest alone would cost it a turn."""
    replica = scripted()
    service = led_by(world, [replica], watermark_linger_ms=60_000)
    replica.gate.clear()
    sent, before = replica.frames, len(replica.requests)
    service.append(b"held back")
    replica.wait_for(lambda _: replica.frames > sent)
    for number in range(8):
        service.append(b"%d" % number)
    replica.gate.set()
    service.wait_for_all()
    counts = [len(offsets_of(part)) for part in replica.requests[before:] if part.records]
    assert sum(counts) == 9
    assert len(counts) <= 3, "two in flight, and one with all that came meanwhile"


def test_r2_a_connection_that_breaks_under_an_append_is_made_anew_and_the_same_bytes_go_out(world, scripted):
    replica = scripted()
    service = led_by(world, [replica])
    for number in range(10):
        replica.cut()
        service.append(b"%d" % number * 1000)
        service.append(b"%d" % number)
    service.wait_for_all()
    assert service.wait() is None
    ends = [end for part in replica.wait_for(has_all(service)) for end in offsets_of(part)]
    assert set(range(1, service.logs[0].log_end_offset + 1)) <= {*ends}, "every batch came at least once"


def test_e1_a_replica_that_was_lost_once_is_told_the_end_of_its_session_all_the_same(world, scripted):
    replica = scripted()
    service = led_by(world, [replica])
    replica.gate.clear()
    sent = replica.frames
    service.append(b"in flight when the connection goes")
    replica.wait_for(lambda _: replica.frames > sent)
    replica.cut()
    replica.gate.set()
    service.wait_for_all()
    led = service.leading.partitions[0]
    told = service.leading.manager.stop_push(led.tp, [replica.replica.index], PushSessionEndReason.REPLICA_REMOVED)
    assert told.result(WAIT_S) is True
    assert replica.requests[-1].end_session_reason == PushSessionEndReason.REPLICA_REMOVED


def test_a_member_that_is_taken_out_is_told_so_as_the_end_of_its_session(world, scripted):
    replica = scripted()
    service = led_by(world, [replica])
    service.append(b"x")
    service.wait_for_all()
    service.leading.stop_pushing_to(replica.replica.index)
    replica.wait_for(lambda parts: parts[-1].end_session_reason == PushSessionEndReason.REPLICA_REMOVED)


def test_what_lies_in_the_file_goes_in_large_requests_once_the_logs_are_known_to_agree(world, scripted):
    """Such a request takes no memory of the leader; it counts as several, so that the bytes in flight stay limited."""
    replica, seen = scripted(), []
    service = world.service(
        [replica.replica],
        settings=replace(QUICK, request_bytes_max=4000, request_file_bytes_max=16_000, requests_in_flight_max=6),
    )
    for _ in range(100):
        service.append(b"x" * 900)

    def answer(part):
        if not seen:
            replica.gate.clear()  # behind the first, which says that the logs agree
        seen.append(len(part.records[0]))
        return succeed(part)

    replica.answer = answer
    service.leading.manager.startup()
    start_session(service, replica)
    service.wait_for(lambda leader: len(leader.sessions[1].in_flight) == 2 and leader.sessions[1].acknowledged)
    sent = service.leading.partitions[0].leader.sessions[1].next_offset
    assert sent < 50, "two of them are as many as may be in flight"
    replica.gate.set()
    service.wait_for_all()
    assert seen[0] <= 4000 < max(seen) <= 16_000
    assert replica.records() == log_bytes(service)
