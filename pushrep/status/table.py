"""Plain tables and numbers for terminals and pipes.

    member  address         role     lag                       The columns stand in the order of their importance:
    1       10.0.0.7:7400   replica  1,000 records, 77.9 KiB   what does not fit the terminal folds below its row.
        in sync: 3 of 3; trouble: connection refused

A pipe gets each row on one line. `say` (terminal.py) prints the lines.
"""

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from pushrep.status.terminal import Styled, printable, wrapped

_NUMBER = re.compile(r"-?[\d,.]+( \w+)?|\?|-|")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], limit: int | None = None) -> Iterator[str]:
    """Yield the lines of a table. limit: as `width` of terminal.py.

    Columns of numbers are aligned right, empty ones left out.
    """
    used = [n for n in range(len(columns)) if not rows or any(row[n] for row in rows)]
    columns, cells = [columns[n] for n in used], [[printable(" ".join(row[n].split())) for n in used] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    right = [bool(cells) and all(_NUMBER.fullmatch(row[n]) for row in cells) for n in range(len(columns))]
    shown = len(columns)
    while limit is not None and shown > 1 and sum(widths[:shown]) + 2 * (shown - 1) > limit:
        shown -= 1

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(size) if is_number else cell.ljust(size)
            for cell, size, is_number in zip(row[:shown], widths, right, strict=False)
        ).rstrip()

    yield Styled(line(columns), bold=True)
    for row in cells:
        yield line(row)
        if folded := "; ".join(
            f"{name}: {cell}" for name, cell in zip(columns[shown:], row[shown:], strict=True) if cell
        ):
            yield from wrapped(folded, limit, "    ")


def time_text(ms: int) -> str:
    """UTC to the second; "@" and the number for a time beyond Python's calendar."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return f"@{ms}"


def count(number: int | None) -> str:
    """A number with commas between thousands; a question mark for None."""
    return "?" if number is None else f"{number:,}"


def many(number: int, noun: str) -> str:
    """A number and its noun."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size(size_bytes: int) -> str:
    """Bytes in the largest unit in which the number is at least 1. It may be negative: a replay's credit can be."""
    value, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def duration(ms: int) -> str:
    """A time in seconds, minutes, hours or days."""
    seconds = ms / 1000
    for limit, divisor, unit in ((120, 1, "s"), (7_200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.1f} {unit}"
    return f"{seconds / 86_400:.1f} d"
