"""What all appenders of an outbox share."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from pushrep.env import Clock
from pushrep.outbox.batch import PendingBatch
from pushrep.outbox.budget import Budget
from pushrep.outbox.identity import OutboxIdentity
from pushrep.outbox.settings import OutboxSettings

if TYPE_CHECKING:
    from pushrep.outbox.partition_appender import PartitionAppender


class Shared(NamedTuple):
    """`ready(appender)` calls a writer, `opened(batch)` tells the linger timer."""

    identity: OutboxIdentity
    pid: int
    settings: OutboxSettings
    budget: Budget
    clock: Clock
    ready: Callable[["PartitionAppender"], None]
    opened: Callable[[PendingBatch], None]
