"""Standbys with wrong clocks: the rules alone, in a world of three or five machines with one true time that none can
read.

A machine has a node with a grant, a service that leads or stands by, a monotonic clock that stops while the machine is
suspended, and a wall clock that can be set. A seed draws kills, suspensions, cut links, steps of wall clocks, holds,
promotions and leads that are handed over. Messages take no time: the test checks who takes over when, not the content
of logs.
"""

from collections import deque
from uuid import UUID

import pytest

from pushrep.election.candidate import (
    LEADER_ALIVE_MS,
    Candidate,
    Look,
    MemberAnswer,
    Purpose,
    Refused,
    SendGrant,
    StandbyElection,
)
from pushrep.election.candidate import Lead as LeadEffect
from pushrep.election.follower import StoreGrant
from pushrep.election.grants import Grant, Member, OfferedGrant, default_min_insync, hold_of, judge_grant
from pushrep.election.leader import Confirmations
from pushrep.election.standby import LeaderHealth, Seen, Standby, StandbyState, TakeoverTimes
from pushrep.wire.error_codes import ErrorCode

TIMES = TakeoverTimes(takeover_after_ms=4_000, takeover_pause_ms=20_000)
TICK_MS, FAULTY_TICKS, QUIET_TICKS = 200, 1_500, 300


class Leads:
    """A service that leads."""

    def __init__(self, grant, now_ms):
        self.grant, self.health, self.acknowledged_ms = grant, LeaderHealth(TIMES, now_ms), -LEADER_ALIVE_MS
        self.confirmations = Confirmations(grant, LEADER_ALIVE_MS)


class Machine:
    def __init__(self, index, grant, draw):
        self.index, self.grant, self.draw = index, grant, draw
        self.suspended_until_ms = self.stood_still_ms = self.started_ms = 0
        self.wall_offset_ms = 1_700_000_000_000
        self.is_node_up, self.contact = True, (-1, 0, False, -1)
        self.handed_over = None  # the grant by which it led until then
        self.start()

    def start(self):
        self.service, self.saw = Standby(TIMES, self.draw.randrange), {}
        self.clock_at = {}  # by the epoch of a hold or a takeover: its wall clock's offset when it came to know of it

    def now_ms(self, world):
        return world.now_ms - self.stood_still_ms

    def wall_ms(self, world):
        return world.now_ms + self.wall_offset_ms

    def hears(self, grant, now_ms, *, is_over=False, successor=-1):
        self.contact = (grant.epoch, now_ms, is_over, successor)

    def standby_contact(self, now_ms):
        """(age, whether this machine is the leader's successor)"""
        age_ms, (_, at_ms, _, successor) = self.contact_age_ms(now_ms), self.contact
        if age_ms is not None or successor < 0 or self.grant.leader == self.index:
            return age_ms, False
        return (None, True) if successor == self.index else (now_ms - at_ms, False)

    def contact_age_ms(self, now_ms):
        epoch, at_ms, is_over, _ = self.contact
        if self.grant.leader == self.index or (epoch >= self.grant.epoch and is_over):
            return None
        return now_ms - (at_ms if epoch >= self.grant.epoch else self.started_ms)


