"""What a batch reads: where it starts, how far it goes under a limit, and what is gone. Pure.

    option's words --resolve--> starts --limit--> ends --(split at record batches by the reader)--> tasks

Every refusal names topic-partition and range. Ranges are half-open.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from filtering.errors import shown_partition
from pushrep.log.slots import shown_name
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
    """Share `limit` (records, or bytes) among partitions by what each has: one each, the rest in proportion.

    Proportion keeps partitions abreast in time; the one each keeps a small partition moving beside a large one.
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
    # A record above the stable offset is not there for readers yet: the stream will meet it.
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
