"""`pushrep startpoint repair`: lets the apply job read records again, and replace their rows in its table.

    look    read the sink's rows from the start on, by (topic, partition, offset); the logs; the consumer's position
    show    print which rows are replaced and how many records are read again
    write   write a startpoint for each partition, all in one step; the command changes nothing else

The apply job that follows the consumer's startpoints carries it out: spark_jobs/replacing.py.
"""

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from filtering.errors import shown_partition
from pushrep.cli.common import show_rows
from pushrep.cli.startpoint_options import (
    facts_of,
    parse_option,
    parse_ttl_s,
    partitions_of,
    place_text,
    sink_of,
    store_of,
    topic_and_partition,
    with_author,
    with_conf,
    with_json,
    with_store,
)
from pushrep.env import SYSTEM_CLOCK
from pushrep.log import SegmentLog
from pushrep.log.directory_files import log_at, shown_name
from pushrep.startpoints import (
    EventLog,
    Kind,
    Reader,
    Startpoint,
    StartpointRefused,
    StartpointStore,
    State,
    Unresolved,
    resolve,
)
from pushrep.status.table import count
from pushrep.status.terminal import say, show_result

_FORWARD = {Kind.LATEST, Kind.BOOTSTRAP}
_BY_TIME = {Kind.TIMESTAMP, Kind.RELATIVE_MS}


def _refused(where: str, why: str) -> StartpointRefused:
    return StartpointRefused(f"{where}: {why}. Nothing was written")


class PartitionRepair(NamedTuple):
    """A repair of one partition: rows at log offsets [start, end) are replaced, [start, stood_at) is read again.

    end: None for all rows from `start` on. rows: how many the sink has there.
    stood_at: the consumer's position, or the end of its rows if that is higher.
    """

    partition: int
    log_start: int
    log_end: int
    stood_at: int
    start: int
    end: int | None
    rows: int = 0

    @property
    def read_again(self) -> int:
        return min(self.stood_at, self.log_end) - self.start

    @property
    def rows_end(self) -> int:
        """The end of the rows that are replaced, at the job's present position."""
        return self.stood_at if self.end is None else min(self.end, self.stood_at)

    def startpoint(self) -> Startpoint:
        return Startpoint.specific(self.start, reset_marks=True, replace_until=self.end)

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "rows_end": self.rows_end, "read_again": self.read_again}


