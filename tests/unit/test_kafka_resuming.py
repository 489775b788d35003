"""What a session does about a refused batch, and what it finds out of a topic that is not as it was.

A real log and its pipeline; the brokers' answers are given.
"""

import asyncio
from itertools import pairwise
from types import SimpleNamespace

import pytest

from filtering import pack_keys
from filtering.retry import Backoff
from pushrep.kafka import KafkaDestination, recovery
from pushrep.kafka.answers import BrokerAnswer, Code
from pushrep.kafka.cluster import PartitionBounds, broker_refused
from pushrep.kafka.errors import (
    BeginsAnew,
    DestinationRefused,
    KafkaUnreachable,
    RefusedByTopic,
    ShippingError,
    TopicLostRecords,
    TopicMissing,
    TopicReplaced,
)
from pushrep.kafka.pipeline import Pipeline
from pushrep.kafka.progress import EpochPartitions, OffsetRanges, PartitionProgress, ShippedRecord, ShippingProgress
from pushrep.kafka.recovery import ShippingRecovery, read_partition, used_partitions
from pushrep.kafka.resume import RecordOrigin
from pushrep.kafka.sink_state import SinkState
from pushrep.kafka.topic import TopicFacts
from pushrep.log import LogConfig, SegmentLog
from pushrep.records import encode_batch, header
from tests.support.simulated_disk import SimulatedClock

PID, LIMIT = 7, 1 << 20
ORIGIN = RecordOrigin(carrier="key", pids={0: PID}, pid_epoch=0)
SET_BY = {
    name: f"{value} (set for the topic)"
    for name, value in (
        ("max.message.bytes", LIMIT),
        ("segment.bytes", 9),
        ("message.timestamp.before.max.ms", 1),
        ("message.timestamp.after.max.ms", 2),
    )
}
FACTS = TopicFacts(
    "orders", "an id", 1, "delete", LIMIT, -1, has_append_time=False, producer_id_expiration_ms=86_400_000,
    cluster_id="a cluster", set_by=SET_BY,
)  # fmt: skip
NEVER = 1 << 61


class Topic:
    """One Kafka partition, which is changed between the questions. asked: how many there were."""

    destination = KafkaDestination(bootstrap_servers="b:1")
    leaders = {0: 1}  # noqa: RUF012 - nobody changes it

    def __init__(self):
        self.batches, self.start, self.end, self.refreshed = [], 0, 0, 0
        self.before_fetch = lambda: None

    def put(self, batch):
        data = bytearray(batch.data)
        header.stamp(data, self.end, 0)
        self.batches.append((self.end, bytes(data)))
        self.end += len(batch)
        return self

    async def refresh(self):
        self.refreshed += 1

    async def bounds(self, _partition):
        return PartitionBounds(self.start, self.end)

    async def ends(self, partitions, failed=None):
        del failed
        return dict.fromkeys(partitions, self.end)

    async def fetch(self, partition, offset, _size_bytes=0):
        self.before_fetch()
        if not self.start <= offset <= self.end:
            raise broker_refused(f"reading orders-{partition}", Code.OFFSET_OUT_OF_RANGE)
        bases = [at for at, _ in self.batches]
        ends = [*bases[1:], self.end]
        return b"".join(data for (_, data), end in zip(self.batches, ends, strict=True) if end > offset)


@pytest.fixture
def log(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(preallocate_bytes=0)) as opened:
        yield opened


@pytest.fixture
def clock():
    return SimulatedClock()


@pytest.fixture
def looked(monkeypatch):
    """What the topic is found to be, and that nobody waits; looked[0] may be changed."""
    found = [FACTS]

    def look(*_):
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    monkeypatch.setattr(recovery, "look_at_topic", look)
    monkeypatch.setattr(recovery, "backoff_of", lambda _: Backoff(0, 0))
    monkeypatch.setattr(recovery, "_LOOK_AT_END_S", 0)
    return found


def append(log, *values, time_ms=1_000):
    keys = pack_keys(PID, 0, log.log_end_offset, len(values))
    batch = encode_batch(list(values), keys=keys, timestamps_ms=time_ms, base_offset=log.log_end_offset)
    log.append(batch)
    return batch


