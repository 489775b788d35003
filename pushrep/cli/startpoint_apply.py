"""`pushrep startpoint apply-checkpoint`: applies startpoints to a stopped Spark query that does not follow them itself.

spark_jobs.checkpoint_apply does the work. This package may not import it, and finds it by its entry point.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pushrep.cli.common import count, show_json, show_table
from pushrep.cli.startpoint_options import (
    brokers,
    checkpoint_tool,
    parse_option,
    place_text,
    sink_of,
    store_or,
    with_author,
    with_checkpoint,
    with_conf,
    with_json,
    with_place,
)
from pushrep.env import SYSTEM_CLOCK
from pushrep.errors import BadArgument
from pushrep.startpoints import Startpoint, StartpointStore
from pushrep.startpoints.store import KAFKA, kind_of

STORE_SUFFIX, MARKS_SUFFIX = "-startpoints", "-marks"


@click.command("apply-checkpoint")
@with_checkpoint
@click.option(
    "--to",
    "words",
    metavar="WHERE",
    help="Where to start: as for `pushrep startpoint set`.  [default: the pending startpoints of --consumer in "
    "--store]",
)
@click.option("--partition", type=click.IntRange(0), help="With --to: only this partition.  [default: all]")
@click.option(
    "--out-of-range",
    type=click.Choice(["error", "earliest", "latest"]),
    default="error",
    show_default=True,
    help="With --to: what to do if WHERE is out of range. error: write nothing.",
)
@click.option(
    "--reset-marks",
    is_flag=True,
    help="With --to: reset the replay filter's marks (--marks), so that records which it has seen pass once more.",
)
@click.option(
    "--replace-until",
    type=click.IntRange(1),
    metavar="OFFSET",
    help="With --reset-marks: replace rows below this offset only.  [default: all rows from the new position on]",
)
@click.option("--consumer", help="The consumer whose startpoints are applied.  [default: the query's id]")
@with_place("CHECKPOINT-startpoints")
@click.option("--logs", type=click.Path(path_type=Path), help="For the source pushrep: the directory of the logs.")
@click.option("--topic", help="The topic; needed if the source reads several.")
@click.option("--source", help="The source's number in CHECKPOINT/sources; needed if the query has several.")
@click.option(
    "--marks",
    metavar="PLACE",
    help="Where the replay filter's marks are, as for `pushrep marks`.  [default: CHECKPOINT-marks, if it exists]",
)
@click.option("--table", help="With --marks or --sink DATABASE: the table of the rows.")
@click.option(
    "--sink",
    metavar="WHERE",
    help="The apply job's --sink: show how many of its rows --reset-marks replaces.",
)
@click.option("--format", "sink_format", default="parquet", show_default=True, help="The format of --sink PATH.")
@with_conf
@click.option("--stopped", is_flag=True, help="Confirm that the query is stopped; without it nothing is written.")
@click.option(
    "--watch-s",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds for which the command checks that no process writes CHECKPOINT. Give more than the query's trigger "
    "interval.",
)
@click.option("--dry-run", is_flag=True, is_eager=True, help="Print what would be done; write nothing.")
@with_author
@with_json
def apply_checkpoint(  # noqa: PLR0913, PLR0917 - one parameter an option
    checkpoint: Path, words: str | None, partition: int | None, out_of_range: str, reset_marks: bool,  # noqa: FBT001
    consumer: str | None, store: str | None, logs: Path | None, topic: str | None, source: str | None,
    marks: str | None, table: str | None, stopped: bool, watch_s: float, dry_run: bool, reason: str, author: str | None,  # noqa: FBT001
    as_json: bool, sink: str | None, sink_format: str, conf: tuple[str, ...],  # noqa: FBT001
    replace_until: int | None,
) -> None:  # fmt: skip
    """Move a stopped, stateless Spark query: its CHECKPOINT gets one more, empty batch that ends at the new position.

    \b
      pushrep startpoint apply-checkpoint cp --to 1200 --partition 0 --reason "wrong rates" --dry-run
      pushrep startpoint apply-checkpoint cp --to 1200 --partition 0 --reason "wrong rates" --stopped
      pushrep startpoint apply-checkpoint cp --logs out --to 2013-07-04T14:00 --reason "wrong rates" --stopped
      pushrep startpoint apply-checkpoint cp --to -5000 --reset-marks --sink ./orders-table --reason "bug" --stopped
      pushrep startpoint apply-checkpoint cp --store out/startpoints --consumer billing --stopped --reason "now"

    \b
    WHERE for a source  kafka     an offset, or -1000 (records back); the brokers are not asked
                        files     an offset is the number of a batch of files, from 0; a time is that of the files
                        pushrep   every form, resolved by --logs; a query with startingStartpoint needs only `set`

    The command first copies CHECKPOINT to CHECKPOINT-before-N; to undo everything, put this copy back. If the command
    is killed, run it again.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    if "://" in str(checkpoint) or str(checkpoint).startswith(("hdfs:", "s3a:", "gs:", "abfss:")):
        raise click.UsageError(
            f"{checkpoint} is not a local directory, and this command works on local directories only"
        )
    if not stopped and not dry_run:
        raise click.UsageError("stop the query, then give --stopped; --dry-run prints what would be done")
    startpoint = _startpoint(words, partition, out_of_range, reset_marks=reset_marks, replace_until=replace_until)
    if sink is not None and startpoint is not None and not reset_marks:
        raise click.UsageError("--sink is for --reset-marks: without it no row is replaced")
    tool = checkpoint_tool("apply-checkpoint")
    looked = None if sink is None else sink_of(tool, sink, table, sink_format, conf)
    if marks is None and looked is not None and looked.is_database:
        marks = sink
    try:
        place = checkpoint_place(tool, checkpoint, consumer, marks, table, source=source, topic=topic, logs=logs)
        opened = store_or(store, checkpoint.with_name(checkpoint.name + STORE_SUFFIX), marks)
        request = None if startpoint is None else tool.Request(startpoint, partition, reason, author)
        if not dry_run and tool.is_interrupted(place, opened):
            _finish_interrupted(tool, place, opened, request, watch_s, as_json=as_json)
            return
        now_ms = SYSTEM_CLOCK.wall_ms()
        moves = tool.preview(place, opened, request=request, now_ms=now_ms, replaces=looked is not None)
        rows = None if looked is None else _rows_replaced(looked, tool.source_at(place)[2].topic, moves)
        _print_moves(place, startpoint, moves, rows, as_json=as_json)
        if dry_run:
            click.echo('{"dry_run": true}' if as_json else "dry run: nothing was written")
            return
        _refuse_what_fails(moves)
        _print_watching(checkpoint, watch_s, as_json=as_json)
        pair = tool.apply(place, opened, request=request, shown=moves, now_ms=now_ms, watch_s=watch_s)
    except tool.SparkJobError as error:
        raise click.ClickException(str(error)) from error
    _show_pair(pair, checkpoint, as_json=as_json)


