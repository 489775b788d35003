"""How commands reach the members of an outbox: their addresses, and --cert, --key, --ca, all three or none."""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import BadArgument
from pushrep.outbox import OutboxIdentity
from pushrep.replicate.certificates import mutual_tls
from pushrep.replicate.election_state import find_election_state

F = TypeVar("F", bound=Callable[..., Any])
PEM = click.Path(path_type=Path, dir_okay=False)


def tls_options(command: F) -> F:
    """--cert, --key and --ca of who connects to replicas."""
    for option, help_ in (
        ("--ca", "Who signs the certificates of replicas (PEM)."),
        ("--key", "Its private key (PEM)."),
        ("--cert", "The certificate that replicas are shown (PEM), with --key and --ca: mutual TLS."),
    ):
        command = click.option(option, type=PEM, help=help_)(command)
    return command


def client_tls(cert: Path | None, key: Path | None, ca: Path | None) -> ssl.SSLContext | None:
    """None without any of the three. Raises UsageError for some of them, and for files that can't be used."""
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        raise click.UsageError("give --cert, --key and --ca, all three or none")
    try:
        return mutual_tls(cert=cert, key=key, ca=ca)
    except BadArgument as error:
        raise click.UsageError(str(error)) from error


def addresses_of(directory: Path, stored: OutboxIdentity | None) -> list[str]:
    """The other members' addresses; none of an outbox that is not there, or has no replicas. Raises CorruptNodeFile."""
    if stored is None:
        return []
    _, state = find_election_state(directory, REAL_FILESYSTEM) or (None, None)
    if state is None or state.grant is None:
        return [address for _, address in stored.replicas]
    return [one.address for one in state.grant.members if one.index != state.member and one.address]
