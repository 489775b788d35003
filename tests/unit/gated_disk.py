"""A disk whose syncs wait for the test, and waiting for another thread."""

import errno
import os
import threading
from contextlib import contextmanager

import pytest

from pushrep.env import RealFilesystem


class GatedDisk(RealFilesystem):
    """Syncs wait while the gate is shut."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()

    @contextmanager
    def hanging(self):
        """A context in which the gate is shut."""
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()

    def open(self, path, *, create=False, writable=True):
        file = super().open(path, create=create, writable=writable)
        sync = file.sync
        return GatedFile(file, lambda: (self.gate.wait(), sync()))


class GatedFile:
    def __init__(self, file, sync):
        self._file, self.sync = file, sync

    def __getattr__(self, name):
        return getattr(self._file, name)


class MeetingDisk(RealFilesystem):
    """While `party` is set, the sync of a log returns when so many syncs are in progress; a single one fails after
    `WAIT_S`.
    """

    WAIT_S = 20
    party = None
    meets = ".log"

    def meet(self, count):
        self.party = threading.Barrier(count, timeout=self.WAIT_S)

    def open(self, path, *, create=False, writable=True):
        file = super().open(path, create=create, writable=writable)
        if path.suffix != self.meets or not writable:
            return file
        sync = file.sync
        return GatedFile(file, lambda: (self.party and self.party.wait(), sync()))


class LosingDisk(RealFilesystem):
    """While `fails` is set, the sync of a log fails, and what it should have written is gone if it `loses`."""

    fails, loses = False, True
    """`fails` may be a function, which is asked at each sync."""

    def __init__(self):
        self.synced_bytes = {}

    def open(self, path, *, create=False, writable=True):
        file = super().open(path, create=create, writable=writable)
        if path.suffix != ".log" or not writable:
            return file
        self.synced_bytes.setdefault(path, file.size())
        sync = file.sync

        def sync_or_lose():
            if self.fails() if callable(self.fails) else self.fails:
                if self.loses:
                    file.truncate(self.synced_bytes[path])
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            sync()
            self.synced_bytes[path] = file.size()

        return GatedFile(file, sync_or_lose)


def until(condition, what):
    """Wait for another thread; the test fails by name if it takes 60 s."""
    pause = threading.Event()
    for _ in range(12_000):
        if condition():
            return
        pause.wait(0.005)
    pytest.fail(f"not within 60 s: {what}")
