"""A file of ascending fixed-size entries, two numbers each: what both indexes of a segment are made of.

    | entry 0 | entry 1 | ... | entry n-1 |        big-endian, second number 4 bytes; no header, nothing allocated ahead
                              `- entries still in memory, up to PENDING_MAX

New entries are kept in memory and written together: a reader whose index ends early walks a little further. The file
is opened for each use and closed again, so that ten thousand idle logs hold no descriptor for it. Entries that are
dropped and then come again as they were, as a scan makes them, cost no write: opening a log that was closed clean
changes nothing.
Invariant: first numbers ascend strictly. Source: Kafka's AbstractIndex, OffsetIndex, TimeIndex.
"""

import errno
import struct
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pushrep.seams import File, Filesystem

PENDING_MAX = 64
"""512 bytes of offset index. With small batches an entry covers 4 KiB: a reader walks 256 KiB too far at most."""

_BLOCK = 64
"""Among so few entries, a search reads all in one call of the system instead of six."""
_KEPT_MAX = 64
"""Dropped entries are remembered up to so many: as many as a clean end has, not as a long scan."""


class IndexFile:
    """Entries of one index file. The writer of the log appends and cuts; readers only look.

    Raises OSError as the file does; a missing file is an empty index.
    """

    __slots__ = (
        "_dropped",
        "_entry",
        "_filesystem",
        "_last",
        "_path",
        "_pending",
        "_ragged",
        "_retaken",
        "_synced",
        "_written",
    )

    def __init__(self, filesystem: Filesystem, path: Path, entry: struct.Struct) -> None:
        self._filesystem, self._path, self._entry = filesystem, path, entry
        self._pending: list[tuple[int, int]] = []
        self._dropped: list[tuple[int, int]] = []  # still in the file, behind the written ones
        self._retaken = False
        self._ragged = False  # bytes behind the last whole entry
        self._written = 0  # whole entries in the file
        self._last: tuple[int, int] | None = None
        self._synced = True
        try:
            self._look()
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            self._ragged = True  # a few bytes can claim to be terabytes: it holds nothing, and the next write cuts it

    def _look(self) -> None:
        entry = self._entry
        with self._opened() as file:
            if file is not None:
                size = file.size()
                self._written, self._ragged = size // entry.size, size % entry.size != 0
                self._last = self._read(file, self._written - 1) if self._written else None

    def __len__(self) -> int:
        return self._written + len(self._pending)

    @property
    def last(self) -> tuple[int, int] | None:
        """The newest entry."""
        return self._last

    def append(self, first: int, second: int) -> None:
        """Add an entry; it reaches the file with the next `write`."""
        self._last = (first, second)
        if self._dropped:
            if self._dropped[0] == self._last:
                del self._dropped[0]
                self._written += 1
                self._retaken = True
                return
            self._cut_file()
        self._pending.append(self._last)

    @property
    def is_due(self) -> bool:
        """Whether enough entries wait for a `write` to be worth its while."""
        return len(self._pending) >= PENDING_MAX

    def write(self) -> None:
        """Bring what waits into the file; it may be called again after a failure."""
        if self._dropped or self._ragged:
            self._cut_file()
        if self._pending or not self._filesystem.exists(self._path):
            data = b"".join([self._entry.pack(*entry) for entry in self._pending])
            with self._opened(create=True) as file:
                if file is not None:
                    file.write_at(data, self._written * self._entry.size)
            self._written += len(self._pending)
            self._pending.clear()
            self._synced = False

    def sync(self, *, retaken: bool = False) -> None:
        """Bring every entry to the disk; costs nothing if there are no new ones.

        `retaken`: entries that were dropped and came again may have been written by a process that did not sync them.
        """
        self.write()
        if retaken and self._retaken:
            self._synced = self._retaken = False
        self.sync_written()

    def sync_written(self) -> None:
        """Bring the entries in the file to the disk; may run beside `append` and `write` in another thread."""
        if self._synced:
            return
        self._synced = True  # first, so that a write from now on is seen by the next call
        try:
            with self._opened(writable=True) as file:
                if file is not None:
                    file.sync()
        except OSError:
            self._synced = False
            raise

    def keep(self, count: int) -> None:
        """Forget all but the first `count` entries, and bytes at the end that are no entry."""
        del self._pending[max(0, count - self._written) :]
        if count < self._written:
            many = self._written - count > _KEPT_MAX
            with self._opened() as file:
                if file is not None and not many:
                    self._dropped[:0] = [self._read(file, number) for number in range(count, self._written)]
            self._written = count
            if many:
                self._cut_file()
        self._last = self._pending[-1] if self._pending else None
        if self._written and not self._pending:
            with self._opened() as file:
                self._last = self._read(file, self._written - 1) if file is not None else None

    def floor(self, key: int, column: int = 0) -> tuple[int, int] | None:
        """The last entry of the file whose number in `column` is at most `key`; None if there is none."""
        if not self._written:
            return None
        with self._opened() as file:
            count = self._search(file, key, column) if file is not None else 0
            return self._read(file, count - 1) if file is not None and count else None

    def floor_now(self, key: int) -> tuple[int, int] | None:
        """As `floor`, of the entries that are still in memory, too."""
        at = bisect_right(self._pending, key, key=lambda entry: entry[0])
        return self._pending[at - 1] if at else self.floor(key)

    def count_up_to(self, key: int, column: int = 0) -> int:
        """How many entries, of the file and in memory, have a number of at most `key` in `column`."""
        count = 0
        if self._written:
            with self._opened() as file:
                count = self._search(file, key, column) if file is not None else 0
        return count + sum(entry[column] <= key for entry in self._pending)

    def ascends(self, *columns: int) -> bool:
        """Whether the numbers of each column in the file ascend strictly: they don't where a power cut left zeros."""
        if not self._written:
            return True
        with self._opened() as file:
            if file is None:
                return True
            data = file.read_at(self._written * self._entry.size, 0)
        entries = np.frombuffer(data, _dtype(self._entry.size))
        return all(_ascends(entries[f"f{column}"]) for column in columns)

    def _cut_file(self) -> None:
        with self._opened(writable=True) as file:
            if file is not None:
                file.truncate(self._written * self._entry.size)
        self._dropped.clear()
        self._ragged = self._synced = False

    def _search(self, file: File, key: int, column: int) -> int:
        size = self._entry.size
        low, high = 0, min(self._written, file.size() // size)
        while high - low > _BLOCK:
            middle = (low + high) // 2
            if self._read(file, middle)[column] <= key:
                low = middle + 1
            else:
                high = middle
        block = file.read_at((high - low) * size, low * size)  # less where the writer cut it while we searched
        entries = list(self._entry.iter_unpack(block[: len(block) // size * size]))
        return low + bisect_right(entries, key, key=lambda entry: entry[column])

    def _read(self, file: File, number: int) -> tuple[int, int]:
        data = file.read_at(self._entry.size, number * self._entry.size)
        if len(data) < self._entry.size:
            return (-1, -1)  # cut by the writer while we searched: nothing there
        first, second = self._entry.unpack(data)
        return first, second

    @contextmanager
    def _opened(self, *, create: bool = False, writable: bool = False) -> Iterator[File | None]:
        try:
            file = self._filesystem.open(self._path, create=create, writable=create or writable)
        except FileNotFoundError:
            yield None
            return
        try:
            yield file
        finally:
            file.close()


def _ascends(numbers: NDArray[np.int64]) -> bool:
    return bool(np.all(numbers[1:] > numbers[:-1])) and (not len(numbers) or bool(numbers[0] >= 0))


@cache
def _dtype(entry_bytes: int) -> np.dtype[np.void]:
    return np.dtype([("f0", f">i{entry_bytes - 4}"), ("f1", ">i4")])
