"""Which upstream positions a partition may take next. Pure: knows numbers, no log and no thread.

    pair = (PID, source partition)        positions of a pair: strictly rising from open to close
    after a failure                       the first one that failed comes next, and no later one before it

A reader's filter drops what is not above the pair's highest offset, so a record that passes an older one is the older
one's end. A hole is as bad: once the offset after it is in, the hole can't be filled. Going back is for a restart: a
re-opened outbox takes any position first (a producer that starts from a saved position replays, and the filter drops
the second copies); from there on it rises again.
"""

from collections.abc import Iterable, Sequence

from filtering import StreamMetadata
from pushrep.outbox.errors import MetadataGap, MetadataNotRising, RecordRefused

Pair = tuple[int, int]
_OFFSETS = 1 << 63


class Run:
    """Records `start` to `start + records` of a batch carry source offsets `offset`, `offset + 1`, ... of one pair."""

    __slots__ = ("offset", "partition", "pid", "records", "start")

    def __init__(self, start: int, records: int, metadata: StreamMetadata) -> None:
        self.start, self.records = start, records
        self.pid, self.partition, self.offset = metadata.pid, metadata.partition, metadata.offset

    @property
    def last_offset(self) -> int:
        return self.offset + self.records - 1

    def goes_on(self, start: int, metadata: StreamMetadata) -> bool:
        """Whether a record at `start` with this position is the run's next."""
        return (
            start == self.start + self.records
            and metadata.offset == self.offset + self.records
            and metadata.pid == self.pid
            and metadata.partition == self.partition
        )


class SourceOrder:
    """The positions taken by one partition of an outbox since it was opened."""

    __slots__ = ("_accepted", "_gaps", "_own_pid", "_partition", "_partitions")

    def __init__(self, *, own_pid: int, partition: int, partitions: int) -> None:
        self._own_pid, self._partition, self._partitions = own_pid, partition, partitions
        self._accepted: dict[Pair, int] = {}  # highest offset taken
        self._gaps: dict[Pair, tuple[int, str]] = {}  # first offset that failed and did not come again, and why

    def accept(self, metadata: StreamMetadata, count: int = 1) -> None:
        """Take `metadata` and the `count - 1` offsets after it; raises `RecordRefused` and takes nothing."""
        pair = (metadata.pid, metadata.partition)
        offset = metadata.offset
        last = self._accepted.get(pair)
        if last is None:
            self._check_pair(metadata)
        if self._gaps and (gap := self._gaps.get(pair)) is not None and offset > gap[0]:
            raise MetadataGap(pid=pair[0], partition=pair[1], failed=gap[0], got=offset, reason=gap[1])
        if last is not None and offset <= last:
            raise MetadataNotRising(pid=pair[0], partition=pair[1], last=last, got=offset)
        if offset + count > _OFFSETS:
            raise RecordRefused("metadata", f"{count} source offsets from {offset} on exceed 64 bits")
        self._accepted[pair] = offset + count - 1
        if self._gaps:
            self._gaps.pop(pair, None)

    def accept_all(self, metadata: Sequence[StreamMetadata]) -> None:
        """Take every position in its order, or raise `RecordRefused` and take none."""
        accepted, gaps = dict(self._accepted), dict(self._gaps)
        try:
            for position in metadata:
                self.accept(position)
        except RecordRefused:
            self._accepted, self._gaps = accepted, gaps
            raise

    def failed(self, runs: Iterable[Run], reason: str) -> None:
        """These positions did not reach the log: the first of each pair comes next."""
        for run in runs:
            pair = (run.pid, run.partition)
            if run.offset < self._gaps.get(pair, (_OFFSETS, ""))[0]:
                self._gaps[pair] = (run.offset, reason)
                self._accepted[pair] = run.offset - 1

    def interrupted(self, metadata: StreamMetadata | Sequence[StreamMetadata] | None, start: int, end: int) -> None:
        """Ctrl-C came before the records `start` to `end` were in a batch: their positions come first from now on."""
        if isinstance(metadata, StreamMetadata):
            first = StreamMetadata(metadata.pid, metadata.partition, metadata.offset + start)
            self.failed([Run(0, end - start, first)], "interrupted")
        elif metadata is not None:
            self.failed([Run(0, 1, position) for position in metadata[start:end]], "interrupted")

    def go_on_as(self, own_pid: int) -> None:
        """The outbox has another PID from now on."""
        self._own_pid = own_pid

    def _check_pair(self, metadata: StreamMetadata) -> None:
        if metadata.pid == self._own_pid:
            raise RecordRefused(
                "metadata", f"PID {metadata.pid} is this outbox's own, which numbers records by their log offset"
            )
        if (wanted := metadata.partition % self._partitions) != self._partition:
            raise RecordRefused(
                "metadata",
                f"source partition {metadata.partition} belongs to partition {wanted} of {self._partitions} "
                f"(source partition mod partitions), not to {self._partition}",
            )
