"""Seals: what a segment held when it was rolled. They check the fields that no CRC covers, and that no batch is
missing.

    00000000000000001042.seal     84 bytes, big-endian
      0    magic 8, "pushseal" | version u32, 1 | zeros 4
     16    topic id 16 | partition i32 | headers' CRC-32C u32
     40    base offset i64 | end offset i64 | size of the .log in bytes i64
     64    batches i64 | zeros 8 | CRC-32C u32 of the 80 before

The headers' CRC goes over the first 21 bytes of every batch, one after the other: base offset, length, leader epoch,
magic, CRC. So it finds an epoch that changed, a segment of another log, and two that were swapped.

A cut or a replacement of a segment first removes its seal from the disk, because a seal beside other bytes means
damage. Only a repair whose bytes match the seal keeps it. A seal that can't be read is ignored.
"""

import errno
import logging
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from pushrep.crc32c import crc32c_extend, crc32c_value
from pushrep.env import Filesystem, put_in_place, read_whole, write_beside
from pushrep.log.directory_files import SEAL_SUFFIX, BadLogFile, parse_log_name, segment_path
from pushrep.records import BatchRun
from pushrep.records.header import SEALED_BYTES

_LOG = logging.getLogger("pushrep.log")

VERSION = 1
_MAGIC = b"pushseal"
_BODY = struct.Struct(">8sI4x16siIqqqq8x")
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

    __slots__ = ("_folded", "_folded_bytes", "pending")

    def __init__(self) -> None:
        self.pending, self._folded, self._folded_bytes = bytearray(), 0, 0

    def add_run(self, run: BatchRun) -> None:
        """Add every batch of a run."""
        self.pending += run.sealed_bytes()
        self._fold()

    @property
    def value(self) -> int:
        """The CRC of all so far."""
        self._fold()
        return self._folded

    @property
    def batches(self) -> int:
        """How many batches there were."""
        return (self._folded_bytes + len(self.pending)) // SEALED_BYTES

    def seal(self, log_id: UUID, log: Path, base_offset: int, end_offset: int, size_bytes: int) -> Seal:
        """The seal of a segment of these batches."""
        return Seal(
            log_id=log_id,
            partition=parse_log_name(log.name)[1],
            base_offset=base_offset,
            end_offset=end_offset,
            size_bytes=size_bytes,
            batches=self.batches,
            headers_crc=self.value,
        )

    def fold_if_due(self) -> None:
        """Keep the memory small."""
        if len(self.pending) >= _FOLD_BYTES:
            self._fold()

    def _fold(self) -> None:
        self._folded = crc32c_extend(self._folded, bytes(self.pending))
        self._folded_bytes += len(self.pending)
        self.pending.clear()


def encode_seal(seal: Seal) -> bytes:
    """The file's bytes."""
    body = _BODY.pack(
        _MAGIC,
        VERSION,
        seal.log_id.bytes,
        seal.partition,
        seal.headers_crc,
        seal.base_offset,
        seal.end_offset,
        seal.size_bytes,
        seal.batches,
    )
    return body + _CRC.pack(crc32c_value(body))


def decode_seal(data: bytes) -> Seal:
    """Raises BadLogFile."""
    if len(data) != SEAL_BYTES:
        raise BadLogFile(f"{len(data)} bytes where {SEAL_BYTES} are expected")
    body = data[: _BODY.size]
    magic, version, log_id, partition, headers_crc, base, end, size, batches = _BODY.unpack(body)
    if magic != _MAGIC or _CRC.unpack_from(data, _BODY.size)[0] != crc32c_value(body):
        raise BadLogFile("its CRC does not match" if magic == _MAGIC else "it is no seal")
    if version != VERSION:
        raise BadLogFile(f"version {version} where {VERSION} is read")
    return Seal(
        log_id=UUID(bytes=log_id),
        partition=partition,
        base_offset=base,
        end_offset=end,
        size_bytes=size,
        batches=batches,
        headers_crc=headers_crc,
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
    try:
        data = read_whole(filesystem, segment_path(log, base_offset, SEAL_SUFFIX), SEAL_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise BadLogFile(error.strerror) from error
        raise
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
