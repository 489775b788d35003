"""`pushrep recording`: what a node keeps, and how to extend, truncate, purge or delete it."""

import json

import click

from pushrep.cli.replay import node_options, recording_of
from pushrep.replay import NodeAccess, RecordingInfo, ReplayClient

_ROW = "{:>6}  {:<32}  {:>12}  {:>12}  {:<8}  {}"


@click.group()
def recording() -> None:
    """The logs that a node keeps: list, extend, truncate, purge and delete them."""


@recording.command("list")
@click.argument("where", metavar="ADDRESS|DIRECTORY")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a recording.")
@node_options
def list_(where: str, as_json: bool, node: NodeAccess | None) -> None:  # noqa: FBT001 - click's
    """Every recording: its id, its log, its offsets, whether somebody writes it."""
    with ReplayClient(where, node=node) as client:
        found = client.recordings()
    if not as_json:
        click.echo(_ROW.format("id", "log", "start", "stable end", "state", "outbox"))
    for one in found:
        click.echo(json.dumps(_as_dict(one)) if as_json else _row(one))


@recording.command()
@click.argument("address")
@click.argument("name", metavar="TOPIC-N|ID")
@click.option("--leader-epoch", type=click.IntRange(0), required=True, help="Above every epoch that the log has seen.")
@node_options
def extend(address: str, name: str, leader_epoch: int, node: NodeAccess | None) -> None:
    """Continue a stopped recording at its end, under a higher leader epoch."""
    with ReplayClient(address, node=node) as client:
        end = client.extend(recording_of(name), leader_epoch)
    click.echo(f"{name} goes on at offset {end}, under leader epoch {leader_epoch}")


@recording.command()
@click.argument("address")
@click.argument("name", metavar="TOPIC-N|ID")
@click.option("--at", "offset", type=click.IntRange(0), required=True, help="Cut from this offset on.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@node_options
def truncate(address: str, name: str, offset: int, yes: bool, node: NodeAccess | None) -> None:  # noqa: FBT001
    """Cut a recording at the batch that holds an offset; replays above it end first."""
    _confirm(yes, f"Cut {name} at offset {offset}?")
    with ReplayClient(address, node=node) as client:
        end = client.truncate(recording_of(name), offset)
    click.echo(f"{name} ends at offset {end}")


@recording.command()
@click.argument("address")
@click.argument("name", metavar="TOPIC-N|ID")
@click.option("--before", "offset", type=click.IntRange(0), required=True, help="Whole segments below it go.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@node_options
def purge(address: str, name: str, offset: int, yes: bool, node: NodeAccess | None) -> None:  # noqa: FBT001
    """Remove the whole segments of a recording below an offset; none above its leader's log start."""
    _confirm(yes, f"Remove the segments of {name} below offset {offset}?")
    with ReplayClient(address, node=node) as client:
        start = client.purge(recording_of(name), offset)
    click.echo(f"{name} begins at offset {start}")


@recording.command()
@click.argument("address")
@click.argument("name", metavar="TOPIC-N|ID")
@click.option("--force", is_flag=True, help="Also while replays of it run; these end.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@node_options
def delete(address: str, name: str, force: bool, yes: bool, node: NodeAccess | None) -> None:  # noqa: FBT001
    """Delete a recording and its files; its id is never given again."""
    _confirm(yes, f"Delete {name} and its files?")
    with ReplayClient(address, node=node) as client:
        freed = client.delete(recording_of(name), force=force).wait()
    click.echo(f"{name} is deleted, {freed:,} bytes are free")


def _confirm(is_sure: bool, question: str) -> None:  # noqa: FBT001 - the option's value
    if not is_sure:
        click.confirm(question, abort=True, err=True)


def _row(one: RecordingInfo) -> str:
    state = "live" if one.is_live else "stopped"
    recording_id = "-" if one.recording_id is None else one.recording_id
    return _ROW.format(recording_id, one.name, one.start_offset, one.stable_offset, state, one.outbox_id or "-")


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
    }