def shipping(log, clock, topic=None, *, at=None, fail=None, on_refused="stop"):
    """The state of one log's shipping, and what recovers it."""
    progress = ShippingProgress(epochs=(EpochPartitions(0, 1),), partitions={0: at} if at else {})
    state = SinkState([log], progress, 0, clock, "orders", "b:1")
    state.begin()
    destination = KafkaDestination(bootstrap_servers="b:1", on_refused=on_refused)
    return state, ShippingRecovery(destination, FACTS, topic or Topic(), state, ORIGIN, clock, fail or (lambda _: None))


def sent_from(source, pipeline, limit=LIMIT):
    """Every batch that the log gives, on its way."""
    source.poll()
    found = []
    while (sent := source.next_piece(limit)) is not None:
        pipeline.add(sent)
        pipeline.on_sent(sent)
        source.in_flight += 1
        found.append(sent)
    return found


def refused(log, clock, answer, *, skip=None):
    """What comes of the first batch that is refused so, while the second is refused, too."""
    state, recovering = shipping(log, clock)
    source, pipeline = state.sources[0], Pipeline(0)
    pipeline.begin(5, 0)
    batches = sent_from(source, pipeline)
    for one in batches:
        list(pipeline.on_answer(one, answer))
    if skip is not None:
        source.skipped = OffsetRanges([skip])
    stopped = asyncio.run(recovering.recover(pipeline))
    assert source.in_flight == 0, "what was on its way is taken back"
    assert pipeline.is_empty
    return source, recovering, stopped, len(batches[0].data)


@pytest.mark.parametrize("code", [Code.MESSAGE_TOO_LARGE, Code.RECORD_LIST_TOO_LARGE])
def test_a_batch_that_is_too_large_goes_in_pieces_of_half_its_size(log, clock, looked, code):
    """faults B4"""
    append(log, *(bytes(1_000) for _ in range(4)))
    append(log, b"next")
    source, recovering, stopped, size = refused(log, clock, BrokerAnswer(code, -1))
    assert stopped is None
    assert recovering.size_max_bytes == size // 2
    pieces = sent_from(source, Pipeline(0), recovering.size_max_bytes)
    assert [pieces[0].start, *(one.end for one in pieces)][-1] == 5
    assert all(one.end == two.start for one, two in pairwise(pieces))
    assert len(pieces) > 2
    assert max(len(one.data) for one in pieces) <= size // 2


def test_a_batch_above_a_limit_that_was_lowered_is_cut_by_the_new_limit(log, clock, looked):
    append(log, bytes(1_000), bytes(1_000))
    looked[0] = FACTS._replace(max_message_bytes=1_500)
    _, recovering, stopped, size = refused(log, clock, BrokerAnswer(Code.MESSAGE_TOO_LARGE, -1))
    assert size > 1_500
    assert (stopped, recovering.size_max_bytes) == (None, 1_500)


@pytest.mark.parametrize(
    ("code", "time_ms", "told"),
    [
        (Code.MESSAGE_TOO_LARGE, 1_000, rf"in a batch of \d+ bytes.*max\.message\.bytes={LIMIT} \(set for"),
        (Code.RECORD_LIST_TOO_LARGE, 1_000, r"in a batch of \d+ bytes.*segment\.bytes=9 \(set for"),
        (Code.INVALID_TIMESTAMP, -1, r"INVALID_TIMESTAMP \(the words\), its time is .*\.before\.max\.ms=1 "),
        (Code.INVALID_TIMESTAMP, 0, r"INVALID_TIMESTAMP \(the words\), its time is .*\.after\.max\.ms=2 "),
        (Code.INVALID_TIMESTAMP, 1, r"INVALID_TIMESTAMP \(the words\), its time is .*\.after\.max\.ms=2 "),
        (Code.INVALID_RECORD, 1_000, r"INVALID_RECORD \(the words\) in a batch of"),
    ],
)
def test_a_record_that_is_refused_alone_stops_its_log_with_the_setting_that_says_so(
    log, clock, looked, code, time_ms, told
):
    """time_ms: after the present one, or before it."""
    append(log, b"one", time_ms=time_ms if time_ms == 1_000 else clock.wall_ms() + time_ms)
    append(log, b"two")
    source, recovering, (stopped, why), _ = refused(log, clock, BrokerAnswer(code, -1, "the words"))
    assert stopped is source
    assert isinstance(why, RefusedByTopic)
    assert (why.partition, why.offset, recovering.size_max_bytes) == (0, 0, LIMIT)
    with pytest.raises(RefusedByTopic, match=told):
        raise why
    assert source.next_offset == 0
    assert 0 in source.alone, "tried again, it goes alone again"
    words = BrokerAnswer(code, -1, "the words", ((0, "of the record"),))
    assert "(of the record)" in str(refused(log, clock, words)[2][1])


