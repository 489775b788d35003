"""What a job says: JSON lines for programs, a line a batch for people, and an error in one line.

{"event": "started", "query": "...", "run": "..."}
{"event": "batch", "batch": 3, "rows": 1000, "kept": 990, "dropped": 8, "unkeyed": 2, ..., "seconds": 0.8}
{"event": "stopped", "batches": 4, "kept": 3990}           or {"event": "failed", "error": "..."}
"""

import json
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import click

from spark_jobs.replay_filter import BatchCounts

# A worker's traceback inside Spark's text ends with the error itself: `package.module.Name: message`.
_WORKER_ERROR = re.compile(r"^(?:\w+\.)+(\w+): (.+)$", re.MULTILINE)
# Py4J's first line says only that a call failed; the Java exception stands on the second.
_JAVA_CALL = re.compile(r"^An error occurred while calling .*\n: (?:[\w$]+\.)+[\w$]+: ")
_CONDITION = re.compile(r"^(?:\[[A-Z_.]+\] )")


class Reporter:
    """Writes events; without a path it tells people on standard error. A context manager."""

    def __init__(self, stream: TextIO | None, *, owned: bool) -> None:
        self._stream, self._owned = stream, owned
        self._batches = self._kept = self._unkeyed = 0
        self._batch_began_s = time.monotonic()

    @classmethod
    def open(cls, path: str | None) -> Self:
        """`-` is standard output; a file is appended to, so that a job that goes on keeps its past."""
        if path is None or path == "-":
            return cls(sys.stdout if path else None, owned=False)
        return cls(Path(path).open("a", encoding="utf-8"), owned=True)

    def started(self, query_id: str, run_id: str) -> None:
        """The query runs."""
        self._batch_began_s = time.monotonic()
        self._event("started", f"query {query_id}", {"query": query_id, "run": run_id})

    def batch(self, counts: BatchCounts) -> None:
        """A batch is done; called by the filter after its marks are stored."""
        now_s = time.monotonic()
        seconds, self._batch_began_s = now_s - self._batch_began_s, now_s
        self._batches += 1
        self._kept += counts.kept or 0
        self._unkeyed += 0 if counts.skipped else counts.unkeyed
        fields = {("batch" if name == "batch_id" else name): value for name, value in asdict(counts).items()}
        text = f"{counts.kept} kept, {counts.dropped} replays dropped, {counts.unkeyed} without metadata pass"
        text = f"batch {counts.batch_id}: {counts.rows} records, {'run before, not again' if counts.skipped else text}"
        self._event("batch", text, fields | {"seconds": round(seconds, 3)})

    def stopped(self) -> None:
        """The query ended without an error."""
        text = f"done: batches {self._batches}, records kept {self._kept}, without metadata {self._unkeyed}"
        self._event("stopped", text, {"batches": self._batches, "kept": self._kept})

    def failed(self, error: str) -> None:
        """For programs; people get the error by itself."""
        if self._stream is not None:
            self._event("failed", error, {"error": error})

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
    """What went wrong, without the stacks of Spark, Java and its Python workers."""
    text = str(error).strip() or type(error).__name__
    named = _WORKER_ERROR.findall(text)
    ours = [f"{message}" for name, message in named if not name.startswith(("Py4J", "Spark", "Python"))]
    if ours:
        return ours[-1].strip()
    return _CONDITION.sub("", _JAVA_CALL.sub("", text).splitlines()[0]).strip()
