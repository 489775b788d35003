"""The catalogue of recordings: which log has which id. An id is never given twice, even if its log or the file is lost.

    <directory>/.pushrep_recordings     one line a fact:  crc32c, 8 hex digits | space | JSON | newline
        line 1       {"format": "pushrep.recordings", "version": 1, "next_id": 1}
        add          {"add": 3, "outbox": uuid, "topic": "orders", "topic_id": uuid, "partition": 0, "start": 0,
                      "created_ms": 1700000000000}
        change       {"id": 3, "stop": 1042}    {"id": 3, "stop": null}: live    {"id": 3, "state": "DELETED"}
                     "removing": true beside DELETED: requested, and the files may not all be gone

A line is on disk before its id is returned, so the id of a torn line was never returned. A torn end is cut, and as many
ids as it has bytes are skipped, in case a complete line at the end was damaged later. A bad line with others after it
is an error. For the process that holds the directory's lock; others use `read_catalogue`.
"""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from uuid import UUID

from pushrep.env import REAL_FILESYSTEM, Filesystem, read_whole, write_atomic
from pushrep.env.checked_json import journal_line, scan_journal
from pushrep.replay.plan import ReplayRefused
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.replay_messages import RecordingState

CATALOGUE_NAME = ".pushrep_recordings"
FORMAT, VERSION = "pushrep.recordings", 1
_BYTES_MAX = 1 << 30
_SPARE_LINES = 1_000
_NO_OUTBOX = UUID(int=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One recording. stop_offset: None while no writer has stopped it."""

    recording_id: int
    tp: TopicIdPartition
    start_offset: int
    created_ms: int
    outbox_id: UUID = _NO_OUTBOX
    stop_offset: int | None = None
    state: RecordingState = RecordingState.VALID
    is_removing: bool = False
    """It was deleted by request, and its files may not all be gone."""


@dataclass(frozen=True, slots=True)
class FoundLog:
    """A log in the directory. is_readable: False if its files can't be read."""

    tp: TopicIdPartition
    start_offset: int
    is_readable: bool = True
    outbox_id: UUID = _NO_OUTBOX


class Catalogue:
    """The recordings of one directory. Made by `open`; not thread-safe. Every change is on disk when it returns."""

    def __init__(self, path: Path, filesystem: Filesystem, facts: "_Facts") -> None:
        """Use `Catalogue.open`."""
        self._path, self._filesystem, self._facts = path, filesystem, facts
        self._failed: OSError | None = None

    @classmethod
    def open(cls, directory: Path | str, filesystem: Filesystem = REAL_FILESYSTEM) -> Self:
        """The catalogue of `directory`, made if there is none. Raises ReplayRefused (KAFKA_STORAGE_ERROR), OSError."""
        path = Path(directory) / CATALOGUE_NAME
        facts = _load(path, filesystem)
        catalogue = cls(path, filesystem, facts if facts is not None else _Facts())
        if facts is None or facts.torn_bytes or facts.lines > 4 * len(facts.entries) + _SPARE_LINES:
            catalogue._rewrite()
        return catalogue

    def __iter__(self) -> Iterator[CatalogueEntry]:
        """By ascending id, deleted ones included."""
        return iter(sorted(self._facts.entries.values(), key=lambda entry: entry.recording_id))

    def get(self, recording_id: int) -> CatalogueEntry:
        """Raises ReplayRefused."""
        try:
            return self._facts.entries[recording_id]
        except KeyError:
            raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"there is no recording {recording_id}") from None

    def stopped(self, recording_id: int, stop_offset: int) -> None:
        """Its writer has closed it at `stop_offset`."""
        self._change(recording_id, {"stop": stop_offset})

    def resumed(self, recording_id: int) -> None:
        """A writer goes on with it."""
        self._change(recording_id, {"stop": None})

    def deleted(self, recording_id: int) -> None:
        """Mark it as deleted, before a file is removed; the id is never given again."""
        self._change(recording_id, {"state": RecordingState.DELETED.name, "removing": True})

    def removed(self, recording_id: int) -> None:
        """Its files are gone."""
        self._change(recording_id, {"state": RecordingState.DELETED.name})

    def reconcile(self, found: Iterable[FoundLog], created_ms: int) -> list[CatalogueEntry]:
        """Compare with the logs in the directory: new ones get ids, unreadable are INVALID, vanished DELETED.

        A log that was made again under its name has another topic id, so it is another recording. Returns new entries.
        """
        logs = {log.tp: log for log in found}
        for entry in list(self):
            log = logs.get(entry.tp)
            if entry.state is RecordingState.DELETED:
                continue
            state = (
                RecordingState.DELETED
                if log is None
                else RecordingState.VALID if log.is_readable else RecordingState.INVALID
            )  # fmt: skip
            if state is not entry.state:
                self._change(entry.recording_id, {"state": state.name})
        unknown = [(tp, log.start_offset, log.outbox_id) for tp, log in logs.items() if self._facts.find(tp) is None]
        return self._add_all(unknown, created_ms)

    # ---- inside

    def _add_all(self, logs: list[tuple[TopicIdPartition, int, UUID]], created_ms: int) -> list[CatalogueEntry]:
        added = [
            CatalogueEntry(
                recording_id=self._facts.next_id + number,
                tp=tp,
                start_offset=start,
                created_ms=created_ms,
                outbox_id=outbox_id,
            )
            for number, (tp, start, outbox_id) in enumerate(logs)
        ]
        if added:
            self._append([_added(entry) for entry in added])
        return added

    def _change(self, recording_id: int, change: dict[str, Any]) -> None:
        self.get(recording_id)
        self._append([{"id": recording_id} | change])

    def _append(self, facts: list[dict[str, Any]]) -> None:
        data = b"".join(map(journal_line, facts))
        if self._failed is not None:
            raise OSError(self._failed.errno, "an earlier write failed: open the catalogue again", str(self._path))
        try:
            with closing(self._filesystem.open(self._path)) as file:
                file.write_at(data, self._facts.size_bytes)
                file.sync()
        except OSError as error:
            self._failed = error  # a second sync may succeed over lost pages; only opening may judge what is there
            raise
        self._facts.size_bytes += len(data)
        for fact in facts:
            self._facts.apply(fact)

    def _rewrite(self) -> None:
        """Rewrite the file with as few lines as possible."""
        lines = [journal_line({"format": FORMAT, "version": VERSION, "next_id": self._facts.next_id})]
        for entry in self:
            lines.append(journal_line(_added(entry)))
            if entry.stop_offset is not None:
                lines.append(journal_line({"id": entry.recording_id, "stop": entry.stop_offset}))
            if entry.state is not RecordingState.VALID:
                removing = {"removing": True} if entry.is_removing else {}
                lines.append(journal_line({"id": entry.recording_id, "state": entry.state.name, **removing}))
        write_atomic(self._filesystem, self._path, lines)
        self._facts.size_bytes, self._facts.lines, self._facts.torn_bytes = sum(map(len, lines)), len(lines), 0


