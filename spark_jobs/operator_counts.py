"""The counts of filter_replays: numbers observed before and after the operator, in each batch's progress.

    <metrics>.before   rows, unkeyed (passed untouched: no metadata, or a PID outside of only_pids), carrier and wanted
                       (what the filter looks for, and where), unkeyed_topics: all of their rows are unkeyed
    <metrics>.after    pairs, kept, dropped, late, jumped, all_dropped; by name up to NAMED_MAX a task: the pairs of
                       which no row passed, and the pairs whose marks jumped over offsets

They are counted chunk by chunk, never row by row. A batch whose rows its handler reads twice counts them twice:
persist them inside foreachBatch.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from filtering.carrier import CarrierCheck
from filtering.replay_filter import FilterCounts
from filtering.stream_metadata import OFFSET_MAX
from spark_jobs.columns import FilterRule
from spark_jobs.decide import BatchCounts, warn_of

METRICS = "filter_replays"
NAMED_MAX = 10

DECIDED = "data binary, report string"
"""What the operator hands on: a chunk's data, and on the first of a pair its report as JSON. Two columns, since each
costs a pair 0.25 ms on its way through pandas.
"""
_DECIDED_FIELDS: Any = [("data", pa.binary()), ("report", pa.string())]
DECIDED_ARROW = pa.schema(_DECIDED_FIELDS)
_NUMBERS = ("pairs", "kept", "dropped", "late", "jumped", "unlikely")
_REPORT = f"{', '.join(f'{name} bigint' for name in _NUMBERS)}, all_dropped string, gap string"
_LOG = logging.getLogger(__name__)
_STATE_LACKS = ("STATE_STORE_COMMIT_VALIDATION_FAILED", "CANNOT_LOAD_STATE_STORE")
"""Spark's conditions of a state that a batch did not store: at its end in newer releases, and at the next start."""


class Reports:
    """Pairs' reports; names no more than NAMED_MAX pairs of each kind, so that a query's progress stays short.

    One for a task; on Spark 3.5, and in a batch frame, one for each pair, so that all are named.
    """

    def __init__(self) -> None:
        self._silent = self._gaps = 0

    def of(self, name: tuple[str, int, int], counts: FilterCounts, *, is_unlikely: bool) -> str:
        """The report of a pair whose filter saw this batch only. `is_unlikely`: no source has such a pair."""
        silent, gap = counts.kept == 0, counts.jumped > 0
        self._silent, self._gaps = self._silent + silent, self._gaps + gap
        report: dict[str, Any] = {
            "pairs": 1,
            "kept": counts.kept,
            "dropped": counts.dropped,
            "late": counts.late,
            "jumped": counts.jumped,
            "unlikely": int(is_unlikely),
        }
        if silent and self._silent <= NAMED_MAX:
            report["all_dropped"] = json.dumps(name)
        if gap and self._gaps <= NAMED_MAX:
            report["gap"] = json.dumps([*name, counts.jumped])
        return json.dumps(report)


def handed_on(data: Sequence[bytes | None], report: str | None = None) -> pd.DataFrame:
    """Rows of DECIDED: these chunks' data, the report on the first of them."""
    return pd.DataFrame({"data": data, "report": [report, *[None] * (len(data) - 1)]})


def observed_before(packed: DataFrame, metrics: str, rule: FilterRule) -> DataFrame:
    """Chunks (row_chunks.PACKED), observed."""
    is_outside = F.col("source_partition") < 0
    topics, keyed = (F.collect_set(F.when(one, F.col("topic"))) for one in (is_outside, ~is_outside))
    return packed.observe(
        f"{metrics}.before",
        _sum("rows").alias("rows"),
        F.coalesce(F.sum(F.when(is_outside, F.col("rows"))), F.lit(0)).alias("unkeyed"),
        F.max(F.lit(rule.carrier_name)).alias("carrier"),
        F.max(F.lit(rule.wanted)).alias("wanted"),
        F.slice(F.sort_array(F.array_except(topics, keyed)), 1, NAMED_MAX).alias("unkeyed_topics"),
    )


def observed_after(decided: DataFrame, metrics: str) -> DataFrame:
    """The column `data` of what the operator hands on (DECIDED), whose reports are observed."""
    return (
        decided.select("data", F.from_json("report", _REPORT).alias("counts"))
        .observe(
            f"{metrics}.after",
            *(_sum(f"counts.{name}").alias(name) for name in _NUMBERS if name != "jumped"),
            # Chance keys jump by up to 2^63 each. A bigint's sum would overflow, and with ANSI rules fail the query.
            F.least(_sum(F.col("counts.jumped").cast("decimal(38, 0)")), F.lit(OFFSET_MAX))
            .cast("bigint")
            .alias("jumped"),
            F.collect_list("counts.all_dropped").alias("all_dropped"),
            F.collect_list("counts.gap").alias("gaps"),
        )
        .select("data")
    )


