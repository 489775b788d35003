"""The facts of a directory store on disk: lines that are only ever appended, several of them in one go or none.

    <directory>/.lock                   flock of whoever writes; holds its pid
    <directory>/startpoints.journal     one line a transaction:  crc32c, 8 hex digits | space | JSON | newline
        line 1                          {"format": "pushrep.startpoints", "version": 1}
        every other                     [fact, ...]        see events.py
    <directory>/startpoints.cut         the torn end that was cut last, if ever

A transaction is on disk when `append` returns, all of its facts or none. Before anything read is believed it is synced:
the process that wrote it may have been killed before its own sync, and what rests on it must not outlive it. A torn end
is cut under the lock and was never promised to anyone; a bad line with good ones behind it is damage and refused.
Format: docs/formats/startpoints.md.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random

from pushrep.env import File, Filesystem, LockHeld, write_atomic
from pushrep.startpoints.changing import TimeBudget, View
from pushrep.startpoints.errors import CorruptStore, NotWritten, StoreBusy, StoreUnavailable
from pushrep.startpoints.events import Fact, from_json, to_json

JOURNAL_NAME, CUT_NAME, LOCK_NAME = "startpoints.journal", "startpoints.cut", ".lock"
FORMAT, VERSION = "pushrep.startpoints", 1
LOCK_WAIT_S = 60.0  # its holder syncs several files, and a slow disk takes seconds for each
JOURNAL_BYTES_MAX = 1 << 30  # some three million startpoints; a file above it is another one under this name
_PAUSE_MAX_S = 0.01  # a transaction is a few syncs long


class Journal:
    """The journal of one directory. Thread-safe; holds no descriptor between calls, so a fork may go on using it."""

    def __init__(
        self,
        directory: Path,
        filesystem: Filesystem,
        *,
        lock_wait_s: float = LOCK_WAIT_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.directory, self.path = directory, directory / JOURNAL_NAME
        self._filesystem, self.lock_wait_s, self._sleep = filesystem, lock_wait_s, sleep
        self.budget = TimeBudget()
        self._mutex, self._view_lock = threading.Lock(), threading.Lock()
        self._known, self._last_line = View([], 0, 0), b""

    @property
    def place(self) -> Path:
        return self.directory

    def load(self) -> list[Fact]:
        """All facts, without the lock: for showing, not for deciding. A transaction just being written is left out."""
        view = self.view()
        return view.facts[: view.length]

    def view(self) -> View:
        """As `load`, without a copy. Only what was appended since the last look is read and parsed."""
        with self._view_lock:
            try:
                with closing(self._filesystem.open(self.path, writable=False)) as file:
                    self._known = self._followed(file)
            except FileNotFoundError:
                self._known, self._last_line = View([], 0, 0), b""
            except OSError as error:  # a lost disk may let a file be opened and fail at its bytes
                raise self._lost(error) from error
            return self._known

    def size_bytes(self) -> int:
        """The journal's size now, 0 if there is none: it changes with every transaction. Raises StoreUnavailable."""
        try:
            with closing(self._filesystem.open(self.path, writable=False)) as file:
                return file.size()
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise self._lost(error) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone with the store's other files until the block ends. Raises StoreBusy, StoreUnavailable."""
        with self._mutex, closing(self._locked()):
            yield

    @contextmanager
    def transaction(self) -> Iterator["Transaction"]:
        """Alone with the journal until the block ends. Raises StoreBusy, StoreUnavailable, CorruptStore."""
        with self.locked():
            try:
                end = self._settle()
                file = self._filesystem.open(self.path)
            except OSError as error:
                raise self._lost(error) from error
            with closing(file):
                yield Transaction(self.path, file, end)

    def close(self) -> None:
        """Nothing is held between calls."""

    # ---- inside

    def _lost(self, error: OSError) -> StoreUnavailable:
        why = "it lies below a file" if isinstance(error, NotADirectoryError) else error.strerror or str(error)
        return StoreUnavailable(self.directory, why)

    def _locked(self) -> File:
        wait_s = self.budget.left_s(self.lock_wait_s)
        try:
            self._filesystem.make_directory(self.directory)
            for attempt in Retrying(
                retry=retry_if_exception_type(LockHeld),
                wait=wait_random(0, _PAUSE_MAX_S),
                stop=stop_after_delay(wait_s),
                sleep=self._sleep,
                reraise=True,
            ):
                with attempt:
                    return self._filesystem.lock(self.directory / LOCK_NAME)
        except LockHeld as error:
            raise StoreBusy(self.directory, error.pid, wait_s) from error
        except OSError as error:
            raise self._lost(error) from error
        raise AssertionError("unreachable: tenacity returns or raises")

    def _settle(self) -> int:
        """Make the journal if there is none, cut a torn end, sync what stands there; its size then."""
        if self.size_bytes() == 0:
            write_atomic(self._filesystem, self.path, [_line({"format": FORMAT, "version": VERSION})])
        good = self.view().end
        with closing(self._filesystem.open(self.path)) as file:
            if good < (size := file.size()):
                write_atomic(self._filesystem, self.directory / CUT_NAME, [file.read_at(size - good, good)])
                file.truncate(good)
            try:
                file.sync()
            except OSError:
                # What was shown may never have reached the disk, and a second sync would not say so. New pages do.
                write_atomic(self._filesystem, self.path, [file.read_at(good, 0)])
        self._filesystem.sync_directory(self.directory)
        return good

    def _followed(self, file: File) -> View:
        """What is known, and what was appended to it; all anew if the file is not a longer form of what was seen."""
        known, size = self._known, file.size()
        if size > JOURNAL_BYTES_MAX:
            raise CorruptStore(self.path, f"{size} bytes are no journal of startpoints; another file has its name")
        # A transaction that was seen and then taken back is the one way to become shorter, or other at its end.
        last = self._last_line
        if not last or size < known.end or file.read_at(len(last), known.end - len(last)) != last:
            known, self._last_line = View([], 0, 0), b""
        parsed = _parse(self.path, file.read_at(size - known.end, known.end), first=known.end == 0)
        known.facts.extend(parsed.facts)
        self._last_line = parsed.last_line or self._last_line
        return View(known.facts, len(known.facts), known.end + parsed.end)


