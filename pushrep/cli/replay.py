"""`pushrep replay`: reads any part of one log again, to its end or as it grows, for people and for pipes; and
`pushrep recording`: lists and maintains the logs that a node keeps.

Formats: table; json, an object a line; raw, the value and a newline.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial, wraps
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import click

from pushrep.cli.common import show_rows, show_table, whole_step
from pushrep.cli.options import begin_of, is_offset, named_logs, time_ms_of, tls_options
from pushrep.cli.progress import OnProgress, progress
from pushrep.cli.record_rows import COLUMNS, as_json, as_row, carrier_of
from pushrep.env.network import Address
from pushrep.log.directory_files import is_log_name, log_at, parse_shown_name, shown_name
from pushrep.outbox.control import NobodyAnswers, ask
from pushrep.records import Record
from pushrep.replay import (
    FOLLOW,
    TO_END,
    Length,
    NodeAccess,
    RecordingInfo,
    Replay,
    ReplayClient,
    ReplayRefused,
    ReplayRequest,
)
from pushrep.replicate.certificates import MutualTls
from pushrep.status.table import count as shown_count
from pushrep.status.terminal import printable, say
from pushrep.wire.error_codes import ErrorCode

_LATEST_RECORDS = 10
_TABLE_ROWS = 20


def client_of(where: str, tls: MutualTls | None) -> ReplayClient:
    """The client of a directory or a node. Raises BadArgument."""
    return ReplayClient(where, node=None if tls is None else NodeAccess(tls=tls))


def recording_of(text: str) -> int | str:
    """The id of a recording as int, or its name `<topic>-<partition>`."""
    return int(text) if is_offset(text) else text


def recordings_of(where: str, text: str) -> list[int | str]:
    """The recording; in a directory each log that the text names. Raises ClickException, NotALog."""
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
    help="Begin at an offset, at the first record of an ISO 8601 time (UTC if it names no zone) or later, at "
    "max-timestamp: the first record with the largest time, or at "
    f"latest: the last --count records ({_LATEST_RECORDS}), with --follow the end.  [default: the log's start]",
)
@click.option(
    "--count",
    type=click.IntRange(0),
    help="End after so many records of each log; with --follow it waits for them.  "
    f"[default: no limit; {_TABLE_ROWS} in a table]",
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
    "--format", "format_", default="json", show_default=True, type=click.Choice(["json", "raw", "table"]),
    help="json: one object a line. raw: the values alone, one a line.",
)  # fmt: skip
@tls_options
def replay(  # noqa: PLR0913, PLR0917 - one parameter an option
    where: str, recording: str, from_: str | None, count: int | None, until: str | None, follow: bool,  # noqa: FBT001
    bound: str, format_: str, tls: MutualTls | None,
) -> None:  # fmt: skip
    """Replay LOG, orders-0 say, from DIRECTORY, where a writer may be running, or from the node at ADDRESS (host:port).

    \b
      pushrep replay out orders-0                                          all records
      pushrep replay out orders --format table                             the first records of each partition
      pushrep replay out orders-0 --from 2026-01-01T14:00 --until 2026-01-01T15:00 --format raw
      pushrep replay out orders-0 --from latest --follow | jq .value       new records
      pushrep replay replica-1:7400 orders-0 --count 10                    from a node (see pushrep recording list)

    \b
    In a DIRECTORY LOG may be orders: all logs of this topic, one after the other; with worker slots orders-0 is this
    partition of every slot, and slot-1/orders-0 is one.
    "source" is the stream metadata in the key or header: PID, source partition, source offset. In JSON a key or value
    that is not UTF-8 is key_base64 or value_base64.
    After Ctrl-C the output is complete up to a record, and standard error has the offset to continue from. A replay
    from a node reconnects by itself and continues where its connection broke.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    if count is None and not follow:
        count = _LATEST_RECORDS if from_ == "latest" else _TABLE_ROWS if format_ == "table" else None
    length: Length | int = TO_END
    if count == 0 or (count is not None and follow):
        length = count
    elif follow:
        length = FOLLOW
    end = _until(until, from_)
    names = recordings_of(where, recording)
    if len(names) > 1 and (follow or is_offset(from_) or is_offset(until)):
        raise click.UsageError(f"an offset and --follow need one log: give one of {', '.join(map(str, names))}")
    if follow and format_ == "table":
        raise click.UsageError("--follow needs --format json or raw: a table is printed at the end")
    rows: list[tuple[str, ...]] = []

    with client_of(where, tls) as client:
        for name in names:
            topic, partition = log_of(client, name)
            carrier = carrier_of(log_at(where, topic, partition).parent, topic)
            running = _begun(client, ReplayRequest(name, None, length, bound), from_, 0 if follow else count or 0)
            if running is not None:
                with running:
                    _run(running, partial(_put, format_, partition, carrier, rows), count, end, follow=follow)
    if format_ == "table":
        show_table(None, COLUMNS, rows)