def _finish_interrupted(  # noqa: PLR0913 - a call's all
    tool: Any, place: Any, store: StartpointStore, request: Any, watch_s: float, *, as_json: bool
) -> None:
    """Complete an earlier call that was killed. Raises ClickException if that call had another request than this
    one.
    """
    _print_watching(place.checkpoint, watch_s, as_json=as_json)
    finished = tool.finish(place, store, watch_s=watch_s)
    if finished is None:
        raise click.ClickException("another process has finished the interrupted call: run this command again")
    _show_pair(finished, place.checkpoint, as_json=as_json)
    if request is not None and not tool.did(store, finished, request):
        raise click.ClickException(
            "an interrupted call was finished first; --to of this call is not done yet: run this command again"
        )


def _startpoint(
    words: str | None, partition: int | None, out_of_range: str, *, reset_marks: bool, replace_until: int | None
) -> Startpoint | None:
    """The startpoint of --to; None without it. Raises UsageError."""
    if replace_until is not None and (words is None or not reset_marks):
        raise click.UsageError("--replace-until is for --to OFFSET --reset-marks: without these no row is replaced")
    if words is None:
        alone = {
            "--partition": partition is not None,
            "--reset-marks": reset_marks,
            "--out-of-range": out_of_range != "error",
        }
        if given := [option for option, is_given in alone.items() if is_given]:
            raise click.UsageError(f"{given[0]} is for --to: a pending startpoint has its own")
        return None
    try:
        startpoint = parse_option("--to", words, out_of_range=out_of_range, reset_marks=reset_marks)
        return replace(startpoint, replace_until=replace_until)
    except BadArgument as error:
        raise click.BadParameter(error.why, param_hint="--replace-until") from error


