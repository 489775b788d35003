"""Startpoints of a running stream, under a small engine that keeps offsets and commits as Spark does, without a JVM."""

import json
import pickle
from pathlib import Path

import pytest

from pushrep import Outbox
from pushrep.log import SegmentLog
from pushrep.log.directory_files import parse_shown_partition
from pushrep.startpoints import (
    Consumed,
    PartitionLost,
    Startpoint,
    StartpointFailed,
    StartpointStore,
    State,
    StoreUnavailable,
)
from spark_jobs.sources import startpoints
from spark_jobs.sources.datasource import PushrepDataSource
from spark_jobs.sources.options import BadOption
from spark_jobs.sources.planning import StreamOffsetUnusable
from tests.support.simulated_disk import SimulatedClock

COUNT = 40


class Engine:
    """The offset log before a batch, the commit log after it; a restart makes another reader."""

    def __init__(self, directory: Path, **options: str) -> None:
        self.options = {"path": str(directory), "topic": "orders", "startingStartpoint": "billing"} | options
        self.offsets: list[str] = []
        self.committed = 0
        self.restart()

    def restart(self) -> None:
        source = PushrepDataSource(self.options)
        self.reader = pickle.loads(pickle.dumps(source.streamReader(source.schema())))  # as it travels to executors

    def start(self):
        return json.loads(self.offsets[self.committed - 1]) if self.committed else self.reader.initialOffset()

    def plan(self) -> bool:
        if len(self.offsets) == self.committed:
            end = json.dumps(self.reader.latestOffset(self.start(), self.reader.getDefaultReadLimit()))
            if self.committed and end == self.offsets[-1]:
                return False
            self.offsets.append(end)
        return True

    def rows(self):
        """(partition, offset, startpoint_epoch) of the planned batch."""
        tasks = self.reader.partitions(self.start(), json.loads(self.offsets[self.committed]))
        rows = [row for task in tasks for batch in self.reader.read(task) for row in batch.to_pylist()]
        return [(row["partition"], row["offset"], row["startpoint_epoch"]) for row in rows]

    def batch(self):
        rows = self.rows() if self.plan() else None
        if rows is not None:
            self.committed += 1
        return rows

    def drain(self):
        return [row for rows in iter(self.batch, None) for row in rows]


@pytest.fixture
def directory(tmp_path):
    for partition in range(2):
        with SegmentLog.open(tmp_path / "logs" / f"orders-{partition}") as log:
            for first in range(0, COUNT, 10):
                log.append([b"x"] * 10, timestamps_ms=list(range(first, first + 10)))
    return tmp_path / "logs"


@pytest.fixture
def store(directory):
    return StartpointStore.open(directory / "startpoints")


def rows(partition, start, end=COUNT, epoch=0):
    return [(partition, offset, epoch) for offset in range(start, end)]


def append(directory, partition, count):
    with SegmentLog.open(directory / f"orders-{partition}") as log:
        log.append([b"x"] * count)


def test_a_running_stream_goes_back_and_forth_without_a_restart(directory, store):
    engine = Engine(directory)
    assert engine.drain() == rows(0, 0) + rows(1, 0)
    back = store.write("billing", "orders", 0, Startpoint.timestamp(25), "again")
    assert engine.drain() == rows(0, 25, epoch=back)
    assert engine.drain() == [], "once"
    append(directory, 0, 5)
    append(directory, 1, 5)
    forth = store.write("billing", "orders", None, Startpoint.relative(records=3), "pass three by")
    assert engine.drain() == rows(0, 43, 45, forth) + rows(1, 43, 45, forth)
    append(directory, 0, 1)
    assert engine.drain() == rows(0, 45, 46, forth)
    consumed = {(fact.sequence, fact.reader.partition) for fact in store.history() if isinstance(fact, Consumed)}
    assert consumed == {(back, 0), (forth, 0), (forth, 1)}


