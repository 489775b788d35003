"""`pushrep replica status`: shows the members of an outbox, from the process that has it open, or else from its
files.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pushrep.cli.common import count, show_json, size, time_text, whole_step
from pushrep.env import REAL_FILESYSTEM
from pushrep.kafka.progress import read_progress
from pushrep.log.directory_files import outboxes_at
from pushrep.log.inspection import LogSummary, lock_holder, logs_at, summarize
from pushrep.outbox import NoOutbox
from pushrep.outbox.control import NobodyAnswers, ask
from pushrep.outbox.identity import identity_in
from pushrep.outbox.shipping import holder_name
from pushrep.outbox.status import DestinationStatus
from pushrep.problems import Problem
from pushrep.replicate.election_state import REPLICA_EPOCH_NAME, find_election_state

_PIPE_COLUMNS = 200
_PARTITIONS_AT_ONCE = 1000
_MEMBERS = (
    "member",
    "address",
    "role",
    "in sync",
    "sessions",
    "records",
    "bytes",
    "oldest",
    "trouble, or last end",
)
_PARTITIONS = ("partition", "start", "end", "flushed", "HWM", "epoch", "in sync", "sessions")
_SESSIONS = ("session", "recording", "state", "position", "lag", "credit", "idle")
_NOBODY = "closed"


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False), default=".")
@click.option(
    "--partitions", "with_partitions", is_flag=True, help="Show each partition, too: offsets, in-sync set, sessions."
)
@click.option("--watch", is_flag=True, help="Show it again and again, until Ctrl-C.")
@click.option(
    "--every", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between updates of --watch."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object; with --watch one for each update.")
def status(directory: Path, every: float, *, with_partitions: bool, watch: bool, as_json: bool) -> None:
    """Show the outbox in DIRECTORY and its members: the leader, the in-sync replicas, how far the others are behind.

    \b
      pushrep replica status outbox
      pushrep replica status outbox --watch
      pushrep replica status outbox --partitions --json

    The service that has the outbox open answers on its control.sock. Without one, the files are read, which hold no
    sessions. "oldest" is the age of the oldest record that a replica has not acknowledged.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    looks = _looks(directory, every if watch else None, with_partitions=with_partitions)
    try:
        _show(looks, watch=watch, as_json=as_json)
    except KeyboardInterrupt:
        if not watch:
            raise


def look(directory: Path, *, with_partitions: bool = False) -> dict[str, Any]:
    """The status of the outbox: from the process that has it open, or else from its files.

    Raises NoOutbox, CorruptOutboxFile, CallRefused.
    """
    try:
        found: dict[str, Any] = ask(directory, "status")
        if with_partitions:
            found["parts"] = []
            for first in range(0, found["partitions"], _PARTITIONS_AT_ONCE):
                found["parts"] += ask(directory, "partitions", {"first": first, "count": _PARTITIONS_AT_ONCE})
    except NobodyAnswers as error:
        return _by_files(directory, error.why, with_partitions=with_partitions)
    return found


def _looks(directory: Path, every: float | None, *, with_partitions: bool) -> Iterator[list[dict[str, Any]]]:
    """Yield the status again and again: a list of one, or of one for each worker slot of the directory."""
    while True:
        found = [(one, look(one, with_partitions=with_partitions)) for one in outboxes_at(directory)]
        yield [status if one == directory else {"slot": one.name, **status} for one, status in found]
        if every is None:
            return
        time.sleep(every)


def _show(looks: Iterator[list[dict[str, Any]]], *, watch: bool, as_json: bool) -> None:
    console = Console(markup=False, highlight=False, emoji=False)
    if as_json:
        for found in looks:
            with whole_step():
                for one in found:
                    show_json(one)
    else:
        draw(looks, drawn, console, watch=watch)


def draw(
    looks: Iterator[list[dict[str, Any]]],
    drawn: Callable[[dict[str, Any]], RenderableType],
    console: Console,
    *,
    watch: bool,
) -> None:
    """Print each status; with `watch` on a terminal each replaces the one before, else it is printed below."""
    if watch and console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            for found in looks:
                live.update(Group(*map(drawn, found)), refresh=True)
    else:
        plain = Console(width=console.width if console.is_terminal else _PIPE_COLUMNS, markup=False, highlight=False)
        for found in looks:
            with whole_step():
                plain.print(*map(drawn, found))


