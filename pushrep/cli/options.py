"""Arguments and options that commands share.

`DIRECTORY LOG`               names logs: LOG is `orders-0`, `slot-3/orders-0`, or `orders` for all of a topic
`--log NAME=VALUE`            any setting of a log (LogConfig)
`--replay NAME=VALUE`         any setting of the replays that a node serves (ReplaySettings)
`--no-copy-check`             do not check whether the directory is a copy of another
`--config FILE`               a Kafka client's properties
`--on-refused`                what happens at a record that a topic refuses
`--cert`, `--key`, `--ca`     mutual TLS for connections to replicas: all three or none
`--health HOST:PORT`          serve probes and metrics
"""

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from pushrep.cli.common import parse_time_ms
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import BadArgument
from pushrep.health import HealthSettings
from pushrep.kafka import KafkaDestination
from pushrep.kafka.destination import destination_of
from pushrep.log import LogConfig
from pushrep.log.directory_files import is_named, log_at, readable_logs, shown_name
from pushrep.log.inspection import is_log, logs_at
from pushrep.outbox import OutboxIdentity
from pushrep.replay.plan import MAX_TIMESTAMP, AtTime, ReplaySettings
from pushrep.replicate.certificates import CertificateFiles, MutualTls, mutual_tls
from pushrep.replicate.election_state import find_election_state
from pushrep.replicate.node_settings import BATCH_BYTES_MAX as NODE_BATCH_BYTES_MAX
from pushrep.replicate.sockets import Address
from pushrep.settings import did_you_mean, settings_of

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Made = TypeVar("_Made")
_SHOWN = 10

directory_argument = click.argument("directory", type=click.Path(path_type=Path))
log_argument = click.argument("name", metavar="LOG")
any_log_argument = click.argument("name", metavar="[LOG]", required=False)


def log_options(command: _Command, **defaults: object) -> _Command:
    """Add the option `--log` to a command; its function gets a LogConfig as `log_config`.

    defaults: the command's defaults that differ from LogConfig's.
    """
    return click.option(
        "--log",
        "log_config",
        multiple=True,
        metavar="NAME=VALUE",
        callback=lambda _context, _option, values: log_config_of(values, **defaults),
        help="A setting of the log's files and disk, for example retention_ms=604800000. Repeat it for more. "
        "docs/settings.md lists all, with units and defaults.",
    )(command)


node_log_options = partial(log_options, batch_bytes_max=NODE_BATCH_BYTES_MAX)
"""`log_options` for a node: its batch_bytes_max is 64 MiB, so that it accepts every batch of its leaders."""

replay_options = click.option(
    "--replay",
    "replay",
    multiple=True,
    metavar="NAME=VALUE",
    callback=lambda _context, _option, values: _settings_of(ReplaySettings, "--replay", "replays'", values),
    help="A setting of the replays that this node serves: max_sessions, connect_timeout_ms, liveness_timeout_ms, "
    "heartbeat_ms or block_bytes, for example liveness_timeout_ms=30000. Repeat it for more.",
)

copy_check_option = click.option(
    "--copy-check/--no-copy-check",
    default=True,
    show_default=True,
    help="Check whether the directory is a copy of another one (a restored backup, a cloned disk).",
)

client_properties_option = click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A file of Kafka client properties, NAME=VALUE a line, with librdkafka's names: security.protocol=SASL_SSL.",
)


def setting_option(made: Callable[..., object], name: str, option: str = "") -> Callable[[_Command], _Command]:
    """An option with the words or the least number, the default and the text of a setting. option: another name."""
    one = settings_of(made)[name]
    return click.option(
        option or f"--{name.replace('_', '-')}",
        type=click.Choice(one.words) if one.within is None else click.IntRange(int(one.within.least)),
        default=one.default,
        show_default=True,
        help=one.text[:1].upper() + one.text[1:],
    )


on_refused_option = setting_option(KafkaDestination, "on_refused")


def log_config_of(settings: tuple[str, ...], **defaults: object) -> LogConfig:
    """The LogConfig of these NAME=VALUE. Raises click.BadParameter."""
    return _settings_of(LogConfig, "--log", "a log's", settings, **defaults)


def _settings_of(made: type[_Made], option: str, whose: str, settings: tuple[str, ...], **defaults: object) -> _Made:
    known = settings_of(made)
    given = dict(defaults)
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name not in known:
            hint = did_you_mean(name, known) or f"; give one of {', '.join(known)}"
            raise click.BadParameter(f"{setting!r} is not NAME=VALUE of {whose} setting{hint}", param_hint=option)
        try:
            given[name] = known[name].value_of(value)
        except BadArgument as error:
            raise click.BadParameter(str(error), param_hint=option) from error
    try:
        return made(**given)
    except BadArgument as error:
        raise click.BadParameter(str(error), param_hint=option) from error


def time_ms_of(option: str, text: str, others: str = "an offset") -> int:
    """The time in an option's value, ms since 1970 UTC. Raises click.BadParameter.

    others: which other values the option takes; for the message.
    """
    try:
        return parse_time_ms(text)
    except ValueError as error:
        why = f"{text!r} is neither {others} nor an ISO 8601 time"
        raise click.BadParameter(why, param_hint=option) from error


