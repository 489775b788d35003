"""A table that a batch may be written to any number of times: the same rows stand in it once.

    <path>/batch_id=17/part-*.parquet       one directory a batch: batch_id is a partition column for any reader
    <path>/_pushrep/owners-2.json           which queries wrote which batches (owners.py); the highest number counts
    <path>/_pushrep/writing/batch_id=18/    the batch being written; readers of files pass over names that begin with _

A batch is written aside and then renamed into place, so a reader sees all of it or nothing, also after kill -9 at
any moment: what is left aside is removed by the next write. A batch that is run again replaces its directory; between
the removal of the old one and the rename readers miss it for a moment. The file system must rename directories
atomically, as local disks and HDFS do; for others, and for table formats with transactions of their own, name a
catalog table (catalog.py).
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql.types import ArrayType, MapType, StructType

from spark_jobs.errors import SparkJobError
from spark_jobs.sinks.hadoop import HadoopDirectory
from spark_jobs.sinks.owners import Owners, TableNotOurs, TableOfAnotherQuery

BATCH_COLUMN = "batch_id"
FRESH_QUERY = "<new>"
FILE_FORMATS = ("parquet", "orc", "json", "csv", "text", "avro", "xml")

_OWN = "_pushrep"
_OWNERS = f"{_OWN}/owners-"


class IdempotentSink(Protocol):
    """What the filter's handler must be: writing a batch again replaces it, and batches can be taken back."""

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        """Write the batch so that exactly these rows stand for it."""
        ...

    def drop_from(self, batch_id: int) -> None:
        """Remove this query's batches >= batch_id."""
        ...

    def check_columns(self, columns: StructType) -> None:
        """Raise BadSink if rows of these columns can't be written as the sink was told to. Needs no Spark."""
        ...

    def check(self, session: SparkSession, columns: StructType, query_id: str | None) -> None:
        """Raise what the first batch of this query would raise, and write nothing; None is a query without a batch.

        Raises BadSink, TableOfAnotherQuery, TableNotOurs.
        """
        ...


class BadSink(SparkJobError):
    """The sink can't write so that a batch may be run again; the message names the setting."""

    def __init__(self, setting: str, value: object, why: str) -> None:
        super().__init__(f"{setting}={value!r}: {why}")
        self.setting, self.value, self.why = setting, value, why


