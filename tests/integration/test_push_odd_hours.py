"""Rare situations in operation: nodes that return under another index, retention, calls that cross."""

import signal
import sys
import threading
from dataclasses import replace
from itertools import count
from uuid import UUID, uuid4

import pytest

from pushrep import Acks, Outbox
from pushrep.election.errors import CantLead
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import ForkedProcess
from pushrep.log import Durability, SegmentLog
from pushrep.outbox.member_changes import add_member, remove_member
from pushrep.records import encode_batch
from pushrep.replay.node_connection import NodeUnreachable
from pushrep.replicate import node_calls
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.election_state import ElectionStateStore, find_election_state
from pushrep.replicate.errors import MayStillBeDelivered, Refusal
from pushrep.replicate.led_partition import LedPartition
from pushrep.replicate.member_clients import tp_of
from pushrep.replicate.settings import Replica
from pushrep.replicate.sockets import Address
from pushrep.status.metrics import StatusCollector
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import (
    DescribeLogRequest,
    DescribeLogResponse,
    EpochStart,
    ListLogsRequest,
    ListLogsResponse,
)
from tests.integration.conftest import SMALL, Service
from tests.integration.outboxes import QUICK, WAIT_S, open_outbox, wait_for_all, wait_until
from tests.integration.test_outbox_members import finish
from tests.support.forks import code_in_fork
from tests.support.outbox_arguments import outbox_arguments


def address(world, index):
    return str(world.nodes[index].address)


def fill(outbox, count):
    for number in range(count):
        outbox.append(0, b"%d" % number).result(WAIT_S)


def log_starts(node):
    return [replica.log.log_start_offset for _, replica in node.replicas()]


# -- retention -----------------------------------------------------------------------------------------------------


def test_h2_records_that_go_by_retention_go_at_the_replicas_too_while_nothing_is_appended(world):
    world.node(1)
    with open_outbox(world, 1) as outbox:
        fill(outbox, 5)
        wait_for_all(outbox)
        assert outbox.log(0).delete_records(3) == 3
        wait_until(lambda: log_starts(world.nodes[1]) == [3], "the replica was told")


def test_a_replica_that_was_away_while_what_it_lacks_went_begins_anew(world):
    """The table's row "restart"; its old log is kept beside it."""
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, 2, acks=Acks.LOCAL) as outbox:
        fill(outbox, 1)
        wait_for_all(outbox)
        world.nodes[2].stop()
        fill(outbox, 5)
        wait_until(lambda: outbox.log(0).high_watermark == 6, "the one that is away has left the in-sync set")
        assert outbox.log(0).delete_records(4) == 4
        world.node(2)
        wait_for_all(outbox)
        assert log_starts(world.nodes[2]) == [4]
    assert list((world.root / "node-2" / outbox.identity.outbox_id).glob("**/*.stale*"))


# -- who counts ----------------------------------------------------------------------------------------------------


def test_a_node_that_was_removed_and_added_again_counts_for_leading_under_its_new_index(world):
    """Members, grants, epochs: N - m + 1 members lead; one that acknowledges has to be one that can be asked."""
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, 2) as outbox:
        fill(outbox, 1)
        wait_for_all(outbox)
        finish(lambda: remove_member(outbox.facts, 1))
        finish(lambda: add_member(outbox.facts, address(world, 1)))
        fill(outbox, 1)
        wait_for_all(outbox)
    world.nodes[2].stop()
    with open_outbox(world, 1, 2) as outbox:
        assert outbox.facts.replication.grant.indexes == {0, 2, 3}
        fill(outbox, 1)
    kept = find_election_state(world.root / "node-1" / outbox.identity.outbox_id, REAL_FILESYSTEM)[1]
    assert kept.member == 3


def test_two_addresses_of_one_node_are_not_two_members(world):
    """The guarantee: records that m members hold are on m disks."""
    world.node(1)
    port = world.nodes[1].address.port
    replicas = [f"127.0.0.1:{port}", f"localhost:{port}"]
    given = {"acks": Acks.LOCAL, "min_insync_replicas": 3, "push": QUICK, "log_config": SMALL}
    with pytest.raises(CantLead, match="members 1 and 2 lead to one directory"):
        Outbox.open(world.root / "outbox", "orders", 1, "billing", **outbox_arguments(replicas=replicas, **given))


