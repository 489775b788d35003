"""A job's options, checked as far as possible without Spark. Pure, except that it reads the outbox's file.

command line ─▶ JobOptions of each job (here) ─▶ pipeline.py
"""

import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from filtering.errors import BadFilterSetting
from filtering.extras import install_command
from filtering.replay_filter import check_ttl
from pushrep.env.checked_json import parse_json
from pushrep.health import HealthSettings
from spark_jobs.errors import BadJobOption, SparkJobError
from spark_jobs.marks_stores import is_database
from spark_jobs.sinks.catalog_table import idempotent_table
from spark_jobs.sinks.idempotent_sink import BadSink, BatchTable
from spark_jobs.sql import SqlTable
from spark_jobs.values import ValueDecoder

AVAILABLE_NOW = "available-now"

_STARTS = {"startingoffsets", "startingtimestamp", "startingoffsetsbytimestamp"}  # in any case, as Spark reads them
_SUBSCRIBING = ("subscribePattern", "assign")  # of source kafka, beside its subscribe, which is --topic
_INTERVAL = re.compile(r"^\s*(\d+)\s*(ms|s|m|h)\s*$")
_SPARK_UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours"}
_KEY_COLUMNS = ("topic", "partition", "offset")
_SINK_OPTIONS = {
    "target": "--sink",
    "partition_by": "--partition-by",
    "format": "--format",
    "table": "--table",
    "name": "--table",
}


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Every job's options of its source, its filter and its checkpoint. Raises BadJobOption."""

    topic: str
    checkpoint: str
    marks: str
    source: str = "pushrep"
    path: str | None = None
    source_options: dict[str, str] = field(default_factory=dict)
    carrier: str = "key"
    starting_offsets: str | None = None
    consumer: str | None = None
    max_records_per_trigger: int | None = None
    window: int = 0
    only_pids: frozenset[int] | None = None
    leave_out: str | None = None
    ttl_s: float | None = None
    retention_ms: int | None = None
    adopt: tuple[str, int] | None = None
    trigger: str = AVAILABLE_NOW
    conf: dict[str, str] = field(default_factory=dict)
    health: HealthSettings | None = None
    _named_always: ClassVar[tuple[str, ...]] = ("topic", "checkpoint")

    def __post_init__(self) -> None:
        for option in self._named_always:
            if not getattr(self, option).strip():
                why = "it is empty; see --help for what it names"
                raise BadJobOption(f"--{option.replace('_', '-')}", getattr(self, option), why)
        if self.source == "pushrep" and self.path is None:
            raise BadJobOption("--path", None, "source pushrep reads logs from a directory: name it")
        if self.source != "pushrep" and self.path is not None:
            raise BadJobOption("--path", self.path, f"belongs to source pushrep; use --source-option for {self.source}")
        if self.source != "pushrep" and self.consumer is not None:
            why = (
                f"only source pushrep follows startpoints while it runs; for {self.source} begin a fresh checkpoint: "
                "pushrep startpoint export, and --adopt"
            )
            raise BadJobOption("--consumer", self.consumer, why)
        try:
            check_ttl(self.ttl_s, self.retention_ms)
        except BadFilterSetting as error:
            why = error.allowed.replace("Give retention_ms=", "Give --retention-ms")
            raise BadJobOption("--ttl-s", self.ttl_s, why) from error
        self._check_source_options()
        made = outbox_carrier(self.path, self.topic) if self.source == "pushrep" and self.path is not None else None
        if made not in {None, self.carrier}:
            why = f"the outbox in {self.path} carries the metadata in the {made}: give --carrier {made}"
            raise BadJobOption("--carrier", self.carrier, why)
        self.trigger_arguments()

    def table_path(self) -> str | None:
        """The directory that the job fills with rows, if it fills one."""
        return None

    def topics(self) -> tuple[str, ...]:
        """Kafka's `subscribe` takes several, with commas between."""
        return tuple(name.strip() for name in self.topic.split(",")) if self.source == "kafka" else (self.topic,)

    def marks_path(self) -> str | None:
        """The directory of the marks; None where they lie with the rows."""
        return self.marks

    def source_servers(self) -> str | None:
        """The brokers of source kafka."""
        given = {name.lower(): text for name, text in self.source_options.items()}
        return given.get("kafka.bootstrap.servers") if self.source == "kafka" else None

    def trigger_arguments(self) -> dict[str, Any]:
        """For `DataStreamWriter.trigger`."""
        if self.trigger == AVAILABLE_NOW:
            return {"availableNow": True}
        interval = _INTERVAL.match(self.trigger)
        if interval is None:
            either = f"give {AVAILABLE_NOW} or an interval such as 10s, 500ms"
            if "real" in self.trigger.lower():
                either = f"Real-Time Mode admits no Python operator, and the filter is one; {either}"
            raise BadJobOption("--trigger", self.trigger, either)
        return {"processingTime": f"{interval[1]} {_SPARK_UNITS[interval[2]]}"}

    def reader_options(self) -> dict[str, str]:
        """Options of the source, under the source's own names."""
        options = self._own_options()
        if self.starting_offsets is not None or not any(name.lower() in _STARTS for name in self.source_options):
            options["startingOffsets"] = self.starting_offsets or "earliest"
        if self.source == "kafka":
            options["kafka.isolation.level"] = "read_committed"
        if self.carrier == "header":
            options["includeHeaders"] = "true"
        return options | self.source_options

    def _own_options(self) -> dict[str, str]:
        """Options of the source that the job's own options set."""
        kafka = self.source == "kafka"
        limit = None if self.max_records_per_trigger is None else str(self.max_records_per_trigger)
        own = {
            ("subscribe" if kafka else "topic"): self.topic,
            "path": self.path,
            ("maxOffsetsPerTrigger" if kafka else "maxRecordsPerTrigger"): limit,
            "startingStartpoint": self.consumer,
        }
        return {name: text for name, text in own.items() if text is not None}

    def _check_source_options(self) -> None:
        by_name = {name.lower(): (name, text) for name, text in self.source_options.items()}
        if self.source == "kafka" and by_name.get("failondataloss", ("", ""))[1].lower() == "false":
            raise BadJobOption(
                "--source-option failOnDataLoss", "false", "a gap would be marked as read without notice"
            )
        own = [*self._own_options(), "startingStartpoint", *(_SUBSCRIBING if self.source == "kafka" else ())]
        for name in own:  # of two one would be silently lost
            if (given := by_name.get(name.lower())) is not None:
                raise BadJobOption(f"--source-option {given[0]}", given[1], "the job has an option of its own for it")
        if self.starting_offsets is not None and (twice := sorted(_STARTS & by_name.keys())):
            name, text = by_name[twice[0]]
            raise BadJobOption(f"--source-option {name}", text, "give it or --starting-offsets, not both")
        headers = by_name.get("includeheaders", ("", "true"))
        if self.carrier == "header" and headers[1].lower() != "true":
            raise BadJobOption(f"--source-option {headers[0]}", headers[1], "--carrier header reads them: leave it out")


