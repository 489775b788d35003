"""`pushrep replica add | remove | replace | adopt | moved`: changes the members of an outbox, one at a time; and
`pushrep promote`: makes a replica the leader.

The service that has the outbox open executes each step; this process sends them to its control.sock. If no process has
the outbox open, this process opens it until the change is done.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import click

from pushrep.cli.options import ADDRESS, addresses_of, tls_options
from pushrep.cli.progress import progress
from pushrep.election.candidate import LEADER_ALIVE_MS
from pushrep.election.errors import TooFewMembers, label
from pushrep.env import REAL_FILESYSTEM
from pushrep.outbox import Acks, Outbox, OutboxConfig
from pushrep.outbox.control import NobodyAnswers, ask
from pushrep.outbox.directory_handover import adopt, moved
from pushrep.outbox.identity import identity_in
from pushrep.outbox.promotion import Promotion, promote
from pushrep.replicate.certificates import MutualTls
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address
from pushrep.settings import DURATION_MAX_S
from pushrep.status.table import count
from pushrep.status.terminal import say, show_result

_PAUSE_S = 0.2
_STEP_S = 1.0  # for a question to the service that is answered at once
_LOST_WAIT_S = 5.0
_DONE, _CATCHING_UP = "done", "catching up"
_DIRECTORY = click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
_LEAST = click.option(
    "--min-insync-replicas",
    "least",
    type=click.IntRange(1),
    help="min_insync_replicas for the new list of members.  [default: more than half if it was more than half before, "
    "else unchanged]",
)
Step: TypeAlias = Callable[[], dict[str, Any]]


def _change_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --timeout, --cert, --key, --ca and --json, the options of each change of members."""
    timeout = click.option(
        "--timeout",
        type=click.FloatRange(0),
        default=600.0,
        show_default=True,
        help="Seconds; afterwards exit with 1. Steps that are done stay done: run the same command again to continue.",
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="The members as a JSON object.")
    return timeout(tls_options(as_json(command)))


@click.group()
def replica() -> None:
    """Run a node that keeps copies of other services' logs; show and change the members of an outbox."""


@replica.command(short_help="Add a node to the members of an outbox.")
@_DIRECTORY
@click.argument("address", type=ADDRESS)
@_LEAST
@_change_options
def add(  # noqa: PLR0913 - the options
    directory: Path, address: Address, least: int | None, timeout: float, *, as_json: bool, tls: MutualTls | None
) -> None:
    """Add the node at ADDRESS to the members of the outbox in DIRECTORY.

    \b
      pushrep replica add outbox 10.0.0.4:7400

    The node is sent all records first, and does not count as a member meanwhile. When it holds as much as the others,
    it becomes a member, by a grant of a majority of the old and of the new list. It gets a number that no member had
    before. If the command is interrupted, run it again.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    limit = _Limit(timeout)
    with _reached(directory, limit, tls) as home, _listing_if_it_fails(directory):
        done = _follow(_adding(home, address, least, limit), limit, directory)
    _print_change(done, f"member {done['member']} ({address}) was added", as_json=as_json)


@replica.command(short_help="Remove a member of an outbox.")
@_DIRECTORY
@click.argument("member", type=click.IntRange(0, 255))
@_LEAST
@click.option(
    "--no-standbys",
    is_flag=True,
    help="Also if fewer than three members are left: no standby takes over any more then.",
)
@_change_options
def remove(  # noqa: PLR0913 - the options
    directory: Path,
    member: int,
    least: int | None,
    timeout: float,
    *,
    no_standbys: bool,
    as_json: bool,
    tls: MutualTls | None,
) -> None:
    """Remove MEMBER, by its number, from the members of the outbox in DIRECTORY.

    \b
      pushrep replica remove outbox 2

    Its copy stays on disk and gets no more records. The leader can't be removed: promote another member first. A node
    that `add` has not made a member yet is removed the same way, by the number that `add` prints.
    """  # noqa: D301 - as above
    limit = _Limit(timeout)
    with _reached(directory, limit, tls) as home, _listing_if_it_fails(directory):
        done = _follow(_removing(home, member, least, limit, no_standbys=no_standbys), limit, directory)
    _print_change(done, f"member {member} was removed", as_json=as_json)


@replica.command(short_help="Replace a member by another node.")
@_DIRECTORY
@click.argument("member", type=click.IntRange(0, 255))
@click.argument("address", type=ADDRESS)
@click.option(
    "--lost",
    type=click.IntRange(0, 255),
    multiple=True,
    metavar="INDEX",
    help="The directory of this member is destroyed, and too few others are left for a majority: remove it from the "
    "list. "
    "MEMBER must be among them. Repeat it for more.",
)
@_change_options
def replace(  # noqa: PLR0913 - the options
    directory: Path,
    member: int,
    address: Address,
    lost: tuple[int, ...],
    timeout: float,
    *,
    as_json: bool,
    tls: MutualTls | None,
) -> None:
    """Replace MEMBER by the node at ADDRESS: the new member is added, then the old one is removed.

    \b
      pushrep replica replace outbox 2 10.0.0.4:7400

    ADDRESS may be the address of MEMBER itself, whose node has a new disk, but not of another member. The new member
    has another number.

    \b
      pushrep replica replace outbox 2 10.0.0.4:7400 --lost 2

    If MEMBER's directory is destroyed and too few members are left for a majority, give --lost: the leader then
    continues without them, under another PID, and accepts records with acks ALL again when enough members of the new
    list hold everything. Records that members which did not answer hold beyond the leader are kept aside when they
    connect to it (docs/replication.md).
    """  # noqa: D301 - as above
    if lost and member not in lost:
        raise click.UsageError(f"--lost must name member {member}, too: add --lost {member}, or leave --lost out")
    limit = _Limit(timeout)
    # Destroyed members do not answer: no need to wait long for them.
    with _reached(directory, limit, tls, _LOST_WAIT_S if lost else timeout) as home, _listing_if_it_fails(directory):
        if lost:
            step = _asking(home, limit, "replace-lost", {"address": str(address), "lost": list(lost)})
            done = _follow(step, limit, directory)
            what = f"{'members' if len(lost) > 1 else 'member'} {', '.join(map(str, lost))}"
            verb = "were" if len(lost) > 1 else "was"
            _print_change(done, f"{what} {verb} replaced by member {done['member']} ({address})", as_json=as_json)
            return
        added = _follow(_adding(home, address, None, limit, replaced=member), limit, directory)
        done = _follow(_removing(home, member, None, limit), limit, directory)
    _print_change(done, f"member {member} was replaced by member {added['member']} ({address})", as_json=as_json)


class _Limit:
    """--timeout, of the whole command."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._until_s = seconds, time.monotonic() + seconds

    def left_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())


