"""Asking the other members of an outbox: all at once, each in a thread, until enough have answered or nobody else will.

    MemberClients.describe, .offer ─▶ a thread for each member ─▶ MemberAnswers.next() ─▶ MemberAnswer, at last None

A node's response becomes a MemberAnswer here. A node that can't be reached, sends an invalid response, or has another
outbox under the id gives no answer: it is not counted, and the log says why.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar
from uuid import UUID

from pushrep.election.candidate import MemberAnswer, MemberLog
from pushrep.election.epochs import EpochEnd, LogEnds, Unfenced
from pushrep.election.grants import Grant
from pushrep.env import Clock
from pushrep.log import SegmentLog
from pushrep.records import RecordBatch
from pushrep.records.header import split_batches
from pushrep.replay.node_connection import NodeUnreachable
from pushrep.replicate.access import UNPROVEN, identity_in
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import (
    DescribeLogRequest,
    DescribeLogResponse,
    FetchRecordsRequest,
    FetchRecordsResponse,
    GrantRequest,
    GrantResponse,
    LogDescription,
)

_LOG = logging.getLogger("pushrep.node")
_DESCRIBED_AT_ONCE = 500
_FETCH_BYTES = 4 << 20
_AGAIN_S = 0.1
_SAID_AGAIN_MS, _SAID_MAX = 60_000, 256
_NOT_COUNTED = "member %s does not count: %s"
R = TypeVar("R", DescribeLogResponse, GrantResponse)


class Ending:
    """Ends the waiting of all rounds of an election, the present and later ones."""

    def __init__(self, settings: PushSettings) -> None:
        self.changed = settings.network.threads.condition()
        self.is_set = False

    def set(self) -> None:
        with self.changed:
            self.is_set = True
            self.changed.notify_all()


class MemberAnswers:
    """The answers of one round. Read by one thread. ending: set when nobody's answer is waited for any more."""

    def __init__(self, settings: PushSettings, clock: Clock, timeout_s: float, ending: "Ending") -> None:
        self._clock, self._until_ms = clock, clock.monotonic_ms() + int(timeout_s * 1000)
        self._threads, self._ending, self._changed = settings.network.threads, ending, ending.changed
        self._arrived: deque[MemberAnswer] = deque()
        self._asked = 0
        self.asks_again = False
        """While it is set, and there is time, a member that did not answer is asked again: it may start soon."""

    def next(self) -> MemberAnswer | None:
        """Wait for the next answer; None when all members have answered or failed, or the time is over."""
        with self._changed:
            left_s = max(0, self._until_ms - self._clock.monotonic_ms()) / 1000
            self._changed.wait_for(lambda: self._arrived or not self._asked or self._ending.is_set, left_s)
            return self._arrived.popleft() if self._arrived else None

    def ask(self, name: str, question: Callable[[], MemberAnswer]) -> None:
        """Ask a member, in a thread of its own."""
        self._asked += 1
        self._threads.thread(partial(self._run, name, question), f"pushrep-ask-{name}").start()

    def _run(self, name: str, question: Callable[[], MemberAnswer]) -> None:
        answer = None
        try:
            while answer is None:
                try:
                    answer = question()
                except (NodeUnreachable, ValueError) as error:  # ValueError: its answer is no valid log or grant
                    is_news = _is_news(f"{name}: {error}", self._clock.monotonic_ms())
                    _LOG.log(logging.WARNING if is_news else logging.DEBUG, _NOT_COUNTED, name, error)
                    if not self.may_ask_again():
                        break
        finally:
            with self._changed:
                self._asked -= 1
                if answer is not None:
                    self._arrived.append(answer)
                self._changed.notify_all()

    def may_ask_again(self) -> bool:
        """Wait a pause; whether the member may be asked again."""
        with self._changed:
            self._changed.wait_for(lambda: not self.asks_again or self._ending.is_set, _AGAIN_S)
            return self.asks_again and not self._ending.is_set and self._clock.monotonic_ms() < self._until_ms


_said_ms: dict[str, int] = {}


def _is_news(text: str, now_ms: int) -> bool:
    """Whether this was not said for a minute: a standby without a majority asks every second."""
    is_news = not 0 <= now_ms - _said_ms.get(text, now_ms - _SAID_AGAIN_MS) < _SAID_AGAIN_MS
    if is_news:
        if len(_said_ms) >= _SAID_MAX:
            _said_ms.clear()
        _said_ms[text] = now_ms
    return is_news


