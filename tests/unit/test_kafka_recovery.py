"""Looking at a topic while nothing is sent to it."""

import asyncio
from types import SimpleNamespace

import pytest

from filtering import pack_keys
from filtering.retry import Backoff
from pushrep.env import SYSTEM_CLOCK
from pushrep.kafka import KafkaDestination, recovery
from pushrep.kafka.answers import AnswerReaction, Code
from pushrep.kafka.cluster import PartitionBounds, broker_refused
from pushrep.kafka.errors import KafkaUnreachable
from pushrep.kafka.progress import ShippedRecord
from pushrep.kafka.recovery import ShippingRecovery
from pushrep.kafka.resume import RecordOrigin
from pushrep.kafka.topic import TopicFacts
from pushrep.log import SegmentLog
from pushrep.records import encode_batch


class MovedCluster:
    """Partition 0 is led by another broker than the one that is asked, and ends at 100."""

    def __init__(self):
        self.knows_leader = False

    async def refresh(self):
        self.knows_leader = True

    destination = None
    leaders = {0: 1}  # noqa: RUF012 - nobody changes it

    async def ends(self, partitions, failed=None):
        if self.knows_leader:
            return {0: 100}
        refused = broker_refused("the end of t-0", Code.NOT_LEADER_OR_FOLLOWER)
        if failed is None:
            raise refused
        failed[0] = refused
        return {}

    async def bounds(self, partition):
        return PartitionBounds(0, (await self.ends([partition]))[partition])


class Shipped:
    went_back = set()  # noqa: RUF012 - one test uses it


FACTS = TopicFacts("t", None, 1, "delete", 1 << 20, -1, has_append_time=False, producer_id_expiration_ms=86_400_000)


def test_who_sends_nothing_learns_that_another_broker_leads(monkeypatch):
    """Otherwise the end of a topic that lost records would be requested from a broker that does not lead it, without
    end.
    """
    monkeypatch.setattr(recovery, "look_at_topic", lambda *_: FACTS)
    monkeypatch.setattr(recovery, "_LOOK_AT_END_S", 0)
    cluster, shipped = MovedCluster(), Shipped()
    looking = ShippingRecovery(None, FACTS, cluster, shipped, None, SYSTEM_CLOCK, lambda _: None)
    asyncio.run(looking.check_topic({0: 150}))
    assert cluster.knows_leader
    with pytest.raises(KafkaUnreachable, match="ends below"):
        asyncio.run(looking.check_topic({0: 150}))
    assert shipped.went_back == {0}


class Partition:
    """Offsets [start, end) of a topic; `at` gives `data`, the others nothing. It counts what it is asked."""

    def __init__(self, start, end, at, data):
        self.start, self.end, self.at, self.data, self.asked = start, end, at, data, 0

    async def bounds(self, _partition):
        self.asked += 2
        return PartitionBounds(self.start, self.end)

    async def fetch(self, partition, offset, _size_bytes):
        self.asked += 1
        if not self.start <= offset <= self.end:
            raise broker_refused(f"reading t-{partition}", Code.OFFSET_OUT_OF_RANGE)
        return self.data if offset == self.at else b""


@pytest.mark.parametrize(
    ("start", "end", "at", "asked", "is_there"),
    [
        (0, 2, 1, 1, True),  # it stands where it was acknowledged
        (5, 9, 5, 3, True),  # retention took it
        (0, 1, 0, 5, False),  # the topic ends below it
        (0, 0, 0, 5, False),
    ],
)
def test_a_look_at_the_newest_record_asks_once(tmp_path, monkeypatch, start, end, at, asked, is_there):
    monkeypatch.setattr(recovery, "_LOOKS_AT_END", 1)
    with SegmentLog.open(tmp_path / "t-0") as log:
        keys = pack_keys(7, 0, 0, 2)
        log.append(encode_batch([b"a", b"b"], keys=keys, timestamps_ms=1000))
        (batch,) = log.batches(0)
        partition, shipped = Partition(start, end, at, bytes(batch.data)), Shipped()
        origin = RecordOrigin(carrier="key", pids={0: 7}, pid_epoch=0)
        looking = ShippingRecovery(None, FACTS, partition, shipped, origin, SYSTEM_CLOCK, lambda _: None)
        source = SimpleNamespace(newest=ShippedRecord(offset=1, destination_offset=1), log=log)
        if is_there:
            asyncio.run(looking.check_newest(0, [source]))
        else:
            with pytest.raises(KafkaUnreachable, match="ends below"):
                asyncio.run(looking.check_newest(0, [source]))
        assert partition.asked == asked


