"""Election: carries out what a Candidate decides, over the network and on this member's disk.

    Look, SendGrant            asked of all at once (member_clients.py); the answers go back to the rules
    StoreEpoch, StoreGrant      promises.json, synced before the next effect
    Fetch                      quarantine or cut, fetch, append, flush
    Refused                    raised; a newer grant for another is stored first, so that the directory can follow it
    Lead                       `run` returns the grant, and `begin` puts its epoch into every log

Openings and promotions both use it. Between the start of `run` and the end of `begin` nobody may append to the logs.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from pushrep.election.candidate import (
    LEADER_ALIVE_MS,
    Candidate,
    CandidateEffect,
    Fetch,
    Lead,
    Look,
    MemberAnswer,
    MemberLog,
    Purpose,
    Refused,
    SendGrant,
    StandbyElection,
)
from pushrep.election.epochs import EpochEnd, marked_unfenced, without_unfenced
from pushrep.election.errors import LogNotFit, NotAhead, NotLeader
from pushrep.election.follower import StoreEpoch, StoreGrant
from pushrep.election.grants import Grant, Member, OfferedGrant, judge_grant, may_have_lost, newest_of, next_ballot
from pushrep.env import SYSTEM_CLOCK, Clock
from pushrep.log import SegmentLog
from pushrep.log.directory_files import read_leader_epochs
from pushrep.records import RecordBatch
from pushrep.replay.node_connection import NodeUnreachable
from pushrep.replicate.election_state import ElectionStateStore
from pushrep.replicate.member_clients import Ending, MemberAnswers, MemberClients, ends_of, tp_of
from pushrep.replicate.replica import cut_unfenced
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address
from pushrep.wire.error_codes import ErrorCode

_LOG = logging.getLogger("pushrep.node")
Change = Callable[[Grant, int], Grant]
"""Makes the next grant from the newest one and its own epoch."""


class Election:
    """One member's attempts to lead. Not thread-safe. Which member it is, is in its election state.

    addresses: of members, instead of the grants' ones. fetched: called with every fetched batch, in order.
    contact_age_ms: how long ago another leader was in contact with this directory's node; None for never.
    leader_alive_ms: as Candidate's.
    """

    def __init__(  # noqa: PLR0913 - whose promises and logs, and what it asks with
        self,
        state_store: ElectionStateStore,
        logs: Mapping[int, SegmentLog],
        settings: PushSettings,
        *,
        addresses: Mapping[int, str] | None = None,
        fetched: Callable[[int, RecordBatch], None] = lambda _partition, _batch: None,
        clock: Clock = SYSTEM_CLOCK,
        contact_age_ms: int | None = None,
        leader_alive_ms: int = LEADER_ALIVE_MS,
    ) -> None:
        self.state_store, self.logs = state_store, logs
        self.index = state_store.kept.member
        self._clients = MemberClients(state_store.outbox_id, self.index, [*map(tp_of, logs.values())], settings)
        self._settings, self._fetched, self._clock = settings, fetched, clock
        self.addresses = dict(addresses or {})
        """The caller's, which come before those of the grants."""
        self._grants: list[Grant] = []
        self._may_cut = True
        self._contact_age_ms, self.leader_alive_ms = contact_age_ms, leader_alive_ms
        self.ending = Ending(settings)
        """Once it is set, every round ends at once, as at its deadline: the outbox is being closed."""
        self._answers = self._round(0)

    def own(self) -> MemberAnswer:
        """This member's own answer to a look."""
        kept = self.state_store.kept
        logs = {
            number: MemberLog(
                log=ends_of(log),
                high_watermark=log.high_watermark,
                is_damaged=log.damaged_from is not None or kept.unfilled.get(log.path.name, 0) > log.log_end_offset,
                unfenced=kept.unfenced.get(log.path.name),
                held_to=self._held_to(log),
            )
            for number, log in self.logs.items()
        }
        highest = max(kept.newest_epoch, kept.number, *(log.log.leader_epochs.latest_epoch for log in logs.values()))
        return MemberAnswer(
            index=self.index,
            grant=kept.grant,
            highest_epoch=highest,
            logs=logs,
            is_unfilled=kept.is_unfilled,
            contact_age_ms=self._contact_age_ms,
            directory_id=self.state_store.directory_id,
            generation=kept.generation,
        )

    def _held_to(self, log: SegmentLog) -> EpochEnd | None:
        """The end of a log that lost records, and the epoch of the last lost one; None if it lost none."""
        kept, name = self.state_store.kept, log.path.name
        end = kept.unfilled.get(name, 0)
        if end <= log.log_end_offset or name in kept.unfenced:
            return None
        # The list on disk of a damaged log still has that epoch.
        kept_epochs = read_leader_epochs(log.path, self.state_store.filesystem)
        return EpochEnd((kept_epochs or log.leader_epochs).epoch_of(end - 1), end)

    def run(  # noqa: PLR0913 - what for, and what may differ
        self,
        purpose: Purpose,
        timeout_s: float,
        *,
        first: Grant | None = None,
        change: Change | None = None,
        may_cut: bool = True,
        standby: StandbyElection | None = None,
        leads: bool = False,
    ) -> Grant:
        """Returns the grant to lead by: enough members have stored it, and this one has all their records on disk.

        first: the first grant, for an outbox without one. change: makes the grant instead of a renewal. timeout_s: of
        each round. may_cut: whether records that this log has and the member ahead has not may be cut; else NotAhead is
        raised. standby: a standby's election: a majority has to agree, and members that do not answer are asked again,
        because they may be standbys that are asking themselves. leads: as a
        Candidate's. Raises NotLeader, LeaderMayBeAlive, CantLead,
        TooFewMembers, NotAhead, LogNotFit, NodeUnreachable if the member that is ahead goes away while
        its records are fetched, LogPoisoned, OSError.
        """
        self._grants, self._may_cut = [first] if first is not None else [], may_cut
        candidate = Candidate(
            self.index,
            purpose,
            self.own(),
            first=first,
            change=change,
            leader_alive_ms=self.leader_alive_ms,
            standby=standby,
            leads=leads,
        )
        self._answers = self._round(timeout_s, candidate)
        effects: deque[CandidateEffect] = deque(candidate.start())
        while True:
            while effects:
                effect = effects.popleft()
                if isinstance(effect, Lead):
                    if nameless := effect.grant.nameless:
                        what = "members %s count by their index alone: the grant names no directory of theirs yet"
                        _LOG.warning(f"%s: {what}", self.state_store.directory, sorted(nameless))
                    return effect.grant
                effects.extend(self._carry_out(effect, candidate, timeout_s))
            self._answers.asks_again = candidate.asks_again
            answer = self._answers.next()
            if answer is None:
                effects.extend(candidate.on_deadline())
                continue
            self._grants += [answer.grant] if answer.grant is not None else []
            effects.extend(candidate.on_answer(answer))

    def _carry_out(self, effect: CandidateEffect, candidate: Candidate, timeout_s: float) -> list[CandidateEffect]:
        match effect:
            case Look():
                self._ask(effect.members, self._clients.describe)
            case StoreEpoch():
                with self.state_store.lock:
                    self.state_store.keep(replace(self.state_store.kept, number=effect.leader_epoch))
            case StoreGrant():
                self.store(effect.grant, is_first=candidate.is_first)
            case SendGrant():
                self._answers.asks_again = False
                self._answers = self._round(timeout_s, candidate)  # late answers to looks are ignored
                self._ask(effect.members, partial(self._clients.offer, effect.grant, is_first=candidate.is_first))
            case Fetch():
                assert candidate.grant is not None, "nothing is fetched before it was granted"
                self.fetch(effect, candidate.grant)
                return candidate.on_fetched(effect.partition)
            case Refused():
                self._answers.asks_again = False
                self._learn_from(effect)
                raise effect.error
        return []

    def begin(self, grant: Grant) -> None:
        """Lead by `grant`: flush everything, begin its epoch, and mark nothing as unfenced any more.

        Raises LogPoisoned, OSError.
        """
        _begin_epochs(self.logs.values(), grant.epoch)
        with self.state_store.lock:
            self.state_store.keep(replace(self.state_store.kept, unfenced={}, is_unfilled=False))

    def begin_unfenced(self) -> int:
        """Begin this member's next epoch without a grant, as too few members answer; later appends are marked as
        unfenced.

        Raises LogPoisoned, OSError.
        """
        number = next_ballot(self.index, max([self.own().highest_epoch, *(grant.epoch for grant in self._grants)]))
        with self.state_store.lock:
            kept = self.state_store.kept
            marks = {
                log.path.name: marked_unfenced(ends_of(log), kept.unfenced.get(log.path.name))
                for log in self.logs.values()
            }
            self.state_store.keep(replace(kept, number=number, unfenced=marks))
        _begin_epochs(self.logs.values(), number)
        return number

    def describe_members(self, grant: Grant, timeout_s: float) -> dict[int, MemberAnswer]:
        """What the other members of `grant` hold; those that do not answer in time are left out."""
        self._grants = [grant]
        return self._ask_once(sorted(grant.indexes - {self.index}), self._clients.describe, timeout_s)

    def describe_new(self, members: Sequence[Member], timeout_s: float) -> dict[int, MemberAnswer]:
        """As `describe_members`, for nodes that are to become members and that no grant names yet."""
        return self._ask_nodes(members, self._clients.describe, timeout_s)

    def offer_removed(self, grant: Grant, members: Sequence[Member], timeout_s: float) -> dict[int, MemberAnswer]:
        """Show `grant` to nodes that it lists no more: what they hold is their own then. Returns the answers."""
        return self._ask_nodes([one for one in members if one.address], partial(self._clients.offer, grant), timeout_s)

    def _ask_nodes(
        self, members: Iterable[Member], question: Callable[[int, Address], MemberAnswer], timeout_s: float
    ) -> dict[int, MemberAnswer]:
        self._answers = self._round(timeout_s)
        for one in members:
            self._answers.ask(str(one.index), partial(question, one.index, Address.parse(one.address)))
        return self._all()

    def offer(self, grant: Grant, timeout_s: float) -> dict[int, MemberAnswer]:
        """Show `grant`, which is stored here, to its other members; returns the answers."""
        return self._ask_once(sorted(grant.indexes - {self.index}), partial(self._clients.offer, grant), timeout_s)

    def store(self, grant: Grant, *, is_first: bool = False) -> None:
        """Store the grant as the newest one, durably. is_first: as `may_have_lost`'s. Raises OSError."""
        with self.state_store.lock:
            kept = self.state_store.kept
            self.state_store.keep(
                replace(
                    kept,
                    grant=grant,
                    is_unfilled=kept.is_unfilled
                    or may_have_lost(kept.grant, grant, self.state_store.directory_id, is_first=is_first),
                    leader_epoch=max(kept.leader_epoch, grant.epoch),
                    number=max(kept.number, grant.epoch),
                    log_generation=grant.generation,  # a new generation begins with its leader's logs
                    is_handed_over=False,
                )
            )

    def fetch(self, fetch: Fetch, grant: Grant) -> None:
        """Cut unfenced records into `.cut`, cut at the fetch's offset, fetch, flush. Raises as `run`."""
        log = self.logs[fetch.partition]
        before = log.log_end_offset
        if not self._may_cut and (fetch.anew is not None or fetch.cut_at < before):
            own = self.own().logs[fetch.partition].granted
            raise NotAhead(partition=fetch.partition, own=own, member=fetch.member, theirs=fetch.until)
        self._set_unfenced_aside(log)
        if log.damaged_from is not None:
            _LOG.warning("%s is damaged from %d on and filled again; it lies in %s", log.path, before, log.quarantine())
        if fetch.anew is not None:
            log.begin_anew(fetch.anew.offset, fetch.anew.leader_epoch)
        elif fetch.cut_at < log.log_end_offset and log.truncate_to(fetch.cut_at, keep=True) != fetch.cut_at:
            raise LogNotFit(fetch.partition, f"it was to be cut at {fetch.cut_at}, inside of a batch")
        if fetch.member != self.index:
            address = self._address(fetch.member)
            for batches in self._clients.fetch(
                address, log, grant.epoch, fetch.until.end_offset, generation=grant.generation
            ):
                log.append_as_is(batches)
                log.flush()
                for batch in batches:
                    self._fetched(fetch.partition, batch)
        log.flush()
        end = log.log_end_offset
        if self.state_store.kept.unfilled.get(log.path.name, 0) <= end:
            self.state_store.note_refilled(log.path.name)
        _LOG.warning("%s ended at %d; %d to %d came from member %d", log.path, before, fetch.cut_at, end, fetch.member)

    def give_up_lost(self) -> None:
        """Accept durably that records are lost: the logs count as whole, and bytes after damage are quarantined.

        Call it only after storing a grant that says so. Raises LogPoisoned, OSError.
        """
        for log in self.logs.values():
            if log.damaged_from is not None:
                end, kept = log.log_end_offset, log.quarantine()
                _LOG.error("%s is damaged from %d on, which is given up; it lies in %s", log.path, end, kept)
        with self.state_store.lock:
            self.state_store.keep(replace(self.state_store.kept, unfilled={}))

    def _set_unfenced_aside(self, log: SegmentLog) -> None:
        mark = self.state_store.kept.unfenced.get(log.path.name)
        if mark is None:
            return
        kept, before = without_unfenced(ends_of(log), mark), log.log_end_offset
        cut_unfenced(log, kept)
        self.state_store.forget_unfenced(log.path.name)
        _LOG.warning(
            "%s: %d records were appended without a grant, and another led since: see .cut",
            log.path,
            before - kept.log_end_offset,
        )

    def _learn_from(self, refused: Refused) -> None:
        """Another leads: store its grant, so that this directory can follow it, or knows that it was removed."""
        newest = newest_of(self._grants)
        is_over = isinstance(refused.error, NotLeader) or (newest is not None and self.index not in newest.indexes)
        if not is_over or newest is None or newest.leader == self.index:
            return
        with self.state_store.lock:
            kept = self.state_store.kept
            if judge_grant(OfferedGrant(newest, newest.leader, kept.grant, kept.leader_epoch)) is ErrorCode.NONE:
                self.state_store.keep(kept.with_grant(newest, self.state_store.directory_id))

    def _round(self, timeout_s: float, candidate: Candidate | None = None) -> MemberAnswers:
        self._clients.generation = self.state_store.kept.generation
        answers = MemberAnswers(self._settings, self._clock, timeout_s, self.ending)
        answers.asks_again = candidate is not None and candidate.asks_again  # before an answer can refuse
        return answers

    def _ask(self, members: Iterable[int], question: Callable[[int, Address], MemberAnswer]) -> None:
        for index in members:
            if text := self._address_text(index):
                self._answers.ask(str(index), partial(question, index, Address.parse(text)))

    def _ask_once(
        self, members: Iterable[int], question: Callable[[int, Address], MemberAnswer], timeout_s: float
    ) -> dict[int, MemberAnswer]:
        self._answers = self._round(timeout_s)
        self._ask(members, question)
        return self._all()

    def _all(self) -> dict[int, MemberAnswer]:
        return {answer.index: answer for answer in iter(self._answers.next, None)}

    def _address(self, index: int) -> Address:
        text = self._address_text(index)
        if not text:
            raise NodeUnreachable(f"member {index}", "it is not known where it listens")
        return Address.parse(text)

    def _address_text(self, index: int) -> str:
        """The member's address from the caller, else from the newest grant with one; empty if it does not listen."""
        kept = self.state_store.kept.grant
        known = [*self._grants, *([kept] if kept is not None else [])]
        found = self.addresses.get(index, "")
        for grant in sorted(known, key=lambda grant: grant.rank, reverse=True):
            members = (*grant.members, *grant.previous_members)
            found = found or next((one.address for one in members if one.index == index), "")
        return found


def _begin_epochs(logs: Collection[SegmentLog], epoch: int) -> None:
    """Flush the logs and begin `epoch` at their ends. Raises LogPoisoned, OSError."""
    for one in islice(logs, 1):
        # Else thousands of new logs would each have a checkpoint written within a second.
        one.run_beside_others([log.flush for log in logs if log.log_end_offset])
        one.begin_epochs([(log, epoch, log.log_end_offset) for log in logs])
