"""Where the control socket lies: <directory>/control.sock, mode 0600.

The path of a socket has 107 bytes at most, and an outbox may lie deeper. So on Linux both sides name it from an open
descriptor of the directory, /proc/self/fd/<n>/control.sock, which is short wherever that is. Elsewhere the path is
taken as it is, and one that is too long is an error that says so.
"""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SOCKET_NAME = "control.sock"
_OWNER_ONLY = 0o600
_DESCRIPTORS = Path("/proc/self/fd")
_BACKLOG = 16


def listen(directory: Path) -> socket.socket:
    """A socket that listens there; what an earlier process left is replaced. Raises OSError.

    The caller holds the lock of the directory: nobody else listens.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK((directory / SOCKET_NAME).lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "there is something else of that name", str(directory / SOCKET_NAME))
        (directory / SOCKET_NAME).unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(directory) as path:
            listener.bind(path)
        (directory / SOCKET_NAME).chmod(_OWNER_ONLY)  # nobody connects before `listen`
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(directory: Path, timeout_s: float) -> socket.socket:
    """Raises OSError: FileNotFoundError or ConnectionRefusedError where nobody listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with _short(directory) as path:
            connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def remove(directory: Path) -> None:
    """Take the name away, if it is there."""
    with suppress(OSError):
        (directory / SOCKET_NAME).unlink()


@contextmanager
def _short(directory: Path) -> Iterator[str]:
    """The path of the socket in few bytes."""
    if not _DESCRIPTORS.is_dir():
        yield str(directory / SOCKET_NAME)
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield str(_DESCRIPTORS / str(descriptor) / SOCKET_NAME)
    finally:
        os.close(descriptor)
