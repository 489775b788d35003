"""What an apply job fills, as the command line looks at it: which rows a repair replaces there.

A path of files and a database are looked at without Spark. Delta and Iceberg start it, once they are asked.
"""

from array import array
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from spark_jobs.errors import CantReplace, SparkJobError
from spark_jobs.marks_stores import is_database
from spark_jobs.sinks.table_commits import WITH_VERSIONS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_jobs.sinks.catalog_table import CatalogTable


class Sink:
    """As the job's options name it. `conf`: of the Spark that looks at Delta and Iceberg; `close` stops it."""

    refusals = (SparkJobError,)

    def __init__(self, sink: str, table: str | None, format: str, conf: Mapping[str, str]) -> None:  # noqa: A002
        self._sink, self._table, self._format, self._conf = sink, table, format, conf
        self._resources = ExitStack()
        self._spark: SparkSession | None = None

    def held(self, topic: str, starts: Mapping[int, int]) -> "dict[int, array[int]]":
        """The log offsets of its rows in each partition from its start on, ascending; looked for at once.

        Raises CantReplace if these rows can't be replaced; BadSink, BadSqlTable, BadJobOption where there is no such
        table, or it does not answer.
        """
        from spark_jobs.jobs.checks import named  # noqa: PLC0415 - pyspark, for this look alone
        from spark_jobs.sinks.directory_table import offsets_from  # noqa: PLC0415
        from spark_jobs.sql import SqlTable  # noqa: PLC0415

        if is_database(self._sink):
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

    def close(self) -> None:
        """Stop Spark, if a look has started it."""
        self._resources.close()

    def _versioned(self) -> "CatalogTable | None":
        """The table, if it is one of Delta or Iceberg. Raises BadSink for a path of Iceberg."""
        if is_database(self._sink) or self._format.lower() not in WITH_VERSIONS:
            return None
        from spark_jobs.sinks.catalog_table import CatalogTable, idempotent_table  # noqa: PLC0415 - as above

        table = idempotent_table(self._sink, self._format)
        assert isinstance(table, CatalogTable)
        return table

    def _session(self) -> "SparkSession":
        from spark_jobs.java import require_java  # noqa: PLC0415 - as above
        from spark_jobs.jobs.pipeline import session_of  # noqa: PLC0415

        if self._spark is None:
            require_java()
            self._spark = self._resources.enter_context(session_of("startpoint", self._conf, debug=False))
        return self._spark
