"""A job without its command line: options in, a query run to its end or to a signal.

    options ─▶ before_spark ─▶ Spark ─▶ with_spark ─▶ query ─▶ end

    before_spark   in milliseconds: places on this machine's disk, logs and topic, Java
    with_spark     the rest: checkpoint, columns and table, whose they are, where the source begins; of a job without a
                   table, `progress_with_spark`

Both only read: a refusal leaves nothing behind, and names the option. Changes behind them are refused by
the batch.

    SIGTERM ─▶ flag ─▶ the batch that runs is finished ─▶ query stopped

Stopping between batches costs nothing; stopping inside one would only make Spark run it again.
"""

import contextlib
import json
import os
import re
import signal
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from filtering.errors import shown_partition
from pushrep.errors import PushrepError
from spark_jobs.batch_marks import LogRange, MarksStore
from spark_jobs.errors import BadJobOption, CantReplace, SparkJobError
from spark_jobs.file_marks import FileMarks, local_path
from spark_jobs.jobs.command import Reporter, one_line, served
from spark_jobs.jobs.options import ApplyOptions, JobOptions, named_by_option
from spark_jobs.jobs.source_topics import SourceTopics, parsed
from spark_jobs.marks_stores import is_database
from spark_jobs.replacing import Replacing
from spark_jobs.replay_filter import ReplayFilteredBatches, adopted_marks
from spark_jobs.sinks.catalog_table import WITH_VERSIONS, CatalogTable, idempotent_table
from spark_jobs.sinks.directory_table import offsets_from
from spark_jobs.sinks.hadoop import HadoopDirectory
from spark_jobs.sinks.idempotent_sink import BadSink, BatchTable
from spark_jobs.sources import register_sources
from spark_jobs.sources.logs import TopicLogs
from spark_jobs.sources.options import SourceOptions
from spark_jobs.sources.planning import resolve_starts
from spark_jobs.sources.startpoints import wanted_of
from spark_jobs.spark_internals import STREAMS_SINCE, release, require_java, session_of, too_old
from spark_jobs.sql import SqlTable
from spark_jobs.values import ValueDecoder

_FIRST_OFFSETS_UNFINISHED = re.compile(r"\.0\.[0-9a-f-]+\.tmp")
_KEPT_TO_READ_AGAIN = ("path", "topic", "includeheaders", "kafka.")
_POLL_S = 0.2  # Spark takes parts of a second, its annotation does not


def before_spark(options: JobOptions) -> None:
    """Raise BadJobOption, SparkUnfit, or the source's own refusal of its options or its topic."""
    if options.source == "pushrep" and release() < STREAMS_SINCE:
        raise too_old("a stream of source pushrep", "4.2")
    _check_places(options)
    if options.source == "kafka" and not options.source_servers():
        raise BadJobOption("--source-option", None, "name the brokers: kafka.bootstrap.servers=HOST:PORT")
    if options.source == "pushrep":
        source = _source_options(options)
        with contextlib.closing(TopicLogs(source.path, source.topic, source.partitions)) as logs:
            logs.extents()
    # spark-submit has its JVM already, and so has whoever calls the job beside a session of its own.
    if "PYSPARK_GATEWAY_PORT" not in os.environ and SparkSession.getActiveSession() is None:
        require_java()


def with_spark(
    spark: SparkSession, options: ApplyOptions, record: StructType, table: BatchTable | SqlTable, marks: MarksStore
) -> None:
    """`record`: the source's columns. Raises BadJobOption, BadSink, and what marks and table of another query raise."""
    columns = options.decoder().columns(record)
    query_id = progress_with_spark(spark, options, marks)
    with named("--sink", table.location if isinstance(table, SqlTable) else options.sink):
        table.check(spark, columns, query_id)


