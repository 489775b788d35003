"""What commands share: logging, tables, numbers, the error for a missing package, and a delayed Ctrl-C.

Log lines go to standard error: time, level, logger and message, or one JSON object a line.
"""

import json
import logging
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from types import FrameType
from typing import TypeVar

import click

from filtering.extras import EXTRA_OF, MissingExtra, install_command
from pushrep.importing import PACKAGES, why_hidden
from pushrep.status.table import table
from pushrep.status.terminal import LogLines, say, show_json, width

_Item = TypeVar("_Item")
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """{"time", "level", "logger", "message"}, and "error" with the traceback if the record has one. Time is UTC."""

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info is not None:
            said["error"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


def log_to_stderr(format_: str, level: str) -> None:
    """Configure the root logger. A program whose root logger has handlers already keeps its configuration."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if format_ == "json" else LogLines(TEXT))
    logging.basicConfig(handlers=[handler], level=level.upper())


def log_at_least(level: int) -> None:
    """Lower the log level to `level`, unless `--log-level` is lower already."""
    root = logging.getLogger()
    root.setLevel(min(root.level, level))


log_format_option = click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Format of log lines."
)
log_level_option = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="The lowest level that is logged, on standard error.",
)


_TIME_END_MS = 1 << 62
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DURATION = re.compile(r"([0-9]{1,9})([smhd])")


def parse_duration_s(text: str) -> int:
    """Seconds of 90s, 30m, 12h or 2d. Raises ValueError."""
    match = DURATION.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{text!r} is not a duration: give 90s, 30m, 12h or 2d")
    return int(match[1]) * _UNIT_S[match[2]]


def parse_time_ms(text: str) -> int:
    """Milliseconds since 1970 UTC. text: the number itself, or an ISO 8601 time (UTC if it names no zone).

    Raises ValueError; its message says which texts are valid.
    """
    if text.isascii() and text.isdigit():
        time_ms = int(text) if len(text) < 20 else _TIME_END_MS
    else:
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            raise ValueError(f"{text!r} is neither an ISO 8601 time nor milliseconds since 1970") from None
        time = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
        time_ms = round(time.timestamp() * 1000)
    if not 0 <= time_ms < _TIME_END_MS:
        raise ValueError(f"{text!r} is before 1970 or too far ahead")
    return time_ms


def why_missing(what: str, error: ImportError) -> str | None:
    """One line that names the missing package and how to install it; None if no package is missing (a bug of ours)."""
    if isinstance(error, MissingExtra):
        return str(error)
    package = (error.name or "").partition(".")[0]
    if package in PACKAGES:
        return why_hidden(package)
    if package not in EXTRA_OF and not isinstance(error, ModuleNotFoundError):
        return None
    return f"{what} needs the Python package {package!r}, which is not installed: {install_command(package)}"


def stopped_by_signal() -> threading.Event:
    """Set by SIGTERM and by Ctrl-C, which from now on do nothing else. Main thread only."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


@contextmanager
def whole_step() -> Iterator[None]:
    """Delay a Ctrl-C until the block ends. A second Ctrl-C raises KeyboardInterrupt at once. Main thread only."""
    came: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's arguments
        if came:
            raise KeyboardInterrupt
        came.append(number)

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def show_table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; see pushrep/status/table.py."""
    if title is not None:
        say(title)
    say(*table(columns, rows, width()))


def show_rows(  # noqa: PLR0913 - what of, and for whom
    found: Iterable[_Item],
    columns: Sequence[str],
    row: Callable[[_Item], Sequence[str]],
    value: Callable[[_Item], object],
    *,
    as_json: bool,
    title: str | None = None,
) -> None:
    """Print a list: for people a table with a row each, or as JSON a value each, on its line as soon as it is found."""
    if not as_json:
        show_table(title, columns, [row(one) for one in found])
        return
    for one in found:
        show_json(value(one))
