"""Operator commands on the destinations of an outbox that nobody has open: under the directory's lock, on its files.

skip_record        a record that the topic does not accept is never shipped; the reason is kept
repartition        what is appended from now on goes to all of a grown topic's partitions, under a new PID epoch
skip_all           nothing is shipped to a topic any more, and the logs keep nothing for it
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Clock, Filesystem
from pushrep.errors import BadArgument
from pushrep.kafka.progress import ShippingProgress, Skip, read_progress, write_progress
from pushrep.log import LogLocked, SegmentLog
from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import log_name
from pushrep.outbox.epoch import begin_pid_epoch
from pushrep.outbox.identity import OutboxIdentity, identity_in


def skip_record(  # noqa: PLR0913 - what is skipped, and where the outbox stands
    directory: Path | str,
    partition: int,
    offset: int,
    reason: str,
    *,
    topic: str | None = None,
    filesystem: Filesystem = REAL_FILESYSTEM,
    clock: Clock = SYSTEM_CLOCK,
) -> Skip:
    """Never ship this record; the ones after it are shipped. topic: None where there is one destination.

    Raises BadArgument unless the record is still to be shipped, NoOutbox, LogLocked.
    """
    with locked_outbox(Path(directory), filesystem, clock) as (path, identity):
        known = read_progress(filesystem, path)
        name = destination_of(known, topic)
        if not 0 <= partition < identity.partitions:
            raise BadArgument("partition", f"{partition} is not one of the {identity.partitions}, counted from 0")
        with opened_log(path, identity, partition, filesystem, clock) as log:
            end = log.log_end_offset
        at = known[name].partitions.get(partition)
        skip = checked_skip(Skip(partition, offset, reason, clock.wall_ms()), 0 if at is None else at[0], end)
        write_progress(filesystem, path, known | {name: with_skip(known[name], skip)})
        return skip


class Unshipped(NamedTuple):
    """Records [start, end) of a log partition that a topic has not acknowledged."""

    topic: str
    partition: int
    start: int
    end: int


def not_known_to_be_shipped(directory: Path, filesystem: Filesystem = REAL_FILESYSTEM) -> list[Unshipped]:
    """The unshipped ranges of every topic that the outbox ships to. Takes no lock. Raises NoOutbox,
    CorruptDestinationsFile.
    """
    identity = identity_in(filesystem, directory)
    found = []
    for topic, progress in read_progress(filesystem, directory).items():
        for partition in range(identity.partitions):
            path = directory / log_name(identity.topic, partition)
            if not filesystem.exists(path):
                continue
            with SegmentLog.open_reader(path) as log:
                at = progress.partitions.get(partition)
                start, end = log.log_start_offset if at is None else at.acknowledged, log.log_end_offset
                if start < end:
                    found.append(Unshipped(topic, partition, start, end))
    return found


def checked_skip(skip: Skip, acknowledged: int, log_end_offset: int) -> Skip:
    """Return `skip` if it gives a reason and a record in [acknowledged, log_end_offset); else raise BadArgument."""
    if not acknowledged <= skip.offset < log_end_offset:
        raise BadArgument(
            "offset",
            f"{skip.offset} is not one of those that are still to be shipped, from {acknowledged} to "
            f"{log_end_offset - 1} of partition {skip.partition}",
        )
    if not skip.reason.strip():
        raise BadArgument("reason", "say why the record is given up; it is kept with it")
    return skip


def with_skip(progress: ShippingProgress, skip: Skip) -> ShippingProgress:
    """The progress with the skip added."""
    return replace(progress, skipped=(*progress.skipped, skip))


def repartition(
    directory: Path | str,
    *,
    topic: str | None = None,
    filesystem: Filesystem = REAL_FILESYSTEM,
    clock: Clock = SYSTEM_CLOCK,
) -> OutboxIdentity:
    """From the logs' ends on use as many partitions as the topic has at the next start. Returns the new identity.

    It has a new PID: readers would meet the old one in two partitions. Raises as `skip_record`.
    """
    with locked_outbox(Path(directory), filesystem, clock) as (path, identity):
        known = read_progress(filesystem, path)
        name = destination_of(known, topic)
        ends = {}
        for partition in range(identity.partitions):
            with opened_log(path, identity, partition, filesystem, clock) as log:
                ends[partition] = log.log_end_offset
        # The PID first: under the old one, the new partition count would put one pair into two partitions.
        raised = begin_pid_epoch(path, filesystem=filesystem, clock=clock)
        changed = known[name].repartitioned(raised.pid_epoch, ends)
        write_progress(filesystem, path, known | {name: changed})
        return raised


def skip_all(
    directory: Path | str, topic: str, *, filesystem: Filesystem = REAL_FILESYSTEM, clock: Clock = SYSTEM_CLOCK
) -> None:
    """Forget a topic's progress: the logs keep nothing for it any more. Raises as `skip_record`."""
    with locked_outbox(Path(directory), filesystem, clock) as (path, _):
        known = read_progress(filesystem, path)
        del known[destination_of(known, topic)]
        write_progress(filesystem, path, known)


@contextmanager
def locked_outbox(
    directory: Path, filesystem: Filesystem, clock: Clock, *, refuse_copy: bool = False
) -> Iterator[tuple[Path, OutboxIdentity]]:
    """Hold the directory's lock, which no other object of this process may hold either. Raises NoOutbox, LogLocked.

    refuse_copy: raise DirectoryIsCopy for a member's directory that is a copy, as `Outbox.open` does.
    """
    identity_in(filesystem, directory)  # raises NoOutbox before the lock file would be made
    held = LogDirectory.acquire(directory, filesystem, clock)
    try:
        if held.references > 1:  # an object of this process holds it too
            raise LogLocked(held.path, os.getpid(), is_own=True)
        identity = identity_in(filesystem, held.path)
        if refuse_copy and identity.replicas:
            held.refuse_copy()
        yield held.path, identity
    finally:
        held.release()


@contextmanager
def opened_log(
    path: Path, identity: OutboxIdentity, partition: int, filesystem: Filesystem, clock: Clock
) -> Iterator[SegmentLog]:
    """Open one of the outbox's logs for writing."""
    with SegmentLog.open(
        path / log_name(identity.topic, partition),
        has_replicas=bool(identity.replicas),
        filesystem=filesystem,
        clock=clock,
    ) as log:
        yield log


def destination_of(known: Mapping[str, ShippingProgress], topic: object) -> str:
    """The destination of that topic; None: the only one. Raises BadArgument."""
    if topic is None and len(known) == 1:
        return next(iter(known))
    if not isinstance(topic, str) or topic not in known:
        names = ", ".join(sorted(known)) or "none"
        raise BadArgument("topic", f"name a destination that the outbox has shipped to; there are: {names}")
    return topic