def _adding(home: Path, address: Address, least: int | None, limit: _Limit, replaced: int | None = None) -> Step:
    return _asking(
        home, limit, "add-member", {"address": str(address), "min_insync_replicas": least, "replaced": replaced}
    )


def _removing(home: Path, member: int, least: int | None, limit: _Limit, *, no_standbys: bool = False) -> Step:
    given = {"index": member, "min_insync_replicas": least, "no_standbys": no_standbys}
    return _asking(home, limit, "remove-member", given)


def _asking(home: Path, limit: _Limit, call: str, arguments: dict[str, Any]) -> Step:
    def step() -> dict[str, Any]:
        try:
            left_s = limit.left_s()
            given = arguments if call == "replace-lost" else {**arguments, "wait_s": left_s / 2}
            done: dict[str, Any] = ask(home, call, given, timeout_s=max(_STEP_S, left_s))
        except NobodyAnswers as error:
            if limit.left_s():
                raise
            raise click.ClickException(
                f"the change is not done after {limit.seconds:g} s, and the service goes on with its step: run the "
                "same command again"
            ) from error
        return done

    return step


@contextmanager
def _reached(directory: Path, limit: _Limit, tls: MutualTls | None, wait_s: float = DURATION_MAX_S) -> Iterator[Path]:
    """Make sure that a process has the outbox open: a service, or else this process inside the `with`. Yields
    `directory`. wait_s: the longest time that opening it waits for members.
    """
    try:
        found = ask(directory, "status", timeout_s=max(_STEP_S, limit.left_s()))
    except NobodyAnswers:
        # An opening waits so long up to three times: for answers, for those that store its grant, for those in sync.
        with _opened(directory, min(wait_s, limit.left_s()) / 3, PushSettings(tls=tls)):
            yield directory
        return
    if found["kind"] != "outbox":
        identity_in(REAL_FILESYSTEM, directory)  # raises NoOutbox
    if tls is not None:
        raise click.UsageError(
            "a service has the outbox open and uses its own certificates: leave --cert, --key, --ca out"
        )
    yield directory


@contextmanager
def _listing_if_it_fails(directory: Path) -> Iterator[None]:
    """If the command fails or is interrupted, print the list of members and the next command to run."""
    try:
        yield
    except BaseException:
        with suppress(Exception):  # an error here must not replace the first one
            for line in _as_it_stands(directory, ask(directory, "status", timeout_s=_STEP_S)):
                say(line, err=True)
        raise


