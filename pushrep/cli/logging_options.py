"""How commands log: a line with time, level and logger, or one JSON object a line. To standard error."""

import json
import logging
from datetime import UTC, datetime

import click

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """{"time", "level", "logger", "message"}, and "error" with the traceback if there is one. Time is UTC."""

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
    """Once, for the whole process; a program that has set its logging up already keeps it."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if format_ == "json" else logging.Formatter(TEXT))
    logging.basicConfig(handlers=[handler], level=level.upper())


def log_at_least(level: int) -> None:
    """A command's own wish; `--log-level` may have asked for more."""
    root = logging.getLogger()
    root.setLevel(min(root.level, level))


log_format_option = click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Of what is logged."
)
log_level_option = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="The least that is logged.",
)
