"""Directory handover: from a node to a promotion, from a service to a node, and after a directory was moved.

A promotion asks the node that has a replica's directory open to close it:

    promotion ─ connect to <data>/control.sock ─▶ node          <data> is the directory above the replica's
              ─ <outbox id> ─────────────────────▶ closes those logs cleanly
              ◀─ <last contact, wall ms> <its age, ms; -1: none> ─
                ... changes the directory ...
              ─ hangs up, or dies ──────────────▶ opens it again; promises.json names the leader

Question and answer are a line each. The directory stays closed while the connection is open, so the node
opens it again after a promotion that was killed. The socket has mode 0600: a user that may use it may change the files,
too.

A line that is a JSON object is a question as in control.py: `status` returns the node's part of `pushrep status`;
`stop-replay` ends a replay session; `contact` ({"outbox_id", "state", "why"} of a service that stands by; the nil id if
the outbox is not made yet) returns how many ms ago the last contact of a leader was, null if there was none.

`adopt` renames <outbox directory>, which a service led from, to <data>/<outbox id>: the node follows the current leader
with it. Its files do not change: promises.json has the same form for leaders and replicas, and contains the member's
index.

A directory that was moved as a whole looks like a copy to pushrep/log/directory_id.py. If the original is gone, `moved`
gives the directory its original id back.
"""

import errno
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from filtering.closing import ClosedAtExit
from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Filesystem
from pushrep.errors import BadArgument, PushrepError
from pushrep.log.directory import LogDirectory
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
from pushrep.log.errors import LogLocked
from pushrep.outbox.control import Calls, answer_line, connect_to, listen_in, remove_socket
from pushrep.outbox.errors import CommandRefused
from pushrep.outbox.identity import read_identity
from pushrep.replicate.election_state import find_election_state
from pushrep.replicate.node_store import LastContact
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.settings import whole_number

_LOG = logging.getLogger("pushrep.node")
_TIMEOUT_S = 30.0
_LINE_BYTES = 4096
NEVER = -1
NOT_MADE = UUID(int=0)
"""The id that a service sends while its outbox is not made yet."""


