"""The offsets that a writer publishes to readers: a mapped file per directory of logs, written without lock or system
call.

    .pushrep_published     big-endian, records of 512 bytes; grows by whole records; writers never replace it
    record 0    magic 8 | version u32 | record bytes u32 | CRC-32C u32 of the 16 before
    record n    one log:
      0    name length u16 | CRC-32C u32 of the name | name (at most 260 bytes)
      268  clock: rested ms i64 (-1: does not rest) | boot ms i64 | wall minus boot ms i64 | boot id 16 | CRC-32C u32 of
           the 40 before; see retention.py
      312  cuts u64: how often records that may have been read were taken off the log's end
      320  slot 0      416  slot 1, each:
             0  sequence u64 | log end offset i64 | flushed offset i64 | high watermark i64 | log start offset i64
            40  leader epoch i32 | pid u32 | boot id 16
            64  CRC-32C u32 of the 64 before

A writer alternates between the two slots, so one of them is whole at every moment. A reader takes the valid
one of the highest sequence: CRC right, and written since this machine started. Where only one is valid, it is taken
once it is seen a second time: as the first was copied, the writer may have filled it anew and gone on to the other.
Written slots stay in the page cache when the process ends; a stop of the machine can lose them. Without a valid slot
the reader uses the checkpoints. Cuts are counted before the files change: if the number is the same before and after a
read of the files, the bytes are of one history of the log. A reader's mapping stays valid while the file grows or is
repaired in place; shrinking it would kill readers (SIGBUS).
"""

import mmap
import struct
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias
from uuid import UUID

from pushrep.crc32c import crc32c_value
from pushrep.env import REAL_FILESYSTEM, Filesystem, file_size

PUBLISHED_NAME = ".pushrep_published"
VERSION = 1
RECORD_BYTES = 512
RECORDS_INITIAL = 7
"""With the header a block of the disk."""
SLOTS_AT = (320, 416)
_EMPTY_BYTES_MAX = 64 << 20

_MAGIC = b"pushpub\x00"
_HEADER = struct.Struct(">8sII")
_NAME = struct.Struct(">HI")
_BODY = struct.Struct(">QqqqqiI16s")
_CRC = struct.Struct(">I")
_CLOCK = struct.Struct(">qqq16s")
_CUTS_BYTES = 8
_NAME_BYTES_MAX = 260  # 249 for the topic, a dash, 10 digits
_SLOT_BYTES = _BODY.size + _CRC.size
_BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
# A try fails only if the writer wrote to the slots while they were copied, within a microsecond.
_READ_TRIES = 64

_Slot: TypeAlias = tuple[int, int, int, int, int, int, int, bytes]

assert _BODY.size == 64, "docs/internals/formats/directory-files.md promises 64 bytes and a CRC"
_CLOCK_BYTES = _CLOCK.size + _CRC.size
assert _NAME.size + _NAME_BYTES_MAX <= SLOTS_AT[0] - _CUTS_BYTES - _CLOCK_BYTES
assert SLOTS_AT[0] + _SLOT_BYTES <= SLOTS_AT[1] <= RECORD_BYTES - _SLOT_BYTES


class Damaged(NamedTuple):
    """Records that were on disk can't be read from `offset` on, at byte `position` of `segment`; as in CorruptBatch."""

    offset: int
    segment: Path
    position: int
    reason: str


class LogOffsets(NamedTuple):
    """A log's ends at one moment, each the next offset. Everybody who asks for them gets these.

    end: of what was written. damage: the known damage of an open log; its ends are then those of what was on disk, so
    that a reader comes to the damage and does not take what is left for the whole log.
    """

    start: int
    end: int
    flushed: int
    high_watermark: int
    damage: Damaged | None = None

    @property
    def stable(self) -> int:
        """min(high watermark, flushed offset): records below it are never cut off."""
        return min(self.flushed, self.high_watermark)


Ends: TypeAlias = tuple[int, int, int, int, Damaged | None]
"""LogOffsets, or its fields."""


