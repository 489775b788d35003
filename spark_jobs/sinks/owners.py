"""Which query wrote which batches of a table: the bookkeeping that keeps one query from overwriting another's.

    query A: batches 0 ..          table's batch_id   0 .. 17
    query B, which adopted (A, 17)                   18 ..          first_batch_id of B is 18

Batch numbers begin at 0 with every checkpoint, so a table's own `batch_id` is the query's number plus where the query
began. Pure; table.py and catalog.py keep the text in the table's directory or properties.
"""

import json
from dataclasses import dataclass
from typing import Self

from spark_jobs.errors import SparkJobError

VERSION = 1


class TableOfAnotherQuery(SparkJobError):
    """Another query writes this table: adopt it, or write elsewhere."""

    def __init__(self, table: str, owner: str, query_id: str) -> None:
        super().__init__(
            f"table {table} is written by query {owner}, this is query {query_id}: a fresh checkpoint would write "
            f"every record again. To go on where that query ended pass adopt=({owner!r}, its last batch), here and "
            f"to the filter (--adopt {owner}:BATCH); otherwise write another table"
        )
        self.table, self.owner, self.query_id = table, owner, query_id


class TableNotOurs(SparkJobError):
    """There is data in the table that this sink did not write; batches could not be told apart from it."""

    def __init__(self, table: str, why: str) -> None:
        super().__init__(f"table {table}: {why}: write another table, or move what is there")
        self.table, self.why = table, why


@dataclass(frozen=True, slots=True)
class Owners:
    """The queries that wrote a table, oldest first, each with the table's batch_id of its batch 0."""

    queries: tuple[tuple[str, int], ...] = ()

    @property
    def owner(self) -> str | None:
        """The query that writes now."""
        return self.queries[-1][0] if self.queries else None

    def first_batch_id(self, query_id: str) -> int:
        """The table's batch_id of this query's batch 0."""
        return dict(self.queries)[query_id]

    def with_first(self, query_id: str) -> Self:
        """The first query of an empty table."""
        return type(self)(((query_id, 0),))

    def with_successor(self, query_id: str, adopt: tuple[str, int]) -> Self:
        """The query that goes on after batch `adopt[1]` of the owner `adopt[0]`."""
        first = self.first_batch_id(adopt[0]) + adopt[1] + 1
        return type(self)((*self.queries, (query_id, first)))

    def to_text(self) -> str:
        """One line of JSON."""
        return json.dumps({"version": VERSION, "queries": [list(query) for query in self.queries]})

    @classmethod
    def from_text(cls, text: str, table: str) -> Self:
        """Read what `to_text` wrote; raises TableNotOurs."""
        try:
            content = json.loads(text)
            if content["version"] != VERSION:
                raise TableNotOurs(table, f"its record of queries has version {content['version']}, not {VERSION}")
            return cls(tuple((str(query), int(first)) for query, first in content["queries"]))
        except (ValueError, KeyError, TypeError) as error:
            raise TableNotOurs(table, f"its record of queries is damaged ({error!r})") from error
