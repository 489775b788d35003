"""Options that commands share.

`--log`, `--replay NAME=VALUE`     every setting of a log (LogConfig), of the replays of a node; `--no-copy-check`
`--config`                         a Kafka client's properties
--cert, --key, --ca                how the members of an outbox are reached: all three or none; and their addresses
"""

import ssl
from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from pushrep.cli.input_lines import parse_time_ms
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import BadArgument
from pushrep.log import LogConfig
from pushrep.outbox import OutboxIdentity
from pushrep.records import Codec
from pushrep.replay.plan import ReplaySettings
from pushrep.replicate.certificates import mutual_tls
from pushrep.replicate.election_state import find_election_state
from pushrep.replicate.node_settings import BATCH_BYTES_MAX as NODE_BATCH_BYTES_MAX

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Made = TypeVar("_Made")


def log_options(command: _Command, **defaults: object) -> _Command:
    """Give a command the option `--log`; its function gets the LogConfig as `log_config`.

    defaults: where they are others than LogConfig's.
    """
    option = click.option(
        "--log",
        "log_config",
        multiple=True,
        metavar="NAME=VALUE",
        callback=lambda _context, _option, values: log_config_of(values, **defaults),
        help="A setting of the log's files and disk, as retention_ms, segment_bytes, disk_refuse_percent; again for "
        "each. All of them: docs/settings.md.",
    )
    return option(command)


node_log_options = partial(log_options, batch_bytes_max=NODE_BATCH_BYTES_MAX)
"""The same for a node, which takes whatever batches its leaders do."""

replay_options = click.option(
    "--replay",
    "replay",
    multiple=True,
    metavar="NAME=VALUE",
    callback=lambda _context, _option, values: _settings_of(ReplaySettings, "--replay", "replays'", values),
    help="A setting of the replays that are served, as connect_timeout_ms, liveness_timeout_ms, heartbeat_ms, "
    "block_bytes; again for each.",
)

copy_check_option = click.option(
    "--copy-check/--no-copy-check",
    default=True,
    show_default=True,
    help="Whether to check that the directory is no copy of another (a restored backup, a clone).",
)

client_properties_option = click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Properties of the client, as kcat and librdkafka spell them: security.protocol, sasl.username ...",
)


def log_config_of(settings: tuple[str, ...], **defaults: object) -> LogConfig:
    """Raises click.BadParameter."""
    return _settings_of(LogConfig, "--log", "a log's", settings, **defaults)


def _settings_of(
    made: Callable[..., _Made], option: str, whose: str, settings: tuple[str, ...], **defaults: object
) -> _Made:
    names = [field.name for field in fields(made)]  # type: ignore[arg-type]  # a dataclass
    given = dict(defaults)
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name not in names:
            near = get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}=...?" if near else f"give one of {', '.join(names)}"
            raise click.BadParameter(f"{setting!r} is no NAME=VALUE of {whose} setting: {hint}", param_hint=option)
        given[name] = _value(name, value, option)
    try:
        return made(**given)
    except BadArgument as error:
        raise click.BadParameter(str(error), param_hint=option) from error


def _value(name: str, text: str, option: str) -> object:
    if name == "codec":
        return Codec.__members__.get(text.upper(), text)
    if text.lower() in {"none", "never"}:
        return None
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"{name} takes a whole number, not {text!r}", param_hint=option) from None


def time_ms_of(option: str, text: str, others: str = "an offset") -> int:
    """The time that an option says, ms since 1970. `others`: what it takes besides. Raises click.BadParameter."""
    try:
        return parse_time_ms(text)
    except ValueError as error:
        why = f"{text!r} is neither {others} nor an ISO 8601 time"
        raise click.BadParameter(why, param_hint=option) from error


F = TypeVar("F", bound=Callable[..., Any])
PEM = click.Path(path_type=Path, dir_okay=False)


def tls_options(command: F) -> F:
    """--cert, --key and --ca for connections to replicas."""
    for option, help_ in (
        ("--ca", "The authority of replicas' certificates (PEM)."),
        ("--key", "Its private key (PEM)."),
        ("--cert", "The certificate to show to replicas (PEM), with --key and --ca: mutual TLS."),
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
