"""`pushrep startpoint set` and `cancel`: what would happen is said before anything is written."""

from collections.abc import Sequence
from pathlib import Path

import click

from filtering.errors import shown_partition
from pushrep.cli.common import count, show_json, show_table
from pushrep.cli.startpoint.options import (
    parse_option,
    parse_ttl_s,
    store_of,
    topic_and_partition,
    with_author,
    with_json,
    with_store,
    written_store_of,
)
from pushrep.cli.startpoint.preview import Row, preview, say_place
from pushrep.env import SYSTEM_CLOCK
from pushrep.errors import PushrepError
from pushrep.log.slots import shown_name
from pushrep.startpoints import Startpoint, Target


class WouldFail(PushrepError):
    """The startpoint does not fit a log as it is now; give another place, --out-of-range, or --unchecked."""


@click.command("set")
@with_store
@click.argument("topic", metavar="TOPIC[-N]")
@click.option("--consumer", help="For this consumer.")
@click.option("--every-consumer", is_flag=True, help="For every consumer; each applies it for itself.")
@click.option("--task", help="For this task of the consumer only.")
@click.option("--to", "place", required=True, metavar="WHERE", help="See below.")
@click.option(
    "--out-of-range",
    type=click.Choice(["error", "earliest", "latest"]),
    default="error",
    show_default=True,
    help="What to do where WHERE does not fit the log when it is applied. error: the partition does not start.",
)
@click.option("--reset-marks", is_flag=True, help="The replay filter behind the consumer forgets what it has seen.")
@click.option(
    "--ttl", default="12h", show_default=True, help="Expires if not applied by then: 90s, 30m, 12h, 2d, never."
)
@click.option("--unchecked", is_flag=True, help="Write it though no log here tells that it fits (a topic in Kafka).")
@click.option("--dry-run", is_flag=True, is_eager=True, help="Show what it would resolve to; write nothing.")
@with_author
@with_json
def set_(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, store: str | None, topic: str, consumer: str | None, every_consumer: bool, task: str | None,  # noqa: FBT001
    place: str, out_of_range: str, reset_marks: bool, ttl: str, unchecked: bool, dry_run: bool, reason: str,  # noqa: FBT001
    author: str | None, as_json: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    """Say where TOPIC (partition N) starts next for a consumer. The newest wins; a running one takes it at once.

    \b
      pushrep startpoint set out orders --consumer billing --to 2013-07-04T14:00 --reason "wrote nonsense since"
      pushrep startpoint set out orders-2 --consumer billing --to +1 --reason "a record that nobody can read"
      pushrep startpoint set out orders --every-consumer --to earliest --reset-marks --reason "all of it again"

    \b
    WHERE   earliest, latest, bootstrap     bootstrap: the others wait until it has caught up
            1234                            an offset
            2013-07-04T14:00, @1372946400000   the first record since then; UTC if it names no zone
            -1h, -30m, -90s, -2d            so long before now
            -1000, +1                       so many records from where the consumer stands
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    if (consumer is None) == (not every_consumer):
        raise click.UsageError("give --consumer NAME or --every-consumer")
    startpoint = parse_option("--to", place, out_of_range=out_of_range, reset_marks=reset_marks)
    ttl_s = parse_ttl_s(ttl)
    opened = store_of(directory, store)
    target = Target(consumer, *topic_and_partition(directory, topic), task)
    rows = preview(directory, opened, target, startpoint, now_ms=SYSTEM_CLOCK.wall_ms())
    if not unchecked:
        check_fits(directory, target, rows, tell=dry_run)
    # Before the write: whoever reads on and sees what would be dropped can still say no.
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
    if as_json:
        show_json({"sequence": written, "dry_run": dry_run})
    else:
        click.echo(
            f"startpoint {written} is written: {target}" if written is not None else "dry run: nothing was written"
        )


@click.command()
@with_store
@click.argument("sequences", metavar="[NUMBER]...", nargs=-1, type=click.IntRange(1))
@click.option("--all", "all_", is_flag=True, help="All that still can be.")
@with_author
@with_json
def cancel(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, store: str | None, sequences: tuple[int, ...], all_: bool, reason: str, author: str | None,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    """Take startpoints back, for all who have not consumed them. Who runs from one goes on; a restart does not.

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
    if as_json:
        show_json({"cancelled": cancelled})
    else:
        click.echo(f"cancelled: {', '.join(map(str, cancelled)) or 'none'}")


def check_fits(directory: Path, target: Target, rows: Sequence[Row], *, tell: bool = False) -> None:
    """Raise WouldFail for what is known to fail; a dry run shows that instead."""
    if not rows:
        name = target.topic if target.partition is None else shown_name(target.topic, target.partition)
        raise WouldFail(f"{directory} holds no log of {name}; if that is no typo, write it with --unchecked")
    failing = [row for row in rows if row.offset is None]
    if failing and not tell:
        places = "; ".join(f"{shown_name(target.topic, row.partition)}: {row.why}" for row in failing)
        raise WouldFail(f"{places}. Nothing was written: give another --to, --out-of-range, or --unchecked")


def _print_preview(target: Target, startpoint: Startpoint, rows: Sequence[Row]) -> None:
    columns = ("consumer", "partition", "log holds", "checkpoint", "would start at", "read again", "passed by")
    show_table(
        f"{target}: {say_place(startpoint)}",
        columns,
        [
            (
                row.consumer or "any" if not row.task else f"{row.consumer} (task {row.task})",
                shown_partition(row.partition),
                f"[{count(row.log_start)}, {count(row.log_end)})",
                count(row.checkpoint) if row.checkpoint is not None else "none",
                count(row.offset) if row.offset is not None else "FAILS",
                count(row.read_again),
                count(row.passed_by),
            )
            for row in rows
        ],
    )
    for row in rows:
        if row.why is not None:
            click.echo(f"{shown_name(target.topic, row.partition)}: {row.why}")
    if not rows and not startpoint.reset_marks:
        click.echo(
            f"no log here tells how far {target} is: a replay filter behind it drops what it has seen, if this goes "
            "back; --reset-marks lets it through"
        )
    again = [row for row in rows if row.read_again]
    if again and not startpoint.reset_marks:
        click.echo(
            f"{count(sum(row.read_again for row in again))} offsets would be read again: a replay filter behind this "
            "consumer drops what it has seen; --reset-marks lets it through"
        )
        for row in again:
            end = count((row.offset or 0) + row.read_again)
            click.echo(f"would be dropped: {shown_name(target.topic, row.partition)} [{count(row.offset or 0)}, {end})")
