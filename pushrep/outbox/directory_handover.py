"""Directory handover: from a node to a promotion, from a service to a node, and after a directory was moved.

A promotion asks the node that has a replica's directory open to close it:

    promotion ─ connect to <data>/control.sock ─────▶ node      <data> is the directory above the replica's
              ─ hand-over {"outbox_id": ...} ───────▶ closes those logs cleanly
              ◀─ [last contact, wall ms; its age, ms] ─
                ... changes the directory ...
              ─ hangs up, or dies ──────────────────▶ opens it again; promises.json names the leader

The directory stays closed while the connection is open, so the node opens it again after a promotion that was killed.
The socket has mode 0600: a user that may use it may change the files, too. The node's other calls (control.py):

    status         the node's part of `pushrep status`
    stop-replay    {"session_id"}                  ends a replay session
    contact        {"outbox_id", "state", "why", "is_fit"}   of a service that stands by (the nil id if the outbox is
                                                   not made yet), and whether it could lead: [how many ms ago the leader
                                                   was in contact, null if none was; whether it handed the lead over to
                                                   this member]

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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK
from pushrep.errors import BadArgument
from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import DirectoryLock
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
from pushrep.outbox.control import CallRefused, Calls, ControlPeer, ControlServer, ask_over, connect_to
from pushrep.outbox.errors import CommandRefused
from pushrep.outbox.identity import read_identity
from pushrep.replay.catalogue import CopyOrigin
from pushrep.replicate.election_state import find_election_state
from pushrep.replicate.node_store import LastContact, StandbyContact
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.settings import whole_number

_LOG = logging.getLogger("pushrep.node")
_TIMEOUT_S = 30.0
NEVER = -1
NOT_MADE = UUID(int=0)
"""The id that a service sends while its outbox is not made yet."""


class HandoverSocket(ControlServer):
    """Answers promotions and commands on the control socket of a running node, until `close`. A context manager.

    While a promotion has an outbox's directory, the node keeps it closed. Raises OSError if it can't listen.
    """

    def __init__(self, node: ReplicaNode) -> None:
        self._node = node
        super().__init__(node.directory, self._node_calls)

    def _node_calls(self, peer: ControlPeer) -> Calls:
        return {
            "status": lambda _: self._node.status().as_dict(),
            "contact": self._contact,
            "stop-replay": partial(self._stop, peer),
            "hand-over": partial(self._hand_over, peer),
            "replicate": self._replicate,
            "copy": lambda given: self._node.copies.state(_recording_id(given))._asdict(),
            "end-copy": lambda given: self._node.copies.end(_recording_id(given))._asdict(),
        }

    def _replicate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        given = dict(arguments)
        into = given.pop("into", None)
        return self._node.copies.replicate(CopyOrigin(**given), into=into)._asdict()

    def _hand_over(self, peer: ControlPeer, arguments: Mapping[str, Any]) -> LastContact:
        outbox_id = _outbox_id(arguments)
        contact = peer.held.enter_context(self._node.hand_over(outbox_id))
        _LOG.warning("outbox %s is handed over for a promotion", outbox_id)
        peer.connection.settimeout(None)
        return contact

    def _stop(self, peer: ControlPeer, arguments: Mapping[str, Any]) -> dict[str, bool]:
        session_id = whole_number("session_id", arguments.get("session_id"), 0, (1 << 63) - 1)
        size = struct.calcsize("3i")
        pid, uid, _ = struct.unpack("3i", peer.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return {"stopped": self._node.stop_replay(session_id, f"process {pid} of user {uid}")}

    def _contact(self, arguments: Mapping[str, Any]) -> StandbyContact:
        outbox_id, state, why = _outbox_id(arguments), arguments.get("state"), arguments.get("why")
        if isinstance(state, str) and isinstance(why, str):
            self._node.note_standby(outbox_id, state, why)
        if outbox_id == NOT_MADE:
            return StandbyContact(None, is_successor=False)
        kept = self._node.store.look_up(outbox_id)
        if arguments.get("is_fit"):
            kept.note_standby()
        return kept.standby_contact


def _recording_id(arguments: Mapping[str, Any]) -> int:
    return whole_number("recording_id", arguments.get("recording_id"))


def _outbox_id(arguments: Mapping[str, Any]) -> UUID:
    try:
        return UUID(str(arguments.get("outbox_id")))
    except ValueError as error:
        raise BadArgument("outbox_id", "give the id of an outbox") from error


@contextmanager
def handed_over(directory: Path, outbox_id: UUID) -> Iterator[LastContact]:
    """In this block the node of a replica's directory keeps it closed. Yields the node's last contact with a leader.

    If no node runs, the contact is empty. Raises OSError if a node runs and does not hand the directory over.
    """
    data = directory.resolve().parent
    with ExitStack() as held:
        try:
            connection = held.enter_context(connect_to(data, _TIMEOUT_S))
            contact = LastContact(*ask_over(connection, "hand-over", {"outbox_id": str(outbox_id)}))
        except (FileNotFoundError, ConnectionRefusedError):
            contact = LastContact()
        except CallRefused as error:
            raise ConnectionResetError(f"the node in {data} does not hand it over: {error}") from error
        yield contact


def adopt(data: Path | str, directory: Path | str) -> Path:
    """Move the outbox in `directory` into `data`, the directory of a node, which may run. Returns the new path.

    Raises CommandRefused (its text says what to do; nothing was changed), CorruptFile, OSError.
    """
    data, directory = Path(data), Path(directory)
    identity = read_identity(REAL_FILESYSTEM, directory)
    if identity is None:
        raise _cant_adopt(directory, "there is no outbox in it")
    if find_election_state(directory, REAL_FILESYSTEM) is None:
        raise _cant_adopt(directory, "it never had replicas, so no other member leads it")
    target = data / identity.outbox_id
    if REAL_FILESYSTEM.exists(target):
        raise _cant_adopt(
            directory, f"{target} is there already: the node began a copy. Stop it, and remove that one or this one"
        )
    try:
        LogDirectory.acquire(directory, REAL_FILESYSTEM, SYSTEM_CLOCK).release()
    except LogLocked as error:
        raise _cant_adopt(directory, f"process {error.pid} has it open: end its service") from error
    REAL_FILESYSTEM.make_directory(data)
    try:
        REAL_FILESYSTEM.rename(Path(os.path.realpath(directory)), target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise _cant_adopt(directory, f"{data} is on another disk: move the whole directory to {target}") from error
    for changed in (data, Path(os.path.realpath(directory)).parent):
        REAL_FILESYSTEM.sync_directory(changed)
    return target


def _cant_adopt(directory: Path, why: str) -> CommandRefused:
    return CommandRefused(f"{directory} can't be adopted: {why}")


def moved(directory: Path | str) -> DirectoryId:
    """Give a directory the id of the directory that it was copied from: an outbox's, or a member's in a node.

    For an operator who knows that the whole directory was moved and the original is gone. Returns the id. Raises
    CommandRefused if it is no copy, or if the original is in the same parent directory (nothing was changed), LogLocked
    while a service or a tool has the directory open, OSError.
    """
    directory = Path(directory)
    if not REAL_FILESYSTEM.exists(directory):
        raise CommandRefused(f"{directory}: there is no such directory")
    with closing(DirectoryLock(directory, REAL_FILESYSTEM)):
        found, verdict = read_directory_id(directory, REAL_FILESYSTEM)
        if found is None:
            raise CommandRefused(f"{directory}: it has no id: no outbox or node has opened it")
        if verdict is CopyVerdict.COPY and found.is_settled:  # not opened since it was copied
            new = settled_id(None) if found.is_unknown else found
        elif found.is_copy:
            new = moved_id(found)
        else:
            raise CommandRefused(f"{directory}: it is the original")
        if (original := _beside(directory, new)) is not None:
            raise CommandRefused(
                f"{directory} is a copy of {original}, which is still there: two directories would write under one "
                f"PID. If it was moved, whole, remove {original} first; else open the copy as it is: it gets a PID of "
                "its own"
            )
        write_directory_id(directory, REAL_FILESYSTEM, new)
        return new


def _beside(directory: Path, wanted: DirectoryId) -> Path | None:
    """The directory with that id in the same parent directory; None: there is none."""
    home = Path(os.path.realpath(directory))
    for name in REAL_FILESYSTEM.list(home.parent):
        if name == home.name or not REAL_FILESYSTEM.exists(home.parent / name / DIRECTORY_ID_NAME):
            continue
        found, verdict = read_directory_id(home.parent / name, REAL_FILESYSTEM)
        if found is not None and found.directory_id == wanted.directory_id and verdict is not CopyVerdict.COPY:
            return home.parent / name
    return None