def read_catalogue(directory: Path | str, filesystem: Filesystem = REAL_FILESYSTEM) -> list[CatalogueEntry]:
    """The recordings of a directory by ascending id, read beside its process; empty without a catalogue.

    Raises ReplayRefused (KAFKA_STORAGE_ERROR).
    """
    facts = _load(Path(directory) / CATALOGUE_NAME, filesystem)
    return [] if facts is None else [facts.entries[one] for one in sorted(facts.entries)]


class _Facts:
    """The state that the lines of a catalogue add up to."""

    def __init__(self) -> None:
        self.entries: dict[int, CatalogueEntry] = {}
        self.next_id = 1
        self.size_bytes = self.lines = self.torn_bytes = 0
        self._by_log: dict[TopicIdPartition, int] = {}

    def find(self, tp: TopicIdPartition) -> CatalogueEntry | None:
        entry = self.entries.get(self._by_log.get(tp, -1))
        return entry if entry is not None and entry.state is not RecordingState.DELETED else None

    def apply(self, fact: dict[str, Any]) -> None:
        """Apply a line. Raises KeyError, TypeError, ValueError for an invalid one."""
        self.lines += 1
        if "format" in fact:
            if (fact["format"], fact["version"]) != (FORMAT, VERSION):
                raise ValueError(f"format {fact['format']!r}, version {fact['version']!r} are not known here")
            self.next_id = max(self.next_id, int(fact["next_id"]))
        elif "add" in fact:
            entry = _entry(fact)
            self.entries[entry.recording_id] = entry
            self._by_log[entry.tp] = entry.recording_id
            self.next_id = max(self.next_id, entry.recording_id + 1)
        elif "stop" in fact:
            self.entries[fact["id"]] = replace(self.entries[fact["id"]], stop_offset=fact["stop"])
        else:
            state, is_removing = RecordingState[fact["state"]], bool(fact.get("removing"))
            self.entries[fact["id"]] = replace(self.entries[fact["id"]], state=state, is_removing=is_removing)


def _load(path: Path, filesystem: Filesystem) -> _Facts | None:
    data = read_whole(filesystem, path, _BYTES_MAX)
    if not data:
        return None
    facts, scan = _Facts(), scan_journal(data)
    for number, (fact, end) in enumerate(scan.lines, 1):
        if not isinstance(fact, dict) or (number == 1) != ("format" in fact):
            raise _damaged(path, number, "it is no fact of a catalogue")
        try:
            facts.apply(fact)
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, number, f"it is no fact of a catalogue: {error}") from error
        facts.size_bytes = end
    if scan.is_damaged or not scan.lines:
        raise _damaged(path, len(scan.lines) + 1, "its CRC does not match")
    # Torn: it has fewer ids than bytes.
    facts.torn_bytes = len(data) - scan.end
    facts.next_id += facts.torn_bytes
    return facts


def _damaged(path: Path, line: int, why: str) -> ReplayRefused:
    # A damaged one is never replaced by a new one, which would give an id to another recording.
    why = f"{path}, line {line}: {why}; nothing was changed, restore the file from a copy"
    return ReplayRefused(ErrorCode.KAFKA_STORAGE_ERROR, why)


def _added(entry: CatalogueEntry) -> dict[str, Any]:
    return {
        "add": entry.recording_id,
        "outbox": str(entry.outbox_id),
        "topic": entry.tp.topic,
        "topic_id": str(entry.tp.topic_id),
        "partition": entry.tp.partition,
        "start": entry.start_offset,
        "created_ms": entry.created_ms,
    }


def _entry(fact: dict[str, Any]) -> CatalogueEntry:
    return CatalogueEntry(
        recording_id=int(fact["add"]),
        tp=TopicIdPartition(UUID(fact["topic_id"]), fact["topic"], int(fact["partition"])),
        start_offset=int(fact["start"]),
        created_ms=int(fact["created_ms"]),
        outbox_id=UUID(fact["outbox"]),
    )
