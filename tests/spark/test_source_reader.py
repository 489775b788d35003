"""The stream reader under a small engine that keeps offsets and commits as Spark does, without a JVM.

Any order of appends, new partitions, limits, restarts and deaths before a commit: every record once, in order, and a
batch that is run again is the same batch.
"""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pyspark.sql.streaming.datasource import ReadAllAvailable

from filtering.errors import shown_partition
from pushrep import Outbox
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.directory_files import CheckpointFile, write_checkpoint
from pushrep.records import Codec
from spark_jobs.errors import SparkJobError
from spark_jobs.sources.datasource import PushrepDataSource
from spark_jobs.sources.logs import EndUnknown
from spark_jobs.sources.options import BadOption
from spark_jobs.sources.planning import DataLoss
from tests.spark.source_engine import Engine, Rows, append, fill, records


class SourceMachine(RuleBasedStateMachine):
    """Against a model: the records of every partition, and those that committed batches have delivered."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="pushrep-source-"))
        self.appended: dict[int, int] = {}
        self.delivered: dict[int, Rows] = {}
        self.seen_of_planned: list[Rows] | None = None

    def teardown(self) -> None:
        shutil.rmtree(self.directory)

    @initialize(
        counts=st.lists(st.integers(0, 30), min_size=1, max_size=3),
        options=st.fixed_dictionaries(
            {"startingOffsets": st.sampled_from(["earliest", "latest"])},
            optional={
                "maxRecordsPerTrigger": st.integers(1, 40).map(str),
                "splitBytes": st.integers(1, 2000).map(str),
            },
        ),
    )
    def begin(self, counts: list[int], options: dict[str, str]) -> None:
        for partition, count in enumerate(counts):
            SegmentLog.open(self.directory / f"orders-{partition}").close()
            self.appended[partition] = 0
            if count:
                self.add(partition, count, Codec.NONE)
        self.engine = Engine(self.directory, **options)
        self.first_wanted: dict[int, int] | None = None  # where the first batch begins, once it was planned
        self.target: dict[int, int] | None = None

    def add(self, partition: int, count: int, codec: Codec) -> None:
        append(self.directory, partition, count, codec=codec)
        self.appended[partition] = self.appended.get(partition, 0) + count

    @rule(partition=st.integers(0, 4), count=st.integers(1, 50), codec=st.sampled_from([Codec.NONE, Codec.LZ4]))
    def append(self, partition: int, count: int, codec: Codec) -> None:
        self.add(partition, count, codec)

    @rule(available_now=st.booleans())
    def restart(self, available_now: bool) -> None:
        self.engine.restart(available_now=available_now)
        self.target = dict(self.appended) if available_now else None

    @rule()
    def run_without_commit(self) -> None:
        if self.engine.plan():
            if self.first_wanted is None:
                latest = self.appended if self.target is None else self.target
                self.first_wanted = dict(latest) if self.engine.options["startingOffsets"] == "latest" else {}
            rows = self.engine.rows()
            flat = sorted(row for task in rows for row in task)
            if self.seen_of_planned is not None:
                assert flat == self.seen_of_planned, "a batch that is run again is the same batch"
            self.seen_of_planned = flat
            for task in rows:
                assert task == records(task[0][0], task[0][1], task[0][1] + len(task)), "contiguous, in order"

    @precondition(lambda self: self.seen_of_planned is not None)
    @rule()
    def run_and_commit(self) -> None:
        self.run_without_commit()
        for row in self.seen_of_planned or []:
            self.delivered.setdefault(row[0], []).append(row)
        limit = self.engine.options.get("maxRecordsPerTrigger")
        assert limit is None or len(self.seen_of_planned or []) <= int(limit)
        self.engine.commit()
        self.seen_of_planned = None

    @invariant()
    def delivered_is_a_prefix(self) -> None:
        for partition, rows in self.delivered.items():
            start = (self.first_wanted or {}).get(partition, 0)
            assert rows == records(partition, start, start + len(rows)), "every record once, in order"

    @rule()
    def drain(self) -> None:
        """A restart and all batches to the end: nothing may be missing."""
        self.restart(available_now=False)
        while self.engine.plan():
            self.run_without_commit()
            self.run_and_commit()
        for partition, count in self.appended.items():
            start = (self.first_wanted or {}).get(partition, 0)
            assert len(self.delivered.get(partition, [])) == count - start, f"partition {partition} is complete"


TestSourceMachine = SourceMachine.TestCase
TestSourceMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_the_default_limit_is_overruled_by_read_all(tmp_path):
    append(tmp_path, 0, 50)
    engine = Engine(tmp_path, maxRecordsPerTrigger="10")
    engine.limit = ReadAllAvailable()
    assert engine.run() == [records(0, 0, 50)]


@pytest.mark.parametrize(
    ("words", "start"),
    [
        ({"startingOffsets": "earliest"}, 0),
        ({"startingOffsets": "latest"}, 20),
        ({"startingOffsets": '{"orders": {"0": 7}}'}, 7),
        ({"startingTimestamp": "4102444800000"}, 20),
        ({"startingTimestamp": "2000-01-01T00:00:00Z"}, 0),
    ],
)
def test_batch_0_is_the_same_batch_until_it_is_committed(tmp_path, words, start):
    append(tmp_path, 0, 20)
    engine = Engine(tmp_path, **words)
    assert engine.plan()
    append(tmp_path, 0, 5)
    append(tmp_path, 1, 5)
    engine.restart()
    assert [row for task in engine.rows() for row in task] == records(0, start, 20)
    engine.commit()
    assert engine.run() == [records(0, 20, 25) + records(1, 0, 5)]


def test_available_now_ends_at_what_was_there(tmp_path):
    append(tmp_path, 0, 30)
    engine = Engine(tmp_path, maxRecordsPerTrigger="20")
    engine.restart(available_now=True)
    append(tmp_path, 0, 30)
    append(tmp_path, 1, 5)
    assert engine.run() == [records(0, 0, 20), records(0, 20, 30)]
    engine.restart(available_now=True)
    assert sorted(row for batch in engine.run() for row in batch) == records(0, 30, 60) + records(1, 0, 5)


def test_an_end_that_did_not_move_is_not_read_again(tmp_path):
    append(tmp_path, 0, 5)
    engine = Engine(tmp_path)
    engine.run()
    end = engine.start()
    assert end["start"] == {"0": 0}, "the offset still carries where batch 0 began"
    assert engine.reader.partitions(end, end) == []


def test_what_is_buffered_is_not_read_before_it_is_on_disk(tmp_path):
    config = LogConfig(flush_ms=3_600_000, flush_bytes=1 << 40)
    with SegmentLog.open(tmp_path / "orders-0", config=config) as log:
        log.append([b"0:0", b"0:1"])
        log.append([b"0:2"], durability=Durability.BUFFERED)
        engine = Engine(tmp_path)
        assert engine.run() == [records(0, 0, 2)]
        log.flush()
        assert engine.run() == [records(0, 2, 3)]


def without_published_state(directory: Path) -> None:
    """The state after a restart of the machine, before the writer is back: the published state is not valid any
    more.
    """
    (directory / ".pushrep_published").unlink()


def was_cut_off_at_5(logs):
    """As after a crash of the machine, with a checkpoint of some time before."""
    (logs / ".pushrep_cleanshutdown").unlink()
    write_checkpoint(logs, CheckpointFile.RECOVERY_POINT, {"orders-0": 5})


def test_after_a_restart_of_the_machine_the_writer_is_waited_for(tmp_path):
    """The log's checkpoints may be behind what was read before; that is not a loss."""
    append(tmp_path, 0, 10)
    engine = Engine(tmp_path)
    engine.run()
    append(tmp_path, 0, 10)
    assert engine.plan()
    without_published_state(tmp_path)
    was_cut_off_at_5(tmp_path)
    engine.restart()
    with pytest.raises(EndUnknown, match="orders-0 is to be read up to 20"):
        engine.rows()
    append(tmp_path, 0, 1)  # the writer is back
    engine.restart()
    assert engine.rows() == [records(0, 10, 20)]
    engine.commit()

    without_published_state(tmp_path)
    was_cut_off_at_5(tmp_path)
    engine.restart()
    assert engine.run() == [], "nothing to read yet, and nothing lost"


