"""The idempotent sink over a table that Spark knows by name, as Delta and Iceberg: its own format commits a batch.

    format of the table                 a batch is                             taken back by
    files (parquet, orc, json, csv)     overwritten as a partition             ALTER TABLE ... DROP PARTITION
    with transactions                   overwritten where batch_id = N         DELETE FROM ... WHERE batch_id >= N
    (Delta, Iceberg and their like)

Which query wrote which batches is in the table property `pushrep.queries` (`Owners` of idempotent_sink.py). In Delta
and Iceberg a batch may replace rows of others (../replacing.py): in the same commit the batches that hold them are
written again without these rows. Each commit names its batch:

    Delta      userMetadata = <record>, txnAppId = pushrep-<query>-<run>, txnVersion = batch
    Iceberg    snapshot property pushrep = <record>
    <record>   {"query": id, "run": text, "batch": n, "ranges": [log ranges], "replaced": [log ranges]}, JSON

So a batch that the table has is not written again, and in Delta a driver that was believed dead can't overwrite with an
old batch. Since Delta ignores a txnVersion below the last one, another `run` (txnAppId) begins when batches are taken
back.
"""

import json
import logging
import re
import uuid
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from filtering.stream_metadata import OFFSET_MAX
from pushrep.env.checked_json import parse_json
from spark_jobs.batch_marks import LogRange
from spark_jobs.errors import CantReplace
from spark_jobs.replacing import within_any
from spark_jobs.sinks.directory_table import DirectoryTable
from spark_jobs.sinks.hadoop import HadoopDirectory
from spark_jobs.sinks.idempotent_sink import (
    BATCH_COLUMN,
    FILE_FORMATS,
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
    settle,
    with_batch_id,
)
from spark_jobs.spark_internals import quoted, to_arrow

_LOG = logging.getLogger(__name__)

RECORD = "pushrep"
DELTA, ICEBERG = "delta", "iceberg"
WITH_VERSIONS = frozenset({DELTA, ICEBERG})
"""Formats whose commits carry a record of ours."""

_PROPERTY = "pushrep.queries"
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_RECORDS_READ = 100
"""Commits that are looked through for the last of ours; those between are others', such as compactions."""


def idempotent_table(
    target: str,
    format: str = "parquet",  # noqa: A002 - Spark's own word
    *,
    options: Mapping[str, str] | None = None,
    partition_by: Sequence[str] = (),
    adopt: tuple[str, int] | None = None,
) -> BatchTable:
    """A handler for ReplayFilteredBatches that writes each batch into `target`, with a column `batch_id`.

    `target` is a path (it has a `/`), then `format` is one of Spark's file formats or delta; or the name of a catalog
    table in any format, made at the first batch if there is none. `partition_by` columns come below batch_id. `adopt`
    as for ReplayFilteredBatches: batches of that query after the adopted one are removed, and the new query's follow.
    Raises BadSink; TableNotOurs at the first batch.
    """
    if "/" not in target:
        return CatalogTable(target, format, options=options or {}, partition_by=partition_by, adopt=adopt)
    if format.lower() == DELTA:
        # Delta takes a name for a path only if that is absolute; else Spark looks for a schema that is called delta.
        path = target if target.startswith("/") or _SCHEME.match(target) else str(Path(target).resolve())
        return CatalogTable(f"delta.`{path}`", format, options=options or {}, partition_by=partition_by, adopt=adopt)
    if format.lower() not in FILE_FORMATS:
        raise BadSink("format", format, f"a path takes one of {', '.join(FILE_FORMATS)}; name a catalog table for it")
    path = target.rstrip("/") or "/"
    return DirectoryTable(path, format, options=options or {}, partition_by=partition_by, adopt=adopt)


def _text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _partition(shown: Sequence[str]) -> str:
    """The SQL of a partition that `SHOW PARTITIONS` shows as `a=1/b=2`, percent-encoded."""
    parts = (map(unquote, part.split("=", 1)) for part in shown[0].split("/"))
    values = ((name, "NULL" if value == _NULL_PARTITION else _text(value)) for name, value in parts)
    return f"PARTITION ({', '.join(f'{quoted(name)} = {value}' for name, value in values)})"


