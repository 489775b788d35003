"""`pushrep startpoint`: sets where consumers start next. pushrep.startpoints does the work.

set, cancel             write, with a reason that is stored; `set` prints a preview before it writes
list, show, history     show; `list` also stores which startpoints have expired
repair                  sets startpoints that also replace rows of the consumer's table: startpoint_repair.py
export                  prints startpoints as Spark's startingOffsets: startpoint_export.py
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from filtering.errors import shown_partition
from pushrep.cli.common import show_rows, show_table
from pushrep.cli.startpoint_export import export
from pushrep.cli.startpoint_options import (
    Row,
    parse_option,
    parse_ttl_s,
    place_text,
    preview,
    store_of,
    topic_and_partition,
    with_author,
    with_json,
    with_store,
    written_store_of,
)
from pushrep.cli.startpoint_repair import repair
from pushrep.env import SYSTEM_CLOCK
from pushrep.log.directory_files import shown_name
from pushrep.startpoints import EventLog, ReaderState, Startpoint, StartpointRefused, State, Target, Written
from pushrep.startpoints.model import OVER, Applied, Cancelled, Expired, Fact, Failed, to_json
from pushrep.status.table import count, time_text
from pushrep.status.terminal import say, show_json, show_result


@click.command("list", short_help="List the startpoints that wait.")
@with_store
@click.option("--consumer", help="Only startpoints for this consumer.  [default: all]")
@click.option("--topic", help="Only startpoints for this topic.  [default: all]")
@click.option(
    "--all", "all_", is_flag=True, help="Show finished startpoints, too: consumed, expired, cancelled, superseded."
)
@with_json
def list_(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, store: str | None, consumer: str | None, topic: str | None, all_: bool, as_json: bool  # noqa: FBT001
) -> None:  # fmt: skip
    """Show the startpoints that are pending, applied or failed, the newest first. Overdue ones are marked expired."""
    opened = written_store_of(directory, store)
    opened.sweep()
    event_log = opened.event_log()
    chosen = [
        written
        for written in reversed(list(event_log.all_written()))
        if (topic in (None, written.target.topic) and (consumer is None or written.target.consumer in (None, consumer)))
        and (all_ or is_open(event_log, written.sequence))
    ]
    if not chosen and not as_json:
        say("no startpoints" if all_ else "no pending, applied or failed startpoints; --all shows the others")
        return
    columns = ("number", "for", "start at", "state", "written", "expires", "by", "reason")
    show_rows(chosen, columns, partial(_row, event_log), partial(_as_dict, event_log), as_json=as_json)


def _row(event_log: EventLog, written: Written) -> tuple[str, ...]:
    return (
        str(written.sequence),
        str(written.target),
        place_text(written.startpoint),
        states_of(event_log, written.sequence),
        time_text(written.created_ms),
        _expires(written),
        written.author,
        written.reason,
    )


@click.command(short_help="Show one startpoint and who has reached it.")
@with_store
@click.argument("sequence", metavar="NUMBER", type=click.IntRange(1))
@with_json
def show(directory: Path, store: str | None, sequence: int, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Show the startpoint with this NUMBER, and its state for each consumer that has applied it or failed to."""
    event_log = written_store_of(directory, store).event_log()
    written = event_log.written(sequence)
    if written is None:
        raise StartpointRefused(f"there is no startpoint {sequence}: look with list")
    marks = ", the replay filter's marks are reset" if written.startpoint.reset_marks else ""
    lines = [
        f"startpoint {sequence}: {written.target}: {place_text(written.startpoint)}{marks}",
        f"written {time_text(written.created_ms)} by {written.author}: {written.reason}",
        f"expires {_expires(written)}; if it is out of range: {written.startpoint.out_of_range}",
        *(f"{reader}: {_state_text(state)}" for reader, state in event_log.readers(sequence).items()),
        f"state: {states_of(event_log, sequence)}",
    ]
    show_result(_as_dict(event_log, written), lines, as_json=as_json)


