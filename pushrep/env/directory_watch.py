"""Hearing of writes to a directory's files, whichever process makes them: inotify(7), where the system has it.

A write through a mapping makes no sound, and neither does a sync: what is told is that somebody wrote, not what.
"""

import ctypes
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol

_IN_MODIFY = 0x0000_0002
_EVENTS_BYTES = 4096
_WATCHES_MAX = 32
"""In one process: a user has 128 of them, for all programs."""

_LIBC = ctypes.CDLL(None, use_errno=True)


class Watch(Protocol):
    """What hears. `fileno`: of a descriptor that can be read once something was written since `heard`."""

    def fileno(self) -> int: ...
    def heard(self) -> bool:
        """Whether something was, since the last call. Never waits."""
        ...

    def close(self) -> None: ...


class Inotify:
    """A watch of one directory."""

    _open = 0

    def __init__(self, descriptor: int) -> None:
        """Use `watch_directory`."""
        self._descriptor = descriptor
        self._lock = threading.Lock()  # a number that was closed may be another file's
        Inotify._open += 1

    @classmethod
    def has_room(cls) -> bool:
        """Whether this process may have another one."""
        return cls._open < _WATCHES_MAX

    def fileno(self) -> int:
        return self._descriptor

    def heard(self) -> bool:
        is_news = False
        with self._lock, suppress(OSError):  # there is nothing, or it was closed
            while os.read(self._descriptor, _EVENTS_BYTES):
                is_news = True
        return is_news

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
                Inotify._open -= 1

    def __del__(self) -> None:
        self.close()  # of a replay that is over, which need not be closed


def watch_directory(path: Path) -> Inotify | None:
    """None where the system can't, or has no more of them: who wants to know has to look now and then."""
    if not Inotify.has_room() or not hasattr(_LIBC, "inotify_init1"):
        return None
    descriptor = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        return None
    if _LIBC.inotify_add_watch(descriptor, os.fsencode(path), ctypes.c_uint32(_IN_MODIFY)) < 0:
        os.close(descriptor)
        return None
    return Inotify(descriptor)
