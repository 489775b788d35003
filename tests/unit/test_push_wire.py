"""Between the wire and the rules nothing is lost: every field, every outcome."""

from dataclasses import replace
from uuid import UUID

import pytest

from pushrep.election.grants import Destination, Grant, Hold, Member, SettledList, Takeover
from pushrep.election.messages import AppendRecordsPartition
from pushrep.records import encode_batch
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire import push_messages as wire
from pushrep.wire.calls import encode, open_frame
from pushrep.wire.frames import FrameLimits, FrameReader, ProtocolError


def over_the_wire(message):
    data = b"".join(bytes(part) for part in encode(message, 1))
    (frame,) = FrameReader(open_frame, FrameLimits()).feed(data)
    return frame.message


def appended(data, **more):
    """A partition's part with one batch."""
    return AppendRecordsPartition(
        tp=TP, leader_epoch=300, replica_epoch=2, session_id=3, append_offset=5, previous_epoch=44,
        epoch_start_offset=5, high_watermark=4, log_start_offset=1, records=(memoryview(bytes(data)),), **more,
    )  # fmt: skip


TP = TopicIdPartition(UUID(int=1), "orders", 3)


def test_a_request_survives_the_way_there_and_back():
    batch = encode_batch([b"a", b"b"], timestamps_ms=1)
    batch.stamp(5, 300)
    sent = appended(batch.data, flush_wanted=True, restart=True, end_session_reason=8, generation=9)
    (came,) = over_the_wire(wire.AppendRecordsRequest(partitions=(sent,))).partitions
    assert (came, came.split().is_whole) == (sent, True)
    assert [(one.base_offset, one.next_offset, one.leader_epoch) for one in came.batches] == [(5, 7, 300)]


def test_a_damaged_record_is_seen():
    data = bytearray(encode_batch([b"a"], timestamps_ms=1).data)
    data[-1] ^= 1
    assert not appended(data).split().is_whole


def test_a_grant_survives_with_every_field():
    grant = Grant(
        outbox_id=UUID(int=2),
        epoch=513,
        leader=1,
        members=(Member(0, "a:1", UUID(int=9), "billing"), Member(1, "b:2")),
        min_insync_replicas=2,
        members_epoch=257,
        pid_epoch=4,
        topic_id=UUID(int=3),
        topic="orders",
        partitions=5,
        carrier="header",
        destinations=(Destination(UUID(int=4), 6),),
        accepted_loss="seen",
        previous_members=(Member(0, "a:1"), Member(1, "b:2"), Member(2)),
        previous_min_insync_replicas=2,
        generation=7,
        hold=Hold(257, 1, 2, "switches"),
        takeover=Takeover(513, 3),
        lists=(SettledList(members=(Member(0), Member(1))), SettledList(members=(Member(1),))),
    )
    came = over_the_wire(wire.GrantRequest(grant=grant, sender=1, member=0)).grant
    assert came == grant
    plain = replace(grant, hold=None, takeover=None)
    assert over_the_wire(wire.GrantRequest(grant=plain, sender=1, member=0)).grant == plain


def test_a_grant_that_contradicts_itself_is_refused_on_arrival():
    grant = Grant(
        outbox_id=UUID(int=2), epoch=256, leader=0, members=(Member(0),), min_insync_replicas=1, members_epoch=0,
        pid_epoch=0, topic_id=UUID(int=3), topic="orders", partitions=1, carrier="key",
    )  # fmt: skip
    object.__setattr__(grant, "epoch", 257)
    with pytest.raises(ProtocolError, match="GrantRequest: no grant: epoch 257 is not member 0's"):
        over_the_wire(wire.GrantRequest(grant=grant, sender=0, member=1))
