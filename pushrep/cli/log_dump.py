"""`pushrep log dump`: prints the lines of Kafka's DumpLogSegments, so that `diff` can compare the two."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from pushrep.cli.options import any_log_argument, log_path
from pushrep.cli.record_rows import field
from pushrep.log.dump import (
    OFFSET_LIMIT,
    BadFile,
    Dumped,
    DumpedBatch,
    DumpedEnd,
    DumpedEntry,
    DumpedHole,
    DumpedLine,
    OffsetWindow,
    control_type,
    dump_file,
    files_to_dump,
)
from pushrep.records import CorruptRecordBatch, Record, UnsupportedCodec
from pushrep.status.terminal import say, show_json


@click.command(short_help="Print batches as Kafka's tool does.")
@click.argument("path", metavar="DIRECTORY|FILE", type=click.Path(path_type=Path))
@any_log_argument
@click.option("--records", is_flag=True, help="Print each record below its batch.")
@click.option("--indexes", is_flag=True, help="Print the .index and .timeindex of each segment, too.")
@click.option(
    "--from",
    "from_",
    type=click.IntRange(0),
    default=0,
    help="Begin with the batch that holds this offset.  [default: the log's start]",
)
@click.option(
    "--to",
    type=click.IntRange(0),
    default=OFFSET_LIMIT,
    show_default=False,
    help="End before this offset.  [default: the log's end]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each batch or index entry.")
def dump(  # noqa: PLR0913, PLR0917 - one parameter an option
    path: Path, name: str | None, records: bool, indexes: bool, from_: int, to: int, as_json: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    """Print the batches of a LOG of DIRECTORY, or the content of one FILE: .log, .index, .timeindex, a checkpoint, a
    marker.

    The lines are those of Kafka's DumpLogSegments. Unlike Kafka's tool this command stops at bytes that are not a whole
    batch, prints where and why, and ends with exit code 1.
    """
    if from_ > to:
        raise click.BadParameter(f"{to} is below --from {from_}", param_hint="--to")
    if name is not None:
        path = log_path(path, name)
    elif not path.is_file():
        raise click.UsageError("give a DIRECTORY and one of its logs, orders-0 say, or one FILE")
    window = OffsetWindow(from_, to)
    files = files_to_dump(path, window, indexes=indexes)
    # A file that the writer has removed since it was listed is skipped.
    shown = [_show(file, window, records=records, as_json=as_json) for file in files if file == path or file.exists()]
    if not any(found for _, found in shown) and from_:
        below = "" if to == OFFSET_LIMIT else f" and below --to {to}"
        say(f"nothing at or above --from {from_}{below}", err=True)
    if not all(good for good, _ in shown):
        click.get_current_context().exit(1)


def _show(file: Path, window: OffsetWindow, *, records: bool, as_json: bool) -> tuple[bool, bool]:
    """Print one file. Returns (all of it is valid, there was something to print)."""
    if not as_json:
        say(f"Dumping {file}")
        if file.suffix == ".log":
            say(f"Log starting offset: {int(file.stem)}")
    good, found, entry = True, False, None
    for entry in dump_file(file, window):
        good, found = good and not _is_bad(entry), found or not isinstance(entry, DumpedEnd)
        if as_json:
            show_json({"file": str(file)} | _as_json(entry, records=records))
            continue
        for line in _lines(file, entry, records=records):
            say(line)
    if file.suffix == ".index" and entry is None and not as_json and window == OffsetWindow():
        say(f"{file} is empty.")
    return good, found


def _is_bad(entry: Dumped) -> bool:
    return isinstance(entry, BadFile | DumpedHole) or (isinstance(entry, DumpedEnd) and not entry.is_clean)


def _lines(file: Path, entry: Dumped, *, records: bool) -> Iterator[str]:
    match entry:
        case DumpedBatch():
            yield _batch_line(entry)
            if records:
                yield from _record_lines(entry)
        case DumpedHole():
            yield f"Missing offsets: {entry.start} to {entry.end - 1} before position: {entry.position} isvalid: false"
        case DumpedEnd(is_clean=False):
            reason = getattr(entry.end, "reason", "")
            yield (
                f"Found {entry.rest_bytes} invalid bytes at the end of {file.name}: position: {entry.end.position} "
                f"expectedOffset: {entry.end.next_offset} isvalid: false reason: {reason}"
            )
        case DumpedEntry(timestamp_ms=None):
            yield f"offset: {entry.offset} position: {entry.position}"
        case DumpedEntry():
            yield f"timestamp: {entry.timestamp_ms} offset: {entry.offset}"
        case BadFile():
            yield f"{file.name} isvalid: false reason: {entry.reason}"
        case DumpedLine():
            yield entry.text


def _batch_line(entry: DumpedBatch) -> str:
    header = entry.batch.header
    horizon = "OptionalLong.empty" if entry.delete_horizon_ms is None else f"OptionalLong[{entry.delete_horizon_ms}]"
    time_type = "LogAppendTime" if header.timestamp_type else "CreateTime"
    return (
        f"baseOffset: {header.base_offset} lastOffset: {header.last_offset} count: {header.record_count} "
        f"baseSequence: {header.base_sequence} lastSequence: {entry.last_sequence} "
        f"producerId: {header.producer_id} producerEpoch: {header.producer_epoch} "
        f"partitionLeaderEpoch: {header.leader_epoch} isTransactional: {_bool(header.is_transactional)} "
        f"isControl: {_bool(header.is_control)} deleteHorizonMs: {horizon} position: {entry.position} "
        f"{time_type}: {header.max_timestamp_ms} size: {header.size_bytes} magic: {header.magic} "
        f"compresscodec: {entry.codec} crc: {header.crc} isvalid: true"
    )


def _record_lines(entry: DumpedBatch) -> Iterator[str]:
    header, found = entry.batch.header, _records_of(entry)
    if isinstance(found, str):
        yield f"| records can't be decoded: {found}"
        return
    for record in found:
        sequence = header.base_sequence + record.offset - header.base_offset if header.base_sequence >= 0 else -1
        time_type = "LogAppendTime" if record.timestamp_type else "CreateTime"
        line = (
            f"| offset: {record.offset} {time_type}: {record.timestamp_ms} keySize: {_length(record.key)} "
            f"valueSize: {_length(record.value)} sequence: {sequence & 0x7FFFFFFF if sequence >= 0 else -1} "
            f"headerKeys: [{','.join(name for name, _ in record.headers)}]"
        )
        yield line + (_marker(record) if header.is_control else _payload(record))


def _records_of(entry: DumpedBatch) -> Iterable[Record] | str:
    """The batch's records, or why they can't be decoded."""
    try:
        return entry.batch.records()
    except (CorruptRecordBatch, UnsupportedCodec) as error:
        return str(error)


def _marker(record: Record) -> str:
    kind, epoch = control_type(record.key, record.value)
    if epoch is None:
        return f" controlType: {kind}"
    return f" endTxnMarker: {kind} coordinatorEpoch: {epoch}"


def _payload(record: Record) -> str:
    key = "" if record.key is None else f" key: {_text(record.key)}"
    return key + ("" if record.value is None else f" payload: {_text(record.value)}")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _length(data: bytes | None) -> int:
    return -1 if data is None else len(data)


def _bool(value: bool) -> str:  # noqa: FBT001 - the value to print
    return "true" if value else "false"


def _as_json(entry: Dumped, *, records: bool) -> dict[str, Any]:  # noqa: PLR0911 - a kind of entry a line
    match entry:
        case DumpedBatch():
            return _batch_json(entry, records=records)
        case DumpedHole():
            return {"position": entry.position, "missing": [entry.start, entry.end], "isvalid": False}
        case DumpedEnd():
            return {
                "end_position": entry.end.position,
                "next_offset": entry.end.next_offset,
                "rest_bytes": entry.rest_bytes,
                "isvalid": entry.is_clean,
                "reason": getattr(entry.end, "reason", None),
            }
        case DumpedEntry(timestamp_ms=None):
            return {"offset": entry.offset, "position": entry.position}
        case DumpedEntry():
            return {"timestamp": entry.timestamp_ms, "offset": entry.offset}
        case BadFile():
            return {"isvalid": False, "reason": entry.reason}
        case DumpedLine():
            return {"line": entry.text}


def _batch_json(entry: DumpedBatch, *, records: bool) -> dict[str, Any]:
    header = entry.batch.header
    fields: dict[str, Any] = {
        "baseOffset": header.base_offset,
        "lastOffset": header.last_offset,
        "count": header.record_count,
        "baseSequence": header.base_sequence,
        "lastSequence": entry.last_sequence,
        "producerId": header.producer_id,
        "producerEpoch": header.producer_epoch,
        "partitionLeaderEpoch": header.leader_epoch,
        "isTransactional": header.is_transactional,
        "isControl": header.is_control,
        "deleteHorizonMs": entry.delete_horizon_ms,
        "position": entry.position,
        "timestampType": header.timestamp_type.name,
        "maxTimestamp": header.max_timestamp_ms,
        "size": header.size_bytes,
        "magic": header.magic,
        "compresscodec": entry.codec,
        "crc": header.crc,
        "isvalid": True,
    }
    if records:
        found = _records_of(entry)
        fields |= {"undecodable": found} if isinstance(found, str) else {"records": [*map(_record_json, found)]}
    return fields


def _record_json(record: Record) -> dict[str, Any]:
    headers = [field("value", value) | {"name": name} for name, value in record.headers]
    fields: dict[str, Any] = {"offset": record.offset, "timestamp": record.timestamp_ms}
    return fields | field("key", record.key) | field("value", record.value) | {"headers": headers}
