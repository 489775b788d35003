"""The statements of PushManager's contract by number, against a replica that answers as a test wants."""

import os
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from pushrep.election.epochs import LogEnds
from pushrep.election.messages import PushSessionEndReason, batches_of
from pushrep.records import RecordBatch, encode_batch
from pushrep.records.leader_epochs import LeaderEpochs
from pushrep.replicate import channel
from pushrep.replicate.errors import IllegalState
from pushrep.replicate.manager import FileRecords, PushManager
from pushrep.replicate.settings import PushSettings
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import AppendRecordsResult, LogDescription
from tests.integration.conftest import WAIT_S

EMPTY = LogEnds(0, 0, LeaderEpochs())
QUICK = PushSettings(backoff_min_ms=1, backoff_max_ms=20, watermark_linger_ms=1)


def session_of(service, replica, *, replica_epoch=7, session_id=1, partition=0):
    return service.leading.partitions[partition].start_session(replica, replica_epoch, session_id, EMPTY)


def start(service, replica, **ids):
    """A session that only the test drives: (tp, session, its future)."""
    session = session_of(service, replica, **ids)
    tp = session.partition.tp
    return tp, session, service.leading.manager.start_push(tp, session)


@pytest.fixture
def led(world, scripted):
    """A service whose drivers were not started, and its replica."""
    replica = scripted()
    service = world.service([replica.replica], settings=QUICK)
    return service, replica


def log_bytes(service, partition=0):
    return b"".join(bytes(batch.data) for batch in service.logs[partition].batches(0))


def test_l1_calls_before_startup_are_kept_and_done_after_it(led):
    service, replica = led
    service.append(b"early")
    _, _, started = start(service, replica.replica)
    service.append(b"still before startup")
    assert not started.done()
    assert replica.frames == 0, "nothing is processed before startup"
    service.leading.manager.startup()
    assert started.result(WAIT_S)
    replica.wait_for(lambda parts: end_of_last(parts) == 2)
    assert replica.records() == log_bytes(service)


def test_l2_one_call_starts_and_one_stops_whoever_asks():
    manager = PushManager(QUICK)
    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(lambda _: manager.startup(), range(8))) == [False] * 7 + [True]
        assert sorted(threads.map(lambda _: manager.shutdown(), range(8))) == [False] * 7 + [True]
    assert not manager.startup()


def test_l3_shutdown_with_a_replica_that_is_silent_returns_and_keeps_nothing(world, scripted):
    replica = scripted()
    service = world.service([replica.replica], settings=replace(QUICK, shutdown_timeout_ms=200))
    manager = service.leading.manager
    manager.startup()
    _, session, started = start(service, replica.replica)
    assert started.result(WAIT_S)
    replica.gate.clear()
    for _ in range(100):
        service.append(bytes(1000))
    assert manager.memory.used_bytes > 0
    stopper = threading.Thread(target=manager.shutdown)
    stopper.start()
    stopper.join(WAIT_S)
    assert not stopper.is_alive()
    assert manager.memory.used_bytes == 0
    assert session.ended is PushSessionEndReason.SHUTDOWN
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pushrep-push-")]


def test_a_replica_that_is_slower_than_the_shutdown_waits_hears_that_nobody_leads_any_more(world, scripted):
    """Otherwise a promotion of this replica would count the leader as alive, although it was closed in order."""
    replica = scripted()
    service = world.service([replica.replica], settings=replace(QUICK, shutdown_timeout_ms=200))
    manager = service.leading.manager
    manager.startup()
    assert start(service, replica.replica)[2].result(WAIT_S)
    replica.gate.clear()
    manager.shutdown()
    replica.gate.set()
    with replica.changed:
        assert replica.changed.wait_for(lambda: any(beat.is_last for beat in replica.beats), WAIT_S), replica.beats


