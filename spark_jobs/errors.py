"""The root of every error that spark_jobs raises, and why the filter refuses a query or a frame.

Each error is named for what the caller does next. Raised inside Spark's planner or workers it reaches the driver as
text in Spark's own exception; so the message names the option, field or file, and what to do.
"""

from collections.abc import Sequence

from filtering.errors import shown_partition


class SparkJobError(Exception):
    """Anything a job, source or column expression of spark_jobs refuses or fails at."""


class SparkUnfit(SparkJobError):
    """This Java, release of Spark, session or setting of it lacks what is needed; the message names it."""


class NotInForeachBatch(SparkJobError):
    """There is no streaming query to keep marks for: use `filter_frame` on a batch frame."""

    def __init__(self) -> None:
        super().__init__("not inside foreachBatch: a batch frame is filtered by .filter_frame(df, marks)")


class MarksMissing(SparkJobError):
    """The store lacks the marks of the batch before; going on with empty ones would let every replay through."""

    def __init__(self, location: str, query_id: str, batch_id: int, kept: list[int]) -> None:
        have = f"it has batches {kept[0]} to {kept[-1]}" if kept else "it has none of this query"
        super().__init__(
            f"marks at {location} lack batch {batch_id} of query {query_id}: {have}. Give the store that belongs to "
            "this checkpoint, or begin a fresh checkpoint with adopt=(query, batch), --adopt QUERY:BATCH"
        )
        self.location, self.query_id, self.batch_id, self.kept = location, query_id, batch_id, kept


class MarksOfAnotherQuery(SparkJobError):
    """The store belongs to another query: adopt its marks, or give this query a store of its own."""

    def __init__(self, location: str, owner: str, last: int, query_id: str) -> None:
        super().__init__(
            f"marks at {location} belong to query {owner} (last batch {last}), this is query {query_id}. To go on "
            f"where that one ended begin a fresh checkpoint with adopt=({owner!r}, {last}), --adopt {owner}:{last}; "
            "otherwise choose another place for the marks"
        )
        self.location, self.owner, self.last, self.query_id = location, owner, last, query_id


class StoreUnfit(SparkJobError):
    """This store lets two writers create one object, shows one half written, or can't be where it is said to be: use
    another, as the message says.
    """

    def __init__(self, location: str, why: str) -> None:
        super().__init__(f"{location}: {why}")
        self.location = location


class CheckpointWentBack(SparkJobError):
    """Spark planned a batch anew that had been stored with other records, and the handler can't take them back."""

    def __init__(self, batch_id: int) -> None:
        super().__init__(
            f"batch {batch_id} was stored with other log ranges: its checkpoint was rolled back. The handler must "
            "remove what it wrote for this batch and later ones: give it a method drop_from(batch_id)"
        )
        self.batch_id = batch_id


class RolledBackOverReplaced(SparkJobError):
    """A checkpoint went back over a batch that replaced rows: undone, its rows and those would be lost. It stays."""

    def __init__(self, batch_id: int, over: int, replaced: Sequence[tuple[str, int, int, int, int]]) -> None:
        topic, partition, start, end, _ = replaced[0]
        super().__init__(
            f"the checkpoint was rolled back to batch {batch_id}, and batch {over} behind it replaced rows, those of "
            f"{topic}-{shown_partition(partition)} [{start}, {end}) first: taken back, these rows would be gone, and "
            "those before them are gone already. Put the checkpoint's files back as they were and send the job back by "
            "a startpoint with --reset-marks, or go on by a fresh checkpoint with --adopt and this query's last batch"
        )
        self.batch_id, self.over, self.replaced = batch_id, over, tuple(replaced)


class CantReplace(SparkJobError):
    """A startpoint gives records again whose rows can't replace those in the table. Nothing of the batch is written.

    Cancel the startpoint, or let the job write the rows beside the old ones: `--append-only`.
    """

    def __init__(self, topic: str, partition: int, offset: int, why: str) -> None:
        super().__init__(
            f"{topic}-{shown_partition(partition)} is read again from offset {offset} on, and its rows can't "
            f"replace those in the table: {why}. --append-only begins with empty marks and writes them beside the old "
            "ones"
        )
        self.topic, self.partition, self.offset, self.why = topic, partition, offset, why


class LogRowTwice(SparkJobError):
    """One record of the log stands twice in the frame, which then is not the log: nobody can say which row is meant.

    Usual causes: dumps of a log that overlap, or rows that were multiplied before the filter.
    """

    def __init__(self, topic: str | None, partition: int, offset: int) -> None:
        super().__init__(
            f"LogRowTwice: log offset {offset} of partition {shown_partition(partition)} of "
            f"{topic if topic is not None else 'the topic'} stands twice in the frame; where dumps overlap, filter "
            'frame.dropDuplicates(["topic", "partition", "offset"]), and make several rows of one behind the filter'
        )
        self.topic, self.partition, self.offset = topic, partition, offset


class FrameChanged(SparkJobError):
    """The frame gave other rows when it was read again: make it repeatable, or cache it first."""

    def __init__(self, partition: int, start: int, end: int, expected: int, got: int) -> None:
        super().__init__(
            f"partition {shown_partition(partition)}, log offsets [{start}, {end}): {expected} rows in the first pass, "
            f"{got} when read again. The frame must give the same rows each time: persist() it first, or read without "
            "ignoreMissingFiles and failOnDataLoss=false, which pass over what is gone in between"
        )
        self.partition, self.start, self.end, self.expected, self.got = partition, start, end, expected, got
