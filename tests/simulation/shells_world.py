"""A world of real shells: leaders, nodes and clients in one process, on simulated clock, disks and network. Seeded.

    Machine    a SimulatedDisk and one process at a time: a ReplicaNode, or a service (shells_service.py), or none
    World      a step is one turn of one thread, or one accident: crash, power cut (between any two calls to a disk),
               cut, one-way block, pause, disk fault, promotion, opening, graceful stop
    check      after every step what changes with it; from the bytes on all disks now and then, and at every accident

What must hold (the names stand in the contract's words):

    acknowledged   a record acknowledged with ALL survives any m - 1 lost members and any order of accidents:
                   whichever members are enough to lead, the one that is ahead of them holds it
    one history    (epoch, base offset) names one batch, wherever it lies; so replicas equal their leader epoch by epoch
    watermark      rises only, and never above any in-sync member's log end; of a member that met an accepted loss which
                   the leader did not (nothing fences that leader): above where its log ended before it met it
    one leader     an epoch's records are appended by one process
    receipts       are told once; when a service ends orderly, every one of them
    buffers        hold nothing at the end, when everything is acknowledged; and at the end all logs are equal
"""

import json
import logging
import os
import random
import secrets
from collections import deque
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from uuid import UUID

from filtering.retry import JITTER
from pushrep.election.candidate import Purpose
from pushrep.election.epochs import LogEnds, granted_end
from pushrep.election.grants import Grant, Member
from pushrep.election.messages import batches_of
from pushrep.errors import PushrepError
from pushrep.log import Durability
from pushrep.records.leader_epochs import LeaderEpochs
from pushrep.replicate.election_state import read_election_state
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address
from tests.simulation.shells_service import SMALL, Service
from tests.support.simulated_disk import PowerLost, SimulatedClock, SimulatedDisk
from tests.support.simulated_network import SimulatedNetwork

PORT = 7400
DATA = Path("/data")
JUMPS_MS = (2_000, 3_600_000, 10 * 365 * 86_400_000)
_UNHEARD = "until it shows ours it gets nothing"  # N10: a lead goes on without a member that stored a newer grant
ACCIDENTS = ("crash", "power", "power_soon", "cut", "block", "pause", "disk", "promote", "stop", "time")


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Rules:
    """The settings of a world. accidents: the relative frequency of each."""

    members: int = 3
    min_insync: int = 2
    partitions: int = 1
    durability: Durability = Durability.FLUSHED
    lag_max_ms: int = 300
    accidents: tuple = (1, 1, 2, 2, 2, 1, 0.5, 2, 0.5, 0.5)
    rates: tuple = (0.002, 0.005, 0.015)
    quiet_steps: int = 20_000
    accepts_loss: bool = False
    wipes: bool = False  # now and then a member that does not lead loses its disk, one at a time
    jumps: bool = False  # wall clocks jump, back too; all machines are suspended together, as guests of one host
    sync_ms: tuple = ()  # what a sync costs, a choice for each disk; none: nothing