def progress_with_spark(spark: SparkSession, options: JobOptions, marks: MarksStore) -> str | None:
    """The checkpoint's query, None before its first start. Raises BadJobOption and what others' marks raise."""
    with named("--checkpoint", options.checkpoint):
        checkpoint = HadoopDirectory(spark, options.checkpoint)
        if unusable := checkpoint.why_unusable():
            raise BadJobOption("--checkpoint", options.checkpoint, f"{unusable}; name a directory, or a new one")
        query_id = _query_of(checkpoint)
        is_planned = any(map(str.isdigit, checkpoint.names("offsets")))
    with named("--sink" if isinstance(marks, SqlTable) else "--marks", marks.location):
        adopted_marks(marks, query_id, options.adopt)
    if options.source == "pushrep" and not is_planned:
        source = _source_options(options)
        with contextlib.closing(TopicLogs(source.path, source.topic, source.partitions)) as logs:
            resolve_starts(source, logs.extents(), logs.first_at)
    return query_id


def _check_places(options: JobOptions) -> None:
    """Refuse files for directories, marks that can't be written, and directories inside each other."""
    kept, table = options.marks_path(), options.table_path()
    marks, sink = (None if text is None else _real(text) for text in (kept, table))
    places = [("--checkpoint", options.checkpoint, _real(options.checkpoint)), ("--marks", options.marks, marks)]
    for option, text, place in [*places, ("--sink", table, sink)]:
        above = () if place is None else (place, *place.parents)
        if (file := next((at for at in above if at.is_file()), None)) is not None:
            raise BadJobOption(option, text, f"{file} is a file; name a directory, or a new one")
    if marks is not None:
        if marks == _real(options.checkpoint):
            raise BadJobOption("--marks", options.marks, "it is the checkpoint itself; name a directory beside it")
        if options.path is not None and marks == _real(options.path):
            why = "it is the directory of the logs, which is their writer's alone"
            raise BadJobOption("--marks", options.marks, why)
        existing = next(place for place in (marks, *marks.parents) if place.exists())
        if not os.access(existing, os.W_OK | os.X_OK, effective_ids=True):  # or batch 0 fails behind its rows
            raise BadJobOption("--marks", options.marks, f"{existing} is not writable; name a directory elsewhere")
    for option, text, place in places:
        if sink is not None and place is not None and (sink == place or sink in place.parents):
            raise BadJobOption(option, text, "it lies in the table of --sink; name a directory beside it")


def _source_options(options: JobOptions) -> SourceOptions:
    source = SourceOptions.parse(options.reader_options())
    source.check(stream=True)
    return source


def _query_of(checkpoint: HadoopDirectory) -> str | None:
    if "metadata" not in checkpoint.names():
        return None
    metadata = parsed(checkpoint, "metadata", checkpoint.read("metadata"))
    if not isinstance(metadata, dict) or "id" not in metadata:
        raise BadJobOption("--checkpoint", checkpoint.path_of("metadata"), "it names no query: restore it from a copy")
    return str(metadata["id"])


def _real(text: str) -> Path | None:
    place = local_path(text)
    return None if place is None else place.resolve()


@contextlib.contextmanager
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


Handler = Callable[[DataFrame, int], object]
"""What takes the rows that the filter kept, with the batch's number."""


Prepare = Callable[[StructType, MarksStore, SourceTopics], Handler]
"""The last look before the query starts, and the handler, of the source's columns and topics. Raises SparkJobError for
what the first batch would fail at.
"""


def apply(options: ApplyOptions, reporter: Reporter, *, debug: bool = False) -> None:
    """Run the query until it has read all (available-now), a signal comes, or it fails: then what failed is raised.

    A Spark session that is active already is used, and left running.
    """
    before_spark(options)
    with (
        served(options.health, f"apply {options.topic}", reporter),
        session_of(f"apply-{options.topic}", options.conf, debug=debug) as spark,
    ):
        apply_in(spark, options, reporter)


