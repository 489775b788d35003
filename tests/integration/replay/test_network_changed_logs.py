"""Sessions of a log that changes under them: it is cut and written anew, or closed and opened anew."""

import threading
from dataclasses import replace

import pytest

from pushrep.env import DiskUsage
from pushrep.env.filesystem import RealFilesystem
from pushrep.log import SegmentLog
from pushrep.records import RecordBatch, encode_batch
from pushrep.replay import ReplayFailed, ReplayRequest, ReplayTruncated
from pushrep.replay import events as e
from pushrep.replay.events import ReplayState
from pushrep.wire.error_codes import ErrorCode
from tests.integration.replay.conftest import (
    QUICK,
    WAIT_S,
    StandingClock,
    control,
    offsets,
    open_log,
    take,
    until,
)


class Filling(RealFilesystem):
    """A disk that is 87 % full if `is_pressed`: leases are broken, and appends go on."""

    is_pressed = False

    def usage(self, path):
        return DiskUsage(87, 100) if self.is_pressed else super().usage(path)


@pytest.fixture
def disk():
    return Filling()


@pytest.fixture
def node(world, disk):
    return world.node(filesystem=disk)


@pytest.fixture
def busy(node):
    """Keep the sessions' thread from doing anything until the returned function is called."""
    held, may_go = threading.Event(), threading.Event()

    def begin():
        node.replay_server.post(lambda: (held.set(), may_go.wait(WAIT_S)))
        assert held.wait(WAIT_S)
        return may_go.set

    yield begin
    may_go.set()


def kept(node, leader):
    return node.store.outbox(leader.outbox)


def looks(node, leader, count=5):
    """Have the sessions of the log look at it that often."""
    for _ in range(count):
        done = threading.Event()
        node.replay_server.changed(leader.tp)
        node.replay_server.post(done.set)
        assert done.wait(WAIT_S)


def test_a_session_holds_a_lease_on_the_log_that_was_opened_anew(node, leader, client, busy):
    """It goes on there, and retention waits for it as before."""
    replay = client.replay(ReplayRequest("orders-0", position=30))
    replay.pause()
    before = open_log(node, leader.tp)
    until(lambda: len(before.leases))
    go_on = busy()
    with kept(node, leader).hand_over():
        pass
    leader.come(node.address)
    go_on()
    log = open_log(node, leader.tp)
    assert log is not before
    until(lambda: [lease.name for lease in log.leases] == ["replay"], "nothing keeps retention from its records")
    replay.resume()
    leader.fill(120)
    assert offsets(take(replay, 90)) == list(range(30, 120))


def test_a_session_follows_while_its_log_is_handed_over_and_after_it(node, leader, client):
    replay = client.replay(ReplayRequest("orders-0", position=90))
    assert offsets(take(replay, 10)) == list(range(90, 100))
    with kept(node, leader).hand_over() as directory:
        with SegmentLog.open(directory / "orders-0", has_replicas=True) as log:
            log.append([b"by its service"])
            log.advance_high_watermark(101)
        assert offsets(take(replay, 1)) == [100]
    leader.end = 101
    leader.come(node.address)
    leader.append(b"by its leader")
    assert offsets(take(replay, 1)) == [101]


def test_a_session_above_the_end_of_the_log_that_was_opened_anew_is_told_truncated(node, leader, client, busy):
    """As of every cut: with its offset, and not that a lease is broken."""
    replay = client.replay(ReplayRequest("orders-0"))
    take(replay, 100)
    go_on = busy()
    with kept(node, leader).hand_over() as directory, SegmentLog.open(directory / "orders-0", has_replicas=True) as log:
        log.truncate_to(49, force=True)
    leader.end = leader.watermark = 49
    leader.come(node.address)
    go_on()
    with pytest.raises(ReplayTruncated) as told:
        take(replay, 1_000)
    assert told.value.cut_offset == 49


