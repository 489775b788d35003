"""settings.json: the settings that `pushrep outbox set` changed. They stand above those that an opening is given.

    {"version": 1, "log": {"retention_ms": 86400000, "segment_ms": null}, "crc32c": int}

`log` has fields of LogConfig that are DYNAMIC. Written whole under the directory's lock: by the process that has the
outbox open, which then applies it to its logs, else by the command. Above worker slots it is for a slot that has no
file of its own, and the command writes it before it looks at the slots.
"""

import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from pushrep.env import REAL_FILESYSTEM, Filesystem
from pushrep.env.checked_json import read_checked_json, write_checked_json
from pushrep.errors import BadArgument
from pushrep.kafka.parking import parking_config
from pushrep.log import LogConfig, SegmentLog
from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import is_slot_name
from pushrep.outbox.destinations import locked_outbox
from pushrep.outbox.settings import OutboxConfig, OutboxSettings
from pushrep.settings import Setting, did_you_mean, settings_of

FILE_NAME = "settings.json"
VERSION = 1
_FILE_BYTES_MAX = 1 << 16
_WAY_ON = "restore it from a copy, or remove it: then the settings of the opening hold"
DYNAMIC_SETTINGS: Mapping[str, Setting] = {name: one for name, one in settings_of(LogConfig).items() if one.is_dynamic}
Kept: TypeAlias = Mapping[str, Any]


def dynamic_setting(name: str) -> Setting:
    """The setting of that name. Raises BadArgument for one that can't be changed while an outbox is open."""
    if (found := DYNAMIC_SETTINGS.get(name)) is not None:
        return found
    known = settings_of(OutboxConfig).keys() | settings_of(LogConfig).keys()
    why = "can't be changed while an outbox is open: give it to the next opening" if name in known else "is no setting"
    raise BadArgument(name, f"{why}{did_you_mean(name, DYNAMIC_SETTINGS)}; these can: {', '.join(DYNAMIC_SETTINGS)}")


def read_kept(filesystem: Filesystem, directory: Path) -> Kept:
    """The changed settings; empty without a file. Raises CorruptFile, OSError."""
    path = _file_of(filesystem, directory)
    found = read_checked_json(
        filesystem, path, _FILE_BYTES_MAX, VERSION, lambda fields: _changed(fields["log"]), _WAY_ON
    )
    return {} if found is None else found


def _file_of(filesystem: Filesystem, directory: Path) -> Path:
    own = directory / FILE_NAME
    return directory.parent / FILE_NAME if is_slot_name(directory.name) and not filesystem.exists(own) else own


def _changed(changes: Mapping[str, Any], kept: Kept | None = None, deleted: Collection[str] = ()) -> Kept:
    """Raises BadArgument."""
    for name, value in changes.items():
        dynamic_setting(name).check(value)
    for name in deleted:
        dynamic_setting(name)
    return {name: value for name, value in {**(kept or {}), **changes}.items() if name not in deleted}


def change_closed(directory: Path, changes: Mapping[str, Any], deleted: Collection[str]) -> Kept:
    """Keep changes for the next opening of an outbox that nobody has open; all that is kept. Raises BadArgument,
    NoOutbox, LogLocked, OSError.
    """
    with locked_outbox(directory) as (path, _):
        kept = _changed(changes, read_kept(REAL_FILESYSTEM, path), deleted)
        _write(path, kept)
        return kept


def change_later_slots(directory: Path, changes: Mapping[str, Any], deleted: Collection[str]) -> None:
    """Keep changes for the slots that are made later below `directory`. Raises BadArgument, CorruptFile, OSError."""
    _write(directory, _changed(changes, read_kept(REAL_FILESYSTEM, directory), deleted))


def _write(directory: Path, kept: Kept) -> None:
    LogConfig(**kept)
    write_checked_json(REAL_FILESYSTEM, directory / FILE_NAME, {"log": kept}, VERSION)


class KeptSettings:
    """The changed settings of an open outbox. Thread-safe. log_config: what its logs are opened with."""

    def __init__(self, held: LogDirectory, settings: OutboxSettings, *, ships: bool) -> None:
        """Raises CorruptFile, OSError, BadArgument for what contradicts the settings of the opening."""
        self._held, self._settings, self._ships = held, settings, ships
        self._lock = threading.Lock()
        self.values = read_kept(held.filesystem, held.path)
        try:
            self.log_config = self._config_with(self.values)
        except BadArgument as error:
            path = _file_of(held.filesystem, held.path)
            why = f"{error.why}; some are of {path}: pushrep outbox set --delete NAME takes them back"
            raise BadArgument(error.argument, why) from error

    def _config_with(self, values: Kept) -> LogConfig:
        return self._settings.log_config(ships=self._ships, kept=values)

    def change(
        self,
        logs: Iterable[SegmentLog],
        parking: Iterable[SegmentLog],
        changes: Mapping[str, Any],
        deleted: Collection[str],
    ) -> Kept:
        """Change settings of these logs, and keep the changes; all that is kept. parking: those of refused records.

        Raises BadArgument, OSError; nothing is changed then.
        """
        with self._lock:
            values = _changed(changes, self.values, deleted)
            config = self._config_with(values)
            self.log_config.refuse_change(config)
            write_checked_json(self._held.filesystem, self._held.path / FILE_NAME, {"log": values}, VERSION)
            self.values, self.log_config = values, config
            for log in logs:
                log.configure(config)
            for log in parking:
                log.configure(parking_config(config))
            return values
