"""What asking an open outbox refuses or fails at, named for what the caller does next."""

from pathlib import Path

from pushrep.errors import PushrepError


class ControlError(PushrepError):
    """The root of this room's errors."""


class NobodyAnswers(ControlError):
    """No process has the outbox open, or it has no control socket: work on the directory itself."""

    def __init__(self, directory: Path, why: str) -> None:
        super().__init__(f"nobody answers for the outbox in {directory}: {why}")
        self.directory, self.why = directory, why


class CallRefused(ControlError):
    """The outbox answered, with an error: `kind` is its class there, `why` its message."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind, self.why = kind, why


class BadControlMessage(ControlError):
    """What came is no message of this protocol; the connection is closed."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the control socket: {why}")
        self.why = why
