"""The marks that a query's filter keeps outside its checkpoint, moved along with it.

    check    they are those of the checkpoint's last batch, before anything is written
    move     the appended batches hold no record: their marks are those of before, and name who was sent back by a reset

Every store does that keeps them by batch: LocalMarks, FileMarks, SqlTable, TopicMarks; named as the job names them.
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from spark_jobs.batch_marks import BatchMarks, SentBack
from spark_jobs.errors import MarksMissing, SparkJobError
from spark_jobs.marks import MarksStore
from spark_jobs.marks_stores import Brokers, NoSuchMarks, opened

_KEEP_ALL = 1 << 40


class MarksUnreachable(SparkJobError):
    """The marks of the query's filter can't be moved along, and a filter would drop or fail: see the message."""

    def __init__(self, location: str | None, why: str) -> None:
        super().__init__(why if location is None else f"marks at {location}: {why}")
        self.location, self.why = location, why


@runtime_checkable
class WithRows(Protocol):
    """A store that commits marks and rows as one, and wants to be told that there are none."""

    def stage_nothing(self, query_id: str, batch_id: int) -> None: ...


@dataclass(frozen=True, slots=True)
class MarksPlace:
    """Where they lie: a directory or its URL, a database's URL with its table, or kafka:TOPIC with its brokers."""

    place: str = field(repr=False)  # a database's URL may have a password
    table: str | None = None
    brokers: Brokers | None = None

    def opened(self) -> AbstractContextManager[MarksStore]:
        """The store there, closed at the end; none is made. Raises NoSuchMarks, and what the store itself raises."""
        return opened(self.place, self.table, self.brokers)


def check_marks(place: MarksPlace | None, query_id: str, batch: int, *, resets: bool) -> str | None:
    """Where the marks of the checkpoint's last batch lie, as people may see it; None if there are none.

    Raises MarksMissing if they are of another one, or MarksUnreachable. Makes no store.
    """
    if place is None:
        if resets:
            raise MarksUnreachable(None, "the startpoint resets marks, and none are named: say where they lie, --marks")
        return None
    try:
        with place.opened() as store:
            _marks_of(store, query_id, batch)
            return store.location
    except NoSuchMarks as error:
        raise MarksUnreachable(error.location, error.why) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class MarksMove:
    """Batches [first, first + count) of a query that hold nothing.

    stood_at: each partition that moved, and from where. resets: those whose marks are reset, None: all there are.
    """

    query_id: str
    topic: str
    first: int
    count: int
    stood_at: Mapping[int, int]
    resets: Collection[int] | None


def move_marks(place: MarksPlace | None, location: str | None, move: MarksMove) -> None:
    """Give the appended batches their marks. Raises MarksMissing, and MarksUnreachable if they lie elsewhere."""
    if location is None:
        return
    if place is None:
        raise MarksUnreachable(location, "an interrupted call was moving them: name them again, --marks")
    with place.opened() as store:
        if store.location != location:
            why = f"an interrupted call was moving those at {location}: name these again, --marks"
            raise MarksUnreachable(store.location, why)
        left = _moved(_marks_of(store, move.query_id, move.first - 1), move)
        store.drop_from(move.query_id, move.first)
        for batch in range(move.first, move.first + move.count):
            if isinstance(store, WithRows):
                store.stage_nothing(move.query_id, batch)
            store.write(replace(left, batch_id=batch), keep=_KEEP_ALL)


def _moved(before: BatchMarks, move: MarksMove) -> BatchMarks:
    """The marks of a batch that holds nothing. Those of a partition that was sent back stay, for whoever replaces rows:
    its filter needs them to tell what they were there (replacing.py); any other begins without.
    """
    if move.resets is None:
        return BatchMarks(before.query_id, before.batch_id)
    known = [one.number for one in before.sent_back] + [key.startpoint_epoch for key in before.marks]
    number = max(known, default=0) + 1
    sent_back = {one[:2]: one for one in before.sent_back}
    for partition, stood_at in move.stood_at.items():
        where = move.topic, partition
        if partition in move.resets:
            sent_back[where] = SentBack(*where, number, stood_at)
        elif where in sent_back:
            old = sent_back[where]
            sent_back[where] = old._replace(replace_from=max(old.replace_from, stood_at))
    after = tuple(sorted(sent_back.values()))
    return BatchMarks(before.query_id, before.batch_id, marks=before.marks, sent_back=after)


def _marks_of(marks: MarksStore, query_id: str, batch: int) -> BatchMarks:
    found = marks.read(query_id, batch)
    if found is None:
        raise MarksMissing(marks.location, query_id, batch, marks.batches(query_id))
    return found