def test_a_last_beat_behind_requests_and_a_beat_without_an_answer_breaks_no_connection(
    world, scripted, monkeypatch, caplog
):
    """One request holds a record, one the end of the session; neither is answered, nor is the beat before."""
    monkeypatch.setattr(channel, "BEAT_MS", 1)
    replica = scripted()
    settings = replace(QUICK, shutdown_timeout_ms=200, requests_in_flight_max=2)
    service = world.service([replica.replica], settings=settings)
    manager = service.leading.manager
    manager.startup()
    assert start(service, replica.replica)[2].result(WAIT_S)
    replica.gate.clear()
    service.append(b"not answered")
    replica.wait_for(lambda requests: requests[-1].records)
    manager.shutdown()
    assert "the connection is given up" not in caplog.text


def test_l4_it_is_active_between_the_two():
    manager = PushManager(QUICK)
    assert not manager.is_active()
    manager.startup()
    assert manager.is_active()
    manager.shutdown()
    assert not manager.is_active()


def test_l5_after_shutdown_the_push_methods_refuse(led):
    service, replica = led
    manager = service.leading.manager
    session = session_of(service, replica.replica)
    tp = session.partition.tp
    manager.startup()
    manager.shutdown()
    for forbidden in (
        lambda: manager.start_push(tp, session),
        lambda: manager.stop_push(tp, [1], PushSessionEndReason.PUSH_DISABLED),
        lambda: manager.on_leader_append(tp, [1], 0, []),
        lambda: manager.on_high_watermark_update(tp, [1], 1),
        lambda: manager.on_log_start_offset_update(tp, [1], 1),
    ):
        with pytest.raises(IllegalState):
            forbidden()
    assert not manager.shutdown()


def test_s1_the_transition_goes_first_in_as_many_requests_as_it_needs(world, scripted):
    replica = scripted()
    service = world.service(
        [replica.replica], settings=replace(QUICK, request_bytes_max=3000, request_file_bytes_max=3000)
    )
    for number in range(20):
        service.append(b"%d" % number * 500)
    transition_end = service.logs[0].log_end_offset
    replica.gate.clear()
    service.leading.manager.startup()
    _, _, started = start(service, replica.replica)
    for number in range(10):
        service.append(b"buffered %d" % number)
    replica.wait_for(lambda parts: len(parts) == 1)
    assert not started.done(), "done at the first success"
    replica.gate.set()
    assert started.result(WAIT_S)
    parts = replica.wait_for(lambda parts: end_of_last(parts) == service.logs[0].log_end_offset)
    spanning = [part for part in parts if part.append_offset < transition_end < end_of_part(part)]
    assert not spanning, "what was buffered waits until the transition is acknowledged"
    assert len([part for part in parts if part.append_offset < transition_end]) > 3
    assert replica.records() == log_bytes(service), "S2: in order, none lost, none twice"


def test_s1_a_replica_that_lacks_a_little_of_many_partitions_costs_no_open_file_for_each(world, scripted):
    replica, partitions = scripted(), range(120)
    service = world.service([replica.replica], settings=QUICK, partitions=len(partitions))
    for partition in partitions:
        service.append(b"lacks it", partition=partition)
    started = [start(service, replica.replica, partition=partition)[2] for partition in partitions]
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 40, limit[1]))
    try:
        service.leading.manager.startup()
        assert all(one.result(WAIT_S) for one in started), "in one request, as a rule"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_s2_what_is_appended_before_the_first_success_comes_once_and_in_order(world, scripted):
    """Also what no longer fits into the buffer, and is read from the log."""
    replica = scripted()
    service = world.service([replica.replica], settings=replace(QUICK, buffer_bytes_max=2_000))
    service.append(b"the transition")
    replica.gate.clear()
    service.leading.manager.startup()
    _, _, started = start(service, replica.replica)
    replica.wait_for(lambda parts: len(parts) == 1)
    for number in range(40):
        service.append(b"%d" % number * 100)
    assert replica.frames == 1, "nothing of it goes out before the first success"
    replica.gate.set()
    assert started.result(WAIT_S)
    end = service.logs[0].log_end_offset
    parts = [part for part in replica.wait_for(lambda parts: end_of_last(parts) == end) if part.records]
    assert [part.append_offset for part in parts] == [0, *(end_of_part(part) for part in parts[:-1])]
    assert replica.records() == log_bytes(service)