def test_where_one_member_is_enough_the_watermark_rises_before_anything_is_appended(world):
    """HWM = min LEO over the in-sync set, and it moves while the set has m members: with m = 1 the leader alone."""
    directory = world.root / "service"
    with SegmentLog.open(directory / "orders-0", SMALL, has_replicas=True) as log:
        log.append(encode_batch([b"a", b"b"], timestamps_ms=1), durability=Durability.FLUSHED)
        assert log.high_watermark == 0, "as a crash leaves it: the checkpoint is older than the log"
    service = Service(directory, uuid4(), [Replica(1, Address("127.0.0.1", 9))], min_insync=1)
    try:
        service.start()
        assert service.logs[0].high_watermark == 2
    finally:
        service.close()


# -- calls that cross ----------------------------------------------------------------------------------------------


def test_a_grant_that_was_let_in_before_a_promotion_does_not_overwrite_what_that_promised(world):
    """Each member keeps the newest grant: the old leader's last offer must not replace the promoted one's file."""
    for index in (1, 2):
        world.node(index)
    with open_outbox(world, 1, 2) as outbox:
        fill(outbox, 1)
        grant = outbox.facts.replication.grant
    node, kept = world.nodes[1], world.kept(1)
    with kept.exclusive_open(), node.hand_over(grant.outbox_id):
        promoting = ElectionStateStore(kept.directory, grant.outbox_id, REAL_FILESYSTEM)
        promoted = grant.renewed(grant.epoch + 513, 1)
        promoting.keep(replace(promoting.kept, grant=promoted))
        with pytest.raises(Refusal, match="handed over"):
            kept.offer_grant(grant.renewed(grant.epoch + 256, 0), 0, 1)
        assert find_election_state(kept.directory, REAL_FILESYSTEM)[1].grant == promoted
    assert kept.election_state.grant == promoted


def test_a_promotion_that_leaves_promises_that_cannot_be_read_stops_that_outbox_until_they_can(world, caplog):
    """A promise that is forgotten loses records: nothing is answered out of what was known before."""
    world.node(1)
    with open_outbox(world, 1) as outbox:
        fill(outbox, 1)
        log = outbox.facts.replication.appenders[0].led.tp
    kept = world.kept(1)
    path = kept.directory / "promises.json"
    sound = path.read_bytes()
    with world.nodes[1].hand_over(kept.outbox_id):
        path.write_bytes(sound[:-20])
    assert str(path) in caplog.text
    asked = DescribeLogRequest(outbox_id=kept.outbox_id, member=0, create=True, partitions=(log,))
    with ReplicaClient(world.nodes[1].address, QUICK) as client:
        assert client.ask(asked, DescribeLogResponse).error_code is ErrorCode.KAFKA_STORAGE_ERROR
        path.write_bytes(sound)
        assert client.ask(asked, DescribeLogResponse).logs[0].log_end_offset == 1
    with open_outbox(world, 1) as outbox:
        assert outbox.append(0, b"on").result(WAIT_S) == 1


@pytest.mark.parametrize("step", range(4))
def test_who_begins_to_wait_while_the_leader_closes_is_called_back_once(world, step):
    """A receipt resolves once: `close` comes at any step, as between the look whether it is closed and the waiting."""
    world.node(1)
    with open_outbox(world, 1) as outbox:
        led, said = outbox.facts.replication.appenders[0].led, []
        closing, steps = threading.Thread(target=led.close), count()

        def close_at_the_step(frame, event, _arg):
            if frame.f_code is not LedPartition.when_replicated.__code__:
                return None
            if event == "line" and next(steps) == step:
                closing.start()
                closing.join(0.1)  # unless it has to wait
            return close_at_the_step

        before = sys.gettrace()
        sys.settrace(close_at_the_step)
        try:
            led.when_replicated(10, said.append)
        finally:
            sys.settrace(before)
        closing.join(WAIT_S)
        assert [type(one) for one in said] == [MayStillBeDelivered]


