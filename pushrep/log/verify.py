"""Is every byte of a log what it was? A full scan beside a running writer, and whatever hangs on the batches with it.

    segments    each from its first byte, by the one scan        .log        damage, end
      joints    ends where the next one begins                   names       joint
      indexes   every entry is true                              .index ...  index
    epochs      the batches' are those of the checkpoint         header      epoch
    small files partition.metadata, leader-epoch-checkpoint                  file

What has to be whole, and where the log has to end (`Expected`):
    the writer lives     all below the end that it had published when we came      no matter what lies behind
    closed clean         all, to the very byte that the marker names
    stopped otherwise    all below the recovery point                              a torn tail behind it is no damage
    nothing is known     all: no line says where unsynced writes began

Beside a writer data moves: segments go by retention, come by rolls, change by truncation. So what looks bad is looked
at again, by the state of then, and is damage only if three looks in a row find the same and the writer still claims
these offsets.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import UUID

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Clock, Filesystem
from pushrep.log.directory_files import (
    LEADER_EPOCHS_CRC_NAME,
    LEADER_EPOCHS_NAME,
    PARTITION_METADATA_NAME,
    BadCheckpoint,
    decode_leader_epochs,
    parse_log_name,
    read_bounded,
    read_leader_epochs,
    read_partition_metadata,
)
from pushrep.log.errors import CorruptPartitionMetadata
from pushrep.log.indexes import IndexCheck
from pushrep.log.inspection import LogState, checked_log, read_state, segment_facts
from pushrep.log.seals import BadSeal, checked_seal, read_seal
from pushrep.log.segment_files import INDEX_SUFFIX, SEAL_SUFFIX, TIME_INDEX_SUFFIX, list_segments, segment_path
from pushrep.log.segment_look import (
    BATCH_KINDS,
    Expected,
    Finding,
    FindingKind,
    SegmentLook,
    SegmentTask,
    look_at_segment,
    segment_name,
)

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
        """No damage."""
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
        """`on_bytes` is told, every 8 MiB or so, how many bytes were read since.

        `state`: what is known of the log, for who holds its lock; None: ask the directory. Raises NotALog.
        """
        self._log, self._filesystem, self._clock = checked_log(log, filesystem), filesystem, clock
        self._on_bytes = on_bytes
        self._state = read_state(self._log, filesystem) if state is None else state
        self._first = Expected.of(self._state)

    def run(self) -> VerifyReport:
        """Look at everything. Raises OSError if the disk can't be read."""
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
                return []  # retention went on meanwhile
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
        """A look that can be told of; None if the segment is gone by rights."""
        same, before = 0, None
        while True:
            # The end that we came with is a batch's end only until the log is cut; the second look takes today's.
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
        """Never more than at the beginning: what came since is not looked at; less, if the writer cut its log."""
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
            return None  # if it should be there, the one before does not end where the next begins
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
            return None  # told of itself

    def _index_check(self, base: int, *, is_newest: bool) -> IndexCheck:
        """The newest segment's index files are made late, and while it is written they may end inside an entry."""
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
    """How much there is to read, for a progress bar."""
    return sum(segment.size_bytes for segment in segment_facts(log, filesystem))


def small_files(log: Path, filesystem: Filesystem = REAL_FILESYSTEM) -> list[Finding]:
    """What is wrong with the files beside the segments. A file of Kafka's own has no CRC and is judged by its form."""
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
    """An index file's bytes; None if it is not there, or went meanwhile."""
    try:
        file = filesystem.open(path, writable=False)
    except FileNotFoundError:
        return None
    try:
        return file.read_at(min(file.size(), _INDEX_BYTES_MAX), 0)
    finally:
        file.close()
