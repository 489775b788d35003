"""How far one replica is, in one push session: acknowledged, in flight, next.

    log       |......... acknowledged | in flight | not sent yet ..... LEO
                                      ^ oldest    ^ next_offset

An answer counts for no more than its own request could verify: min(replica's LEO, the request's end). A replica may
hold records above it that an older leader left, and those are not ours.
"""

from collections import deque
from typing import NamedTuple

from pushrep.election.epochs import EpochEnd, LogEnds, common_end, step_back
from pushrep.election.messages import AppendRecordsResult
from pushrep.election.sessions import MAY_BECOME, OPERATOR_NEEDED, REACTIONS, Reaction, SessionState, Step
from pushrep.push_session_end_reason import PushSessionEndReason


class SessionId(NamedTuple):
    """Newer identifiers win, in this order. The first request with a higher triple opens the session at the replica."""

    leader_epoch: int
    replica_epoch: int
    session_id: int


class InFlight(NamedTuple):
    """A request that waits for its answer: `sequence` names it, [append_offset, end_offset) are its records."""

    sequence: int
    append_offset: int
    end_offset: int
    restart: bool


class ReplicaProgress:
    """One replica in one push session. Not thread-safe: the partition's lock is the caller's."""

    __slots__ = (
        "_in_flight",
        "_sequence",
        "acknowledged",
        "described",
        "flushed",
        "id",
        "is_live",
        "next_offset",
        "reason",
        "replica",
        "restart",
        "state",
    )

    def __init__(self, replica: int, session: SessionId, ours: LogEnds, theirs: LogEnds) -> None:
        self.replica, self.id = replica, session
        self.state = SessionState.STARTING
        self.is_live = True
        self.reason: PushSessionEndReason | None = None
        self.acknowledged: int | None = None
        """The replica holds everything below, by answers of this session; None before the first."""
        self.flushed: int | None = None
        self.restart = False
        self.next_offset = self.described = common_end(ours, theirs)
        """Up to `described` the two logs have the same epochs, by the replica's own description."""
        self._in_flight: deque[InFlight] = deque()
        self._sequence = 0
        self._aim(ours, self.next_offset)

    @property
    def in_flight(self) -> tuple[InFlight, ...]:
        """Requests without an answer, oldest first."""
        return tuple(self._in_flight)

    def sent(self, append_offset: int, end_offset: int) -> InFlight:
        """Note that the records [append_offset, end_offset) go to the wire; none if the two are equal.

        append_offset: next_offset, or the base of the batch that holds it, for a replica can end where no batch of
        ours does.
        """
        assert append_offset <= self.next_offset, (
            f"[{append_offset}, ...) would leave out what is at {self.next_offset}"
        )
        self._sequence += 1
        request = InFlight(self._sequence, append_offset, end_offset, self.restart)
        self._in_flight.append(request)
        self.next_offset, self.restart = end_offset, False
        return request

    def on_answer(self, sequence: int, result: AppendRecordsResult, ours: LogEnds) -> Reaction:
        """Take an answer in. Returns what it was taken for; IGNORE if its request was given up."""
        request = next((sent for sent in self._in_flight if sent.sequence == sequence), None)
        if request is None:
            return Reaction(Step.IGNORE)
        reaction = REACTIONS[self.state, result.error]
        if reaction.step is Step.STEP_BACK and result.epoch_end_offset < 0:
            reaction = OPERATOR_NEEDED
        if reaction.step is Step.ADVANCE:
            self._in_flight.remove(request)
            self._advance(request, result)
        elif reaction.step is Step.STEP_BACK:
            # Below its place a record less agrees each time; at a log start that nobody can look behind, anew.
            self._aim(ours, step_back(ours, EpochEnd(result.epoch, result.epoch_end_offset)))
        elif reaction.step is Step.GO_TO_END:
            self._aim(ours, min(result.log_end_offset, ours.log_end_offset))
        elif reaction.step is Step.REREAD:
            self._become(SessionState.REREADING)
            self.resend(ours)
        elif reaction.step is Step.RESEND:
            self.resend(ours)
        elif reaction.reason is not None:
            self.end(reaction.reason)
        return reaction

    def resend(self, ours: LogEnds) -> None:
        """Everything in flight goes out again, in the same order: the connection is gone, or the replica said later."""
        if self._in_flight:
            oldest = self._in_flight[0]
            self.next_offset, self.restart = oldest.append_offset, oldest.restart
            self._in_flight.clear()
        self.on_log_start(ours)

    def on_log_start(self, ours: LogEnds) -> None:
        """Records were removed here; a replica that still needed some of them begins anew where the log starts now."""
        if self.next_offset < ours.log_start_offset:
            self._aim(ours, ours.log_start_offset)

    def end(self, reason: PushSessionEndReason) -> bool:
        """End the session; False if it was over already."""
        if not self.is_live:
            return False
        self._become(SessionState.ENDED)
        self.reason = reason
        self._in_flight.clear()
        return True

    def verified(self, *, flushed_only: bool) -> int | None:
        """Up to where this session has shown that the replica holds the leader's records; None before it has."""
        return self.flushed if flushed_only else self.acknowledged

    def _advance(self, request: InFlight, result: AppendRecordsResult) -> None:
        if self.state is not SessionState.PUSHING:
            self._become(SessionState.PUSHING)
        self.acknowledged = max(self.acknowledged or 0, min(result.log_end_offset, request.end_offset))
        self.flushed = max(self.flushed or 0, min(result.flushed_offset, request.end_offset))

    def _aim(self, ours: LogEnds, offset: int) -> None:
        """Go on at `offset`; what is in flight is given up. Where the log starts there is nothing to compare: anew."""
        self._in_flight.clear()
        self.next_offset = max(offset, ours.log_start_offset)
        self.restart = offset <= ours.log_start_offset > 0

    def _become(self, state: SessionState) -> None:
        assert state in MAY_BECOME[self.state], f"{self.state} may not become {state}"
        self.state, self.is_live = state, state is not SessionState.ENDED
