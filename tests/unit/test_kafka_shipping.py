"""Shipping to brokers that fail: whatever they answer, each record is in the topic, visible once, and in order.

The brokers are simulated, and spoken to over loopback; tests/kafka ships to Kafka's own.
"""

import random
import time

import pytest

from filtering import METADATA_HEADER, ReplayFilter, StreamMetadata
from pushrep import KafkaDestination, LogConfig, Outbox, OutboxConfig
from pushrep.cli.main import run
from pushrep.env import REAL_FILESYSTEM
from pushrep.kafka import (
    AnotherCluster,
    DestinationAhead,
    DestinationRefused,
    OutboxDiverged,
    OutboxTakenOver,
    RecordsParked,
    ShippingError,
    ShippingStopped,
    ShippingTimeout,
    TopicLostRecords,
    TopicMissing,
    fence_rules,
    parking,
    recovery,
    sink,
    sink_session,
    sink_state,
)
from pushrep.kafka.answers import AnswerReaction, Code, reaction_to
from pushrep.kafka.cluster import Connection
from pushrep.kafka.progress import read_progress
from pushrep.kafka.requests import ProduceBatches
from pushrep.kafka.source import ShippedPartition
from pushrep.outbox import rebase
from tests.support.spans import Spans, ids_of
from tests.unit.gated_disk import until
from tests.unit.simulated_brokers import (
    ADD,
    END,
    FETCH,
    INIT,
    LOST,
    METADATA,
    OFFSETS,
    PRODUCE,
    SILENT,
    UNSENT,
    SimulatedBrokers,
    SimulatedPartition,
)

WAIT_S = 60
LOG = LogConfig(flush_ms=10, preallocate_bytes=0)
AT_ONCE = OutboxConfig(open_timeout_s=0.0, log_config=LOG)
"""The outbox is open before the brokers have answered."""


@pytest.fixture
def brokers(monkeypatch):
    """Two brokers; the topic's two partitions have one of them each as leader."""
    with SimulatedBrokers(nodes=2, partitions=2) as made:
        made.topic[1].leader = 2
        monkeypatch.setattr(sink, "look_at_topic", made.facts)
        monkeypatch.setattr(recovery, "look_at_topic", made.facts)
        yield made


@pytest.fixture
def opened(brokers, tmp_path):
    """Open the outbox of the test, which ships to them."""

    def open_outbox(partitions=2, *, config=None, carrier="key", **destination):
        kafka = KafkaDestination(
            bootstrap_servers=brokers.servers, retry_backoff_ms=1, retry_backoff_max_ms=5, **destination
        )
        config = config or OutboxConfig(open_timeout_s=WAIT_S, log_config=LOG)
        where = tmp_path / "outbox", brokers.name, partitions, "shop"
        return Outbox.open(*where, kafka=kafka, carrier=carrier, config=config)

    return open_outbox


def fill(outbox, *labels, count=5):
    for label in labels:
        for partition in range(outbox.identity.partitions):
            outbox.append_many(partition, [b"%s %d" % (label.encode(), n) for n in range(count)])


def check(brokers, outbox):
    """Every record of the logs is there, visible once, in order; returns how many raw copies there are."""
    readers, seen, copies = ReplayFilter(), {}, 0
    for number, partition in enumerate(brokers.topic):
        for record in partition.records():
            if not readers.admit(dict(record.headers).get(METADATA_HEADER, record.key), number):
                copies += 1
            else:
                seen.setdefault(number, []).append((record.key, record.value, record.timestamp_ms, record.headers))
    logs = {}
    for number in range(outbox.identity.partitions):
        records = [(one.key, one.value, one.timestamp_ms, one.headers) for one in outbox.log(number).records(0)]
        logs.setdefault(number % len(brokers.topic), []).append(records)
    for number, some in logs.items():
        assert sorted(seen.get(number, []), key=repr) == sorted((one for records in some for one in records), key=repr)
        for records in some:
            assert [one for one in seen[number] if one in records] == records
    return copies


# But for those that say that the topic has the batch, and those that a record which is sent alone stops at.
REFUSED_FOR_A_WHILE = [
    code for code in Code
    if reaction_to(code) not in {AnswerReaction.DONE, AnswerReaction.STOP, AnswerReaction.SPLIT, AnswerReaction.ISOLATE}
]  # fmt: skip
TOGETHER = [Code.INVALID_RECORD, Code.INVALID_TIMESTAMP, Code.MESSAGE_TOO_LARGE]
"""Said once, of a batch."""