def _put(format_: str, partition: int, carrier: str, rows: list[tuple[str, ...]], records: list[Record]) -> None:
    """Write records by one call, so that an interrupt leaves no partial line. rows: of a table, printed at the end."""
    if format_ == "table":
        rows.extend(as_row(partition, record, carrier) for record in records)
    elif format_ == "raw":
        values = ((record.value or b"") for record in records)
        if sys.stdout.isatty():
            values = (printable(value.decode(errors="backslashreplace")).encode() for value in values)
        sys.stdout.buffer.write(b"".join(value + b"\n" for value in values))
    else:
        lines = (_json_line(as_json(partition, record, carrier)) for record in records)
        sys.stdout.buffer.write("".join(f"{line}\n" for line in lines).encode())


def _json_line(row: dict[str, Any]) -> str:
    line = json.dumps(row, ensure_ascii=False)
    return line if line.isprintable() else json.dumps(row)


def _begun(client: ReplayClient, request: ReplayRequest, from_: str | None, last: int) -> Replay | None:
    """Begin a replay; None if the log is empty. last: how many records before the end `--from latest` means.

    Raises ClickException for an unknown log, and as `ReplayClient.replay`.
    """
    try:
        position = begin_of("--from", "earliest" if from_ is None else from_)
        if position == "latest":
            starts = {name: one.start_offset for one in client.recordings() for name in (one.name, one.recording_id)}
            tip = client.tip_of(request.recording, request.bound)
            position = max(starts.get(request.recording, 0), tip - last)
        return client.replay(replace(request, position=None if isinstance(position, str) else position))
    except ReplayRefused as refused:
        if refused.code is ErrorCode.UNKNOWN_RECORDING:
            raise click.ClickException(f"{refused.why}; pushrep recording list {client.where} shows all") from refused
        if refused.code is not ErrorCode.EMPTY_RECORDING:
            raise
        say(f"nothing to replay: {refused.why}", err=True)
        return None


def _run(replay: Replay, put: Callable[[list[Record]], None], limit: int | None, until: Until, *, follow: bool) -> None:
    """Write all records of a replay. Also after an error or Ctrl-C the output is complete up to a record."""
    written, is_whole = 0, True
    start = position = replay.position
    try:
        with _progress(replay, follow=follow) as show:
            for records, block_end in _pieces(replay, limit, until):
                with whole_step():  # so that `position` counts exactly the records that were written
                    put(records)
                    if follow:
                        sys.stdout.buffer.flush()
                    written, position = written + len(records), block_end
                show(position - start, total=max(1, replay.tip - start))
    except BrokenPipeError:
        is_whole = False  # how many records the pipe's reader got is unknown
        raise
    finally:
        if is_whole:
            sys.stdout.buffer.flush()
            if sys.exc_info()[0] is not None:
                say(f"{written} records; continue with --from {position}", err=True)


def _pieces(replay: Replay, left: int | None, until: Until) -> Iterator[tuple[list[Record], int]]:
    """Yield the records of each batch, and the offset to continue from after them, up to `left` records and the
    end.
    """
    if left == 0 or until.is_reached(replay.position):
        return
    for batch in replay.batches():
        records = batch.records()
        before = list(takewhile(until.admits, records))
        if left is not None:
            before = before[:left]
            left -= len(before)
        is_cut = len(before) < len(records)
        behind = before[-1].offset + 1 if before else max(batch.start, batch.batch.header.base_offset)
        yield before, behind if is_cut else replay.position
        if is_cut or left == 0 or until.is_reached(replay.position):
            return


def _progress(replay: Replay, *, follow: bool) -> AbstractContextManager[OnProgress]:
    """The progress of a replay that has an end, and whose records do not go to a terminal."""
    if follow or sys.stdout.isatty():
        return nullcontext(lambda done, *, total=None, note="": None)  # noqa: ARG005 - nobody sees it
    return progress("replaying", max(1, replay.tip - replay.position), unit="records")


def _until(text: str | None, from_: str | None) -> Until:
    if text is None:
        return Until()
    if is_offset(text):
        if from_ is not None and is_offset(from_) and int(text) < int(from_):
            raise click.BadParameter(f"{text} is below --from {from_}", param_hint="--until")
        return Until(offset=int(text))
    return Until(timestamp_ms=time_ms_of("--until", text))


