"""The settings of a service's outbox from a TOML file and PUSHREP_... variables, instead of from its code.

    [outbox]                    PUSHREP_TOPIC=orders         arguments of Outbox.open, fields of OutboxConfig
    topic = "orders"
    [log]                       PUSHREP_LOG_SEGMENT_BYTES=67108864         fields of LogConfig
    segment_bytes = 67108864
    [kafka]                     PUSHREP_KAFKA_BOOTSTRAP_SERVERS=broker:9092      fields of KafkaDestination
    sasl_password_file = "/run/secrets/kafka"                              a text's value is the file's content
    [health]                    PUSHREP_HEALTH_LISTEN=127.0.0.1:9400       fields of HealthSettings

A variable wins over the file. A misspelt setting is refused by its name. The values are checked by what takes them, as
always.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from pushrep.errors import BadArgument, checked_path
from pushrep.health import HealthSettings
from pushrep.kafka.destination import KafkaDestination
from pushrep.log import LogConfig
from pushrep.outbox.outbox import Outbox
from pushrep.outbox.settings import DEFAULT_CONFIG, OutboxConfig
from pushrep.settings import Setting, did_you_mean, settings_of

PREFIX = "PUSHREP_"
_FILE = "_file"
SECTIONS = {
    "outbox": (Outbox.open, OutboxConfig),
    "log": (LogConfig,),
    "kafka": (KafkaDestination,),
    "health": (HealthSettings,),
}
"""The tables of a file, and what their settings are the arguments of."""


class PlacedSetting(NamedTuple):
    """A setting in a table of the file. made: what it is an argument of."""

    section: str
    setting: Setting
    made: Any

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + ("" if self.section == "outbox" else f"{self.section}_").upper() + self.setting.name.upper()


def all_settings() -> dict[tuple[str, str], PlacedSetting]:
    """Every setting that a file can hold, by table and name, in the order of the code."""
    return {
        (section, one.name): PlacedSetting(section, one, made)
        for section, many in SECTIONS.items()
        for made in many
        for one in settings_of(made).values()
        if one.is_plain
    }


def outbox_settings(
    file: Path | str | None = None, environ: Mapping[str, str] = os.environ, **in_code: Any
) -> dict[str, Any]:
    """Arguments for `Outbox.open`, `Outbox.open_slot`, `AsyncOutbox.open`: `Outbox.open(**outbox_settings("my.toml"))`.

    file: TOML; None: the variables alone. in_code: arguments from the service's own code; each setting of the file and
    the variables wins over them. Raises BadArgument, which names the setting.
    """
    given: dict[Any, dict[str, Any]] = {made: {} for many in SECTIONS.values() for made in many}
    known = all_settings()
    if file is not None:
        _take_file(checked_path("file", file), known, given)
    _take_variables(environ, known, given)
    found = in_code | given[Outbox.open]
    config = found.get("config", DEFAULT_CONFIG)
    if given[LogConfig]:
        given[OutboxConfig]["log_config"] = replace(config.log_config, **given[LogConfig])
    if given[OutboxConfig]:
        found["config"] = replace(config, **given[OutboxConfig])
    for name, made, needed in (("kafka", KafkaDestination, "bootstrap_servers"), ("health", HealthSettings, "listen")):
        if given[made] and found.get(name) is None and needed not in given[made]:
            raise BadArgument(f"{name}.{needed}", f"the other settings of {name} want it: 'host:port'")
        if given[made]:
            found[name] = made(**given[made]) if found.get(name) is None else replace(found[name], **given[made])
    missing = [one for one in known.values() if one.made == Outbox.open and one.setting.is_needed]
    if missing := [one for one in missing if one.setting.name not in found]:
        tables = [] if file is None else _tables_in(checked_path("file", file))
        near = [] if "outbox" in tables else get_close_matches("outbox", tables, 1)
        others = ", ".join(one.setting.name for one in missing[1:])
        raise BadArgument(
            missing[0].setting.name,
            f"has to be given, in the table [outbox] of the file or as {missing[0].variable}"
            + (f"; missing, too: {others}" if others else "")
            + (f"; {file} has no table [outbox], but [{near[0]}]" if near else ""),
        )
    return found


def _tables_in(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text("file", path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadArgument(str(path), f"is no TOML: {error}") from error


def _take_file(path: Path, known: Mapping[tuple[str, str], PlacedSetting], given: dict[Any, dict[str, Any]]) -> None:
    for section, values in _tables_in(path).items():
        if section not in SECTIONS:
            continue  # of the command line, or of another program
        if not isinstance(values, dict):
            raise BadArgument(section, f"in {path} is a table: [{section}]")
        for name, value in values.items():
            place, is_file = _find(known, section, name, path)
            content = _content(f"{section}.{name}", value) if is_file else value
            given[place.made][place.setting.name] = place.setting.value_of(content)


def _take_variables(
    environ: Mapping[str, str], known: Mapping[tuple[str, str], PlacedSetting], given: dict[Any, dict[str, Any]]
) -> None:
    by_variable = {place.variable: place for place in known.values()}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX):
            continue
        if (place := by_variable.get(variable)) is not None:
            given[place.made][place.setting.name] = place.setting.value_of(value)
        elif (place := by_variable.get(variable.removesuffix(_FILE.upper()))) is not None and place.setting.is_text:
            given[place.made][place.setting.name] = place.setting.value_of(_content(variable, value))
        elif hint := did_you_mean(variable, by_variable, 0.85):
            raise BadArgument(variable, f"is no setting{hint}")


def _find(
    known: Mapping[tuple[str, str], PlacedSetting], section: str, name: str, path: Path
) -> tuple[PlacedSetting, bool]:
    """The setting of that name, and whether the name says that a file holds its value."""
    if (place := known.get((section, name))) is not None:
        return place, False
    place = known.get((section, name.removesuffix(_FILE)))
    if place is not None and place.setting.is_text:
        return place, True
    hint = did_you_mean(name, [one for of, one in known if of == section])
    raise BadArgument(f"{section}.{name} in {path}", f"is no setting{hint}")


def _content(setting: str, path: object) -> str:
    """The file's content, without the trailing line ends that editors add."""
    return _text(setting, checked_path(setting, path)).rstrip("\r\n")


def _text(setting: str, path: Path) -> str:
    """Raises BadArgument where no file can be read, UnicodeDecodeError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadArgument(setting, f"can't read {str(path)!r}: {error.strerror or error}") from error
