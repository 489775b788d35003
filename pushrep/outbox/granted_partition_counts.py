"""How many partitions of a topic are used, in the grant: each member has it on disk before the first batch is sent.

Grant.destinations: (topic id, n) of each destination; of one that was repartitioned one after another, oldest first
"""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import UUID

from pushrep.errors import PushrepError
from pushrep.kafka.errors import NotPinned

if TYPE_CHECKING:
    from pushrep.election.grants import Grant
    from pushrep.outbox.replication import Replication

_LOG = logging.getLogger("pushrep.outbox")

Destinations = tuple[tuple[UUID, int], ...]


class GrantedPartitionCounts:
    """pushrep.kafka.partition_counts.FixedPartitionCounts over the members of an open outbox."""

    def __init__(self, replication: "Replication") -> None:
        self._replication = replication

    def known(self, topic_id: UUID) -> tuple[int, ...]:
        """As in the grant by which it leads. Raises NotPinned while it does not lead."""
        return tuple(count for one, count in self._grant().destinations if one == topic_id)

    def keep(self, topic_id: UUID, partitions: tuple[int, ...]) -> None:
        """A new grant that says so, unless the grant does already. Raises NotPinned."""
        replication = self._replication
        if self.known(topic_id) == partitions:
            return
        if not replication.own_appenders:
            raise NotPinned("the outbox is not open yet")
        try:
            with replication.step_lock:
                replication.change_members(
                    lambda newest, epoch: replace(
                        newest.renewed(epoch, newest.leader),
                        destinations=_with(newest.destinations, topic_id, partitions),
                    )
                )
        except (PushrepError, OSError) as error:
            raise NotPinned(str(error)) from error

    def _grant(self) -> "Grant":
        grant = self._replication.grant
        if grant is None:
            raise NotPinned("too few members answer")
        return grant


class GrantedLeadership:
    """pushrep.kafka.fencing.Leadership over the members of an open outbox."""

    has_members = True

    def __init__(self, replication: "Replication") -> None:
        self._replication = replication

    def is_newest(self) -> bool:
        """Whether enough members answer, and none keeps a newer grant than the one that this outbox leads by."""
        try:
            return self._replication.leads_by_the_newest_grant()
        except (PushrepError, OSError) as error:
            _LOG.warning("whether this outbox leads by the newest grant can't be found out: %s", error)
            return False


def _with(known: Destinations, topic_id: UUID, partitions: tuple[int, ...]) -> Destinations:
    others = tuple(one for one in known if one[0] != topic_id)
    return (*others, *((topic_id, count) for count in partitions))
