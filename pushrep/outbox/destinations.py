"""Operator commands on an outbox that nobody has open: under the directory's lock, on its files.

skip_records       records that the topic does not accept are never shipped; the reason is kept
repartition        what is appended from now on goes to all of a grown topic's partitions, under a new PID epoch
skip_all           nothing is shipped to a topic any more, and the logs keep nothing for it
purge_closed       old segments are removed; purge_open does so for an open outbox. What a destination that was used, a
                   replica in the in-sync set, a lease or a derived store needs stays, and the answer names the reader
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK
from pushrep.errors import BadArgument
from pushrep.kafka.parking import ParkedRecord, parked_in, parking_name
from pushrep.kafka.pipeline import size_alone
from pushrep.kafka.progress import OffsetRanges, ShippingProgress, Skip, read_progress, write_progress
from pushrep.log import LogConfig, LogLocked, SegmentLog, list_logs
from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import log_name
from pushrep.log.retention import NeededFrom
from pushrep.outbox.identity import OutboxIdentity, begin_pid_epoch, identity_in, read_identity
from pushrep.outbox.positions import POSITIONS_NAME, PositionsStore
from pushrep.outbox.relay_note import HOLDER, RelayNotes
from pushrep.records import Record
from pushrep.replicate.election_state import PROMISES_NAME
from pushrep.settings import printable_text, whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRecords:
    """Which records are given up, and why: those in [start, end) of a partition for which all that is named holds.

    partition None: all partitions. end None: the logs' ends as they are now. before_ms, after_ms: only records whose
    own time is before, or after. larger_than_bytes: only records that alone make a larger batch.
    Raises BadArgument.
    """

    reason: str
    partition: int | None = None
    start: int = 0
    end: int | None = None
    before_ms: int | None = None
    after_ms: int | None = None
    larger_than_bytes: int | None = None

    def __post_init__(self) -> None:
        printable_text("reason", self.reason)
        for name in ("partition", "start", "end", "before_ms", "after_ms", "larger_than_bytes"):
            if (value := getattr(self, name)) is not None:
                whole_number(name, value)

    def found_in(self, progress: ShippingProgress, logs: Mapping[int, SegmentLog], now_ms: int) -> list[Skip]:
        """Those of them that are still to be shipped, and not given up yet.

        Raises BadArgument for a partition that is not there, and for offsets that are not to be shipped any more.
        """
        if self.partition is not None and self.partition not in logs:
            raise BadArgument("partition", f"{self.partition} is not one of the {len(logs)}, counted from 0")
        found = []
        for number in logs if self.partition is None else [self.partition]:
            log, known = logs[number], progress.partitions.get(number)
            first = max(log.log_start_offset, 0 if known is None else known.acknowledged)
            found += [
                Skip(number, start, self.reason, now_ms, None if end == start + 1 else end)
                for start, end in self._of(log, progress.skipped_of(number), first)
            ]
        return found

    def _of(self, log: SegmentLog, skipped: OffsetRanges, first: int) -> OffsetRanges:
        end = log.log_end_offset
        if (self.before_ms, self.after_ms, self.larger_than_bytes) == (None, None, None) and self.end is not None:
            wanted = skipped.missing(self.start, self.end)
            for start, last in wanted:
                if not first <= start < last <= end:
                    raise BadArgument(
                        "offset",
                        f"{start if last == start + 1 else f'{start}-{last - 1}'} is not among those that are still to "
                        f"be shipped, from {first} to {end - 1} of partition {log.partition}",
                    )
            return wanted
        found = OffsetRanges()
        start, end = max(self.start, first), end if self.end is None else min(self.end, end)
        for record in log.records(start, end) if start < end else ():
            if self._has(record) and record.offset not in skipped:
                found.add(record.offset, record.offset + 1)
        return found

    def _has(self, record: Record) -> bool:
        return (
            (self.before_ms is None or record.timestamp_ms < self.before_ms)
            and (self.after_ms is None or record.timestamp_ms > self.after_ms)
            and (self.larger_than_bytes is None or size_alone(record) > self.larger_than_bytes)
        )


def skip_records(
    directory: Path | str,
    wanted: SkippedRecords,
    *,
    topic: str | None = None,
) -> list[Skip]:
    """Never ship these records; the ones after them are shipped. Returns what was not given up before.

    topic: None where there is one destination, or none yet: then it is the outbox's topic.
    Raises BadArgument as `SkippedRecords.found_in`, NoOutbox, LogLocked.
    """
    with locked_outbox(Path(directory)) as (path, identity), ExitStack() as stack:
        known = read_progress(REAL_FILESYSTEM, path)
        if topic == identity.topic or not known:  # it may be given before the first start that ships
            known.setdefault(identity.topic, ShippingProgress())
        name = destination_of(known, topic)
        logs = {
            number: stack.enter_context(opened_log(path, identity, number)) for number in range(identity.partitions)
        }
        found = wanted.found_in(known[name], logs, SYSTEM_CLOCK.wall_ms())
        if found:
            write_progress(REAL_FILESYSTEM, path, known | {name: known[name].skipping(found)})
        return found


def parked_records(directory: Path) -> list[ParkedRecord]:
    """The parked records that no operator has dealt with. Takes no lock. Raises NoOutbox."""
    identity = identity_in(REAL_FILESYSTEM, directory)
    path = directory / parking_name(identity.topic, identity.partitions)
    if not REAL_FILESYSTEM.exists(path):
        return []
    with SegmentLog.open_reader(path) as log:
        return [one for one in parked_in(log).values() if not one.is_done]


class Unshipped(NamedTuple):
    """Records [start, end) of a log partition that a topic has not acknowledged."""

    topic: str
    partition: int
    start: int
    end: int


def not_known_to_be_shipped(directory: Path) -> list[Unshipped]:
    """The unshipped ranges of every topic that the outbox ships to. Takes no lock. Raises NoOutbox,
    CorruptFile.
    """
    identity = identity_in(REAL_FILESYSTEM, directory)
    found = []
    for topic, progress in read_progress(REAL_FILESYSTEM, directory).items():
        for partition in range(identity.partitions):
            path = directory / log_name(identity.topic, partition)
            if not REAL_FILESYSTEM.exists(path):
                continue
            with SegmentLog.open_reader(path) as log:
                at = progress.partitions.get(partition)
                start, end = log.log_start_offset if at is None else at.acknowledged, log.log_end_offset
                if start < end:
                    found.append(Unshipped(topic, partition, start, end))
    return found


def repartition(directory: Path | str, *, topic: str | None = None) -> OutboxIdentity:
    """From the logs' ends on use as many partitions as the topic has at the next start. Returns the new identity.

    It has a new PID: readers would meet the old one in two partitions. Raises NoOutbox, LogLocked, BadArgument.
    """
    with locked_outbox(Path(directory)) as (path, identity):
        known = read_progress(REAL_FILESYSTEM, path)
        name = destination_of(known, topic)
        ends = {}
        for partition in range(identity.partitions):
            with opened_log(path, identity, partition) as log:
                ends[partition] = log.log_end_offset
        # The PID first: under the old one, the new partition count would put one pair into two partitions.
        raised = begin_pid_epoch(path)
        changed = known[name].repartitioned(raised.pid_epoch, ends)
        write_progress(REAL_FILESYSTEM, path, known | {name: changed})
        return raised


def skip_all(directory: Path | str, topic: str) -> None:
    """Forget a topic's progress: the logs keep nothing for it any more. Raises as `repartition`."""
    with locked_outbox(Path(directory)) as (path, _):
        known = read_progress(REAL_FILESYSTEM, path)
        del known[destination_of(known, topic)]
        write_progress(REAL_FILESYSTEM, path, known)


