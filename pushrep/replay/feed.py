"""Feed: where the blocks of a replay come from: a session of this process, or one of a node (remote.py)."""

from typing import NamedTuple, Protocol

from pushrep.records import RecordBatch
from pushrep.replay import events as e
from pushrep.wire.replay_messages import ReplayEndReason


class ReplayedBlock(NamedTuple):
    """Whole batches, to be cut to [start, end)."""

    batches: list[RecordBatch]
    start: int
    end: int


class Feed(Protocol):
    """One session and its subscriber. One thread at a time takes steps and waits; the rest may come from any."""

    end: e.SendEnd | None
    """Why it is over, in the session's words; None while it is not."""

    @property
    def session_id(self) -> int: ...
    @property
    def position(self) -> int:
        """Behind the last block that was given."""
        ...

    @property
    def tip(self) -> int:
        """How far could be read at the last look."""
        ...

    @property
    def end_reason(self) -> ReplayEndReason | None: ...
    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        ...

    @property
    def step_waits(self) -> bool:
        """Whether the next step may wait for a disk or a peer: an event loop leaves it to a thread."""
        ...

    def step(self) -> ReplayedBlock | None:
        """A block, or None if there is none now. Never waits for one."""
        ...

    def rest(self) -> None:
        """In place of a step, while whoever takes the blocks pauses."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Until there may be something to do, `wake`, or the time is over."""
        ...

    async def wait_async(self, timeout_s: float) -> None:
        """The same in an event loop."""
        ...

    def wake(self) -> None:
        """End a wait."""
        ...

    def stop(self) -> None:
        """End it; again is fine."""
        ...

    def close(self) -> None:
        """Let go of what it reads from."""
        ...
