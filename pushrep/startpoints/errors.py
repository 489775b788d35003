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


class NoSuchStartpoint(PushrepError):
    """No startpoint has this sequence number; `pushrep startpoint list` shows those that there are."""

    def __init__(self, sequence: int) -> None:
        super().__init__(f"there is no startpoint {sequence}: look with list")
        self.sequence = sequence


class NotCancellable(PushrepError):
    """The startpoint is over, in `state`; cancelling can't undo it. Set another one."""

    def __init__(self, sequence: int, state: str) -> None:
        super().__init__(f"startpoint {sequence} is {state} already: cancelling can't undo that, set another one")
        self.sequence, self.state = sequence, state


class NotApplied(PushrepError):
    """`consume` or `commit` names a startpoint that was not applied for this reader; call `apply` first."""

    def __init__(self, reader: object, sequence: int) -> None:
        super().__init__(f"startpoint {sequence} was not applied for {reader}: apply it, then commit behind it")
        self.reader, self.sequence = reader, sequence


class NotCommitted(PushrepError):
    """`consume` comes after the commit that carries the sequence; there is none yet."""

    def __init__(self, reader: object, sequence: int) -> None:
        super().__init__(f"{reader} has not committed behind startpoint {sequence}: commit, then consume it")
        self.reader, self.sequence = reader, sequence


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
    """The consumer's checkpoint is not for this log as it is now; set a startpoint that says where to go on."""

    def __init__(self, reader: object, why: str) -> None:
        super().__init__(f"the checkpoint of {reader} can't be used: {why}. Set a startpoint that says where to go on")
        self.reader, self.why = reader, why


class DefaultUnusable(PushrepError):
    """There is neither a startpoint nor a checkpoint, and the default does not fit the log; give another default."""

    def __init__(self, reader: object, why: str) -> None:
        super().__init__(f"{reader} has no startpoint and no checkpoint, and its default does not fit: {why}")
        self.reader, self.why = reader, why
