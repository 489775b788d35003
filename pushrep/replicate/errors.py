"""What pushing, and a node, refuses or fails at, named for what the caller or operator does next."""

from pathlib import Path

from pushrep.errors import PushrepError
from pushrep.wire.error_codes import ErrorCode


class IllegalState(PushrepError):
    """The manager is shut down: make another one."""

    def __init__(self, method: str) -> None:
        super().__init__(f"{method}: the manager was shut down; make another one")
        self.method = method


class MayStillBeDelivered(PushrepError):
    """The records are in this log; whether enough replicas will hold them is unknown, `why` is the reason."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the records may still be delivered: {why}")
        self.why = why


class NodeInUse(PushrepError):
    """Another node keeps its logs in `directory`: give this one a directory of its own."""

    def __init__(self, directory: Path, pid: int | None) -> None:
        super().__init__(f"process {pid} keeps its replicas in {directory}: give every node a directory of its own")
        self.directory, self.pid = directory, pid


class Refusal(PushrepError):
    """A node does not carry out a call; `code` is its answer's error code."""

    def __init__(self, code: ErrorCode, why: str) -> None:
        super().__init__(why)
        self.code = code