def test_a_refused_record_that_was_given_up_meanwhile_stops_nothing(log, clock, looked):
    append(log, b"one")
    append(log, b"two")
    answer = BrokerAnswer(Code.INVALID_RECORD, -1, "no")
    assert refused(log, clock, answer, skip=(0, 1))[2] is None


@pytest.mark.parametrize("code", [Code.INVALID_TIMESTAMP, Code.INVALID_RECORD])
def test_the_record_that_a_broker_names_goes_alone_and_without_a_name_each_does(log, clock, looked, code):
    append(log, b"a", b"b", b"c")
    source, *_ = refused(log, clock, BrokerAnswer(code, -1, "", ((1, "bad"), (9, "not there"))))
    assert list(source.alone) == [(1, 2)]
    source, *_ = refused(log, clock, BrokerAnswer(code, -1, ""))
    assert [offset in source.alone for offset in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (Code.TOPIC_AUTHORIZATION_FAILED, "WRITE on topic 'orders'"),
        (Code.POLICY_VIOLATION, r"topic orders: POLICY_VIOLATION \(no\)"),
    ],
)
def test_what_no_repetition_solves_stops_the_log_with_its_reason(log, clock, looked, code, told):
    append(log, b"a", b"b")
    append(log, b"c")
    source, _, (stopped, why), _ = refused(log, clock, BrokerAnswer(code, -1, "no"))
    assert stopped is source
    with pytest.raises((ShippingError, KafkaUnreachable), match=told):
        raise why


