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
from typing import Any, Self, TextIO

import click

from filtering.replay_filter import FilterCounts
from pushrep.errors import BadArgument
from pushrep.health import HealthServer, HealthSettings
from pushrep.status import JobStatus, Problem
from spark_jobs.decide import BatchCounts
from spark_jobs.errors import BadJobOption

# A worker's traceback inside Spark's text ends with the error itself: `package.module.Name: message`.
_WORKER_ERROR = re.compile(r"^(?:\w+\.)+(\w+): (.+)$", re.MULTILINE)
# Py4J's first line says only that a call failed; the Java exception stands on the second.
_JAVA_CALL = re.compile(r"^An error occurred while calling .*\n: (?:[\w$]+\.)+[\w$]+: ")
_CONDITION = re.compile(r"^(?:\[[A-Z_.]+\] )")


class Reporter:
    """Writes events; without a stream it writes lines for people to standard error."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._batches = 0
        self._query: str | None = None
        self._sums: FilterCounts | None = None
        self._batch_began_s = time.monotonic()

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
        found = () if self._query is not None else (Problem("not_answering", f"job {name}", begins),)
        counts = {} if self._query is None or self._sums is None else {self._query: self._sums}
        return JobStatus(name=name, counts=counts, certificates=certificates, found=found)

    def _event(self, event: str, text: str, fields: dict[str, Any]) -> None:
        if self._stream is None:
            click.echo(text, err=True)
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
    return _CONDITION.sub("", _JAVA_CALL.sub("", text).splitlines()[0]).strip()


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
