"""A few blocks held back, so that what frees space on a full disk can be done on a full disk.

    <directory of logs>/.pushrep_reserve     64 KiB and 128 bytes a log, allocated, never read

    truncate, purge, retention, opening, closing ─ write a checkpoint beside the old one ─▶ no room?
        ─▶ give the reserve up ─▶ write again, rename: the old file's blocks are free ─▶ take the reserve back

Without it an operator could not even cut a log off: the checkpoints have to be lowered before anything goes. Appends
never use it. Where it could not be made, or somebody else took the blocks meanwhile, the refusal says what to do.
"""

import errno
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pushrep.log.errors import NoRoomToCut
from pushrep.seams import Filesystem
from pushrep.seams.filesystem import NO_PLAIN_FILE

RESERVE_NAME = ".pushrep_reserve"
RESERVE_BYTES_MIN = 64 << 10  # sixteen blocks: each small file wants one, and the directory may want one for a name
_BYTES_A_LOG = 128  # a line of each file that lists all logs, twice: the old one and the new one

_PARTS = 16

_Answer = TypeVar("_Answer")


class Reserve:
    """The held back blocks of one directory of logs, for who holds its lock. Thread-safe."""

    def __init__(self, directory: Path, filesystem: Filesystem, logs: int) -> None:
        self._path, self._filesystem = directory / RESERVE_NAME, filesystem
        self._size_bytes = RESERVE_BYTES_MIN + _BYTES_A_LOG * logs
        self._lock = threading.Lock()  # not held while something is written: who writes holds locks of its own
        self._users = 0
        self._fill()

    def with_room(self, write: Callable[[], _Answer]) -> _Answer:
        """What `write` answers. If the disk has no room for it, it is called again with the reserve's room.

        So it has to be a thing that can be done twice. Raises what it raises, ENOSPC and EDQUOT (as OSError, or as
        NoRoomToCut) the second time only.
        """
        try:
            return write()
        except (OSError, NoRoomToCut) as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT} or not self._begin():
                raise
        try:
            return write()
        finally:
            self._end()

    def _begin(self) -> bool:
        """False if there is nothing to give up."""
        with self._lock:
            if not self._users and not self._empty():
                return False
            self._users += 1
            return True

    def _end(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._fill()

    def _empty(self) -> bool:
        with suppress(OSError):
            file = self._filesystem.open(self._path)
            try:
                if file.size():
                    file.truncate(0)
                    return True
            finally:
                file.close()
        return False

    def _fill(self) -> None:
        """As much of it as there is room for; the next opening or use tries again. Raises what no plain file does."""
        try:
            file = self._filesystem.open(self._path, create=True)
        except OSError as error:
            if error.errno in NO_PLAIN_FILE:
                raise
            return
        try:
            # In steps: somebody may have taken a block meanwhile, and fifteen are worth having.
            for part in range(_PARTS, 0, -1):
                with suppress(OSError):
                    file.allocate(self._size_bytes * part // _PARTS)
                    return
        finally:
            file.close()
