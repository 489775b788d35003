"""`pushrep append`: appends lines or CSV to a log; after a crash the same command continues where the log ends.

    line n of source S ─▶ metadata (PID of S, partition, n) ─▶ Outbox      Outbox.last_metadata ─▶ last line in the log

The PID is made of the input's name and of how its lines are distributed over partitions. With another name or another
distribution the input is another source, and all its lines are appended.
"""

import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import BinaryIO

import click

from filtering import METADATA_HEADER, StreamMetadata, producer_id
from pushrep.cli.input_lines import BadLine, Choices, Entry, LineRules, numbered_lines
from pushrep.cli.options import addresses_of, client_tls, copy_check_option, log_options, tls_options
from pushrep.cli.progress import progress
from pushrep.env import REAL_FILESYSTEM
from pushrep.log import Durability, LogConfig
from pushrep.outbox import Acks, Outbox, OutboxConfig, RecordRefused, read_identity
from pushrep.outbox.errors import MetadataGap
from pushrep.records import HEADER_BYTES
from pushrep.replicate.settings import PushSettings


class Counts:
    """How many lines were appended, were in the log already, were blank, were bad; and the number of the last line."""

    def __init__(self) -> None:
        self.appended = self.present = self.blank = self.bad = self.last_line = 0


class Appender:
    """Appends the lines of one input."""

    def __init__(self, outbox: Outbox, rules: LineRules, source: str | None, placement: str) -> None:
        self._outbox, self.rules, self.source = outbox, rules, source
        self.counts = Counts()
        identity = outbox.identity
        self._known: dict[int, int] = {}
        if source is not None:
            self._pid = producer_id(
                application=identity.producer,
                stream=identity.topic,
                source=json.dumps([source, placement]),
                destination=identity.outbox_id,
            )
            for partition in range(identity.partitions):
                last = outbox.last_metadata(self._pid, partition)
                self._known[partition] = 0 if last is None else last

    @property
    def resumes_after(self) -> int:
        """The number of a line: every line up to it is in the log, was blank or was bad. 0: none."""
        return min(self._known.values(), default=0)

    def append_line(self, number: int, line: bytes) -> None:
        """Append a line unless the log holds it. Raises BadLine, ClickException, and the errors of
        `Outbox.append`.
        """
        self.counts.last_line = number
        if self.source is not None and number < self.resumes_after:
            self.counts.present += 1  # blank and bad lines are counted here, too; an earlier run reported them
            return
        entry = self.rules.parse(number, line)
        if entry is None:
            self.counts.blank += 1
        elif self.source is None:
            self._append(number, entry, None)
        elif number <= (known := self._known[entry.partition]):
            self.counts.present += 1
            if number == known:
                self._check_known(number, entry)
        else:
            self._append(number, entry, StreamMetadata(self._pid, entry.partition, number))

    def stopped(self, bad: BadLine) -> click.ClickException:
        """The error that ends the run at a bad line."""
        again = "and run the command again" if self.source is not None else "and append the rest"
        return click.ClickException(
            f"{bad}; the lines before it are in the log: correct it {again}, or give --on-bad-line skip"
        )

    def _append(self, number: int, entry: Entry, metadata: StreamMetadata | None) -> None:
        try:
            self._outbox.append(entry.partition, entry.value, timestamp_ms=entry.timestamp_ms, metadata=metadata)
        except MetadataGap:
            self._outbox.flush()  # an earlier append may have failed and left the gap: flush raises its error
            raise
        except RecordRefused as refused:
            if refused.argument == "value":
                raise BadLine(number, refused.why) from refused
            raise
        self.counts.appended += 1

    def _check_known(self, number: int, entry: Entry) -> None:
        """Raise ClickException if the log's last record is this line's record and has another value."""
        log = self._outbox.log(entry.partition)
        last = next(iter(log.records(log.log_end_offset - 1)), None)
        if last is None:
            return
        carried = last.key
        if self._outbox.identity.carrier == "header":
            carried = next((value for name, value in reversed(last.headers) if name == METADATA_HEADER), None)
        if carried == StreamMetadata(self._pid, entry.partition, number).pack() and last.value != entry.value:
            raise click.ClickException(
                f"line {number} of {self.source} differs from its record in the log: this is another input, or an "
                "earlier run read it with other options. Give it a name of its own with --source NAME"
            )


_DEFAULT_PRODUCER = "pushrep-append"
_NAMED_BAD_LINES = 20
_PROGRESS_EVERY = 4096  # lines


