"""What a cut or a quarantine has set aside is put back where it fits: whole batches that go on where the log ends.

    1000.log | ..... |                          the log ends at offset 1042
    1000.log.4096.cut    | 1042-1049 | 1050-1053 | torn ..      fits: two batches are appended, what is torn stays aside
    2000.log.corrupt     | 2000 ...                             fits only once the log ends at 2000

The batches are appended with their own offsets and epochs, and synced; the file that held them stays as it is. What is
not whole, or does not follow, is never put back: a log that went on after the cut has given those offsets out again.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Clock, Filesystem
from pushrep.errors import BadArgument
from pushrep.log.inspection import checked_log
from pushrep.log.segment_log import SegmentLog
from pushrep.log.walk import ScanRange, WholeBatch, scan
from pushrep.records import BatchHeader, CorruptRecordBatch, RecordBatch
from pushrep.records.header import HEADER_BYTES

_ASIDE = re.compile(r"([0-9]{20})\.log(?:\.[0-9]+)?\.(?:cut|corrupt|stale)(?:\.[0-9]+)?")
_TOGETHER = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What was put back, or would be. refused: why nothing of the file fits. stopped: why its rest was left."""

    log: str
    file: str
    dry_run: bool
    start_offset: int
    end_offset: int
    batches: int
    records: int
    refused: str | None
    stopped: str | None

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


def restore(
    log: Path,
    file: Path,
    *,
    dry_run: bool = False,
    filesystem: Filesystem = REAL_FILESYSTEM,
    clock: Clock = SYSTEM_CLOCK,
) -> RestoreReport:
    """Append the whole batches of `file`, which was set aside of this log, if they follow its end.

    Takes the writer's lock, but for a dry run, which changes nothing. Raises NotALog, LogLocked, LogDamaged, OSError,
    BadArgument for a file of another name.
    """
    log = checked_log(log, filesystem)
    match = _ASIDE.fullmatch(file.name)
    if match is None:
        raise BadArgument(
            "file", f"{file.name} is none that a cut leaves: <segment>.log[.<byte>].cut, .corrupt, .stale"
        )
    if dry_run:
        with SegmentLog.open_reader(log, isolation="written", filesystem=filesystem) as reader:
            end = reader.log_end_offset
        return _report(log, file, end, *_fitting(file, int(match[1]), end, filesystem), dry_run=True)
    with SegmentLog.open(log, filesystem=filesystem, clock=clock) as opened:
        end = opened.log_end_offset
        found, refused, stopped = _fitting(file, int(match[1]), end, filesystem)
        for at in range(0, len(found), _TOGETHER):
            opened.append_as_is(found[at : at + _TOGETHER])
        opened.flush()
        return _report(log, file, end, found, refused, stopped, dry_run=False)


def _fitting(
    file: Path, segment: int, end: int, filesystem: Filesystem
) -> tuple[list[RecordBatch], str | None, str | None]:
    """(the whole batches that follow offset `end`, why there is none, why no more)."""
    opened = filesystem.open(file, writable=False)
    try:
        try:
            first = BatchHeader.parse(opened.read_at(HEADER_BYTES, 0))
        except CorruptRecordBatch as error:
            return [], f"it begins with no batch: {error.reason}", None
        if first.base_offset != end:
            return [], f"it begins with offset {first.base_offset}, the log ends at {end}", None
        found = []
        for step in scan(opened, ScanRange(base_offset=segment, next_offset=end)):
            if isinstance(step, WholeBatch):
                found.append(RecordBatch.check(bytes(step.batch.data)))
            elif step.position < opened.size():
                stopped = getattr(step, "reason", "zeros follow")
                return found, None if found else stopped, f"byte {step.position}, offset {step.next_offset}: {stopped}"
        return found, None, None
    finally:
        opened.close()


def _report(  # noqa: PLR0913, PLR0917 - the parts of one report
    log: Path,
    file: Path,
    end: int,
    found: list[RecordBatch],
    refused: str | None,
    stopped: str | None,
    *,
    dry_run: bool,
) -> RestoreReport:
    return RestoreReport(
        log=log.name,
        file=file.name,
        dry_run=dry_run,
        start_offset=end,
        end_offset=found[-1].header.next_offset if found else end,
        batches=len(found),
        records=sum(batch.header.record_count for batch in found),
        refused=refused,
        stopped=stopped,
    )
