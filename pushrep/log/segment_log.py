"""SegmentLog: the log of one topic partition, opened by the one process that writes it.

<directory of logs>/                       lock, clean marker, checkpoints, published state (directory.py)
    orders-0/                              <topic>-<partition>: this log
        00000000000000000000.log ...       segments and their indexes (directory_files.py)
        leader-epoch-checkpoint            partition.metadata

open ─▶ lock ─▶ marker and checkpoints ─▶ recovery, derived stores (open_log) ─▶ writer (writer.py)
                                        + reader (reader.py) + retention, derived stores (retention.py)

`open_log`: identity ─▶ recovery ─▶ epochs ─▶ derived stores (cut, then given what they lack) ─▶ writer, reader, ...

Whether a log with replicas lost records is known only when it is opened:

    | records ... | x damaged, or gone |                 the end of the records that were there
                  ^ the log ends here  ^ high watermark checkpoint; with damage, everything acknowledged as on disk

`on_lost` is called before a checkpoint is lowered, so that after a crash in between the next opening calls it. It
writes the end to promises.json: until the log ends there again, its member is not counted. After damage only records
known to be on disk count, not what a scan might find.

What the logs of one outbox say together, in the outbox and on a node: disk, scrub, recovery, syncs.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Self
from uuid import UUID, uuid4

from filtering.closing import ClosedAtExit
from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Clock, Filesystem
from pushrep.errors import BadArgument, ForkedProcess, PushrepError
from pushrep.log.batching import Appendable, refuse_columns, refuse_times, to_batches
from pushrep.log.config import AppendResult, Durability, LogConfig
from pushrep.log.directory import DirectoryView, LogDirectory
from pushrep.log.directory_files import (
    PARTITION_METADATA_NAME,
    CheckpointFile,
    list_segments,
    parse_log_name,
    read_leader_epochs,
    read_partition_metadata,
    real_log_path,
    write_leader_epochs,
    write_lists_of_epochs,
    write_partition_metadata,
)
from pushrep.log.disk import DiskLevel, DiskStatus, DiskWatch, ManyFiles, above_limit, run_beside_each_other
from pushrep.log.errors import (
    BelowHighWatermark,
    CorruptLog,
    CorruptPartitionMetadata,
    FileRemoved,
    LogPoisoned,
    NotALog,
    OffsetOutOfRange,
    RepairRefused,
)
from pushrep.log.flush_scheduler import may_be_interrupted, process_flusher
from pushrep.log.published import LogOffsets
from pushrep.log.reader import BatchReader, Bounds, Isolation, LogReader, LogSlices
from pushrep.log.recovery import Opening, Recovered, Recovery, RecoveryReport
from pushrep.log.retention import (
    WHY_HELD,
    BackgroundTasks,
    DerivedStore,
    DerivedStores,
    Lease,
    NeededFrom,
    OnLeaseBroken,
    Purged,
    Retention,
    RetentionHeld,
)
from pushrep.log.scrub import Scrub, ScrubFinding, ScrubStatus
from pushrep.log.segment_repair import SegmentRepair, new_indexes
from pushrep.log.writer import LoadedLog, LogContext, LogWriter, WriterState
from pushrep.records import Record, RecordBatch
from pushrep.records.encoder import Headers, Keys
from pushrep.records.header import OFFSET_MAX
from pushrep.records.leader_epochs import LeaderEpochs
from pushrep.status import Blocks, Histogram, Problem

_LOG = logging.getLogger("pushrep.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """The arguments of SegmentLog.open. is_suspect: as in Recovery."""

    derived: DerivedStores
    holders: Mapping[str, NeededFrom] | None = None
    adopt: bool = False
    log_id: UUID | None = None
    has_replicas: bool = False
    lost: "_Lost | None" = None
    is_suspect: bool = False


def open_log(context: LogContext, attached: Attached) -> tuple[RecoveryReport, LogWriter, BatchReader, BackgroundTasks]:
    """Open the log of `context`, whose directory is locked. Raises as SegmentLog.open."""
    config, view, filesystem = context.config, context.view, context.filesystem
    derived, loaded = attached.derived, load_log(context, attached)
    view.open_files.limit = config.open_files_max
    background = BackgroundTasks(view.disk, config.disk_limits, derived, context.clock)
    writer = LogWriter(context, loaded, background)
    reader = BatchReader(filesystem, view.path, writer)
    retention = Retention(writer, reader, derived, config, view, filesystem, context.clock)
    for name, needed_from in (attached.holders or {}).items():
        retention.hold(name, needed_from)
    background.begin(retention, process_flusher() if context.clock is SYSTEM_CLOCK else None)
    return loaded.recovered.report, writer, reader, background


def load_log(context: LogContext, attached: Attached) -> LoadedLog:
    """Recover the log of `context`. Raises as SegmentLog.open."""
    view, derived = context.view, attached.derived
    recovered, kept_epochs = _load(context, attached)
    report = recovered.report
    if attached.lost is not None:
        attached.lost.check(report.log_end_offset, is_damaged=report.damaged_from is not None)
    # A log with replicas gets its list with its first epoch, so that making the log costs no write of it.
    is_unlisted = attached.has_replicas and kept_epochs is None and report.log_end_offset == 0
    found = _RecoveredLog(recovered)
    reader = BatchReader(context.filesystem, view.path, found)
    epochs = _settle_epochs(context, recovered, reader, kept_epochs, is_written=not is_unlisted)
    derived.settle(found.bounds(), epochs)
    derived.dispatch(reader, found.bounds())
    watermark = None
    if attached.has_replicas:
        watermark = min(max(view.known_watermark, report.log_start_offset), report.log_end_offset)
    return LoadedLog(recovered, epochs, watermark, is_unlisted)


_SHARED_MS = 1000


class _RecoveredLog:
    """A recovered log, to be read before it is open."""

    def __init__(self, recovered: Recovered) -> None:
        self._recovered = recovered

    def bounds(self) -> Bounds:
        report = self._recovered.report
        return Bounds(report.log_start_offset, report.log_end_offset)

    def bases(self, *, fresh: bool) -> Sequence[int]:  # noqa: ARG002 - nobody writes meanwhile
        return self._recovered.bases

    def revision(self) -> int:
        return 0

    cuts = revision
    damage = None


class _Lost:
    """How far a log was known to reach before its opening, and the callback if it does not any more."""

    def __init__(self, directory: LogDirectory, name: str, on_lost: Callable[[int], object], held: int = 0) -> None:
        """held: the high watermark that this process knows."""
        self._high_watermark = max(held, directory.checkpointed(CheckpointFile.HIGH_WATERMARK, name) or 0)
        self._seen, self.on_lost = directory.seen_to(name), on_lost

    def check(self, log_end_offset: int, *, is_damaged: bool = False) -> None:
        known = max(self._high_watermark, self._seen, log_end_offset + 1) if is_damaged else self._high_watermark
        if known > log_end_offset:
            self.on_lost(known)


class _Checkpoints:
    """Stores recovery's progress in the directory of logs, and cuts derived stores before a cut.

    keeps_watermark: the high watermark of a log with replicas stays until the log is open, to show what was lost.
    """

    def __init__(self, view: DirectoryView, derived: DerivedStores, *, keeps_watermark: bool) -> None:
        self._view, self._derived, self._keeps_watermark = view, derived, keeps_watermark
        self._seen_to = max(view.seen_to, derived.highest_end())

    def proven(self, recovery_point: int, *, soon: bool = False) -> None:
        if (self._view.recovery_point or 0) < recovery_point:
            self._view.checkpoint(recovery_point=recovery_point)
            # Ten thousand killed logs share a few writes; the flusher writes the last ones.
            self._view.sync_checkpoints(_SHARED_MS if soon else 0)

    def ends_at(self, offset: int) -> None:
        """Store that readers may have seen records above `offset`, whose offsets the log is about to assign again."""
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
                ("high_watermark", None if self._keeps_watermark else self._view.high_watermark),
            )
            if value is not None and value > offset
        }
        if lower:
            self._view.checkpoint(**lower)
            self._view.sync_checkpoints()
        self._view.lower_published(offset)


def _load(context: LogContext, attached: Attached) -> tuple[Recovered, LeaderEpochs | None]:
    """Recover the log's files; also returns its stored list of epochs. The directory of logs is locked."""
    filesystem, view = context.filesystem, context.view
    try:
        filesystem.make_directory(view.path)
        log_id = _identity(view.path, filesystem, attached)
        kept_epochs = read_leader_epochs(view.path, filesystem)
        checkpoints = _Checkpoints(view, attached.derived, keeps_watermark=attached.has_replicas)
        recovery = Recovery(
            filesystem,
            view.path,
            context.config,
            context.clock,
            checkpoints,
            is_copy=view.is_copy,
            log_id=log_id,
            epochs=kept_epochs,
            repairable_below=_repairable_below(attached, kept_epochs),
            is_suspect=attached.is_suspect,
        )
        recovered = recovery.run(
            view.known_on_disk,
            view.log_start_offset,
            view.clean,
            checkpointed=view.recovery_point or 0,
        )
    except (FileExistsError, NotADirectoryError) as error:
        raise NotALog(view.path, "it is a file; a log is a directory") from error
    except PermissionError as error:
        raise NotALog(view.path, f"{error.filename or view.path} may not be written by this user") from error
    report = recovered.report
    if report.damaged_from is None:
        checkpoints.ends_at(report.log_end_offset)
        view.lower_to_end(report.log_end_offset)  # it was cut, by this recovery or before
    return recovered, kept_epochs


