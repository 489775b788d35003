"""What a member has promised, on disk before its answer says so: the newest grant, and the newest leader epoch taken.

    <data>/replica-epoch.json                    {"version": 1, "replica_epoch": n, "crc32c": c}
    <data>/<outbox id>/promises.json             {"version": 1, "outbox_id": u, "leader_epoch": n,
                                                  "grant": {...} | null, "crc32c": c}

crc32c is taken over the other fields as compact JSON with sorted keys. Both files are replaced whole and atomically. A
file that is there and can't be believed stops the node for that outbox: a promise that is forgotten loses records.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import google_crc32c

from pushrep.node.errors import CorruptNodeFile
from pushrep.replication.errors import BadGrant
from pushrep.replication.grants import Grant, Member
from pushrep.seams import Filesystem, read_whole, write_atomic

PROMISES_NAME = "promises.json"
REPLICA_EPOCH_NAME = "replica-epoch.json"
_VERSION = 1
_FILE_BYTES_MAX = 1 << 20


class Promises(NamedTuple):
    """Of one outbox. leader_epoch: the newest one that any of its logs here has taken; -1 for none."""

    leader_epoch: int = -1
    grant: Grant | None = None

    @property
    def newest_epoch(self) -> int:
        """Of everything older nothing is accepted."""
        return max(self.leader_epoch, self.grant.epoch if self.grant is not None else -1)


def read_promises(directory: Path, outbox_id: UUID, filesystem: Filesystem) -> Promises:
    """What was promised to the outbox that is kept in `directory`. Raises CorruptNodeFile, OSError."""
    path = directory / PROMISES_NAME
    fields = _read(path, filesystem)
    if fields is None:
        return Promises()
    try:
        if UUID(fields["outbox_id"]) != outbox_id:
            raise CorruptNodeFile(path, f"it belongs to outbox {fields['outbox_id']}")
        grant = fields["grant"]
        return Promises(int(fields["leader_epoch"]), _grant_of(grant) if grant is not None else None)
    except (KeyError, TypeError, ValueError, BadGrant) as error:
        raise CorruptNodeFile(path, f"a field is missing or impossible: {error!r}") from error


def write_promises(directory: Path, outbox_id: UUID, promises: Promises, filesystem: Filesystem) -> None:
    """On disk when this returns. Raises OSError; the old ones hold then."""
    grant = _grant_fields(promises.grant) if promises.grant is not None else None
    fields = {"outbox_id": str(outbox_id), "leader_epoch": promises.leader_epoch, "grant": grant}
    _write(directory / PROMISES_NAME, fields, filesystem)


def raise_replica_epoch(data: Path, filesystem: Filesystem) -> int:
    """The replica epoch of this start of the node: one more than the last, on disk. Raises CorruptNodeFile, OSError."""
    path = data / REPLICA_EPOCH_NAME
    fields = _read(path, filesystem)
    try:
        epoch = 1 if fields is None else int(fields["replica_epoch"]) + 1
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptNodeFile(path, f"its number is missing or none: {error!r}") from error
    _write(path, {"replica_epoch": epoch}, filesystem)
    return epoch


def _read(path: Path, filesystem: Filesystem) -> dict[str, Any] | None:
    data = read_whole(filesystem, path, _FILE_BYTES_MAX)
    if data is None:
        return None
    try:
        fields = json.loads(data)
        crc = fields.pop("crc32c")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptNodeFile(path, f"it is no JSON object with a crc32c: {error}") from error
    if crc != _crc(fields):
        raise CorruptNodeFile(path, "its crc32c does not match")
    if fields.pop("version", None) != _VERSION:
        raise CorruptNodeFile(path, f"its version is not {_VERSION}: it was written by a newer pushrep")
    return dict(fields)


def _write(path: Path, fields: Mapping[str, Any], filesystem: Filesystem) -> None:
    whole = {"version": _VERSION, **fields}
    whole["crc32c"] = _crc(whole)
    write_atomic(filesystem, path, [json.dumps(whole, sort_keys=True, indent=1).encode() + b"\n"])


def _crc(fields: Mapping[str, Any]) -> int:
    return int(google_crc32c.value(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()))


def _grant_fields(grant: Grant) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(grant).items() if name != "quorums"}
    fields["outbox_id"], fields["topic_id"] = str(grant.outbox_id), str(grant.topic_id)
    fields["destinations"] = [[str(topic_id), count] for topic_id, count in grant.destinations]
    for name in ("members", "previous_members"):
        fields[name] = [[member.index, member.address] for member in getattr(grant, name)]
    return fields


def _grant_of(fields: Mapping[str, Any]) -> Grant:
    read = dict(fields)
    read["outbox_id"], read["topic_id"] = UUID(read["outbox_id"]), UUID(read["topic_id"])
    read["destinations"] = tuple((UUID(topic_id), int(count)) for topic_id, count in read["destinations"])
    for name in ("members", "previous_members"):
        read[name] = tuple(Member(int(index), str(address)) for index, address in read[name])
    return Grant(**read)
