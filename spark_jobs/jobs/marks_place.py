"""Where a job keeps its marks, as its options name it.

a directory of this machine, file:...    LocalMarks    a segment log
hdfs://..., any other scheme             FileMarks     a file for each batch, on Spark's own file system
kafka:TOPIC                              TopicMarks    a compacted topic
"""

from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from spark_jobs.file_marks import FileMarks
from spark_jobs.jobs.options import JobOptions, local_path
from spark_jobs.marks import LocalMarks
from spark_jobs.marks_stores import Brokers, topic_marks

if TYPE_CHECKING:
    from spark_jobs.topic_marks import TopicMarks


def marks_of(options: JobOptions, spark: SparkSession) -> "LocalMarks | FileMarks | TopicMarks":
    """The store, which opens at its first use. Raises what `topic_marks_of` raises."""
    if options.marks_in_topic():
        return topic_marks_of(options)
    place = local_path(options.marks)
    return FileMarks(options.marks, spark) if place is None else LocalMarks(place)


def topic_marks_of(options: JobOptions) -> "TopicMarks":
    """The store of kafka:TOPIC. Raises NoSuchMarks, BadArgument, OSError for settings that reach no broker."""
    brokers = Brokers(options.marks_brokers(), options.marks_config, "--marks-servers", "--marks-config")
    return topic_marks(options.marks, brokers)
