"""A leader's process in the simulation: it waits for the lead, leads, and lets clients append.

    Election ─▶ grant ─▶ Leading over SegmentLogs ─▶ clients append, each batch with a receipt

It represents an Outbox, which only adds threads that seal batches: replicas see no difference.
"""

from contextlib import closing
from dataclasses import replace

from pushrep.election.candidate import Purpose
from pushrep.election.errors import TooFewMembers
from pushrep.election.grants import next_ballot
from pushrep.errors import PushrepError
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.records import encode_batch
from pushrep.replicate.election import Election
from pushrep.replicate.election_state import NO_MEMBER, ElectionStateStore
from pushrep.replicate.leading import Leading
from pushrep.replicate.settings import Replica
from pushrep.replicate.sockets import Address

SMALL = LogConfig(preallocate_bytes=0)
LOCK_NAME = ".lock"
_ANSWER_S = 0.5


class Receipt:
    """A client's receipt of an append: `answers` gets the result, and must get it exactly once."""

    def __init__(self, base_offset, end_offset, data):
        self.base_offset, self.end_offset, self.data = base_offset, end_offset, data
        self.answers = []


class Service:
    """One run of a leader's program on a machine. `run` is its main thread."""

    def __init__(self, world, machine, purpose):
        self.world, self.machine, self.purpose = world, machine, purpose
        self.process = machine.host.process
        self.settings = replace(world.push_settings, network=self.process)
        self.leading = self.grant = self.refused = None
        self.logs, self.receipts = {}, []
        self.is_stopping = self.is_over = False

    def run(self):
        disk = self.machine.disk
        try:
            disk.make_directory(self.machine.outbox_directory)
            with closing(disk.lock(self.machine.data / LOCK_NAME)):
                try:
                    self._open_logs()
                    self._stand()
                finally:
                    self._close()
        except (OSError, PushrepError) as error:
            self.refused = error
            self.world.note(self.machine, f"gives_up({error!r})")
        self.is_over = True

    def _open_logs(self):
        first = self.world.first
        for number in range(first.partitions):
            self.logs[number] = SegmentLog.open(
                self.machine.outbox_directory / f"{first.topic}-{number}",
                SMALL,
                log_id=first.topic_id,
                has_replicas=True,
                filesystem=self.machine.disk,
                clock=self.world.clock,
            )

    def _close(self):
        if not self.process.is_alive:
            return  # a kill closes nothing
        if self.leading is not None:
            self.leading.close()
        for log in self.logs.values():
            log.close()

    def _stand(self):
        """Stand by, lead, and lead until the lead is over."""
        world, machine = self.world, self.machine
        state_store = ElectionStateStore(machine.outbox_directory, world.first.outbox_id, machine.disk)
        if state_store.kept.member == NO_MEMBER:
            state_store.keep(replace(state_store.kept, member=machine.index))
        first = world.first if machine.index == 0 else None
        if first is None and state_store.kept.grant is None:
            return
        # An operator who deposes: else most promotions would leave a leader alone, and the worlds would be quiet ones.
        election = Election(state_store, self.logs, self.settings, clock=world.clock, leader_alive_ms=0)
        grant = self._grant(election, first)
        election.begin(grant)
        self.grant = grant
        self.leading = Leading(
            grant.outbox_id,
            grant,
            self.logs,
            [
                Replica(member.index, Address.parse(member.address))
                for member in grant.members
                if member.index != machine.index
            ],
            durability=world.rules.durability,
            settings=self.settings,
            replica_lag_max_ms=world.rules.lag_max_ms,
            clock=world.clock,
        )
        world.leads(self)
        self.leading.start()
        clients = [self.process.thread(lambda n=n: self._client(n), f"client-{n}") for n in self.logs]
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    def _grant(self, election, first):
        try:
            return election.run(self.purpose, _ANSWER_S, first=first)
        except TooFewMembers:
            kept = election.state_store.kept.grant
            # Without a grant the outbox was never made: there is nothing whose loss somebody could accept.
            if kept is None or self.purpose is Purpose.OPEN or not self.world.rules.accepts_loss:
                raise
        epoch = next_ballot(election.index, election.own().highest_epoch)
        grant = kept.renewed(epoch, election.index)
        election.store(grant)
        self.world.losses.append(epoch)
        self.world.note(self.machine, "accept_loss")
        return grant

    @property
    def wants_end(self):
        return self.is_stopping or any(led.resigned for led in self.leading.partitions.values())

    def _client(self, number):
        """Appends to one partition, as an outbox's writer does: log, push, flush, wait by a callback."""
        try:
            while not self.wants_end:
                self.process.sleep(self.world.random.choice((0, 0.001, 0.005, 0.02)))
                may_append_all = self.leading.partitions[number].leader.may_append_all
                may_append = not self.world.is_quiet or number in self.world.nudged
                if may_append and may_append_all and not self.wants_end:
                    self.world.nudged.discard(number)
                    self._append(number)
        except (OSError, PushrepError) as error:
            self.world.note(self.machine, f"append_failed({error!r})")
            self.is_stopping = True

    def _append(self, number):
        world, log = self.world, self.logs[number]
        world.appends(self, number)
        values = [world.random.randbytes(world.random.choice((5, 30, 200))) for _ in range(world.random.randint(1, 3))]
        batch = encode_batch(values, timestamps_ms=1)
        result = log.append(batch, durability=Durability.BUFFERED)
        receipt = Receipt(result.base_offset, result.last_offset + 1, bytes(batch.data))
        self.leading.partitions[number].on_append(result.base_offset, [batch], self.world.clock.monotonic_ms())
        if world.rules.durability is Durability.FLUSHED:
            log.flush()
            self.leading.partitions[number].on_flush(log.flushed_offset)

        def told(error):
            receipt.answers.append(error)
            world.receipt_told(self, number, receipt)

        self.receipts.append(receipt)
        self.leading.partitions[number].when_replicated(receipt.end_offset, told)