def test_s3_an_update_without_a_session_is_nothing(led):
    service, replica = led
    manager = service.leading.manager
    manager.startup()
    tp = service.leading.partitions[0].tp
    batch = next(iter_batches(service))
    manager.on_leader_append(tp, [1, 2], 0, [batch])
    manager.on_high_watermark_update(tp, [1], 5)
    manager.on_log_start_offset_update(tp, [1], 5)
    assert manager.memory.used_bytes == 0
    assert replica.frames == 0


def test_s4_newer_identifiers_replace_a_session_and_older_ones_are_ignored(led):
    service, replica = led
    service.leading.manager.startup()
    _, first, started = start(service, replica.replica, session_id=5)
    assert started.result(WAIT_S)
    _, _, ignored = start(service, replica.replica, session_id=4)
    assert ignored.result(WAIT_S) is False
    assert first.ended is None
    tp, newer, started = start(service, replica.replica, session_id=6)
    assert started.result(WAIT_S)
    assert first.ended is PushSessionEndReason.STALE_REPLICA_EPOCH
    assert newer.ended is None
    end = service.append(b"x")
    parts = replica.wait_for(lambda parts: end_of_last(parts) == end)
    assert parts[-1].session_id == 6
    assert tp == newer.partition.tp


def test_s5_a_gap_is_filled_from_the_log_and_an_overlap_dropped(led):
    service, replica = led
    manager = service.leading.manager
    manager.startup()
    tp, session, started = start(service, replica.replica)
    assert started.result(WAIT_S)
    batches = []
    for number in range(6):
        batches.append(one_batch(b"%d" % number))
        service.logs[0].append(batches[-1])
    with session.partition.lock:
        session.partition.leader.on_append(6, 0)
    manager.on_leader_append(tp, [1], 3, [batches[3]])  # 0, 1 and 2 were never told
    manager.on_leader_append(tp, [1], 2, [batches[2]])  # an overlap
    manager.on_leader_append(tp, [1], 5, [batches[5]])
    replica.wait_for(lambda parts: end_of_last(parts) == 6)
    assert replica.records() == log_bytes(service)


def test_a1_records_in_the_log_are_pushed_from_there_also_as_a_first_call(led):
    service, replica = led
    manager = service.leading.manager
    manager.startup()
    tp, session, started = start(service, replica.replica)
    assert started.result(WAIT_S)
    service.logs[0].append(one_batch(b"in the file"))
    with session.partition.lock:
        session.partition.leader.on_append(1, 0)
    manager.on_leader_append(tp, [1], 0, FileRecords(1))
    assert manager.memory.used_bytes == 0
    replica.wait_for(lambda parts: end_of_last(parts) == 1)


def test_a1_one_buffer_serves_all_replicas(world, scripted):
    replicas = [scripted(1), scripted(2)]
    service = world.service([one.replica for one in replicas], settings=QUICK)
    service.leading.manager.startup()
    for one in replicas:
        assert start(service, one.replica)[2].result(WAIT_S)
        one.gate.clear()
    batch_bytes = len(one_batch(bytes(5000)).data)
    service.append(bytes(5000))
    assert service.leading.manager.memory.used_bytes == batch_bytes, "the bytes lie there once"
    replicas[0].gate.set()
    service.wait_for(lambda leader: leader.sessions[1].acknowledged == 1)
    assert service.leading.manager.memory.used_bytes == batch_bytes, "the other one still needs them"
    replicas[1].gate.set()
    service.wait_for(lambda leader: leader.sessions[2].acknowledged == 1)
    service.wait_for(lambda _: service.leading.manager.memory.used_bytes == 0)


