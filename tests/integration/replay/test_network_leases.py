"""lease_max_s over the network: a session whose subscriber takes nothing holds the disk for so long, and no longer."""

import pytest

from pushrep.env import SYSTEM_CLOCK
from pushrep.log import LogConfig
from pushrep.replay import ReplayEndReason, ReplayFailed, ReplayRefused, ReplayRequest
from pushrep.startpoints import Startpoint, StartpointStore
from pushrep.wire.error_codes import ErrorCode
from tests.integration.replay.conftest import offsets, open_log, take, until

LEASE_MAX_S, COUNT = 60, 4_000


class Ahead:
    """This machine's clocks, that a test puts forward."""

    def __init__(self):
        self.ms = 0

    def wall_ms(self):
        return SYSTEM_CLOCK.wall_ms() + self.ms

    def monotonic_ms(self):
        return SYSTEM_CLOCK.monotonic_ms() + self.ms


class Kept:
    """A node's log of many segments, of which retention would leave the last."""

    def __init__(self, world):
        config = LogConfig(segment_bytes=4096, preallocate_bytes=0, retention_bytes=0, lease_max_s=LEASE_MAX_S)
        self.clock = Ahead()
        # What the clock leaps over is no time in which something could have been sent.
        patient = {"liveness_timeout_ms": 3_600_000, "connect_timeout_ms": 3_600_000}
        self.node = world.node(config=config, clock=self.clock, replay=patient)
        self.leader = world.leader(self.node).fill(COUNT)
        self.client = world.client(self.node)

    @property
    def log(self):
        return open_log(self.node, self.leader.tp)

    def pass_time(self, *, renewing):
        """Longer than lease_max_s, and until so many sessions have renewed after it."""
        self.clock.ms += 1000 * (LEASE_MAX_S + 1)
        at_ms = self.clock.monotonic_ms()
        until(lambda: sum(lease.renewed_ms >= at_ms for lease in self.log.leases) == renewing)
        self.retain()

    def retain(self):
        """All passes of retention that there are."""
        while self.log.apply_retention():
            pass


@pytest.fixture
def kept(world):
    return Kept(world)


def test_a_session_that_is_not_read_holds_segments_for_lease_max_s_and_its_subscriber_is_told_once(kept):
    """A session holds a lease on its segments: retention waits for it, up to `lease_max_s`."""
    paused = kept.client.replay(ReplayRequest("orders-0"))
    paused.pause()
    following = kept.client.replay(ReplayRequest("orders-0", position=COUNT - 1))
    assert offsets(take(following, 1)) == [COUNT - 1]
    kept.retain()
    assert kept.log.log_start_offset < COUNT - 1000, "retention waits"
    kept.pass_time(renewing=1)
    assert kept.log.log_start_offset > COUNT - 500
    paused.resume()
    with pytest.raises(ReplayFailed) as failed:
        list(paused)
    assert failed.value.code is ErrorCode.LEASE_BROKEN
    assert paused.end_reason is ReplayEndReason.LEASE_BROKEN
    assert paused.poll() == [], "once"
    kept.leader.append(b"more")
    assert offsets(take(following, 1)) == [COUNT], "who reads keeps its lease"


def test_a_leaders_log_start_waits_for_a_session_and_is_taken_with_a_later_request(kept):
    """The leader is not refused: its next requests carry the same start."""
    held = kept.client.start_replay(ReplayRequest("orders-0"))
    until(lambda: kept.log.leases)
    kept.leader.say(log_start_offset=COUNT - 500)
    assert kept.log.log_start_offset == 0, "a session still needs these records"
    kept.client.stop(held)
    until(lambda: not kept.log.leases)
    kept.leader.say(log_start_offset=COUNT - 500)
    assert kept.log.log_start_offset == COUNT - 500


def test_a_consumer_that_does_not_poll_for_lease_max_s_is_told_what_is_gone_and_goes_on_by_a_startpoint(kept, tmp_path):
    with (
        StartpointStore.open(tmp_path / "startpoints") as store,
        kept.client.subscribe("orders", consumer="audit", startpoints=store) as consumer,
    ):
        abandoned(kept, store, consumer)


def abandoned(kept, store, consumer):
    """`consumer` reads a little, and then nothing for longer than lease_max_s."""
    until(lambda: consumer.poll(10))
    consumer.commit()
    kept.pass_time(renewing=0)
    with pytest.raises(ReplayFailed) as failed:
        until(lambda: not consumer.poll(COUNT) and None)
    assert failed.value.code is ErrorCode.LEASE_BROKEN
    with pytest.raises(ReplayRefused) as refused:
        until(lambda: not consumer.poll() and None)  # a busy node takes longer to answer than one poll waits
    assert (refused.value.code, refused.value.start) == (ErrorCode.INVALID_POSITION, kept.log.log_start_offset)
    store.write("audit", "orders", 0, Startpoint.earliest(), "what is left")
    [(_, _, records)] = until(consumer.poll)
    assert records[0].offset == kept.log.log_start_offset
