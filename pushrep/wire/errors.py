"""The error of a connection whose peer broke the protocol."""

from pushrep.errors import PushrepError


class ProtocolError(PushrepError):
    """The peer broke the protocol: nothing it sends can be trusted any more. Log `reason` and close the connection."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; the connection has to be closed")
        self.reason = reason
