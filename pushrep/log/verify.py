"""Is every byte of a log what it was? A full scan beside a running writer, with indexes and the small files.

    segments    each from its first byte, by the one scan        .log        damage, end
      joints    ends where the next one begins                   names       joint
      indexes   every entry is true                              .index ...  index
    epochs      the batches' are those of the checkpoint         header      damage
    small files partition.metadata, leader-epoch-checkpoint                  file

What has to be whole, and where the log has to end (`Expected`):
    the writer lives all below the end that it had published when we began no matter what follows
    closed clean         all, to the very byte that the marker names
    stopped otherwise    all below the recovery point                              a torn tail behind it is no damage
    nothing is known     all: nothing says where unsynced writes began

Beside a writer files change: retention removes segments, rolls add them, truncation cuts them. So bad bytes are read
again, with the log's state of that moment, and are damage only if three looks in a row find the same and the writer
still has these offsets.

`SegmentLook` reads one segment from its first byte, and compares it with its indexes and its neighbours:

    what is scanned      what it is compared with              Finding
    bytes                CRC, length, order                    DAMAGE
    epochs               the checkpoint of leader epochs       DAMAGE
    the headers          the segment's seal                    SEAL
    the end              the base of the next segment          JOINT
                         where the log was closed              END
    every batch          the entries of both indexes           INDEX

Its caller gives it the file and the expectations. It ends at the first bad batch, because bytes after that prove
nothing. A torn tail, which a stopped writer left above the recovery point, is no damage: the next open cuts it.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Clock, File, Filesystem, read_whole
from pushrep.log.directory_files import (
    INDEX_SUFFIX,
    LEADER_EPOCHS_CRC_NAME,
    LEADER_EPOCHS_NAME,
    PARTITION_METADATA_NAME,
    SEAL_SUFFIX,
    TIME_INDEX_SUFFIX,
    BadLogFile,
    decode_leader_epochs,
    list_segments,
    read_bounded,
    read_leader_epochs,
    read_partition_metadata,
    segment_path,
)
from pushrep.log.errors import CorruptPartitionMetadata
from pushrep.log.indexes import IndexCheck
from pushrep.log.inspection import LogState, checked_log, read_state, segment_facts
from pushrep.log.seals import HeadersCrc, Seal, checked_seal, read_seal
from pushrep.log.walk import (
    CleanEnd,
    Damage,
    ScanEnd,
    ScanRange,
    TornTail,
    scan_over_holes,
    scan_vectorised,
)
from pushrep.records import BatchRun
from pushrep.records.leader_epochs import LeaderEpochs

_REPORT_EVERY_BYTES = 8 << 20


class FindingKind(Enum):
    """The kinds of findings, each with its remedy."""

    DAMAGE = "damage"
    """Bytes that are no batch where one was: repair."""
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


BATCH_KINDS = frozenset({FindingKind.DAMAGE, FindingKind.JOINT, FindingKind.END, FindingKind.SEAL})
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


class SegmentLook:
    """The result of reading a segment: findings, the end of its whole batches, their last epoch, how much was read."""

    def __init__(  # noqa: PLR0913 - what is known of a segment
        self,
        log: Path,
        base_offset: int,
        next_base: int | None,
        *,
        leader_epoch: int,
        expected: Expected,
        epochs: LeaderEpochs | None,
        seal: Seal | None,
        log_id: UUID | None,
        indexes: IndexCheck,
    ) -> None:
        """leader_epoch: the one before it. epochs: the stored list."""
        self._log, self._log_id, self._base_offset, self._next_base = log, log_id, base_offset, next_base
        self._expected, self._epochs, self._seal, self._indexes = expected, epochs, seal, indexes
        self.findings: list[Finding] = []
        self.torn: Finding | None = None
        self.end_offset, self.leader_epoch = base_offset, leader_epoch
        self.batches = self.records = self.position = 0
        self.is_sealed = False
        self._end: ScanEnd | None = None
        self._headers = HeadersCrc()

    def read(self, file: File, on_bytes: Callable[[int], None]) -> "SegmentLook":
        """Scan the segment, and judge its end, its joint to the next one and its indexes."""
        reported = 0
        for run in self._runs(file):
            self._take(run)
            if self.position - reported >= _REPORT_EVERY_BYTES:
                on_bytes(self.position - reported)
                reported = self.position
        on_bytes(self.position - reported)
        self._judge(file.size())
        return self

    def _runs(self, file: File) -> Iterator[BatchRun]:
        """The expected whole batches, up to the first that is wrong; beside a writer to the end that it published."""
        expected = self._expected
        limit = expected.below if expected.is_live and self._next_base is None else None
        what = ScanRange(
            base_offset=self._base_offset,
            end_offset=self._next_base,
            recovery_point=expected.below or 0,
            leader_epoch=self.leader_epoch,
            closed_at=limit,
            epochs=self._epochs,
            may_lack_records=expected.is_compacted,
        )
        steps = scan_over_holes(file, what, scan_vectorised) if expected.is_compacted else scan_vectorised(file, what)
        while limit is None or self.end_offset < limit:
            step = next(steps)
            if isinstance(step, BatchRun):
                yield step
            elif expected.is_compacted and isinstance(step, Damage) and step.goes_on_at is not None:
                self._find_hole(step.goes_on_at)
            else:
                self._end = step
                return

    def _find_hole(self, end: int) -> None:
        why = f"the offsets up to {end} are missing, as a broker's cleaner leaves it"
        self.findings.append(self._at(FindingKind.HOLE, why))

    def _take(self, run: BatchRun) -> None:
        self._indexes.run(run)
        if self._seal is not None:
            self._headers.add_run(run)
        self.batches += len(run)
        self.records += int(run.record_count.sum())
        self.position, self.end_offset, self.leader_epoch = run.end, run.next_offset, int(run.leader_epoch[-1])

    def _judge(self, size_bytes: int) -> None:
        expected = self._expected
        if self._end is not None:
            self._judge_end(self._end, size_bytes)
            self._judge_seal()
        tolerated = None if expected.exact_bytes is not None or self._next_base is not None else expected.below
        if expected.is_live and expected.below is not None:
            tolerated = expected.below
        if self.torn is None and all(finding.kind is FindingKind.HOLE for finding in self.findings):
            for fault in self._indexes.faults(tolerated):
                name = segment_name(self._base_offset, fault.suffix)
                self.findings.append(Finding(FindingKind.INDEX, name, fault.position, None, fault.reason))

    def _judge_seal(self) -> None:
        base_offset, seal = self._base_offset, self._seal
        if seal is None or self.findings or self.torn is not None:
            return
        self.is_sealed = True
        found = (base_offset, self.end_offset, self.position)
        why = seal.contradiction(self._headers.seal(self._log_id or seal.log_id, self._log, *found))
        if why is not None:
            self.findings.append(Finding(FindingKind.SEAL, segment_name(base_offset), 0, base_offset, why))

    def _judge_end(self, end: ScanEnd, size_bytes: int) -> None:
        expected, next_base = self._expected, self._next_base
        if isinstance(end, Damage) or (isinstance(end, TornTail) and expected.below is None):
            self.findings.append(self._at(FindingKind.DAMAGE, end.reason))
        elif isinstance(end, TornTail):
            kind = FindingKind.END if expected.exact_bytes is not None else FindingKind.DAMAGE
            found = self._at(kind, end.reason)
            if expected.exact_bytes is None and not expected.is_live:
                self.torn = found
            else:
                self.findings.append(found)
        elif next_base is not None and expected.is_compacted and end.next_offset < next_base:
            self._find_hole(next_base)
        elif next_base is not None and end.next_offset != next_base:
            gap = "a gap" if end.next_offset < next_base else "an overlap"
            why = f"it ends at {end.next_offset}, {segment_name(next_base)} begins at {next_base}: {gap}"
            self.findings.append(self._at(FindingKind.JOINT, why))
        elif next_base is None:
            self._judge_clean_end(end, size_bytes)

    def _judge_clean_end(self, end: CleanEnd, size_bytes: int) -> None:
        expected = self._expected
        if expected.exact_bytes is None:
            return
        if end.next_offset != expected.below:
            self.findings.append(
                self._at(FindingKind.END, f"the log ends at {end.next_offset}, it was closed at {expected.below}")
            )
        elif size_bytes != expected.exact_bytes:
            self.findings.append(
                self._at(FindingKind.END, f"the file has {size_bytes} bytes, it was closed with {expected.exact_bytes}")
            )

    def _at(self, kind: FindingKind, reason: str) -> Finding:
        return Finding(kind, segment_name(self._base_offset), self.position, self.end_offset, reason)


def known_log_id(log: Path, filesystem: Filesystem) -> UUID | None:
    """The log's id; None if it has none, or the file is damaged, which is a finding of its own."""
    try:
        return read_partition_metadata(log, filesystem)
    except CorruptPartitionMetadata:
        return None


