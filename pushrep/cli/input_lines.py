"""Lines of a file as records. Each record is one line, so a run can continue at the number of a line.

    file ─▶ numbered_lines ─▶ (number, bytes) ─▶ LineRules.parse ─▶ Entry; None: a blank line of a CSV; raises BadLine

Lines are counted from 1; the header of a CSV is line 1. The only I/O is reading the given stream.
"""

import csv
import json
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import BinaryIO, NamedTuple

import click

from pushrep.errors import PushrepError

_TIME_END_MS = 1 << 62


class BadLine(PushrepError):
    """The line can't become a record. number: of the line, counted from 1. why: for people."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"line {number}: {why}")
        self.number, self.why = number, why


class Entry(NamedTuple):
    """A line as a record."""

    partition: int
    value: bytes
    timestamp_ms: int | None


class Choices(NamedTuple):
    """The options about lines. `partition_by` and `timestamp_column` are names of a CSV's columns."""

    is_csv: bool
    delimiter: str
    value_is_json: bool
    partitions: int
    partition: int | None
    partition_by: str | None
    timestamp_column: str | None

    @property
    def placement(self) -> str:
        """How lines are distributed over partitions, as text: a part of the source's name."""
        if self.partition is not None:
            return f"partition {self.partition}"
        return f"by column {self.partition_by}" if self.partition_by is not None else "by line number"


def numbered_lines(stream: BinaryIO, line_bytes_max: int) -> Iterator[tuple[int, bytes | BadLine]]:
    """Yield (number, line without its line break); a `BadLine` in place of a line longer than `line_bytes_max`.

    A longer line is never held in memory as a whole.
    """
    number = 0
    while line := stream.readline(line_bytes_max + 2):
        number += 1
        if len(line) > line_bytes_max and not line.endswith(b"\n"):
            while (rest := stream.readline(1 << 16)) and not rest.endswith(b"\n"):
                pass
            yield number, BadLine(number, f"is longer than {line_bytes_max} bytes")
            continue
        yield number, line.removesuffix(b"\n").removesuffix(b"\r")


class LineRules:
    """How a line becomes a record. For CSV call `take_header` with the first line before `parse`."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._columns: list[str] = []
        self._partition_at = self._timestamp_at = -1

    def take_header(self, line: bytes) -> None:
        """Read the names of the columns. Raises ClickException."""
        try:
            self._columns = self._fields(line.removeprefix(b"\xef\xbb\xbf"))
        except (csv.Error, UnicodeDecodeError, StopIteration) as error:
            raise click.ClickException(f"line 1, the CSV's header, can't be read: {error}") from error
        doubled = sorted({name for name in self._columns if self._columns.count(name) > 1})
        if doubled:
            raise click.ClickException(f"line 1, the CSV's header, names {', '.join(doubled)} twice")
        self._partition_at = self._column("--partition-by", self._choices.partition_by)
        self._timestamp_at = self._column("--timestamp-column", self._choices.timestamp_column)

    def parse(self, number: int, line: bytes) -> Entry | None:
        """The record of a line; None for a blank line of a CSV. Raises `BadLine`."""
        if not self._choices.is_csv:
            return Entry(self._place(number, None), line, None)
        if not line:
            return None
        try:
            fields = self._fields(line)
        except UnicodeDecodeError as error:
            raise BadLine(number, f"is not UTF-8 at byte {error.start}") from error
        except (csv.Error, StopIteration) as error:
            raise BadLine(number, f"is not a CSV record: {error} (a record has to be one line)") from error
        if len(fields) != len(self._columns):
            raise BadLine(number, f"has {len(fields)} fields, the header has {len(self._columns)}")
        timestamp_ms = None
        if self._timestamp_at >= 0:
            try:
                timestamp_ms = parse_time_ms(fields[self._timestamp_at])
            except ValueError as error:
                raise BadLine(number, f"column {self._choices.timestamp_column}: {error}") from error
        value = line
        if self._choices.value_is_json:
            record = dict(zip(self._columns, fields, strict=True))
            value = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
        key = fields[self._partition_at] if self._partition_at >= 0 else None
        return Entry(self._place(number, key), value, timestamp_ms)

    def _place(self, number: int, key: str | None) -> int:
        if self._choices.partition is not None:
            return self._choices.partition
        if key is not None:  # CRC-32, not hash(): the same in every process and version of Python
            return zlib.crc32(key.encode()) % self._choices.partitions
        return number % self._choices.partitions

    def _fields(self, line: bytes) -> list[str]:
        return next(csv.reader([line.decode()], strict=True, delimiter=self._choices.delimiter))

    def _column(self, option: str, name: str | None) -> int:
        if name is None:
            return -1
        if name not in self._columns:
            raise click.ClickException(
                f"{option} {name}: the CSV has no column {name}; it has {', '.join(self._columns)}"
            )
        return self._columns.index(name)


def parse_time_ms(text: str) -> int:
    """Milliseconds since 1970 UTC. text: the number itself, or an ISO 8601 time (UTC if it names no zone).

    Raises ValueError; its message says which texts are valid.
    """
    if text.isascii() and text.isdigit():
        time_ms = int(text) if len(text) < 20 else _TIME_END_MS
    else:
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            raise ValueError(f"{text!r} is neither an ISO 8601 time nor milliseconds since 1970") from None
        time = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
        time_ms = round(time.timestamp() * 1000)
    if not 0 <= time_ms < _TIME_END_MS:
        raise ValueError(f"{text!r} is before 1970 or too far ahead")
    return time_ms
