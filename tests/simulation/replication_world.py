"""A world of members that replicate one partition by nothing but the pure rules: seeded, all in memory.

    Disk       what a member keeps: log, epochs, grant, numbers; what was not flushed can go with the power
    Member     a disk and one role at a time: down, node (follows), owner (candidate, then leader)
    World      picks one possible event after the other: deliver, lose, append, push, flush, crash, open, promote ...

Messages of a connection keep their order; connections overtake each other, and a cut one loses a tail. Effects are
carried out one by one, and the power can go between any two. `check` holds after every step:

    every leader's watermark tells one history, which no member contradicts below its own
    (epoch, offset) -> one batch, and one history before it, wherever it lies: prefix equality epoch by epoch
    whichever members are left of any m - 1 lost: the one that is ahead of them holds all that was acknowledged
    a leader stops in time once enough members showed it a newer grant, and leads on while m confirm its own, whatever
    one bad member shows (`lies`)
    one leader for each epoch; with forced grants all of this in each generation for itself, which begins as the log of
    the one that was forced to lead: nothing of an older generation gets into it
"""

# ruff: noqa: N802 - a method per effect has the name of the effect

import random
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import NamedTuple
from uuid import UUID

from pushrep.election import candidate as candidates
from pushrep.election import follower, leader
from pushrep.election import follower as do
from pushrep.election.candidate import Candidate, CandidateState, MemberAnswer, MemberLog, Purpose
from pushrep.election.epochs import LogEnds, Unfenced, granted_end, marked_unfenced, without_unfenced
from pushrep.election.errors import CantLead, NotLeader
from pushrep.election.follower import ReplicaState
from pushrep.election.grants import (
    GENERATION_TAG_BITS,
    Grant,
    OfferedGrant,
    base_of,
    judge_grant,
    next_ballot,
    next_generation,
)
from pushrep.election.grants import Member as Listed
from pushrep.election.leader import Confirmations, PartitionLeader
from pushrep.election.messages import Batch
from pushrep.election.push_session import SessionId
from pushrep.records.leader_epochs import LeaderEpochs
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode

TP = TopicIdPartition(UUID(int=2), "t", 0)


class Violation(AssertionError):
    """An invariant does not hold."""


class PowerCut(Exception):
    """The machine stopped in the middle of its effects."""


class Stored(NamedTuple):
    """A batch in a log; `history` is of everything up to its end."""

    batch: Batch
    history: int


@dataclass
class Disk:
    """A member's disk. flushed: records below this offset survive a power cut."""

    batches: list[Stored] = field(default_factory=list)
    start: int = 0
    start_history: int = 0
    flushed: int = 0
    epochs: LeaderEpochs = field(default_factory=LeaderEpochs)
    high_watermark: int = 0
    grant: Grant | None = None
    taken: int = -1
    numbers: int = -1
    unfenced: Unfenced | None = None
    runs: int = 0
    directory_id: UUID | None = None
    generation: int = 0  # of the log; below the grant's while it is to be set aside
    is_unfilled: bool = False

    @property
    def end(self):
        return self.batches[-1].batch.next_offset if self.batches else self.start

    @property
    def ends(self):
        return LogEnds(self.start, self.end, self.epochs)

    @property
    def highest_epoch(self):
        return max(self.taken, self.numbers, self.grant.epoch if self.grant else -1, self.epochs.latest_epoch)

    def history_at(self, offset):
        """The hash of the log's history below `offset`; None if no batch ends there."""
        if offset == self.start:
            return self.start_history
        low, high = 0, len(self.batches)
        while low < high:
            middle = (low + high) // 2
            if self.batches[middle].batch.next_offset < offset:
                low = middle + 1
            else:
                high = middle
        found = low < len(self.batches) and self.batches[low].batch.next_offset == offset
        return self.batches[low].history if found else None

    def index_of(self, offset):
        low, high = 0, len(self.batches)
        while low < high:
            middle = (low + high) // 2
            if self.batches[middle].batch.base_offset < offset:
                low = middle + 1
            else:
                high = middle
        return low

    def base_of(self, offset):
        """The base offset of the batch that holds `offset`; `offset` itself at the log's end."""
        at = self.index_of(offset + 1) - 1
        held = at >= 0 and self.batches[at].batch.next_offset > offset
        return self.batches[at].batch.base_offset if held else offset

    def batch_at(self, offset):
        at = self.index_of(offset)
        if at < len(self.batches) and self.batches[at].batch.base_offset == offset:
            return self.batches[at].batch.data
        return None

    def read(self, offset, end, count):
        """Up to `count` batches of [offset, end)."""
        at = self.index_of(offset)
        return tuple(stored.batch for stored in self.batches[at : at + count] if stored.batch.next_offset <= end)

    def cut(self, offset):
        """Cut the log as LogEnds.cut decides; the rest is on disk."""
        self.epochs = self.ends.cut(offset).leader_epochs
        while self.batches and self.batches[-1].batch.base_offset >= offset:
            self.batches.pop()
        self.flushed = min(self.flushed, self.end)

    def answer(self, index, contact_age_ms=None):
        log = MemberLog(log=self.ends, high_watermark=self.high_watermark, unfenced=self.unfenced)
        return MemberAnswer(
            index=index,
            grant=self.grant,
            highest_epoch=self.highest_epoch,
            logs={0: log},
            contact_age_ms=contact_age_ms,
            directory_id=self.directory_id,
            is_unfilled=self.is_unfilled,
            generation=self.grant.generation if self.grant else 0,
        )


class Line:
    """The records that one generation acknowledged, and its leaders."""

    def __init__(self):
        self.known = {}  # (epoch, base offset) -> history behind it, wherever it lies
        self.committed = {0: 0}  # offset -> history, of every watermark of a leader
        self.committed_end = 0
        self.leaders = {}

    @classmethod
    def of(cls, disk, watermark):
        """That begins as this log."""
        line = cls()
        line.known = {(one.batch.leader_epoch, one.batch.base_offset): one.history for one in disk.batches}
        ends = {one.batch.next_offset: one.history for one in disk.batches}
        line.committed = {disk.start: disk.start_history}
        line.committed |= {end: history for end, history in ends.items() if end <= watermark}
        line.committed_end = watermark
        return line