def test_a_run_that_ends_by_itself_tells_the_store_where(directory, store):
    engine = Engine(directory, maxRecordsPerTrigger="30")
    engine.reader.prepareForTriggerAvailableNow()
    assert sorted(engine.drain()) == rows(0, 0) + rows(1, 0)
    assert [one.offset for one in store.checkpoints()] == [COUNT, COUNT]


def test_a_batch_that_is_run_again_is_the_same_batch(directory, store):
    engine = Engine(directory)
    engine.drain()
    store.write("billing", "orders", 1, Startpoint.specific(30), "again")
    assert engine.plan()
    planned = engine.rows()
    append(directory, 1, 5)
    store.write("billing", "orders", 1, Startpoint.specific(10), "no, further")
    engine.restart()
    assert engine.batch() == planned == rows(1, 30, epoch=1)
    assert engine.drain() == rows(1, 10, COUNT + 5, epoch=2)


def test_an_answer_that_spark_never_logged_stays_the_answer(directory, store):
    engine = Engine(directory)
    engine.drain()
    store.write("billing", "orders", 0, Startpoint.latest(), "only what is new")
    engine.reader.latestOffset(engine.start(), engine.reader.getDefaultReadLimit())  # and killed
    append(directory, 0, 5)
    engine.restart()
    assert engine.drain() == rows(0, COUNT, COUNT + 5, epoch=1), "the latest of then"


def test_asked_twice_the_reader_says_the_same(directory, store):
    engine = Engine(directory)
    engine.drain()
    store.write("billing", "orders", 0, Startpoint.specific(30), "again")
    ask = lambda: engine.reader.latestOffset(engine.start(), engine.reader.getDefaultReadLimit())  # noqa: E731
    assert ask() == ask()
    assert engine.drain() == rows(0, 30, epoch=1)


def test_a_first_batch_starts_by_startpoint(directory, store):
    store.write("billing", "orders", 1, Startpoint.specific(35), "go")
    engine = Engine(directory, startingOffsets="latest")
    assert engine.drain() == rows(1, 35, epoch=1)
    append(directory, 0, 2)
    assert engine.drain() == rows(0, COUNT, COUNT + 2)


def test_limits_are_kept_and_a_startpoint_is_consumed_after_progress(directory, store):
    engine = Engine(directory, maxRecordsPerTrigger="8")
    engine.drain()
    store.write("billing", "orders", 0, Startpoint.specific(20), "again")
    assert engine.batch() == rows(0, 20, 28, epoch=1)
    assert store.read("billing", "orders", 0) is not None, "not before Spark committed it"
    assert engine.batch() == rows(0, 28, 36, epoch=1)
    assert store.read("billing", "orders", 0) is None
    engine.restart()
    assert engine.drain() == rows(0, 36, epoch=1)


def test_a_new_checkpoint_does_not_take_it_again(directory, store):
    store.write("billing", "orders", None, Startpoint.specific(35), "go")
    engine = Engine(directory)
    engine.drain()
    engine.plan()
    fresh = Engine(directory)
    assert fresh.drain() == rows(0, 0) + rows(1, 0)


def test_a_failed_one_stops_the_stream_until_it_is_cancelled(directory, store):
    engine = Engine(directory)
    engine.drain()
    sequence = store.write("billing", "orders", 0, Startpoint.specific(COUNT + 1), "a typo")
    for _ in range(2):
        with pytest.raises(StartpointFailed, match="beyond the end"):
            engine.plan()
        engine.restart()
    store.cancel(sequence, "a typo")
    append(directory, 0, 1)
    assert engine.drain() == rows(0, COUNT, COUNT + 1)


def test_a_startpoint_gets_a_stream_over_a_loss(directory, store):
    engine = Engine(directory)
    engine.drain()
    (directory / "orders-0").rename(directory.parent / "orders-0")
    with SegmentLog.open(directory / "orders-0") as log:
        log.append([b"another life"] * 3)
    engine.restart()
    with pytest.raises(Exception, match="made anew"):
        engine.plan()
    store.write("billing", "orders", 0, Startpoint.earliest(), "it was restored")
    engine.restart()
    assert engine.drain() == rows(0, 0, 3, epoch=1)


