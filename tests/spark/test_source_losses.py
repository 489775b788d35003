"""What the source does if records that it still has to read are gone: it fails with their offsets, or continues after
them.
"""

import re
import shutil
from pathlib import Path

import pytest

from pushrep.log import LogConfig, SegmentLog
from spark_jobs.sources import arrow
from spark_jobs.sources.datasource import TaskRange
from spark_jobs.sources.planning import DataLoss
from tests.spark.source_engine import Engine, Rows, append, fill, records


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
    """Remove old segments, as retention or the command purge does."""
    with SegmentLog.open(directory / "orders-0", config=LogConfig(segment_bytes=4096)) as log:
        assert log.delete_records(75) == 75


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
def test_a_loss_between_two_batches_is_named_or_stepped_over(tmp_path, caplog, lose, told, then, available_now, fail):
    """Also with AvailableNow, whose end was fixed before the loss."""
    fill(tmp_path, 0, 10)
    append(tmp_path, 1, 1)
    engine = Engine(tmp_path, failOnDataLoss=fail, maxRecordsPerTrigger="30")
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
    tasks: dict[str, list[TaskRange]] = {}
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
        reading = engine.reader.read(task)
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
