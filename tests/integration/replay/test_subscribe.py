"""ReplayClient.subscribe: a consumer with startpoints and checkpoints, over a directory and a node, by one code."""

from uuid import UUID

import pytest

from pushrep.errors import BadArgument
from pushrep.log import SegmentLog
from pushrep.replay import ReplayClient, ReplayFailed, ReplayRefused, ReplayTruncated
from pushrep.startpoints import (
    Consumed,
    PartitionLost,
    Startpoint,
    StartpointFailed,
    StartpointRefused,
    StartpointStore,
)
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from tests.integration.replay.conftest import until

COUNT = 100


class Directory:
    """Two logs in a directory; `append` is their writer's."""

    def __init__(self, place):
        self.place = place
        for partition in range(2):
            self.append(COUNT, partition)

    def client(self):
        return ReplayClient(self.place)

    def append(self, count, partition=0):
        with SegmentLog.open(self.place / f"orders-{partition}") as log:
            first = log.log_end_offset
            for base in range(first, first + count, 7):
                many = range(base, min(base + 7, first + count))
                log.append([b"x"] * len(many), timestamps_ms=[1000 * n for n in many])


class Node:
    """The same at a node."""

    def __init__(self, world):
        self.world, self.node = world, world.node()
        self.leaders = [self._leader(partition) for partition in range(2)]
        for partition in range(2):
            self.append(COUNT, partition)

    def _leader(self, partition):
        tp = TopicIdPartition(UUID(int=7), "orders", partition)
        return self.world.leader(self.node, tp, outbox=UUID(int=9))

    def client(self):
        return self.world.client(self.node)

    def append(self, count, partition=0):
        leader = self.leaders[partition]
        end = leader.end + count
        for base in range(leader.end, end, 7):
            many = range(base, min(base + 7, end))
            leader.append(*[b"x"] * len(many), timestamps_ms=[1000 * n for n in many])


@pytest.fixture(params=["directory", "node"])
def place(request, tmp_path):
    if request.param == "directory":
        return Directory(tmp_path / "out")
    return Node(request.getfixturevalue("world"))


@pytest.fixture
def store(tmp_path):
    return StartpointStore.open(tmp_path / "store")


def subscribe(place, store, **more):
    return place.client().subscribe("orders", consumer="billing", startpoints=store, **more)


def take(consumer, count):
    """{partition: [(epoch, offset)]} of `count` records; over a network they may be on their way."""
    got = {}

    def enough():
        for partition, epoch, records in consumer.poll(count - sum(map(len, got.values()))):
            got.setdefault(partition, []).extend((epoch, record.offset) for record in records)
        return sum(map(len, got.values())) >= count

    until(enough)
    return got


def run(start, end, epoch=0):
    return [(epoch, offset) for offset in range(start, end)]


def test_without_a_store_it_is_the_one_beside_the_logs(place):
    """`pushrep startpoint` uses the same store; a node has none for its readers, and its error says so."""
    if isinstance(place, Node):
        with pytest.raises(BadArgument, match="store_at") as refused:
            place.client().subscribe("orders", consumer="billing")
        assert refused.value.argument == "startpoints"
        return
    with StartpointStore.open(place.place / "startpoints") as store:
        store.write("billing", "orders", 0, Startpoint.specific(COUNT - 3), "the last three")
    with place.client().subscribe("orders", consumer="billing", partitions=[0]) as consumer:
        assert take(consumer, 3) == {0: run(COUNT - 3, COUNT, epoch=1)}
        consumer.commit()
    with place.client().subscribe("orders", consumer="billing", partitions=[0]) as consumer:
        assert consumer.poll() == []


def test_rule_1_startpoint_before_checkpoint_before_default(place, store):
    with subscribe(place, store) as consumer:
        assert take(consumer, 2 * COUNT) == {0: run(0, COUNT), 1: run(0, COUNT)}
        consumer.commit()
    place.append(5)
    number = store.write("billing", "orders", 1, Startpoint.timestamp(89_500), "again")
    with subscribe(place, store, reset=False) as consumer:
        assert take(consumer, 15) == {0: run(COUNT, COUNT + 5), 1: run(90, COUNT, number)}
        consumer.commit()
    assert [fact.sequence for fact in store.history() if isinstance(fact, Consumed)] == [number]
    with subscribe(place, store, reset=True, partitions=[0]) as consumer:
        assert take(consumer, 10) == {0: run(0, 10)}, "reset passes the checkpoint by"


