"""outbox.json: what was fixed when the outbox was made.

    {"version": 1, "outbox_id": uuid, "producer": str, "topic": str, "partitions": int,
     "carrier": "key" | "header", "pid_epoch": int,
     "member": int, "replicas": [[index, "host:port"], ...], "min_insync_replicas": int, "crc32c": int}

Indexes are 0 to 255. `member` is this directory's own, 0 in an outbox without replicas.

The PID of every record rests on outbox_id, producer, topic and pid_epoch, so a flipped bit here would turn the whole
history into another producer's: `crc32c` is taken over the other fields as compact JSON with sorted keys.
Written whole and atomically, under the directory's lock: when the outbox is made, when its epoch rises, when
it is opened with replicas for the first time, and when the newest grant (promises.json beside it, which decides) names
other members. A replica that was promoted gets its file at the first open: from the grant, and the producer's name.

The PID epoch: an outbox gets another PID before one of its offsets could name a second record.

    what happened                                              shown by                         what `Outbox.open` does
    a log ends below what readers may have seen of it          given-up-offset-checkpoint       raises the epoch
    a directory is gone, and held records                      the same                         refuses: LogsMissing, or
                                                                                                raises with accept_loss
    a directory is gone, and nothing is known of it            its name                         raises
    outbox.json is older than its logs                         PIDs of later epochs in them     leaps
    everything is a copy of another directory                  directory-id.json                leaps
    the same, where the file system can't show a copy          nothing: an operator says so     begin_pid_epoch leaps

Shipping may call for a leap as well, while the outbox is open: where a topic begins above what this outbox knew of it,
retention removed records that it never read, and another copy of the log may have shipped them.

A copy does not know which epochs its original has used since. The next epoch could be used by both, so the epoch of a
copy leaps by a random number of up to 2^24. (A grant has 31 bits for the epoch: two larger leaps could exceed them.)

The epoch is on disk before the entries that called for it are removed, and both before the first append. A crash in
between raises it once more, which costs a PID and no record. pushrep/log/directory.py decides what readers may have
seen.
"""

import logging
import secrets
import shlex
import uuid
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filtering import producer_id
from pushrep.election.grants import Grant, default_min_insync
from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Filesystem
from pushrep.env.checked_json import read_checked_json, write_checked_json
from pushrep.errors import BadArgument, CorruptFile
from pushrep.log import SegmentLog, list_logs
from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import (
    OUTBOX_FILE_NAME,
    CheckpointFile,
    log_name,
    parse_log_name,
    read_checkpoint,
    slot_directories,
)
from pushrep.log.inspection import is_log
from pushrep.outbox.errors import LogsMissing, NoOutbox, OutboxDiffers
from pushrep.outbox.positions import PositionsStore
from pushrep.records.header import OFFSET_MAX
from pushrep.replicate.election_state import PROMISES_NAME, REPLICA_EPOCH_NAME, ElectionState, find_election_state
from pushrep.settings import checked, printable_text, whole_number
from pushrep.topic_id_partition import check_topic

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
        printable_text("producer", self.producer)
        check_topic("topic", self.topic)
        whole_number("partitions", self.partitions, 1, PARTITIONS_MAX)
        if self.carrier not in CARRIERS:
            raise BadArgument("carrier", f"{self.carrier!r} is neither 'key' nor 'header'")

    @property
    def log_names(self) -> list[str]:
        """The directories of its logs, in the order of the partitions."""
        return [log_name(self.topic, n) for n in range(self.partitions)]

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


def _identity_of(fields: dict[str, Any]) -> OutboxIdentity:
    fields["replicas"] = tuple((int(index), str(address)) for index, address in fields["replicas"])
    return checked(OutboxIdentity(**fields))


def read_identity(filesystem: Filesystem, directory: Path) -> OutboxIdentity | None:
    """The stored identity; None if there is no outbox. Takes no lock. Raises `CorruptFile`, OSError."""
    path = directory / FILE_NAME
    try:
        return read_checked_json(filesystem, path, _FILE_BYTES_MAX, VERSION, _identity_of, "restore it from a copy")
    except NotADirectoryError:
        return None


