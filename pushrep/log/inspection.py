"""What the files of a directory say about its logs, read beside a running writer: takes no lock, writes nothing.

    where does it end?   the writer lives            what it published last               "writer"
                         closed clean                its line in the clean marker         "clean marker"
                         stopped, machine still up   what it published last               "last published"
                         else                        the recovery point checkpoint        "checkpoint"
                         else                        nobody knows without a scan          "nothing"

Whether there is a writer is asked of the kernel by the lock that shows it (env/filesystem.py), which answers across
containers. On a file system without such locks, the pid in the lock file counts if such a process lives.
"""

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pushrep.env import REAL_FILESYSTEM, Filesystem, file_size
from pushrep.log.directory_files import (
    INDEX_SUFFIX,
    LEADER_EPOCHS_CRC_NAME,
    LEADER_EPOCHS_NAME,
    LOCK_NAME,
    LOG_SUFFIX,
    PARTITION_METADATA_NAME,
    SEAL_SUFFIX,
    TIME_INDEX_SUFFIX,
    CheckpointFile,
    CleanLog,
    compacted_logs,
    list_segments,
    log_at,
    parse_log_name,
    read_checkpoint,
    read_clean_marker,
    read_leader_epochs,
    readable_logs,
    segment_path,
)
from pushrep.log.directory_id import CopyVerdict, read_directory_id
from pushrep.log.errors import InvalidLogName, NotALog
from pushrep.log.published import LogOffsets, PublishedState, read_published

_OFFSET_ENTRY_BYTES, _TIME_ENTRY_BYTES = 8, 12
_OWN_NAMES = frozenset({LEADER_EPOCHS_NAME, LEADER_EPOCHS_CRC_NAME, PARTITION_METADATA_NAME})


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """What is known of a log without reading its batches. known_by: see the file's map.

    published: None if nothing valid was published since the machine started.
    is_compacted: a broker's cleaner took offsets of it.
    is_copy: the directory is a copy, so that what was published is about its original.
    """

    writer_pid: int | None
    published: PublishedState | None
    clean: CleanLog | None
    recovery_point: int | None
    high_watermark: int | None
    log_start_offset: int | None
    is_copy: bool = False
    is_compacted: bool = False

    @property
    def is_live(self) -> bool:
        """Whether the directory's present writer has, or had, this log open."""
        return self.writer_pid is not None and self.published is not None and self.published.pid == self.writer_pid

    @property
    def known_by(self) -> str:
        """The source of the log's end."""
        if self.is_live:
            return "writer"
        if self.clean is not None:
            return "clean marker"
        if self.published is not None and not self.is_copy:
            return "last published"
        return "nothing" if self.recovery_point is None else "checkpoint"

    def ends(self, first_base: int | None) -> LogOffsets | None:
        """The log's ends by that source; None if nothing says them. first_base: of its first segment."""
        if self.published is not None and self.known_by in {"writer", "last published"}:
            return self.published.ends
        end = self.recovery_point if self.clean is None else self.clean.end_offset
        if end is None:
            return None
        start = self.log_start_offset if self.log_start_offset is not None else first_base or 0
        return LogOffsets(start, end, end, end if self.high_watermark is None else min(end, self.high_watermark))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSummary:
    """One line of `ls`. An end offset is the next one, not the last; log_end_offset is None if it is unknown."""

    name: str
    log_start_offset: int
    log_end_offset: int | None
    flushed_offset: int | None
    high_watermark: int | None
    leader_epoch: int
    segments: int
    size_bytes: int
    is_clean: bool
    known_by: str
    writer_pid: int | None


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """The files of one segment; None for an index that is not there."""

    base_offset: int
    size_bytes: int
    index_entries: int | None
    time_index_entries: int | None


def logs_at(path: Path) -> list[Path]:
    """The log at `path`, or every log in the directory of logs `path`, or in all slots below it. Raises NotALog."""
    if is_log(path):
        return [path]
    found = [log_at(path, topic, number) for topic, number in readable_logs(path)]
    if not found:
        raise NotALog(path, "it holds neither segments nor logs")
    return found


def is_log(path: Path, filesystem: Filesystem = REAL_FILESYSTEM) -> bool:
    """Whether `path` is the directory of one log: named like one, with segments or a partition.metadata in it."""
    path = Path(os.path.realpath(path))
    try:
        parse_log_name(path.name)
        names = filesystem.list(path)
    except (InvalidLogName, FileNotFoundError, NotADirectoryError):
        return False
    return PARTITION_METADATA_NAME in names or bool(list_segments(filesystem, path))