def test_a_directory_that_was_replaced_is_noticed(tmp_path):
    directory = tmp_path / "logs"
    append(directory, 0, 5)
    engine = Engine(directory)
    engine.run()
    shutil.rmtree(directory)
    append(directory, 0, 9)
    with pytest.raises(DataLoss, match="made anew"):
        engine.plan()


@pytest.mark.parametrize(
    ("path", "why"), [("absent", "No such file or directory"), ("file", "Not a directory"), ("empty", "no log of it")]
)
def test_a_path_without_the_topic_is_refused(tmp_path, path, why):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    engine = Engine(tmp_path / path)
    with pytest.raises(BadOption, match=why):
        engine.plan()


REFUSED_READS = {
    "a topic that is not there": ({"topic": "Orders"}, ["'Orders'", "orders, other"]),
    "a path that is not there": ({"path": "/no/such/directory"}, ["/no/such/directory"]),
    "a partition that is not there": ({"partitions": "1,7"}, ["partitions", "7"]),
    "an unknown option": ({"subscribe": "orders"}, ["subscribe", "no such option"]),
    "a malformed option": ({"includeHeaders": "maybe"}, ["includeHeaders", "maybe"]),
    "a start beyond the end": (
        {"partitions": "0", "startingOffsets": '{"orders": {"0": 901}}'},
        ["startingOffsets", "partition 0", "901", "beyond the end", "[0, 900)"],
    ),
    "an end beyond the end": (
        {"partitions": "0", "endingOffsets": '{"orders": {"0": 901}}'},
        ["endingOffsets", "partition 0", "beyond the end"],
    ),
    "an end before the start": (
        {"partitions": "0", "startingOffsets": '{"orders": {"0": 5}}', "endingOffsets": '{"orders": {"0": 4}}'},
        ["endingOffsets", "partition 0", "4", "5"],
    ),
    "a trigger's limit": ({"maxRecordsPerTrigger": "5"}, ["maxRecordsPerTrigger", "readStream"]),
}


