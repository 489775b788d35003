"""What a leader or a candidate refuses, named for what the caller does next."""

from collections.abc import Mapping

from pushrep.errors import PushrepError


class ReplicationError(PushrepError):
    """The root of this room's errors."""


class NotLeader(ReplicationError):
    """Member `leader` leads by epoch `epoch`, or this one gave that lead up: go back in as a replica."""

    def __init__(self, leader: int, epoch: int, why: str = "") -> None:
        super().__init__(
            why or f"member {leader} leads since epoch {epoch}: this directory can go back in as its replica"
        )
        self.leader, self.epoch = leader, epoch


class RivalGenerations(NotLeader):
    """Two grants were forced independently: nobody can tell which history counts, so neither is led."""

    def __init__(self, leader: int, epoch: int, *, generation: int, rival: int) -> None:
        super().__init__(
            leader,
            epoch,
            f"a loss was accepted twice: here in generation {label(generation)}, by member {leader}, epoch {epoch}, in "
            f"{label(rival)}. Both are offline. Decide which one goes on, and run there: pushrep promote DIRECTORY "
            "--accept-loss; what the other one holds is set aside then",
        )
        self.generation, self.rival = generation, rival


def label(generation: int) -> str:
    """A generation as text: its number, and the random part that distinguishes it from others of that number."""
    return f"{generation >> 32}.{generation & 0xFFFFFFFF:08x}" if generation else "0"


class CantLead(ReplicationError):
    """This member does not lead as it is, and nobody was fenced; the message says why, and what to do."""


class CantStandBy(ReplicationError):
    """No standby can take over in this outbox as it is; the message says what is missing."""

    def __init__(self, why: str) -> None:
        super().__init__(f"nobody can stand by: {why}")
        self.why = why


class TooFewMembers(ReplicationError):
    """Of the `needed` members that a leader needs, only `answered` answered: bring back one of `silent`."""

    def __init__(self, *, answered: int, needed: int, silent: tuple[int, ...]) -> None:
        super().__init__(f"{answered} of {needed} needed members answered: bring back one of the members {silent}")
        self.answered, self.needed, self.silent = answered, needed, silent


class NotAhead(ReplicationError):
    """Another member holds more: promote `member`, or fetch its records first (`--catch-up`).

    own, theirs: (newest granted epoch in the log, its end offset) of partition `partition`. is_fenced: whether a number
    was taken before that was seen, so that the old leader leads no more.
    """

    def __init__(
        self,
        *,
        partition: int,
        own: tuple[int, int],
        member: int,
        theirs: tuple[int, int],
        is_fenced: bool = False,
    ) -> None:
        who_leads = "the leader until now is fenced, so nobody leads" if is_fenced else "nobody was fenced"
        super().__init__(
            f"partition {partition} ends at {own[1]} in epoch {own[0]} here, at {theirs[1]} in epoch {theirs[0]} at"
            f" member {member}: promote that one, or catch up first (--catch-up); {who_leads}"
        )
        self.partition, self.own, self.member, self.theirs = partition, own, member, theirs
        self.is_fenced = is_fenced


class LeaderMayBeAlive(ReplicationError):
    """Member `leader` may still lead by epoch `epoch`, so it was not deposed, and nobody was fenced.

    contacts: of the members that it was in contact with lately, how many milliseconds ago by their own clocks. silent:
    those that did not answer, and could be in contact with it.
    """

    def __init__(self, *, leader: int, epoch: int, contacts: Mapping[int, int], silent: tuple[int, ...]) -> None:
        heard = [
            f"member {index} was in contact with it, or started, {age_ms} ms ago"
            for index, age_ms in sorted(contacts.items())
        ]
        heard += [f"members {silent} did not answer"] if silent else []
        super().__init__(
            f"member {leader} may lead on by epoch {epoch}: {', '.join(heard)}. Nobody was fenced. End its service and "
            "try again some seconds later, or take the lead from it all the same: --depose"
        )
        self.leader, self.epoch, self.contacts, self.silent = leader, epoch, contacts, silent


FILLED_BY_ANOTHER = (
    "promote another member, which fills this one again. Where no other is left, pushrep promote DIRECTORY "
    "--accept-loss goes on without what it lost"
)


class LogNotFit(ReplicationError):
    """Partition `partition` of this member is damaged or was cut below its own high watermark; it says what helps."""

    def __init__(self, partition: int, why: str, remedy: str = FILLED_BY_ANOTHER) -> None:
        super().__init__(f"partition {partition} can't lead: {why}; {remedy}")
        self.partition, self.why = partition, why


class BadGrant(ReplicationError, ValueError):
    """A grant that contradicts itself; `why` names the field."""

    def __init__(self, why: str) -> None:
        super().__init__(f"no grant: {why}")
        self.why = why
