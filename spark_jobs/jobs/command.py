"""What the commands of all jobs share: the options of source and run, how a job runs, and its reports.

Reports: JSON lines for programs, a line a batch for people, errors in one line, health and metrics by HTTP.

{"event": "started", "query": "...", "run": "..."}
{"event": "batch", "batch": 3, "rows": 1000, "kept": 990, "dropped": 8, "unkeyed": 2, ..., "seconds": 0.8}
{"event": "stopped", "batches": 4, "kept": 3990}           or {"event": "failed", "error": "..."}
"""

import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TextIO, TypeVar

import click

from filtering.replay_filter import FilterCounts
from pushrep.errors import BadArgument
from pushrep.health import HealthServer, HealthSettings
from pushrep.status import JobStatus, Problem
from pushrep.status.terminal import LogLines, say
from spark_jobs.decide import BatchCounts
from spark_jobs.errors import BadJobOption

Command = TypeVar("Command", bound=Callable[..., Any])


def name_value(text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value


def query_batch(text: str) -> tuple[str, int]:
    """QUERY:BATCH."""
    query, _, batch = text.rpartition(":")
    if not query or not batch.isdecimal():
        raise click.BadParameter(f"{text!r} is not QUERY:BATCH, as in 0b5a...:17")
    return query, int(batch)


_SOURCE = (
    click.option("--source", default="pushrep", help="Spark's name of the source: pushrep, kafka, ..."),
    click.option("--path", help="Source pushrep: the directory that holds the logs, <topic>-<n> below it."),
    click.option("--topic", required=True, help="The topic to read (for kafka its option `subscribe`)."),
    click.option(
        "--source-option",
        "source_options",
        type=name_value,
        metavar="NAME=VALUE",
        multiple=True,
        help="Any option of the source.",
    ),
    click.option("--carrier", type=click.Choice(["key", "header"]), default="key", help="Where the metadata travels."),
    click.option(
        "--starting-offsets", help="earliest, latest or JSON; for a fresh checkpoint only.  [default: earliest]"
    ),
    click.option("--max-records-per-trigger", type=click.IntRange(min=1), help="At most so many records a batch."),
    click.option("--window", type=click.IntRange(min=0), default=0, help="Offsets so far below a mark may still come."),
    click.option(
        "--only-pid",
        "only_pids",
        type=click.IntRange(-(2**63), 2**63 - 1),
        multiple=True,
        help="Filter these PIDs only; others pass.",
    ),
    click.option(
        "--leave-out",
        metavar="SQL",
        help="Read no records of which this condition over the source's columns is true: past a PairSplit.",
    ),
    click.option("--ttl-s", type=click.FloatRange(min=0, min_open=True), help="Forget marks that rose so long ago."),
    click.option(
        "--retention-ms",
        type=click.IntRange(min=-1),
        help="The topic's retention.ms, which --ttl-s needs and must not be below; 0: it is not compared.",
    ),
)
_RUN = (
    click.option("--checkpoint", required=True, help="Spark's checkpoint directory; one for each table."),
    click.option("--marks", help="The directory of the marks.  [default: the checkpoint's path + -marks]"),
    click.option(
        "--adopt", type=query_batch, metavar="QUERY:BATCH", help="A fresh checkpoint goes on after that query's batch."
    ),
    click.option(
        "--trigger", default="available-now", help="available-now: what is there, then stop; or 10s, 1m, 500ms."
    ),
    click.option(
        "--conf",
        "conf",
        type=name_value,
        metavar="NAME=VALUE",
        multiple=True,
        help="A setting of Spark, as spark-submit takes them.",
    ),
    click.option("--health", metavar="HOST:PORT", help="Answer /livez, /readyz and /metrics (Prometheus) there."),
    click.option("--health-cert", help="Its certificate (PEM), with --health-key and --health-ca: TLS."),
    click.option("--health-key", help="Its private key (PEM)."),
    click.option("--health-ca", help="Who signs the certificates of those that may read /metrics (PEM)."),
    click.option("--health-plain", is_flag=True, help="Listen off loopback without TLS."),
    click.option("--json", "json_path", help="Progress as JSON lines into this file; - is standard output."),
    click.option("--debug", is_flag=True, help="Errors with their whole stack; Spark's log too."),
)


def source_options(command: Command) -> Command:
    """What is read, and how it is filtered."""
    return _all(_SOURCE, command)


def run_options(file: str) -> Callable[[Command], Command]:
    """Where progress is kept, when batches run, what is reported; `file` is the job's own, for --where."""

    def print_path(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: ARG001, FBT001 - click's form
        if value:
            say(str(Path(file).resolve()))
            ctx.exit()

    where = click.option(
        "--where",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=print_path,
        help="Print the path of this job's file, for spark-submit.",
    )
    return lambda command: _all((*_RUN, where), command)


# A worker's traceback inside Spark's text ends with the error itself: `package.module.Name: message`.
_WORKER_ERROR = re.compile(r"^(?:\w+\.)+(\w+): (.+)$", re.MULTILINE)
# Py4J's first line says only that a call failed; the Java exception stands on the second.
_JAVA_CALL = re.compile(r"^An error occurred while calling .*\n: (?:[\w$]+\.)+[\w$]+: ")
# What a thread of Spark's waited for says nothing itself; the last cause says what happened.
_AWAITED = "Exception thrown in awaitResult"
_CAUSE = re.compile(r"^Caused by: (?:[\w$]+\.)+[\w$]+: (.+)$", re.MULTILINE)
_CONDITION = re.compile(r"^(?:\[[A-Z_.]+\] )")


class Reporter:
    """Writes events; without a stream it writes lines for people to standard error."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._batches = 0
        self._query: str | None = None
        self._sums: FilterCounts | None = None
        self._batch_began_s = time.monotonic()
        self._begun_ms = time.time_ns() // 1_000_000

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: str | None) -> Iterator[Self]:
        """`-` is standard output; a file is appended to, so that a restarted job keeps its earlier events.

        Raises BadJobOption.
        """
        with contextlib.ExitStack() as resources:
            stream: TextIO | None = sys.stdout if path else None
            if path is not None and path != "-":
                try:
                    stream = resources.enter_context(Path(path).open("a", encoding="utf-8"))
                except OSError as error:
                    why = f"can't be written: {error.strerror}; name a file, or -"
                    raise BadJobOption("--json", path, why) from error
            yield cls(stream)

    def started(self, query_id: str, run_id: str) -> None:
        """The query runs."""
        self._query = query_id
        self._batch_began_s = time.monotonic()
        self._event("started", f"query {query_id}", {"query": query_id, "run": run_id})

    def batch(self, counts: BatchCounts) -> None:
        """A batch is done; called by the filter after its marks are stored."""
        now_s = time.monotonic()
        seconds, self._batch_began_s = now_s - self._batch_began_s, now_s
        self._batches += 1
        self._sums = counts.added_to(self._sums)
        fields = {("batch" if name == "batch_id" else name): value for name, value in asdict(counts).items()}
        text = f"{counts.kept} kept, {counts.dropped} replays dropped, {counts.unkeyed} without metadata pass"
        if counts.skipped:
            text = "stored before, not written again"
        text = f"batch {counts.batch_id}: {counts.rows} records, {text}"
        self._event("batch", text, fields | {"seconds": round(seconds, 3)})

    def stopped(self) -> None:
        """The query ended without an error."""
        kept, unkeyed = (0, 0) if self._sums is None else (self._sums.kept, self._sums.unkeyed)
        text = f"done: batches {self._batches}, records kept {kept}, without metadata {unkeyed}"
        self._event("stopped", text, {"batches": self._batches, "kept": kept})

    def failed(self, error: str) -> None:
        """Write the event `failed`; without a stream nothing, since the error is shown elsewhere."""
        if self._stream is not None:
            self._event("failed", error, {"error": error})

    def status(self, name: str, certificates: Mapping[str, int | None]) -> JobStatus:
        """What is wrong with the job, and its counts. name: of the job, in metrics."""
        begins = "the query has not begun: Spark is starting, or source, table and marks are being checked"
        found = () if self._query is not None else (Problem("not_answering", f"job {name}", begins, self._begun_ms),)
        counts = {} if self._query is None or self._sums is None else {self._query: self._sums}
        return JobStatus(name=name, counts=counts, certificates=certificates, found=found)

    def _event(self, event: str, text: str, fields: dict[str, Any]) -> None:
        if self._stream is None:
            say(text, err=True)
        else:
            self._stream.write(json.dumps({"event": event, **fields}) + "\n")
            self._stream.flush()


def one_line(error: BaseException) -> str:
    """The error's message, without the stacks of Spark, Java and Python workers."""
    text = str(error).strip() or type(error).__name__
    named = _WORKER_ERROR.findall(text)
    ours = [f"{message}" for name, message in named if not name.startswith(("Py4J", "Spark", "Python"))]
    if ours:
        return ours[-1].strip()
    first = _JAVA_CALL.sub("", text).splitlines()[0]
    if first.startswith(_AWAITED) and (causes := _CAUSE.findall(text)):
        first = causes[-1]
    return _CONDITION.sub("", first).strip()


@contextlib.contextmanager
def served(settings: HealthSettings | None, name: str, reporter: Reporter) -> Iterator[None]:
    """Answer /livez, /readyz (200 once the query runs) and /metrics meanwhile. Raises BadJobOption."""
    if settings is None:
        yield
        return

    try:
        server = HealthServer(settings, lambda: reporter.status(name, {"health": settings.expires_s()}))
    except BadArgument as error:
        raise BadJobOption("--health", None, error.why) from error
    with server:
        yield


def run_job(given: dict[str, Any], job: Callable[[dict[str, Any], Reporter, bool], None]) -> None:
    """Call job(given, reporter, debug); an error is one line on standard error and exit code 1."""
    debug, json_path = given.pop("debug"), given.pop("json_path")
    handler = logging.StreamHandler()
    handler.setFormatter(LogLines("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if debug else logging.WARNING, handlers=[handler])
    if not debug:
        # Py4J logs an error of a batch with its stack; the job prints it in one line.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
    # Spark's workers must be this very Python, with what is installed beside it.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        with Reporter.open(json_path) as reporter:
            try:
                job(given, reporter, debug)
            except Exception as error:
                reporter.failed(one_line(error))
                raise
    except Exception as error:
        if debug:
            raise
        say(f"error: {one_line(error)}", err=True)
        sys.exit(1)


def given_as_options(given: dict[str, Any], *pairs: str) -> dict[str, Any]:
    """What click parsed, as the options take it; `pairs`: the options that take NAME=VALUE and may be repeated."""
    settings = dict(given)
    for name in ("source_options", "conf", *pairs):
        settings[name] = dict(settings[name])
    settings["only_pids"] = frozenset(settings["only_pids"]) or None
    settings["marks"] = settings["marks"] or settings["checkpoint"].rstrip("/") + "-marks"
    settings["health"] = _health(
        {name: settings.pop(f"health_{name}") for name in ("cert", "key", "ca", "plain")}, settings["health"]
    )
    return settings


def _health(given: dict[str, Any], listen: str | None) -> HealthSettings | None:
    if listen is None:
        if named := [name for name, value in given.items() if value]:
            raise BadJobOption(f"--health-{named[0]}", None, "belongs to --health HOST:PORT: give both")
        return None
    try:
        return HealthSettings(listen=listen, **given)
    except BadArgument as error:
        option = error.argument.removesuffix(".listen").replace(".", "-")
        raise BadJobOption(f"--{option}", None, error.why) from error


def _all(options: tuple[Callable[[Command], Command], ...], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
