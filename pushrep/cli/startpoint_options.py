"""What the startpoint commands share: the store, the topic, WHERE to start as text, and previews.

earliest  latest  bootstrap      the log's start, its end, its start
1234                             an offset
2013-07-04T14:00                 the first record at this time (UTC if it names no zone) or later; @MS: ms since 1970
-90s -30m -1h -2d                so long before now
-1000 +1                         so many records from the consumer's position
"""

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from pushrep.cli.common import DURATION, parse_duration_s, parse_time_ms, why_missing
from pushrep.kafka.destination import read_properties
from pushrep.log import LogReader, NotALog, SegmentLog
from pushrep.log.directory_files import log_at, parse_shown_name, readable_logs
from pushrep.log.errors import InvalidLogName
from pushrep.startpoints import (
    STORE_NAME,
    Kind,
    LogFacts,
    Reader,
    Resolved,
    Startpoint,
    StartpointStore,
    Target,
    resolve,
    store_at,
)
from pushrep.startpoints.store import BOOTSTRAP_SERVERS as CLIENT_SERVERS
from pushrep.startpoints.store import KAFKA, kind_of
from pushrep.status.table import time_text


def facts_of(log: LogReader) -> LogFacts:
    """A log as its readers see it now."""
    start, end = log.bounds()
    return LogFacts(start=start, end=end, first_at=log.offset_for_timestamp, log_id=str(log.log_id or ""))


class Row(NamedTuple):
    """Where a reader would start if the startpoint were applied now.

    consumer: None for any consumer, in a partition without checkpoints. offset: None if the startpoint would fail, with
    the reason in `why`. [log_start, log_end): the log's offsets.
    """

    consumer: str | None
    partition: int
    task: str
    checkpoint: int | None
    log_start: int
    log_end: int
    offset: int | None
    why: str | None
    reset_marks: bool

    @property
    def read_again(self) -> int | None:
        """How many offsets the reader has committed already and would read again; None: not known."""
        if self.offset is None or self.offset >= self.log_end:
            return 0
        if self.checkpoint is None:
            return None
        return max(0, min(self.checkpoint, self.log_end) - self.offset)

    @property
    def passed_by(self) -> int | None:
        """How many offsets the reader would skip; None: not known, at most those from the log's start on."""
        if self.offset is None or self.offset <= self.log_start:
            return 0
        if self.checkpoint is None:
            return None
        return max(0, self.offset - max(self.checkpoint, self.log_start))

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "read_again": self.read_again, "passed_by": self.passed_by}


def partitions_of(directory: Path, topic: str) -> list[int]:
    """The partitions of the topic that have logs in the directory; empty if there is no such directory."""
    try:
        return [partition for name, partition in readable_logs(directory) if name == topic]
    except NotALog:
        return []


def preview(
    directory: Path, store: StartpointStore, target: Target, startpoint: Startpoint, *, now_ms: int
) -> list[Row]:
    """A row for each partition with a log in `directory`, and each of the target's readers with a checkpoint in it."""
    checkpoints = [found for found in store.checkpoints() if target.covers(found.reader)]
    rows = []
    with ExitStack() as opened:
        for partition in partitions_of(directory, target.topic):
            if target.partition not in (None, partition):
                continue
            reader = opened.enter_context(SegmentLog.open_reader(log_at(directory, target.topic, partition)))
            log = facts_of(reader)
            known: list[tuple[Reader | None, int | None]] = [
                (found.reader, found.offset) for found in checkpoints if found.reader.partition == partition
            ]
            for who, offset in known or [(None, None)]:
                answer = resolve(startpoint, log, created_ms=now_ms, position=offset)
                rows.append(
                    Row(
                        consumer=who.consumer if who is not None else target.consumer,
                        partition=partition,
                        task=who.task if who is not None else target.task or "",
                        checkpoint=offset,
                        log_start=log.start,
                        log_end=log.end,
                        offset=answer.offset if isinstance(answer, Resolved) else None,
                        why=answer.by_policy if isinstance(answer, Resolved) else answer.why,
                        reset_marks=startpoint.reset_marks,
                    )
                )
    return rows


