"""Leases: a reader of the past says from where on it needs the log, and retention keeps that for it, for a while.

    acquire ──▶ held ── renew (the offset rises) ──▶ held ── release ──▶ gone
                  │
                  └── not renewed for lease_max_s, or the disk is too full ──▶ broken: the reader is told why

A lease that is broken holds nothing; its reader may go on, and gets OffsetOutOfRange where the log has gone.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from pushrep.env import Clock
from pushrep.errors import ForkedProcess
from pushrep.log.errors import LeaseBroken

_LOG = logging.getLogger("pushrep.log")

Told = Callable[[str], None]
"""Called with the reason when a lease is broken; in any thread, and it must not wait for the log."""


class Lease:
    """Nothing from `offset` on is removed while it is held. Made by `SegmentLog.acquire_lease`; a context manager."""

    def __init__(self, leases: "Leases", name: str, offset: int, told: Told | None) -> None:
        self.name = name
        self._leases, self._told = leases, told
        self._offset = offset
        self._broken: str | None = None
        self.renewed_ms = 0

    @property
    def offset(self) -> int:
        """First offset that it holds."""
        return self._offset

    @property
    def broken(self) -> str | None:
        """Why it holds nothing any more; None while it holds."""
        return self._broken

    def renew(self, offset: int | None = None) -> None:
        """Go on holding, from `offset` on (None: from where it held before; never lower).

        Raises LeaseBroken; in a fork of the process that took it, as `release` does, ForkedProcess.
        """
        self._leases.renew(self, offset)

    def release(self) -> None:
        """Hold nothing any more; again is fine, and so is a broken lease."""
        self._leases.release(self)

    def moved_to(self, offset: int, now_ms: int) -> None:
        """For Leases."""
        self._offset, self.renewed_ms = max(self._offset, offset), now_ms

    def break_for(self, reason: str) -> None:
        """For Leases; tells the holder, whose errors end here."""
        self._broken = reason
        _LOG.warning("the lease of %s from offset %d on is broken: %s", self.name, self._offset, reason)
        if self._told is not None:
            try:
                self._told(reason)
            except Exception:  # noqa: BLE001 - whatever it is, it is the holder's own
                _LOG.exception("%s could not be told that its lease is broken", self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = f"broken: {self._broken}" if self._broken else f"from {self._offset} on"
        return f"<Lease {self.name} {state}>"


class Leases:
    """The leases of one log. Thread-safe."""

    def __init__(self, clock: Clock, max_s: int) -> None:
        self._clock, self._max_s = clock, max_s
        self._lock = threading.Lock()
        self._held: set[Lease] = set()
        self._owner_pid = os.getpid()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Lease]:
        with self._lock:
            return iter(tuple(self._held))

    def acquire(self, name: str, offset: int, told: Told | None = None) -> Lease:
        """A lease from `offset` on, which the caller found to be in the log."""
        lease = Lease(self, name, offset, told)
        with self._lock:
            lease.moved_to(offset, self._clock.monotonic_ms())
            self._held.add(lease)
        return lease

    def renew(self, lease: Lease, offset: int | None) -> None:
        """See Lease.renew."""
        self._check_fork(lease)
        with self._lock:
            if lease not in self._held:
                raise LeaseBroken(lease.name, lease.broken or "it was released")
            lease.moved_to(lease.offset if offset is None else offset, self._clock.monotonic_ms())

    def release(self, lease: Lease) -> None:
        """See Lease.release."""
        self._check_fork(lease)
        with self._lock:
            self._held.discard(lease)

    def expire(self) -> None:
        """Break those that were not renewed in time."""
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            late = [lease for lease in self._held if now_ms - lease.renewed_ms > self._max_s * 1000]
            self._held.difference_update(late)
        for lease in late:
            lease.break_for(f"it was not renewed for {self._max_s} s")

    def break_all(self, reason: str) -> None:
        """Break every lease and tell its holder the reason."""
        with self._lock:
            held, self._held = self._held, set()
        for lease in held:
            lease.break_for(reason)

    def _check_fork(self, lease: Lease) -> None:
        """A fork's copy holds nothing, and its lock may be held for ever by a thread that stayed behind."""
        if os.getpid() != self._owner_pid:
            raise ForkedProcess(f"the lease of {lease.name}", owner_pid=self._owner_pid, pid=os.getpid())
