"""destinations.json: the progress of each destination, beside the logs of an outbox.

    {"version": 1, "crc32c": int, "destinations": {topic: {
        "topic_id": uuid | null, "cluster_id": str | null,          whose numbers these are
        "pid_epoch": int,                                           under which PID epoch
        "pid_epochs": [int, ...],                                   earlier ones of the outbox
        "lost": {partition: [first, end]},                          what it acknowledged and has lost
        "rebase": {partition: [log end, [[start, end], ...]]},      an unfinished rebase
        "epochs": [{"pid_epoch": int, "partitions": int | null,     how many of the topic's partitions are used, of the
                    "starts": {partition: offset}}, ...],           records from these offsets on (missing: 0)
        "progress": {partition: [acknowledged, destination offset, crc]},
        "newest": {partition: [offset, its destination offset]},    the last record that is known there, if any
        "appended": {partition: [[offset, ms], ...]},               when it was appended, of those that are behind
        "skipped": [{"partition": int, "offset": int, "reason": str, "at_ms": int, "end": int | null},
                    ...]}}}

`newest` is read again at each start: if another record is there, the topic lost its end, and others wrote on. Offsets
are the log's, except the destination offset: the topic's content from there on is not known yet. `crc` is that of the
log's batch which ends at `acknowledged` or holds it: if the log has another batch there, it was cut and written anew,
and shipping begins at its start. `crc32c` covers the other fields as compact JSON with sorted keys. Written whole and
atomically, under the directory's lock. Format: docs/internals/formats/destinations.md.

OffsetRanges is a set of offsets, kept as ascending half-open ranges: a million consecutive offsets are one pair.

How many partitions of a topic are used is stored by every member of an outbox, too (sink.PartitionCounts), because the
file is on one disk only. Else the next leader, or a directory that lost the file, would fix the number anew, and in a
topic that grew meanwhile one pair would get into two partitions.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from pushrep.env import Filesystem, write_atomic
from pushrep.env.checked_json import checked_json, read_checked_json
from pushrep.kafka.errors import DestinationRefused, KafkaUnreachable
from pushrep.settings import checked


class OffsetRanges:
    """Offsets; made empty or from ranges [start, end) in any order, which may touch or overlap."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(ranges):
            if start < end:
                self.add(start, end)

    def add(self, start: int, end: int) -> None:
        """Add [start, end). Cheap in ascending order; else the ranges after it are moved."""
        assert start < end, "not a range"
        first = bisect_right(self._ends, start - 1)  # the first range that touches it or is after it
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def __contains__(self, offset: object) -> bool:
        return isinstance(offset, int) and self.end_of(offset) != offset

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The ranges, ascending; none touches the next."""
        return iter(list(zip(self._starts, self._ends, strict=True)))

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OffsetRanges) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment] # it can be added to

    def end_of(self, offset: int) -> int:
        """The first offset from this one on that is not in the set."""
        at = bisect_right(self._starts, offset) - 1
        return self._ends[at] if at >= 0 and offset < self._ends[at] else offset

    def meets(self, start: int, end: int) -> bool:
        """Whether any offset of [start, end) is in the set."""
        at = bisect_right(self._ends, start)
        return start < end and at < len(self._starts) and self._starts[at] < end

    def missing(self, start: int, end: int) -> "OffsetRanges":
        """The ranges of [start, end) that are not in the set."""
        found = OffsetRanges()
        for at in range(bisect_right(self._ends, start), bisect_right(self._starts, end)):
            if start < min(self._starts[at], end):
                found.add(start, min(self._starts[at], end))
            start = max(start, self._ends[at])
        if start < end:
            found.add(start, end)
        return found


FILE_NAME = "destinations.json"
VERSION = 1
_FILE_BYTES_MAX = 256 << 20  # a million partitions make about 40 MB
_WAY_ON = "restore it from a copy, or remove it: then the topic is read from its start, and what it lacks is shipped"


class ShippedRecord(NamedTuple):
    """A record of a log, and its offset in its Kafka partition."""

    offset: int
    destination_offset: int


class PartitionProgress(NamedTuple):
    """The progress of one log partition; see the file's map."""

    acknowledged: int
    destination_offset: int
    log_crc: int
    newest: ShippedRecord | None = None


@dataclass(frozen=True, slots=True)
class EpochPartitions:
    """From `starts` on (a partition that is not named: from its beginning) `partitions` of the topic are used.

    partitions None: it is fixed when the topic is next seen.
    """

    pid_epoch: int
    partitions: int | None
    starts: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.partitions is not None and self.partitions < 1:
            raise ValueError(f"{self.partitions} partitions")


class Skip(NamedTuple):
    """Records that an operator has skipped: the one at `offset`, or all of [offset, end)."""

    partition: int
    offset: int
    reason: str
    at_ms: int
    end: int | None = None


