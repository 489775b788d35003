"""The data source "pushrep": Spark's interface to the logs of one topic, for batch reads and streams.

    driver    options -> logs' extents -> ranges of offsets per partition -> tasks (cut at record batches)
    executor  one task = one contiguous range of one partition, in offset order, as Arrow batches

What may be read is decided on the driver, below each log's stable offset; a task reads what the plan says. Driver and
executors see the logs under the same path: one machine, or a shared file system.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from filtering.errors import shown_partition
from pushrep.log import LogReader, NotALog, OffsetOutOfRange, SegmentLog
from pushrep.log.directory_files import log_at
from pushrep.records import RecordBatch
from spark_jobs.sources.arrow import ArrowWriter, source_schema
from spark_jobs.sources.logs import PLANNED, EndUnknown, TopicLogs, written_end
from spark_jobs.sources.options import BadOption, SourceOptions
from spark_jobs.sources.planning import (
    DataLoss,
    Extent,
    Range,
    StreamOffset,
    StreamOffsetUnusable,
    StreamPosition,
    StreamStep,
    check_present,
    end_of_batch,
    first_step,
    initial_words,
    next_step,
    ranges_between,
    report,
    resolve,
    resolve_starts,
    share,
    until,
    with_begun,
)
from spark_jobs.sources.startpoints import StreamStartpoints
from spark_jobs.spark_internals import STREAMS_SINCE, release, too_old
from spark_jobs.spark_internals import arrow_schema as to_arrow_types


@dataclass(frozen=True)
class TaskRange(InputPartition):
    """Offsets [start, end) of one partition, of the log with this id, in the epochs that planning.py gives."""

    partition: int
    start: int
    end: int
    log_id: str
    epoch: int = 0
    marks_epoch: int = 0


def plan_tasks(
    logs: TopicLogs, ranges: Mapping[int, Range], log_ids: Mapping[int, str], options: SourceOptions
) -> list[TaskRange]:
    """Cut each range into tasks of about `splitBytes`.

    Raises DataLoss if a log does not hold its range any more; or leaves out what is gone, with a warning.
    """
    tasks = []
    for partition, (start, end) in sorted(ranges.items()):
        task = held_part(TaskRange(partition, start, end, log_ids[partition]), logs.reader_if_there(partition), options)
        if task.start < task.end:
            pieces = logs.pieces(partition, task.start, task.end, options.split_bytes)
            tasks += [replace(task, start=low, end=high) for low, high in pieces]
    return tasks


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
                raise walk.lost  # nothing is gone, so it is another fault


class _Walk:
    """A task's batches. If retention or a cut removes records meanwhile, it ends at `position`; `lost` is the error."""

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
    """The part of a task's range that the log still holds; the rest is reported as DataLoss.

    `reader` None: there is no log. Raises EndUnknown if that is not known now.
    """
    log_id = None if reader is None else reader.log_id
    if reader is None or log_id is None or str(log_id) != task.log_id:
        start = end = task.end
        gone, why = (task.start, task.end), f"the log was made anew (it was {task.log_id}, it is {log_id})"
        if log_id is None:
            why = "the log is not there any more"
    else:
        start, end = reader.log_start_offset, reader.log_end_offset
        if start <= task.start and task.end <= end:
            return task
        gone, why = (task.start, min(start, task.end)), f"the log starts at {start}"
        if start <= task.start:
            if written_end(reader) is None:
                raise EndUnknown(options.topic, task.partition, task.end, end)
            gone, why = (max(end, task.start), task.end), f"the log ends at {end}"
    report(DataLoss(options.topic, task.partition, *gone, why), fail_on_data_loss=options.fail_on_data_loss)
    return replace(task, start=min(max(task.start, start), task.end), end=max(min(task.end, end), task.start))


try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ModuleNotFoundError:  # before Spark 4.2, where a stream is refused
    SupportsTriggerAvailableNow = object  # type: ignore[assignment, misc]
    ReadAllAvailable = ReadLimit = ReadMaxRows = Any  # type: ignore[assignment, misc]


class PushrepDataSource(DataSource):
    """`spark.read` or `spark.readStream` `.format("pushrep")`; options in `spark_jobs.sources.options`."""

    @classmethod
    def name(cls) -> str:
        return "pushrep"

    def schema(self) -> StructType:
        options = SourceOptions.parse(self.options)
        include_epochs = options.startpoint_consumer is not None
        return source_schema(include_headers=options.include_headers, include_epochs=include_epochs)

    def reader(self, schema: StructType) -> "PushrepReader":
        return PushrepReader(self._checked(schema), schema)

    def streamReader(self, schema: StructType) -> "PushrepStreamReader":  # noqa: N802 - Spark's name
        if release() < STREAMS_SINCE:
            raise too_old("a stream of source pushrep", "4.2")
        return PushrepStreamReader(self._checked(schema), schema)

    def _checked(self, schema: StructType) -> SourceOptions:
        own = self.schema()
        if schema.simpleString() != own.simpleString():
            why = f"leave .schema(...) out: its columns are {own.simpleString()}"
            raise BadOption("schema", schema.simpleString(), why)
        return SourceOptions.parse(self.options)


