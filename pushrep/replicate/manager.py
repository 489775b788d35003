"""PushManager: which replicas of which partitions are pushed to. Its ten methods have the names of Confluent's.

    start_push ─▶ Pusher (one a partition and replica) ─▶ Channel (one a replica) ─▶ Worker (a few threads)
    on_leader_append ─▶ one Buffered for all replicas ─▶ each Pusher's queue ─▶ its channel is woken

It owns no replication state: that is in the PartitionLeader to which a session belongs. Nothing here waits for the
network or a disk, and a partition with nothing to send costs nothing.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

from pushrep.election.messages import PushSessionEndReason
from pushrep.election.push_session import BEGINS_ANEW
from pushrep.env import SYSTEM_CLOCK, Clock
from pushrep.log.disk import Durations
from pushrep.records import RecordBatch
from pushrep.replicate.channel import Beats, Channel, Workers, release_workers, workers_for
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.errors import IllegalState
from pushrep.replicate.led_partition import PushSession
from pushrep.replicate.pusher import MemoryTracker, Pusher
from pushrep.replicate.settings import PushSettings, Replica
from pushrep.status.value import REQUEST_BOUNDS_S
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode

_LOG = logging.getLogger("pushrep.push")
_GRACE_MS = 500


class FileRecords(NamedTuple):
    """Records up to `end_offset` that are read from the log when they are sent; nothing is buffered."""

    end_offset: int


class _State(Enum):
    NEW = auto()
    ACTIVE = auto()
    STOPPED = auto()


class _ReplicaPush(NamedTuple):
    pusher: Pusher
    channel: Channel


class PushManager:
    """Thread-safe across partitions; calls for one partition must be in order. It can't be used after `shutdown`."""

    def __init__(
        self,
        settings: PushSettings | None = None,
        *,
        push_internal_topics: bool = False,
        push_cluster_links: bool = False,
        clock: Clock = SYSTEM_CLOCK,
        beats: Beats | None = None,
    ) -> None:
        """beats: the heartbeats that each connection sends."""
        self.settings = settings or PushSettings()
        self.memory = MemoryTracker(self.settings.buffer_bytes_max)
        self.not_caught_up: Counter[int] = Counter()
        """How often each replica lagged."""
        self.session_ends: Counter[PushSessionEndReason] = Counter()
        self.refusals: Counter[tuple[int, ErrorCode]] = Counter()
        """How often each replica answered with each error."""
        self.connections_lost: Counter[int] = Counter()
        """How often connections to each replica broke."""
        self.requests: dict[tuple[int, int], Durations] = {}
        """How long pushes took to be answered, by the replica and the number of its channel."""
        self._push_internal, self._push_links = push_internal_topics, push_cluster_links
        self._clock, self._beats = clock, beats
        self._lock = threading.Lock()
        self._state = _State.NEW
        self._workers: Workers | None = None  # from the first channel on
        self._channels: dict[tuple[Replica, int], Channel] = {}
        self._closing: list[Channel] = []
        self._pushes: dict[TopicIdPartition, dict[int, _ReplicaPush]] = {}

    def startup(self) -> bool:
        """Begin to push. True for the first call."""
        with self._lock:
            if self._state is not _State.NEW:
                return False
            self._state = _State.ACTIVE
            self._shared_workers().start()
            for channel in self._channels.values():
                channel.worker.add(channel)
            return True

    def shutdown(self) -> bool:
        """End every session, drop buffered records, stop the threads. True for the first call."""
        with self._lock:
            was, self._state = self._state, _State.STOPPED
            pushes = [(tp, index) for tp, of_tp in self._pushes.items() for index in of_tp]
        if was is _State.STOPPED:
            return False
        for tp, index in pushes:
            self._stop(tp, index, PushSessionEndReason.SHUTDOWN)
        until_ms = self._clock.monotonic_ms() + self.settings.shutdown_timeout_ms
        with self._lock:
            channels, self._channels = [*self._channels.values(), *self._closing], {}
            workers, self._workers = self._workers, None
        for channel in channels:
            if was is _State.ACTIVE:
                channel.close(until_ms)
            else:  # no worker runs it
                channel.cut()
        for channel in channels:
            left_ms = until_ms + _GRACE_MS - self._clock.monotonic_ms()
            channel.wait_closed(max(0, left_ms) / 1000)
        if workers is not None:
            release_workers(workers)
        return was is _State.ACTIVE

    def is_active(self) -> bool:
        """Between `startup` and `shutdown`."""
        return self._state is _State.ACTIVE

    def start_push(
        self, tp: TopicIdPartition, session: PushSession, client: ReplicaClient | None = None
    ) -> "Future[bool]":
        """Push to a partition's replica: first the records that its log lacks, then new ones.

        client: a connection to the replica to take over, if there is none yet. The future is True at the first success,
        False if the session ended before, or an equal or newer session is live.
        """
        self._check("start_push")
        index = session.replica.index
        with self._lock:
            live = self._pushes.get(tp, {}).get(index)
            if live is not None and live.pusher.session.ended is None and session.id <= live.pusher.session.id:
                return _done(value=False)
        if live is not None:
            self._stop(tp, index, PushSessionEndReason.STALE_REPLICA_EPOCH)
        if session.ended is not None:
            return session.started
        pusher = Pusher(session, self.memory)
        with self._lock:
            channel = self._channel_of(tp, session.replica, client)
            channel.pushers[pusher] = None
            self._pushes.setdefault(tp, {})[index] = _ReplicaPush(pusher, channel)
        channel.wake(pusher)
        return session.started

    def stop_push(
        self, tp: TopicIdPartition, replica_ids: Iterable[int], reason: PushSessionEndReason
    ) -> "Future[bool]":
        """End these sessions, if they are known, and drop their buffered records.

        The future is done once every replica that gets this reason was notified, or can't be.
        """
        self._check("stop_push")
        return _all_of([stopped for index in replica_ids if (stopped := self._stop(tp, index, reason)) is not None])

    def on_leader_append(
        self,
        tp: TopicIdPartition,
        replica_ids: Iterable[int],
        append_offset: int,
        records: Sequence[RecordBatch] | FileRecords,
    ) -> None:
        """Records were appended at `append_offset`: in memory, or already in the log's file. Never waits."""
        self._check("on_leader_append")
        pushes = self._pushes.get(tp)
        if not pushes:
            return
        found = [push for index in replica_ids if (push := pushes.get(index)) is not None]
        if not found:
            return
        if not isinstance(records, FileRecords):
            parts = tuple(batch.data for batch in records)
            entry = self.memory.hold(append_offset, records[-1].header.next_offset, parts, len(found))
            if entry is not None:
                for push in found:
                    push.pusher.offer(entry)
        for push in found:
            push.channel.push(push.pusher)

    def on_high_watermark_update(self, tp: TopicIdPartition, replica_ids: Iterable[int], high_watermark: int) -> None:
        """The high watermark rose; replicas get it even if no record follows. Other values are ignored.

        Part of the fixed interface, for callers with their own rules; `Leading` does not call it: its rules raise the
        watermark themselves and wake the pushers that have to send it (`wake`).
        """
        self._check("on_high_watermark_update")
        self._wake_if(tp, replica_ids, lambda pusher: pusher.session.partition.leader.high_watermark >= high_watermark)

    def on_log_start_offset_update(
        self, tp: TopicIdPartition, replica_ids: Iterable[int], log_start_offset: int
    ) -> None:
        """The log start rose; as above. `Leading` reads it at each tick, and its rules wake the pushers."""
        self._check("on_log_start_offset_update")
        self._wake_if(
            tp, replica_ids, lambda pusher: pusher.session.partition.leader.log.log_start_offset >= log_start_offset
        )

    def record_follower_not_caught_up(self, tp: TopicIdPartition, replica_id: int) -> None:
        """Count it; no state changes."""
        self.not_caught_up[replica_id] += 1
        _LOG.debug("%s: replica %d is behind", tp, replica_id)

    def record_refusal(self, replica_id: int, error: ErrorCode) -> None:
        """A replica answered with an error: count it; no state changes."""
        self.refusals[replica_id, error] += 1

    def is_push_replication_supported(self, *, is_internal_topic: bool, is_cluster_link_destination: bool) -> bool:
        """Whether such a topic is pushed.

        Part of the fixed interface, for a broker's topics: an outbox has no internal topics, nor cluster links.
        """
        return (self._push_internal or not is_internal_topic) and (self._push_links or not is_cluster_link_destination)

    def away(self) -> dict[int, str]:
        """Why replicas can't be reached, by their index."""
        with self._lock:
            channels = list(self._channels.values())
        return {channel.replica.index: channel.away for channel in channels if channel.away is not None}

    def wake(self, tp: TopicIdPartition, replica_id: int, *, backoff: bool = False) -> None:
        """There is something to send to a replica, if it is known, or to send again after a pause."""
        push = self._pushes.get(tp, {}).get(replica_id)
        if push is None:
            return
        if backoff:
            push.channel.wake_later(push.pusher)
        else:
            push.channel.notify(push.pusher)

    def on_session_ended(self, session: PushSession, reason: PushSessionEndReason) -> None:
        """The replica ended the session: drop its buffered records."""
        self.session_ends[reason] += 1
        push = self._pushes.get(session.partition.tp, {}).get(session.replica.index)
        if push is not None and push.pusher.session is session:
            self._stop(session.partition.tp, session.replica.index, reason)

    def _wake_if(self, tp: TopicIdPartition, replica_ids: Iterable[int], is_news: "Callable[[Pusher], bool]") -> None:
        pushes = self._pushes.get(tp, {})
        for index in replica_ids:
            push = pushes.get(index)
            if push is not None and is_news(push.pusher):
                push.channel.notify(push.pusher)

    def _stop(self, tp: TopicIdPartition, index: int, reason: PushSessionEndReason) -> "Future[bool] | None":
        with self._lock:
            push = self._pushes.get(tp, {}).pop(index, None)
            if push is None:
                return None
            if not self._pushes[tp]:
                del self._pushes[tp]
        if push.pusher.end(reason):
            push.channel.wake(push.pusher)
        key = (push.channel.replica, self._line_of(tp))
        with self._lock:
            push.channel.pushers.pop(push.pusher, None)
            is_last = not push.channel.pushers and reason not in BEGINS_ANEW  # else the next session begins soon
            if is_last and self._channels.get(key) is push.channel:
                del self._channels[key]
                self._closing = [one for one in self._closing if not one.hung_up.is_set()] + [push.channel]
                push.channel.close()
        return push.pusher.end_sent

    def _channel_of(self, tp: TopicIdPartition, replica: Replica, client: ReplicaClient | None) -> Channel:
        key = (replica, self._line_of(tp))
        channel = self._channels.get(key)
        if channel is None:
            # While the manager is active, a worker runs the channel; else `shutdown` closes the given connection.
            opened = client.hand_over() if client is not None and self.is_active() else None
            channel = self._channels[key] = Channel(
                replica,
                self.settings,
                self._shared_workers().least_loaded(),
                self._clock,
                opened,
                self._beats,
                self.connections_lost,
                self.requests.setdefault((replica.index, key[1]), Durations(REQUEST_BOUNDS_S)),
            )
            if self.is_active():
                channel.worker.add(channel)
        return channel

    def _shared_workers(self) -> Workers:
        if self._workers is None:
            self._workers = workers_for(self.settings, self._clock)
        return self._workers

    def _line_of(self, tp: TopicIdPartition) -> int:
        return tp.partition % self.settings.workers_per_replica

    def _check(self, method: str) -> None:
        if self._state is _State.STOPPED:
            raise IllegalState(method)


def _done(*, value: bool) -> "Future[bool]":
    future: Future[bool] = Future()
    future.set_result(value)
    return future


def _all_of(futures: "list[Future[bool]]") -> "Future[bool]":
    """Done when all are; True if all of them are True."""
    if not futures:
        return _done(value=True)
    whole: Future[bool] = Future()
    missing = threading.Semaphore(len(futures) - 1)

    def one_is_done(_: "Future[bool]") -> None:
        if not missing.acquire(blocking=False):
            whole.set_result(all(future.result() for future in futures))

    for future in futures:
        future.add_done_callback(partial(one_is_done))
    return whole
