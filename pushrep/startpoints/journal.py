"""A store in a directory: the journal of its facts, and a checkpoint file for each reader.

    <directory>/.lock                   flock of the writer; holds its pid
    <directory>/startpoints.journal     one line a transaction:  crc32c, 8 hex digits | space | JSON | newline
        line 1                          {"format": "pushrep.startpoints", "version": 1}
        every other                     [fact, ...]        see model.py
    <directory>/startpoints.cut         the torn end that was cut last, if ever
    <directory>/checkpoints/<32 hex digits>.json       the digits: SHA-256 of consumer, topic, partition and task
        {"version": 1, "consumer": str, "topic": str, "partition": int, "task": str | null,
         "generation": int,             rises with every claim; a holder of a lower one has lost the partition
         "offset": int | null,          next offset to read; null before the first commit
         "sequence": int,               of the startpoint that the commit's run started from, 0 for none
         "log": str,                    the log's own id, "" unknown
         "crc32c": int}                 over the other fields as compact JSON with sorted keys

A transaction is on disk when `append` returns, all of its facts or none. The file is synced before a change is based on
its content, because its writer may have been killed before its own sync. A torn end, which was never acknowledged, is
cut under the lock; a bad line before good ones is damage and refused.
Checkpoints are replaced atomically, under the journal's lock. Format: docs/internals/formats/startpoints.md.
"""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from filtering.retry import Backoff, RetryPolicy
from pushrep.env import File, Filesystem, LockHeld, write_atomic
from pushrep.env.checked_json import BadJsonFile, journal_line, read_checked_json, scan_journal, write_checked_json
from pushrep.errors import CorruptFile
from pushrep.log.directory_files import LOCK_NAME
from pushrep.startpoints.event_log import TimeBudget, View
from pushrep.startpoints.model import (
    Checkpoint,
    Fact,
    Reader,
    StoreUnavailable,
    busy,
    from_json,
    not_written,
    to_json,
)

JOURNAL_NAME, CUT_NAME = "startpoints.journal", "startpoints.cut"
FORMAT, VERSION = "pushrep.startpoints", 1
JOURNAL_BYTES_MAX = 1 << 30  # some three million startpoints; a file above it is another one under this name
_BACKOFF = Backoff(first_s=0.01, longest_s=0.01)  # a transaction is a few syncs long


class Journal:
    """The journal of one directory. Thread-safe; holds no descriptor between calls, so a fork may go on using it."""

    lock_wait_s = 60.0  # the holder syncs several files, for which a slow disk needs seconds each

    def __init__(self, directory: Path, filesystem: Filesystem) -> None:
        self.place, self.path = directory, directory / JOURNAL_NAME
        self._filesystem = filesystem
        self.budget = TimeBudget()
        self._mutex, self._view_lock = threading.Lock(), threading.Lock()
        self._known, self._last_line = View([], 0, 0), b""

    def view(self) -> View:
        """All facts, without the lock: for display, not for decisions. An unfinished transaction is left out.

        It reads and parses only what was appended since the last call.
        """
        with self._view_lock:
            try:
                with closing(self._filesystem.open(self.path, writable=False)) as file:
                    self._known = self._followed(file)
            except FileNotFoundError:
                self._known, self._last_line = View([], 0, 0), b""
            except OSError as error:  # on a lost disk a file may open, and reading it fails
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
        """Alone with the store's other files until the block ends. Raises StoreUnavailable."""
        with self._mutex, closing(self._locked()):
            yield

    @contextmanager
    def transaction(self) -> Iterator["Transaction"]:
        """Alone with the journal until the block ends. Raises StoreUnavailable, CorruptFile."""
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
        return StoreUnavailable(self.place, why)

    def _locked(self) -> File:
        wait_s = self.budget.left_s(self.lock_wait_s)
        try:
            self._filesystem.make_directory(self.place)
            policy = RetryPolicy(
                is_retriable=lambda error: isinstance(error, LockHeld), backoff=_BACKOFF, within_s=wait_s
            )
            return policy.call(lambda: self._filesystem.lock(self.place / LOCK_NAME))
        except LockHeld as error:
            raise busy(self.place, error.pid, wait_s) from error
        except OSError as error:
            raise self._lost(error) from error

    def _settle(self) -> int:
        """Make the journal if there is none, cut a torn end, sync the file; returns its size."""
        if self.size_bytes() == 0:
            write_atomic(self._filesystem, self.path, [journal_line({"format": FORMAT, "version": VERSION})])
        good = self.view().end
        with closing(self._filesystem.open(self.path)) as file:
            if good < (size := file.size()):
                write_atomic(self._filesystem, self.place / CUT_NAME, [file.read_at(size - good, good)])
                file.truncate(good)
            try:
                file.sync()
            except OSError:
                # The bytes read may never have reached the disk, and a second sync would succeed: write them again.
                write_atomic(self._filesystem, self.path, [file.read_at(good, 0)])
        self._filesystem.sync_directory(self.place)
        return good

    def _followed(self, file: File) -> View:
        """The known facts and the appended ones; reads everything again if the file does not begin as it did."""
        known, size = self._known, file.size()
        if size > JOURNAL_BYTES_MAX:
            raise CorruptFile(self.path, f"{size} bytes are no journal of startpoints; another file has its name")
        # Only a transaction that was read and then cut off makes the file shorter, or changes its end.
        last = self._last_line
        if not last or size < known.end or file.read_at(len(last), known.end - len(last)) != last:
            known, self._last_line = View([], 0, 0), b""
        parsed = _parse(self.path, file.read_at(size - known.end, known.end), first=known.end == 0)
        known.facts.extend(parsed.facts)
        self._last_line = parsed.last_line or self._last_line
        return View(known.facts, len(known.facts), known.end + parsed.end)


