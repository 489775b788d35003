"""What opening a log found and did, for people and for code."""

from dataclasses import asdict, dataclass
from typing import Any

from pushrep.log.recovery_plan import Opening
from pushrep.log.scrub import ScrubFinding


@dataclass(frozen=True, slots=True)
class Cut:
    """What was taken off the log's end: `size_bytes` from byte `position` of `segment` on, later segments included.

    `kept_as` names the files that hold it now; empty if there was nothing but zeros.
    """

    offset: int
    segment: str
    position: int
    size_bytes: int
    reason: str
    kept_as: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """How a log was opened. `str()` of it is a sentence, `as_dict()` is for JSON.

    damaged_from: first offset that was known to be on disk and can't be read; None if all is well. damaged_segments:
    sealed ones of a log with replicas, which goes on behind them: another member's to repair.
    """

    opening: Opening
    reason: str
    segments_scanned: int
    bytes_scanned: int
    log_start_offset: int
    log_end_offset: int
    cut: Cut | None
    damaged_from: int | None
    damage: str | None
    seconds: float
    damaged_segments: tuple[ScrubFinding, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self) | {"opening": self.opening.value}

    def __str__(self) -> str:
        known = f"offsets [{self.log_start_offset}, {self.log_end_offset})"
        work = f"{self.segments_scanned} segments and {self.bytes_scanned} bytes scanned in {self.seconds:.3f} s"
        parts = [f"{self.opening.value} opening ({self.reason}): {known}, {work}"]
        if self.cut is not None:
            kept = f", kept as {', '.join(self.cut.kept_as)}" if self.cut.kept_as else ""
            parts.append(
                f"cut {self.cut.size_bytes} bytes behind offset {self.cut.offset} at byte {self.cut.position} of "
                f"{self.cut.segment} ({self.cut.reason}){kept}"
            )
        if self.damaged_from is not None:
            parts.append(f"DAMAGED from offset {self.damaged_from} on ({self.damage}): read-only below it")
        parts += [
            f"{one.segment} is DAMAGED from offset {one.offset} on ({one.reason}): for another member to repair"
            for one in self.damaged_segments
        ]
        return "; ".join(parts)