def test_a_session_goes_on_and_rests_where_the_log_was_shorter_for_a_moment(node, leader, client):
    """As while a log is recovered beside its readers: what it was sent is there again."""
    replay = client.replay(ReplayRequest("orders-0", bound="written"))
    take(replay, 100)
    (served,), may_go = node.replay_server.served.values(), threading.Event()
    with kept(node, leader).hand_over() as directory, SegmentLog.open(directory / "orders-0", has_replicas=True) as log:
        node.replay_server.on_disk(lambda: may_go.wait(WAIT_S) and None)
        batches = [RecordBatch(bytearray(batch.data)) for batch in log.batches(49)]
        log.truncate_to(49, force=True)
        looks(node, leader)
        log.append_as_is(batches)
        may_go.set()
        until(lambda: looks(node, leader) or served.next_turn_ms > node.replay_server.now_ms(), "it looks all the time")
        log.append([b"more"])
        assert offsets(take(replay, 1)) == [100]


@pytest.mark.parametrize("last", ["nothing", "a batch", "a control batch"])
def test_a_session_goes_on_where_the_batch_before_it_is_still_there(node, leader, client, last):
    """Whatever it was sent last: the log was opened anew, and nothing of it was cut."""
    if last == "a control batch":
        leader.say(control(leader.batch([b"marker"])))
    replay = client.replay(ReplayRequest("orders-0", position=leader.end if last == "nothing" else 90))
    until(lambda: (replay.poll() and None) or replay.position == leader.end)
    with kept(node, leader).hand_over():
        pass
    leader.come(node.address)
    leader.append(b"more")
    assert offsets(take(replay, 1)) == [leader.end - 1]


