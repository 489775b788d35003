"""What an outbox refuses or fails at, named for what the caller does next.

OutboxDiffers                   fix the argument of `open`     RecordRefused and below   fix the record
LogsMissing                     restore what is missing        BufferFull                append again, later
NoFreeSlot                      give more slots                CommandRefused            another way, as it says
NoOutbox                        check the path
DeliveryFailed                  a receipt's bad answer         ReceiptTimeout            ask the receipt again
LogStopped, OutboxClosed, CloseTimedOut                        open again
NotEnoughReplicas               append again, when replicas are back
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pushrep.errors import BadArgument, PushrepError


class OutboxDiffers(BadArgument):
    """The outbox was made with another value. The stored one stays, because keys and readers depend on it."""

    def __init__(self, path: Path, setting: str, *, stored: object, got: object) -> None:
        super().__init__(
            setting,
            f"this outbox was made with {setting}={stored!r} and it can't change, got {got!r} "
            f"(kept in {path}); open it with {stored!r}, or take another directory",
        )
        self.path, self.stored, self.got = path, stored, got


class NoOutbox(PushrepError):
    """There is no outbox in the directory, and `create` was False: check the path. Nothing was changed."""

    def __init__(self, directory: Path, why: str = "look at the path") -> None:
        super().__init__(f"there is no outbox in {directory}: {why}")
        self.directory, self.why = directory, why


class NoFreeSlot(PushrepError):
    """Every slot is held by a process: give more slots than there are workers at once, ending ones counted."""

    def __init__(self, directory: Path, slots: int, pids: Sequence[int | None]) -> None:
        held = ", ".join("?" if pid is None else str(pid) for pid in pids)
        super().__init__(
            f"all {slots} slots in {directory} are taken, by the processes {held}: give a larger slots=, more than "
            "there are workers at once, those counted that are ending"
        )
        self.directory, self.slots, self.pids = directory, slots, tuple(pids)


class LogsMissing(PushrepError):
    """Logs of the outbox with records that readers may have seen are gone: restore them. Nothing was changed.

    `ends`: by the log's name the offset below which readers may have seen its records. `accept_loss=True` goes on
    without them, under a PID of the next epoch, so that readers see new records at these offsets as new.
    """

    def __init__(self, directory: Path, ends: Mapping[str, int]) -> None:
        named = ", ".join(f"{name} (records up to offset {end})" for name, end in ends.items())
        super().__init__(
            f"{directory}: {named} {'is' if len(ends) == 1 else 'are'} missing; restore what is missing, or say that "
            "it is lost: accept_loss=True, pushrep append --accept-loss"
        )
        self.directory, self.ends = directory, dict(ends)


class CommandRefused(PushrepError):
    """What an operator asked for can't be done as it is; the message says why, and what to do instead. Unless it says
    otherwise, nothing was changed.
    """


class StandbyCancelled(PushrepError):
    """`cancel` was set before this instance led. Nothing is open."""

    def __init__(self, directory: Path) -> None:
        super().__init__(f"{directory}: it stands by no more")
        self.directory = directory


class OutboxClosed(PushrepError):
    """`close` was called; open the directory again."""

    def __init__(self, directory: Path) -> None:
        super().__init__(f"the outbox in {directory} is closed; open it again")
        self.directory = directory


class CloseTimedOut(PushrepError):
    """The disk did not answer within `close_timeout_s`; the directory stays locked until this process ends."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        super().__init__(
            f"{directory}: a write did not come back within close_timeout_s={timeout_s}; what waited has failed, and "
            "the lock is kept until this process ends"
        )
        self.directory, self.timeout_s = directory, timeout_s


class RecordRefused(PushrepError, ValueError):
    """The record was not appended and never will be as it is; `argument` names what is wrong with it."""

    def __init__(self, argument: str, why: str) -> None:
        super().__init__(f"{argument}: {why}")
        self.argument, self.why = argument, why