@pytest.mark.parametrize("fence", ["required", "off"])
def test_whatever_a_broker_answers_for_a_while_each_record_is_visible_once(brokers, opened, fence):
    """Every code of Kafka that may pass, one that nobody knows, and answers and requests that get lost."""
    with opened(3, fence=fence) as outbox:
        for fault in [*REFUSED_FOR_A_WHILE, 999, LOST, UNSENT, *TOGETHER]:
            brokers.faults[PRODUCE] += [fault] if fault in TOGETHER else [fault, fault]
            fill(outbox, str(fault))
            outbox.wait_shipped(WAIT_S)
        assert check(brokers, outbox) == 0
        assert outbox.lag()["kafka:orders"] == (0, 0, None, (), None)
        [kafka] = outbox.status().destinations
        assert kafka.counts.retried > 0
        assert (kafka.counts.errors["NOT_LEADER_OR_FOLLOWER"], kafka.counts.errors["error 999"]) == (2, 2)
        assert kafka.counts.connections >= 2
        assert sum(kafka.requests.counts) > 0


@pytest.mark.parametrize("version", [(13, 2), (8, 0)], ids=["new brokers", "old ones"])
def test_a_topic_that_others_write_to_is_shipped_to_under_a_fence(brokers, opened, version):
    brokers.produce_version, brokers.transaction_version = version
    with opened(3, fence="required") as outbox:
        fill(outbox, "a")
        outbox.wait_shipped(WAIT_S)
        [name] = brokers.names
        for partition in brokers.topic:
            assert partition.producers.keys() == {brokers.producer(name)[0]}, "nothing is sent under another id"
        for partition in brokers.topic:
            partition.write(b"another's", keys=[b"another's"])
        fill(outbox, "b")
        outbox.wait_shipped(WAIT_S)
    for partition in brokers.topic:
        partition.batches = [one for one in partition.batches if b"another's" not in one]
    with opened(3) as outbox:
        assert check(brokers, outbox) == 0


def test_who_may_not_fence_ships_without_or_not_at_all(brokers, opened):
    brokers.faults[INIT] += [Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED]
    with opened() as outbox:
        fill(outbox, "a")
        outbox.wait_shipped(WAIT_S)
        fencing = outbox.facts.shipping.sink.fencing.newest
        assert not fencing.is_standing
        assert "WRITE on transactional-id" in fencing.why_unfenced
        assert check(brokers, outbox) == 0
    brokers.faults[INIT] += [Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED]
    with pytest.raises(DestinationRefused, match="WRITE on transactional-id") as refused:
        opened(fence="required")
    assert refused.value.setting == "fence"


@pytest.mark.parametrize("fence", ["preferred", "required"])
def test_a_coordinator_that_forgot_us_shuts_nobody_out_and_is_not_believed_where_it_has_to(brokers, opened, fence):
    with opened(fence=fence) as outbox:
        fill(outbox, "a")
        outbox.wait_shipped(WAIT_S)
        brokers.forget()
        brokers.faults[PRODUCE] += [Code.UNKNOWN_PRODUCER_ID]
        fill(outbox, "b")
        if fence == "required":
            with pytest.raises(DestinationRefused, match="earlier instances are not fenced"):
                outbox.wait_shipped(WAIT_S)
        else:
            outbox.wait_shipped(WAIT_S)
            assert outbox.facts.shipping.sink.fencing.newest.earlier_unfenced
            assert check(brokers, outbox) == 0


def test_of_two_instances_the_older_one_stops_and_the_next_opening_takes_over(brokers, opened):
    with opened() as outbox:
        fill(outbox, "a")
        outbox.wait_shipped(WAIT_S)
        brokers.take_over()
        fill(outbox, "b")
        with pytest.raises(OutboxTakenOver, match="orders"):
            outbox.wait_shipped(WAIT_S)
        assert outbox.facts.shipping.sink.state.counts.taken_over == 1
        assert all(len(one.records()) == 5 for one in brokers.topic), "nothing is sent any more"
    with opened() as outbox:
        outbox.wait_shipped(WAIT_S)
        assert check(brokers, outbox) == 0


@pytest.mark.parametrize("fence", ["preferred", "off"])
def test_a_partition_without_a_leader_keeps_no_other_waiting(brokers, opened, monkeypatch, fence):
    monkeypatch.setattr(sink_state, "IN_TROUBLE_MS", 1)
    brokers.topic[1].leader = None
    with opened(fence=fence) as outbox:
        fill(outbox, "a")
        outbox.facts.shipping.sink.state.wait({0: 5}, WAIT_S, None)
        until(lambda: outbox.lag()["kafka:orders"].trouble == "orders-1 has no leader", "it is said which one waits")
        assert [len(one.records()) for one in brokers.topic] == [5, 0]
        brokers.topic[1].leader = 1
        outbox.wait_shipped(WAIT_S)
        until(lambda: outbox.lag()["kafka:orders"].trouble is None, "it has one")
        brokers.topic[0].leader = 2
        fill(outbox, "b")
        outbox.wait_shipped(WAIT_S)
        brokers.disconnect()
        fill(outbox, "c")
        outbox.wait_shipped(WAIT_S)
        assert check(brokers, outbox) == 0