def test_bootstrap_holds_the_others_over_restarts(directory, store):
    engine = Engine(directory, maxRecordsPerTrigger="25")
    engine.drain()
    append(directory, 0, 3)
    store.write("billing", "orders", 1, Startpoint.bootstrap(), "read it first")
    assert engine.batch() == rows(1, 0, 25, epoch=1)
    engine.restart()
    assert engine.batch() == rows(1, 25, epoch=1)
    assert engine.drain() == rows(0, COUNT, COUNT + 3)


def test_two_streams_of_one_name_fence_each_other(directory, store):
    first = Engine(directory)
    first.drain()
    second = Engine(directory)
    second.drain()
    store.write("billing", "orders", 0, Startpoint.specific(30), "again")
    with pytest.raises(PartitionLost):
        first.plan()
    assert second.drain() == rows(0, 30, epoch=1)


def test_without_the_option_nothing_is_written(directory):
    source = PushrepDataSource({"path": str(directory), "topic": "orders"})
    assert "startpoint_epoch" not in source.schema().names
    reader = source.streamReader(source.schema())
    reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    assert not (directory / "startpoints").exists()


def test_a_store_elsewhere_and_one_that_was_replaced(directory, tmp_path):
    elsewhere = StartpointStore.open(tmp_path / "elsewhere")
    elsewhere.write("billing", "orders", 0, Startpoint.specific(30), "go")
    engine = Engine(directory, startpoints=str(tmp_path / "elsewhere"))
    assert engine.drain() == rows(0, 30, epoch=1) + rows(1, 0)
    engine.options["startpoints"] = str(tmp_path / "another")
    engine.restart()
    with pytest.raises(StreamOffsetUnusable, match="has no such startpoint"):
        engine.plan()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"startpoints": "kafka:startpoints"}, r"startpoints\.bootstrap\.servers: .*HOST:PORT"),
        ({"startpoints": "kafka://broker/startpoints"}, "kafka:TOPIC"),
        (
            {"startpoints": "elsewhere", "startpoints.sasl.password": "hush"},
            r"startpoints\.sasl\.password: .*kafka:TOPIC",
        ),
        ({"startpoints.bootstrap.servers": "broker:9092"}, "belongs to a store in a topic"),
        ({"startpoints": " "}, "it is empty"),
    ],
)
def test_places_that_are_no_store_are_refused_by_option(directory, options, named):
    with pytest.raises(BadOption, match=named) as refused:
        Engine(directory, **options)
    assert "hush" not in str(refused.value)


def test_batch_reads_and_empty_names_are_refused(directory):
    source = PushrepDataSource({"path": str(directory), "topic": "orders", "startingStartpoint": "billing"})
    with pytest.raises(BadOption, match="only readStream"):
        source.reader(source.schema())
    with pytest.raises(BadOption, match="startingStartpoint"):
        PushrepDataSource({"path": str(directory), "topic": "orders", "startingStartpoint": " "}).schema()


class Model:
    """A position per partition, and the place that the newest startpoint names."""

    def __init__(self):
        self.ends, self.position, self.pending, self.wanted = [0, 0], [0, 0], [None, None], [[], []]

    def batch_is_planned(self):
        for n in range(2):
            start = self.position[n] if self.pending[n] is None else self.pending[n]
            self.wanted[n] += range(start, self.ends[n])
            self.position[n], self.pending[n] = max(start, self.ends[n]), None