class Transaction:
    """Appends while the store's lock is held."""

    def __init__(self, path: Path, file: File, end: int) -> None:
        self._path, self._file, self._end = path, file, end

    @staticmethod
    def next_sequence(at_least: int) -> int:
        """Sequences count up by one."""
        return at_least

    def append(self, facts: Sequence[Fact]) -> None:
        """On disk, all of them, when this returns. Raises StoreUnavailable."""
        line = journal_line([to_json(fact) for fact in facts])
        try:
            self._file.write_at(line, self._end)
            self._file.sync()
        except OSError as error:
            raise self._taken_back(error) from error
        self._end += len(line)

    def _taken_back(self, error: OSError) -> StoreUnavailable:
        # After a failed sync the page cache may hold bytes that are not on disk. Cut them off, so that nobody reads
        # them.
        try:
            self._file.truncate(self._end)
            self._file.sync()
        except OSError:
            return not_written(self._path, error.strerror or str(error), is_known=False)
        return not_written(self._path, error.strerror or str(error), is_known=True)


class _Parsed(NamedTuple):
    facts: list[Fact]
    end: int
    last_line: bytes


def _parse(path: Path, data: bytes, *, first: bool) -> _Parsed:
    """The whole lines of `data`, which begins the file or not. Raises CorruptFile for a bad one before good ones."""
    try:
        scan = scan_journal(data)
    except BadJsonFile as error:
        raise CorruptFile(path, f"a line with its checksum is {error}; restore it from a copy") from error
    if scan.is_damaged:
        bad = data[scan.end :].split(b"\n", 1)[0]
        raise CorruptFile(path, f"{bad[:60]!r}... is damaged and whole lines follow; restore it from a copy")
    facts: list[Fact] = []
    start = last = 0
    for value, end in scan.lines:
        if first and start == 0:
            _check_head(path, value)
        else:
            facts.extend(_facts(path, value))
        last, start = start, end
    if first and data and not scan.lines:
        raise CorruptFile(path, "its first line is no journal of startpoints; restore it from a copy")
    return _Parsed(facts, scan.end, data[last : scan.end])


def _check_head(path: Path, head: Any) -> None:
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise CorruptFile(path, "its first line is no journal of startpoints; restore it from a copy")
    if head.get("version") != VERSION:
        why = f"version {head.get('version')!r}, this pushrep reads {VERSION}: use the one that wrote it"
        raise CorruptFile(path, why)


def _facts(path: Path, value: Any) -> Iterator[Fact]:
    try:
        for fields in value:
            yield from_json(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFile(path, f"{str(value)[:60]}... is nothing that this pushrep knows ({error})") from error


CHECKPOINTS_NAME = "checkpoints"
CHECKPOINT_VERSION = 1
_FILE_BYTES_MAX = 1 << 16
_WAY_ON = "restore it, or remove it and set a startpoint"


class CheckpointFiles:
    """The checkpoint files of one store. To change one, hold the journal's lock."""

    def __init__(self, directory: Path, filesystem: Filesystem) -> None:
        self._directory, self._filesystem = directory / CHECKPOINTS_NAME, filesystem

    def load(self, reader: Reader) -> Checkpoint:
        """The reader's checkpoint; without one, an empty one of generation 0. Raises CorruptFile, StoreUnavailable."""
        path = self._path(reader)
        checkpoint = self._read(path) or Checkpoint(reader=reader)
        if checkpoint.reader != reader:
            raise CorruptFile(path, f"it is the checkpoint of {checkpoint.reader}, where {reader}'s belongs")
        return checkpoint

    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the reader's file, durably. Raises StoreUnavailable."""
        path = self._path(checkpoint.reader)
        try:
            self._filesystem.make_directory(self._directory)
            write_checked_json(self._filesystem, path, checkpoint.as_json(), CHECKPOINT_VERSION)
        except OSError as error:
            raise not_written(path, error.strerror or str(error), is_known=False) from error

    def all(self) -> list[Checkpoint]:
        """Every reader's, sorted; one that is replaced meanwhile is the old or the new one. Raises as `load`."""
        try:
            names = self._filesystem.list(self._directory)
        except FileNotFoundError:
            return []
        found = [self._read(self._directory / name) for name in names if name.endswith(".json")]
        return sorted((one for one in found if one is not None), key=lambda checkpoint: checkpoint.reader)

    def _read(self, path: Path) -> Checkpoint | None:
        try:
            return read_checked_json(
                self._filesystem, path, _FILE_BYTES_MAX, CHECKPOINT_VERSION, Checkpoint.of_json, _WAY_ON
            )
        except CorruptFile as error:
            raise CorruptFile(path, f"no checkpoint: {error.why}") from error
        except OSError as error:
            raise StoreUnavailable(path, error.strerror or str(error)) from error

    def _path(self, reader: Reader) -> Path:
        words = "\0".join((reader.consumer, reader.topic, str(reader.partition), reader.task))
        return self._directory / f"{hashlib.sha256(words.encode()).hexdigest()[:32]}.json"
