"""Opening a log: who it is, what recovery finds, what is derived from it, and then the parts that use it.

identity ─▶ recovery ─▶ epochs ─▶ derived stores: cut, then told what they lack ─▶ writer, reader, housekeeping
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID, uuid4

from pushrep.env import SYSTEM_CLOCK, Filesystem
from pushrep.log.derived import DerivedStore, DerivedStores
from pushrep.log.directory import DirectoryView
from pushrep.log.directory_files import (
    PARTITION_METADATA_NAME,
    read_leader_epochs,
    read_partition_metadata,
    write_leader_epochs,
    write_partition_metadata,
)
from pushrep.log.errors import NotALog, PartitionMetadataMissing
from pushrep.log.flusher import process_flusher
from pushrep.log.housekeeping import Housekeeping
from pushrep.log.keeping import Keeper, NeededFrom
from pushrep.log.log_writer import Surroundings
from pushrep.log.reading import BatchReader, Bounds
from pushrep.log.recovery import Recovered, Recovery, RecoveryReport
from pushrep.log.replicated_log import ReplicatedLog
from pushrep.log.segment_files import list_segments
from pushrep.records.header import OFFSET_MAX
from pushrep.records.leader_epochs import LeaderEpochs


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """What its opener brings to a log: see SegmentLog.open."""

    derived: Sequence[DerivedStore] = ()
    holders: Mapping[str, NeededFrom] | None = None
    adopt: bool = False
    log_id: UUID | None = None
    has_replicas: bool = False


@dataclass(frozen=True, slots=True)
class OpenedLog:
    """The parts of a log that is open."""

    log_id: UUID
    report: RecoveryReport
    writer: ReplicatedLog
    reader: BatchReader
    housekeeping: Housekeeping


def open_log(around: Surroundings, attached: Attached) -> OpenedLog:
    """Open the log of `around`, whose directory is locked. Raises as SegmentLog.open."""
    config, view, filesystem = around.config, around.view, around.filesystem
    derived = DerivedStores(attached.derived)
    recovered, log_id = _load(around, derived, attached)
    try:
        epochs = _settle_epochs(around, recovered)
        found = _Found(recovered, view.cleaned_offset)
        if derived:
            derived.settle(found.bounds(), epochs)
            derived.tell(BatchReader(filesystem, view.path, found), found.bounds())
    except BaseException:
        recovered.active.close()
        raise
    view.open_files.limit = config.open_files_max
    housekeeping = Housekeeping(view.disk, config.disk_limits, derived, config.retention_check_ms, around.clock)
    watermark = _watermark(view, recovered.report) if attached.has_replicas else None
    writer = ReplicatedLog(around, recovered, epochs, housekeeping, watermark)
    reader = BatchReader(filesystem, view.path, writer)
    keeper = Keeper(writer, reader, derived, config, view.path, filesystem, around.clock)
    for name, needed_from in (attached.holders or {}).items():
        keeper.hold(name, needed_from)
    housekeeping.begin(writer, reader, keeper, process_flusher() if around.clock is SYSTEM_CLOCK else None)
    return OpenedLog(log_id, recovered.report, writer, reader, housekeeping)


_LOG = logging.getLogger("pushrep.log")

_SHARED_MS = 1000


class _Found:
    """A log as recovery found it, to be read before it is in use."""

    def __init__(self, recovered: Recovered, cleaned_offset: int) -> None:
        self._recovered, self._cleaned_offset = recovered, cleaned_offset

    def bounds(self) -> Bounds:
        report = self._recovered.report
        return Bounds(report.log_start_offset, report.log_end_offset)

    def bases(self, *, fresh: bool) -> Sequence[int]:  # noqa: ARG002 - nobody writes meanwhile
        return self._recovered.bases

    def cleaned_offset(self) -> int:
        return self._cleaned_offset

    def revision(self) -> int:
        return 0


class _Checkpoints:
    """What recovery tells the directory of logs; derived stores are cut before it hears of a cut."""

    def __init__(self, view: DirectoryView, derived: DerivedStores) -> None:
        self._view, self._derived = view, derived
        self._seen_to = max(view.seen_to, derived.highest_end())

    def proven(self, recovery_point: int, *, soon: bool = False) -> None:
        if (self._view.recovery_point or 0) < recovery_point:
            self._view.checkpoint(recovery_point=recovery_point)
            # Ten thousand logs that were killed share a few writes; the flusher brings the last ones to disk.
            self._view.sync_checkpoints(_SHARED_MS if soon else 0)

    def ends_at(self, offset: int) -> None:
        """Whoever saw records above that has to hear of it: the log is about to give their offsets to others."""
        if offset < self._seen_to:
            seen, self._seen_to = self._seen_to, 0
            self._view.give_up(seen)
            _LOG.error(
                "%s ends at offset %d: records up to %d were on disk and are gone", self._view.path, offset, seen
            )

    def about_to_cut(self, offset: int) -> None:
        self.ends_at(offset)
        self._derived.cut_to(offset)
        lower = {
            name: offset
            for name, value in (
                ("recovery_point", self._view.recovery_point),
                ("high_watermark", self._view.high_watermark),
            )
            if value is not None and value > offset
        }
        if lower:
            self._view.checkpoint(**lower)
            self._view.sync_checkpoints()
        self._view.lower_published(offset)


def _load(around: Surroundings, derived: DerivedStores, attached: Attached) -> tuple[Recovered, UUID]:
    """Read the log's own files; the directory of logs is locked by now."""
    filesystem, view = around.filesystem, around.view
    try:
        filesystem.make_directory(view.path)
        log_id = _identity(view.path, filesystem, attached)
        checkpoints = _Checkpoints(view, derived)
        recovery = Recovery(
            filesystem,
            view.path,
            around.config,
            around.clock,
            checkpoints,
            is_copy=view.is_copy,
            log_id=log_id,
            repairable_below=_repairable_below(around, derived, attached),
        )
        recovered = recovery.run(
            view.known_on_disk,
            view.log_start_offset,
            view.clean,
            view.cleaned_offset,
            checkpointed=view.recovery_point or 0,
        )
    except (FileExistsError, NotADirectoryError) as error:
        raise NotALog(view.path, "it is a file; a log is a directory") from error
    except PermissionError as error:
        raise NotALog(view.path, f"{error.filename or view.path} may not be written by this user") from error
    report = recovered.report
    if report.damaged_from is None:
        checkpoints.ends_at(report.log_end_offset)
        view.lower_to_end(report.log_end_offset)  # it was cut, now or before
    return recovered, log_id


