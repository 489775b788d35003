"""A file that is read from front to back: the system is told what comes next, so that disk and processor both work.

    | being checked | next window | ... being fetched by the system (WILLNEED) ... |
                                   `- 16 MiB ahead of the last read

Without it each window is waited for and then checked, one after the other. Measured: benchmarks/verify.py.
"""

import os
from contextlib import suppress

from pushrep.seams import File
from pushrep.seams.filesystem import Buffer

AHEAD_BYTES = 16 << 20
"""Some milliseconds of a fast disk: more than a window takes to check, and little enough for a busy page cache."""


class ReadAheadFile:
    """A File that fetches what follows its reads. Closing it closes the file."""

    __slots__ = ("_fd", "_fetched", "_file")

    def __init__(self, file: File) -> None:
        self._file, self._fetched = file, 0
        self._fd: int | None = None
        with suppress(OSError):  # a file in memory has no number, and needs none
            self._fd = file.fileno()

    def read_at(self, size: int, position: int) -> bytes:
        wanted = position + size + AHEAD_BYTES
        # In steps of half the distance: a call a window would be one too many.
        if self._fd is not None and wanted - self._fetched > AHEAD_BYTES // 2:
            start = max(self._fetched, position)
            with suppress(OSError):  # advice only
                os.posix_fadvise(self._fd, start, wanted - start, os.POSIX_FADV_WILLNEED)
            self._fetched = wanted
        return self._file.read_at(size, position)

    def write_at(self, data: Buffer, position: int) -> None:
        self._file.write_at(data, position)

    def size(self) -> int:
        return self._file.size()

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def allocate(self, size: int) -> None:
        self._file.allocate(size)

    def sync(self) -> None:
        self._file.sync()

    def drop_cache(self) -> None:
        self._file.drop_cache()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
