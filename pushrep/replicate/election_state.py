"""A member's election state, on disk before its answers show it: the newest grant, and the newest leader epoch taken.

    <data>/replica-epoch.json                    {"version": 1, "replica_epoch": n, "crc32c": c}
    <data>/<outbox id>/promises.json             {"version": 1, "outbox_id": u, "member": i, "leader_epoch": n,
                                                  "grant": {...} | null, "number": n,
                                                  "ungranted": {log: [start, epoch, end]},
                                                  "unfilled": {log: offset}, "is_unfilled": bool,
                                                  "log_generation": g, "rival": {...} | null,
                                                  "is_handed_over": bool, "crc32c": c}
    <data>/<outbox id>/generation-<g>.stale/      logs of an older generation, whole, with promises and checkpoints

A member is a node's copy of an outbox or the directory that a service leads from: both have the same file, so either
can become the other.

A grant of a higher generation is stored first, then the logs are moved aside, then `log_generation` is raised. Until
then the next opening of the directory has to finish the move before it reads or writes anything. crc32c covers the
other fields as compact JSON with sorted keys. Both files are replaced atomically. If a file is damaged, the node
refuses that outbox: a forgotten promise loses records.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from pushrep.election.epochs import EpochEnd, Unfenced
from pushrep.election.errors import label
from pushrep.election.grants import Destination, Grant, Hold, Member, SettledList, Takeover, may_have_lost
from pushrep.env import Clock, Filesystem
from pushrep.env.checked_json import read_checked_json, write_checked_json
from pushrep.env.filesystem import read_whole, write_atomic
from pushrep.errors import CorruptFile
from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import CheckpointFile, is_log_name
from pushrep.log.directory_id import read_directory_id
from pushrep.log.writer import STALE_SUFFIX

_LOG = logging.getLogger("pushrep.node")
PROMISES_NAME = "promises.json"
REPLICA_EPOCH_NAME = "replica-epoch.json"
NODE_FILE_VERSION = 1
_WAY_ON = "restore it, or remove this replica's directory and let it be filled again"
_FILE_BYTES_MAX = 64 << 20  # an entry for every partition that appended without a grant
NO_MEMBER = -1
_Value = TypeVar("_Value")
_GRANT_FIELDS = frozenset(field.name for field in fields(Grant) if field.init)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectionState:
    """Of one outbox. leader_epoch: the newest one that any of its logs here has taken; -1 for none.

    member: which one this is; NO_MEMBER before the first grant. number: the newest epoch of its own,
    granted or not. unfenced: by log, the records appended without a grant. unfilled: by log, the end of records that it
    lost; until it ends there again this member does not count. is_unfilled: it stored its first grant without an
    earlier one, so its disk may have been lost: until a leader has given it everything it does not count.
    log_generation: of the logs in the directory; if it is below the grant's, they have to be moved aside. rival: an
    offered grant that was forced independently of the stored one: a leader by either gets the other in its answer, and
    stops. is_handed_over: this member led by the grant, and handed the lead over to another.
    """

    leader_epoch: int = -1
    grant: Grant | None = None
    member: int = NO_MEMBER
    number: int = -1
    unfenced: Mapping[str, Unfenced] = field(default_factory=dict)
    unfilled: Mapping[str, int] = field(default_factory=dict)
    is_unfilled: bool = False
    log_generation: int = 0
    rival: Grant | None = None
    is_handed_over: bool = False

    @property
    def newest_epoch(self) -> int:
        """Requests of older epochs are refused. Epochs taken without a grant fence nobody."""
        return max(self.leader_epoch, self.grant.epoch if self.grant is not None else -1)

    @property
    def generation(self) -> int:
        """The newest grant's generation; 0 without a grant."""
        return 0 if self.grant is None else self.grant.generation

    @property
    def identities(self) -> frozenset[str]:
        """The identities that the newest grant names: they may lead, too."""
        members = () if self.grant is None else (*self.grant.members, *self.grant.previous_members)
        return frozenset(one.identity for one in members if one.identity)

    @property
    def are_logs_outdated(self) -> bool:
        """Whether the logs are of an older generation than the grant, so that they have to be moved aside."""
        return self.log_generation != self.generation

    def with_grant(self, grant: Grant, directory_id: UUID | None, *, is_first: bool = False) -> "ElectionState":
        """The state of that directory with another's grant that `judge_grant` accepted; a new generation ends what was
        promised for the old logs. is_first: as `may_have_lost`'s.
        """
        if grant.generation == self.generation:
            newest_epoch = max(self.leader_epoch, grant.epoch)
            is_unfilled = self.is_unfilled or may_have_lost(self.grant, grant, directory_id, is_first=is_first)
            return replace(self, grant=grant, leader_epoch=newest_epoch, is_unfilled=is_unfilled, is_handed_over=False)
        began = replace(self, unfenced={}, unfilled={}, is_unfilled=True, rival=None, is_handed_over=False)
        return replace(began, grant=grant, leader_epoch=grant.epoch)

    @property
    def is_led_here(self) -> bool:
        """Whether the newest grant names this member: then its service opens the directory, and a node does not."""
        return self.grant is not None and self.grant.leader == self.member