class MemberClients:
    """The requests of member `member` about `tps`, the outbox's logs. Thread-safe."""

    def __init__(self, outbox_id: UUID, member: int, tps: Sequence[TopicIdPartition], settings: PushSettings) -> None:
        self._outbox_id, self._member, self._tps, self._settings = outbox_id, member, tps, settings
        self.generation = 0
        """The generation of the newest grant here."""

    def describe(self, index: int, address: Address) -> MemberAnswer:
        """Ask what a member holds. Raises NodeUnreachable, ValueError."""
        with ReplicaClient(address, self._settings) as client:
            return self._whole(index, client, self._describe(client, 0))

    def offer(self, grant: Grant, index: int, address: Address, *, is_first: bool = False) -> MemberAnswer:
        """Offer a grant; the answer shows what the member holds, and its newest grant. Raises as `describe`.

        is_first: nothing was ever acknowledged, so a member without a grant has lost nothing.
        """
        with ReplicaClient(address, self._settings) as client:
            page = tuple(self._tps[:_DESCRIBED_AT_ONCE])
            first = client.ask(
                GrantRequest(grant=grant, sender=self._member, partitions=page, member=index, is_first=is_first),
                GrantResponse,
            )
            if first.error_code is not ErrorCode.NONE and not first.grants:
                raise NodeUnreachable(str(address), first.why)
            return self._whole(index, client, first)

    def fetch(
        self, address: Address, log: SegmentLog, grant_epoch: int, end_offset: int, *, generation: int = 0
    ) -> Iterator[list[RecordBatch]]:
        """The batches from the log's end on, up to `end_offset`; the caller appends each list before the next.

        Raises NodeUnreachable.
        """
        with ReplicaClient(address, self._settings) as client:
            while (offset := log.log_end_offset) < end_offset:
                answer = client.ask(
                    FetchRecordsRequest(
                        tp=tp_of(log),
                        grant_epoch=grant_epoch,
                        offset=offset,
                        max_bytes=_FETCH_BYTES,
                        generation=generation,
                    ),
                    FetchRecordsResponse,
                )
                if answer.error_code is not ErrorCode.NONE or not answer.records:
                    raise NodeUnreachable(
                        str(address), f"it gave no records of {log.path.name} at {offset}: {answer.why}"
                    )
                data = memoryview(bytes(answer.records[0]))  # type: ignore[arg-type]
                found = split_batches(data)
                batches = [
                    RecordBatch(data[at : at + header.size_bytes], header)
                    for at, header in found.placed
                    if header.next_offset <= end_offset
                ]
                joins = found.joins and bool(batches) and batches[0].header.base_offset == offset
                if found.why_not is not None or not joins:
                    why = found.why_not or "they do not join"
                    raise NodeUnreachable(str(address), f"it sent broken batches of {log.path.name} at {offset}: {why}")
                yield batches

    def _whole(self, index: int, client: ReplicaClient, first: DescribeLogResponse | GrantResponse) -> MemberAnswer:
        descriptions = list(first.logs)
        while len(descriptions) < len(self._tps):  # an answer has as many logs as fit into a frame
            descriptions += self._describe(client, len(descriptions)).logs
        is_another = first.member not in {-1, index}
        age_ms = first.contact_age_ms if isinstance(first, DescribeLogResponse) else -1
        # Of another member's answer only the directory counts: by it the rules see that one node has two addresses.
        grant = first.grants[0] if first.grants and not is_another else None
        return MemberAnswer(
            index=index,
            grant=grant,
            highest_epoch=first.highest_epoch,
            logs=dict(_partition_logs(descriptions)),
            is_unfilled=first.is_unfilled,
            directory_id=first.directory_id,
            generation=first.generation,
            contact_age_ms=None if age_ms < 0 else age_ms,
            identity="" if (shown := identity_in(client.certificate)) in UNPROVEN else shown,
        )

    def _describe(self, client: ReplicaClient, at: int) -> DescribeLogResponse:
        """Describe the logs from the `at`-th on, at least one."""
        page = tuple(self._tps[at : at + _DESCRIBED_AT_ONCE])
        answer = client.ask(
            DescribeLogRequest(
                outbox_id=self._outbox_id, member=self._member, partitions=page, generation=self.generation
            ),
            DescribeLogResponse,
        )
        if answer.error_code is not ErrorCode.NONE or not answer.logs:
            raise NodeUnreachable(str(client.address), answer.why)
        return answer


def _partition_logs(descriptions: Sequence[LogDescription]) -> Iterator[tuple[int, MemberLog]]:
    """The logs by partition, without those that the member lacks; one that it can't open counts as damaged."""
    for one in descriptions:
        if one.error_code is ErrorCode.UNKNOWN_TOPIC_ID:
            continue
        unfenced = None
        if one.ungranted_from >= 0:
            unfenced = Unfenced(one.ungranted_from, EpochEnd(one.granted_epoch, one.granted_end_offset))
        yield (
            one.tp.partition,
            MemberLog(
                log=one.log_ends(),
                high_watermark=one.high_watermark,
                is_damaged=one.error_code is not ErrorCode.NONE or one.damaged_from >= 0,
                unfenced=unfenced,
            ),
        )


def tp_of(log: SegmentLog) -> TopicIdPartition:
    """The log's topic id, topic and partition."""
    return TopicIdPartition(log.log_id, log.topic, log.partition)


def ends_of(log: SegmentLog) -> LogEnds:
    """The log's ends and epochs, as the rules compare them."""
    return LogEnds(log.log_start_offset, log.log_end_offset, log.leader_epochs)
