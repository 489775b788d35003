"""The idempotent sink over a path: a batch may be written any number of times, the same rows stand in it once.

    <path>/batch_id=17/part-*.parquet       one directory a batch: batch_id is a partition column for any reader
    <path>/_pushrep/owners-2.json           which queries wrote which batches; the highest number counts
    <path>/_pushrep/writer                  which attempt at a batch began last
    <path>/_pushrep/writing/<attempt>/batch_id=18/
                                            the batch being written; readers of files pass over names that begin with _
    <path>/_pushrep/replacing/batch_id=17/  whole batches on their way into place, together
    <path>/_pushrep/replaced/batch_id=18    where that batch replaced rows of others: it is not taken back

A batch is written aside and then renamed into place, so a reader sees all of it or nothing, also after kill -9 at
any moment: the next attempt removes what is left aside. If that is a second driver's while the first still
writes, the first is refused: right before its batch goes into place it looks whether its attempt is still the last.
A batch that is run again replaces its directory; between the removal of the old one and the rename readers miss it for
a moment. A batch that replaces rows of others (../replacing.py) is written aside with these batches as they are without
them; the rename to `replacing` decides: after a kill behind it, the next write completes the replacement.

In an object store objects become visible one by one. There a batch is one object, written by one task and renamed into
place, which the store does in one step. So it takes no partition columns, and no batch replaces rows of others there.
For these, and for table formats with transactions of their own, name a catalog table (catalog_table.py).
"""

import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from urllib.parse import urlsplit
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql.types import StringType, StructField, StructType

from filtering.stream_metadata import OFFSET_MAX
from spark_jobs.batch_marks import LogRange
from spark_jobs.errors import CantReplace
from spark_jobs.replacing import within_any
from spark_jobs.sinks.hadoop import FILE_SYSTEMS, HadoopDirectory
from spark_jobs.sinks.idempotent_sink import (
    BATCH_COLUMN,
    FRESH_QUERY,
    PLACE,
    BadSink,
    BatchTable,
    Owners,
    TableNotOurs,
    held_until_in,
    offsets_by_partition,
    refuse_earlier,
    refuse_replacing,
    refuse_without_place,
    settle,
)

_LOG = logging.getLogger(__name__)

_REPLACING_FORMATS = ("parquet", "orc")
"""Formats from which rows are read as they were written, types and nulls too."""

_OWN = "_pushrep"
_WRITING, _REPLACING = f"{_OWN}/writing", f"{_OWN}/replacing"
_REPLACED = f"{_OWN}/replaced"
_WRITER = f"{_OWN}/writer"
_OWNERS = f"{_OWN}/owners-"

_TWO_DRIVERS = "another driver began to write there meanwhile: end one of the two, and start the other again"