def _as_it_stands(directory: Path, status: dict[str, Any]) -> Iterator[str]:
    if not status["members"]:
        return  # an outbox without replicas: the command's error says so
    members = [one for one in status["members"] if not one["is_joining"]]
    named = ", ".join(
        f"{one['index']} ({'here' if one['is_leader'] else one['address'] or 'no address'})" for one in members
    )
    yield f"the members are {named}; min_insync_replicas {status['min_insync_replicas']}"
    for one in status["members"]:
        if one["is_joining"]:
            yield (
                f"{one['address']} will become member {one['index']}; it does not count as a member yet. To give it "
                f"up: pushrep replica remove {directory} {one['index']}"
            )
    addresses = [one["address"] for one in members if one["address"]]
    yield f"from the next open on: replicas={addresses}"
    if status["is_changing"]:
        away = [one["index"] for one in members if one["is_silent"]]
        when = f" when {', '.join(map(str, away))} answer" if away else ""
        yield f"the change is not finished, majorities of both lists are needed: run the same command again{when}"


def _opened(directory: Path, timeout_s: float, push: PushSettings) -> Outbox:
    identity = identity_in(REAL_FILESYSTEM, directory)
    addresses = addresses_of(directory, identity)
    return Outbox.open(
        directory,
        identity.topic,
        identity.partitions,
        identity.producer,
        carrier=identity.carrier,
        replicas=addresses,
        acks=Acks.ALL if addresses else None,
        # It waits for slow members: only a leader can change the list.
        config=OutboxConfig(open_timeout_s=timeout_s, push=push, create=False),
    )


def _follow(step: Step, limit: _Limit, directory: Path) -> dict[str, Any]:
    """Repeat the step until the change is done; show its progress on standard error."""
    said = warned = ""
    with progress(_CATCHING_UP, unit="records") as show:
        behind: int | None = None
        while (found := step())["phase"] != _DONE:
            if found["warning"] != warned:
                warned = found["warning"]
                say(warned, err=True)
            if found["phase"] != said:
                said = found["phase"]
                say(f"member {found['member']}: {said} ...", err=True)
            if (left := _behind(directory, found["member"])) is not None:
                behind = max(left, behind or 0)
                show(behind - left, total=behind)
            if not limit.left_s():
                give_up = ""
                if found["phase"] == _CATCHING_UP:
                    give_up = f", or give up: pushrep replica remove {directory} {found['member']}"
                to_go = "" if left is None else f" ({count(left)} records to go)"
                raise click.ClickException(
                    f"member {found['member']} is still {said}{to_go} after {limit.seconds:g} s; steps that are done "
                    f"stay done: run the same command again{give_up}"
                )
            time.sleep(_PAUSE_S)
    return found


def _behind(directory: Path, member: int) -> int | None:
    """How many records the member has not acknowledged."""
    lags = {one["index"]: one["lag"] for one in ask(directory, "status")["members"]}
    lag = lags.get(member)
    return lag["records"] if lag else None


def _print_change(done: dict[str, Any], what: str, *, as_json: bool) -> None:
    listed = ", ".join(f"{one['index']} ({one['address'] or 'here'})" for one in done["members"])
    addresses = [one["address"] for one in done["members"] if one["address"]]
    lines = (
        f"{what}; members: {listed}; min_insync_replicas {done['min_insync_replicas']}",
        f"from the next open on: replicas={addresses}",
    )
    show_result(done, lines, as_json=as_json)


@replica.command("adopt", short_help="Make an old leader's directory a copy.")
@click.argument("data", type=click.Path(path_type=Path, file_okay=False))
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
def adopt_command(data: Path, directory: Path) -> None:
    """Move the outbox in DIRECTORY to the node whose directory is DATA, where it becomes a replica of the new leader.

    \b
      pushrep replica adopt copies outbox

    For a former leader that was replaced while it did not run (NotLeader). The node may be running. Records that only
    this directory holds are kept aside, not deleted. Add the node's address to `replicas` of the new leader's service.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    say(f"{directory} was moved to {adopt(data, directory)}")


@replica.command("moved", short_help="Confirm that a directory was moved.")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
def moved_command(directory: Path) -> None:
    """Confirm that DIRECTORY was moved here as a whole, and that its original does not exist any more.

    \b
      pushrep replica moved copies/7b0d3c1e-6f1a-4d2e-9a55-0c6a3f1be2aa

    For the directory of an outbox, with or without replicas, or of one member below a node. Do not use it for a
    restored backup: it lacks the records and votes that the original stored after the backup was made.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    say(f"{directory} has the directory id {moved(directory).directory_id.hex} from now on")


