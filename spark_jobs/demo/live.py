"""What a person sees while it runs: two bars on a terminal, plain lines elsewhere, nothing but errors with --json.

terminal       bars that move, and above them one line for each thing that happened
pipe or file   the same lines, each with its second, and how far it is every few seconds
"""

import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from spark_jobs.demo.history import Sample

PLAIN_EVERY_S: Final = 5.0


class Live:
    """The display of a run; usable as a context manager. `flights` is what both bars end at."""

    def __init__(self, console: Console, flights: int) -> None:
        self._console, self._flights = console, flights
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
            self._append = self._progress.add_task("append", total=flights, note="")
            self._apply = self._progress.add_task("apply ", total=flights, note="Spark starts")

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

    def show(self, sample: Sample) -> None:
        """How far it is; on a pipe only now and then."""
        if self._progress:
            repeats = sample.appended - sample.flights
            self._progress.update(self._append, completed=sample.flights, note=f"{max(0, repeats):,} of them twice")
            # The stream's end is the log's end, which grows: the bar shows how close behind it is.
            total = max(sample.appended, sample.applied, self._flights)
            note = f"{sample.appended - sample.applied:,} behind" if sample.applied else "Spark starts"
            self._progress.update(self._apply, completed=sample.applied, total=total, note=note)
        elif sample.at_s - self._plain_at_s >= PLAIN_EVERY_S:
            self._plain_at_s = sample.at_s
            self.say(
                f"{sample.flights:,} of {self._flights:,} flights appended in {sample.appended:,} records, "
                f"{sample.applied:,} read by the stream"
            )