class DirectoryTable:
    """The sink for a path; see `idempotent_table`."""

    def __init__(
        self,
        path: str,
        format: str,  # noqa: A002 - Spark's own word
        *,
        options: Mapping[str, str],
        partition_by: Sequence[str],
        adopt: tuple[str, int] | None,
    ) -> None:
        self._path, self._format, self._options = path.rstrip("/") or "/", format, dict(options)
        self._partition_by, self._adopt = tuple(partition_by), adopt
        self._place: tuple[str, HadoopDirectory, int] | None = None

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        directory, first = self._opened(rows.sparkSession)
        aside = f"{_OWN}/writing"
        directory.remove(aside)
        name = f"{BATCH_COLUMN}={first + batch_id}"
        writer = rows.write.format(self._format).options(**self._options).mode("overwrite")
        if self._partition_by:
            writer = writer.partitionBy(*self._partition_by)
        writer.save(directory.path_of(f"{aside}/{name}"))
        directory.remove(name)
        if not directory.rename(f"{aside}/{name}", name):
            why = f"the file system refused to rename {aside}/{name} to {name}"
            raise BadSink("target", self._path, why)

    def drop_from(self, batch_id: int) -> None:
        if self._place is None:
            session = SparkSession.getActiveSession()
            if session is None:
                raise BadSink("target", self._path, "no Spark session is active here")
            self._opened(session)
        _, directory, first = cast("tuple[str, HadoopDirectory, int]", self._place)
        self._drop(directory, first + batch_id)

    def check_columns(self, columns: StructType) -> None:
        refuse_columns(columns, self._partition_by)

    def check(self, session: SparkSession, columns: StructType, query_id: str | None) -> None:
        self.check_columns(columns)
        if "path" in {name.lower() for name in self._options}:
            raise BadSink(
                "target", self._path, "its path is given, an option path of the format beside it is not taken"
            )
        directory = HadoopDirectory(session, self._path)
        if unusable := directory.why_unusable():
            raise BadSink("target", self._path, unusable)
        settle(self._owners(directory), query_id or FRESH_QUERY, self._adopt, self._path)

    def _opened(self, session: SparkSession) -> tuple[HadoopDirectory, int]:
        query_id = query_of(session)
        if self._place is None or self._place[0] != query_id:
            directory = HadoopDirectory(session, self._path)
            owners = self._owners(directory)
            settled = settle(owners, query_id, self._adopt, self._path)
            if settled is not owners:
                first = settled.first_batch_id(query_id)
                # What the adopted query wrote after the adopted batch comes again; before the new owner is named,
                # so that a kill in between leaves the old one and this runs again.
                self._drop(directory, first)
                if not directory.create(f"{_OWNERS}{len(settled.queries)}.json", settled.to_text()):
                    raise BadSink("target", self._path, f"the file system refused to make a file in {_OWN}")
            self._place = query_id, directory, settled.first_batch_id(query_id)
        return self._place[1], self._place[2]

    def _owners(self, directory: HadoopDirectory) -> Owners:
        if directory.is_file():
            raise TableNotOurs(self._path, "is a file")
        written = [
            int(n) for name in directory.names(_OWN) if (n := name.removesuffix(".json")[len("owners-") :]).isdigit()
        ]
        if written:
            return Owners.from_text(directory.read(f"{_OWNERS}{max(written)}.json"), self._path)
        if others := [name for name in directory.names() if name != _OWN]:
            raise TableNotOurs(self._path, f"holds {others[0]!r}, which this sink did not write")
        return Owners()

    def _drop(self, directory: HadoopDirectory, first: int) -> None:
        for name in directory.names():
            column, _, value = name.partition("=")
            if column == BATCH_COLUMN and value.isdigit() and int(value) >= first:
                directory.remove(name)


def settle(owners: Owners, query_id: str, adopt: tuple[str, int] | None, table: str) -> Owners:
    """The owners once this query writes: unchanged if it does already. Raises TableOfAnotherQuery."""
    if owners.owner == query_id:
        return owners
    if owners.owner is None:
        return owners.with_first(query_id)
    if adopt is None or adopt[0] != owners.owner:
        raise TableOfAnotherQuery(table, owners.owner, query_id)
    return owners.with_successor(query_id, adopt)


def query_of(session: SparkSession) -> str:
    """The query in whose foreachBatch we are; `batch` outside of any."""
    return session.sparkContext.getLocalProperty("sql.streaming.queryId") or "batch"


def with_batch_id(rows: DataFrame, batch_id: int) -> DataFrame:
    """The rows with the table's batch_id as their last column."""
    return rows.withColumn(BATCH_COLUMN, F.lit(batch_id).cast("bigint"))


def refuse_columns(columns: StructType, partition_by: Sequence[str]) -> None:
    """Raise BadSink for rows that no table of ours can hold, and for partitions by what they don't have."""
    names = {name.lower(): name for name in columns.names}
    if BATCH_COLUMN in names:
        why = "the table has a column of this name for the number of the batch: give the rows' own another name"
        raise BadSink("column", names[BATCH_COLUMN], why)
    for name in partition_by:
        if name.lower() not in names:
            raise BadSink("partition_by", name, f"there is no such column; there are {', '.join(columns.names)}")
        kind = columns[names[name.lower()]].dataType
        if isinstance(kind, ArrayType | MapType | StructType) or kind.typeName() == "variant":
            raise BadSink("partition_by", name, f"its type is {kind.simpleString()}: partitions need a simple one")
    chosen = [name.lower() for name in partition_by]
    if len(set(chosen)) < len(chosen):
        raise BadSink("partition_by", ",".join(partition_by), "a column is named twice")
    if columns.names and len(chosen) == len(columns.names):
        raise BadSink("partition_by", ",".join(partition_by), "a column must be left to be written")