def identity_in(filesystem: Filesystem, directory: Path) -> OutboxIdentity:
    """As `read_identity`, but raises `NoOutbox` where there is none; it says what the directory is instead."""
    identity = read_identity(filesystem, directory)
    if identity is not None:
        return identity
    if slots := slot_directories(directory, filesystem):
        raise NoOutbox(directory, f"it holds worker slots, each of them an outbox: name one, as {slots[0]}")
    if is_log(directory, filesystem):
        raise NoOutbox(directory, f"it is a single log: name the directory above it, {directory.absolute().parent}")
    kept = find_election_state(directory, filesystem) if filesystem.exists(directory / PROMISES_NAME) else None
    if kept is not None and (grant := kept[1].grant) is not None:
        at = next((one.address for one in grant.members if one.index == grant.leader), "")
        leader = f"member {grant.leader}{f' at {at}' if at else ''}"
        what = f"it is member {kept[1].member}'s copy of outbox {kept[0]} of topic {grant.topic}, which {leader} leads"
        raise NoOutbox(directory, f"{what}: run this in the directory of that member's service")
    if filesystem.exists(directory / REPLICA_EPOCH_NAME):
        why = "it is a node's directory: name the directory of the service whose outbox it is"
        raise NoOutbox(directory, f"{why}; pushrep status {shlex.quote(str(directory))} shows whose copies it keeps")
    raise NoOutbox(directory)


def refuse_other_kinds(directory: Path, filesystem: Filesystem, *, create: bool) -> None:
    """Raise BadArgument where an outbox would be made among the files of one log, or beside slots: no worker could
    open its slot any more. NoOutbox where none may be made.
    """
    if filesystem.exists(directory / FILE_NAME):
        return
    if is_log(directory, filesystem):
        raise BadArgument("directory", f"{directory} is a single log: name the directory above it, or a new one")
    if slots := slot_directories(directory, filesystem):
        raise BadArgument(
            "directory",
            f"{directory} holds the outboxes of worker slots ({slots[0].name} ...): use Outbox.open_slot, or name one "
            "of the slots",
        )
    if not create:
        raise NoOutbox(directory, "look at the path, or open it with create=True")


def write_identity(filesystem: Filesystem, directory: Path, identity: OutboxIdentity) -> None:
    """Replace the file; on disk when this returns. The caller holds the directory's lock. Raises OSError."""
    write_checked_json(filesystem, directory / FILE_NAME, asdict(identity), VERSION)


def settle_identity(
    held: LogDirectory, wanted: OutboxIdentity, min_insync_replicas: int | None, lead: ElectionState | None
) -> tuple[OutboxIdentity, bool]:
    """The stored identity, or `wanted` made durable if there is none; and whether the outbox was made just now.

    min_insync_replicas: as the caller wants it, None: as it is. lead: has the grant by which this directory may lead;
    None before there is one. Raises `OutboxDiffers` where a fixed setting is asked for with another value,
    `CorruptFile` if logs of the topic lie there without the file.
    """
    path = held.path / FILE_NAME
    found = stored = read_identity(held.filesystem, held.path)
    if stored is None and lead is None:
        if any(name == wanted.topic for name, _ in list_logs(held.path, held.filesystem)):
            raise CorruptFile(
                path, f"is missing beside logs of topic {wanted.topic!r}; restore it, or take another directory"
            )
        write_identity(held.filesystem, held.path, wanted)
        _LOG.info("a new outbox was made in %s: producer %r, topic %r", held.path, wanted.producer, wanted.topic)
        return wanted, True
    if lead is not None and lead.grant is not None:
        stored = _as_granted(path, stored, lead.grant, lead.member, wanted)
    assert stored is not None, "one of the two is there"
    _check_fixed(path, stored, wanted)
    if lead is None and wanted.replicas and not stored.replicas:
        stored = replace(stored, replicas=wanted.replicas, min_insync_replicas=wanted.min_insync_replicas)
        _LOG.info("%s has replicas from now on: %s", held.path, ", ".join(address for _, address in stored.replicas))
    elif lead is None:
        kept_replicas, got_replicas = ([address for _, address in one.replicas] for one in (stored, wanted))
        if sorted(kept_replicas) != sorted(got_replicas):
            raise OutboxDiffers(path, "replicas", stored=kept_replicas, got=got_replicas)
    if min_insync_replicas not in {None, stored.min_insync_replicas}:
        raise OutboxDiffers(path, "min_insync_replicas", stored=stored.min_insync_replicas, got=min_insync_replicas)
    if stored != found:
        write_identity(held.filesystem, held.path, stored)
    return stored, False


