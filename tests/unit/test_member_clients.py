"""What a member's answer is worth to who leads: the records that are fetched from it, and a description of its logs."""

from uuid import uuid4

import pytest

from pushrep.log import SegmentLog
from pushrep.records import encode_batch
from pushrep.replay.node_connection import NodeUnreachable
from pushrep.replicate.member_clients import MemberClients, tp_of
from pushrep.replicate.settings import PushSettings
from pushrep.wire import push_messages as wire
from pushrep.wire.calls import ApiKey
from pushrep.wire.error_codes import ErrorCode
from tests.support.simulated_disk import SimulatedClock
from tests.unit.scripted_node import BREAKS, HERE, ScriptedNode


@pytest.fixture
def log(tmp_path):
    """A log of the offsets [0, 2)."""
    with SegmentLog.open(tmp_path / "orders-0", has_replicas=True) as opened:
        opened.append([b"a", b"b"])
        yield opened


@pytest.fixture
def node():
    return ScriptedNode(SimulatedClock())


@pytest.fixture
def clients(node, log):
    return MemberClients(uuid4(), 0, [tp_of(log)], PushSettings(network=node))


def batch(base_offset, next_offset):
    made = encode_batch([b"%d" % n for n in range(base_offset, next_offset)], timestamps_ms=1)
    made.stamp(base_offset, 0)
    return bytes(made.data)


def records(*batches):
    return wire.FetchRecordsResponse(log_end_offset=9, records=(b"".join(batches),) if batches else ())


def fetched(clients, log, end_offset):
    for batches in clients.fetch(HERE, log, 0, end_offset):
        log.append_as_is(batches)


def test_what_is_fetched_is_asked_for_from_the_logs_end_on_until_it_is_there(clients, node, log):
    """And nothing above that: a member may hold records that nobody has acknowledged."""
    node.connections.append(
        {ApiKey.FETCH_RECORDS: [records(batch(2, 4)), records(batch(4, 5), batch(5, 7), batch(7, 9))]}
    )
    fetched(clients, log, 7)
    assert [record.value for record in log.records(0)] == [b"a", b"b", b"2", b"3", b"4", b"5", b"6"]
    asked = [one.offset for one in node.asked if isinstance(one, wire.FetchRecordsRequest)]
    assert (asked, node.line.is_open) == ([2, 4], False)


BAD = {
    "an error": wire.FetchRecordsResponse(error_code=ErrorCode.FENCED_LEADER_EPOCH, error_message="fenced"),
    "an error with records": wire.FetchRecordsResponse(
        error_code=ErrorCode.FENCED_LEADER_EPOCH, records=(batch(2, 4),)
    ),
    "nothing": records(),
    "damage": records(batch(2, 4)[:-1] + b"?"),
    "damage behind a whole batch": records(batch(2, 4), batch(4, 6)[:-1] + b"?"),
    "a part of a batch": records(batch(2, 4), batch(4, 6)[:-5]),
    "a hole": records(batch(3, 5)),
    "a hole between": records(batch(2, 4), batch(5, 7)),
    "records that are there": records(batch(1, 3)),
    "a batch that goes too far": records(batch(2, 8)),
    **{how: how for how in BREAKS[1:]},
}


@pytest.mark.parametrize("what", BAD)
def test_a_member_that_gives_no_batches_that_join_is_no_source(clients, node, log, what):
    """Nothing of that answer is appended: no CRC covers where a batch belongs."""
    node.connections.append({ApiKey.FETCH_RECORDS: BAD[what]})
    with pytest.raises(NodeUnreachable):
        fetched(clients, log, 7)
    assert (log.log_end_offset, node.line.is_open) == (2, False)


def described(tp, **fields):
    return wire.LogDescription(tp=tp, **fields)


@pytest.mark.parametrize(
    ("answer", "has_logs"),
    [({"error_code": ErrorCode.UNAUTHORISED}, False), ({"error_code": ErrorCode.UNAUTHORISED}, True), ({}, False)],
    ids=["an error", "an error with logs", "no log"],
)
def test_a_member_that_describes_nothing_counts_as_not_reached(clients, node, log, answer, has_logs):
    logs = (described(tp_of(log)),) if has_logs else ()
    node.connections.append({ApiKey.DESCRIBE_LOG: wire.DescribeLogResponse(logs=logs, **answer)})
    with pytest.raises(NodeUnreachable):
        clients.describe(1, HERE)
    assert not node.line.is_open


@pytest.mark.parametrize(
    ("fields", "is_there", "is_damaged"),
    [
        ({}, True, False),
        ({"error_code": ErrorCode.UNKNOWN_TOPIC_ID}, False, None),
        ({"error_code": ErrorCode.KAFKA_STORAGE_ERROR}, True, True),
        ({"damaged_from": 0}, True, True),
        ({"damaged_from": 5}, True, True),
    ],
    ids=["whole", "not there", "can't be opened", "damaged at once", "damaged"],
)
def test_a_log_that_a_member_can_not_open_counts_as_damaged_and_one_that_it_lacks_as_none(
    clients, node, log, fields, is_there, is_damaged
):
    node.connections.append({ApiKey.DESCRIBE_LOG: wire.DescribeLogResponse(logs=(described(tp_of(log), **fields),))})
    answer = clients.describe(1, HERE)
    assert [(n, one.is_damaged) for n, one in answer.logs.items()] == ([(0, is_damaged)] if is_there else [])
    assert not node.line.is_open
