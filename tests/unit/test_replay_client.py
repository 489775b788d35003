"""ReplayClient over real logs in a directory: what it gives, waits for, survives and tells when it ends."""

import asyncio
import threading
from itertools import islice
from uuid import uuid4

import pytest

from pushrep.errors import BadArgument
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.records import Codec, encode_batch
from pushrep.replay import (
    TO_END,
    AtTime,
    Catalogue,
    FoundLog,
    NodeAccess,
    RecordingState,
    ReplayClient,
    ReplayEndReason,
    ReplayFailed,
    ReplayRefused,
    ReplayRequest,
    ReplaySettings,
    ReplayTruncated,
)
from pushrep.replay.local import LocalReplays
from pushrep.replay.replay import Replay
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from tests.support.simulated_disk import SimulatedClock

SMALL = LogConfig(segment_bytes=4096)


def fill(log, count, start=0, per_batch=7, size=40):
    for first in range(start, start + count, per_batch):
        values = [b"%06d" % n + b"." * size for n in range(first, min(first + per_batch, start + count))]
        log.append(values, durability=Durability.BUFFERED)
    log.flush()


@pytest.fixture
def log(tmp_path):
    """A log of 100 records in several segments, open for writing."""
    with SegmentLog.open(tmp_path / "orders-0", SMALL) as opened:
        fill(opened, 100)
        yield opened


@pytest.fixture
def client(tmp_path, log):
    with ReplayClient(tmp_path) as opened:
        yield opened


def offsets(records):
    return [record.offset for record in records]


def refusal(client, **request):
    with pytest.raises(ReplayRefused) as refused:
        client.replay(ReplayRequest("orders-0", **request))
    return refused.value


def test_records_and_batches_give_the_same_and_stop_on_the_record(client):
    for position, count in [(0, 100), (3, 10), (13, 1), (95, 5), (50, 0)]:
        request = ReplayRequest("orders-0", position=position, length=count)
        replay = client.replay(request)
        records = list(replay)
        assert offsets(records) == list(range(position, position + count))
        assert [record.value[:6] for record in records] == [b"%06d" % n for n in range(position, position + count)]
        assert (replay.position, replay.end_reason) == (position + count, ReplayEndReason.LIMIT_REACHED)
        batches = list(client.replay(request).batches())
        assert [record for batch in batches for record in batch.records()] == records
        assert all(batch.start <= one.offset < batch.end for batch in batches for one in batch.records())


def test_records_then_batches_go_on_where_the_other_stopped(client):
    replay = client.replay(ReplayRequest("orders-0", length=TO_END))
    assert offsets(islice(replay, 10)) == list(range(10))
    assert replay.position == 10
    rest = iter(replay.batches())
    assert offsets(next(rest).records()) == list(range(14, 21)), "the batch that was begun as records is behind it"
    assert replay.position == 21
    assert offsets(replay) == list(range(21, 100))


def test_an_event_loop_gets_the_same(client):
    async def both():
        request = ReplayRequest("orders-0", position=5, length=TO_END)
        records = [record.offset async for record in client.replay(request)]
        batches = [batch async for batch in client.replay(request).batches()]
        return records, [record.offset for batch in batches for record in batch.records()]

    assert asyncio.run(both()) == (list(range(5, 100)), list(range(5, 100)))


def test_following_meets_what_is_appended_with_no_gap_and_no_duplicate(tmp_path, client, log):
    replay = client.replay(ReplayRequest("orders-0", position=90))
    got = offsets(islice(replay, 10))
    writer = threading.Thread(target=fill, args=(log, 200, 100, 3))
    writer.start()
    got += offsets(islice(replay, 200))
    writer.join()
    assert got == list(range(90, 300))
    assert replay.poll() == []


