"""`partition.metadata`: which log this is, in Kafka's format with a line of ours below.

    version: 0
    topic_id: 1Kz0qS9WRXC6kV2F0h0v8g      the uuid's 16 bytes in unpadded URL-safe base64, as Kafka's `Uuid` writes it
    crc32c: 546c8642                      ours: CRC-32C of the bytes above, 8 hexadecimal digits

Kafka reads the first two lines and no further (`PartitionMetadataFile`). A file without the third is Kafka's own; it
ends right behind the id.
A bad file is refused by name, never counted as absent: a new id would make every record look new to the filter.
"""

import base64
import binascii
import re
from pathlib import Path
from uuid import UUID

import google_crc32c

from pushrep.log.checkpoints import read_bounded
from pushrep.log.errors import CorruptPartitionMetadata
from pushrep.seams import REAL_FILESYSTEM, Filesystem, write_atomic

PARTITION_METADATA_NAME = "partition.metadata"
_FORM = re.compile(rb"version: 0\ntopic_id: ([A-Za-z0-9_-]{22})(?:\n(?:crc32c: ([0-9a-f]{8})\n)?)?")


def encode_partition_metadata(topic_id: UUID) -> bytes:
    """The file's bytes. The zero uuid means "no id" to Kafka: ValueError."""
    if topic_id.int == 0:
        raise ValueError("the zero uuid is no topic id")
    body = b"version: 0\ntopic_id: %s\n" % base64.urlsafe_b64encode(topic_id.bytes).rstrip(b"=")
    return body + b"crc32c: %08x\n" % google_crc32c.value(body)


def decode_partition_metadata(data: bytes) -> UUID:
    """The topic id in a file that we or Kafka wrote. Raises ValueError with the reason."""
    match = _FORM.fullmatch(data)
    if match is None:
        raise ValueError("not the lines version, topic_id and crc32c")
    if match[2] is not None and int(match[2], 16) != google_crc32c.value(data[: match.end(1) + 1]):
        raise ValueError("its CRC does not match")
    try:
        topic_id = UUID(bytes=base64.urlsafe_b64decode(match[1] + b"=="))
    except (binascii.Error, ValueError) as error:
        raise ValueError("its topic_id is no uuid in base64") from error
    if topic_id.int == 0:
        raise ValueError("its topic_id is zero")
    return topic_id


def read_partition_metadata(log_directory: Path, filesystem: Filesystem = REAL_FILESYSTEM) -> UUID | None:
    """The id of the log in this directory; None if it has no file yet. Raises CorruptPartitionMetadata."""
    path = log_directory / PARTITION_METADATA_NAME
    try:
        data = read_bounded(path, filesystem)
        return decode_partition_metadata(data) if data is not None else None
    except ValueError as error:
        raise CorruptPartitionMetadata(path, str(error)) from error


def write_partition_metadata(log_directory: Path, topic_id: UUID, filesystem: Filesystem = REAL_FILESYSTEM) -> None:
    """Write the file once, when the log is made; on disk under its name when this returns."""
    write_atomic(filesystem, log_directory / PARTITION_METADATA_NAME, [encode_partition_metadata(topic_id)])
