"""`pushrep startpoint undo-repair`: restores the rows that a repair replaced, from the table's version before the
repair.

    look     check that the query has read everything that the repair let it read again, that no other writer has
             changed rows since, and that the table still has the version before
    show     print for each partition how many rows are removed, and how many are restored
    undo     one commit of the table, with author and reason

spark_jobs.job_sink and the table's sink do the work. Marks and checkpoint do not change.
"""

from pathlib import Path
from typing import Any

import click

from pushrep.cli.common import count, show_json, show_table
from pushrep.cli.startpoint_apply import checkpoint_place
from pushrep.cli.startpoint_options import (
    checkpoint_tool,
    sink_of,
    with_author,
    with_brokers,
    with_checkpoint,
    with_conf,
    with_json,
)


@click.command("undo-repair")
@with_checkpoint
@click.option("--sink", required=True, metavar="WHERE", help="The apply job's --sink.")
@click.option(
    "--format", "sink_format", default="parquet", show_default=True, help="The format of --sink: delta or iceberg."
)
@with_conf
@click.option("--topic", help="The topic; needed if the source reads several.")
@click.option("--source", help="The source's number in CHECKPOINT/sources; needed if the query has several.")
@click.option("--logs", type=click.Path(path_type=Path), help="For the source pushrep: the directory of the logs.")
@click.option(
    "--marks",
    metavar="PLACE",
    help="Where the replay filter's marks are, as for `pushrep marks`.  [default: CHECKPOINT-marks, if it exists]",
)
@with_brokers("--marks")
@click.option("--dry-run", is_flag=True, is_eager=True, help="Print what would be done; write nothing.")
@with_author
@with_json
def undo_repair(  # noqa: PLR0913, PLR0917 - one parameter an option
    checkpoint: Path, sink: str, sink_format: str, conf: tuple[str, ...], topic: str | None, source: str | None,
    logs: Path | None, marks: str | None, dry_run: bool, reason: str, author: str | None, as_json: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    """Undo the newest repair of a query: an apply-checkpoint --reset-marks of a query that writes to Delta or Iceberg.

    \b
      pushrep startpoint undo-repair cp --sink /data/orders --format delta --conf spark.jars=... --dry-run
      pushrep startpoint undo-repair cp --sink /data/orders --format delta --conf spark.jars=... --reason "worse"

    The rows that the repair replaced are restored; rows of later batches stay. The command is refused, and writes
    nothing, while the query still reads records again, if another writer has changed rows since the repair, and if the
    table no longer has the version before it.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    tool = checkpoint_tool("undo-repair")
    looked = sink_of(tool, sink, None, sink_format, conf)
    try:
        place = checkpoint_place(tool, checkpoint, None, marks, None, source=source, topic=topic, logs=logs)
        found = tool.look_at_repair(place, looked)
        _show(checkpoint, found, as_json=as_json)
        is_written = not (dry_run or found.repair.is_undone)
        if is_written:
            looked.undo(found, reason=reason, author=author)
    except tool.SparkJobError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        show_json({"written": is_written})
    else:
        click.echo("undone: the query continues from its position" if is_written else "nothing was written")


def _show(checkpoint: Path, found: Any, *, as_json: bool) -> None:
    rows = [
        {"partition": partition, "rows_go": gone, "rows_come_back": back}
        for partition, (gone, back) in found.rows.items()
    ]
    if as_json:
        for row in rows:
            show_json(row)
    elif found.repair.is_undone:
        click.echo(f"{checkpoint}: its newest repair is undone already")
    else:
        title = f"{checkpoint}: rows of its newest repair, which version {found.repair.before} of the table replaces"
        columns = ("partition", "rows removed", "rows restored")
        show_table(title, columns, [tuple(map(count, row.values())) for row in rows])
