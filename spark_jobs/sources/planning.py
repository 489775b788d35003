"""What a batch or a stream reads: where it starts, how far it goes under a limit, and what is gone. Pure.

    option's words --resolve--> starts --limit--> ends --(split at record batches by the reader)--> tasks

    a stream's first batch   the option's words are resolved; every partition carries its start in the end offset
    later                    each partition goes on where it ended; a new one begins at 0, and carries that
    something lost           the query stops and names it, or (failOnDataLoss=false) goes on with what is there, and
                             carries that start, so that the batch is the same when it is run again

The offset that Spark logs for each batch, as JSON:

    before the first batch   {"version": 1, "topic": "orders", "startingOffsets": "earliest"}      the option's words
    end of each batch        {"version": 1, "topic": "orders",
                              "partitions": {"0": {"epoch": 0, "offset": 23, "log": "<uuid>"}},    next offset to read
                              "start": {"0": 12}}                                                  where it began

Spark asks for the words again as long as no batch is committed, so what they meant at first must stand in what it
logs: a partition that has no predecessor (all of them in batch 0, a new one later) carries its start in the end
offset. Killed before the first commit, batch 0 is read again from there and is the same batch, whatever was appended.

`log` is the log's own id: offsets of a log that was made anew under the same name mean other records. `epoch` is the
number of the startpoint that the partition's run started from, 0 for none (startpoints.py); `marks`, only where there
is one, is the number of the newest startpoint before it that reset a replay filter's marks.
Every refusal names topic-partition and range. Ranges are half-open.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from filtering.errors import shown_partition
from pushrep.log.directory_files import shown_name
from spark_jobs.errors import SparkJobError
from spark_jobs.sources.options import (
    EARLIEST_OFFSET,
    LATEST_OFFSET,
    AtOffsets,
    AtTimestamp,
    BadOption,
    Edge,
    Place,
    SourceOptions,
)

Range: TypeAlias = tuple[int, int]
"""Offsets [start, end) of one partition."""


@dataclass(frozen=True, slots=True)
class Extent:
    """What a partition holds for readers: [start, end), end being its stable offset, and the log's own id."""

    start: int
    end: int
    log_id: str


class DataLoss(SparkJobError):
    """Records that the query still had to read are gone: [start, end) of `topic`-`partition`."""

    def __init__(self, topic: str, partition: int, start: int, end: int, why: str) -> None:
        super().__init__(
            f"source pushrep: {shown_name(topic, partition)}: offsets [{start}, {end}) are gone: {why}. "
            "Restore the log, or set failOnDataLoss=false to go on with what is there"
        )
        self.topic, self.partition, self.start, self.end, self.why = topic, partition, start, end, why


def resolve_starts(
    options: SourceOptions, extents: Mapping[int, Extent], first_at: Callable[[int, int], int | None]
) -> dict[int, int]:
    """What the option startingOffsets or startingTimestamp means now; as `resolve`."""
    option = "startingTimestamp" if "startingTimestamp" in options.given else "startingOffsets"
    return resolve(option, options.start, extents, first_at)


def resolve(
    option: str,
    place: Place,
    extents: Mapping[int, Extent],
    first_at: Callable[[int, int], int | None],
) -> dict[int, int]:
    """The offset that `place` means in each partition. `first_at(partition, ms)` looks a timestamp up.

    Raises BadOption, naming `option`, if given offsets leave a partition out, name one that is not read, or lie
    outside the log.
    """
    if place is Edge.EARLIEST:
        return {partition: extent.start for partition, extent in extents.items()}
    if place is Edge.LATEST:
        return {partition: extent.end for partition, extent in extents.items()}
    if isinstance(place, AtTimestamp):
        return {partition: _at(first_at(partition, place.ms), extent) for partition, extent in extents.items()}
    assert isinstance(place, AtOffsets)
    _check_partitions(option, place.offsets, extents)
    return {partition: _given(option, partition, place.offsets[partition], extents[partition]) for partition in extents}


def share(available: Mapping[int, int], limit: int) -> dict[int, int]:
    """Share `limit` records among partitions by what each has: one each, the rest in proportion.

    In proportion, partitions stay at about the same time; one each keeps a small partition moving beside a large one.
    Never more than `limit` in total.
    """
    total = sum(available.values())
    if total <= limit:
        return dict(available)
    waiting = [partition for partition, count in sorted(available.items()) if count]
    if len(waiting) > limit:
        # Fewer records than partitions: the fullest first, so that the backlog shrinks where it is largest.
        fullest = sorted(waiting, key=lambda partition: (-available[partition], partition))[:limit]
        return {partition: int(partition in fullest) for partition in available}
    rest, rest_total = limit - len(waiting), total - len(waiting)
    shares = dict.fromkeys(available, 0)
    for partition in waiting:
        # available - 1 ≤ rest_total and rest < rest_total, so a share never exceeds what the partition has.
        shares[partition] = 1 + (available[partition] - 1) * rest // rest_total
    return shares


