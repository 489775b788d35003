"""When a standby, a member whose service waits until it may lead, takes over.

    WAITING ──a grant──▶ STANDING_BY ──nobody leads──▶ LOOKING ──enough answered──▶ TAKING_OVER ──▶ LEADING ──▶ DEPOSED
                           ▲   ▲                         │ too few, or a             │ another was    │           │
                           │   └─────────────────────────┘ sign of a leader          │ faster         │           │
                           └──────────────────────────────────────────────────────────┘                └ again ◀──┘

The successor that a leader named when it handed over looks at once, and nobody pauses for that: it is no takeover. The
others wait meanwhile, as if the leader had been in contact then.

For this member nobody leads if the leader said so, or if its own node had no contact with it for `takeover_after_ms`
and has had its grant for as long; if the newest grant names this member, it looks at once. Each standby waits for a
random time, so that usually one looks first. Then a Candidate decides, with a `StandbyElection`: the answers show
whether the leader is alive (candidate.py), and the ballots decide who leads.

Two more things keep standbys from taking over: an operator's hold, and the pause after a takeover by a standby
(`takeover_pause_ms`). Without the pause, a fault that ends one leader after the other would leave none of them time to
work. The first failure is taken over at once. The grant carries both, so that members that were away or just started
know them. A member computes once by the wall clock how long they still last, at most their whole length. From then on
it uses the monotonic clock, so that steps of the wall clock do not matter. A member that stood by during a takeover
waits for the whole pause, whatever the wall clock says. If the last leader leads again, that is no takeover.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from pushrep.election.errors import CantStandBy
from pushrep.election.grants import Grant, Hold, Takeover, owner_of

TAKEOVER_AFTER_MS = 10_000
TAKEOVER_PAUSE_MS = 30_000
MEMBERS_MIN = 3
"""With two members, the one that is left can't know whether it is the one cut off."""
_SPREAD_MAX_MS = 1_000  # a look takes some 100 ms: a third of a second between two standbys, on average


class StandbyState(Enum):
    """The states of a standby; the value is for display."""

    WAITING = "waiting"
    """No grant names this member yet: the outbox is not made."""
    STANDING_BY = "standing_by"
    LOOKING = "looking"
    TAKING_OVER = "taking_over"
    """It has the grant: from here on the old leader is fenced."""
    LEADING = "leading"
    DEPOSED = "deposed"
    """It does not lead any more: another does, or it resigned."""