class Rebase(NamedTuple):
    """A rebase of one log partition: these ranges of offsets are appended again, in order, from `log_end` on."""

    log_end: int
    again: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippingProgress:
    """The progress of one destination; of a new one empty."""

    topic_id: UUID | None = None
    cluster_id: str | None = None
    pid_epoch: int = 0
    epochs: tuple[EpochPartitions, ...] = ()
    partitions: Mapping[int, PartitionProgress] = field(default_factory=dict)
    skipped: tuple[Skip, ...] = ()
    pid_epochs: tuple[int, ...] = ()
    rebase: Mapping[int, Rebase] = field(default_factory=dict)
    lost: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    appended: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def under(self, pid_epoch: int) -> "ShippingProgress":
        """The same under this PID epoch; the one before is added to `pid_epochs`."""
        if pid_epoch == self.pid_epoch:
            return self
        earlier = {*self.pid_epochs, self.pid_epoch} - {pid_epoch}
        return replace(self, pid_epoch=pid_epoch, pid_epochs=tuple(sorted(earlier)))

    def topic_partition(self, partition: int, offset: int) -> int:
        """The Kafka partition of a log partition's record. Every epoch's partition count has to be fixed."""
        epoch = self._epoch_of(partition, offset)
        assert epoch.partitions is not None, "it is fixed before anything is shipped"
        return partition % epoch.partitions

    def same_since(self, partition: int, offset: int) -> int:
        """The lowest offset from which on, up to `offset`, the log partition's records go to one Kafka partition."""
        wanted = self.topic_partition(partition, offset)
        while (start := self._epoch_of(partition, offset).starts.get(partition, 0)) > 0:
            if self.topic_partition(partition, start - 1) != wanted:
                return start
            offset = start - 1
        return 0

    def _epoch_of(self, partition: int, offset: int) -> EpochPartitions:
        for epoch in reversed(self.epochs):
            if offset >= epoch.starts.get(partition, 0):
                return epoch
        raise AssertionError("the first epoch begins at the beginning")

    def next_boundary(self, partition: int, offset: int) -> int | None:
        """The start of this partition's next epoch, above `offset`; None if there is none."""
        starts = [epoch.starts.get(partition, 0) for epoch in self.epochs]
        return min((start for start in starts if start > offset), default=None)

    def skipped_of(self, partition: int) -> OffsetRanges:
        """The offsets that are not shipped."""
        return OffsetRanges(
            (one.offset, one.end or one.offset + 1) for one in self.skipped if one.partition == partition
        )

    def skipping(self, skips: Iterable[Skip]) -> "ShippingProgress":
        """With these records given up, too; those that are given up already are not listed twice."""
        known: dict[int, OffsetRanges] = {}
        added = []
        for one in skips:
            if one.partition not in known:
                known[one.partition] = self.skipped_of(one.partition)
            for start, end in known[one.partition].missing(one.offset, one.end or one.offset + 1):
                added.append(one._replace(offset=start, end=None if end == start + 1 else end))
        return replace(self, skipped=(*self.skipped, *added))

    def with_topic(self, topic_id: UUID, partitions: int, pid_epoch: int) -> "ShippingProgress":
        """For the present topic: open partition counts are fixed, and another topic's numbers are dropped."""
        epochs = self.epochs or (EpochPartitions(pid_epoch, partitions),)
        is_same = self.topic_id in {None, topic_id}
        fixed = tuple(
            replace(one, partitions=partitions if one.partitions is None else min(one.partitions, partitions))
            for one in epochs
        )
        known = dict(self.partitions) if is_same else {}
        lost = self.lost if is_same else {}
        return replace(self.under(pid_epoch), topic_id=topic_id, epochs=fixed, partitions=known, lost=lost)

    def within(self, ends: Mapping[int, int]) -> "ShippingProgress":
        """The progress for logs with these ends: an epoch that began above a log's end begins there."""
        epochs = tuple(
            replace(one, starts={p: min(at, ends.get(p, at)) for p, at in one.starts.items()}) for one in self.epochs
        )
        return replace(self, epochs=epochs)

    def repartitioned(self, pid_epoch: int, ends: Mapping[int, int]) -> "ShippingProgress":
        """From these ends of the logs on, all partitions are used that the topic has when it is next seen."""
        return replace(self, epochs=(*self.epochs, EpochPartitions(pid_epoch, None, dict(ends))))


def read_progress(filesystem: Filesystem, directory: Path) -> dict[str, ShippingProgress]:
    """The progress by topic; empty without a file. Raises CorruptFile, OSError."""
    return read_checked_json(filesystem, directory / FILE_NAME, _FILE_BYTES_MAX, VERSION, _by_topic, _WAY_ON) or {}


def write_progress(filesystem: Filesystem, directory: Path, progress: Mapping[str, ShippingProgress]) -> None:
    """Replace the file; on disk when this returns. The caller holds the directory's lock. Raises OSError."""
    write_atomic(filesystem, directory / FILE_NAME, [encode_progress(progress)])


def encode_progress(progress: Mapping[str, ShippingProgress]) -> bytes:
    """The file's bytes."""
    found = {topic: _fields_of(one) for topic, one in progress.items()}
    return checked_json({"destinations": found}, VERSION, indent=None)  # what is written each second stands on one line