def apply_in(spark: SparkSession, options: ApplyOptions, reporter: Reporter) -> None:
    """As `apply`, in a session that stays."""
    table = options.table()

    def prepare(record: StructType, marks: MarksStore, topics: SourceTopics) -> Handler:  # noqa: ARG001 - as every job
        with_spark(spark, options, record, table, marks)
        return DecodedBatches(options.decoder(), table)

    source = _source_options(options) if options.consumer is not None else None
    wanted = None if source is None else wanted_of(source)
    replacing = None if options.append_only else Replacing(table, partial(_records, options), wanted)
    stream(spark, options, prepare, reporter, store=table if isinstance(table, SqlTable) else None, replacing=replacing)


def _records(options: JobOptions, session: SparkSession, where: LogRange) -> DataFrame:
    options_of_range = {
        name: text for name, text in options.reader_options().items() if name.lower().startswith(_KEPT_TO_READ_AGAIN)
    }
    if options.source == "kafka":
        shown = str(where.partition)
        options_of_range["assign"] = json.dumps({where.topic: [where.partition]})
    else:
        shown = shown_partition(where.partition)
        options_of_range["partitions"] = str(where.partition)
    ends = {"startingOffsets": where.start, "endingOffsets": where.end}
    options_of_range |= {name: json.dumps({where.topic: {shown: offset}}) for name, offset in ends.items()}
    return session.read.format(options.source).options(**options_of_range).load()


def stream(  # noqa: PLR0913 - a query's parts
    spark: SparkSession,
    options: JobOptions,
    prepare: Prepare,
    reporter: Reporter,
    *,
    store: SqlTable | None = None,
    replacing: Replacing | None = None,
) -> None:
    """Source ─▶ filter ─▶ the handler that `prepare` gives, until the end or a signal.

    `store`: of the marks, which takes them with the rows; None: the one that the options name. `replacing`: for records
    that a startpoint gives again; None: their rows come a second time.
    """
    if options.source == "pushrep":
        register_sources(spark)
    marks = store or FileMarks(options.marks, spark)
    rows = _without(options, spark.readStream.format(options.source).options(**options.reader_options()).load())
    with SourceTopics.of(spark, options) as topics:
        filtered = ReplayFilteredBatches(
            prepare(rows.schema, marks, topics),
            marks,
            carrier=options.carrier,
            window=options.window,
            only_pids=options.only_pids,
            ttl_s=options.ttl_s,
            retention_ms=options.retention_ms,
            adopt=options.adopt,
            replacing=replacing,
            on_counts=reporter.batch,
        )
        topics.agree()
        between = OneBatchAtATime(filtered, topics.check)
        remove_first_batch_leftovers(HadoopDirectory(spark, options.checkpoint))
        writer = rows.writeStream.foreachBatch(between).option("checkpointLocation", options.checkpoint)
        with _signals() as stop:
            query = writer.trigger(**options.trigger_arguments()).start()
            reporter.started(str(query.id), str(query.runId))
            _run(query, between, stop)
    reporter.stopped()


def _without(options: JobOptions, rows: DataFrame) -> DataFrame:
    """The rows that --leave-out does not name. Raises BadJobOption for a condition that Spark does not take."""
    if options.leave_out is None:
        return rows
    with named("--leave-out", options.leave_out):
        return rows.where(f"not coalesce(({options.leave_out}), false)")


def remove_first_batch_leftovers(checkpoint: HadoopDirectory) -> None:
    """Remove what a kill left of the very first file of `offsets`, `.0.<uuid>.tmp`.

    Spark writes a file under such a name and renames it. Before its first batch it wants that directory empty, and
    would refuse every restart (STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY). A batch that is planned, or any other
    file: nothing is touched. Another driver that is just writing that very file would fail, and start again.
    """
    found = checkpoint.names("offsets")
    if not checkpoint.names("commits") and all(_FIRST_OFFSETS_UNFINISHED.fullmatch(name) for name in found):
        for name in found:
            checkpoint.remove(f"offsets/{name}")


