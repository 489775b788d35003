"""How the log tools show things: tables without decoration, sizes and offsets as people read them, JSON on request."""

import json
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

_PIPE_COLUMNS = 200  # a pipe has no width: let no column be cut to 80


def show_table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on standard output, numbers to the right."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    width = None if Console().is_terminal else _PIPE_COLUMNS
    Console(width=width, markup=False, highlight=False, emoji=False).print(table)


def show_json(value: Any) -> None:
    """One JSON value on one line."""
    click.echo(json.dumps(value, default=str))


def count(number: int | None) -> str:
    """A number with its thousands apart; a question mark for one that nobody knows."""
    return "?" if number is None else f"{number:,}"


def size(size_bytes: int) -> str:
    """Bytes in the largest unit that leaves a digit before the point."""
    value, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
