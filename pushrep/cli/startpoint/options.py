"""What the sub-commands have in common: which store, which topic, how a refusal names the option."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pushrep.cli.startpoint.preview import partitions_of
from pushrep.startpoints import STORE_NAME, StartpointStore

_Command = TypeVar("_Command", bound=Callable[..., Any])


def with_store(command: _Command) -> _Command:
    """The argument DIRECTORY and the option --store."""
    option = click.option(
        "--store", metavar="PLACE", help="Where the startpoints lie.  [default: DIRECTORY/startpoints]"
    )
    return click.argument("directory", type=click.Path(path_type=Path))(option(command))


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
    """The store that the options name. Raises StoreUnavailable for one of another kind."""
    return StartpointStore.open(store if store is not None else directory / STORE_NAME)


def topic_and_partition(directory: Path, text: str) -> tuple[str, int | None]:
    """TOPIC or TOPIC-N. A topic's own name wins, as in `pushrep read`."""
    match = re.fullmatch(r"(.+)-(0|[1-9][0-9]{0,9})", text)
    if match is None or partitions_of(directory, text):
        return text, None
    return match[1], int(match[2])


def _is_terminal() -> bool:
    return sys.stdin.isatty()