def segment_name(base: int, suffix: str = ".log") -> str:
    """The name of a segment's file."""
    return segment_path(Path(), base, suffix).name


_INDEX_BYTES_MAX = 512 << 20
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
        on_bytes: Callable[[int], None] = lambda _bytes: None,
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
        with closing(file):
            look = SegmentLook(
                self._log,
                base,
                following[0] if following else None,
                leader_epoch=epoch,
                expected=expected,
                epochs=read_leader_epochs(self._log, self._filesystem),
                seal=read_seal(self._filesystem, self._log, base) if following else None,
                log_id=known_log_id(self._log, self._filesystem),
                indexes=self._index_check(base, is_newest=not following),
            )
            return look.read(file, self._on_bytes)

    def _index_check(self, base: int, *, is_newest: bool) -> IndexCheck:
        """The newest segment's index files may be missing yet, and beside a writer they may end inside an entry."""
        contents: list[bytes | None] = []
        for suffix, entry_bytes in ((INDEX_SUFFIX, 8), (TIME_INDEX_SUFFIX, 12)):
            data = read_whole(self._filesystem, segment_path(self._log, base, suffix), _INDEX_BYTES_MAX)
            if data is not None and is_newest and self._first.is_live:
                data = data[: len(data) // entry_bytes * entry_bytes]
            contents.append(data)
        return IndexCheck(base, contents[0], contents[1])


def verify_log(
    log: Path,
    *,
    filesystem: Filesystem = REAL_FILESYSTEM,
    clock: Clock = SYSTEM_CLOCK,
    on_bytes: Callable[[int], None] = lambda _bytes: None,
    state: LogState | None = None,
) -> VerifyReport:
    """Verify the log at `log`, beside its writer or without one; see Verifier. Raises NotALog, OSError."""
    return Verifier(log, filesystem=filesystem, clock=clock, on_bytes=on_bytes, state=state).run()


def bytes_to_verify(log: Path) -> int:
    """The bytes to read, for a progress bar."""
    return sum(segment.size_bytes for segment in segment_facts(log))


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
        except BadLogFile as error:
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
    except BadLogFile as error:
        return str(error)
    if filesystem.exists(log / LEADER_EPOCHS_CRC_NAME) and read_leader_epochs(log, filesystem) is None:
        return f"its CRC is not in {LEADER_EPOCHS_CRC_NAME}"
    return None


def _add(report: VerifyReport, look: SegmentLook) -> None:
    report.segments += 1
    report.sealed += look.is_sealed
    report.batches += look.batches
    report.records += look.records
    report.bytes_read += look.position
    if not any(finding.kind in BATCH_KINDS for finding in report.findings):
        report.verified_to = look.end_offset
    report.findings += look.findings
    report.torn = report.torn or look.torn