def _type(kind: DataType) -> str:
    """A type as SQL declares it, names inside it in quotes."""
    if isinstance(kind, StructType):
        return f"struct<{', '.join(f'{quoted(field.name)}: {_type(field.dataType)}' for field in kind.fields)}>"
    if isinstance(kind, ArrayType):
        return f"array<{_type(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"map<{_type(kind.keyType)}, {_type(kind.valueType)}>"
    return kind.simpleString()


class BatchRecord(NamedTuple):
    """The record in a commit: the batch that it holds."""

    query: str
    run: str
    batch: int
    ranges: Sequence[LogRange]
    replaced: Sequence[LogRange]

    @classmethod
    def parse(cls, text: str | None) -> "BatchRecord | None":
        """The record in a commit's text; None for a commit that holds no batch of ours."""
        try:
            fields: dict[str, Any] = parse_json(text or "")
            ranges, replaced = ([LogRange(*one) for one in fields[name]] for name in ("ranges", "replaced"))
            return cls(fields["query"], fields["run"], fields["batch"], ranges, replaced)
        except (ValueError, KeyError, TypeError):
            return None

    def options(self, format: str) -> dict[str, str]:  # noqa: A002 - Spark's own word
        """Options of the writer by which the commit carries this record."""
        text = json.dumps(self._asdict(), separators=(",", ":"))
        if format == ICEBERG:
            return {f"snapshot-property.{RECORD}": text}
        app = f"pushrep-{self.query}-{self.run}"
        return {"userMetadata": text, "txnAppId": app, "txnVersion": str(self.batch)}