class Owner:
    """The process of a service: a candidate, then a leader, or one that appends without a grant."""

    def __init__(self, candidate):
        self.candidate = candidate
        self.leader = None
        self.fetch = None
        self.describing = set()
        self.next_session = 1
        self.said = {}
        self.shown = {}
        self.is_ungranted = False
        self.began_at = 0
        self.confirmations = None
        self.confirmed = {}  # by member that does not lie: when it showed this leader's grant last
        self.deposed = {}  # by such a member: when it showed a newer one first


class Contact(NamedTuple):
    """With the leader of `epoch`, at step `at`; never longer apart than a living one may be silent since `since`."""

    epoch: int
    at: int
    since: int


NO_CONTACT = Contact(-1, 0, 0)


@dataclass
class Machine:
    index: int
    disk: Disk = field(default_factory=Disk)
    role: str = "down"
    owner: Owner | None = None
    session: do.ReplicaSession = do.NO_SESSION
    watermark: int = 0  # in memory; the disk's is a checkpoint
    serial: int = 0
    started_at: int = 0
    contact: Contact = NO_CONTACT


class Message(NamedTuple):
    kind: str
    source: int
    target: int
    body: object
    serial: int  # of the process it is meant for or came from; an answer to another process is lost


@dataclass(frozen=True)
class Rules:
    """How the world goes, and what its shells do wrong."""

    members: int = 3
    min_insync: int = 2
    machines: int = 3
    flushed_only: bool = True
    loses_power: bool = True
    changes_members: bool = False
    accepts_loss: bool = False
    forces: bool = False
    leader_alive_steps: int = 0
    doubt_steps: int = 0  # how long a leader leads on that too few confirm; 0: drawn
    wipes: float = 0  # how many of all troubles
    lies: float = 0  # how many answers of one bad member show a newer grant that nobody has
    fsyncs_epochs: bool = True
    answers_last: bool = True


