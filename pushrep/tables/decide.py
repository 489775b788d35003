"""Do the database's state and the outbox continue each other? Pure.

    state      the row of `<name>_relay`: (epoch, batch), whether the batch is open, and, for each partition, the log's
               end when the batch before it was closed (`ends`)
    outbox     each log's start and end, and the `event-id` of what it holds from `ends` on

Closing a batch deletes its rows, once all of them are on disk and acknowledged. So behind `ends` there are records of
the open batch only, and the log is never shorter than `ends`. The outbox's own records are its half of the state:
there is no second file that could be lost, restored or copied without them, and a member that takes over has it.
"""

from collections.abc import Mapping
from typing import NamedTuple

EVENT_ID = "event-id"
"""The header of each relayed record: `<epoch>-<batch>-<row id>`. No two events have the same."""


class EventId(NamedTuple):
    """What the header `event-id` says."""

    epoch: int
    batch: int
    row_id: int

    @classmethod
    def parse(cls, value: bytes | None) -> "EventId | None":
        """None for anything else: whoever appends to the outbox by hand writes what he likes."""
        parts = (value or b"").split(b"-")
        if len(parts) != 3 or not all(part.isdigit() and len(part) < 20 for part in parts):
            return None
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return f"{self.epoch}-{self.batch}-{self.row_id}"


class BatchState(NamedTuple):
    """The state in the database. ends: by partition, where the log ended when no batch was open."""

    epoch: int
    batch: int
    is_open: bool
    ends: Mapping[int, int]


class RelayedLog(NamedTuple):
    """A partition's log. newest: the highest (epoch, batch) in it from the state's end on; rows: its rows there."""

    start: int
    end: int
    newest: tuple[int, int] | None = None
    rows: frozenset[int] = frozenset()


class GoesOn(NamedTuple):
    """The relay may go on. appended: by partition, the rows of the open batch that are in the log already."""

    appended: Mapping[int, frozenset[int]]


class NotContinued(NamedTuple):
    """It may not. outbox_is_old: the outbox lacks what the database gave it; else the database is the older one."""

    outbox_is_old: bool
    why: str


def judge(state: BatchState, logs: Mapping[int, RelayedLog]) -> GoesOn | NotContinued:
    """Whether the relay may go on with this outbox."""
    appended = {}
    at = (state.epoch, state.batch)
    for partition, log in logs.items():
        end = state.ends.get(partition, 0)
        if log.end < end:
            return NotContinued(
                True, f"the log of partition {partition} ends at {log.end}, and held everything below {end}"
            )
        if log.newest is not None and log.newest > at:
            there = f"batch {log.newest[0]}-{log.newest[1]} in partition {partition} of the outbox"
            return NotContinued(False, f"there are records of {there}, and the database is at batch {at[0]}-{at[1]}")
        if log.start > end:
            return NotContinued(
                False, f"what was appended to partition {partition} from offset {end} on is not there any more"
            )
        if log.newest == at:
            if not state.is_open:
                there = f"partition {partition} holds records of batch {at[0]}-{at[1]} behind offset {end}"
                return NotContinued(False, f"{there}, at which the database closed that batch")
            appended[partition] = log.rows
    return GoesOn(appended)
