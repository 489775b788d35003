"""`pushrep recording`: lists the logs that a node keeps, and extends, truncates, purges or deletes one."""

import click

from pushrep.cli.common import show_json, show_table
from pushrep.cli.options import tls_options
from pushrep.cli.replay import client_of, recording_of
from pushrep.replay import RecordingInfo
from pushrep.replicate.certificates import MutualTls
from pushrep.status.table import count


@click.group()
def recording() -> None:
    """List, extend, truncate, purge and delete the logs that a node keeps."""


@recording.command("list", short_help="List the recordings of a node.")
@click.argument("where", metavar="ADDRESS|DIRECTORY")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a recording.")
@tls_options
def list_(where: str, as_json: bool, tls: MutualTls | None) -> None:  # noqa: FBT001 - click's
    """List the recordings of the node at ADDRESS, or in DIRECTORY: id, log, offsets, outbox. State live: it has a
    writer.
    """
    with client_of(where, tls) as client:
        found = client.recordings()
    if as_json:
        for one in found:
            show_json(_as_dict(one))
    else:
        show_table(None, ("log", "id", "start", "stable end", "state", "outbox"), [_row(one) for one in found])


@recording.command(short_help="Let a stopped recording continue.")
@click.argument("address")
@click.argument("name", metavar="LOG|ID")
@click.option(
    "--leader-epoch",
    type=click.IntRange(0),
    required=True,
    help="The new leader epoch; it has to be higher than every epoch in the log.",
)
@tls_options
def extend(address: str, name: str, leader_epoch: int, tls: MutualTls | None) -> None:
    """Let a stopped recording continue at its end, under a higher leader epoch."""
    with client_of(address, tls) as client:
        end = client.extend(recording_of(name), leader_epoch)
    click.echo(f"{name} continues at offset {end}, under leader epoch {leader_epoch}")


@recording.command(short_help="Cut a recording at an offset.")
@click.argument("address")
@click.argument("name", metavar="LOG|ID")
@click.option(
    "--at",
    "offset",
    type=click.IntRange(0),
    required=True,
    help="Cut at the start of the batch that holds this offset: this batch and all after it are removed.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@tls_options
def truncate(address: str, name: str, offset: int, yes: bool, tls: MutualTls | None) -> None:  # noqa: FBT001
    """Cut a recording at the batch that holds an offset. Replays that read above it are ended first. Refused while a
    leader writes the recording.
    """
    _confirm(yes, f"Cut {name} at offset {offset}?")
    with client_of(address, tls) as client:
        end = client.truncate(recording_of(name), offset)
    click.echo(f"{name} ends at offset {end}")


@recording.command(short_help="Remove old segments of a recording.")
@click.argument("address")
@click.argument("name", metavar="LOG|ID")
@click.option(
    "--before",
    "offset",
    type=click.IntRange(0),
    required=True,
    help="Remove the segments that lie wholly below this offset.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@tls_options
def purge(address: str, name: str, offset: int, yes: bool, tls: MutualTls | None) -> None:  # noqa: FBT001
    """Remove the whole segments of a recording below an offset, up to its leader's log start at most."""
    _confirm(yes, f"Remove the segments of {name} below offset {offset}?")
    with client_of(address, tls) as client:
        start = client.purge(recording_of(name), offset)
    click.echo(f"{name} begins at offset {start}")


@recording.command(short_help="Delete a recording and its files.")
@click.argument("address")
@click.argument("name", metavar="LOG|ID")
@click.option("--force", is_flag=True, help="Delete it although replays of it run; they are ended.  [default: refuse]")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@tls_options
def delete(address: str, name: str, force: bool, yes: bool, tls: MutualTls | None) -> None:  # noqa: FBT001
    """Delete a recording and its files. Its id is never used again."""
    _confirm(yes, f"Delete {name} and its files?")
    with client_of(address, tls) as client:
        freed = client.delete(recording_of(name), force=force).wait()
    click.echo(f"{name} is deleted, {freed:,} bytes were freed")


def _confirm(is_sure: bool, question: str) -> None:  # noqa: FBT001 - the option's value
    if not is_sure:
        click.confirm(question, abort=True, err=True)


def _row(one: RecordingInfo) -> tuple[str, ...]:
    recording_id = "" if one.recording_id is None else str(one.recording_id)
    ends = (count(one.start_offset), count(one.stable_offset))
    outbox = "" if one.outbox_id is None else str(one.outbox_id)
    state = "live" if one.is_live else "stopped"
    if one.damaged_from is not None:
        state += f", damaged from {count(one.damaged_from)} on"
    return (one.name, recording_id, *ends, state, outbox)


def _as_dict(one: RecordingInfo) -> dict[str, object]:
    return {
        "recording_id": one.recording_id,
        "name": one.name,
        "log_id": None if one.log_id is None else str(one.log_id),
        "outbox_id": None if one.outbox_id is None else str(one.outbox_id),
        "start_offset": one.start_offset,
        "stable_offset": one.stable_offset,
        "end_offset": one.end_offset,
        "is_live": one.is_live,
        "state": one.state.name,
        "damaged_from": one.damaged_from,
    }