def test_a_marker_that_never_came_is_asked_for_again(brokers, opened, monkeypatch):
    monkeypatch.setattr(fence_rules, "MARKER_WITHIN_MS", 50)
    brokers.topic[1].takes_markers = False
    with opened(fence="required", config=AT_ONCE) as outbox:
        fill(outbox, "a")
        until(lambda: brokers.asked.count(END) > 2, "it is listed again")
        brokers.topic[1].takes_markers = True
        outbox.wait_shipped(WAIT_S)
        assert check(brokers, outbox) == 0


def test_brokers_that_are_away_keep_the_records_and_no_appends_waiting(brokers, opened):
    brokers.down = {1, 2}
    with opened(config=AT_ONCE) as outbox:
        fill(outbox, "a")
        outbox.flush()
        with pytest.raises(ShippingTimeout) as late:
            outbox.wait_shipped(0.01)
        assert late.value.records == 10
        brokers.down = set()
        outbox.wait_shipped(WAIT_S)
        brokers.down = {2}
        brokers.disconnect()
        fill(outbox, "b")
        outbox.facts.shipping.sink.state.wait({0: 10}, WAIT_S, None)
        brokers.down = set()
        outbox.wait_shipped(WAIT_S)
        assert check(brokers, outbox) == 0


def test_a_broker_that_is_away_is_named_until_it_is_back_or_leads_nothing(brokers, opened, monkeypatch):
    monkeypatch.setattr(sink_state, "IN_TROUBLE_MS", 1)
    with opened(fence="off") as outbox:

        def goes(word):
            fill(outbox, word)
            until(lambda: "broker 2 can't be reached" in str(outbox.lag()["kafka:orders"].trouble), "it is said")

        for way_on in ("back", "led by another"):
            outbox.wait_shipped(WAIT_S)
            brokers.down = {2}
            brokers.disconnect()
            goes(way_on)
            if way_on == "back":
                brokers.down = set()
            else:
                brokers.topic[1].leader = 1
            outbox.wait_shipped(WAIT_S)
            until(lambda: outbox.lag()["kafka:orders"].trouble is None, "nothing is in the way any more")
        assert check(brokers, outbox) == 0


def test_a_failure_that_passes_at_once_is_no_trouble_however_often_it_comes(brokers, opened, caplog):
    with opened() as outbox:
        for n in range(3):
            brokers.faults[PRODUCE] += [Code.NOT_ENOUGH_REPLICAS]
            outbox.append(0, b"%d" % n)
            outbox.wait_shipped(WAIT_S)
    assert "records wait" not in caplog.text


def test_a_broker_that_asks_for_a_pause_gets_it(brokers, opened):
    brokers.throttle_ms = 3_600_000
    with opened() as outbox:
        fill(outbox, "a")
        outbox.wait_shipped(WAIT_S)
        fill(outbox, "b")
        with pytest.raises(ShippingTimeout):
            outbox.wait_shipped(0.1)
        assert [len(one.records()) for one in brokers.topic] == [5, 5]


@pytest.fixture
def rounds(monkeypatch):
    """Grows while the logs are looked at for what is to be sent, again and again."""
    made, poll = [], ShippedPartition.poll
    monkeypatch.setattr(ShippedPartition, "poll", lambda self: (made.append(self), poll(self))[1])
    return made


@pytest.fixture
def requests(monkeypatch):
    """What is sent and answered, in this order, as (word, connection, partition)."""
    made, send = [], Connection.send_in_parts

    class Request(ProduceBatches):
        def __init__(self, topic, topic_id, batches, timeout_ms):
            super().__init__(topic, topic_id, batches, timeout_ms)
            self.partitions = list(batches)

    def note(connection, request):
        answer = send(connection, request)
        places = [(connection, partition) for partition in request.partitions]
        made.extend(("sent", *place) for place in places)

        async def answered():
            try:
                return await answer
            finally:
                made.extend(("answered", *place) for place in places)

        return answered()

    monkeypatch.setattr(Connection, "send_in_parts", note)
    monkeypatch.setattr(sink_session, "ProduceBatches", Request)
    return made


def test_each_partition_gets_its_turn_and_no_more_requests_wait_than_five(
    brokers, opened, monkeypatch, rounds, requests
):
    """Five requests are on the way at most; a partition's first over a new connection is answered before its next."""
    monkeypatch.setattr(sink_session, "_REQUEST_BYTES", 1)  # a batch a request
    brokers.topic += [SimulatedPartition() for _ in range(6)]
    for one in brokers.topic:
        one.leader = 1

    def fill_often(outbox, word):
        for n in range(6):
            fill(outbox, f"{word}{n}")
            outbox.flush()

    def waiting():
        words = [word for word, *_ in requests]
        return words.count("sent") - words.count("answered")

    brokers.down = {1, 2}
    with opened(8, fence="off", config=AT_ONCE) as outbox:
        fill_often(outbox, "a")
        brokers.down = set()
        outbox.wait_shipped(WAIT_S)
        turns = [partition for word, _, partition in requests if word == "sent"]
        assert set(turns[:16]) == set(range(8)), "who came first does not come first again"
        for word in ("b", "c"):
            brokers.faults[PRODUCE] += [SILENT]
            fill_often(outbox, word)
            until(lambda: waiting() == 5, "five are on the way")
            rounds.clear()
            until(lambda: len(rounds) > 80, "there was time for more")
            assert waiting() == 5
            brokers.disconnect()
            outbox.wait_shipped(WAIT_S)
        assert check(brokers, outbox) == 0
    places = {one[1:] for one in requests}
    assert len({connection for connection, _ in places}) == 3
    for place in places:
        assert [word for word, *where in requests if tuple(where) == place][:2] == ["sent", "answered"]


