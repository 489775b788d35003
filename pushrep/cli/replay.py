"""`pushrep replay`: reads any part of one log again, to its end or as it grows, for people and for pipes.

One writer a format; after each `flush` its output is complete:

json    an object a line            raw     the value and a newline
avro    an object container file (Avro 1.11), deflate, schema RECORD_SCHEMA
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import wraps
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

import click
from fastavro.write import Writer as AvroWriter

from pushrep.cli.common import whole_step
from pushrep.cli.log_names import named_logs
from pushrep.cli.options import client_tls, time_ms_of, tls_options
from pushrep.cli.progress import OnProgress, progress
from pushrep.cli.record_rows import as_json, carrier_of
from pushrep.log.directory_files import is_log_name, log_at, parse_shown_name, shown_name
from pushrep.records import Record
from pushrep.replay import (
    FOLLOW,
    TO_END,
    AtTime,
    Length,
    NodeAccess,
    Replay,
    ReplayClient,
    ReplayRefused,
    ReplayRequest,
)
from pushrep.wire.error_codes import ErrorCode

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


class RecordWriter(Protocol):
    """Writes records in one format."""

    def write(self, records: Iterable[Record]) -> None: ...
    def flush(self) -> None:
        """Flush all written records to the file or pipe."""
        ...


class LineOutput:
    """The formats json and raw: bytes for each record."""

    def __init__(self, out: BinaryIO, line: Callable[[Record], bytes]) -> None:
        self._out, self._line = out, line

    def write(self, records: Iterable[Record]) -> None:
        """Write all records by one call, so that an interrupt leaves no partial line."""
        self._out.write(b"".join(map(self._line, records)))

    def flush(self) -> None:
        self._out.flush()


class AvroFile:
    """The format avro: one container file. A flush ends a block."""

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
    """The writer of the format: avro, raw or json."""
    if format_ == "avro":
        return AvroFile(out, partition)
    if format_ == "raw":
        return LineOutput(out, lambda record: (record.value or b"") + b"\n")
    return LineOutput(out, lambda r: json.dumps(as_json(partition, r, carrier), ensure_ascii=False).encode() + b"\n")


F = TypeVar("F", bound=Callable[..., Any])


def node_options(command: F) -> F:
    """Add --cert, --key and --ca to a command. Its function gets `node`: a NodeAccess, None without these options."""

    @wraps(command)
    def with_node(*args: Any, cert: Path | None, key: Path | None, ca: Path | None, **kwargs: Any) -> Any:
        context = client_tls(cert, key, ca)
        return command(*args, node=None if context is None else NodeAccess(tls=context), **kwargs)

    return tls_options(with_node)  # type: ignore[return-value]  # the same command, as click sees it


def recording_of(text: str) -> int | str:
    """The id of a recording as int, or its name `<topic>-<partition>`."""
    return int(text) if text.isascii() and text.isdigit() else text


def recordings_of(where: str, text: str) -> list[int | str]:
    """The recording; in a directory each log that the text names. Raises ClickException, NotALogDirectory."""
    recording = recording_of(text)
    if isinstance(recording, str) and Path(where).is_dir():
        return [shown_name(*log) for log in named_logs(Path(where), recording)]
    return [recording]


def log_of(client: ReplayClient, recording: int | str) -> tuple[str, int]:
    """The recording's topic and partition. Raises ClickException, which names those that are there."""
    if isinstance(recording, str) and is_log_name(recording.rpartition("/")[2]):
        return parse_shown_name(recording)
    there = client.recordings()
    found = next((one for one in there if one.recording_id == recording), None)
    if found is None:
        known = ", ".join(one.name for one in there) or "none"
        raise click.ClickException(f"{client.where} has no recording {recording}; it has {known}")
    return found.topic, found.partition


class Until(NamedTuple):
    """The end of a replay: before this offset, and before the first record at or after this time. None: no such
    limit.
    """

    offset: int | None = None
    timestamp_ms: int | None = None

    def admits(self, record: Record) -> bool:
        """Whether the record is before the end."""
        if self.offset is not None and record.offset >= self.offset:
            return False
        return self.timestamp_ms is None or record.timestamp_ms < self.timestamp_ms

    def is_reached(self, position: int) -> bool:
        """Whether no record at or above `position` can be before the end, so that `--follow` can stop."""
        return self.offset is not None and position >= self.offset


