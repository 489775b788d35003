"""One segment, looked at from its first byte: is it what is expected, do its indexes and its neighbours fit?

    what is scanned      what it is compared with              Finding
    bytes                CRC, length, order                    DAMAGE
    epochs               the checkpoint of leader epochs       EPOCH
    the headers          the segment's seal                    SEAL
    the end              the base of the next segment          JOINT
                         where the log was closed              END
    every batch          the entries of both indexes           INDEX

Decides; what it is given (a file, expectations) others have fetched. Ends at the first bad batch: what lies behind it
proves nothing. Torn is what a stopped writer left behind the recovery point: no damage, the next open cuts it off.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from pushrep.env import File
from pushrep.log.indexes import IndexCheck
from pushrep.log.inspection import LogState
from pushrep.log.seals import HeadersCrc, Seal
from pushrep.log.segment_files import segment_path
from pushrep.log.walk import CleanEnd, Damage, ScanEnd, ScanRange, TornTail, scan_runs
from pushrep.records import BatchRun
from pushrep.records.leader_epochs import LeaderEpochs

_TELL_EVERY_BYTES = 8 << 20


class FindingKind(Enum):
    """What was found, by what helps."""

    DAMAGE = "damage"
    """Bytes that are no batch where one was: repair."""
    EPOCH = "epoch"
    """A whole batch whose leader epoch is not the checkpoint's: repair."""
    JOINT = "joint"
    """A segment does not end where the next one begins: repair, or restore the file."""
    END = "end"
    """The log does not end where it was closed: repair."""
    SEAL = "seal"
    """Whole batches in order that are not those that were sealed when the segment was rolled: repair."""
    INDEX = "index"
    """An index entry is not true: rebuild-index."""
    FILE = "file"
    """A small file beside the segments is bad."""


