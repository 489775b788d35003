"""A filter's settings in Spark, what became of a batch's rows, and the warnings; the rule itself: filtering/rule.py."""

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pyspark.sql import Column, DataFrame

from filtering.errors import BadFilterSetting
from filtering.marks import HighwaterMarks, check_window
from filtering.replay_filter import FilterCounts, ReplayFilter
from spark_jobs.columns import CARRIERS, CarrierUnusable, SourcePosition, carrier_key

_NAMED_IN_LOG = 10
PARTITIONS_LIKELY = 1 << 20
OFFSETS_LIKELY = 1 << 53
"""No source has numbers as high; of random keys that parse, all but one in two million have one of them."""


def looks_unlikely(marks: HighwaterMarks) -> npt.NDArray[np.bool_]:
    """Which pairs no real source can have: their keys probably are metadata by chance."""
    columns = marks.to_columns()
    return (columns.partitions >= PARTITIONS_LIKELY) | (columns.offsets >= OFFSETS_LIKELY)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterRule:
    """How to filter. `carrier` key, header or a SourcePosition; `window` in offsets; `only_pids`: other PIDs pass.

    Raises CarrierUnusable, BadFilterSetting.
    """

    carrier: str | SourcePosition = "key"
    window: int = 0
    only_pids: frozenset[int] | None = None
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.carrier, SourcePosition):
            if self.window and self.carrier.is_tuple:
                raise BadFilterSetting("window", self.window, "0 where a position has several parts, and no distances")
        elif self.carrier not in CARRIERS:
            raise CarrierUnusable(self.carrier, "", f"there is no such carrier; use one of {', '.join(CARRIERS)}")
        check_window(self.window)
        if self.only_pids is not None:
            object.__setattr__(self, "only_pids", frozenset(self.only_pids))
        self.new_filter(HighwaterMarks())  # refuses the rest

    def new_filter(self, marks: HighwaterMarks) -> ReplayFilter:
        """A filter over these marks."""
        return ReplayFilter(marks, window=self.window, only_pids=self.only_pids, ttl_s=self.ttl_s)

    def key(self, df: DataFrame) -> Column:
        """The bytes of a row that may be metadata. Raises CarrierUnusable, PositionUnfit."""
        return self.carrier.key(df) if isinstance(self.carrier, SourcePosition) else carrier_key(self.carrier, df)

    @property
    def pid_condition(self) -> str:
        """Whether the column `pid` is one of `only_pids`, in SQL; true without any."""
        if self.only_pids is None:
            return "true"
        return f"pid in ({', '.join(map(str, sorted(self.only_pids)))})" if self.only_pids else "false"

    @property
    def may_be_chance(self) -> bool:
        """Whether bytes that a producer wrote for another purpose may be taken for metadata."""
        return not isinstance(self.carrier, SourcePosition)

    @property
    def counts_gaps(self) -> bool:
        """Whether missing source offsets of a pair are missing records."""
        return not (isinstance(self.carrier, SourcePosition) and self.carrier.is_tuple)


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What became of a batch's rows. rows = kept + dropped + unkeyed; late rows are among the dropped.

    `unkeyed` passed untouched: no metadata, or a PID outside of `only_pids`. `jumped`: source offsets that marks
    passed over, 0 as long as nothing is missing. `all_dropped`: (topic, pid, source partition) of pairs of which no row
    passed. `skipped`: the batch had been stored before, the handler was not called; kept and dropped are 0.
    `unlikely_pairs` name a source partition or offset that no source has, as business keys of 20 bytes do
    that are metadata by chance.
    """

    batch_id: int
    rows: int
    unkeyed: int
    pairs: int
    kept: int = 0
    dropped: int = 0
    late: int = 0
    jumped: int = 0
    all_dropped: tuple[tuple[str, int, int], ...] = ()
    skipped: bool = False
    unlikely_pairs: int = 0

    def added_to(self, before: FilterCounts | None) -> FilterCounts:
        """The sums of the batches before, with this one: what `pushrep.status.JobStatus` shows."""
        if self.skipped and before is not None:
            return before
        return FilterCounts(
            kept=self.kept,
            dropped=self.dropped,
            unkeyed=0 if self.skipped else self.unkeyed,
            other_pids=0,
            late=self.late,
            pairs=self.pairs,
            jumped=self.jumped,
        ).added_to(before)


def warn_of(log: logging.Logger, what: str, counts: BatchCounts) -> None:
    """Warn of pairs of which every row was dropped, and of business keys that are taken for metadata.

    what: whose counts they are.
    """
    if counts.all_dropped:
        log.warning(
            "%s: every row of %d (topic, pid, source partition) was dropped: %s%s; a part of the source that is "
            "read again looks like this, and so does a re-used PID, or a source that began again at offset 0",
            what,
            len(counts.all_dropped),
            list(counts.all_dropped[:_NAMED_IN_LOG]),
            " and more" if len(counts.all_dropped) > _NAMED_IN_LOG else "",
        )
    if counts.unlikely_pairs:
        log.warning(
            "%s: %d of %d (pid, source partition) name a source partition from %d or an offset from %d on, which no "
            "source has: business keys of 20 bytes look like this, and one that comes again, or out of order, is "
            "dropped. Name your producers (only_pids, --only-pid), or carry the metadata in a header",
            what,
            counts.unlikely_pairs,
            counts.pairs,
            PARTITIONS_LIKELY,
            OFFSETS_LIKELY,
        )


def warn_of_no_metadata(log: logging.Logger, counts: BatchCounts, carrier: str | SourcePosition) -> None:
    """Say that none of a batch's rows has metadata: then the filter does nothing at all."""
    log.warning(
        "batch %d: none of its %d records has stream metadata as carrier=%r: all of them pass, replayed or not",
        counts.batch_id,
        counts.rows,
        carrier,
    )
