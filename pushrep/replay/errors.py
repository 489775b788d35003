"""What a replay is refused for, and what ends one before its time; codes are the protocol's."""

from pathlib import Path

from pushrep.errors import PushrepError
from pushrep.wire.error_codes import ErrorCode


class ReplayRefused(PushrepError):
    """No session was made: `code` says why. A refused position comes with the range [`start`, `end`] that would do."""

    def __init__(self, code: ErrorCode, why: str, *, start: int | None = None, end: int | None = None) -> None:
        super().__init__(f"{why} ({code.name})")
        self.code, self.why, self.start, self.end = code, why, start, end


class ReplayFailed(PushrepError):
    """The session ended by an error; it is raised once, `offset` is the first that was not given.

    `segment`: base offset of the segment that it was met in, None without one.
    """

    def __init__(self, code: ErrorCode, why: str, *, offset: int, segment: int | None = None) -> None:
        super().__init__(f"the replay ended at offset {offset}: {why} ({code.name})")
        self.code, self.why, self.offset, self.segment = code, why, offset, segment


class ReplayTruncated(ReplayFailed):
    """The log was cut below what was given: what came from `cut_offset` on is not in it any more.

    Take it back, then start again at `cut_offset`; `leader_epoch` is that of what stands there now, -1 if unknown.
    """

    def __init__(self, *, offset: int, cut_offset: int, leader_epoch: int) -> None:
        why = f"the log was cut at offset {cut_offset}, take back what came from there on"
        super().__init__(ErrorCode.TRUNCATED, why, offset=offset)
        self.cut_offset, self.leader_epoch = cut_offset, leader_epoch


class ReplayBusy(PushrepError):
    """Another thread iterates this replay: give each of them a replay of its own."""

    def __init__(self) -> None:
        super().__init__("another thread reads this replay: start one for each of them")


class CorruptCatalogue(PushrepError):
    """The catalogue of recordings is damaged at `line`; nothing was changed. Restore the file from a copy.

    It is never made anew beside a damaged one: an id would be given to another recording.
    """

    def __init__(self, path: Path, line: int, why: str) -> None:
        super().__init__(f"{path}, line {line}: {why}; nothing was changed, restore the file from a copy")
        self.path, self.line, self.why = path, line, why


class UnknownRecording(PushrepError):
    """The catalogue has no such recording."""

    def __init__(self, recording_id: int) -> None:
        super().__init__(f"there is no recording {recording_id}")
        self.recording_id = recording_id


class NodeUnreachable(PushrepError):
    """The node at `address` can't be spoken to: `why`. Where it was asked to change something, it may have."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"the node at {address} can't be reached: {why}")
        self.address, self.why = address, why


class KeepingRefused(PushrepError):
    """The node did not extend, truncate, purge or delete the recording: `code` says why, nothing was changed."""

    def __init__(self, code: ErrorCode, why: str) -> None:
        super().__init__(f"{why or code.meaning} ({code.name})")
        self.code, self.why = code, why
