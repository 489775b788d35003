"""The apply job without its command line: options in, a query run to its end or to a signal.

    SIGTERM ─▶ flag ─▶ the batch that runs is finished ─▶ query stopped ─▶ marks closed

Stopping between batches costs nothing; stopping inside one would only make Spark run it again.
"""

import contextlib
import json
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_jobs.errors import SparkJobError
from spark_jobs.jobs.reporting import Reporter
from spark_jobs.marks import LocalMarks
from spark_jobs.replay_filter import ReplayFilteredBatches
from spark_jobs.sinks.table import IdempotentSink, idempotent_table
from spark_jobs.sources import register_sources
from spark_jobs.values import ValueDecoder

_STARTS = {"startingoffsets", "startingtimestamp", "startingoffsetsbytimestamp"}  # in any case, as Spark reads them
AVAILABLE_NOW = "available-now"
_POLL_S = 0.2  # Spark takes parts of a second, its annotation does not
_INTERVAL = re.compile(r"^\s*(\d+)\s*(ms|s|m|h)\s*$")
_SPARK_UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours"}


class BadOption(SparkJobError):
    """An option of the job is missing, malformed or out of place; `option` names it."""

    def __init__(self, option: str, value: object, why: str) -> None:
        super().__init__(f"{option}={value!r}: {why}")
        self.option, self.value, self.why = option, value, why


@dataclass(frozen=True, kw_only=True)
class ApplyOptions:
    """What the job is told; its command's --help tells each. Raises BadOption, BadValueFormat."""

    topic: str
    sink: str
    checkpoint: str
    marks: str
    source: str = "pushrep"
    path: str | None = None
    source_options: dict[str, str] = field(default_factory=dict)
    carrier: str = "key"
    starting_offsets: str | None = None
    max_records_per_trigger: int | None = None
    window: int = 0
    only_pids: frozenset[int] | None = None
    sink_format: str = "parquet"
    sink_options: dict[str, str] = field(default_factory=dict)
    partition_by: tuple[str, ...] = ()
    adopt: tuple[str, int] | None = None
    trigger: str = AVAILABLE_NOW
    value_format: str = "binary"
    value_schema: str | None = None
    keep: tuple[str, ...] = ()
    conf: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for option in ("topic", "sink", "checkpoint", "marks"):
            if not getattr(self, option).strip():
                raise BadOption(f"--{option}", getattr(self, option), "it is empty; see --help for what it names")
        if Path(self.checkpoint).is_file():
            raise BadOption("--checkpoint", self.checkpoint, "it is a file; name a directory, or a new one")
        if self.source == "pushrep" and self.path is None:
            raise BadOption("--path", None, "source pushrep reads logs from a directory: name it")
        if self.source != "pushrep" and self.path is not None:
            raise BadOption("--path", self.path, f"belongs to source pushrep; use --source-option for {self.source}")
        by_name = {name.lower(): text.lower() for name, text in self.source_options.items()}
        if by_name.get("failondataloss") == "false" and self.source == "kafka":
            raise BadOption("--source-option failOnDataLoss", "false", "a gap that nobody sees would be marked as read")
        made = outbox_carrier(self.path, self.topic) if self.source == "pushrep" and self.path is not None else None
        if made not in {None, self.carrier}:
            why = f"the outbox in {self.path} carries the metadata in the {made}: give --carrier {made}"
            raise BadOption("--carrier", self.carrier, why)
        self.trigger_arguments()
        self.decoder()

    def trigger_arguments(self) -> dict[str, Any]:
        """For `DataStreamWriter.trigger`."""
        if self.trigger == AVAILABLE_NOW:
            return {"availableNow": True}
        interval = _INTERVAL.match(self.trigger)
        if interval is None:
            raise BadOption("--trigger", self.trigger, f"is neither {AVAILABLE_NOW} nor an interval such as 10s, 500ms")
        return {"processingTime": f"{interval[1]} {_SPARK_UNITS[interval[2]]}"}

    def decoder(self) -> ValueDecoder:
        """Values into columns."""
        return ValueDecoder(self.value_format, self.value_schema, self.keep)

    def reader_options(self) -> dict[str, str]:
        """The source's options, those of the command line by the source's own names."""
        kafka = self.source == "kafka"
        options = {("subscribe" if kafka else "topic"): self.topic}
        if self.starting_offsets is not None or not any(name.lower() in _STARTS for name in self.source_options):
            options["startingOffsets"] = self.starting_offsets or "earliest"
        if kafka:
            options["kafka.isolation.level"] = "read_committed"
        if self.path is not None:
            options["path"] = self.path
        if self.max_records_per_trigger is not None:
            options["maxOffsetsPerTrigger" if kafka else "maxRecordsPerTrigger"] = str(self.max_records_per_trigger)
        if self.carrier == "header":
            options["includeHeaders"] = "true"
        return options | self.source_options