def test_a2_call_order_is_wire_order_through_cuts_and_retries(led):
    service, replica = led
    service.leading.manager.startup()
    _, _, started = start(service, replica.replica)
    assert started.result(WAIT_S)
    seen, taken = [], []

    def stubborn(part):
        """Fails now and then; takes only what follows on what it has, as a log does."""
        seen.append(part.append_offset)
        held = taken[-1][1] if taken else 0
        if len(seen) in {5, 9} or part.append_offset > held:
            return AppendRecordsResult(error_code=ErrorCode.REQUEST_TIMED_OUT)
        for batch in batches_of(part.records[0])[0] if part.records else ():
            if batch.base_offset == held:
                held = batch.next_offset
                taken.append((bytes(batch.data), held))
        return AppendRecordsResult(log_end_offset=held)

    replica.answer = stubborn
    for number in range(300):
        service.append(b"%d" % number)
        if number % 20 == 10:  # however fast it is, these are fifteen requests at least
            service.wait_for(lambda leader, end=number + 1: leader.sessions[1].acknowledged == end)
        if number == 150:
            replica.wait_for(lambda parts: end_of_last(parts) > 0)
            replica.cut()
    service.wait_for(lambda leader: leader.sessions[1].acknowledged == 300)
    assert b"".join(data for data, _ in taken) == log_bytes(service)
    assert len(seen) > 9


def test_a3_appends_wait_for_nobody(led):
    """A replica never answers and never reads: appends continue, and bytes above the limit are evicted."""
    service, replica = led
    service.leading.manager.memory.limit_bytes = 50_000
    service.leading.manager.startup()
    assert start(service, replica.replica)[2].result(WAIT_S)
    replica.gate.clear()
    for _ in range(500):
        service.append(bytes(1000))
        assert service.leading.manager.memory.used_bytes <= 50_000
    assert service.leading.manager.memory.evicted_bytes > 0
    replica.gate.set()
    replica.wait_for(lambda parts: end_of_last(parts) == 500)
    assert replica.records() == log_bytes(service), "what was evicted is read from the log"


def test_h1_only_a_rise_counts(led):
    service, replica = led
    manager = service.leading.manager
    manager.startup()
    tp, _, started = start(service, replica.replica)
    assert started.result(WAIT_S)
    end = service.append(b"x")
    replica.wait_for(lambda parts: parts[-1].high_watermark == end)
    before = len(replica.requests)
    for offset in (end, end - 1, end, end + 1):  # the last one is not the leader's yet
        manager.on_high_watermark_update(tp, [1], offset)
    again = service.append(b"y")
    parts = replica.wait_for(lambda parts: parts[-1].high_watermark == again)
    assert parts[before].records, "whatever those calls had sent would have come first"
    led = service.leading.partitions[0]
    service.wait_for(lambda leader: not leader.sessions[1].in_flight)
    with led.lock:  # a caller with its own rules raises it, and nothing else tells the pusher
        led.leader.high_watermark = again + 1
    manager.on_high_watermark_update(tp, [1], again + 1)
    (bare,) = replica.wait_for(lambda parts: parts[-1].high_watermark == again + 1)[len(parts) :]
    assert bare.records == ()


def test_h2_a_bare_rise_is_shipped(led):
    service, replica = led
    service.leading.manager.startup()
    assert start(service, replica.replica)[2].result(WAIT_S)
    end = service.append(b"x")
    parts = replica.wait_for(lambda parts: parts[-1].high_watermark == end)
    assert parts[-1].records == (), "nothing was there to ride with"
    service.logs[0].flush()
    service.logs[0].delete_records(end)
    led = service.leading.partitions[0]
    led.on_log_start(end)
    replica.wait_for(lambda parts: parts[-1].log_start_offset == end)


def test_e1_stop_evicts_and_tells_the_replica_if_the_reason_says_so(led):
    service, replica = led
    manager = service.leading.manager
    manager.startup()
    tp, session, started = start(service, replica.replica)
    assert started.result(WAIT_S)
    replica.gate.clear()
    service.append(bytes(1000))
    stopped = manager.stop_push(tp, [1, 9], PushSessionEndReason.PUSH_DISABLED)
    assert manager.memory.used_bytes == 0
    assert session.ended is PushSessionEndReason.PUSH_DISABLED, "E2: at once"
    replica.gate.set()
    assert stopped.result(WAIT_S) is True
    parts = replica.wait_for(lambda parts: parts[-1].end_session_reason >= 0)
    assert parts[-1].end_session_reason == PushSessionEndReason.PUSH_DISABLED
    assert manager.stop_push(tp, [1], PushSessionEndReason.PUSH_DISABLED).result(WAIT_S), "a second call is nothing"
    frames = replica.frames
    service.append(b"to nobody")
    assert replica.frames == frames