_ENDS = {"earliest": Startpoint.earliest, "latest": Startpoint.latest, "bootstrap": Startpoint.bootstrap}


def parse_place(text: str, *, out_of_range: str = "error", reset_marks: bool = False) -> Startpoint:
    """The startpoint that `text` names. Raises ValueError (or BadArgument, a subclass); the message lists valid
    forms.
    """
    words = text.strip()
    if words.lower() in _ENDS:
        return _ENDS[words.lower()](reset_marks=reset_marks)
    if re.fullmatch(r"[0-9]+", words):
        return Startpoint.specific(int(words), out_of_range=out_of_range, reset_marks=reset_marks)
    if re.fullmatch(r"[+-][0-9]+", words):
        return Startpoint.relative(records=int(words), out_of_range=out_of_range, reset_marks=reset_marks)
    if words.startswith("-") and DURATION.fullmatch(words[1:]):
        ms = -1000 * parse_duration_s(words[1:])
        return Startpoint.relative(ms=ms, out_of_range=out_of_range, reset_marks=reset_marks)
    try:
        ms = parse_time_ms(words.removeprefix("@"))
    except ValueError:
        raise ValueError(
            f"{text!r} is not a place to start: give earliest, latest, bootstrap, an offset, an ISO 8601 time, "
            "-1h (so long before now) or -1000 (so many records back)"
        ) from None
    return Startpoint.timestamp(ms, out_of_range=out_of_range, reset_marks=reset_marks)


def place_text(startpoint: Startpoint) -> str:
    """A startpoint as text."""
    value, until = startpoint.value, startpoint.replace_until
    match startpoint.kind:
        case Kind.SPECIFIC_OFFSET:
            rows = "" if until is None else f", rows below {until} are replaced"
            return f"offset {value}{rows}"
        case Kind.TIMESTAMP:
            return time_text(value or 0)
        case Kind.RELATIVE_RECORDS:
            return f"{value:+} records"
        case Kind.RELATIVE_MS:
            return f"{(value or 0) / 1000:g} s"
        case _:
            return str(startpoint.kind).lower()


SINKS = "pushrep.sinks"
BOOTSTRAP_SERVERS, KAFKA_CONFIG = "--bootstrap-servers", "--kafka-config"

_Command = TypeVar("_Command", bound=Callable[..., Any])


def with_store(command: _Command) -> _Command:
    """Add the argument DIRECTORY, and --store with the options for its brokers."""
    return click.argument("directory", type=click.Path(path_type=Path))(with_place("DIRECTORY/startpoints")(command))


def with_place(default: str) -> Callable[[_Command], _Command]:
    """Add --store, with the options for its brokers. default: the text for the help."""
    words = f"Where the startpoints are stored: a directory, or kafka:TOPIC.  [default: {default}]"
    option = click.option("--store", metavar="PLACE", help=words)
    servers = click.option(
        BOOTSTRAP_SERVERS,
        metavar="HOST:PORT,...",
        expose_value=False,
        callback=_noted,
        help="The Kafka brokers for --store kafka:TOPIC.",
    )
    config = click.option(
        KAFKA_CONFIG,
        type=click.Path(path_type=Path, dir_okay=False, exists=True),
        expose_value=False,
        callback=_noted,
        help="A file of Kafka client properties for them, NAME=VALUE a line, with librdkafka's names.",
    )
    return lambda command: option(servers(config(command)))


with_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
with_conf = click.option(
    "--conf",
    "conf",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of the Spark session that reads a --sink of Delta or Iceberg; give those of the job, for example "
    "spark.jars=delta.jar. Repeat it for more.",
)


