"""SegmentLog: the log of one topic partition, opened by the one process that writes it.

<directory of logs>/                       lock, clean marker, checkpoints, published state (directory.py)
    orders-0/                              <topic>-<partition>: this log
        00000000000000000000.log ...       segments and their indexes (segment_files.py)
        leader-epoch-checkpoint            partition.metadata

open ─▶ lock ─▶ marker and checkpoints ─▶ recovery (recovery.py) ─▶ LogWriter (log_writer.py) + BatchReader (reading.py)
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import UUID, uuid4

from pushrep.errors import ForkedProcess
from pushrep.log.batching import Appendable, to_batches
from pushrep.log.config import AppendResult, Durability, LogConfig
from pushrep.log.directory import DirectoryView, LogDirectory
from pushrep.log.errors import BelowHighWatermark, NotALog, OffsetOutOfRange
from pushrep.log.leader_epochs import LeaderEpochs, read_leader_epochs, write_leader_epochs
from pushrep.log.log_names import parse_log_name
from pushrep.log.log_reader import Isolation, LogReader
from pushrep.log.log_writer import LogWriter, Surroundings
from pushrep.log.partition_metadata import read_partition_metadata, write_partition_metadata
from pushrep.log.reading import BatchReader, Bounds
from pushrep.log.recovery import Recovered, Recovery
from pushrep.log.recovery_report import RecoveryReport
from pushrep.records import Record, RecordBatch
from pushrep.records.encoder import Headers, Keys
from pushrep.seams import REAL_FILESYSTEM, SYSTEM_CLOCK, Clock, Filesystem


class SegmentLog:
    """A crash-safe log of one topic partition in Kafka's own file format. Thread-safe; a context manager.

    Made by `SegmentLog.open`; beside its writer, every process may use `SegmentLog.open_reader`. After `close`
    everything raises LogClosed, and in a fork of the process that opened it everything raises ForkedProcess.
    """

    def __init__(self, directory: LogDirectory, around: Surroundings, recovered: Recovered, log_id: UUID) -> None:
        """Use `SegmentLog.open`."""
        self._directory, self._around = directory, around
        self.path: Path = around.view.path
        self.topic, self.partition = parse_log_name(self.path.name)
        self.log_id = log_id
        self.recovery: RecoveryReport = recovered.report
        self._writer = LogWriter(around, recovered, _settle_epochs(around, recovered))
        self._reader = BatchReader(around.filesystem, self.path, self._writer)
        self._closed = False

    @classmethod
    def open(
        cls,
        directory: Path | str,
        config: LogConfig | None = None,
        *,
        filesystem: Filesystem = REAL_FILESYSTEM,
        clock: Clock = SYSTEM_CLOCK,
    ) -> Self:
        """Open, or make, the log in `directory`, named `<topic>-<partition>`; `.recovery` tells what had to be done.

        Raises LogLocked (with the pid) if another process writes in the directory above, InvalidLogName, NotALog and
        NotALogDirectory for what can't be one, CorruptLog if files are missing, LogPoisoned if the disk fails.
        """
        path = Path(directory)
        path = path if path.name else Path(os.path.realpath(path))
        parse_log_name(path.name)
        shared = LogDirectory.acquire(path.parent, filesystem, clock)
        try:
            view = shared.attach(path.name)
            try:
                around = Surroundings(filesystem, clock, view, config if config is not None else LogConfig())
                return cls(shared, around, *_load(around))
            except BaseException:
                view.close_unclean()
                raise
        except BaseException:
            with suppress(OSError):  # what went wrong first is what the caller has to know
                shared.release()
            raise

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
    def stable_offset(self) -> int:
        """min(high watermark, flushed offset): nothing below is ever taken back."""
        writer = self._checked_writer()
        return min(writer.high_watermark, writer.flushed_offset)

    def append(
        self,
        data: Appendable,
        *,
        keys: Keys | None = None,
        headers: Headers | None = None,
        timestamps_ms: int | Sequence[int] | None = None,
        durability: Durability = Durability.FLUSHED,
    ) -> AppendResult:
        """Append one value (bytes), a list of values, or a ready RecordBatch, and say where the records went.

        `keys` and `headers` are columns as `encode_batch` takes them, `timestamps_ms` one time or one per value
        (None: now). A ready batch has its own; its offsets and epoch are stamped into it. All of it is appended or
        nothing. Raises RecordTooLarge, ValueError, AppendFailed (disk full: nothing was written), LogPoisoned,
        LogDamaged.
        """
        writer = self._checked_writer()
        times = self._around.clock.wall_ms() if timestamps_ms is None else timestamps_ms
        result = writer.append(to_batches(data, keys, headers, times, self._around.config))
        if durability is Durability.FLUSHED:
            writer.flush(result.last_offset + 1)
        return result

    def flush(self) -> None:
        """Everything appended so far is on disk when this returns. Raises LogPoisoned."""
        self._checked_writer().flush()

    def read(self, offset: int, max_bytes: int) -> bytes:
        """Whole batches from the one that holds `offset` on, at most `max_bytes` but at least one.

        Empty at the log end. Raises OffsetOutOfRange, CorruptBatch.
        """
        self._checked_writer()
        return self._reader.read(offset, max_bytes)

    def batches(self, start: int, end: int | None = None) -> Iterator[RecordBatch]:
        """Every batch that holds an offset in [start, end), up to the log end of now. Raises as `read`."""
        self._checked_writer()
        return self._reader.batches(start, end)

    def records(self, start: int, end: int | None = None) -> Iterator[Record]:
        """Every record in [start, end), up to the log end of now. Raises as `read`."""
        self._checked_writer()
        return self._reader.records(start, end)

    def offset_for_timestamp(self, timestamp_ms: int) -> int | None:
        """Offset of the first record whose time is `timestamp_ms` or later; None if there is none."""
        self._checked_writer()
        return self._reader.offset_for_timestamp(timestamp_ms)

    def truncate_to(self, offset: int, *, force: bool = False) -> int:
        """Cut the log at the base of the batch that holds `offset`; the log end offset after it.

        At or above the log end nothing happens. Raises BelowHighWatermark unless `force` says that acknowledged
        records may go, OffsetOutOfRange below the log start, LogDamaged.
        """
        writer = self._checked_writer()
        if offset < writer.log_start_offset:
            raise OffsetOutOfRange(offset, *writer.bounds())
        if offset < writer.high_watermark and not force:
            raise BelowHighWatermark(offset, writer.high_watermark)
        end = writer.truncate_to(offset)
        self._reader.forget()
        return end

    def close(self) -> None:
        """Bring everything to disk and give the log back; closing twice is fine.

        Raises LogPoisoned or OSError if it could not be brought to disk: the next open then scans.
        """
        self._check_fork()
        if self._closed:
            return
        self._closed = True
        clean = None
        try:
            clean = self._writer.close()
        finally:
            view = self._around.view
            try:
                if clean is None:
                    view.close_unclean()
                else:
                    view.close_clean(clean)
            finally:
                self._directory.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SegmentLog({str(self.path)!r})"

    def _checked_writer(self) -> LogWriter:
        self._check_fork()
        self._writer.check_open()
        return self._writer

    def _check_fork(self) -> None:
        if self._directory.forked:
            raise ForkedProcess(f"the log {self.path}", owner_pid=self._directory.owner_pid, pid=os.getpid())


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


class _Checkpoints:
    """What recovery tells the directory of logs."""

    def __init__(self, view: DirectoryView) -> None:
        self._view = view

    def proven(self, recovery_point: int) -> None:
        if (self._view.recovery_point or 0) < recovery_point:
            self._view.checkpoint(recovery_point=recovery_point)
            self._view.sync_checkpoints()

    def about_to_cut(self, offset: int) -> None:
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


def _load(around: Surroundings) -> tuple[Recovered, UUID]:
    """Read the log's own files; the directory of logs is locked by now."""
    filesystem, view = around.filesystem, around.view
    try:
        filesystem.make_directory(view.path)
        log_id = read_partition_metadata(view.path, filesystem)
        if log_id is None:
            log_id = uuid4()
            write_partition_metadata(view.path, log_id, filesystem)
        recovery = Recovery(filesystem, view.path, around.config, around.clock, _Checkpoints(view))
        recovered = recovery.run(view.recovery_point, view.log_start_offset, view.clean, view.cleaned_offset)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotALog(view.path, "it is a file; a log is a directory") from error
    except PermissionError as error:
        raise NotALog(view.path, f"{error.filename or view.path} may not be written by this user") from error
    report = recovered.report
    if report.damaged_from is None and view.cleaned_offset > report.log_end_offset:  # the log was cut, now or before
        view.checkpoint(cleaned_offset=report.log_end_offset)
        view.sync_checkpoints()
    return recovered, log_id


def _settle_epochs(around: Surroundings, recovered: Recovered) -> LeaderEpochs:
    """The list of epochs as the log has them: none above its end, those that the scan met, at least one."""
    filesystem, path = around.filesystem, around.view.path
    kept = read_leader_epochs(path, filesystem)
    epochs = LeaderEpochs() if kept is None else kept.cut_from(recovered.report.log_end_offset + 1)
    if kept is None:
        reader = BatchReader(filesystem, path, _Found(recovered, around.view.cleaned_offset))
        for batch in reader.batches(recovered.report.log_start_offset):
            epochs = epochs.assigned(max(0, batch.header.leader_epoch), batch.header.base_offset)
    for epoch, start in recovered.epochs_seen:
        epochs = epochs.assigned(max(0, epoch), start)
    if not epochs.entries:
        epochs = epochs.assigned(0, recovered.report.log_end_offset)
    if epochs != kept and recovered.report.damaged_from is None:
        write_leader_epochs(path, epochs, filesystem)
    return epochs