@click.command(short_help="Read any part of a log again, or follow it.")
@click.argument("where", metavar="DIRECTORY|ADDRESS")
@click.argument("recording", metavar="LOG|ID")
@click.option(
    "--from",
    "from_",
    metavar="WHERE",
    help="Begin at an offset, at the first record of an ISO 8601 time (UTC if it names no zone) or later, or at "
    "latest: "
    "the end, with --follow.  [default: the log's start]",
)
@click.option(
    "--count",
    type=click.IntRange(0),
    help="End after so many records of each log; with --follow it waits for them.  [default: no limit]",
)
@click.option(
    "--until",
    metavar="WHERE",
    help="End before this offset, or before the first record with this ISO 8601 time or a later one.  [default: the "
    "log's end when the replay begins]",
)
@click.option("--follow", is_flag=True, help="At the end, wait for new records.")
@click.option(
    "--bound",
    default="stable",
    show_default=True,
    type=click.Choice(["stable", "high_watermark", "flushed", "written"]),
    help="Read only records below this offset of the log. stable: the lower of high_watermark and flushed, below which "
    "no record is ever cut off. written: all appended records.",
)
@click.option(
    "--format", "format_", default="json", show_default=True, type=click.Choice(["json", "raw", "avro"]),
    help="json: one object a line. raw: the values alone, one a line. avro: an object container file.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file.  [default: standard output]"
)
@click.option("--force", is_flag=True, help="Overwrite the file of --out.  [default: refuse if it exists]")
@click.option(
    "--max-bytes-per-s", type=click.IntRange(1), help="Read at most so many bytes a second.  [default: no limit]"
)
@node_options
def replay(  # noqa: PLR0913, PLR0917 - one parameter an option
    where: str, recording: str, from_: str | None, count: int | None, until: str | None, follow: bool,  # noqa: FBT001
    bound: str, format_: str, out: Path | None, force: bool, max_bytes_per_s: int | None,  # noqa: FBT001
    node: NodeAccess | None,
) -> None:  # fmt: skip
    """Replay LOG, orders-0 say, from DIRECTORY, where a writer may be running, or from the node at ADDRESS (host:port).

    \b
      pushrep replay out orders-0                                          all records
      pushrep replay out orders-0 --from 2026-01-01T14:00 --until 2026-01-01T15:00 --format raw
      pushrep replay out orders-0 --from latest --follow | jq .value       new records
      pushrep replay out orders-0 --format avro --out orders.avro
      pushrep replay replica-1:7400 orders-0 --count 10                    from a node (see pushrep recording list)

    \b
    In a DIRECTORY LOG may be orders: all logs of this topic, one after the other; with worker slots orders-0 is this
    partition of every slot, and slot-1/orders-0 is one.
    After Ctrl-C the output is complete up to a record, and standard error has the offset to continue from. A replay
    from a node reconnects by itself and continues where its connection broke.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    if from_ == "latest" and not follow:
        raise click.UsageError("--from latest begins at the log's end, which has no record yet: add --follow")
    if out is not None and out.exists() and not force:
        raise click.UsageError(f"{out} exists already: give another file, or --force to overwrite it")
    length: Length | int = TO_END
    if count == 0 or (count is not None and follow):
        length = count
    elif follow:
        length = FOLLOW
    end = _until(until, from_)
    names = recordings_of(where, recording)
    if len(names) > 1 and (follow or format_ == "avro" or _is_offset(from_) or _is_offset(until)):
        raise click.UsageError(
            f"an offset, --follow and --format avro need one log: give one of {', '.join(map(str, names))}"
        )
    with ExitStack() as opened:
        client = opened.enter_context(ReplayClient(where, node=node))
        stream: BinaryIO | None = None if out is not None else sys.stdout.buffer
        for name in names:
            topic, partition = log_of(client, name)
            running = _begun(client, ReplayRequest(name, None, length, bound, max_bytes_per_s), from_)
            if running is not None:
                opened.enter_context(running)
            if stream is None and out is not None:  # a refused replay must not make, or empty, the file
                stream = opened.enter_context(out.open("wb" if force else "xb"))
            assert stream is not None
            chosen = carrier_of(log_at(where, topic, partition).parent, topic)
            _run(running, stream, _Job(format_, partition, chosen, count, end, follow=follow, to_file=out is not None))


def _begun(client: ReplayClient, request: ReplayRequest, from_: str | None) -> Replay | None:
    """Begin a replay; None if the log is empty. Raises ClickException for an unknown log, and as
    `ReplayClient.replay`.
    """
    try:
        position = _position(from_, client, request.recording, request.bound)
        return client.replay(replace(request, position=position))
    except ReplayRefused as refused:
        if refused.code is ErrorCode.UNKNOWN_RECORDING:
            raise click.ClickException(f"{refused.why}; pushrep recording list {client.where} shows all") from refused
        if refused.code is not ErrorCode.EMPTY_RECORDING:
            raise
        click.echo(f"nothing to replay: {refused.why}", err=True)
        return None


class _Job(NamedTuple):
    format: str
    partition: int
    carrier: str
    limit: int | None
    until: Until
    follow: bool
    to_file: bool


def _run(replay: Replay | None, stream: BinaryIO, job: _Job) -> None:
    """Write all records of a replay. Also after an error or Ctrl-C the output is complete up to a record."""
    writer = writer_for(job.format, stream, partition=job.partition, carrier=job.carrier)
    written, is_whole = 0, True
    position = replay.position if replay is not None else 0
    try:
        if replay is not None:
            start = position
            with _progress(replay, job) as show:
                for records, block_end in _pieces(replay, job):
                    with whole_step():  # so that `position` counts exactly the records that were written
                        writer.write(records)
                        if job.follow:
                            writer.flush()
                        written, position = written + len(records), block_end
                    show(position - start, total=max(1, replay.tip - start))
    except BrokenPipeError:
        is_whole = False  # how many records the pipe's reader got is unknown
        raise
    finally:
        if is_whole:
            writer.flush()
        if replay is not None and is_whole and (job.to_file or sys.exc_info()[0] is not None):
            click.echo(f"{written} records; continue with --from {position}", err=True)


def _pieces(replay: Replay, job: _Job) -> Iterator[tuple[list[Record], int]]:
    """Yield the records of each batch, and the offset to continue from after them, up to the job's limit and end."""
    left = job.limit
    if left == 0 or job.until.is_reached(replay.position):
        return
    for batch in replay.batches():
        records = batch.records()
        before = list(takewhile(job.until.admits, records))
        if left is not None:
            before = before[:left]
            left -= len(before)
        is_cut = len(before) < len(records)
        behind = before[-1].offset + 1 if before else max(batch.start, batch.batch.header.base_offset)
        yield before, behind if is_cut else replay.position
        if is_cut or left == 0 or job.until.is_reached(replay.position):
            return


def _progress(replay: Replay, job: _Job) -> AbstractContextManager[OnProgress]:
    """The progress of a replay that has an end, and whose records do not go to a terminal."""
    if job.follow or (sys.stdout.isatty() and not job.to_file):
        return nullcontext(lambda done, *, total=None, note="": None)  # noqa: ARG005 - nobody sees it
    return progress("replaying", max(1, replay.tip - replay.position), unit="records")


def _position(text: str | None, client: ReplayClient, name: int | str, bound: str) -> int | AtTime | None:
    if text is None or text == "earliest":
        return None
    if text == "latest":
        return client.tip_of(name, bound)
    if _is_offset(text):
        return int(text)
    return AtTime(time_ms_of("--from", text))


def _until(text: str | None, from_: str | None) -> Until:
    if text is None:
        return Until()
    if _is_offset(text):
        if from_ is not None and _is_offset(from_) and int(text) < int(from_):
            raise click.BadParameter(f"{text} is below --from {from_}", param_hint="--until")
        return Until(offset=int(text))
    return Until(timestamp_ms=time_ms_of("--until", text))


def _is_offset(text: str | None) -> bool:
    return text is not None and text.isascii() and text.isdigit()
