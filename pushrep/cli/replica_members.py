"""`pushrep replica add | remove | replace | adopt | moved`: the members of an outbox.

Members change one at a time while the outbox runs or is closed.

The service that has the outbox open makes each step, asked on its control.sock; while nobody has it open, this process
opens it for as long as that takes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import click

from pushrep.cli.common import count, show_json
from pushrep.cli.options import F, addresses_of, client_tls, tls_options
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import BadArgument
from pushrep.outbox import Acks, Outbox
from pushrep.outbox.control import NobodyAnswers, ask
from pushrep.outbox.directory_handover import adopt, moved
from pushrep.outbox.identity import identity_in
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address

_PAUSE_S = 0.2
_LOST_WAIT_S = 5.0
_DONE, _CATCHING_UP = "done", "catching up"
_DIRECTORY = click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
_LEAST = click.option(
    "--min-insync-replicas",
    "least",
    type=click.IntRange(1),
    help="min_insync_replicas of the new list.  [default: more than half where it was that, else as it was]",
)
Step: TypeAlias = Callable[[], dict[str, Any]]


def _change_options(command: F) -> F:
    """What every change of members takes: --timeout, how its nodes are reached, --json."""
    timeout = click.option(
        "--timeout",
        type=click.FloatRange(0),
        default=600.0,
        show_default=True,
        help="Give up after so many seconds; run it again then.",
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="The members as a JSON object.")
    return timeout(tls_options(as_json(command)))


class _AddressType(click.ParamType[str]):
    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return str(Address.parse(value))
        except BadArgument as error:
            self.fail(error.why, param, ctx)


@click.command()
@_DIRECTORY
@click.argument("address", type=_AddressType())
@_LEAST
@_change_options
def add(directory: Path, address: str, least: int | None, timeout: float, *, as_json: bool, **tls: Path | None) -> None:
    """Add the node at ADDRESS to the members of the outbox in DIRECTORY.

    \b
      pushrep replica add outbox 10.0.0.4:7400

    It first gets all records, and does not count as a member. When it holds what the others hold, it becomes a member,
    by a grant of a majority of the old and of the new list. If it is interrupted, run it again. Its number was never
    another member's.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    with _reached(directory, timeout, **tls) as home, _listing_if_it_fails(directory):
        done = _follow(_adding(home, address, least), timeout, directory)
    _print_change(done, f"member {done['member']} ({address}) was added", as_json=as_json)


@click.command()
@_DIRECTORY
@click.argument("member", type=click.IntRange(0, 255))
@_LEAST
@_change_options
def remove(
    directory: Path, member: int, least: int | None, timeout: float, *, as_json: bool, **tls: Path | None
) -> None:
    """Remove MEMBER, by its number, from the members of the outbox in DIRECTORY.

    \b
      pushrep replica remove outbox 2

    Its copy stays where it is, and gets no more records. The leader can't be removed: promote another one first. A
    node that `add` still waits for is removed the same way, by the number that `add` prints.
    """  # noqa: D301 - as above
    with _reached(directory, timeout, **tls) as home, _listing_if_it_fails(directory):
        done = _follow(_removing(home, member, least), timeout, directory)
    _print_change(done, f"member {member} was removed", as_json=as_json)


@click.command()
@_DIRECTORY
@click.argument("member", type=click.IntRange(0, 255))
@click.argument("address", type=_AddressType())
@click.option(
    "--lost",
    type=click.IntRange(0, 255),
    multiple=True,
    metavar="INDEX",
    help="This member's directory is destroyed, and too few others are left to agree; it leaves the list. MEMBER at "
    "least; can be given again.",
)
@_change_options
def replace(  # noqa: PLR0913 - the options
    directory: Path,
    member: int,
    address: str,
    lost: tuple[int, ...],
    timeout: float,
    *,
    as_json: bool,
    **tls: Path | None,
) -> None:
    """Put the node at ADDRESS in the place of MEMBER: the new one is added, then the old one is removed.

    \b
      pushrep replica replace outbox 2 10.0.0.4:7400

    ADDRESS may be the member's own, once a new disk is there; of the list no other may. The new one has another number.

    \b
      pushrep replica replace outbox 2 10.0.0.4:7400 --lost 2

    If too few are left to agree, --lost says that MEMBER's directory is destroyed: the leader continues alone, under
    another PID, and takes records with ALL again once enough of the new list hold everything. What unreached members
    hold beyond the leader is kept aside when they reach it (docs/replication.md).
    """  # noqa: D301 - as above
    if lost and member not in lost:
        raise click.UsageError(f"--lost {member} says that member {member} is destroyed: give it, too, or none")
    wait_s = min(timeout, _LOST_WAIT_S) if lost else timeout  # for those that are destroyed nobody need wait
    with _reached(directory, wait_s, **tls) as home, _listing_if_it_fails(directory):
        if lost:
            done = _follow(_replacing(home, address, lost), timeout, directory)
            what = f"{'members' if len(lost) > 1 else 'member'} {', '.join(map(str, lost))}"
            _print_change(done, f"{what} gave way to member {done['member']} ({address})", as_json=as_json)
            return
        added = _follow(_adding(home, address, None, replaced=member), timeout, directory)
        done = _follow(_removing(home, member, None), timeout, directory)
    _print_change(done, f"member {member} was replaced by member {added['member']} ({address})", as_json=as_json)