@dataclass(frozen=True, slots=True)
class PublishedState:
    """The last state that a log's writer published. An end offset is the next one, not the last."""

    sequence: int
    log_end_offset: int
    flushed_offset: int
    high_watermark: int
    log_start_offset: int
    leader_epoch: int
    pid: int

    @property
    def ends(self) -> LogOffsets:
        """The offsets alone."""
        return LogOffsets(self.log_start_offset, self.log_end_offset, self.flushed_offset, self.high_watermark)


class ClockNote(NamedTuple):
    """What a log's retention has seen of the clocks: see retention.py. is_of_boot: no start of the machine since."""

    rested_ms: int
    boot_ms: int
    offset_ms: int
    is_of_boot: bool = True


class PublishedEntry:
    """One log's record, for its writer. Calls for one log must not overlap; different logs need no order."""

    __slots__ = ("_boot_id", "_map", "_pid", "_sequence", "_slots", "cuts")

    def __init__(self, mapped: mmap.mmap, position: int, pid: int, boot_id: bytes) -> None:
        self._map, self._pid, self._boot_id = mapped, pid, boot_id
        self._slots = (position + SLOTS_AT[0], position + SLOTS_AT[1])
        # Of any boot, because a leftover with a higher sequence would win over a new slot.
        self._sequence = max((fields[0] for fields in _valid_slots(mapped, position)), default=0)
        self.cuts = _cuts(mapped, position)

    def publish(self, ends: Ends, leader_epoch: int) -> None:
        """Publish; about a microsecond, no system call."""
        self._sequence = sequence = self._sequence + 1
        start, end, flushed, high_watermark, _ = ends
        body = _BODY.pack(sequence, end, flushed, high_watermark, start, leader_epoch, self._pid, self._boot_id)
        at = self._slots[sequence & 1]
        self._map[at : at + _SLOT_BYTES] = body + _CRC.pack(crc32c_value(body))

    def state(self) -> PublishedState | None:
        """The published state, perhaps an earlier process's since this machine started; None if none is valid."""
        return _newest(self._map, self._slots[0] - SLOTS_AT[0], self._boot_id)

    def last_words(self) -> PublishedState | None:
        """The published state, for the writer: also one that survived a restart of the machine."""
        slots = _valid_slots(self._map, self._slots[0] - SLOTS_AT[0])
        return PublishedState(*max(slots)[:-1]) if slots else None

    def count_cut(self) -> None:
        """The log is about to be cut."""
        self.cuts += 1
        self._map[self._slots[0] - _CUTS_BYTES : self._slots[0]] = self.cuts.to_bytes(_CUTS_BYTES)

    def lower(self, offset: int) -> None:
        """Lower what is published to `offset`: the log is about to be cut there."""
        self.count_cut()
        state = self.state()
        if state is not None and max(state.log_end_offset, state.flushed_offset, state.high_watermark) > offset:
            start, end, flushed, high_watermark = (min(offset, one) for one in state.ends[:4])
            self.publish(LogOffsets(start, end, flushed, high_watermark), state.leader_epoch)

    def keep_clock(self, note: ClockNote) -> None:
        """Keep it for the next writer: over the end of the process, and over an orderly restart of the machine."""
        data, end = _CLOCK.pack(*note[:3], self._boot_id), self._slots[0] - _CUTS_BYTES
        self._map[end - _CLOCK_BYTES : end] = data + _CRC.pack(crc32c_value(data))

    def clock(self) -> ClockNote | None:
        """What was kept; None if nothing was."""
        end = self._slots[0] - _CUTS_BYTES
        data, crc = self._map[end - _CLOCK_BYTES : end - _CRC.size], self._map[end - _CRC.size : end]
        rested_ms, boot_ms, offset_ms, boot_id = _CLOCK.unpack(data)
        if _CRC.pack(crc32c_value(data)) != crc or not any(data):
            return None
        return ClockNote(rested_ms, boot_ms, offset_ms, boot_id == self._boot_id)

    def clear(self) -> None:
        """Clear both slots, left by a log that is gone."""
        self.count_cut()
        for at in self._slots:
            self._map[at : at + _SLOT_BYTES] = bytes(_SLOT_BYTES)