def test_following_survives_a_stop_and_a_restart_of_the_writer(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as first:
        fill(first, 10)
    with ReplayClient(tmp_path) as client:
        replay = client.replay(ReplayRequest("orders-0", position=10))
        assert replay.poll() == []
        with SegmentLog.open(tmp_path / "orders-0") as second:
            fill(second, 10, start=10)
            assert offsets(replay.poll()) == list(range(10, 20))
        assert replay.poll() == []
        assert replay.end_reason is None


def test_a_log_that_this_process_closes_is_followed_from_outside(tmp_path):
    log = SegmentLog.open(tmp_path / "orders-0")
    fill(log, 10)
    with ReplayClient(tmp_path, logs=[log]) as client:
        replay = client.replay(ReplayRequest("orders-0"))
        assert len(replay.poll()) == 10
        log.close()
        assert replay.poll() == []
        with SegmentLog.open(tmp_path / "orders-0") as again:
            fill(again, 3, start=10)
            assert offsets(replay.poll()) == [10, 11, 12]


def test_a_counted_replay_ends_when_its_writer_stops(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as log:
        fill(log, 10)
        with ReplayClient(tmp_path) as client:
            replay = client.replay(ReplayRequest("orders-0", length=12))
            assert len(replay.poll()) == 10
            assert replay.poll() == []
            fill(log, 1, start=10)
            log.close()
            assert offsets(replay) == [10], "what came before the stop is given"
            assert replay.end_reason is ReplayEndReason.LIMIT_REACHED
            assert refusal(client, position=11, length=1).code is ErrorCode.INVALID_POSITION
            assert client.replay(ReplayRequest("orders-0", position=11)).poll() == []


def test_times_out_of_order_mean_the_first_by_offset(tmp_path):
    times = [50, 10, 70, 30, 90, 20]
    with SegmentLog.open(tmp_path / "orders-0") as log:
        for at, codec in zip(times, [*Codec, Codec.NONE], strict=True):
            log.append(encode_batch([b"a"], timestamps_ms=at, codec=codec))
        with ReplayClient(tmp_path) as client:
            for since in range(0, 100, 5):
                wanted = next((n for n, at in enumerate(times) if at >= since), len(times))
                replay = client.replay(ReplayRequest("orders-0", position=AtTime(since)))
                assert offsets(replay.poll()) == list(range(wanted, len(times))), f"since {since}"


# ---- bounds


def test_bounds_are_read_again_at_the_tip(tmp_path):
    counter = {"value": 5}
    with SegmentLog.open(tmp_path / "orders-0", has_replicas=True) as log:
        fill(log, 21)
        with ReplayClient(tmp_path, logs=[log], counters={"applied": lambda: counter["value"]}) as client:
            stable = client.replay(ReplayRequest("orders-0"))
            written = client.replay(ReplayRequest("orders-0", bound="written"))
            applied = client.replay(ReplayRequest("orders-0", bound="applied"))
            assert (stable.poll(), len(written.poll()), applied.poll()) == ([], 21, [])
            log.advance_high_watermark(14)
            assert offsets(stable.poll()) == list(range(14))
            assert applied.poll() == [], "the counter stands inside of the first batch"
            counter["value"] = 20
            assert offsets(applied.poll()) == list(range(14)), "no further than stable"
            log.advance_high_watermark(21)
            counter["value"] = None
            assert applied.poll() == []
            assert applied.poll() == []
            assert applied.end_reason is ReplayEndReason.LIMIT_REACHED, "a counter that closed stays where it was"


# ---- ends


def test_refusals_come_from_the_log_as_it_is(client):
    refused = refusal(client, position=101)
    assert (refused.code, refused.start, refused.end) == (ErrorCode.INVALID_POSITION, 0, 100)
    assert refusal(client, bound="nobody").code is ErrorCode.INVALID_REQUEST
    for unknown in ("orders-1", "no name", 7):
        with pytest.raises(ReplayRefused) as none:
            client.replay(ReplayRequest(unknown))
        assert none.value.code is ErrorCode.UNKNOWN_RECORDING


def test_what_is_neither_a_directory_nor_an_address_is_refused_by_name(tmp_path):
    for where in (tmp_path / "nothing", "replica.example", "replica.example:port"):
        with pytest.raises(BadArgument, match="no directory of logs, and no address"):
            ReplayClient(where)
    with pytest.raises(BadArgument, match="is a directory"):
        ReplayClient(tmp_path, node=NodeAccess())
    with pytest.raises(BadArgument, match="are its own to say"):
        ReplayClient("replica.example:7400", settings=ReplaySettings())
    with ReplayClient(tmp_path) as client, pytest.raises(BadArgument, match="pushrep log"):
        client.truncate("orders-0", 0)


def test_a_cut_below_what_was_given_is_told_once(client, log):
    replay = client.replay(ReplayRequest("orders-0"))
    assert len(replay.poll()) == 100
    log.truncate_to(50, force=True)
    with pytest.raises(ReplayTruncated) as told:
        replay.poll()
    assert (told.value.offset, told.value.cut_offset) == (100, log.log_end_offset)
    assert replay.poll() == []
    assert list(replay) == []
    assert replay.end_reason is ReplayEndReason.TRUNCATED


def test_a_cut_that_was_written_over_is_found_out_too(client, log):
    replay = client.replay(ReplayRequest("orders-0"))
    assert len(replay.poll()) == 100
    log.truncate_to(98, force=True)
    fill(log, 30, start=log.log_end_offset, per_batch=5, size=41)
    with pytest.raises(ReplayTruncated) as told:
        replay.poll()
    assert told.value.cut_offset <= 98


@pytest.mark.parametrize("epoch", [0, 4], ids=["of the same epoch", "of another epoch"])
@pytest.mark.parametrize("again", [1, 0], ids=["and grew by a record", "and did not grow"])
def test_a_log_that_ends_inside_the_last_batch_that_was_given_lacks_all_of_it(client, log, again, epoch):
    """A batch is cut whole: what stands there now is another one, and the log's end says nothing about it."""
    replay = client.replay(ReplayRequest("orders-0"))
    assert len(replay.poll()) == 100
    log.truncate_to(98, force=True)
    if epoch:
        log.begin_epoch(epoch, 98)
    fill(log, again, start=98, size=41)
    with pytest.raises(ReplayTruncated) as told:
        replay.poll()
    assert told.value.cut_offset == 98


def test_a_cut_whose_place_can_not_be_read_ends_the_replay_by_that_error(client, log, tmp_path):
    """Once; it may be lower than the log's end shows, and a reader that took back too little would go on."""
    replay = client.replay(ReplayRequest("orders-0"))
    assert len(replay.poll()) == 100
    log.truncate_to(50, force=True)
    (epochs := tmp_path / "orders-0" / "leader-epoch-checkpoint").unlink()
    epochs.mkdir()
    with pytest.raises(ReplayFailed) as told:
        replay.poll()
    assert (told.value.code, replay.end_reason) == (ErrorCode.KAFKA_STORAGE_ERROR, ReplayEndReason.ERROR)
    assert replay.poll() == []
    epochs.rmdir()


def test_a_cut_above_what_was_given_is_nothing_to_a_replay(client, log):
    replay = client.replay(ReplayRequest("orders-0", length=7))
    assert len(replay.poll()) == 7
    follower = client.replay(ReplayRequest("orders-0", position=0, length=60))
    log.truncate_to(50, force=True)
    fill(log, 50, start=log.log_end_offset)
    assert offsets(follower) == list(range(60))


def test_who_resumes_names_the_epoch_before(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as log:
        log.begin_epoch(3, 0)
        fill(log, 7)
        log.begin_epoch(4, 7)
        fill(log, 7, start=7)
        with ReplayClient(tmp_path) as client:
            assert len(client.replay(ReplayRequest("orders-0", position=7, epoch_before=3)).poll()) == 7
            assert refusal(client, position=7, epoch_before=2).code is ErrorCode.TRUNCATED


def test_what_retention_took_is_an_error_with_the_offset(client, log):
    late = client.start_replay(ReplayRequest("orders-0"))
    start = log.purge(99)
    assert log.log_start_offset > 50, start
    replay = client.attach(late)
    with pytest.raises(ReplayFailed) as failed:
        list(replay)
    assert (failed.value.code, failed.value.offset) == (ErrorCode.OFFSET_OUT_OF_RANGE, 0)
    assert list(replay) == []


def test_damage_is_told_with_its_segment(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0", SMALL) as log:
        fill(log, 200)
    segments = sorted((tmp_path / "orders-0").glob("*.log"))
    second = segments[1]
    data = bytearray(second.read_bytes())
    data[400] ^= 1
    second.write_bytes(data)
    with ReplayClient(tmp_path) as client:
        replay = client.replay(ReplayRequest("orders-0", length=TO_END))
        with pytest.raises(ReplayFailed) as failed:
            list(replay)
        assert (failed.value.code, failed.value.segment) == (ErrorCode.CORRUPT_MESSAGE, int(second.stem))
        assert failed.value.offset == int(second.stem)
        assert replay.position == int(second.stem), "all that came before was given"


def test_a_batch_of_an_epoch_that_is_not_the_logs_is_refused_as_the_first_one(tmp_path):
    """No CRC covers the epoch, and behind a higher one the batches that follow would seem to fall."""
    with SegmentLog.open(tmp_path / "orders-0") as log:
        fill(log, 70)
    (segment,) = (tmp_path / "orders-0").glob("*.log")
    data = bytearray(segment.read_bytes())
    data[-len(data) // 10 + 15] = 1  # of the last of ten batches of one size
    segment.write_bytes(data)
    with ReplayClient(tmp_path) as client:
        refused = refusal(client, position=65)
        assert refused.code is ErrorCode.CORRUPT_MESSAGE
        assert "leader epoch 1, the log says 0" in refused.why
        assert len(list(client.replay(ReplayRequest("orders-0", length=63)))) == 63


def test_a_deleted_log_is_told_as_deleted(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as log:
        fill(log, 10)
    with ReplayClient(tmp_path) as client:
        replay = client.replay(ReplayRequest("orders-0"))
        assert len(replay.poll()) == 10
        (tmp_path / "orders-0").rename(tmp_path / "gone")
        (tmp_path / ".pushrep_published").unlink()
        with pytest.raises(ReplayFailed) as failed:
            next(iter(replay))
        assert failed.value.code is ErrorCode.RECORDING_DELETED
        assert replay.end_reason is ReplayEndReason.RECORDING_DELETED


def test_stop_from_another_thread_ends_who_waits(client):
    replay = client.replay(ReplayRequest("orders-0", position=100))
    got = []
    reader = threading.Thread(target=lambda: got.extend(replay))
    reader.start()
    client.stop(replay.session_id)
    client.stop(replay.session_id)
    reader.join(60)
    assert not reader.is_alive()
    assert got == []
    assert replay.end_reason is ReplayEndReason.STOPPED


def test_two_threads_can_not_share_one_replay(tmp_path, log):
    waits, go_on = threading.Event(), threading.Event()
    session = LocalReplays(tmp_path).replay(ReplayRequest("orders-0", position=100))
    session.wait = lambda _timeout_s: (waits.set(), go_on.wait(60))
    with Replay(session) as replay:
        reader = threading.Thread(target=lambda: list(replay))
        reader.start()
        assert waits.wait(60), "for a block"
        for use in (lambda: next(iter(replay)), replay.poll):
            with pytest.raises(BadArgument, match="another thread reads this one"):
                use()
        replay.stop()
        go_on.set()
        reader.join(60)
        assert replay.poll() == [], "nobody else reads it now"


def test_pause_holds_everything_back_and_resume_goes_on(client):
    replay = client.replay(ReplayRequest("orders-0", length=TO_END))
    replay.pause()
    assert replay.poll() == []
    reader = threading.Thread(target=lambda: got.extend(replay))
    got = []
    reader.start()
    replay.resume()
    reader.join(60)
    assert offsets(got) == list(range(100))


# ---- slots and leases


def test_slots_come_back_by_end_stop_and_missing_subscribers(tmp_path, log):
    clock = SimulatedClock()
    settings = ReplaySettings(max_sessions=2, connect_timeout_ms=5_000)
    with ReplayClient(tmp_path, settings=settings, clock=clock) as client:
        list(client.replay(ReplayRequest("orders-0", length=3)))
        first = client.replay(ReplayRequest("orders-0"))
        second = client.start_replay(ReplayRequest("orders-0"))
        assert refusal(client).code is ErrorCode.MAX_REPLAYS
        clock.advance(5_000)
        third = client.start_replay(ReplayRequest("orders-0"))
        with pytest.raises(ReplayRefused, match="UNKNOWN_REPLAY"):
            client.attach(second)
        assert len(client.attach(third).poll()) == 100
        with pytest.raises(ReplayRefused, match="UNKNOWN_REPLAY"):
            client.attach(third)
        assert client.stop_all("orders-0") == 2
        assert first.end_reason is ReplayEndReason.STOPPED
        assert client.stop_all("orders-0") == 0


def test_a_machine_that_stands_still_before_a_replay_has_its_subscriber_begins_it_anew(tmp_path, log, monkeypatch):
    clock = SimulatedClock()
    with ReplayClient(tmp_path, clock=clock) as client:
        started, pauses_ms = LocalReplays.start_replay, [5_000, 0]

        def late(replays, request):
            session_id = started(replays, request)
            clock.advance(pauses_ms.pop(0))
            return session_id

        monkeypatch.setattr(LocalReplays, "start_replay", late)
        assert offsets(client.replay(ReplayRequest("orders-0", length=TO_END))) == list(range(100))
        pauses_ms += [5_000, 5_000]
        assert refusal(client).code is ErrorCode.UNKNOWN_REPLAY, "not for ever"


def test_retention_waits_for_a_replay_until_it_has_passed(tmp_path, log):
    with ReplayClient(tmp_path, logs=[log]) as client:
        started = client.start_replay(ReplayRequest("orders-0", position=30, length=TO_END))
        with pytest.raises(Exception, match="replay"):
            log.purge(90)
        assert log.log_start_offset <= 30
        replay = client.attach(started)
        assert offsets(replay) == list(range(30, 100))
        assert log.purge(90) > 30, "a replay that is over holds nothing"


def test_a_broken_lease_ends_the_replay(tmp_path):
    clock = SimulatedClock()
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(lease_max_s=60), clock=clock) as log:
        fill(log, 100)
        with ReplayClient(tmp_path, logs=[log], clock=clock) as client:
            replay = client.replay(ReplayRequest("orders-0"))
            replay.pause()
            clock.advance(61_000)
            log.apply_retention()
            replay.resume()
            with pytest.raises(ReplayFailed) as failed:
                replay.poll()
            assert failed.value.code is ErrorCode.LEASE_BROKEN
            assert replay.end_reason is ReplayEndReason.LEASE_BROKEN


def test_a_lease_that_is_found_broken_before_the_notice_comes_ends_the_replay_too(tmp_path):
    clock = SimulatedClock()
    settings = ReplaySettings(block_bytes=400)
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(lease_max_s=60), clock=clock) as log:
        fill(log, 100)
        with ReplayClient(tmp_path, logs=[log], clock=clock, settings=settings) as client:
            replay = client.replay(ReplayRequest("orders-0", length=TO_END))
            assert offsets(islice(replay, 1)) == [0]
            (lease,) = log.leases
            notice, lease.on_broken = lease.on_broken, None
            clock.advance(61_000)
            log.apply_retention()
            with pytest.raises(ReplayFailed, match="it was not renewed for 60 s") as failed:
                list(replay)
            assert failed.value.code is ErrorCode.LEASE_BROKEN
            notice("late")
            assert replay.end_reason is ReplayEndReason.LEASE_BROKEN


class AskingClock(SimulatedClock):
    """Whenever it is asked for the time, another thread tries to get the lock."""

    lock, got = None, ()

    def monotonic_ms(self):
        if self.lock is not None:
            thread = threading.Thread(target=self._try)
            thread.start()
            thread.join()
        return super().monotonic_ms()

    def _try(self):
        if self.lock.acquire(blocking=False):
            self.lock.release()
            self.got += (True,)
        else:
            self.got += (False,)


@pytest.mark.parametrize("call", ["start", "attach", "stop of the client", "stop of the session"])
def test_two_threads_never_change_the_sessions_at_once(tmp_path, log, call):
    clock = AskingClock()
    replays = LocalReplays(tmp_path, logs=[log], clock=clock)
    started = replays.start_replay(ReplayRequest("orders-0"))
    session = replays.attach(replays.start_replay(ReplayRequest("orders-0")))
    clock.lock = replays.lock
    {
        "start": lambda: replays.start_replay(ReplayRequest("orders-0")),
        "attach": lambda: replays.attach(started),
        "stop of the client": lambda: replays.stop(session.session_id),
        "stop of the session": session.stop,
    }[call]()
    clock.lock = None
    assert set(clock.got) == {False}
    replays.close()


# ---- the catalogue


def test_recordings_are_what_lies_there_with_the_ids_of_the_catalogue(tmp_path, log, client):
    (before,) = client.recordings()
    assert (before.recording_id, before.name, before.end_offset, before.is_live) == (None, "orders-0", 100, True)
    Catalogue.open(tmp_path).reconcile([FoundLog(TopicIdPartition(log.log_id, "orders", 0), 0)], 1)
    (after,) = client.recordings()
    assert after.recording_id == 1
    assert len(list(client.replay(ReplayRequest(1, length=5)))) == 5
    Catalogue.open(tmp_path).reconcile([FoundLog(TopicIdPartition(uuid4(), "orders", 0), 0)], 1)
    with pytest.raises(ReplayRefused, match="UNKNOWN_RECORDING"):
        client.replay(ReplayRequest(1))
    assert client.recordings()[0].state is RecordingState.VALID