@pytest.mark.parametrize("seed", range(3))
def test_moved_and_killed_at_random_it_reads_what_a_model_says(directory, seed, torture):
    """A kill may come before the plan, after it, or inside the batch, which then is the same batch again."""
    chance, model = torture.random(seed), Model()
    model.ends = [COUNT, COUNT]
    store, engine, got = StartpointStore.open(directory / "startpoints"), Engine(directory), [[], []]
    for _ in range(torture.count(40, 1000)):
        event = chance.choice(["append", "startpoint", "kill", "batch", "batch"])
        if event == "append":
            partition, count = chance.randrange(2), chance.randint(1, 6)
            append(directory, partition, count)
            model.ends[partition] += count
        elif event == "startpoint":
            partition, place = chance.choice([0, 1, None]), chance.randint(0, min(model.ends))
            store.write("billing", "orders", partition, Startpoint.specific(place), "go")
            for n in range(2) if partition is None else [partition]:
                model.pending[n] = place
        elif event == "kill":
            engine.restart()
        elif engine.plan():
            model.batch_is_planned()
            planned = engine.rows()
            if chance.random() < 0.3:
                engine.restart()
                assert engine.rows() == planned
            engine.committed += 1
            for partition, offset, _ in planned:
                got[partition].append(offset)
    assert got == model.wanted, f"seed {torture.seed}"


@pytest.mark.spark
def test_a_running_query_follows_a_startpoint(spark, directory, store, checkpoint):
    from spark_jobs import register_sources

    register_sources(spark)
    batches = []

    def handle(rows, batch_id):
        found = sorted((row.partition, row.offset, row.startpoint_epoch) for row in rows.collect())
        batches.append(found)

    frame = (
        spark.readStream.format("pushrep")
        .options(path=str(directory), topic="orders", startingStartpoint="billing")
        .load()
    )
    query = frame.writeStream.foreachBatch(handle).option("checkpointLocation", checkpoint).start()
    try:
        query.processAllAvailable()
        sequence = store.write("billing", "orders", 0, Startpoint.timestamp(25), "again, while it runs")
        while (found := store.read("billing", "orders", 0)) is not None and found.state is State.PENDING:
            query.processAllAvailable()  # a store that a slow disk keeps busy holds no stream: it asks again
        query.processAllAvailable()
        ends = [json.loads(progress["sources"][0]["endOffset"]) for progress in query.recentProgress]
    finally:
        query.stop()
    assert batches == [rows(0, 0) + rows(1, 0), rows(0, 25, epoch=sequence)]
    assert ends[-1]["partitions"]["0"]["epoch"] == sequence, "the progress tells the startpoint"


@pytest.mark.spark
def test_a_running_query_goes_on_while_its_store_is_away_says_so_in_its_progress_and_follows_it_again(
    spark, directory, store, checkpoint, tmp_path
):
    """The store's place leads into nothing for a while, as a network's directory does, and there again."""
    from spark_jobs import register_sources

    register_sources(spark)
    batches, place = [], tmp_path / "place"

    def leads_to(there):
        (tmp_path / "next").symlink_to(there)
        (tmp_path / "next").replace(place)

    def said():
        """The entries about the store in the progress of each batch."""
        return {
            p["batchId"]: json.loads(p["sources"][0]["latestOffset"]).get("startpoints")
            for p in query.recentProgress
            if p["numInputRows"]
        }

    def handle(rows, batch_id):
        batches.append(sorted((row.partition, row.offset, row.startpoint_epoch) for row in rows.collect()))

    (directory / "startpoints").mkdir()
    (tmp_path / "file").touch()
    leads_to(directory / "startpoints")
    options = {"path": str(directory), "topic": "orders", "startingStartpoint": "billing", "startpoints": str(place)}
    frame = spark.readStream.format("pushrep").options(**options).load()
    query = frame.writeStream.foreachBatch(handle).option("checkpointLocation", checkpoint).start()
    try:
        query.processAllAvailable()
        leads_to(tmp_path / "file" / "startpoints")
        append(directory, 0, 5)
        query.processAllAvailable()
        assert batches == [rows(0, 0) + rows(1, 0), rows(0, COUNT, COUNT + 5)]

        leads_to(directory / "startpoints")
        sequence = store.write("billing", "orders", 1, Startpoint.specific(35), "again")
        while (found := store.read("billing", "orders", 1)) is not None and found.state is State.PENDING:
            query.processAllAvailable()  # it asks again after a second or more
        query.processAllAvailable()
        append(directory, 1, 1)
        query.processAllAvailable()
        words = said()
    finally:
        query.stop()
    assert batches[2:] == [rows(1, 35, epoch=sequence), rows(1, COUNT, COUNT + 1, epoch=sequence)]
    assert (words[0], words[3]) == (None, None)
    assert "new startpoints wait" in words[1]


