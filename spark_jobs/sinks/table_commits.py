"""What the commits of a Delta or an Iceberg table say: which batch each holds.

Delta      userMetadata = <record>, txnAppId = pushrep-<query>-<run>, txnVersion = batch
Iceberg    snapshot property pushrep = <record>
<record>   {"query": id, "run": text, "batch": n, "ranges": [log ranges], "replaced": [log ranges]}, JSON
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from spark_jobs.batch_marks import LogRange

RECORD = "pushrep"
DELTA, ICEBERG = "delta", "iceberg"
WITH_VERSIONS = frozenset({DELTA, ICEBERG})
"""Formats whose commits carry a record of ours."""


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
        text = json.dumps(self._asdict(), separators=(",", ":"))
        if format == ICEBERG:
            return {f"snapshot-property.{RECORD}": text}
        app = f"pushrep-{self.query}-{self.run}"
        return {"userMetadata": text, "txnAppId": app, "txnVersion": str(self.batch)}
