"""What became of a batch's rows, and what its owner must hear of. Pure: no Spark."""

import logging
from dataclasses import dataclass

_NAMED_IN_LOG = 10
PARTITIONS_LIKELY = 1 << 20
OFFSETS_LIKELY = 1 << 53
"""No source has such partitions or offsets; of random keys that parse, all but one in two million have one of them."""


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What became of a batch's rows. rows = kept + dropped + unkeyed; late rows are among the dropped.

    `unkeyed` passed untouched: no metadata, or a PID outside of `only_pids`. `jumped`: source offsets that marks
    passed over, 0 as long as nothing is missing. Where rows are judged one by one `kept`, `dropped`, `late` and
    `jumped` are None if the handler's first action did not read all rows, or there was none. `all_dropped`: (topic,
    pid, source partition) of pairs of which no row passed. `skipped`: the batch had been stored before, the handler was
    not called. `unlikely_pairs` name a source partition or offset that no source has, as business keys of 20 bytes do
    that are metadata by chance.
    """

    batch_id: int
    rows: int
    unkeyed: int
    pairs: int
    kept: int | None = None
    dropped: int | None = None
    late: int | None = None
    jumped: int | None = None
    all_dropped: tuple[tuple[str, int, int], ...] = ()
    skipped: bool = False
    unlikely_pairs: int = 0


def warn_of_silent_pairs(log: logging.Logger, counts: BatchCounts) -> None:
    """Name the pairs of which every row was dropped, loudly."""
    if counts.all_dropped:
        log.warning(
            "batch %d: every row of %d (topic, pid, source partition) was dropped: %s%s; a replayed stretch looks "
            "like this, and so does a re-used PID or a source that began again at offset 0",
            counts.batch_id,
            len(counts.all_dropped),
            list(counts.all_dropped[:_NAMED_IN_LOG]),
            " and more" if len(counts.all_dropped) > _NAMED_IN_LOG else "",
        )


def warn_of_no_metadata(log: logging.Logger, counts: BatchCounts, carrier: str) -> None:
    """Say that none of a batch's rows has metadata: then the filter does nothing at all."""
    log.warning(
        "batch %d: none of its %d records has stream metadata as carrier=%r: all of them pass, replayed or not",
        counts.batch_id,
        counts.rows,
        carrier,
    )


def warn_of_chance_keys(log: logging.Logger, what: str, pairs: int, unlikely: int) -> None:
    """Say that business keys are taken for metadata: each that comes twice would be dropped."""
    if unlikely:
        log.warning(
            "%s: %d of %d (pid, source partition) name a source partition from %d or an offset from %d on, which no "
            "source has: business keys of 20 bytes look like this, and one that comes again, or out of order, is "
            "dropped. Name your producers (only_pids, --only-pid), or carry the metadata in a header",
            what,
            unlikely,
            pairs,
            PARTITIONS_LIKELY,
            OFFSETS_LIKELY,
        )
