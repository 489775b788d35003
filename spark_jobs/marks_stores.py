"""A marks store by name: a directory, a URL of one, or a database's URL with a table."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spark_jobs.errors import SparkJobError
from spark_jobs.file_marks import FileMarks, local_path
from spark_jobs.marks import MarksStore

_DATABASES = ("postgresql://", "postgres://", "sqlite:")


def is_database(place: str) -> bool:
    """Whether a place of marks or rows is the URL of a database."""
    return place.startswith(_DATABASES)


class NoSuchMarks(SparkJobError):
    """There are no such marks at this place: name another, as the job's --marks has it."""

    def __init__(self, location: str, why: str) -> None:
        super().__init__(f"marks at {location}: {why}")
        self.location, self.why = location, why


@contextmanager
def opened(place: str, table: str | None = None, *, to_write: bool = False) -> Iterator[MarksStore]:
    """The store there, which must exist unless it is written. Raises NoSuchMarks, and what the store raises."""
    if is_database(place):
        if table is None:
            raise NoSuchMarks(place.partition(":")[0], "a database needs --table, the table of the rows")
        path = Path(place.removeprefix("sqlite:"))
        if not to_write and place.startswith("sqlite:") and not path.is_file():
            raise NoSuchMarks(place, "there is no such file")
        from spark_jobs.sql.table import SqlTable  # noqa: PLC0415 - psycopg is an extra

        yield SqlTable(place, table)
        return
    if table is not None:
        raise NoSuchMarks(place, "--table belongs to a database: postgresql://HOST/DATABASE or sqlite:PATH")
    local = local_path(place)
    if local is None:
        with _in_spark(place, to_write=to_write) as store:
            yield store
        return
    if not to_write and not any(local.glob("*.marks")):
        raise NoSuchMarks(place, "there are none; name the directory that the job has as --marks")
    yield FileMarks(place, read_only=not to_write)


@contextmanager
def _in_spark(place: str, *, to_write: bool) -> Iterator[MarksStore]:
    """By Spark's own file systems: a session is started unless one is there."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - slow to import, and not needed for a local store

    from spark_jobs.java import require_java  # noqa: PLC0415

    active = SparkSession.getActiveSession()
    if active is None:
        require_java()
    session = active or SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        yield FileMarks(place, session, read_only=not to_write)
    finally:
        if active is None:
            session.stop()
