"""The progress of a command on standard error, if that is a terminal: how much is done, the rate, the time left."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from pushrep.status.terminal import printable


class OnProgress(Protocol):
    """Called with how much is done, with the total if that is another than at first, and a note."""

    def __call__(self, done: float, *, total: float | None = None, note: str = "") -> object: ...


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f}/s")


@contextmanager
def progress(what: str, total: float | None = None, *, unit: str = "bytes") -> Iterator[OnProgress]:
    """Yield the function that shows progress. unit: "bytes", or a noun in the plural. total: None: unknown."""
    if not sys.stderr.isatty():
        yield lambda done, *, total=None, note="": None  # noqa: ARG005 - nobody sees it
        return
    amounts = [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn(), _Rate()]
    columns = (
        TextColumn(printable(what), markup=False), BarColumn(), *amounts, TimeElapsedColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, note="")

        def show(done: float, *, total: float | None = None, note: str = "") -> None:
            bar.update(task, completed=done, total=total, note=printable(note))

        yield show


def adding(show: OnProgress) -> Callable[[int], None]:
    """A function that is called with how much more is done."""
    done = 0

    def add(more: int) -> None:
        nonlocal done
        done += more
        show(done)

    return add
