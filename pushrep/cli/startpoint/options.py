"""What the sub-commands have in common: which store, which topic, how a refusal names the option."""

import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

import click

from pushrep.cli.common import parse_duration_s, why_missing
from pushrep.cli.startpoint.preview import parse_place, partitions_of
from pushrep.kafka.destination import read_properties
from pushrep.log.errors import InvalidLogName
from pushrep.log.slots import parse_shown_name
from pushrep.startpoints import STORE_NAME, Startpoint, StartpointStore, places, store_at
from pushrep.startpoints.places import KAFKA, kind_of

GROUP = "pushrep.checkpoints"
BOOTSTRAP_SERVERS, KAFKA_CONFIG = "--bootstrap-servers", "--kafka-config"

_Command = TypeVar("_Command", bound=Callable[..., Any])


def with_store(command: _Command) -> _Command:
    """The argument DIRECTORY and the options --store, and what a store in a topic needs to be reached."""
    argument = click.argument("directory", type=click.Path(path_type=Path))
    return argument(with_place("DIRECTORY/startpoints")(command))


def with_place(default: str) -> Callable[[_Command], _Command]:
    """The options --store, and what a store in a topic needs to be reached; `default` as people read it."""
    words = f"Where the startpoints lie: a directory, or kafka:TOPIC.  [default: {default}]"
    option = click.option("--store", metavar="PLACE", help=words)
    servers = click.option(
        BOOTSTRAP_SERVERS, metavar="HOST:PORT,...", expose_value=False, callback=_noted, help="Of --store kafka:TOPIC."
    )
    config = click.option(
        KAFKA_CONFIG,
        type=click.Path(path_type=Path, dir_okay=False, exists=True),
        expose_value=False,
        callback=_noted,
        help="Properties of its client, as librdkafka spells them.",
    )
    return lambda command: option(servers(config(command)))


def with_json(command: _Command) -> _Command:
    """The option --json."""
    return click.option("--json", "as_json", is_flag=True, help="JSON, one object a line.")(command)


def with_author(command: _Command) -> _Command:
    """The options of every write: who, and why."""
    author = click.option("--author", help="Who says so.  [default: your user name]")
    reason = click.option("--reason", callback=_asked, help="Why; kept as history. Asked for at a terminal.")
    return reason(author(command))


def _asked(context: click.Context, _parameter: click.Parameter, reason: str | None) -> str:
    if reason is None and context.params.get("dry_run"):  # --dry-run is eager, so it is known here
        return "dry run"
    if reason is None and not _is_terminal():
        raise click.UsageError("say why: --reason TEXT")
    return reason if reason is not None else str(click.prompt("Reason"))


def store_of(directory: Path, store: str | None) -> StartpointStore:
    """The store that the options name, closed with the command. Raises StoreUnavailable, BadArgument, UsageError."""
    if store is None and kind_of(str(directory)) == KAFKA:
        raise click.UsageError(f"DIRECTORY is that of the logs; a store in a topic is named by --store {directory}")
    return store_or(store, directory / STORE_NAME)


def written_store_of(directory: Path, store: str | None) -> StartpointStore:
    """As `store_of`, for who only looks: a mistyped directory is not one without startpoints."""
    if store is None and kind_of(str(directory)) != KAFKA and not directory.exists():
        raise click.UsageError(f"there is no directory {directory}: name that of the logs, or the store by --store")
    return store_of(directory, store)


def store_or(store: str | None, default: Path, *others: str | None) -> StartpointStore:
    """As `store_of`, by any default; `others`: places of this command that may be on the same brokers."""
    servers, config = brokers()
    place = store if store is not None else default
    if all(kind_of(one or "") != KAFKA for one in (place, *others)) and (servers is not None or config is not None):
        raise click.UsageError(f"{BOOTSTRAP_SERVERS} and {KAFKA_CONFIG} are for --store kafka:TOPIC")
    if kind_of(place) != KAFKA:
        opened = store_at(place)
    elif servers is None:
        raise click.UsageError(f"--store {place}: say where, {BOOTSTRAP_SERVERS} HOST:PORT")
    else:
        opened = store_at(place, read_properties(config) | {places.BOOTSTRAP_SERVERS: servers})
    click.get_current_context().call_on_close(opened.close)
    return opened


def brokers() -> tuple[str | None, Path | None]:
    """What the options say of brokers: their addresses, and a file of the client's properties."""
    context = click.get_current_context()
    return context.meta.get(BOOTSTRAP_SERVERS), context.meta.get(KAFKA_CONFIG)


def checkpoint_tool(what: str) -> Any:
    """The module of spark_jobs that stands above this package and does `what`: it is found by its entry point."""
    for entry in entry_points(group=GROUP):
        try:
            return entry.load()()
        except ModuleNotFoundError as error:
            raise click.ClickException(why_missing(what, error) or str(error)) from error
    raise click.ClickException(f"{what} needs the package spark_jobs, which this installation lacks")


def _noted(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    context.meta[parameter.opts[0]] = value


def topic_and_partition(directory: Path, text: str) -> tuple[str, int | None]:
    """TOPIC, TOPIC-N or, of a worker slot, slot-M/TOPIC-N. A topic's own name wins, as in `pushrep read`."""
    if partitions_of(directory, text):
        return text, None
    try:
        return parse_shown_name(text)
    except InvalidLogName:
        return text, None


def parse_option(option: str, text: str, *, out_of_range: str = "error", reset_marks: bool = False) -> Startpoint:
    """As `parse_place`, of this option of the command. Raises click.BadParameter."""
    try:
        return parse_place(text, out_of_range=out_of_range, reset_marks=reset_marks)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from error


def parse_ttl_s(text: str) -> int | None:
    """The option --ttl; None for never. Raises click.BadParameter."""
    if text == "never":
        return None
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}, or never", param_hint="--ttl") from error


def _is_terminal() -> bool:
    return sys.stdin.isatty()