class DecodedBatches:
    """The filter's handler: rows → columns of their values → the table, or a database's staging table."""

    def __init__(self, decode: ValueDecoder, table: BatchTable | SqlTable) -> None:
        self._decode, self._table = decode, table

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        self._table(self._decode(rows), batch_id)

    def replace(self, rows: DataFrame, batch_id: int, ranges: Sequence[LogRange]) -> None:
        self._table.replace(self._decode(rows), batch_id, ranges)

    def drop_from(self, batch_id: int) -> None:
        if not isinstance(self._table, SqlTable):  # whose rows go with their marks, in the store's own transaction
            self._table.drop_from(batch_id)

    def last_batch(self, session: SparkSession) -> int | None:
        return None if isinstance(self._table, SqlTable) else self._table.last_batch(session)

    def expect(self, query_id: str, batch_id: int, ranges: tuple[LogRange, ...]) -> None:
        self._table.expect(query_id, batch_id, ranges)


class OneBatchAtATime:
    """Lets the main thread wait for the end of the running batch and refuse the next; remembers what failed.

    check: called before each batch; it raises what stops it.
    """

    def __init__(self, batches: Callable[[DataFrame, int], object], check: Callable[[], object]) -> None:
        self._batches, self.check = batches, check
        self._running = threading.Lock()
        self._closed = False
        self.error: BaseException | None = None

    def close(self) -> None:
        """Wait for the batch that runs; none will after it."""
        with self._running:
            self._closed = True

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        with self._running:
            if self._closed:
                raise SparkJobError("the job ends: Spark runs this batch when it is started again")
            try:
                self.check()
                self._batches(df, batch_id)
            except BaseException as error:
                self.error = error
                raise


def _run(query: StreamingQuery, between: OneBatchAtATime, stop: threading.Event) -> None:
    """Wait for the end or for the signal. The batch's own error is raised, not Spark's text about it."""
    try:
        while not query.awaitTermination(cast("int", _POLL_S)):
            if stop.is_set():
                between.close()
                with contextlib.suppress(Exception):  # a batch that was about to begin is refused
                    query.stop()
                return
    except Exception as error:
        if between.error is not None:
            raise between.error from error
        between.check()  # Spark fails at a topic that went or was made anew, in words that don't say so
        raise


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, instead of ending Python in the middle of a call into the JVM."""
    stop = threading.Event()

    wanted = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: stop.set()) for number in wanted]
    try:
        yield stop
    finally:
        for number, handler in zip(wanted, before, strict=True):
            signal.signal(number, handler)


class Sink:
    """What an apply job fills, as `pushrep startpoint repair` looks at it: which rows a repair replaces there.

    As the job's options name it. A path of files and a database are looked at without Spark. Delta and Iceberg start
    it, with `conf`; `close` stops it.
    """

    refusals = (SparkJobError,)

    def __init__(self, sink: str, table: str | None, format: str, conf: Mapping[str, str]) -> None:  # noqa: A002
        self._sink, self._table, self._format, self._conf = sink, table, format, conf
        self._resources = contextlib.ExitStack()

    def held(self, topic: str, starts: Mapping[int, int]) -> "dict[int, array[int]]":
        """The log offsets of its rows in each partition from its start on, ascending; looked for at once.

        Raises CantReplace if these rows can't be replaced; BadSink, BadJobOption where there is no such table, or it
        does not answer.
        """
        if is_database(self._sink):
            database = SqlTable(self._sink, self._table or "")
            with named("--sink", database.location):
                return database.offsets_from(topic, starts)
        if self._format.lower() in WITH_VERSIONS:
            table = idempotent_table(self._sink, self._format)
            assert isinstance(table, CatalogTable)
            require_java()
            session = self._resources.enter_context(session_of("startpoint", self._conf, debug=False))
            with named("--sink", self._sink):
                return table.offsets_from(session, topic, starts)
        if "/" not in self._sink:
            why = f"a catalog's table of {self._format} exchanges whole batches only; Delta and Iceberg can (--format)"
            raise CantReplace(topic, *min(starts.items()), why)
        return offsets_from(self._sink, self._format, topic, starts)

    def close(self) -> None:
        """Stop Spark, if a look has started it."""
        self._resources.close()
