"""The stream reader under a small engine that keeps offsets and commits as Spark does, without a JVM.

Any order of appends, new partitions, limits, restarts and deaths before a commit: every record once, in order, and a
batch that is run again is the same batch.
"""

import json
import pickle
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pyspark.sql.streaming.datasource import ReadAllAvailable

from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.records import Codec
from spark_jobs.sources import arrow
from spark_jobs.sources.datasource import PushrepDataSource, PushrepStreamReader
from spark_jobs.sources.logs import EndUnknown, TopicNotFound
from spark_jobs.sources.planning import DataLoss
from spark_jobs.sources.tasks import LogRange, read_range

Rows = list[tuple[int, int, bytes]]


class Engine:
    """What MicroBatchExecution does with a source: the offset log before a batch, the commit log after it."""

    def __init__(self, directory: Path, **options: str) -> None:
        self.directory, self.options = directory, options
        self.offsets: list[str] = []
        self.committed = 0
        self.restart()

    def restart(self, *, available_now: bool = False, **options: str) -> None:
        self.options |= options
        source = PushrepDataSource({"path": str(self.directory), "topic": "orders"} | self.options)
        self.reader: PushrepStreamReader = source.streamReader(source.schema())
        self.limit = self.reader.getDefaultReadLimit()
        if available_now:
            self.reader.prepareForTriggerAvailableNow()

    def start(self) -> dict[str, Any]:
        return json.loads(self.offsets[self.committed - 1]) if self.committed else self.reader.initialOffset()

    def plan(self) -> bool:
        """Log the next batch's end, unless one is logged and not committed; False if there is nothing to do."""
        if len(self.offsets) > self.committed:
            return True
        end = json.dumps(self.reader.latestOffset(self.start(), self.limit))
        if self.committed and end == self.offsets[-1]:
            return False
        self.offsets.append(end)
        return True

    def rows(self) -> list[Rows]:
        """The planned batch, task by task."""
        return [self.read(task) for task in self.tasks()]

    def tasks(self) -> list[LogRange]:
        return self.reader.partitions(self.start(), json.loads(self.offsets[self.committed]))

    def read(self, task: LogRange) -> Rows:
        """By a reader that travelled as Spark sends it."""
        source = PushrepDataSource({"path": str(self.directory), "topic": "orders"} | self.options)
        executor = pickle.loads(pickle.dumps(source)).streamReader(source.schema())
        return [
            (row["partition"], row["offset"], row["value"])
            for batch in executor.read(pickle.loads(pickle.dumps(task)))
            for row in batch.to_pylist()
        ]

    def commit(self) -> None:
        self.committed += 1

    def run(self) -> list[Rows]:
        """Every batch until there is nothing to do."""
        batches = []
        while self.plan():
            batches.append([row for task in self.rows() for row in task])
            self.commit()
        return batches


def append(directory: Path, partition: int, count: int, **kwargs: Any) -> None:
    with SegmentLog.open(directory / f"orders-{partition}", config=LogConfig(segment_bytes=4096, **kwargs)) as log:
        first = log.log_end_offset
        log.append([f"{partition}:{offset}".encode() for offset in range(first, first + count)])


def fill(directory: Path, partition: int, batches: int, per_batch: int = 10) -> None:
    """As so many calls of `append`, by one writer."""
    with SegmentLog.open(directory / f"orders-{partition}", config=LogConfig(segment_bytes=4096)) as log:
        for first in range(0, batches * per_batch, per_batch):
            log.append([f"{partition}:{offset}".encode() for offset in range(first, first + per_batch)])


def records(partition: int, start: int, end: int) -> Rows:
    return [(partition, offset, f"{partition}:{offset}".encode()) for offset in range(start, end)]


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
                "maxBytesPerTrigger": st.integers(1, 2000).map(str),
                "splitBytes": st.integers(1, 2000).map(str),
                "minPartitions": st.integers(1, 6).map(str),
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
    engine = Engine(tmp_path, maxRecordsPerTrigger="10", maxBytesPerTrigger="100")
    engine.limit = ReadAllAvailable()
    assert engine.run() == [records(0, 0, 50)]


def test_a_limit_in_bytes_cuts_at_record_batches(tmp_path):
    for _ in range(20):
        append(tmp_path, 0, 20)
    batches = Engine(tmp_path, maxBytesPerTrigger="1500").run()
    assert [row for batch in batches for row in batch] == records(0, 0, 400)
    assert 4 < len(batches) < 20
    assert all(batch[0][1] % 20 == 0 for batch in batches)


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


def cut(directory: Path) -> None:
    with SegmentLog.open(directory / "orders-0") as log:
        log.truncate_to(20, force=True)


def make_anew(directory: Path) -> None:
    shutil.rmtree(directory / "orders-0")
    append(directory, 0, 8)


def remove(directory: Path) -> None:
    shutil.rmtree(directory / "orders-0")


@pytest.mark.parametrize(
    ("lose", "told", "then"),
    [
        (cut, r"orders-0: offsets \[20, 30\) are gone: the log ends at 20", [[], records(0, 20, 26)]),
        (make_anew, r"orders-0: .* the log was made anew", [records(0, 0, 8), records(0, 8, 14)]),
        (remove, "orders-0: .* the log is not there any more", [[], records(0, 0, 6)]),
    ],
)
def test_a_loss_stops_the_query_or_is_stepped_over(tmp_path, caplog, lose, told, then):
    for _ in range(3):
        append(tmp_path, 0, 10)
    append(tmp_path, 1, 1)
    engine = Engine(tmp_path)
    engine.run()
    lose(tmp_path)
    engine.restart()
    with pytest.raises(DataLoss, match=told):
        engine.plan()
    engine.restart(failOnDataLoss="false")
    assert [row for batch in engine.run() for row in batch] == then[0]
    assert "orders-0" in caplog.text
    append(tmp_path, 0, 6)
    assert [row for batch in engine.run() for row in batch] == then[1]


