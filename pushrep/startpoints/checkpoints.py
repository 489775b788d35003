"""How far each reader is: a small file each, replaced atomically, that also says who may write it.

    <directory>/checkpoints/<32 hex digits>.json       the digits: SHA-256 of consumer, topic, partition and task
    {"version": 1, "consumer": str, "topic": str, "partition": int, "task": str | null,
     "generation": int,                 rises with every claim; who holds a lower one has lost the partition
     "offset": int | null,              next offset to read; null before the first commit
     "sequence": int,                   of the startpoint that the commit's run started from, 0 for none
     "log": str,                        the log's own id, "" unknown
     "crc32c": int}                     over the other fields as compact JSON with sorted keys

Written under the journal's lock. Format: docs/formats/startpoints.md.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c

from pushrep.env import Filesystem, read_whole, write_atomic
from pushrep.startpoints.errors import CorruptStore, NotWritten, StoreUnavailable
from pushrep.startpoints.model import Reader

CHECKPOINTS_NAME = "checkpoints"
VERSION = 1
_FILE_BYTES_MAX = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Where a reader stands, see the file's map; `offset` None: it has claimed the partition and committed nothing."""

    reader: Reader
    generation: int = 0
    offset: int | None = None
    sequence: int = 0
    log_id: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A reader's right to its partition, until another instance claims it."""

    reader: Reader
    generation: int


class CheckpointFiles:
    """The checkpoint files of one store. Whoever changes one holds the journal's lock."""

    def __init__(self, directory: Path, filesystem: Filesystem) -> None:
        self._directory, self._filesystem = directory / CHECKPOINTS_NAME, filesystem

    def load(self, reader: Reader) -> Checkpoint:
        """What stands there now; an empty one (generation 0) if there is none.

        Raises CorruptStore, StoreUnavailable.
        """
        path = self._path(reader)
        try:
            data = read_whole(self._filesystem, path, _FILE_BYTES_MAX)
        except OSError as error:
            raise StoreUnavailable(path, error.strerror or str(error)) from error
        checkpoint = Checkpoint(reader=reader) if data is None else decode(path, data)
        if checkpoint.reader != reader:
            raise CorruptStore(path, f"it is the checkpoint of {checkpoint.reader}, where {reader}'s belongs")
        return checkpoint

    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the reader's file; its name is on disk, too, when this returns. Raises NotWritten."""
        path = self._path(checkpoint.reader)
        try:
            self._filesystem.make_directory(self._directory)
            write_atomic(self._filesystem, path, [encode(checkpoint)])
        except OSError as error:
            raise NotWritten(path, error.strerror or str(error), is_known=False) from error

    def all(self) -> list[Checkpoint]:
        """Every reader's, sorted; one that is replaced meanwhile is the old or the new one."""
        try:
            names = self._filesystem.list(self._directory)
        except FileNotFoundError:
            return []
        found = []
        for name in names:
            path = self._directory / name
            if path.suffix == ".json" and (data := read_whole(self._filesystem, path, _FILE_BYTES_MAX)) is not None:
                found.append(decode(path, data))
        return sorted(found, key=lambda checkpoint: checkpoint.reader)

    def _path(self, reader: Reader) -> Path:
        words = "\0".join((reader.consumer, reader.topic, str(reader.partition), reader.task))
        return self._directory / f"{hashlib.sha256(words.encode()).hexdigest()[:32]}.json"


def encode(checkpoint: Checkpoint) -> bytes:
    """The file's bytes."""
    reader = checkpoint.reader
    fields = {
        "version": VERSION,
        "consumer": reader.consumer,
        "topic": reader.topic,
        "partition": reader.partition,
        "task": reader.task or None,
        "generation": checkpoint.generation,
        "offset": checkpoint.offset,
        "sequence": checkpoint.sequence,
        "log": checkpoint.log_id,
    }
    return (json.dumps({**fields, "crc32c": _checksum(fields)}, ensure_ascii=False, indent=1) + "\n").encode()


def decode(path: Path, data: bytes) -> Checkpoint:
    """The checkpoint in the file's bytes. Raises CorruptStore."""
    try:
        fields = json.loads(data)
        checksum, version = fields.pop("crc32c"), fields["version"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptStore(path, f"no checkpoint ({error}); restore it, or remove it and set a startpoint") from error
    if checksum != _checksum(fields):
        raise CorruptStore(path, "its checksum does not fit; restore it, or remove it and set a startpoint")
    if version != VERSION:
        raise CorruptStore(path, f"version {version!r}, this pushrep reads {VERSION}: use the one that wrote it")
    try:
        reader = Reader(fields["consumer"], fields["topic"], fields["partition"], fields["task"] or "")
        return Checkpoint(
            reader=reader,
            generation=fields["generation"],
            offset=fields["offset"],
            sequence=fields["sequence"],
            log_id=fields["log"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStore(path, f"unusable fields ({error})") from error


def _checksum(fields: dict[str, Any]) -> int:
    text = json.dumps(fields, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return int(google_crc32c.value(text.encode()))
