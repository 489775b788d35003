"""A task of the source: one contiguous range of one partition, cut on the driver, read on an executor."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from pushrep.log import LogReader, NotALog, OffsetOutOfRange, SegmentLog
from pushrep.log.slots import log_at
from pushrep.records import RecordBatch
from spark_jobs.sources.arrow import ArrowWriter
from spark_jobs.sources.logs import PLANNED, EndUnknown, TopicLogs, written_end
from spark_jobs.sources.options import SourceOptions
from spark_jobs.sources.planning import DataLoss, Range
from spark_jobs.sources.progress import report
from spark_jobs.spark_internals import arrow_schema as to_arrow_types


@dataclass(frozen=True)
class TaskRange(InputPartition):
    """Offsets [start, end) of one partition, of the log with this id, in the epochs that progress.py tells."""

    partition: int
    start: int
    end: int
    log_id: str
    epoch: int = 0
    marks_epoch: int = 0


def plan_tasks(
    logs: TopicLogs, ranges: Mapping[int, Range], log_ids: Mapping[int, str], options: SourceOptions
) -> list[TaskRange]:
    """Cut each range into tasks of about `splitBytes`; smaller ones if `minPartitions` asks for more tasks.

    Raises DataLoss if a log does not hold its range any more; or leaves out what is gone, with a warning.
    """
    rulers = {}
    for partition, (start, end) in sorted(ranges.items()):
        task = held_part(TaskRange(partition, start, end, log_ids[partition]), logs.reader_if_there(partition), options)
        if task.start < task.end:
            rulers[partition] = logs.ruler(partition, task.start, task.end, options.split_bytes)
    piece_bytes = float(options.split_bytes)
    if options.min_partitions is not None and rulers:
        piece_bytes = min(piece_bytes, sum(ruler.size_bytes for ruler in rulers.values()) / options.min_partitions)
    return [
        TaskRange(partition, start, end, log_ids[partition])
        for partition, ruler in rulers.items()
        for start, end in ruler.cut(piece_bytes)
    ]


def read_range(options: SourceOptions, schema: StructType, task: TaskRange) -> Iterator[pa.RecordBatch]:
    """The records of one task as Arrow batches, in offset order. Raises DataLoss if they are gone by now."""
    arrow_schema = to_arrow_types(schema)
    writer = ArrowWriter(
        options.topic,
        task.partition,
        arrow_schema,
        include_headers=options.include_headers,
        epochs=(task.epoch, task.marks_epoch) if options.startpoint_consumer is not None else (),
    )
    with ExitStack() as resources:
        reader: LogReader | None = None
        with suppress(NotALog):
            path = log_at(options.path, options.topic, task.partition)
            reader = resources.enter_context(SegmentLog.open_reader(path, isolation=PLANNED))
        task = held_part(task, reader, options)
        while reader is not None and task.start < task.end:
            walk = _Walk(reader, task)
            yield from writer.convert(walk, task.start, task.end)
            if walk.lost is None:
                return
            rest = replace(task, start=walk.position)
            task = held_part(rest, reader, options)
            if task == rest and task.start < task.end:
                raise walk.lost  # nothing is gone: it was another fault


class _Walk:
    """A task's batches; stops where the log lost them meanwhile, by retention or a cut, and tells where and by what."""

    def __init__(self, reader: LogReader, task: TaskRange) -> None:
        self._reader, self._task = reader, task
        self.position = task.start
        self.lost: Exception | None = None

    def __iter__(self) -> Iterator[RecordBatch]:
        try:
            for batch in self._reader.batches(self._task.start, self._task.end):
                yield batch
                self.position = min(batch.header.next_offset, self._task.end)
        except (OffsetOutOfRange, FileNotFoundError) as error:
            self.lost = error


def held_part(task: TaskRange, reader: LogReader | None, options: SourceOptions) -> TaskRange:
    """The part of a task's range that the log still holds; what it does not hold is reported as DataLoss.

    `reader` None: there is no log. Raises EndUnknown if nobody can tell now.
    """
    log_id = None if reader is None else reader.log_id
    if reader is None or log_id is None:
        return _nothing_of(task, "the log is not there any more", options)
    if str(log_id) != task.log_id:
        return _nothing_of(task, f"the log was made anew (it was {task.log_id}, it is {log_id})", options)
    start, end = reader.log_start_offset, reader.log_end_offset
    if task.start < start:
        gone = DataLoss(options.topic, task.partition, task.start, min(start, task.end), f"the log starts at {start}")
    elif task.end > end:
        if written_end(reader) is None:
            raise EndUnknown(options.topic, task.partition, task.end, end)
        gone = DataLoss(options.topic, task.partition, max(end, task.start), task.end, f"the log ends at {end}")
    else:
        return task
    report(gone, fail_on_data_loss=options.fail_on_data_loss)
    return replace(task, start=min(max(task.start, start), task.end), end=max(min(task.end, end), task.start))


def _nothing_of(task: TaskRange, why: str, options: SourceOptions) -> TaskRange:
    gone = DataLoss(options.topic, task.partition, task.start, task.end, why)
    report(gone, fail_on_data_loss=options.fail_on_data_loss)
    return replace(task, start=task.end)
