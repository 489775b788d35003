"""Is every byte of a log what it was? A full scan beside a running writer, with indexes and the small files.

    segments    each from its first byte, by the one scan        .log        damage, end
      joints    ends where the next one begins                   names       joint
      indexes   every entry is true                              .index ...  index
    epochs      the batches' are those of the checkpoint         header      epoch
    small files partition.metadata, leader-epoch-checkpoint                  file

What has to be whole, and where the log has to end (`Expected`):
    the writer lives all below the end that it had published when we began no matter what follows
    closed clean         all, to the very byte that the marker names
    stopped otherwise    all below the recovery point                              a torn tail behind it is no damage
    nothing is known     all: nothing says where unsynced writes began

Beside a writer files change: retention removes segments, rolls add them, truncation cuts them. So bad bytes are read
again, with the log's state of that moment, and are damage only if three looks in a row find the same and the writer
still has these offsets.

`look_at_segment` reads one segment from its first byte, and compares it with its indexes and its neighbours:

    what is scanned      what it is compared with              Finding
    bytes                CRC, length, order                    DAMAGE
    epochs               the checkpoint of leader epochs       EPOCH
    the headers          the segment's seal                    SEAL
    the end              the base of the next segment          JOINT
                         where the log was closed              END
    every batch          the entries of both indexes           INDEX

Its caller gives it the file and the expectations. It ends at the first bad batch, because bytes after that prove
nothing. A torn tail, which a stopped writer left above the recovery point, is no damage: the next open cuts it.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Clock, File, Filesystem
from pushrep.log.directory_files import (
    INDEX_SUFFIX,
    LEADER_EPOCHS_CRC_NAME,
    LEADER_EPOCHS_NAME,
    PARTITION_METADATA_NAME,
    SEAL_SUFFIX,
    TIME_INDEX_SUFFIX,
    BadCheckpoint,
    decode_leader_epochs,
    list_segments,
    parse_log_name,
    read_bounded,
    read_leader_epochs,
    read_partition_metadata,
    segment_path,
)
from pushrep.log.errors import CorruptPartitionMetadata
from pushrep.log.indexes import IndexCheck
from pushrep.log.inspection import LogState, checked_log, read_state, segment_facts
from pushrep.log.seals import BadSeal, HeadersCrc, Seal, checked_seal, read_seal
from pushrep.log.walk import CleanEnd, Damage, RunStep, ScanEnd, ScanRange, TornTail, scan_vectorised
from pushrep.records import BatchRun
from pushrep.records.leader_epochs import LeaderEpochs

_REPORT_EVERY_BYTES = 8 << 20


class FindingKind(Enum):
    """The kinds of findings, each with its remedy."""

    DAMAGE = "damage"
    """Bytes that are no batch where one was: repair."""
    EPOCH = "epoch"
    """A whole batch whose leader epoch is not the checkpoint's: repair."""
    JOINT = "joint"
    """A segment does not end where the next one begins: repair, or restore the file."""
    END = "end"
    """The log does not end where it was closed: repair."""
    SEAL = "seal"
    """Whole batches in order, but not those that were sealed when the segment was rolled: repair."""
    HOLE = "hole"
    """Offsets are missing, and a broker's cleaner has compacted the log: it can be consumed from the broker."""
    INDEX = "index"
    """An index entry is not true: repair makes it anew."""
    FILE = "file"
    """A small file beside the segments is bad."""


BATCH_KINDS = frozenset({FindingKind.DAMAGE, FindingKind.EPOCH, FindingKind.JOINT, FindingKind.END, FindingKind.SEAL})
"""Findings about the batches themselves; everything else can be rebuilt from them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One damage: the file, the byte, the first affected offset, and the reason."""

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
    """What has to be whole, and where the log has to end.

    below: every offset below it was on disk, or is in the page cache of a running machine; None: the whole log.
    exact_bytes: the newest segment ends at this byte, with the offset `below`; None if that is unknown. is_live: a
    writer goes on meanwhile. is_compacted: a broker's cleaner made holes in it, which are reported one by one.
    """

    below: int | None
    exact_bytes: int | None
    is_live: bool
    is_compacted: bool = False

    @classmethod
    def of(cls, state: LogState) -> "Expected":
        """The expectations by the directory's files."""
        ends, below, exact_bytes = state.ends(None), state.recovery_point, None
        if ends is not None and state.is_live:
            below = ends.end
        elif ends is not None:  # as the next opening decides
            below = max(below or 0, ends.flushed) if state.clean is None else ends.end
            exact_bytes = None if state.clean is None else state.clean.last_segment_bytes
        return cls(below=below, exact_bytes=exact_bytes, is_live=state.is_live, is_compacted=state.is_compacted)


