"""A marks store by name: a directory, a URL of one, or a database's URL with a table; and what the console shows of it.

    look(place)    {"place", "query", "batches": [...], "marks": [...]}, or {"place", "why"}
    a batch        {"batch", "read", "rows", "kept", "dropped", "unkeyed", "late", "jumped"}

batches: the newest, ascending. read: log records of the ranges that it held, holes included. The others are the counts
of RowCounts (batch_marks.py), None where nobody knows. marks: of the last batch, a pair each, with what the store
knows of it. A database's place is its URL, #, and the table of the rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pushrep.errors import PushrepError
from spark_jobs.batch_marks import BatchMarks, MarksStore, RowCounts
from spark_jobs.errors import MarksMissing, SparkJobError
from spark_jobs.file_marks import FileMarks, local_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCHES_SHOWN = 20
_DATABASES = ("postgresql://", "postgres://", "sqlite:")


def is_database(place: str) -> bool:
    """Whether a place of marks or rows is the URL of a database."""
    return place.startswith(_DATABASES)


@contextmanager
def opened(place: str, table: str | None = None, *, to_write: bool = False) -> Iterator[MarksStore]:
    """The store there, which must exist unless it is written. Raises MarksMissing, and what the store raises."""
    if is_database(place):
        if table is None:
            raise MarksMissing(f"marks at {place.partition(':')[0]}: a database needs --table, the table of the rows")
        path = Path(place.removeprefix("sqlite:"))
        if not to_write and place.startswith("sqlite:") and not path.is_file():
            raise MarksMissing(f"marks at {place}: there is no such file")
        from spark_jobs.sql import SqlTable  # noqa: PLC0415 - psycopg is an extra

        yield SqlTable(place, table)
        return
    if table is not None:
        raise MarksMissing(
            f"marks at {place}: --table belongs to a database: postgresql://HOST/DATABASE or sqlite:PATH"
        )
    local = local_path(place)
    if local is None:
        with in_spark("marks") as session:
            yield FileMarks(place, session, read_only=not to_write)
        return
    if not to_write and not any(local.glob("*.marks")):
        raise MarksMissing(f"marks at {place}: there are none; name the directory that the job has as --marks")
    yield FileMarks(place, read_only=not to_write)


@contextmanager
def in_spark(name: str) -> "Iterator[SparkSession]":
    """The session that is active; else one of one task, ended behind it."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - slow to import, and not needed for a local store

    from spark_jobs.spark_internals import require_java, session_of  # noqa: PLC0415

    if SparkSession.getActiveSession() is None:
        require_java()
    with session_of(name, {"spark.master": "local[1]", "spark.ui.enabled": "false"}, debug=False) as session:
        yield session


def why_unreadable(error: Exception) -> str | None:
    """What a store, or the database of one, refuses; None for any other error."""
    if isinstance(error, SparkJobError | PushrepError | OSError):
        return str(error)
    if type(error).__module__.partition(".")[0] not in {"psycopg", "sqlite3"}:  # of the extra that is loaded
        return None
    return f"the database of the marks: {error}"


def owner_of(store: MarksStore) -> str:
    """The query that has the store. Raises MarksMissing for an empty one."""
    query_id = store.owner()
    if query_id is None:
        raise MarksMissing(f"marks at {store.location}: it holds no marks")
    return query_id


def look(place: str) -> dict[str, Any]:
    """See the file's map; `why` instead of the rest where nothing can be read. Raises nothing that a store raises."""
    url, _, table = place.partition("#") if is_database(place) else (place, "", "")
    if not is_database(place) and local_path(place) is None:
        return {"place": place, "why": "shown are marks of a directory of this machine, or of a database"}
    try:
        with opened(url, table or None) as store:
            owner = owner_of(store)
            numbers = store.batches(owner)[-BATCHES_SHOWN:]
            found = [one for one in (store.read(owner, number) for number in numbers) if one is not None]
    except Exception as error:
        if (why := why_unreadable(error)) is None:
            raise
        return {"place": place, "why": why}
    marks = marks_of(found[-1]) if found else []
    return {"place": place, "query": owner, "batches": [batch_of(one) for one in found], "marks": marks}


def batch_of(batch: BatchMarks) -> dict[str, Any]:
    """A batch's number and counts."""
    counts = dict.fromkeys(RowCounts._fields) if batch.counts is None else batch.counts._asdict()
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
