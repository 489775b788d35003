"""A query's marks while it runs, for the console: `look("orders-checkpoint-marks")` or `look("sqlite:shop.db#orders")`.

    {"place", "query", "batches": [...], "marks": [...]}
    a batch: {"batch", "read", "rows", "kept", "dropped", "unkeyed", "late", "jumped"}

batches: the newest, ascending. read: log records of the ranges that it held, holes included. The others are the counts
of RowCounts (batch_marks.py), None where nobody knows. marks: of the last batch, a pair each, with what the store
knows of it. A database's place is its URL, #, and the table of the rows.
"""

from typing import Any

from pushrep.errors import PushrepError
from spark_jobs.batch_marks import BatchMarks, RowCounts
from spark_jobs.errors import SparkJobError
from spark_jobs.file_marks import local_path
from spark_jobs.marks_stores import NoSuchMarks, is_database, opened

BATCHES_SHOWN = 20
_UNKNOWN: dict[str, int | None] = dict.fromkeys(RowCounts._fields)


def look(place: str) -> dict[str, Any]:
    """See the file's map; `why` instead of the rest where nothing can be read. Raises nothing that a store raises."""
    try:
        owner, found = _newest(place)
    except (SparkJobError, PushrepError, OSError) as error:
        return {"place": place, "why": str(error)}
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in {"psycopg", "sqlite3"}:
            raise
        return {"place": place, "why": f"the database of the marks: {error}"}
    marks = marks_of(found[-1]) if found else []
    return {"place": place, "query": owner, "batches": [batch_of(one) for one in found], "marks": marks}


def _newest(place: str) -> tuple[str, list[BatchMarks]]:
    """The query that has the store, and its newest batches."""
    url, _, table = place.partition("#") if is_database(place) else (place, "", "")
    if not is_database(place) and local_path(place) is None:
        raise NoSuchMarks(place, "shown are those of a directory of this machine, or of a database")
    with opened(url, table or None) as store:
        owner = store.owner()
        if owner is None:
            raise NoSuchMarks(store.location, "it holds no marks")
        numbers = store.batches(owner)[-BATCHES_SHOWN:]
        return owner, [one for one in (store.read(owner, number) for number in numbers) if one is not None]


def batch_of(batch: BatchMarks) -> dict[str, Any]:
    """A batch's number and counts."""
    counts = _UNKNOWN if batch.counts is None else batch.counts._asdict()
    return {"batch": batch.batch_id, "read": sum(one.end - one.start for one in batch.ranges), **counts}


def marks_of(batch: BatchMarks) -> list[dict[str, Any]]:
    """The marks of a batch, a pair each, sorted."""
    return [
        {
            "topic": key.topic,
            "startpoint_epoch": key.startpoint_epoch,
            "pid": pid,
            "partition": partition,
            "offset": entry.offset,
            "destination_partition": entry.destination_partition,
            "advanced_ms": entry.advanced_ms,
            "not_seen": min(entry.offset, marks.window) - int.from_bytes(entry.bitmap).bit_count(),
            "window": marks.window,
        }
        for key, marks in sorted(batch.marks.items())
        for (pid, partition), entry in marks.items()
    ]