def outbox_carrier(directory: str, topic: str) -> str | None:
    """Where the outbox of `topic` in a directory of logs puts the metadata, "key" or "header"; None: no outbox."""
    try:
        told = json.loads((Path(directory) / "outbox.json").read_text(encoding="utf-8"))
        return str(told["carrier"]) if told["topic"] == topic else None
    except (OSError, ValueError, TypeError, KeyError):  # a log without an outbox; who opens the outbox judges its file
        return None


def apply(options: ApplyOptions, reporter: Reporter, *, debug: bool = False) -> None:
    """Run the query until it has read all (available-now), a signal comes, or it fails: then what failed is raised."""
    spark = _session(options)
    try:
        if not debug:
            spark.sparkContext.setLogLevel("OFF")
        apply_in(spark, options, reporter)
    finally:
        spark.stop()  # its JVM must not outlive the job


def apply_in(spark: SparkSession, options: ApplyOptions, reporter: Reporter) -> None:
    """As `apply`, in a session that stays."""
    register_sources(spark)
    sink = idempotent_table(
        options.sink,
        options.sink_format,
        options=options.sink_options,
        partition_by=options.partition_by,
        adopt=options.adopt,
    )
    handler = DecodedBatches(options.decoder(), sink)
    with LocalMarks(options.marks) as marks:
        filtered = ReplayFilteredBatches(
            handler,
            marks,
            carrier=options.carrier,
            window=options.window,
            only_pids=options.only_pids,
            adopt=options.adopt,
            on_counts=reporter.batch,
        )
        between = OneBatchAtATime(filtered)
        rows = spark.readStream.format(options.source).options(**options.reader_options()).load()
        writer = rows.writeStream.foreachBatch(between).option("checkpointLocation", options.checkpoint)
        with _signals() as stop:
            query = writer.trigger(**options.trigger_arguments()).start()
            reporter.started(str(query.id), str(query.runId))
            _run(query, between, stop)
    reporter.stopped()


class DecodedBatches:
    """The filter's handler: rows → columns of their values → the sink."""

    def __init__(self, decode: ValueDecoder, sink: IdempotentSink) -> None:
        self._decode, self._sink = decode, sink

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        self._sink(self._decode(rows), batch_id)

    def drop_from(self, batch_id: int) -> None:
        self._sink.drop_from(batch_id)


class OneBatchAtATime:
    """Lets the main thread wait for the end of the running batch and keep out the next; remembers what failed."""

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
                with contextlib.suppress(Exception):  # a batch that was just about to begin found the door closed
                    query.stop()
                return
    except Exception as error:
        if between.error is not None:
            raise between.error from error
        raise


def _session(options: ApplyOptions) -> SparkSession:
    builder = SparkSession.builder.appName(f"pushrep-apply-{options.topic}")
    # A plan for every batch is a web page for nobody; --conf may say otherwise.
    for name, value in {"spark.ui.showConsoleProgress": "false", **options.conf}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


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