def _by_topic(fields: Mapping[str, Any]) -> dict[str, ShippingProgress]:
    return {topic: _progress_of(one) for topic, one in fields["destinations"].items()}


def _fields_of(one: ShippingProgress) -> dict[str, Any]:
    newest = {str(partition): at.newest for partition, at in one.partitions.items() if at.newest is not None}
    return {
        "topic_id": None if one.topic_id is None else str(one.topic_id),
        "cluster_id": one.cluster_id,
        "pid_epoch": one.pid_epoch,
        "pid_epochs": list(one.pid_epochs),
        "lost": {str(p): list(at) for p, at in one.lost.items()},
        "rebase": {str(p): [at.log_end, at.again] for p, at in one.rebase.items()},
        "epochs": [
            {
                "pid_epoch": epoch.pid_epoch,
                "partitions": epoch.partitions,
                "starts": {str(p): at for p, at in epoch.starts.items()},
            }
            for epoch in one.epochs
        ],
        "progress": {str(partition): list(at[:3]) for partition, at in one.partitions.items()},
        "newest": newest,
        "appended": {str(p): at for p, at in one.appended.items()},
        "skipped": [skip._asdict() for skip in one.skipped],
    }


def _progress_of(fields: Mapping[str, Any]) -> ShippingProgress:
    topic_id, newest = fields["topic_id"], _by_number(fields["newest"], _whole)
    return checked(
        ShippingProgress(
            topic_id=None if topic_id is None else UUID(topic_id),
            cluster_id=fields["cluster_id"],
            pid_epoch=fields["pid_epoch"],
            epochs=tuple(
                checked(EpochPartitions(one["pid_epoch"], one["partitions"], _by_number(one["starts"])))
                for one in fields["epochs"]
            ),
            partitions={
                p: PartitionProgress(acknowledged, at, log_crc, ShippedRecord(*newest[p]) if p in newest else None)
                for p, (acknowledged, at, log_crc) in _by_number(fields["progress"], _whole).items()
            },
            skipped=tuple(checked(Skip(**one)) for one in fields["skipped"]),
            pid_epochs=tuple(_whole(fields["pid_epochs"])),
            appended={
                p: tuple((int(end), int(at)) for end, at in ends) for p, ends in _by_number(fields["appended"]).items()
            },
            lost={p: (int(first), int(end)) for p, (first, end) in _by_number(fields["lost"]).items()},
            rebase={
                p: Rebase(int(end), tuple((int(a), int(b)) for a, b in again))
                for p, (end, again) in _by_number(fields["rebase"]).items()
            },
        )
    )


def _whole(numbers: Sequence[object]) -> Any:
    """The numbers. Raises TypeError for what is no whole one: there may be a million partitions."""
    if not all(type(one) is int for one in numbers):
        raise TypeError(f"{numbers!r:.100} are no whole numbers")
    return numbers


def _by_number(fields: Mapping[str, Any], made: Callable[[Any], Any] = lambda value: value) -> dict[int, Any]:
    return {int(number): made(value) for number, value in fields.items()}


def fixed_count(progress: ShippingProgress, topic: str, partitions: int, known: tuple[int, ...]) -> int:
    """How many of a topic's `partitions` are used if that is not fixed in the file; known: the members' counts.

    Raises DestinationRefused for several counts, because nothing says at which offsets each began.
    """
    if progress.epochs or not known:
        return partitions
    if len(set(known)) > 1:
        raise DestinationRefused(
            topic,
            "partitions",
            partitions,
            f"the outbox has used {', '.join(map(str, known))} of them in turn, and destinations.json, which knows "
            "from which offsets on, is missing: copy it from the member that shipped last, or ship to a new topic",
        )
    return min(known[0], partitions)


def check_seen(progress: ShippingProgress, topic: str, topic_id: UUID, partitions: int) -> None:
    """Raise KafkaUnreachable if a broker knows fewer partitions than are used: it lags, because topics never shrink."""
    used = max(counts_of(progress), default=0)
    if progress.topic_id == topic_id and used > partitions:
        raise KafkaUnreachable(
            f"the broker that was asked knows {partitions} of topic {topic}'s partitions, {used} are used"
        )


def check_kept(progress: ShippingProgress, topic: str, known: tuple[int, ...]) -> None:
    """Raise DestinationRefused if the members have counts that the file lacks.

    Then another member shipped later, and by the file's counts a pair would get into a second partition.
    """
    counts = counts_of(progress)
    if counts[: len(known)] != known:
        raise DestinationRefused(
            topic,
            "partitions",
            ", ".join(map(str, counts)),
            f"so says destinations.json, but the outbox has used {', '.join(map(str, known))} of them in turn: copy it "
            "from the member that shipped last, or ship to a new topic",
        )


def counts_of(progress: ShippingProgress) -> tuple[int, ...]:
    """The counts for members to store: each one that was used, oldest first."""
    fixed = (epoch.partitions for epoch in progress.epochs if epoch.partitions is not None)
    return tuple(count for count, _ in groupby(fixed))
