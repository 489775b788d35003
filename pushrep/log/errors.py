"""What a log refuses or fails at, each named for what the caller does next; the data is in the fields."""

import errno
import os
from pathlib import Path
from uuid import UUID

from pushrep.errors import PushrepError


class LogLocked(PushrepError):
    """Someone else writes here: stop process `pid` (None if it is unknown), or read with `SegmentLog.open_reader`.

    `is_own`: this very process has it open; close what was opened, or go on with it.
    """

    def __init__(self, directory: Path, pid: int | None, *, is_own: bool = False) -> None:
        if is_own:
            text = f"{directory} is open in this very process ({pid}) already: use what was opened, or close it first"
        else:
            who = f"process {pid}" if pid is not None else "another process"
            if pid == os.getpid():
                who += " (this one, or another container's of the same number)"
            text = f"{directory} is being written by {who}: stop it, or open a reader beside it"
        super().__init__(text)
        self.directory, self.pid, self.is_own = directory, pid, is_own


class LogClosed(PushrepError):
    """The log or its directory was closed in this process; open it again."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is closed: open it again")
        self.path = path


class InvalidLogName(PushrepError, ValueError):
    """Not `<topic>-<partition>` with a topic that Kafka would accept; choose another name."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name!r} is no name of a log, <topic>-<partition>: {why}")
        self.name, self.why = name, why


class NotALog(PushrepError):
    """No log is at this path, and none can be below it: name `<directory>/<topic>-<partition>`, or the directory."""

    def __init__(self, path: Path, why: str = "no such directory") -> None:
        super().__init__(f"{path} is no log: {why}")
        self.path, self.why = path, why


class CorruptPartitionMetadata(PushrepError):
    """`partition.metadata` is damaged, or missing beside segments, so that nothing says which log this is. Restore it.

    It is never made again over an old log: the id is part of the PIDs of everything that was read from it, and with
    another one every record would look new to the replay filter. `adopt=True` gives a log without it a new id.
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path} {why}: restore it from a replica or a backup, write the topic id in, or open a log that has none "
            "with adopt=True, which gives it a new identity (a replay filter then takes its records for new ones)"
        )
        self.path, self.why = path, why


class CorruptLog(PushrepError):
    """The files of a log don't fit together; `names` are the ones to look at. Nothing was changed."""

    def __init__(self, directory: Path, names: tuple[str, ...], why: str) -> None:
        super().__init__(f"{directory}: {' and '.join(names)}: {why}; nothing was changed, restore the missing file")
        self.directory, self.names, self.why = directory, names, why


class CompactedLog(PushrepError):
    """A broker's log cleaner has compacted the log below `cleaned_offset`, so that offsets are missing in it.

    `pushrep log dump` and `verify` read such a log; consume it from a broker instead.
    """

    def __init__(self, path: Path, cleaned_offset: int) -> None:
        super().__init__(
            f"{path}: a broker's cleaner has compacted it below offset {cleaned_offset} (cleaner-offset-checkpoint): a "
            "log with missing offsets is not opened; consume it from the broker, or look at it with pushrep log dump"
        )
        self.path, self.cleaned_offset = path, cleaned_offset


class CorruptBatch(PushrepError):
    """A read met bytes that are no whole batch where `offset` should be: they are never skipped.

    `position` is the byte in the file `segment`. Repair the log, or fetch the range from a replica.
    """

    def __init__(self, offset: int, segment: Path, position: int, reason: str) -> None:
        super().__init__(f"{segment} holds no whole batch for offset {offset} at byte {position}: {reason}")
        self.offset, self.segment, self.position, self.reason = offset, segment, position, reason


class LogDamaged(PushrepError):
    """Records that were on disk can't be read: the log can be read below `damaged_from`, but takes no appends."""

    def __init__(self, directory: Path, damaged_from: int, reason: str) -> None:
        super().__init__(
            f"{directory} is damaged from offset {damaged_from} on ({reason}): it can be read below it, "
            "but takes no appends until it is repaired; nothing was deleted"
        )
        self.directory, self.damaged_from, self.reason = directory, damaged_from, reason


class LogPoisoned(PushrepError):
    """A sync failed, or the file is another's (`cause` is FileRemoved), so written records may be lost: close the log
    and open it again.

    A second fsync may succeed over lost pages (Rebello et al., USENIX ATC 2020); only recovery may judge.
    """

    def __init__(self, directory: Path, cause: BaseException) -> None:
        super().__init__(f"{directory} is poisoned ({str(cause) or repr(cause)}): close it and open it again")
        self.directory, self.cause = directory, cause


class FileRemoved(PushrepError):
    """Another program removed, renamed, replaced or cut the newest file of a log; it is the `cause` of LogPoisoned.

    Nothing was acknowledged since the file was last seen in place. Find the program (a clean-up job, logrotate), and
    keep it away from the log's directory. `found_bytes`: the size under the name, None if that is no file or another.
    """

    def __init__(self, path: Path, expected_bytes: int, found_bytes: int | None) -> None:
        what = "was removed or replaced" if found_bytes is None else f"has {found_bytes} bytes, not {expected_bytes}"
        super().__init__(f"{path} {what}: another program has changed a file that only its writer may change")
        self.path, self.expected_bytes, self.found_bytes = path, expected_bytes, found_bytes