def test_e2_the_end_is_told_once(led):
    service, replica = led
    manager = service.leading.manager
    manager.startup()
    told = []
    service.leading.partitions[0].on_ended = lambda session, reason: told.append(reason)
    tp, _, started = start(service, replica.replica)
    assert started.result(WAIT_S)
    manager.stop_push(tp, [1], PushSessionEndReason.REPLICA_REMOVED).result(WAIT_S)
    manager.stop_push(tp, [1], PushSessionEndReason.SHUTDOWN).result(WAIT_S)
    assert told == [PushSessionEndReason.REPLICA_REMOVED]


def test_e3_an_answer_to_a_session_that_is_over_changes_nothing(led):
    service, replica = led
    service.leading.manager.startup()
    _, first, started = start(service, replica.replica, session_id=1)
    assert started.result(WAIT_S)
    replica.gate.clear()
    service.append(b"x")
    replica.wait_for(lambda parts: end_of_last(parts) == 1)
    _, second, _ = start(service, replica.replica, session_id=2)
    assert first.ended is not None
    replica.answer = lambda part: (
        AppendRecordsResult(error_code=ErrorCode.KAFKA_STORAGE_ERROR) if part.session_id == 1 else succeed_part(part)
    )
    replica.gate.set()
    assert second.started.result(WAIT_S), "the failure was the old session's"
    service.wait_for(lambda leader: leader.sessions[1].acknowledged == 1)
    assert second.ended is None


def test_r1_a_success_carries_the_replicas_ends_and_completes_who_waits(led):
    service, replica = led
    service.leading.manager.startup()
    _, session, started = start(service, replica.replica)
    assert started.result(WAIT_S)
    end = service.append(b"a", b"b")
    assert service.wait(end) is None
    service.wait_for(lambda _: session.log_end_offset == end)
    assert session.on_append_records_response(end, 0) is False, "no watermark rose"
    assert session.on_append_records_response(end, 1) is True


@pytest.mark.parametrize("code", [ErrorCode.KAFKA_STORAGE_ERROR, ErrorCode.INVALID_REQUEST, ErrorCode.UNKNOWN_TOPIC_ID])
def test_r2_a_final_error_ends_the_session_with_its_reason(led, code):
    service, replica = led
    service.leading.manager.startup()
    replica.answer = lambda _: AppendRecordsResult(error_code=code)
    _, session, started = start(service, replica.replica)
    assert started.result(WAIT_S) is False
    assert session.ended is PushSessionEndReason.NON_RETRIABLE_ERROR
    assert service.leading.manager.session_ends[PushSessionEndReason.NON_RETRIABLE_ERROR] == 1


def test_r2_a_retriable_error_resends_the_same_bytes(led):
    service, replica = led
    service.append(b"same bytes")
    service.leading.manager.startup()
    answers = iter([ErrorCode.NODE_STOPPING, ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NODE_STOPPING])
    replica.answer = lambda part: (
        AppendRecordsResult(error_code=code) if (code := next(answers, None)) is not None else succeed_part(part)
    )
    assert start(service, replica.replica)[2].result(WAIT_S)
    parts = replica.wait_for(lambda parts: len(parts) >= 4)
    assert len({(part.append_offset, bytes(part.records[0])) for part in parts[:4]}) == 1


def test_r2_no_answer_in_time_gives_the_connection_up_and_sends_again(world, scripted):
    replica = scripted()
    service = world.service([replica.replica], settings=replace(QUICK, request_timeout_ms=50))
    service.leading.manager.startup()
    replica.gate.clear()
    _, _, started = start(service, replica.replica)
    replica.wait_for(lambda parts: len(parts) >= 2)
    replica.gate.set()
    assert started.result(WAIT_S)