def _repairable_below(attached: Attached, kept_epochs: LeaderEpochs | None) -> int:
    """Damaged segments below it may be repaired later: epochs are known without them, and derived stores have them."""
    if not attached.has_replicas or kept_epochs is None:
        return 0
    lowest = attached.derived.lowest_end()
    return OFFSET_MAX if lowest is None else lowest[0]


def _identity(path: Path, filesystem: Filesystem, attached: Attached) -> UUID:
    """The log's id. A new log gets one before its first segment, so segments without an id are not given one."""
    log_id = read_partition_metadata(path, filesystem)
    if log_id is None:
        if not attached.adopt and list_segments(filesystem, path):
            raise CorruptPartitionMetadata(path / PARTITION_METADATA_NAME, "is missing beside the log's segments")
        log_id = attached.log_id or uuid4()
        write_partition_metadata(path, log_id, filesystem)
    return log_id


def _settle_epochs(
    context: LogContext, recovered: Recovered, reader: BatchReader, kept: LeaderEpochs | None, *, is_written: bool
) -> LeaderEpochs:
    """The list of epochs after recovery: none above the log's end, those of scanned batches, at least one."""
    filesystem, path, report = context.filesystem, context.view.path, recovered.report
    if kept is not None:
        epochs = kept.cut_from(report.log_end_offset + 1)
    else:
        epochs = LeaderEpochs()
        for batch in reader.batches(report.log_start_offset):
            epochs = epochs.assigned(max(0, batch.header.leader_epoch), batch.header.base_offset)
    begun = [entry for entry in epochs.entries if entry[1] == report.log_end_offset]  # epochs without a record
    for epoch, start in recovered.epochs_seen:
        epochs = epochs.assigned(max(0, epoch), start)
    if begun and begun[0][0] > epochs.latest_epoch:
        epochs = epochs.assigned(*begun[0])
    epochs = epochs.cut_below(report.log_start_offset)  # the scan saw the whole segment in which the log starts
    if not epochs.entries:
        epochs = epochs.assigned(0, report.log_end_offset)
    if epochs != kept and report.damaged_from is None and is_written:
        write_leader_epochs(path, epochs, filesystem)
    return epochs


