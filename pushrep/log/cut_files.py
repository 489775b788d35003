"""Copies of the bytes that are cut off a log's end: they are in files beside it before the log is cut.

    1000.log | ..... | bad ......     2000.log     3000.log
                     ^ position
    1. the bytes from `position` on are copied to 1000.log.<position>.cut.part, synced, and renamed to .cut
    2. 3000.log, then 2000.log are renamed to .log.cut, newest first: a crash in between leaves contiguous names
    3. the caller truncates and syncs 1000.log, and syncs the directory: at an opening recovery.py, later
       writer.py or repair.py by `Segment.cut`

Only indexes are deleted, because they can be rebuilt. The copy is made first, so that on a full disk the cut fails
before anything has changed. It is exact to the byte; zeros at its end, mostly space that was allocated ahead, are a
hole in the file and take no space. A cut that is repeated after it was stopped finds its copy and makes no second one.

On a full disk a bad tail is moved instead of copied (`TailBackup`), piece by piece, from its end:

    1000.log                    | ..... | t o r n |          1000.log.<position>.cut.moving   |             |
      first piece               | ..... | t o r n |                                           |          n  |
      cut, next piece           | ..... | t o r   |                                           |       r  n  |
      ...                       | ..... |                    renamed to .cut                  | t  o  r  n  |

A piece is on disk in its new place before it is cut from its old one, which frees space for the next; zeros need none.
After a crash each byte is in one of the two files, at the same distance from `position`, so the next opening goes on
where this one ended. The piece at `position` is cut last: until then the log ends in a torn tail, which the next
opening finds. So a tail is moved only if it begins with a bad batch, at or above the recovery point. One that begins
with a whole batch would be part of the log at the next opening, and is copied.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from pushrep.env import File, Filesystem, file_size
from pushrep.log.directory_files import (
    CUT_SUFFIX,
    INDEX_SUFFIX,
    MOVING_SUFFIX,
    PART_SUFFIX,
    REPAIR_SUFFIX,
    SEAL_SUFFIX,
    TIME_INDEX_SUFFIX,
    free_name,
    moved_from,
    segment_path,
    taken_names,
)
from pushrep.log.errors import NO_ROOM, NoRoomToCut
from pushrep.log.seals import remove_seals
from pushrep.log.walk import WINDOW_BYTES


def move_aside(
    filesystem: Filesystem, directory: Path, bases: Sequence[int], *, keep: bool = True, suffix: str = CUT_SUFFIX
) -> tuple[list[str], int]:
    """Rename whole segments, newest first, and remove their indexes; returns (their new names, their bytes).

    Without `keep` the segments are removed, for segments without any acknowledged record.
    """
    kept, size_bytes = [], 0
    remove_seals(filesystem, directory, bases)
    for base in sorted(bases, reverse=True):
        path = segment_path(directory, base)
        size = file_size(filesystem, path) or 0
        size_bytes += size
        if size and keep:
            target = free_name(filesystem, path.with_name(path.name + suffix))
            filesystem.rename(path, target)
            kept.append(target.name)
        else:
            filesystem.remove(path)
        _remove_indexes(filesystem, directory, base)
    if bases:
        filesystem.sync_directory(directory)
    return kept, size_bytes


def remove_segments(filesystem: Filesystem, directory: Path, bases: Sequence[int]) -> None:
    """Remove whole segments below the log start, oldest first, so that a crash leaves contiguous names."""
    for base in sorted(bases):
        path = segment_path(directory, base)
        if filesystem.exists(path):
            filesystem.remove(path)
        _remove_indexes(filesystem, directory, base)
    if bases:
        filesystem.sync_directory(directory)


def keep_range(  # noqa: PLR0913 - a range of a file, and where it goes
    filesystem: Filesystem, path: Path, file: File, position: int, end: int | None = None, *, suffix: str = CUT_SUFFIX
) -> str | None:
    """Copy the bytes [position, end) of `file` (None: to its end) into `<path>.<position><suffix>`; that file's name.

    None if there are no such bytes. It is on disk under its name when this returns, and no other file is replaced.
    Raises NoRoomToCut on a full disk, OSError; nothing of the copy remains then.
    """
    end = file.size() if end is None else end
    if end <= position:
        return None
    path = path.with_name(f"{path.name}.{position}{suffix}")
    target = free_name(filesystem, path)
    for kept in taken_names(filesystem, path):
        if holds_range(filesystem, kept, file, position, end):
            return kept.name  # made by a cut that was stopped before it changed the log
    part = path.with_name(path.name + PART_SUFFIX)
    with no_room_to_cut(path, end - position):
        try:
            _copy(filesystem, part, file, position, end)
        except OSError:
            if filesystem.exists(part):
                filesystem.remove(part)
            raise
    filesystem.rename(part, target)
    filesystem.sync_directory(path.parent)
    return target.name


@contextmanager
def no_room_to_cut(path: Path, wanted_bytes: int) -> Iterator[None]:
    """Raise NoRoomToCut for an error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise NoRoomToCut(path, wanted_bytes, error) from error