@click.command(short_help="Show every event in order.")
@with_store
@click.option("--consumer", help="Only events that concern this consumer.  [default: all]")
@click.option("--topic", help="Only events of this topic.  [default: all]")
@with_json
def history(directory: Path, store: str | None, consumer: str | None, topic: str | None, as_json: bool) -> None:  # noqa: FBT001
    """Show every event in order: startpoints that were written, applied, consumed, failed, expired or cancelled."""
    written: dict[int, Written] = {}
    for fact in written_store_of(directory, store).history():
        if isinstance(fact, Written):
            written[fact.sequence] = fact
        if topic not in (None, written[fact.sequence].target.topic) or not _concerns(fact, written, consumer):
            continue
        show_result(to_json(fact), [line_of(fact)], as_json=as_json)


def _concerns(fact: Fact, written: dict[int, Written], consumer: str | None) -> bool:
    if consumer is None:
        return True
    if isinstance(fact, Written | Expired | Cancelled):
        return written[fact.sequence].target.consumer in (None, consumer)
    return fact.reader.consumer == consumer


def line_of(fact: Fact) -> str:
    """An event as one line of text."""
    match fact:
        case Written():
            text = f"{fact.target}: {place_text(fact.startpoint)}, by {fact.author}: {fact.reason}"
            return f"{time_text(fact.created_ms)}  {fact.sequence} written    {text}"
        case Applied():
            text = f"{fact.reader}: offset {fact.offset} of [{fact.start}, {fact.end})"
            policy = f"; {fact.by_policy}" if fact.by_policy is not None else ""
            return f"{time_text(fact.at_ms)}  {fact.sequence} applied    {text}{policy}"
        case Failed():
            return f"{time_text(fact.at_ms)}  {fact.sequence} failed     {fact.reader}: {fact.why}"
        case Cancelled():
            return f"{time_text(fact.at_ms)}  {fact.sequence} cancelled  by {fact.author}: {fact.reason}"
        case Expired():
            return f"{time_text(fact.at_ms)}  {fact.sequence} expired"
        case _:
            return f"{time_text(fact.at_ms)}  {fact.sequence} consumed   {fact.reader}"


def is_open(event_log: EventLog, sequence: int) -> bool:
    """Whether the startpoint is pending, applied or failed for some reader, and not superseded."""
    states = {state.state for state in event_log.readers(sequence).values()}
    return bool((states | {event_log.state(sequence)}) - OVER) and event_log.superseded_by(sequence) is None


def states_of(event_log: EventLog, sequence: int) -> str:
    """The state, if all readers are in the same; else how many readers are in which state."""
    states = [str(state.state) for state in event_log.readers(sequence).values()]
    rest = str(event_log.state(sequence))
    newer = event_log.superseded_by(sequence)
    if rest == State.PENDING and newer is not None:
        rest = f"superseded by {newer}"
    if set(states) <= {rest}:
        return rest
    counted = [f"{count(states.count(state))} {state}" for state in map(str, State) if state in states]
    return f"{', '.join(counted)}; others {rest}"


def _state_text(state: ReaderState) -> str:
    text = str(state.state)
    if state.applied is not None:
        at = state.applied
        text += f", at offset {at.offset} of [{at.start}, {at.end}), {time_text(at.at_ms)}"
        text += f"; {at.by_policy}" if at.by_policy is not None else ""
    return f"{text}: {state.failure}" if state.failure is not None else text


def _expires(written: Written) -> str:
    return "never" if written.ttl_s is None else time_text(written.created_ms + written.ttl_s * 1000)


def _as_dict(event_log: EventLog, written: Written) -> dict[str, Any]:
    readers = [
        {
            "consumer": reader.consumer,
            "partition": reader.partition,
            "task": reader.task or None,
            "state": str(state.state),
            "offset": state.applied.offset if state.applied is not None else None,
            "failure": state.failure,
        }
        for reader, state in event_log.readers(written.sequence).items()
    ]
    fields = to_json(written)
    del fields["event"]
    state = {
        "state": str(event_log.state(written.sequence)),
        "superseded_by": event_log.superseded_by(written.sequence),
    }
    return {**fields, **state, "readers": readers}


