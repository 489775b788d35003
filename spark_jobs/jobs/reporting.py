"""A job's reports: JSON lines for programs, a line a batch for people, errors in one line, health and metrics by HTTP.

{"event": "started", "query": "...", "run": "..."}
{"event": "batch", "batch": 3, "rows": 1000, "kept": 990, "dropped": 8, "unkeyed": 2, ..., "seconds": 0.8}
{"event": "stopped", "batches": 4, "kept": 3990}           or {"event": "failed", "error": "..."}
"""

import contextlib
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import click

from filtering.replay_filter import FilterCounts
from pushrep.errors import BadArgument
from pushrep.health import HealthServer, HealthSettings
from pushrep.status import JobStatus, Problem
from spark_jobs.errors import SparkJobError
from spark_jobs.replay_filter import BatchCounts

# A worker's traceback inside Spark's text ends with the error itself: `package.module.Name: message`.
_WORKER_ERROR = re.compile(r"^(?:\w+\.)+(\w+): (.+)$", re.MULTILINE)
# Py4J's first line says only that a call failed; the Java exception stands on the second.
_JAVA_CALL = re.compile(r"^An error occurred while calling .*\n: (?:[\w$]+\.)+[\w$]+: ")
_CONDITION = re.compile(r"^(?:\[[A-Z_.]+\] )")


class Reporter:
    """Writes events; without a stream it writes lines for people to standard error. A context manager."""

    def __init__(self, stream: TextIO | None, *, owned: bool) -> None:
        self._stream, self._owned = stream, owned
        self._batches = 0
        self._query: str | None = None
        self._sums: FilterCounts | None = None
        self._batch_began_s = time.monotonic()

    @classmethod
    def open(cls, path: str | None) -> Self:
        """`-` is standard output; a file is appended to, so that a restarted job keeps its earlier events."""
        if path is None or path == "-":
            return cls(sys.stdout if path else None, owned=False)
        return cls(Path(path).open("a", encoding="utf-8"), owned=True)

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

    @property
    def counts(self) -> Mapping[str, FilterCounts]:
        """Of all batches so far, by the query's id: what `JobStatus` shows."""
        return {} if self._query is None or self._sums is None else {self._query: self._sums}

    def status(self, name: str, certificates: Mapping[str, int | None]) -> JobStatus:
        """What is wrong with the job, and its counts. name: of the job, in metrics."""
        begins = "the query has not begun: Spark is starting, or source, table and marks are being checked"
        found = () if self._query is not None else (Problem("not_answering", f"job {name}", begins),)
        return JobStatus(name=name, counts=self.counts, certificates=certificates, found=found)

    def _event(self, event: str, text: str, fields: dict[str, Any]) -> None:
        if self._stream is None:
            click.echo(text, err=True)
        else:
            self._stream.write(json.dumps({"event": event, **fields}) + "\n")
            self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owned and self._stream is not None:
            self._stream.close()


def one_line(error: BaseException) -> str:
    """The error's message, without the stacks of Spark, Java and Python workers."""
    text = str(error).strip() or type(error).__name__
    named = _WORKER_ERROR.findall(text)
    ours = [f"{message}" for name, message in named if not name.startswith(("Py4J", "Spark", "Python"))]
    if ours:
        return ours[-1].strip()
    return _CONDITION.sub("", _JAVA_CALL.sub("", text).splitlines()[0]).strip()


class BadHealth(SparkJobError):
    """Health can't be served as --health asks for it."""


@contextlib.contextmanager
def served(settings: HealthSettings | None, name: str, reporter: Reporter) -> Iterator[None]:
    """Answer /livez, /readyz (200 once the query runs) and /metrics meanwhile. Raises BadHealth."""
    if settings is None:
        yield
        return

    try:
        server = HealthServer(settings, lambda: reporter.status(name, {"health": settings.expires_s()}))
    except BadArgument as error:
        raise BadHealth(f"--health: {error.why}") from error
    with server:
        yield
