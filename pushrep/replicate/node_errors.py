"""What a node refuses, named for what its operator does next."""

from pathlib import Path

from pushrep.errors import PushrepError


class NodeError(PushrepError):
    """The root of this room's errors."""


class NodeInUse(NodeError):
    """Another node keeps its logs in `directory`: give this one a directory of its own."""

    def __init__(self, directory: Path, pid: int | None) -> None:
        super().__init__(f"process {pid} keeps its replicas in {directory}: give every node a directory of its own")
        self.directory, self.pid = directory, pid


class CorruptNodeFile(NodeError):
    """A small file of the node is damaged; what it promised is unknown: restore it from a copy.

    Without it the node could follow a leader that it has sworn off, so it is never taken for absent.
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}; restore it, or remove this replica's directory and let it be filled again")
        self.path, self.why = path, why


class CantListen(NodeError):
    """`address` can't be listened on."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"can't listen on {address}: {why}")
        self.address, self.why = address, why