@click.command("set", short_help="Set where a consumer starts next.")
@with_store
@click.argument("topic", metavar="TOPIC[-N]")
@click.option("--consumer", help="The consumer's name. Give it or --every-consumer.")
@click.option("--every-consumer", is_flag=True, help="For every consumer of TOPIC; each applies it once.")
@click.option("--task", help="Only this task of the consumer.  [default: all]")
@click.option(
    "--to",
    "place",
    required=True,
    metavar="WHERE",
    help="Where to start: earliest, latest, bootstrap, an offset, a time, -1h or +1; explained above.",
)
@click.option(
    "--out-of-range",
    type=click.Choice(["error", "earliest", "latest"]),
    default="error",
    show_default=True,
    help="What a consumer does if WHERE is out of the log's range when it applies the startpoint. error: the partition "
    "does not start, until the startpoint is cancelled or a newer one is set.",
)
@click.option(
    "--reset-marks",
    is_flag=True,
    help="Reset the marks of the consumer's replay filter, so that records which it has seen pass once more.",
)
@click.option(
    "--ttl",
    default="12h",
    show_default=True,
    help="The startpoint expires if it is not applied within this time: 90s, 30m, 12h, 2d, or never.",
)
@click.option(
    "--unchecked",
    is_flag=True,
    help="Write it without checking it against a log in DIRECTORY, for example for a topic in Kafka.",
)
@click.option(
    "--dry-run", is_flag=True, is_eager=True, help="Print the offsets where consumers would start; write nothing."
)
@with_author
@with_json
def set_(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, store: str | None, topic: str, consumer: str | None, every_consumer: bool, task: str | None,  # noqa: FBT001
    place: str, out_of_range: str, reset_marks: bool, ttl: str, unchecked: bool, dry_run: bool, reason: str,  # noqa: FBT001
    author: str | None, as_json: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    """Set where a consumer starts next in TOPIC, or in its partition N. A newer startpoint replaces an older one. A
    running consumer applies it at once.

    \b
      pushrep startpoint set out orders --consumer billing --to 2013-07-04T14:00 --reason "wrong rates since then"
      pushrep startpoint set out orders-2 --consumer billing --to +1 --reason "skip a broken record"
      pushrep startpoint set out orders --every-consumer --to earliest --reset-marks --reason "reprocess everything"

    \b
    WHERE   earliest, latest                the log's start, the log's end
            bootstrap                       as earliest; partitions without a startpoint wait until it has caught up
            1234                            an offset
            2013-07-04T14:00, @1372946400000   the first record at this time (UTC without a zone; @: ms) or later
            -1h, -30m, -90s, -2d            so long before now
            -1000, +1                       so many records from the consumer's position
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    if (consumer is None) == (not every_consumer):
        raise click.UsageError("give --consumer NAME or --every-consumer")
    startpoint = parse_option("--to", place, out_of_range=out_of_range, reset_marks=reset_marks)
    ttl_s = parse_ttl_s(ttl)
    opened = store_of(directory, store)
    target = Target(consumer, *topic_and_partition(directory, topic), task)
    rows = preview(directory, opened, target, startpoint, now_ms=SYSTEM_CLOCK.wall_ms())
    if not unchecked:
        check_fits(directory, target, rows, dry_run=dry_run)
    # Printed before the write, so that the operator can interrupt the command.
    if as_json:
        for row in rows:
            show_json(row.as_dict())
    else:
        _print_preview(target, startpoint, rows)
    written = None
    if not dry_run:
        written = opened.write(
            target.consumer, target.topic, target.partition, startpoint, reason, task=task, author=author, ttl_s=ttl_s
        )
    text = f"startpoint {written} is written: {target}" if written is not None else "dry run: nothing was written"
    show_result({"sequence": written, "dry_run": dry_run}, [text], as_json=as_json)


@click.command(short_help="Take startpoints back.")
@with_store
@click.argument("sequences", metavar="[NUMBER]...", nargs=-1, type=click.IntRange(1))
@click.option("--all", "all_", is_flag=True, help="Cancel every startpoint that can still be cancelled.")
@with_author
@with_json
def cancel(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, store: str | None, sequences: tuple[int, ...], all_: bool, reason: str, author: str | None,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    """Cancel startpoints for all consumers that have not consumed them. A running consumer that has applied one
    continues from there until it is restarted.

    \b
      pushrep startpoint cancel out 3 --reason "wrong day"
      pushrep startpoint cancel out --all --reason "the incident is over"
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    if all_ == bool(sequences):
        raise click.UsageError("give the numbers of startpoints, or --all")
    opened = written_store_of(directory, store)
    cancelled = opened.delete_all(reason, author=author) if all_ else list(sequences)
    for sequence in sequences:
        opened.cancel(sequence, reason, author=author)
    text = f"cancelled: {', '.join(map(str, cancelled)) or 'none'}"
    show_result({"cancelled": cancelled}, [text], as_json=as_json)


def check_fits(directory: Path, target: Target, rows: Sequence[Row], *, dry_run: bool = False) -> None:
    """Raise StartpointRefused if there is no log of it, or it can't be resolved now; a dry run prints the latter."""
    if not rows:
        name = target.topic if target.partition is None else shown_name(target.topic, target.partition)
        raise StartpointRefused(
            f"{directory} holds no log of {name}: correct the name, or give --unchecked for a topic elsewhere"
        )
    failing = [row for row in rows if row.offset is None]
    if failing and not dry_run:
        places = "; ".join(f"{shown_name(target.topic, row.partition)}: {row.why}" for row in failing)
        raise StartpointRefused(f"{places}. Nothing was written: give another --to, --out-of-range, or --unchecked")


def _print_preview(target: Target, startpoint: Startpoint, rows: Sequence[Row]) -> None:
    columns = ("consumer", "partition", "log holds", "checkpoint", "would start at", "read again", "skipped")
    show_table(
        f"{target}: {place_text(startpoint)}",
        columns,
        [
            (
                row.consumer or "any" if not row.task else f"{row.consumer} (task {row.task})",
                shown_partition(row.partition),
                f"[{count(row.log_start)}, {count(row.log_end)})",
                count(row.checkpoint) if row.checkpoint is not None else "none",
                count(row.offset) if row.offset is not None else "FAILS",
                _count_or_unknown(row.read_again),
                _count_or_unknown(row.passed_by),
            )
            for row in rows
        ],
    )
    for row in rows:
        if row.why is not None:
            say(f"{shown_name(target.topic, row.partition)}: {row.why}")
    _say_what_is_unknown(target, rows)
    if not rows and not startpoint.reset_marks:
        say(
            f"no log here to find the position of {target}: if the startpoint goes back, the consumer's replay filter "
            "drops the records that it has seen. Give --reset-marks to let them through"
        )
    again = [row for row in rows if row.read_again]
    if again and not startpoint.reset_marks:
        say(
            f"{count(sum(row.read_again or 0 for row in again))} offsets would be read again: the consumer's replay "
            "filter drops the records that it has seen. Give --reset-marks to let them through"
        )
        for row in again:
            end = count((row.offset or 0) + (row.read_again or 0))
            say(f"would be dropped: {shown_name(target.topic, row.partition)} [{count(row.offset or 0)}, {end})")


def _count_or_unknown(number: int | None) -> str:
    return "unknown" if number is None else count(number)


def _say_what_is_unknown(target: Target, rows: Sequence[Row]) -> None:
    """Of readers without a checkpoint: nobody knows where they stand."""
    unknown = [row for row in rows if row.read_again is None or row.passed_by is None]
    if not unknown:
        return
    skipped = sum((row.offset or 0) - row.log_start for row in unknown)
    held = sum(row.log_end - row.log_start for row in unknown)
    what = f"all {count(held)}" if skipped == held else f"{count(skipped)} of {count(held)}"
    would = f"if it would begin at earliest, {what} records would be skipped" if skipped else "check the name"
    say(f"no checkpoint of {target.consumer or 'any consumer'} is known here: {would}")


@click.group()
def startpoint() -> None:
    """Set where consumers start next in their partitions. A running consumer applies a startpoint at once, a stopped
    one at its next start; each applies it once. The history is kept.

    \b
      pushrep startpoint set out orders --consumer billing --to 2013-07-04T14:00 --reason "wrong rates" --dry-run
      pushrep startpoint repair out orders --consumer billing --from 2013-07-04T14:00 --sink ./orders-table --dry-run
      pushrep startpoint list out            startpoints that are pending, applied or failed
      pushrep startpoint cancel out 3 --reason "wrong day"
      pushrep startpoint history out         who set what, and what consumers did with it

    A Spark query that does not follow startpoints begins a fresh checkpoint: pushrep startpoint export --help

    DIRECTORY is the directory of the logs; startpoints are in DIRECTORY/startpoints, or in --store.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are


for command in (set_, repair, list_, show, cancel, history, export):
    startpoint.add_command(command)