class World:
    def __init__(self, count, draw):
        self.now_ms, self.draw, self.cut = 0, draw, set()
        first = Grant(
            outbox_id=UUID(int=1), epoch=0, leader=0, members=tuple(map(Member, range(count))), members_epoch=0,
            min_insync_replicas=default_min_insync(count), pid_epoch=0, topic_id=UUID(int=2), topic="orders",
            partitions=1, carrier="key",
        )  # fmt: skip
        self.machines = [Machine(index, first, draw) for index in range(count)]
        self.leaders, self.takeovers, self.holds, self.acknowledged_ms = {}, [], [], 0
        self.handed_over = 0

    # -- who reaches whom

    def acts(self, machine):
        return self.now_ms >= machine.suspended_until_ms

    def reach(self, machine, other):
        """Both ways, and its node answers."""
        ways = {(machine.index, other.index), (other.index, machine.index)}
        return self.acts(other) and other.is_node_up and not ways & self.cut

    def others(self, machine):
        return [one for one in self.machines if one is not machine and self.reach(machine, one)]

    # -- a tick

    def tick(self):
        self.now_ms += TICK_MS
        for machine in self.machines:
            if not self.acts(machine):
                machine.stood_still_ms += TICK_MS
            elif isinstance(machine.service, Leads):
                self.lead(machine)
            elif machine.service is not None and machine.is_node_up:
                self.stand_by(machine)

    def lead(self, machine):
        leads, now_ms = machine.service, machine.now_ms(self)
        kept = {machine.index}
        for other in self.others(machine):
            if self.offer(leads.grant, machine, other):
                other.hears(leads.grant, other.now_ms(self))
                leads.health.on_answer(other.index, now_ms)
                leads.confirmations.on_own(other.index, now_ms)
                kept.add(other.index)
            elif other.grant.rank > leads.grant.rank:
                leads.confirmations.on_newer(other.index, other.grant.epoch, other.grant.leader, now_ms)
        if leads.confirmations.newer_grant(now_ms) is not None:
            machine.start()
        elif leads.health.why_resign(leads.grant, "", now_ms) is not None:
            for other in self.others(machine):
                if other.grant == leads.grant:
                    other.hears(leads.grant, other.now_ms(self), is_over=True)
            machine.start()
        elif leads.grant.may_acknowledge(kept):
            self.acknowledged_ms = leads.acknowledged_ms = self.now_ms

    def stand_by(self, machine):
        standby, now_ms, wall_ms = machine.service, machine.now_ms(self), machine.wall_ms(self)
        if (takeover := machine.grant.takeover) is not None:
            machine.saw.setdefault(takeover.epoch, standby.state is not StandbyState.WAITING)
        self.note_clock(machine, machine.grant)
        age_ms, is_successor = machine.standby_contact(now_ms)
        seen = Seen(
            now_ms, machine.grant, machine.index, age_ms, wall_ms=wall_ms, is_successor=is_successor,
            has_handed_over=machine.handed_over == machine.grant,
        )  # fmt: skip
        if standby.why_not_look(seen) is None:
            election = StandbyElection(lambda grant: self.told(machine, grant), wall_ms, standby.named_by)
            if self.elect(machine, election) is None:
                standby.on_refused(now_ms)

    def note_clock(self, machine, grant):
        for carried in filter(None, (grant.hold, grant.takeover)):
            machine.clock_at.setdefault(carried.epoch, machine.wall_offset_ms)

    def told(self, machine, grant):
        """Why the service may not take over, given another member's grant; of that member it uses only the grant."""
        if grant.takeover is not None:
            machine.saw.setdefault(grant.takeover.epoch, False)
        self.note_clock(machine, grant)
        return machine.service.why_not_take_over(grant, machine.now_ms(self), machine.wall_ms(self))

    def elect(self, machine, standby=None, change=None):
        """The grant, if it leads by one now."""
        led_by, now_ms = machine.grant.leader, machine.now_ms(self)
        is_own = led_by == machine.index
        purpose = Purpose.OPEN if is_own else Purpose.PROMOTE_AND_CATCH_UP
        alive_ms = min(LEADER_ALIVE_MS, TIMES.takeover_after_ms) if standby is not None else 0
        candidate = Candidate(
            machine.index,
            purpose,
            self.answer(machine),
            standby=standby,
            change=change,
            leader_alive_ms=alive_ms,
            leads=change is not None,
        )
        todo, granted = deque(candidate.start()), None
        while todo:
            effect = todo.popleft()
            if isinstance(effect, StoreGrant):
                machine.grant = effect.grant
            elif isinstance(effect, LeadEffect):
                granted = effect.grant
            elif isinstance(effect, Refused):
                return None
            elif isinstance(effect, Look | SendGrant):
                for other in self.others(machine):
                    if not isinstance(other.service, Leads):  # else its service has the directory
                        if isinstance(effect, SendGrant):
                            self.offer(effect.grant, machine, other)
                        todo += candidate.on_answer(self.answer(other))
            if not todo:
                todo += candidate.on_deadline()
        if granted is not None:
            machine.service = Leads(granted, now_ms)
            is_handed_over = standby is not None and standby.named_by is not None
            self.handed_over += is_handed_over
            self.check(machine, granted, is_takeover=standby is not None and not is_own and not is_handed_over)
        return granted

    def answer(self, machine):
        age_ms = machine.contact_age_ms(machine.now_ms(self))
        epoch = machine.grant.epoch
        return MemberAnswer(
            index=machine.index, grant=machine.grant, highest_epoch=epoch, is_unfilled=False, contact_age_ms=age_ms
        )

    def offer(self, grant, sender, other):
        if isinstance(other.service, Leads) and other.service.grant.rank > grant.rank:
            return False
        if judge_grant(OfferedGrant(grant, sender.index, other.grant, other.grant.epoch)) is not ErrorCode.NONE:
            return False
        other.grant = grant
        return True

    # -- what has to hold

    def check(self, machine, grant, *, is_takeover):
        assert self.leaders.setdefault(grant.epoch, machine.index) == machine.index, "one number, one leader"
        if not is_takeover:
            return
        for other in self.machines:
            if other is not machine and isinstance(other.service, Leads):
                silent_ms = self.now_ms - other.service.acknowledged_ms
                assert silent_ms >= LEADER_ALIVE_MS, "it took the lead from one that had just acknowledged"
        if self.takeovers:
            at_ms, before, offset_ms = self.takeovers[-1]
            if machine.saw.get(before.epoch) or machine.clock_at.get(before.epoch, offset_ms) == offset_ms:
                assert self.now_ms - at_ms >= TIMES.takeover_pause_ms, "no pause between two takeovers"
        for began_ms, until_ms, hold, offset_ms in self.holds:
            if machine.clock_at.get(hold.epoch, offset_ms) == offset_ms:
                assert not began_ms <= self.now_ms < until_ms, "it took over during a hold"
        self.takeovers.append((self.now_ms, grant.takeover, machine.wall_offset_ms))

    # -- faults

    def trouble(self):
        draw = self.draw
        leads = [one for one in self.machines if isinstance(one.service, Leads)]
        machine = draw.choice(leads if leads and draw.random() < 0.5 else self.machines)
        match draw.randrange(10):
            case 0 | 1:
                machine.service = None
            case 2:
                machine.is_node_up = False
            case 3:
                machine.suspended_until_ms = self.now_ms + draw.choice((1_000, 6_000, 30_000))
            case 4:
                self.cut.add(tuple(draw.sample(range(len(self.machines)), 2)))
            case 5 if self.steps_clocks:
                machine.wall_offset_ms += draw.choice((-1, 1)) * draw.choice((5_000, 60_000, 3_600_000))
            case 6:
                self.heal()
            case 7:
                self.hold(draw.choice((0, 0, 10_000, 40_000)))
            case 8 if draw.random() < 0.2:
                if machine.is_node_up and not isinstance(machine.service, Leads) and self.acts(machine):
                    self.elect(machine)
            case 9 if isinstance(machine.service, Leads) and self.acts(machine):
                self.hand_over(machine)

    def hand_over(self, machine):
        """To one that it reaches and that stands by, if there is one and no hold; the others hear it, too."""
        grant, now_ms = machine.service.grant, machine.wall_ms(self)
        others = [one for one in self.others(machine) if one.grant == grant]
        can = [one for one in others if isinstance(one.service, Standby) and self.acts(one)]
        if can and hold_of(grant, now_ms) is None:
            successor = self.draw.choice(can)
            for other in others:
                other.hears(grant, other.now_ms(self), is_over=True, successor=successor.index)
            machine.handed_over = grant
            machine.start()

    steps_clocks = True

    def hold(self, length_ms):
        """An operator holds takeovers at the leader; max(m, N - m + 1) members store the hold, or it is refused."""
        for machine in self.machines:
            if self.acts(machine) and isinstance(machine.service, Leads):
                grant, now_ms = machine.service.grant, machine.wall_ms(self)
                agree = {machine.index, *(one.index for one in self.others(machine) if one.grant == grant)}
                if len(agree) < grant.quorums[0].to_change:
                    continue
                until_ms = now_ms + length_ms
                change = lambda newest, epoch: newest.held(epoch, since_ms=now_ms, until_ms=until_ms, reason="work")  # noqa: B023,E731
                if (granted := self.elect(machine, change=change)) is not None:
                    self.holds = [(began_ms, min(end_ms, self.now_ms), *by) for began_ms, end_ms, *by in self.holds]
                    self.holds.append((self.now_ms, self.now_ms + length_ms, granted.hold, machine.wall_offset_ms))
                return

    def heal(self):
        self.cut.clear()
        for machine in self.machines:
            if not machine.is_node_up:
                machine.is_node_up, machine.started_ms = True, machine.now_ms(self)
            if machine.service is None:
                machine.start()


