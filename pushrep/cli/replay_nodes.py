"""What commands that may speak to a node have in common: its certificates, and how a recording is named."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from pushrep.cli.replica.certificates import client_tls
from pushrep.log.slots import is_named, parse_shown_name, readable_logs, shown_name, slot_directories
from pushrep.replay import NodeAccess, ReplayClient

F = TypeVar("F", bound=Callable[..., Any])
_PATH = click.Path(path_type=Path, dir_okay=False)


def node_options(command: F) -> F:
    """Add --cert, --key and --ca; the command gets `node`, None without them."""

    @wraps(command)
    def with_node(*args: Any, cert: Path | None, key: Path | None, ca: Path | None, **kwargs: Any) -> Any:
        return command(*args, node=_access(cert, key, ca), **kwargs)

    options = [
        click.option("--cert", type=_PATH, help="For a node with TLS: your certificate (PEM), with --key and --ca."),
        click.option("--key", type=_PATH, help="Your private key (PEM)."),
        click.option("--ca", type=_PATH, help="Who signed the node's certificate (PEM)."),
    ]
    for option in reversed(options):
        with_node = option(with_node)
    return with_node  # type: ignore[return-value]  # the same command, as click sees it


def recording_of(text: str) -> int | str:
    """An id of the catalogue, or `<topic>-<partition>`."""
    return int(text) if text.isascii() and text.isdigit() else text


def recordings_of(where: str, text: str) -> list[int | str]:
    """The recording, or where `where` has worker slots and the name has none, that of every slot."""
    found: list[int | str] = []
    if slot_directories(where):
        found += [shown_name(*log) for log in readable_logs(where) if is_named(log, text)]
    return found or [recording_of(text)]


def log_of(client: ReplayClient, recording: int | str) -> tuple[str, int]:
    """Its topic and partition; raises InvalidLogName for a name that is none, UsageError for an unknown id."""
    if isinstance(recording, str):
        return parse_shown_name(recording)
    found = next((one for one in client.recordings() if one.recording_id == recording), None)
    if found is None:
        raise click.UsageError(f"there is no recording {recording}: `pushrep recording list` names them")
    return found.topic, found.partition


def _access(cert: Path | None, key: Path | None, ca: Path | None) -> NodeAccess | None:
    context = client_tls(cert, key, ca)
    return None if context is None else NodeAccess(tls=context)