def _destinations(directory: Path, ends: dict[int, int]) -> list[dict[str, Any]]:
    """Destinations and their lag, from destinations.json. Raises CorruptDestinationsFile."""
    found = []
    for topic, progress in read_progress(REAL_FILESYSTEM, directory).items():
        has = {n: one.acknowledged for n, one in progress.partitions.items()}
        records = sum(max(0, end - has.get(n, 0)) for n, end in ends.items())
        found.append(asdict(DestinationStatus(name=holder_name(topic), topic=topic, records=records)))
    return found


def _by_files(directory: Path, why: str, *, with_partitions: bool) -> dict[str, Any]:
    try:
        identity = identity_in(REAL_FILESYSTEM, directory)
    except NoOutbox as error:
        raise NoOutbox(directory, _what_it_is(directory) or error.why) from error
    kept = find_election_state(directory, REAL_FILESYSTEM)
    grant = None if kept is None else kept[1].grant
    leader = identity.member if grant is None else grant.leader
    summaries = [one for one in map(summarize, logs_at(directory)) if one.name.rpartition("-")[0] == identity.topic]
    writer = lock_holder(directory)
    members = [(identity.member, ""), *identity.replicas]
    found: dict[str, Any] = {
        "directory": str(directory.resolve()),
        "pid": writer,
        "outbox_id": identity.outbox_id,
        "producer": identity.producer,
        "topic": identity.topic,
        "partitions": identity.partitions,
        "state": _NOBODY if writer is None else "held by a process that does not answer",
        "why": why,
        "member": identity.member,
        "min_insync_replicas": identity.min_insync_replicas,
        "epoch": max((one.leader_epoch for one in summaries), default=-1),
        "log_end_offsets": sum(one.log_end_offset or 0 for one in summaries),
        "flushed_offsets": sum(one.flushed_offset or 0 for one in summaries),
        "high_watermarks": sum(one.high_watermark or 0 for one in summaries),
        "members": [
            {"index": index, "address": address, "is_leader": index == leader, "lag": None}
            for index, address in sorted(members)
        ],
        "destinations": _destinations(directory, {_number(one): one.log_end_offset or 0 for one in summaries}),
        "problems": []
        if writer is None
        else [Problem("not_answering", f"process {writer} has it open: {why}").as_dict()],
    }
    if with_partitions:
        found["parts"] = [_partition_of(one) for one in summaries]
    return found


def _partition_of(log: LogSummary) -> dict[str, Any]:
    return {
        "partition": _number(log),
        "log_start_offset": log.log_start_offset,
        "log_end_offset": log.log_end_offset,
        "flushed_offset": log.flushed_offset,
        "high_watermark": log.high_watermark,
        "leader_epoch": log.leader_epoch,
        "in_sync": [],
        "sessions": [],
    }


def _number(log: LogSummary) -> int:
    return int(log.name.rpartition("-")[2])


def _what_it_is(directory: Path) -> str | None:
    """What a directory without an outbox.json is, for the error; None if it does not belong to a node."""
    kept = find_election_state(directory, REAL_FILESYSTEM)
    if kept is not None and (grant := kept[1].grant) is not None:
        outbox_id, state = kept
        leader = "it leads, but no service has opened it yet," if state.is_led_here else f"member {grant.leader} leads"
        return (
            f"it is a node's copy of outbox {outbox_id} ({grant.topic}), member {state.member}; {leader} since epoch "
            f"{grant.epoch}. For its lag run this command on the leader's directory"
        )
    if (directory / REPLICA_EPOCH_NAME).exists():
        return "it is the directory of a node, which has a directory for each outbox: give one of those"
    return None


def drawn(found: dict[str, Any]) -> RenderableType:
    """The status that `look` returned, as text and tables."""
    drawn: list[RenderableType] = [Text("\n".join(_lines(found)))]
    if found["members"]:
        drawn.append(table(_MEMBERS, [_member(one) for one in found["members"]]))
    if "parts" in found:
        drawn.append(table(_PARTITIONS, [_part(one) for one in found["parts"]]))
    return Group(*drawn)