@pytest.mark.parametrize(("idle_ms", "at_once"), [(3_600_000, 5), (0, 1)])
def test_after_a_silence_the_first_batch_is_answered_before_the_next(
    brokers, opened, monkeypatch, rounds, idle_ms, at_once
):
    """The broker may have forgotten the producer, and take any sequence number."""
    monkeypatch.setattr(sink_session, "_IDLE_MAX_MS", idle_ms)
    with opened(1, fence="off") as outbox:
        fill(outbox, "a")
        outbox.wait_shipped(WAIT_S)
        brokers.faults[PRODUCE] += [SILENT]
        before = brokers.asked.count(PRODUCE)
        for n in range(7):
            fill(outbox, f"b{n}")
            outbox.flush()
        until(lambda: brokers.asked.count(PRODUCE) >= before + at_once, "it is sent")
        at = len(rounds)
        until(lambda: len(rounds) > at + 20, "there was time for more")
        assert brokers.asked.count(PRODUCE) == before + at_once
        brokers.disconnect()
        outbox.wait_shipped(WAIT_S)
        assert check(brokers, outbox) == 0


def test_a_producer_that_lost_its_place_goes_on_under_another_id_whatever_its_own_was(brokers, opened, caplog):
    """Under the same one a batch would count as one that is there already."""
    brokers.newest_producer_id = -1  # the first one has the id 0
    with opened(fence="off") as outbox:
        fill(outbox, "a")
        outbox.wait_shipped(WAIT_S)
        assert brokers.topic[0].producers.keys() == {0}
        brokers.faults[PRODUCE] += [Code.UNKNOWN_PRODUCER_ID] * 2
        fill(outbox, "b")
        outbox.wait_shipped(WAIT_S)
        assert check(brokers, outbox) == 0
    assert "nothing is shipped at present" not in caplog.text, "nothing seemed to be lost"


# -- records that the topic does not take ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (Code.INVALID_RECORD, r"INVALID_RECORD \(it is bad\) in a batch of \d+ bytes"),
        (Code.INVALID_TIMESTAMP, r"INVALID_TIMESTAMP \(it is bad\), its time is 2001-09-09T01:46:40"),
    ],
)
def test_one_refused_record_stops_its_partition_at_itself_until_it_is_given_up(brokers, opened, capsys, code, told):
    for one in brokers.topic:
        one.refuses = lambda record: "it is bad" if record.value == b"bad" else None
        one.refuses_with = code
    with opened() as outbox:
        began_ms = time.time_ns() // 1_000_000
        outbox.append_many(0, [b"a", b"b", b"bad", b"c"], timestamps_ms=1_000_000_000_000)
        fill(outbox, "d")
        with pytest.raises(ShippingStopped, match=told) as stopped:
            outbox.wait_shipped(WAIT_S)
        assert (stopped.value.partition, stopped.value.offset) == (0, 2)
        asked = brokers.asked.count(PRODUCE)
        [kafka] = outbox.status().destinations
        assert [(one.partition, one.since_ms >= began_ms) for one in kafka.stopped] == [(0, True)]
        outbox.facts.shipping.sink.state.wait({1: 5}, WAIT_S, None)
        assert [one.value for one in brokers.topic[0].records()] == [b"a", b"b"]
        outbox.append_many(1, [b"e"] * 5)
        outbox.facts.shipping.sink.state.wait({1: 10}, WAIT_S, None)
        assert brokers.asked.count(PRODUCE) <= asked + 2, "what was refused is not asked for again and again"
        assert run(["outbox", "skip", "2", "--directory", str(outbox.directory), "--reason", "bad"]) == 0
        outbox.wait_shipped(WAIT_S)
        assert [one.value for one in brokers.topic[0].records()][:3] == [b"a", b"b", b"c"]
        assert len(brokers.topic[0].records()) == 8
    capsys.readouterr()