@pytest.mark.parametrize("case", REFUSED_READS)
def test_a_batch_read_refuses_by_name(tmp_path, case):
    fill(tmp_path, 0, 90)
    append(tmp_path, 1, 4)
    with SegmentLog.open(tmp_path / "other-0") as log:
        log.append(b"elsewhere")
    options, named = REFUSED_READS[case]
    source = PushrepDataSource({"path": str(tmp_path), "topic": "orders"} | options)
    with pytest.raises(SparkJobError) as refusal:
        source.reader(source.schema()).partitions()
    for words in named:
        assert words in str(refusal.value)


def test_worker_slots_are_read_as_one_and_a_new_slot_is_taken_up(tmp_path):
    """Each partition of each slot has a different number, so that records of two slots are never confused."""
    names = ["slot-0/0", "slot-0/1", "slot-3/0", "slot-3/1"]
    for slot in ("slot-0", "slot-3"):
        slot_of(tmp_path, slot, 10)
    engine = Engine(tmp_path, maxRecordsPerTrigger="7")
    rows = [row for batch in engine.run() for row in batch]
    assert by_log(rows) == {name: list(range(10)) for name in names}
    slot_of(tmp_path, "slot-3", 5)
    slot_of(tmp_path, "slot-12", 5)
    engine.restart()
    rows = [row for batch in engine.run() for row in batch]
    news = {f"slot-12/{n}": list(range(5)) for n in (0, 1)} | {f"slot-3/{n}": list(range(10, 15)) for n in (0, 1)}
    assert by_log(rows) == news
    one = Engine(tmp_path / "slot-3", partitions="1")
    assert by_log([row for batch in one.run() for row in batch]) == {"1": list(range(15))}
    given = json.dumps({"orders": {"slot-0/1": 4, "slot-3/1": 14, "slot-12/1": -1}})
    some = Engine(tmp_path, partitions="1", startingOffsets=given)
    assert by_log([row for batch in some.run() for row in batch]) == {"slot-0/1": [4, 5, 6, 7, 8, 9], "slot-3/1": [14]}
    with pytest.raises(BadOption, match="name every partition; missing: slot-3/1, slot-12/1"):
        Engine(tmp_path, partitions="1", startingOffsets=json.dumps({"orders": {"slot-0/1": 4}})).plan()
    shutil.rmtree(tmp_path / "slot-3" / "orders-1")
    with pytest.raises(DataLoss, match="slot-3/orders-1"):
        engine.plan()


def test_a_slot_that_was_made_anew_is_named(tmp_path):
    slot_of(tmp_path, "slot-0", 10)
    slot_of(tmp_path, "slot-1", 10)
    engine = Engine(tmp_path)
    engine.run()
    shutil.rmtree(tmp_path / "slot-1")
    slot_of(tmp_path, "slot-1", 20)
    with pytest.raises(DataLoss, match=r"slot-1/orders-0: .* made anew"):
        engine.plan()


def slot_of(directory, slot, count):
    with Outbox.open(directory / slot, "orders", 2, "web-shop") as outbox:
        for partition in range(2):
            outbox.append_many(partition, [b"x"] * count).result(60)


def by_log(rows):
    found = {}
    for number, offset, _ in rows:
        found.setdefault(shown_partition(number), []).append(offset)
    return found
