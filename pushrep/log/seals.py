"""Seals: what a segment held when it was rolled. They check the fields that no CRC covers, and that no batch is
missing.

    00000000000000001042.seal     84 bytes, big-endian
      0    magic 8, "pushseal" | version u32, 2 | CRC of the first batch u32
     16    topic id 16 | partition i32 | headers' CRC-32C u32
     40    base offset i64 | end offset i64 | size of the .log in bytes i64
     64    batches i64 | CRC of the last batch u32 | position of the last batch u32 | CRC-32C u32 of the 80 before

The headers' CRC goes over the first 21 bytes of every batch, one after the other: base offset, length, leader epoch,
magic, CRC. So it finds an epoch that changed, a segment of another log, and two that were swapped. The first and the
last batch's CRC, as in their headers, are for `SealChecks`, which reads no more than that.

A cut or a replacement of a segment first removes its seal from the disk, because a seal beside other bytes means
damage. Only a repair whose bytes match the seal keeps it. A seal that can't be read is ignored.
"""

import logging
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID

from pushrep.crc32c import crc32c_extend, crc32c_value
from pushrep.env import Filesystem, put_in_place, write_beside
from pushrep.log.directory_files import (
    SEAL_SUFFIX,
    BadLogFile,
    parse_log_name,
    read_bounded,
    read_partition_metadata,
    segment_path,
)
from pushrep.log.errors import CorruptPartitionMetadata, is_reading_short
from pushrep.log.walk import ReadableFile, ScanRange, WholeBatch, scan
from pushrep.records import BatchRun
from pushrep.records.header import CRC_AT, LENGTH, LENGTH_AT, LENGTH_ENDS_AT, SEALED_BYTES

_LOG = logging.getLogger("pushrep.log")

VERSION = 2
_MAGIC = b"pushseal"
_BODY = struct.Struct(">8sII16siIqqqqII")
_CRC = struct.Struct(">I")
SEAL_BYTES = _BODY.size + _CRC.size
_FOLD_BYTES = 64 << 10

assert SEAL_BYTES == 84, "docs/internals/formats/directory-files.md says so"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """What a segment held."""

    log_id: UUID
    partition: int
    base_offset: int
    end_offset: int
    size_bytes: int
    batches: int
    headers_crc: int
    first_crc: int
    last_crc: int
    last_position: int

    def contradiction(self, found: "Seal") -> str | None:
        """Why the segment that was found is not the sealed one; None if it is."""
        if self.log_id != found.log_id:
            return f"it was sealed as a segment of log {self.log_id}, this is {found.log_id}"
        if self.partition != found.partition:  # Kafka's partitions of one topic share an id
            return f"it was sealed as a segment of partition {self.partition}, this is {found.partition}"
        if self.base_offset != found.base_offset:
            return f"it was sealed as the segment that begins at {self.base_offset}"
        if (found.batches, found.end_offset, found.size_bytes) != (self.batches, self.end_offset, self.size_bytes):
            return (
                f"{found.batches} batches to {found.end_offset} in {found.size_bytes} bytes where {self.batches} to "
                f"{self.end_offset} in {self.size_bytes} were sealed (if a broker wrote to it since: remove its seal)"
            )
        if found.headers_crc != self.headers_crc:
            return f"its headers' CRC-32C is 0x{found.headers_crc:08x}, sealed was 0x{self.headers_crc:08x}"
        return None


class HeadersCrc:
    """The CRC over the first 21 bytes of each batch, as they come.

    pending: a buffer to which an append adds them by `+=`, because a call for each batch would cost twice as much; call
    `fold_if_due` now and then.
    """

    __slots__ = ("_first", "_folded", "_folded_bytes", "_last", "pending")

    def __init__(self) -> None:
        self.pending, self._folded, self._folded_bytes = bytearray(), 0, 0
        self._first = self._last = bytes(SEALED_BYTES)

    def add_run(self, run: BatchRun) -> None:
        """Add every batch of a run."""
        self.pending += run.sealed_bytes()
        self._fold()

    @property
    def batches(self) -> int:
        """How many batches there were."""
        return (self._folded_bytes + len(self.pending)) // SEALED_BYTES

    def seal(self, log_id: UUID, log: Path, base_offset: int, end_offset: int, size_bytes: int) -> Seal:
        """The seal of a segment of these batches."""
        self._fold()
        return Seal(
            log_id=log_id,
            partition=parse_log_name(log.name)[1],
            base_offset=base_offset,
            end_offset=end_offset,
            size_bytes=size_bytes,
            batches=self.batches,
            headers_crc=self._folded,
            first_crc=_crc_of(self._first),
            last_crc=_crc_of(self._last),
            last_position=size_bytes - LENGTH.unpack_from(self._last, LENGTH_AT)[0] - LENGTH_ENDS_AT,
        )

    def fold_if_due(self) -> None:
        """Keep the memory small."""
        if len(self.pending) >= _FOLD_BYTES:
            self._fold()

    def _fold(self) -> None:
        if not self.pending:
            return
        if not self._folded_bytes:
            self._first = bytes(self.pending[:SEALED_BYTES])
        self._last = bytes(self.pending[-SEALED_BYTES:])
        self._folded = crc32c_extend(self._folded, bytes(self.pending))
        self._folded_bytes += len(self.pending)
        self.pending.clear()


def encode_seal(seal: Seal) -> bytes:
    """The file's bytes."""
    body = _BODY.pack(
        _MAGIC,
        VERSION,
        seal.first_crc,
        seal.log_id.bytes,
        seal.partition,
        seal.headers_crc,
        seal.base_offset,
        seal.end_offset,
        seal.size_bytes,
        seal.batches,
        seal.last_crc,
        seal.last_position,
    )
    return body + _CRC.pack(crc32c_value(body))