@click.group()
def recording() -> None:
    """List, copy, extend, truncate, purge and delete the logs that a node keeps."""


@recording.command("list", short_help="List the recordings of a node.")
@click.argument("where", metavar="ADDRESS|DIRECTORY")
@click.option("--topic", help="Only the logs of this topic.")
@click.option("--from-id", type=click.IntRange(0), help="Only the ids from this one on, in their order.")
@click.option("--limit", type=click.IntRange(1), help="So many at most, by id: the next page is --from-id LAST+1.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a recording.")
@tls_options
def list_(  # noqa: PLR0913, PLR0917 - one parameter an option
    where: str, topic: str | None, from_id: int | None, limit: int | None, as_json: bool,  # noqa: FBT001
    tls: MutualTls | None,
) -> None:  # fmt: skip
    """List the recordings of the node at ADDRESS, or in DIRECTORY: id, log, offsets, outbox. State live: it has a
    writer.
    """
    with client_of(where, tls) as client:
        found = client.recordings(topic, from_id=from_id, limit=limit)
    columns = ("log", "id", "start", "stable end", "state", "outbox")
    show_rows(found, columns, _row, _as_dict, as_json=as_json)


def _of_recording(question: str | None = None) -> Callable[[Callable[..., str]], Callable[..., None]]:
    """Add ADDRESS, LOG|ID and the options for TLS; the function gets client, recording and its name, and returns the
    line to print. question: is asked first, unless --yes is given.
    """

    def decorated(command: Callable[..., str]) -> Callable[..., None]:
        @wraps(command)
        def called(address: str, name: str, tls: MutualTls | None, *, yes: bool = True, **options: Any) -> None:
            if not yes and question is not None:
                click.confirm(question.format(name=name, **options), abort=True, err=True)
            with client_of(address, tls) as client:
                say(command(client, recording_of(name), name, **options))

        found = click.argument("address")(click.argument("name", metavar="LOG|ID")(tls_options(called)))
        is_sure = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
        return found if question is None else is_sure(found)

    return decorated


@recording.command(short_help="Let a stopped recording continue.")
@click.option(
    "--leader-epoch",
    type=click.IntRange(0),
    required=True,
    help="The new leader epoch; it has to be higher than every epoch in the log.",
)
@_of_recording()
def extend(client: ReplayClient, one: int | str, name: str, leader_epoch: int) -> str:
    """Let a stopped recording continue at its end, under a higher leader epoch."""
    return f"{name} continues at offset {client.extend(one, leader_epoch)}, under leader epoch {leader_epoch}"


@recording.command(short_help="Cut a recording at an offset.")
@click.option(
    "--at",
    "offset",
    type=click.IntRange(0),
    required=True,
    help="Cut at the start of the batch that holds this offset: this batch and all after it are removed.",
)
@click.option(
    "--keep",
    is_flag=True,
    help="Set what is cut aside in .cut files at the node, which pushrep log restore takes, the lowest offset first.  "
    "[default: erase it]",
)
@_of_recording("Cut {name} at offset {offset}?")
def truncate(client: ReplayClient, one: int | str, name: str, offset: int, *, keep: bool) -> str:
    """Cut a recording at the batch that holds an offset. Replays that read above it are ended first. Refused while a
    leader writes the recording.
    """
    return f"{name} ends at offset {client.truncate(one, offset, keep=keep)}"


@recording.command(short_help="Remove old segments of a recording.")
@click.option(
    "--before",
    "offset",
    type=click.IntRange(0),
    required=True,
    help="Remove the segments that lie wholly below this offset.",
)
@_of_recording("Remove the segments of {name} below offset {offset}?")
def purge(client: ReplayClient, one: int | str, name: str, offset: int) -> str:
    """Remove the whole segments of a recording below an offset, up to its leader's log start at most."""
    return f"{name} begins at offset {client.purge(one, offset)}"


@recording.command(short_help="Delete a recording and its files.")
@click.option("--force", is_flag=True, help="Delete it although replays of it run; they are ended.  [default: refuse]")
@click.option(
    "--outbox-gone", is_flag=True,
    help="Delete it although the node is a member of its outbox, which is no more; who led it, and when it was heard, "
    "is shown first.  [default: refuse]",
)  # fmt: skip
@_of_recording("Delete {name} and its files?")
def delete(client: ReplayClient, one: int | str, name: str, *, force: bool, outbox_gone: bool) -> str:
    """Delete a recording and its files. Its id is never used again."""
    try:
        freed = client.delete(one, force=force).wait()
    except ReplayRefused as refused:
        if not outbox_gone or refused.code is not ErrorCode.RECORDING_IN_USE:
            raise
        say(refused.why, err=True)
        if not click.get_current_context().params["yes"]:
            click.confirm("Is that outbox gone for good?", abort=True, err=True)
        freed = client.delete(one, force=force, outbox_gone=True).wait()
    return f"{name} is deleted, {freed:,} bytes were freed"