def operator_counts(progress: Mapping[str, Any], metrics: str = METRICS) -> BatchCounts | None:
    """The counts in a query's progress (`query.lastProgress`); None where that filter observed nothing.

    `all_dropped` names at most NAMED_MAX pairs of a task, all on Spark 3.5.
    """
    before, after = (_observed(progress, f"{metrics}.{side}") for side in ("before", "after"))
    if before is None or after is None:
        return None
    named = tuple((topic, pid, partition) for topic, pid, partition in map(json.loads, after["all_dropped"]))
    return BatchCounts(
        progress["batchId"],
        before["rows"],
        before["unkeyed"],
        after["pairs"],
        kept=after["kept"],
        dropped=after["dropped"],
        late=after["late"],
        jumped=after["jumped"],
        all_dropped=named,
        unlikely_pairs=after["unlikely"],
    )


def operator_gaps(progress: Mapping[str, Any], metrics: str = METRICS) -> dict[tuple[str, int, int], int]:
    """The gaps of one batch: (topic, pid, source partition) → offsets that its mark passed over; NAMED_MAX a task."""
    after = _observed(progress, f"{metrics}.after")
    found = [] if after is None else map(json.loads, after["gaps"])
    return {(topic, pid, partition): jumped for topic, pid, partition, jumped in found}


def _observed(progress: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """What was observed under a name; over Spark Connect it is a list of values and a list of names."""
    row = progress["observedMetrics"].get(name)
    if row is None or "schema" not in row:
        return row if row is None or isinstance(row, Mapping) else row.asDict()
    return dict(zip((field["name"] for field in row["schema"]["fields"]), row["values"], strict=True))


def _sum(numbers: Any) -> Any:
    return F.coalesce(F.sum(numbers), F.lit(0))


_watched: WeakSet[SparkSession] = WeakSet()


def warn_of_no_metadata(spark: SparkSession) -> None:
    """From now on warn of each topic that a filter of this session finds no metadata in, once for each run."""
    if spark not in _watched:
        _watched.add(spark)
        spark.streams.addListener(_CarrierListener())


class _CarrierListener(StreamingQueryListener):
    def __init__(self) -> None:
        self._checks: dict[tuple[str, str, str], CarrierCheck] = {}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        progress = json.loads(event.progress.json)
        for name in progress["observedMetrics"]:
            found = _observed(progress, name)
            for topic in (found or {}).get("unkeyed_topics") or ():
                assert found is not None
                key = (str(event.progress.runId), name, topic)
                if key not in self._checks:
                    self._checks[key] = CarrierCheck(_LOG, topic, found["carrier"], found["wanted"])
                self._checks[key].look(1, 1, lambda _: 0)  # the workers look into headers, before rows are given out

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        self._checks = {key: one for key, one in self._checks.items() if key[0] != str(event.runId)}
        if any(condition in (event.exception or "") for condition in _STATE_LACKS):
            _LOG.error(
                "query %s: its state is not there as of its last batch. A handler that did not read that batch whole "
                "leaves it so, and no later batch can run: begin a fresh checkpoint with the marks of this one, "
                "pushrep marks import STORE --from-checkpoint DIR",
                event.id,
            )


class CountsListener(StreamingQueryListener):
    """Is called for every batch of every query of a session: `spark.streams.addListener(CountsListener(on_counts))`.

    Calls `on_counts(query id, counts)` for those with a filter of this name, and logs by name the pairs of which
    every row was dropped. It runs in the driver, some time after the batch.
    """

    def __init__(self, on_counts: Callable[[str, BatchCounts], Any] | None = None, *, metrics: str = METRICS) -> None:
        self._on_counts, self._metrics = on_counts, metrics
        self.counts: dict[str, FilterCounts] = {}
        """By query name (id, if it has none) since this listens: `pushrep.status.JobStatus` shows them."""

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        """Nothing to report yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        counts = operator_counts(json.loads(event.progress.json), self._metrics)
        if counts is None:
            return
        _LOG.info("%s", counts)
        warn_of(_LOG, f"batch {counts.batch_id}", counts)
        query = event.progress.name or str(event.progress.id)
        self.counts[query] = counts.added_to(self.counts.get(query))
        if self._on_counts is not None:
            self._on_counts(str(event.progress.id), counts)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        """The last batch reported all."""