def begin_of(option: str, text: str) -> str | int | AtTime:
    """Where a reader begins, by an option's value: "earliest", "latest", an offset or a time. Raises
    click.BadParameter.
    """
    if text in {"earliest", "latest"}:
        return text
    if is_offset(text):
        return int(text)
    if text == "max-timestamp":
        return AtTime(MAX_TIMESTAMP)
    return AtTime(time_ms_of(option, text, others="earliest, latest, an offset, max-timestamp"))


def is_offset(text: str | None) -> bool:
    """Whether an option's value is an offset."""
    return text is not None and text.isascii() and text.isdigit()


PEM = click.Path(path_type=Path, dir_okay=False)


class _AddressType(click.ParamType[Address]):
    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Address:
        try:
            return Address.parse(value)
        except BadArgument as error:
            self.fail(error.why, param, ctx)


ADDRESS = _AddressType()


def tls_options(command: _Command) -> _Command:
    """Add --cert, --key and --ca for connections to replicas; the function gets `tls`: their context, None without."""

    @wraps(command)
    def with_tls(*args: Any, cert: Path | None, key: Path | None, ca: Path | None, **kwargs: Any) -> Any:
        files = pem_files(cert, key, ca)
        try:
            tls = None if files is None else mutual_tls(**files._asdict())
        except BadArgument as error:
            raise click.UsageError(str(error)) from error
        return command(*args, tls=tls, **kwargs)

    found: Any = with_tls
    for option, help_ in (
        ("--ca", "A PEM file: the CA that signed the replicas' certificates."),
        ("--key", "A PEM file: the private key of --cert."),
        ("--cert", "A PEM file: the client certificate for replicas with mutual TLS. Needs --key and --ca."),
    ):
        found = click.option(option, type=PEM, help=help_)(found)
    return cast("_Command", found)


health_option = click.option(
    "--health",
    metavar="HOST:PORT",
    help="Serve /livez, /readyz and /metrics at this address, with --cert over TLS.  [default: serve nothing]",
)


def health_of(listen: str | None, tls: MutualTls | None) -> HealthSettings | None:
    """The settings of `--health`, with the files of `tls`. Raises BadArgument."""
    cert, key, ca = (None, None, None) if tls is None else map(str, tls.files)
    return None if listen is None else HealthSettings(listen=listen, cert=cert, key=key, ca=ca)


def kafka_of(servers: str | None, config: Path | None, on_refused: str = "stop") -> KafkaDestination | None:
    """The destination of `--bootstrap-servers` and `--config`; None without them. Raises UsageError, BadArgument."""
    if config is not None and servers is None:
        raise click.UsageError("--config is for the Kafka client: give --bootstrap-servers, too")
    return None if servers is None else destination_of(servers, None, config, on_refused)


def pem_files(cert: Path | None, key: Path | None, ca: Path | None) -> CertificateFiles | None:
    """The files of mutual TLS; None if none is given. Raises UsageError if only some are given."""
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        raise click.UsageError("give --cert, --key and --ca, all three or none")
    return CertificateFiles(cert, key, ca)


def addresses_of(directory: Path, stored: OutboxIdentity | None) -> list[str]:
    """The addresses of the outbox's other members; an empty list if there is no outbox or it has no replicas.

    Raises CorruptFile.
    """
    if stored is None:
        return []
    _, state = find_election_state(directory, REAL_FILESYSTEM) or (None, None)
    if state is None or state.grant is None:
        return [address for _, address in stored.replicas]
    return [one.address for one in state.grant.members if one.index != state.member and one.address]


def named_logs(directory: Path, name: str) -> list[tuple[str, int]]:
    """Topic and number of each log that `name` means. Raises ClickException, NotALog."""
    _refuse_log(directory)
    logs = readable_logs(directory)
    chosen = [log for log in logs if log[0] == name] or [log for log in logs if is_named(log, name)]
    if not chosen:
        raise click.ClickException(f"{directory} has no log {name}; it has {_listed(logs) or 'none'}")
    return chosen


def log_paths(directory: Path, name: str | None) -> list[Path]:
    """The paths of these logs; without a name, of all. Raises ClickException, NotALog."""
    _refuse_log(directory)
    return logs_at(directory) if name is None else [log_at(directory, *log) for log in named_logs(directory, name)]


def log_path(directory: Path, name: str) -> Path:
    """The path of one log. Raises as `log_paths`."""
    chosen = named_logs(directory, name)
    if len(chosen) > 1:
        raise click.ClickException(f"{name} names {len(chosen)} logs: give one of {_listed(chosen)}")
    return log_at(directory, *chosen[0])


def _refuse_log(directory: Path) -> None:
    if is_log(directory):
        parent = directory.parent if directory.name else directory.absolute().parent
        raise click.ClickException(
            f"{directory} is one log: give its directory and its name, {parent} {directory.name}"
        )


def _listed(logs: list[tuple[str, int]]) -> str:
    more = f", and {len(logs) - _SHOWN} more" if len(logs) > _SHOWN else ""
    return ", ".join(shown_name(*log) for log in logs[:_SHOWN]) + more
