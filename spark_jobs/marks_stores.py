"""A marks store by name: a directory, a URL of one, or a database's URL with a table."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spark_jobs.errors import SparkJobError
from spark_jobs.marks import LocalMarks, MarksStore

_FILE_URL = re.compile(r"^file:/+")
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
def opened(place: str, table: str | None = None) -> Iterator[MarksStore]:
    """The store there, closed at the end; none is made. Raises NoSuchMarks, and what the store itself raises."""
    if is_database(place):
        if table is None:
            raise NoSuchMarks(place.partition(":")[0], "a database needs --table, the table of the rows")
        path = Path(place.removeprefix("sqlite:"))
        if place.startswith("sqlite:") and not path.is_file():
            raise NoSuchMarks(place, "there is no such file")
        from spark_jobs.sql.table import SqlTable  # noqa: PLC0415 - psycopg is an extra

        yield SqlTable(place, table)
        return
    if table is not None:
        raise NoSuchMarks(place, "--table belongs to a database: postgresql://HOST/DATABASE or sqlite:PATH")
    local = _FILE_URL.sub("/", place)
    if "://" in local or any(Path(local).glob("*.marks")):
        with _file_marks(place) as store:
            yield store
    else:
        if not any(Path(local).glob("marks-*")):
            raise NoSuchMarks(place, "there are none; name the directory that the job has as --marks")
        with LocalMarks(local) as store:
            yield store


@contextmanager
def _file_marks(place: str) -> Iterator[MarksStore]:
    """By Spark's own file systems: a session is started unless one is there."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - slow to import, and not needed for a local store

    from spark_jobs.file_marks import FileMarks  # noqa: PLC0415
    from spark_jobs.java import require_java  # noqa: PLC0415

    active = SparkSession.getActiveSession()
    if active is None:
        require_java()
    session = active or SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        yield FileMarks(place, session, check=False)
    finally:
        if active is None:
            session.stop()