def _at(offset: int | None, extent: Extent) -> int:
    # A record above the stable offset is not visible to readers yet: the stream will read it later.
    return extent.end if offset is None else max(extent.start, min(offset, extent.end))


def _check_partitions(option: str, offsets: Mapping[int, int], extents: Mapping[int, Extent]) -> None:
    missing, unread = sorted(extents.keys() - offsets.keys()), sorted(offsets.keys() - extents.keys())
    if missing:
        raise BadOption(option, None, f"name every partition; missing: {', '.join(map(shown_partition, missing))}")
    if unread:
        raise BadOption(
            option, None, f"not among the partitions that are read: {', '.join(map(shown_partition, unread))}"
        )


def _given(option: str, partition: int, offset: int, extent: Extent) -> int:
    if offset == EARLIEST_OFFSET:
        return extent.start
    if offset == LATEST_OFFSET:
        return extent.end
    if not extent.start <= offset <= extent.end:
        where = "below the log start" if offset < extent.start else "beyond the end"
        holds = f"the log holds [{extent.start}, {extent.end}); give an offset of these, -2 (earliest) or -1 (latest)"
        raise BadOption(option, None, f"offset {offset} of partition {shown_partition(partition)} is {where}; {holds}")
    return offset


VERSION = 1


class StreamOffsetUnusable(SparkJobError):
    """The checkpoint's source offset is not for this source as it is configured now; `field` says in what."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"source pushrep: the checkpoint's offset can't be used, {field}: {why}")
        self.field = field


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Next offset to read in one partition, of which log, in which startpoint epoch, see the file's map."""

    offset: int
    log_id: str
    epoch: int = 0
    marks_epoch: int = 0


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The end of a batch: a position per partition, and the starts of those that this batch reads first."""

    topic: str
    positions: Mapping[int, StreamPosition]
    starts: Mapping[int, int]

    def to_json(self) -> dict[str, Any]:
        """The dict that Spark writes; keys in ascending partition order, so equal offsets are equal texts."""
        return {
            "version": VERSION,
            "topic": self.topic,
            "partitions": {str(partition): _entry(position) for partition, position in sorted(self.positions.items())},
            "start": {str(partition): offset for partition, offset in sorted(self.starts.items())},
        }

    @classmethod
    def from_json(cls, logged: Mapping[str, Any], topic: str) -> "StreamOffset | None":
        """Read what Spark logged; None for the words of a stream without a batch. Raises StreamOffsetUnusable."""
        if logged.get("version") != VERSION:
            why = f"this source reads {VERSION}; use the release that wrote it, or a new checkpoint"
            raise StreamOffsetUnusable(f"version={logged.get('version')!r}", why)
        if logged.get("topic") != topic:
            why = f"option topic is {topic!r} now; set it back, or use a new checkpoint"
            raise StreamOffsetUnusable(f"topic={logged.get('topic')!r}", why)
        if "partitions" not in logged:
            return None
        positions = {
            int(partition): StreamPosition(entry["offset"], entry["log"], entry["epoch"], entry.get("marks", 0))
            for partition, entry in logged["partitions"].items()
        }
        return cls(topic, positions, {int(partition): offset for partition, offset in logged["start"].items()})


def _entry(position: StreamPosition) -> dict[str, Any]:
    entry = {"epoch": position.epoch, "offset": position.offset, "log": position.log_id}
    return entry | ({"marks": position.marks_epoch} if position.marks_epoch else {})


def initial_words(topic: str, given: Mapping[str, str]) -> dict[str, Any]:
    """The offset of a stream without a batch: the option's words, not what they mean today."""
    option = "startingTimestamp" if "startingTimestamp" in given else "startingOffsets"
    return {"version": VERSION, "topic": topic, option: given.get(option, "earliest")}


logger = logging.getLogger(__name__)

WrittenEnd: TypeAlias = Callable[[int], int | None]


@dataclass(frozen=True, slots=True)
class StreamStep:
    """The ranges that the next batch may read, before any limit; `starts` are those that its end offset carries.

    `begun`: partitions that startpoints move in this batch: to where, and their epochs.
    """

    ranges: Mapping[int, Range]
    starts: Mapping[int, int]
    begun: Mapping[int, StreamPosition] = field(default_factory=dict)


def first_step(resolved: Mapping[int, int], extents: Mapping[int, Extent]) -> StreamStep:
    """The step of a stream without a batch, from what the option's words mean now."""
    return StreamStep(
        {partition: (start, extents[partition].end) for partition, start in resolved.items()}, dict(resolved)
    )