# -- what the topic holds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 2])
def test_a_log_stops_before_the_record_that_the_topic_lacks_and_is_known_again_by_the_batch_before_it(
    log, clock, looked, first
):
    """Its checkpoint has the CRC of the last batch that the topic holds: else the next opening ships it anew."""
    batches = [append(log, b"a", b"b"), append(log, b"c", b"d"), append(log, b"e", b"f")]
    topic = Topic()
    for n, batch in enumerate(batches):
        if 2 * n != first:
            topic.put(batch)
    at = PartitionProgress(2, 2, batches[0].header.crc, ShippedRecord(1, 1)) if first else None
    state, recovering = shipping(log, clock, topic, at=at)
    source = state.sources[0]
    asyncio.run(recovering.resume(0, [source]))
    before = batches[first // 2 - 1].header.crc if first else 0
    assert (source.acknowledged, source.next_offset, source.log_crc) == (first, first, before)
    assert (source.destination_offset, source.newest) == (-1, None), "the topic is read again from its start"
    assert source.is_matching
    assert source.match_at_ms > NEVER
    assert f"lacks offset {first}-{first + 1} of partition 0 and holds later ones" in source.stopped
    source.skip(OffsetRanges([(first, first + 2)]))
    assert source.match_at_ms == 0, "it is matched at once"
    asyncio.run(recovering.resume(0, [source]))
    assert (source.acknowledged, source.stopped, source.is_matching, source.stopped_until_ms) == (6, None, False, 0)
    assert (source.newest, source.destination_offset) == (ShippedRecord(5, 3), 4)
    assert source.log_crc == batches[-1].header.crc


def test_one_record_that_is_lacking_is_told_as_one(log, clock, looked):
    a, _, c = (append(log, value) for value in (b"a", b"b", b"c"))
    state, recovering = shipping(log, clock, Topic().put(a).put(c))
    asyncio.run(recovering.resume(0, list(state.sources.values())))
    assert "lacks offset 1 of partition 0" in state.sources[0].stopped


def test_a_topic_that_ends_below_what_it_acknowledged_has_lost_it_unless_it_was_made_again(log, clock, looked):
    a, b = append(log, b"a"), append(log, b"b")
    at = PartitionProgress(2, 2, b.header.crc, ShippedRecord(1, 1))
    topic = Topic().put(a)
    for found, error in ((FACTS._replace(topic_id="another"), TopicReplaced), (FACTS, TopicLostRecords)):
        looked[0] = found
        state, recovering = shipping(log, clock, topic, at=at)
        with pytest.raises(error) as told:
            asyncio.run(recovering.resume(0, list(state.sources.values())))
    assert told.value.lost == {0: (1, 2)}
    at = PartitionProgress(2, 5, b.header.crc, ShippedRecord(1, 4))  # behind records of others
    state, recovering = shipping(log, clock, topic.put(b), at=at)
    state.went_back.add(0)
    asyncio.run(recovering.resume(0, list(state.sources.values())))
    assert state.sources[0].destination_offset == 2
    assert state.went_back == set(), "it had lost records of others"
    assert (state.sources[0].acknowledged, state.sources[0].newest) == (2, ShippedRecord(1, 1))


def test_a_log_that_is_another_one_begins_anew(log, clock, looked):
    batch = append(log, b"a", b"b")
    state, recovering = shipping(log, clock, Topic().put(batch), at=PartitionProgress(2, 2, batch.header.crc))
    source = state.sources[0]
    source.is_doubtful, source.log_crc = True, 4711
    with pytest.raises(BeginsAnew, match="partition 0"):
        asyncio.run(recovering.resume(0, [source]))
    asyncio.run(recovering.resume(0, [source]))
    assert (source.acknowledged, source.is_matching) == (2, False)


def test_a_head_that_retention_took_unread_is_told(log, clock, looked):
    """identity T1"""
    batch = append(log, b"a", b"b")
    topic = Topic().put(batch).put(encode_batch([b"x"], timestamps_ms=1))
    known = PartitionProgress(2, 2, batch.header.crc)
    for start, at, tells in ((2, known, 0), (3, known, 1), (3, PartitionProgress(2, -1, batch.header.crc), 0)):
        topic.start, told = start, []
        state, recovering = shipping(log, clock, topic, at=at)
        state.on_head_cut = told.append
        asyncio.run(recovering.resume(0, list(state.sources.values())))
        assert len(told) == tells
        assert state.sources[0].destination_offset == 3


def test_what_others_wrote_and_is_not_there_yet_is_read_later(log, clock, looked):
    """A new leader learns the end late."""
    topic = Topic().put(encode_batch([b"x", b"y"], timestamps_ms=1))
    state, recovering = shipping(log, clock, topic)
    state.unread[0] = (1, 4)
    asyncio.run(recovering.read_others(0))
    assert state.unread == {0: (2, 4)}
    topic.put(encode_batch([b"z", b"z"], timestamps_ms=1))
    asyncio.run(recovering.read_others(0))
    assert state.unread == {}


def test_reading_goes_on_where_retention_removed_what_was_to_be_read():
    topic, found = Topic(), []
    for _ in range(3):
        topic.put(encode_batch([b"x", b"y"], timestamps_ms=1))

    async def until_done(what):
        while True:
            try:
                return await what()
            except KafkaUnreachable:
                assert topic.start == 2, "it is gone"

    def remove():
        topic.start = 2

    topic.before_fetch = remove
    end = asyncio.run(read_partition(topic, until_done, 0, 0, lambda batch, at: found.append((batch, at))))
    assert (end, [at for _, at in found]) == (6, [2, 4])
    found.clear()
    assert asyncio.run(read_partition(topic, until_done, 0, 3, lambda _, at: found.append(at))) == 6
    assert found == [3, 4]

    async def fetch_more(*_):
        return b"".join(data for _, data in topic.batches)

    asked, topic.fetch = topic.fetch, fetch_more
    found.clear()
    assert asyncio.run(read_partition(topic, until_done, 0, 4, lambda _, at: found.append(at))) == 6
    assert found == [4], "what a broker gives from before is passed"
    topic.fetch = asked
    assert asyncio.run(read_partition(topic, until_done, 0, 9, lambda _, at: found.append(at))) == 9
    topic.batches.clear()

    async def give_nothing(*_):
        return b""

    topic.fetch = give_nothing
    with pytest.raises(KafkaUnreachable, match="partition 0 gives nothing at 4"):
        asyncio.run(read_partition(topic, until_done, 0, 4, lambda *_: None))


# -- the topic's settings and ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (FACTS._replace(cluster_id="another", topic_id="another"), None),
        (KafkaUnreachable("no broker answers"), None),
        (FACTS._replace(topic_id="another"), TopicReplaced),
        (TopicMissing("orders"), TopicMissing),
        (FACTS._replace(cleanup_policy="compact"), DestinationRefused),
    ],
)
def test_a_look_at_the_topic_ends_a_session_for_what_is_sure_and_a_quiet_one_for_what_loses_records(
    log, clock, looked, found, error
):
    """Another cluster's broker took over an address: what it says is nothing."""
    looked[0], failures = found, []
    state, recovering = shipping(log, clock, Topic(), fail=failures.append)
    if error is None:
        asyncio.run(recovering.check_topic({}))
    else:
        with pytest.raises(error):
            asyncio.run(recovering.check_topic({}))

    async def look_again():
        recovering.look_again()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(look_again())
    assert [type(one) for one in failures] == ([error] if error is DestinationRefused else [])
    assert recovering.size_max_bytes == LIMIT
    looked[0] = FACTS._replace(max_message_bytes=5_000)
    asyncio.run(look_again())
    assert recovering.size_max_bytes == 5_000
    assert not state.went_back