class CatalogTable(BatchTable):
    """The sink for a table's name; see `idempotent_table`."""

    _place: tuple[str, Owners] | None = None
    _last: BatchRecord | None = None

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        self._ask_spark(rows.sparkSession, batch_id)
        self._write(rows, batch_id, ())

    def replace(self, rows: DataFrame, batch_id: int, ranges: Sequence[LogRange]) -> None:
        """As the call, and rows that other batches have in these log ranges go in the same commit."""
        self._write(rows, batch_id, ranges)

    def held_until(self, session: SparkSession, where: LogRange, batch_id: int) -> int:
        """The log offset behind a partition's last row of other batches; 0 without any. Raises CantReplace."""
        if self._committing() is None:
            why = f"a catalog's table of {self._format} exchanges whole batches only; Delta and Iceberg can, a path of "
            raise CantReplace(*where[:3], why + "parquet or orc, and a database")
        return held_until_in(self._others(session, batch_id), where)

    def drop_from(self, batch_id: int) -> None:
        session = SparkSession.active()
        self._open(session, None, batch_id)
        self._drop_after(session, batch_id)

    def last_batch(self, session: SparkSession) -> int | None:
        """By the newest of our commits, or by a partition of the batch that comes or a later one.

        Where the user has partitions below, a batch without rows leaves none, so a table of files can't say that it
        lacks one.
        """
        assert self._expected is not None, "the form tells the sink what comes, then asks"
        query_id, batch_id, _ = self._expected
        if not self._exists(session):
            return -1
        if (committing := self._committing()) is not None:
            return next((one.batch for one in self._records(session, committing) if one.query == query_id), None)
        if not self._is_files() or BATCH_COLUMN not in session.table(self._name).columns:
            return None
        return max((number for number in self._partitions(session) if number >= batch_id), default=None)

    def check(self, session: SparkSession, columns: StructType, query_id: str | None) -> None:
        self.check_columns(columns)
        self._check_session(session)
        if not self._exists(session):
            return
        there = session.table(self._name).columns
        if BATCH_COLUMN not in there:
            raise TableNotOurs(self._name, f"has no column {BATCH_COLUMN}")
        wanted, have = ({name.lower() for name in names} for names in ([*columns.names, BATCH_COLUMN], there))
        if wanted != have:
            why = f"the table has the columns {', '.join(there)}, the rows {', '.join([*columns.names, BATCH_COLUMN])}"
            raise BadSink("target", self._name, f"{why}: alter the table, or write another")
        settle(self._owners(session), query_id or FRESH_QUERY, self._adopt, self._name)

    def _check_session(self, session: SparkSession) -> None:
        """Raise BadSink where Delta's jar is not in the session, or an option is one that this sink sets itself."""
        committing = self._committing()
        if committing == DELTA and "DeltaSparkSessionExtension" not in (
            session.conf.get("spark.sql.extensions", "") or ""
        ):
            why = (
                "this Spark session does not have Delta: give its jar and the two settings that docs/spark.md names; "
                "of Spark 4.2 there was no release of it"
            )
            raise BadSink("format", self._format, why)
        ours = () if committing is None else BatchRecord("", "", 0, (), ()).options(committing)
        taken = {name.lower() for name in ours}
        for name, text in self._options.items():
            if name.lower() in taken:
                raise BadSink(f"option {name}", text, "this sink sets it, to recognise its batches: leave it out")

    def _write(self, rows: DataFrame, batch_id: int, replaced: Sequence[LogRange]) -> None:
        session = rows.sparkSession
        self._open(session, rows, batch_id)
        numbered, numbers, committing = with_batch_id(rows, batch_id), [batch_id], self._committing()
        if self._is_files():
            # The partition goes first: an overwrite with no rows would leave what lies below it, in a session in which
            # only partitions that get rows are overwritten.
            self._drop(session, [batch_id])
            self._overwrite_partition(numbered, batch_id)
            return
        options, record = self._options, None
        if committing is not None and self._is_told:
            record = self._record(session, committing, batch_id, replaced)
            if record is self._last:
                _LOG.info("batch %d is in %s with these very log ranges: not written again", batch_id, self._name)
                return
            options = options | record.options(committing)
        if replaced:
            gone = within_any(replaced)
            others = self._others(session, batch_id).where(gone).select(BATCH_COLUMN).distinct().collect()
            numbers += sorted(row[0] for row in others)
            _LOG.info("batch %d replaces rows of %d others in %s", batch_id, len(others), self._name)
            if others:
                kept = session.table(self._name).where(F.col(BATCH_COLUMN).isin(numbers[1:]) & ~gone)
                numbered = numbered.unionByName(kept)
        self._last = None
        numbered.writeTo(self._name).options(**options).overwrite(F.col(BATCH_COLUMN).isin(numbers))
        self._last = record

    def _overwrite_partition(self, numbered: DataFrame, batch_id: int) -> None:
        """Named in SQL, a partition is overwritten alone whatever the session's mode is; `insertInto` names none."""
        session, view = numbered.sparkSession, f"pushrep_{uuid.uuid4().hex}"
        columns = session.catalog.listColumns(self._name)
        own = ", ".join(quoted(one.name) for one in columns if one.name.lower() != BATCH_COLUMN)
        below = [quoted(one.name) for one in columns if one.isPartition and one.name.lower() != BATCH_COLUMN]
        where = ", ".join([f"{BATCH_COLUMN} = {batch_id}", *below])
        numbered.createOrReplaceTempView(view)
        try:
            session.sql(f"INSERT OVERWRITE TABLE {self._name} PARTITION ({where}) SELECT {own} FROM {view}")  # noqa: S608
        finally:
            session.catalog.dropTempView(view)

    def _record(
        self, session: SparkSession, committing: str, batch_id: int, replaced: Sequence[LogRange]
    ) -> BatchRecord:
        """The next commit's record; the table's last record if it has the batch. Raises CheckpointWentBack."""
        query_id, ranges = self._batch(batch_id)
        run = uuid.uuid4().hex[:12]
        if self._last is not None and self._last.batch < batch_id:
            since = [self._last]
        else:
            since = list(self._records(session, committing))
        later = [one for one in since if one.query == query_id and one.batch >= batch_id]
        last = next((one for one in since if one.query == query_id), None)
        if last is not None and last.batch == batch_id and tuple(last.ranges) == ranges:
            self._last = last
            return last
        if later:
            self._drop_after(session, batch_id)
        elif last is not None:
            run = last.run
        return BatchRecord(query_id, run, batch_id, ranges, tuple(replaced))

    def _records(self, session: SparkSession, committing: str) -> Iterator[BatchRecord]:
        """The records of the newest commits that the table consists of, the newest first."""
        return filter(None, map(BatchRecord.parse, self._commit_texts(session, committing)))

    def _commit_texts(self, session: SparkSession, committing: str) -> Iterator[str | None]:
        if committing == ICEBERG:
            name = self._name
            if "." not in name:
                name = f"{session.catalog.currentCatalog()}.{session.catalog.currentDatabase()}.{name}"
            snapshots = session.sql(
                f"SELECT s.summary['{RECORD}'] "  # noqa: S608 - a name
                f"FROM {name}.history h JOIN {name}.snapshots s ON h.snapshot_id = s.snapshot_id "
                f"WHERE h.is_current_ancestor ORDER BY h.made_current_at DESC LIMIT {_RECORDS_READ}"
            ).collect()
            yield from (text for (text,) in snapshots)
            return
        restored_to: int | None = None
        for commit in session.sql(f"DESCRIBE HISTORY {self._name} LIMIT {_RECORDS_READ}").collect():
            if restored_to is not None and commit["version"] > restored_to:
                continue  # a RESTORE took it back
            yield commit["userMetadata"]
            if commit["operation"] == "RESTORE":
                to = (commit["operationParameters"] or {}).get("version")
                if to is None or not str(to).isdigit():
                    return
                restored_to = int(to)

    def offsets_from(self, session: SparkSession, topic: str, starts: Mapping[int, int]) -> "dict[int, array[int]]":
        """The offsets of the rows in each partition from its start on, ascending. Raises CantReplace, BadSink."""
        self._check_session(session)
        if not self._exists(session):
            raise BadSink("target", self._name, "there is no such table")
        rows = session.table(self._name)
        held_until_in(rows, LogRange(topic, *min(starts.items()), OFFSET_MAX))  # refuses what can't be replaced
        here = (F.col("topic") == topic) & F.col("partition").isin(*starts) & (F.col("offset") >= min(starts.values()))
        return offsets_by_partition(to_arrow(rows.where(here).select("partition", "offset")), starts)

    def _others(self, session: SparkSession, batch_id: int) -> DataFrame:
        if not self._exists(session):
            return session.createDataFrame([], PLACE)
        self._open(session, None, batch_id)
        return session.table(self._name).where(F.col(BATCH_COLUMN) != batch_id)

    def _is_files(self) -> bool:
        return self._format.lower() in FILE_FORMATS

    def _committing(self) -> str | None:
        """The format, if its commits carry a record: Delta or Iceberg; one commit of theirs can overwrite any rows."""
        return self._format.lower() if self._format.lower() in WITH_VERSIONS else None

    def _exists(self, session: SparkSession) -> bool:
        path = self._name.removeprefix("delta.`").removesuffix("`")
        if path != self._name:  # a path: the catalog does not answer for those that are not there yet
            return "_delta_log" in HadoopDirectory(session, path).names()
        return session.catalog.tableExists(self._name)

    def _open(self, session: SparkSession, rows: DataFrame | None, batch_id: int) -> None:
        """Make the query the writer of the table, which is made for these rows. Raises BadSink, TableNotOurs."""
        query_id, _ = self._batch(batch_id)
        if self._place is None or self._place[0] != query_id:
            self._place = query_id, self._settled(session, rows, query_id)
        refuse_earlier(self._place[1], batch_id, self._name)

    def _settled(self, session: SparkSession, rows: DataFrame | None, query_id: str) -> Owners:
        self._last = None
        if not self._exists(session):
            if rows is None:
                raise BadSink("target", self._name, "there is no such table to take batches back from")
            self._create(rows, query_id)
        if BATCH_COLUMN not in session.table(self._name).columns:
            raise TableNotOurs(self._name, f"has no column {BATCH_COLUMN}")
        owners = self._owners(session)
        settled = settle(owners, query_id, self._adopt, self._name)
        if settled is not owners:
            self._drop_after(session, settled.first)
            session.sql(f"ALTER TABLE {self._name} SET TBLPROPERTIES ({_text(_PROPERTY)} = {_text(settled.to_text())})")
        return settled

    def _create(self, rows: DataFrame, query_id: str) -> None:
        empty = with_batch_id(rows.sparkSession.createDataFrame([], rows.schema), 0)
        partitions = (BATCH_COLUMN, *self._partition_by)
        if self._committing() is not None:
            first, *more = map(F.col, partitions)
            table = empty.writeTo(self._name).using(self._format).partitionedBy(first, *more)
            table.tableProperty(_PROPERTY, Owners(((query_id, 0),)).to_text()).create()
            return
        if self._is_files():
            # Declared, not written as an empty frame: a kill leaves files of that, over which Spark makes no table.
            columns = ", ".join(f"{quoted(field.name)} {_type(field.dataType)}" for field in empty.schema.fields)
            given = ", ".join(f"{_text(name)} = {_text(text)}" for name, text in self._options.items())
            rows.sparkSession.sql(
                f"CREATE TABLE {self._name} ({columns}) USING {self._format} {f'OPTIONS ({given}) ' if given else ''}"
                f"PARTITIONED BY ({', '.join(map(quoted, partitions))}) "
                f"TBLPROPERTIES ({_text(_PROPERTY)} = {_text(Owners(((query_id, 0),)).to_text())})"
            )
            return
        empty.write.format(self._format).options(**self._options).partitionBy(*partitions).saveAsTable(self._name)

    def _owners(self, session: SparkSession) -> Owners:
        properties = {row["key"]: row["value"] for row in session.sql(f"SHOW TBLPROPERTIES {self._name}").collect()}
        if _PROPERTY in properties:
            return Owners.from_text(properties[_PROPERTY], self._name)
        if not session.table(self._name).isEmpty():
            raise TableNotOurs(self._name, "holds rows that this sink did not write")
        return Owners()

    def _drop_after(self, session: SparkSession, first: int) -> None:
        """Remove the batches from `first` on. Raises CheckpointWentBack."""
        if (committing := self._committing()) is not None:
            newest_last = reversed([*self._records(session, committing)])
            of_each = {one.batch: one.replaced for one in newest_last}
            refuse_replacing(self._name, first, {n: str(gone[0]) for n, gone in of_each.items() if gone})
        if not self._is_files():
            session.sql(f"DELETE FROM {self._name} WHERE {BATCH_COLUMN} >= {first}")  # noqa: S608 - a number
            return
        self._drop(session, sorted((one for one in self._partitions(session) if one >= first), reverse=True))

    def _partitions(self, session: SparkSession) -> set[int]:
        """The batches of a table of files that have rows."""
        named = (row[0].split("/") for row in session.sql(f"SHOW PARTITIONS {self._name}").collect())
        values = {dict(part.split("=", 1) for part in parts)[BATCH_COLUMN] for parts in named}
        return {int(value) for value in values if value.isdigit()}

    def _drop(self, session: SparkSession, batch_ids: Sequence[int]) -> None:
        for batch_id in batch_ids:
            whole = f"PARTITION ({BATCH_COLUMN} = {batch_id})"
            # A catalog in memory takes no partition for all that are below it.
            below = map(_partition, session.sql(f"SHOW PARTITIONS {self._name} {whole}").collect())
            session.sql(f"ALTER TABLE {self._name} DROP IF EXISTS {', '.join(below) or whole}")
