"""Rule 9 in real queries: a stream that startpoints send back live, through both forms of the filter."""

import random
from pathlib import Path

import pytest

from filtering import ReplayFilter, StreamMetadata
from pushrep.log import SegmentLog
from pushrep.startpoints import Startpoint, StartpointStore, State
from spark_jobs import FileMarks, ReplayFilteredBatches, filter_replays, register_sources

pytestmark = pytest.mark.spark


class Topic:
    """Logs of two partitions with replays in them, their startpoints, and the rule by brute force."""

    def __init__(self, directory):
        self.directory, self.rng = directory, random.Random(5)
        self.keys, self.source, self.read = [[], []], [0, 0], [0, 0]
        self.filters = [ReplayFilter(), ReplayFilter()]
        self.store = StartpointStore.open(directory / "startpoints")
        self.grow(30)

    def grow(self, count, rewind=0):
        for partition, keys in enumerate(self.keys):
            self.source[partition] = max(0, self.source[partition] - rewind)
            for _ in range(count):
                if self.rng.random() < 0.1:
                    self.source[partition] = max(0, self.source[partition] - self.rng.randint(1, 9))
                keys.append(StreamMetadata(7, partition, self.source[partition]).pack())
                self.source[partition] += 1
            if count:
                with SegmentLog.open(self.directory / f"orders-{partition}") as log:
                    log.append([b"x"] * count, keys=keys[-count:])

    def send(self, partition, offset, *, reset_marks):
        """A startpoint, and what it means: go there, and forget or not."""
        startpoint = Startpoint.specific(offset, reset_marks=reset_marks)
        self.store.write("billing", "orders", partition, startpoint, "again")
        for n in range(2) if partition is None else [partition]:
            self.read[n] = offset
            if reset_marks:
                self.filters[n] = ReplayFilter()

    def waits(self):
        """Whether a startpoint is pending."""
        found = [self.store.read("billing", "orders", partition) for partition in range(2)]
        return any(one is not None and one.state is State.PENDING for one in found)

    def expected(self):
        """The expected output of everything that can be read now, as (partition, offset), sorted."""
        found = []
        for partition, keys in enumerate(self.keys):
            rest = range(self.read[partition], len(keys))
            found += [(partition, n) for n in rest if self.filters[partition].admit(keys[n], partition)]
            self.read[partition] = len(keys)
        return found


class Query:
    """A running query through one form of the filter; `got` is what came out since the last look."""

    def __init__(self, spark, topic, place, form):
        self.spark, self.topic, self.place, self.form = spark, topic, place, form
        self.batches, self.fail_at = {}, None
        self.seen = {}
        register_sources(spark)
        self.start()

    def start(self):
        options = {"path": str(self.topic.directory), "topic": "orders", "startingStartpoint": "billing"}
        rows = self.spark.readStream.format("pushrep").options(**options).load()
        if self.form == "operator":
            rows, handler = filter_replays(rows), self
        else:
            self.marks = FileMarks(self.place / "marks")
            handler = ReplayFilteredBatches(self, self.marks)
        writer = rows.writeStream.foreachBatch(handler)
        self.running = writer.option("checkpointLocation", str(self.place / "checkpoint")).start()

    def __call__(self, rows, batch_id):
        self.batches[batch_id] = sorted(
            (row.partition, row.offset) for row in rows.select("partition", "offset").collect()
        )
        if self.fail_at == batch_id:
            raise RuntimeError("the handler wrote, and died before anything was stored")

    def drop_from(self, batch_id):
        self.batches = {n: rows for n, rows in self.batches.items() if n < batch_id}

    def stop(self):
        self.running.stop()

    def catch_up(self):
        """All that there is to read is read, from where the startpoints say that are written."""
        while self.topic.waits():
            self.running.processAllAvailable()  # a store that a slow disk keeps busy holds no stream: it asks again
        self.running.processAllAvailable()

    def got(self):
        self.catch_up()
        new = {n: rows for n, rows in self.batches.items() if n not in self.seen}
        self.seen = dict(self.batches)
        return sorted(row for rows in new.values() for row in rows)


@pytest.fixture
def topic(tmp_path):
    return Topic(tmp_path / "logs")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", ["foreachBatch", "operator"])
def test_rule_9_a_stream_sent_back_live_with_and_without_reset_marks(spark, topic, tmp_path, form, torture):
    if form == "foreachBatch" and not torture.is_long:
        pytest.skip("its short form is the next test")
    query = Query(spark, topic, tmp_path, form)
    try:
        assert query.got() == topic.expected()
        topic.send(0, 10, reset_marks=False)
        topic.grow(3)
        inherited = topic.expected()
        assert query.got() == inherited
        assert min(inherited) >= (0, 30), "what was seen is dropped: the marks were inherited"
        topic.send(0, 12, reset_marks=True)
        again = topic.expected()
        assert query.got() == again
        assert again[0] == (0, 12), "the marks began anew"
        chance = torture.random(form)
        for _ in range(torture.count(0, 60)):
            topic.send(
                chance.choice([0, 1, None]), chance.randrange(len(topic.keys[0])), reset_marks=chance.random() < 0.5
            )
            topic.grow(chance.randint(0, 5))
            assert query.got() == topic.expected(), f"seed {torture.seed}"
    finally:
        query.stop()


def test_rule_9_a_batch_run_again_and_one_rolled_back(spark, topic, tmp_path):
    """The handler fails in the batch in which an epoch begins; later a batch at the same place is planned again."""
    query = Query(spark, topic, tmp_path, "foreachBatch")
    try:
        query.fail_at = 0
        topic.send(1, 15, reset_marks=True)
        expected = topic.expected()
        with pytest.raises(Exception, match="died before"):
            query.got()
        assert query.batches == {0: expected}
        query.stop()
        query.fail_at = None
        topic.grow(6, rewind=9)
        topic.send(None, 30, reset_marks=False)  # waits while batch 0 is run again
        after = topic.expected()
        query.start()
        query.catch_up()
        assert query.batches == {0: expected, 1: after}, "the same batch, then the newer one, which inherits"
        query.stop()
        forget(tmp_path / "checkpoint", 1)
        topic.send(None, 30, reset_marks=True)
        anew = topic.expected()
        assert len(anew) > len(after), "same offsets, other rows: only the epoch tells that it is not the stored batch"
        query.start()
        query.catch_up()
        assert query.batches == {0: expected, 1: anew}
    finally:
        query.stop()


def forget(checkpoint: Path, first: int):
    """Roll a checkpoint back: batch `first` and what follows were never planned."""
    for kind in ("offsets", "commits"):
        for file in (checkpoint / kind).iterdir():
            if int(file.name.strip(".").split(".")[0]) >= first:
                file.unlink()