def test_a_startpoint_is_taken_up_while_it_runs_and_once(place, store):
    with subscribe(place, store, partitions=[0]) as consumer:
        assert take(consumer, 30) == {0: run(0, 30)}
        consumer.commit()
        number = store.write("billing", "orders", 0, Startpoint.relative(records=-10), "from here")
        assert take(consumer, 20) == {0: run(20, 40, number)}, "what had been fetched ahead is dropped"
    with subscribe(place, store, partitions=[0]) as consumer:
        assert take(consumer, 5) == {0: run(20, 25, number)}, "not committed: the stored offset again"
        consumer.commit()
        assert take(consumer, COUNT - 25) == {0: run(25, COUNT, number)}
        place.append(3)
        assert take(consumer, 3) == {0: run(COUNT, COUNT + 3, number)}, "and it follows"


def test_bootstrap_holds_the_other_partition(place, store):
    with subscribe(place, store) as consumer:
        take(consumer, 2 * COUNT)
        consumer.commit()
        number = store.write("billing", "orders", 1, Startpoint.bootstrap(), "read it first")
        place.append(2)
        assert take(consumer, COUNT) == {1: run(0, COUNT, number)}
        assert take(consumer, 2) == {0: run(COUNT, COUNT + 2)}


def test_rule_4_out_of_range_and_a_time_without_a_record_stop_the_partition(place, store):
    with subscribe(place, store, partitions=[0]) as consumer:
        for startpoint in (Startpoint.specific(COUNT + 1), Startpoint.timestamp(10**9)):
            store.write("billing", "orders", 0, startpoint, "a typo")
            with pytest.raises(StartpointFailed):
                consumer.poll()
        number = store.write("billing", "orders", 0, Startpoint.timestamp(10**9, out_of_range="earliest"), "go on")
        assert take(consumer, 3) == {0: run(0, 3, number)}


def test_who_subscribes_fences_and_close_ends_it(place, store):
    first = subscribe(place, store, partitions=[0])
    take(first, 10)
    with subscribe(place, store, partitions=[0]) as second:
        take(second, 1)
        with pytest.raises(PartitionLost):
            first.commit()
    first.close()
    first.close()
    with pytest.raises(StartpointRefused):
        first.poll()


def test_a_partition_that_is_not_there_is_refused(place, store):
    with pytest.raises(ReplayRefused, match="no recording orders-7"):
        subscribe(place, store, partitions=[7])
    with pytest.raises(ReplayRefused, match="no recording other-0"):
        place.client().subscribe("other", consumer="billing", startpoints=store)


def test_a_session_that_somebody_stopped_is_no_silent_stall(place, store):
    """stop_all ends the sessions, not the consumers, which continue from their positions."""
    with place.client() as client, client.subscribe("orders", consumer="billing", startpoints=store) as consumer:
        take(consumer, 2 * COUNT)
        for partition in range(2):
            assert client.stop_all(f"orders-{partition}") == 1
        place.append(5)
        assert take(consumer, 5) == {0: run(COUNT, COUNT + 5)}


def test_a_consumer_above_a_cut_is_told_until_it_is_sent_elsewhere(world, store):
    """No silent stall, and no other history read on as if it were the same."""
    place = Node(world)
    leader = place.leaders[0]
    with subscribe(place, store, partitions=[0]) as consumer:
        take(consumer, COUNT)
        leader.stop()
        assert place.client().truncate("orders-0", 49) == 49
        with pytest.raises(ReplayTruncated):
            until(consumer.poll)
        leader.end = leader.start_offset = leader.watermark = 49
        leader.epoch += 256
        leader.come(place.node.address)
        leader.append(*[b"y"] * COUNT)
        for _ in range(3):
            with pytest.raises(ReplayTruncated):
                consumer.poll()
        number = store.write("billing", "orders", 0, Startpoint.specific(49), "what was written anew")
        assert take(consumer, 5) == {0: run(49, 54, number)}


def test_a_partition_whose_cut_can_not_be_told_keeps_no_other_unread(tmp_path):
    """Its list of leader epochs, which says where it was cut, can't be read."""
    place, got = Directory(tmp_path), []
    with place.client() as client, client.subscribe("orders", consumer="billing") as consumer:
        take(consumer, 2 * COUNT)
        with SegmentLog.open(tmp_path / "orders-1") as log:
            log.truncate_to(49, force=True)
        place.append(50)
        (epochs := tmp_path / "orders-1" / "leader-epoch-checkpoint").unlink()
        epochs.mkdir()
        told = []
        for _ in range(5):
            try:
                got += [record.offset for one in consumer.poll() for record in one.records]
            except (ReplayFailed, ReplayRefused) as error:  # the next one begins above the log's end
                told.append(error.code)
        epochs.rmdir()
    assert (got, told[0]) == ([*range(COUNT, COUNT + 50)], ErrorCode.KAFKA_STORAGE_ERROR)
