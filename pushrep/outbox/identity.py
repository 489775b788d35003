"""outbox.json: what was fixed when the outbox was made.

    {"version": 1, "outbox_id": uuid, "producer": str, "topic": str, "partitions": int,
     "carrier": "key" | "header", "pid_epoch": int,
     "member": int, "replicas": [[index, "host:port"], ...], "min_insync_replicas": int, "crc32c": int}

Indexes are 0 to 255. `member` is this directory's own, 0 in an outbox without replicas.

The PID of every record rests on outbox_id, producer, topic and pid_epoch, so a flipped bit here would turn the whole
history into another producer's: `crc32c` is taken over the other fields as compact JSON with sorted keys.
Written whole and atomically, under the directory's lock: when the outbox is made, when its epoch rises (epoch.py), when
it is opened with replicas for the first time, and when the newest grant (promises.json beside it, which decides) names
other members. A replica that was promoted gets its file at the first open: from the grant, and the producer's name.
"""

import json
import logging
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from filtering import producer_id
from pushrep.election.grants import Grant, default_min_insync
from pushrep.env import Filesystem, read_whole, write_atomic
from pushrep.env.checked_json import BadJsonFile, OtherVersion, crc_of_fields, parse_checked_json
from pushrep.errors import BadArgument
from pushrep.log.directory_files import OUTBOX_FILE_NAME, is_topic, slot_directories
from pushrep.log.inspection import is_log
from pushrep.outbox.errors import CorruptOutboxFile, NoOutbox, OutboxDiffers
from pushrep.settings import whole_number

_LOG = logging.getLogger("pushrep.outbox")

FILE_NAME = OUTBOX_FILE_NAME
VERSION = 1
CARRIERS = ("key", "header")
PARTITIONS_MAX = 1 << 20  # far above any real outbox, so that a typing error makes no million directories
_FILE_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxIdentity:
    """The outbox's identity. Raises `BadArgument` for an invalid topic or producer."""

    outbox_id: str
    producer: str
    topic: str
    partitions: int
    carrier: str
    pid_epoch: int = 0
    member: int = 0
    replicas: tuple[tuple[int, str], ...] = ()
    min_insync_replicas: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.producer, str) or not self.producer:
            raise BadArgument("producer", "give the application's name, the same at every start")
        if not _is_utf8(self.producer):
            raise BadArgument("producer", f"{self.producer!r} is no text that UTF-8 can carry")
        if not isinstance(self.topic, str) or not is_topic(self.topic):
            raise BadArgument("topic", f"{self.topic!r} is no topic name: 1 to 249 of a-z A-Z 0-9 . _ -")
        whole_number("partitions", self.partitions, 1, PARTITIONS_MAX)
        if self.carrier not in CARRIERS:
            raise BadArgument("carrier", f"{self.carrier!r} is neither 'key' nor 'header'")

    @property
    def pid(self) -> int:
        """The PID of our own records. They are sealed before a destination is known, so the outbox's id is both its
        incarnation and its destination.
        """
        return producer_id(
            application=self.producer,
            stream=self.topic,
            source=self.outbox_id,
            destination=self.outbox_id,
            epoch=self.pid_epoch,
        )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def new_identity(  # noqa: PLR0913 - what is fixed
    *,
    producer: str,
    topic: str,
    partitions: int,
    carrier: str,
    replicas: Sequence[str] = (),
    min_insync_replicas: int | None = None,
) -> OutboxIdentity:
    """The identity of a new outbox: this directory is member 0, the replicas are members 1, 2, ..."""
    return OutboxIdentity(
        outbox_id=str(uuid.uuid4()),
        producer=producer,
        topic=topic,
        partitions=partitions,
        carrier=carrier,
        replicas=tuple(enumerate(replicas, start=1)),
        min_insync_replicas=min_insync_replicas or default_min_insync(len(replicas) + 1),
    )


def encode(identity: OutboxIdentity) -> bytes:
    """The file's bytes."""
    fields = {"version": VERSION, **asdict(identity)}
    return (json.dumps({**fields, "crc32c": crc_of_fields(fields)}, indent=1) + "\n").encode()