@pytest.mark.parametrize("how", ["stop", "park"])
def test_a_record_larger_than_the_topic_takes_is_named_or_parked_and_larger_batches_are_parted(brokers, opened, how):
    for one in brokers.topic:
        one.size_max = 5_000
    brokers.settings = {"max_message_bytes": 1 << 20, "set_by": {"max.message.bytes": "5000 (by the topic)"}}
    with opened(on_refused=how) as outbox:
        outbox.append_many(0, [b"%d" % n * 100 for n in range(150)])
        outbox.wait_shipped(WAIT_S)
        outbox.append_many(0, [b"before", bytes(6_000), b"behind"])
        if how == "stop":
            with pytest.raises(ShippingStopped, match=r"max\.message\.bytes=5000 \(by the topic\)") as stopped:
                outbox.wait_shipped(WAIT_S)
            assert stopped.value.offset == 151
        else:
            with pytest.raises(RecordsParked) as parked:
                outbox.wait_shipped(WAIT_S)
            assert parked.value.places == ((0, 151),)
            [kept] = outbox.facts.shipping.sink.state.parking.all()
            assert outbox.facts.shipping.sink.state.parking.record(kept.number).value == bytes(6_000)
        sent = [one.value for one in brokers.topic[0].records()]
        assert sent == [b"%d" % n * 100 for n in range(150)] + [b"before", b"behind"][: 1 if how == "stop" else 2]
        assert max(map(len, brokers.topic[0].batches)) <= 5_000


def test_a_missing_right_stops_until_it_is_given(brokers, opened, monkeypatch):
    monkeypatch.setattr(sink_session, "STOPPED_RETRY_MS", 20)
    for one in brokers.topic:
        one.refuses, one.refuses_with = lambda _record: "no", Code.TOPIC_AUTHORIZATION_FAILED
    with opened() as outbox:
        fill(outbox, "a")
        with pytest.raises(ShippingStopped, match="WRITE on topic 'orders'"):
            outbox.wait_shipped(WAIT_S)
        assert len(outbox.lag()["kafka:orders"].stopped) in {1, 2}
        for one in brokers.topic:
            one.refuses = lambda _record: None
        until(lambda: outbox.lag()["kafka:orders"].records == 0, "it is tried again by itself")
        assert outbox.lag()["kafka:orders"].stopped == ()
        assert check(brokers, outbox) == 0


@pytest.mark.parametrize("way_on", ["a younger one behind it keeps the segment", "the topic keeps it"])
def test_a_record_that_the_topic_would_delete_on_arrival_is_not_sent(brokers, opened, monkeypatch, way_on):
    monkeypatch.setattr(sink_session, "STOPPED_RETRY_MS", 20)
    brokers.settings = {"retention_ms": 1_000, "set_by": {"retention.ms": "1000 (by the topic)"}}
    with opened() as outbox:
        outbox.append(0, b"old", timestamp_ms=1_000_000_000_000)
        outbox.append_many(1, [b"a"] * 5)
        with pytest.raises(ShippingStopped, match=r"2001-09-09.*retention\.ms=1000") as stopped:
            outbox.wait_shipped(WAIT_S)
        assert stopped.value.offset == 0
        outbox.facts.shipping.sink.state.wait({1: 5}, WAIT_S, None)
        assert brokers.topic[0].records() == []
        if way_on == "a younger one behind it keeps the segment":
            outbox.append(0, b"new")
        else:
            brokers.settings = {}
        until(lambda: outbox.lag()["kafka:orders"].records == 0, "it goes on by itself")


# -- what is known of the topic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["older", "none"])
@pytest.mark.parametrize("carrier", ["key", "header"])
def test_a_start_finds_in_the_topic_what_no_checkpoint_tells(brokers, opened, tmp_path, lost, carrier):
    file = tmp_path / "outbox" / "destinations.json"
    with opened(3, carrier=carrier) as outbox:
        fill(outbox, "a")
        outbox.wait_shipped(WAIT_S)
    older = file.read_bytes()
    with opened(3, carrier=carrier) as outbox:
        fill(outbox, "b")
        outbox.wait_shipped(WAIT_S)
    if lost == "older":
        file.write_bytes(older)
    else:
        file.unlink()
    with opened(3, carrier=carrier) as outbox:
        fill(outbox, "c")
        outbox.wait_shipped(WAIT_S)
        assert check(brokers, outbox) == 0


def test_a_topic_that_was_made_again_is_shipped_to_from_the_start(brokers, opened):
    with opened() as outbox:
        fill(outbox, "a")
        outbox.wait_shipped(WAIT_S)
        brokers.renew()
        brokers.topic[1].leader = 2
        fill(outbox, "b")
        outbox.wait_shipped(WAIT_S)
        assert check(brokers, outbox) == 0
    brokers.renew()
    with opened() as outbox:
        outbox.wait_shipped(WAIT_S)
        assert check(brokers, outbox) == 0


