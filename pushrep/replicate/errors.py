"""What pushing refuses or fails at, named for what the caller does next."""

from pushrep.errors import PushrepError


class PushError(PushrepError):
    """The root of this room's errors."""


class IllegalState(PushError):
    """The manager is shut down: make another one."""

    def __init__(self, method: str) -> None:
        super().__init__(f"{method}: the manager was shut down; make another one")
        self.method = method


class ReplicaUnreachable(PushError):
    """Nobody that speaks our protocol answers at `address`: start the replica, or look at `why`."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"{address}: {why}")
        self.address, self.why = address, why


class MayStillBeDelivered(PushError):
    """The records are in this log; whether enough replicas will hold them is not known, `why` tells the reason."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the records may still be delivered: {why}")
        self.why = why
