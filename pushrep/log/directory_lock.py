"""The lock of a directory of logs: one writer, by flock on `.lock`, which holds its pid and is never removed."""

import errno
from pathlib import Path

from pushrep.env import File, Filesystem, LockHeld
from pushrep.log.errors import LogLocked, NotALogDirectory

LOCK_NAME = ".lock"
# Kafka locks a file of this name by a record lock, which flock does not see: a broker must not run on this directory.


def take_lock(path: Path, filesystem: Filesystem) -> File:
    """The lock of the directory at `path`, which is made if it is missing. Raises LogLocked, NotALogDirectory."""
    try:
        filesystem.make_directory(path)
        return filesystem.lock(path / LOCK_NAME)
    except LockHeld as error:
        raise LogLocked(path, error.pid) from error
    except (FileExistsError, NotADirectoryError) as error:
        raise NotALogDirectory(path, "it is a file, or one of its parents is") from error
    except PermissionError as error:
        raise NotALogDirectory(path, "it may not be written by this user") from error
    except OSError as error:
        if error.errno not in {errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG}:
            raise  # the disk's or the process's trouble, not the path's
        named = f"{error.filename}: " if error.filename == str(path / LOCK_NAME) else ""
        raise NotALogDirectory(path, f"{named}{error.strerror}") from error
