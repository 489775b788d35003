"""What the logs of one outbox say together, in the outbox and on a node: disk, scrub, recovery, syncs."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pushrep.log import SegmentLog
from pushrep.log.disk_space import DiskLevel, DiskStatus
from pushrep.log.recovery import Opening
from pushrep.log.scrub import ScrubStatus
from pushrep.status import Blocks, Histogram, Problem


class RecoveryStatus(NamedTuple):
    """How logs were opened, and cut since. recoveries: logs that were opened after an unclean stop."""

    recoveries: int
    seconds: float
    cut_bytes: int
    cuts: int
    quarantines: int


class LogsStatus(NamedTuple):
    """The logs of one outbox in one directory. syncs: of their segments."""

    outbox_id: str
    topic: str
    disk: DiskStatus
    scrub: ScrubStatus
    recovery: RecoveryStatus
    syncs: Histogram | None


def logs_status(outbox_id: str, logs: Iterable[SegmentLog]) -> LogsStatus:
    """The status of open logs, one at least. Raises LogClosed."""
    logs = list(logs)
    reports = [log.recovery for log in logs]
    disk = logs[0].disk
    return LogsStatus(
        outbox_id,
        logs[0].topic,
        disk.status(),
        logs[0].scrub.status,
        RecoveryStatus(
            recoveries=sum(one.opening is Opening.ABNORMAL for one in reports),
            seconds=sum(one.seconds for one in reports),
            cut_bytes=sum(one.cut.size_bytes for one in reports if one.cut),
            cuts=sum(log.cuts for log in logs),
            quarantines=sum(log.quarantines for log in logs),
        ),
        Histogram.of([disk.syncs]),
    )


def logs_problems(logs: Iterable[LogsStatus], blocks: Blocks | None = None) -> Iterator[Problem]:
    """The problems of disks and sealed segments. blocks: what a full disk blocks, if not appends."""
    logs = list(logs)
    for disk in {one.disk for one in logs}:
        used = f"{disk.used_bytes} of {disk.size_bytes} bytes are used"
        if disk.level >= DiskLevel.FULL:
            yield Problem("disk_full", f"disk {disk.mount}", f"{used}: appends are refused", blocks=blocks)
        elif disk.level >= DiskLevel.PRESSED:
            yield Problem("disk_filling", f"disk {disk.mount}", used)
    for one in logs:
        for finding in one.scrub.findings:
            why = f"damaged from offset {finding.offset} on: {finding.reason}"
            yield Problem("segment_damaged", f"{finding.log}/{finding.segment}", why)
