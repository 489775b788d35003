"""A small engine that keeps offsets and commits as Spark does, without a JVM; and logs for it to read."""

import json
import pickle
from pathlib import Path
from typing import Any

from pushrep.log import LogConfig, SegmentLog
from spark_jobs.sources.datasource import PushrepDataSource, PushrepStreamReader, TaskRange

Rows = list[tuple[int, int, bytes]]


class Engine:
    """Does what MicroBatchExecution does with a source: the offset log before a batch, the commit log after it."""

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

    def tasks(self) -> list[TaskRange]:
        return self.reader.partitions(self.start(), json.loads(self.offsets[self.committed]))

    def read(self, task: TaskRange) -> Rows:
        """Read by a reader that was pickled, as Spark sends it."""
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
    """Append records by so many calls of `append`, with one writer."""
    with SegmentLog.open(directory / f"orders-{partition}", config=LogConfig(segment_bytes=4096)) as log:
        for first in range(0, batches * per_batch, per_batch):
            log.append([f"{partition}:{offset}".encode() for offset in range(first, first + per_batch)])


def records(partition: int, start: int, end: int) -> Rows:
    return [(partition, offset, f"{partition}:{offset}".encode()) for offset in range(start, end)]
