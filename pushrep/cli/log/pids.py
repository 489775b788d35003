"""PIDs at the command line: what a cut means for the outbox that a log belongs to, and `pushrep log new-epoch`."""

from pathlib import Path
from typing import Any

import click

from pushrep.cli.log.showing import show_json
from pushrep.outbox import begin_pid_epoch, outbox_of_log
from pushrep.outbox.destinations import not_known_to_be_shipped


def outbox_after_cut(log: Path, log_end_offset: int) -> dict[str, Any] | None:
    """What the log's outbox will do at its next open, None where the log is no outbox's.

    next_pid_epoch: the stored epoch, or the one after it if readers may have seen offsets that the log will give out
    again. (Another partition may call for it, too.)
    """
    outbox: dict[str, Any] | None = outbox_of_log(log)
    if outbox is not None:
        outbox["next_pid_epoch"] = outbox["pid_epoch"] + (log_end_offset < outbox["given_up_to"])
    return outbox


def tell_outbox(log: Path, outbox: dict[str, Any] | None) -> None:
    """One line for people, if the cut calls for another epoch."""
    if outbox is not None and outbox["next_pid_epoch"] != outbox["pid_epoch"]:
        click.echo(
            f"{log.name}: readers may have seen offsets up to {outbox['given_up_to']:,}: the outbox's next open begins "
            f"PID epoch {outbox['next_pid_epoch']}, so that they take what comes there for new"
        )


@click.command("new-epoch")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Producer, PID and epoch as a JSON object.")
def new_epoch(directory: Path, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Let the outbox in DIRECTORY go on under another PID: run it once after restoring it, or its outbox.json, from
    an older copy, before anything is appended.

    A copy does not know which offsets readers have seen since it was made. Without a new PID their replay filters
    take the records that come at those offsets for replays, and drop them. Cuts and lost directories are noticed
    without this.
    """
    identity = begin_pid_epoch(directory)
    unshipped = not_known_to_be_shipped(directory)
    if as_json:
        fields = {"producer": identity.producer, "pid": identity.pid, "pid_epoch": identity.pid_epoch}
        show_json({**fields, "unshipped": [one._asdict() for one in unshipped]})
        return
    click.echo(f"{directory}: PID epoch {identity.pid_epoch} begins, the PID is {identity.pid} now")
    for one in unshipped:
        click.echo(
            f"offsets [{one.start}, {one.end}) of partition {one.partition} keep their old PID, and are not known to "
            f"be in topic {one.topic}: if it holds other records in their place, they stay behind. Then: "
            f"pushrep outbox rebase {directory}"
        )
