"""The settings of a service's outbox from a TOML file and PUSHREP_... variables, instead of from its code.

    [outbox]                    PUSHREP_TOPIC=orders                       arguments of Outbox.open, by their names
    topic = "orders"
    [log]                       PUSHREP_LOG_SEGMENT_BYTES=67108864         fields of LogConfig
    segment_bytes = 67108864
    [kafka]                     PUSHREP_KAFKA_BOOTSTRAP_SERVERS=broker:9092      fields of KafkaDestination
    sasl_password_file = "/run/secrets/kafka"                              a text's value is the file's content
    [health]                    PUSHREP_HEALTH_LISTEN=127.0.0.1:9400       fields of HealthSettings

A variable wins over the file. A misspelt setting is refused by its name. The values are checked by what takes them, as
always.
"""

import inspect
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from pushrep.errors import checked_path
from pushrep.health import HealthSettings
from pushrep.kafka.destination import KafkaDestination
from pushrep.log import LogConfig
from pushrep.outbox.errors import SettingRefused
from pushrep.outbox.outbox import Outbox

PREFIX = "PUSHREP_"
_FILE = "_file"
_SECTIONS = {"outbox": PREFIX, "log": f"{PREFIX}LOG_", "kafka": f"{PREFIX}KAFKA_", "health": f"{PREFIX}HEALTH_"}
_OBJECTS = {"kafka", "push", "health", "log_config", "filesystem", "clock"}  # arguments that a file cannot hold


class Setting(NamedTuple):
    """One setting: the kinds of value that it takes, its default (`inspect.Parameter.empty`: it has to be given)."""

    section: str
    name: str
    kinds: tuple[Any, ...]
    default: object

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return _SECTIONS[self.section] + self.name.upper()

    @property
    def is_needed(self) -> bool:
        """Whether there is no default."""
        return self.default is inspect.Parameter.empty

    @property
    def is_text(self) -> bool:
        """Whether its value is a text, which a file may hold."""
        return str in self.kinds


def all_settings() -> list[Setting]:
    """Every setting, in the order of the code."""
    found = []
    hints = get_type_hints(Outbox.open, localns={"HealthSettings": HealthSettings})  # it imports it late
    for name, parameter in inspect.signature(Outbox.open).parameters.items():
        if name not in _OBJECTS:
            found.append(Setting("outbox", name, _kinds(hints[name]), parameter.default))
    for section, made in (("log", LogConfig), ("kafka", KafkaDestination), ("health", HealthSettings)):
        hints = get_type_hints(made)
        for field in fields(made):
            kinds = _kinds(hints[field.name])
            if any(kind in {int, bool, str} or isinstance(kind, type) for kind in kinds):
                default = inspect.Parameter.empty if field.default is not None and _is_missing(field) else field.default
                found.append(Setting(section, field.name, kinds, default))
    return found


def outbox_settings(
    file: Path | str | None = None, environ: Mapping[str, str] = os.environ, **in_code: Any
) -> dict[str, Any]:
    """Arguments for `Outbox.open`, `Outbox.open_slot`, `AsyncOutbox.open`: `Outbox.open(**outbox_settings("my.toml"))`.

    file: TOML; None: the variables alone. in_code: arguments from the service's own code; the file and the variables
    win over them. Raises SettingRefused, which names the setting, BadArgument.
    """
    given: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    known = {(one.section, one.name): one for one in all_settings()}
    if file is not None:
        _take_file(checked_path("file", file), known, given)
    _take_variables(environ, known, given)
    settings = given["outbox"]
    if given["log"]:
        settings["log_config"] = LogConfig(**given["log"])
    if given["kafka"]:
        if "bootstrap_servers" not in given["kafka"]:
            raise SettingRefused("kafka.bootstrap_servers", "the other settings of kafka want it: 'host:port'")
        settings["kafka"] = KafkaDestination(**given["kafka"])
    if given["health"]:
        if "listen" not in given["health"]:
            raise SettingRefused("health.listen", "the other settings of health want it: 'host:port'")
        settings["health"] = HealthSettings(**given["health"])
    settings = in_code | settings
    missing = [one for one in known.values() if one.section == "outbox" and one.is_needed and one.name not in settings]
    if missing:
        tables = [] if file is None else _tables_in(checked_path("file", file))
        near = [] if "outbox" in tables else get_close_matches("outbox", tables, 1)
        others = ", ".join(one.name for one in missing[1:])
        raise SettingRefused(
            missing[0].name,
            f"has to be given, in the table [outbox] of the file or as {missing[0].variable}"
            + (f"; missing, too: {others}" if others else "")
            + (f"; {file} has no table [outbox], but [{near[0]}]" if near else ""),
        )
    return settings


