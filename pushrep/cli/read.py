"""`pushrep read`: shows the records in the logs of a topic. It takes no lock and writes nothing; a writer may be
running.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import click

from filtering import METADATA_HEADER
from filtering.errors import shown_partition
from pushrep.cli.common import show_table
from pushrep.cli.log_names import directory_argument, log_argument, named_logs
from pushrep.cli.options import time_ms_of
from pushrep.cli.record_rows import as_json, carrier_of, cell, is_in_key, metadata_of, time_text
from pushrep.log import Isolation, LogReader, SegmentLog
from pushrep.log.directory_files import log_at, shown_name
from pushrep.records import Record

_TABLE_ROWS = 20
_LATEST_RECORDS = 10


@click.command(short_help="Show the records of a topic's logs.")
@directory_argument
@log_argument
@click.option(
    "--from",
    "from_",
    default="earliest",
    show_default=True,
    metavar="WHERE",
    help="Where to begin in each partition: earliest, latest (the last --count records), an offset, or an ISO 8601 "
    "time "
    "(UTC if it names no zone), which begins at the first record with that timestamp or a later one.",
)
@click.option(
    "--count",
    type=click.IntRange(1),
    help=f"Show at most so many records of each partition.  "
    f"[default: {_LATEST_RECORDS} with --from latest; else {_TABLE_ROWS} in a table, and all as json or raw]",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json", "raw"]),
    default="table",
    show_default=True,
    help="json: one object a line. raw: the values alone, one a line.",
)
@click.option(
    "--isolation",
    type=click.Choice(["stable", "written"]),
    default="stable",
    show_default=True,
    help="stable: only records below the stable offset, which survive a power cut. written: all appended records.",
)
def read(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, name: str, from_: str, count: int | None, format_: str,
    isolation: Isolation,
) -> None:  # fmt: skip
    """Show the records of LOG in DIRECTORY, with their source partition and source offset. LOG is orders-0, or orders
    for all logs of this topic.

    \b
      pushrep read out flights                              the first records of each partition
      pushrep read out flights-2 --from latest --count 5    the last five of partition 2
      pushrep read out flights --from 2013-07-04 --format json   all records since then, as JSON lines
      pushrep read out greetings --format raw | wc -l

    \b
    The column "source" is the stream metadata in the key or header: PID, source partition, source offset.
    In JSON a key or value that is not UTF-8 is key_base64 or value_base64.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    chosen = named_logs(directory, name)
    carrier = carrier_of(log_at(directory, *chosen[0]).parent, chosen[0][0])
    limit = count if count is not None else _LATEST_RECORDS if from_ == "latest" else None
    if format_ == "table" and limit is None:
        limit = _TABLE_ROWS
    with ExitStack() as readers:
        opened = [
            readers.enter_context(SegmentLog.open_reader(log_at(directory, *log), isolation=isolation))
            for log in chosen
        ]
        ranges = [range_of(reader, *log, from_, limit) for reader, log in zip(opened, chosen, strict=True)]
        rows = chain.from_iterable(one.records(limit) for one in ranges)
        if format_ == "table":
            _print_table(rows, carrier)
        else:
            _write_lines(rows, carrier, raw=format_ == "raw")


class RecordRange(NamedTuple):
    """The offsets [start, end) of one log that are shown. partition: the log's number."""

    partition: int
    reader: LogReader
    start: int
    end: int

    def records(self, limit: int | None) -> Iterator[tuple[int, Record]]:
        """Yield (number of the log, record), at most `limit` records."""
        for record in islice(self.reader.records(self.start, self.end), limit):
            yield self.partition, record


def range_of(reader: LogReader, topic: str, number: int, from_: str, limit: int | None) -> RecordRange:
    """The range that `from_` selects in a log. Raises ClickException."""
    first, end = reader.bounds()
    if from_ == "earliest":
        start = first
    elif from_ == "latest":
        start = max(first, end - (limit or _LATEST_RECORDS))
    elif from_.isascii() and from_.isdigit():
        start = int(from_)
        if not first <= start <= end:
            raise click.ClickException(
                f"--from {from_}: {shown_name(topic, number)} holds the offsets [{first}, {end})"
            )
    else:
        found = reader.offset_for_timestamp(time_ms_of("--from", from_, others="earliest, latest, an offset"))
        start = end if found is None else found
    return RecordRange(number, reader, start, end)


def _write_lines(rows: Iterable[tuple[int, Record]], carrier: str, *, raw: bool) -> None:
    out = sys.stdout.buffer
    for number, record in rows:
        if raw:
            out.write((record.value or b"") + b"\n")
        else:
            out.write(json.dumps(as_json(number, record, carrier), ensure_ascii=False).encode() + b"\n")
    out.flush()


def _print_table(rows: Iterable[tuple[int, Record]], carrier: str) -> None:
    shown = []
    for number, record in rows:
        metadata = metadata_of(record, carrier)
        shown.append(
            (
                shown_partition(number),
                str(record.offset),
                time_text(record.timestamp_ms),
                cell(record.value),
                "" if is_in_key(record, carrier) else cell(record.key),
                f"{metadata.pid} {metadata.partition} {metadata.offset}" if metadata else "",
                " ".join(f"{name}={cell(value)}" for name, value in record.headers if name != METADATA_HEADER),
            )
        )
    show_table(None, ("partition", "offset", "timestamp", "value", "key", "source", "headers"), shown)
    if not shown:
        click.echo("no records there", err=True)
