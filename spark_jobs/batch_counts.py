"""What became of a batch's rows, and what its owner must hear of. Pure: no Spark."""

import logging
from dataclasses import dataclass

_NAMED_IN_LOG = 10


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What became of a batch's rows. rows = kept + dropped + unkeyed; late rows are among the dropped.

    `unkeyed` passed untouched: no metadata, or a PID outside of `only_pids`. `jumped`: source offsets that marks
    passed over, 0 as long as nothing is missing. Where rows are judged one by one `kept`, `dropped`, `late` and
    `jumped` are None if the handler's first action did not read all rows, or there was none. `all_dropped`: (topic,
    pid, source partition) of pairs of which no row passed. `skipped`: the batch had been stored before, the handler was
    not called.
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
