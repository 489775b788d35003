"""The root of every error that pushrep raises; each room names its own below it, for what the caller does next."""

import os
from pathlib import Path


class PushrepError(Exception):
    """Anything pushrep refuses or fails at. The message is for people, the fields of the sub-classes for code."""


class BadArgument(PushrepError, ValueError, TypeError):
    """An argument or setting can't be used as it is, `argument` names it: correct the call. Nothing was done."""

    def __init__(self, argument: str, why: str) -> None:
        super().__init__(f"{argument}: {why}")
        self.argument, self.why = argument, why


class CorruptFile(PushrepError):
    """A small file of ours is damaged, missing beside what it describes, or of another version: do as the text says.

    It never counts as absent. outbox.json made anew would be a new PID, and readers would keep every replay; a node
    without its promises.json could follow a leader that it has promised to refuse.
    """

    def __init__(self, path: Path | str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path, self.why = path, why


class ForkedProcess(PushrepError):
    """The object was made in the parent of this process; open it again here.

    A fork copies file positions, locks and buffers but no threads: two writers would share one log.
    """

    def __init__(self, what: str, *, owner_pid: int, pid: int) -> None:
        super().__init__(
            f"{what} was opened by process {owner_pid} and can't be used in its fork {pid}: open one of its own here, "
            "behind the fork; many workers share a directory by Outbox.open_slot"
        )
        self.what, self.owner_pid, self.pid = what, owner_pid, pid


def checked_timeout(value: object) -> None:
    """Raise BadArgument for what is no number of seconds, None (for ever) apart."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise BadArgument("timeout", f"give seconds or None, not {value!r}")


def checked_path(argument: str, value: object) -> Path:
    """The path that a caller gave. Raises BadArgument for what is none, as None."""
    if not isinstance(value, str | os.PathLike) or value == "":
        raise BadArgument(argument, f"give a path, not {value!r}")
    if "\0" in str(value):
        raise BadArgument(argument, f"no path has a NUL in it: {value!r}")
    return Path(value)
