"""What startpoints refuse or fail at, each named for what the caller does next; the data is in the fields."""

from pathlib import Path

from pushrep.errors import PushrepError


class StoreUnavailable(PushrepError):
    """This place can't be a store of startpoints; name a directory that may be written."""

    def __init__(self, location: Path | str, why: str) -> None:
        super().__init__(f"{location} can't be a store of startpoints: {why}")
        self.location, self.why = location, why


class StoreBusy(PushrepError):
    """Another process held the store's lock for all of the time that was given; try again, or end process `pid`."""

    def __init__(self, directory: Path | str, pid: int | None, waited_s: float) -> None:
        who = f"process {pid}" if pid is not None else "another process"
        super().__init__(f"{directory} was locked by {who} for {waited_s:g} s: try again, or end it if it hangs")
        self.directory, self.pid, self.waited_s = directory, pid, waited_s


class Overtaken(PushrepError):
    """Somebody else changed the store in between, and nothing was written; the store does it again by itself."""

    def __init__(self, place: Path | str) -> None:
        super().__init__(f"{place} was changed by another writer meanwhile; nothing was written: try again")
        self.place = place


class StoreClosed(PushrepError):
    """The store was closed in this process; open it again."""

    def __init__(self, directory: Path | str) -> None:
        super().__init__(f"the store of startpoints {directory} is closed: open it again")
        self.directory = directory


class CorruptStore(PushrepError):
    """A file of the store is damaged, or of another version: restore a copy, or use the release that wrote it."""

    def __init__(self, path: Path | str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path, self.why = path, why


class NotWritten(PushrepError):
    """The disk refused. `is_known`: it is sure that nothing stays; else look with `list` when the disk is back."""

    def __init__(self, path: Path | str, why: str, *, is_known: bool) -> None:
        outcome = "nothing was written" if is_known else "whether it was written is not known: look with list"
        super().__init__(f"{path}: {why}; {outcome}")
        self.path, self.why, self.is_known = path, why, is_known


class StartpointRefused(PushrepError):
    """It does not fit the startpoint or the log as they are; the message says what to do. Nothing was written."""


class PartitionLost(PushrepError):
    """Another instance took the partition over (`generation` is its); stop reading it. Nothing was written."""

    def __init__(self, reader: object, *, held: int, generation: int) -> None:
        super().__init__(f"{reader} was taken over: generation {held} is fenced by {generation}; stop reading it here")
        self.reader, self.held, self.generation = reader, held, generation


class StartpointFailed(PushrepError):
    """The newest startpoint can't be applied, so the partition does not start; cancel it or set another one."""

    def __init__(self, reader: object, sequence: int, why: str) -> None:
        super().__init__(f"startpoint {sequence} of {reader} failed: {why}. Cancel it or set another one")
        self.reader, self.sequence, self.why = reader, sequence, why


class CheckpointUnusable(PushrepError):
    """The consumer has no start: its checkpoint or its default is not for this log as it is now; set a startpoint."""

    def __init__(self, reader: object, why: str) -> None:
        super().__init__(f"{reader} has no place to start: {why}. Set a startpoint that says where")
        self.reader, self.why = reader, why