OTHERS = {
    "another size": lambda: encode_batch([b"other"] * 2, timestamps_ms=1),
    "another time": lambda: encode_batch([b"%06d" % n + b"." * 40 for n in (98, 99)], timestamps_ms=2),
    "of other records": lambda: [encode_batch([b"%06d" % n + b"." * 40], timestamps_ms=1) for n in (98, 99)],
    "no record": lambda: control(encode_batch([b"%06d" % n + b"." * 40 for n in (98, 99)], timestamps_ms=1)),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_session_is_told_of_another_batch_of_the_same_epoch_in_the_place_of_the_one_that_it_was_sent(
    node, leader, client, other
):
    """It has to take back all of that batch."""
    replay = client.replay(ReplayRequest("orders-0"))
    take(replay, 100)
    with kept(node, leader).hand_over() as directory, SegmentLog.open(directory / "orders-0", has_replicas=True) as log:
        assert log.truncate_to(98, force=True) == 98
        batches = other()
        for batch in batches if isinstance(batches, list) else [batches]:
            batch.stamp(log.log_end_offset, leader.epoch)
            log.append_as_is([batch])
        log.advance_high_watermark(100)
    leader.come(node.address)
    with pytest.raises(ReplayTruncated) as told:
        take(replay, 1_000)
    assert told.value.cut_offset == 98


def test_a_session_whose_log_is_cut_between_its_look_and_its_read_takes_back_the_whole_batch(
    node, leader, client, monkeypatch
):
    """It finds the log's new end, which lies inside the batch that it was sent, by the error of the read."""
    replay = client.replay(ReplayRequest("orders-0"))
    take(replay, 100)
    source = node.replay_server.served[replay.session_id].source
    looked, was_cut, facts = threading.Event(), threading.Event(), source.facts

    def slow_facts():
        found = facts()
        looked.set()
        assert was_cut.wait(WAIT_S)
        return found

    monkeypatch.setattr(source, "facts", slow_facts)
    node.replay_server.changed(leader.tp)
    assert looked.wait(WAIT_S)
    with kept(node, leader).hand_over() as directory, SegmentLog.open(directory / "orders-0", has_replicas=True) as log:
        assert log.truncate_to(98, force=True) == 98
        log.append([b"%06d" % 98 + b"." * 40], timestamps_ms=1)
        log.advance_high_watermark(99)
        was_cut.set()
        with pytest.raises(ReplayTruncated) as told:
            take(replay, 1_000)
    assert told.value.cut_offset == 98


def test_a_session_that_gets_no_lease_on_the_log_that_was_opened_anew_ends(node, leader, client, busy, disk):
    """Its disk is too full by then: what the session reads next may be removed at any time."""
    replay = client.replay(ReplayRequest("orders-0"))
    take(replay, 100)
    go_on = busy()
    with kept(node, leader).hand_over():
        disk.is_pressed = True
    leader.come(node.address)
    go_on()
    with pytest.raises(ReplayFailed) as told:
        take(replay, 1_000)
    assert told.value.code is ErrorCode.LEASE_BROKEN


def test_a_session_that_ended_while_its_log_was_opened_anew_holds_nothing_there(node, leader, client, busy):
    replay = client.replay(ReplayRequest("orders-0"))
    take(replay, 100)
    served = node.replay_server.served[replay.session_id]
    go_on = busy()
    node.replay_server.post(lambda: served.handle(e.Stop()))
    with kept(node, leader).hand_over():
        pass
    leader.come(node.address)
    go_on()
    assert list(replay) == []
    client.recordings()  # whatever was posted before is done
    assert open_log(node, leader.tp).leases == ()


def test_a_session_that_finds_the_cut_before_the_new_epoch_is_there_tells_that_epoch(world, node, monkeypatch):
    """TRUNCATED comes with the epoch that goes on there, and not with the one that was cut."""
    leader = world.leader(node).fill(49)
    leader.fill(100, watermark=49)
    replay = world.client(node).replay(ReplayRequest("orders-0", bound="written"))
    take(replay, 100)
    append, ends = SegmentLog.append_as_is, []

    def append_after_a_while(log, batches):
        ends.append(log.log_end_offset)
        looks(node, leader)
        return append(log, batches)

    monkeypatch.setattr(SegmentLog, "append_as_is", append_after_a_while)
    leader.cut(49)
    with pytest.raises(ReplayTruncated) as told:
        take(replay, 1_000)
    assert (told.value.cut_offset, told.value.leader_epoch, ends) == (49, 512, [49])


def test_a_session_whose_last_batch_is_removed_too_gives_what_the_log_holds_now(world, node, busy):
    """Nothing is left to be compared; but the files that it had open are of the history that was cut."""
    leader = world.leader(node).fill(49)
    leader.fill(200, watermark=49)
    client = world.client(node, replace(QUICK, credit_bytes=2_000))
    replay = client.replay(ReplayRequest("orders-0", position=63, bound="written"))
    (served,) = node.replay_server.served.values()
    until(lambda: served.session.records_sent and served.session.credit <= 0 and served.connection.is_idle)
    at = served.session.position
    assert 63 < at < 120, "in a segment that goes as a whole: what was sent of it stays as it was"
    go_on = busy()
    leader.cut(49)
    for end in range(56, 205, 7):
        leader.append(*[b"new %d" % n + b"." * 40 for n in range(leader.end, end)])
    leader.say(log_start_offset=at)
    assert open_log(node, leader.tp).log_start_offset == at
    go_on()
    got = take(replay, 100)
    assert offsets(got) == list(range(63, 63 + len(got)))
    assert {record.value[:4] for record in got if record.offset >= at} == {b"new "}


def test_a_subscriber_that_does_not_take_the_end_after_a_cut_keeps_no_slot(world):
    """No subscriber, however slow, keeps its slot; of a log that was cut neither."""
    clock = StandingClock()
    node = world.node(clock=clock, replay={"liveness_timeout_ms": 1_000})
    leader = world.leader(node).append(b"a")
    leader.say(leader.batch([b"b"]), watermark=1)
    leader.say(leader.batch([b"x" * (1 << 20)] * 24), watermark=1)  # more than a network takes without a reader
    replay = world.client(node).replay(ReplayRequest("orders-0", bound="written"))
    (served,) = node.replay_server.served.values()
    until(lambda: served.session.position == 26)
    leader.cut(1)
    until(lambda: served.session.state is ReplayState.INACTIVE)
    clock.ms += 1_000
    until(lambda: looks(node, leader) or not node.replay_server.counters().sessions)
    assert replay.end_reason is None, "it was not read"