class World:
    """One seeded run. `steps` raises Violation."""

    def __init__(self, seed, rules=Rules()):
        self.random = random.Random(seed)
        self.seed, self.rules = seed, rules
        # Each seed has a temper of its own (swarm testing): what one mix of events hides, another shows.
        draw = self.random.choice
        self.trouble_rate = draw((0.01, 0.03, 0.08))
        self.deliver_rate = draw((0.4, 0.6, 0.75))
        self.troubles = [draw((0.2, 1, 5)) for _ in range(5)]
        self.troubles[4] = draw((0, 0, 0, 1))
        self.works = [draw((0.3, 1, 3)) for _ in range(7)]
        self.power_rate = draw((0, 0.003, 0.02))
        self.window = draw((1, 3, 6))
        self.machines = [Machine(index) for index in range(rules.machines)]
        self.wires = {}
        self.cuts = {}
        self.lines = {0: Line()}  # by generation
        self.now_ms = self.now_steps = 0
        self.counts = {}
        self.trace = deque(maxlen=60)
        self.first = Grant(
            outbox_id=UUID(int=1),
            epoch=0,
            leader=0,
            members=tuple(Listed(index) for index in range(rules.members)),
            min_insync_replicas=rules.min_insync,
            members_epoch=0,
            pid_epoch=0,
            topic_id=UUID(int=2),
            topic="t",
            partitions=1,
            carrier="key",
        )
        self.unsynced = {}
        self.directories, self.lost, self.aside = 0, set(), {}
        for machine in self.machines:
            self.new_directory(machine)
        self.looks = {}
        in_doubt = rules.doubt_steps or random.Random(f"alive {seed}").choice((1, 30, 100))
        self.alive_steps = rules.leader_alive_steps or in_doubt
        self.liar = self.random.randrange(rules.machines) if rules.lies else -1
        self.slow = set()
        self.heals_at = -1
        for machine in self.machines[1:]:
            self.start_node(machine)

    # ---- the loop

    def steps(self, count):
        for _ in range(count):
            self.step()
        return self

    def step(self):
        self.now_steps += 1
        if self.now_steps == self.heals_at:
            self.slow = set()
        draw = self.random.random()
        try:
            if draw < self.trouble_rate:
                self.trouble(self.random.choice(self.machines))
            elif self.wires and draw < self.trouble_rate + self.deliver_rate:
                wire = self.random.choice(list(self.wires))
                if wire[:2] not in self.slow:
                    self.deliver(wire)
            else:
                self.work(self.random.choice(self.machines))
        except PowerCut as cut:
            self.crash(self.machines[cut.args[0]])
        self.check_ahead()

    def work(self, machine):
        if machine.role == "node":
            if self.random.random() < 0.1:
                machine.disk.high_watermark = min(machine.watermark, machine.disk.end)
        elif machine.role == "owner":
            self.own_work(machine)
        elif self.random.random() < 0.3:
            self.rise(machine)

    def new_directory(self, machine):
        self.directories += 1
        machine.disk.directory_id = UUID(int=self.directories)

    @property
    def committed_end(self):
        return max(line.committed_end for line in self.lines.values())

    def line_of(self, machine):
        """The line of the generation of the member's log."""
        return self.lines[machine.disk.generation]

    def wipe(self, machine):
        """A new disk under the old name, with no records and no promises; or an older disk that is put back. At most m
        - 1 members at a time. A member that leads alone (m = N) does not learn that it was replaced.
        """
        grants = [one.disk.grant for one in self.machines if one.disk.grant is not None]
        are_named = grants and not any(grant.nameless for grant in grants)
        if not are_named or machine.role != "node" or len(self.lost | {machine.index}) >= self.rules.min_insync:
            return
        self.lost.add(machine.index)
        before = machine.disk
        returns = self.random.random() < 0.5 and self.rules.members > self.rules.min_insync
        machine.disk = self.aside.get(machine.index) if returns else None
        self.note(machine, "put back" if machine.disk is not None else "wipe")
        if machine.disk is None:
            machine.disk = Disk()
            self.new_directory(machine)
        machine.disk.runs = before.runs
        self.aside[machine.index] = before
        self.start_node(machine)

    def trouble(self, machine):
        if self.rules.wipes and self.random.random() < self.rules.wipes:
            self.wipe(machine)
            return
        (kind,) = self.random.choices(("crash", "cut", "promote", "time", "slow"), self.troubles)
        if kind == "crash":
            self.crash(machine)
        elif kind == "cut":
            self.cut_wires(machine)
        elif kind == "slow":  # what is on its way in one direction waits; perhaps for longer than its sender lives
            pairs = [(one.index, other.index) for one in self.machines for other in self.machines if one is not other]
            self.slow = set(self.random.sample(pairs, self.random.randint(0, 2)))
        elif kind == "promote":
            if machine.role == "node":
                self.promote(machine)
            elif self.may_force(machine) and self.random.random() < 0.3:
                self.force(machine)
        elif machine.role == "owner" and machine.owner.leader is None:
            self.note(machine, "deadline")
            self.apply_candidate(machine, machine.owner.candidate.on_deadline())
        else:
            self.now_ms += self.random.choice((1, 10_000, 40_000))

    def note(self, machine, what):
        self.trace.append(f"{machine.index}: {what}")
        key = str(what).split(" ")[0].split("(")[0]
        self.counts[key] = self.counts.get(key, 0) + 1

    # ---- processes

    def start_node(self, machine):
        self.finish_setting_aside(machine)
        machine.role, machine.owner, machine.serial = "node", None, machine.serial + 1
        machine.started_at, machine.contact = self.now_steps, NO_CONTACT
        machine.disk.runs += 1
        machine.session = do.NO_SESSION
        machine.watermark = machine.disk.high_watermark

    def rise(self, machine):
        grant = machine.disk.grant
        leads = grant.leader == machine.index if grant else machine.index == 0
        if leads and self.random.random() < 0.8:
            self.open(machine, Purpose.OPEN)
        else:
            self.start_node(machine)

    def open(self, machine, purpose, change=None):
        self.note(machine, purpose.name)
        self.finish_setting_aside(machine)
        machine.role, machine.serial = "owner", machine.serial + 1
        machine.watermark = machine.disk.high_watermark
        machine.session = do.NO_SESSION
        # In a directory that was wiped another outbox would begin, with an id of its own.
        first = self.first if machine.index == 0 and machine.index not in self.aside else None
        if first is None and machine.disk.grant is None:
            self.start_node(machine)
            return
        candidate = Candidate(
            machine.index,
            purpose,
            machine.disk.answer(machine.index, self.contact_age(machine)),
            first=first,
            change=change,
            leader_alive_ms=self.rules.leader_alive_steps,
            leads=change is not None,
        )
        machine.owner = Owner(candidate)
        machine.owner.began_at = self.now_steps
        self.apply_candidate(machine, candidate.start())

    def promote(self, machine):
        if machine.disk.grant is None or machine.index not in machine.disk.grant.indexes:
            return
        if self.rules.accepts_loss and self.random.random() < 0.5:
            self.promote_with_loss(machine)
            return
        if self.rules.forces and self.random.random() < 0.3:
            self.force(machine)
            return
        machine.disk.high_watermark = min(machine.watermark, machine.disk.end)  # the node closes its log cleanly
        self.open(machine, self.random.choice((Purpose.PROMOTE, Purpose.PROMOTE_AND_CATCH_UP)))

    def promote_with_loss(self, machine):
        """An operator's --accept-loss: it leads without asking anybody."""
        epoch = next_ballot(machine.index, machine.disk.highest_epoch)
        grant = machine.disk.grant.renewed(epoch, machine.index)
        machine.role, machine.serial = "owner", machine.serial + 1
        machine.owner = Owner(None)
        machine.disk.high_watermark = min(machine.watermark, machine.disk.end)
        self.note(machine, "accept_loss")
        for effect in (do.StoreEpoch(epoch), do.StoreGrant(grant), candidates.Lead(grant)):
            self.apply_candidate(machine, [effect])

    def may_force(self, machine):
        return self.rules.forces and machine.role == "down" and machine.disk.grant is not None

    def force(self, machine):
        """A grant behind a loss that was accepted, while the others are only away: they come back later."""
        self.finish_setting_aside(machine)
        disk, grant = machine.disk, machine.disk.grant
        if machine.index not in grant.indexes or disk.end < disk.high_watermark:
            return
        if machine.role == "down":
            machine.watermark = disk.high_watermark
        disk.high_watermark = machine.watermark = min(machine.watermark, disk.end)
        others = sorted(grant.indexes - {machine.index})
        reached = set(self.random.sample(others, self.random.randint(0, len(others))))
        near = {machine.index, *reached}
        seen = near if self.random.random() < 0.3 else range(len(self.machines))  # or two are forced beside each other
        self.slow = {
            (one.index, other.index)
            for one in self.machines
            for other in self.machines
            if (one.index in near) != (other.index in near)
        }
        self.heals_at = self.now_steps + self.random.randint(1, 400)
        shown = [self.machines[index].disk.grant for index in seen]
        generation = next_generation(
            max(one.generation for one in shown if one is not None), self.random.getrandbits(GENERATION_TAG_BITS)
        )
        epoch = next_ballot(machine.index, disk.highest_epoch)
        forced = grant.forced(
            epoch,
            machine.index,
            generation,
            members=tuple(one for one in grant.members if one.index in grant.indexes),
            min_insync_replicas=grant.min_insync_replicas,
            reached=reached,
        )
        self.note(machine, f"force {generation >> GENERATION_TAG_BITS}")
        machine.role, machine.serial = "owner", machine.serial + 1
        machine.owner = Owner(None)
        self.lines[generation] = Line.of(disk, machine.watermark)
        self.durable(machine, numbers=epoch)
        self.power(machine)
        self.durable(machine, grant=forced, taken=epoch, generation=generation, is_unfilled=False)
        for member in others:
            self.send("grant", machine.index, member, forced, machine.serial)
        self.power(machine)
        self.lead(machine, forced)

    def finish_setting_aside(self, machine):
        """The member's log is of an older generation than the grant: the whole log is set aside."""
        disk = machine.disk
        if disk.grant is None or disk.grant.generation == disk.generation:
            return
        if self.power_rate and self.random.random() < 0.3:
            raise PowerCut(machine.index)
        self.note(machine, "aside")
        machine.disk = replace(
            Disk(), grant=disk.grant, taken=disk.taken, numbers=disk.numbers, runs=disk.runs,
            directory_id=disk.directory_id, is_unfilled=disk.is_unfilled, generation=disk.grant.generation,
        )  # fmt: skip
        machine.watermark = 0

    def crash(self, machine):
        if machine.role == "down":
            return
        self.note(machine, "crash")
        disk = machine.disk
        if self.rules.loses_power:
            unsynced = [stored for stored in disk.batches if stored.batch.next_offset > disk.flushed]
            lost = self.random.randint(0, len(unsynced))
            for _ in range(lost):
                disk.batches.pop()
        disk.epochs = disk.epochs.cut_from(disk.end + 1)
        disk.flushed = disk.end
        for name, value in self.unsynced.pop(machine.index, {}).items():
            setattr(disk, name, value)
        if machine.watermark <= disk.end and self.random.random() < 0.3:
            disk.high_watermark = max(disk.high_watermark, machine.watermark)
        machine.role, machine.owner, machine.serial = "down", None, machine.serial + 1

    # ---- wires

    def send(self, kind, source, target, body, serial):
        if target >= len(self.machines):
            return
        pair = (source, target)
        wire = (*pair, self.cuts.get(pair, 0))
        self.wires.setdefault(wire, deque()).append(Message(kind, source, target, body, serial))

    def cut_wires(self, machine):
        """Every connection of this machine: a tail is lost, the rest may still arrive, however late."""
        self.note(machine, "cut")
        for wire, queue in self.wires.items():
            if machine.index in wire[:2] and wire[2] == self.cuts.get(wire[:2], 0):
                for _ in range(self.random.randint(0, len(queue))):
                    queue.pop()
        for other in self.machines:
            for pair in ((machine.index, other.index), (other.index, machine.index)):
                self.cuts[pair] = self.cuts.get(pair, 0) + 1
            self.disconnect(machine, other.index)
            self.disconnect(other, machine.index)
        self.wires = {wire: queue for wire, queue in self.wires.items() if queue}

    def disconnect(self, machine, other):
        if machine.owner is None:
            return
        machine.owner.describing.discard(other)
        if machine.owner.leader is not None:
            machine.owner.leader.on_disconnect(other)
        elif machine.owner.fetch is not None and machine.owner.fetch.member == other:
            machine.role, machine.owner = "down", None  # gives up; begins anew later

    def deliver(self, wire):
        queue = self.wires[wire]
        message = queue.popleft()
        if not queue:
            del self.wires[wire]
        machine = self.machines[message.target]
        handler = getattr(self, f"on_{message.kind}")
        if message.kind.endswith("answer"):
            if machine.role == "owner" and machine.serial == message.serial:
                handler(machine, message)
        elif machine.role == "node":
            handler(machine, message)

    def reply(self, machine, message, body):
        if machine.index == self.liar and self.random.random() < self.rules.lies:
            body = self.altered(machine, message.kind, body)
        self.send(message.kind + "_answer", machine.index, message.source, body, message.serial)

    def altered(self, machine, kind, body):
        """The answer, with a newer grant than there is."""
        leads = self.random.randrange(self.rules.members)
        above, highest = self.random.choice((0, 256, 1 << 30)), machine.disk.highest_epoch
        epoch = next_ballot(leads, highest + (above if highest < 1 << 30 else 0))  # twice so far leaves 31 bits
        self.note(machine, "lies")
        if kind == "append":
            session, sequence, result = body
            code = self.random.choice((result.error_code, ErrorCode.FENCED_LEADER_EPOCH))
            return session, sequence, replace(result, error_code=code, grant_epoch=epoch, grant_leader=leads)
        grant = machine.disk.grant
        if grant is None or leads not in {one.index for one in grant.members}:
            return body
        if kind in {"look", "grant"}:
            return replace(body, grant=grant.renewed(epoch, leads), highest_epoch=epoch)
        return (*body[:-1], grant.renewed(epoch, leads)) if kind == "describe" else body

    # ---- candidates

    def apply_candidate(self, machine, effects):
        disk, owner = machine.disk, machine.owner
        for effect in effects:
            self.note(machine, effect)
            self.power(machine)
            if isinstance(effect, candidates.Look):
                for member in effect.members:
                    self.send("look", machine.index, member, None, machine.serial)
            elif isinstance(effect, do.StoreEpoch):
                self.check_fences_no_living(machine)
                self.durable(machine, numbers=effect.leader_epoch)
            elif isinstance(effect, do.StoreGrant):
                if effect.grant.generation != disk.generation:
                    raise Violation(f"{machine.index} would lead in a generation that its log is not of")
                self.durable(machine, grant=effect.grant, taken=max(disk.taken, effect.grant.epoch))
            elif isinstance(effect, candidates.SendGrant):
                for member in effect.members:
                    self.send("grant", machine.index, member, effect.grant, machine.serial)
            elif isinstance(effect, candidates.Fetch):
                self.begin_fetch(machine, effect)
            elif isinstance(effect, candidates.Lead):
                self.lead(machine, effect.grant)
            elif isinstance(effect, candidates.Refused):
                self.refused(machine, effect.error)
            if machine.owner is not owner:
                return

    def begin_fetch(self, machine, fetch):
        disk = machine.disk
        if disk.unfenced is not None:
            self.set_aside_ungranted(disk, without_unfenced(disk.ends, disk.unfenced))
        if fetch.cut_at < disk.high_watermark:
            raise Violation(f"{machine.index} would cut at {fetch.cut_at}, below its watermark {disk.high_watermark}")
        if fetch.anew is not None:
            self.set_aside(machine, fetch.anew)
        disk.cut(fetch.cut_at)
        if fetch.member == machine.index or disk.end >= fetch.until.end_offset:
            disk.flushed = disk.end
            self.apply_candidate(machine, machine.owner.candidate.on_fetched(0))
            return
        machine.owner.fetch = fetch
        self.send("fetch", machine.index, fetch.member, (machine.owner.candidate.grant.rank, disk.end), machine.serial)

    def on_fetch(self, machine, message):
        rank, offset = message.body
        if machine.disk.grant is not None and machine.disk.grant.rank == rank and offset >= machine.disk.start:
            self.reply(machine, message, machine.disk.read(offset, machine.disk.end, 2))

    def on_fetch_answer(self, machine, message):
        fetch, disk = machine.owner.fetch, machine.disk
        if fetch is None or machine.owner.leader is not None:
            return
        for batch in message.body:
            if batch.base_offset == disk.end and batch.next_offset <= fetch.until.end_offset:
                self.write(machine, batch)
        if disk.end < fetch.until.end_offset:
            body = (machine.owner.candidate.grant.rank, disk.end)
            self.send("fetch", machine.index, fetch.member, body, machine.serial)
            return
        disk.flushed = disk.end
        machine.owner.fetch = None
        self.apply_candidate(machine, machine.owner.candidate.on_fetched(0))

    def lead(self, machine, grant):
        disk = machine.disk
        if grant.generation != disk.generation:
            raise Violation(f"{machine.index} leads in {grant.generation} over a log of {disk.generation}")
        if self.random.random() < 0.5:  # the effect says so; the watermark must be safe if a shell forgets
            disk.flushed = disk.end
        self.begin_epoch(disk, grant.epoch, disk.end)
        leaders = self.line_of(machine).leaders
        if leaders.setdefault(grant.epoch, (machine.index, machine.serial)) != (machine.index, machine.serial):
            raise Violation(f"epoch {grant.epoch} of {machine.index} is led twice")
        self.lost -= {
            one.index
            for one in grant.members
            if one.index not in grant.entering and one.directory_id == self.machines[one.index].disk.directory_id
        }
        disk.unfenced = None
        machine.owner.confirmations = Confirmations(grant, self.alive_steps)
        machine.owner.leader = PartitionLeader(
            grant,
            disk.ends,
            flushed_offset=disk.flushed,
            high_watermark=disk.high_watermark,
            flushed_only=self.rules.flushed_only,
            now_ms=self.now_ms,
        )
        self.apply_leader(machine, machine.owner.leader.start())

    def refused(self, machine, error):
        self.note(machine, f"refused {type(error).__name__}")
        owner, disk = machine.owner, machine.disk
        is_open = owner.candidate.purpose is Purpose.OPEN
        own_grant = disk.grant is not None and disk.grant.leader == machine.index
        if type(error).__name__ == "TooFewMembers" and is_open and own_grant and owner.candidate.grant is None:
            self.append_ungranted(machine)
        machine.role, machine.owner = "down", None
        if isinstance(error, NotLeader | CantLead) or not is_open:
            self.start_node(machine)

    def append_ungranted(self, machine):
        """acks=LOCAL while too few answer: under the next own number, marked, never pushed."""
        disk = machine.disk
        epoch = next_ballot(machine.index, disk.highest_epoch)
        disk.unfenced = marked_unfenced(disk.ends, disk.unfenced)
        disk.numbers = epoch
        self.begin_epoch(disk, epoch, disk.end)
        for _ in range(self.random.randint(1, 3)):
            self.append(machine, epoch)
        self.note(machine, "ungranted")

    # ---- leaders

    def own_work(self, machine):
        owner = machine.owner
        if owner.leader is None:
            candidate = owner.candidate
            waits = candidate.state is CandidateState.LOOKING and candidate.purpose is Purpose.PROMOTE
            if waits and self.random.random() < 0.1:  # it wants to hear everybody, and one of them may be down
                self.apply_candidate(machine, candidate.on_deadline())
            return
        self.find_out(machine)
        if owner.leader.has_resigned:
            machine.role, machine.owner, machine.serial = "down", None, machine.serial + 1
            return
        if owner.leader.grant.is_led_alone and self.rules.forces and owner.leader.may_settle:
            self.note(machine, "settled")
            self.reopen(machine, lambda base, epoch: base.settled(epoch))
            return
        if self.rules.wipes and owner.leader.uncounted and self.random.random() < 0.3:
            self.admit(machine)
            return
        kinds = ("append", "flush", "push", "tick", "start", "checkpoint", "change")
        (kind,) = self.random.choices(
            kinds, [w * k for w, k in zip(self.works, (6, 4, 14, 1, 0.5, 1, 0.7), strict=True)]
        )
        if kind == "append":
            self.append(machine, owner.leader.grant.epoch)
            self.apply_leader(machine, owner.leader.on_append(machine.disk.end, self.now_ms))
        elif kind == "flush":
            machine.disk.flushed = machine.disk.end
            self.apply_leader(machine, owner.leader.on_flush(machine.disk.end))
        elif kind == "push":
            self.push(machine)
        elif kind == "tick":
            self.apply_leader(machine, owner.leader.on_tick(self.now_ms))
        elif kind == "start":
            self.raise_start(machine)
        elif kind == "checkpoint":
            machine.disk.high_watermark = owner.leader.high_watermark
        elif self.rules.changes_members:
            self.change_members(machine)

    def append(self, machine, epoch):
        base, count = machine.disk.end, self.random.randint(1, 3)
        data = b"%d %d %d %d" % (epoch, base, count, self.random.getrandbits(30))
        self.write(machine, Batch(base, base + count, epoch, data))

    def write(self, machine, batch):
        """Append to a log, and check that an epoch has one history in all logs."""
        disk = machine.disk
        if batch.base_offset != disk.end:
            raise Violation(f"{machine.index} appends at {batch.base_offset}, its log ends at {disk.end}")
        before = disk.history_at(disk.end)
        history = hash((before, batch.data))
        known = self.line_of(machine).known
        if known.setdefault((batch.leader_epoch, batch.base_offset), history) != history:
            raise Violation(f"epoch {batch.leader_epoch} has two histories at {batch.base_offset}")
        disk.batches.append(Stored(batch, history))
        disk.epochs = disk.epochs.assigned(batch.leader_epoch, batch.base_offset)

    def push(self, machine):
        owner, disk = machine.owner, machine.disk
        targets = [index for index in range(len(self.machines)) if index != machine.index]
        if not self.rules.changes_members:
            targets = [index for index in targets if index in owner.leader.grant.indexes]
        target = self.random.choice(targets)
        progress = owner.leader.sessions.get(target)
        if progress is None or not progress.is_live:
            if target not in owner.describing or self.random.random() < 0.1:
                owner.describing.add(target)
                shown = owner.leader.grant if self.rules.forces else None  # a session begins with it
                self.send("describe", machine.index, target, shown, machine.serial)
            return
        if len(progress.in_flight) >= self.window:
            return
        start = disk.base_of(progress.next_offset)
        batches = disk.read(start, disk.end, self.random.randint(1, 3))
        news = (owner.leader.high_watermark, disk.start)
        if not batches and progress.acknowledged is not None and owner.said.get(target) == news:
            return
        owner.said[target] = news
        end = batches[-1].next_offset if batches else start
        sent, request = owner.leader.request(target, start, end, TP)
        body = (progress.id, sent.sequence, request.with_batches(batches, True))
        self.send("append", machine.index, target, body, machine.serial)

    def on_describe(self, machine, message):
        if message.body is not None:
            self.take_grant(machine, message.body, message.source)
        disk = machine.disk
        self.reply(machine, message, (disk.ends, disk.runs, disk.directory_id, disk.grant))

    def on_describe_answer(self, machine, message):
        owner = machine.owner
        if owner.leader is None or owner.leader.has_resigned or message.source not in owner.describing:
            return
        owner.describing.discard(message.source)
        theirs, runs, directory_id, grant = message.body
        if self.rules.forces and grant is not None:
            shown = owner.leader.on_grant_shown(message.source, grant.generation, grant.epoch, grant.leader)
            self.apply_leader(machine, shown)
            if shown or grant.generation != owner.leader.grant.generation:
                return
        owner.shown[message.source] = directory_id
        is_members = owner.leader.grant.is_member(message.source, directory_id)
        self.apply_leader(machine, owner.leader.on_directory(message.source, is_members=is_members))
        session = SessionId(owner.leader.grant.epoch, runs, owner.next_session)
        owner.next_session += 1
        self.apply_leader(machine, owner.leader.start_session(message.source, session, theirs))

    def on_append_answer(self, machine, message):
        leading = machine.owner.leader
        if leading is not None:
            session, sequence, result = message.body
            progress = leading.sessions.get(message.source)
            is_live = progress is not None and progress.is_live and progress.id == session
            effects = leading.on_answer(message.source, session, sequence, result)
            is_older = result.generation >> GENERATION_TAG_BITS < leading.grant.generation >> GENERATION_TAG_BITS
            if is_older and any(isinstance(effect, leader.Resigned) for effect in effects):
                raise Violation(f"{machine.index} is deposed by an older generation")
            if result.generation == leading.grant.generation:
                self.check_leads_on(machine.owner, effects)
            self.apply_leader(machine, effects)
            is_ours = (result.generation, result.grant_epoch) == leading.grant.rank
            if is_live and is_ours and result.error_code is not ErrorCode.FENCED_LEADER_EPOCH:
                machine.owner.confirmations.on_own(message.source, self.now_steps)
                if message.source != self.liar:
                    machine.owner.confirmed[message.source] = self.now_steps

    def find_out(self, machine):
        """Stop if too few have confirmed this lead."""
        owner = machine.owner
        if (newer := owner.confirmations.newer_grant(self.now_steps)) is not None:
            effects = owner.leader.resign(newer[1], newer[0])
            self.check_leads_on(owner, effects)
            self.apply_leader(machine, effects)
        self.check_stops_in_time(owner)

    def check_leads_on(self, owner, effects):
        """No lead ends by a grant of its generation while m members that do not lie confirm it."""
        if not any(isinstance(effect, leader.Resigned) for effect in effects):
            return
        confirmed = {one for one, at in owner.confirmed.items() if self.now_steps - at < self.alive_steps}
        if owner.leader.grant.may_acknowledge({owner.leader.grant.leader, *confirmed}):
            raise Violation(f"the lead of {owner.leader.grant.leader} ends, and {sorted(confirmed)} confirm it")

    def check_stops_in_time(self, owner):
        """No leader goes on that so many members have shown a newer grant, long ago, that another may lead by it."""
        grant, late = owner.leader.grant, self.now_steps - self.alive_steps
        deposed = {one for one, at in owner.deposed.items() if at <= late}
        if (
            not owner.leader.has_resigned
            and not self.rules.wipes
            and len(grant.quorums) == 1
            and grant.too_few_to_lead(deposed) is None
        ):
            raise Violation(f"{grant.leader} leads on, and {sorted(deposed)} have shown a newer grant")

    def apply_leader(self, machine, effects):
        for effect in effects:
            if not isinstance(effect, leader.Push):
                self.note(machine, effect)
            if isinstance(effect, leader.Contested):
                owner = machine.owner
                owner.confirmations.on_newer(*effect, self.now_steps)
                owner.confirmed.pop(effect.replica, None)
                stored = self.machines[effect.replica].disk.grant
                if effect.replica != self.liar and stored is not None and stored.rank > owner.leader.grant.rank:
                    owner.deposed.setdefault(effect.replica, self.now_steps)
            if isinstance(effect, leader.HighWatermarkMoved):
                machine.watermark = effect.high_watermark
                self.commit(machine, effect.high_watermark)
            elif isinstance(effect, leader.SessionEnded) and effect.is_alarm and not self.rules.accepts_loss:
                raise Violation(f"a replica waits for an operator: {effect}")

    def raise_start(self, machine):
        disk, leading = machine.disk, machine.owner.leader
        if disk.end - disk.start < 12:
            return
        bases = [
            stored.batch.base_offset for stored in disk.batches if stored.batch.base_offset <= leading.high_watermark
        ]
        if bases:
            self.drop_below(disk, bases[-1])
            self.apply_leader(machine, leading.on_log_start(disk.start))

    def drop_below(self, disk, offset):
        """The log starts at the batch that holds `offset`."""
        while disk.batches and disk.batches[0].batch.next_offset <= offset:
            disk.start_history = disk.batches[0].history
            disk.start = disk.batches[0].batch.next_offset
            disk.batches.pop(0)
        disk.epochs = disk.epochs.cut_below(disk.start)
        disk.high_watermark = max(disk.high_watermark, disk.start)

    def change_members(self, machine):
        """One member at a time; a joint grant, then one of the new list alone."""
        leading = machine.owner.leader
        grant = leading.grant
        if grant.previous_members:
            if leading.may_settle:
                self.reopen(
                    machine,
                    lambda base, epoch: (
                        base.settled(epoch) if base.previous_members else base.renewed(epoch, machine.index)
                    ),
                )
            return
        listed = {member.index for member in grant.members}
        joining = sorted(leading.caught_up - listed)
        leaving = sorted(listed - {machine.index})
        if joining and self.random.random() < 0.6:
            members = (*grant.members, Listed(self.random.choice(joining)))
        elif len(leaving) > 1:
            gone = self.random.choice(leaving)
            members = tuple(member for member in grant.members if member.index != gone)
        else:
            return

        def change(base, epoch):
            if base.members_epoch != grant.members_epoch or base.previous_members:
                return base.renewed(epoch, machine.index)
            return base.with_members(epoch, members)

        self.reopen(machine, change)

    def admit(self, machine):
        """A member with a new directory was filled: a grant that names it, and then one that counts it."""
        leading = machine.owner.leader
        grant = leading.grant
        if grant.entering and leading.may_settle:
            self.note(machine, "admitted")
            self.reopen(
                machine,
                lambda base, epoch: base.settled(epoch) if base.entering else base.renewed(epoch, machine.index),
            )
        filled = sorted((leading.uncounted & leading.caught_up & grant.indexes) - grant.entering)
        if grant.previous_members or not filled:
            return
        shown = machine.owner.shown[filled[0]]

        def change(base, epoch):
            if base.members_epoch != grant.members_epoch:
                return base.renewed(epoch, machine.index)
            return base.with_directory(epoch, filled[0], shown)

        self.reopen(machine, change)

    def reopen(self, machine, change):
        self.note(machine, "change_members")
        machine.disk.flushed = machine.disk.end
        machine.disk.high_watermark = machine.owner.leader.high_watermark
        self.open(machine, Purpose.OPEN, change)

    # ---- nodes

    def state_of(self, machine):
        disk = machine.disk
        return ReplicaState(
            log=disk.ends,
            flushed_offset=disk.flushed,
            high_watermark=machine.watermark,
            leader_epoch=disk.taken,
            replica_epoch=disk.runs,
            grant=disk.grant,
            session=machine.session,
            unfenced=disk.unfenced,
        )

    def on_look(self, machine, message):
        machine.disk.high_watermark = machine.watermark
        self.reply(machine, message, machine.disk.answer(machine.index, self.contact_age(machine)))

    on_look_answer = None

    def contact_age(self, machine):
        """The age of the last contact as a node reports it: since its start if it had none."""
        grant, contact = machine.disk.grant, machine.contact
        if not self.rules.leader_alive_steps or grant is None or grant.leader == machine.index:
            return None
        return self.now_steps - (contact.at if contact.epoch >= grant.epoch else machine.started_at)

    def hear(self, machine, epoch):
        before, now = machine.contact, self.now_steps
        if epoch >= before.epoch:
            goes_on = epoch == before.epoch and now - before.at < self.rules.leader_alive_steps
            machine.contact = Contact(epoch, now, before.since if goes_on else now)

    def check_fences_no_living(self, machine):
        """A number is taken from a leader that m members, it counted, were in contact with all the time since."""
        owner, steps = machine.owner, self.rules.leader_alive_steps
        if not steps or owner.candidate is None or owner.candidate.purpose is Purpose.OPEN:
            return
        leads = [one for one in self.machines if one.owner is not None and one.owner.leader is not None]
        for leading in (one for one in leads if not one.owner.leader.has_resigned):
            grant = leading.owner.leader.grant
            heard = {
                one.index
                for one in self.machines
                if one.disk.grant is not None
                and one.contact.epoch == grant.epoch == one.disk.grant.epoch
                and one.contact.since <= owner.began_at
                and self.now_steps - one.contact.at < steps
            }
            if heard and machine.index != leading.index and grant.may_acknowledge({leading.index, *heard}):
                raise Violation(f"{machine.index} fences {leading.index}, which {sorted(heard)} heard all the time")

    def on_grant(self, machine, message):
        self.take_grant(machine, message.body, message.source)
        disk = machine.disk
        disk.high_watermark = machine.watermark
        self.reply(machine, message, disk.answer(machine.index))

    def take_grant(self, machine, grant, sender):
        disk = machine.disk
        verdict = judge_grant(OfferedGrant(grant, sender, disk.grant, disk.taken, disk.is_unfilled))
        self.note(machine, f"grant {verdict.name}")
        if verdict is not ErrorCode.NONE:
            return
        older, newer = ((one >> GENERATION_TAG_BITS, one) for one in (disk.generation, grant.generation))
        if newer < older or (newer[0] == older[0] and newer != older):
            raise Violation(f"{machine.index} goes from generation {older} to {newer}")
        self.power(machine)
        if grant.generation == disk.generation:
            is_first = disk.grant is None
            self.durable(machine, grant=grant)
            if is_first and disk.directory_id not in {one.directory_id for one in grant.members}:
                self.durable(machine, is_unfilled=True)
            return
        self.durable(machine, grant=grant, taken=grant.epoch, unfenced=None, is_unfilled=True)
        machine.session = do.NO_SESSION
        self.finish_setting_aside(machine)

    def on_append(self, machine, message):
        session, sequence, request = message.body
        effects = follower.follow(self.state_of(machine), request, machine.disk.batch_at)
        if not self.rules.answers_last:
            effects = sorted(effects, key=lambda effect: not isinstance(effect, do.Answer))
        for effect in effects:
            self.power(machine)
            if isinstance(effect, do.Answer):
                if effect.result.error_code is not ErrorCode.FENCED_LEADER_EPOCH:
                    self.hear(machine, request.leader_epoch)
                self.note(machine, effect.result.error_code.name)
                is_filled = machine.disk.end >= max(request.high_watermark, request.epoch_start_offset)
                if effect.result.error_code is ErrorCode.NONE and machine.disk.is_unfilled and is_filled:
                    machine.disk.flushed = machine.disk.end
                    self.durable(machine, is_unfilled=False)
                self.reply(machine, message, (session, sequence, effect.result))
            else:
                self.follow(machine, effect)

    def follow(self, machine, effect):
        if not isinstance(effect, do.Append | do.Flush | do.SetHighWatermark):
            self.note(machine, effect)
        getattr(self, f"do_{type(effect).__name__}")(machine, machine.disk, effect)

    def do_StoreEpoch(self, machine, _, effect):
        self.durable(machine, taken=effect.leader_epoch)

    def do_OpenSession(self, machine, _, effect):
        machine.session = effect.session

    def do_CloseSession(self, machine, *_):
        machine.session = machine.session._replace(is_over=True)

    def do_SetUnfencedAside(self, _, disk, effect):
        self.set_aside_ungranted(disk, effect.log)

    def do_SetAside(self, machine, _, effect):
        self.set_aside(machine, effect)

    def do_Truncate(self, machine, disk, effect):
        if effect.offset < machine.watermark:
            raise Violation(f"{machine.index} cuts at {effect.offset}, below its watermark {machine.watermark}")
        disk.cut(effect.offset)

    def do_Append(self, machine, _, effect):
        for batch in effect.batches:
            self.write(machine, batch)

    def do_BeginEpoch(self, _, disk, effect):
        self.begin_epoch(disk, effect.leader_epoch, effect.start_offset)

    def do_Flush(self, _, disk, __):
        disk.flushed = disk.end

    def do_SetHighWatermark(self, machine, _, effect):
        self.set_watermark(machine, effect.high_watermark)

    def do_SetLogStart(self, _, disk, effect):
        self.drop_below(disk, effect.log_start_offset)

    def do_GoOffline(self, machine, _, effect):
        if not self.rules.accepts_loss:
            raise Violation(f"{machine.index} goes offline: {effect.finding.name}")
        raise PowerCut(machine.index)

    def set_aside(self, machine, effect):
        disk, (offset, epoch) = machine.disk, effect
        history = self.line_of(machine).committed.get(offset)
        if history is None:
            raise Violation(f"{machine.index} begins anew at {offset}, where nothing was acknowledged")
        disk.batches, disk.start, disk.start_history = [], offset, history
        disk.epochs = LeaderEpochs().assigned(epoch, offset)
        disk.flushed = disk.high_watermark = machine.watermark = offset

    def begin_epoch(self, disk, epoch, start):
        disk.epochs = disk.epochs.assigned(epoch, start)

    def set_aside_ungranted(self, disk, log):
        disk.cut(log.log_end_offset)
        disk.epochs = log.leader_epochs
        disk.unfenced = None

    # ---- durability

    def power(self, machine):
        """Between any two effects the power can go."""
        if self.random.random() < self.power_rate:
            raise PowerCut(machine.index)

    def durable(self, machine, **values):
        for name, value in values.items():
            if not self.rules.fsyncs_epochs:
                self.unsynced.setdefault(machine.index, {}).setdefault(name, getattr(machine.disk, name))
            setattr(machine.disk, name, value)

    # ---- what must hold

    def commit(self, machine, watermark):
        """A leader acknowledged everything below the offset: from now on this is the only history."""
        line = self.line_of(machine)
        for stored in reversed(machine.disk.batches):
            offset = stored.batch.next_offset
            if offset > watermark:
                continue
            is_known = offset in line.committed
            if line.committed.setdefault(offset, stored.history) != stored.history and not self.rules.accepts_loss:
                raise Violation(f"{machine.index} acknowledges another history at {offset}")
            if is_known:
                break
        line.committed_end = max(line.committed_end, watermark)

    def set_watermark(self, machine, watermark):
        if watermark < machine.watermark:
            raise Violation(f"{machine.index}'s watermark falls from {machine.watermark} to {watermark}")
        machine.watermark = watermark
        committed = self.line_of(machine).committed.get(watermark)
        if not self.rules.accepts_loss and machine.disk.history_at(watermark) != committed:
            raise Violation(f"{machine.index} takes {watermark} for acknowledged over another history")

    def check_ahead(self):
        """Check that of all members that may lead, the one ahead holds all acknowledged records, also after a power
        cut.
        """
        if self.rules.accepts_loss:
            return
        for generation, line in self.lines.items():
            if line.committed_end:
                self.check_generation(generation, line)

    def check_generation(self, generation, line):
        held = [
            machine
            for machine in self.machines
            if machine.disk.grant
            and machine.disk.grant.generation == machine.disk.generation == generation
            and not machine.disk.is_unfilled
        ]
        looks = [(line.committed_end, *((one.index, self.look_of(one.disk)) for one in held))]
        if looks == self.looks.get(generation):
            return
        self.looks[generation] = looks
        states = [self.end_of] + ([self.durable_end_of] if self.rules.loses_power else [])
        ends = [{machine.index: end_of(machine.disk, line) for machine in held} for end_of in states]
        for count in range(1, len(held) + 1):
            for group in combinations(held, count):
                base = base_of(machine.disk.grant for machine in group)
                left = {one.index for one in group if base.is_member(one.index, one.disk.directory_id)} & base.indexes
                if base.too_few_to_lead(left) is None:
                    self.check_left(left, ends, line)

    def look_of(self, disk):
        return disk.end, disk.flushed, disk.start, id(disk.epochs), id(disk.grant), disk.unfenced

    def check_left(self, left, ends, line):
        for is_cut, of in enumerate(ends):
            _, holds_all = max(of[index] for index in left)
            if not holds_all:
                when = " after a power cut" if is_cut else ""
                lost = f"all that was acknowledged up to {line.committed_end}"
                raise Violation(f"members {sorted(left)}{when} would lead without {lost}")

    def end_of(self, disk, line):
        return granted_end(disk.ends, disk.unfenced), self.holds(disk, disk.end, line)

    def durable_end_of(self, disk, line):
        kept = disk.ends._replace(log_end_offset=disk.flushed, leader_epochs=disk.epochs.cut_from(disk.flushed + 1))
        return granted_end(kept, disk.unfenced), self.holds(disk, disk.flushed, line)

    def holds(self, disk, end, line):
        """Whether a log with this end has everything that was acknowledged."""
        if disk.start > line.committed_end:
            return True
        return end >= line.committed_end and disk.history_at(line.committed_end) == line.committed[line.committed_end]


def on_candidate_answer(world, machine, message):
    if machine.owner.candidate is not None and machine.owner.leader is None:
        world.apply_candidate(machine, machine.owner.candidate.on_answer(message.body))


World.on_look_answer = on_candidate_answer
World.on_grant_answer = on_candidate_answer
