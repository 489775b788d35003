"""Which directory of an outbox this is, and whether its files are a copy of another's.

    directory-id.json   {"version": 1, "directory_id": 32 hex digits, "copy_of": [32 hex digits, ...],
                         "is_settled": bool, "witness": {"inode", "generation", "birth_ns"} | null, "crc32c": n}

The file holds its own witness, which is what distinguishes it from a copy: inode, generation, birth time. It is written
under another name, completed with its witness, synced, and renamed. A copy of the directory has the same bytes in
another file, with another witness.

    the file            its witness                          the directory
    is not there                                             has no id yet; its outbox's next opening gives it one
    is whole            as written, one name                 is what the id says
    is whole            another, or a second name            is a COPY
    is whole            none was written, or none is there   not known: no verdict
    is damaged                                               is a COPY, of nobody knows which

A copy that is found is first recorded as one (`copy_of`, not settled); `opened_id` has the order of the steps. Every
opening and close of the outbox writes a new file: so if a backup's bytes are written into the present file, the witness
in them is an older one.
"""

import logging
import secrets
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any
from uuid import UUID

from pushrep.env import Filesystem, FileWitness
from pushrep.env.checked_json import checked_json, read_checked_json
from pushrep.errors import CorruptFile
from pushrep.log.directory_files import remove_clean_marker
from pushrep.log.published import PUBLISHED_NAME

_LOG = logging.getLogger("pushrep.log")

DIRECTORY_ID_NAME = "directory-id.json"
UNKNOWN_ID = UUID(int=0)
"""Stands for the original's id where the copy's file can't be read."""
_VERSION = 1
_FILE_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryId:
    """A directory's identity. directory_id: 128 random bits.

    copy_of: the directories that it is a copy of, oldest first, until an operator says that the last is gone; empty for
    an original. is_settled: False from when it is found to be a copy until its outbox has another PID epoch.
    """

    directory_id: UUID
    copy_of: tuple[UUID, ...] = ()
    is_settled: bool = True

    def __post_init__(self) -> None:
        if not self.is_settled and not self.copy_of:
            raise ValueError("no copy of anything, and yet to be settled")

    @property
    def is_unknown(self) -> bool:
        """Whether its file could not be read."""
        return self.directory_id == UNKNOWN_ID

    @property
    def is_copy(self) -> bool:
        """Whether the original may still be there."""
        return bool(self.copy_of)


class CopyVerdict(Enum):
    """What the witness says of a directory."""

    NO_ID = auto()
    ORIGINAL = auto()
    COPY = auto()
    UNKNOWN = auto()
    """Its file system has nothing that distinguishes a file from a copy."""


def read_directory_id(directory: Path, filesystem: Filesystem) -> tuple[DirectoryId | None, CopyVerdict]:
    """The stored identity, and the verdict of its witness. Takes no lock, changes nothing. Raises OSError."""
    path = directory / DIRECTORY_ID_NAME
    try:
        found = read_checked_json(filesystem, path, _FILE_BYTES_MAX, _VERSION, _id_of, "its id can't be believed")
    except CorruptFile as error:
        _LOG.error("the directory counts as a copy: %s", error)
        return DirectoryId(directory_id=UNKNOWN_ID), CopyVerdict.COPY
    if found is None:
        return None, CopyVerdict.NO_ID
    return found[0], judge_witness(found[1], filesystem.witness(path))


def _id_of(fields: Mapping[str, Any]) -> tuple[DirectoryId, FileWitness | None]:
    found = DirectoryId(
        directory_id=UUID(hex=fields["directory_id"]),
        copy_of=tuple(UUID(hex=one) for one in fields["copy_of"]),
        is_settled=bool(fields["is_settled"]),
    )
    return found, _witness_of(fields["witness"])


