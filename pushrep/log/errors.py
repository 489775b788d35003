"""What a log refuses or fails at, each named for what the caller does next; the data is in the fields."""

from pathlib import Path

from pushrep.errors import PushrepError


class LogLocked(PushrepError):
    """Someone else writes here: stop process `pid` (None if it is unknown), or read with `SegmentLog.open_reader`."""

    def __init__(self, directory: Path, pid: int | None) -> None:
        who = f"process {pid}" if pid is not None else "another process"
        super().__init__(f"{directory} is being written by {who}: stop it, or open a reader beside it")
        self.directory, self.pid = directory, pid


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
    """There is no log at this path; name the directory of one partition, `<directory>/<topic>-<partition>`."""

    def __init__(self, path: Path, why: str = "no such directory") -> None:
        super().__init__(f"{path} is no log: {why}")
        self.path, self.why = path, why


class NotALogDirectory(PushrepError):
    """The path can't hold logs (it is a file, or may not be written); name another or change its permissions."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} can't be a directory of logs: {why}")
        self.path, self.why = path, why


class CorruptPartitionMetadata(PushrepError):
    """`partition.metadata` does not say who the log is. Restore the file from a replica or a backup.

    It is never made anew over an old log: the id is part of the PIDs of everything that was read from it, and with
    another one every record would look new to the replay filter.
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} is damaged ({why}): restore it from a replica or a backup, or write the topic id in")
        self.path, self.why = path, why
