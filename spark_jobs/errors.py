"""The root of every error that spark_jobs raises, and why a query, a frame or an option is refused.

Each error is named for what the caller does next. Raised inside Spark's planner or workers it reaches the driver as
text in Spark's own exception; so the message names the option, field or file, and what to do.
"""

from filtering.errors import shown_partition


class SparkJobError(Exception):
    """Anything a job, source or column expression of spark_jobs refuses or fails at."""


class SparkUnfit(SparkJobError):
    """This Java, release of Spark, session or setting of it lacks what is needed; the message names it."""


class MarksMissing(SparkJobError):
    """The marks that are needed are not at this place: give the store that belongs to the checkpoint, or adopt others.

    Going on with empty ones would let every replay through.
    """


class MarksOfAnotherQuery(SparkJobError):
    """The store belongs to another query: adopt its marks, or give this query a store of its own."""


class StoreUnfit(SparkJobError):
    """This store lets two writers create one object, or shows one half written: use another, as the message says."""

    def __init__(self, location: str, why: str) -> None:
        super().__init__(f"{location}: {why}")
        self.location, self.why = location, why


class CheckpointWentBack(SparkJobError):
    """Spark runs a batch again that was stored, and what was written can't be taken back: go on as the message says."""


class TableWentBack(SparkJobError):
    """The table lacks batches of which marks and checkpoint say that they were written: restore them, or go back, too.

    Going on would leave their rows out.
    """


ROWS_WOULD_BE_LOST = (
    "taken back, these rows would be gone, and those before them are gone already. Put the checkpoint's files back as "
    "they were and send the job back by a startpoint with --reset-marks, or go on by a fresh checkpoint with --adopt "
    "and this query's last batch"
)
"""Of a rollback over a batch that replaced rows."""


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


class FrameUnusable(SparkJobError):
    """The frame can't be filtered as it is; the message names the column or row, and what to do.

    A column that the filter needs is missing, of a type without order, or has nulls; a record stands twice; one log
    partition came in two startpoint epochs; the frame is none of foreachBatch.
    """


class FrameChanged(SparkJobError):
    """The frame gave other rows when it was read again: make it repeatable, or cache it first."""

    def __init__(self, partition: int, start: int, end: int, expected: int, got: int) -> None:
        super().__init__(
            f"partition {shown_partition(partition)}, log offsets [{start}, {end}): {expected} rows in the first pass, "
            f"{got} when read again. The frame must give the same rows each time: persist() it first, or read without "
            "ignoreMissingFiles and failOnDataLoss=false, which pass over what is gone in between"
        )
        self.partition, self.start, self.end, self.expected, self.got = partition, start, end, expected, got


class RecordUnfit(SparkJobError):
    """A record can't be handled as the job is set; nothing of its batch is written, no later record of its partition
    is relayed.
    """


class BadJobOption(SparkJobError):
    """An option of the job is missing, malformed or out of place; `option` names it."""

    def __init__(self, option: str, value: object, why: str) -> None:
        super().__init__(f"{option}: {why}" if value is None else f"{option}={value!r}: {why}")
        self.option, self.value, self.why = option, value, why