class SegmentLook(NamedTuple):
    """The result of reading a segment: findings, the end of its whole batches, their last epoch, how much was read."""

    findings: tuple[Finding, ...]
    torn: Finding | None
    end_offset: int
    leader_epoch: int
    batches: int
    records: int
    size_bytes: int
    is_sealed: bool = False


class SegmentTask(NamedTuple):
    """A segment to read: its base and the next one's, the epoch before it, the expectations, the stored epochs, its
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
    reported = 0
    for _ in walk.runs(file):
        if on_bytes is not None and walk.position - reported >= _REPORT_EVERY_BYTES:
            on_bytes(walk.position - reported)
            reported = walk.position
    if on_bytes is not None:
        on_bytes(walk.position - reported)
    return walk.look(file.size())


class _Walk:
    """The state of reading one segment."""

    def __init__(self, task: SegmentTask, indexes: IndexCheck) -> None:
        self._task, self._indexes = task, indexes
        self._findings: list[Finding] = []
        self._torn: Finding | None = None
        self._next_offset, self._epoch = task.base_offset, task.leader_epoch
        self._batches = self._records = self.position = 0
        self._end: ScanEnd | None = None
        self._headers, self._is_sealed = HeadersCrc(), False

    def runs(self, file: File) -> Iterator[BatchRun]:
        """The expected whole batches; ends before a batch that is not expected or is wrong."""
        task, below = self._task, self._task.expected.below
        limit = below if task.expected.is_live and task.next_base is None else None
        what = ScanRange(
            base_offset=task.base_offset,
            end_offset=task.next_base,
            recovery_point=below or 0,
            leader_epoch=task.leader_epoch,
            may_lack_records=task.expected.is_compacted,
        )
        if limit is not None and limit <= task.base_offset:
            return
        for step in self._steps(file, what):
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

    def _steps(self, file: File, what: ScanRange) -> Iterator[RunStep]:
        """The scan; in a compacted log it goes on behind each hole, which is a finding."""
        while True:
            hole = None
            for step in scan_vectorised(file, what):
                if self._task.expected.is_compacted and isinstance(step, Damage) and step.goes_on_at is not None:
                    hole = step
                    break
                yield step
            if hole is None or hole.goes_on_at is None:
                return
            self._find_hole(hole.goes_on_at)
            what = what._replace(position=hole.position, next_offset=hole.goes_on_at, leader_epoch=self._epoch)

    def _find_hole(self, end: int) -> None:
        why = f"the offsets up to {end} are missing, as a broker's cleaner leaves it"
        self._findings.append(self._at(FindingKind.HOLE, why))

    def _is_plain(self, run: BatchRun, limit: int | None) -> bool:
        """Whether checking its first batch is enough: all of one epoch, and below the limit."""
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
        """The result, after the last step."""
        task, expected = self._task, self._task.expected
        if self._end is not None and not self._damage:
            self._judge_end(self._end, size_bytes)
            self._judge_seal()
        tolerated = None if expected.exact_bytes is not None or task.next_base is not None else expected.below
        if expected.is_live and expected.below is not None:
            tolerated = expected.below
        if not self._damage and self._torn is None:
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

    @property
    def _damage(self) -> list[Finding]:
        return [finding for finding in self._findings if finding.kind is not FindingKind.HOLE]

    def _judge_seal(self) -> None:
        task = self._task
        if task.seal is None or self._findings or self._torn is not None:
            return
        self._is_sealed = True
        found = (task.base_offset, self._next_offset, self.position)
        why = task.seal.contradiction(task.log_id, task.partition, *found, self._headers)
        if why is not None:
            self._findings.append(Finding(FindingKind.SEAL, segment_name(task.base_offset), 0, task.base_offset, why))

    def _contradiction(self, run: BatchRun, limit: int | None) -> str | None:
        """Why the run's first batch is not the written one, by the fields that no CRC covers; None if it is."""
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
        elif task.next_base is not None and expected.is_compacted and end.next_offset < task.next_base:
            self._find_hole(task.next_base)
        elif task.next_base is not None and end.next_offset != task.next_base:
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