@contextmanager
def locked_outbox(directory: Path, *, refuse_copy: bool = False) -> Iterator[tuple[Path, OutboxIdentity]]:
    """Hold the directory's lock, which no other object of this process may hold either. Raises NoOutbox, LogLocked.

    refuse_copy: raise DirectoryIsCopy for a member's directory that is a copy, as `Outbox.open` does.
    """
    identity_in(REAL_FILESYSTEM, directory)  # raises NoOutbox before the lock file would be made
    with held_alone(directory) as held:
        identity = identity_in(REAL_FILESYSTEM, held.path)
        if refuse_copy and identity.replicas:
            held.refuse_copy()
        yield held.path, identity


@contextmanager
def held_alone(directory: Path) -> Iterator[LogDirectory]:
    """Hold the directory's lock, which no other object of this process may hold either. Raises LogLocked."""
    with LogDirectory.acquire(directory, REAL_FILESYSTEM, SYSTEM_CLOCK) as held:
        if held.references > 1:
            raise LogLocked(held.path, held.owner_pid, is_own=True)
        yield held


def opened_log(path: Path, identity: OutboxIdentity, partition: int) -> SegmentLog:
    """Open one of the outbox's logs for writing."""
    return SegmentLog.open(path / log_name(identity.topic, partition), has_replicas=bool(identity.replicas))