class SegmentLog(ClosedAtExit):
    """A crash-safe log of one topic partition in Kafka's own file format. Thread-safe; a context manager.

    Made by `SegmentLog.open`; beside its writer, every process may use `SegmentLog.open_reader`. After `close` its
    offsets and methods raise LogClosed; in a fork of the process that opened it they raise ForkedProcess. `path`,
    `log_id`, `config`, `recovery`, `disk` and `scrub` can still be used.
    """

    def __new__(cls, *given: object, **_named: object) -> Self:
        """Raises BadArgument if the class is called instead of `open`."""
        if not given or not isinstance(given[0], LogDirectory):
            raise BadArgument("SegmentLog", "is made by SegmentLog.open(directory)")
        return super().__new__(cls)

    def __init__(self, directory: LogDirectory, context: LogContext, attached: Attached) -> None:
        """Use `SegmentLog.open`."""
        self._directory, self._context, self._attached = directory, context, attached
        self.path: Path = context.view.path
        self.topic, self.partition = parse_log_name(self.path.name)
        self.recovery, self._writer, self._reader, self._background = open_log(context, attached)
        self.log_id = self._writer.log_id
        self.cuts = self.quarantines = 0
        """How often it was truncated, and how often damage was quarantined, since it was opened."""
        config = context.config
        scrub = directory.scrub
        scrub.add(self._writer, config.scrub_bytes_per_s, config.scrub_pause_s)
        for found in self.recovery.damaged_segments:
            scrub.report(self._writer, found)
        self._writer.on_unsealed = partial(scrub.soon, self._writer)
        self._reader.on_suspect = lambda base: scrub.soon(self._writer, base, partial(self._rebuild_index, base))
        self._reader.on_damage = partial(scrub.soon, self._writer)
        self._closing = threading.Lock()
        self._closed = False

    @classmethod
    def open(  # noqa: PLR0913 - what a log stands on, all by name
        cls,
        directory: Path | str,
        config: LogConfig | None = None,
        *,
        derived: Sequence[DerivedStore] = (),
        holders: Mapping[str, NeededFrom] | None = None,
        adopt: bool = False,
        log_id: UUID | None = None,
        has_replicas: bool = False,
        on_lost: Callable[[int], object] | None = None,
        filesystem: Filesystem = REAL_FILESYSTEM,
        clock: Clock = SYSTEM_CLOCK,
    ) -> Self:
        """Open or make the log in `directory`, named `<topic>-<partition>`; `.recovery` reports what was done.

        `derived` are cut to the log's records, and get those that they lack, before this returns. `holders`: by name,
        the functions as for `hold`. `adopt`: take segments that have no partition.metadata, as a new log.
        `log_id`: for a log that is made now; an existing one keeps its own. `has_replicas`: only
        `advance_high_watermark` raises the high watermark; else it is the log end offset. `on_lost(end)` is called if
        the log of replicas held records up to `end` and ends below; its error is raised.
        Raises LogLocked (with the pid) if another process writes in the directory above, InvalidLogName, NotALog and
        NotALog for what can't be one, CompactedLog, CorruptLog if files are missing,
        CorruptPartitionMetadata if it is unknown which log this is, LogPoisoned if the disk fails.
        """
        path = real_log_path(directory)
        if not isinstance(config, LogConfig | None):
            raise BadArgument("config", f"give a LogConfig, not {type(config).__name__}")
        shared = LogDirectory.acquire(path.parent, filesystem, clock, is_real=True)
        try:
            lost = None if on_lost is None else _Lost(shared, path.name, on_lost)
            if lost is not None and not filesystem.exists(path):
                lost.check(0)  # attaching forgets everything known of a removed log
            view = shared.attach(path.name)
            try:
                context = LogContext(filesystem, clock, view, config if config is not None else LogConfig())
                attached = Attached(
                    derived=DerivedStores(derived),
                    holders=holders,
                    adopt=adopt,
                    log_id=log_id,
                    has_replicas=has_replicas,
                    lost=lost,
                )
                return view.reserve.call(lambda: cls(shared, context, attached))
            except BaseException:
                view.close()
                raise
        except BaseException:
            with suppress(OSError):  # the first error is the one to raise
                shared.release()
            raise

    @property
    def stopped_by(self) -> BaseException | None:
        """The failure (a sync, EIO, a read-only disk) after which the log takes no appends until `reopen`, if any."""
        return self._checked_writer().stopped_by

    def when_stopped(self, call: Callable[[BaseException], object]) -> None:
        """Call `call(failure)`, which must not wait, whenever a failure stops the log."""
        self._checked_writer().on_stopped = call

    def reopen(self) -> None:
        """Open the log again in place after a failure has stopped it, as after a crash: it ends where recovery finds
        its end, never below `flushed_offset`. Readers, holders and leases stay. Else does nothing.

        A newest file that was removed or renamed is written back first, from the descriptor that is still open. If it
        was cut, the log is damaged from there on.

        Nobody may append or flush meanwhile. Raises what `open` raises of the files (LogPoisoned, OSError, CorruptLog):
        it is still stopped then.
        """
        writer, context, attached, lost = self._checked_writer(), self._context, self._attached, self._attached.lost
        if writer.stopped_by is None:
            return

        def recover() -> LoadedLog:
            if not context.filesystem.exists(self.path):  # a new log, of another id, would be made there
                raise CorruptLog(self.path, (self.path.name,), "the directory is gone")
            held = writer.high_watermark
            context.view.look_again(writer.flushed_offset)
            known = lost and _Lost(self._directory, self.path.name, lost.on_lost, held)
            again = replace(attached, lost=known, is_suspect=isinstance(writer.stopped_by, FileRemoved))
            loaded = context.view.reserve.call(lambda: load_log(context, again))
            self.recovery = loaded.recovered.report
            return loaded

        with self._background.retention.paused():
            writer.reopen(recover)
        self._background.retention.forget()
        self._reader.forget()
        for found in self.recovery.damaged_segments:
            self.scrub.report(writer, found)

    @classmethod
    def open_reader(
        cls,
        directory: Path | str,
        *,
        isolation: Isolation = "stable",
        filesystem: Filesystem = REAL_FILESYSTEM,
    ) -> LogReader:
        """Read beside the writer, or without one: no lock, no recovery, no writes.

        `isolation` "stable" reads what can never be taken back, below min(high watermark, flushed offset); "written"
        reads to the log end. Raises InvalidLogName, NotALog.
        """
        return LogReader(directory, isolation=isolation, filesystem=filesystem)

    def moved_ms(self) -> int | None:
        """See LogDirectory.moved_ms."""
        return self._directory.moved_ms()

    def state(self) -> WriterState:
        """The offsets and epochs at one moment."""
        return self._checked_writer().state()

    def ends(self) -> LogOffsets:
        """The log's ends and damage at one moment, as a reader in another process is told them."""
        return self._checked_writer().ends()

    def history(self) -> int:
        """Changes before records are taken off the log's end: under another number others may be at their offsets."""
        return self._checked_writer().cuts()

    @property
    def log_start_offset(self) -> int:
        """First offset that can be read."""
        return self._checked_writer().log_start_offset

    @property
    def log_end_offset(self) -> int:
        """The offset that the next record gets."""
        return self._checked_writer().log_end_offset

    @property
    def flushed_offset(self) -> int:
        """First offset not known to be on disk."""
        return self._checked_writer().flushed_offset

    @property
    def high_watermark(self) -> int:
        """First offset not yet held by enough replicas; the log end offset where there are none."""
        return self._checked_writer().high_watermark

    @property
    def leader_epochs(self) -> LeaderEpochs:
        """Which leader epoch begins at which offset; appends are stamped with the last one."""
        return self._checked_writer().leader_epochs

    @property
    def stable_offset(self) -> int:
        """min(high watermark, flushed offset): nothing below is ever taken back."""
        return self._checked_writer().stable_offset

    def size_from(self, offset: int) -> int:
        """Bytes of the records from `offset` to the log end, too high by at most an index interval. Raises OSError."""
        return self._checked_writer().size_from(offset)

    @property
    def config(self) -> LogConfig:
        """Its settings: those that it was opened with, or of the last `configure`."""
        return self._context.config

    def configure(self, config: LogConfig) -> None:
        """Go on with other settings, from now on: the files' size and age, retention, and the disk's limits.

        Raises BadArgument, which names the setting, if another one differs or the largest batch would.
        """
        writer = self._checked_writer()
        self.config.refuse_change(config)
        self._context = replace(self._context, config=config)
        writer.configure(config)
        self._background.configure(config)

    @property
    def disk(self) -> DiskWatch:
        """The disk below the directory of logs: how full it is, how long its syncs took."""
        return self._context.view.disk

    def why_no_append(self) -> str:
        """Why an append would be refused now; empty if it would not."""
        writer = self._checked_writer()
        if not writer.is_writable:
            failure = writer.stopped_by
            why = "it is damaged" if failure is None else f"a sync failed, or a write that can't be undone: {failure}"
            return f"{self.path} takes no records: {why}"
        if self.disk.level(self._context.config.disk_limits) is DiskLevel.FULL:
            return str(above_limit(self.path, self.disk.usage, self._context.config.disk_limits))
        return ""

    @property
    def ignored_index_entries(self) -> int:
        """How many wrong index entries reads of this object ignored.

        The scrub rebuilds such indexes of a sealed segment at once, `close` those of the newest.
        """
        return self._reader.ignored_entries

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases that keep records of this log from being removed. Raises LogClosed."""
        self._checked_writer()
        return tuple(self._background.retention.leases)

    @property
    def retention_held(self) -> RetentionHeld | None:
        """Since and until when removal by time rests, because the wall clock may be wrong; None if it does not."""
        return self._background.retention.held

    @property
    def scrub(self) -> Scrub:
        """The background check of all sealed segments of the directory's logs; `status` has its findings."""
        return self._directory.scrub

    @property
    def damaged_segments(self) -> tuple[ScrubFinding, ...]:
        """The damaged segments of this log that the scrub has found and nobody has repaired yet, ascending."""
        mine = (found for found in self.scrub.status.findings if found.log == self.path.name)
        return tuple(sorted(mine, key=attrgetter("base_offset")))

    def repair_segment(self, base_offset: int) -> SegmentRepair | None:
        """Begin the repair of a damaged sealed segment with batches of another member; None if none is damaged there.

        `add` that member's batches from `wanted` on, until it `is_done`; close it in any case. One repair of a segment
        at a time. Raises RepairRefused, OSError.
        """
        writer = self._checked_writer()
        found = next((one for one in self.damaged_segments if one.base_offset == base_offset), None)
        if found is None:
            return None
        cuts = writer.cuts()

        def put(repair: SegmentRepair) -> None:
            if not repair.is_proved:
                repair.keep_replaced()
            if not writer.replace_sealed(base_offset, found.end_offset, cuts, repair.put):
                raise RepairRefused("the log was cut meanwhile, or starts behind it")
            self._reader.forget()
            self.scrub.repaired(writer, base_offset)

        return SegmentRepair(
            self._context.filesystem,
            self.path,
            base_offset,
            found.end_offset,
            epochs=writer.leader_epochs,
            log_id=self.log_id,
            on_done=put,
        )

    def _rebuild_index(self, base_offset: int) -> None:
        """Rebuild a sealed segment's indexes beside the old ones, while others read and append."""
        context, writer, cuts = self._context, self._writer, self._writer.cuts()
        following = dict(writer.sealed()).get(base_offset)
        if following is None:
            return
        try:
            with new_indexes(context.filesystem, self.path, base_offset, following, context.config) as put:
                is_put = writer.replace_sealed(base_offset, following, cuts, put)
        except (OSError, PushrepError) as error:  # readers manage without indexes
            _LOG.warning("%s: the indexes of segment %d are not made anew: %s", self.path, base_offset, error)
            return
        if is_put:
            self._reader.suspect_segments.discard(base_offset)
            _LOG.warning("%s: the indexes of segment %d were made anew", self.path, base_offset)

    @property
    def damaged_from(self) -> int | None:
        """First offset that was on disk and can't be read: the log ends there and takes no appends. None: all is well.

        After `quarantine`, too, `recovery` reports what the opening found.
        """
        return self._checked_writer().damaged_from

    def append(  # noqa: PLR0913 - a batch's columns
        self,
        data: Appendable,
        *,
        keys: Keys | None = None,
        headers: Headers | None = None,
        timestamps_ms: int | Sequence[int] | None = None,
        durability: Durability = Durability.FLUSHED,
        base_offset: int | None = None,
    ) -> AppendResult:
        """Append one value (bytes), a list of values, or an encoded RecordBatch; returns the records' offsets.

        `keys` and `headers` are columns as `encode_batch` takes them, `timestamps_ms` one time or one per value
        (None: now). An encoded batch has its own; its offsets and epoch are stamped into it. All or nothing is
        appended. `base_offset`: append only if the log ends there, for records that contain their own offsets; else
        raise LogEndMoved. Raises RecordTooLarge, BadArgument, CorruptRecordBatch (for an encoded batch), AppendFailed
        (the disk is full, or fuller than the settings allow: nothing was written), LogPoisoned,
        LogDamaged.
        """
        writer = self._checked_writer()
        if not isinstance(durability, Durability):
            raise BadArgument("durability", f"give Durability.FLUSHED or BUFFERED, not {durability!r}")
        if isinstance(data, RecordBatch):
            refuse_columns(keys=keys, headers=headers, timestamps_ms=timestamps_ms)
            times: int | Sequence[int] = 0  # the batch has its own
            has_others_times = not data.is_own
        else:
            has_others_times = timestamps_ms is not None
            times = self._context.clock.wall_ms() if timestamps_ms is None else timestamps_ms
        config = self._context.config
        batches = to_batches(data, keys, headers, times, config)
        if has_others_times and config.limits_times:
            refuse_times(batches, config, self._context.clock.wall_ms())
        try:
            if durability is Durability.FLUSHED and base_offset is None and not may_be_interrupted():
                return writer.append_together(batches)
            reopened_after = writer.reopened_after
            result = writer.append(batches, base_offset)
            if durability is Durability.FLUSHED:
                writer.flush_acknowledged(reopened_after, result.last_offset + 1)
        except LogPoisoned:
            writer.is_told = True
            raise
        return result

    def append_as_is(self, batches: Sequence[RecordBatch]) -> None:
        """Append a leader's checked batches with their offsets and epochs, as a replica does.

        Newer epochs are on disk before their batches are written. Raises as `append`; LogEndMoved if a batch does not
        follow the one before.
        """
        self._checked_writer().append_as_is(batches)

    def begin_epoch(self, leader_epoch: int, start_offset: int) -> None:
        """Add an epoch that begins at `start_offset`, the log end, to the list; on disk when this returns.

        Raises BadArgument for another offset, or below the epoch of the last record, OSError.
        """
        self._checked_writer().begin_epoch(leader_epoch, start_offset)

    def begin_epochs(self, begun: Sequence[tuple["SegmentLog", int, int]]) -> None:
        """`begin_epoch` of many logs, each with its leader epoch and start offset; this is one of them.

        Raises as that does; then some of the lists may have the epoch on disk.
        """
        context = self._context
        with ExitStack() as beginning:
            lists: dict[Path, LeaderEpochs] = {}
            for log, leader_epoch, start_offset in sorted(begun, key=lambda one: one[0].path):  # as one lock order
                epochs = beginning.enter_context(log.beginning_epoch(leader_epoch, start_offset))
                if epochs is not None:
                    lists[log.path] = epochs

            def write() -> None:
                with ManyFiles(context.filesystem, context.clock, list(lists)) as files:
                    write_lists_of_epochs(lists, files, context.filesystem)

            if lists:
                context.view.reserve.call(write)

    def beginning_epoch(self, leader_epoch: int, start_offset: int) -> AbstractContextManager[LeaderEpochs | None]:
        """See LogWriter.beginning_epoch."""
        return self._checked_writer().beginning_epoch(leader_epoch, start_offset)

    def run_beside_others(self, calls: Sequence[Callable[[], object]]) -> None:
        """Run calls that wait for this log's disk concurrently; after the last one raises the first one's error."""
        run_beside_each_other(self._context.filesystem, self._context.clock, self.path, calls)

    def forget_epochs_above(self, leader_epoch: int) -> None:
        """Remove epochs newer than `leader_epoch`, which have no record yet, from the list, durably.

        Raises BadArgument if one of them has a record, OSError.
        """
        self._checked_writer().forget_epochs_above(leader_epoch)

    def begin_anew(self, offset: int, leader_epoch: int) -> tuple[str, ...]:
        """Rename all segments to `.stale`: the log is empty then and starts at `offset`, where the epoch begins.

        Returns the names of those files. Raises LogPoisoned.
        """
        writer = self._checked_writer()
        with self._background.retention.paused():
            kept = writer.begin_anew(offset, leader_epoch)
        self._reader.forget()
        return kept

    def advance_high_watermark(self, offset: int) -> None:
        """Raise the high watermark of a log with replicas to `offset`, at most to the log end; a lower one changes
        nothing.

        Readers see it at once; it is checkpointed with the next flush in the background.
        """
        self._checked_writer().advance_high_watermark(offset)

    def flush(self) -> None:
        """Everything appended so far is on disk when this returns. Raises LogPoisoned."""
        writer = self._checked_writer()
        try:
            writer.flush_acknowledged(writer.reopened_after, writer.log_end_offset)
        except LogPoisoned:
            writer.is_told = True
            raise

    def read(self, offset: int, max_bytes: int) -> bytes:
        """Whole batches from the one that holds `offset` on, at most `max_bytes` but at least one.

        Empty at the log end. Raises OffsetOutOfRange, CorruptBatch.
        """
        self._checked_writer()
        return self._reader.read(offset, max_bytes)

    def read_to_repair(self, offset: int, max_bytes: int) -> bytes:
        """As `read`, also below the log start in the segment that holds it: its repair needs the whole segment."""
        self._checked_writer()
        return self._reader.read(offset, max_bytes, below_start=True)

    def slices(self) -> LogSlices:
        """The batches as slices of files, for sendfile. Don't use it while the log is cut, or after `close`."""
        writer = self._checked_writer()
        return LogSlices(
            self._context.filesystem,
            self.path,
            bases=lambda fresh: writer.bases(fresh=fresh),
            epochs=lambda: writer.leader_epochs,
            seals=self._reader.seals,
        )

    def batches(self, start: int, end: int | None = None) -> Iterator[RecordBatch]:
        """Every batch with an offset in [start, end), up to the present log end. Raises as `read`."""
        self._checked_writer()
        return self._reader.batches(start, end)

    def records(self, start: int, end: int | None = None) -> Iterator[Record]:
        """Every record in [start, end), up to the present log end. Raises as `read`."""
        self._checked_writer()
        return self._reader.records(start, end)

    def offset_for_timestamp(self, timestamp_ms: int) -> int | None:
        """Offset of the first record whose time is `timestamp_ms` or later; None if there is none."""
        self._checked_writer()
        return self._reader.offset_for_timestamp(timestamp_ms)

    def offset_of_largest_timestamp(self) -> int | None:
        """Offset of the first record with the largest time, as Kafka's ListOffsets gives it for the time -3; None if no
        record has a time.
        """
        self._checked_writer()
        return self._reader.offset_of_largest_timestamp()

    def truncate_to(self, offset: int, *, force: bool = False, keep: bool = False) -> int:
        """Cut the log at the base of the batch that holds `offset`; returns the new log end offset.

        At or above the log end nothing happens. `keep`: keep all that is cut in `.cut` files, else nothing. Raises
        BelowHighWatermark unless `force` says that acknowledged records may go, OffsetOutOfRange below the log start,
        LogDamaged.
        """
        if not hasattr(offset, "__index__"):
            raise BadArgument("offset", f"give an offset, not {offset!r}")
        writer = self._checked_writer()
        if offset < writer.log_start_offset:
            raise OffsetOutOfRange(offset, *writer.bounds())
        if offset < writer.high_watermark and not force:
            raise BelowHighWatermark(offset, writer.high_watermark)
        with self._background.retention.paused():
            before = writer.log_end_offset
            end = writer.truncate_to(offset, keep=keep)
            self.cuts += end < before
        self._reader.forget()
        return end

    def quarantine(self) -> tuple[str, ...]:
        """Move everything from the damage on to `.corrupt` files; returns their names.

        For a log with `damaged_from`, if its records can be fetched again elsewhere: afterwards it ends there and takes
        appends. Nothing is deleted. Without damage nothing is done. Raises LogPoisoned.
        """
        writer = self._checked_writer()
        with self._background.retention.paused():
            kept = writer.quarantine()
            self.quarantines += bool(kept)
        self._reader.forget()
        return kept

    def apply_retention(self) -> tuple[int, ...]:
        """Run a pass of retention now; returns the base offsets of the removed segments.

        A pass removes a few segments at most: call it until the result is empty. Raises OSError.
        """
        self._checked_writer()
        return self._background.retention.run()

    def purge(self, before_offset: int) -> int:
        """Remove the whole segments that end at or below `before_offset`; returns the log start offset.

        Raises StillNeeded (which names the reader) if one of them is needed, OffsetOutOfRange, OSError.
        """
        self._checked_writer()
        return self._background.retention.purge(before_offset)

    def delete_records(self, before_offset: int) -> int:
        """Let the log start at `before_offset`, as Kafka's DeleteRecords does, and remove the segments below it.

        The log start offset after it. Raises as `purge`.
        """
        self._checked_writer()
        return self._background.retention.purge(before_offset, inside=True)

    def purge_old(
        self, *, before_offset: int | None = None, before_ms: int | None = None, dry_run: bool = False
    ) -> Purged:
        """Remove whole old segments that nobody needs.

        These end at or below `before_offset`, or hold only records older than `before_ms`. Never the active one, nor
        what a holder, a lease, a replica or a derived store needs: `kept_by` of the result names it. dry_run: remove
        nothing. Raises LogClosed, LogDamaged, LogPoisoned, OSError.
        """
        self._checked_writer()
        return self._background.retention.purge_old(before_offset=before_offset, before_ms=before_ms, dry_run=dry_run)

    def hold(self, name: str, needed_from: NeededFrom) -> None:
        """Keep everything from `needed_from()` on (None: it needs nothing), until `drop_holder(name)`.

        For destinations and replicas: it is called before each removal, in any thread; it must neither wait nor call
        the log. ValueError if the name is taken.
        """
        self._checked_writer()
        self._background.retention.hold(name, needed_from)

    def drop_holder(self, name: str) -> None:
        """Remove the holder `name`; ValueError if there is none of that name."""
        self._checked_writer()
        self._background.retention.drop(name)

    def acquire_lease(self, name: str, offset: int, on_broken: OnLeaseBroken | None = None) -> Lease:
        """Keep everything from `offset` on for a reader of the past, as long as it renews within `lease_max_s`.

        `on_broken(reason)` is called if the lease is broken: not renewed, or the disk is too full; it must not wait.
        Raises OffsetOutOfRange, LeaseBroken if the disk is too full now.
        """
        self._checked_writer()
        return self._background.acquire_lease(name, offset, on_broken)

    def close(self) -> None:
        """Write everything to disk and close the log; closing twice is fine.

        Raises LogPoisoned or OSError if that failed: then the next open scans. LogPoisoned, too, if a sync in the
        background failed before and no call has raised that yet: what was appended is perhaps not on disk.
        """
        self._check_fork()
        with self._closing:
            if self._closed:
                return
            self._closed = True
        clean = None
        try:
            self._directory.scrub.remove(self._writer)
            self._background.end()
            clean = self._writer.close()
            if clean is not None:
                self._background.sync_derived()
                self._rebuild_suspect_indexes()
        finally:
            # Not before: a holder who is told of it looks whether the log is closed.
            self._background.retention.leases.break_all("the log was closed")
            view = self._context.view
            try:
                view.close(clean)
            finally:
                self._directory.release()

    def _rebuild_suspect_indexes(self) -> None:
        context, suspects = self._context, self._reader.suspect_segments
        if suspects:
            try:
                bases = list_segments(context.filesystem, self.path)
                for base, following in pairwise([*bases, None]):
                    if base in suspects:
                        with new_indexes(context.filesystem, self.path, base, following, context.config) as put:
                            put()
            except OSError as error:  # readers manage without indexes
                _LOG.warning("%s: its indexes are not made anew: %s", self.path, error)

    def __repr__(self) -> str:
        return f"SegmentLog({str(self.path)!r})"

    def _checked_writer(self) -> LogWriter:
        writer = self._writer
        if self._directory.forked or writer.is_closed:  # inlined, because every property calls this
            self._check_fork()
            writer.check_open()
        return writer

    def _check_fork(self) -> None:
        if self._directory.forked:
            raise ForkedProcess(f"the log {self.path}", owner_pid=self._directory.owner_pid, pid=os.getpid())


