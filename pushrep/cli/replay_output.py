"""What `pushrep replay` writes: one writer a format, each of them whole after every `write` and `close`.

json    an object a line            raw     the value and a newline
table   columns a line              avro    an object container file (Avro 1.11), deflate, schema RECORD_SCHEMA
"""

import json
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, Protocol

from fastavro.write import Writer as AvroWriter

from pushrep.cli.record_rows import as_json, cell, metadata_of, time_text
from pushrep.records import Record

_BYTES = ["null", "bytes"]
RECORD_SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Record",
    "namespace": "pushrep",
    "fields": [
        {"name": "partition", "type": "int"},
        {"name": "offset", "type": "long"},
        {"name": "timestamp_ms", "type": "long", "doc": "since 1970-01-01 UTC, -1 for none"},
        {"name": "key", "type": _BYTES},
        {"name": "value", "type": _BYTES},
        {
            "name": "headers",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Header",
                    "fields": [{"name": "name", "type": "string"}, {"name": "value", "type": _BYTES}],
                },
            },
        },
    ],
}
_ROW = "{:>12}  {:<23}  {:<32}  {:<32}  {}\n"


class RecordWriter(Protocol):
    """Writes records as one format."""

    def write(self, records: Iterable[Record]) -> None: ...
    def flush(self) -> None:
        """Bring all that was written to the reader."""
        ...


class LineOutput:
    """A line, or lines, a record."""

    def __init__(self, out: BinaryIO, line: Callable[[Record], bytes], head: bytes = b"") -> None:
        self._out, self._line = out, line
        out.write(head)

    def write(self, records: Iterable[Record]) -> None:
        """In one piece, so that an interrupt leaves no half of a line."""
        self._out.write(b"".join(map(self._line, records)))

    def flush(self) -> None:
        self._out.flush()


class AvroFile:
    """One container file; a flush ends a block."""

    def __init__(self, out: BinaryIO, partition: int) -> None:
        self._out, self._partition = out, partition
        self._writer = AvroWriter(out, RECORD_SCHEMA, codec="deflate")

    def write(self, records: Iterable[Record]) -> None:
        for record in records:
            self._writer.write(
                {
                    "partition": self._partition,
                    "offset": record.offset,
                    "timestamp_ms": record.timestamp_ms,
                    "key": record.key,
                    "value": record.value,
                    "headers": [{"name": name, "value": value} for name, value in record.headers],
                }
            )

    def flush(self) -> None:
        self._writer.flush()
        self._out.flush()


def writer_for(format_: str, out: BinaryIO, *, partition: int, carrier: str) -> RecordWriter:
    """The writer of that name."""
    match format_:
        case "avro":
            return AvroFile(out, partition)
        case "raw":
            return LineOutput(out, lambda record: (record.value or b"") + b"\n")
        case "json":
            return LineOutput(
                out, lambda r: json.dumps(as_json(partition, r, carrier), ensure_ascii=False).encode() + b"\n"
            )
    head = _ROW.format("offset", "timestamp", "source", "key", "value").encode()
    return LineOutput(out, lambda record: _row(record, carrier), head)


def _row(record: Record, carrier: str) -> bytes:
    metadata = metadata_of(record, carrier)
    source = f"{metadata.pid} {metadata.partition} {metadata.offset}" if metadata else ""
    key = "" if carrier == "key" and metadata else cell(record.key)
    return _ROW.format(record.offset, time_text(record.timestamp_ms), source, key, cell(record.value)).encode()