@pytest.mark.parametrize("when", ["running", "at an opening"])
def test_what_the_topic_lost_is_said_and_sent_again_after_a_rebase(brokers, opened, monkeypatch, capsys, when):
    monkeypatch.setattr(recovery, "_LOOK_AT_END_S", 0)
    monkeypatch.setattr(sink_session, "WATCH_S", 0.01)
    monkeypatch.setattr(rebase, "look_at_topic", brokers.facts)
    outbox = opened()
    for label in "ab":
        fill(outbox, label)
        outbox.wait_shipped(WAIT_S)
    if when == "running":
        brokers.topic[0].cut(6)
        with pytest.raises(TopicLostRecords) as lost:
            until(lambda: outbox.wait_shipped(WAIT_S), "it is seen")
        outbox.close()
    else:
        outbox.close()
        brokers.topic[0].cut(6)
        with pytest.raises(TopicLostRecords) as lost:
            opened()
    assert lost.value.lost == {0: (5, 10)}
    with pytest.raises(TopicLostRecords):  # it is on disk, and told until somebody acts
        opened()
    assert run(["outbox", "rebase", str(outbox.directory), "--bootstrap-servers", brokers.servers]) == 0
    assert "the topic has lost [5, 10)" in capsys.readouterr().out
    with opened() as outbox:
        outbox.wait_shipped(WAIT_S)
        assert check(brokers, outbox) == 0


def test_a_batch_that_is_answered_to_stand_where_another_stood_shows_what_the_topic_lost(brokers, opened):
    """Before anybody looks at the topic's end."""
    with opened() as outbox:
        for label in "ab":
            fill(outbox, label)
            outbox.wait_shipped(WAIT_S)
        brokers.topic[0].cut(6)
        fill(outbox, "c")
        with pytest.raises(ShippingStopped, match="lacks offset 5-9 of partition 0 and holds later ones"):
            outbox.wait_shipped(WAIT_S)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_what_another_instance_wrote_in_our_place_stops_shipping(brokers, opened, is_ahead):
    """Without a fence a copy of the outbox wrote between: another content at a position of ours, or one above."""
    with opened(fence="off") as outbox:
        fill(outbox, "a")
        outbox.wait_shipped(WAIT_S)
        key = StreamMetadata(outbox.pid, 0, 100 if is_ahead else 3).pack()
        brokers.topic[0].write(b"another", keys=[key])
        fill(outbox, "b")
        with pytest.raises(DestinationAhead if is_ahead else OutboxDiverged) as told:
            until(lambda: outbox.wait_shipped(WAIT_S), "it is read")
    assert (told.value.shipped_offset if is_ahead else told.value.offset) == (100 if is_ahead else 3)


class Interrupted(Exception):
    """Ctrl-C."""


def seen(brokers, number):
    """The values that a filtering reader of the topic's partition sees."""
    reader = ReplayFilter()
    records = brokers.topic[number].records()
    return [one.value for one in records if reader.admit(dict(one.headers).get(METADATA_HEADER, one.key), number)]


@pytest.mark.parametrize("carrier", ["key", "header"])
def test_a_rebase_appends_again_what_another_has_in_our_place_once_however_often_it_is_interrupted(
    brokers, opened, monkeypatch, capsys, carrier
):
    monkeypatch.setattr(rebase, "look_at_topic", brokers.facts)
    with opened(fence="off", carrier=carrier) as outbox:
        fill(outbox, "a")
        outbox.wait_shipped(WAIT_S)
        brokers.down = {1, 2}
        brokers.disconnect()
        fill(outbox, "b")
        metadata = StreamMetadata(outbox.pid, 0, 7).pack()
        own = {"keys": [metadata]} if carrier == "key" else {"headers": [[(METADATA_HEADER, metadata)]]}
        brokers.topic[0].write(b"another's", **own)  # a copy of the outbox was faster
        brokers.topic[0].write(b"of others", keys=[b"no metadata"])
    brokers.down = set()
    with pytest.raises((OutboxDiverged, DestinationAhead)):
        opened(fence="off", carrier=carrier)
    command = ["outbox", "rebase", str(outbox.directory), "--bootstrap-servers", brokers.servers]
    assert run([*command, "--dry-run"]) == 0
    write = rebase.write_progress

    def unless_finished(*given):
        if not given[-1]["orders"].rebase:
            raise Interrupted
        write(*given)

    for _ in range(2):
        monkeypatch.setattr(rebase, "write_progress", unless_finished)
        with pytest.raises(Interrupted):
            rebase.rebase(outbox.directory, KafkaDestination(bootstrap_servers=brokers.servers))
        with pytest.raises(ShippingError, match=r"a rebase was interrupted, .* again: pushrep outbox rebase"):
            opened(fence="off", carrier=carrier)
    monkeypatch.setattr(rebase, "write_progress", write)
    assert run(command) == 0
    with opened(fence="off", carrier=carrier) as outbox:
        fill(outbox, "c")
        outbox.wait_shipped(WAIT_S)
        ours = [b"%c %d" % (label, n) for label in b"abc" for n in range(5)]
        found = [one for one in seen(brokers, 0) if one in ours]
        assert sorted(found) == ours, "each once"
        assert [one for one in found if one[0] in b"ac"] == [one for one in ours if one[0] in b"ac"]
        assert [one.value for one in outbox.log(0).records(0)].count(b"b 3") == 2
    capsys.readouterr()