def _repairable_below(around: Surroundings, derived: DerivedStores, attached: Attached) -> int:
    """Up to where a sealed segment may be damaged: its epochs are told without it, and no store has to hear of it."""
    if not attached.has_replicas or read_leader_epochs(around.view.path, around.filesystem) is None:
        return 0
    lowest = derived.lowest_end()
    return OFFSET_MAX if lowest is None else lowest[0]


def _identity(path: Path, filesystem: Filesystem, attached: Attached) -> UUID:
    """The log's id; a new log gets one before its first segment, so segments without one are not ours to name."""
    log_id = read_partition_metadata(path, filesystem)
    if log_id is None:
        if not attached.adopt and list_segments(filesystem, path):
            raise PartitionMetadataMissing(path / PARTITION_METADATA_NAME)
        log_id = attached.log_id or uuid4()
        write_partition_metadata(path, log_id, filesystem)
    return log_id


def _watermark(view: DirectoryView, report: RecoveryReport) -> int:
    """The highest that is known of it: what was published outlives a kill, the checkpoint a power cut."""
    published = view.published_before.high_watermark if view.published_before is not None else 0
    known = max(published, view.high_watermark or 0, report.log_start_offset)
    return min(known, report.log_end_offset)


def _settle_epochs(around: Surroundings, recovered: Recovered) -> LeaderEpochs:
    """The list of epochs as the log has them: none above its end, those that the scan met, at least one."""
    filesystem, path = around.filesystem, around.view.path
    kept, report = read_leader_epochs(path, filesystem), recovered.report
    epochs = LeaderEpochs()
    if kept is not None:
        epochs = kept.cut_from(report.log_end_offset + 1).cut_below(report.log_start_offset)
    if kept is None:
        reader = BatchReader(filesystem, path, _Found(recovered, around.view.cleaned_offset))
        for batch in reader.batches(report.log_start_offset):
            epochs = epochs.assigned(max(0, batch.header.leader_epoch), batch.header.base_offset)
    begun = [entry for entry in epochs.entries if entry[1] == report.log_end_offset]  # no record of it yet
    for epoch, start in recovered.epochs_seen:
        epochs = epochs.assigned(max(0, epoch), start)
    if begun and begun[0][0] > epochs.latest_epoch:
        epochs = epochs.assigned(*begun[0])
    if not epochs.entries:
        epochs = epochs.assigned(0, report.log_end_offset)
    if epochs != kept and report.damaged_from is None:
        write_leader_epochs(path, epochs, filesystem)
    return epochs
