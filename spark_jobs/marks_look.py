"""A query's marks while it runs: the log of its LocalMarks, read without its lock.

    look("orders-checkpoint-marks") ─▶ {"place", "query", "batches": [{"batch", "read"}, ...], "marks": [...]}

`batches`: the newest, ascending; `read`: log records of the ranges that it held, holes included. `marks`: of the last
batch, a pair each, with what the store knows of it. A store of marks does not hold how many rows were kept and dropped:
these come from a job's file of events (jobs/reporting.py), the newest event of each batch.
"""

import json
import os
from pathlib import Path
from typing import Any

from pushrep.errors import PushrepError
from pushrep.log import SegmentLog, list_logs
from spark_jobs.batch_marks import BatchMarks
from spark_jobs.errors import SparkJobError
from spark_jobs.marks import COMPLETE, TOPIC, entries, json_of
from spark_jobs.marks_stores import NoSuchMarks

BATCHES_SHOWN = 20
_EVENTS_BYTES = 64 << 10  # of the end of a job's file: hundreds of batches
_COUNTS = ("rows", "kept", "dropped", "jumped", "unkeyed", "seconds")


def look(place: str, events: str | None = None) -> dict[str, Any]:
    """See the file's map; `why` instead of the rest where nothing can be read. events: a job's file. Raises nothing."""
    try:
        found = _look(Path(place))
        counts = {} if events is None else _counts(Path(events))
    except (SparkJobError, PushrepError, OSError) as error:
        return {"place": place, "why": str(error)}
    batches = [one | counts.get(one["batch"], {}) for one in found["batches"]]
    return {"place": place, **found, "batches": batches}


def _look(path: Path) -> dict[str, Any]:
    generations = [number for topic, number in list_logs(path) if topic == TOPIC]
    for generation in reversed(generations):
        kept: dict[tuple[str, int], bytes] = {}
        is_whole = generation == generations[0]
        with SegmentLog.open_reader(path / f"{TOPIC}-{generation}") as log:
            for value, _ in entries(log):
                is_whole = is_whole or value == COMPLETE
                note = json_of(value)
                if note is None:
                    head = BatchMarks.from_bytes(value)
                    kept.pop((head.query_id, head.batch_id), None)  # the newest entry of a batch counts
                    kept[head.query_id, head.batch_id] = value
                elif "drop_from" in note:
                    query, first = note["drop_from"]
                    kept = {key: value for key, value in kept.items() if key[0] != query or key[1] < first}
        if is_whole and kept:
            return _summary(list(kept.values()))
    raise NoSuchMarks(str(path), "there are none; name the directory that the job has as --marks")


def _summary(values: list[bytes]) -> dict[str, Any]:
    last = BatchMarks.from_bytes(values[-1])
    shown = [batch for batch in map(BatchMarks.from_bytes, values[-BATCHES_SHOWN:]) if batch.query_id == last.query_id]
    return {
        "query": last.query_id,
        "batches": [{"batch": one.batch_id, "read": sum(r.end - r.start for r in one.ranges)} for one in shown],
        "marks": [
            {
                "topic": key.topic,
                "pid": pid,
                "partition": partition,
                "offset": entry.offset,
                "destination_partition": entry.destination_partition,
                "advanced_ms": entry.advanced_ms,
                "not_seen": min(entry.offset, marks.window) - int.from_bytes(entry.bitmap).bit_count(),
                "window": marks.window,
            }
            for key, marks in sorted(last.marks.items())
            for (pid, partition), entry in marks.items()
        ],
    }


def _counts(events: Path) -> dict[int, dict[str, Any]]:
    """By batch, of the newest events; a line that is none is passed over. Raises OSError."""
    with events.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _EVENTS_BYTES))
        lines = file.read().splitlines()
    found = {}
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:  # cut off: at the beginning of what was read, or being written
            continue
        if isinstance(event, dict) and event.get("event") == "batch":
            found[event["batch"]] = {name: event.get(name) for name in _COUNTS}
    return found
