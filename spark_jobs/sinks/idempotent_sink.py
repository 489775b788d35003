"""What the tables of the apply job share: which query wrote which batches, and the columns.

`Owners` (pure) keeps which query writes, so that one never overwrites another's batches: a directory keeps it in a file
(directory_table.py), a catalog's table in its properties (catalog_table.py).

    query A                            batches  0 .. 17
    query B, which adopted (A, 17)             18 ..          as the filter numbers them (replay_filter.py)
"""

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql.types import StructType

from filtering.stream_metadata import OFFSET_MAX
from pushrep.env.checked_json import parse_json
from spark_jobs.batch_marks import LogRange
from spark_jobs.errors import ROWS_WOULD_BE_LOST, CantReplace, CheckpointWentBack, SparkJobError
from spark_jobs.replacing import within
from spark_jobs.spark_internals import query_id_of

VERSION = 1
BATCH_COLUMN = "batch_id"
FRESH_QUERY = "<new>"
NOT_TOLD = (
    "nobody told the sink whose batch this is: give the sink to ReplayFilteredBatches as its handler; a handler around "
    "it has a method expect(query_id, batch_id, ranges) that hands on to the sink's own"
)
"""In a thread of a handler nothing else says which query runs."""
FILE_FORMATS = ("parquet", "orc", "json", "csv", "text", "avro", "xml")

PLACE = "topic string, partition int, `offset` bigint, batch_id bigint"
"""The columns that say where a row's record lies, and its batch."""


class BadSink(SparkJobError):
    """The sink can't write so that a batch may be run again; the message names the setting."""

    def __init__(self, setting: str, value: object, why: str) -> None:
        super().__init__(f"{setting}={value!r}: {why}")
        self.setting, self.value, self.why = setting, value, why


class TableNotOurs(SparkJobError):
    """Another query writes this table, or it has data that this sink did not write: adopt it, or write another."""

    def __init__(self, table: str, why: str, instead: str = "write another table, or move what is there") -> None:
        super().__init__(f"table {table} {why}: {instead}")
        self.table, self.why = table, why


@dataclass(frozen=True, slots=True)
class Owners:
    """The queries that wrote a table, oldest first, each with the number of its first batch."""

    queries: tuple[tuple[str, int], ...] = ()

    @property
    def owner(self) -> str | None:
        """The query that writes now."""
        return self.queries[-1][0] if self.queries else None

    @property
    def first(self) -> int:
        """The number of its first batch; 0 while there is none."""
        return self.queries[-1][1] if self.queries else 0

    def to_text(self) -> str:
        """One line of JSON."""
        return json.dumps({"version": VERSION, "queries": [list(query) for query in self.queries]})

    @classmethod
    def from_text(cls, text: str, table: str) -> Self:
        """Read what `to_text` wrote; raises TableNotOurs."""
        try:
            content = parse_json(text)
            if content["version"] != VERSION:
                raise TableNotOurs(table, f"has a record of queries of version {content['version']}, not {VERSION}")
            return cls(tuple((str(query), int(first)) for query, first in content["queries"]))
        except (ValueError, KeyError, TypeError) as error:
            raise TableNotOurs(table, f"has a record of queries that is damaged ({error!r})") from error


def refuse_without_place(columns: Sequence[str], where: LogRange) -> None:
    """Raise CantReplace for a table whose rows do not say where their records lie."""
    if missing := [name for name in ("topic", "partition", "offset") if name not in columns]:
        raise CantReplace(*where[:3], f"it has rows without {missing[0]}: keep topic, partition and offset")


def offsets_by_partition(rows: Any, starts: Mapping[int, int]) -> "dict[int, array[int]]":
    """Of an Arrow table of partitions and offsets: each partition's offsets from its start on, ascending."""
    partitions, offsets = (rows.column(name).to_numpy() for name in ("partition", "offset"))
    found = {one: np.sort(offsets[(partitions == one) & (offsets >= start)]) for one, start in starts.items()}
    return {one: array("q", own.astype(np.int64).tobytes()) for one, own in found.items()}


def held_until_in(rows: DataFrame, where: LogRange) -> int:
    """The log offset behind the last of the rows in a partition; 0 without any. Raises CantReplace."""
    refuse_without_place(rows.columns, where)
    placed = F.col("topic").isNotNull() & F.col("partition").isNotNull() & F.col("offset").isNotNull()
    here = within(where._replace(start=0, end=OFFSET_MAX))
    found = rows.agg(F.max(F.when(here, F.col("offset"))), F.min(placed)).first()
    if found is not None and found[1] is False:
        raise CantReplace(*where[:3], "it has rows without topic, partition and offset: keep all three")
    return 0 if found is None or found[0] is None else int(found[0]) + 1