def decode(path: Path, data: bytes) -> OutboxIdentity:
    """Decode the file's bytes. Raises `CorruptOutboxFile`, which names what is wrong with them."""
    try:
        fields = parse_checked_json(data, VERSION)
    except OtherVersion as error:
        raise CorruptOutboxFile(path, str(error)) from error
    except BadJsonFile as error:
        raise CorruptOutboxFile(path, f"{error}; restore it from a copy") from error
    try:
        fields["replicas"] = tuple((int(index), str(address)) for index, address in fields["replicas"])
        return OutboxIdentity(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptOutboxFile(path, f"unusable fields ({error})") from error


def read_identity(filesystem: Filesystem, directory: Path) -> OutboxIdentity | None:
    """The stored identity; None if there is no outbox. Takes no lock. Raises `CorruptOutboxFile`."""
    path = directory / FILE_NAME
    try:
        data = read_whole(filesystem, path, _FILE_BYTES_MAX)
    except NotADirectoryError:
        return None
    except OSError as error:
        raise CorruptOutboxFile(path, f"can't be read: {error.strerror or error}") from error
    return None if data is None else decode(path, data)


def identity_in(filesystem: Filesystem, directory: Path) -> OutboxIdentity:
    """As `read_identity`, but raises `NoOutbox` where there is none; it says what the directory is instead."""
    identity = read_identity(filesystem, directory)
    if identity is not None:
        return identity
    if slots := slot_directories(directory, filesystem):
        raise NoOutbox(directory, f"it holds worker slots, each of them an outbox: name one, as {slots[0]}")
    if is_log(directory, filesystem):
        raise NoOutbox(directory, f"it is a single log: name the directory above it, {directory.absolute().parent}")
    raise NoOutbox(directory)


def write_identity(filesystem: Filesystem, directory: Path, identity: OutboxIdentity) -> None:
    """Replace the file; on disk when this returns. The caller holds the directory's lock. Raises OSError."""
    write_atomic(filesystem, directory / FILE_NAME, [encode(identity)])


class KeptGrant(NamedTuple):
    """The newest grant that a directory has stored, and which member it is."""

    grant: Grant
    member: int


def settle_identity(  # noqa: PLR0913 - what is there, and what is wanted
    filesystem: Filesystem,
    directory: Path,
    wanted: OutboxIdentity,
    *,
    logs_exist: bool,
    min_insync_replicas: int | None = None,
    lead: KeptGrant | None = None,
) -> tuple[OutboxIdentity, bool]:
    """The stored identity, or `wanted` made durable if there is none; and whether the outbox was made just now.

    min_insync_replicas: as the caller wants it, None: as it is. lead: the grant by which this directory may lead; None
    before there is one. The caller holds the directory's lock. Raises
    `OutboxDiffers` where a fixed setting is asked for with another value,
    `CorruptOutboxFile` if logs of the topic lie there without the file.
    """
    path = directory / FILE_NAME
    stored = read_identity(filesystem, directory)
    if stored is None and lead is not None:
        stored = replace(wanted, outbox_id=str(lead.grant.outbox_id), pid_epoch=lead.grant.pid_epoch)
        stored = replace(stored, topic=lead.grant.topic, partitions=lead.grant.partitions, carrier=lead.grant.carrier)
        _check_fixed(path, stored, wanted)
        stored = _as_granted(path, stored, lead, wanted, min_insync_replicas)
        write_identity(filesystem, directory, stored)
        _LOG.info("%s was a replica and holds the grant of epoch %d as its leader", directory, lead.grant.epoch)
        return stored, False
    if stored is None:
        if logs_exist:
            raise CorruptOutboxFile(
                path, f"is missing beside logs of topic {wanted.topic!r}; restore it, or take another directory"
            )
        write_identity(filesystem, directory, wanted)
        _LOG.info("a new outbox was made in %s: producer %r, topic %r", directory, wanted.producer, wanted.topic)
        return wanted, True
    _check_fixed(path, stored, wanted)
    if lead is not None:
        granted = _as_granted(path, stored, lead, wanted, min_insync_replicas)
        if granted != stored:
            write_identity(filesystem, directory, granted)
        return granted, False
    if wanted.replicas and not stored.replicas:
        stored = replace(stored, replicas=wanted.replicas, min_insync_replicas=wanted.min_insync_replicas)
        write_identity(filesystem, directory, stored)
        _LOG.info("%s has replicas from now on: %s", directory, ", ".join(address for _, address in stored.replicas))
        return stored, False
    kept_replicas, got_replicas = ([address for _, address in one.replicas] for one in (stored, wanted))
    if sorted(kept_replicas) != sorted(got_replicas):
        raise OutboxDiffers(path, "replicas", stored=kept_replicas, got=got_replicas)
    if min_insync_replicas not in {None, stored.min_insync_replicas}:
        raise OutboxDiffers(path, "min_insync_replicas", stored=stored.min_insync_replicas, got=min_insync_replicas)
    return stored, False


def _check_fixed(path: Path, stored: OutboxIdentity, wanted: OutboxIdentity) -> None:
    for setting in ("topic", "producer", "partitions", "carrier"):
        if (kept := getattr(stored, setting)) != (got := getattr(wanted, setting)):
            raise OutboxDiffers(path, setting, stored=kept, got=got)


def _as_granted(
    path: Path, stored: OutboxIdentity, lead: KeptGrant, wanted: OutboxIdentity, min_insync_replicas: int | None
) -> OutboxIdentity:
    """The stored identity with the grant's members. A leader does not listen, so the grant may have no address for it.
    When it becomes a replica, it gets the address in `wanted` that no other member has.
    """
    grant = lead.grant
    others = {one.index: one.address for one in grant.members if one.index != lead.member}
    got = [address for _, address in wanted.replicas]
    new = [address for address in got if address not in others.values()]
    silent = [index for index, address in others.items() if not address]
    if len(new) > 1 or len(new) > len(silent) or any(address and address not in got for address in others.values()):
        raise OutboxDiffers(path, "replicas", stored=[one for one in others.values() if one], got=got)
    if min_insync_replicas not in {None, grant.min_insync_replicas}:
        raise OutboxDiffers(path, "min_insync_replicas", stored=grant.min_insync_replicas, got=min_insync_replicas)
    return replace(
        stored,
        member=lead.member,
        replicas=tuple(sorted((others | dict(zip(silent, new, strict=False))).items())),
        min_insync_replicas=grant.min_insync_replicas,
        pid_epoch=max(stored.pid_epoch, grant.pid_epoch),
    )