@recording.command(short_help="Copy a recording of another node.")
@click.argument("source", metavar="ADDRESS")
@click.argument("name", metavar="LOG|ID")
@click.option(
    "--to",
    "data",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="The directory of the node that gets the copy. If no node runs there, this command is one while it copies.",
)
@click.option("--follow", is_flag=True, help="Copy also what comes later, until --stop.")
@click.option("--until", type=click.IntRange(0), help="Copy no batch that ends above this offset.")
@click.option("--into", type=click.IntRange(1), help="The id that the copy has at the node, to be sure.")
@click.option("--stop", is_flag=True, help="End the copy; what was copied stays.")
@tls_options
def replicate(  # noqa: PLR0913, PLR0917 - one parameter an option
    source: str, name: str, data: Path, follow: bool, until: int | None, into: int | None, stop: bool,  # noqa: FBT001
    tls: MutualTls | None,
) -> None:  # fmt: skip
    """Copy the recording LOG of the node at ADDRESS into the node in the directory --to, batch for batch as it is.

    \b
      pushrep recording replicate node-1:7400 orders-0 --to copies             what is there now
      pushrep recording replicate node-1:7400 orders-0 --to copies --follow    as it grows
      pushrep recording replicate node-1:7400 orders-0 --to copies --stop

    It goes on where the copy ends. Exit code 1 if the source has another history there (TRUNCATED), or if a leader
    writes the copy. A running node uses its own certificate.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    with client_of(source, tls) as client:
        found = [one for one in client.recordings() if recording_of(name) in {one.recording_id, one.name}]
    if len(found) != 1 or found[0].recording_id is None:
        raise click.ClickException(f"{source} has {len(found)} recordings {name}: pushrep recording list {source}")
    from pushrep.outbox.directory_handover import HandoverSocket  # noqa: PLC0415 - a replay alone needs no node
    from pushrep.replicate.node_settings import NodeSettings  # noqa: PLC0415
    from pushrep.replicate.replica_node import ReplicaNode  # noqa: PLC0415

    asked = {"address": source, "recording_id": found[0].recording_id, "follows": follow, "until": until, "into": into}
    is_away = follow
    with ExitStack() as held:
        try:
            state = ask(data, "replicate", asked)
        except NobodyAnswers:
            is_away = False
            node = held.enter_context(ReplicaNode(data, NodeSettings(address=Address("127.0.0.1", 0))))
            node.copies.access = partial(NodeAccess, tls=tls)
            held.enter_context(HandoverSocket(node))
            state = ask(data, "replicate", asked)
        number = {"recording_id": state["recording_id"]}
        if stop:
            state = ask(data, "end-copy", number)
        pause = threading.Event()
        while state["end"] is None and not is_away:
            pause.wait(_LOOK_EVERY_S)
            state = ask(data, "copy", number)
    ended = f", {state['end']} {state['why']}".rstrip() if state["end"] else ", and goes on"
    say(f"{state['name']} is copied up to offset {state['position']}{ended}")
    if state["end"] not in {None, "LIMIT_REACHED", "STOPPED"}:
        click.get_current_context().exit(1)


_LOOK_EVERY_S = 0.2


def _row(one: RecordingInfo) -> tuple[str, ...]:
    recording_id = "" if one.recording_id is None else str(one.recording_id)
    ends = (shown_count(one.start_offset), shown_count(one.stable_offset))
    outbox = "" if one.outbox_id is None else str(one.outbox_id)
    state = f"invalid: {one.invalid}" if one.invalid else "live" if one.is_live else "stopped"
    if one.damaged_from is not None:
        state += f", damaged from {shown_count(one.damaged_from)} on"
    return (one.name, recording_id, *ends, state, outbox)


def _as_dict(one: RecordingInfo) -> dict[str, object]:
    return {
        "recording_id": one.recording_id,
        "name": one.name,
        "log_id": None if one.log_id is None else str(one.log_id),
        "outbox_id": None if one.outbox_id is None else str(one.outbox_id),
        "start_offset": one.start_offset,
        "stable_offset": one.stable_offset,
        "end_offset": one.end_offset,
        "is_live": one.is_live,
        "state": one.state.name,
        "damaged_from": one.damaged_from,
        "invalid": one.invalid or None,
        "origin": one.origin or None,
    }
