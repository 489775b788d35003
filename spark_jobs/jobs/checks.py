"""What a job can refuse before it reads a record: everything at which its first batch would fail.

    before_spark   in milliseconds: places on this machine's disk, logs and topic, columns, Java
    with_spark     what only Spark knows: checkpoint and table wherever they lie, whose they are, where the source
                   begins; of a job without a table, `progress_with_spark`

Both only read; a refusal leaves nothing behind, and names the option. A change after these checks is refused by
the batch.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from pushrep.errors import PushrepError
from spark_jobs.errors import MarksMissing, MarksOfAnotherQuery, SparkJobError
from spark_jobs.file_marks import FileMarks, local_path
from spark_jobs.java import require_java
from spark_jobs.jobs.options import ApplyOptions, BadJobOption, JobOptions, named_by_option
from spark_jobs.jobs.reporting import one_line
from spark_jobs.marks import MarksStore
from spark_jobs.sinks.hadoop import HadoopDirectory
from spark_jobs.sinks.idempotent_sink import FRESH_QUERY, BadSink, IdempotentSink
from spark_jobs.sources.arrow import own_schema
from spark_jobs.sources.logs import TopicLogs
from spark_jobs.sources.options import SourceOptions
from spark_jobs.sources.planning import resolve_starts
from spark_jobs.spark_internals import STREAMS_SINCE, release, too_old
from spark_jobs.sql import SqlTable
from spark_jobs.values import BadValueFormat


def before_spark(options: JobOptions, check_record: Callable[[StructType], object] | None = None) -> None:
    """Raise BadJobOption, SparkUnfit, or the source's own refusal of its options or its topic.

    `check_record` gets the source's columns where they are known without Spark.
    """
    if options.source == "pushrep" and release() < STREAMS_SINCE:
        raise too_old("a stream of source pushrep", "4.2")
    _check_places(options)
    if options.source == "kafka" and "kafka.bootstrap.servers" not in map(str.lower, options.source_options):
        why = "source kafka needs --source-option kafka.bootstrap.servers=HOST:9092"
        raise BadJobOption("--source-option", None, why)
    _check_marks(options)
    if options.source == "pushrep":
        source = _source_options(options)
        logs = TopicLogs(source.path, source.topic, source.partitions)
        try:
            logs.extents()
        finally:
            logs.close()
        if check_record is not None:
            check_record(own_schema(source))
    # spark-submit has its JVM already, and so has whoever calls the job beside a session of its own.
    if "PYSPARK_GATEWAY_PORT" not in os.environ and SparkSession.getActiveSession() is None:
        require_java()


def columns_without_spark(options: ApplyOptions, record: StructType) -> None:
    """The table's columns, judged unless only Spark can. Raises BadJobOption, BadSink."""
    if not options.decoder().needs_spark():
        _columns(options, record)


def with_spark(
    spark: SparkSession, options: ApplyOptions, record: StructType, table: IdempotentSink | SqlTable, marks: MarksStore
) -> None:
    """`record`: the source's columns. Raises BadJobOption, BadSink, and what marks and table of another query raise."""
    columns = _columns(options, record)
    query_id = progress_with_spark(spark, options, marks)
    with named("--sink", sink_name(options)):
        table.check(spark, columns, query_id)


def progress_with_spark(spark: SparkSession, options: JobOptions, marks: MarksStore) -> str | None:
    """The checkpoint's query, None before its first start. Raises BadJobOption and what others' marks raise."""
    with named("--checkpoint", options.checkpoint):
        checkpoint = HadoopDirectory(spark, options.checkpoint)
        if unusable := checkpoint.why_unusable():
            raise BadJobOption("--checkpoint", options.checkpoint, f"{unusable}; name a directory, or a new one")
        query_id = _query_of(checkpoint)
        planned = sorted(int(name) for name in checkpoint.names("offsets") if name.isdigit())
        if planned and options.source == "kafka":
            _check_topics(options, checkpoint, f"offsets/{planned[-1]}")
    with named("--marks", marks.location):
        _check_owner(marks, query_id, options.adopt)
    if options.source == "pushrep" and not planned:
        _check_start(_source_options(options))
    return query_id


def _check_topics(options: JobOptions, checkpoint: HadoopDirectory, name: str) -> None:
    """Raise BadJobOption here: Spark would log a batch of the new topics, and then fail without the old ones."""
    offsets = [json.loads(text) for text in _logged_offsets(checkpoint.path_of(name), checkpoint.read(name))]
    read = {topic for offset in offsets if isinstance(offset, dict) for topic in offset}
    if gone := sorted(read - set(options.topics())):
        why = f"the checkpoint's query has read {', '.join(gone)}: name that, too, or begin with a fresh checkpoint"
        raise BadJobOption("--topic", options.topic, why)