@click.command(short_help="Replace a table's rows from a point on.")
@with_store
@click.argument("topic", metavar="TOPIC[-N]")
@click.option("--consumer", required=True, help="The apply job's --consumer.")
@click.option(
    "--from",
    "from_",
    required=True,
    metavar="WHERE",
    help="The first record that is read again: as --to of `pushrep startpoint set`.",
)
@click.option(
    "--to",
    metavar="WHERE",
    help="Replace only rows of records before this place.  [default: all rows from --from on]",
)
@click.option("--sink", required=True, metavar="WHERE", help="The apply job's --sink.")
@click.option("--table", help="With --sink DATABASE: the table of the rows.")
@click.option("--format", "sink_format", default="parquet", show_default=True, help="The format of --sink PATH.")
@with_conf
@click.option(
    "--ttl",
    default="12h",
    show_default=True,
    help="The startpoints expire if they are not applied within this time: 90s, 30m, 12h, 2d, or never.",
)
@click.option("--dry-run", is_flag=True, is_eager=True, help="Print what would be done; write nothing.")
@with_author
@with_json
def repair(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, store: str | None, topic: str, consumer: str, from_: str, to: str | None, sink: str,
    table: str | None, sink_format: str, conf: tuple[str, ...],
    ttl: str, dry_run: bool, reason: str, author: str | None, as_json: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    """Let the apply job read records again from --from on, and replace their rows in its table.

    \b
      pushrep startpoint repair out orders --consumer billing --from 2013-07-04T14:00 --sink ./orders-table --dry-run
      pushrep startpoint repair out orders --consumer billing --from 2013-07-04T14:00 --to 2013-07-04T15:00 \\
          --sink postgresql://HOST/shop --table orders --reason "wrong rates for an hour"

    A running job applies the startpoints at once, a stopped one at its next start. If the sink can't replace rows, the
    command is refused before anything is written.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    start, end, ttl_s = _place("--from", from_), None if to is None else _place("--to", to), parse_ttl_s(ttl)
    opened = store_of(directory, store)
    name, only = topic_and_partition(directory, topic)
    look = _Look(
        directory,
        opened,
        opened.event_log(),
        consumer,
        name,
        start,
        end,
        sink_of(sink, table, sink_format, conf),
        SYSTEM_CLOCK.wall_ms(),
    )
    known = [partition for partition in partitions_of(directory, name) if only in (None, partition)]
    places = {place.partition: place for place in map(look.place, known) if place is not None}
    held = look.held({one: place.start for one, place in places.items()})
    parts = [part for one, place in places.items() if (part := look.part(place, held[one])) is not None]
    if not parts:
        where = "from --from on" if end is None else "between --from and --to"
        why = f"{consumer} has read no record {where}" if known else f"{directory} holds no log of it"
        raise _refused(topic, why)
    if not any(part.rows for part in parts):
        raise _refused(topic, "the sink has no row to replace: check that --sink is the job's")
    if all(opened.checkpoint(Reader(consumer, name, part.partition)).offset is None for part in parts):
        say(
            f"{consumer} has no position in the store yet: check that --consumer is the job's. The end of its rows is "
            "shown as its position",
            err=True,
        )
    columns = ("partition", "log holds", "position", "rows replaced at", "rows", "read again")
    title = f"{consumer} at {name}: {look.words()}"
    show_rows(parts, columns, _row, PartitionRepair.as_dict, as_json=as_json, title=title)
    sequences, text = None, "dry run: nothing was written"
    if not dry_run:
        wanted = {part.partition: part.startpoint() for part in parts}
        sequences = opened.write_each(consumer, name, wanted, reason, author=author, ttl_s=ttl_s)
        text = f"written: {', '.join(f'startpoint {n}' for n in sequences.values())}; {consumer} applies them"
    show_result({"sequences": sequences, "dry_run": dry_run}, [text], as_json=as_json)


def _place(option: str, text: str) -> Startpoint:
    place = parse_option(option, text)
    if place.kind in _FORWARD:
        raise click.BadParameter(
            f"{place_text(place)} can't be used for a repair: give earliest, an offset, a time, -1h or -1000",
            param_hint=option,
        )
    return place


class _Look(NamedTuple):
    """The facts from which the repair of each partition is planned."""

    directory: Path
    store: StartpointStore
    event_log: EventLog
    consumer: str
    topic: str
    start: Startpoint
    end: Startpoint | None
    sink: Any
    now_ms: int

    def words(self) -> str:
        return f"from {place_text(self.start)}" + ("" if self.end is None else f" to {place_text(self.end)}")

    def place(self, partition: int) -> PartitionRepair | None:
        """The repair of a partition by log and checkpoint alone; None if it has no records there. Raises
        StartpointRefused.
        """
        checkpoint = self.store.checkpoint(Reader(self.consumer, self.topic, partition)).offset
        with SegmentLog.open_reader(log_at(self.directory, self.topic, partition)) as log:
            facts = facts_of(log)
            start = resolve(self.start, facts, created_ms=self.now_ms, position=checkpoint)
            end = None
            if self.end is not None:
                end = resolve(self.end, facts, created_ms=self.now_ms, position=checkpoint)
        if isinstance(start, Unresolved):
            if self.start.kind in _BY_TIME:  # all records of this partition are older
                return None
            raise _refused(shown_name(self.topic, partition), start.why)
        end_offset = facts.end if isinstance(end, Unresolved) else None if end is None else end.offset
        if end_offset is not None and end_offset <= start.offset:
            return None
        return PartitionRepair(partition, facts.start, facts.end, checkpoint or 0, start.offset, end_offset)

    def held(self, starts: Mapping[int, int]) -> "Mapping[int, array[int]]":
        """The offsets of the sink's rows at or above each partition's start, ascending. Raises StartpointRefused."""
        if not starts:
            return {}
        try:
            found: Mapping[int, array[int]] = self.sink.held(self.topic, starts)
        except self.sink.refusals as error:
            raise _refused(self.topic, str(error)) from error
        return found

    def part(self, place: PartitionRepair, held: "array[int]") -> PartitionRepair | None:
        """The repair with the sink's rows; None if it has nothing to repair. Raises StartpointRefused."""
        stood_at = max(place.stood_at, held[-1] + 1 if held else 0)
        if stood_at <= place.start:
            return None
        self._refuse_others(place)
        rows = len(held) if place.end is None else bisect_left(held, place.end)
        return place._replace(stood_at=stood_at, rows=rows)

    def _refuse_others(self, place: PartitionRepair) -> None:
        """Raise StartpointRefused if another startpoint is pending, or an earlier repair still reads records that this
        one would skip: its rows would stay wrong.
        """
        where, checkpoint = shown_name(self.topic, place.partition), place.stood_at
        reader = Reader(self.consumer, self.topic, place.partition)
        waiting = self.store.read(reader.consumer, reader.topic, reader.partition)
        if waiting is not None and waiting.state is not State.FAILED:
            then = "apply it, or cancel it first" if waiting.state is State.PENDING else "read on, and call again"
            raise _refused(where, f"startpoint {waiting.sequence} is {waiting.state}: let the job {then}")
        for written in reversed(list(self.event_log.all_written())):
            found = self.event_log.reader_state(written.sequence, reader)
            if found is None or found.applied is None or not written.startpoint.reset_marks:
                continue
            through = found.applied.end if found.applied.position is None else found.applied.position
            if checkpoint < through and (place.start > checkpoint or place.end is not None):
                why = (
                    f"{reader.consumer} reads again up to {through} for startpoint {written.sequence}, and its last "
                    f"checkpoint, which it writes each minute, is {checkpoint}: wait, or start at {checkpoint} or below"
                )
                raise _refused(where, why + (", without --to" if place.end is not None else ""))
            return


def _row(part: PartitionRepair) -> tuple[str, ...]:
    return (
        shown_partition(part.partition),
        f"[{count(part.log_start)}, {count(part.log_end)})",
        count(part.stood_at),
        f"[{count(part.start)}, {count(part.rows_end)})",
        count(part.rows),
        count(part.read_again),
    )