@click.command(short_help="Append lines or CSV; continue after a crash.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("topic")
@click.argument("file", default="-", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--format",
    "format_",
    type=click.Choice(["lines", "csv"]),
    default="lines",
    show_default=True,
    help="lines: each line is the value of a record. csv: the first line names the columns, each other line is a "
    "record.",
)
@click.option(
    "--value",
    type=click.Choice(["json", "csv-line"]),
    default="json",
    show_default=True,
    help="The record's value, with --format csv: a JSON object of the columns, or the line as it is.",
)
@click.option("--delimiter", default=",", show_default=True, help="The character between the fields of a CSV line.")
@click.option(
    "--partitions",
    type=click.IntRange(1),
    help="How many partitions a new log has; fixed when it is made.  [default: 1]",
)
@click.option(
    "--producer",
    help=f"The application's name, a part of the PID; fixed when the log is made.  [default: {_DEFAULT_PRODUCER}]",
)
@click.option(
    "--carrier",
    type=click.Choice(["key", "header"]),
    help="Where records carry their stream metadata; fixed when the log is made.  [default: key]",
)
@click.option(
    "--partition",
    type=click.IntRange(0),
    help="Append every line to this partition.  [default: line n goes to partition n mod --partitions]",
)
@click.option(
    "--partition-by",
    metavar="COLUMN",
    help="Choose the partition by the CRC-32 of this CSV column: lines with the same text go to the same partition.",
)
@click.option(
    "--timestamp-column",
    metavar="COLUMN",
    help="The CSV column with the records' timestamps: ISO 8601 (UTC if it names no zone), or ms since 1970.",
)
@click.option(
    "--source",
    metavar="NAME",
    help="The input's name, the same at each run: the command continues by it.  [default: FILE's full path; none for "
    "standard input, which is then appended from its first line]",
)
@click.option(
    "--durability",
    type=click.Choice(["buffered", "flushed"]),
    default="flushed",
    show_default=True,
    help="flushed: fdatasync while lines are appended. buffered: a line is surely on disk only when the command ends.",
)
@click.option(
    "--replica",
    "replicas",
    multiple=True,
    metavar="HOST:PORT",
    help="A node that keeps a copy (pushrep replica serve). Repeat it for more. Stored with the log.",
)
@click.option(
    "--acks",
    type=click.Choice(["all", "local"]),
    help="all: the command ends when min_insync_replicas members and all in-sync replicas hold every line. local: when "
    "this log does.  [default: all with replicas]",
)
@tls_options
@click.option(
    "--on-bad-line",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="What to do with a line that can't become a record. stop: end with exit code 1, the lines before it are in "
    "the log. skip: print it on standard error and continue.",
)
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Continue although the directory of a partition that held records is missing; these records are lost.",
)
@log_options
@copy_check_option
@click.option("--json", "as_json", is_flag=True, help="Print the summary as a JSON object.")
def append(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, topic: str, file: Path, format_: str, value: str, delimiter: str, partitions: int | None,
    producer: str | None, carrier: str | None, partition: int | None, partition_by: str | None,
    timestamp_column: str | None, source: str | None, durability: str, replicas: tuple[str, ...], acks: str | None,
    cert: Path | None, key: Path | None, ca: Path | None, on_bad_line: str,
    log_config: LogConfig, accept_loss: bool, copy_check: bool, as_json: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    """Append the lines of FILE (-: standard input) to the log of TOPIC in DIRECTORY, which is made if it is missing.

    \b
    Without options line n goes to partition n mod N.
      pushrep append out greetings hello.txt
      pushrep append out flights flights.csv --format csv --partitions 3 \\
          --partition-by origin --timestamp-column time_hour
      journalctl -f | pushrep append out journal -
      pushrep append out orders orders.txt --replica 10.0.0.2:7400 --replica 10.0.0.3:7400

    \b
    After a crash, kill -9 or Ctrl-C run the same command again: it continues where the log ends. The metadata of a
    record holds the line's number as source offset, and a PID made of the input's name. So the log shows which
    lines it holds, and a reader that filters replays sees each line once. A file's name is its full path, or
    --source NAME. Standard input can be resumed only with --source, and if it has the same lines again from the
    first on. Without --source all its lines are appended at each run.

    \b
    A line that can't become a record (for example a CSV line with too few fields) is reported with its number. With
    --on-bad-line stop the lines before it are in the log: correct the line and run the command again. With skip the
    other lines are appended; put a line that you correct later into a file of its own.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    _check_usage(format_, partition, partition_by, timestamp_column, delimiter)
    if source is not None and not source.strip():
        raise click.BadParameter("it is empty: give the input's name, the same at every run", param_hint="--source")
    stored = read_identity(REAL_FILESYSTEM, directory) if directory.is_dir() else None
    count = partitions or (stored.partitions if stored else 1)
    if partition is not None and partition >= count:
        raise click.BadParameter(f"{partition} is not one of the {count} partitions, counted from 0",
                                 param_hint="--partition")  # fmt: skip
    choices = Choices(format_ == "csv", delimiter, value == "json", count, partition, partition_by, timestamp_column)
    name = source if source is not None else (None if str(file) == "-" else str(file.resolve()))
    started = time.monotonic()
    rules = LineRules(choices)
    with ExitStack() as resources:
        stream = resources.enter_context(_opened(file))
        lines = numbered_lines(stream, log_config.batch_limit_bytes - HEADER_BYTES)
        if choices.is_csv:
            _take_header(lines, rules)  # a bad header must end the command before a log is made with fixed settings
        outbox = resources.enter_context(Outbox.open(
            directory, topic, count, producer or (stored.producer if stored else _DEFAULT_PRODUCER),
            carrier=carrier or (stored.carrier if stored else "key"),
            durability=Durability[durability.upper()],
            replicas=replicas or addresses_of(directory, stored), acks=None if acks is None else Acks[acks.upper()],
            config=OutboxConfig(
                accept_loss=accept_loss, copy_check=copy_check, log_config=log_config,
                push=PushSettings(tls=client_tls(cert, key, ca)),
            ),
        ))  # fmt: skip
        appender = Appender(outbox, rules, name, choices.placement)
        size_bytes = _size_bytes(stream)
        with progress("appending", size_bytes) as show:
            _append_all(
                lines,
                appender,
                lambda number: show(0 if size_bytes is None else stream.tell(), note=f"{number:,} lines"),
                stop=on_bad_line == "stop",
            )
        outbox.flush()
        ends = [outbox.log(n).log_end_offset for n in range(count)]
    _print_result(topic, appender, ends, time.monotonic() - started, as_json=as_json)


def _check_usage(
    format_: str, partition: int | None, partition_by: str | None, timestamp_column: str | None, delimiter: str
) -> None:
    for option, given in (("--partition-by", partition_by), ("--timestamp-column", timestamp_column)):
        if given is not None and format_ != "csv":
            raise click.UsageError(f"{option} is for --format csv: add that, or leave {option} out")
    if partition is not None and partition_by is not None:
        raise click.UsageError("give --partition or --partition-by, not both")
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise click.BadParameter(f"{delimiter!r} is not one character other than a quote or the end of a line",
                                 param_hint="--delimiter")  # fmt: skip


def _opened(file: Path) -> AbstractContextManager[BinaryIO]:
    if str(file) == "-":
        return nullcontext(sys.stdin.buffer)
    if file.is_dir():
        raise click.BadParameter(f"{file} is a directory: give a file, or - for standard input", param_hint="FILE")
    return file.open("rb")


def _take_header(lines: Iterator[tuple[int, bytes | BadLine]], rules: LineRules) -> None:
    _, line = next(lines, (1, None))
    if line is None:
        raise click.ClickException("the input is empty: the first line of a CSV has to name its columns")
    if isinstance(line, BadLine):
        raise click.ClickException(f"the CSV's header: {line}")
    rules.take_header(line)


def _append_all(
    lines: Iterator[tuple[int, bytes | BadLine]], appender: Appender, advance: Callable[[int], object], *, stop: bool
) -> None:
    counts = appender.counts
    for number, line in lines:
        if number % _PROGRESS_EVERY == 0:
            advance(number)
        try:
            if isinstance(line, BadLine):
                raise line
            appender.append_line(number, line)
        except BadLine as bad:
            if stop:
                raise appender.stopped(bad) from bad
            counts.bad += 1
            if counts.bad <= _NAMED_BAD_LINES:
                click.echo(f"skipped {bad}", err=True)
    if counts.bad > _NAMED_BAD_LINES:
        click.echo(f"skipped {counts.bad - _NAMED_BAD_LINES} more lines", err=True)


def _size_bytes(stream: BinaryIO) -> int | None:
    """The size of a regular file; None for a pipe, and for a stream without a file descriptor."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _print_result(topic: str, appender: Appender, ends: list[int], seconds: float, *, as_json: bool) -> None:
    counts = appender.counts
    if as_json:
        summary = {
            "topic": topic, "appended": counts.appended, "already_there": counts.present, "bad_lines": counts.bad,
            "blank_lines": counts.blank, "last_line": counts.last_line, "resumable": appender.source is not None,
            "log_end_offsets": ends, "seconds": round(seconds, 3),
        }  # fmt: skip
        click.echo(json.dumps(summary))
        return
    words = [f"appended {_many(counts.appended, 'record')} to {topic} in {seconds:.1f} s"]
    if counts.present:
        words.append(f"already there: {_many(counts.present, 'line')}")
    if counts.bad:
        words.append(f"skipped: {_many(counts.bad, 'bad line')}")
    click.echo("; ".join(words) + "; log ends at " + ", ".join(f"{end:,}" for end in ends))


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
