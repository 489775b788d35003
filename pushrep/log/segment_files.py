"""The files of one log: a few per segment, as Kafka names them, and what recovery put aside.

00000000000000001042.log             batches; the number is the base offset of the first, 20 digits
00000000000000001042.index           .timeindex, both rebuilt from the .log at need
00000000000000001042.seal            what the segment was when it was rolled; see seals.py
00000000000000001042.log.4096.cut    what was cut off from byte 4096 on; `.log.cut` for a whole file
                                     .corrupt in place of .cut: what was set aside because it is damaged
00000000000000001042.log.4096.cut.part   .log.repair: a copy that is being made; the next opening removes one left over
00000000000000001042.log.4096.cut.moving   a tail that is being moved on a full disk; the next opening goes on with it
00000000000000001042.log.swap        a broker's, which was to replace this segment and perhaps the next ones

What else a broker leaves there (.snapshot, .txnindex, .deleted, .cleaned) is neither read nor removed.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from pushrep.env import Filesystem

LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX = ".log", ".index", ".timeindex"
SEAL_SUFFIX = ".seal"
CUT_SUFFIX, CORRUPT_SUFFIX = ".cut", ".corrupt"
PART_SUFFIX, REPAIR_SUFFIX = ".part", ".repair"
MOVING_SUFFIX = ".moving"

_SEGMENT = re.compile(r"([0-9]{20})\.log")
_SWAP = re.compile(r"[0-9]{20}\.log\.swap")
_HALF_MADE = re.compile(r"[0-9]{20}\.(?:(?:log|index|timeindex)\.repair|log\.[0-9]+\.(?:cut|corrupt)\.part)")
_MOVING = re.compile(r"([0-9]{20}\.log)\.([0-9]+)\.cut\.moving")
_OF_A_SEGMENT = re.compile(r"([0-9]{20})\.(?:index|timeindex|seal)")


@lru_cache(maxsize=4096)  # a Path takes 3 µs to put together, and a read asks for several
def segment_path(directory: Path, base_offset: int, suffix: str = LOG_SUFFIX) -> Path:
    """The file of the segment that begins with `base_offset`."""
    return directory / f"{base_offset:020d}{suffix}"


def list_segments(filesystem: Filesystem, directory: Path) -> list[int]:
    """Base offsets of the segments in the directory, ascending."""
    return segments_in(filesystem.list(directory))


def segments_in(names: Iterable[str]) -> list[int]:
    """Base offsets of the segments among the names of a directory, which are sorted."""
    return [int(match[1]) for name in names if (match := _SEGMENT.fullmatch(name))]


def orphan_indexes_in(names: Iterable[str]) -> list[str]:
    """Names of index files and seals whose segment is gone: a crash came between the removal of the two."""
    bases = set(segments_in(names := list(names)))
    return [name for name in names if (match := _OF_A_SEGMENT.fullmatch(name)) and int(match[1]) not in bases]


def swaps_in(names: Iterable[str]) -> list[str]:
    """Names of segments that a broker had compacted and was about to put in the place of others when it was stopped."""
    return [name for name in names if _SWAP.fullmatch(name)]


def half_made_in(names: Iterable[str]) -> list[str]:
    """Names of copies that nobody finished: what they were to hold is still where it was."""
    return [name for name in names if _HALF_MADE.fullmatch(name)]


def moved_from(names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """{name of a file that takes a tail: (segment, byte that the tail begins with)}; see cut_files.py."""
    return {name: (match[1], int(match[2])) for name in names if (match := _MOVING.fullmatch(name))}


def taken_names(filesystem: Filesystem, path: Path) -> Iterator[Path]:
    """`path`, `path.1` and so on, as far as they exist."""
    candidate, number = path, 0
    while filesystem.exists(candidate):
        yield candidate
        number += 1
        candidate = path.with_name(f"{path.name}.{number}")


def free_name(filesystem: Filesystem, path: Path) -> Path:
    """`path`, or the first of `path.1`, `path.2` ... that is not taken: what is kept aside is never overwritten."""
    number = sum(1 for _ in taken_names(filesystem, path))
    return path.with_name(f"{path.name}.{number}") if number else path
