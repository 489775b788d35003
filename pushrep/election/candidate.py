"""How a member comes to lead: an opening that renews its own grant, or a promotion that takes another's.

    LOOKING ──enough answered──▶ GRANTING ──enough stored──▶ CATCHING_UP ──all fetched──▶ LEADING
       │                            │ a newer grant             │
       └────────────────────────────┴───────────────────────────┴──▶ REFUSED (with an error that says what to do)

LOOKING asks and compares before an epoch is taken, so that a promotion that can't succeed fences nobody: one that is
not ahead of all answering members, or whose leader may be alive. A leader may be alive if it, the members that were in
contact with it lately and those that did not answer are together enough to acknowledge. A leader's own node answers
only while no service has the directory: then that leader is not alive. A member that can't tell counts as one without
contact.
A member with a grant of an older generation does not count, and a candidate with one is refused: their logs are another
history. A member without a grant does not count, because its disk may have been lost with its records and promises;
unless the grant names its directory, or nothing was ever acknowledged. A member that gets its first grant later, or
begins anew in another generation, answers `is_unfilled` until it has been given everything. A member counts only with
the directory that the grant names. The first grant takes the directories from the look, which waits for all members;
every later grant keeps them. GRANTING stores epoch and grant on its own disk before anybody else sees them. A member's
answer counts once it has stored this grant: from then on no older leader can add to the records that it showed.
CATCHING_UP fetches, for every partition, the records that only the member ahead has, and flushes them. So the leader
holds every record that m members held.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple, TypeAlias
from uuid import UUID

from pushrep.election.epochs import (
    EpochEnd,
    LogEnds,
    Unfenced,
    common_end,
    granted_end,
    without_unfenced,
)
from pushrep.election.errors import (
    CantLead,
    LeaderMayBeAlive,
    LogNotFit,
    NotAhead,
    NotLeader,
    ReplicationError,
    RivalGenerations,
    TooFewMembers,
    label,
)
from pushrep.election.follower import SetAside, StoreEpoch, StoreGrant
from pushrep.election.grants import (
    Grant,
    Takeover,
    are_rivals,
    base_of,
    may_have_lost,
    newest_of,
    next_ballot,
)

LEADER_ALIVE_MS = 3_000
"""A leader sends a heartbeat once a second: one that was in contact so recently may be alive."""


class CandidateState(Enum):
    """The states of a candidate."""

    LOOKING = auto()
    GRANTING = auto()
    CATCHING_UP = auto()
    LEADING = auto()
    REFUSED = auto()


MAY_BECOME: Mapping[CandidateState, frozenset[CandidateState]] = MappingProxyType(
    {
        CandidateState.LOOKING: frozenset({CandidateState.GRANTING, CandidateState.REFUSED}),
        CandidateState.GRANTING: frozenset({CandidateState.CATCHING_UP, CandidateState.REFUSED}),
        CandidateState.CATCHING_UP: frozenset({CandidateState.LEADING, CandidateState.REFUSED}),
        CandidateState.LEADING: frozenset(),
        CandidateState.REFUSED: frozenset(),
    }
)
assert MAY_BECOME.keys() == set(CandidateState), "every state has a row"


class Purpose(Enum):
    """What a candidate is allowed to do."""

    OPEN = auto()
    """Renew this member's leadership; never take another's."""
    PROMOTE = auto()
    """Take another's leadership, but only if nobody is ahead."""
    PROMOTE_AND_CATCH_UP = auto()
    """Take another's leadership, and fetch first the records that only others have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLog:
    """One partition of a member, as candidates compare it."""

    log: LogEnds
    high_watermark: int
    is_damaged: bool = False
    unfenced: Unfenced | None = None
    held_to: EpochEnd | None = None
    """Its end before it was damaged or lost records, if its member knows that."""

    @property
    def granted(self) -> EpochEnd:
        """(newest granted epoch in the log, its end)."""
        return granted_end(self.log, self.unfenced)

    @property
    def why_unfit(self) -> str | None:
        """Why its member does not count before it is filled; None if it does."""
        if self.is_damaged:
            return "it is damaged"
        if self.log.log_end_offset < self.high_watermark:
            return f"it ends at {self.log.log_end_offset}, below its high watermark {self.high_watermark}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberAnswer:
    """A member's answer to a look, or after it stored a grant. highest_epoch: the highest that it has seen.

    is_unfilled: it stored its first grant without an earlier one, and has not been given everything since.
    directory_id: None without a directory. identity: in its node's certificate, empty without TLS. generation: of its
    newest grant. contact_age_ms: since the last contact with the leader by its newest grant, by its own clock; None
    without such a leader.
    """

    index: int
    grant: Grant | None
    highest_epoch: int
    logs: Mapping[int, MemberLog] = field(default_factory=dict)
    is_unfilled: bool = False
    directory_id: UUID | None = None
    generation: int = 0
    contact_age_ms: int | None = None
    identity: str = ""

    @property
    def counts(self) -> bool:
        return not self.is_unfilled and all(log.why_unfit is None for log in self.logs.values())


class StandbyElection(NamedTuple):
    """A standby's own election: `Grant.too_few_to_take_over` says how many members it needs.

    why_not(grant): why no standby may take over by that grant, empty if one may. wall_ms: when it begins. named_by: the
    rank of the grant whose leader handed the lead over to this member, if one did: that is no takeover.
    """

    why_not: Callable[[Grant], str]
    wall_ms: int
    named_by: tuple[int, int] | None = None


class Look(NamedTuple):
    """Ask these members for their grants and logs."""

    members: tuple[int, ...]


class SendGrant(NamedTuple):
    """Offer the grant to these members; their answers come after it is on their disks."""

    members: tuple[int, ...]
    grant: Grant


class Fetch(NamedTuple):
    """Durably: cut unfenced records aside, cut at `cut_at`, then fetch up to `until` from `member`, and flush.

    member: this member itself if there is only something to cut. anew: the other's log starts at `cut_at`, and nothing
    shows that this log is the same before it; so all of it is moved aside first.
    """

    partition: int
    member: int
    cut_at: int
    until: EpochEnd
    anew: SetAside | None = None


class Lead(NamedTuple):
    """Durably: flush every log here, begin the grant's epoch at its end, and mark nothing as unfenced any more.

    Then make a PartitionLeader for each log.
    """

    grant: Grant


class Refused(NamedTuple):
    """The attempt failed: raise `error`, or for an opening with acks=LOCAL append under an epoch without a grant."""

    error: ReplicationError


CandidateEffect: TypeAlias = Look | StoreEpoch | StoreGrant | SendGrant | Fetch | Lead | Refused


class Candidate:
    """One attempt to lead an outbox; the next one needs a new Candidate. Not thread-safe.

    own: this member's own answer, its unfenced epochs included in `highest_epoch`. first: the first grant, for an
    outbox without one; its epoch is replaced. change: makes the next grant from the newest one and its epoch, to change
    the members; None: a renewal. leader_alive_ms: another leader that was in contact within this time may be alive, and
    is left alone; 0: it is deposed. standby: for a standby's election; None for an operator's or an opening's. leads:
    this member leads by its grant, so a newer one of its generation does not end that while m members confirm its own.
    """

    def __init__(  # noqa: PLR0913 - who, what for, and what may differ
        self,
        index: int,
        purpose: Purpose,
        own: MemberAnswer,
        *,
        first: Grant | None = None,
        change: Callable[[Grant, int], Grant] | None = None,
        leader_alive_ms: int = LEADER_ALIVE_MS,
        standby: StandbyElection | None = None,
        leads: bool = False,
    ) -> None:
        self.index, self.purpose, self._change, self._leads = index, purpose, change, leads
        self._standby = standby
        self._leader_alive_ms, self._is_over = leader_alive_ms, False
        self.state = CandidateState.LOOKING
        self.grant: Grant | None = None
        """The grant that this attempt offers, once it has an epoch."""
        self._own, self._first = own, first
        self._answers: dict[int, MemberAnswer] = {index: own}
        self._to_fetch: set[int] = set()
        self._was_led_by_another = False
        self.is_first = False
        """By the answers to the look, nothing was ever acknowledged."""

    @property
    def base(self) -> Grant:
        """The grant from which the next one is made, and whose member lists count."""
        base = base_of(one.grant for one in self._answers.values() if not self._deposes_nobody(one))
        if base is None:
            assert self._first is not None, "an outbox without a grant is opened with its first one"
            return self._first
        return base

    @property
    def asks_again(self) -> bool:
        """Whether silent members are asked again: in a standby's election, while too few have answered or stored its
        grant.
        """
        waits = self.state in {CandidateState.LOOKING, CandidateState.GRANTING}
        return self._standby is not None and waits and self._too_few(self.grant or self.base) is not None

    def start(self) -> list[CandidateEffect]:
        """Begin: look at all members."""
        for partition, log in self._own_unfit():
            if self.purpose is not Purpose.OPEN or log.held_to is None:
                return self._refuse(LogNotFit(partition, str(log.why_unfit)))
        return [Look(self._others()), *self._on_look()]

    def on_answer(self, answer: MemberAnswer) -> list[CandidateEffect]:
        """A member answered a look or an offer. Late answers change nothing."""
        if self.state is CandidateState.LOOKING:
            known = set(self._others())
            self._answers[answer.index] = answer
            more = tuple(sorted(set(self._others()) - known))  # a newer list may have members that were not asked yet
            return [*([Look(more)] if more else []), *self._on_look()]
        if self.state is CandidateState.GRANTING:
            self._answers[answer.index] = answer
            return self._on_stored()
        return []

    def on_deadline(self) -> list[CandidateEffect]:
        """Nobody else will answer."""
        if self.state not in {CandidateState.LOOKING, CandidateState.GRANTING}:
            return []
        self._is_over = True
        if effects := self._on_look() if self.state is CandidateState.LOOKING else self._on_stored():
            return effects
        for partition, log in self._own_unfit():
            return self._refuse(self._not_held(partition, log))
        too_few = self._too_few(self.grant or self.base)
        assert too_few is not None, "enough that count would have led on"
        return self._refuse(too_few)

    def too_few_with(self, answers: Mapping[int, MemberAnswer]) -> TooFewMembers | None:
        """Why it has too few members by these answers and no more; None if it has enough. Ask it before `start`."""
        self._answers |= answers
        return self._too_few(self.base)

    def _too_few(self, grant: Grant) -> TooFewMembers | None:
        counting = self._counting()
        return grant.too_few_to_lead(counting) if self._standby is None else grant.too_few_to_take_over(counting)

    def on_fetched(self, partition: int) -> list[CandidateEffect]:
        """A Fetch was carried out."""
        if self.state is not CandidateState.CATCHING_UP:
            return []
        self._to_fetch.discard(partition)
        return [] if self._to_fetch else self._lead()

    def _own_unfit(self) -> list[tuple[int, MemberLog]]:
        """The partitions of which this member lost records: it does not count, and leads only after fetching them."""
        return [(partition, log) for partition, log in sorted(self._own.logs.items()) if log.why_unfit is not None]

    def _not_held(self, partition: int, own: MemberLog) -> LogNotFit:
        end = own.log.log_end_offset if own.held_to is None else own.held_to.end_offset
        lost, others = f"[{own.log.log_end_offset}, {end})", sorted(self._counting() - {self.index})
        why = f"{own.why_unfit}: of {lost} it lost records, and of the others {others} answered that are fit"
        return LogNotFit(partition, why, self._way_out(partition, end))

    def _way_out(self, partition: int, end_offset: int) -> str:
        """What an operator can do about lost records up to `end_offset`."""
        if self.base.too_few_to_lead(self.base.indexes - {self.index}) is None:
            return "bring back those that hold all of it, or promote another member"
        fit = self._counting() - {self.index}
        logs = {index: self._answers[index].logs for index in fit}
        ends = [(held[partition].granted, index) for index, held in logs.items() if partition in held]
        why = "no quorum leads without this member"
        if not ends:
            return f"{why}: start the others, one of which has to go on"
        most, index = max(ends)
        address = next((one.address for one in self.base.members if one.index == index), "")
        holds = "all of it" if most.end_offset >= end_offset else f"most, up to offset {most.end_offset}"
        return (
            f"{why}. Member {index} ({address}) holds {holds}: run pushrep promote DATA/OUTBOX-ID --accept-loss there, "
            "and put this directory under a node (pushrep replica adopt), where it is filled"
        )

    def _others(self) -> tuple[int, ...]:
        return tuple(sorted(self.base.indexes - {self.index}))

    def _counting(self) -> frozenset[int]:
        """The members that answered and count; once there is a grant, those that stored it."""
        if self.grant is None:
            if self._is_first_grant():
                return frozenset(self._answers)
            is_first = self._nothing_was_acknowledged()
            return frozenset(
                index
                for index, answer in self._answers.items()
                if self.base.is_member(index, answer.directory_id)
                and (answer.grant is None or answer.grant.generation == self.base.generation)
                and (is_first or (answer.counts and (answer.grant or self._was_never_granted(answer))))
            )
        return frozenset(
            index
            for index, answer in self._answers.items()
            if answer.grant == self.grant
            and self.grant.is_member(index, answer.directory_id)
            and (self.is_first or answer.counts)
        )

    def _was_never_granted(self, answer: MemberAnswer) -> bool:
        """Whether a member without a grant has lost nothing: the grant names its directory, which has no record. A new
        generation is new to whoever enters it.
        """
        is_empty = not any(log.log.log_end_offset for log in answer.logs.values())
        return is_empty and not self.base.generation and self.base.names(answer.directory_id)

    def _is_first_grant(self) -> bool:
        """Whether nobody led before: nobody else shows a grant, and this member never led by its own."""
        own, grants = self._own.grant, [one.grant for one in self._answers.values() if one.grant is not None]
        if own is None or len(grants) > 1:
            return not grants
        led = any(log.granted.epoch >= own.members_epoch for log in self._own.logs.values())
        return not led and not own.previous_members and self._nothing_was_acknowledged()

    def _named(self, grant: Grant, epoch: int) -> Grant:
        """The first grant, with the directories of all members, unless one shows none."""
        shown = {index: answer.directory_id for index, answer in self._answers.items()}
        named = {index: one for index, one in shown.items() if one is not None}
        return grant.with_names(epoch, named) if named.keys() >= grant.indexes else grant

    def _may_name_more(self) -> bool:
        """Whether a member that the first grant would name can still answer."""
        are_all_named = all(answer.directory_id is not None for answer in self._answers.values())
        return are_all_named and not self._is_over and self._answers.keys() < self.base.indexes

    def _why_another_leads(self, newest: Grant | None) -> ReplicationError | None:
        """An opening deposes nobody, and nobody deposes a leader of a newer generation."""
        if newest is None:
            return None
        if (why_not := self._why_another_generation(newest)) is None and self._was_led_by_another:
            return NotLeader(newest.leader, newest.epoch) if self.purpose is Purpose.OPEN else None
        return why_not

    def _why_another_generation(self, newest: Grant) -> NotLeader | None:
        """A grant was forced without this directory, or two were forced independently."""
        own = self._own.grant
        for answer in self._answers.values():
            if answer.grant is not None and are_rivals(newest.generation, answer.grant.generation):
                here, there = (newest, answer.grant) if own == newest else (answer.grant, newest)
                return why_outranked(here, there)
        return None if own is None or own.generation == newest.generation else why_outranked(own, newest)

    def _why_no_member(self) -> ReplicationError | None:
        """This member is not in the list, or has another directory than the grant's or another member's."""
        if all(member.index != self.index for member in self.base.members):
            removed = f"member {self.index} was removed by epoch {self.base.epoch}"
            return CantLead(f"{removed}: add this directory again under a new index")
        if not self._is_first_grant() and not self.base.is_member(self.index, self._own.directory_id):
            since = f"member {self.index} since epoch {self.base.members_epoch}"
            return CantLead(
                f"this is not the directory that counts as {since}: its disk is new, or it is a copy. Promote another "
                "member; this one is filled by that, below its node"
            )
        return why_twice(self._answers)

    def _nothing_was_acknowledged(self) -> bool:
        """Whether no record can have been acknowledged: nobody who answers has a grant; or all members answer, and none
        has a record of a granted epoch. What was acknowledged lies on m members, and fewer than m disks may be lost.
        """
        answers = self._answers.values()
        if all(answer.grant is None for answer in answers):
            return True
        logs = [log for answer in answers for log in answer.logs.values()]
        are_empty = all(log.why_unfit is None and log.granted.end_offset == 0 for log in logs)
        return are_empty and self._answers.keys() >= self.base.indexes

    def _deposes_nobody(self, answer: MemberAnswer) -> bool:
        """Of this member's generation, a directory that counts for nothing shows no leader either."""
        is_another = answer.index != self.index and answer.is_unfilled
        return is_another and self._own.grant is not None and answer.generation == self._own.generation

    def _disbelieve(self) -> bool:
        """Of a leader: forget the answers that show a newer grant, if m members show its own. False: ask on."""
        own = self._own.grant
        if not self._leads or own is None:
            return True
        shown = {index: one.grant.rank for index, one in self._answers.items() if one.grant is not None}
        newer = {index for index, rank in shown.items() if rank[0] == own.generation and rank > own.rank}
        if not own.may_acknowledge({index for index, rank in shown.items() if rank == own.rank}):
            return self._is_over or not newer
        self._answers = {index: one for index, one in self._answers.items() if index not in newer}
        return True

    def _on_look(self) -> list[CandidateEffect]:
        if not self._disbelieve():
            return []
        newest = newest_of(one.grant for one in self._answers.values() if not self._deposes_nobody(one))
        is_first_grant = self._is_first_grant()
        self._was_led_by_another = newest is not None and newest.leader != self.index
        goes_on = self._goes_on(newest)
        if isinstance(goes_on, ReplicationError):
            return self._refuse(goes_on)
        if not goes_on:
            return []
        if (is_held := self._why_held()) is not None:
            return self._refuse(is_held)
        self.is_first = self._nothing_was_acknowledged()
        epoch = next_ballot(self.index, max(answer.highest_epoch for answer in self._answers.values()))
        grant = self.base.renewed(epoch, self.index) if self._change is None else self._change(self.base, epoch)
        if is_first_grant:
            grant = self._named(replace(grant, members_epoch=epoch), epoch)
        if self._standby is not None and self._was_led_by_another and not self._is_handed_over(self.base):
            grant = replace(grant, takeover=Takeover(epoch, self._standby.wall_ms))
        shown = self._answers.items()
        grant = grant.with_identities(
            {index: one.identity for index, one in shown if one.identity and grant.is_member(index, one.directory_id)}
        )
        self._become(CandidateState.GRANTING)
        self.grant = grant
        own, is_first = self._own, self.is_first
        is_unfilled = own.is_unfilled or may_have_lost(own.grant, grant, own.directory_id, is_first=is_first)
        self._answers = {self.index: replace(own, grant=grant, highest_epoch=epoch, is_unfilled=is_unfilled)}
        return [StoreEpoch(grant.epoch), StoreGrant(grant), SendGrant(self._others(), grant), *self._on_stored()]

    def _is_handed_over(self, grant: Grant) -> bool:
        return self._standby is not None and self._standby.named_by == grant.rank

    def _why_held(self) -> CantLead | None:
        """Why no standby may take over now. Enough members have answered for one of them to know the newest hold."""
        if self._standby is None or not self._was_led_by_another:
            return None
        why_not = self._standby.why_not(self.base)
        return CantLead(f"{why_not}; nobody was fenced") if why_not else None

    def _goes_on(self, newest: Grant | None) -> bool | ReplicationError:
        """Whether to take an epoch, by the answers so far; or the error, if no further answer could change it."""
        if (why_not := self._why_another_leads(newest) or self._why_no_member()) is not None:
            return why_not
        is_enough = self._too_few(self.base) is None and not (self._is_first_grant() and self._may_name_more())
        if is_enough and self._own_unfit() and isinstance(refusal := self._fetches(), ReplicationError):
            return refusal if self._is_over else False  # another may hold them
        if newest is None or self.purpose is Purpose.OPEN:
            return is_enough
        silent = self.base.indexes - self._answers.keys()
        # One that handed over is not alive, though others may not have heard it yet.
        alive_ms = 0 if self._is_handed_over(newest) else self._leader_alive_ms
        alive = leader_alive(self.index, newest, self._answers, silent, alive_ms)
        if alive is not None and self._is_over and (is_enough or alive.contacts):
            return alive
        if is_enough and isinstance(refusal := self._fetches(), ReplicationError):
            return refusal
        # The others may show that it is not alive, or that they hold more.
        waits = alive is not None or (self.purpose is Purpose.PROMOTE and bool(silent))
        return is_enough and (self._is_over or not waits)

    def _on_stored(self) -> list[CandidateEffect]:
        assert self.grant is not None
        for answer in self._answers.values():
            newer = answer.grant
            if newer is None or newer == self.grant or newer.generation < self.grant.generation:
                continue
            is_in_doubt = self._leads and not self._is_over and newer.generation == self.grant.generation
            if is_in_doubt or self._deposes_nobody(answer):
                continue
            if (why_not := self._why_another_generation(newer)) is not None:
                return self._refuse(why_not)
            if newer.epoch == self.grant.epoch or self.grant.is_refused_after(newer):
                return self._refuse(NotLeader(newer.leader, newer.epoch))
        if self._too_few(self.grant) is not None:
            return []
        fetches = self._fetches()
        if isinstance(fetches, ReplicationError):
            return self._refuse(fetches)
        self._become(CandidateState.CATCHING_UP)
        self._to_fetch = {fetch.partition for fetch in fetches}
        return list(fetches) if fetches else self._lead()

    def _fetches(self) -> list[Fetch] | ReplicationError:
        """What has to be cut and fetched before leading, or why this member can't lead."""
        fetches = []
        counting = self._counting()
        holds_others = bool(self._own_unfit()) and not self._own.is_unfilled  # of the partitions that lost nothing
        for partition, own in sorted(self._own.logs.items()):
            held = [
                (answer.logs[partition].granted, index)
                for index, answer in self._answers.items()
                if (index in counting or (index == self.index and holds_others)) and partition in answer.logs
            ]
            none_has_a_log = own.granted, self.index
            ahead, member = max(held, key=lambda pair: (pair[0], pair[1] == self.index), default=none_has_a_log)
            granted = without_unfenced(own.log, own.unfenced)
            if own.why_unfit is not None and (own.held_to is None or ahead < own.held_to):
                return self._not_held(partition, own)
            if ahead == own.granted:
                if own.unfenced is not None and self._was_led_by_another:
                    fetches.append(Fetch(partition, self.index, granted.log_end_offset, ahead))
                continue
            if self.purpose is Purpose.PROMOTE:
                is_fenced = self.grant is not None
                return NotAhead(partition=partition, own=own.granted, member=member, theirs=ahead, is_fenced=is_fenced)
            theirs = self._answers[member].logs[partition]
            cut_at = common_end(granted, without_unfenced(theirs.log, theirs.unfenced))
            anew = None
            if granted.log_start_offset < theirs.log.log_start_offset >= cut_at:
                cut_at = theirs.log.log_start_offset
                anew = SetAside(cut_at, theirs.log.leader_epochs.epoch_of(cut_at))
            if cut_at < own.high_watermark:
                return LogNotFit(partition, f"it parts from member {member} at {cut_at}, below its high watermark")
            fetches.append(Fetch(partition, member, cut_at, ahead, anew))
        return fetches

    def _lead(self) -> list[CandidateEffect]:
        assert self.grant is not None
        self._become(CandidateState.LEADING)
        return [Lead(self.grant)]

    def _refuse(self, error: ReplicationError) -> list[CandidateEffect]:
        self._become(CandidateState.REFUSED)
        return [Refused(error)]

    def _become(self, state: CandidateState) -> None:
        assert state in MAY_BECOME[self.state], f"{self.state} may not become {state}"
        self.state = state