def next_step(
    before: StreamOffset,
    extents: Mapping[int, Extent],
    *,
    written_end: WrittenEnd,
    fail_on_data_loss: bool,
) -> StreamStep:
    """The step after `before`. Raises DataLoss, or with `fail_on_data_loss` off warns and goes on with what is there.

    `written_end(partition)` is the end of its log with what is not stable yet, None if nobody knows it now.
    """
    ranges: dict[int, Range] = {}
    starts: dict[int, int] = {}
    for partition, extent in sorted(extents.items()):
        position = before.positions.get(partition)
        start = 0 if position is None else position.offset
        lost = _lost(before.topic, partition, position, extent, written_end)
        if lost is not None:
            loss, start = lost
            report(loss, fail_on_data_loss=fail_on_data_loss)
            starts[partition] = start
        elif position is None:
            if extent.end == 0:
                continue  # a partition joins with its first record
            starts[partition] = start
        ranges[partition] = (start, max(start, extent.end))
    return StreamStep(ranges, starts)


def with_begun(step: StreamStep, begun: Mapping[int, StreamPosition]) -> StreamStep:
    """The step with these partitions moved, each in the epoch of its startpoint."""
    ranges, starts = dict(step.ranges), dict(step.starts)
    for partition, position in begun.items():
        end = ranges[partition][1] if partition in ranges else position.offset
        ranges[partition] = (position.offset, max(position.offset, end))
        starts[partition] = position.offset
    return StreamStep(ranges, starts, begun)


def until(target: Mapping[int, Extent], now: Mapping[int, Extent]) -> dict[int, Extent]:
    """Where a run stops in each partition: at the end in `target`, but not behind what the log holds now.

    A log that was made anew since is read to its end. The log's start may lie above the end.
    """
    return {
        partition: Extent(now[partition].start, min(then.end, now[partition].end), then.log_id)
        if now[partition].log_id == then.log_id
        else now[partition]
        for partition, then in target.items()
        if partition in now
    }


def check_present(before: StreamOffset, present: set[int], *, fail_on_data_loss: bool) -> None:
    """Report each partition that the stream has read from and that is not there any more."""
    for partition, position in sorted(before.positions.items()):
        if partition not in present:
            why = f"the log is not there any more (read up to {position.offset})"
            loss = DataLoss(before.topic, partition, position.offset, position.offset, why)
            report(loss, fail_on_data_loss=fail_on_data_loss)


def end_of_batch(
    before: StreamOffset | None, topic: str, step: StreamStep, ends: Mapping[int, int], extents: Mapping[int, Extent]
) -> StreamOffset | None:
    """The offset that Spark logs for a batch that reads up to `ends`; None if it would read nothing."""
    still = all(ends[partition] == start for partition, (start, _) in step.ranges.items())
    if before is not None and still and not step.starts:
        return None
    positions = dict(before.positions) if before is not None else {}
    for partition in step.ranges:
        position = step.begun.get(partition, positions.get(partition, StreamPosition(0, "")))
        log_id = extents[partition].log_id
        positions[partition] = replace(position, offset=ends[partition], log_id=log_id)
    return StreamOffset(topic, positions, step.starts)


def ranges_between(before: StreamOffset | None, after: StreamOffset) -> dict[int, Range]:
    """What a logged batch reads, per partition: from its own start, else from where the batch before it ended."""
    ranges = {}
    for partition, position in after.positions.items():
        known = before.positions.get(partition) if before is not None else None
        start = after.starts.get(partition, position.offset if known is None else known.offset)
        if start < position.offset:
            ranges[partition] = (start, position.offset)
    return ranges


def report(loss: DataLoss, *, fail_on_data_loss: bool) -> None:
    """Raise the loss, or only log a warning."""
    if fail_on_data_loss:
        raise loss
    logger.warning("%s; failOnDataLoss is false: going on", loss)


def _lost(
    topic: str, partition: int, position: StreamPosition | None, extent: Extent, written_end: WrittenEnd
) -> tuple[DataLoss, int] | None:
    """What is gone, and where to go on."""
    offset = 0 if position is None else position.offset
    if position is not None and position.log_id != extent.log_id:
        why = f"the log was made anew (read up to {offset} of {position.log_id}, it is {extent.log_id})"
        return DataLoss(topic, partition, offset, offset, why), extent.start
    if offset < extent.start:
        return DataLoss(topic, partition, offset, extent.start, f"the log starts at {extent.start}"), extent.start
    # Above the stable end is not lost yet: after a restart of the machine only a checkpoint knows the end, until
    # the writer is back.
    if offset > extent.end and (end := written_end(partition)) is not None and offset > end:
        return DataLoss(topic, partition, end, offset, f"the log ends at {end}"), extent.end
    return None