class DirectoryTable(BatchTable):
    """The sink for a path; see `idempotent_table`."""

    _place: tuple[str, HadoopDirectory, Owners] | None = None
    _replaced: frozenset[int] = frozenset()

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        self._ask_spark(rows.sparkSession, batch_id)
        directory = self._opened(rows.sparkSession, batch_id)
        aside = self._begin(directory)
        self._write_aside(directory, aside, batch_id, rows)
        self._refuse_if_not_last(directory, aside)
        self._into_place(directory, aside, f"{BATCH_COLUMN}={batch_id}")
        if batch_id in self._replaced:  # by an attempt that did not get so far
            directory.remove(f"{_REPLACED}/{BATCH_COLUMN}={batch_id}")

    def replace(self, rows: DataFrame, batch_id: int, ranges: Sequence[LogRange]) -> None:
        """As the call, and rows that other batches have in these log ranges go. Raises CantReplace."""
        session = rows.sparkSession
        directory = self._opened(session, batch_id)
        aside = self._begin(directory)
        gone = within_any(ranges)
        others = self._others(session, batch_id).where(gone).select(BATCH_COLUMN).distinct().collect()
        for (number,) in others:
            kept = self._read(session, directory.path_of(f"{BATCH_COLUMN}={number}")).where(~gone)
            self._write_aside(directory, aside, number, kept)
        self._write_aside(directory, aside, batch_id, rows)
        self._refuse_if_not_last(directory, aside)
        self._place = None  # if this is interrupted, the next call completes it
        directory.overwrite(f"{_REPLACED}/{BATCH_COLUMN}={batch_id}", str(ranges[0]))
        if not directory.rename(aside, _REPLACING):
            raise BadSink("target", self._name, f"the file system refused to rename {aside} to {_REPLACING}")
        self._finish_replacing(directory)
        _LOG.info("batch %d replaces rows of %d others in %s", batch_id, len(others), self._name)

    def _read(self, session: SparkSession, path: str) -> DataFrame:
        """One batch by itself, as its own files say it is; a partition's text does not come back as a number."""
        reader = session.read.format(self._format).options(**self._options)
        found = reader.load(path).schema.fields
        in_files = reader.option("recursiveFileLookup", "true").load(path).schema.names
        columns = [one if one.name in in_files else StructField(one.name, StringType()) for one in found]
        return reader.option("recursiveFileLookup", "false").schema(StructType(columns)).load(path)

    def held_until(self, session: SparkSession, where: LogRange, batch_id: int) -> int:
        """The log offset behind a partition's last row of other batches; 0 without any. Raises CantReplace."""
        if self._format.lower() not in _REPLACING_FORMATS:
            why = f"{self._format} doesn't give rows back as they were written; {' and '.join(_REPLACING_FORMATS)} do"
            raise CantReplace(*where[:3], why)
        if not self._opened(session, batch_id).renames_directories:
            raise CantReplace(*where[:3], "it lies in an object store, where batches don't change together")
        return held_until_in(self._others(session, batch_id), where)

    def _others(self, session: SparkSession, batch_id: int) -> DataFrame:
        """Topic, partition and offset of the rows of other batches."""
        directory = self._opened(session, batch_id)
        if not any(name.startswith(f"{BATCH_COLUMN}=") for name in directory.names()):
            return session.createDataFrame([], PLACE)
        rows = session.read.format(self._format).schema(PLACE).load(directory.path_of(""))
        return rows.where(F.col(BATCH_COLUMN) != batch_id)

    def _begin(self, directory: HadoopDirectory) -> str:
        """The directory of a new attempt, and what other attempts left is removed; these are refused from here on."""
        attempt = uuid4().hex
        directory.overwrite(_WRITER, attempt)  # before the removal: another attempt must not take a part for the whole
        directory.remove(_WRITING)
        return f"{_WRITING}/{attempt}"

    def _refuse_if_not_last(self, directory: HadoopDirectory, aside: str) -> None:
        if directory.read(_WRITER) != aside.removeprefix(f"{_WRITING}/"):
            raise BadSink("target", self._name, _TWO_DRIVERS)

    def _write_aside(self, directory: HadoopDirectory, aside: str, number: int, rows: DataFrame) -> None:
        options = self._options
        if not directory.renames_directories:
            rows, options = rows.repartition(1), options | {"maxRecordsPerFile": "0"}
        writer = rows.write.format(self._format).options(**options).mode("overwrite")
        if self._partition_by:
            writer = writer.partitionBy(*self._partition_by)
        writer.save(directory.path_of(f"{aside}/{BATCH_COLUMN}={number}"))

    def _into_place(self, directory: HadoopDirectory, aside: str, name: str) -> None:
        written = [name] if name in directory.names(aside) else []
        if not directory.renames_directories:  # there one task writes one object, without rows too
            files = directory.names(f"{aside}/{name}")
            written = [f"{name}/{file}" for file in files if not file.startswith(("_", "."))]  # which no reader ignores
        if len(written) != 1:
            raise BadSink("target", self._name, _TWO_DRIVERS)
        directory.remove(name)
        if not directory.rename(f"{aside}/{written[0]}", written[0]):
            raise BadSink("target", self._name, f"the file system refused to rename {aside}/{written[0]}")

    def _finish_replacing(self, directory: HadoopDirectory) -> None:
        for name in directory.names(_REPLACING):
            self._into_place(directory, _REPLACING, name)
        directory.remove(_REPLACING)

    def drop_from(self, batch_id: int) -> None:
        self._drop(self._opened(None, batch_id), batch_id)

    def check(self, session: SparkSession, columns: StructType, query_id: str | None) -> None:
        self.check_columns(columns)
        directory = HadoopDirectory(session, self._name)
        if unusable := directory.why_unusable():
            raise BadSink("target", self._name, unusable)
        self._refuse_partitions(directory)
        settle(self._owners(directory), query_id or FRESH_QUERY, self._adopt, self._name)

    def _opened(self, session: SparkSession | None, batch_id: int) -> HadoopDirectory:
        query_id, _ = self._batch(batch_id)
        if self._place is None or self._place[0] != query_id:
            directory = HadoopDirectory(session or SparkSession.active(), self._name)
            if unusable := directory.why_unusable():
                raise TableNotOurs(self._name, unusable)
            self._refuse_partitions(directory)
            self._finish_replacing(directory)
            owners = self._owners(directory)
            settled = settle(owners, query_id, self._adopt, self._name)
            if settled is not owners:
                # Rows that the adopted query wrote after the adopted batch are removed: before the new owner is named,
                # so that a kill in between leaves the old one and this runs again.
                self._drop(directory, settled.first)
                directory.check_new_objects(_OWN, once=False)
                if not directory.create_bytes(f"{_OWNERS}{len(settled.queries)}.json", settled.to_text().encode()):
                    raise BadSink("target", self._name, f"the file system refused to make a file in {_OWN}")
            self._replaced = frozenset(_batches(directory.names(_REPLACED)))
            self._place = query_id, directory, settled
        refuse_earlier(self._place[2], batch_id, self._name)
        return self._place[1]

    def _refuse_partitions(self, directory: HadoopDirectory) -> None:
        if self._partition_by and not directory.renames_directories:
            why = "an object store shows objects one by one, so a batch is one there: leave it out, or name a table"
            raise BadSink("partition_by", ",".join(self._partition_by), f"{why} of a format with commits of its own")

    def _owners(self, directory: HadoopDirectory) -> Owners:
        written = [
            int(n) for name in directory.names(_OWN) if (n := name.removesuffix(".json")[len("owners-") :]).isdigit()
        ]
        if written:
            return Owners.from_text(directory.read(f"{_OWNERS}{max(written)}.json"), self._name)
        if others := [name for name in directory.names() if name != _OWN]:
            raise TableNotOurs(self._name, f"holds {others[0]!r}, which this sink did not write")
        return Owners()

    def last_batch(self, session: SparkSession) -> int:
        directory = HadoopDirectory(session, self._name)
        return max([*_batches(directory.names()), *_batches(directory.names(_REPLACING))], default=-1)

    def _drop(self, directory: HadoopDirectory, first: int) -> None:
        """The highest first: killed in between, no hole is left. Raises CheckpointWentBack."""
        there = sorted(_batches(directory.names()), reverse=True)
        marked = {*_batches(directory.names(_REPLACED))}.intersection(there)
        where = {number: directory.read(f"{_REPLACED}/{BATCH_COLUMN}={number}") for number in marked}
        refuse_replacing(self._name, first, where)
        for number in there:
            if number >= first:
                directory.remove(f"{BATCH_COLUMN}={number}")


