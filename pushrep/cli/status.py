"""`pushrep status`: shows outboxes, nodes and logs, in directories or at addresses, as text or as one JSON object.

    {"version": 1, "at_ms": wall clock of the reading, "places": [PLACE, ...]}    in the order of the arguments

PLACE always has
    place       the argument; a directory of worker slots gives a place for each slot, `<directory>/slot-<n>`
    kind        "outbox" | "node" | "logs" | "unknown"
    state       a text. Outbox: that of `LeadingState`, "closed" or "held by a process that does not answer"; node:
                "running", "closed" or "held by a process that does not answer"; logs: "at rest"; unknown: "unknown"
    problems    [{"problem": a name of PROBLEMS, "subject", "why", "since_ms": or null, "blocks": "appends",
                "acknowledgements", "shipping", "replication" or "nothing", "advice", "command"}, ...], worst first
and by its kind
    outbox      the fields of OutboxStatus; of a closed outbox those of ClosedOutbox. With --partitions "parts":
                [PartitionStatus, ...]
    node        the fields of NodeStatus; a closed node has `logs`, and `address` if a grant names it. At an address the
                same, if the caller may list every outbox there; otherwise only `address`, `certificates` and `logs`,
                and it is not known what is wrong. At an address `logs` lacks the flushed offset
    logs        "logs": [{"topic", "partition", "log_start_offset", ...}, ...]
    unknown     "why"
New versions add fields and rename none. A field without a value is missing or null. Ranges of offsets are half-open.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from ssl import SSLContext
from typing import Any
from uuid import UUID

import click

from pushrep.cli.options import tls_options
from pushrep.env import REAL_FILESYSTEM
from pushrep.env.checked_json import BadJsonFile, parse_json
from pushrep.errors import BadArgument, PushrepError
from pushrep.log.directory_files import OUTBOX_FILE_NAME, outboxes_at, parse_log_name
from pushrep.log.errors import NotALog
from pushrep.log.inspection import lock_holder, logs_at, summarize
from pushrep.outbox.control import NobodyAnswers, ask
from pushrep.outbox.status import HELD, closed_status
from pushrep.replay.node_connection import NodeUnreachable
from pushrep.replicate.certificates import MutualTls
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.election_state import REPLICA_EPOCH_NAME, find_election_state
from pushrep.replicate.node_status import NodeLog, is_node_status, log_problems
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address
from pushrep.status import Blocks, PlaceStatus, Problem
from pushrep.status.terminal import say, show_json, width
from pushrep.status.text import status_lines
from pushrep.wire import push_messages as wire
from pushrep.wire.error_codes import ErrorCode

VERSION = 1
EXIT_PROBLEM, EXIT_UNKNOWN = 1, 3
_REACH_MS = 5_000
_ask = partial(ask, timeout_s=_REACH_MS / 1000)
_PARTITIONS_AT_ONCE = 1000
_PARTLY = "this identity may not list every outbox there, so its problems are not known"


@click.command(short_help="Show how far everything is, what is wrong.")
@click.argument("places", nargs=-1, metavar="[DIRECTORY|HOST:PORT]...")
@click.option("--partitions", "with_partitions", is_flag=True, help="Show each partition of an outbox, too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@tls_options
def status(
    places: tuple[str, ...], tls: MutualTls | None,
    *, with_partitions: bool, as_json: bool,
) -> None:  # fmt: skip
    """Show outboxes, nodes and logs: offsets, how far replicas and Kafka topics are behind, and problems ("!").

    \b
      pushrep status outbox
      pushrep status outbox copies 10.0.0.7:7400
      pushrep status workers --json --partitions

    Without an argument it shows the working directory. Exit code 0: no problem; 1: a problem; 3: a place can't be read
    or reached, its process does not answer within five seconds, or it does not tell this identity all.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    found = [one for place in places or (".",) for one in look_at(place, tls, with_partitions=with_partitions)]
    if as_json:
        show_json({"version": VERSION, "at_ms": time.time_ns() // 1_000_000, "places": found})
    else:
        for number, one in enumerate(found):
            say(*[""][:number], *status_lines(one, width()))
    if any(one["kind"] == "unknown" or one.get("state") == HELD or one.get("why") == _PARTLY for one in found):
        click.get_current_context().exit(EXIT_UNKNOWN)
    if any(one["problems"] for one in found):
        click.get_current_context().exit(EXIT_PROBLEM)


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
    except (BadArgument, NotALog) as error:  # a typing error, say: nothing is known to be wrong with a service
        found = _unknown(place, error.why, Blocks.NOTHING)
    except (PushrepError, OSError) as error:
        found = _unknown(place, str(error).removeprefix(f"{place}: "))
    return {**found, "place": place}


def _unknown(place: str, why: str, blocks: Blocks | None = None) -> dict[str, Any]:
    problem = Problem("not_answering", place, why, blocks=blocks)
    return PlaceStatus(directory=place, why=why, found=(problem,)).as_dict()


def _directory(path: Path, *, with_partitions: bool) -> dict[str, Any]:
    if (path / OUTBOX_FILE_NAME).exists():
        return _outbox(path, with_partitions=with_partitions)
    if not (path / REPLICA_EPOCH_NAME).exists():
        return PlaceStatus(kind="logs", state="at rest", directory=str(path.resolve()), logs=_logs(path)).as_dict()
    try:
        node: dict[str, Any] = _ask(path, "status")
    except NobodyAnswers as error:
        writer = lock_holder(path)
        copies = [one for one in sorted(path.iterdir()) if _is_id(one.name)]
        held = Problem("not_answering", "node", f"process {writer} runs it: {error}")
        return PlaceStatus(
            kind="node",
            state="closed" if writer is None else HELD,
            address=next(filter(None, map(_named_address, copies)), ""),
            pid=writer,
            directory=str(path.resolve()),
            logs=[{"outbox_id": one.name, **log} for one in copies for log in _logs(one)],
            found=() if writer is None else (held,),
        ).as_dict()
    return node


def _outbox(path: Path, *, with_partitions: bool) -> dict[str, Any]:
    try:
        found: dict[str, Any] = _ask(path, "status")
        for first in range(0, found["partitions"] if with_partitions else 0, _PARTITIONS_AT_ONCE):
            found["parts"] += _ask(path, "status", {"first": first, "count": _PARTITIONS_AT_ONCE})["parts"]
    except NobodyAnswers as error:
        found = closed_status(path, error.why).as_dict()
        if not with_partitions:
            found["parts"] = []
    return found


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
    """The node at an address, as in the module's docstring. Raises BadArgument, NodeUnreachable."""
    try:
        address = Address.parse(place)
    except BadArgument as error:
        raise BadArgument("place", "it is neither a directory nor HOST:PORT") from error
    settings = PushSettings(tls=tls, connect_timeout_ms=_REACH_MS, request_timeout_ms=_REACH_MS)
    with ReplicaClient(address, settings) as client:
        expires_s = client.certificate_expires_s()
        answer = client.ask(wire.ListLogsRequest(), wire.ListLogsResponse)
        if answer.error_code is not ErrorCode.NONE:
            raise NodeUnreachable(place, f"it refuses to list its logs: {answer.error_code.name}")
        own_status = _described_by(client)
    logs = [
        NodeLog(
            outbox_id=str(one.outbox_id),
            topic=one.tp.topic,
            partition=one.tp.partition,
            log_start_offset=one.log_start_offset,
            log_end_offset=one.log_end_offset,
            flushed_offset=None,
            high_watermark=one.high_watermark,
            leader_epoch=one.leader_epoch,
            failure=None if one.error_code is ErrorCode.NONE else one.error_code.name,
        )
        for one in answer.logs
    ]
    if own_status is not None:
        found = {**own_status, "kind": "node", "address": place, "logs": [one._asdict() for one in logs]}
        if not is_node_status(found):
            raise NodeUnreachable(place, "its status is not that of a node, or of another version")
        return found
    return PlaceStatus(
        kind="node",
        state="running",
        why=_PARTLY,
        address=place,
        certificates={} if expires_s is None else {"node": expires_s},
        logs=[one._asdict() for one in logs],
        found=tuple(log_problems(logs)),
    ).as_dict()


def _described_by(client: ReplicaClient) -> dict[str, Any] | None:
    """The node's own status; None if this identity may not see all of it. Raises NodeUnreachable."""
    answer = client.ask(wire.DescribeNodeRequest(), wire.DescribeNodeResponse)
    if answer.error_code is not ErrorCode.NONE:
        return None
    try:
        status = parse_json(answer.status)
    except BadJsonFile as error:
        raise NodeUnreachable(str(client.address), f"its status can't be read: {error}") from error
    if not isinstance(status, dict):
        raise NodeUnreachable(str(client.address), "its status is not a JSON object")
    return status