class ElectionStateStore:
    """The election state of one directory. Thread-safe. Raises CorruptFile, OSError."""

    def __init__(self, directory: Path, outbox_id: UUID, filesystem: Filesystem) -> None:
        self.directory, self.outbox_id, self.filesystem = directory, outbox_id, filesystem
        self.lock = threading.RLock()
        """Held from reading to storing, so that one grant at a time is judged."""
        self.kept = read_election_state(directory, outbox_id, filesystem)
        """The state as on disk."""

    @property
    def directory_id(self) -> UUID | None:
        """The directory's id; None if it has none. Raises OSError."""
        found, _ = read_directory_id(self.directory, self.filesystem)
        return None if found is None else found.directory_id

    def keep(self, state: ElectionState) -> None:
        """Store the state; on disk when this returns. If it raises, the old one holds."""
        with self.lock:
            if state != self.kept:
                self.filesystem.make_directory(self.directory)
                if state.are_logs_outdated and not self.kept.are_logs_outdated:  # the state of these logs
                    aside = self._aside(state)
                    self.filesystem.make_directory(aside)
                    write_election_state(aside, self.outbox_id, self.kept, self.filesystem)
                write_election_state(self.directory, self.outbox_id, state, self.filesystem)
                self.kept = state

    def note_lost(self, log: str, end_offset: int) -> None:
        """Store that `log` lost records up to `end_offset`: this member does not count before it has them again. Raises
        OSError.
        """
        with self.lock:
            kept = self.kept.unfilled
            self.keep(replace(self.kept, unfilled={**kept, log: max(end_offset, kept.get(log, 0))}))

    def note_refilled(self, log: str) -> None:
        """`log` has its lost records again. Raises OSError."""
        with self.lock:
            self.keep(replace(self.kept, unfilled={name: to for name, to in self.kept.unfilled.items() if name != log}))

    def forget_unfenced(self, log: str) -> None:
        """The unfenced records of `log` were cut off. Raises OSError."""
        with self.lock:
            left = {name: mark for name, mark in self.kept.unfenced.items() if name != log}
            self.keep(replace(self.kept, unfenced=left))

    def store_epoch(self, leader_epoch: int) -> None:
        """Refuse older leaders from now on, durably. Raises OSError."""
        with self.lock:
            if leader_epoch > self.kept.leader_epoch:
                self.keep(replace(self.kept, leader_epoch=leader_epoch))

    def set_logs_aside(self, held: LogDirectory) -> None:
        """If a grant of a higher generation was stored, move the older logs aside, with their checkpoints.

        held: the directory, none of its logs open. Raises OSError; the next call goes on from there.
        """
        with self.lock:
            if not self.kept.are_logs_outdated:
                return
            aside, filesystem = self._aside(self.kept), self.filesystem
            filesystem.make_directory(aside)
            names = [name for name in filesystem.list(self.directory) if is_log_name(name)]
            if names:
                held.sync_checkpoints()
            for checkpoint in CheckpointFile:
                data = read_whole(filesystem, self.directory / checkpoint.value, _FILE_BYTES_MAX) if names else None
                if data is not None and not filesystem.exists(aside / checkpoint.value):
                    write_atomic(filesystem, aside / checkpoint.value, [data])
            for name in names:
                filesystem.rename(self.directory / name, aside / name)
            filesystem.sync_directory(aside)
            filesystem.sync_directory(self.directory)
            for name in names:
                held.forget_missing(name)
            held.forget_removed()
            self.keep(replace(self.kept, log_generation=self.kept.generation))
        if names:
            _LOG.warning(
                "%s: a loss was accepted while this member was away (generation %s): what it held is in %s, and it is "
                "given everything",
                self.directory,
                label(self.kept.generation),
                aside,
            )

    def _aside(self, state: ElectionState) -> Path:
        return self.directory / f"generation-{label(state.log_generation)}{STALE_SUFFIX}"

    def read_again(self) -> None:
        """Read the file again, which another process may have written."""
        with self.lock:
            self.kept = read_election_state(self.directory, self.outbox_id, self.filesystem)


def read_election_state(directory: Path, outbox_id: UUID, filesystem: Filesystem) -> ElectionState:
    """The stored election state of the outbox in `directory`. Raises CorruptFile, OSError."""
    found = find_election_state(directory, filesystem)
    if found is None:
        return ElectionState()
    if found[0] != outbox_id:
        raise CorruptFile(directory / PROMISES_NAME, f"it belongs to outbox {found[0]}; {_WAY_ON}")
    return found[1]