def _lines(found: dict[str, Any]) -> Iterator[str]:
    name = f"{found['slot']}: {found['topic']}" if "slot" in found else found["topic"]
    yield f"{name}, {found['partitions']} partitions, producer {found['producer']}, {found['outbox_id']}"
    pid = f", pid {found['pid']}" if found["pid"] is not None else ""
    promise = f", acks {found['acks']}, {found['durability']}" if "acks" in found else ""
    yield f"{found['state']}{pid}{promise}" + (f": {found['why']}" if found["why"] else "")
    if found["members"]:
        yield (
            f"epoch {found['epoch']}, {len(found['members'])} members, this one is {found['member']}, "
            f"min_insync_replicas {found['min_insync_replicas']}"
            + (", a change of members is not finished" if found.get("is_changing") else "")
        )
    if (hold := found.get("hold")) is not None:
        yield f"takeovers are held until {time_text(hold['until_ms'])}: {hold['reason']}"
    if "in_sync_min" in found and found["members"]:
        below = found["under_min_insync"]
        yield f"smallest in-sync set {found['in_sync_min']}; partitions below min_insync_replicas: {below}"
    yield (
        f"records: end {count(found['log_end_offsets'])}, flushed {count(found['flushed_offsets'])}, "
        f"high watermark {count(found['high_watermarks'])} (sums of all partitions)"
    )
    for one in found.get("destinations", ()):
        behind = f"{one['name']}: {count(one['records'])} records behind"
        in_the_way = "; ".join(
            [
                *([one["trouble"]] if one["trouble"] else []),
                *(f"partition {s['partition']} is stopped at {s['offset']}: {s['why']}" for s in one["stopped"]),
            ]
        )
        yield behind + (f": {in_the_way}" if in_the_way else "")


def _member(one: dict[str, Any]) -> tuple[str, ...]:
    lag = one["lag"]
    beginning = (str(one["index"]), one["address"] or "here", _role(one))
    if lag is None:
        return (*beginning, *[""] * (len(_MEMBERS) - len(beginning)))
    return (
        *beginning,
        f"{lag['in_sync']} of {lag['partitions']}",
        str(one["sessions"]),
        count(lag["records"]),
        size(lag["size_bytes"]),
        f"{lag['age_ms'] / 1000:.1f} s",
        one["trouble"] or one["last_end_reason"] or "",
    )


def _role(one: dict[str, Any]) -> str:
    if one.get("is_joining"):
        return "joining"
    return "leader" if one["is_leader"] else "replica"


def _part(one: dict[str, Any]) -> tuple[str, ...]:
    sessions = [
        f"{s['replica']}: {s['state'].lower()} {s['acknowledged'] if s['acknowledged'] >= 0 else '?'}"
        + (f" ({s['end_reason']})" if s["end_reason"] else "")
        for s in one["sessions"]
    ]
    return (
        str(one["partition"]),
        count(one["log_start_offset"]),
        count(one["log_end_offset"]),
        count(one["flushed_offset"]),
        count(one["high_watermark"]),
        str(one["leader_epoch"]),
        ",".join(map(str, one["in_sync"])),
        "; ".join(sessions),
    )


def sessions_table(sessions: list[dict[str, Any]]) -> Table:
    """A table of a node's replay sessions. sessions: as in `pushrep.replicate.node_status`."""
    return table(_SESSIONS, [_session(one) for one in sessions])


def _session(one: dict[str, Any]) -> tuple[str, ...]:
    numbers = (count(one[name]) for name in ("position", "lag", "credit"))
    return (
        f"{one['session_id']:016x}",
        str(one["recording"]),
        one["state"],
        *numbers,
        f"{one['idle_ms'] / 1000:.1f} s",
    )


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    """A table: the first two columns and the last are aligned left, the others right."""
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number in {0, 1, len(columns) - 1} else "right")
    for row in rows:
        table.add_row(*row)
    return table
