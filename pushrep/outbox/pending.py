"""Waiting for batches that are on their way, and telling of one that failed and that nobody asked about."""

from collections.abc import Iterable, Sequence
from time import monotonic

from pushrep.outbox.batch import PendingBatch
from pushrep.outbox.errors import ReceiptTimeout
from pushrep.outbox.partition_appender import PartitionAppender


def pending_in(appenders: Iterable[PartitionAppender]) -> list[PendingBatch]:
    """Every batch that is not decided yet."""
    return [batch for appender in appenders for batch in appender.pending()]


def decided_by(deadline_s: float | None, batches: Iterable[PendingBatch]) -> bool:
    """Whether all are decided by then, on the monotonic clock; None: however long it takes."""
    return all(batch.wait(None if deadline_s is None else max(0.0, deadline_s - monotonic())) for batch in batches)


def raise_unseen_failure(appenders: Iterable[PartitionAppender]) -> None:
    """Raise `DeliveryFailed` for the first failure that no receipt was asked about; the others count as told."""
    failed = [batch for appender in appenders if (batch := appender.unseen_failure()) is not None]
    for batch in failed:
        batch.raise_failure()


def flush_appenders(appenders: Sequence[PartitionAppender], timeout: float | None) -> None:
    """Return when everything appended before is on disk. Raises `DeliveryFailed`, `ReceiptTimeout`, `LogClosed`."""
    for appender in appenders:
        appender.request_flush()
    deadline_s = None if timeout is None else monotonic() + timeout
    if not decided_by(deadline_s, pending_in(appenders)) and timeout is not None:
        raise ReceiptTimeout(timeout)
    raise_unseen_failure(appenders)
    for appender in appenders:
        appender.log.flush()