def _adding(home: Path, address: str, least: int | None, replaced: int | None = None) -> Step:
    arguments = {"address": address, "min_insync_replicas": least, "replaced": replaced}
    return lambda: ask(home, "add-member", arguments)


def _replacing(home: Path, address: str, lost: Sequence[int]) -> Step:
    return lambda: ask(home, "replace-lost", {"address": address, "lost": list(lost)})


def _removing(home: Path, member: int, least: int | None) -> Step:
    return lambda: ask(home, "remove-member", {"index": member, "min_insync_replicas": least})


@contextmanager
def _reached(directory: Path, timeout_s: float, **tls: Path | None) -> Iterator[Path]:
    """The control socket of the service that has the outbox open, or of this process, which then opens it."""
    try:
        ask(directory, "status")
    except NobodyAnswers:
        with _opened(directory, timeout_s, PushSettings(tls=client_tls(**tls))):
            yield directory
        return
    if any(file is not None for file in tls.values()):
        raise click.UsageError("the outbox is open, and its service has certificates of its own: leave these out")
    yield directory


@contextmanager
def _listing_if_it_fails(directory: Path) -> Iterator[None]:
    """Print the list of members and what to run next, if the command fails or is interrupted."""
    try:
        yield
    except BaseException:
        with suppress(Exception):  # the operator needs the first error
            for line in _as_it_stands(directory, ask(directory, "status")):
                click.echo(line, err=True)
        raise


def _as_it_stands(directory: Path, status: dict[str, Any]) -> Iterator[str]:
    if not status["members"]:
        return  # without replicas: the error says so
    members = [one for one in status["members"] if not one["is_joining"]]
    named = ", ".join(
        f"{one['index']} ({'here' if one['is_leader'] else one['address'] or 'no address'})" for one in members
    )
    yield f"the members are {named}; min_insync_replicas {status['min_insync_replicas']}"
    for one in status["members"]:
        if one["is_joining"]:
            yield f"{one['address']} is to become member {one['index']}, and does not count yet"
    addresses = [one["address"] for one in members if one["address"]]
    yield f"from the next open on: replicas={addresses}"
    away = [one["index"] for one in members if one["lag"] is not None and not one["lag"]["in_sync"]]
    if status["is_changing"]:
        names = ", ".join(map(str, away)) or "none"
        yield f"the change is not finished, both lists still count: run the same command again once {names} answer"
        if away:
            lost = " ".join(f"--lost {index}" for index in away)
            yield f"if they are destroyed: pushrep replica replace {directory} {away[0]} HOST:PORT {lost}"


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
        open_timeout_s=timeout_s,  # only a leader can change the members, so wait for slow ones
        push=push,
        create=False,
    )


def _follow(step: Step, timeout_s: float, directory: Path) -> dict[str, Any]:
    """Repeat the step until the change is done; show its progress on standard error."""
    deadline, said = time.monotonic() + timeout_s, ""
    while (found := step())["phase"] != _DONE:
        if found["told"]:
            click.echo(found["told"], err=True)
        if found["phase"] != said:
            said = found["phase"]
            click.echo(f"member {found['member']}: {said} ...", err=True)
        if time.monotonic() > deadline:
            give_up = ""
            if found["phase"] == _CATCHING_UP:
                give_up = f", or give up: pushrep replica remove {directory} {found['member']}"
            raise click.ClickException(
                f"member {found['member']} is still {said}{_behind(directory, found['member'])} after {timeout_s:g} s; "
                f"what was done stays: run the same command again{give_up}"
            )
        time.sleep(_PAUSE_S)
    return found


def _behind(directory: Path, member: int) -> str:
    lags = {one["index"]: one["lag"] for one in ask(directory, "status")["members"]}
    lag = lags.get(member)
    return f" ({count(lag['records'])} records to go)" if lag else ""


def _print_change(done: dict[str, Any], what: str, *, as_json: bool) -> None:
    if as_json:
        show_json(done)
        return
    listed = ", ".join(f"{one['index']} ({one['address'] or 'here'})" for one in done["members"])
    addresses = [one["address"] for one in done["members"] if one["address"]]
    click.echo(f"{what}; members: {listed}; min_insync_replicas {done['min_insync_replicas']}")
    click.echo(f"from the next open on: replicas={addresses}")


@click.command("adopt")
@click.argument("data", type=click.Path(path_type=Path, file_okay=False))
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
def adopt_command(data: Path, directory: Path) -> None:
    """Move the outbox in DIRECTORY under the node that keeps its copies in DATA; it follows the new leader from there.

    \b
      pushrep replica adopt copies outbox

    For a leader that was replaced while it was away (NotLeader). The node may be running. Records that only this
    directory has are kept aside, not deleted. Add its address to `replicas` of the service that leads now.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    click.echo(f"{directory} is {adopt(data, directory)} now")


@click.command("moved")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
def moved_command(directory: Path) -> None:
    """Confirm that DIRECTORY was moved here as a whole, and that its original is gone for good.

    \b
      pushrep replica moved copies/7b0d3c1e-6f1a-4d2e-9a55-0c6a3f1be2aa

    For the directory of an outbox, with or without replicas, or of one member below a node. Not for a restored backup:
    what the original got or promised after the backup was made is not in it.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    click.echo(f"{directory} is directory {moved(directory).directory_id.hex} from now on")
