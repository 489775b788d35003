"""Why a frame can't be filtered: it is not the log, in its order, each record once, each time it is read."""

from spark_jobs.errors import SparkJobError


class LogOrderBroken(SparkJobError):
    """Rows of one log partition came out of their log order inside one Spark partition: filter with `sort=True`.

    Usual causes: a shuffle or a sort before the filter, or rows that were multiplied before it.
    """

    def __init__(self, topic: str | None, partition: int, before: int, after: int) -> None:
        super().__init__(
            f"LogOrderBroken: log offset {after} comes after {before} in partition {partition} of "
            f"{topic if topic is not None else 'the topic'}; filter before anything that shuffles or multiplies rows, "
            "or pass sort=True"
        )
        self.topic, self.partition, self.before, self.after = topic, partition, before, after


class LogRowTwice(SparkJobError):
    """One record of the log stands twice in the frame, which then is not the log: nobody can say which row is meant.

    Usual causes: dumps of a log that overlap, or rows that were multiplied before the filter.
    """

    def __init__(self, topic: str | None, partition: int, offset: int) -> None:
        super().__init__(
            f"LogRowTwice: log offset {offset} of partition {partition} of "
            f"{topic if topic is not None else 'the topic'} stands twice in the frame; where dumps overlap, filter "
            'frame.dropDuplicates(["topic", "partition", "offset"]), and make several rows of one behind the filter'
        )
        self.topic, self.partition, self.offset = topic, partition, offset


class FrameChanged(SparkJobError):
    """The frame gave other rows when it was read again: make it repeatable, or cache it first."""

    def __init__(self, partition: int, start: int, end: int, expected: int, got: int) -> None:
        super().__init__(
            f"partition {partition}, log offsets [{start}, {end}): {expected} rows in the first pass, {got} when "
            "read again. The frame must give the same rows in the same Spark partitions each time: persist() it first, "
            "or read without ignoreMissingFiles and failOnDataLoss=false, which pass over what is gone in between"
        )
        self.partition, self.start, self.end, self.expected, self.got = partition, start, end, expected, got
