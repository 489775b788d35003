"""What all lanes of an outbox share."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from pushrep.outbox.batch import Batch
from pushrep.outbox.budget import Budget
from pushrep.outbox.identity import OutboxIdentity
from pushrep.outbox.settings import OutboxSettings
from pushrep.seams import Clock

if TYPE_CHECKING:
    from pushrep.outbox.lane import Lane


class Shared(NamedTuple):
    """`ready(lane)` calls a writer, `opened(batch)` tells the sealer."""

    identity: OutboxIdentity
    pid: int
    settings: OutboxSettings
    budget: Budget
    clock: Clock
    ready: Callable[["Lane"], None]
    opened: Callable[[Batch], None]