def put_back(filesystem: Filesystem, path: Path, file: File) -> None:
    """Write the bytes of `file`, whose name was taken from it, under its name `path` again, durably. Raises OSError."""
    part = path.with_name(path.name + REPAIR_SUFFIX)
    _copy(filesystem, part, file, 0, file.size())
    filesystem.rename(part, path)
    filesystem.sync_directory(path.parent)


def _copy(filesystem: Filesystem, target: Path, file: File, position: int, end: int) -> None:
    with closing(filesystem.open(target, create=True)) as copy:
        copy.truncate(0)
        for start, data in _pieces(file, position, end):
            if data.count(0) != len(data):  # else a hole
                copy.write_at(data.rstrip(b"\0"), start - position)
        copy.truncate(end - position)
        copy.sync()


def holds_range(filesystem: Filesystem, kept: Path, file: File, position: int, end: int) -> bool:
    """Whether the file `kept` has just the bytes [position, end) of `file`."""
    with closing(filesystem.open(kept, writable=False)) as other:
        return other.size() == end - position and all(
            other.read_at(len(data), start - position) == data for start, data in _pieces(file, position, end)
        )


def _pieces(file: File, position: int, end: int) -> Iterator[tuple[int, bytes]]:
    for start in range(position, end, WINDOW_BYTES):
        yield start, file.read_at(min(WINDOW_BYTES, end - start), start)


def _remove_indexes(filesystem: Filesystem, directory: Path, base: int) -> None:
    for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX, SEAL_SUFFIX):
        index = segment_path(directory, base, suffix)
        if filesystem.exists(index):
            filesystem.remove(index)


_PIECE_BYTES_MIN = 4096  # a block; less would free nothing
_PIECE_BYTES_UNKNOWN = 4 * _PIECE_BYTES_MIN  # a quarter of the reserve
_PIECE_BYTES_MAX = 1 << 20
_WANTED_BYTES = 2 * _PIECE_BYTES_MIN


