"""The root of every error that pushrep raises; each room names its own below it, for what the caller does next."""


class PushrepError(Exception):
    """Anything pushrep refuses or fails at. The message is for people, the fields of the sub-classes for code."""


class BadArgument(PushrepError, ValueError, TypeError):
    """An argument or setting can't be used as it is, `argument` names it: correct the call. Nothing was done."""

    def __init__(self, argument: str, why: str) -> None:
        super().__init__(f"{argument}: {why}")
        self.argument, self.why = argument, why


class ForkedProcess(PushrepError):
    """The object was made in the parent of this process; open it again here.

    A fork copies file positions, locks and buffers but no threads: two writers would share one log.
    """

    def __init__(self, what: str, *, owner_pid: int, pid: int) -> None:
        super().__init__(f"{what} was opened by process {owner_pid} and can't be used in its fork {pid}: open it here")
        self.what, self.owner_pid, self.pid = what, owner_pid, pid
