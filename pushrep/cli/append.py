"""`pushrep append`: appends lines to a log; after a crash the same command continues where the log ends.

    line n of source S ─▶ metadata (PID of S, n mod N, n) ─▶ Outbox      Outbox.last_metadata ─▶ last line in the log

The PID is made of the input's name. With another name the input is another source, and all its lines are appended.
"""

import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

import click

from filtering import StreamMetadata, producer_id
from pushrep.cli.options import addresses_of, copy_check_option, log_options, tls_options
from pushrep.cli.progress import progress
from pushrep.cli.record_rows import metadata_of
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import BadArgument
from pushrep.log import Durability, LogConfig
from pushrep.outbox import Acks, Outbox, OutboxConfig, RecordRefused, read_identity
from pushrep.outbox.errors import MetadataGap
from pushrep.records import HEADER_BYTES
from pushrep.replicate.certificates import MutualTls
from pushrep.replicate.settings import PushSettings
from pushrep.status.table import many
from pushrep.status.terminal import show_result

_DEFAULT_PRODUCER = "pushrep-append"
_PROGRESS_EVERY = 4096  # lines


def numbered_lines(stream: BinaryIO, line_bytes_max: int) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line without its line break), counted from 1. Raises BadArgument at a longer line, which is never
    held in memory as a whole.
    """
    number = 0
    while line := stream.readline(line_bytes_max + 2):
        number += 1
        if len(line) > line_bytes_max and not line.endswith(b"\n"):
            raise BadArgument(f"line {number}", f"is longer than {line_bytes_max} bytes")
        yield number, line.removesuffix(b"\n").removesuffix(b"\r")


class Appender:
    """Appends the lines of one input. source: its name; None: its lines have no metadata of their own."""

    def __init__(self, outbox: Outbox, source: str | None) -> None:
        self._outbox, self.source = outbox, source
        self.appended = self.present = self.last_line = 0
        identity = outbox.identity
        self._pid = producer_id(
            application=identity.producer,
            stream=identity.topic,
            source=source or "",
            destination=identity.outbox_id,
        )
        partitions = range(identity.partitions)
        known = {n: None if source is None else outbox.last_metadata(self._pid, n) for n in partitions}
        self._known = {n: 0 if last is None else last for n, last in known.items()}

    def append_line(self, number: int, line: bytes) -> None:
        """Append a line unless the log holds it. Raises ClickException, and the errors of `Outbox.append`."""
        self.last_line = number
        partition = number % len(self._known)
        metadata = None if self.source is None else StreamMetadata(self._pid, partition, number)
        if number <= self._known[partition]:
            self.present += 1
            if number == self._known[partition] and metadata is not None:
                self._check_known(metadata, line)
            return
        try:
            self._outbox.append(partition, line, metadata=metadata)
        except MetadataGap:
            self._outbox.flush()  # an earlier append may have failed and left the gap: flush raises its error
            raise
        except RecordRefused as refused:
            raise BadArgument(f"line {number}", refused.why) from refused
        self.appended += 1

    def _check_known(self, metadata: StreamMetadata, line: bytes) -> None:
        """Raise ClickException if the log's last record is this line's record and has another value."""
        log = self._outbox.log(metadata.partition)
        last = next(iter(log.records(log.log_end_offset - 1)), None)
        carrier = self._outbox.identity.carrier
        if last is not None and metadata_of(last, carrier) == metadata and last.value != line:
            raise click.ClickException(
                f"line {metadata.offset} of {self.source} differs from its record in the log: this is another input. "
                "Give it a name of its own with --source NAME"
            )


@click.command(short_help="Append lines; continue after a crash.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("topic")
@click.argument("file", default="-", type=click.Path(path_type=Path, allow_dash=True))
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
    "--accept-loss",
    is_flag=True,
    help="Continue although the directory of a partition that held records is missing; these records are lost.",
)
@log_options
@copy_check_option
@click.option("--json", "as_json", is_flag=True, help="Print the summary as a JSON object.")
def append(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, topic: str, file: Path, partitions: int | None, producer: str | None, source: str | None,
    durability: str, replicas: tuple[str, ...], acks: str | None, tls: MutualTls | None,
    log_config: LogConfig, accept_loss: bool, copy_check: bool, as_json: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    """Append the lines of FILE (-: standard input) to the log of TOPIC in DIRECTORY, which is made if it is missing.

    \b
    Line n goes to partition n mod N.
      pushrep append out greetings hello.txt
      journalctl -f | pushrep append out journal -
      pushrep append out orders orders.txt --replica 10.0.0.2:7400 --replica 10.0.0.3:7400

    \b
    After a crash, kill -9 or Ctrl-C run the same command again: it continues where the log ends. The metadata of a
    record holds the line's number as source offset, and a PID made of the input's name. So the log shows which
    lines it holds, and a reader that filters replays sees each line once. A file's name is its full path, or
    --source NAME. Standard input can be resumed only with --source, and if it has the same lines again from the
    first on. Without --source all its lines are appended at each run.

    A line that is too long ends the command; the lines before it are in the log.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    if source is not None and not source.strip():
        raise click.BadParameter("it is empty: give the input's name, the same at every run", param_hint="--source")
    stored = read_identity(REAL_FILESYSTEM, directory) if directory.is_dir() else None
    count = partitions or (stored.partitions if stored else 1)
    name = source if source is not None else (None if str(file) == "-" else str(file.resolve()))
    started = time.monotonic()
    with _opened(file) as stream, Outbox.open(
        directory, topic, count, producer or (stored.producer if stored else _DEFAULT_PRODUCER),
        carrier=stored.carrier if stored else "key",
        durability=Durability[durability.upper()],
        replicas=replicas or addresses_of(directory, stored), acks=None if acks is None else Acks[acks.upper()],
        config=OutboxConfig(
            accept_loss=accept_loss, copy_check=copy_check, log_config=log_config,
            push=PushSettings(tls=tls),
        ),
    ) as outbox:  # fmt: skip
        appender = Appender(outbox, name)
        size_bytes = _size_bytes(stream)
        try:
            with progress("appending", size_bytes) as show:
                for number, line in numbered_lines(stream, log_config.batch_limit_bytes - HEADER_BYTES):
                    if number % _PROGRESS_EVERY == 0:
                        show(0 if size_bytes is None else stream.tell(), note=f"{number:,} lines")
                    appender.append_line(number, line)
        except BadArgument as bad:
            raise click.ClickException(f"{bad}; the lines before it are in the log") from bad
        outbox.flush()
        ends = [outbox.log(n).log_end_offset for n in range(count)]
    seconds = time.monotonic() - started
    present = f"; already there: {many(appender.present, 'line')}" if appender.present else ""
    ended = ", ".join(f"{end:,}" for end in ends)
    text = f"appended {many(appender.appended, 'record')} to {topic} in {seconds:.1f} s{present}; log ends at {ended}"
    result = {
        "topic": topic, "appended": appender.appended, "already_there": appender.present,
        "last_line": appender.last_line, "resumable": name is not None, "log_end_offsets": ends,
        "seconds": round(seconds, 3),
    }  # fmt: skip
    show_result(result, [text], as_json=as_json)


def _opened(file: Path) -> AbstractContextManager[BinaryIO]:
    if str(file) == "-":
        return nullcontext(sys.stdin.buffer)
    if file.is_dir():
        raise click.BadParameter(f"{file} is a directory: give a file, or - for standard input", param_hint="FILE")
    return file.open("rb")


def _size_bytes(stream: BinaryIO) -> int | None:
    """The size of a regular file; None for a pipe, and for a stream without a file descriptor."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