def retire(directory: Path) -> None:
    """What retention or the command purge does."""
    with SegmentLog.open(directory / "orders-0", config=LogConfig(segment_bytes=4096)) as log:
        assert log.delete_records(75) == 75


LIMITS = [{"maxBytesPerTrigger": "800"}, {"maxRecordsPerTrigger": "30"}]


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: next(iter(limit)))
@pytest.mark.parametrize("available_now", [False, True], ids=["", "AvailableNow"])
@pytest.mark.parametrize("fail", ["true", "false"])
@pytest.mark.parametrize(
    ("lose", "told", "then"),
    [
        (retire, r"orders-0: offsets \[\d+, 75\) are gone: the log starts at 75", records(0, 75, 100)),
        (cut, r"orders-0: offsets \[20, \d+\) are gone: the log ends at 20", []),
        (make_anew, r"orders-0: .* the log was made anew", records(0, 0, 8)),
        (remove, r"orders-0: .* the log is not there any more", []),
    ],
)
def test_a_loss_between_two_batches_is_named_or_stepped_over(
    tmp_path, caplog, lose, told, then, available_now, limit, fail
):
    """With AvailableNow too, whose end was fixed before the loss."""
    fill(tmp_path, 0, 10)
    append(tmp_path, 1, 1)
    engine = Engine(tmp_path, failOnDataLoss=fail, **limit)
    engine.restart(available_now=available_now)
    assert engine.plan()
    engine.rows()
    engine.commit()
    assert 20 < engine.start()["partitions"]["0"]["offset"] < 75
    lose(tmp_path)
    if fail == "true":
        with pytest.raises(DataLoss, match=told):
            engine.run()
    else:
        assert [row for batch in engine.run() for row in batch if row[0] == 0] == then
        assert re.search(told, caplog.text)


@pytest.mark.parametrize(
    ("lose", "told", "then"),
    [
        (retire, r"orders-0: offsets \[0, 75\) are gone: the log starts at 75", records(0, 75, 100)),
        (cut, r"orders-0: offsets \[20, 100\) are gone: the log ends at 20", records(0, 0, 20)),
        (make_anew, r"orders-0: offsets \[0, 100\) are gone: the log was made anew", []),
        (remove, r"orders-0: offsets \[0, 100\) are gone: the log is not there any more", []),
    ],
)
@pytest.mark.parametrize("when", ["before it is cut into tasks", "before the tasks run"])
def test_a_planned_batch_whose_records_are_gone_is_a_loss(tmp_path, caplog, lose, told, then, when):
    fill(tmp_path, 0, 10)
    append(tmp_path, 1, 1)
    tasks: dict[str, list[LogRange]] = {}
    engines = {fail: Engine(tmp_path, failOnDataLoss=fail) for fail in ("true", "false")}
    for fail, engine in engines.items():
        assert engine.plan()
        tasks[fail] = engine.tasks()
    lose(tmp_path)
    for engine in engines.values():
        engine.restart()

    def rows(fail: str) -> Rows:
        engine = engines[fail]
        return [row for task in (engine.tasks() if "cut" in when else tasks[fail]) for row in engine.read(task)]

    with pytest.raises(DataLoss, match=told):
        rows("true")
    assert sorted(rows("false")) == sorted(then + records(1, 0, 1))
    assert re.search(told, caplog.text)


def test_retention_that_overtakes_a_running_task_is_a_loss(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(arrow, "ROWS_MAX", 100)
    fill(tmp_path, 0, 100, 40)
    for fail in ("false", "true"):
        engine = Engine(tmp_path, failOnDataLoss=fail)
        assert engine.plan()
        (task,) = engine.tasks()
        reading = read_range(engine.reader._options, engine.reader._schema, task)
        first = next(reading)["offset"].to_pylist()
        with SegmentLog.open(tmp_path / "orders-0", config=LogConfig(segment_bytes=4096)) as log:
            start = log.delete_records(first[-1] + 1010)
        if fail == "true":
            with pytest.raises(DataLoss, match=f"gone: the log starts at {start}"):
                list(reading)
        else:
            rest = [offset for batch in reading for offset in batch["offset"].to_pylist()]
            assert rest[-(4000 - start) :] == list(range(start, 4000))
            before = first + rest[: -(4000 - start)]
            assert before == list(range(len(before))), "what was read before it was gone, without a hole"
            assert len(before) < start
    assert "orders-0" in caplog.text


def without_published_state(directory: Path) -> None:
    """As after a restart of the machine, before the writer is back: what it published counts no more."""
    (directory / ".pushrep_published").unlink()


def test_after_a_restart_of_the_machine_the_writer_is_waited_for(tmp_path):
    """The checkpoints that speak for a log then may lag behind what was read; that is no loss."""
    append(tmp_path, 0, 10)
    engine = Engine(tmp_path)
    engine.run()
    append(tmp_path, 0, 10)
    assert engine.plan()
    without_published_state(tmp_path)
    checkpoint = tmp_path / "recovery-point-offset-checkpoint"
    checkpoint.write_text(checkpoint.read_text().replace("orders 0 20", "orders 0 5"))
    engine.restart()
    with pytest.raises(EndUnknown, match="orders-0 is to be read up to 20"):
        engine.rows()
    append(tmp_path, 0, 1)  # the writer is back
    engine.restart()
    assert engine.rows() == [records(0, 10, 20)]
    engine.commit()

    without_published_state(tmp_path)
    checkpoint.write_text(checkpoint.read_text().replace("orders 0 21", "orders 0 5"))
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
    with pytest.raises(TopicNotFound, match=why):
        engine.plan()
