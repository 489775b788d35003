"""A directory that a service led from goes under a node, and follows who leads now.

    <outbox directory> ─ lock ─ rename ─▶ <data>/<outbox id>

Its files stay as they are: promises.json, which is the same for a leader and a replica, says which member it is.
"""

import errno
import os
from pathlib import Path

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Filesystem
from pushrep.log.directory import LogDirectory
from pushrep.log.errors import LogLocked
from pushrep.outbox.errors import CantAdopt
from pushrep.outbox.identity import read_identity
from pushrep.replicate.election_state import find_election_state


def adopt(data: Path | str, directory: Path | str, *, filesystem: Filesystem = REAL_FILESYSTEM) -> Path:
    """Move the outbox in `directory` under the node whose directory is `data`, running or not; where it lies then.

    Raises CantAdopt (with what to do; nothing was changed), CorruptNodeFile, CorruptOutboxFile, OSError.
    """
    data, directory = Path(data), Path(directory)
    identity = read_identity(filesystem, directory)
    if identity is None:
        raise CantAdopt(directory, "there is no outbox in it")
    if find_election_state(directory, filesystem) is None:
        raise CantAdopt(directory, "it never had replicas: nobody else leads it")
    target = data / identity.outbox_id
    if filesystem.exists(target):
        raise CantAdopt(
            directory, f"{target} is there already: the node began a copy. Stop it, and remove that one or this one"
        )
    try:
        LogDirectory.acquire(directory, filesystem, SYSTEM_CLOCK).release()
    except LogLocked as error:
        raise CantAdopt(directory, f"process {error.pid} has it open: end its service") from error
    filesystem.make_directory(data)
    try:
        filesystem.rename(Path(os.path.realpath(directory)), target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise CantAdopt(directory, f"{data} is on another disk: move the whole directory to {target}") from error
    for changed in (data, Path(os.path.realpath(directory)).parent):
        filesystem.sync_directory(changed)
    return target