_INDEX_BYTES_MAX = 64 << 20
_LOOKS = 3


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """What a verification saw. `findings` is empty if all is well; a torn tail is none."""

    log: str
    log_start_offset: int
    verified_to: int
    segments: int = 0
    sealed: int = 0
    batches: int = 0
    records: int = 0
    bytes_read: int = 0
    findings: list[Finding] = field(default_factory=list)
    torn: Finding | None = None
    writer_pid: int | None = None
    seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether there is no damage."""
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        values = asdict(self)
        values["findings"] = [finding.as_dict() for finding in self.findings]
        values["torn"] = self.torn.as_dict() if self.torn is not None else None
        return values | {"is_whole": self.is_whole}


class Verifier:
    """Verifies one log; use once: `run`. Never writes, takes no lock."""

    def __init__(
        self,
        log: Path,
        *,
        filesystem: Filesystem = REAL_FILESYSTEM,
        clock: Clock = SYSTEM_CLOCK,
        on_bytes: Callable[[int], None] | None = None,
        state: LogState | None = None,
    ) -> None:
        """`on_bytes` is called every 8 MiB or so with the bytes that were read since.

        `state`: what is known of the log, from a caller that holds its lock; None: ask the directory. Raises NotALog.
        """
        self._log, self._filesystem, self._clock = checked_log(log, filesystem), filesystem, clock
        self._on_bytes = on_bytes
        self._state = read_state(self._log, filesystem) if state is None else state
        self._first = Expected.of(self._state)

    def run(self) -> VerifyReport:
        """Verify everything. Raises OSError if the disk can't be read."""
        began_ms = self._clock.monotonic_ms()
        bases = list_segments(self._filesystem, self._log)
        start = self._start(bases)
        report = VerifyReport(log=self._log.name, log_start_offset=start, verified_to=start)
        report.writer_pid = self._state.writer_pid if self._state.is_live else None
        report.findings += small_files(self._log, self._filesystem)
        report.findings += self._first_missing(bases, start)
        epoch, base = -1, bases[0] if bases else None
        while base is not None:
            look = self._settled_look(base, epoch)
            if look is not None:
                _add(report, look)
                epoch = look.leader_epoch
            base = next((b for b in list_segments(self._filesystem, self._log) if b > base), None)
            if look is not None and self._first.is_live and look.end_offset >= (self._first.below or 0):
                break
        report.seconds = (self._clock.monotonic_ms() - began_ms) / 1000
        return report

    def _start(self, bases: list[int]) -> int:
        if self._state.is_live and self._state.published is not None:
            return self._state.published.log_start_offset
        remembered = self._state.log_start_offset
        return remembered if remembered is not None else (bases[0] if bases else 0)

    def _first_missing(self, bases: list[int], start: int) -> list[Finding]:
        if bases and bases[0] > start:
            if self._first.is_live and bases[0] <= self._start_now():
                return []  # retention removed segments meanwhile
            why = f"the log starts at {start}, its first file is missing; {segment_name(bases[0])} is the first"
            return [Finding(FindingKind.JOINT, segment_name(start), None, start, why)]
        if not bases and (self._first.below or 0) > start:
            why = f"no segment is there, but offsets up to {self._first.below} were"
            return [Finding(FindingKind.JOINT, segment_name(start), None, start, why)]
        return []

    def _start_now(self) -> int:
        published = read_state(self._log, self._filesystem).published
        return published.log_start_offset if published is not None else 0

    def _settled_look(self, base: int, epoch: int) -> SegmentLook | None:
        """Read a segment until the result is final; None if retention or a cut removed it."""
        same, before = 0, None
        while True:
            # The published end is a batch's end only until the log is cut, so the second look takes the present one.
            expected = self._expected_now() if before is None else self._known_now()
            look = self._look(base, epoch, expected)
            if look is None or not look.findings or not expected.is_live:
                return look
            claimed = self._known_now()
            holds = all(f.offset is None or claimed.below is None or f.offset < claimed.below for f in look.findings)
            same = same + 1 if holds and look.findings == before else int(holds)
            if same >= _LOOKS:
                return look
            before = look.findings

    def _expected_now(self) -> Expected:
        """The present expectations, without batches newer than at the beginning; less if the writer cut its log."""
        now = self._known_now()
        if not now.is_live or now.below is None or self._first.below is None:
            return now
        return replace(now, below=min(now.below, self._first.below))

    def _known_now(self) -> Expected:
        if not self._first.is_live:
            return self._first
        return Expected.of(read_state(self._log, self._filesystem))

    def _look(self, base: int, epoch: int, expected: Expected) -> SegmentLook | None:
        following = [b for b in list_segments(self._filesystem, self._log) if b > base]
        try:
            file = self._filesystem.open(segment_path(self._log, base), writable=False)
        except FileNotFoundError:
            return None  # if it should be there, the segment before gets a finding
        try:
            epochs = read_leader_epochs(self._log, self._filesystem)
            seal = read_seal(self._filesystem, self._log, base) if following else None
            next_base, (_, partition) = following[0] if following else None, parse_log_name(self._log.name)
            return look_at_segment(
                file,
                SegmentTask(base, next_base, epoch, expected, epochs, seal, self._log_id(), partition),
                self._index_check(base, is_newest=not following),
                self._on_bytes,
            )
        finally:
            file.close()

    def _log_id(self) -> UUID | None:
        try:
            return read_partition_metadata(self._log, self._filesystem)
        except CorruptPartitionMetadata:
            return None  # the file itself gets a finding

    def _index_check(self, base: int, *, is_newest: bool) -> IndexCheck:
        """The newest segment's index files may be missing yet, and beside a writer they may end inside an entry."""
        contents: list[bytes | None] = []
        for suffix, entry_bytes in ((INDEX_SUFFIX, 8), (TIME_INDEX_SUFFIX, 12)):
            data = _read(segment_path(self._log, base, suffix), self._filesystem)
            if data is not None and is_newest and self._first.is_live:
                data = data[: len(data) // entry_bytes * entry_bytes]
            contents.append(data)
        return IndexCheck(base, contents[0], contents[1])


def verify_log(
    log: Path,
    *,
    filesystem: Filesystem = REAL_FILESYSTEM,
    clock: Clock = SYSTEM_CLOCK,
    on_bytes: Callable[[int], None] | None = None,
    state: LogState | None = None,
) -> VerifyReport:
    """Verify the log at `log`, beside its writer or without one; see Verifier. Raises NotALog, OSError."""
    return Verifier(log, filesystem=filesystem, clock=clock, on_bytes=on_bytes, state=state).run()


def bytes_to_verify(log: Path, filesystem: Filesystem = REAL_FILESYSTEM) -> int:
    """The bytes to read, for a progress bar."""
    return sum(segment.size_bytes for segment in segment_facts(log, filesystem))


def small_files(log: Path, filesystem: Filesystem = REAL_FILESYSTEM) -> list[Finding]:
    """The findings in the files beside the segments. A file of Kafka's own has no CRC; its form is checked."""
    found = []
    try:
        read_partition_metadata(log, filesystem)
    except CorruptPartitionMetadata as error:
        found.append(Finding(FindingKind.FILE, PARTITION_METADATA_NAME, None, None, error.why))
    for base in list_segments(filesystem, log)[:-1]:
        try:
            checked_seal(filesystem, log, base)
        except BadSeal as error:
            found.append(Finding(FindingKind.FILE, segment_name(base, SEAL_SUFFIX), None, None, str(error)))
    if (why := _bad_epochs(log, filesystem)) is not None:
        found.append(Finding(FindingKind.FILE, LEADER_EPOCHS_NAME, None, None, why))
    return found


def _bad_epochs(log: Path, filesystem: Filesystem) -> str | None:
    try:
        data = read_bounded(log / LEADER_EPOCHS_NAME, filesystem)
        if data is None:
            return None
        decode_leader_epochs(data)
    except BadCheckpoint as error:
        return str(error)
    if filesystem.exists(log / LEADER_EPOCHS_CRC_NAME) and read_leader_epochs(log, filesystem) is None:
        return f"its CRC is not in {LEADER_EPOCHS_CRC_NAME}"
    return None


def _add(report: VerifyReport, look: SegmentLook) -> None:
    report.segments += 1
    report.sealed += look.is_sealed
    report.batches += look.batches
    report.records += look.records
    report.bytes_read += look.size_bytes
    if not any(finding.kind in BATCH_KINDS for finding in report.findings):
        report.verified_to = look.end_offset
    report.findings += look.findings
    report.torn = report.torn or look.torn


def _read(path: Path, filesystem: Filesystem) -> bytes | None:
    """An index file's bytes; None if it is not there, or was removed meanwhile."""
    try:
        file = filesystem.open(path, writable=False)
    except FileNotFoundError:
        return None
    try:
        return file.read_at(min(file.size(), _INDEX_BYTES_MAX), 0)
    finally:
        file.close()