def test_asking_for_outboxes_that_are_not_there_leaves_nothing_in_the_node(world):
    """Malformed or foreign input for minutes: no growth."""
    world.node(1)
    with ReplicaClient(world.nodes[1].address) as client:
        for _ in range(20):
            stranger, tp = uuid4(), TopicIdPartition(uuid4(), "orders", 0)
            asked = client.ask(DescribeLogRequest(outbox_id=stranger, partitions=(tp,)), DescribeLogResponse)
            assert asked.logs[0].error_code.name == "UNKNOWN_TOPIC_ID"
            assert client.ask(ListLogsRequest(outbox_id=stranger), ListLogsResponse).logs == ()
    assert world.nodes[1].store.kept() == []


# -- many openings -------------------------------------------------------------------------------------------------


def test_logs_that_were_opened_for_years_are_described_in_several_answers(world, monkeypatch):
    """Frame limits: a log gets an epoch with every opening, and a list of them that outgrew the frame ended all."""
    epochs = tuple(EpochStart(epoch=256 * n + 2**30, start_offset=n + 2**40) for n in range(60_000))
    world.node(1)
    with open_outbox(world, 1, partitions=3) as outbox:
        tps = tuple(tp_of(outbox.log(n)) for n in range(3))
        described = node_calls.description
        monkeypatch.setattr(node_calls, "description", lambda one: replace(described(one), leader_epochs=epochs))
        with ReplicaClient(world.nodes[1].address) as client:
            asked = DescribeLogRequest(outbox_id=UUID(outbox.identity.outbox_id), partitions=tps)
            answer = client.ask(asked, DescribeLogResponse)
    assert [one.tp for one in answer.logs] == [tps[0]]


def test_who_leads_and_who_wants_to_asks_for_the_logs_that_an_answer_left_out(world, monkeypatch):
    monkeypatch.setattr(node_calls, "_DESCRIPTIONS_BYTES", 1)
    world.node(1)
    for _ in range(2):
        with open_outbox(world, 1, partitions=4, min_insync_replicas=2) as outbox:
            for partition in range(4):
                outbox.append(partition, b"on both").result(WAIT_S)
            wait_for_all(outbox)


# -- faults of others ----------------------------------------------------------------------------------------------


def test_a_replica_that_described_nonsense_is_asked_again(world, monkeypatch):
    """A session begins again after a pause: the thread that begins sessions survives an invalid list of epochs."""
    world.node(1)
    described, nonsense = (
        node_calls.description,
        [EpochStart(epoch=5, start_offset=7), EpochStart(epoch=4, start_offset=3)],
    )
    asked = []

    def description(replica):
        asked.append(replica)
        return replace(described(replica), leader_epochs=nonsense if len(asked) == 1 else ())

    with open_outbox(world, 1, acks=Acks.LOCAL) as outbox:
        fill(outbox, 1)
        wait_for_all(outbox)
        world.nodes[1].stop()
        monkeypatch.setattr(node_calls, "description", description)
        world.node(1)
        fill(outbox, 1)
        wait_for_all(outbox)
    assert len(asked) > 1


def test_a_host_that_no_name_can_be_is_unreachable_like_any_other():
    with pytest.raises(NodeUnreachable, match="label"):
        ReplicaClient(Address("a" * 64, 7400))


def test_one_who_waited_and_fails_takes_nobody_with_him(world):
    """A receipt resolves once: also behind a callback that raises."""
    service = world.service([world.node(1)], name="service")
    service.start()
    said, told = [], threading.Event()

    def fails(error):
        said.append(error)
        raise RuntimeError

    service.leading.partitions[0].when_replicated(1, fails)
    service.leading.partitions[0].when_replicated(1, lambda error: (said.append(error), told.set()))
    service.append(b"one")
    assert told.wait(WAIT_S)
    assert said == [None, None]


# -- forks ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("use", [Outbox.lag, Outbox.status, Outbox.wait_shipped])
def test_in_a_fork_every_use_is_refused_before_it_takes_a_lock(world, use):
    """In a forked child every use raises ForkedProcess: also while the parent holds a partition's lock."""
    world.node(1)
    with open_outbox(world, 1) as outbox, outbox.facts.replication.appenders[0].led.lock:

        def child():
            signal.alarm(WAIT_S)
            with pytest.raises(ForkedProcess):
                use(outbox)
            list(StatusCollector(outbox.status).collect())  # says nothing of it, and fails nobody's scrape

        assert code_in_fork(child) == 0
