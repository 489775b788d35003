"""When a log is flushed, and by which thread, so that buffered appends reach the disk soon though no caller waits.

    append ─ first unflushed byte ──▶ due in flush_ms   ┐
           ─ flush_bytes unflushed ─▶ due at once       ├─▶ one thread: log.flush_in_background(), log by log
                                                        ┘
One thread per process while any log is attached; it sleeps without a timeout while nothing is due. It reports no
errors: if a sync fails, the log's writer poisons the log (`_sync` of writer.py), and the next append raises
LogPoisoned. After an error of one log the thread goes on with the others. It runs on the machine's clock.

`FlushScheduler` decides when a log's appends have to be on disk, and which thread flushes them:

    bytes not on disk    0 ............ flush_bytes ............ 2 * flush_bytes
      machine's clock    the flusher    the flusher, at once     an append waits for a sync: the disk is slower
                         in flush_ms
      simulated clock    the append,    the append
                         after flush_ms

A simulated clock gets no thread, so that a run can be repeated.

Group commit: one thread at a time, the leader, syncs a log for all threads that wait for it.

    A  acquire ─ fdatasync ─ release ─┐
    B  acquire: waits ────────────────┤ A's sync has brought B's records to disk, too: B returns without leading
    C  acquire: waits ────────────────┘ C's came behind it: C leads, for all that came meanwhile

While the log is open, only the leader closes descriptors that a sync may use. A thread that is interrupted (Ctrl-C)
must not stay the leader. So it acquires inside of the `try` that releases, and releases by an assignment: Python
handles signals where a function begins, so a call might end before it did anything.

    try:
        if leader.acquire(settled, wanted):
            ...
    finally:
        if leader.owner == get_ident():
            leader.owner = None
            leader.notify()

Each waiting thread sleeps on a lock of its own. The thread that releases wakes the threads whose records are on disk,
each once, and one of the others to lead: no thread wakes only to sleep again. The woken threads wake one another in a
few rows; all at once they would queue for the interpreter's lock. A `with` of a Condition can be interrupted with its
lock held; that of a plain lock can't.

The leader also writes the batches that other threads queued (`CommitRequest`):

    A  queues, leads ─ writes A ─ syncs ─┐
    B  queues, sleeps ───────────────────┤ C  leads ─ writes B, C, D ─ syncs ─┐ all return
    C  queues, sleeps ───────────────────┤                                    │
    D  queues, sleeps ───────────────────┘────────────────────────────────────┘

If each caller wrote its own batches, it would compete with all others for the log's and the interpreter's lock.

Only threads that Ctrl-C can't interrupt write for others: Python interrupts the main thread alone. An exception that is
injected into another one (a watchdog's, by PyThreadState_SetAsyncExc) comes out of that one's append; the others'
requests count as written as far as the log holds them, and the next leader writes the rest.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from heapq import heappop, heappush
from itertools import count
from threading import get_ident, main_thread
from typing import Any, Protocol, TypeVar

from pushrep.env import SYSTEM_CLOCK, Clock
from pushrep.errors import PushrepError
from pushrep.log.config import AppendResult, LogConfig
from pushrep.records import RecordBatch

_LOG = logging.getLogger("pushrep.log")


class Flushable(Protocol):
    """An object that a Flusher calls: a log, a directory of logs for its checkpoints, a scrub, a Tick."""

    def flush_in_background(self) -> None:
        """Do what is due: a log is synced and its recovery point raised. It handles errors; one that it raises is
        logged.
        """
        ...


class Flusher:
    """Calls attached logs back when they are due. Thread-safe; a log is never called back after `detach`."""

    def __init__(self, name: str = "pushrep-flusher") -> None:
        self._name = name
        self._lock = threading.Lock()  # `with condition` could stay locked after Ctrl-C
        self._changed = threading.Condition(self._lock)
        self._due_s: dict[Flushable, float] = {}
        # A heap of the same times; entries that differ from `_due_s` are stale. Ten thousand logs may wait at once.
        self._queue: list[tuple[float, int, Flushable]] = []
        self._counter = count()
        self._attached: set[Flushable] = set()
        self._running: Flushable | None = None
        self._thread: threading.Thread | None = None

    def attach(self, log: Flushable) -> None:
        """Allow `soon` for this log; each `attach` needs a `detach`."""
        with self._lock:
            self._attached.add(log)

    def soon(self, log: Flushable, delay_ms: int) -> bool:
        """Flush `log` within `delay_ms`; a time that is earlier stays. Does nothing if it is detached.

        False if no thread can be started now, or the interpreter is ending: call it again later.
        """
        due_s = time.monotonic() + delay_ms / 1000
        with self._lock:
            if log not in self._attached:
                return True
            if self._due_s.get(log, due_s + 1) > due_s:
                # In this order, because Ctrl-C may come between two lines: an extra wake-up does no harm, and an entry
                # of the queue has no effect without one in `_due_s`.
                if not self._queue or due_s < self._queue[0][0]:  # else the thread wakes earlier than that anyway
                    self._changed.notify_all()
                heappush(self._queue, (due_s, next(self._counter), log))
                self._due_s[log] = due_s
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return False
                self._thread = thread
            return True

    def detach(self, log: Flushable) -> None:
        """Forget `log`, and wait for a flush of it that is running. The last `detach` ends the thread."""
        with self._lock:
            self._attached.discard(log)
            self._due_s.pop(log, None)
            self._changed.notify_all()
            if threading.current_thread() is self._thread:  # from a callback
                return
            self._changed.wait_for(lambda: self._running is not log)
            thread = self._thread if not self._attached else None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._running = log = self._next()
                if log is None:
                    self._thread = None
                    return
            try:
                log.flush_in_background()
            except Exception:  # noqa: BLE001 - no memory, perhaps: without this thread nobody would flush any log
                _LOG.exception("%r could not be flushed in the background", log)
            finally:
                with self._lock:
                    self._running = None
                    self._changed.notify_all()

    def _next(self) -> Flushable | None:
        """Wait for the next log that is due and take it; None when no log is attached any more."""
        while self._attached:
            if not self._due_s:
                self._queue.clear()
            if not self._queue:
                self._changed.wait()
                continue
            due_s, _, log = self._queue[0]
            if self._due_s.get(log) != due_s:
                heappop(self._queue)
                continue
            wait_s = due_s - time.monotonic()
            if wait_s <= 0:
                heappop(self._queue)
                del self._due_s[log]
                return log
            self._changed.wait(wait_s)
        return None


class _ProcessFlushers:
    def __init__(self) -> None:
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        # The threads stayed in the parent, and their locks may have been held.
        self.flusher, self.scrubber, self.ticker = Flusher(), Flusher("pushrep-scrub"), Flusher("pushrep-ticks")


_CURRENT = _ProcessFlushers()
os.register_at_fork(after_in_child=_CURRENT.after_fork_in_child)


def process_flusher() -> Flusher:
    """The one flusher of this process."""
    return _CURRENT.flusher


def process_scrubber() -> Flusher:
    """A second flusher, for slow reads in the background, so that no flush waits for them."""
    return _CURRENT.scrubber


class Tick:
    """Calls `call()`, which must not wait, every `every_ms` until `end`; one thread serves all ticks of a process."""

    def __init__(self, every_ms: int, call: Callable[[], object]) -> None:
        self._every_ms, self._call = every_ms, call
        self._ticker = _CURRENT.ticker
        self._ticker.attach(self)
        self._ticker.soon(self, every_ms)

    def flush_in_background(self) -> None:
        """The thread's call."""
        try:
            self._call()
        finally:
            self._ticker.soon(self, self._every_ms)

    def end(self) -> None:
        """Stop: when this returns, no call runs and none follows. A second `end` does nothing."""
        self._ticker.detach(self)


