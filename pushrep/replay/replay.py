"""Replay: the subscriber's iterator over records or whole batches, with or without an event loop.

    for record in replay                    async for record in replay
    for batch in replay.batches()           async for batch in replay.batches()

All four continue where any of them stopped. One thread or task at a time iterates; any may call `stop`, `pause` and
`resume`.

Its blocks come from a Feed: a session of this process (local.py) or of a node (remote.py).
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from typing import NamedTuple, TypeAlias

from filtering.closing import ClosedAtExit
from pushrep.errors import BadArgument, PushrepError
from pushrep.records import Record, RecordBatch, RecordCursor
from pushrep.replay.local import LocalSession
from pushrep.replay.plan import ReplayedBlock
from pushrep.replay.remote import RemoteSession
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.replay_messages import ReplayEndReason


class ReplayFailed(PushrepError):
    """The session ended with an error, which is raised once. `offset`: the first one that was not delivered.

    `segment`: base offset of the segment with the error; None without one.
    """

    def __init__(self, code: ErrorCode, why: str, *, offset: int, segment: int | None = None) -> None:
        super().__init__(f"the replay ended at offset {offset}: {why} ({code.name})")
        self.code, self.why, self.offset, self.segment = code, why, offset, segment


class ReplayTruncated(ReplayFailed):
    """The log was cut below delivered records: those from `cut_offset` on are not in it any more.

    Undo them, then start again at `cut_offset`; `leader_epoch` is that of the records there now, -1 if unknown.
    """

    def __init__(self, *, offset: int, cut_offset: int, leader_epoch: int) -> None:
        why = f"the log was cut at offset {cut_offset}, take back what came from there on"
        super().__init__(ErrorCode.TRUNCATED, why, offset=offset)
        self.cut_offset, self.leader_epoch = cut_offset, leader_epoch


Feed: TypeAlias = LocalSession | RemoteSession
"""One session and its subscriber. One thread at a time calls `step` and `wait`; any may call the others."""

_WAIT_S = 1.0  # at the tip; the feed is notified or polls


class ReplayedBatch(NamedTuple):
    """A whole batch of the log; its records with offsets in [start, end) belong to the replay."""

    batch: RecordBatch
    start: int
    end: int

    def records(self) -> list[Record]:
        """Its records that belong to the replay, none of a control batch. Raises CorruptRecordBatch."""
        return list(self.cursor().records)

    def cursor(self) -> RecordCursor:
        """As `records`, but each Record is made when it is taken; decoding happens first. Raises CorruptRecordBatch."""
        first = max(self.start, self.batch.header.base_offset)
        if self.batch.header.is_control:
            return RecordCursor(first)
        return RecordCursor(first, self.batch.rows().between(self.start, self.end))


class Replay(ClosedAtExit):
    """A running replay. Made by ReplayClient; a context manager, which stops it.

    Iterating raises ReplayFailed once, ReplayTruncated if the log was cut below `position`; then it is over.
    """

    def __init__(self, feed: Feed) -> None:
        """Use `ReplayClient.replay`."""
        self._feed = feed
        self._batches: deque[ReplayedBatch] = deque()
        self._cursor: RecordCursor | None = None  # into the batch that is being iterated by record
        self._standing = self._block_end = feed.position
        self._is_paused = self._has_raised = False
        self._turn = threading.Lock()

    @property
    def session_id(self) -> int:
        """All 64 bits of it."""
        return self._feed.session_id

    @property
    def position(self) -> int:
        """The next offset to be delivered, at which another replay would go on."""
        cursor = self._cursor
        return self._standing if cursor is None else cursor.position

    @property
    def tip(self) -> int:
        """The end of readable records at its last look."""
        return max(self._feed.tip, self.position)

    @property
    def end_reason(self) -> ReplayEndReason | None:
        """Why it is over; None while it runs, or while records are left to iterate."""
        end = self._feed.end
        return None if self._batches or end is None else end.reason

    def __iter__(self) -> Iterator[Record]:
        """Records one by one; ends with the replay, and waits at the tip if it follows."""
        return chain.from_iterable(self._iterators())  # no Python code between a record and its reader

    def _iterators(self) -> Iterator[Iterator[Record]]:
        """An iterator over each batch's records, continuing a batch that was left."""
        while True:
            yield self._left()
            if not self._batches and not self._load():
                return
            self._next_records()

    async def __aiter__(self) -> AsyncIterator[Record]:
        """The same in an event loop; steps that may wait run in a thread."""
        while True:
            for record in self._left():
                yield record
            if not self._batches and not await self._load_async():
                return
            self._next_records()

    def batches(self) -> "ReplayBatches":
        """Whole batches, for `for` and `async for`."""
        return ReplayBatches(self)

    def poll(self) -> list[Record]:
        """The present records, of one block at most; empty if there are none. Never waits. Raises as iterating."""
        with self._one_at_a_time():
            if not self._is_paused and not self._batches:
                self._enqueue(self._feed.step())
        found = list(self._left())
        while self._batches and not self._is_paused:
            self._next_records()
            found += self._left()
        self._raise_if_failed()
        if not self._batches:
            self._stand_at(self._block_end)
        return found

    def pause(self) -> None:
        """Deliver nothing until `resume`: iterating waits. The lease is not renewed meanwhile."""
        self._is_paused = True

    def resume(self) -> None:
        """Go on."""
        self._is_paused = False
        self._feed.wake()

    def stop(self) -> None:
        """End it; records that were read and not delivered are dropped. A second call is fine."""
        self._feed.stop()
        self._batches.clear()
        self._feed.wake()

    def close(self) -> None:
        """`stop`, and close the log."""
        self.stop()
        self._feed.close()

    # ---- inside

    def next_batch(self) -> ReplayedBatch | None:
        """For ReplayBatches: wait for the next batch; None when the replay is over."""
        if not self._batches and not self._load():
            return None
        return self._dequeue()

    async def next_batch_async(self) -> ReplayedBatch | None:
        """For ReplayBatches."""
        if not self._batches and not await self._load_async():
            return None
        return self._dequeue()

    def _dequeue(self) -> ReplayedBatch:
        batch = self._batches.popleft()
        self._standing, self._cursor = min(batch.end, batch.batch.header.next_offset), None
        return batch

    def _left(self) -> Iterator[Record]:
        """The rest of the batch that is being read record by record."""
        return iter(()) if self._cursor is None else self._cursor.records

    def _stand_at(self, offset: int) -> None:
        self._standing, self._cursor = offset, None

    def _next_records(self) -> None:
        batch = self._batches.popleft()
        # An error leaves the position before the batch.
        self._stand_at(max(batch.start, batch.batch.header.base_offset))
        self._cursor = batch.cursor()

    def _load(self) -> bool:
        """Wait for a block; False when the replay is over."""
        self._stand_at(self._block_end)
        with self._one_at_a_time():
            while not self._step():
                if self._is_over():
                    self._stand_at(self._block_end)
                    return False
                self._feed.wait(_WAIT_S)
        return True

    async def _load_async(self) -> bool:
        self._stand_at(self._block_end)
        with self._one_at_a_time():
            while not (await asyncio.to_thread(self._step) if self._feed.step_waits else self._step()):
                if self._is_over():
                    self._stand_at(self._block_end)
                    return False
                await self._feed.wait_async(_WAIT_S)
        return True

    def _step(self) -> bool:
        if self._is_paused and not self._feed.is_over:
            self._feed.rest()
            return False
        self._enqueue(self._feed.step())
        return bool(self._batches)

    def _enqueue(self, block: ReplayedBlock | None) -> None:
        if block is not None and not self._feed.is_over:
            self._batches.extend(map(ReplayedBatch, block.batches, repeat(block.start), repeat(block.end)))
            self._block_end = block.end
        elif not self._batches:
            self._block_end = max(self._block_end, self._feed.position)

    def _is_over(self) -> bool:
        self._raise_if_failed()
        return self._feed.is_over

    def _raise_if_failed(self) -> None:
        end = self._feed.end
        if end is None or end.code is ErrorCode.NONE or self._has_raised or self._batches:
            return
        self._has_raised = True
        if end.reason is ReplayEndReason.TRUNCATED:
            cut = end.cut_offset if end.cut_offset is not None else end.offset
            raise ReplayTruncated(offset=end.offset, cut_offset=cut, leader_epoch=end.leader_epoch)
        raise ReplayFailed(end.code, end.why, offset=end.offset, segment=end.segment)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._turn.acquire(blocking=False):
            raise BadArgument("replay", "another thread reads this one: start one for each thread")
        try:
            yield
        finally:
            self._turn.release()


class ReplayBatches:
    """The whole batches of a replay; made by `Replay.batches`."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def __iter__(self) -> Iterator[ReplayedBatch]:
        return iter(self._replay.next_batch, None)

    async def __aiter__(self) -> AsyncIterator[ReplayedBatch]:
        while (batch := await self._replay.next_batch_async()) is not None:
            yield batch
