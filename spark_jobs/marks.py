"""Where the marks of a foreachBatch query live between batches: the Protocol of a store, and its errors."""

from typing import Protocol

from spark_jobs.batch_marks import BatchMarks, BatchMarksUnreadable
from spark_jobs.errors import SparkJobError

KEEP_ALL = 1 << 30
"""Batches of a query that `write` keeps: more than any has."""


class MarksStore(Protocol):
    """Keeps the marks of queries, keyed (query id, batch). One query owns a store: the one that wrote last."""

    location: str
    """For messages: where a person finds it."""

    def owner(self) -> str | None:
        """The query that wrote last; None while the store is empty."""
        ...

    def batches(self, query_id: str) -> list[int]:
        """The batches kept of this query, ascending, with the one that it adopted."""
        ...

    def read(self, query_id: str, batch_id: int) -> BatchMarks | None:
        """What was written last for this batch; None if nothing was, or it was dropped."""
        ...

    def write(self, marks: BatchMarks, *, keep: int) -> None:
        """Store durably before returning; of this query the newest `keep` batches stay, and no other query's do
        once this one has written `keep` (BatchMarks.drops).
        """
        ...

    def drop_from(self, query_id: str, batch_id: int) -> None:
        """Forget this query's batches >= batch_id, durably."""
        ...


class MarksFenced(SparkJobError):
    """Another driver wrote marks since this one read them: two run at once, or a checkpoint was copied. End one."""

    def __init__(self, location: str, query_id: str, batch_id: int) -> None:
        super().__init__(
            f"marks at {location} were written by another driver while batch {batch_id} of query {query_id} ran: the "
            "marks of this batch are not stored; end one of the two, and start the other again"
        )
        self.location, self.query_id, self.batch_id = location, query_id, batch_id


class MarksStoreDamaged(SparkJobError):
    """The store can't be trusted: restore a copy, or start a fresh checkpoint with `adopt=` from an older batch."""

    def __init__(self, location: str, why: str) -> None:
        super().__init__(f"marks at {location}: {why}")
        self.location, self.why = location, why


def parsed_marks(data: bytes, location: str, batch: tuple[str, int]) -> BatchMarks:
    """A store's bytes. Raises MarksStoreDamaged, also where they are not of this (query, batch)."""
    try:
        marks = BatchMarks.from_bytes(data)
    except BatchMarksUnreadable as error:
        raise MarksStoreDamaged(location, str(error)) from error
    if batch != (marks.query_id, marks.batch_id):
        raise MarksStoreDamaged(location, f"it holds batch {marks.batch_id} of query {marks.query_id}")
    return marks