def find_election_state(directory: Path, filesystem: Filesystem) -> tuple[UUID, ElectionState] | None:
    """(outbox id, election state) of `directory`; None if it is no member's. Raises as above."""
    return read_node_file(directory / PROMISES_NAME, filesystem, _state_of)


def _state_of(fields: Mapping[str, Any]) -> tuple[UUID, ElectionState]:
    return UUID(fields["outbox_id"]), ElectionState(
        leader_epoch=int(fields["leader_epoch"]),
        grant=_grant_of(fields["grant"]),
        member=int(fields["member"]),
        number=int(fields["number"]),
        unfenced={
            str(log): Unfenced(int(start), EpochEnd(int(epoch), int(end)))
            for log, (start, epoch, end) in fields["ungranted"].items()
        },
        unfilled={str(log): int(end) for log, end in fields["unfilled"].items()},
        is_unfilled=bool(fields["is_unfilled"]),
        log_generation=int(fields["log_generation"]),
        rival=_grant_of(fields["rival"]),
        is_handed_over=bool(fields["is_handed_over"]),
    )


def write_election_state(directory: Path, outbox_id: UUID, state: ElectionState, filesystem: Filesystem) -> None:
    """Write the file; on disk when this returns. Raises OSError; then the old one holds."""
    fields: dict[str, Any] = {
        "outbox_id": str(outbox_id),
        "member": state.member,
        "leader_epoch": state.leader_epoch,
        "grant": _grant_fields(state.grant),
        "number": state.number,
        "ungranted": {log: [start, *granted] for log, (start, granted) in state.unfenced.items()},
        "unfilled": dict(state.unfilled),
        "is_unfilled": state.is_unfilled,
        "log_generation": state.log_generation,
        "rival": _grant_fields(state.rival),
        "is_handed_over": state.is_handed_over,
    }
    write_checked_json(filesystem, directory / PROMISES_NAME, fields, NODE_FILE_VERSION)


def raise_replica_epoch(data: Path, filesystem: Filesystem, clock: Clock) -> int:
    """Store and return the replica epoch of this start of the node, one more than the last.

    Raises CorruptFile, OSError. The first one is the wall clock's milliseconds: after a lost disk it must not be
    below the one that a leader knows, which would treat the node's sessions as old ones and never fill it again.
    """
    path = data / REPLICA_EPOCH_NAME
    last = read_node_file(path, filesystem, lambda fields: int(fields["replica_epoch"]))
    epoch = max(1, clock.wall_ms()) if last is None else last + 1
    write_checked_json(filesystem, path, {"replica_epoch": epoch}, NODE_FILE_VERSION)
    return epoch


def read_node_file(path: Path, filesystem: Filesystem, value_of: Callable[[dict[str, Any]], _Value]) -> _Value | None:
    """The value of one of a node's small files; None without one. Raises CorruptFile, OSError."""
    return read_checked_json(filesystem, path, _FILE_BYTES_MAX, NODE_FILE_VERSION, value_of, _WAY_ON)


def _grant_fields(grant: Grant | None) -> dict[str, Any] | None:
    if grant is None:
        return None
    fields = {name: value for name, value in asdict(grant).items() if name in _GRANT_FIELDS}
    fields["outbox_id"], fields["topic_id"] = str(grant.outbox_id), str(grant.topic_id)
    fields["destinations"] = [[str(one.topic_id), one.partitions] for one in grant.destinations]
    fields["lists"] = [sorted(one.indexes) for one in grant.lists]
    for name in ("members", "previous_members"):
        fields[name] = [
            [one.index, one.address, None if one.directory_id is None else one.directory_id.hex, one.identity]
            for one in getattr(grant, name)
        ]
    return fields


def _grant_of(fields: Mapping[str, Any] | None) -> Grant | None:
    if fields is None:
        return None
    read = dict(fields)
    read["outbox_id"], read["topic_id"] = UUID(read["outbox_id"]), UUID(read["topic_id"])
    read["destinations"] = tuple(Destination(UUID(topic_id), int(count)) for topic_id, count in read["destinations"])
    for name in ("members", "previous_members"):
        read[name] = tuple(
            Member(int(index), str(address), None if shown is None else UUID(hex=shown), str(identity))
            for index, address, shown, identity in read[name]
        )
    read["lists"] = tuple(SettledList(members=tuple(Member(int(index)) for index in one)) for one in read["lists"])
    read["hold"] = None if read["hold"] is None else Hold(**read["hold"])
    read["takeover"] = None if read["takeover"] is None else Takeover(**read["takeover"])
    return Grant(**read)
