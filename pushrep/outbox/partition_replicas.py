"""The replicas of a partition: whether records may be appended now, which batches wait for members, each replica's lag.

    write round ─▶ refusal()? ─▶ log ─▶ on_append, on_flush ─▶ waiting ─▶ resolved at the high watermark
                                                                  └─▶ failed: delivery_timeout_ms, NotLeader, close

Batches wait only with acks=ALL; with LOCAL they are pushed without waiting for an answer.

The lag counts what the replica told this leader: by its acknowledgements, in any session; before the first one, by the
description of its log. So a replica that went away lags by the records since then; one that never answered, by all.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from pushrep.env import Clock
from pushrep.errors import PushrepError
from pushrep.log import SegmentLog
from pushrep.outbox.batch import PendingBatch
from pushrep.outbox.errors import NotEnoughReplicas

if TYPE_CHECKING:
    from pushrep.replicate.led_partition import LedPartition


class Waiting(NamedTuple):
    """A batch that is in the log at `base_offset` since `since_ms`, but not yet on enough members."""

    base_offset: int
    batch: PendingBatch
    since_ms: int
    led: "LedPartition"

    @property
    def end_offset(self) -> int:
        return self.base_offset + len(self.batch.values)


class PartitionReplicas:
    """One partition's replicas. `led` is None until the outbox leads; with acks=ALL appends are refused until then."""

    def __init__(self, name: str, *, needs_all: bool, min_insync_replicas: int, clock: Clock) -> None:
        self.needs_all = needs_all
        self.led: LedPartition | None = None
        self.failure: Exception | None = None
        """Why the outbox can't lead, until it is opened again."""
        self.lead_anew: Callable[[Callable[[], None]], None] = lambda go_on: go_on()
        """See Replication.lead_anew."""
        self.is_held_back = False
        """The members are being changed: appends are accepted and wait for the write lock; `refusal` is asked again
        after that.
        """
        self.waiting: deque[Waiting] = deque()
        """In log order; guarded by the appender's lock."""
        self.write_lock = threading.Lock()
        """Held while a round is written, and while the leader is changed."""
        self.needed, self._name, self._clock = min_insync_replicas, name, clock
        self._made_ms, self._possible_ms = clock.monotonic_ms(), -1
        self._first: int | None = None  # base offset of the batch that has waited for longest

    def refusal(self) -> Exception | None:
        """Why no record can be appended now; None if one can."""
        led = self.led
        if self.failure is not None:
            return self.failure
        if self.is_held_back:
            return None
        if led is None:
            return self._not_enough(1) if self.needs_all else None
        if led.resigned is not None:
            return led.resigned
        return self._not_enough(len(led.leader.in_sync)) if self.needs_all and not led.leader.may_append_all else None

    def look(self) -> None:
        """Note whether records can be appended now, and are acknowledged; called once a second."""
        try:
            first = self.waiting[0].base_offset
        except IndexError:
            first = None
        if self.refusal() is None and (first is None or first != self._first):
            self._possible_ms = self._clock.monotonic_ms()
        self._first = first

    def refused_ms(self, grace_ms: int = 0) -> int | None:
        """For how long no record could be appended; None: one can. grace_ms: of fewer than enough members in sync, if
        there were enough before.
        """
        self.look()
        was_possible, age_ms, refusal = self._possible_ms >= 0, self._impossible_ms(), self.refusal()
        may_pass = was_possible and age_ms < grace_ms and isinstance(refusal, NotEnoughReplicas)
        return None if refusal is None or may_pass else age_ms

    def acknowledges(self, grace_ms: int) -> bool:
        """Whether batches are acknowledged, or none waits. grace_ms: of an in-sync member that does not answer."""
        self.look()
        return not self.waiting or self._impossible_ms() < grace_ms

    def _impossible_ms(self) -> int:
        since_ms = self._possible_ms if self._possible_ms >= 0 else self._made_ms
        return self._clock.monotonic_ms() - since_ms

    def hold(self, batches: Sequence[PendingBatch], bases: Sequence[int]) -> list[Waiting]:
        """Let these batches wait for replicas from now on."""
        now_ms, led = self._clock.monotonic_ms(), self.led
        assert led is not None, "without a leader nothing is written that waits for replicas"
        held = [Waiting(base, batch, now_ms, led) for batch, base in zip(batches, bases, strict=True)]
        self.waiting += held
        return held

    def remove(self, waiting: Waiting) -> None:
        """Remove a decided batch, usually the first."""
        if self.waiting and self.waiting[0] is waiting:
            self.waiting.popleft()
        elif waiting in self.waiting:
            self.waiting.remove(waiting)

    def remove_expired(self, since_ms: int) -> list[Waiting]:
        """Remove and return those that have waited since `since_ms` or longer."""
        late = []
        while self.waiting and self.waiting[0].since_ms <= since_ms:
            late.append(self.waiting.popleft())
        return late

    def remove_all(self) -> list[Waiting]:
        """Remove and return all."""
        taken = list(self.waiting)
        self.waiting.clear()
        return taken

    def _not_enough(self, in_sync: int) -> NotEnoughReplicas:
        return NotEnoughReplicas(self._name, in_sync=in_sync, needed=self.needed)


@contextmanager
def writes_paused(appenders: Collection[PartitionReplicas]) -> Iterator[None]:
    """Hold all their write locks: nothing is written to their logs meanwhile."""
    with ExitStack() as turns:
        for appender in appenders:
            turns.enter_context(appender.write_lock)
        yield


@contextmanager
def holding_back(appenders: Collection[PartitionReplicas]) -> Iterator[None]:
    """Records that are appended meanwhile wait to be written instead of being refused."""
    for appender in appenders:
        appender.is_held_back = True
    try:
        yield
    finally:
        for appender in appenders:
            appender.is_held_back = False


class ReplicaLag(NamedTuple):
    """How far a replica is, over all partitions.

    records, size_bytes: what it is not known to hold; the bytes are too high by at most an index interval (4 KiB) a
    partition.
    age_ms: how long ago the oldest of them was appended, counted from this opening at the earliest; 0 if there are
        none. Too high by an eighth at most.
    in_sync, partitions: in how many of them it is in the in-sync set.
    """

    records: int = 0
    in_sync: int = 0
    partitions: int = 0
    size_bytes: int = 0
    age_ms: int = 0


def lag_of(
    index: int, appenders: Mapping[int, PartitionReplicas], logs: Mapping[int, SegmentLog], now_ms: int
) -> ReplicaLag:
    """The lag of member `index`. now_ms: by the leaders' clock."""
    records = in_sync = size_bytes = age_ms = 0
    for number, log in logs.items():
        led = appenders[number].led
        held, since = 0, None
        if led is not None:
            with led.lock:
                held, since = led.leader.held_by(index), led.leader.owes_since(index)
                in_sync += index in led.leader.in_sync
        held = max(held, log.log_start_offset)
        owed = max(0, log.log_end_offset - held)
        if not owed:
            continue
        records += owed
        with suppress(OSError, PushrepError):  # only a figure; the log itself reports a failing disk
            size_bytes += log.size_from(held)
        age_ms = max(age_ms, 0 if since is None else now_ms - since)
    return ReplicaLag(records, in_sync, len(logs), size_bytes, age_ms)