class RecoveryStatus(NamedTuple):
    """How logs were opened, and cut since. recoveries: logs that were opened after an unclean stop."""

    recoveries: int
    seconds: float
    cut_bytes: int
    cuts: int
    quarantines: int


class LogsStatus(NamedTuple):
    """The logs of one outbox in one directory. moved_ms: since when its path leads elsewhere. syncs: of segments."""

    outbox_id: str
    topic: str
    directory: str
    moved_ms: int | None
    disk: DiskStatus
    scrub: ScrubStatus
    recovery: RecoveryStatus
    syncs: Histogram | None
    held: RetentionHeld | None


def logs_status(outbox_id: str, logs: Iterable[SegmentLog]) -> LogsStatus:
    """The status of open logs, one at least. Raises LogClosed."""
    logs = list(logs)
    reports = [log.recovery for log in logs]
    disk = logs[0].disk
    return LogsStatus(
        outbox_id,
        logs[0].topic,
        str(logs[0].path.parent),
        logs[0].moved_ms(),
        disk.status({log.config.disk_limits for log in logs}),
        logs[0].scrub.status,
        RecoveryStatus(
            recoveries=sum(one.opening is Opening.ABNORMAL for one in reports),
            seconds=sum(one.seconds for one in reports),
            cut_bytes=sum(one.cut.size_bytes for one in reports if one.cut),
            cuts=sum(log.cuts for log in logs),
            quarantines=sum(log.quarantines for log in logs),
        ),
        Histogram.of([disk.syncs]),
        max(filter(None, (log.retention_held for log in logs)), key=attrgetter("until_ms"), default=None),
    )