def checked_log(path: Path, filesystem: Filesystem = REAL_FILESYSTEM) -> Path:
    """The real path of the log at `path`. Raises NotALog."""
    if not is_log(path, filesystem):
        raise NotALog(path, "no such directory" if not filesystem.exists(path) else "it holds no segment of a log")
    return Path(os.path.realpath(path))


def lock_holder(directory: Path, filesystem: Filesystem = REAL_FILESYSTEM) -> int | None:
    """The pid, as that process knows it, of who writes in a directory of logs; None if nobody does. Takes no lock."""
    if (is_locked := filesystem.is_locked(directory / LOCK_NAME)) is False:
        return None
    try:
        file = filesystem.open(directory / LOCK_NAME, writable=False)
    except FileNotFoundError:
        return None
    with closing(file):
        text = file.read_at(32, 0).strip()
    return int(text) if text.isdigit() and (is_locked or _lives(int(text))) else None


def read_state(log: Path, filesystem: Filesystem = REAL_FILESYSTEM) -> LogState:
    """The present state of the log at `log`, by the files of the directory above."""
    directory, name = log.parent, log.name
    offsets = {at: read_checkpoint(directory, at, filesystem).get(name) for at in CheckpointFile}
    return LogState(
        writer_pid=lock_holder(directory, filesystem),
        published=read_published(directory, name, filesystem),
        clean=read_clean_marker(directory, filesystem).get(name),
        recovery_point=offsets[CheckpointFile.RECOVERY_POINT],
        high_watermark=offsets[CheckpointFile.HIGH_WATERMARK],
        log_start_offset=offsets[CheckpointFile.LOG_START_OFFSET],
        is_compacted=name in compacted_logs(directory, filesystem),
        is_copy=read_directory_id(directory, filesystem)[1] is CopyVerdict.COPY,
    )


def summarize(log: Path) -> LogSummary:
    """One log in one line."""
    state = read_state(log)
    segments = segment_facts(log)
    first_base = segments[0].base_offset if segments else 0
    ends = state.ends(first_base)
    epochs = read_leader_epochs(log, REAL_FILESYSTEM)
    return LogSummary(
        name=log.name,
        log_start_offset=(state.log_start_offset or first_base) if ends is None else ends.start,
        log_end_offset=None if ends is None else ends.end,
        flushed_offset=None if ends is None else ends.flushed,
        high_watermark=None if ends is None else ends.high_watermark,
        leader_epoch=epochs.latest_epoch if epochs is not None else -1,
        segments=len(segments),
        size_bytes=sum(segment.size_bytes for segment in segments),
        is_clean=state.clean is not None,
        known_by=state.known_by,
        writer_pid=state.writer_pid if state.is_live else None,
    )


def segment_facts(log: Path, filesystem: Filesystem = REAL_FILESYSTEM) -> list[SegmentFacts]:
    """The segments of a log; one that is removed meanwhile is left out."""
    facts = []
    for base in list_segments(filesystem, log):
        size = file_size(filesystem, segment_path(log, base))
        offsets = file_size(filesystem, segment_path(log, base, INDEX_SUFFIX))
        times = file_size(filesystem, segment_path(log, base, TIME_INDEX_SUFFIX))
        if size is not None:
            facts.append(
                SegmentFacts(
                    base,
                    size,
                    None if offsets is None else offsets // _OFFSET_ENTRY_BYTES,
                    None if times is None else times // _TIME_ENTRY_BYTES,
                )
            )
    return facts


def leftovers(log: Path) -> list[tuple[str, int]]:
    """(name, bytes) of files in a log's directory that are no part of the log: .cut, .corrupt, .stale, .tmp, ..."""
    bases = {f"{base:020d}" for base in list_segments(REAL_FILESYSTEM, log)}
    own = {
        stem + suffix for stem in bases for suffix in (LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX, SEAL_SUFFIX)
    } | _OWN_NAMES
    names = (name for name in REAL_FILESYSTEM.list(log) if name not in own)
    sizes = ((name, file_size(REAL_FILESYSTEM, log / name)) for name in names)
    return [(name, size) for name, size in sizes if size is not None]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's
    return True
