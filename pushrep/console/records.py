"""The records of one log for a page: source partition and source offset of each, its value as text or hex.

Keys, values and headers are in the result only if `AskedRecords.payloads` is set. The sizes, and the 20 bytes of stream
metadata, always are. At most 4,000 characters of each are shown: they are chosen before anything is decoded.
"""

from codecs import getincrementaldecoder
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import click

from filtering import METADATA_HEADER, StreamMetadata
from pushrep.cli.options import begin_of
from pushrep.cli.record_rows import carrier_of, metadata_of
from pushrep.log import LogReader, SegmentLog
from pushrep.log.directory_files import log_at
from pushrep.records import Record
from pushrep.replay import MAX_TIMESTAMP, AtTime

RECORDS_A_PAGE = 20
FORMS = ("text", "hex")
_CHARACTERS = 4_000
_UTF_8_BYTES = 4  # of a character, at most
_HEX_CHARACTERS = 3  # of a byte, with its blank
_HEX_LINE = 32
_HEADERS = 50  # shown of a record


class ShownPayload(NamedTuple):
    """A record's payload in the chosen form. why: set if the value is not UTF-8, and is shown as hex instead."""

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
    """The query of a page. start: an offset, a time, `earliest`, `latest` or `max-timestamp`. form: one of FORMS."""

    partition: int = 0
    start: str = "latest"
    form: str = "text"
    payloads: bool = False


def records_page(directory: Path, topic: str, asked: AskedRecords) -> RecordsPage:
    """Stable records of one log. Raises PushrepError and click.BadParameter."""
    carrier = carrier_of(directory, topic)
    with SegmentLog.open_reader(log_at(directory, topic, asked.partition)) as reader:
        first, last = reader.bounds()
        start = _start(reader, asked, first, last)
        shown = [
            _shown(record, carrier, payload_of(record, carrier, asked.form) if asked.payloads else None)
            for record in islice(reader.records(start, last), RECORDS_A_PAGE)
        ]
    return RecordsPage(shown, first, last, shown[-1].offset + 1 if shown else start)


def _start(reader: LogReader, asked: AskedRecords, first: int, last: int) -> int:
    """The offset that `asked.start` selects. Raises ClickException."""
    begin = begin_of("--from", asked.start)
    if isinstance(begin, str):
        return first if begin == "earliest" else max(first, last - RECORDS_A_PAGE)
    if isinstance(begin, AtTime):
        is_largest = begin.timestamp_ms == MAX_TIMESTAMP
        found = reader.offset_of_largest_timestamp() if is_largest else reader.offset_for_timestamp(begin.timestamp_ms)
        return last if found is None else found
    if not first <= begin <= last:
        raise click.ClickException(f"the log holds the offsets [{first}, {last})")
    return begin


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


def payload_of(record: Record, carrier: str, form: str) -> ShownPayload:
    """Key, value and headers, cut to what is shown. carrier: "key" or "header"; form: one of FORMS."""
    value = record.value or b""
    text = _text(value) if form == "text" else _hex(value)
    is_metadata = carrier == "key" and metadata_of(record, carrier) is not None
    others = [(name, data) for name, data in record.headers if name != METADATA_HEADER]
    headers = [(name[:_CHARACTERS], _either(data)) for name, data in others[:_HEADERS]]
    if (more := len(others) - _HEADERS) > 0:
        headers.append((f"and {more:,} more", ""))
    return ShownPayload(
        key="" if is_metadata else _either(record.key),
        value=_hex(value) if text is None else text,
        headers=tuple(headers),
        why="The value is not UTF-8, it is shown as hex." if text is None else None,
    )


def _either(data: bytes | None) -> str:
    if data is None:
        return "null"
    return _hex(data) if (text := _text(data)) is None else text


def _text(data: bytes) -> str | None:
    """Its first characters; None if they are not UTF-8."""
    start = data[: _CHARACTERS * _UTF_8_BYTES]
    try:
        text = getincrementaldecoder("utf-8")().decode(start, final=len(start) == len(data))
    except UnicodeDecodeError:
        return None
    return text if len(text) <= _CHARACTERS and len(start) == len(data) else f"{text[:_CHARACTERS]}… {_size(data)}"


def _hex(data: bytes) -> str:
    start = data[: _CHARACTERS // _HEX_CHARACTERS]
    text = "\n".join(start[at : at + _HEX_LINE].hex(" ") for at in range(0, len(start), _HEX_LINE))
    return text if len(start) == len(data) else f"{text}… {_size(data)}"


def _size(data: bytes) -> str:
    return f"(of {len(data):,} bytes)"
