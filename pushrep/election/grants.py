"""Who leads an outbox, by ballot: epochs, grants, and how many members have to store one.

    N members, m = min_insync_replicas, the leader counted in both

    acknowledged   m of N hold it        N - m + 1 stored the grant     lead
                   |== m ==========|
                         |======= N - m + 1 ====|        any two such sets meet in a member, which holds the record and
                                                         refuses older leaders: the new one finds it there

A grant that changes the list or m also has the list before, and needs enough members of both (a joint grant) until
`may_settle`; the next grant then has the new list alone. If the list before is one member, as after a forced grant
(below), that one leads alone until then: the others are empty at first and don't count. Everything that is acknowledged
meanwhile is on that member, too.

A member is a directory: the grant has its id, and an answer with another id does not count. A member with a new disk is
filled first. Then a joint grant names the new directory beside the old one (`entering`). Acknowledgements count the new
directory as soon as nobody can lead with the old one any more, because enough members have stored that grant
(`may_enter`). `judge_grant` is a member's answer to a grant: stored, or why not.

A forced grant follows an accepted loss: no other member agrees to it. It begins a generation, which is compared before
everything else, and its leader leads alone as above. Logs of an older generation are another history: a member that
stores a grant of a higher one sets its logs aside first, and begins anew as unfilled.

    generation   | number: 31 bits | 32 random bits |     two forced grants of one number are rivals: neither knew of
                                                          the other, and a node that meets both goes offline
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from pushrep.election.epochs import NO_EPOCH
from pushrep.election.errors import BadGrant, TooFewMembers
from pushrep.records.leader_epochs import EPOCH_MAX
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.values import Count, Counter, Epoch, MemberIndex, Struct, TimeMs

BALLOT_STRIDE = 256
"""Member i takes only epochs that are i modulo this, so that no two members ever take the same."""
EPOCH_LEAP = 1 << 19
"""The epoch of a grant that names a new directory is so far above every epoch that was seen. The old directory may have
led alone by epochs that no other member heard of (2,048 openings); the new directory must take none of them again."""
EPOCH_JUMP_MAX = 1 << 20
"""The largest step between two epochs that a member hears of one after the other under one list of members: 4,096
openings. The sender of a larger step is broken, or of another outbox."""
LIST_JUMP_MAX = 128 * EPOCH_LEAP
"""The largest step to an epoch of another list: up to 128 directories may be replaced while the member is away."""
LISTS_MAX = 32
"""How many earlier lists a grant has at most, as it is in many answers. Nobody changes the list more often while one
member is away."""
GENERATION_TAG_BITS = 32
"""The lower half of a generation is random."""


@dataclass(frozen=True, slots=True, order=True)
class Member(Struct):
    """A member of an outbox: an index that is never used again, and its address (empty: it does not listen).
    directory_id: of the directory that counts as this member; None if the grant has none. identity: the name in its
    node's certificate; a client of that name may lead the outbox, too. Empty if the grant has none.
    """

    index: MemberIndex
    address: str = ""
    directory_id: UUID | None = None
    identity: str = ""


def default_min_insync(members: int) -> int:
    """More than half, the leader counted."""
    return members // 2 + 1


@dataclass(frozen=True, slots=True)
class Quorum:
    """N members and m = min_insync_replicas, from which all other numbers follow."""

    members: frozenset[int]
    min_insync_replicas: int

    @property
    def to_lead(self) -> int:
        """N - m + 1 members: they share a member with any m."""
        return len(self.members) - self.min_insync_replicas + 1

    @property
    def to_change(self) -> int:
        """How many have to store a list that replaces this one.

        As many as lead are not enough: with an even N two leading sets may be disjoint (4 members, m = 3: two and two),
        and one without the new list would lead by the old. m members share a member with every leading set.
        """
        return max(self.to_lead, self.min_insync_replicas)

    @property
    def to_take_over(self) -> int:
        """How many a standby needs: with a high m few are enough to lead, and two parts of a cut network could depose
        each other. Two majorities always share a member.
        """
        return max(self.to_lead, len(self.members) // 2 + 1)


@dataclass(frozen=True, slots=True, order=True)
class Hold(Struct):
    """An operator's request that no standby takes over before `until_ms`. epoch: of its grant.

    Wall clock, ms since 1970. An ended hold has `until_ms` = `since_ms`.
    """

    epoch: Epoch
    since_ms: TimeMs
    until_ms: TimeMs
    reason: str


@dataclass(frozen=True, slots=True, order=True)
class Destination(Struct):
    """A Kafka topic that the outbox ships to, and how many of its partitions are used in this PID epoch."""

    topic_id: UUID
    partitions: Count


@dataclass(frozen=True, slots=True, order=True)
class Takeover(Struct):
    """The last takeover by a standby: its grant's epoch, and its wall clock time, ms since 1970."""

    epoch: Epoch
    ms: TimeMs


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledList(Struct):
    """A list of members that was in force alone once: their indexes, which are never used again."""

    members: tuple[Member, ...]

    @property
    def indexes(self) -> frozenset[int]:
        """The members."""
        return frozenset(one.index for one in self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant(Struct):
    """A leader by name and number, as a member stores and says it. Raises BadGrant if it contradicts itself.

    members_epoch: of the grant that first named these lists; a renewal keeps it, a change takes its own number.
    previous_members, previous_min_insync_replicas: of a joint grant, else empty and 0.
    next_index: the lowest index that no member ever had; the grant raises it above its members' indexes by itself.
    destinations: of one that was repartitioned, oldest first. accepted_loss: what an operator was shown and accepted.
    generation: of the last forced grant, 0 where there was none (`next_generation`). hold, takeover: the newest ones,
    which every later grant carries (`base_of`). lists: the settled lists of this generation before this one, the newest
    LISTS_MAX of them, oldest first: a member that was away knows its own one among them.
    """

    outbox_id: UUID
    epoch: Epoch
    leader: MemberIndex
    members: tuple[Member, ...]
    min_insync_replicas: Count
    members_epoch: Epoch
    pid_epoch: Count
    topic_id: UUID
    topic: str
    partitions: Count
    carrier: str
    destinations: tuple[Destination, ...] = ()
    accepted_loss: str = ""
    previous_members: tuple[Member, ...] = ()
    previous_min_insync_replicas: Count = 0
    next_index: Count = 0
    generation: Counter = 0
    hold: Hold | None = None
    takeover: Takeover | None = None
    lists: tuple[SettledList, ...] = ()
    quorums: tuple[Quorum, ...] = field(init=False, repr=False, compare=False)
    """The quorums that all have to agree: one, two while the list changes."""
    indexes: frozenset[int] = field(init=False, repr=False, compare=False)
    """The members of both lists."""

    def __post_init__(self) -> None:
        if why := _contradiction(self):
            raise BadGrant(why)
        Struct.__post_init__(self)
        lists = [(self.members, self.min_insync_replicas)]
        if self.previous_members:
            lists.append((self.previous_members, self.previous_min_insync_replicas))
        quorums = tuple(Quorum(frozenset(one.index for one in members), m) for members, m in lists)
        object.__setattr__(self, "quorums", quorums)  # read with every acknowledgement
        object.__setattr__(self, "indexes", frozenset().union(*(quorum.members for quorum in quorums)))
        object.__setattr__(self, "next_index", max(self.next_index, 1 + max(self.indexes)))

    @property
    def rank(self) -> tuple[int, int]:
        """The order of grants: the one of the greater rank is newer."""
        return self.generation, self.epoch

    @property
    def entering(self) -> frozenset[int]:
        """Members with a new directory: their acknowledgements do not count before the change is settled."""
        before = {one.index: one.directory_id for one in self.previous_members}
        return frozenset(
            one.index for one in self.members if one.index in before and before[one.index] != one.directory_id
        )

    @property
    def nameless(self) -> frozenset[int]:
        """Members without a directory in the grant: they count by their index alone, until a grant names one."""
        return frozenset(one.index for one in self.members if one.directory_id is None)

    def directory_of(self, index: int) -> UUID | None:
        """The directory that counts as this member; None without one, or without such a member."""
        members = (*self.members, *self.previous_members)
        return next((one.directory_id for one in members if one.index == index), None)

    def names(self, directory_id: UUID | None) -> bool:
        """Whether that directory counts as a member by its id."""
        return directory_id is not None and any(one.directory_id == directory_id for one in self.members)

    def is_member(self, index: int, directory_id: UUID | None) -> bool:
        """Whether a node with this directory (None: it shows none) counts as that member."""
        named = self.directory_of(index)
        return named is None or named == directory_id

    def index_at(self, address: str) -> int:
        """The member that listens at `address`; -1 if none does."""
        members = (*self.members, *self.previous_members)
        return next((member.index for member in members if member.address == address), -1)

    @property
    def is_led_alone(self) -> bool:
        """Whether the list before is one member, which leads alone until enough of the new list hold its records."""
        return len(self.previous_members) == 1

    def too_few_to_lead(self, stored: AbstractSet[int]) -> TooFewMembers | None:
        """Why the members that stored the grant are not enough to lead by it; None if they are."""
        return self._too_few(self._deciding, stored, [quorum.to_lead for quorum in self._deciding])

    def too_few_to_take_over(self, stored: AbstractSet[int]) -> TooFewMembers | None:
        """Why they are not enough for a standby to lead, and for a leader to know that it still leads."""
        return self._too_few(self._deciding, stored, [quorum.to_take_over for quorum in self._deciding])

    def too_few_to_change(self, stored: AbstractSet[int]) -> TooFewMembers | None:
        """Why they are not enough to store a list that replaces the present ones."""
        return self._too_few(self.quorums, stored, [quorum.to_change for quorum in self.quorums])

    @property
    def _deciding(self) -> tuple[Quorum, ...]:
        return self.quorums[1:] if self.is_led_alone else self.quorums

    @staticmethod
    def _too_few(quorums: Sequence[Quorum], stored: AbstractSet[int], needed: Sequence[int]) -> TooFewMembers | None:
        """The quorum that lacks most; None if none lacks a member."""
        pairs = zip(quorums, needed, strict=True)
        short, least = max(pairs, key=lambda pair: pair[1] - len(pair[0].members & stored))
        answered, silent = len(short.members & stored), tuple(sorted(short.members - stored))
        return None if answered >= least else TooFewMembers(answered=answered, needed=least, silent=silent)

    def may_acknowledge(self, in_sync: AbstractSet[int]) -> bool:
        """Whether records that all of `in_sync` hold survive the loss of any m - 1 members."""
        if self.is_led_alone:  # else an acknowledgement would depend on one member
            return all(len(quorum.members & in_sync) >= quorum.to_change for quorum in self.quorums)
        return all(len(quorum.members & in_sync) >= quorum.min_insync_replicas for quorum in self.quorums)

    def may_settle(self, stored: AbstractSet[int], holding: AbstractSet[int]) -> bool:
        """Whether a joint grant may be followed by one with the new list alone. stored: the members that stored it.

        holding: those that hold everything below the high watermark.
        """
        new, *old = self.quorums
        if entering := self.entering:
            return entering <= stored & holding and self.may_enter(stored - entering)
        return (
            bool(old)
            and all(len(quorum.members & stored) >= quorum.to_lead for quorum in self.quorums)
            and all(len(quorum.members & stored) >= quorum.to_change for quorum in old)
            and len(new.members & holding) >= new.min_insync_replicas
        )

    def may_enter(self, others: AbstractSet[int]) -> bool:
        """Whether a member may come in with another directory, after these others have stored that grant: nobody can
        lead with the old directory any more.

        A leader with the old directory needs N - m of the N - 1 others. If m of them refuse, only N - 1 - m are left.
        N - m others and the new directory are as many as lead. There are at most N - 1 others: with m = N the old
        directory leads alone, and nobody can refuse it.
        """
        n, m = len(self.members), self.min_insync_replicas
        return len(self.quorums[0].members & others) >= min(n - 1, max(m, n - m))

    def renewed(self, epoch: int, leader: int) -> "Grant":
        """The grant with another epoch, for the same or another leader; without the accepted loss."""
        return replace(self, epoch=epoch, leader=leader, accepted_loss="")

    @property
    def hold_epoch(self) -> int:
        """The epoch of the grant that set the hold; -1 without a hold."""
        return NO_EPOCH if self.hold is None else self.hold.epoch

    def is_refused_after(self, kept: "Grant") -> bool:
        """Whether a member that keeps `kept`, of the same generation, refuses this one: it has an older epoch or member
        list, as of a candidate that looked before the list changed, or an older hold, which a takeover would end.
        """
        return self.epoch < kept.epoch or self.members_epoch < kept.members_epoch or self.hold_epoch < kept.hold_epoch

    def held(self, epoch: int, *, since_ms: int, until_ms: int, reason: str) -> "Grant":
        """The next grant, with a hold until `until_ms`; if that is `since_ms`, it ends the present hold."""
        return replace(self.renewed(epoch, self.leader), hold=Hold(epoch, since_ms, until_ms, reason))

    def with_partitions_of(self, epoch: int, topic_id: UUID, partitions: tuple[int, ...]) -> "Grant":
        """The next grant, with these partition counts of a topic: several, if it was repartitioned."""
        others = (one for one in self.destinations if one.topic_id != topic_id)
        destinations = (*others, *(Destination(topic_id, count) for count in partitions))
        return replace(self.renewed(epoch, self.leader), destinations=destinations)

    def with_members(self, epoch: int, members: tuple[Member, ...], min_insync_replicas: int | None = None) -> "Grant":
        """The joint grant that begins a change of the list; None: the default m. One member at a time, or BadGrant."""
        if self.previous_members:
            raise BadGrant("the last change of members is not settled yet")
        changed = {member.index for member in members} ^ {member.index for member in self.members}
        if len(changed) > 1:
            raise BadGrant(f"members change one at a time, not {sorted(changed)}")
        return self._changed(
            epoch,
            members=members,
            min_insync_replicas=min_insync_replicas or default_min_insync(len(members)),
            previous_members=self.members,
            previous_min_insync_replicas=self.min_insync_replicas,
        )

    def with_directory(self, epoch: int, index: int, directory_id: UUID) -> "Grant":
        """The joint grant by which a member that was filled comes in with another directory; its epoch is EPOCH_LEAP
        above `epoch`. BadGrant while another change is not settled.
        """
        if self.previous_members and self.entering != {index}:
            raise BadGrant("the last change of members is not settled yet")
        return replace(
            self.with_names(epoch + EPOCH_LEAP, {index: directory_id}),
            previous_members=self.previous_members or self.members,
            previous_min_insync_replicas=self.previous_min_insync_replicas or self.min_insync_replicas,
        )

    def without_address(self, epoch: int, index: int) -> "Grant":
        """The same members, this one without its address, so that its node may become another member."""
        members = tuple(replace(one, address="", identity="") if one.index == index else one for one in self.members)
        return replace(self.renewed(epoch, self.leader), members=members)

    def with_names(self, epoch: int, directories: Mapping[int, UUID]) -> "Grant":
        """The next grant, with directories of members that had none and were filled by the leader. They count as
        before.
        """
        members = tuple(replace(one, directory_id=directories.get(one.index, one.directory_id)) for one in self.members)
        return self._changed(epoch, members=members)

    def with_identities(self, identities: Mapping[int, str]) -> "Grant":
        """The grant, with the identities in members' certificates; only for members with a directory."""
        return replace(
            self,
            members=tuple(
                one if one.directory_id is None else replace(one, identity=identities.get(one.index, one.identity))
                for one in self.members
            ),
        )

    def forced(  # noqa: PLR0913 - what a loss changes
        self,
        epoch: int,
        leader: int,
        generation: int,
        *,
        members: tuple[Member, ...],
        min_insync_replicas: int,
        reached: AbstractSet[int] = frozenset(),
    ) -> "Grant":
        """The grant after an accepted loss: `leader` leads alone until enough of `members` hold its records.

        reached: the members that showed their directories; other members' may have been replaced.
        """
        known = {leader, *reached}
        listed = tuple(one if one.index in known else Member(one.index, one.address) for one in members)
        return replace(
            self,
            epoch=epoch,
            members_epoch=epoch,
            leader=leader,
            generation=generation,
            members=listed,
            min_insync_replicas=min_insync_replicas,
            previous_members=tuple(one for one in listed if one.index == leader) if len(listed) > 1 else (),
            previous_min_insync_replicas=int(len(listed) > 1),
            lists=(),  # a member of an older generation takes this grant, whatever its own list is
        )

    def settled(self, epoch: int) -> "Grant":
        """The next grant, with the new list alone; allowed once `may_settle`."""
        before = SettledList(members=tuple(Member(one.index) for one in self.previous_members))
        is_another = not self.is_led_alone and before.indexes != self.quorums[0].members
        lists = (*self.lists, before)[-LISTS_MAX:] if is_another else self.lists
        return self._changed(epoch, previous_members=(), previous_min_insync_replicas=0, lists=lists)

    def _changed(self, epoch: int, **changes: Any) -> "Grant":
        """The next grant with other lists: its epoch is their `members_epoch`."""
        return replace(self, epoch=epoch, members_epoch=epoch, accepted_loss="", **changes)


def next_ballot(index: int, highest_seen: int) -> int:
    """The next epoch of member `index`: one of its own, above `highest_seen`."""
    return highest_seen + 1 + (index - highest_seen - 1) % BALLOT_STRIDE


def owner_of(epoch: int) -> int:
    """The index of the member that this epoch belongs to."""
    return epoch % BALLOT_STRIDE


def may_have_lost(before: Grant | None, grant: Grant, directory_id: UUID | None, *, is_first: bool) -> bool:
    """Whether a member that stores `grant` may have lost its disk, with records and promises: it has no grant from
    before. Unless `grant` names its directory, it counts once it was filled. is_first: nothing was ever acknowledged.
    """
    return before is None and not is_first and not grant.names(directory_id)


def newest_of(grants: Iterable[Grant | None]) -> Grant | None:
    """The grant of the greatest rank; None without any."""
    return max((one for one in grants if one is not None), key=lambda grant: grant.rank, default=None)


def base_of(grants: Iterable[Grant | None]) -> Grant | None:
    """The grant that the next one is made from: the one with the newest member lists. It gets the newest hold and the
    newest takeover of all grants. None without any grant.
    """
    shown = [one for one in grants if one is not None]
    if not shown:
        return None
    base = max(shown, key=lambda grant: (grant.generation, grant.members_epoch, grant.epoch))
    hold = max((one.hold for one in shown if one.hold is not None), default=None)
    takeover = max((one.takeover for one in shown if one.takeover is not None), default=None)
    return base if (hold, takeover) == (base.hold, base.takeover) else replace(base, hold=hold, takeover=takeover)


def hold_of(grant: Grant | None, wall_ms: int) -> Hold | None:
    """The hold of a grant, if it still lasts; None if there is none, it was ended or it is over."""
    return None if grant is None or grant.hold is None or grant.hold.until_ms <= wall_ms else grant.hold


def next_generation(newest: int, tag: int) -> int:
    """The generation of a forced grant, above the newest one seen. tag: GENERATION_TAG_BITS random bits."""
    return (newest >> GENERATION_TAG_BITS) + 1 << GENERATION_TAG_BITS | tag


def are_rivals(generation: int, other: int) -> bool:
    """Whether two generations were forced independently, so that nobody can tell which history counts."""
    return generation != other and generation >> GENERATION_TAG_BITS == other >> GENERATION_TAG_BITS


class OfferedGrant(NamedTuple):
    """A received grant, and the local state. leader_epoch: the newest one accepted in any log, -1 for none.

    is_unfilled: this directory is a copy, or lacks what its member held: it counts for nothing, so it takes any newer
    grant.
    """

    offered: Grant
    sender: int
    kept: Grant | None
    leader_epoch: int
    is_unfilled: bool = False

    @property
    def begins_generation(self) -> bool:
        """Whether it has a higher generation: then earlier promises do not bind."""
        return self.kept is not None and self.offered.generation > self.kept.generation

    @property
    def newest_epoch(self) -> int:
        """The newest epoch known here: older ones are refused."""
        return max(self.leader_epoch, self.kept.epoch if self.kept else NO_EPOCH)

    @property
    def is_strangers(self) -> bool:
        """Whether the sender is in no list that is known here, and its own lists do not go on from one of these."""
        if self.kept is None or self.is_unfilled or self.sender in self.kept.indexes:
            return False
        went_on_from = {listed.indexes for listed in self.offered.lists}
        went_on_from |= {quorum.members for quorum in self.offered.quorums}
        return went_on_from.isdisjoint(quorum.members for quorum in self.kept.quorums)

    @property
    def jumps(self) -> bool:
        """Whether its epoch is further above the newest one than a healthy sender can be ahead. Not measurable without
        a grant here.
        """
        if self.kept is None or self.is_unfilled:
            return False
        is_same_list = self.offered.members_epoch == self.kept.members_epoch
        return self.offered.epoch - self.newest_epoch > (EPOCH_JUMP_MAX if is_same_list else LIST_JUMP_MAX)


GrantCheck: TypeAlias = tuple[ErrorCode, Callable[[OfferedGrant], bool]]
"""A reason to refuse a grant: the answer, and whether it holds."""


_FIXED_AT_CREATION = ("outbox_id", "topic_id", "topic", "partitions", "carrier")
GENERATION_CHECKS: tuple[GrantCheck, ...] = (
    (
        ErrorCode.INCONSISTENT_OUTBOX,
        lambda case: (
            case.kept is not None
            and any(getattr(case.kept, name) != getattr(case.offered, name) for name in _FIXED_AT_CREATION)
        ),
    ),
    (
        ErrorCode.INCONSISTENT_OUTBOX,
        lambda case: case.kept is not None and are_rivals(case.kept.generation, case.offered.generation),
    ),
    (
        ErrorCode.FENCED_LEADER_EPOCH,
        lambda case: case.kept is not None and case.offered.generation < case.kept.generation,
    ),
)
"""The first checks; after them a grant that begins a generation is judged as if no grant was stored."""
GRANT_CHECKS: tuple[GrantCheck, ...] = (
    (ErrorCode.NOT_A_MEMBER, lambda case: case.is_strangers),
    (ErrorCode.FENCED_LEADER_EPOCH, lambda case: case.offered.epoch < case.newest_epoch),
    (
        ErrorCode.FENCED_LEADER_EPOCH,
        lambda case: case.kept is not None and case.offered.is_refused_after(case.kept),
    ),
    (ErrorCode.IMPOSSIBLE_EPOCH, lambda case: case.offered.leader != case.sender),
    (
        ErrorCode.IMPOSSIBLE_EPOCH,  # one epoch has one grant
        lambda case: case.kept is not None and case.offered.epoch == case.kept.epoch and case.offered != case.kept,
    ),
    (ErrorCode.IMPOSSIBLE_EPOCH, lambda case: case.jumps),
)
"""The checks, in this order; a grant that passes all is stored, on disk before the answer."""


def judge_grant(case: OfferedGrant) -> ErrorCode:
    """The answer to a grant. NONE: store the grant, unless it is stored already, then answer. Another: answer with the
    stored grant.
    """
    if (refused := _first_refusal(GENERATION_CHECKS, case)) is not ErrorCode.NONE:
        return refused
    return _first_refusal(GRANT_CHECKS, case._replace(kept=None, leader_epoch=-1) if case.begins_generation else case)


def _first_refusal(checks: tuple[GrantCheck, ...], case: OfferedGrant) -> ErrorCode:
    return next((error for error, refuses in checks if refuses(case)), ErrorCode.NONE)


def _contradiction(grant: Grant) -> str | None:
    if not 0 <= grant.epoch <= EPOCH_MAX or owner_of(grant.epoch) != grant.leader:
        return f"epoch {grant.epoch} is not member {grant.leader}'s to take"
    if grant.members_epoch > grant.epoch:
        return f"members_epoch {grant.members_epoch} lies above epoch {grant.epoch}"
    lists = [(grant.members, grant.min_insync_replicas)]
    if grant.previous_members:
        lists.append((grant.previous_members, grant.previous_min_insync_replicas))
    for members, min_insync in lists:
        indexes = {member.index for member in members}
        if len(indexes) != len(members):
            return f"each member index stands once in a list: {sorted(m.index for m in members)}"
        directories = [member.directory_id for member in members if member.directory_id is not None]
        if len(set(directories)) != len(directories) or not 1 <= min_insync <= len(members):
            return (
                f"min_insync_replicas = {min_insync} of {len(members)} members in {len(set(directories))} directories"
            )
    if all(member.index != grant.leader for member in grant.members):
        return f"leader {grant.leader} is no member"
    return None