def _batches(names: Iterable[str]) -> Iterator[int]:
    for column, _, value in (name.partition("=") for name in names):
        if column == BATCH_COLUMN and value.isdigit():
            yield int(value)


def offsets_from(
    path: str,
    format: str,  # noqa: A002 - Spark's own word
    topic: str,
    starts: Mapping[int, int],
) -> "dict[int, array[int]]":
    """The offsets of the rows in each partition from its start on, ascending, found without Spark.

    Raises CantReplace, BadSink.
    """
    import pyarrow as pa  # noqa: PLC0415 - a second to load, for this look alone
    import pyarrow.dataset as ds  # noqa: PLC0415

    where = LogRange(topic, *min(starts.items()), OFFSET_MAX)
    if format.lower() not in _REPLACING_FORMATS:
        raise CantReplace(*where[:3], f"{format} is neither parquet nor orc, nor Delta or Iceberg")
    # Whether a store of Azure renames directories only its client knows: taken for one that does not.
    if (scheme := urlsplit(path).scheme) not in {"", *FILE_SYSTEMS}:
        why = f"{scheme} is no file system, and only there do batches of files change together"
        raise CantReplace(*where[:3], why)
    try:
        files = ds.OrcFileFormat() if format.lower() == "orc" else ds.ParquetFileFormat()
        rows = ds.dataset(path, format=files, partitioning="hive")
        names = pa.schema([]) if rows.partitioning is None else rows.partitioning.schema
        if (at := names.get_field_index("topic")) >= 0:  # in `topic=2024` Arrow sees a number
            texts = ds.partitioning(names.set(at, pa.field("topic", pa.string())), flavor="hive")
            rows = ds.dataset(path, format=files, partitioning=texts)
    except (OSError, ValueError) as error:
        raise BadSink("target", path, f"can't be read: {error}") from error
    refuse_without_place(rows.schema.names, where)
    here = (ds.field("topic") == topic) & ds.field("partition").isin([*starts])
    here &= ds.field("offset") >= min(starts.values())
    return offsets_by_partition(rows.to_table(["partition", "offset"], filter=here), starts)