def _check_fixed(path: Path, stored: OutboxIdentity, wanted: OutboxIdentity) -> None:
    for setting in ("topic", "producer", "partitions", "carrier"):
        if (kept := getattr(stored, setting)) != (got := getattr(wanted, setting)):
            raise OutboxDiffers(path, setting, stored=kept, got=got)


def _as_granted(
    path: Path, stored: OutboxIdentity | None, grant: Grant, member: int, wanted: OutboxIdentity
) -> OutboxIdentity:
    """The identity by the grant; stored None: a replica's directory, which has none yet.

    A leader does not listen, so the grant may have no address for it. When it becomes a replica, it gets the address in
    `wanted` that no other member has.
    """
    others = {one.index: one.address for one in grant.members if one.index != member}
    got = [address for _, address in wanted.replicas]
    new = [address for address in got if address not in others.values()]
    silent = [index for index, address in others.items() if not address]
    if len(new) > 1 or len(new) > len(silent) or any(address and address not in got for address in others.values()):
        raise OutboxDiffers(path, "replicas", stored=[one for one in others.values() if one], got=got)
    if stored is None:
        stored = replace(wanted, outbox_id=str(grant.outbox_id), pid_epoch=grant.pid_epoch)
        stored = replace(stored, topic=grant.topic, partitions=grant.partitions, carrier=grant.carrier)
    return replace(
        stored,
        member=member,
        replicas=tuple(sorted((others | dict(zip(silent, new, strict=False))).items())),
        min_insync_replicas=grant.min_insync_replicas,
        pid_epoch=max(stored.pid_epoch, grant.pid_epoch),
    )


LATER_EPOCHS = 16
"""How many epochs above the stored one are looked for: an older copy of outbox.json is rarely more than a few behind.
"""


def missing_logs(held: LogDirectory, identity: OutboxIdentity, *, accept_loss: bool) -> list[str]:
    """Names of the outbox's logs whose directories are not there. Raises `LogsMissing` if they held records.

    Only their names are known, and the directories that are made next hide that they were missing. So before that it is
    noted on disk, for an opening after a crash in between, that readers may have seen any offset of them.
    """
    present = set(held.filesystem.list(held.path))
    missing = [name for name in identity.log_names if name not in present]
    ends = {name: seen for name in missing if (seen := held.seen_to(name))}
    if ends and not accept_loss:
        raise LogsMissing(held.path, ends)
    for name, seen in ends.items():
        _LOG.error("%s is missing and is made anew: its records up to offset %d are lost", held.path / name, seen)
    for name in missing:
        if not held.given_up(name):
            held.remember(name, {CheckpointFile.GIVEN_UP: ends.get(name, OFFSET_MAX)})
    if missing:
        held.sync_checkpoints()
    return missing


