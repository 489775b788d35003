"""What a leader or a candidate refuses, named for what the caller does next."""

from collections.abc import Mapping

from pushrep.errors import PushrepError


class ReplicationError(PushrepError):
    """The root of this room's errors."""


class NotLeader(ReplicationError):
    """Member `leader` was granted epoch `epoch`: this directory can go back in as a replica of it."""

    def __init__(self, leader: int, epoch: int) -> None:
        super().__init__(f"member {leader} leads since epoch {epoch}: this directory can go back in as its replica")
        self.leader, self.epoch = leader, epoch


class LeadGivenUp(NotLeader):
    """This member gave up its lead of epoch `epoch`, so that another may have it; `why` says what it could not do."""

    def __init__(self, leader: int, epoch: int, why: str) -> None:
        super().__init__(leader, epoch)
        self.args = (f"member {leader} gave up its lead of epoch {epoch}: {why}",)
        self.why = why


class OlderGeneration(NotLeader):
    """Grants were forced while this directory was away: its records are kept aside, and it is filled as a replica of
    member `leader`. generation, newest: its own, and the one that another member showed.
    """

    def __init__(self, leader: int, epoch: int, *, generation: int, newest: int) -> None:
        super().__init__(leader, epoch)
        why = (
            f"this directory is of generation {label(generation)}, member {leader} leads in {label(newest)} since a "
            "loss was accepted: it can go back in as a replica, which sets aside what it holds and is given everything"
        )
        self.args = (why,)
        self.generation, self.newest = generation, newest


class RivalGenerations(NotLeader):
    """Two grants were forced independently: nobody can tell which history counts, so neither is led."""

    def __init__(self, leader: int, epoch: int, *, generation: int, rival: int) -> None:
        super().__init__(leader, epoch)
        why = (
            f"a loss was accepted twice: here in generation {label(generation)}, by member {leader}, epoch {epoch}, in "
            f"{label(rival)}. Both are offline. Decide which one goes on, and run there: pushrep promote DIRECTORY "
            "--accept-loss; what the other one holds is set aside then"
        )
        self.args = (why,)
        self.generation, self.rival = generation, rival


def label(generation: int) -> str:
    """A generation as text: its number, and the random part that distinguishes it from others of that number."""
    return f"{generation >> 32}.{generation & 0xFFFFFFFF:08x}" if generation else "0"


class CantStandBy(ReplicationError):
    """No standby can take over in this outbox as it is; `why` says what is missing."""

    def __init__(self, why: str) -> None:
        super().__init__(f"nobody can stand by: {why}")
        self.why = why


class TakeoverHeld(ReplicationError):
    """No standby may take over now, because of a hold or the pause after a takeover; nobody was fenced."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; nobody was fenced")
        self.why = why


class NotAMember(ReplicationError):
    """Member `member` was removed by the grant of epoch `epoch`: it can't lead; add it again under a new index."""

    def __init__(self, member: int, epoch: int) -> None:
        super().__init__(f"member {member} was removed by epoch {epoch}: add this directory again under a new index")
        self.member, self.epoch = member, epoch


class AnotherDirectory(ReplicationError):
    """This directory is not the one that the grant of epoch `epoch` names as member `member`: its disk is new, or it
    is a copy. It does not lead; as a node's, the leader fills it.
    """

    def __init__(self, member: int, epoch: int) -> None:
        super().__init__(
            f"this is not the directory that counts as member {member} since epoch {epoch}: its disk is new, or it is "
            "a copy. Promote another member; this one is filled by that, below its node"
        )
        self.member, self.epoch = member, epoch


class MemberTwice(ReplicationError):
    """The addresses of members `first` and `second` lead to one directory: it would count twice."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(
            f"MEMBER_TWICE: the addresses of members {first} and {second} lead to one directory, whose disk would "
            "count twice: give each member an address of its own"
        )
        self.first, self.second = first, second


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
