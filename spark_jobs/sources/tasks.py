"""A task of the source: one contiguous range of one partition, cut on the driver, read on an executor."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from pushrep.log import LogReader, SegmentLog
from pushrep.log.log_names import log_name
from spark_jobs.sources.arrow import ArrowWriter
from spark_jobs.sources.logs import PLANNED, EndUnknown, TopicLogs, written_end
from spark_jobs.sources.options import SourceOptions
from spark_jobs.sources.planning import DataLoss, Range
from spark_jobs.sources.progress import report


@dataclass(frozen=True)
class LogRange(InputPartition):
    """Offsets [start, end) of one partition, of the log with this id."""

    partition: int
    start: int
    end: int
    log_id: str


def plan_tasks(
    logs: TopicLogs, ranges: Mapping[int, Range], log_ids: Mapping[int, str], options: SourceOptions
) -> list[LogRange]:
    """Cut each range into tasks of about `splitBytes`; smaller ones if `minPartitions` asks for more tasks.

    Raises DataLoss if a log does not hold its range any more; or leaves out what is gone, with a warning.
    """
    rulers = {}
    for partition, (start, end) in sorted(ranges.items()):
        task = held_part(LogRange(partition, start, end, log_ids[partition]), logs.reader(partition), options)
        if task.start < task.end:
            rulers[partition] = logs.ruler(partition, task.start, task.end, options.split_bytes)
    piece_bytes = float(options.split_bytes)
    if options.min_partitions is not None and rulers:
        piece_bytes = min(piece_bytes, sum(ruler.size_bytes for ruler in rulers.values()) / options.min_partitions)
    return [
        LogRange(partition, start, end, log_ids[partition])
        for partition, ruler in rulers.items()
        for start, end in ruler.cut(piece_bytes)
    ]


def read_range(options: SourceOptions, schema: StructType, task: LogRange) -> Iterator[pa.RecordBatch]:
    """The records of one task as Arrow batches, in offset order. Raises DataLoss if they are gone by now."""
    name = log_name(options.topic, task.partition)
    arrow_schema = to_arrow_schema(schema, timezone="UTC")
    writer = ArrowWriter(options.topic, task.partition, arrow_schema, include_headers=options.include_headers)
    with SegmentLog.open_reader(Path(options.path) / name, isolation=PLANNED) as reader:
        task = held_part(task, reader, options)
        if task.start < task.end:
            yield from writer.convert(reader.batches(task.start, task.end), task.start, task.end)


def held_part(task: LogRange, reader: LogReader, options: SourceOptions) -> LogRange:
    """The part of a task's range that the log still holds; what it does not hold is reported as DataLoss.

    Raises EndUnknown if nobody can tell now.
    """
    log_id, start, end = str(reader.log_id), reader.log_start_offset, reader.log_end_offset
    gone: DataLoss | None = None
    if log_id != task.log_id:
        why = f"the log was made anew (it was {task.log_id}, it is {log_id})"
        gone = DataLoss(options.topic, task.partition, task.start, task.end, why)
        start = end = task.end
    elif task.start < start:
        gone = DataLoss(options.topic, task.partition, task.start, min(start, task.end), f"the log starts at {start}")
    elif task.end > end:
        if written_end(reader) is None:
            raise EndUnknown(options.topic, task.partition, task.end, end)
        gone = DataLoss(options.topic, task.partition, max(end, task.start), task.end, f"the log ends at {end}")
    if gone is None:
        return task
    report(gone, fail_on_data_loss=options.fail_on_data_loss)
    return replace(task, start=min(max(task.start, start), task.end), end=max(min(task.end, end), task.start))