def sink_of(sink: str, table: str | None, sink_format: str, conf: Sequence[str]) -> Any:
    """The apply job's sink, of spark_jobs, which this package may not import. It is closed when the command ends.

    Raises UsageError, ClickException.
    """
    if bad := next((one for one in conf if "=" not in one), None):
        raise click.UsageError(f"--conf {bad}: give NAME=VALUE")
    entries = list(entry_points(group=SINKS))
    if not entries:
        raise click.ClickException("a look at --sink needs spark_jobs, which is not in this installation of pushrep")
    try:
        kind = entries[0].load()
    except ModuleNotFoundError as error:
        raise click.ClickException(why_missing("--sink", error) or str(error)) from error
    made = kind(sink, table, sink_format, dict(one.split("=", 1) for one in conf))
    click.get_current_context().call_on_close(made.close)
    return made


def with_author(command: _Command) -> _Command:
    """Add --reason and --author, the options of each command that writes."""
    author = click.option("--author", help="Who does this; stored in the history.  [default: your user name]")
    reason = click.option(
        "--reason",
        callback=_asked,
        help="Why; stored in the history. Must be given; on a terminal the command asks for it.",
    )
    return reason(author(command))


def _asked(context: click.Context, _parameter: click.Parameter, reason: str | None) -> str:
    if reason is None and context.params.get("dry_run"):  # --dry-run is eager: click has parsed it already
        return "dry run"
    if reason is None and not _is_terminal():
        raise click.UsageError("give a reason: --reason TEXT")
    return reason if reason is not None else str(click.prompt("Reason"))


def store_of(directory: Path, store: str | None) -> StartpointStore:
    """The store that the options name. It is closed when the command ends.

    Raises StoreUnavailable, BadArgument, UsageError.
    """
    if store is None and kind_of(str(directory)) == KAFKA:
        raise click.UsageError(f"DIRECTORY is the directory of the logs: give the store as --store {directory}")
    return store_or(store, directory / STORE_NAME)


def written_store_of(directory: Path, store: str | None) -> StartpointStore:
    """As `store_of`, but a directory that does not exist raises UsageError: it is mistyped, and holds no
    startpoints.
    """
    if store is None and kind_of(str(directory)) != KAFKA and not directory.exists():
        raise click.UsageError(f"there is no directory {directory}: give the directory of the logs, or --store PLACE")
    return store_of(directory, store)


def store_or(store: str | None, default: Path) -> StartpointStore:
    """As `store_of`, with another default."""
    meta = click.get_current_context().meta
    servers, config = meta.get(BOOTSTRAP_SERVERS), meta.get(KAFKA_CONFIG)
    place = store if store is not None else default
    if kind_of(place) != KAFKA:
        if servers is not None or config is not None:
            raise click.UsageError(f"{BOOTSTRAP_SERVERS} and {KAFKA_CONFIG} are for --store kafka:TOPIC")
        opened = store_at(place)
    elif servers is None:
        raise click.UsageError(f"--store {place}: give the brokers, {BOOTSTRAP_SERVERS} HOST:PORT")
    else:
        opened = store_at(place, read_properties(config) | {CLIENT_SERVERS: servers})
    click.get_current_context().call_on_close(opened.close)
    return opened


def _noted(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    context.meta[parameter.opts[0]] = value


def topic_and_partition(directory: Path, text: str) -> tuple[str, int | None]:
    """Topic and partition (None: all) of TOPIC, TOPIC-N or slot-M/TOPIC-N. A topic that is named `text` has
    precedence.
    """
    if partitions_of(directory, text):
        return text, None
    try:
        return parse_shown_name(text)
    except InvalidLogName:
        return text, None


def parse_option(option: str, text: str, *, out_of_range: str = "error", reset_marks: bool = False) -> Startpoint:
    """As `parse_place`, but raises click.BadParameter, with the option's name."""
    try:
        return parse_place(text, out_of_range=out_of_range, reset_marks=reset_marks)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from error


def parse_ttl_s(text: str) -> int | None:
    """Seconds of --ttl; None for never. Raises click.BadParameter."""
    if text == "never":
        return None
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}, or never", param_hint="--ttl") from error


def _is_terminal() -> bool:
    return sys.stdin.isatty()
