"""A directory was moved, whole, and its original is gone: it is no copy any more but the original itself."""

import os
from pathlib import Path

from pushrep.env import REAL_FILESYSTEM, Filesystem
from pushrep.log.directory_files import take_lock
from pushrep.log.directory_id import (
    DIRECTORY_ID_NAME,
    CopyVerdict,
    DirectoryId,
    moved_id,
    read_directory_id,
    settled_id,
    write_directory_id,
)
from pushrep.outbox.errors import NotACopy, OriginalStands


def moved(directory: Path | str, *, filesystem: Filesystem = REAL_FILESYSTEM) -> DirectoryId:
    """Give the outbox's directory, or that of a member below a node, the id of the one that it was copied from.

    For an operator who knows that the original is gone, and that this is all of it. The id that it has now. Raises
    NotACopy, OriginalStands where that is beside it (nothing was changed), LogLocked while a service or a tool has it
    open, OSError.
    """
    directory = Path(directory)
    if not filesystem.exists(directory):
        raise NotACopy(directory, "there is no such directory")
    lock = take_lock(directory, filesystem)
    try:
        found, verdict = read_directory_id(directory, filesystem)
        if found is None:
            raise NotACopy(directory, "it has no id: no outbox was opened in it since directories have one")
        if verdict is CopyVerdict.COPY and found.is_settled:  # nobody opened it since it was copied
            new = settled_id(None) if found.is_unknown else found
        elif found.is_copy:
            new = moved_id(found)
        else:
            raise NotACopy(directory, "it is the original")
        if (original := _beside(directory, new, filesystem)) is not None:
            raise OriginalStands(directory, original)
        write_directory_id(directory, filesystem, new)
        return new
    finally:
        lock.close()


def _beside(directory: Path, wanted: DirectoryId, filesystem: Filesystem) -> Path | None:
    """The directory of that id among the neighbours; where else it may be nobody knows."""
    home = Path(os.path.realpath(directory))
    for name in filesystem.list(home.parent):
        if name == home.name or not filesystem.exists(home.parent / name / DIRECTORY_ID_NAME):
            continue
        found, verdict = read_directory_id(home.parent / name, filesystem)
        if found is not None and found.directory_id == wanted.directory_id and verdict is not CopyVerdict.COPY:
            return home.parent / name
    return None