def judge_witness(written: FileWitness | None, now: FileWitness | None) -> CopyVerdict:
    """The verdict: whether the file is the one whose witness is in it."""
    if written is None or now is None:
        return CopyVerdict.UNKNOWN
    if written.inode != now.inode or now.links != 1:
        return CopyVerdict.COPY
    halves = [
        (one, other) for one, other in zip(written[1:3], now[1:3], strict=True) if one is not None and other is not None
    ]
    if any(one != other for one, other in halves):
        return CopyVerdict.COPY
    return CopyVerdict.ORIGINAL if halves else CopyVerdict.UNKNOWN


def opened_id(directory: Path, filesystem: Filesystem) -> tuple[DirectoryId | None, CopyVerdict]:
    """The id and the verdict; called before anything else of a locked directory is read.

    A copy is made safe first, in an order that may stop anywhere: it is recorded as a copy, then its published state is
    removed, then its clean marker. Until `settle_id`, recovery treats a torn end below the recovery point as an effect
    of copying, not as damage. Raises OSError.
    """
    found, verdict = read_directory_id(directory, filesystem)
    if found is None or (verdict is not CopyVerdict.COPY and found.is_settled):
        return found, verdict
    if found.is_settled:
        found = replace(found, copy_of=(*found.copy_of, found.directory_id), is_settled=False)
        write_directory_id(directory, filesystem, found)
        _LOG.warning(
            "%s is a copy of directory %s: its file %s is another", directory, found.copy_of[-1].hex, DIRECTORY_ID_NAME
        )
    if filesystem.exists(directory / PUBLISHED_NAME):
        filesystem.remove(directory / PUBLISHED_NAME)
        filesystem.sync_directory(directory)
    remove_clean_marker(directory, filesystem)
    return found, CopyVerdict.COPY


def settled_id(found: DirectoryId | None, new_id: UUID | None = None) -> DirectoryId:
    """The id from now on: a new one (`new_id`, if it was given out before) for a directory without an id and for a
    copy.
    """
    if found is not None and found.is_settled:
        return found
    return DirectoryId(directory_id=new_id or new_directory_id(), copy_of=() if found is None else found.copy_of)


def moved_id(found: DirectoryId) -> DirectoryId:
    """The id of a directory whose original is gone: that of the original, which may have been a copy itself."""
    if not found.copy_of:
        return found
    if found.copy_of[-1] == UNKNOWN_ID:
        return DirectoryId(directory_id=new_directory_id())
    return DirectoryId(directory_id=found.copy_of[-1], copy_of=found.copy_of[:-1])


def write_directory_id(directory: Path, filesystem: Filesystem, kept: DirectoryId) -> CopyVerdict:
    """Write the file with its own witness; on disk when this returns. UNKNOWN where there is none. Raises OSError; then
    the old file is still there.
    """
    path = directory / DIRECTORY_ID_NAME
    temp = path.with_name(path.name + ".tmp")
    with suppress(FileNotFoundError):  # left half made, or with two names in a copy
        filesystem.remove(temp)
    with closing(filesystem.open(temp, create=True)) as file:
        witness = filesystem.witness(temp)
        file.write_at(checked_json(_fields(kept, witness), _VERSION), 0)
        file.sync()
    filesystem.rename(temp, path)
    filesystem.sync_directory(directory)
    return CopyVerdict.UNKNOWN if witness is None else CopyVerdict.ORIGINAL


def new_directory_id() -> UUID:
    """A random one."""
    return UUID(bytes=secrets.token_bytes(16))


def _fields(kept: DirectoryId, witness: FileWitness | None) -> dict[str, Any]:
    stored = None
    if witness is not None:
        stored = {"inode": witness.inode, "generation": witness.generation, "birth_ns": witness.birth_ns}
    return {
        "directory_id": kept.directory_id.hex,
        "copy_of": [one.hex for one in kept.copy_of],
        "is_settled": kept.is_settled,
        "witness": stored,
    }


def _witness_of(fields: dict[str, int | None] | None) -> FileWitness | None:
    if fields is None:
        return None
    inode = fields["inode"]
    if not isinstance(inode, int):
        raise TypeError(f"its inode is {inode!r}")
    return FileWitness(inode, fields["generation"], fields["birth_ns"])
