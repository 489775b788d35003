"""Secondary indexes (derived stores): data computed from a log's records, in step with it through crashes and cuts.

    log     0 ─────────────────── flushed ──── end        given in order, whole batches, never above the flushed offset
    store   0 ──────── end_offset ┄┄┄▶                    the store itself says where to go on after a restart

At open, before anything else looks at the log (the log ends at `end`, begins at `start`):

    the store                                                     what is done
    holds nothing                                                 kept; given the batches from the log's start on
    holds something, the log has no record, and ends elsewhere    destroyed
    ends above `end`                                              cut to `end`, judged again
    its last record's leader epoch is not the log's there         cut to where that epoch of the log began, judged again
                                                                  - or destroyed, if the log begins no earlier
    else                                                          kept; given the batches from its own end on

Cutting a log cuts the stores first: after a crash in between a store may lack records, but never has too many. Model:
RocketMQ's consume queue and index, which are dispatched from the commit log and truncated with it.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, TypeAlias

from pushrep.log.errors import DerivedStoreFailed
from pushrep.log.reader import BatchReader, Bounds
from pushrep.records import RecordBatch
from pushrep.records.leader_epochs import LeaderEpochs


class DerivedStore(Protocol):
    """Data computed from a log. Calls to one store never overlap; its OSError is raised by the log's caller."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    @property
    def end_offset(self) -> int:
        """It holds everything below; 0 if it holds nothing. May rise without `dispatch`, if the store learns records
        elsewhere.
        """
        ...

    @property
    def last(self) -> tuple[int, int] | None:
        """(offset, leader epoch) of its last record; None if it holds nothing."""
        ...

    def cut_to(self, offset: int) -> None:
        """Forget all from `offset` on, durably, and more if need be: `end_offset` is at most `offset` then."""
        ...

    def destroy(self) -> None:
        """Forget everything, durably; `end_offset` is 0 then."""
        ...

    def dispatch(self, batch: RecordBatch) -> None:
        """Add the next batch; records that it holds already change nothing."""
        ...

    def sync(self) -> None:
        """Bring it to disk, because the log may be about to remove the records."""
        ...


class Verdict(Enum):
    """The decisions without a number."""

    KEPT = auto()
    DESTROYED = auto()


@dataclass(frozen=True, slots=True)
class CutTo:
    """Forget everything from `offset` on."""

    offset: int


Judgement: TypeAlias = Verdict | CutTo


def judge(end_offset: int, last: tuple[int, int] | None, log: Bounds, epochs: LeaderEpochs) -> Judgement:
    """What to do with a store in this state beside a log with these bounds; see the file's map."""
    if end_offset == 0:
        return Verdict.KEPT
    if log.start == log.end != end_offset:
        return Verdict.DESTROYED
    if end_offset > log.end:
        return CutTo(log.end) if log.end else Verdict.DESTROYED
    if last is None or not last[0] < end_offset:
        return Verdict.DESTROYED  # the store contradicts itself
    offset, epoch = last
    if offset < log.start or epochs.epoch_of(offset) in {epoch, -1}:
        return Verdict.KEPT  # the log has no epoch for removed records
    began = max((start for _, start in epochs.entries if start <= offset), default=0)
    return CutTo(began) if began > log.start else Verdict.DESTROYED


class DerivedStores:
    """The stores of one log. Thread-safe. `lock` is held while the log is cut, so that no store gets a batch then."""

    def __init__(self, stores: Sequence[DerivedStore]) -> None:
        self._stores = tuple(stores)
        self.lock = threading.RLock()

    def __bool__(self) -> bool:
        return bool(self._stores)

    def lowest_end(self) -> tuple[int, str] | None:
        """(end, name) of the store with the lowest end; None without stores."""
        return min(((store.end_offset, f"the derived store {store.name}") for store in self._stores), default=None)

    def highest_end(self) -> int:
        """The highest end of a store, 0 without stores: the log was flushed at least so far."""
        return max((store.end_offset for store in self._stores), default=0)

    def settle(self, log: Bounds, epochs: LeaderEpochs) -> None:
        """Cut or destroy stores that do not agree with the log. Raises DerivedStoreFailed, OSError."""
        for store in self._stores:
            while (judgement := judge(store.end_offset, store.last, log, epochs)) is not Verdict.KEPT:
                if isinstance(judgement, CutTo):
                    _cut(store, judgement.offset)
                else:
                    _destroy(store)

    def cut_to(self, offset: int) -> None:
        """The log is about to be cut there. Raises DerivedStoreFailed, OSError."""
        with self.lock:
            for store in self._stores:
                if store.end_offset > offset:
                    _cut(store, offset) if offset else _destroy(store)

    def dispatch(self, reader: BatchReader, log: Bounds) -> None:
        """Dispatch to each store the whole batches in `log` that it lacks. Raises CorruptBatch, OSError, the store's
        errors.
        """
        with self.lock:
            for store in self._stores:
                start = max(store.end_offset, log.start)
                if start >= log.end:
                    continue
                for batch in reader.batches(start, log.end):
                    if batch.header.next_offset > log.end:
                        break
                    if batch.header.next_offset > store.end_offset:
                        store.dispatch(batch)

    def sync(self) -> None:
        """Sync all stores."""
        with self.lock:
            for store in self._stores:
                store.sync()


def _cut(store: DerivedStore, offset: int) -> None:
    store.cut_to(offset)
    if store.end_offset > offset:
        raise DerivedStoreFailed(store.name, f"still ends at {store.end_offset} after it was cut to {offset}")


def _destroy(store: DerivedStore) -> None:
    store.destroy()
    if store.end_offset:
        raise DerivedStoreFailed(store.name, f"still ends at {store.end_offset} after it was destroyed")
