"""What an apply job fills, as the command line looks at it: which rows a repair replaces there, and how it is undone.

a path of files, a database      looked at without Spark         the rows of before a repair are gone
Delta, Iceberg                   Spark looks, once it is asked   they keep the version of before: sinks/catalog_table.py
"""

from array import array
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pushrep.startpoints.model import author_name
from spark_jobs.errors import CantReplace, CantUndo, SparkJobError
from spark_jobs.marks_stores import is_database
from spark_jobs.sinks.table_commits import WITH_VERSIONS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_jobs.sinks.catalog_table import CatalogTable
    from spark_jobs.sinks.table_commits import Repair


@dataclass(frozen=True, slots=True)
class Replaced:
    """A repair, and by partition how many rows go when it is undone, and how many come back; none if it is undone."""

    repair: "Repair"
    rows: Mapping[int, tuple[int, int]]


class Sink:
    """As the job's options name it. `conf`: of the Spark that looks at Delta and Iceberg; `close` stops it."""

    refusals = (SparkJobError,)

    def __init__(self, sink: str, table: str | None, format: str, conf: Mapping[str, str]) -> None:  # noqa: A002
        self._sink, self._table, self._format, self._conf = sink, table, format, conf
        self._resources = ExitStack()
        self._spark: SparkSession | None = None

    @property
    def is_database(self) -> bool:
        """Whether the job's marks lie there, too."""
        return is_database(self._sink)

    def held(self, topic: str, starts: Mapping[int, int]) -> "dict[int, array[int]]":
        """The log offsets of its rows in each partition from its start on, ascending; looked for at once.

        Raises CantReplace if these rows can't be replaced; BadSink, BadSqlTable, BadJobOption where there is no such
        table, or it does not answer.
        """
        from spark_jobs.jobs.checks import named  # noqa: PLC0415 - pyspark, for this look alone
        from spark_jobs.sinks.directory_table import offsets_from  # noqa: PLC0415
        from spark_jobs.sql import SqlTable  # noqa: PLC0415

        if self.is_database:
            table = SqlTable(self._sink, self._table or "")
            with named("--sink", table.location):
                return table.offsets_from(topic, starts)
        if (versioned := self._versioned()) is not None:
            with named("--sink", self._sink):
                return versioned.offsets_from(self._session(), topic, starts)
        if "/" not in self._sink:
            why = f"a catalog's table of {self._format} exchanges whole batches only; Delta and Iceberg can (--format)"
            raise CantReplace(topic, *min(starts.items()), why)
        return offsets_from(self._sink, self._format, topic, starts)

    def refuse_without_versions(self) -> None:
        """Raise CantUndo for a table that keeps no rows of before. Starts no Spark."""
        self._with_versions()

    def replaced(self, query_id: str, number: int) -> Replaced:
        """What the batches of a query replaced in a startpoint epoch. Raises CantUndo, BadSink, BadJobOption."""
        from spark_jobs.jobs.checks import named  # noqa: PLC0415 - as above
        from spark_jobs.spark_internals import setting  # noqa: PLC0415 - as above

        table = self._with_versions()
        with named("--sink", self._sink):
            session = self._session()
            repair = table.repair_of(session, query_id, number)
            if repair is not None and repair.is_undone:
                return Replaced(repair, {})
            exchanged = () if repair is None else table.exchanged(session, repair)
            with setting(session, "spark.sql.files.ignoreMissingFiles", "false"):  # VACUUM removes rows of before
                counts: list[dict[int, int]] = [dict(rows.groupBy("partition").count().collect()) for rows in exchanged]
        if repair is None or not any(counts):
            raise CantUndo(self._sink, "its history knows no batch that replaced a row since a partition was sent back")
        gone, back = counts
        return Replaced(repair, {one: (gone.get(one, 0), back.get(one, 0)) for one in sorted({*gone, *back})})

    def undo(self, shown: Replaced, *, reason: str, author: str | None) -> None:
        """Put the rows of before back, in one commit that says who did it, and why. Raises BadJobOption.

        The query stands where it stood, and so do its marks: once a repair is read through, they are those of before.
        """
        from spark_jobs.jobs.checks import named  # noqa: PLC0415 - as above

        said = {"author": author_name(author), "reason": reason}
        with named("--sink", self._sink):
            self._with_versions().undo(self._session(), shown.repair, said)

    def close(self) -> None:
        """Stop Spark, if a look has started it."""
        self._resources.close()

    def _versioned(self) -> "CatalogTable | None":
        """The table, if it is one of Delta or Iceberg. Raises BadSink for a path of Iceberg."""
        if self.is_database or self._format.lower() not in WITH_VERSIONS:
            return None
        from spark_jobs.sinks.catalog_table import CatalogTable, idempotent_table  # noqa: PLC0415 - as above

        table = idempotent_table(self._sink, self._format)
        assert isinstance(table, CatalogTable)
        return table

    def _with_versions(self) -> "CatalogTable":
        if (table := self._versioned()) is None:
            kind = self._sink.partition(":")[0] if self.is_database else self._format
            raise CantUndo(
                f"--sink of {kind}",
                "it keeps no rows of before a repair, as Delta and Iceberg do (--format): restore a copy of it, or let "
                "the code of before run over the same records by another repair",
            )
        return table

    def _session(self) -> "SparkSession":
        from spark_jobs.java import require_java  # noqa: PLC0415 - as above
        from spark_jobs.jobs.pipeline import session_of  # noqa: PLC0415

        if self._spark is None:
            require_java()
            self._spark = self._resources.enter_context(session_of("startpoint", self._conf, debug=False))
        return self._spark
