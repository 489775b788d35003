"""The catalogue of recordings: which log has which id. An id is never given twice, even if its log is lost.

    <directory>/.pushrep_recordings
        {"version": 1, "recordings": [{"id": 3, "outbox": uuid, "topic": "orders", "topic_id": uuid, "partition": 0,
                                       "start": 0, "created_ms": 1700000000000, "state": "DELETED",
                                       "is_removing": true, "origin": null}, ...], "crc32c": n}

is_removing: a deletion was requested, and the files may not all be gone. Deleted ones stay in the file, so the next id
is one above the last. The file is replaced whole (env/checked_json.py) before an id is returned. A damaged one is
refused: a new one would give an id to another recording. For the process that holds the directory's lock; others use
`read_catalogue`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self
from uuid import UUID

from pushrep.env import REAL_FILESYSTEM, Filesystem
from pushrep.env.checked_json import read_checked_json, write_checked_json
from pushrep.errors import CorruptFile
from pushrep.replay.plan import ReplayRefused
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.replay_messages import RecordingState

CATALOGUE_NAME = ".pushrep_recordings"
VERSION = 1
_BYTES_MAX = 1 << 30
_WAY_ON = (
    "nothing was changed, restore the file from a copy, or remove it and ask by name: the logs get ids then that "
    "others had"
)
_NO_OUTBOX = UUID(int=0)


@dataclass(frozen=True, slots=True)
class CopyOrigin:
    """The recording of another node that a recording is a copy of. follows: also what comes later; until: no batch that
    ends above this offset. is_done: the copy ended; else it goes on when its node starts.
    """

    address: str
    recording_id: int
    follows: bool = False
    until: int | None = None
    is_done: bool = False

    def __str__(self) -> str:
        return f"recording {self.recording_id} of {self.address}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One recording. origin: what it is a copy of."""

    recording_id: int
    tp: TopicIdPartition
    start_offset: int
    created_ms: int
    outbox_id: UUID = _NO_OUTBOX
    state: RecordingState = RecordingState.VALID
    is_removing: bool = False
    """It was deleted by request, and its files may not all be gone."""
    origin: CopyOrigin | None = None


@dataclass(frozen=True, slots=True)
class FoundLog:
    """A log in the directory."""

    tp: TopicIdPartition
    start_offset: int
    outbox_id: UUID = _NO_OUTBOX


class Catalogue:
    """The recordings of one directory. Made by `open`; not thread-safe. Every change is on disk when it returns."""

    def __init__(self, path: Path, filesystem: Filesystem, entries: dict[int, CatalogueEntry]) -> None:
        """Use `Catalogue.open`."""
        self._path, self._filesystem, self._entries = path, filesystem, entries
        self._last_id = max(entries, default=0)  # also of a write that failed, which a reader may have seen

    @classmethod
    def open(cls, directory: Path | str, filesystem: Filesystem = REAL_FILESYSTEM) -> Self:
        """The catalogue of `directory`; the first recording makes its file. Raises ReplayRefused (KAFKA_STORAGE_ERROR),
        OSError.
        """
        path = Path(directory) / CATALOGUE_NAME
        return cls(path, filesystem, _load(path, filesystem))

    def __iter__(self) -> Iterator[CatalogueEntry]:
        """By ascending id, deleted ones included."""
        return iter(list(self._entries.values()))

    def get(self, recording_id: int) -> CatalogueEntry:
        """Raises ReplayRefused."""
        try:
            return self._entries[recording_id]
        except KeyError:
            raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"there is no recording {recording_id}") from None

    def originates(self, recording_id: int, origin: CopyOrigin) -> None:
        """It is a copy of `origin`. Raises ReplayRefused, OSError."""
        self._store({recording_id: replace(self.get(recording_id), origin=origin)})

    def deleted(self, recording_id: int) -> None:
        """Mark it as deleted, before a file is removed; the id is never given again."""
        gone = replace(self.get(recording_id), state=RecordingState.DELETED, is_removing=True)
        self._store({recording_id: gone})

    def removed(self, recording_id: int) -> None:
        """Its files are gone."""
        gone = replace(self.get(recording_id), state=RecordingState.DELETED, is_removing=False)
        self._store({recording_id: gone})

    def reconcile(self, found: Iterable[FoundLog], created_ms: int) -> list[CatalogueEntry]:
        """Compare with the logs in the directory: new ones get ids, vanished ones are DELETED.

        A log that was made again under its name has another topic id, so it is another recording. A log that is being
        removed is none. Returns new entries.
        """
        logs, changed = {log.tp: log for log in found}, dict[int, CatalogueEntry]()
        for entry in self:
            if entry.is_removing:
                logs.pop(entry.tp, None)
            elif entry.state is not RecordingState.DELETED:
                log = logs.pop(entry.tp, None)
                state = RecordingState.VALID if log is not None else RecordingState.DELETED
                changed[entry.recording_id] = replace(entry, state=state)
        added = [
            CatalogueEntry(
                recording_id=self._last_id + number,
                tp=tp,
                start_offset=log.start_offset,
                created_ms=created_ms,
                outbox_id=log.outbox_id,
            )
            for number, (tp, log) in enumerate(logs.items(), 1)
        ]
        self._last_id += len(added)
        self._store(changed | {entry.recording_id: entry for entry in added})
        return added

    def _store(self, changed: dict[int, CatalogueEntry]) -> None:
        entries = self._entries | changed
        if entries != self._entries:
            recordings = [_fields(entry) for entry in entries.values()]
            write_checked_json(self._filesystem, self._path, {"recordings": recordings}, VERSION)
            self._entries = entries


def read_catalogue(directory: Path | str, filesystem: Filesystem = REAL_FILESYSTEM) -> list[CatalogueEntry]:
    """The recordings of a directory by ascending id, read beside its process; empty without a catalogue.

    Raises ReplayRefused (KAFKA_STORAGE_ERROR).
    """
    return list(Catalogue.open(directory, filesystem))


def _load(path: Path, filesystem: Filesystem) -> dict[int, CatalogueEntry]:
    try:
        found = read_checked_json(
            filesystem, path, _BYTES_MAX, VERSION, lambda fields: list(map(_entry, fields["recordings"])), _WAY_ON
        )
    except CorruptFile as error:
        raise ReplayRefused(ErrorCode.KAFKA_STORAGE_ERROR, str(error)) from error
    return {entry.recording_id: entry for entry in found or ()}


def _fields(entry: CatalogueEntry) -> dict[str, Any]:
    return {
        "id": entry.recording_id,
        "outbox": str(entry.outbox_id),
        "topic": entry.tp.topic,
        "topic_id": str(entry.tp.topic_id),
        "partition": entry.tp.partition,
        "start": entry.start_offset,
        "created_ms": entry.created_ms,
        "state": entry.state.name,
        "is_removing": entry.is_removing,
        "origin": None if entry.origin is None else asdict(entry.origin),
    }


def _entry(fields: Mapping[str, Any]) -> CatalogueEntry:
    return CatalogueEntry(
        recording_id=int(fields["id"]),
        tp=TopicIdPartition(UUID(fields["topic_id"]), fields["topic"], int(fields["partition"])),
        start_offset=int(fields["start"]),
        created_ms=int(fields["created_ms"]),
        outbox_id=UUID(fields["outbox"]),
        state=RecordingState[fields["state"]],
        is_removing=bool(fields["is_removing"]),
        origin=None if fields["origin"] is None else CopyOrigin(**fields["origin"]),
    )
