"""The in-flight queue of a producer that leaves no hole: records that are not acknowledged, partition by partition.

    enqueue ─▶ | first not acknowledged | ... | newest |     acknowledge: from the left, in order
                   └ fail: the partition takes nothing until `resume`; `outgoing` then begins here

The prefix condition of the replay filter: what each attempt writes for a (PID, source partition) reaches the log in
order and without holes. A second attempt that begins at the first record that is not acknowledged keeps it: what is
written twice so is a replay, which readers drop. Pure.
"""

from collections import defaultdict, deque
from collections.abc import Collection
from itertools import islice
from typing import Generic, Protocol, TypeVar

from filtering import StreamMetadata
from partitioner.source_partition import OffsetNotAbove, PartitionStopped


class Pending(Protocol):
    """One record that was taken: where it goes, and where it came from."""

    @property
    def partition(self) -> int: ...
    @property
    def metadata(self) -> StreamMetadata: ...


Record = TypeVar("Record", bound=Pending)


class InFlightQueue(Generic[Record]):
    """See the file's map. Not thread-safe."""

    def __init__(self) -> None:
        self._pending: defaultdict[int, deque[Record]] = defaultdict(deque)
        self._stopped: dict[int, Exception] = {}
        self._highest: dict[tuple[int, int], int] = {}
        self._count = 0

    def __len__(self) -> int:
        """Records that are not acknowledged."""
        return self._count

    @property
    def stopped(self) -> dict[int, Exception]:
        """The partitions that take nothing, each with the error of its first record."""
        return dict(self._stopped)

    def check(self, partition: int, metadata: StreamMetadata) -> None:
        """Whether a record may be taken. Raises OffsetNotAbove, PartitionStopped."""
        if self._stopped and partition in self._stopped:
            raise self.refusal(partition)
        highest = self._highest.get((metadata.pid, metadata.partition))
        if highest is not None and metadata.offset <= highest:
            raise OffsetNotAbove(metadata, highest)

    def refusal(self, partition: int) -> PartitionStopped:
        """The error that a stopped partition raises."""
        return PartitionStopped(partition, self._pending[partition][0].metadata, self._stopped[partition])

    def enqueue(self, pending: Record) -> None:
        """A record that `check` let through is on its way, behind all others of its partition."""
        metadata = pending.metadata
        self._highest[metadata.pid, metadata.partition] = metadata.offset
        self._pending[pending.partition].append(pending)
        self._count += 1

    def acknowledge(self, pending: Record) -> bool:
        """It is in the log. False if an earlier record may not be: then it stays, and is sent again after that one."""
        waiting = self._pending[pending.partition]
        if not waiting or waiting[0] is not pending:
            return False
        waiting.popleft()
        self._count -= 1
        return True

    def fail(self, pending: Record, error: Exception) -> None:
        """Sending it again would not help: nothing more is taken for its partition until `resume`.

        A failure of a record that is not the first is ignored: it counts once the record is the first and fails again.
        """
        waiting = self._pending[pending.partition]
        if waiting and waiting[0] is pending:
            self._stopped[pending.partition] = error

    def resume(self, partition: int) -> None:
        """Let the partition go on: the cause of its failure is corrected."""
        self._stopped.pop(partition, None)

    def outgoing(self, up_to: Collection[StreamMetadata] = ()) -> list[Record]:
        """The unacknowledged records of the partitions that are not stopped, each partition in order.

        up_to: only these records and those before them in their partition; empty: all.
        """
        found: list[Record] = []
        for partition, waiting in self._pending.items():
            if partition not in self._stopped:
                last = max((n for n, one in enumerate(waiting) if one.metadata in up_to), default=-1) + 1
                found += islice(waiting, last) if up_to else waiting
        return found