def test_the_end_of_a_partition_is_doubted_until_it_was_asked_for_several_times(log, clock, looked):
    topic = Topic().put(encode_batch([b"x", b"y"], timestamps_ms=1))
    state, recovering = shipping(log, clock, topic)
    asyncio.run(recovering.check_topic({0: 2}))
    real, asked = topic.bounds, []

    async def late(partition):
        asked.append(partition)
        if len(asked) < 4:
            return PartitionBounds(0, 1)
        return await real(partition)

    topic.bounds = late
    asyncio.run(recovering.find_shortened({0: 2, 1: 7}, {0: 1}))
    assert (state.went_back, len(asked)) == (set(), 4), "a new leader learns it late; of the other nothing is known"

    async def unreachable(_partition):
        raise KafkaUnreachable("no leader")

    topic.bounds = unreachable
    asyncio.run(recovering.find_shortened({0: 2}, {0: 1}))
    assert state.went_back == set(), "nobody has told its end"
    topic.bounds = real
    asyncio.run(recovering.find_shortened({0: 3}, {0: 2}))
    assert state.went_back == {0}
    with pytest.raises(KafkaUnreachable, match="orders-0 ends below"):
        asyncio.run(recovering.check_topic({0: 3}))


@pytest.mark.parametrize(
    ("places", "partitions", "used"),
    [
        ([], 4, None),
        ([(0, 0), (5, 1)], 4, 4),
        ([(0, 0), (3, 1), (2, 0)], 4, 2),
        ([(0, 0), (4, 4)], 4, None),
        ([(3, 0)], 3, 3),
        ([(3, 0)], 2, 1),
    ],
)
def test_how_many_partitions_were_used_is_what_agrees_with_each_record(places, partitions, used):
    if places and used is None:
        with pytest.raises(DestinationRefused, match=r"destinations\.json") as told:
            used_partitions("orders", partitions, places)
        assert told.value.setting == "partitions"
    else:
        assert used_partitions("orders", partitions, places) == used


def test_a_log_with_nothing_acknowledged_has_nothing_that_could_be_lacking(log, clock, looked):
    _, recovering = shipping(log, clock, Topic())
    asyncio.run(recovering.check_newest(0, []))
    asyncio.run(recovering.check_newest(0, [SimpleNamespace(newest=None, log=log)]))
    asyncio.run(recovering.resume(0, []))


def test_a_log_that_could_not_be_read_goes_on_once_it_was_matched(log, clock, looked):
    batch = append(log, b"a")
    state, recovering = shipping(log, clock, Topic().put(batch), at=PartitionProgress(1, 1, batch.header.crc))
    source = state.sources[0]
    source.stop(OSError("no disk"), 0, NEVER)
    state.set_trouble("too many open files", ("log", 0))
    clock.advance(60_000)
    assert state.trouble == "too many open files"
    asyncio.run(recovering.resume(0, [source]))
    assert (source.stopped, source.stopped_until_ms, source.is_matching, state.trouble) == (None, 0, False, None)