class BatchTable(ABC):
    """A table as the filter's handler, in a directory or a catalog; `name` is its path or name.

    Writing a batch again replaces it, and batches can be taken back. `expect` is called before all else for a batch.
    """

    commits_marks = False

    def __init__(
        self,
        name: str,
        format: str,  # noqa: A002 - Spark's own word
        *,
        options: Mapping[str, str],
        partition_by: Sequence[str],
        adopt: tuple[str, int] | None,
    ) -> None:
        self._name, self._format, self._options = name, format, dict(options)
        self._partition_by, self._adopt = tuple(partition_by), adopt
        self._expected: tuple[str, int, tuple[LogRange, ...]] | None = None
        self._is_told = False

    def expect(self, query_id: str, batch_id: int, ranges: tuple[LogRange, ...]) -> None:
        """The batch that comes next: its query, its number and the log ranges of all its rows.

        Raises TableNotOurs for the batch of another query than before, which may run beside it.
        """
        if self._is_told and self._expected is not None and self._expected[0] != query_id:
            why = f"was written by query {self._expected[0]} by this very object, and this is query {query_id}"
            raise TableNotOurs(self._name, why, "make an object for each query; a table belongs to one of them, too")
        self._expected, self._is_told = (query_id, batch_id, ranges), True

    def _ask_spark(self, session: SparkSession, batch_id: int) -> None:
        """A sink that foreachBatch calls itself, as behind `filter_replays`, runs in the query's own thread."""
        if not self._is_told and (query_id := query_id_of(session)) is not None:
            self._expected = query_id, batch_id, ()

    def _batch(self, batch_id: int) -> tuple[str, tuple[LogRange, ...]]:
        """The query and the log ranges of the batch that comes. Raises BadSink if the sink was not told of it."""
        if self._expected is None or self._expected[1] != batch_id:
            raise BadSink("batch_id", batch_id, NOT_TOLD)
        return self._expected[0], self._expected[2]

    def check_columns(self, columns: StructType) -> None:
        """Raise BadSink for a column that the table has itself, and for partitions by what the rows don't have."""
        names = {name.lower(): name for name in columns.names}
        if BATCH_COLUMN in names:
            why = "the table has a column of this name for the number of the batch: give the rows' own another name"
            raise BadSink("column", names[BATCH_COLUMN], why)
        for name in self._partition_by:
            if name.lower() not in names:
                raise BadSink("partition_by", name, f"there is no such column; there are {', '.join(columns.names)}")

    def held(self, session: SparkSession, where: LogRange, batch_id: int) -> DataFrame:
        """The column `offset` of the rows of other batches in a log range."""
        return self._others(session, batch_id).where(within(where)).select("offset")

    @abstractmethod
    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        """Write the batch so that exactly these rows stand for it."""

    @abstractmethod
    def replace(self, rows: DataFrame, batch_id: int, ranges: Sequence[LogRange]) -> None:
        """As the call, and rows that other batches have in these log ranges go in the same step. Raises CantReplace."""

    @abstractmethod
    def drop_from(self, batch_id: int) -> None:
        """Remove this query's batches >= batch_id. Raises CheckpointWentBack, before any, if one replaced rows."""

    @abstractmethod
    def last_batch(self, session: SparkSession) -> int | None:
        """The number of the newest batch that the table holds; below 0: none; None: it can't say."""

    @abstractmethod
    def check(self, session: SparkSession, columns: StructType, query_id: str | None) -> None:
        """Raise what the first batch of this query would raise, and write nothing; None is a query without a batch.

        Raises BadSink, TableNotOurs.
        """

    @abstractmethod
    def _others(self, session: SparkSession, batch_id: int) -> DataFrame:
        """The rows of other batches."""


def settle(owners: Owners, query_id: str, adopt: tuple[str, int] | None, table: str) -> Owners:
    """The owners with this query as the writer; the same object if it is that already. Raises TableNotOurs."""
    if owners.owner == query_id:
        return owners
    if owners.owner is None:
        return Owners(((query_id, 0),))
    if adopt is None or adopt[0] != owners.owner:
        raise TableNotOurs(
            table,
            f"is written by query {owners.owner}, this is query {query_id}",
            "a fresh checkpoint would write every record again. To go on where that query ended pass "
            f"adopt=({owners.owner!r}, its last batch), here and to the filter (--adopt {owners.owner}:BATCH); "
            "otherwise write another table",
        )
    return Owners((*owners.queries, (query_id, adopt[1] + 1)))


def refuse_replacing(table: str, batch_id: int, replaced: Mapping[int, str]) -> None:
    """Raise CheckpointWentBack if batches from `batch_id` on can't go, since one of them replaced rows of others.

    replaced: by the number of each batch that did, where.
    """
    if over := [number for number in sorted(replaced) if number >= batch_id]:
        why = f"batch {over[0]} of table {table} replaced rows, those of {replaced[over[0]]} first"
        raise CheckpointWentBack(f"batches from {batch_id} on would have to go, and {why}: {ROWS_WOULD_BE_LOST}")


def refuse_earlier(owners: Owners, batch_id: int, table: str) -> None:
    """Raise BadSink for a batch before the owner's first one: Spark's own number, which belongs to a batch before."""
    if batch_id < owners.first:
        why = f"the query continues after batch {owners.first - 1}, and Spark counts its batches from 0 again"
        raise BadSink("batch_id", batch_id, f"{why}: write {table} by ReplayFilteredBatches with the same adopt=")


def with_batch_id(rows: DataFrame, batch_id: int) -> DataFrame:
    """The rows with the batch's number as their last column."""
    return rows.withColumn(BATCH_COLUMN, F.lit(batch_id).cast("bigint"))
