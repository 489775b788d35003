"""How text reaches a terminal: `say` writes all that commands print, `LogLines` all that they log.

Values, names and reasons are others' words. A control character in them would move the cursor, change the window's
title or write a line that looks like ours, and a bidirectional one would turn a line round. So whatever
`str.isprintable` refuses is shown as Python would escape it.
"""

import json
import logging
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, Self

import click


def printable(text: str) -> str:
    r"""The text on one line: what `str.isprintable` refuses is escaped, as `\x1b`, `\n` or `\u202e`."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class Styled(str):
    """A line with the arguments of `click.style`, which only a terminal shows."""

    __slots__ = ("style",)
    style: Mapping[str, Any]

    def __new__(cls, text: str, **style: Any) -> Self:
        found = super().__new__(cls, text)
        found.style = style
        return found


def say(*lines: str, err: bool = False) -> None:
    """Print each line, printable, on standard output, or with `err` on standard error."""
    for line in lines:
        text = printable(line)
        click.echo(click.style(text, **line.style) if isinstance(line, Styled) else text, err=err)


def show_result(value: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print what a command did: the value as JSON on one line, or else these lines, for people."""
    say(*([json.dumps(value, default=str)] if as_json else lines))


def show_json(value: object) -> None:
    """One JSON value on one line."""
    show_result(value, (), as_json=True)


def width() -> int | None:
    """The columns of the terminal; None for a pipe or a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def wrapped(text: str, limit: int | None, indent: str = "", first: str | None = None) -> list[str]:
    """The text in lines of at most `limit` columns, all of them indented. first: instead of the first's indent."""
    first, text = indent if first is None else first, printable(text)
    if limit is None:
        return [first + text]
    return textwrap.wrap(
        text, limit, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


class LogLines(logging.Formatter):
    """A record on one line, and the lines of its traceback, printable."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - as above
        return "\n".join(map(printable, super().formatException(ei).split("\n")))