class Transaction:
    """The way to append, while nobody else may."""

    def __init__(self, path: Path, file: File, end: int) -> None:
        self._path, self._file, self._end = path, file, end

    @staticmethod
    def next_sequence(at_least: int) -> int:
        """They count up."""
        return at_least

    def append(self, facts: Sequence[Fact]) -> None:
        """On disk, all of them, when this returns. Raises NotWritten."""
        line = _line([to_json(fact) for fact in facts])
        try:
            self._file.write_at(line, self._end)
            self._file.sync()
        except OSError as error:
            raise self._taken_back(error) from error
        self._end += len(line)

    def _taken_back(self, error: OSError) -> NotWritten:
        # After a failed sync the page cache may show what the disk never got. Cut off, so that nobody believes it and
        # the next transaction writes these bytes anew.
        try:
            self._file.truncate(self._end)
            self._file.sync()
        except OSError:
            return NotWritten(self._path, error.strerror or str(error), is_known=False)
        return NotWritten(self._path, error.strerror or str(error), is_known=True)


def _line(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return b"%08x %s\n" % (google_crc32c.value(text), text)


def _checked(line: bytes) -> Any:
    """The JSON of a whole line without its end; None if the checksum does not fit."""
    if len(line) < 9 or line[8:9] != b" " or line[:8] != b"%08x" % google_crc32c.value(line[9:]):
        return None
    return json.loads(line[9:])


class _Parsed(NamedTuple):
    facts: list[Fact]
    end: int
    last_line: bytes


def _parse(path: Path, data: bytes, *, first: bool) -> _Parsed:
    """The whole lines of `data`, which begins the file or not. Raises CorruptStore for a bad one before good ones."""
    facts: list[Fact] = []
    position, last_line = 0, b""
    for line in data.split(b"\n")[:-1]:
        value = _checked(line)
        if value is None:
            if any(_checked(later) is not None for later in data[position + len(line) + 1 :].split(b"\n")[:-1]):
                raise CorruptStore(path, f"{line[:60]!r}... is damaged and whole lines follow; restore it from a copy")
            break
        if first and position == 0:
            _check_head(path, value)
        else:
            facts.extend(_facts(path, value))
        last_line = line + b"\n"
        position += len(last_line)
    if first and data and position == 0:
        raise CorruptStore(path, "its first line is no journal of startpoints; restore it from a copy")
    return _Parsed(facts, position, last_line)


def _check_head(path: Path, head: Any) -> None:
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise CorruptStore(path, "its first line is no journal of startpoints; restore it from a copy")
    if head.get("version") != VERSION:
        why = f"version {head.get('version')!r}, this pushrep reads {VERSION}: use the one that wrote it"
        raise CorruptStore(path, why)


def _facts(path: Path, value: Any) -> Iterator[Fact]:
    try:
        for fields in value:
            yield from_json(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStore(path, f"{str(value)[:60]}... is nothing that this pushrep knows ({error})") from error
