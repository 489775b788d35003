"""What a person sees while it runs: bars on a terminal, plain lines elsewhere, nothing but errors with --json.

terminal       bars that move, and above them one line for each thing that happened
pipe or file   the same lines, each with its second, and how far it is every few seconds
"""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, NamedTuple, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

PLAIN_EVERY_S: Final = 5.0


class Bar(NamedTuple):
    """How far one program is, in records."""

    completed: int
    total: int
    note: str


class Live:
    """The display of a run; usable as a context manager. A bar for each label, which ends at `flights` at least."""

    def __init__(self, console: Console, flights: int, labels: Sequence[str]) -> None:
        self._console = console
        self._began, self._plain_at_s = time.monotonic(), 0.0
        self._progress: Progress | None = None
        if console.is_terminal and not console.quiet:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TaskProgressColumn(),
                TextColumn("{task.completed:>9,.0f} of {task.total:,.0f}"),
                TextColumn("[dim]{task.fields[note]}"),
                TimeElapsedColumn(),
                console=console,
                expand=True,
                transient=True,
                refresh_per_second=8,
            )
            width = max(map(len, labels))
            self._tasks = [self._progress.add_task(label.ljust(width), total=flights, note="") for label in labels]

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()

    def say(self, text: str) -> None:
        """Something happened: one line."""
        line = Text(f"{time.monotonic() - self._began:5.1f} s  ", style="dim")
        line.append(text, style="bold red" if text.startswith("kill -9") else "not dim")
        (self._progress.console if self._progress else self._console).print(line, soft_wrap=not self._progress)

    def show(self, at_s: float, bars: Sequence[Bar], sentence: str) -> None:
        """How far it is, the bars in the order of their labels; on a pipe the sentence, now and then."""
        if self._progress:
            for task, bar in zip(self._tasks, bars, strict=True):
                self._progress.update(task, completed=bar.completed, total=bar.total, note=bar.note)
        elif at_s - self._plain_at_s >= PLAIN_EVERY_S:
            self._plain_at_s = at_s
            self.say(sentence)


def behind(at: int, before: int, flights: int) -> Bar:
    """A stream that has read `at` of `before` records: its end is what it reads, which grows."""
    return Bar(at, max(before, at, flights), f"{before - at:,} behind" if at else "Spark starts")