def test_a_rebase_refuses_records_that_would_lose_their_callers_metadata(brokers, opened, monkeypatch, capsys):
    monkeypatch.setattr(rebase, "look_at_topic", brokers.facts)
    with opened(fence="off") as outbox:
        fill(outbox, "a")
        outbox.wait_shipped(WAIT_S)
        brokers.down = {1, 2}
        brokers.disconnect()
        outbox.append(0, b"from upstream", metadata=StreamMetadata(77, 0, 5)).result(WAIT_S)
        brokers.topic[0].write(b"another's", keys=[StreamMetadata(outbox.pid, 0, 4).pack()])
    brokers.down = set()
    before = read_progress(REAL_FILESYSTEM, outbox.directory)
    assert run(["outbox", "rebase", str(outbox.directory), "--bootstrap-servers", brokers.servers]) == 1
    said = capsys.readouterr().err
    assert "1 records of partition 0, the first at offset 5" in said
    assert "carry the caller's own metadata" in said
    assert read_progress(REAL_FILESYSTEM, outbox.directory) == before


@pytest.mark.parametrize("first", [0, 5])
def test_a_record_that_the_topic_lacks_before_later_ones_stops_its_partition_until_it_is_given_up(
    brokers, opened, capsys, first
):
    with opened() as outbox:
        for label in "abc":
            fill(outbox, label)
            outbox.wait_shipped(WAIT_S)
    lacking = [n for n, one in enumerate(brokers.topic[0].batches) if b"%c 0" % b"ab"[first // 5] in one]
    del brokers.topic[0].batches[lacking[0]]
    (outbox.directory / "destinations.json").unlink()  # then the topic is read from its start
    with opened(config=AT_ONCE) as outbox:
        fill(outbox, "d")
        last = first + 4
        with pytest.raises(ShippingStopped, match=f"lacks offset {first}-{last} of partition 0 and holds later ones"):
            outbox.wait_shipped(WAIT_S)
        outbox.facts.shipping.sink.state.wait({1: 20}, WAIT_S, None)
        given_up = ["--directory", str(outbox.directory), "--reason", "lost"]
        assert run(["outbox", "skip", f"{first}-{last}", *given_up]) == 0
        outbox.wait_shipped(WAIT_S)
        assert [one.value[:1] for one in brokers.topic[0].records()].count(b"d") == 5
    capsys.readouterr()


def test_after_too_many_refused_records_in_a_row_the_partition_stops_and_says_so(brokers, opened, monkeypatch):
    monkeypatch.setattr(parking, "IN_A_ROW_MAX", 2)
    for one in brokers.topic:
        one.refuses = lambda record: "it is bad" if record.value.startswith(b"bad") else None
    with opened(on_refused="park") as outbox:
        outbox.append_many(0, [b"bad", b"a", b"bad", b"bad", b"bad again", b"b"])
        with pytest.raises(
            ShippingStopped, match=r"not parked: 2 records in a row were parked\. .*it is bad"
        ) as stopped:
            outbox.wait_shipped(WAIT_S)
        assert stopped.value.offset == 4
        [kafka] = outbox.status().destinations
        assert [one.is_refused for one in kafka.stopped] == [True], "it goes on once the record is given up"
        assert [one.value for one in brokers.topic[0].records()] == [b"a"]


def test_the_spans_of_what_was_shipped_say_where_it_went_and_what_failed(brokers, opened):
    spans = Spans()
    brokers.faults[PRODUCE] += [Code.NOT_ENOUGH_REPLICAS]
    with spans.traced(), opened() as outbox:
        with spans.tracer.start_as_current_span("request") as request:
            outbox.append_many(1, [b"a", b"b"])
        outbox.wait_shipped(WAIT_S)
    failed, sent = spans.named("send orders")
    for one, error in ((failed, "NOT_ENOUGH_REPLICAS"), (sent, None)):
        assert one.attributes["messaging.destination.partition.id"] == "1"
        assert one.attributes["messaging.batch.message_count"] == 2
        assert one.attributes.get("error.type") == error
        assert [ids_of(link.context) for link in one.links] == [ids_of(request.get_span_context())]


@pytest.mark.parametrize("when", ["once it is answered", "at the next opening"])
def test_all_that_others_wrote_is_read_also_what_came_while_it_was_not_answered(brokers, opened, when):
    with opened(fence="off") as outbox:
        fill(outbox, "a")
        outbox.wait_shipped(WAIT_S)
        brokers.faults[FETCH] += [Code.REQUEST_TIMED_OUT] * 9_999
        brokers.topic[0].write(b"another's", keys=[StreamMetadata(outbox.pid, 0, 3).pack()])
        for word in "bc":
            fill(outbox, word)
            outbox.flush()
            until(lambda: outbox.facts.shipping.sink.needed_from(0) == outbox.log(0).log_end_offset, "it is shipped")
            brokers.topic[0].write(b"of no outbox", keys=[b"k"])
        if when == "once it is answered":
            brokers.faults[FETCH].clear()
            with pytest.raises(OutboxDiverged):
                until(lambda: outbox.wait_shipped(WAIT_S), "it is read")
    brokers.faults[FETCH].clear()
    with pytest.raises(OutboxDiverged):
        opened(fence="off")


def test_brokers_of_another_cluster_get_nothing(brokers, opened):
    with opened() as outbox:
        fill(outbox, "a")
        outbox.wait_shipped(WAIT_S)
    brokers.cluster_id = "another cluster"
    with pytest.raises(AnotherCluster) as told:
        opened()
    assert (told.value.expected, told.value.found) == ("a cluster", "another cluster")
    assert all(len(one.records()) == 5 for one in brokers.topic)


def test_a_topic_that_is_not_there_or_would_lose_records_is_refused_by_name(brokers, opened, tmp_path):
    brokers.is_missing = True
    with pytest.raises(TopicMissing, match="orders"):
        opened()
    assert read_progress(REAL_FILESYSTEM, tmp_path / "outbox") == {}, "the name may be a mistake"
    brokers.is_missing = False
    for settings, named in (
        ({"cleanup_policy": "compact,delete"}, "cleanup.policy"),
        ({"max_message_bytes": 1_000}, "max.message.bytes"),
    ):
        brokers.settings = settings
        with pytest.raises(DestinationRefused) as refused:
            opened()
        assert refused.value.setting == named
    brokers.settings = {}
    with opened() as outbox:
        fill(outbox, "a")
        outbox.wait_shipped(WAIT_S)
        assert check(brokers, outbox) == 0


def test_a_setting_that_would_lose_records_stops_a_running_service_until_it_is_undone(brokers, opened, monkeypatch):
    monkeypatch.setattr(sink_session, "WATCH_S", 0.01)
    monkeypatch.setattr(sink, "_REFUSED_RETRY_S", 0.01)
    with opened() as outbox:
        fill(outbox, "a")
        outbox.wait_shipped(WAIT_S)
        brokers.settings = {"cleanup_policy": "compact"}
        until(lambda: "cleanup.policy" in (outbox.lag()["kafka:orders"].trouble or ""), "it is seen")
        fill(outbox, "b")
        with pytest.raises(DestinationRefused):
            outbox.wait_shipped(WAIT_S)
        brokers.settings = {}
        until(lambda: outbox.lag()["kafka:orders"].records == 0, "it goes on by itself")
        assert check(brokers, outbox) == 0


def test_a_topic_that_grew_is_used_as_before_until_it_is_repartitioned(brokers, opened, capsys):
    with opened(4) as outbox:
        fill(outbox, "a")
        outbox.wait_shipped(WAIT_S)
    brokers.topic += [SimulatedPartition(), SimulatedPartition()]
    (outbox.directory / "destinations.json").unlink()  # then the records in the topic tell it
    with opened(4) as outbox:
        fill(outbox, "b")
        outbox.wait_shipped(WAIT_S)
    assert [len(one.records()) for one in brokers.topic] == [20, 20, 0, 0]
    assert run(["outbox", "repartition", str(outbox.directory)]) == 0
    with opened(4) as outbox:
        fill(outbox, "c")
        outbox.wait_shipped(WAIT_S)
    assert [len(one.records()) for one in brokers.topic] == [25, 25, 5, 5]
    capsys.readouterr()


@pytest.mark.parametrize("seed", range(4))
def test_faults_at_random_lose_double_and_reorder_nothing(brokers, opened, seed):
    rng = random.Random(seed)
    faults = [LOST, UNSENT, *REFUSED_FOR_A_WHILE]
    for round_ in range(3):
        with opened(3, fence=rng.choice(["preferred", "off"])) as outbox:
            for step in range(4):
                for key in (PRODUCE, PRODUCE, FETCH, OFFSETS, METADATA, INIT, ADD, END):
                    if rng.random() < 0.3:
                        brokers.faults[key].append(rng.choice(faults if key == PRODUCE else [LOST, UNSENT, 7]))
                if rng.random() < 0.5:
                    brokers.topic[rng.randrange(2)].leader = rng.choice([1, 2])
                if rng.random() < 0.3:
                    brokers.disconnect()
                fill(outbox, f"{round_} {step}", count=rng.randrange(1, 9))
                if rng.random() < 0.7:
                    outbox.flush()
            if rng.random() < 0.7:
                outbox.wait_shipped(WAIT_S)
    brokers.faults.clear()
    with opened(3) as outbox:
        outbox.wait_shipped(WAIT_S)
        check(brokers, outbox)
