"""The command `pushrep`: sub-commands found by entry point, loaded when named, and one way to end.

    exit 0  done            exit 1    refused or failed: one line `error: ...` on standard error, no traceback
    exit 2  wrong usage     exit 130  interrupted (Ctrl-C)          exit 141  the reader of our output went away

A distribution adds a command by an entry point of the group `pushrep.commands` that names a click command.
"""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any, NoReturn

import click

from filtering import FilteringError
from pushrep.errors import PushrepError

GROUP = "pushrep.commands"
EXIT_FAILED, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 130, 141

# Our own commands' lines in `pushrep --help`, so that showing them loads none (demo would bring Spark's parts with it).
_SUMMARIES = {
    "append": "Append lines or CSV from a file or standard input to a log; goes on after a crash.",
    "demo": "Watch real records go through crashes and replays and come out once each.",
    "demo-kafka": "The same through Kafka, two Spark jobs and PostgreSQL, with each of them killed.",
    "log": "Look into the files of logs, check and mend them.",
    "marks": "What a Spark query remembers for its replay filter: show, export, import, reset.",
    "promote": "Make a replica the leader of its outbox: when the leader is lost.",
    "outbox": "Change where an outbox's records go: skip one, use more partitions, drop a topic.",
    "read": "Show what lies in a log, beside a running writer.",
    "recording": "The logs that a node keeps: list, extend, truncate, purge and delete them.",
    "replay": "Any part of a log again, to its end or following, for people and pipes.",
    "replica": "Keep copies of other services' logs, pushed here as they are written.",
    "ship": "Deliver to Kafka what a service that is gone has left in its outbox.",
    "startpoint": "Say where a consumer starts next; see who wished what.",
}


class Commands(click.Group):
    """The installed sub-commands; each is imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(_installed())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - as above
        entry = _installed().get(cmd_name)
        if entry is None:
            return None
        try:
            command = entry.load()
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"pushrep {cmd_name} needs the Python package {error.name!r}, which is not installed; "
                "install pushrep with its extras: pip install '.[demo]' in its repository"
            ) from error
        if not isinstance(command, click.Command):
            raise click.ClickException(f"entry point {entry.value!r} of pushrep {cmd_name} is no click command")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click would answer 1, as for an error
            _silence_stdout()
            ctx.exit(EXIT_BROKEN_PIPE)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, self._summary(ctx, name)) for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def _summary(self, ctx: click.Context, name: str) -> str:
        if name in _SUMMARIES:
            return _SUMMARIES[name]
        try:
            command = self.get_command(ctx, name)
        except click.ClickException as error:
            return f"(unavailable: {error.message})"
        return command.get_short_help_str(limit=200) if command else ""


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Each command explains itself with examples: pushrep append --help",
)
@click.version_option(version("pushrep"), prog_name="pushrep")
def cli() -> None:
    """A crash-safe local log in Kafka's own format: append to it, read it, replay it."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return the exit code; what went wrong is on standard error."""
    try:
        answer = cli.main(args=list(arguments), prog_name="pushrep", standalone_mode=False)
    except click.Abort:
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except click.UsageError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        return _fail(error.format_message())
    except (PushrepError, FilteringError) as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    return answer if isinstance(answer, int) else 0


def main() -> NoReturn:
    """The console script."""
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
        code = EXIT_BROKEN_PIPE
    sys.exit(code)


def _fail(message: str) -> int:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return EXIT_FAILED


def _silence_stdout() -> None:
    """Python flushes standard output once more at exit; into a closed pipe that would print a complaint."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # no real file behind it
        return


if __name__ == "__main__":
    main()
