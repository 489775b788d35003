"""A small JSON file that notices every changed bit: {"version": n, ...fields, "crc32c": c}, replaced whole.

crc32c is CRC-32C over the other fields, the version among them, as compact JSON with sorted keys.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c

from pushrep.env.filesystem import Filesystem, read_whole, write_atomic


class BadJsonFile(ValueError):
    """The file is there and can't be believed; the text says why."""


def read_checked_json(filesystem: Filesystem, path: Path, size_max: int, newest_version: int) -> dict[str, Any] | None:
    """The fields, without version and crc32c; None if there is no file. Raises BadJsonFile, OSError."""
    data = read_whole(filesystem, path, size_max)
    if data is None:
        return None
    try:
        fields = json.loads(data)
        crc = fields.pop("crc32c")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadJsonFile(f"it is no JSON object with a crc32c: {error}") from error
    if crc != _crc(fields):
        raise BadJsonFile("its crc32c does not match")
    version = fields.pop("version", None)
    if version not in range(1, newest_version + 1):
        raise BadJsonFile(f"its version is {version}, not {newest_version}: it was written by a newer pushrep")
    return dict(fields)


def checked_json(fields: Mapping[str, Any], version: int) -> bytes:
    """The file's bytes."""
    whole = {"version": version, **fields}
    whole["crc32c"] = _crc(whole)
    return json.dumps(whole, sort_keys=True, indent=1).encode() + b"\n"


def write_checked_json(filesystem: Filesystem, path: Path, fields: Mapping[str, Any], version: int) -> None:
    """On disk when this returns. Raises OSError; the old file stands then."""
    write_atomic(filesystem, path, [checked_json(fields, version)])


def _crc(fields: Mapping[str, Any]) -> int:
    return int(google_crc32c.value(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()))
