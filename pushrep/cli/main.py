"""The command `pushrep`: it finds its sub-commands by entry point, imports one when it is called, and sets the exit
code.

    exit 0  done            exit 1    refused or failed: one line `error: ...` on standard error, no traceback
    exit 2  wrong usage     exit 130  interrupted (Ctrl-C)          exit 141  the reader of the output closed the pipe

A distribution adds a command by an entry point of the group `pushrep.commands` that names a click command.
"""

import gc
import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any, NoReturn

import click

from filtering import FilteringError
from pushrep.cli.common import log_format_option, log_level_option, log_to_stderr, why_missing
from pushrep.errors import PushrepError
from pushrep.importing import why_hidden
from pushrep.settings import did_you_mean
from pushrep.status.terminal import say

GROUP = "pushrep.commands"
PREFIX = "PUSHREP"
EXIT_FAILED, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 130, 141

# The lines of `pushrep --help` for this distribution's commands: `--help` then imports no command (`marks` imports
# Spark).
_SUMMARIES = {
    "append": "Append lines; continue after a crash.",
    "console": "Serve web pages of outboxes and nodes.",
    "log": "Show, check and repair the files of logs.",
    "marks": "Show and keep the marks of a replay filter.",
    "promote": "Make a replica the leader.",
    "outbox": "Create, run and maintain an outbox.",
    "recording": "List and maintain the logs on a node.",
    "replay": "Read any part of a log again, or follow it.",
    "replica": "Run a node; change an outbox's members.",
    "ship": "Ship an outbox whose service does not run.",
    "startpoint": "Set where a consumer starts next.",
    "status": "Show how far everything is, what is wrong.",
    "tables": "Relay rows of a database's transactions.",
}


class Commands(click.Group):
    """The installed sub-commands; each is imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(_installed())

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _installed():
            ctx.fail(f"No such command {args[0]!r}{did_you_mean(args[0], _installed())}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - as above
        entry = _installed().get(cmd_name)
        if entry is None:
            return None
        try:
            command = entry.load()
        except (ImportError, AttributeError) as error:  # AttributeError: another package has the name of one of ours
            package = entry.module.partition(".")[0]
            why = why_missing(f"pushrep {cmd_name}", error) if isinstance(error, ImportError) else None
            if (why := why_hidden(package) or why) is None:
                raise
            raise click.ClickException(why) from error
        if not isinstance(command, click.Command):
            raise click.ClickException(f"entry point {entry.value!r} of pushrep {cmd_name} is not a click command")
        give_variables(command, f"{PREFIX}_{cmd_name}")
        if not gc.isenabled():  # `main` disabled it; imported modules live as long as the process
            gc.freeze()
            gc.enable()
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click would exit with 1, as for an error
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
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
        "auto_envvar_prefix": PREFIX,  # each option has a variable: docs/settings.md
    },
    epilog="The help of each command has examples: pushrep append --help",
)
@click.version_option(version("pushrep"), prog_name="pushrep")
@log_format_option
@log_level_option
def cli(log_format: str, log_level: str) -> None:
    """A crash-safe local log in Kafka's own format: append to it, read it, replay it."""
    log_to_stderr(log_format, log_level)


def give_variables(command: click.Command, prefix: str) -> None:
    """Name the variable of each option after the option, not after the function's parameter, as click would: after
    `--from`, where the function has `from_`.
    """
    prefix = prefix.upper().replace("-", "_")
    for option in command.params:
        if isinstance(option, click.Option) and option.envvar is None:
            written = max(option.opts, key=len).lstrip("-").replace("-", "_")
            option.envvar = f"{prefix}_{written.upper()}"
    for name, below in getattr(command, "commands", {}).items():
        give_variables(below, f"{prefix}_{name}")


def run(arguments: Sequence[str]) -> int:  # noqa: PLR0911 - an exit code for each way to end
    """Run one command line and return the exit code. Errors are printed on standard error."""
    try:
        answer = cli.main(args=list(arguments), prog_name="pushrep", standalone_mode=False)
    except click.Abort:
        say("interrupted", err=True)
        return EXIT_INTERRUPTED
    except click.UsageError as error:
        if error.ctx is not None:
            tried = f"Try '{error.ctx.command_path} --help' for help."
            say(*error.ctx.get_usage().split("\n"), tried, "", err=True)
        _fail(error.format_message(), "Error")
        return error.exit_code
    except click.ClickException as error:
        return _fail(error.format_message())
    except (PushrepError, FilteringError) as error:
        return _fail(str(error))
    except ImportError as error:
        if (why := why_missing(f"pushrep {' '.join(arguments[:1])}", error)) is None:
            raise
        return _fail(why)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    return answer if isinstance(answer, int) else 0


def main() -> NoReturn:
    """The console script."""
    gc.disable()  # garbage collection during the imports took a quarter of a short command's time
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
        code = EXIT_BROKEN_PIPE
    sys.exit(code)


def _fail(message: str, word: str = "error") -> int:
    say(f"{word}: {' '.join(message.split())}", err=True)
    return EXIT_FAILED


def _silence_stdout() -> None:
    """Redirect standard output to /dev/null. Else Python's flush at exit would print an error about the closed pipe."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # standard output has no file descriptor
        return


if __name__ == "__main__":
    main()
