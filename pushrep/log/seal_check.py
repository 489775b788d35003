"""The first read of a sealed segment holds it against its seal, before any record of it is given.

    cleaner-offset-checkpoint ─ below it? ─▶ .seal of this size? ─▶ header ─▶ header ─▶ ...   end, count, CRC: as sealed

Only segments that begin below the cleaner's offset: offsets may be missing there, so that one that rotted looks as good
as another. Elsewhere a batch's offset and epoch have a witness already (the end of the batch before it, the list of
leader epochs), and to read every header first would halve the speed of a replay.

What was found whole is remembered by the process, for the very file: device, inode, size and time of its last change.
So who replaces, cuts or repairs a segment makes it forgotten. What a disk changes later by itself is the scrub's to
find. A segment without a seal is read as it is; so is one of another size than its seal's if no offset of it is
missing: its batches witness each other.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from pushrep.env import SYSTEM_CLOCK, File, Filesystem
from pushrep.log.directory_files import parse_log_name, read_partition_metadata
from pushrep.log.errors import CorruptBatch
from pushrep.log.seals import HeadersCrc, Seal, read_seal
from pushrep.log.segment_files import SEAL_SUFFIX, segment_path
from pushrep.log.walk import ReadableFile, ScanRange, scan_headers, why_not
from pushrep.records.header import SEALED_BYTES

_FILES_MAX = 4096
_SETTLED_MS = 2000
"""A file that changed later than so long ago is not remembered: file systems keep that time in steps of some ms."""

_Identity: TypeAlias = tuple[int, int, int, int]
_whole: dict[tuple[str, int], _Identity] = {}


def hold_against_seal(
    filesystem: Filesystem, directory: Path, base: int, file: File, cleaned_offset: Callable[[], int]
) -> None:
    """For who is about to read the segment `base` of the log in `directory`, open as `file`. Thread-safe.

    Raises CorruptBatch if it is not the one that was sealed, OSError.
    """
    if not filesystem.exists(segment_path(directory, base, SEAL_SUFFIX)):
        return  # asked first: the newest segment, which has none, is read most often
    cleaned_to = cleaned_offset()
    if base >= cleaned_to:
        return
    key, identity = (str(directory), base), _identity(file)
    if identity is not None and _whole.get(key) == identity:
        return
    seal = read_seal(filesystem, directory, base)
    if seal is None:
        return
    found = _contradiction(filesystem, directory, seal, file, ScanRange(base_offset=base, cleaned_offset=cleaned_to))
    if found is not None:
        if read_seal(filesystem, directory, base) != seal:
            return  # it was cut or replaced meanwhile; who does that removes the seal first
        raise found
    # Of before the look: what came in between makes it another file.
    if identity is not None and identity == _identity(file):
        if len(_whole) >= _FILES_MAX:
            _whole.clear()
        _whole[key] = identity


def _identity(file: File) -> _Identity | None:
    """None where a file has no lasting one, or changed just now."""
    try:
        status = os.fstat(file.fileno())
    except OSError:  # it is in memory
        return None
    if SYSTEM_CLOCK.wall_ms() - status.st_ctime_ns // 1_000_000 < _SETTLED_MS:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


class _LastRead:
    """A file that remembers what was read last, which is where a scan has found a header."""

    def __init__(self, file: ReadableFile) -> None:
        self._file, self._data, self._start = file, b"", 0
        self.size = file.size

    def read_at(self, size: int, position: int) -> bytes:
        self._data, self._start = self._file.read_at(size, position), position
        return self._data

    def sealed_bytes(self, position: int) -> bytes:
        """What a seal covers of the header there."""
        at = position - self._start
        return self._data[at : at + SEALED_BYTES]


def _contradiction(
    filesystem: Filesystem, directory: Path, seal: Seal, file: File, what: ScanRange
) -> CorruptBatch | None:
    """By the headers alone: who reads a batch checks its CRC."""
    headers, last_read = HeadersCrc(), _LastRead(file)
    end, position, epoch = what.base_offset, 0, -1
    for at, first, next_offset, size, leader_epoch, _, _ in scan_headers(last_read, what):
        headers.covered += next_offset - first
        headers.pending += last_read.sealed_bytes(at)
        headers.fold_if_due()
        end, position, epoch = next_offset, at + size, leader_epoch
    path = segment_path(directory, what.base_offset)
    if not seal.fits(file.size()):
        why = seal.why_resized(file.size(), headers.covered, what.base_offset, max(end, seal.end_offset))
        return CorruptBatch(what.base_offset, path, 0, why) if why is not None else None
    if position != seal.size_bytes:
        behind = ScanRange(
            base_offset=what.base_offset,
            position=position,
            next_offset=end,
            leader_epoch=epoch,
            cleaned_offset=what.cleaned_offset,
        )
        return CorruptBatch(end, path, position, why_not(file, behind))
    log_id = read_partition_metadata(directory, filesystem)
    why = seal.contradiction(log_id, parse_log_name(directory.name)[1], what.base_offset, headers, end)
    return CorruptBatch(what.base_offset, path, 0, why) if why is not None else None
