"""The default serializer: what services have as events → the bytes of a record's value.

    bytes                            themselves
    pydantic's models                their model_dump_json()
    msgspec's structs                msgspec.json.encode
    dataclasses, dicts, lists, text  JSON; times as ISO 8601, Decimal and UUID as text, an Enum as its value

Neither pydantic nor msgspec is imported here: an event of theirs brings its module along.
"""

import datetime as dt
import decimal
import enum
import json
import sys
import uuid
from dataclasses import fields, is_dataclass
from typing import Any


def to_json(event: Any) -> bytes:
    """The event's bytes. Raises TypeError for what has none."""
    if isinstance(event, bytes | bytearray | memoryview):
        return bytes(event)
    if (dump := getattr(event, "model_dump_json", None)) is not None:
        return str(dump()).encode()
    if (msgspec := sys.modules.get("msgspec")) is not None and isinstance(event, msgspec.Struct):
        encoded: bytes = msgspec.json.encode(event)
        return encoded
    return json.dumps(event, default=_plain, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset | tuple):
        return sorted(value) if isinstance(value, set | frozenset) else list(value)
    raise TypeError(f"{type(value).__name__} has no JSON: give the topic a serializer=")