@click.command("promote", short_help="Make a replica the leader.")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option(
    "--catch-up",
    is_flag=True,
    help="If another member holds more records, fetch these first.  [default: refuse, and name that member]",
)
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Lead although too few members answer, or although the log here is damaged and no other is left. Acknowledged "
    "records may be lost.",
)
@click.option(
    "--lost",
    type=click.IntRange(0, 255),
    multiple=True,
    metavar="INDEX",
    help="With --accept-loss: the directory of this member is destroyed; remove it from the list. Repeat it for more.",
)
@click.option(
    "--new",
    multiple=True,
    metavar="HOST:PORT",
    help="With --accept-loss: add this node to the list of members; it is sent all records. Repeat it for more.",
)
@click.option("--depose", is_flag=True, help="Replace the leader although it may be alive.  [default: refuse then]")
@click.option(
    "--leader-alive-ms",
    type=click.IntRange(1),
    default=LEADER_ALIVE_MS,
    show_default=True,
    help="Milliseconds: a leader that members had contact with within this time counts as one that may be alive.",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    help="Seconds to wait for the answers of the other members.",
)
@tls_options
def promote_command(  # noqa: PLR0913, PLR0917 - the options
    directory: Path,
    timeout_s: float,
    tls: MutualTls | None,
    lost: tuple[int, ...],
    new: tuple[str, ...],
    leader_alive_ms: int,
    *,
    depose: bool,
    catch_up: bool,
    accept_loss: bool,
) -> None:
    """Make the replica in DIRECTORY the leader of all partitions of its outbox, when the leader is lost.

    \b
      pushrep promote copies/7b0d3c1e-6f1a-4d2e-9a55-0c6a3f1be2aa
      pushrep promote copies/7b0d3c1e-6f1a-4d2e-9a55-0c6a3f1be2aa --catch-up

    DIRECTORY is <data>/<outbox id> of a node. A running node releases the directory. So many other members have to
    answer that no record acknowledged with ALL is lost. If members had contact with the leader within
    --leader-alive-ms, the command refuses without --depose.

    Afterwards open the service's Outbox on DIRECTORY, with the replicas that the command prints. The old leader is
    fenced; `pushrep replica adopt` moves its directory under a node, where it follows the new leader.

    If members are destroyed, give --accept-loss with --lost for each of them, and --new for each node in their place;
    then the outbox continues with acks ALL (docs/replication.md). Records that other members hold beyond this replica
    are kept aside in their directories when they connect to the new leader, and they get its records.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    try:
        done = promote(
            directory,
            catch_up=catch_up,
            accept_loss=accept_loss,
            lost=lost,
            new=new,
            depose=depose,
            leader_alive_ms=leader_alive_ms,
            push=PushSettings(tls=tls),
            timeout_s=timeout_s,
        )
    except TooFewMembers as error:
        gone = sorted({*lost, *error.silent})
        known = " ".join([*(f"--lost {index}" for index in gone), *["--new HOST:PORT"] * len(gone)])
        raise click.ClickException(
            f"{error}. Nothing was changed. If their directories are destroyed: pushrep promote {directory} "
            f"--accept-loss {known}"
        ) from error
    _print_promotion(directory, done)


def _print_promotion(directory: Path, done: Promotion) -> None:
    grant, granted = done.grant, done.granted
    say(f"member {grant.leader} leads outbox {grant.outbox_id} ({grant.topic}) under epoch {grant.epoch}")
    for partition, log in sorted(done.logs.items()):
        say(
            f"  {grant.topic}-{partition}: high watermark {log.high_watermark}, log end {log.log.log_end_offset}, "
            f"epoch {log.granted.epoch}"
        )
    if grant.accepted_loss:
        say(f"accepted loss: without {grant.accepted_loss}")
        say(
            f"generation {label(grant.generation)} begins: records that other members hold beyond it are kept aside "
            "when they connect to this leader"
        )
    if granted.unreached:
        say(
            f"members {list(granted.unreached)} did not answer and are not fenced: records that they accept from the "
            "old leader until they get this grant are kept aside, too"
        )
    for damaged in granted.damaged:
        say(f"damaged, and no other member sent what is missing: {damaged}")
    if not granted.is_read:
        say("not every sealed segment was checked for damage: the outbox checks the rest while it is open")
    listed = ", ".join(f'"{address}"' for address in done.replicas)
    say(f"open the service's Outbox on {directory} with replicas=[{listed}]")