@dataclass(frozen=True, kw_only=True)
class ApplyOptions(JobOptions):
    """The apply job's options; its command's --help describes each. Raises BadJobOption.

    With a database as `sink`, `sink_table` is its table and `marks` is empty: they are stored with the rows.
    """

    sink: str
    sink_table: str | None = None
    sink_format: str = "parquet"
    sink_options: dict[str, str] = field(default_factory=dict)
    partition_by: tuple[str, ...] = ()
    value_format: str = "binary"
    value_schema: str | None = None
    keep: tuple[str, ...] = ()
    append_only: bool = False
    _named_always: ClassVar[tuple[str, ...]] = ("topic", "sink", "checkpoint")

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_database(self.sink):
            self._check_database()
        elif self.sink_table is not None:
            why = "belongs to a database: --sink postgresql://HOST/DATABASE or sqlite:PATH"
            raise BadJobOption("--table", self.sink_table, why)
        if self.window and self.consumer is not None and not self.append_only:
            why = (
                "a startpoint that resets marks would stop each batch, since with a window the earlier marks can't be "
                "computed: give --append-only, too, or leave --consumer out"
            )
            raise BadJobOption("--window", self.window, why)
        self.table()
        self.decoder()

    def table_path(self) -> str | None:
        """The directory of --sink; None if that names a table of a catalog or a database."""
        return self.sink if "/" in self.sink and not is_database(self.sink) else None

    def marks_path(self) -> str | None:
        return None if is_database(self.sink) else super().marks_path()

    def decoder(self) -> ValueDecoder:
        """Values into columns."""
        return ValueDecoder(self.value_format, self.value_schema, self.keep)

    def table(self) -> BatchTable | SqlTable:
        """Where the columns go."""
        try:
            if is_database(self.sink):
                return SqlTable(self.sink, self.sink_table or "", adopt=self.adopt)
            return idempotent_table(
                self.sink,
                self.sink_format,
                options=self.sink_options,
                partition_by=self.partition_by,
                adopt=self.adopt,
            )
        except BadSink as error:
            raise named_by_option(error) from error

    def _check_database(self) -> None:
        if self.sink_table is None:
            raise BadJobOption("--table", None, "name the database's table, which is made if there is none")
        if not self.sink.startswith("sqlite:") and find_spec("psycopg") is None:
            raise BadJobOption("--sink", None, f"PostgreSQL needs psycopg: {install_command('psycopg')}")
        if self.marks:
            why = "a database has them beside the rows, in one transaction: leave it out"
            raise BadJobOption("--marks", self.marks, why)
        of_files = (
            ("--format", self.sink_format if self.sink_format != "parquet" else None),
            ("--sink-option", next(iter(self.sink_options), None)),
            ("--partition-by", next(iter(self.partition_by), None)),
        )
        for option, given in of_files:
            if given is not None:
                raise BadJobOption(option, given, "belongs to a table of files: leave it out")
        if lacking := [name for name in _KEY_COLUMNS if name not in self.keep]:
            why = f"{lacking[0]} is missing: a database's rows are distinguished by topic, partition and offset"
            raise BadJobOption("--keep", ",".join(self.keep), why)


def named_by_option(error: BadSink) -> SparkJobError:
    """The sink's refusal of a setting, under the name that the command line gives it."""
    option = _SINK_OPTIONS.get(error.setting)
    return error if option is None else BadJobOption(option, error.value, error.why)


def outbox_carrier(directory: str, topic: str) -> str | None:
    """Where the outbox of `topic` in a directory of logs puts the metadata, "key" or "header"; None: no outbox."""
    try:
        identity = parse_json((Path(directory) / "outbox.json").read_text(encoding="utf-8"))
        return str(identity["carrier"]) if identity["topic"] == topic else None
    except (OSError, ValueError, TypeError, KeyError):  # a log without an outbox; the outbox itself checks its file
        return None
