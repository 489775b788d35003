"""What a consumer knows of the partitions that it reads: next offset and marks, always of the same moment.

    assign (loaded) ─▶ admit, batch by batch ─▶ due: (offset, marks) of each partition that moved ─▶ committed
         seek ─▶ the marks of that very position if it was just loaded, else none            drop on revocation
         move ─▶ a startpoint's: the marks go along or begin anew; due once records were read behind it

One filter for each topic, so that a pair in two partitions is noticed.

Pure: knows no client and no clock.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from filtering.carrier import CarrierCheck
from filtering.errors import BadFilterSetting
from filtering.marks import HighwaterMarks
from filtering.replay_filter import FilterCounts, ReplayFilter, check_ttl
from filtering.stream_metadata import StreamMetadata

_LOG = logging.getLogger(__name__)
TopicPartition = tuple[str, int]
NO_MARKS = HighwaterMarks()
Spans = Mapping[int, tuple[int, int]]
"""Of each partition in a batch the offsets of its first and its last record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterSettings:
    """As ReplayFilter takes them. `retention_ms`: what `ttl_s` may not be below. `carrier`: "key", "header", or a text
    for the caller's own function. Raises BadFilterSetting.
    """

    window: int = 0
    only_pids: frozenset[int] | None = None
    ttl_s: float | None = None
    retention_ms: int | None = None
    carrier: str = "key"

    def __post_init__(self) -> None:
        check_ttl(self.ttl_s, self.retention_ms)


class PendingCommit(NamedTuple):
    """One partition that moved since it was committed: the next offset to read, and the marks as of it."""

    topic: str
    partition: int
    offset: int
    marks: HighwaterMarks
    startpoint: int
    has_new_startpoint: bool


@dataclass(slots=True)
class _Partition:
    offset: int | None  # None: the client's reset policy decides
    began: int | None  # where this run began, once that is known
    committed: int | None
    startpoint: int
    has_new_startpoint: bool