def _print_watching(checkpoint: Path, watch_s: float, *, as_json: bool) -> None:
    if not as_json:
        click.echo(f"watching {checkpoint} for {watch_s:g} s: no process may write it")


def _show_pair(pair: Any, checkpoint: Path, *, as_json: bool) -> None:
    backup = pair.backup_of(checkpoint)
    if as_json:
        show_json({"first_batch": pair.first, "batches": pair.count, "backup": str(backup)})
        return
    click.echo(f"batch {pair.first + pair.count - 1} is appended; the query continues after it at its next start")
    click.echo(f"copy of the checkpoint before: {backup}")


def checkpoint_place(
    tool: Any, checkpoint: Path, consumer: str | None, marks: str | None, table: str | None, **of_source: Any
) -> Any:
    """The checkpoint, its consumer, marks and source, as the options name them. Raises UsageError."""
    beside = checkpoint.with_name(checkpoint.name + MARKS_SUFFIX)
    known = marks if marks is not None else str(beside) if beside.is_dir() else None
    if known is not None and Path(known).is_dir():  # absolute: a call from another directory may finish this one
        known = str(Path(known).resolve())
    reached = tool.Brokers(*brokers()) if known is not None and kind_of(known) == KAFKA else None
    if known is None and table is not None:
        raise click.UsageError("--table needs --marks DATABASE or --sink DATABASE: give one of them")
    return tool.CheckpointPlace(
        checkpoint=checkpoint,
        consumer=consumer if consumer is not None else tool.query_id_of(checkpoint),
        marks=None if known is None else tool.MarksPlace(known, table, reached),
        **of_source,
    )


def _rows_replaced(looked: Any, topic: str, moves: Sequence[Any]) -> dict[int, int]:
    """{partition: how many rows of the sink are replaced}. Raises the sink's error if it can't replace rows."""
    replacing = {move.partition: move for move in moves if move.reset_marks and move.after is not None}
    held = looked.held(topic, {partition: move.after for partition, move in replacing.items()}) if replacing else {}
    ends = {partition: move.replace_until for partition, move in replacing.items()}
    return {one: len(own) if ends[one] is None else bisect_left(own, ends[one]) for one, own in held.items()}


def _print_moves(
    place: Any,
    startpoint: Startpoint | None,
    moves: Sequence[Any],
    rows_replaced: dict[int, int] | None,
    *,
    as_json: bool,
) -> None:
    if as_json:
        for move in moves:
            names = ("partition", "before", "after", "reset_marks", "replace_until", "why")
            fields = {name: getattr(move, name) for name in names}
            show_json(fields if rows_replaced is None else fields | {"rows": rows_replaced.get(move.partition, 0)})
        return
    what = place_text(startpoint) if startpoint is not None else f"pending startpoints of {place.consumer}"
    columns = ("partition", "position", "new position", "read again", "skipped")
    rows = []
    for move in moves:
        after = move.after if move.after is not None else move.before
        again, passed = max(0, move.before - after), max(0, after - move.before)
        goes_to = count(move.after) if move.after is not None else "FAILS"
        rows.append((str(move.partition), count(move.before), goes_to, count(again), count(passed)))
    show_table(f"{place.checkpoint}: {what}", columns, rows)
    for move in moves:
        if move.why is not None:
            click.echo(f"partition {move.partition}: {move.why}")
        if rows_replaced is not None:
            click.echo(f"partition {move.partition}: {count(rows_replaced.get(move.partition, 0))} rows are replaced")
        if place.marks is not None and not move.reset_marks and move.after is not None and move.after < move.before:
            click.echo(
                f"partition {move.partition}: the query's replay filter would drop "
                f"[{count(move.after)}, {count(move.before)}) as seen. Give --reset-marks to let these through"
            )


def _refuse_what_fails(moves: Sequence[Any]) -> None:
    failing = [f"partition {move.partition}: {move.why}" for move in moves if move.after is None]
    if failing:
        raise click.ClickException(f"{'; '.join(failing)}. Nothing was written: give another --to, or --out-of-range")
