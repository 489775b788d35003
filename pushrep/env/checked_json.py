"""JSON files with a checksum: a small file that is replaced whole, and a journal that is appended to.

    file       {"version": n, ...fields, "crc32c": c}      c: over the other fields as compact JSON with sorted keys
    journal    lines of  crc32c, 8 hex digits | space | JSON | newline             crc32c: over the JSON's bytes

A journal's last line may be torn: its write was never acknowledged. A bad line before whole ones is damage. CRCs are
CRC-32C.
"""

import errno
import json
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pushrep.crc32c import crc32c_value
from pushrep.env.filesystem import Filesystem, read_whole, write_atomic
from pushrep.errors import CorruptFile

_DEPTH_MAX = 64
_Value = TypeVar("_Value")


class BadJsonFile(ValueError):
    """The text is no JSON, or nested deeper than 64 levels."""


def read_checked_json(  # noqa: PLR0913, PLR0917 - a file, and what it has to be
    filesystem: Filesystem,
    path: Path,
    size_max: int,
    version: int,
    value_of: Callable[[dict[str, Any]], _Value],
    way_on: str,
) -> _Value | None:
    """What `value_of` makes of the file's fields, without version and crc32c; None if there is no file.

    way_on: what to do about a damaged file, for the error. Raises CorruptFile, also where `value_of` misses a field or
    meets an impossible one; OSError.
    """
    try:
        data = read_whole(filesystem, path, size_max)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise CorruptFile(path, f"{error.strerror}; {way_on}") from error
        raise
    if data is None:
        return None
    try:
        fields = parse_json(data)
        crc = fields.pop("crc32c")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptFile(path, f"it is no JSON object with a crc32c: {error}; {way_on}") from error
    if crc != crc_of_fields(fields):
        raise CorruptFile(path, f"its checksum, crc32c, does not match; {way_on}")
    if (found := fields.pop("version", None)) != version:
        raise CorruptFile(path, f"its version is {found!r}, this pushrep reads {version}: use the one that wrote it")
    try:
        return value_of(fields)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptFile(path, f"a field is missing or impossible: {error!r}; {way_on}") from error


def parse_json(data: bytes | str) -> Any:
    """The value of JSON that others wrote. Raises BadJsonFile for what is no JSON, or deeper than 64."""
    try:
        value = json.loads(data, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise BadJsonFile(f"no JSON: {error}") from error
    opening = ("[", "{") if isinstance(data, str) else (b"[", b"{")
    if sum(map(data.count, opening)) > _DEPTH_MAX and _is_deeper(value, _DEPTH_MAX):  # type: ignore[arg-type]
        raise BadJsonFile(f"JSON with more than {_DEPTH_MAX} levels")
    return value


def _finite(text: str) -> float:
    """The number, where it is one: JSON knows no NaN, and 1e999 would become infinity."""
    if isfinite(number := float(text)):
        return number
    raise ValueError(f"{text:.20} is no number of JSON")


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, list | dict):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(part, levels - 1) for part in parts)


def checked_json(fields: Mapping[str, Any], version: int, indent: int | None = 1) -> bytes:
    """The file's bytes."""
    whole = {"version": version, **fields}
    whole["crc32c"] = crc_of_fields(whole)
    return json.dumps(whole, sort_keys=True, indent=indent).encode() + b"\n"


def write_checked_json(filesystem: Filesystem, path: Path, fields: Mapping[str, Any], version: int) -> None:
    """Write the file; on disk when this returns. Raises OSError; then the old file is still there."""
    write_atomic(filesystem, path, [checked_json(fields, version)])


def crc_of_fields(fields: Mapping[str, Any]) -> int:
    """CRC-32C of the fields as compact JSON in ASCII with sorted keys."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return int(crc32c_value(text.encode()))


class JournalLine(NamedTuple):
    """A whole line of a journal: its JSON value, and the position after its newline."""

    value: Any
    end: int


class JournalScan(NamedTuple):
    """The whole lines up to the first that is not. is_damaged: whole lines follow it, so it is not a torn end."""

    lines: list[JournalLine]
    is_damaged: bool

    @property
    def end(self) -> int:
        """The position after the last of them, where a torn end begins."""
        return self.lines[-1].end if self.lines else 0


def journal_line(value: Any) -> bytes:
    """One line of a journal."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return b"%08x %s\n" % (crc32c_value(text), text)


def scan_journal(data: bytes) -> JournalScan:
    """The lines of a journal, or of a part of one that begins with a line. Raises BadJsonFile for a whole line that is
    no JSON.
    """
    texts = data.split(b"\n")[:-1]
    lines: list[JournalLine] = []
    end = 0
    for number, text in enumerate(texts):
        if not _is_whole(text):
            return JournalScan(lines, is_damaged=any(map(_is_whole, texts[number + 1 :])))
        end += len(text) + 1
        lines.append(JournalLine(parse_json(text[9:]), end))
    return JournalScan(lines, is_damaged=False)


def _is_whole(text: bytes) -> bool:
    return len(text) >= 9 and text[8:9] == b" " and text[:8] == b"%08x" % crc32c_value(text[9:])