class Machine:
    """One host and its disk."""

    def __init__(self, world, index):
        self.index, self.world = index, world
        self.address = Address(f"m{index}", PORT)
        self.disk = SimulatedDisk(world.random.getrandbits(32), clock=world.clock)
        if world.rules.sync_ms:
            self.disk.sync_ms = world.random.choice(world.rules.sync_ms)
        self.host = world.network.machine(self.address.host)
        self.data = DATA
        self.outbox_directory = DATA / str(world.first.outbox_id)
        self.node = self.service = None
        self.watermarks, self.parsed = {}, {}
        self.ends = {}  # by partition and leader epoch: where the log ended when that epoch was last the newest here

    @property
    def role(self):
        return "node" if self.node else "service" if self.service else "down"

    @property
    def leading(self):
        """The leading state of the machine's service; None without a service, or if it does not lead."""
        return self.service.leading if self.service is not None else None

    def log(self, partition):
        """The open log, None if it is not."""
        if self.service is not None:
            return self.service.logs.get(partition)
        if self.node is None:
            return None
        replicas = (one for _, one in self.node.replicas() if one.tp.partition == partition)
        return next((one.log for one in replicas if one.failure is None), None)

    def promises(self, *, durable=False):
        """The election state on the member's disk, parsed without the product's code; None if there is none."""
        if "promises.json" not in (self.disk.names(self.outbox_directory, synced=durable) or []):
            return None
        return json.loads(self.disk.contents(self.outbox_directory / "promises.json", synced=durable))

    def counts(self, *, durable=False):
        """Whether the member has promised something, and has been filled since."""
        kept = self.promises(durable=durable)
        return kept is not None and kept["grant"] is not None and not kept["is_unfilled"]

    def granted_epoch(self):
        kept = self.promises()
        return -1 if kept is None or kept["grant"] is None else kept["grant"]["epoch"]

    def newest_epoch(self):
        """Granted or taken: leaders of older ones are refused."""
        kept = self.promises()
        return -1 if kept is None else max(kept["leader_epoch"], self.granted_epoch())

    def image(self, partition, *, durable=False):
        """(start, batches, epochs) of a log as its disk has it; None without one. Durable: as after a power cut."""
        path = self.outbox_directory / f"{self.world.first.topic}-{partition}"
        files = self.disk.names(path, synced=durable) or []
        segments = sorted(name for name in files if name.endswith(".log"))
        if not segments:
            return None
        data = b"".join(self.disk.contents(path / name, synced=durable) for name in segments)
        seen, batches = self.parsed.get((partition, durable), (None, None))
        if data != seen:
            batches, _ = batches_of(data)
            self.parsed[partition, durable] = data, batches
        checkpoint = "leader-epoch-checkpoint"
        text = self.disk.contents(path / checkpoint, synced=durable).decode() if checkpoint in files else ""
        rows = [tuple(map(int, line.split()[:2])) for line in text.splitlines()[2:]]
        return Image(int(segments[0][:-4]), batches, rows)


class Image:
    """A log, read without its code."""

    def __init__(self, start, batches, epochs):
        self.start, self.batches = start, batches
        self.end = batches[-1].next_offset if batches else start
        entries = [(epoch, offset) for epoch, offset in epochs if offset <= self.end]
        self.epochs = LeaderEpochs(tuple(entries))

    @property
    def granted(self):
        return granted_end(LogEnds(self.start, self.end, self.epochs), None)

    def lacks(self, acknowledged):
        """The first acknowledged batch that it does not have, or has otherwise."""
        held = {batch.base_offset: batch.data for batch in self.batches}
        for base, data in acknowledged.items():
            if base >= self.start and held.get(base) != data:
                return base
        return None