class FlushDue(Enum):
    """What the appending thread itself has to do."""

    NOTHING = auto()
    FLUSH = auto()
    FLUSH_AND_CHECKPOINT = auto()


ACKNOWLEDGED_MS = 750
"""How soon after an acknowledged flush the checkpoints are due, if flush_ms is longer: with SHARE_MS the recovery point
rises over them within a second, or later where writing the checkpoints takes longer than 25 ms.
"""
SHARE_MS = 250
"""How much later they are written if another log of the directory has just written them: one write serves many logs."""


class FlushScheduler:
    """Decides when `log` is flushed: at the latest after flush_bytes or flush_ms. Thread-safe.

    The flusher calls `log` back until `end`.
    """

    def __init__(self, log: Flushable, config: LogConfig, clock: Clock) -> None:
        self._log, self._config, self._clock = log, config, clock
        self._flusher = process_flusher() if clock is SYSTEM_CLOCK else None
        self._since_ms: int | None = None  # of the first byte that is not on disk, by a simulated clock
        self._within_ms = config.flush_ms  # how long after that; less once something was acknowledged
        if self._flusher is not None:
            self._flusher.attach(log)

    def on_change(self, unflushed_bytes: int = 0) -> FlushDue:
        """The log changed; `unflushed_bytes` of it are not on disk yet."""
        much = unflushed_bytes >= self._config.flush_bytes
        if self._flusher is None:
            return FlushDue.FLUSH_AND_CHECKPOINT if self._is_old() or much else FlushDue.NOTHING
        if self._since_ms is None:
            self.schedule()
        if not much:
            return FlushDue.NOTHING
        self._flusher.soon(self._log, 0)
        return FlushDue.FLUSH if unflushed_bytes >= 2 * self._config.flush_bytes else FlushDue.NOTHING

    def on_acknowledged(self) -> FlushDue:
        """A caller was told that its records are on disk: the recovery point has to rise over them soon."""
        if self._within_ms > ACKNOWLEDGED_MS:
            self._within_ms = ACKNOWLEDGED_MS
            if self._flusher is not None:
                self._flusher.soon(self._log, ACKNOWLEDGED_MS)
        return self.on_change()

    def schedule(self) -> None:
        """Schedule the flusher in flush_ms, unless it is scheduled."""
        if self._flusher is not None and self._since_ms is None:
            self._since_ms = 0 if self._flusher.soon(self._log, self._within_ms) else None

    def on_flush(self) -> None:
        """A flush of everything up to now begins."""
        self._since_ms, self._within_ms = None, self._config.flush_ms

    def end(self) -> None:
        """When this returns, the flusher does not run for this log, and will not again."""
        if self._flusher is not None:
            self._flusher.detach(self._log)

    def _is_old(self) -> bool:
        now_ms = self._clock.monotonic_ms()
        if self._since_ms is None:
            self._since_ms = now_ms
        if now_ms - self._since_ms < self._within_ms:
            return False
        self.on_flush()
        return True


