"""The PID epoch: an outbox gets another PID before one of its offsets could name a second record.

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
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Clock, Filesystem
from pushrep.log import SegmentLog
from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import CheckpointFile, log_name, parse_log_name, read_checkpoint
from pushrep.outbox.errors import CorruptOutboxFile, LogsMissing
from pushrep.outbox.identity import FILE_NAME, OutboxIdentity, identity_in, read_identity, write_identity
from pushrep.outbox.positions import PositionsStore
from pushrep.records.header import OFFSET_MAX

_LOG = logging.getLogger("pushrep.outbox")

LATER_EPOCHS = 16
"""How many epochs above the stored one are looked for: an older copy of outbox.json is rarely more than a few behind.
"""


def missing_logs(held: LogDirectory, identity: OutboxIdentity, *, accept_loss: bool) -> list[str]:
    """Names of the outbox's logs whose directories are not there. Raises `LogsMissing` if they held records.

    Only their names are known, and the directories that are made next hide that they were missing. So before that it is
    noted on disk, for an opening after a crash in between, that readers may have seen any offset of them.
    """
    present = set(held.filesystem.list(held.path))
    names = [log_name(identity.topic, n) for n in range(identity.partitions)]
    missing = [name for name in names if name not in present]
    ends = {name: seen for name in missing if (seen := held.seen_to(name))}
    if ends and not accept_loss:
        raise LogsMissing(held.path, ends)
    for name, seen in ends.items():
        _LOG.error("%s is missing and is made anew: its records up to offset %d are lost", held.path / name, seen)
    for name in missing:
        if not held.checkpointed(CheckpointFile.GIVEN_UP, name):
            held.remember(name, {CheckpointFile.GIVEN_UP: ends.get(name, OFFSET_MAX)})
    if missing:
        held.sync_checkpoints()
    return missing


def was_cut(held: LogDirectory, name: str) -> bool:
    """Whether the log lost offsets since the outbox was opened last: stored positions may be too high."""
    return bool(held.checkpointed(CheckpointFile.GIVEN_UP, name))


def settle_epoch(
    held: LogDirectory,
    identity: OutboxIdentity,
    logs: Sequence[tuple[SegmentLog, PositionsStore]],
    made_anew: Collection[str],
) -> OutboxIdentity:
    """Store and return the identity to append under. The logs are open and complete; nobody appends yet."""
    reasons = [f"{name} was missing" for name in made_anew]
    for log, _ in logs:
        given_up = held.checkpointed(CheckpointFile.GIVEN_UP, log.path.name) or 0
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
        is_copy = bool(later) or held.is_unsettled_copy
        epoch = _leap(later or identity.pid_epoch) if is_copy else identity.pid_epoch + 1
        identity = _raised(held.filesystem, held.path, identity, epoch, "; ".join(reasons))
    struck_out = [log.path.name for log, _ in logs if was_cut(held, log.path.name)]
    for name in struck_out:
        held.remember(name, {CheckpointFile.GIVEN_UP: 0})
    if struck_out:
        held.sync_checkpoints()
    return identity


def begin_pid_epoch(
    directory: Path | str, *, filesystem: Filesystem = REAL_FILESYSTEM, clock: Clock = SYSTEM_CLOCK
) -> OutboxIdentity:
    """Let the outbox go on under another PID: for a directory that was restored from an older copy. The new identity.

    Such a copy does not know what readers have seen since it was made. Call it before the first append. Raises
    `NoOutbox`, `CorruptOutboxFile`, `LogLocked`.
    """
    directory = Path(directory)
    identity_in(filesystem, directory)  # before anything is made there
    held = LogDirectory.acquire(directory, filesystem, clock)
    try:
        identity = identity_in(filesystem, held.path)
        raised = _raised(filesystem, held.path, identity, _leap(identity.pid_epoch), "it was asked for")
        if held.is_unsettled_copy and not identity.replicas:
            held.settle_id()  # else the next opening would begin another
        return raised
    finally:
        held.release()


def leap_epoch(filesystem: Filesystem, directory: Path, identity: OutboxIdentity, why: str) -> OutboxIdentity:
    """The identity under a PID that no copy of the directory can have, on disk; the caller holds the directory's lock.

    Raises OSError.
    """
    return _raised(filesystem, directory, identity, _leap(identity.pid_epoch), why)


def outbox_of_log(log: Path, filesystem: Filesystem = REAL_FILESYSTEM) -> dict[str, int | str] | None:
    """What a log's outbox has stored about it, for tools that show it; None for a log of no outbox. Takes no lock.

    producer, pid, pid_epoch: as stored. given_up_to: readers may have seen offsets up to there; 0: no cut since the
    last open. The next open raises the epoch if the log ends below it.
    """
    try:
        identity = read_identity(filesystem, log.parent)
    except CorruptOutboxFile as error:
        _LOG.warning("%s", error)
        return None
    topic, partition = parse_log_name(log.name)
    if identity is None or identity.topic != topic or partition >= identity.partitions:
        return None
    given_up = read_checkpoint(log.parent, CheckpointFile.GIVEN_UP, filesystem)
    return {
        "producer": identity.producer,
        "pid": identity.pid,
        "pid_epoch": identity.pid_epoch,
        "given_up_to": given_up.get(log.name, 0),
    }


def _leap(epoch: int) -> int:
    return epoch + 1 + secrets.randbelow(1 << 24)


def _raised(filesystem: Filesystem, directory: Path, identity: OutboxIdentity, epoch: int, why: str) -> OutboxIdentity:
    raised = replace(identity, pid_epoch=epoch)
    write_identity(filesystem, directory, raised)
    _LOG.warning("%s begins PID epoch %d (PID %d, before: %d): %s", directory, epoch, raised.pid, identity.pid, why)
    return raised


def _later_epoch(identity: OutboxIdentity, logs: Sequence[tuple[SegmentLog, PositionsStore]]) -> int | None:
    """The highest epoch above the stored one that has records in the logs, None if none of the next few has."""
    later = range(identity.pid_epoch + LATER_EPOCHS, identity.pid_epoch, -1)
    epochs = {replace(identity, pid_epoch=epoch).pid: epoch for epoch in later}
    found = [pid for log, store in logs for pid, _ in store.knows_any((pid, log.partition) for pid in epochs)]
    return max((epochs[pid] for pid in found), default=None)
