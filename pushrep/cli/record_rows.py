"""A record as JSON object and as table cells, for every command that shows records."""

import base64
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filtering import METADATA_HEADER, StreamMetadata
from filtering.errors import shown_partition
from pushrep.env import REAL_FILESYSTEM
from pushrep.outbox import read_identity
from pushrep.records import Record

_CELL_CHARACTERS = 60


def carrier_of(directory: Path, topic: str) -> str:
    """Where the records of a topic carry their metadata, by the outbox in `directory`; "key" without one."""
    identity = read_identity(REAL_FILESYSTEM, directory)
    return identity.carrier if identity is not None and identity.topic == topic else "key"


def metadata_of(record: Record, carrier: str) -> StreamMetadata | None:
    """The stream metadata where the carrier, "key" or "header", has it; None if there is none."""
    if carrier == "key":
        return StreamMetadata.try_unpack(record.key)
    for name, value in reversed(record.headers):
        if name == METADATA_HEADER:
            return StreamMetadata.try_unpack(value)
    return None


def as_json(number: int, record: Record, carrier: str) -> dict[str, Any]:
    """One record of the log of this number (log/directory_files.py); a key or value that is no UTF-8 is in base64."""
    metadata = metadata_of(record, carrier)
    slot, _, partition = shown_partition(number).rpartition("/")
    row: dict[str, Any] = {"slot": slot} if slot else {}
    row |= {"partition": int(partition), "offset": record.offset, "timestamp_ms": record.timestamp_ms}
    if metadata is not None:
        row["source"] = {"pid": metadata.pid, "partition": metadata.partition, "offset": metadata.offset}
    if carrier != "key" or metadata is None:
        row |= field("key", record.key)
    row |= field("value", record.value)
    headers = [field("value", value) | {"name": name} for name, value in record.headers if name != METADATA_HEADER]
    if headers:
        row["headers"] = headers
    return row


def field(name: str, data: bytes | None) -> dict[str, str | None]:
    """Bytes in JSON: their text; what is no UTF-8 is in base64, under another name."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def cell(data: bytes | None) -> str:
    """Bytes in a table: their text if they are UTF-8, cut to fit; nothing for null."""
    if data is None:
        return ""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.hex()
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= _CELL_CHARACTERS else text[: _CELL_CHARACTERS - 1] + "…"


def time_text(timestamp_ms: int) -> str:
    """ISO 8601 in UTC, to the millisecond; the number itself where no calendar goes that far."""
    try:
        return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds")[:-6]
    except (OverflowError, ValueError, OSError):
        return str(timestamp_ms)