def decode_seal(data: bytes) -> Seal:
    """Raises BadLogFile."""
    if len(data) != SEAL_BYTES:
        raise BadLogFile(f"{len(data)} bytes where {SEAL_BYTES} are expected")
    body = data[: _BODY.size]
    magic, version, first_crc, log_id, partition, headers_crc, *places, last_crc, last_position = _BODY.unpack(body)
    if magic != _MAGIC or _CRC.unpack_from(data, _BODY.size)[0] != crc32c_value(body):
        raise BadLogFile("its CRC does not match" if magic == _MAGIC else "it is no seal")
    if version != VERSION:
        raise BadLogFile(f"version {version} where {VERSION} is read")
    base, end, size, batches = places
    return Seal(
        log_id=UUID(bytes=log_id),
        partition=partition,
        base_offset=base,
        end_offset=end,
        size_bytes=size,
        batches=batches,
        headers_crc=headers_crc,
        first_crc=first_crc,
        last_crc=last_crc,
        last_position=last_position,
    )


def read_seal(filesystem: Filesystem, log: Path, base_offset: int) -> Seal | None:
    """The seal of the segment; None if there is none, or it can't be read, which is logged. Raises OSError."""
    try:
        return checked_seal(filesystem, log, base_offset)
    except BadLogFile as error:
        _LOG.warning("%s counts as absent: %s", segment_path(log, base_offset, SEAL_SUFFIX), error)
        return None


def checked_seal(filesystem: Filesystem, log: Path, base_offset: int) -> Seal | None:
    """The same. Raises BadLogFile, OSError."""
    data = read_bounded(segment_path(log, base_offset, SEAL_SUFFIX), filesystem, SEAL_BYTES)
    return decode_seal(data) if data is not None else None


def remove_seals(filesystem: Filesystem, log: Path, bases: Iterable[int]) -> None:
    """Remove the seals of segments that are about to be cut or replaced, durably. Raises OSError."""
    paths = [segment_path(log, base, SEAL_SUFFIX) for base in bases]
    found = [path for path in paths if filesystem.exists(path)]
    for path in found:
        filesystem.remove(path)
    if found:
        filesystem.sync_directory(log)


def write_seal(filesystem: Filesystem, log: Path, seal: Seal) -> None:
    """Write and sync the file, which others see whole; the caller syncs the directory for its name. Raises OSError."""
    path = segment_path(log, seal.base_offset, SEAL_SUFFIX)
    write_beside(filesystem, path, encode_seal(seal))
    put_in_place(filesystem, path)


class SealChecks:
    """Compares each sealed segment of one log with its seal when a reader first opens it: whose it is, its first batch
    and its last. So no record of another log's segment of the same shape is given. Two threads may check one twice.

    Three small reads, whatever the segment's size; what lies between the two batches is left to verify and the scrub.
    """

    def __init__(self, filesystem: Filesystem, log: Path) -> None:
        self._filesystem, self._log = filesystem, log
        self._passed: set[int] = set()

    def forget(self) -> None:
        """The log was cut: segments may be others now."""
        self._passed = set()

    def contradiction(self, base_offset: int, file: ReadableFile) -> str | None:
        """Why the file is not the segment that was sealed; None if it is, has no seal, or passed before.

        The seal of a segment that is cut or replaced meanwhile may contradict the file that was opened before: so look
        a second time, with the file opened anew. Raises OSError.
        """
        if base_offset in self._passed:
            return None
        seal, why = self._readable_seal(base_offset), None
        if seal is not None:
            first = ScanRange(base_offset=base_offset)
            last = first._replace(position=seal.last_position, last_offset=seal.end_offset - 1)
            why = self._owner_contradiction(seal, base_offset)
            why = why or _batch_contradiction(file, first, seal.first_crc)
            why = why or _batch_contradiction(file, last, seal.last_crc)
        if why is None:
            self._passed.add(base_offset)
        return why

    def _readable_seal(self, base_offset: int) -> Seal | None:
        try:
            return read_seal(self._filesystem, self._log, base_offset)
        except OSError as error:
            if is_reading_short(error):
                raise  # else the segment would pass for good
            return None  # verify names it; the records can be read without it

    def _owner_contradiction(self, seal: Seal, base_offset: int) -> str | None:
        try:
            log_id = read_partition_metadata(self._log, self._filesystem) or seal.log_id
        except (CorruptPartitionMetadata, OSError) as error:
            if is_reading_short(error):
                raise
            log_id = seal.log_id
        partition = parse_log_name(self._log.name)[1]
        return seal.contradiction(replace(seal, log_id=log_id, partition=partition, base_offset=base_offset))


def _batch_contradiction(file: ReadableFile, what: ScanRange, sealed_crc: int) -> str | None:
    """Why the batch at the beginning of `what` is not the sealed one. None, too, if it is damaged: then the walk gives
    what is whole before it, and the reason.
    """
    found = _crc_of(file.read_at(SEALED_BYTES, what.position).ljust(SEALED_BYTES, b"\0"))
    if found == sealed_crc or not isinstance(next(scan(file, what)), WholeBatch):
        return None
    return f"its batch at byte {what.position} has the CRC-32C 0x{found:08x}, sealed was 0x{sealed_crc:08x}"


def _crc_of(header: bytes) -> int:
    crc: int = _CRC.unpack_from(header, CRC_AT)[0]
    return crc