class TailBackup:
    """Moves the bytes from `position` on out of `file`, which is `path`. Used once, by `finish`.

    Making it writes the first piece to its new place and changes nothing in the old one. Raises NoRoomToCut if there is
    no room even for that, OSError.
    """

    def __init__(self, filesystem: Filesystem, path: Path, file: File, position: int) -> None:
        self._filesystem, self._file, self._path, self._position = filesystem, file, path, position
        self._final = path.with_name(f"{path.name}.{position}{CUT_SUFFIX}")
        self._moving = moving_path(path, position)
        # A small piece first: there must be space left to write the checkpoints that lower the log's end.
        self._piece_bytes = _PIECE_BYTES_MIN
        is_new = not filesystem.exists(self._moving)
        with no_room_to_cut(path, _WANTED_BYTES):
            try:
                self._write(b"", 0)
                filesystem.sync_directory(path.parent)
                self._begin = self._copy(file.size())
                self._piece_bytes = self._fitting(file.size() - position)
            except OSError:
                if is_new and filesystem.exists(self._moving):
                    filesystem.remove(self._moving)
                raise

    def finish(self) -> str:
        """Move the rest; return the name of the file that holds all of it. If it raises (as above), the next opening
        goes on.
        """
        with no_room_to_cut(self._path, _WANTED_BYTES):
            while self._begin > self._position:
                self._file.truncate(self._begin)
                self._begin = self._copy(self._begin)
        self._file.truncate(self._position)
        self._file.sync()  # else the next opening, after a power cut, would find the tail again and keep it twice
        return _rename(self._filesystem, self._moving, self._final)

    def _copy(self, end: int) -> int:
        """Write the piece before `end` to its new place on disk, skipping zeros; return where it begins."""
        while end > self._position:
            # Whole blocks of the old file, so that each cut frees enough for the next piece.
            begin = max(self._position, (end - self._piece_bytes) // _PIECE_BYTES_MIN * _PIECE_BYTES_MIN)
            data = self._file.read_at(end - begin, begin)
            if data.count(0) == len(data):
                end = begin
                continue
            self._write(data, begin - self._position)
            return begin
        return end

    def _fitting(self, tail_bytes: int) -> int:
        """A piece size that surely fits: half a written piece would use up the free space."""
        usage = self._filesystem.usage(self._path)
        free_bytes = usage.total_bytes - usage.used_bytes
        if free_bytes >= tail_bytes:  # then a quota was reached; how much of it is left is unknown
            return _PIECE_BYTES_UNKNOWN
        return max(_PIECE_BYTES_MIN, min(free_bytes // 4, _PIECE_BYTES_MAX) // _PIECE_BYTES_MIN * _PIECE_BYTES_MIN)

    def _write(self, data: bytes, position: int) -> None:
        """Write; the bytes and the file's final size are on disk when this returns."""
        with closing(self._filesystem.open(self._moving, create=True)) as target:
            target.truncate(max(target.size(), self._file.size() - self._position))
            if target.read_at(len(data), position) != data:  # an earlier opening may have written it
                target.write_at(data, position)
            target.sync()


def quarantine_tail(
    filesystem: Filesystem, path: Path, file: File, position: int, *, suffix: str = CUT_SUFFIX
) -> str | TailBackup | None:
    """Remove the segment's seal and save a bad tail before it is cut: returns the name of its copy, None for no bytes.
    On a full disk returns its begun move into `.cut`, whatever the suffix: call `finish` after the checkpoints are
    lowered.

    A move that was begun before goes on. Raises NoRoomToCut, OSError; nothing of the log has changed then.
    """
    remove_seals(filesystem, path.parent, [int(path.stem)])
    if not filesystem.exists(moving_path(path, position)):
        try:
            return keep_range(filesystem, path, file, position, suffix=suffix)
        except NoRoomToCut:
            pass
    return TailBackup(filesystem, path, file, position)


def moving_path(path: Path, position: int) -> Path:
    """The file into which the tail of the segment `path` is moved."""
    return path.with_name(f"{path.name}.{position}{CUT_SUFFIX}{MOVING_SUFFIX}")


def end_moves(filesystem: Filesystem, directory: Path, names: Iterable[str]) -> list[str]:
    """Rename the completely moved files among the names of a directory; return the names of the others."""
    going_on = []
    for name, (segment, position) in moved_from(names).items():
        path = directory / segment
        if (file_size(filesystem, path) or 0) > position:
            going_on.append(name)
        else:
            _rename(filesystem, directory / name, directory / name.removesuffix(MOVING_SUFFIX))
    return going_on


def _rename(filesystem: Filesystem, moving: Path, final: Path) -> str:
    target = free_name(filesystem, final)
    filesystem.rename(moving, target)
    filesystem.sync_directory(target.parent)
    return target.name
