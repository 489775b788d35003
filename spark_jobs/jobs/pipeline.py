"""A job without its command line: options in, a query run to its end or to a signal.

    options ─▶ checks ─▶ Spark ─▶ checks ─▶ query ─▶ end
    SIGTERM ─▶ flag ─▶ the batch that runs is finished ─▶ query stopped

Stopping between batches costs nothing; stopping inside one would only make Spark run it again.
"""

import contextlib
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Protocol, cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from filtering.errors import shown_partition
from spark_jobs.batch_marks import LogRange
from spark_jobs.errors import SparkJobError
from spark_jobs.file_marks import FileMarks
from spark_jobs.jobs.checks import before_spark, check_database, columns_without_spark, named, with_spark
from spark_jobs.jobs.options import ApplyOptions, JobOptions
from spark_jobs.jobs.reporting import Reporter, served
from spark_jobs.marks import MarksStore
from spark_jobs.replacing import AskRowsWanted, Replacing, ReplacingHandler
from spark_jobs.replay_filter import ReplayFilteredBatches
from spark_jobs.sinks.hadoop import HadoopDirectory
from spark_jobs.sinks.idempotent_sink import IdempotentSink
from spark_jobs.sources import register_sources
from spark_jobs.sources.options import SourceOptions
from spark_jobs.sources.startpoints import wanted_of
from spark_jobs.sql import SqlTable
from spark_jobs.values import ValueDecoder

_FIRST_OFFSETS_UNFINISHED = re.compile(r"\.0\.[0-9a-f-]+\.tmp")
_KEPT_TO_READ_AGAIN = ("path", "topic", "includeheaders", "kafka.")
_POLL_S = 0.2  # Spark takes parts of a second, its annotation does not


Handler = Callable[[DataFrame, int], object]
"""What takes the rows that the filter kept, with the batch's number."""


class Prepare(Protocol):
    """The last look before the query starts, and the handler; `record` are the source's columns."""

    def __call__(self, spark: SparkSession, record: StructType, marks: MarksStore) -> Handler:
        """Raises SparkJobError for what the first batch would fail at."""
        ...


def apply(options: ApplyOptions, reporter: Reporter, *, debug: bool = False) -> None:
    """Run the query until it has read all (available-now), a signal comes, or it fails: then what failed is raised.

    A Spark session that is active already is used, and left running.
    """
    check_database(options)
    before_spark(options, partial(columns_without_spark, options))
    with (
        served(options.health, f"apply {options.topic}", reporter),
        session_of(f"apply-{options.topic}", options.conf, debug=debug) as spark,
    ):
        apply_in(spark, options, reporter)


def apply_in(spark: SparkSession, options: ApplyOptions, reporter: Reporter) -> None:
    """As `apply`, in a session that stays."""
    table = options.table()

    def prepare(spark: SparkSession, record: StructType, marks: MarksStore) -> Handler:
        with_spark(spark, options, record, table, marks)
        return DecodedBatches(options.decoder(), table)

    replacing = None if options.append_only else Replacing(table, partial(_records, options), _wanted(options))
    stream(spark, options, prepare, reporter, store=table if isinstance(table, SqlTable) else None, replacing=replacing)


def _records(options: JobOptions, session: SparkSession, where: LogRange) -> DataFrame:
    """A log range once more."""
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


def _wanted(options: JobOptions) -> AskRowsWanted | None:
    """Asks the store of the consumer's startpoints; None without a consumer."""
    return wanted_of(SourceOptions.parse(options.reader_options())) if options.consumer is not None else None


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
    filtered = ReplayFilteredBatches(
        prepare(spark, rows.schema, marks),
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
    between = OneBatchAtATime(filtered)
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


def remove_first_batch_leftovers(checkpoint: HadoopDirectory) -> list[str]:
    """Remove what a kill left of the very first file of `offsets`, `.0.<uuid>.tmp`; the names.

    Spark writes a file under such a name and renames it. Before its first batch it wants that directory empty, and
    would refuse every restart (STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY). A batch that is planned, or any other
    file: nothing is touched. Another driver that is just writing that very file would fail, and start again.
    """
    found = checkpoint.names("offsets")
    if checkpoint.names("commits") or not all(_FIRST_OFFSETS_UNFINISHED.fullmatch(name) for name in found):
        return []
    for name in found:
        checkpoint.remove(f"offsets/{name}")
    return found


class DecodedBatches:
    """The filter's handler: rows → columns of their values → the table, or a database's staging table."""

    def __init__(self, decode: ValueDecoder, table: IdempotentSink | SqlTable) -> None:
        self._decode, self._table = decode, table

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        self._table(self._decode(rows), batch_id)

    def replace(self, rows: DataFrame, batch_id: int, ranges: Sequence[LogRange]) -> None:
        cast("ReplacingHandler", self._table).replace(self._decode(rows), batch_id, ranges)

    def drop_from(self, batch_id: int) -> None:
        if not isinstance(self._table, SqlTable):  # whose rows go with their marks, in the store's own transaction
            self._table.drop_from(batch_id)

    def expect(self, query_id: str, batch_id: int, ranges: tuple[LogRange, ...]) -> None:
        self._table.expect(query_id, batch_id, ranges)


class OneBatchAtATime:
    """Lets the main thread wait for the end of the running batch and refuse the next; remembers what failed."""

    def __init__(self, batches: ReplayFilteredBatches) -> None:
        self._batches = batches
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
                raise _Stopping
            try:
                self._batches(df, batch_id)
            except BaseException as error:
                self.error = error
                raise


class _Stopping(SparkJobError):
    """The job ends: Spark runs this batch when the job is started again."""


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
        raise


@contextlib.contextmanager
def session_of(name: str, conf: Mapping[str, str], *, debug: bool) -> Iterator[SparkSession]:
    """The active session, left running; else one of the job's own, stopped at the end."""
    ours = SparkSession.getActiveSession() is None
    builder = SparkSession.builder.appName(f"pushrep-{name}")
    # A job needs no web pages of its plans; --conf may say otherwise.
    for setting, value in {"spark.ui.showConsoleProgress": "false", **conf}.items():
        builder = builder.config(setting, value)
    spark = builder.getOrCreate()
    try:
        if not debug:
            spark.sparkContext.setLogLevel("OFF")
        yield spark
    finally:
        if ours:
            spark.stop()  # its JVM must not outlive the job


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, instead of ending Python in the middle of a call into the JVM."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of handlers
        stop.set()

    wanted = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, on_signal) for number in wanted]
    try:
        yield stop
    finally:
        for number, handler in zip(wanted, before, strict=True):
            signal.signal(number, handler)
