"""Do the database's state and the outbox continue each other? Pure.

    state      the row of `<name>_relay`: (epoch, batch), whether the batch is open, and, for each partition, the log's
               end when the batch before it was closed (`ends`)
    outbox     each log's start and end, and the `event-id` of what it holds from `ends` on

Closing a batch deletes its rows, once all of them are on disk and acknowledged. So behind `ends` there are records of
the open batch only, and the log is never shorter than `ends`. The outbox's own records are its half of the state: they
can't be lost, restored or copied without themselves, and a member that takes over has them. Rows whose
records are gone, or that never became any, are known by the note beside them (pushrep/outbox/relay_note.py), which a
member may lack.

    the database's newest closed batch      the outbox                                 verdict
    n                                       records of n + 1, if that is open          goes on behind them
                                            a record, or a note, of a later batch      the database went back
    none: no relay ever ran                 a record or a note of any batch            the database went back
    n                                       ends before `ends` in any partition        the outbox went back

A batch that left no record in the outbox, since it was empty or all of it was refused, can't be missing there, and
is begun again without harm where the database lost it.
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


def judge(
    state: BatchState, logs: Mapping[int, RelayedLog], noted: tuple[int, int] | None = None
) -> GoesOn | NotContinued:
    """Whether the relay may go on with this outbox. noted: the newest batch that its note says is closed."""
    appended = {}
    known = f"the database is at batch {state.epoch}-{state.batch}" if state.batch else "the database knows of none"
    at, closed = (state.epoch, state.batch), (state.epoch, state.batch - state.is_open)
    if noted is not None and noted > closed:
        return NotContinued(False, f"the outbox knows the end of batch {noted[0]}-{noted[1]}, and {known}")
    for partition, log in logs.items():
        end = state.ends.get(partition, 0)
        if log.end < end:
            return NotContinued(
                True, f"the log of partition {partition} ends at {log.end}, and held everything below {end}"
            )
        if log.newest is not None and log.newest > at:
            there = f"batch {log.newest[0]}-{log.newest[1]} in partition {partition} of the outbox"
            return NotContinued(False, f"there are records of {there}, and {known}")
        if log.start > end and noted != closed:  # else it was nobody's of an open batch: the note kept those
            return NotContinued(
                False, f"what was appended to partition {partition} from offset {end} on is not there any more"
            )
        if log.newest == at:
            if not state.is_open:
                there = f"partition {partition} holds records of batch {at[0]}-{at[1]} behind offset {end}"
                return NotContinued(False, f"{there}, at which the database closed that batch")
            appended[partition] = log.rows
    return GoesOn(appended)