class PushrepReader(DataSourceReader):
    """A batch read: both ends are resolved when Spark plans it."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        options.check(stream=False)
        self._options, self._schema = options, schema

    def partitions(self) -> list[InputPartition]:
        options = self._options
        with closing(TopicLogs(options.path, options.topic, options.partitions)) as logs:
            extents = logs.extents()
            starts = resolve_starts(options, extents, logs.first_at)
            ends = resolve("endingOffsets", options.end, extents, logs.first_at)
            for partition in extents:
                if ends[partition] < starts[partition] and "endingOffsets" in options.given:
                    name = shown_partition(partition)
                    why = f"partition {name} would end at {ends[partition]}, before its start {starts[partition]}"
                    raise BadOption("endingOffsets", options.given["endingOffsets"], why)
            ranges = {partition: (starts[partition], ends[partition]) for partition in extents}
            tasks = plan_tasks(logs, ranges, {partition: extents[partition].log_id for partition in extents}, options)
        # For no partitions Spark makes a task of its own and hands it this.
        return list[InputPartition](tasks) or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, TaskRange):
            return iter(())
        return read_range(self._options, self._schema, partition)


class PushrepStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream; what Spark logs per batch is drawn in `spark_jobs.sources.planning`."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        options.check(stream=True)
        self._options, self._schema = options, schema
        self._logs = TopicLogs(options.path, options.topic, options.partitions)
        self._target: Mapping[int, Extent] | None = None
        consumer = options.startpoint_consumer
        self._startpoints = StreamStartpoints(options, self._logs, consumer) if consumer is not None else None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return initial_words(self._options.topic, self._options.given)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        if self._options.max_records is not None:
            return ReadMaxRows(self._options.max_records)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._target = self._logs.extents()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        latest = {
            partition: StreamPosition(extent.end, extent.log_id) for partition, extent in self._logs.extents().items()
        }
        shown = StreamOffset(self._options.topic, latest, {}).to_json()
        away = self._startpoints.away() if self._startpoints is not None else None
        return shown if away is None else {**shown, "startpoints": away}  # progress shows it; nothing of it is logged

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        options = self._options
        before = StreamOffset.from_json(start, options.topic)
        extents = self._extents()
        begun: Mapping[int, StreamPosition] = {}
        if self._startpoints is not None:
            begun = self._startpoints.begun(before, extents)
            extents = self._startpoints.readable(extents)
        if before is None:
            step = first_step(resolve_starts(options, extents, self._logs.first_at), extents)
        else:
            check_present(before, set(self._logs.present()), fail_on_data_loss=options.fail_on_data_loss)
            step = next_step(
                # Records that a startpoint skips are not lost.
                replace(before, positions={**before.positions, **begun}),
                extents,
                written_end=lambda partition: written_end(self._logs.reader(partition)),
                fail_on_data_loss=options.fail_on_data_loss,
            )
        if self._startpoints is not None:
            step = self._startpoints.held(before, with_begun(step, begun))
        end = end_of_batch(before, options.topic, step, self._limited(step, limit), extents)
        if end is not None:
            return end.to_json()
        if self._startpoints is not None and before is not None and self._target is not None:
            self._startpoints.run_ends(before)
        return start

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        # An unchanged end still carries the starts of its own batch, of which nothing may be read again.
        if start == end:
            return []
        before = StreamOffset.from_json(start, self._options.topic)
        after = StreamOffset.from_json(end, self._options.topic)
        if after is None:
            raise StreamOffsetUnusable("partitions", "the logged end of a batch names none; use a new checkpoint")
        ranges = ranges_between(before, after)
        log_ids = {partition: position.log_id for partition, position in after.positions.items()}
        tasks = plan_tasks(self._logs, ranges, log_ids, self._options)
        at = after.positions
        return [
            replace(task, epoch=at[task.partition].epoch, marks_epoch=at[task.partition].marks_epoch) for task in tasks
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_range(self._options, self._schema, cast("TaskRange", partition))

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do: records stay in the log until its own retention takes it."""

    def stop(self) -> None:
        self._logs.close()
        if self._startpoints is not None:
            self._startpoints.close()

    def _extents(self) -> Mapping[int, Extent]:
        """What the logs hold; with AvailableNow no more than they held when the run began."""
        now = self._logs.extents()
        if self._target is None:
            return now
        left = until(self._target, now)
        # The end of a log that was made anew is fixed when it is first seen, or the run might never end.
        anew = {p: extent for p, extent in left.items() if extent.log_id != self._target[p].log_id}
        self._target = {**self._target, **anew}
        return left

    def _limited(self, step: StreamStep, limit: ReadLimit) -> dict[int, int]:
        """Where the batch ends per partition, under the limits that Spark asks to keep."""
        ends = {partition: end for partition, (_, end) in step.ranges.items()}
        if isinstance(limit, ReadAllAvailable) or self._options.max_records is None:
            return ends
        shares = share({p: ends[p] - start for p, (start, _) in step.ranges.items()}, self._options.max_records)
        return {partition: step.ranges[partition][0] + count for partition, count in shares.items()}
