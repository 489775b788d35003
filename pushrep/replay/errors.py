"""Why a replay is refused, or ends early; codes are the protocol's."""

from pathlib import Path

from pushrep.errors import PushrepError
from pushrep.wire.error_codes import ErrorCode


class ReplayRefused(PushrepError):
    """No session was made, or a recording was not extended, truncated, purged or deleted: `code` says why, and nothing
    was changed. A refused position comes with the valid range [`start`, `end`].
    """

    def __init__(self, code: ErrorCode, why: str, *, start: int | None = None, end: int | None = None) -> None:
        super().__init__(f"{why or code.meaning} ({code.name})")
        self.code, self.why, self.start, self.end = code, why, start, end


class ReplayFailed(PushrepError):
    """The session ended with an error, which is raised once. `offset`: the first one that was not delivered.

    `segment`: base offset of the segment with the error; None without one.
    """

    def __init__(self, code: ErrorCode, why: str, *, offset: int, segment: int | None = None) -> None:
        super().__init__(f"the replay ended at offset {offset}: {why} ({code.name})")
        self.code, self.why, self.offset, self.segment = code, why, offset, segment


class ReplayTruncated(ReplayFailed):
    """The log was cut below delivered records: those from `cut_offset` on are not in it any more.

    Undo them, then start again at `cut_offset`; `leader_epoch` is that of the records there now, -1 if unknown.
    """

    def __init__(self, *, offset: int, cut_offset: int, leader_epoch: int) -> None:
        why = f"the log was cut at offset {cut_offset}, take back what came from there on"
        super().__init__(ErrorCode.TRUNCATED, why, offset=offset)
        self.cut_offset, self.leader_epoch = cut_offset, leader_epoch


class CorruptCatalogue(PushrepError):
    """The catalogue of recordings is damaged at `line`; nothing was changed. Restore the file from a copy.

    A damaged one is never replaced by a new one, which would give an id to another recording.
    """

    def __init__(self, path: Path, line: int, why: str) -> None:
        super().__init__(f"{path}, line {line}: {why}; nothing was changed, restore the file from a copy")
        self.path, self.line, self.why = path, line, why


class NodeUnreachable(PushrepError):
    """The node at `address` can't be reached: `why`. A change that was requested may have been made."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"the node at {address} can't be reached: {why}")
        self.address, self.why = address, why