def _tables_in(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text("file", path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingRefused(str(path), f"is no TOML: {error}") from error


def _take_file(path: Path, known: Mapping[tuple[str, str], Setting], given: dict[str, dict[str, Any]]) -> None:
    for section, values in _tables_in(path).items():
        if section not in _SECTIONS:
            continue  # of the command line, or of another program
        if not isinstance(values, dict):
            raise SettingRefused(section, f"in {path} is a table: [{section}]")
        for name, value in values.items():
            setting, is_file = _find(known, section, name, f"{section}.{name} in {path}")
            given[section][setting.name] = _value(setting, _content(f"{section}.{name}", value) if is_file else value)


def _take_variables(
    environ: Mapping[str, str], known: Mapping[tuple[str, str], Setting], given: dict[str, dict[str, Any]]
) -> None:
    by_variable = {setting.variable: setting for setting in known.values()}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX):
            continue
        setting = by_variable.get(variable)
        if setting is not None:
            given[setting.section][setting.name] = _value(setting, value)
        elif (setting := by_variable.get(variable.removesuffix(_FILE.upper()))) is not None and setting.is_text:
            given[setting.section][setting.name] = _value(setting, _content(variable, value))
        elif near := get_close_matches(variable, by_variable, 1, 0.85):
            raise SettingRefused(variable, f"is no setting; did you mean {near[0]}?")


def _find(known: Mapping[tuple[str, str], Setting], section: str, name: str, place: str) -> tuple[Setting, bool]:
    if (setting := known.get((section, name))) is not None:
        return setting, False
    setting = known.get((section, name.removesuffix(_FILE)))
    if setting is not None and setting.is_text:
        return setting, True
    names = [one for of, one in known if of == section]
    near = get_close_matches(name, names, 1)
    raise SettingRefused(place, f"is no setting{f'; did you mean {near[0]}?' if near else ''}")


def _content(setting: str, path: object) -> str:
    """The file's content, without the trailing line ends that editors add."""
    return _text(setting, checked_path(setting, path)).rstrip("\r\n")


def _text(setting: str, path: Path) -> str:
    """Raises SettingRefused where no file can be read, UnicodeDecodeError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingRefused(setting, f"can't read {str(path)!r}: {error.strerror or error}") from error


def _value(setting: Setting, value: object) -> Any:
    """The value as the argument takes it; a variable's value is text."""
    enums = [kind for kind in setting.kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    if enums:
        names = enums[0].__members__
        if not isinstance(value, str) or value.upper() not in names:
            raise SettingRefused(setting.name, f"give one of {', '.join(names).lower()}, not {value!r}")
        return names[value.upper()]
    if any(get_origin(kind) is Sequence for kind in setting.kinds):
        return [one.strip() for one in value.split(",") if one.strip()] if isinstance(value, str) else value
    if not isinstance(value, str) or setting.is_text:
        return value
    if bool in setting.kinds:
        if value.lower() not in {"true", "false"}:
            raise SettingRefused(setting.name, f"give true or false, not {value!r}")
        return value.lower() == "true"
    try:
        return float(value) if float in setting.kinds and int not in setting.kinds else int(value)
    except ValueError:
        raise SettingRefused(setting.name, f"give a number, not {value!r}") from None


def _kinds(hint: Any) -> tuple[Any, ...]:
    kinds = get_args(hint) if get_origin(hint) in {Union, UnionType} else (hint,)
    return tuple(kind for kind in kinds if kind is not NoneType)


def _is_missing(field: Any) -> bool:
    return type(field.default).__name__ == "_MISSING_TYPE"
