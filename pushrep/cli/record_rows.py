"""A record as a JSON object or as table cells, for the commands that show records."""

import base64
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filtering import METADATA_HEADER, StreamMetadata
from filtering.errors import shown_partition
from pushrep.env import REAL_FILESYSTEM
from pushrep.outbox import read_identity
from pushrep.records import Record
from pushrep.status.terminal import printable

_CELL_CHARACTERS = 60


def carrier_of(directory: Path, topic: str) -> str:
    """Where the records of a topic carry their metadata: as stored by the outbox in `directory`; "key" without one."""
    identity = read_identity(REAL_FILESYSTEM, directory)
    return identity.carrier if identity is not None and identity.topic == topic else "key"


def metadata_of(record: Record, carrier: str) -> StreamMetadata | None:
    """The stream metadata in the record's key (carrier: "key") or header; None if it has none."""
    if is_in_key(record, carrier):
        return StreamMetadata.try_unpack(record.key)
    return StreamMetadata.try_unpack(dict(record.headers).get(METADATA_HEADER))  # the last one counts


def is_in_key(record: Record, carrier: str) -> bool:
    """Whether the record's key is stream metadata."""
    return carrier == "key" and StreamMetadata.try_unpack(record.key) is not None


def as_json(number: int, record: Record, carrier: str) -> dict[str, Any]:
    """A record as a JSON object. number: of its log, which names slot and partition (log/directory_files.py)."""
    metadata = metadata_of(record, carrier)
    slot, _, partition = shown_partition(number).rpartition("/")
    row: dict[str, Any] = {"slot": slot} if slot else {}
    row |= {"partition": int(partition), "offset": record.offset, "timestamp_ms": record.timestamp_ms}
    if metadata is not None:
        row["source"] = {"pid": metadata.pid, "partition": metadata.partition, "offset": metadata.offset}
    if not is_in_key(record, carrier):
        row |= field("key", record.key)
    row |= field("value", record.value)
    headers = [field("value", value) | {"name": name} for name, value in record.headers if name != METADATA_HEADER]
    if headers:
        row["headers"] = headers
    return row


COLUMNS = ("partition", "offset", "timestamp", "value", "key", "source", "headers")


def as_row(number: int, record: Record, carrier: str) -> tuple[str, ...]:
    """A record as a row of COLUMNS. number: as of `as_json`."""
    metadata = metadata_of(record, carrier)
    return (
        shown_partition(number),
        str(record.offset),
        time_text(record.timestamp_ms),
        cell(record.value),
        "" if is_in_key(record, carrier) else cell(record.key),
        f"{metadata.pid} {metadata.partition} {metadata.offset}" if metadata else "",
        " ".join(f"{name}={cell(value)}" for name, value in record.headers if name != METADATA_HEADER),
    )


def field(name: str, data: bytes | None) -> dict[str, str | None]:
    """Bytes in JSON: {name: text}; {name + "_base64": base64} if they are not UTF-8."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def cell(data: bytes | None) -> str:
    """Bytes in a table: their text, or hex if they are not UTF-8, cut to 60 characters; empty for null."""
    if data is None:
        return ""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.hex()
    text = printable(text)
    return text if len(text) <= _CELL_CHARACTERS else text[: _CELL_CHARACTERS - 1] + "…"


def time_text(timestamp_ms: int) -> str:
    """ISO 8601 in UTC, to the millisecond; the number itself for a time beyond Python's calendar."""
    try:
        return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds")[:-6]
    except (OverflowError, ValueError, OSError):
        return str(timestamp_ms)