class Brokers:
    """The brokers of a store of startpoints, which answer or do not."""

    def __init__(self, store, monkeypatch):
        self.store, self._monkeypatch, self.lost = store, monkeypatch, ()
        for name in ("size_bytes", "read", "claim", "apply", "commit", "reader_state"):
            self._may_be_lost(name)

    def _may_be_lost(self, name):
        method = getattr(StartpointStore, name)

        def asked(store, *words, **named):
            if name in self.lost:
                raise StoreUnavailable("kafka:startpoints", "no broker answers")
            return method(store, *words, **named)

        self._monkeypatch.setattr(StartpointStore, name, asked)


ALL_LOST = ("size_bytes", "read", "claim", "apply", "commit", "reader_state")


@pytest.fixture
def brokers(store, monkeypatch):
    return Brokers(store, monkeypatch)


@pytest.fixture
def clock(monkeypatch):
    """The clock of the pauses between requests to a store that does not answer."""
    clock = SimulatedClock()
    poll = startpoints.StorePoll
    monkeypatch.setattr(startpoints, "StorePoll", lambda store, _clock: poll(store, clock))
    return clock


@pytest.mark.parametrize("lost", [ALL_LOST, ("read",), ("apply",)], ids=["all", "behind the look", "its writers"])
def test_a_store_that_goes_away_holds_no_running_stream_and_is_taken_up_again(
    directory, store, brokers, clock, caplog, lost
):
    engine = Engine(directory)
    engine.drain()
    sequence = store.write("billing", "orders", 1, Startpoint.specific(35), "again")
    brokers.lost = lost
    append(directory, 0, 5)
    assert engine.drain() == rows(0, COUNT, COUNT + 5)
    assert "no broker answers" in engine.reader.reportLatestOffset()["startpoints"]
    for _ in range(3):
        clock.advance(60_000)
        assert engine.drain() == []
    assert caplog.text.count("new startpoints wait") == 1, "told once"
    brokers.lost = ()
    clock.advance(60_000)
    assert engine.drain() == rows(1, 35, epoch=sequence)
    assert "startpoints" not in engine.reader.reportLatestOffset()
    append(directory, 1, 1)
    assert engine.drain() == rows(1, COUNT, COUNT + 1, epoch=sequence)
    assert [fact.sequence for fact in store.history() if isinstance(fact, Consumed)] == [sequence]


def test_a_store_that_does_not_answer_at_a_start_stops_the_stream_by_the_name_of_its_setting(directory, brokers):
    engine = Engine(directory, startpoints=str(directory / "startpoints"))
    brokers.lost = ALL_LOST
    with pytest.raises(BadOption, match=r"option startpoints=.*has to answer when a stream starts.*no broker answers"):
        engine.batch()
    brokers.lost = ()
    engine.drain()
    engine.restart()
    brokers.lost = ("claim",)
    with pytest.raises(BadOption, match=r"option startpoints="):
        engine.batch()


def test_a_partition_that_comes_while_the_store_is_away_waits_for_it(directory, store, brokers, clock):
    """Its start offset is unknown until the store answers."""
    engine = Engine(directory)
    engine.drain()
    brokers.lost = ALL_LOST
    with SegmentLog.open(directory / "orders-2") as log:
        log.append([b"x"] * 3)
    append(directory, 0, 1)
    assert engine.drain() == rows(0, COUNT, COUNT + 1)
    brokers.lost = ()
    number = store.write("billing", "orders", 2, Startpoint.specific(1), "not the first")
    clock.advance(60_000)
    assert engine.drain() == rows(2, 1, 3, epoch=number)


