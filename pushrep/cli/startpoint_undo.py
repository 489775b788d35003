"""`pushrep startpoint undo-repair`: the rows that a repair replaced come back from the table's version of before.

    look     the query stands behind what it was to read again; nobody else has changed rows; that version is kept
    show     by partition how many rows go, and how many come back
    undo     in one commit of the table, which says who did it, and why

The work is done by spark_jobs.job_sink and the table's sink; marks and checkpoint stay where they are.
"""

from pathlib import Path
from typing import Any

import click

from pushrep.cli.common import count, show_json, show_table
from pushrep.cli.startpoint_apply import checkpoint_place
from pushrep.cli.startpoint_options import checkpoint_tool, sink_of, with_author, with_brokers, with_conf, with_json


@click.command("undo-repair")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--sink", required=True, metavar="WHERE", help="The apply job's.")
@click.option("--format", "sink_format", default="parquet", show_default=True, help="Of --sink.")
@with_conf
@click.option("--topic", help="Which one, if the source reads several.")
@click.option("--source", help="Which one, if the query has several: its number in CHECKPOINT/sources.")
@click.option("--logs", type=click.Path(path_type=Path), help="Source pushrep: the directory of the logs.")
@click.option(
    "--marks", metavar="PLACE", help="The replay filter's marks.  [default: CHECKPOINT-marks, if there is one]"
)
@with_brokers("--marks")
@click.option("--dry-run", is_flag=True, is_eager=True, help="Show what it would do; write nothing.")
@with_author
@with_json
def undo_repair(  # noqa: PLR0913, PLR0917 - one parameter an option
    checkpoint: Path, sink: str, sink_format: str, conf: tuple[str, ...], topic: str | None, source: str | None,
    logs: Path | None, marks: str | None, dry_run: bool, reason: str, author: str | None, as_json: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    """Take the newest repair of a query back: one that apply-checkpoint --reset-marks moved, into Delta or Iceberg.

    \b
      pushrep startpoint undo-repair cp --sink /data/orders --format delta --conf spark.jars=... --dry-run
      pushrep startpoint undo-repair cp --sink /data/orders --format delta --conf spark.jars=... --reason "worse"

    What it replaced is as it was; rows of later batches stay. Refused, and nothing is written, while the query still
    reads again, where somebody else has changed rows since, and once the table has let that version go.
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
        click.echo("undone: the query continues from where it stands" if is_written else "nothing was written")


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
        title = f"{checkpoint}: what its newest repair replaced, as of version {found.repair.before} of the table"
        show_table(title, ("partition", "rows go", "rows come back"), [tuple(map(count, row.values())) for row in rows])
