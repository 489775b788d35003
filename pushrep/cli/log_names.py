"""One way to name logs: DIRECTORY LOG, where LOG is `orders-0`, `slot-3/orders-0`, or `orders` for all of a topic."""

from pathlib import Path

import click

from pushrep.log.directory_files import is_named, log_at, readable_logs, shown_name
from pushrep.log.inspection import is_log, logs_at

_SHOWN = 10

directory_argument = click.argument("directory", type=click.Path(path_type=Path))
log_argument = click.argument("name", metavar="LOG")
any_log_argument = click.argument("name", metavar="[LOG]", required=False)


def named_logs(directory: Path, name: str) -> list[tuple[str, int]]:
    """Topic and number of each log that `name` means. Raises ClickException, NotALogDirectory."""
    _refuse_log(directory)
    logs = readable_logs(directory)
    chosen = [log for log in logs if log[0] == name] or [log for log in logs if is_named(log, name)]
    if not chosen:
        raise click.ClickException(f"{directory} has no log {name}; it has {_listed(logs) or 'none'}")
    return chosen


def log_paths(directory: Path, name: str | None) -> list[Path]:
    """The paths of these logs; without a name, of all. Raises ClickException, NotALog, NotALogDirectory."""
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