_LOOK_AGAIN_S = 1.0  # in case the leader, or the thread that should wake the next one, was interrupted
_ROWS = 4  # in one row, all would wait for a thread that gets no processor

_Wanted = TypeVar("_Wanted")


class _Waiter:
    """A thread that sleeps until another releases its lock, and then wakes the next one of its row."""

    __slots__ = ("_settled", "_wanted", "lock", "next")

    def __init__(self, settled: Callable[[Any], bool], wanted: object) -> None:
        self._settled, self._wanted = settled, wanted
        self.next: _Waiter | None = None
        self.lock = threading.Lock()
        self.lock.acquire()

    def may_go(self) -> bool:
        try:
            return self._settled(self._wanted)
        except PushrepError:  # the waiting thread calls `settled` itself, and raises the error
            return True


class GroupCommitLeader:
    """Which thread leads the group commit of one log. Thread-safe; not reentrant.

    owner: the leader's thread, None if there is none; set to None to release, see above.
    """

    def __init__(self) -> None:
        self.owner: int | None = None
        self._lock = threading.Lock()
        self._waiting: dict[_Waiter, None] = {}

    def acquire(self, settled: Callable[[_Wanted], bool], wanted: _Wanted) -> bool:
        """Wait until nobody leads, then lead. False, without leading, once `settled(wanted)` is true.

        Raises its errors. `settled` is called again whenever a leader has released.
        """
        while True:
            with self._lock:
                if settled(wanted):
                    return False
                if self.owner is None:
                    self.owner = get_ident()
                    return True
                waiter = _Waiter(settled, wanted)
                self._waiting[waiter] = None
            woken = False
            try:
                woken = waiter.lock.acquire(timeout=_LOOK_AGAIN_S)
            finally:
                if not woken:
                    with self._lock:  # another thread may have put it into a row meanwhile
                        self._waiting.pop(waiter, None)
                if waiter.next is not None:
                    waiter.next.lock.release()

    def try_acquire(self) -> bool:
        """Lead if nobody does."""
        with self._lock:
            if self.owner is None:
                self.owner = get_ident()
                return True
        return False

    def notify(self) -> None:
        """Wake the threads that need not wait any more, and one to lead. Called after a release, and when the log is
        closed.
        """
        with self._lock:
            row = [waiter for waiter in self._waiting if waiter.may_go()]
            for waiter in row:
                del self._waiting[waiter]
            if self.owner is None and self._waiting:  # else the leader notifies when it releases
                longest = next(iter(self._waiting))
                del self._waiting[longest]
                row.insert(0, longest)
            for waiter, following in zip(row, row[_ROWS:], strict=False):
                waiter.next = following
        for waiter in row[:_ROWS]:
            waiter.lock.release()

    def do_unless_held(self, do: Callable[[], None]) -> bool:
        """Call `do` while no thread leads or can begin to. False, without a call, if one leads."""
        with self._lock:
            if self.owner is not None:
                return False
            do()
            return True

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which this thread leads."""
        try:
            self.acquire(lambda _wanted: False, 0)
            yield
        finally:
            if self.owner == get_ident():
                self.owner = None
                self.notify()


class CommitRequest:
    """One caller's batches, then the result of their append, or its error."""

    __slots__ = ("batches", "error", "result")

    def __init__(self, batches: Sequence[RecordBatch]) -> None:
        self.batches = batches
        self.result: AppendResult | None = None
        self.error: BaseException | None = None

    @property
    def is_open(self) -> bool:
        """Neither written nor refused."""
        return self.result is None and self.error is None

    def written(self) -> None:
        """The batches were written, at their stamped offsets."""
        self.result = AppendResult(self.batches[0].header.base_offset, self.batches[-1].header.next_offset - 1)

    def take_over(self, begun: int, end: int) -> None:
        """The writing thread was interrupted, perhaps behind the write: the log has grown from `begun` to `end`."""
        if self.is_open and begun <= self.batches[0].header.base_offset and self.batches[-1].header.next_offset <= end:
            self.written()

    def answer(self) -> AppendResult:
        """The offsets of the append; raises its error if it failed."""
        if self.error is not None:
            raise self.error
        if self.result is None:
            raise AssertionError("asked before anybody wrote")
        return self.result


def may_be_interrupted() -> bool:
    """Whether this thread is the one that gets Ctrl-C."""
    return get_ident() == main_thread().ident


def is_injected(error: BaseException) -> bool:
    """Whether somebody raised it in this thread (a watchdog's TimeoutError, say): the system's own have a number."""
    return isinstance(error, OSError) and error.errno is None


def write_each(requests: Sequence[CommitRequest], write: Callable[[Sequence[RecordBatch]], None]) -> None:
    """Write the requests at once or, if that fails, one by one, so that each has its own result.

    `write` writes all or nothing. Its errors are the requests' results; others, and injected ones, are raised.
    """
    try:
        write([batch for one in requests for batch in one.batches])
    except (OSError, PushrepError, MemoryError) as error:
        if is_injected(error):
            raise
        for one in requests:
            if len(requests) > 1:
                write_each([one], write)
            else:
                one.error = error
    else:
        for one in requests:
            one.written()