class MetadataNotRising(RecordRefused):
    """A source offset not above the pair's last one since `open`: every filtering reader drops such a record.

    Also if the outbox is opened again, which takes it. docs/commit-order.md has what to do.
    """

    def __init__(self, *, pid: int, partition: int, last: int, got: int) -> None:
        super().__init__(
            "metadata",
            f"source offset {got} of PID {pid}, partition {partition} is not above {last}, the last one taken since "
            "this outbox was opened: every filtering reader drops such a record, also if it is appended after another "
            "open. If the log has it, go on behind last_metadata; if not, its source numbers records in another order "
            "than it commits them: docs/commit-order.md",
        )
        self.pid, self.partition, self.last, self.got = pid, partition, last, got


class MetadataGap(RecordRefused):
    """An earlier record of the pair failed. Appending a later one first would leave a hole that no retry can fill."""

    def __init__(self, *, pid: int, partition: int, failed: int, got: int, reason: str) -> None:
        super().__init__(
            "metadata",
            f"source offset {failed} of PID {pid}, partition {partition} failed ({reason}) and has to go first, got "
            f"{got}; append the failed records again in their order",
        )
        self.pid, self.partition, self.failed, self.got, self.reason = pid, partition, failed, got, reason


class BufferFull(PushrepError):
    """Back-pressure: no free memory within `block_ms`. Nothing was appended; append the same record again later."""

    def __init__(self, *, buffer_bytes: int, wanted_bytes: int, block_ms: int) -> None:
        super().__init__(
            f"no {wanted_bytes} bytes free of buffer_bytes={buffer_bytes} within block_ms={block_ms}: "
            "records come faster than the disk takes them"
        )
        self.buffer_bytes, self.wanted_bytes, self.block_ms = buffer_bytes, wanted_bytes, block_ms


class DeliveryFailed(PushrepError):
    """The record's batch failed; `__cause__` says why.

    `may_be_delivered`: False - it is not in the log, append it again. True - it may be. A re-opened outbox knows
    (`last_metadata`), and if the record is appended again with its metadata, a reader's filter drops the second copy.
    `delivered`: of one `append_many`, how many records are in the log before the first that failed.
    """

    def __init__(self, *, topic: str, partition: int, may_be_delivered: bool, reason: str, delivered: int = 0) -> None:
        fate = "it may still be delivered" if may_be_delivered else "it is not in the log"
        if delivered:
            fate = f"the first {delivered} records are in the log, of the rest: {fate}"
        super().__init__(f"append to {topic}-{partition} failed, {fate}: {reason}")
        self.topic, self.partition, self.may_be_delivered = topic, partition, may_be_delivered
        self.delivered = delivered


class ReceiptTimeout(PushrepError, TimeoutError):
    """No result within `timeout` seconds: the record may still be delivered. Ask the receipt again."""

    def __init__(self, timeout: float) -> None:
        super().__init__(f"no answer within {timeout} s; the record may still be delivered, ask the receipt again")
        self.timeout = timeout


class LogStopped(PushrepError):
    """The partition's log accepts no records: after a failure of the disk until it has been opened again in place,
    which is tried within a second and then at least every minute; after damage until the outbox is opened again.
    """

    def __init__(self, topic: str, partition: int, reason: str, what_ends_it: str = "open the outbox again") -> None:
        super().__init__(f"{topic}-{partition} takes no records: {reason}; {what_ends_it}")
        self.topic, self.partition = topic, partition


class NotEnoughReplicas(PushrepError):
    """acks=ALL, and fewer than `min_insync_replicas` members are in sync, the leader counted. Nothing was appended.

    Append the record again once they are; `outbox.lag()` shows who is missing.
    """

    def __init__(self, name: str, *, in_sync: int, needed: int) -> None:
        super().__init__(
            f"{name}: {in_sync} of {needed} needed members are in sync (min_insync_replicas={needed}, this one counted)"
        )
        self.name, self.in_sync, self.needed = name, in_sync, needed
