"""`pushrep status`: shows outboxes, nodes and logs, in directories or at addresses, as tables or as one JSON object.

    {"version": 1, "at_ms": wall clock of the reading, "places": [PLACE, ...]}    in the order of the arguments

PLACE always has
    place       the argument; a directory of worker slots gives a place for each slot, `<directory>/slot-<n>`
    kind        "outbox" | "node" | "logs" | "unknown"
    state       a text. Outbox: that of `LeadingState`, "closed" or "held by a process that does not answer"; node:
                "running", "closed" or "held by a process that does not answer"; logs: "at rest"; unknown: "unknown"
    problems    [{"problem": a word of pushrep.problems.BLOCKS, "why": text, "blocks": bool}, ...], worst first
and by its kind
    outbox      the fields of OutboxStatus; a closed outbox lacks those that only its process has (acks, disk, scrub,
                in_sync_min, session_ends ...). With --partitions "parts": [PartitionStatus, ...]
    node        the fields of NodeStatus; a closed node has `logs`, and `address` if a grant names it. At an address the
                same, if the caller may list every outbox there; otherwise, and from an older node, only `address`,
                `certificate_expires_s` and `logs`. At an address `logs` has outbox_id, topic, partition, offsets
                without the flushed one, and leader_epoch
    logs        "logs": [{"topic", "partition", "log_start_offset", ...}, ...]
    unknown     "why"
New versions add fields and rename none. A field without a value is missing or null. Ranges of offsets are half-open.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from ssl import SSLContext
from typing import Any
from uuid import UUID

import click
from rich.console import Console, Group, RenderableType
from rich.text import Text

from pushrep.cli.common import count, show_json, size, time_text, whole_step
from pushrep.cli.options import client_tls, tls_options
from pushrep.cli.replica_status import draw, drawn, look, sessions_table, table
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import BadArgument, PushrepError
from pushrep.log.directory_files import OUTBOX_FILE_NAME, outboxes_at, parse_log_name
from pushrep.log.inspection import lock_holder, logs_at, summarize
from pushrep.outbox.control import BadControlMessage, NobodyAnswers, ask
from pushrep.problems import Problem, certificate_problems
from pushrep.replicate.election_state import REPLICA_EPOCH_NAME, find_election_state
from pushrep.replicate.errors import ReplicaUnreachable
from pushrep.replicate.replica_client import ReplicaClient
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address
from pushrep.wire import push_messages as wire
from pushrep.wire.error_codes import ErrorCode

VERSION = 1
_REACH_MS = 5_000
_LOGS = ("outbox", "log", "start", "end", "HWM", "epoch", "what is wrong")


@click.command()
@click.argument("places", nargs=-1, metavar="[DIRECTORY|HOST:PORT]...")
@click.option("--partitions", "with_partitions", is_flag=True, help="Show each partition of an outbox, too.")
@click.option("--watch", is_flag=True, help="Show it again and again, until Ctrl-C.")
@click.option(
    "--every", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between updates of --watch."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object; with --watch one for each update.")
@tls_options
def status(  # noqa: PLR0913 - the options
    places: tuple[str, ...], every: float, cert: Path | None, key: Path | None, ca: Path | None,
    *, with_partitions: bool, watch: bool, as_json: bool,
) -> None:  # fmt: skip
    """Show outboxes, nodes and logs: offsets, how far replicas and Kafka topics are behind, and problems ("!").

    \b
      pushrep status outbox
      pushrep status outbox copies 10.0.0.7:7400 --watch
      pushrep status workers --json --partitions

    Without an argument it shows the working directory. Exit code 1 if one of the places can't be read or reached.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    tls = client_tls(cert, key, ca)
    console = Console(markup=False, highlight=False, emoji=False)
    last: list[dict[str, Any]] = []

    def looks() -> Iterator[list[dict[str, Any]]]:
        while True:
            last[:] = [
                one for place in places or (".",) for one in look_at(place, tls, with_partitions=with_partitions)
            ]
            yield list(last)
            if not watch:
                return
            time.sleep(every)

    try:
        if as_json:
            for found in looks():
                with whole_step():
                    show_json({"version": VERSION, "at_ms": time.time_ns() // 1_000_000, "places": found})
        else:
            draw(looks(), _drawn, console, watch=watch)
    except KeyboardInterrupt:
        if not watch:
            raise
    if any(one["kind"] == "unknown" for one in last):
        click.get_current_context().exit(1)


def look_at(place: str, tls: SSLContext | None = None, *, with_partitions: bool = False) -> list[dict[str, Any]]:
    """The PLACE of a directory or address, see the module's docstring; one for each worker slot. Raises nothing: an
    error gives a place of kind "unknown".
    """
    path = Path(place)
    if not path.is_dir():
        return [_looked(place, lambda: _node_at(place, tls))]
    slots = [(str(one) if one != path else place, one) for one in outboxes_at(path)]
    return [_looked(name, partial(_directory, one, with_partitions=with_partitions)) for name, one in slots]


def _looked(place: str, look_there: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        found = look_there()
    except (PushrepError, OSError) as error:
        problem = Problem("not_answering", str(error)).as_dict()
        found = {"kind": "unknown", "state": "unknown", "why": str(error), "problems": [problem]}
    return {"place": place, **found}


def _directory(path: Path, *, with_partitions: bool) -> dict[str, Any]:
    if (path / OUTBOX_FILE_NAME).exists():
        return {"kind": "outbox", **look(path, with_partitions=with_partitions)}
    if not (path / REPLICA_EPOCH_NAME).exists():
        return {"kind": "logs", "state": "at rest", "logs": _logs(path), "problems": []}
    try:
        return {"kind": "node", **ask(path, "status")}
    except (NobodyAnswers, BadControlMessage) as error:  # BadControlMessage: an older node without this request
        writer = lock_holder(path)
        problems = [] if writer is None else [Problem("not_answering", f"process {writer} runs it: {error}").as_dict()]
        copies = [one for one in sorted(path.iterdir()) if _is_id(one.name)]
        named = next(filter(None, map(_named_address, copies)), None)
        return {
            "kind": "node",
            "state": "closed" if writer is None else "held by a process that does not answer",
            **({} if named is None else {"address": named}),
            "pid": writer,
            "directory": str(path.resolve()),
            "logs": [{"outbox_id": one.name, **log} for one in copies for log in _logs(one)],
            "problems": problems,
        }


def _named_address(copy: Path) -> str | None:
    """The address of the copy's node in its newest grant; None if the grant has none or can't be read."""
    with suppress(PushrepError, OSError):
        kept = find_election_state(copy, REAL_FILESYSTEM)
        if kept is not None and (grant := kept[1].grant) is not None:
            return next((one.address for one in grant.members if one.index == kept[1].member and one.address), None)
    return None


def _logs(directory: Path) -> list[dict[str, Any]]:
    """A dict for each log in the directory. Raises NotALog."""
    found = []
    for log in logs_at(directory):
        topic, partition = parse_log_name(log.name)
        found.append({"topic": topic, "partition": partition, **asdict(summarize(log))})
    return found


def _is_id(name: str) -> bool:
    try:
        UUID(name)
    except ValueError:
        return False
    return True


def _node_at(place: str, tls: SSLContext | None) -> dict[str, Any]:
    """The node at an address, as in the module's docstring. Raises BadArgument, ReplicaUnreachable."""
    try:
        address = Address.parse(place)
    except BadArgument as error:
        raise BadArgument("place", f"{place} is neither a directory nor HOST:PORT") from error
    settings = PushSettings(tls=tls, connect_timeout_ms=_REACH_MS, request_timeout_ms=_REACH_MS)
    with ReplicaClient(address, settings) as client:
        expires_s = client.certificate_expires_s()
        answer = client.ask(wire.ListLogsRequest(), wire.ListLogsResponse)
        own_status = _described_by(client)
    if answer.error_code is not ErrorCode.NONE:
        raise ReplicaUnreachable(place, f"it refuses to list its logs: {answer.error_code.name}")
    logs = [
        {
            "outbox_id": str(one.outbox_id), "topic": one.tp.topic, "partition": one.tp.partition,
            "log_start_offset": one.log_start_offset, "log_end_offset": one.log_end_offset,
            "high_watermark": one.high_watermark, "leader_epoch": one.leader_epoch, "size_bytes": one.size_bytes,
            "failure": None if one.error_code is ErrorCode.NONE else one.error_code.name,
        }
        for one in answer.logs
    ]  # fmt: skip
    if own_status is not None:
        return {**own_status, "kind": "node", "place": place, "address": place, "logs": logs}
    offline = [log for log in logs if log["failure"] is not None]
    problems = [
        Problem("log_offline", f"{log['outbox_id']}/{log['topic']}-{log['partition']}: {log['failure']}").as_dict()
        for log in offline
    ]
    problems += [one.as_dict() for one in certificate_problems({"node": expires_s}, time.time())]
    return {
        "kind": "node",
        "state": "running",
        "address": place,
        "certificate_expires_s": expires_s,
        "logs": logs,
        "problems": problems,
    }


def _described_by(client: ReplicaClient) -> dict[str, Any] | None:
    """The node's own status; None if this identity may not see all of it.

    Raises ReplicaUnreachable.
    """
    answer = client.ask(wire.DescribeNodeRequest(), wire.DescribeNodeResponse)
    if answer.error_code is not ErrorCode.NONE:
        return None
    try:
        status = json.loads(answer.status)
    except ValueError as error:
        raise ReplicaUnreachable(str(client.address), f"its status is not JSON: {error}") from error
    if not isinstance(status, dict):
        raise ReplicaUnreachable(str(client.address), "its status is not a JSON object")
    return status


# ---- for people


def _drawn(found: dict[str, Any]) -> RenderableType:
    lines = [f"! {one['problem']}: {one['why']}" for one in found["problems"]]
    if found["kind"] == "outbox":
        lines = [*_machine(found), *lines]
        return Group(drawn(found), *([Text("\n".join(lines))] if lines else []))
    parts: list[RenderableType] = [Text("\n".join([*_lines(found), *lines]))]
    if logs := found.get("logs", ()):
        parts.append(table(_LOGS, [_log(one) for one in logs]))
    if sessions := found.get("replays", {}).get("sessions"):
        parts.append(sessions_table(sessions))
    return Group(*parts)


def _lines(found: dict[str, Any]) -> Iterator[str]:
    where = f", {found['address']}" if "address" in found and found["address"] != found["place"] else ""
    pid = f", pid {found['pid']}" if found.get("pid") is not None else ""
    yield f"{found['place']}: {found['kind']}{where}{pid}, {found['state']}"
    yield from _machine(found)
    for one in found.get("leaders", ()):
        yield f"outbox {one['outbox_id']} ({one['topic']}): {_leader(one)}"
    for one in found.get("standbys", ()):
        of = f" of {one['outbox_id']}" if one["outbox_id"] else ""  # "": its outbox is not made yet
        yield f"standby{of}: {one['state']}{': ' + one['why'] if one['why'] else ''}"
    for one in found.get("holds", ()):
        yield f"takeovers of {one['outbox_id']} are held until {time_text(one['until_ms'])}: {one['reason']}"
    if (replays := found.get("replays")) is not None:
        ended = ", ".join(f"{reason.lower()} {n}" for reason, n in replays["ended"].items()) or "none"
        yield f"replays: {len(replays['sessions'])} of at most {replays['sessions_max']} run; ended: {ended}"


def _leader(one: dict[str, Any]) -> str:
    if one["is_here"]:
        return "this member leads; for its service see `pushrep status` of the outbox's own directory"
    where = f" ({one['address']})" if one["address"] else ""
    contact = "and has resigned" if one["silent_ms"] is None else f"last contact {one['silent_ms'] / 1000:.1f} s ago"
    return f"member {one['leader']}{where} leads under epoch {one['epoch']}, {contact}"


def _machine(found: dict[str, Any]) -> Iterator[str]:
    """Lines about disk, scrub and certificates of an open outbox or a running node."""
    if (disk := found.get("disk")) is not None:
        yield f"disk {disk['mount']}: {size(disk['used_bytes'])} of {size(disk['size_bytes'])} used, {disk['level']}"
    scrubs = [found["scrub"]] if "scrub" in found else list(found.get("scrubs", {}).values())
    if scrubs:
        passes, damaged, repaired = (sum(one[name] for one in scrubs) for name in ("passes", "damaged", "repaired"))
        left = sum(len(one["findings"]) for one in scrubs)
        yield f"scrub: passes {passes}, segments found damaged {damaged}, repaired {repaired}, damaged now {left}"
    for use, expires_s in certificates_in(found).items():
        until = "its expiry can't be read"
        if expires_s is not None:
            until = f"until {datetime.fromtimestamp(expires_s, UTC):%Y-%m-%d %H:%M} UTC"
        yield f"certificate for {use}: {until}"


def certificates_in(found: dict[str, Any]) -> dict[str, int | None]:
    """The certificates of a place that `look_at` returned: {use: Unix time of expiry; None: it can't be read}."""
    of_node = {"node": found["certificate_expires_s"]} if found.get("certificate_expires_s") is not None else {}
    return {**found.get("certificates", {}), **of_node}


def _log(one: dict[str, Any]) -> tuple[str, ...]:
    numbers = (count(one[name]) for name in ("log_start_offset", "log_end_offset", "high_watermark"))
    wrong = one.get("failure") or one.get("finding") or one.get("refused") or ""
    return (one.get("outbox_id", ""), f"{one['topic']}-{one['partition']}", *numbers, str(one["leader_epoch"]), wrong)