class Waiting:
    """What has kept partitions waiting, each in turn."""

    def __init__(self):
        self.told = []

    def set_trouble(self, trouble, subject=None):
        self.told.append((subject, trouble))


@pytest.mark.parametrize(
    ("error", "text"),
    [(KafkaUnreachable("no leader"), "Kafka can't be reached: no leader"), (TimeoutError(), "TimeoutError()")],
)
def test_what_keeps_a_partition_waiting_is_told_until_it_is_over(error, text):
    """An error without words is told by its name. Nothing is said of a partition that never waited."""
    state, fails = Waiting(), [error, error]
    quick = KafkaDestination(bootstrap_servers="127.0.0.1:1", retry_backoff_ms=1, retry_backoff_max_ms=1)
    looking = ShippingRecovery(quick, FACTS, MovedCluster(), state, None, SYSTEM_CLOCK, lambda _: None)

    async def ask():
        if fails:
            raise fails.pop()
        return 7

    async def both():
        return [await looking.until_done(ask, 3), await looking.until_done(ask, 4)]

    assert asyncio.run(both()) == [7, 7]
    assert [one for one in state.told if one[0] is not None] == [(3, text), (3, text), (3, None)]


@pytest.mark.parametrize(
    ("reaction", "asked"),
    [
        (AnswerReaction.RETRY, ["reopened"]),
        (AnswerReaction.REFRESH, ["who leads", "reopened"]),
        (AnswerReaction.CHECK_TOPIC, ["which topic it is", "who leads", "reopened"]),
    ],
)
def test_what_is_asked_before_the_same_bytes_are_sent_again(monkeypatch, reaction, asked):
    """And only the second refusal in a row is trouble."""
    done, shipped = [], Waiting()

    class Leaders:
        destination = None

        async def refresh(self):
            done.append("who leads")

    monkeypatch.setattr(recovery, "backoff_of", lambda _: Backoff(0, 0))
    monkeypatch.setattr(recovery, "look_at_topic", lambda *_: done.append("which topic it is") or FACTS)
    looking = ShippingRecovery(None, FACTS, Leaders(), shipped, None, SYSTEM_CLOCK, lambda _: None)
    refused = SimpleNamespace(answer="refused: busy")
    pipeline = SimpleNamespace(partition=0, verdict=lambda: (refused, reaction), reopen=lambda: done.append("reopened"))
    for troubles in (0, 1):
        assert asyncio.run(looking.recover(pipeline)) is None
        assert done == asked * (1 + troubles)
        assert [one for one in shipped.told if one[0] == 0] == troubles * [(0, "t-0: refused: busy")]
    looking.succeeded(0)
    shipped.told.clear()
    asyncio.run(looking.recover(pipeline))
    assert [one for one in shipped.told if one[0] == 0] == [], "it was answered meanwhile"


def test_brokers_that_could_not_be_asked_who_leads_are_no_trouble_once_they_take_records(monkeypatch):
    """The bytes are sent again all the same, and once they are acknowledged nobody asks a second time."""
    shipped = Waiting()

    class Leaders:
        destination = None

        async def refresh(self):
            raise KafkaUnreachable("no broker answers")

    monkeypatch.setattr(recovery, "backoff_of", lambda _: Backoff(0, 0))
    looking = ShippingRecovery(None, FACTS, Leaders(), shipped, None, SYSTEM_CLOCK, lambda _: None)
    pipeline = SimpleNamespace(
        partition=0, verdict=lambda: (SimpleNamespace(answer="moved"), AnswerReaction.REFRESH), reopen=lambda: None
    )
    asyncio.run(looking.recover(pipeline))
    assert shipped.told == [(None, "Kafka can't be reached: no broker answers")]
    looking.succeeded(0)
    assert (None, None) in shipped.told
