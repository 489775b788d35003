"""The idempotent sink over a catalog table: the table's own format commits a batch, in one transaction if it has any.

    format of the table                 a batch is                             taken back by
    files (parquet, orc, json, csv)     overwritten as a partition             ALTER TABLE ... DROP PARTITION
    with a catalog of its own           overwritten where batch_id = N         DELETE FROM ... WHERE batch_id >= N
    (Delta, Iceberg and their like)

Which query wrote which batches stands in the table property `pushrep.queries` (owners.py).
"""

from collections.abc import Mapping, Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql.types import StructType

from spark_jobs.sinks.owners import Owners, TableNotOurs
from spark_jobs.sinks.table import (
    BATCH_COLUMN,
    FILE_FORMATS,
    FRESH_QUERY,
    BadSink,
    DirectoryTable,
    IdempotentSink,
    query_of,
    refuse_columns,
    settle,
    with_batch_id,
)
from spark_jobs.spark_internals import setting

_PROPERTY = "pushrep.queries"


def idempotent_table(
    target: str,
    format: str = "parquet",  # noqa: A002 - Spark's own word
    *,
    options: Mapping[str, str] | None = None,
    partition_by: Sequence[str] = (),
    adopt: tuple[str, int] | None = None,
) -> IdempotentSink:
    """A handler for ReplayFilteredBatches that writes each batch into `target`, with a column `batch_id`.

    `target` is a path (it has a `/`), then `format` is one of Spark's file formats; or the name of a catalog table in
    any format, made at the first batch if there is none. `partition_by` columns come below batch_id. `adopt` as for
    ReplayFilteredBatches: batches of that query after the adopted one are removed, and the new query's follow.
    Raises BadSink; TableOfAnotherQuery and TableNotOurs at the first batch.
    """
    if "/" not in target:
        return CatalogTable(target, format, options=options or {}, partition_by=partition_by, adopt=adopt)
    if format.lower() not in FILE_FORMATS:
        raise BadSink("format", format, f"a path takes one of {', '.join(FILE_FORMATS)}; name a catalog table for it")
    return DirectoryTable(target, format, options=options or {}, partition_by=partition_by, adopt=adopt)


class CatalogTable:
    """The sink for a table's name; see `idempotent_table`."""

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
        self._place: tuple[str, int] | None = None

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        session = rows.sparkSession
        first = self._opened(session, rows)
        numbered = with_batch_id(rows, first + batch_id)
        if not self._is_files():
            numbered.writeTo(self._name).options(**self._options).overwrite(F.col(BATCH_COLUMN) == first + batch_id)
            return
        # The partition goes first, since an overwrite with no rows would leave it as it is.
        self._drop(session, [first + batch_id])
        # insertInto goes by position, and partition columns stand last in a table of files.
        columns = session.table(self._name).columns
        # As an option of the writer it is not heard by insertInto, which would then empty the whole table.
        with setting(session, "spark.sql.sources.partitionOverwriteMode", "dynamic"):
            numbered.select(*columns).write.insertInto(self._name, overwrite=True)

    def drop_from(self, batch_id: int) -> None:
        session = SparkSession.getActiveSession()
        if session is None:
            raise BadSink("target", self._name, "no Spark session is active here")
        self._drop_after(session, self._opened(session, None) + batch_id)

    def check_columns(self, columns: StructType) -> None:
        refuse_columns(columns, self._partition_by)

    def check(self, session: SparkSession, columns: StructType, query_id: str | None) -> None:
        self.check_columns(columns)
        if not session.catalog.tableExists(self._name):
            return
        there = session.table(self._name).columns
        if BATCH_COLUMN not in there:
            raise TableNotOurs(self._name, f"has no column {BATCH_COLUMN}")
        wanted, have = ({name.lower() for name in names} for names in ([*columns.names, BATCH_COLUMN], there))
        if wanted != have:
            why = f"the table has the columns {', '.join(there)}, the rows {', '.join([*columns.names, BATCH_COLUMN])}"
            raise BadSink("target", self._name, f"{why}: alter the table, or write another")
        settle(self._owners(session), query_id or FRESH_QUERY, self._adopt, self._name)

    def _is_files(self) -> bool:
        return self._format.lower() in FILE_FORMATS

    def _opened(self, session: SparkSession, rows: DataFrame | None) -> int:
        query_id = query_of(session)
        if self._place is not None and self._place[0] == query_id:
            return self._place[1]
        if not session.catalog.tableExists(self._name):
            if rows is None:
                raise BadSink("target", self._name, "there is no such table to take batches back from")
            self._create(rows)
        if BATCH_COLUMN not in session.table(self._name).columns:
            raise TableNotOurs(self._name, f"has no column {BATCH_COLUMN}")
        owners = self._owners(session)
        settled = settle(owners, query_id, self._adopt, self._name)
        if settled is not owners:
            self._drop_after(session, settled.first_batch_id(query_id))
            text = settled.to_text().replace("'", "\\'")
            session.sql(f"ALTER TABLE {self._name} SET TBLPROPERTIES ('{_PROPERTY}' = '{text}')")
        self._place = query_id, settled.first_batch_id(query_id)
        return self._place[1]

    def _create(self, rows: DataFrame) -> None:
        empty = with_batch_id(rows.sparkSession.createDataFrame([], rows.schema), 0)
        partitions = (BATCH_COLUMN, *self._partition_by)
        empty.write.format(self._format).options(**self._options).partitionBy(*partitions).saveAsTable(self._name)

    def _owners(self, session: SparkSession) -> Owners:
        properties = {row["key"]: row["value"] for row in session.sql(f"SHOW TBLPROPERTIES {self._name}").collect()}
        if _PROPERTY in properties:
            return Owners.from_text(properties[_PROPERTY], self._name)
        if not session.table(self._name).isEmpty():
            raise TableNotOurs(self._name, "holds rows that this sink did not write")
        return Owners()

    def _drop_after(self, session: SparkSession, first: int) -> None:
        if not self._is_files():
            session.sql(f"DELETE FROM {self._name} WHERE {BATCH_COLUMN} >= {first}")  # noqa: S608 - a number
            return
        named = (row[0].split("/") for row in session.sql(f"SHOW PARTITIONS {self._name}").collect())
        values = {dict(part.split("=", 1) for part in parts)[BATCH_COLUMN] for parts in named}
        self._drop(session, sorted(int(value) for value in values if value.isdigit() and int(value) >= first))

    def _drop(self, session: SparkSession, batch_ids: Sequence[int]) -> None:
        for batch_id in batch_ids:
            session.sql(f"ALTER TABLE {self._name} DROP IF EXISTS PARTITION ({BATCH_COLUMN} = {batch_id})")