class PublishedFile:
    """The mapped file of a directory, for the one process that holds its lock. Not thread-safe: attach under a lock."""

    def __init__(self, directory: Path, pid: int, filesystem: Filesystem = REAL_FILESYSTEM) -> None:
        """Open or make the file; one whose header is damaged is cleared in place. Raises OSError."""
        self._path, self._filesystem, self._pid = directory / PUBLISHED_NAME, filesystem, pid
        self._boot_id = read_boot_id(filesystem)
        size = max(file_size(filesystem, self._path) or 0, (1 + RECORDS_INITIAL) * RECORD_BYTES)
        self._map = self._mapped(-(-size // RECORD_BYTES) * RECORD_BYTES)
        if not _header_is_good(self._map):
            self._map[:] = bytes(len(self._map))
            self._map[:RECORD_BYTES] = _header()
        self._next = self._first_free()
        self._positions = _all_positions(self._map, self._next)

    def entry(self, name: str) -> PublishedEntry:
        """The record of a log, made if it has none. The file doubles when it is full."""
        block = _name_block(name)
        position = self._positions.get(block)
        if position is None:
            position = self._next
            if position == len(self._map):
                self._map = self._mapped(2 * len(self._map))
            self._map[position : position + RECORD_BYTES] = block + bytes(RECORD_BYTES - len(block))
            self._positions[block] = position
            self._next = position + RECORD_BYTES
        return PublishedEntry(self._map, position, self._pid, self._boot_id)

    def _mapped(self, size: int) -> mmap.mmap:
        # Entries handed out before keep the mapping they were made with: the pages are the same.
        return self._filesystem.map_shared(self._path, size, writable=True)

    def _first_free(self) -> int:
        """The place of a new record: after the last one that is not all zeros, so that none with a damaged name is
        reused.

        64 MiB of zeros end the search: a power cut can leave holes, but a sparse file can seem terabytes long.
        """
        position = end = RECORD_BYTES
        empty = bytes(RECORD_BYTES)
        while position < len(self._map) and position - end < _EMPTY_BYTES_MAX:
            position += RECORD_BYTES
            if self._map[position - RECORD_BYTES : position] != empty:
                end = position
        return end


class PublishedReader:
    """Follows one log's record from any process. Never blocks the writer; `read` costs least while that publishes."""

    def __init__(self, directory: Path | str, log_name: str, filesystem: Filesystem = REAL_FILESYSTEM) -> None:
        self._path, self._name, self._filesystem = Path(directory) / PUBLISHED_NAME, log_name, filesystem
        self._boot_id = read_boot_id(filesystem)
        self._map: mmap.mmap | None = None
        self._position: int | None = None
        self._sequence = 0

    def read(self) -> PublishedState | None:
        """The last published state; None without a file, or without a valid slot since this machine started.

        If it did not change since the last call, the file is opened again: the directory may have been restored.
        """
        state = self._current()
        if state is None or state.sequence == self._sequence:
            self._attach()
            state = self._current()
        self._sequence = state.sequence if state is not None else 0
        return state

    def _current(self) -> PublishedState | None:
        if self._map is None or self._position is None:
            return None
        return _newest(self._map, self._position, self._boot_id)

    def cuts(self) -> int:
        """How often the log was cut, as far as the file was opened by `read`; costs a fraction of a microsecond."""
        mapped, position = self._map, self._position
        return 0 if mapped is None or position is None else _cuts(mapped, position)

    def unmap(self) -> None:
        """Drop the mapping: while it exists, the disk can't be unmounted. The next `read` opens it again."""
        self._map = self._position = None

    def _attach(self) -> None:
        self._map = self._position = None
        size = (file_size(self._filesystem, self._path) or 0) // RECORD_BYTES * RECORD_BYTES
        if size <= RECORD_BYTES:
            return
        mapped = self._filesystem.map_shared(self._path, size, writable=False)
        if _header_is_good(mapped):
            self._map, self._position = mapped, _find(mapped, self._name)


def read_published(
    directory: Path | str, log_name: str, filesystem: Filesystem = REAL_FILESYSTEM
) -> PublishedState | None:
    """What the writer of `log_name` published last; None as PublishedReader.read."""
    return PublishedReader(directory, log_name, filesystem).read()


def read_boot_id(filesystem: Filesystem = REAL_FILESYSTEM) -> bytes:
    """16 bytes that change with every start of the machine; zeros where the system has none (readers then get None)."""
    try:
        file = filesystem.open(_BOOT_ID_PATH, writable=False)
    except FileNotFoundError:
        return bytes(16)
    with closing(file):
        return UUID(file.read_at(64, 0).decode("ascii").strip()).bytes


def _cuts(mapped: mmap.mmap, position: int) -> int:
    end = position + SLOTS_AT[0]
    return int.from_bytes(mapped[end - _CUTS_BYTES : end])


def _newest(mapped: mmap.mmap, position: int, boot_id: bytes) -> PublishedState | None:
    if boot_id == bytes(16):
        return None
    alone: list[_Slot] = []
    for _ in range(_READ_TRIES):
        slots = _valid_slots(mapped, position)
        # A single valid slot may be older than the other one was before it was overwritten; if it is seen twice, it is
        # not.
        if len(slots) == len(SLOTS_AT) or (slots and slots == alone):
            ours = [fields for fields in slots if fields[-1] == boot_id]
            return PublishedState(*max(ours)[:-1]) if ours else None
        if not slots and not any(mapped[position + SLOTS_AT[0] : position + RECORD_BYTES]):
            return None  # never written
        alone = slots
    return None


def _valid_slots(mapped: mmap.mmap, position: int) -> list[_Slot]:
    slots: list[_Slot] = []
    for at in SLOTS_AT:
        slot = mapped[position + at : position + at + _SLOT_BYTES]  # a copy, checked and decoded below
        body = slot[: _BODY.size]
        if _CRC.unpack_from(slot, _BODY.size)[0] == crc32c_value(body):
            slots.append(_BODY.unpack(body))
    return slots


def _all_positions(mapped: mmap.mmap, end: int) -> dict[bytes, int]:
    """The position of each name's record: searching the file for each of ten thousand logs would take minutes."""
    found: dict[bytes, int] = {}
    for position in range(RECORD_BYTES, end, RECORD_BYTES):
        length, _ = _NAME.unpack_from(mapped, position)
        if 0 < length <= _NAME_BYTES_MAX:
            found.setdefault(mapped[position : position + _NAME.size + length + 1], position)
    return found


def _find(mapped: mmap.mmap, name: str) -> int | None:
    block = _name_block(name)
    at = mapped.find(block, RECORD_BYTES)
    while at >= 0 and at % RECORD_BYTES:
        at = mapped.find(block, at + 1)
    return at if at >= 0 else None


def _name_block(name: str) -> bytes:
    data = name.encode("ascii")
    if not 0 < len(data) <= _NAME_BYTES_MAX:
        raise ValueError(f"a log's name has 1 to {_NAME_BYTES_MAX} bytes, not {len(data)}")
    # Zeros follow the name; its length and CRC in front of it distinguish "a-1" from "a-12".
    return _NAME.pack(len(data), crc32c_value(data)) + data + b"\x00"


def _header() -> bytes:
    fields = _HEADER.pack(_MAGIC, VERSION, RECORD_BYTES)
    return (fields + _CRC.pack(crc32c_value(fields))).ljust(RECORD_BYTES, b"\x00")


def _header_is_good(mapped: mmap.mmap) -> bool:
    return mapped[:RECORD_BYTES] == _header()