class World:
    """One seeded run: `steps(n)`, then `settle()`. Raises Violation."""

    def __init__(self, seed, rules=Rules(), skip=frozenset()):
        self.seed, self.rules, self.skip = seed, rules, skip
        self.random = random.Random(seed)
        draw = self.random.choice
        self.clock = SimulatedClock()
        self.network = SimulatedNetwork(self.random.getrandbits(32), self.clock, delay_ms=draw((1, 5, 20)))
        self.network.keepalive_ms = 400
        self.scheduler = self.network.scheduler
        self.trouble_rate = draw(rules.rates)
        self.accidents = [weight * draw((0.2, 1, 4)) for weight in rules.accidents]
        self.push_settings = PushSettings(
            max_workers=draw((1, 2)),
            backoff_min_ms=1,
            backoff_max_ms=20,
            watermark_linger_ms=draw((0, 2)),
            linger_ms=draw((0, 0, 3)),
            request_timeout_ms=400,
            connect_timeout_ms=60,
            repair_interval_ms=0,  # nothing rots in this world
            request_bytes_max=draw((300, 2_000, 8_000)),
            requests_in_flight_max=draw((1, 3, 12)),
            buffer_bytes_max=draw((0, 2_000, 1 << 20)),
            shutdown_timeout_ms=100,
        )
        indexes = range(rules.members)
        self.first = Grant(
            outbox_id=UUID(int=1),
            epoch=0,
            leader=0,
            members=tuple(Member(index, f"m{index}:{PORT}") for index in indexes),
            min_insync_replicas=rules.min_insync,
            members_epoch=0,
            pid_epoch=0,
            topic_id=UUID(int=2),
            topic="t",
            partitions=rules.partitions,
            carrier="key",
        )
        self.acknowledged = {n: {} for n in range(rules.partitions)}
        self.known = {}
        self.leaders = {}
        self.losses = []  # epochs of the grants that accepted one
        self.counts = {}
        self.trace = deque(maxlen=80)
        self.is_quiet = self.is_in_turn = False
        self.nudged = set()
        self.trouble_number = self.step_number = self.settling = 0
        self.services = []
        self._logging = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # accidents are what it is about
        JITTER.seed(seed)
        self._drawn_by_the_system = os.urandom, secrets.token_bytes, secrets.randbits, secrets.randbelow
        drawn = random.Random(seed)
        self._draw_by(drawn.randbytes, drawn.randbytes, drawn.getrandbits, drawn.randrange)
        random.seed(seed)  # the pauses of a standby
        self.machines = [Machine(self, index) for index in indexes]
        for machine in self.machines[1:]:
            self.start_node(machine)
        self.start_service(self.machines[0], Purpose.OPEN)

    # ---- the loop

    def live(self, steps):
        """So many steps, then peace."""
        for _ in range(steps):
            self.step()
        self.check_disks()
        if not self.rules.accepts_loss:  # else a replica that holds more waits for an operator
            self.settle()
        return self

    def step(self):
        self.step_number += 1
        if self.random.random() < self.trouble_rate:
            self.trouble()
        else:
            self.turn()

    def turn(self):
        if not self.network.step():
            self.rouse()
        if self.scheduler.errors:
            raise self.scheduler.errors[0]
        self.after_turn()

    def rouse(self):
        """All processes wait for another one: an operator repairs the world."""
        self.note(None, "idle")
        self.clock.advance(1)
        for machine in self.machines:
            if machine.host.is_up:
                machine.host.process.is_paused = False
        down = [machine for machine in self.machines if machine.role == "down"]
        nodes = [machine for machine in self.machines if machine.node is not None]
        if down:
            self.rise(self.random.choice(down))
        elif nodes and not self.is_in_turn:
            self.do_promote(self.random.choice(nodes), self.random)

    def after_turn(self):
        for machine in self.machines:
            if machine.disk.is_off:
                self.note(machine, "power went")
                self.end_process(machine, power=True)
            elif machine.service is not None and machine.service.is_over:
                self.service_ended(machine)
            elif machine.role == "down" and self.random.random() < (0.3 if self.is_quiet else 0.02):
                self.rise(machine)
            self.check_machine(machine)
        if self.random.random() < 0.01:
            self.check_disks()

    def note(self, machine, what):
        self.trace.append(f"{self.clock.monotonic_ms()} {machine.index if machine else '-'}: {what}")
        key = str(what).split(" ")[0].split("(")[0]
        self.counts[key] = self.counts.get(key, 0) + 1

    def close(self):
        """Nothing of it is left running."""
        for machine in self.machines:
            if machine.host.is_up:
                self.end_process(machine, power=False)
        logging.disable(self._logging)
        self._draw_by(*self._drawn_by_the_system)

    @staticmethod
    def _draw_by(*four):
        """Ids, and the tags of two generations, which decide which is the newer one."""
        os.urandom, secrets.token_bytes, secrets.randbits, secrets.randbelow = four

    # ---- processes

    def start_node(self, machine):
        process = machine.host.start()
        settings = NodeSettings(
            address=machine.address, allow=frozenset({"any"}), plain_off_loopback=True, log_config=SMALL
        )
        try:
            machine.node = ReplicaNode(
                machine.data, settings, filesystem=machine.disk, clock=self.clock, network=process
            )
        except PowerLost:
            self.end_process(machine, power=True)
        except (OSError, PushrepError) as error:
            self.note(machine, f"node_failed({error!r})")
            self.end_process(machine, power=False)
        machine.watermarks = {}

    def start_service(self, machine, purpose):
        self.note(machine, purpose.name)
        process = machine.host.start()
        machine.watermarks = {}
        machine.service = Service(self, machine, purpose)
        process.thread(machine.service.run, "main").start()

    def service_ended(self, machine):
        """The service ended in order: check that each receipt has its result."""
        service = machine.service
        untold = [receipt for receipt in service.receipts if len(receipt.answers) != 1]
        if untold:
            raise Violation(f"{machine.index} closed, and {len(untold)} receipts were told {untold[0].answers}")
        if service.leading is not None and service.leading.manager.memory.used_bytes:
            raise Violation(f"{machine.index} closed and holds {service.leading.manager.memory.used_bytes} bytes")
        is_refused = type(service.refused).__name__ in {"NotLeader", "CantLead", "NotAhead", "LogNotFit"}
        self.note(machine, f"refused {type(service.refused).__name__}" if service.refused else "ended")
        self.end_process(machine, power=False)
        if is_refused:
            self.start_node(machine)

    def rise(self, machine):
        try:
            promises = read_election_state(machine.outbox_directory, self.first.outbox_id, machine.disk)
        except PowerLost:
            self.end_process(machine, power=True)
            return
        leads = promises.grant.leader == machine.index if promises.grant else machine.index == 0
        if leads and self.random.random() < 0.7:
            self.start_service(machine, Purpose.OPEN)
        else:
            self.start_node(machine)

    def end_process(self, machine, *, power):
        machine.disk.is_off = True  # what Python still runs of it reaches no disk
        if power:
            machine.host.lose_power()
        else:
            machine.host.kill()
        machine.node = machine.service = None
        machine.disk.is_off = False
        if power:
            machine.disk.lose_power()
        else:
            machine.disk.crash()
            machine.disk.power_at = None
        machine.watermarks = {}

    # ---- accidents

    def trouble(self):
        machine = self.random.choice(self.machines)
        (kind,) = self.random.choices(ACCIDENTS, self.accidents)
        self.trouble_number += 1
        draw = random.Random(f"{self.seed} {self.trouble_number}")  # so that one less changes none of the others
        if self.trouble_number in self.skip:
            return
        if self.rules.wipes and draw.random() < 0.3:
            kind = "wipe"
        if self.rules.jumps and draw.random() < 0.3:
            kind = "jump"
        self.note(machine, kind)
        getattr(self, f"do_{kind}")(machine, draw)
        self.check_disks()

    def do_crash(self, machine, _):
        if machine.host.is_up:
            self.end_process(machine, power=False)

    def do_power(self, machine, _):
        self.end_process(machine, power=True)

    def do_power_soon(self, machine, draw):
        machine.disk.power_after(draw.choice((1, 3, 10, 40)))

    def do_cut(self, machine, _):
        for other in self.machines:
            self.network.cut(machine.address.host, other.address.host)

    def do_block(self, machine, draw):
        """One way or both; or everything flows again."""
        if self.network.blocked and draw.random() < 0.7:
            self.network.blocked.clear()
            return
        other = draw.choice([other for other in self.machines if other is not machine])
        self.network.block(machine.address.host, other.address.host)
        if draw.random() < 0.5:
            self.network.block(other.address.host, machine.address.host)

    def do_pause(self, machine, draw):
        """SIGSTOP, or SIGCONT to all."""
        for other in self.machines:
            if other.host.is_up:
                other.host.process.is_paused = other is machine and draw.random() < 0.5

    def do_disk(self, machine, draw):
        if draw.random() < 0.5:
            machine.disk.fail_sync()
        else:
            machine.disk.fail_write()

    def do_promote(self, machine, draw):
        """An operator names this node the leader."""
        if machine.node is None:
            return
        self.stop_node(machine)
        if machine.role == "down" and not machine.host.is_up:
            self.start_service(machine, draw.choice((Purpose.PROMOTE, Purpose.PROMOTE_AND_CATCH_UP)))

    def do_stop(self, machine, _):
        """An orderly end."""
        if machine.node is not None:
            self.stop_node(machine)
        elif machine.service is not None:
            machine.service.is_stopping = True

    def do_wipe(self, machine, _):
        """Its disk is gone, an empty one is in its place; it comes back under its old address."""
        is_alone = all(other.counts() for other in self.machines if other is not machine)
        # It forgets whom it promised to refuse: with two leaders about, that is a limit which replication.md names.
        newest = max(other.granted_epoch() for other in self.machines)
        services = [other.service for other in self.machines if other.service is not None]
        is_led_by_one = all(one.leading is not None and one.grant.epoch == newest for one in services)
        if machine.service is None and machine.counts() and is_alone and is_led_by_one:
            self.end_process(machine, power=True)
            machine.disk.remove_tree(DATA)
            machine.parsed = {}
            self.counts["wiped"] = self.counts.get("wiped", 0) + 1

    def do_jump(self, _, draw):
        """The wall clock of all, by seconds or years; or a suspension, which both clocks count at its end."""
        if draw.random() < 0.3:
            self.clock.advance(draw.choice((5_000, 60_000)))
        else:
            self.clock.set_wall(max(0, self.clock.wall_ms() + draw.choice((-1, 1)) * draw.choice(JUMPS_MS)))

    def do_time(self, _, draw):
        self.clock.advance(draw.choice((10, 100, 1000)))

    def stop_node(self, machine):
        """Its logs are closed clean."""
        process, node = machine.host.process, machine.node
        process.is_paused = False
        thread = process.thread(node.stop, "stop")
        thread.start()
        self.is_in_turn = True  # nobody else is stopped meanwhile
        while thread.is_alive() and machine.node is node:
            self.turn()
        self.is_in_turn = False
        if machine.node is node:  # else the power went meanwhile
            self.end_process(machine, power=False)

    # ---- what must hold

    def leads(self, service):
        """A service begins to lead: whatever was acknowledged is in its log."""
        self.note(service.machine, f"leads {service.grant.epoch}")
        self.services.append(service)
        for partition, acknowledged in self.acknowledged.items():
            image = service.machine.image(partition)
            lacking = image.lacks(acknowledged) if image else min(acknowledged, default=None)
            if lacking is not None and not self.rules.accepts_loss:
                raise Violation(f"{service.machine.index} leads without what was acknowledged at {lacking}")

    def appends(self, service, partition):
        epoch = service.logs[partition].leader_epochs.latest_epoch
        if self.leaders.setdefault(epoch, service) is not service:
            raise Violation(f"two processes append in epoch {epoch}")

    def receipt_told(self, service, partition, receipt):
        if len(receipt.answers) != 1:
            raise Violation(f"a receipt was told {len(receipt.answers)} times: {receipt.answers}")
        self.note(service.machine, "acknowledged" if receipt.answers[0] is None else "failed")
        if receipt.answers[0] is None:
            known = self.acknowledged[partition].setdefault(receipt.base_offset, receipt.data)
            if known != receipt.data and not self.rules.accepts_loss:
                raise Violation(f"two batches were acknowledged at {receipt.base_offset}")

    def check_machine(self, machine):
        """The watermark rises only, and in-sync members hold what is below it."""
        for partition in range(self.rules.partitions):
            if self.rules.accepts_loss and (image := machine.image(partition)) is not None:
                machine.ends[partition, machine.newest_epoch()] = image.end
            log = machine.log(partition)
            if log is None:
                continue
            watermark = log.high_watermark
            of_log, before = machine.watermarks.get(partition, (None, 0))
            if of_log is not log:  # opened anew: from its checkpoint on
                machine.watermarks[partition] = (log, watermark)
                continue
            if watermark < before:
                raise Violation(f"{machine.index}'s watermark falls from {before} to {watermark}")
            if watermark > before:
                machine.watermarks[partition] = (log, watermark)
                if machine.leading is not None and machine.leading.partitions:
                    self.check_in_sync(machine, partition, watermark)

    def check_in_sync(self, machine, partition, watermark):
        leader = machine.leading.partitions[partition].leader
        if leader.high_watermark < watermark:
            return
        for index in leader.in_sync:
            if self.rules.wipes and not self.machines[index].counts():
                continue  # it lost its disk behind its answer
            end = self.end_for(self.machines[index], partition, leader.grant.epoch)
            if end is None or end < watermark:
                raise Violation(f"the watermark is {watermark}, in-sync member {index} ends at {end}")

    def end_for(self, machine, partition, epoch):
        """The end of a member's log, None without one, up to which the leader of `epoch` may count it.

        After an accepted loss that this leader does not know of, the member may have cut its log for another leader.
        Then its earlier answers have to have been true: they counted up to the end of that log.
        """
        newest = machine.newest_epoch()
        if any(epoch < loss <= newest for loss in self.losses):
            self.counts["unfenced"] = self.counts.get("unfenced", 0) + 1
            return machine.ends.get((partition, epoch))
        image = machine.image(partition)
        return image.end if image is not None else None

    def check_disks(self):
        """Check that of all members that may lead the one ahead holds all acknowledged records, and that an epoch has
        one history.
        """
        for partition in range(self.rules.partitions):
            images = {machine.index: machine.image(partition) for machine in self.machines}
            held = {index: image for index, image in images.items() if image is not None}
            for index, image in held.items():
                for batch in image.batches:
                    place = (partition, batch.leader_epoch, batch.base_offset)
                    if self.known.setdefault(place, bytes(batch.data)) != batch.data:
                        raise Violation(
                            f"epoch {batch.leader_epoch} has another batch at {batch.base_offset} on {index}"
                        )
            self.check_ahead(partition, held)
            if self.rules.durability is Durability.FLUSHED:
                durable = {machine.index: machine.image(partition, durable=True) for machine in self.machines}
                there = {index: image for index, image in durable.items() if image is not None}
                self.check_ahead(partition, there, durable=True)

    def check_ahead(self, partition, held, *, durable=False):
        acknowledged = self.acknowledged[partition]
        if not acknowledged or self.rules.accepts_loss:
            return
        lacking = {index: image.lacks(acknowledged) for index, image in held.items()}
        needed = self.rules.members - self.rules.min_insync + 1
        uncounted = set()
        if self.rules.wipes:
            uncounted = {machine.index for machine in self.machines if not machine.counts(durable=durable)}
        for left in combinations(range(self.rules.members), needed):
            if uncounted & set(left):
                continue
            ahead = max(((held[index].granted, index) for index in left if index in held), default=None)
            if ahead is None or lacking[ahead[1]] is not None:
                at = min(acknowledged) if ahead is None else lacking[ahead[1]]
                raise Violation(f"of members {left} none that would lead holds what was acknowledged at {at}")

    # ---- an end in peace

    def settle(self):
        """No accidents any more: one leads, all catch up, everybody has the same bytes and nothing waits."""
        self.is_quiet = True
        self.network.blocked.clear()
        for machine in self.machines:
            if machine.host.is_up:
                machine.host.process.is_paused = False
            machine.disk.power_at = None
            machine.disk.fail_sync(0)
            machine.disk.fail_write(0)
        for count in range(self.rules.quiet_steps):
            self.turn()
            self.settling = count
            if count % 600 == 0:  # whoever waits for nothing hears of nobody: one more record for each
                self.nudged = set(range(self.rules.partitions))
            if count % 50 == 0 and self.is_settled():
                break
            if count % 300 == 0:  # an operator who knows of a newer leader, or that a member has a newer grant alone
                leaders = [m for m in self.machines if m.leading is not None]
                older = sorted(leaders, key=lambda m: m.service.grant.epoch)[:-1]
                contested = [m for m in leaders if any(_UNHEARD in why for why in m.leading.troubles().values())]
                for machine in [*older, *contested]:
                    machine.service.is_stopping = True
            if count % 300 == 299 and not any(machine.service for machine in self.machines):
                up = [machine for machine in self.machines if machine.node is not None]
                if up:
                    self.stop_node(machine := self.random.choice(up))
                    self.start_service(machine, Purpose.PROMOTE_AND_CATCH_UP)
        else:
            raise Violation(f"not settled: {[(m.role, [str(m.log(0))]) for m in self.machines]}")
        self.check_disks()
        self.check_settled()

    def leader(self):
        """The only service that surely leads."""
        leads = [m for m in self.machines if m.leading is not None and not m.service.wants_end]
        return max(leads, key=lambda machine: machine.service.grant.epoch, default=None)

    def is_settled(self):
        leader = self.leader()
        if leader is None or any(m.node is None for m in self.machines if m is not leader):
            return False
        for partition, led in leader.leading.partitions.items():
            end = led.log.log_end_offset
            if led.leader.high_watermark != end or len(led.leader.in_sync) != self.rules.members:
                return False
            if any(m.log(partition) is None or m.log(partition).high_watermark != end for m in self.machines):
                return False
        return True

    def check_settled(self):
        leader = self.leader()
        if leader.leading.manager.memory.used_bytes:
            raise Violation(f"{leader.leading.manager.memory.used_bytes} bytes are buffered, and nothing waits")
        waiting = [receipt for receipt in leader.service.receipts if not receipt.answers]
        if waiting:
            raise Violation(f"{len(waiting)} receipts wait below the watermark")
        for partition in range(self.rules.partitions):
            own = leader.image(partition)
            for machine in self.machines:
                other = machine.image(partition)
                start = max(own.start, other.start)
                mine, theirs = ([bytes(b.data) for b in i.batches if b.base_offset >= start] for i in (own, other))
                if mine != theirs:
                    raise Violation(f"the logs of {leader.index} and {machine.index} differ at the end")


def run(seed, rules=Rules(), steps=1_500, skip=frozenset()):
    """A whole life of one world; it is closed whatever happens."""
    world = World(seed, rules, skip)
    try:
        return world.live(steps)
    finally:
        world.close()