def _logged_offsets(path: str, text: str) -> list[str]:
    """The offset of each source that has one, from a file `offsets/N` of Spark's. Raises BadJobOption.

    v1 | {"batchWatermarkMs": ...} | one line a source: its offset, or -
    v2 | the same                  | <source>:<offset>                      Spark 4.1 and newer can write it
    """
    version, _, *lines = text.split("\n")
    if version not in {"v1", "v2"}:
        raise BadJobOption("--checkpoint", path, "it holds no offsets of version v1 or v2; this release reads no other")
    texts = [line.partition(":")[2] if version == "v2" else line for line in lines if line]
    return [offset for offset in texts if offset != "-"]


def _check_places(options: JobOptions) -> None:
    """Refuse files where directories should be, and directories inside each other."""
    table = options.table_path()
    for option, text in (("--checkpoint", options.checkpoint), ("--marks", options.marks_path()), ("--sink", table)):
        place = None if text is None else local_path(text)
        if place is not None and (file := _file_in(place)) is not None:
            what = "it is a file" if file == place else f"{file} is a file"
            raise BadJobOption(option, text, f"{what}; name a directory, or a new one")
    kept = options.marks_path()
    marks, checkpoint = None if kept is None else _real(kept), _real(options.checkpoint)
    if marks is not None and marks == checkpoint:
        raise BadJobOption("--marks", options.marks, "it is the checkpoint itself; name a directory beside it")
    if options.path is not None and marks is not None and marks == _real(options.path):
        raise BadJobOption("--marks", options.marks, "it is the directory of the logs, which is their writer's alone")
    if table is not None and (sink := _real(table)) is not None:
        for option, text, place in (
            ("--checkpoint", options.checkpoint, checkpoint),
            ("--marks", options.marks, marks),
        ):
            if place is not None and (sink == place or sink in place.parents):
                raise BadJobOption(option, text, "it lies in the table of --sink; name a directory beside it")


def _check_marks(options: JobOptions) -> None:
    """Read the store if there is one: it may be damaged."""
    kept = options.marks_path()
    path = None if kept is None else _real(kept)
    if path is None:  # only Spark reaches them, or they lie with the rows
        return
    if path.exists():
        with named("--marks", options.marks):
            marks = FileMarks(path)
            if (owner := marks.owner()) is not None:
                marks.read(owner, marks.batches(owner)[-1])
        return
    above = next(place for place in path.parents if place.exists())
    if not os.access(above, os.W_OK | os.X_OK, effective_ids=True):
        raise BadJobOption("--marks", options.marks, f"{above} is not writable; name a directory elsewhere")


def _check_owner(marks: MarksStore, query_id: str | None, adopt: tuple[str, int] | None) -> None:
    """Refuse marks of another query before the checkpoint gets a batch that can't run. Makes no store."""
    owner = marks.owner()
    if owner == query_id and owner is not None:
        return
    if owner is not None and adopt is None:
        raise MarksOfAnotherQuery(marks.location, owner, marks.batches(owner)[-1], query_id or FRESH_QUERY)
    if query_id is None and adopt is not None and marks.read(*adopt) is None:
        raise MarksMissing(marks.location, *adopt, marks.batches(adopt[0]))


def _check_start(source: SourceOptions) -> None:
    logs = TopicLogs(source.path, source.topic, source.partitions)
    try:
        resolve_starts(source, logs.extents(), logs.first_at)
    finally:
        logs.close()


def _source_options(options: JobOptions) -> SourceOptions:
    source = SourceOptions.parse(options.reader_options())
    source.check_stream()
    return source


def _columns(options: ApplyOptions, record: StructType) -> StructType:
    """The table's columns; partition columns must be among them."""
    try:
        columns = options.decoder().columns(record)
    except BadValueFormat as error:
        raise BadJobOption(f"--{error.option}", None, error.why) from error
    with named("--sink", sink_name(options)):
        options.table().check_columns(columns)
    return columns


def check_database(options: ApplyOptions) -> None:
    """Whether a database as --sink answers. Raises BadJobOption."""
    table = options.table()
    if isinstance(table, SqlTable):
        with named("--sink", sink_name(options)):
            table.owner()


def sink_name(options: ApplyOptions) -> str:
    """For messages: a database's URL without its password."""
    table = options.table()
    return table.location if isinstance(table, SqlTable) else options.sink


def _query_of(checkpoint: HadoopDirectory) -> str | None:
    """The id of the query whose checkpoint this is; None before its first start."""
    if "metadata" not in checkpoint.names():
        return None
    return str(json.loads(checkpoint.read("metadata"))["id"])


def _real(text: str) -> Path | None:
    place = local_path(text)
    return None if place is None else place.resolve()


def _file_in(place: Path) -> Path | None:
    """The first file among a path and those above it."""
    return next((at for at in (place, *place.parents) if at.is_file()), None)


@contextmanager
def named(option: str, value: str) -> Iterator[None]:
    """Errors raised inside become errors of this option; those of other libraries in one line."""
    try:
        yield
    except BadSink as error:
        raise named_by_option(error) from error
    except SparkJobError:
        raise
    except (PushrepError, OSError) as error:
        raise BadJobOption(option, value, str(error)) from error
    except Exception as error:  # of Hadoop, through Py4J
        raise BadJobOption(option, value, one_line(error)) from error