_REMEDIES = {
    errno.ENOSPC: "free space on the disk",
    errno.EDQUOT: "raise the user's quota",
    errno.EFBIG: "raise the process's file size limit (ulimit -f) or lower segment_bytes",
    errno.EMFILE: "raise the process's limit of open files (ulimit -n) or lower open_files_max",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
    errno.ENOMEM: "free memory",
    errno.EAGAIN: "free memory",
    errno.EROFS: "mount the file system writable",
    errno.EOVERFLOW: "begin a new log",
}
SHORTAGES = _REMEDIES.keys() - {errno.EROFS, errno.EOVERFLOW}
"""What the system is short of for a moment: a call that it refuses so has done nothing, except a sync."""


NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The disk is full, or the user's part of it."""


def is_shortage(error: BaseException) -> bool:
    """Whether the same may be done again soon."""
    return getattr(error, "errno", None) in SHORTAGES


def is_reading_short(error: BaseException) -> bool:
    """The same of a read, where EFBIG is a file that is mostly a hole, and stays so."""
    return is_shortage(error) and getattr(error, "errno", None) != errno.EFBIG


def append_remedy(cause: OSError) -> str:
    """What to do about a write that the system refused."""
    return _REMEDIES.get(cause.errno or 0, "look at the disk")


class AppendFailed(PushrepError):
    """The system refused the write. Nothing of it remains, and its offsets are free again: mend the cause, then append
    again. Bytes that can't be removed now are removed before the next append.

    `errno` is the system's number, for example ENOSPC.
    """

    def __init__(self, path: Path, cause: OSError, remedy: str) -> None:
        super().__init__(f"{path}: {cause.strerror or cause}; nothing was written: {remedy}, then append again")
        self.path, self.errno, self.remedy = path, cause.errno, remedy


class LogEndMoved(PushrepError):
    """The log does not end at the append's base offset `expected`, but at `end`; nothing was written."""

    def __init__(self, path: Path, *, expected: int, end: int) -> None:
        super().__init__(f"{path} ends at offset {end}, the append was made for {expected}; nothing was written")
        self.path, self.expected, self.end = path, expected, end


class NoRoomToCut(PushrepError):
    """The disk has no room for the copy that is kept of what a cut takes off, or for the few bytes that go before it.

    Nothing was changed. Free space, up to `wanted_bytes`, then do the same again. `errno` is the system's number.
    """

    def __init__(self, path: Path, wanted_bytes: int, cause: OSError) -> None:
        super().__init__(
            f"{path}: {cause.strerror or cause}; nothing was cut: {append_remedy(cause)} ({wanted_bytes} bytes at "
            "most), then do it again"
        )
        self.path, self.wanted_bytes, self.errno = path, wanted_bytes, cause.errno


class StillNeeded(PushrepError):
    """`by` needs records from `needed_from` on, so nothing below `offset` was removed: wait for it, or drop it by name.

    `by` names a holder, a lease, a derived store, or "the stable offset": what is not flushed or replicated yet.
    """

    def __init__(self, offset: int, needed_from: int, by: str) -> None:
        super().__init__(f"records below offset {offset} can't go: {by} needs them from {needed_from} on")
        self.offset, self.needed_from, self.by = offset, needed_from, by


class LeaseBroken(PushrepError):
    """The lease was broken, so retention may have removed its records. `reason` says why; take a new one."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"the lease of {name} was broken: {reason}")
        self.name, self.reason = name, reason


class OffsetOutOfRange(PushrepError):
    """`offset` lies outside of what can be read, which is [start, end)."""

    def __init__(self, offset: int, start: int, end: int) -> None:
        super().__init__(f"offset {offset} is outside of the log's range [{start}, {end})")
        self.offset, self.start, self.end = offset, start, end


class BelowHighWatermark(PushrepError):
    """Cutting there would take away acknowledged records: say `force=True` if that is meant."""

    def __init__(self, offset: int, high_watermark: int) -> None:
        super().__init__(
            f"offset {offset} is below the high watermark {high_watermark}: records that were acknowledged would go; "
            "pass force=True if that is meant"
        )
        self.offset, self.high_watermark = offset, high_watermark


class DirectoryIsCopy(PushrepError):
    """A member's directory is a copy of another: it may lack votes and records of that one, so it takes no part.

    copy_of: the other's id.
    """

    def __init__(self, path: Path, copy_of: UUID) -> None:
        super().__init__(
            f"{path} is a copy of directory {copy_of.hex} (a restored backup, a clone, or moved to another disk), and "
            "a member that forgot what it promised could lose records. If it was moved, whole, and the original is "
            f"gone: pushrep replica moved {path}. Else promote another member; below a node (of a service: pushrep "
            f"replica adopt NODE {path}) the leader fills it, and it counts again. If all members are copies (a "
            f"site that was restored): pushrep promote {path} --accept-loss goes on with what it holds; so say it of "
            "the one that holds the most"
        )
        self.path, self.copy_of = path, copy_of


class RepairRefused(PushrepError):
    """The requested repair would not make the log whole; nothing was changed. The message says which one would."""
