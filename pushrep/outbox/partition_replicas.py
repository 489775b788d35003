"""The replicas of a partition: may it take records now, which batches wait for enough members, how far is each behind.

    write round ─▶ refusal()? ─▶ log ─▶ on_append, on_flush ─▶ waiting ─▶ resolved at the high watermark
                                                                  └─▶ failed: delivery_timeout_ms, NotLeader, close

Batches wait only with acks=ALL; with LOCAL they are pushed without waiting for an answer.

A replica holds what it has said to this leader: by its acknowledgements, over sessions, and before the first one by the
description of its log. So a replica that went away lags by what came since, one that was never there by everything.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from pushrep.env import Clock
from pushrep.errors import PushrepError
from pushrep.log import SegmentLog
from pushrep.outbox.batch import PendingBatch
from pushrep.outbox.errors import NotEnoughReplicas
from pushrep.records import RecordBatch

if TYPE_CHECKING:
    from pushrep.replicate.led_partition import LedPartition


class Waiting(NamedTuple):
    """A batch that stands in the log at `base_offset` since `since_ms`, and not yet at enough members."""

    base_offset: int
    batch: PendingBatch
    since_ms: int
    led: "LedPartition"

    @property
    def end_offset(self) -> int:
        return self.base_offset + len(self.batch.values)


class PartitionReplicas:
    """Of one partition. `led` is set once its outbox leads; until then nothing is taken that waits for replicas."""

    def __init__(self, name: str, *, needs_all: bool, min_insync_replicas: int, clock: Clock) -> None:
        self.needs_all = needs_all
        self.led: LedPartition | None = None
        self.failure: Exception | None = None
        """Why the outbox can't lead, until it is opened again."""
        self.is_held_back = False
        """The members are being changed: what is appended waits for that, and is judged then."""
        self.waiting: deque[Waiting] = deque()
        """In log order; guarded by the appender's lock."""
        self.write_lock = threading.Lock()
        """Held while a round is written: the leader is changed under it, while nothing is appended."""
        self.needed, self._name, self._clock = min_insync_replicas, name, clock

    def refusal(self) -> Exception | None:
        """Why a record can't be taken now, None if it can."""
        led = self.led
        if self.failure is not None:
            return self.failure
        if self.is_held_back:
            return None
        if led is None:
            return self._not_enough(1) if self.needs_all else None
        if led.resigned is not None:
            return led.resigned
        return self._not_enough(len(led.leader.in_sync)) if self.needs_all and not led.may_append_all else None

    def check(self) -> None:
        """Raise the refusal, if there is one."""
        if (refusal := self.refusal()) is not None:
            raise refusal

    def on_append(self, base_offset: int, batches: Sequence[RecordBatch]) -> None:
        """They stand in the log now."""
        if self.led is not None:
            self.led.on_append(base_offset, batches, self._clock.monotonic_ms())

    def on_flush(self, flushed_offset: int) -> None:
        """Everything below is on this disk."""
        if self.led is not None:
            self.led.on_flush(flushed_offset)

    def hold(self, batches: Sequence[PendingBatch], bases: Sequence[int]) -> list[Waiting]:
        """These wait from now on."""
        now_ms, led = self._clock.monotonic_ms(), self.led
        assert led is not None, "without a leader nothing is written that waits for replicas"
        held = [Waiting(base, batch, now_ms, led) for batch, base in zip(batches, bases, strict=True)]
        self.waiting += held
        return held

    def remove(self, waiting: Waiting) -> None:
        """It is decided; mostly it is the first."""
        if self.waiting and self.waiting[0] is waiting:
            self.waiting.popleft()
        elif waiting in self.waiting:
            self.waiting.remove(waiting)

    def remove_expired(self, since_ms: int) -> list[Waiting]:
        """Those that wait since `since_ms` or longer; they wait no more."""
        late = []
        while self.waiting and self.waiting[0].since_ms <= since_ms:
            late.append(self.waiting.popleft())
        return late

    def remove_all(self) -> list[Waiting]:
        """Nobody waits any more."""
        taken = list(self.waiting)
        self.waiting.clear()
        return taken

    def _not_enough(self, in_sync: int) -> NotEnoughReplicas:
        return NotEnoughReplicas(self._name, in_sync=in_sync, needed=self.needed)


@contextmanager
def writes_paused(appenders: Collection[PartitionReplicas]) -> Iterator[None]:
    """Nothing is written to any of their logs meanwhile."""
    with ExitStack() as turns:
        for appender in appenders:
            turns.enter_context(appender.write_lock)
        yield


@contextmanager
def holding_back(appenders: Collection[PartitionReplicas]) -> Iterator[None]:
    """What is appended meanwhile waits to be written, and is not refused."""
    for appender in appenders:
        appender.is_held_back = True
    try:
        yield
    finally:
        for appender in appenders:
            appender.is_held_back = False


class ReplicaLag(NamedTuple):
    """How far a replica is, over all partitions.

    records, size_bytes: that it is not known to hold; bytes are too many by an index entry (4 KiB) a partition at most.
    age_ms: how long ago the oldest of them was appended, 0 if there are none; what is older than this opening counts
        from there on. Too high by an eighth at most.
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
    """Of the member `index`. now_ms: of the clock that the leaders were given."""
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
        with suppress(OSError, PushrepError):  # the bytes are for people; the log itself reports a disk that fails
            size_bytes += log.size_from(held)
        age_ms = max(age_ms, 0 if since is None else now_ms - since)
    return ReplicaLag(records, in_sync, len(logs), size_bytes, age_ms)
