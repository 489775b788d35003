"""The records of one log for a page: source partition and source offset of each, its value as text, JSON, Avro or hex.

Keys, values and headers are in the result only if `AskedRecords.payloads` is set. The sizes, and the 20 bytes of stream
metadata, always are.
"""

import io
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import fastavro

from filtering import METADATA_HEADER, StreamMetadata
from pushrep.cli.read import range_of
from pushrep.cli.record_rows import carrier_of, metadata_of
from pushrep.errors import BadArgument, PushrepError
from pushrep.log import SegmentLog
from pushrep.log.directory_files import log_at
from pushrep.records import Record

Schema: TypeAlias = str | list[Any] | dict[Any, Any]
"""A parsed Avro schema."""
RECORDS_A_PAGE = 20
_CHARACTERS = 4_000  # shown of a value, so that a page of large records stays small
_SCHEMA_ID_BYTES = 5  # of Confluent's wire format: 0, then the schema's id in four bytes
_CONTAINER = b"Obj\x01"
_HEX_LINE = 32
_HEADERS = 50  # shown of a record
_PARSED_BYTES = 256 << 10  # a larger value is shown as hex: parsed and formatted, it takes many times its size
_UNREADABLE = (
    ValueError, EOFError, LookupError, TypeError, RecursionError, PushrepError, fastavro.schema.SchemaParseException,
)  # fmt: skip


class ShownPayload(NamedTuple):
    """A record's payload in the chosen form. why: the error, if the value does not have that form and is shown as
    hex.
    """

    key: str
    value: str
    headers: tuple[tuple[str, str], ...]
    why: str | None


class ShownRecord(NamedTuple):
    """One record. key_hex: the 20 bytes of its metadata in hex, as (producer id, partition, offset). payload: None if
    payloads are hidden.
    """

    offset: int
    timestamp_ms: int
    key_bytes: int | None
    value_bytes: int | None
    metadata: StreamMetadata | None
    key_hex: tuple[str, str, str] | None
    payload: ShownPayload | None


class RecordsPage(NamedTuple):
    """Records of a log with the offsets [first, last). next: the offset to continue from."""

    records: list[ShownRecord]
    first: int
    last: int
    next: int


class AskedRecords(NamedTuple):
    """The query of a page. start: an offset, a time, `earliest` or `latest`. form: a key of FORMS."""

    partition: int = 0
    start: str = "latest"
    form: str = "text"
    payloads: bool = False


def records_page(directory: Path, topic: str, asked: AskedRecords, schema: Schema | None = None) -> RecordsPage:
    """Stable records of one log. schema: for values in Avro.

    Raises PushrepError and click.BadParameter.
    """
    carrier = carrier_of(directory, topic)
    with SegmentLog.open_reader(log_at(directory, topic, asked.partition)) as reader:
        chosen = range_of(reader, topic, asked.partition, asked.start, RECORDS_A_PAGE)
        first, last = reader.bounds()
        shown = [
            _shown(record, carrier, _payload(record, carrier, asked.form, schema) if asked.payloads else None)
            for _, record in chosen.records(RECORDS_A_PAGE)
        ]
    return RecordsPage(shown, first, last, shown[-1].offset + 1 if shown else chosen.start)


def read_schemas(given: Iterable[str]) -> dict[str, Schema]:
    """{topic: schema} of each TOPIC=FILE; a file has an Avro schema in JSON. Raises BadArgument."""
    found = {}
    for one in given:
        topic, equals, file = one.partition("=")
        try:
            found[topic] = fastavro.parse_schema(json.loads(Path(file).read_text(encoding="utf-8")))
        except (OSError, ValueError, fastavro.schema.SchemaParseException) as error:
            raise BadArgument("avro_schema", f"{one}: {error}" if equals else f"{one}: give TOPIC=FILE") from error
    return found


def _shown(record: Record, carrier: str, payload: ShownPayload | None) -> ShownRecord:
    metadata = metadata_of(record, carrier)
    packed = None if metadata is None else metadata.pack().hex(" ")
    return ShownRecord(
        offset=record.offset,
        timestamp_ms=record.timestamp_ms,
        key_bytes=None if record.key is None else len(record.key),
        value_bytes=None if record.value is None else len(record.value),
        metadata=metadata,
        key_hex=None if packed is None else (packed[:23], packed[24:35], packed[36:]),
        payload=payload,
    )


def _payload(record: Record, carrier: str, form: str, schema: Schema | None) -> ShownPayload:
    value, why = record.value or b"", None
    try:
        text = FORMS[form](value, schema)
    except _UNREADABLE as error:
        text, why = _hex(value, None), f"The value is not {form}, it is shown as hex: {error or type(error).__name__}"
    is_metadata = carrier == "key" and metadata_of(record, carrier) is not None
    headers = [(_cut(name), _any(data)) for name, data in record.headers if name != METADATA_HEADER]
    if (more := len(headers) - _HEADERS) > 0:
        headers[_HEADERS:] = [(f"and {more:,} more", "")]
    return ShownPayload("" if is_metadata else _any(record.key), _cut(text), tuple(headers), why)


def _any(data: bytes | None) -> str:
    if data is None:
        return "null"
    try:
        return _cut(data.decode())
    except UnicodeDecodeError:
        return _cut(_hex(data, None))


def _cut(text: str) -> str:
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}… ({len(text):,} characters)"


def _hex(value: bytes, _schema: object) -> str:
    # A byte gives three characters, so these bytes give more than `_cut` shows.
    value = value[:_CHARACTERS]
    return "\n".join(value[at : at + _HEX_LINE].hex(" ") for at in range(0, len(value), _HEX_LINE))


def _parsed(value: bytes) -> bytes:
    if len(value) > _PARSED_BYTES:
        raise ValueError(f"{len(value):,} bytes are too many to format, at most {_PARSED_BYTES:,}")
    return value


def _json(value: bytes, _schema: object) -> str:
    return json.dumps(json.loads(_parsed(value)), indent=2, ensure_ascii=False)


def _avro(value: bytes, schema: Schema | None) -> str:
    found: Any
    if _parsed(value).startswith(_CONTAINER):
        found = list(fastavro.reader(io.BytesIO(value)))
    elif schema is None:
        raise BadArgument(
            "avro_schema", "the topic's schema is missing: start the console with --avro-schema TOPIC=FILE"
        )
    else:
        body = value[_SCHEMA_ID_BYTES:] if value[:1] == b"\0" and len(value) > _SCHEMA_ID_BYTES else value
        rest = io.BytesIO(body)
        found = fastavro.schemaless_reader(rest, schema, None)
        if rest.read(1):
            raise ValueError("the value is longer than the schema says: it was written with another schema")
    return json.dumps(found, indent=2, ensure_ascii=False, default=str)


FORMS: Mapping[str, Callable[[bytes, Schema | None], str]] = MappingProxyType(
    {"text": lambda value, _: value.decode(), "json": _json, "avro": _avro, "hex": _hex}
)
"""The forms of a value: name -> function of (value, schema) that returns text, or raises one of _UNREADABLE."""
