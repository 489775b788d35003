"""`--log NAME=VALUE`: every setting of a log (LogConfig) on the command line; `--no-copy-check`."""

from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

import click

from pushrep.errors import BadArgument
from pushrep.log import LogConfig
from pushrep.records import Codec

_Command = TypeVar("_Command", bound=Callable[..., Any])
_NAMES = tuple(field.name for field in fields(LogConfig))


def log_options(command: _Command) -> _Command:
    """Give a command the option `--log`; its function gets the LogConfig as `log_config`."""
    option = click.option(
        "--log",
        "log_config",
        multiple=True,
        metavar="NAME=VALUE",
        callback=lambda _context, _option, values: log_config_of(values),
        help="A setting of the log's files and disk, as retention_ms, segment_bytes, disk_refuse_percent; again for "
        "each. All of them: docs/settings.md.",
    )
    return option(command)


copy_check_option = click.option(
    "--copy-check/--no-copy-check",
    default=True,
    show_default=True,
    help="Notice a directory that is a copy of another (a restored backup, a clone), or do not ask.",
)


def log_config_of(settings: tuple[str, ...]) -> LogConfig:
    """Raises click.BadParameter."""
    given: dict[str, object] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name not in _NAMES:
            near = get_close_matches(name, _NAMES, 1)
            hint = f"did you mean {near[0]}=...?" if near else f"give one of {', '.join(_NAMES)}"
            raise click.BadParameter(f"{setting!r} is no NAME=VALUE of a log's setting: {hint}", param_hint="--log")
        given[name] = _value(name, value)
    try:
        return LogConfig(**given)  # type: ignore[arg-type]  # LogConfig checks them
    except BadArgument as error:
        raise click.BadParameter(str(error), param_hint="--log") from error


def _value(name: str, text: str) -> object:
    if name == "codec":
        return Codec.__members__.get(text.upper(), text)
    if text.lower() in {"none", "never"}:
        return None
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"{name} takes a whole number, not {text!r}", param_hint="--log") from None