MAY_BECOME: Mapping[StandbyState, frozenset[StandbyState]] = MappingProxyType(
    {
        StandbyState.WAITING: frozenset({StandbyState.STANDING_BY}),
        StandbyState.STANDING_BY: frozenset({StandbyState.LOOKING}),
        StandbyState.LOOKING: frozenset({StandbyState.TAKING_OVER, StandbyState.STANDING_BY}),
        StandbyState.TAKING_OVER: frozenset({StandbyState.LEADING, StandbyState.STANDING_BY}),
        StandbyState.LEADING: frozenset({StandbyState.DEPOSED}),
        StandbyState.DEPOSED: frozenset({StandbyState.STANDING_BY}),
    }
)
assert MAY_BECOME.keys() == set(StandbyState), "every state has a row"


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeoverTimes:
    """takeover_after_ms: how long without contact to a leader before a standby looks, and how long a leader without a
    majority, or one that can't append, goes on leading. takeover_pause_ms: how long after a takeover the next one
    waits.
    """

    takeover_after_ms: int = TAKEOVER_AFTER_MS
    takeover_pause_ms: int = TAKEOVER_PAUSE_MS

    @property
    def spread_ms(self) -> int:
        """The longest random delay before a look."""
        return min(_SPREAD_MAX_MS, self.takeover_after_ms // 4)


class Seen(NamedTuple):
    """The facts of a standby at one moment. now_ms: monotonic. member: its index.

    contact_age_ms: since its node's last contact with the leader; None: the leader said that it leads no more. unfit:
    why this member can't lead now, empty if it can. is_successor: the leader handed the lead over to this member.
    has_handed_over: this member led by the grant, and handed the lead over to another.
    """

    now_ms: int
    grant: Grant | None
    member: int
    contact_age_ms: int | None
    unfit: str = ""
    wall_ms: int = 0
    is_successor: bool = False
    has_handed_over: bool = False


class Standby:
    """The rules of one standby. Not thread-safe. draw(n): a random number from 0 to n - 1."""

    def __init__(self, times: TakeoverTimes, draw: Callable[[int], int]) -> None:
        self.times, self._draw = times, draw
        self.state = StandbyState.WAITING
        self._rank: tuple[int, int] | None = None
        self._known_ms = 0  # when the newest grant became known here
        self._due_ms: int | None = None  # when to look, once nobody leads
        self._takeover: Takeover | None = None
        self._paused_until_ms = 0  # monotonic, as the next
        self._hold: Hold | None = None
        self._held_until_ms = 0
        self.named_by: tuple[int, int] | None = None
        """The rank of the grant whose leader handed the lead over to this member: no takeover, so no pause."""

    def become(self, state: StandbyState) -> None:
        """Change the state, as the table allows."""
        assert state in MAY_BECOME[self.state], f"{self.state} may not become {state}"
        self.state = state

    def why_not_look(self, seen: Seen) -> str | None:
        """Why this member does not look now; None: it is LOOKING from here on. Raises CantStandBy."""
        if seen.grant is None:
            return "the outbox is not made yet: pushrep outbox create"
        if all(one.index != seen.member for one in seen.grant.members):
            removed = f"member {seen.member} was removed by epoch {seen.grant.members_epoch}"
            return f"{removed}: it stands by again once pushrep replica add has made its node a member"
        check_standby(seen.grant)
        if self.state in {StandbyState.WAITING, StandbyState.DEPOSED}:
            self.become(StandbyState.STANDING_BY)
        self._learn(seen.grant, seen.now_ms, seen.wall_ms, is_here=self._rank is not None)
        if seen.grant.rank != self._rank:
            self._rank, self._known_ms, self._due_ms = seen.grant.rank, seen.now_ms, None
        self.named_by = seen.grant.rank if seen.is_successor else None
        if why_not := seen.unfit or self._why_not_due(seen, seen.grant):
            self._due_ms = None
            return why_not
        if self._due_ms is None:
            is_own = seen.grant.leader == seen.member
            self._due_ms = seen.now_ms + (0 if is_own or seen.is_successor else self._draw(1 + self.times.spread_ms))
        if seen.now_ms < self._due_ms:
            return "nobody leads: it looks soon"
        self.become(StandbyState.LOOKING)
        return None

    def on_refused(self, now_ms: int) -> None:
        """It looked or took an epoch, and does not lead: the next look is at a random time again."""
        self.become(StandbyState.STANDING_BY)
        self._due_ms = now_ms + self.times.spread_ms // 2 + self._draw(1 + self.times.spread_ms)

    def _why_not_due(self, seen: Seen, grant: Grant) -> str:
        if grant.leader == seen.member:  # this member has the grant: it deposes nobody
            waits = seen.has_handed_over and seen.now_ms - self._known_ms < self.times.takeover_after_ms
            return "it handed the lead over: another takes over now" if waits else ""
        if why_not := self._why_held(seen.now_ms, grant):
            return why_not
        if seen.contact_age_ms is None:
            return ""
        silent_ms = min(seen.contact_age_ms, seen.now_ms - self._known_ms)
        if silent_ms < self.times.takeover_after_ms:
            address = next((one.address for one in grant.members if one.index == grant.leader), "")
            return f"member {grant.leader}{f' ({address})' if address else ''} was in contact {silent_ms} ms ago"
        return ""

    def why_not_take_over(self, grant: Grant, now_ms: int, wall_ms: int) -> str:
        """Why no standby may take over now, by the hold and pause in a grant of other members; empty: one may."""
        self._learn(grant, now_ms, wall_ms, is_here=False)
        return self._why_held(now_ms, grant)

    def _learn(self, grant: Grant, now_ms: int, wall_ms: int, *, is_here: bool) -> None:
        """Note a grant's hold and takeover. is_here: this member stood by when its own node got the grant."""
        takeover, hold = grant.takeover, grant.hold
        if takeover is not None and (self._takeover is None or takeover > self._takeover):
            pause_ms = self.times.takeover_pause_ms
            left_ms = pause_ms if is_here else _left_ms(takeover.ms, pause_ms, wall_ms)
            self._takeover, self._paused_until_ms = takeover, now_ms + left_ms
        if hold is not None and (self._hold is None or hold > self._hold):
            self._hold, self._held_until_ms = (
                hold,
                now_ms + _left_ms(hold.since_ms, hold.until_ms - hold.since_ms, wall_ms),
            )

    def _why_held(self, now_ms: int, grant: Grant) -> str:
        if self._hold is not None and now_ms < self._held_until_ms:
            left = _seconds(self._held_until_ms - now_ms)
            return f"takeovers are held for {left} ({self._hold.reason}): pushrep outbox hold"
        if grant.rank != self.named_by and self._takeover is not None and now_ms < self._paused_until_ms:
            left = _seconds(self._paused_until_ms - now_ms)
            return f"member {owner_of(self._takeover.epoch)} took over lately: the next may in {left}"
        return ""


def _left_ms(began_ms: int, length_ms: int, wall_ms: int) -> int:
    return min(max(0, began_ms + length_ms - wall_ms), length_ms)


class LeaderHealth:
    """Decides when a leader resigns: after `takeover_after_ms` without answers of a majority, or without being able to
    append, so that another may lead. Other threads may call `on_answer`.
    """

    def __init__(self, times: TakeoverTimes, now_ms: int) -> None:
        self._times = times
        self._began_ms = self._appends_since_ms = now_ms
        self._answered_ms: dict[int, int] = {}

    def on_answer(self, member: int, now_ms: int) -> None:
        """Another member answered, and has this leader's grant."""
        self._answered_ms[member] = now_ms

    def why_resign(self, grant: Grant, why_no_append: str, now_ms: int) -> str | None:
        """Why the leader has to resign; None if it goes on. why_no_append: empty if the log takes records."""
        if not why_no_append:
            self._appends_since_ms = now_ms
        limit_ms = self._times.takeover_after_ms
        late = {one for one in grant.indexes if now_ms - self._answered_ms.get(one, self._began_ms) >= limit_ms}
        if grant.too_few_to_take_over(grant.indexes - (late - {grant.leader})) is not None:
            return (
                f"members {sorted(late - {grant.leader})} did not answer for {_seconds(limit_ms)}: no majority is left"
            )
        if now_ms - self._appends_since_ms >= limit_ms:
            return f"it could not append for {_seconds(now_ms - self._appends_since_ms)}: {why_no_append}"
        return None


def check_standby(grant: Grant) -> None:
    """Raise CantStandBy for an outbox whose members are too few, or acknowledge with less than a majority."""
    count, least = len(grant.members), grant.min_insync_replicas
    if max(count, len(grant.previous_members)) < MEMBERS_MIN:  # until a change is settled the longer list stands
        raise CantStandBy(f"the outbox has {count} members, {MEMBERS_MIN} are needed: pushrep replica add")
    if least < count // 2 + 1:
        raise CantStandBy(
            f"min_insync_replicas = {least} of {count} members is no majority: what was acknowledged could be on "
            f"members that no standby asks; {count // 2 + 1} are needed"
        )


def _seconds(ms: int) -> str:
    return f"{ms / 1000:.1f} s"