def test_bootstrapping_goes_on_while_the_store_is_away(directory, store, brokers):
    engine = Engine(directory, maxRecordsPerTrigger="15")
    engine.drain()
    sequence = store.write("billing", "orders", 1, Startpoint.bootstrap(), "all of it, before anything else")
    append(directory, 0, 5)
    assert engine.batch() == rows(1, 0, 15, epoch=sequence)
    brokers.lost = ALL_LOST
    assert engine.batch() == rows(1, 15, 30, epoch=sequence), "partition 0 is held still"
    assert sorted(engine.drain()) == rows(0, COUNT, COUNT + 5) + rows(1, 30, epoch=sequence)


def test_a_store_that_is_lost_after_it_told_a_start_where_is_an_outage_of_a_running_stream(
    directory, store, brokers, clock, caplog, monkeypatch
):
    """A turn has asked all that it needs before it plans, even in the first after a start, amid a bootstrap."""
    engine = Engine(directory, maxRecordsPerTrigger="25")
    engine.drain()
    append(directory, 0, 3)
    sequence = store.write("billing", "orders", 1, Startpoint.bootstrap(), "read it first")
    assert engine.batch() == rows(1, 0, 25, epoch=sequence)
    engine.restart()
    readable = startpoints.StreamStartpoints.readable

    def lost_meanwhile(self, extents):
        brokers.lost = ALL_LOST
        return readable(self, extents)

    monkeypatch.setattr(startpoints.StreamStartpoints, "readable", lost_meanwhile)
    assert engine.batch() == rows(1, 25, epoch=sequence), "partition 0 is held still"
    assert engine.drain() == rows(0, COUNT, COUNT + 3)
    assert caplog.text.count("new startpoints wait") == 1, "told once"
    assert "no broker answers" in engine.reader.reportLatestOffset()["startpoints"]


def test_a_partition_that_comes_back_waits_for_a_store_that_does_not_say_whether_it_bootstraps(
    directory, store, brokers, clock
):
    engine = Engine(directory, failOnDataLoss="false")
    engine.drain()
    sequence = store.write("billing", "orders", 1, Startpoint.specific(35), "again")
    assert engine.drain() == rows(1, 35, epoch=sequence)
    append(directory, 1, 1)
    (directory / "orders-1").rename(directory.parent / "orders-1")
    engine.restart()
    assert engine.drain() == []
    (directory.parent / "orders-1").rename(directory / "orders-1")
    append(directory, 0, 1)
    brokers.lost = ("reader_state",)
    assert engine.drain() == rows(0, COUNT, COUNT + 1)
    assert "no broker answers" in engine.reader.reportLatestOffset()["startpoints"]
    brokers.lost = ()
    clock.advance(60_000)
    assert engine.drain() == rows(1, COUNT, COUNT + 1, epoch=sequence)


def test_a_startpoint_moves_one_partition_of_one_worker_slot(tmp_path):
    for slot in ("slot-0", "slot-1"):
        with Outbox.open(tmp_path / slot, "orders", 1, "web-shop") as outbox:
            outbox.append_many(0, [b"x"] * 3).result(60)
    first, second = (parse_shown_partition(name) for name in ("slot-0/0", "slot-1/0"))
    engine = Engine(tmp_path)
    assert sorted(engine.batch()) == [(number, offset, 0) for number in (first, second) for offset in range(3)]
    with StartpointStore.open(tmp_path / "startpoints") as store:
        store.write("billing", "orders", second, Startpoint.specific(1), "wrong since")
    assert engine.batch() == [(second, 1, 1), (second, 2, 1)]