BATCH_KINDS = frozenset({FindingKind.DAMAGE, FindingKind.EPOCH, FindingKind.JOINT, FindingKind.END, FindingKind.SEAL})
"""What concerns the batches themselves; the rest can be made again from them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One damage: in which file, at which byte of it, which offset is the first that is concerned, and why."""

    kind: FindingKind
    file: str
    position: int | None
    offset: int | None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self) | {"kind": self.kind.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What has to be whole and where the log has to end.

    below: every offset below it was on disk, or stands in the page cache of a machine that is up; None: all there is.
    exact_bytes: the newest segment ends with this byte and with the offset `below`; None if that is not known.
    is_live: the writer goes on meanwhile.
    cleaned_offset: a hole is no damage up to here, a broker's cleaner may have made it.
    """

    below: int | None
    exact_bytes: int | None
    is_live: bool
    cleaned_offset: int = 0

    @classmethod
    def of(cls, state: LogState) -> "Expected":
        """From what the directory says."""
        below, exact_bytes = state.recovery_point, None
        if state.is_live and state.published is not None:
            below = state.published.log_end_offset
        elif state.clean is not None:
            below, exact_bytes = state.clean.end_offset, state.clean.last_segment_bytes
        elif state.published is not None and not state.is_copy:  # as the next opening takes it
            below = max(below or 0, state.published.flushed_offset)
        return cls(below=below, exact_bytes=exact_bytes, is_live=state.is_live, cleaned_offset=state.cleaned_offset)

    def accounts_for(self, end_offset: int, next_base: int) -> bool:
        """Whether a segment that ends with the first may be followed by one that begins with the second."""
        return end_offset == next_base or end_offset < next_base <= self.cleaned_offset


class SegmentLook(NamedTuple):
    """One look at one segment: what is bad, where its whole batches end, the epoch they end with, how much it was."""

    findings: tuple[Finding, ...]
    torn: Finding | None
    end_offset: int
    leader_epoch: int
    batches: int
    records: int
    size_bytes: int
    is_sealed: bool = False


class SegmentTask(NamedTuple):
    """A segment to look at: its base and the next one's, the epoch before it, what is expected, the kept epochs, its
    seal, the log's id and partition.
    """

    base_offset: int
    next_base: int | None
    leader_epoch: int
    expected: Expected
    epochs: LeaderEpochs | None
    seal: Seal | None = None
    log_id: UUID | None = None
    partition: int = 0


def look_at_segment(
    file: File, task: SegmentTask, indexes: IndexCheck, on_bytes: Callable[[int], None] | None = None
) -> SegmentLook:
    """Scan one segment and judge its end, its joint to the next one and its indexes."""
    walk = _Walk(task, indexes)
    told = 0
    for _ in walk.runs(file):
        if on_bytes is not None and walk.position - told >= _TELL_EVERY_BYTES:
            on_bytes(walk.position - told)
            told = walk.position
    if on_bytes is not None:
        on_bytes(walk.position - told)
    return walk.look(file.size())


class _Walk:
    """The state of one look."""

    def __init__(self, task: SegmentTask, indexes: IndexCheck) -> None:
        self._task, self._indexes = task, indexes
        self._findings: list[Finding] = []
        self._torn: Finding | None = None
        self._next_offset, self._epoch = task.base_offset, task.leader_epoch
        self._batches = self._records = self.position = 0
        self._end: ScanEnd | None = None
        self._headers, self._is_sealed = HeadersCrc(), False

    def runs(self, file: File) -> Iterator[BatchRun]:
        """All whole batches that are expected; ends early at what lies behind, or at what is wrong with one."""
        task, below = self._task, self._task.expected.below
        limit = below if task.expected.is_live and task.next_base is None else None
        what = ScanRange(
            base_offset=task.base_offset,
            end_offset=task.next_base,
            recovery_point=below or 0,
            leader_epoch=task.leader_epoch,
            cleaned_offset=task.expected.cleaned_offset,
        )
        if limit is not None and limit <= task.base_offset:
            return
        for step in scan_runs(file, what):
            if not isinstance(step, BatchRun):
                self._end = step
                return
            for run in (step,) if self._is_plain(step, limit) else step.singles():
                if reason := self._contradiction(run, limit):
                    self._findings.append(self._at(FindingKind.EPOCH, reason))
                    return
                self._take(run)
                yield run
                if limit is not None and self._next_offset >= limit:
                    return

    def _is_plain(self, run: BatchRun, limit: int | None) -> bool:
        """Whether what holds for its first batch holds for all: one epoch, below the limit."""
        if limit is not None and run.next_offset > limit:
            return False
        epochs = self._task.epochs
        if epochs is None:
            return True
        first, last = (int(run.base_offset[at]) for at in (0, -1))
        one_epoch = bool(run.leader_epoch[0] == run.leader_epoch[-1])
        return one_epoch and epochs.epoch_of(first) == epochs.epoch_of(last)

    def _take(self, run: BatchRun) -> None:
        self._indexes.run(run)
        if self._task.seal is not None:
            self._headers.add_run(run)
        self._batches += len(run)
        self._records += int(run.record_count.sum())
        self.position, self._next_offset, self._epoch = run.end, run.next_offset, int(run.leader_epoch[-1])

    def look(self, size_bytes: int) -> SegmentLook:
        """The verdict, after the last step."""
        task, expected = self._task, self._task.expected
        if self._end is not None and not self._findings:
            self._judge_end(self._end, size_bytes)
            self._judge_seal()
        tolerated = None if expected.exact_bytes is not None or task.next_base is not None else expected.below
        if expected.is_live and expected.below is not None:
            tolerated = expected.below
        if not self._findings and self._torn is None:
            for fault in self._indexes.faults(tolerated):
                name = segment_name(task.base_offset, fault.suffix)
                self._findings.append(Finding(FindingKind.INDEX, name, fault.position, None, fault.reason))
        return SegmentLook(
            tuple(self._findings),
            self._torn,
            self._next_offset,
            self._epoch,
            self._batches,
            self._records,
            self.position,
            self._is_sealed,
        )

    def _judge_seal(self) -> None:
        task = self._task
        if task.seal is None or self._findings or self._torn is not None:
            return
        if task.seal.fits(self.position):
            self._is_sealed = True
            found = self._headers, self._next_offset
            why = task.seal.contradiction(task.log_id, task.partition, task.base_offset, *found)
        else:
            end = self._next_offset if task.next_base is None else task.next_base
            why = task.seal.why_resized(self.position, self._headers.covered, task.base_offset, end)
        if why is not None:
            self._findings.append(Finding(FindingKind.SEAL, segment_name(task.base_offset), 0, task.base_offset, why))

    def _contradiction(self, run: BatchRun, limit: int | None) -> str | None:
        """Why its first batch is not the one that was written here: what its CRC does not cover, others know."""
        if limit is not None and run.next_offset > limit:
            return f"a batch up to offset {run.next_offset} where the writer's log ended at {limit}"
        epochs = self._task.epochs
        if epochs is None:
            return None
        return epochs.contradiction(int(run.base_offset[0]), int(run.leader_epoch[0]))

    def _judge_end(self, end: ScanEnd, size_bytes: int) -> None:
        task, expected = self._task, self._task.expected
        if isinstance(end, Damage) or (isinstance(end, TornTail) and expected.below is None):
            self._findings.append(self._at(FindingKind.DAMAGE, end.reason))
        elif isinstance(end, TornTail):
            kind = FindingKind.END if expected.exact_bytes is not None else FindingKind.DAMAGE
            found = self._at(kind, end.reason)
            if expected.exact_bytes is None and not expected.is_live:
                self._torn = found
            else:
                self._findings.append(found)
        elif task.next_base is not None and not expected.accounts_for(end.next_offset, task.next_base):
            gap = "a gap" if end.next_offset < task.next_base else "an overlap"
            why = f"it ends at {end.next_offset}, {segment_name(task.next_base)} begins at {task.next_base}: {gap}"
            self._findings.append(self._at(FindingKind.JOINT, why))
        elif task.next_base is None:
            self._judge_clean_end(end, size_bytes)

    def _judge_clean_end(self, end: CleanEnd, size_bytes: int) -> None:
        expected = self._task.expected
        if expected.exact_bytes is None:
            return
        if end.next_offset != expected.below:
            self._findings.append(
                self._at(FindingKind.END, f"the log ends at {end.next_offset}, it was closed at {expected.below}")
            )
        elif size_bytes != expected.exact_bytes:
            self._findings.append(
                self._at(FindingKind.END, f"the file has {size_bytes} bytes, it was closed with {expected.exact_bytes}")
            )

    def _at(self, kind: FindingKind, reason: str) -> Finding:
        return Finding(kind, segment_name(self._task.base_offset), self.position, self._next_offset, reason)


def segment_name(base: int, suffix: str = ".log") -> str:
    """The name of a segment's file."""
    return segment_path(Path(), base, suffix).name
