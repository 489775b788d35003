"""`pushrep log ls` and `describe`: what is there, read beside a running writer."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from pushrep.cli.common import count, show_json, show_table, size
from pushrep.env import REAL_FILESYSTEM
from pushrep.log.directory_files import read_leader_epochs, read_partition_metadata
from pushrep.log.errors import CorruptPartitionMetadata
from pushrep.log.inspection import (
    LogSummary,
    leftovers,
    logs_at,
    read_state,
    segment_facts,
    summarize,
)
from pushrep.log.slots import shown_below
from pushrep.outbox import outbox_of_log

_COLUMNS = ("log", "start", "end", "flushed", "HWM", "epoch", "segments", "size", "writer", "closed clean", "known by")


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object a log.")
def ls(directory: Path, as_json: bool) -> None:  # noqa: FBT001 - click hands options over by position or name
    """List the logs in DIRECTORY: offsets, segments, bytes, leader epoch, who writes, and whether it was closed clean.
    Of a directory of worker slots the logs of every slot.

    "known by" says who told the offsets: the writer that runs, the clean marker, what a stopped writer published last,
    or the checkpoints of the last flush. HWM is the high watermark.
    """
    for_people = []
    for path in logs_at(directory):
        summary = replace(summarize(path), name=shown_below(directory, path))
        if as_json:
            show_json(asdict(summary))
        else:
            for_people.append(_row(summary))
    if not as_json:
        show_table(None, _COLUMNS, for_people)


def _row(one: LogSummary) -> tuple[str, ...]:
    return (
        one.name,
        count(one.log_start_offset),
        count(one.log_end_offset),
        count(one.flushed_offset),
        count(one.high_watermark),
        str(one.leader_epoch),
        count(one.segments),
        size(one.size_bytes),
        "-" if one.writer_pid is None else f"pid {one.writer_pid}",
        "yes" if one.is_clean else "open" if one.writer_pid is not None else "NO",
        one.known_by,
    )


@click.command()
@click.argument("log", metavar="LOG|DIRECTORY", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="All of it as one JSON object, one a log.")
def describe(log: Path, as_json: bool) -> None:  # noqa: FBT001 - as above
    """Show one LOG: segments and indexes, leader epochs, checkpoints, clean marker, id, its outbox, what lies aside;
    of a directory, that of its worker slots, too, every log.

    Aside lies what recovery and repair kept: .cut (taken off the end), .corrupt (replaced), .stale and .tmp files.
    """
    for number, path in enumerate(logs_at(log)):
        facts = _facts(path) | {"log": shown_below(log, path)}
        if as_json:
            show_json(facts)
        else:
            click.echo("" if number else None, nl=bool(number))
            _describe(facts)


def _describe(facts: dict[str, Any]) -> None:
    for name in ("log", "log_id", "log_start_offset", "log_end_offset", "flushed_offset", "high_watermark"):
        click.echo(f"{name.replace('_', ' '):20} {'?' if facts[name] is None else facts[name]}")
    click.echo(f"{'known by':20} {facts['known_by']}")
    click.echo(f"{'writer':20} {'none' if facts['writer_pid'] is None else 'pid {}'.format(facts['writer_pid'])}")
    marker = facts["clean_marker"]
    listed = "not listed" if marker is None else ", ".join(f"{key} {value}" for key, value in marker.items())
    click.echo(f"{'clean marker':20} {listed}")
    click.echo("checkpoints")
    for name, offset in facts["checkpoints"].items():
        click.echo(f"{'- ' + name.replace('_', ' '):20} {'no checkpoint' if offset is None else offset}")
    epochs = facts["leader_epochs"]
    shown = "none kept" if epochs is None else ", ".join(f"{epoch} from {start}" for epoch, start in epochs)
    click.echo(f"{'leader epochs':20} {shown}")
    if (outbox := facts["outbox"]) is not None:
        click.echo(f"{'outbox':20} producer {outbox['producer']}, PID {outbox['pid']}, epoch {outbox['pid_epoch']}")
        if outbox["given_up_to"]:
            click.echo(f"{'given up to':20} {outbox['given_up_to']}")
    rows = [
        (f"{s['base_offset']:020d}", size(s["size_bytes"]), count(s["index_entries"]), count(s["time_index_entries"]))
        for s in facts["segments"]
    ]
    show_table(None, ("segment", "size", "index entries", "time index entries"), rows)
    if facts["leftovers"]:
        aside = [(one["name"], size(one["size_bytes"])) for one in facts["leftovers"]]
        show_table("aside", ("file", "size"), aside)


def _facts(log: Path) -> dict[str, Any]:
    state, summary = read_state(log, REAL_FILESYSTEM), summarize(log)
    epochs = read_leader_epochs(log)
    try:
        log_id: Any = read_partition_metadata(log)
        metadata_fault = None
    except CorruptPartitionMetadata as error:
        log_id, metadata_fault = None, error.why
    return {
        "log": log.name,
        "log_id": None if log_id is None else str(log_id),
        "partition_metadata_fault": metadata_fault,
        "log_start_offset": summary.log_start_offset,
        "log_end_offset": summary.log_end_offset,
        "flushed_offset": summary.flushed_offset,
        "high_watermark": summary.high_watermark,
        "known_by": summary.known_by,
        "writer_pid": summary.writer_pid,
        "clean_marker": None if state.clean is None else asdict(state.clean),
        "checkpoints": {
            "recovery_point": state.recovery_point,
            "log_start_offset": state.log_start_offset,
            "high_watermark": state.high_watermark,
        },
        "outbox": outbox_of_log(log),
        "leader_epochs": None if epochs is None else [list(entry) for entry in epochs.entries],
        "segments": [asdict(segment) for segment in segment_facts(log)],
        "leftovers": [{"name": name, "size_bytes": size_bytes} for name, size_bytes in leftovers(log)],
    }