def destination_of(known: Mapping[str, ShippingProgress], topic: object) -> str:
    """The destination of that topic; None: the only one. Raises BadArgument."""
    if topic is None and len(known) == 1:
        return next(iter(known))
    if not isinstance(topic, str) or topic not in known:
        names = ", ".join(sorted(known)) or "none"
        raise BadArgument("topic", f"name a destination that the outbox has shipped to; there are: {names}")
    return topic


def purge_open(logs: Mapping[int, SegmentLog], arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The control call: `partition` (None: all), `before_offset` or `before_ms`, `dry_run`. Raises BadArgument."""
    only, offset, time_ms = (arguments.get(name) for name in ("partition", "before_offset", "before_ms"))
    for name, value in (("partition", only), ("before_offset", offset), ("before_ms", time_ms)):
        if value is not None:
            whole_number(name, value)
    if only is not None and only not in logs:
        raise BadArgument("partition", f"{only} is not one of the {len(logs)}, counted from 0")
    chosen = logs.values() if only is None else [logs[only]]
    return _purge(chosen, offset, time_ms, is_dry_run=bool(arguments.get("dry_run")))


def purge_closed(  # noqa: PLR0913 - what goes, and where it stands
    directory: Path,
    topic: str | None,
    partition: int | None,
    *,
    before_offset: int | None,
    before_ms: int | None,
    dry_run: bool,
) -> list[dict[str, Any]]:
    """The same in a directory of logs that nobody has open. topic, partition: one log, None: all of them.

    Raises LogLocked, BadArgument for a node's copies, and what opening a log raises.
    """
    if REAL_FILESYSTEM.exists(directory / PROMISES_NAME) and read_identity(REAL_FILESYSTEM, directory) is None:
        raise BadArgument("directory", f"{directory} is a copy that a node keeps: use pushrep recording purge")
    with held_alone(directory) as held:
        identity, known = read_identity(REAL_FILESYSTEM, held.path), read_progress(REAL_FILESYSTEM, held.path)
        notes = RelayNotes(REAL_FILESYSTEM, held.path)
        found = []
        for name, number in sorted(list_logs(held.path)):
            if (topic, partition) not in {(None, None), (name, number)}:
                continue
            path = held.path / log_name(name, number)
            is_ours = identity is not None and name == identity.topic
            carrier = identity.carrier if identity is not None else "key"
            derived = [PositionsStore(path / POSITIONS_NAME, carrier, REAL_FILESYSTEM)] if is_ours else []
            with SegmentLog.open(
                path,
                LogConfig(),
                derived=derived,
                holders=_holders(known, notes, number) if is_ours else {},
                has_replicas=identity is not None and bool(identity.replicas),
            ) as log:
                found += _purge([log], before_offset, before_ms, is_dry_run=dry_run)
        return found


def _purge(
    logs: Iterable[SegmentLog], before_offset: int | None, before_ms: int | None, *, is_dry_run: bool
) -> list[dict[str, Any]]:
    if (before_offset is None) == (before_ms is None):
        raise BadArgument("before", "give an offset or a time")
    answers = []
    for log in logs:
        purged = log.purge_old(before_offset=before_offset, before_ms=before_ms, dry_run=is_dry_run)
        answers.append(
            {
                "log": log_name(log.topic, log.partition),
                "segments": [segment.base_offset for segment in purged.segments],
                "size_bytes": purged.size_bytes,
                "log_start_offset": purged.log_start_offset,
                "kept_by": purged.kept_by,
                "needed_from": purged.needed_from,
            }
        )
    return answers


def _holders(known: Mapping[str, ShippingProgress], notes: RelayNotes, partition: int) -> Mapping[str, NeededFrom]:
    """What each destination that was used once has not acknowledged, and what a table's relay needs."""
    return {HOLDER: partial(notes.needed_from, partition)} | {
        f"kafka:{topic}": partial(int, at.acknowledged if (at := progress.partitions.get(partition)) else 0)
        for topic, progress in known.items()
    }