@pytest.mark.parametrize("steps_clocks", [False, True], ids=["clocks that agree", "clocks that jump"])
@pytest.mark.parametrize("count", [3, 5])
def test_pauses_and_holds_are_kept_and_somebody_leads_once_all_is_well(count, steps_clocks, torture):
    takeovers = handed_over = ran = 0
    worlds = torture.count(4, 500)
    for number in range(3 * worlds):
        if number >= worlds and handed_over:  # a few worlds may have no handover by chance
            break
        ran += 1
        world = World(count, torture.random(count, steps_clocks, number))
        world.steps_clocks = steps_clocks
        for _ in range(FAULTY_TICKS):
            world.tick()
            if world.draw.random() < 0.03:
                world.trouble()
        world.heal()
        for machine in world.machines:
            machine.suspended_until_ms = 0
        held_ms = max((until_ms for _, until_ms, *_ in world.holds), default=0) - world.now_ms
        for _ in range(QUIET_TICKS + max(0, held_ms) // TICK_MS):
            world.tick()
        assert world.now_ms - world.acknowledged_ms < 5 * TICK_MS, (number, "nobody leads, and nothing is in the way")
        takeovers += len(world.takeovers)
        handed_over += world.handed_over
    assert handed_over
    assert takeovers > ran


@pytest.mark.parametrize("fault", ["killed", "killed with its node", "stands still", "cut off"])
@pytest.mark.parametrize("count", [3, 5])
def test_another_acknowledges_within_five_seconds_of_the_limit(count, fault, torture):
    """The contract's number, outside of the pause, with as many members away as may be. Messages and fsyncs take no
    time here: what is left of the five seconds is for those.
    """
    for number in range(torture.count(10, 1_000)):
        world = World(count, torture.random(count, fault, number))
        for _ in range(2):
            for _ in range(TIMES.takeover_pause_ms // TICK_MS + world.draw.randrange(100)):
                world.tick()
            (leader,) = (one for one in world.machines if isinstance(one.service, Leads))
            others = [one for one in world.machines if one is not leader]
            away = world.draw.sample(others, world.draw.randrange((count - 1) // 2))
            lost_ms = world.now_ms
            for one in away:
                one.service, one.is_node_up = None, False
            if fault == "stands still":
                leader.suspended_until_ms = lost_ms + 3_600_000
            elif fault == "cut off":
                world.cut |= {(leader.index, one.index) for one in others}
            else:
                leader.service, leader.is_node_up = None, fault == "killed"
            while world.acknowledged_ms <= lost_ms:
                world.tick()
                assert world.now_ms - lost_ms <= TIMES.takeover_after_ms + 5_000, (number, "nobody acknowledged")
            leader.suspended_until_ms = 0
            world.heal()
        assert len(world.takeovers) == 2, "each time by a standby"
