"""A subscriber beside one node: it holds every block against the one before, whatever the node has checked (identity
O5), and does not wait for a node that has fallen silent.
"""

from types import SimpleNamespace

import pytest

from pushrep.env import SYSTEM_CLOCK
from pushrep.records import encode_batch
from pushrep.replay import TO_END, NodeAccess, ReplayEndReason, ReplayRequest
from pushrep.replay.remote import RemoteSession
from pushrep.wire import replay_messages as wire
from pushrep.wire.connection import PeerEvent
from pushrep.wire.error_codes import ErrorCode
from tests.support.simulated_disk import SimulatedClock


class Subscriber:
    """A session, and the connection on which its node sends what `gets` is given."""

    correlation_id = 1

    def __init__(self, access=NodeAccess(), clock=SYSTEM_CLOCK):  # noqa: B008 - it is frozen
        self.session = RemoteSession(("127.0.0.1", 1), 1, ReplayRequest("orders-0", 0, TO_END), access, clock)
        self.socket, self.coming = SimpleNamespace(settimeout=lambda seconds: None), []
        self.session.start(self, wire.StartReplayResponse(session_id=1, start_offset=0, end_offset=100))

    def gets(self, message):
        """The block that the reader gets then, if any."""
        self.coming.append(PeerEvent(1, message))
        return self.session.step()

    @property
    def end(self):
        return self.session.end

    def ask(self, request, answer):
        return answer()

    def receive(self):
        coming, self.coming = self.coming, []
        return coming

    def close(self):
        self.coming = None  # nothing is received any more


@pytest.fixture
def subscriber():
    """A subscriber that has received everything below offset 10, the end of a batch."""
    made = Subscriber()
    assert made.gets(data(0, 10, batch(0, 10))).end == 10
    return made


def batch(base_offset, next_offset):
    made = encode_batch([b"x"] * (next_offset - base_offset), timestamps_ms=1, base_offset=base_offset)
    return bytes(made.data)


def data(start, end, *batches):
    return wire.ReplayData(
        session_id=1, start_offset=start, end_offset=end, tip_offset=100, records=(memoryview(b"".join(batches)),)
    )


def end(offset, reason=ReplayEndReason.LIMIT_REACHED):
    return wire.ReplayEnd(session_id=1, reason=reason, offset=offset)


@pytest.mark.parametrize(
    "block",
    [
        data(10, 12, batch(11, 13)),
        data(10, 12, batch(9, 12)),
        data(10, 14, batch(10, 12), batch(13, 15)),
        data(10, 14, batch(10, 12), batch(11, 14)),
        data(12, 13, batch(10, 13)),
        data(8, 12, batch(10, 12)),
        data(10, 15, batch(10, 13)),
        data(10, 10, batch(10, 13)),
        data(10, 13, batch(10, 13), batch(13, 15)),
    ],
    ids=[
        "a hole", "one lower", "a hole between", "an overlap", "it begins later", "it begins before",
        "it goes further than its records", "it goes nowhere", "it goes less far than its records",
    ],
)  # fmt: skip
def test_identity_o5_a_block_that_does_not_join_ends_the_replay_at_its_offset(subscriber, block):
    assert subscriber.gets(block) is None, "none of it is given"
    found = subscriber.end
    assert (found.code, found.offset, found.reason) == (ErrorCode.CORRUPT_MESSAGE, 10, ReplayEndReason.ERROR)


@pytest.mark.parametrize(
    "block",
    [data(10, 12, batch(10, 12)), data(10, 11, batch(10, 12)), data(10, 13, batch(10, 12), batch(12, 13))],
    ids=["the next", "cut", "two"],
)
def test_identity_o5_what_joins_is_given(subscriber, block):
    given = subscriber.gets(block)
    assert (given.start, given.end) == (block.start_offset, block.end_offset)
    assert subscriber.end is None


def test_identity_o5_a_batch_may_be_gone_on_with_only_where_it_was_cut(subscriber):
    assert subscriber.gets(data(10, 11, batch(10, 13))).end == 11
    assert subscriber.gets(data(11, 13, batch(10, 13))).end == 13
    assert subscriber.gets(data(13, 15, batch(12, 15))) is None
    assert subscriber.end.code is ErrorCode.CORRUPT_MESSAGE


def test_identity_o5_an_end_is_reached_by_records_that_came(subscriber):
    assert subscriber.gets(end(12)) is None
    assert (subscriber.end.code, subscriber.end.offset) == (ErrorCode.CORRUPT_MESSAGE, 10)


@pytest.mark.parametrize("last", [end(10), end(12, ReplayEndReason.STOPPED)])
def test_identity_o5_an_end_that_was_reached_is_one(subscriber, last):
    assert subscriber.gets(last) is None
    assert (subscriber.end.code, subscriber.end.reason) == (ErrorCode.NONE, last.reason)


class Away:
    """A network on which nobody answers; how often it was tried."""

    tried = 0

    def connect(self, address, timeout_s):
        self.tried += 1
        raise ConnectionRefusedError


@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.parametrize("reconnect", [False, True])
def test_a_connection_without_a_word_for_the_longest_silence_is_broken(reconnect, is_paused):
    """NodeAccess: "a connection without any message, not even a heartbeat, for so long counts as broken"."""
    access, clock = NodeAccess(reconnect=reconnect, network=Away()), SimulatedClock()
    clock.advance(1_000_000)
    subscriber = Subscriber(access, clock)
    clock.advance(access.silence_max_ms + 1)
    subscriber.session.attach(subscriber, 2)  # as after a reconnect
    clock.advance(access.silence_max_ms)
    assert subscriber.session.step() is None
    assert subscriber.coming == [], "it is a new connection"
    subscriber.gets(data(0, 10, batch(0, 10)))
    clock.advance(access.silence_max_ms)
    subscriber.gets(wire.ReplayData(session_id=1, start_offset=10, end_offset=10, tip_offset=100))
    clock.advance(access.silence_max_ms)
    assert subscriber.session.step() is None
    assert subscriber.coming == [], "a heartbeat is a word"
    clock.advance(1)
    subscriber.session.rest() if is_paused else subscriber.session.step()
    assert subscriber.coming is None, "the connection is closed"
    subscriber.session.step()
    assert access.network.tried == reconnect
    if reconnect:
        assert subscriber.end is None
    else:
        found = subscriber.end
        assert (found.code, found.offset, found.reason) == (ErrorCode.REQUEST_TIMED_OUT, 10, ReplayEndReason.ERROR)
