"""How full may the disk be? Three limits and what a log does at each: a table over a percentage, no file touched.

    used      0 ... 75 ......... 85 ......... 90 ... 100 %        (LogConfig: disk_warn_percent and so on)
    level       ROOM    TIGHT       PRESSED      FULL
                        a warning   leases are   appends are refused, too; until below 85 again
                                    broken, retention runs at once

    level before   used < 75   75 <= used < 85   85 <= used < 90   90 <= used
    ROOM           ROOM        TIGHT             PRESSED           FULL
    TIGHT          ROOM        TIGHT             PRESSED           FULL
    PRESSED        ROOM        TIGHT             PRESSED           FULL
    FULL           ROOM        TIGHT             FULL              FULL

Only FULL has a memory: a log that took appends again at 89.9 % would refuse them at the next megabyte. A disk that is
really full is another thing: the system refuses the write then, whatever stands here (AppendFailed).
"""

from dataclasses import dataclass
from enum import IntEnum

from pushrep.errors import BadArgument


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
    """Percentages of the file system; see the file's map. 100 for a limit that no disk reaches in practice."""

    warn_percent: int
    pressed_percent: int
    refuse_percent: int

    def __post_init__(self) -> None:
        if not 0 <= self.warn_percent <= self.pressed_percent <= self.refuse_percent <= 100:
            raise BadArgument(
                "disk_warn_percent, disk_pressed_percent, disk_refuse_percent",
                f"they rise from 0 to 100, not {self.warn_percent}, {self.pressed_percent}, {self.refuse_percent}",
            )


def disk_level(before: DiskLevel, used_percent: float, limits: DiskLimits) -> DiskLevel:
    """The level at `used_percent`, coming from level `before`."""
    if used_percent >= limits.refuse_percent:
        return DiskLevel.FULL
    if used_percent >= limits.pressed_percent:
        return DiskLevel.FULL if before is DiskLevel.FULL else DiskLevel.PRESSED
    return DiskLevel.TIGHT if used_percent >= limits.warn_percent else DiskLevel.ROOM
