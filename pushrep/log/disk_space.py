"""How full may the disk be? Three limits by percentage and room, and what a log does at each: a table, no file touched.

    used      0 ... 75 ......... 85 ......... 90 ... 100 %        (LogConfig: disk_warn_percent and so on)
    and free    < 40       < 20       < 10 GiB                    (LogConfig: disk_warn_free_bytes and so on)
    level       ROOM    TIGHT       PRESSED      FULL
                        a warning   leases are   appends are refused, too; until it is below PRESSED again
                                    broken, retention runs at once

A limit is reached when both hold: the percentage rules on a disk of less than some 100 GiB, the free bytes on a larger
one, which at 90 % may have a terabyte left.

    level before   below TIGHT   TIGHT    PRESSED    FULL
    ROOM           ROOM          TIGHT    PRESSED    FULL
    TIGHT          ROOM          TIGHT    PRESSED    FULL
    PRESSED        ROOM          TIGHT    PRESSED    FULL
    FULL           ROOM          TIGHT    FULL       FULL

Only FULL has a memory: a log that took appends again at 89.9 % would refuse them at the next megabyte. A disk that is
really full is another thing: the system refuses the write then, whatever stands here (AppendFailed).
"""

from dataclasses import dataclass
from enum import IntEnum

from pushrep.errors import BadArgument
from pushrep.seams import DiskUsage


class DiskLevel(IntEnum):
    """How full the disk is, by a log's own limits; a higher level includes what the lower ones do."""

    ROOM = 0
    """Nothing to do."""
    TIGHT = 1
    """A warning is logged."""
    PRESSED = 2
    """Leases are broken and retention runs at once."""
    FULL = 3
    """Appends are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLimits:
    """Percentages and free bytes of the file system, the `disk_*` of LogConfig; see the file's map."""

    warn_percent: int = 75
    pressed_percent: int = 85
    refuse_percent: int = 90
    warn_free_bytes: int = 40 << 30
    pressed_free_bytes: int = 20 << 30
    refuse_free_bytes: int = 10 << 30

    def __post_init__(self) -> None:
        percents = self.warn_percent, self.pressed_percent, self.refuse_percent
        if not 0 <= percents[0] <= percents[1] <= percents[2] <= 100:
            raise BadArgument(
                "disk_warn_percent, disk_pressed_percent, disk_refuse_percent",
                f"they rise from 0 to 100, not {', '.join(map(str, percents))}",
            )
        free = self.warn_free_bytes, self.pressed_free_bytes, self.refuse_free_bytes
        if not free[0] >= free[1] >= free[2] >= 0:
            raise BadArgument(
                "disk_warn_free_bytes, disk_pressed_free_bytes, disk_refuse_free_bytes",
                f"they fall, down to 0 at least, not {', '.join(map(str, free))}",
            )


def disk_level(before: DiskLevel, usage: DiskUsage, limits: DiskLimits) -> DiskLevel:
    """The level at this usage, coming from level `before`."""
    used, free = usage.used_percent, usage.free_bytes
    if used >= limits.refuse_percent and free <= limits.refuse_free_bytes:
        return DiskLevel.FULL
    if used >= limits.pressed_percent and free <= limits.pressed_free_bytes:
        return DiskLevel.FULL if before is DiskLevel.FULL else DiskLevel.PRESSED
    is_tight = used >= limits.warn_percent and free <= limits.warn_free_bytes
    return DiskLevel.TIGHT if is_tight else DiskLevel.ROOM