def test_a_connection_that_broke_is_counted_and_told_and_one_that_the_leader_closes_is_not(world, scripted, caplog):
    replica = scripted()
    service = world.service([replica.replica], settings=QUICK)
    manager = service.leading.manager
    manager.startup()
    assert start(service, replica.replica)[2].result(WAIT_S)
    before = len(replica.requests)
    replica.listener.accepted[0].shutdown(socket.SHUT_RDWR)
    replica.wait_for(lambda parts: len(parts) > before)
    for state in ("connected again", "shut down"):
        assert manager.connections_lost == {1: 1}, state
        assert caplog.text.count(f"{replica.replica} is lost") == 1, state
        manager.shutdown()


def test_q1_internal_topics_and_links_are_not_pushed_unless_configured():
    manager = PushManager(QUICK)
    asked = [(internal, link) for internal in (False, True) for link in (False, True)]
    supported = [
        manager.is_push_replication_supported(is_internal_topic=internal, is_cluster_link_destination=link)
        for internal, link in asked
    ]
    assert supported == [True, False, False, False]
    manager.shutdown()
    manager = PushManager(QUICK, push_internal_topics=True, push_cluster_links=True)
    assert manager.is_push_replication_supported(is_internal_topic=True, is_cluster_link_destination=True)
    manager.shutdown()


def test_q2_a_follower_behind_is_counted_and_nothing_else(led):
    service, replica = led
    tp = service.leading.partitions[0].tp
    for index in (1, 1, 2):
        service.leading.manager.record_follower_not_caught_up(tp, index)
    assert dict(service.leading.manager.not_caught_up) == {1: 2, 2: 1}
    assert replica.frames == 0


def test_one_request_carries_many_partitions_and_idle_ones_are_not_looked_at(world, scripted):
    replica = scripted()
    service = world.service([replica.replica], partitions=10, settings=QUICK)
    service.leading.manager.startup()
    for n in range(10):
        start(service, replica.replica, partition=n)
    replica.wait_for(lambda parts: len({part.tp for part in parts}) == 10)
    replica.gate.clear()
    service.append(b"first", partition=0)
    replica.wait_for(lambda parts: any(part.records for part in parts))
    for n in range(1, 6):
        service.append(b"more", partition=n)
    replica.gate.set()
    parts = replica.wait_for(lambda parts: len({part.tp for part in parts if part.records}) == 6)
    with_records = [part for part in parts if part.records]
    assert replica.frames < len(parts), "several partitions shared a frame"
    assert {part.tp.partition for part in with_records} == set(range(6)), "the idle ones sent nothing"


# --- helpers -------------------------------------------------------------------------------------------------------


def end_of_part(part):
    batches, _ = batches_of(part.records[0]) if part.records else ((), True)
    return batches[-1].next_offset if batches else part.append_offset


def end_of_last(parts):
    return end_of_part(parts[-1]) if parts else -1


def succeed_part(part):
    return AppendRecordsResult(log_end_offset=end_of_part(part), flushed_offset=end_of_part(part))


def one_batch(*values):
    batch = encode_batch(list(values), timestamps_ms=1)
    return RecordBatch(batch.data)


def iter_batches(service):
    yield one_batch(b"x")


def test_an_error_that_nobody_foresaw_is_a_trouble_and_sessions_begin_again(world, scripted, caplog):
    """A node that describes a log which nobody asked for, twice; then the right one."""
    replica, wrong = scripted(), [1, 2]

    def describe(tp):
        return LogDescription(tp=replace(tp, partition=wrong.pop()) if wrong else tp)

    replica.describe = describe
    service = world.service([replica.replica], settings=QUICK)
    troubles = []
    service.leading.on_kept = lambda _index: troubles.append(service.leading.troubles().get(1))
    service.start()
    end = service.append(b"x")
    assert service.wait(end) is None
    replica.wait_for(lambda parts: end_of_last(parts) == end)
    assert [why.partition(":")[0] for why in troubles if why is not None] == ["KeyError"] * 2
    service.wait_for(lambda leader: leader.sessions)
    assert service.leading.troubles() == {}
    assert caplog.text.count("sessions can't begin") == 2