class HandoverSocket(ClosedAtExit):
    """Answers promotions and commands on the control socket of a running node, until `close`. A context manager.

    While a promotion has an outbox's directory, the node keeps it closed. Raises OSError if it can't listen.
    """

    def __init__(self, node: ReplicaNode) -> None:
        self._node = node
        self._listener = listen_in(node.directory.resolve())
        self._open: set[socket.socket] = set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="pushrep-node-handover", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering, and end open connections."""
        self._is_closed = True
        remove_socket(self._node.directory.resolve())
        for sock in (self._listener, *tuple(self._open)):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closed:
                    _LOG.error("the control socket of the node in %s has failed: %s", self._node.directory, error)
                return
            self._open.add(connection)
            threading.Thread(
                target=self._serve, args=(connection,), name="pushrep-node-handover-call", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_TIMEOUT_S)
            asked = _line(connection)
            if asked.startswith("{"):
                calls: Calls = {
                    "status": lambda _: self._node.status().as_dict(),
                    "contact": self._contact,
                    "stop-replay": partial(self._stop, connection),
                }
                connection.sendall(answer_line(asked.encode(), calls))
                return
            outbox_id = UUID(asked)
            with self._node.hand_over(outbox_id) as contact:
                _LOG.warning("outbox %s is handed over for a promotion", outbox_id)
                age_ms = NEVER if contact.age_ms is None else contact.age_ms
                connection.sendall(f"{contact.wall_ms} {age_ms}\n".encode())
                connection.settimeout(None)
                connection.recv(1)  # returns when the promotion hangs up
        except (OSError, ValueError, PushrepError) as error:
            _LOG.warning("a request on the control socket failed: %s", error)
        finally:
            self._open.discard(connection)
            connection.close()

    def _stop(self, connection: socket.socket, arguments: Mapping[str, Any]) -> dict[str, bool]:
        session_id = whole_number("session_id", arguments.get("session_id"), 0, (1 << 63) - 1)
        size = struct.calcsize("3i")
        pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return {"stopped": self._node.stop_replay(session_id, f"process {pid} of user {uid}")}

    def _contact(self, arguments: Mapping[str, Any]) -> int | None:
        try:
            outbox_id = UUID(str(arguments.get("outbox_id")))
        except ValueError as error:
            raise BadArgument("outbox_id", "give the id of an outbox") from error
        state, why = arguments.get("state"), arguments.get("why")
        if isinstance(state, str) and isinstance(why, str):
            self._node.note_standby(outbox_id, state, why)
        return None if outbox_id == NOT_MADE else self._node.store.look_up(outbox_id).contact_age_ms


@contextmanager
def handed_over(directory: Path, outbox_id: UUID) -> Iterator[LastContact]:
    """In this block the node of a replica's directory keeps it closed. Yields the node's last contact with a leader.

    If no node runs, the contact is empty. Raises OSError if a node runs and does not hand the directory over.
    """
    try:
        connection = connect_to(directory.resolve().parent, _TIMEOUT_S)
    except (FileNotFoundError, ConnectionRefusedError):
        yield LastContact()
        return
    with connection:
        connection.sendall(f"{outbox_id}\n".encode())
        answer = _line(connection)
        if not answer:
            raise ConnectionResetError(f"the node in {directory.resolve().parent} does not hand it over: see its log")
        wall_ms, age_ms = [int(number) for number in answer.split()]
        yield LastContact(wall_ms, None if age_ms == NEVER else age_ms)


def _line(connection: socket.socket) -> str:
    data = b""
    while not data.endswith(b"\n") and len(data) < _LINE_BYTES:
        more = connection.recv(_LINE_BYTES)
        if not more:
            break
        data += more
    return data.decode("ascii", "replace").strip()


def adopt(data: Path | str, directory: Path | str, *, filesystem: Filesystem = REAL_FILESYSTEM) -> Path:
    """Move the outbox in `directory` into `data`, the directory of a node, which may run. Returns the new path.

    Raises CommandRefused (its text says what to do; nothing was changed), CorruptNodeFile, CorruptOutboxFile, OSError.
    """
    data, directory = Path(data), Path(directory)
    identity = read_identity(filesystem, directory)
    if identity is None:
        raise _cant_adopt(directory, "there is no outbox in it")
    if find_election_state(directory, filesystem) is None:
        raise _cant_adopt(directory, "it never had replicas, so no other member leads it")
    target = data / identity.outbox_id
    if filesystem.exists(target):
        raise _cant_adopt(
            directory, f"{target} is there already: the node began a copy. Stop it, and remove that one or this one"
        )
    try:
        LogDirectory.acquire(directory, filesystem, SYSTEM_CLOCK).release()
    except LogLocked as error:
        raise _cant_adopt(directory, f"process {error.pid} has it open: end its service") from error
    filesystem.make_directory(data)
    try:
        filesystem.rename(Path(os.path.realpath(directory)), target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise _cant_adopt(directory, f"{data} is on another disk: move the whole directory to {target}") from error
    for changed in (data, Path(os.path.realpath(directory)).parent):
        filesystem.sync_directory(changed)
    return target


def _cant_adopt(directory: Path, why: str) -> CommandRefused:
    return CommandRefused(f"{directory} can't be adopted: {why}")


def moved(directory: Path | str, *, filesystem: Filesystem = REAL_FILESYSTEM) -> DirectoryId:
    """Give a directory the id of the directory that it was copied from: an outbox's, or a member's in a node.

    For an operator who knows that the whole directory was moved and the original is gone. Returns the id. Raises
    CommandRefused if it is no copy, or if the original is in the same parent directory (nothing was changed), LogLocked
    while a service or a tool has the directory open, OSError.
    """
    directory = Path(directory)
    if not filesystem.exists(directory):
        raise CommandRefused(f"{directory}: there is no such directory")
    lock = take_lock(directory, filesystem)
    try:
        found, verdict = read_directory_id(directory, filesystem)
        if found is None:
            raise CommandRefused(f"{directory}: it has no id: no version that gives directories an id has opened it")
        if verdict is CopyVerdict.COPY and found.is_settled:  # not opened since it was copied
            new = settled_id(None) if found.is_unknown else found
        elif found.is_copy:
            new = moved_id(found)
        else:
            raise CommandRefused(f"{directory}: it is the original")
        if (original := _beside(directory, new, filesystem)) is not None:
            raise CommandRefused(
                f"{directory} is a copy of {original}, which is still there: two directories would write under one "
                f"PID. If it was moved, whole, remove {original} first; else open the copy as it is: it gets a PID of "
                "its own"
            )
        write_directory_id(directory, filesystem, new)
        return new
    finally:
        lock.close()


def _beside(directory: Path, wanted: DirectoryId, filesystem: Filesystem) -> Path | None:
    """The directory with that id in the same parent directory; None: there is none."""
    home = Path(os.path.realpath(directory))
    for name in filesystem.list(home.parent):
        if name == home.name or not filesystem.exists(home.parent / name / DIRECTORY_ID_NAME):
            continue
        found, verdict = read_directory_id(home.parent / name, filesystem)
        if found is not None and found.directory_id == wanted.directory_id and verdict is not CopyVerdict.COPY:
            return home.parent / name
    return None