def leader_alive(
    own: int, newest: Grant, answers: Mapping[int, MemberAnswer], silent: AbstractSet[int], leader_alive_ms: int
) -> LeaderMayBeAlive | None:
    """Why the leader by the `newest` grant may still lead; None if it does not. own: the asking member.

    The error names silent members only if the answers alone do not show it.
    """
    leader = newest.leader
    node = answers.get(leader)  # the leader's, which answers only while no service has the directory
    has_no_service = node is not None and node.grant == newest and newest.is_member(leader, node.directory_id)
    if leader == own or not leader_alive_ms or has_no_service:
        return None
    contacts = {
        index: answer.contact_age_ms
        for index, answer in answers.items()
        if answer.contact_age_ms is not None and answer.contact_age_ms < leader_alive_ms
    }
    known = {leader, *contacts}
    if not newest.may_acknowledge(known | silent):
        return None
    others = () if contacts and newest.may_acknowledge(known) else tuple(sorted({leader, *silent} - contacts.keys()))
    return LeaderMayBeAlive(leader=leader, epoch=newest.epoch, contacts=contacts, silent=others)


def why_outranked(own: Grant, other: Grant) -> NotLeader | None:
    """Why nobody leads by `own` where `other` is shown: it is newer, or its rival; None if it is neither."""
    if are_rivals(own.generation, other.generation):
        rivals = {"generation": own.generation, "rival": other.generation}
        return RivalGenerations(other.leader, other.epoch, **rivals)
    if other.generation > own.generation:
        why = (
            f"this directory is of generation {label(own.generation)}, member {other.leader} leads in "
            f"{label(other.generation)} since a loss was accepted: it can go back in as a replica, which sets aside "
            "what it holds and is given everything"
        )
        return NotLeader(other.leader, other.epoch, why)
    return NotLeader(other.leader, other.epoch) if other.rank > own.rank else None


def why_twice(answers: Mapping[int, MemberAnswer]) -> CantLead | None:
    """Why these members can't all count: two addresses lead to one directory; None if each has its own."""
    seen: dict[UUID, int] = {}
    for index, answer in sorted(answers.items()):
        if answer.directory_id is not None and (first := seen.setdefault(answer.directory_id, index)) != index:
            return CantLead(
                f"MEMBER_TWICE: the addresses of members {first} and {index} lead to one directory, whose disk would "
                "count twice: give each member an address of its own"
            )
    return None