class Assignment:
    """See the file's map. Not thread-safe."""

    def __init__(
        self, settings: FilterSettings, header_of: Callable[[Any], bytes | None] = lambda _record: None
    ) -> None:
        """header_of: what a record of the client carries in the header."""
        self._settings, self._header_of = settings, header_of
        self._partitions: dict[TopicPartition, _Partition] = {}
        self._filters: dict[str, ReplayFilter] = {}
        self._counts: dict[str, FilterCounts] = {}
        self._checks: dict[str, CarrierCheck] = {}

    def __contains__(self, partition: TopicPartition) -> bool:
        return partition in self._partitions

    def __iter__(self) -> Iterator[TopicPartition]:
        return iter(self._partitions)

    @property
    def topics(self) -> Collection[str]:
        """Every topic of which a partition was ever assigned."""
        return self._filters.keys()

    @property
    def counts(self) -> Mapping[str, FilterCounts]:
        """By topic, since the consumer was made; `pairs` are those known now."""
        return {topic: one.counts.added_to(self._counts.get(topic)) for topic, one in self._filters.items()}

    def assign(
        self,
        partition: TopicPartition,
        offset: int | None,
        marks: HighwaterMarks = NO_MARKS,
        *,
        startpoint: int = 0,
        is_new_startpoint: bool = False,
    ) -> None:
        """Begin (again) at a position with its marks. Raises PairSplit."""
        topic, number = partition
        others = self._without(topic, {number})
        self._set(topic, others.merge(marks))
        self._partitions[partition] = _Partition(offset, offset, offset, startpoint, is_new_startpoint)

    def move(self, partition: TopicPartition, offset: int, startpoint: int, *, reset_marks: bool) -> None:
        """A startpoint sends it elsewhere while it is read; with its marks, or with none. Raises BadFilterSetting."""
        self._of(partition)
        marks = NO_MARKS if reset_marks else _only(self._filters[partition[0]].marks(), {partition[1]})
        self.assign(partition, offset, marks, startpoint=startpoint, is_new_startpoint=True)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Continue elsewhere without marks, under the same startpoint. Raises BadFilterSetting."""
        state = self._of(partition)
        self.assign(partition, offset, startpoint=state.startpoint, is_new_startpoint=state.has_new_startpoint)

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget these; nothing of them is committed any more."""
        gone: dict[str, set[int]] = {}
        for partition in partitions:
            if self._partitions.pop(partition, None) is not None:
                gone.setdefault(partition[0], set()).add(partition[1])
        for topic, numbers in gone.items():
            self._set(topic, self._without(topic, numbers))

    def admit(self, partition: TopicPartition, offset: int, key: bytes | None, record: Any = None) -> bool:
        """Whether the record at `offset` passes; the position is behind it then, in either case.

        Raises PairSplit, WrongCarrier: then the position is before it, and this run began no later than there.
        """
        state = self._of(partition)
        if state.began is None:
            state.began = offset
        check = self._checks[partition[0]]
        if not check.is_proven:
            check.look(1, StreamMetadata.try_unpack(key) is None, lambda _: self._in_header([record]))
        passes = self._filters[partition[0]].admit(key, partition[1])
        state.offset = offset + 1
        return passes

    def admit_columns(
        self,
        topic: str,
        keys: bytes | Sequence[bytes | None],
        partitions: int | npt.NDArray[Any],
        spans: Spans,
        records: Sequence[Any] = (),
    ) -> npt.NDArray[np.bool_]:
        """The same for many records of one topic in the order in which they were read.

        keys: as ReplayFilter.admit_batch takes them. partitions: one for all, or one for each. Raises as `admit`.
        """
        for number, (first, _) in spans.items():
            self.met((topic, number), first)
        own = self._filters[topic]
        before = own.unkeyed
        passes = own.admit_batch(keys, partitions)
        self._checks[topic].look(len(passes), own.unkeyed - before, lambda first: self._in_header(records[:first]))
        for number, (_, last) in spans.items():
            self._partitions[topic, number].offset = last + 1
        return passes

    def met(self, partition: TopicPartition, offset: int) -> None:
        """The client handed over its record at `offset`, which may never be admitted. Raises BadFilterSetting."""
        state = self._of(partition)
        if state.began is None:
            state.began = offset

    def position(self, partition: TopicPartition) -> int | None:
        """The next offset to read; None while the client's reset policy decides. Raises BadFilterSetting."""
        return self._of(partition).offset

    def began(self, partition: TopicPartition) -> int | None:
        """Where this run began to read; None while that is not known. Raises BadFilterSetting."""
        return self._of(partition).began

    def startpoint(self, partition: TopicPartition) -> int:
        """The number of the startpoint that this run began with; 0 for none. Raises BadFilterSetting."""
        return self._of(partition).startpoint

    def due(self, now_ms: int) -> list[PendingCommit]:
        """What a commit would say now, of each partition that moved since the last one.

        A start alone consumes no startpoint: a commit is due once a record behind it was read.
        """
        moved = [
            (partition, state, state.offset)
            for partition, state in self._partitions.items()
            if state.offset is not None
            and state.offset != (state.began if state.has_new_startpoint else state.committed)
        ]
        marks = {topic: self._filters[topic].marks(now_ms) for topic in {partition[0] for partition, _, _ in moved}}
        return [
            PendingCommit(*partition, offset, _only(marks[partition[0]], {partition[1]}), state.startpoint,
                state.has_new_startpoint)
            for partition, state, offset in moved
        ]  # fmt: skip

    def committed(self, done: Iterable[PendingCommit]) -> None:
        """These are stored. A partition that was moved meanwhile has nothing committed at its new position yet."""
        for one in done:
            state = self._partitions.get((one.topic, one.partition))
            if state is not None and state.startpoint == one.startpoint:
                state.committed, state.has_new_startpoint = one.offset, False

    def _of(self, partition: TopicPartition) -> _Partition:
        state = self._partitions.get(partition)
        if state is None:
            raise BadFilterSetting("partition", "{}-{}".format(*partition), "one that is assigned to this consumer")
        return state

    def _in_header(self, records: Sequence[Any]) -> int:
        return sum(StreamMetadata.try_unpack(self._header_of(record)) is not None for record in records)

    def _without(self, topic: str, numbers: set[int]) -> HighwaterMarks:
        known = self._filters.get(topic)
        return NO_MARKS if known is None else _only(known.marks(), numbers, keep=False)

    def _set(self, topic: str, marks: HighwaterMarks) -> None:
        """The topic's filter begins anew with these marks; what it counted stays counted."""
        settings = self._settings
        made = ReplayFilter(marks, window=settings.window, only_pids=settings.only_pids, ttl_s=settings.ttl_s)
        if (old := self._filters.get(topic)) is not None:
            self._counts[topic] = old.counts.added_to(self._counts.get(topic))
        else:
            self._checks[topic] = CarrierCheck(_LOG, topic, settings.carrier)
        if marks:
            self._checks[topic].prove()
        self._filters[topic] = made


def _only(marks: HighwaterMarks, numbers: set[int], *, keep: bool = True) -> HighwaterMarks:
    """The marks of the pairs that live in these partitions; with `keep` False, of all others."""
    columns = marks.to_columns()
    inside = np.isin(columns.destination_partitions, list(numbers))
    return marks.without_rows(np.flatnonzero(~inside if keep else inside))
