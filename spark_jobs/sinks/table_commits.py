"""What the commits of a Delta or an Iceberg table say: which batch each holds, and what a repair replaced.

    Delta      userMetadata = <record>, txnAppId = pushrep-<query>-<run>, txnVersion = batch
    Iceberg    snapshot property pushrep = <record>
    <record>   {"query": id, "run": text, "batch": n, "ranges": [log ranges], "replaced": [log ranges]}, JSON

A repair is what the batches of one query and one startpoint epoch replaced. Its rows come back from the version before
its first commit, in one commit that has another record:

    version 7      batches 3 .. 5, the old rows        version 10   batch 8, new records
    versions 8, 9  batches 6, 7 replaced [120, 180)    version 11   [120, 180) as in 7, in their old batches; 8 stays
                                                                    {"undo": {"query", "number", "author", "reason"}}
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from spark_jobs.batch_marks import LogRange
from spark_jobs.errors import CantUndo

RECORD = "pushrep"
DELTA, ICEBERG = "delta", "iceberg"
WITH_VERSIONS = frozenset({DELTA, ICEBERG})
"""Formats that keep the rows of before a commit."""
_KEEP_ROWS = {"OPTIMIZE", "VACUUM START", "VACUUM END", "SET TBLPROPERTIES", "UNSET TBLPROPERTIES", "replace"}
"""Operations that change no row: Delta's, and Iceberg's in small letters."""


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
            fields: dict[str, Any] = json.loads(text or "")
            ranges, replaced = ([LogRange(*one) for one in fields[name]] for name in ("ranges", "replaced"))
            return cls(fields["query"], fields["run"], fields["batch"], ranges, replaced)
        except (ValueError, KeyError, TypeError):
            return None

    def options(self, format: str) -> dict[str, str]:  # noqa: A002 - Spark's own word
        """Options of the writer by which the commit carries this record."""
        found = text_options(format, self._asdict())
        if format == DELTA:
            found |= {"txnAppId": f"pushrep-{self.query}-{self.run}", "txnVersion": str(self.batch)}
        return found


def text_options(format: str, record: Mapping[str, Any]) -> dict[str, str]:  # noqa: A002 - Spark's own word
    """Options of the writer by which the commit carries `record` as its text."""
    text = json.dumps(record, separators=(",", ":"))
    return {f"snapshot-property.{RECORD}" if format == ICEBERG else "userMetadata": text}


class Commit(NamedTuple):
    """One commit: the version that it made, by which operation, and its text."""

    version: int
    operation: str
    text: str | None

    @property
    def undoes(self) -> tuple[str, int] | None:
        """Query and number of the repair that it took back, if that is what it did."""
        try:
            undone = json.loads(self.text or "")["undo"]
            return undone["query"], undone["number"]
        except (ValueError, KeyError, TypeError):
            return None


class Repair(NamedTuple):
    """What a repair did to a table: in which log ranges it replaced rows, and the version of before.

    number: the startpoint epoch of its batches.
    """

    query: str
    number: int
    ranges: tuple[LogRange, ...]
    before: int
    is_undone: bool

    def undo_options(self, format: str, said: Mapping[str, str]) -> dict[str, str]:  # noqa: A002 - Spark's own word
        """Options of the writer by which the commit says which repair it undoes, by whom and why (`said`)."""
        return text_options(format, {"undo": {"query": self.query, "number": self.number, **said}})


def repair_in(commits: Iterable[Commit], table: str, query_id: str, number: int) -> Repair | None:
    """What a query's batches of this startpoint epoch replaced, by a table's commits, the newest first; None: nothing.

    Raises CantUndo where other commits may have changed the rows since, or the history does not reach back behind it.
    """
    found = [(commit, BatchRecord.parse(commit.text)) for commit in commits]
    own = {n: record for n, (_, record) in enumerate(found) if record is not None and record.query == query_id}
    replaced = {n: [one for one in own[n].replaced if one.startpoint_epoch == number] for n in own}
    first = max((n for n in own if replaced[n]), default=None)
    if first is None:
        return None
    ranges = tuple(sorted(one for some in replaced.values() for one in some))
    places = {one[:2] for one in ranges}
    is_undone = any(commit.undoes == (query_id, number) for commit, _ in found)
    # An older batch of the same partition, read before it was sent back, shows that no commit of the repair is missing.
    older = [one for n, record in own.items() if n > first for one in record.ranges]
    if not is_undone and not places <= {one[:2] for one in older if one.startpoint_epoch != number}:
        raise CantUndo(table, "its history does not reach back behind the repair")
    for n, (commit, record) in enumerate([] if is_undone else found[:first]):
        if record is None:
            is_foreign = commit.operation not in _KEEP_ROWS
        else:
            is_foreign = not replaced.get(n) and any(one[:2] in places for one in record.replaced)
        if is_foreign:
            why = f"version {commit.version}, {commit.operation}, came after the repair: it may have changed its rows"
            raise CantUndo(table, why)
    return Repair(query_id, number, ranges, found[min(first + 1, len(found) - 1)][0].version, is_undone)