def settle_epoch(
    held: LogDirectory,
    identity: OutboxIdentity,
    logs: Sequence[tuple[SegmentLog, PositionsStore]],
    made_anew: Collection[str],
) -> OutboxIdentity:
    """Store and return the identity to append under. The logs are open and complete; nobody appends yet."""
    reasons = [f"{name} was missing" for name in made_anew]
    for log, _ in logs:
        given_up = held.given_up(log.path.name)
        if log.log_end_offset < given_up and log.path.name not in made_anew:
            reasons.append(f"{log.path.name} ends at {log.log_end_offset}, and readers may have seen up to {given_up}")
    if later := _later_epoch(identity, logs):
        reasons.append(f"records of epoch {later} are in the logs, so {FILE_NAME} is an older copy")
    if held.is_unsettled_copy:
        assert held.directory_id is not None, "it has an id"
        reasons.append(
            f"this directory is a copy of directory {held.directory_id.copy_of[-1].hex}, which may have gone on"
        )
    if reasons:
        why = "; ".join(reasons)
        if later or held.is_unsettled_copy:
            identity = replace(identity, pid_epoch=later or identity.pid_epoch)
            identity = leap_epoch(held.filesystem, held.path, identity, why)
        else:
            identity = _raised(held.filesystem, held.path, identity, identity.pid_epoch + 1, why)
    struck_out = [log.path.name for log, _ in logs if held.given_up(log.path.name)]
    for name in struck_out:
        held.remember(name, {CheckpointFile.GIVEN_UP: 0})
    if struck_out:
        held.sync_checkpoints()
    return identity


def begin_pid_epoch(directory: Path | str) -> OutboxIdentity:
    """Let the outbox go on under another PID: for a directory that was restored from an older copy. The new identity.

    Such a copy does not know what readers have seen since it was made. Call it before the first append. Raises
    `NoOutbox`, `CorruptFile`, `LogLocked`.
    """
    directory = Path(directory)
    identity_in(REAL_FILESYSTEM, directory)  # before anything is made there
    with LogDirectory.acquire(directory, REAL_FILESYSTEM, SYSTEM_CLOCK) as held:
        identity = identity_in(REAL_FILESYSTEM, held.path)
        raised = leap_epoch(REAL_FILESYSTEM, held.path, identity, "it was asked for")
        if held.is_unsettled_copy and not identity.replicas:
            held.settle_id()  # else the next opening would begin another
        return raised


def leap_epoch(filesystem: Filesystem, directory: Path, identity: OutboxIdentity, why: str) -> OutboxIdentity:
    """The identity under a PID that no copy of the directory can have, on disk; the caller holds the directory's lock.

    Raises OSError.
    """
    return _raised(filesystem, directory, identity, identity.pid_epoch + 1 + secrets.randbelow(1 << 24), why)


def outbox_of_log(log: Path) -> dict[str, int | str] | None:
    """What a log's outbox has stored about it, for tools that show it; None for a log of no outbox. Takes no lock.

    producer, pid, pid_epoch: as stored. given_up_to: readers may have seen offsets up to there; 0: no cut since the
    last open. The next open raises the epoch if the log ends below it.
    """
    try:
        identity = read_identity(REAL_FILESYSTEM, log.parent)
    except (CorruptFile, OSError) as error:
        _LOG.warning("%s", error)
        return None
    topic, partition = parse_log_name(log.name)
    if identity is None or identity.topic != topic or partition >= identity.partitions:
        return None
    given_up = read_checkpoint(log.parent, CheckpointFile.GIVEN_UP)
    return {
        "producer": identity.producer,
        "pid": identity.pid,
        "pid_epoch": identity.pid_epoch,
        "given_up_to": given_up.get(log.name, 0),
    }


def _raised(filesystem: Filesystem, directory: Path, identity: OutboxIdentity, epoch: int, why: str) -> OutboxIdentity:
    raised = replace(identity, pid_epoch=epoch)
    write_identity(filesystem, directory, raised)
    _LOG.warning("%s begins PID epoch %d (PID %d, before: %d): %s", directory, epoch, raised.pid, identity.pid, why)
    return raised


def _later_epoch(identity: OutboxIdentity, logs: Sequence[tuple[SegmentLog, PositionsStore]]) -> int | None:
    """The highest epoch above the stored one that has records in the logs, None if none of the next few has."""
    later = range(identity.pid_epoch + 1, identity.pid_epoch + LATER_EPOCHS + 1)
    epochs = {replace(identity, pid_epoch=epoch).pid: epoch for epoch in later}
    highest = [(log.partition, store.highest) for log, store in logs]
    return max((epoch for pid, epoch in epochs.items() for n, known in highest if (pid, n) in known), default=None)