def logs_problems(logs: Iterable[LogsStatus], blocks: Blocks | None = None) -> Iterator[Problem]:
    """The problems of disks and sealed segments. blocks: of a node, whose full disk blocks no appends."""
    logs = list(logs)
    places = ["" if blocks is None else f"/{one.outbox_id}" for one in logs]
    for disk, place in dict(zip((one.disk for one in logs), places, strict=True)).items():
        used = f"{disk.used_bytes} of {disk.size_bytes} bytes are used"
        if disk.level >= DiskLevel.FULL:
            why = f"{used}: appends are refused"
            yield Problem("disk_full", f"disk {disk.mount}", why, disk.since_ms, blocks, place)
        elif disk.level >= DiskLevel.PRESSED:
            yield Problem("disk_filling", f"disk {disk.mount}", used, disk.since_ms, argument=place)
    for one, place in zip(logs, places, strict=True):
        if one.moved_ms is not None:
            why = "another directory is at its path: its process goes on in the one that was moved"
            yield Problem("directory_moved", f"directory {one.directory}", why, one.moved_ms, argument=place)
        for finding in one.scrub.findings:
            why = f"damaged from offset {finding.offset} on: {finding.reason}"
            subject, log = f"{finding.log}/{finding.segment}", f"{place} {finding.log}"
            yield Problem("segment_damaged", subject, why, finding.found_ms, argument=log)
        if one.held is not None:
            yield Problem("retention_held", f"topic {one.topic}", WHY_HELD, one.held.since_ms, argument=place)
