"""`pushrep log`: commands for the files of a log. pushrep.log does the work.

ls, describe, dump, verify            read only; a writer may be running
repair, restore, truncate,            take the writer's lock; refused while a writer runs, with its process id
new-epoch
purge                                 the service that has the outbox open does it; else this process takes the lock
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import click

from pushrep.cli.common import show_rows
from pushrep.cli.log_dump import dump
from pushrep.cli.options import any_log_argument, directory_argument, log_argument, log_path, log_paths, time_ms_of
from pushrep.cli.progress import adding, progress
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import BadArgument
from pushrep.log import SegmentLog
from pushrep.log.directory_files import (
    list_segments,
    outboxes_at,
    parse_log_name,
    read_leader_epochs,
    read_partition_metadata,
    shown_below,
    slot_directories,
)
from pushrep.log.errors import BelowHighWatermark, CorruptPartitionMetadata
from pushrep.log.inspection import (
    LogSummary,
    checked_log,
    leftovers,
    logs_at,
    read_state,
    segment_facts,
    summarize,
)
from pushrep.log.repair import Repairer, RepairReport
from pushrep.log.repair import restore as restore_file
from pushrep.log.verify import BATCH_KINDS, Finding, FindingKind, VerifyReport, bytes_to_verify, verify_log
from pushrep.outbox import begin_pid_epoch, outbox_of_log
from pushrep.outbox.control import NobodyAnswers, ask
from pushrep.outbox.destinations import not_known_to_be_shipped, purge_closed
from pushrep.outbox.positions import POSITIONS_NAME
from pushrep.replay import ReplayClient
from pushrep.replay.client import compare_copies, why_not_held
from pushrep.replicate.election_state import find_election_state
from pushrep.status.table import count, size, table
from pushrep.status.terminal import say, show_result, width

_COLUMNS = ("log", "start", "end", "flushed", "HWM", "epoch", "segments", "size", "writer", "closed clean", "known by")


@click.group()
def log() -> None:
    """Show, check and repair the files of logs.

    \b
      pushrep log ls outbox
      pushrep log verify outbox orders-0

    LOG is the name of a log in DIRECTORY: orders-0, or slot-3/orders-0. Exit code 1: damage was found.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are


log.add_command(dump)


@log.command(short_help="List logs: offsets, size, writer.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object a log.")
def ls(directory: Path, as_json: bool) -> None:  # noqa: FBT001 - click hands options over by position or name
    """List the logs in DIRECTORY: offsets, segments, bytes, leader epoch, writer, and whether each was closed cleanly.
    For a directory of worker slots it lists the logs of every slot.

    "known by" is the source of the offsets: the running writer, the clean marker, the last state that a stopped writer
    published, or the checkpoints of the last flush. HWM is the high watermark.
    """
    found = (replace(summarize(path), name=shown_below(directory, path)) for path in logs_at(directory))
    show_rows(found, _COLUMNS, _row, asdict, as_json=as_json)


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


@log.command(short_help="Show a log's segments and checkpoints.")
@directory_argument
@any_log_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object a log.")
def describe(directory: Path, name: str | None, as_json: bool) -> None:  # noqa: FBT001 - as above
    """Show a LOG: segments and indexes, leader epochs, checkpoints, clean marker, id, its outbox, files kept aside.
    Without LOG it shows every log in DIRECTORY, and in its worker slots.

    Files kept aside by recovery and repair: .cut (bytes cut off the log's end), .corrupt (bytes that were replaced),
    .stale and .tmp.
    """
    for number, path in enumerate(log_paths(directory, name)):
        facts = _facts(path) | {"log": shown_below(directory, path)}
        show_result(facts, chain([""] if number else [], _described_lines(facts)), as_json=as_json)


def _described_lines(facts: dict[str, Any]) -> Iterator[str]:
    for name in ("log", "log_id", "log_start_offset", "log_end_offset", "flushed_offset", "high_watermark"):
        yield f"{name.replace('_', ' '):20} {'?' if facts[name] is None else facts[name]}"
    yield f"{'known by':20} {facts['known_by']}"
    yield f"{'writer':20} {'none' if facts['writer_pid'] is None else 'pid {}'.format(facts['writer_pid'])}"
    marker = facts["clean_marker"]
    listed = "not listed" if marker is None else ", ".join(f"{key} {value}" for key, value in marker.items())
    yield f"{'clean marker':20} {listed}"
    yield "checkpoints"
    for name, offset in facts["checkpoints"].items():
        yield f"{'- ' + name.replace('_', ' '):20} {'no checkpoint' if offset is None else offset}"
    epochs = facts["leader_epochs"]
    shown = "none kept" if epochs is None else ", ".join(f"{epoch} from {start}" for epoch, start in epochs)
    yield f"{'leader epochs':20} {shown}"
    if (outbox := facts["outbox"]) is not None:
        yield f"{'outbox':20} producer {outbox['producer']}, PID {outbox['pid']}, epoch {outbox['pid_epoch']}"
        if outbox["given_up_to"]:
            yield f"{'given up to':20} {outbox['given_up_to']}"
    rows = [
        (f"{s['base_offset']:020d}", size(s["size_bytes"]), count(s["index_entries"]), count(s["time_index_entries"]))
        for s in facts["segments"]
    ]
    yield from table(("segment", "size", "index entries", "time index entries"), rows, width())
    if facts["leftovers"]:
        aside = [(one["name"], size(one["size_bytes"])) for one in facts["leftovers"]]
        yield "aside"
        yield from table(("file", "size"), aside, width())


def _facts(log: Path) -> dict[str, Any]:
    state, summary = read_state(log, REAL_FILESYSTEM), summarize(log)
    epochs = read_leader_epochs(log)
    try:
        log_id: Any = read_partition_metadata(log)
        metadata_fault = None
    except CorruptPartitionMetadata as error:
        log_id, metadata_fault = None, error.why
    return {
        **asdict(summary),
        "log_id": None if log_id is None else str(log_id),
        "partition_metadata_fault": metadata_fault,
        "clean_marker": None if state.clean is None else asdict(state.clean),
        "checkpoints": {
            "recovery_point": state.recovery_point,
            "log_start_offset": state.log_start_offset,
            "high_watermark": state.high_watermark,
        },
        "outbox": outbox_of_log(log),
        "leader_epochs": None if epochs is None else [list(entry) for entry in epochs.entries],
        "segments": [asdict(segment) for segment in segment_facts(log)],
        "leftovers": [
            {"name": name, "size_bytes": size_bytes} for name, size_bytes in leftovers(log) if name != POSITIONS_NAME
        ],
    }


def verify_against(log: Path, where: str) -> bool:
    """Compare the log with its copy at `where` and print the result. Returns whether both hold the same batches.

    Raises ReplayRefused, NodeUnreachable.
    """
    other = Path(where) / log.parent.name if slot_directories(where) else where
    try:
        there = ReplayClient(other)
    except BadArgument as error:
        raise click.BadParameter(error.why, param_hint="--against") from error
    with ReplayClient(log.parent) as here, there:
        found = compare_copies(here, there, log.name)
    what = f"offsets [{found.start}, {found.end}), {found.batches:,} batches, {size(found.size_bytes)}"
    if found.is_same:
        say(f"{log}: the same as at {where}: {what}")
    else:
        say(f"{log}: DIFFERS from {where} from offset {found.differs_at} on; below it the same: {what}")
    return found.is_same


def members_that_hold(log: Path, report: VerifyReport) -> list[dict[str, int | str | None]]:
    """For each damaged range, whether each other member of the outbox holds it: `why_not` is None if it holds all of
    it.

    A range begins at the damage and ends with its segment. Empty for a log without other members.
    """
    _, state = find_election_state(log.parent, REAL_FILESYSTEM) or (None, None)
    damaged = sorted({one.offset for one in report.findings if one.kind in BATCH_KINDS and one.offset is not None})
    if state is None or state.grant is None or not damaged:
        return []
    bases, log_id = list_segments(REAL_FILESYSTEM, log), read_partition_metadata(log, REAL_FILESYSTEM)
    answers: list[dict[str, int | str | None]] = []
    for one in state.grant.members:
        if one.index == state.member or not one.address:
            continue
        with ReplayClient(one.address) as there:
            for start in damaged:
                end = min((base for base in bases if base > start), default=max(start, report.verified_to))
                why_not = why_not_held(there, log.name, log_id, start, end)
                answers.append(
                    {"member": one.index, "address": one.address, "start": start, "end": end, "why_not": why_not}
                )
    return answers


_REMEDIES = {
    FindingKind.DAMAGE: "pushrep log repair",
    FindingKind.JOINT: "restore the file, or pushrep log repair",
    FindingKind.END: "pushrep log repair",
    FindingKind.SEAL: "pushrep log repair",
    FindingKind.HOLE: "consume the topic from a broker",
    FindingKind.INDEX: "pushrep log repair",
    FindingKind.FILE: "pushrep log repair, or restore the file from a copy",
}
assert _REMEDIES.keys() == set(FindingKind), "each kind of finding has its remedy"


@log.command(short_help="Read every byte and report damage.")
@directory_argument
@any_log_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object a log.")
@click.option(
    "--against",
    metavar="ADDRESS|DIRECTORY",
    help="Compare each batch with this copy, too: HOST:PORT of a node, or the directory above the copy.",
)
def verify(directory: Path, name: str | None, as_json: bool, against: str | None) -> None:  # noqa: FBT001 - click's
    """Read every batch of a LOG, or of all logs in DIRECTORY (of worker slots: in every slot), and report damage: file,
    byte, offset, reason, remedy.

    The check covers lengths, CRCs, the order of offsets and epochs, the seals of rolled segments, the boundaries
    between segments, every index entry, and the small files beside them. A writer may be running: then the check covers
    the records that it had published when the check began. In an outbox with replicas the command asks each other
    member whether it holds the damaged range, up to the end of the segment; while the outbox is open, it repairs the
    range from such a member by itself. Exit code 1 if anything is damaged. A torn tail, which an unclean stop leaves
    and the next open cuts off, is reported and does not count as damage.
    """
    whole = True
    for log in log_paths(directory, name):
        shown = shown_below(directory, log)
        with progress(shown, bytes_to_verify(log)) as show:
            report = verify_log(log, on_bytes=adding(show))
        report.log = shown
        whole = whole and report.is_whole
        members = members_that_hold(log, report)
        result = report.as_dict() | ({"members": members} if members else {})
        show_result(result, _report_lines(report, members), as_json=as_json)
        if against is not None:
            whole = verify_against(log, against) and whole
    if not whole:
        click.get_current_context().exit(1)


def _report_lines(report: VerifyReport, members: list[dict[str, int | str | None]]) -> Iterator[str]:
    speed = f", {size(int(report.bytes_read / report.seconds))}/s" if report.seconds else ""
    beside = f", beside the writer, pid {report.writer_pid}" if report.writer_pid is not None else ""
    verdict = f"whole: offsets [{report.log_start_offset}, {report.verified_to})"
    if not report.is_whole:
        verdict = f"DAMAGED ({len(report.findings)}): whole below offset {report.verified_to}"
    yield (
        f"{report.log}: {verdict}, {report.records:,} records in {report.batches:,} batches and "
        f"{report.segments} segments, {size(report.bytes_read)}{speed}{beside}"
    )
    yield from _finding_lines(report)
    for one in members:
        verdict = "holds it" if one["why_not"] is None else f"does not hold it: {one['why_not']}"
        yield f"  [{one['start']}, {one['end']}): member {one['member']}, {one['address']}, {verdict}"


def _finding_lines(report: VerifyReport) -> Iterator[str]:
    """A line for each damage, and one for a torn tail."""
    for finding in report.findings:
        yield f"  {finding.kind.value}: {_place(finding)}: {finding.reason} -> {_REMEDIES[finding.kind]}"
    if report.torn is not None:
        yield (
            f"  torn tail, above the last flush; the next open cuts it off: {_place(report.torn)}: {report.torn.reason}"
        )


def _place(finding: Finding) -> str:
    """File, byte and offset of a finding; it may lack byte and offset."""
    parts = [finding.file]
    if finding.position is not None:
        parts.append(f"byte {finding.position}")
    if finding.offset is not None:
        parts.append(f"offset {finding.offset}")
    return " ".join(parts)


@log.command(short_help="Repair a damaged log, from a copy say.")
@directory_argument
@log_argument
@click.option(
    "--from-copy",
    "copy",
    type=click.Path(path_type=Path),
    help="Take the damaged range from this directory: another copy of the log.",
)
@click.option(
    "--cut-at",
    type=click.IntRange(0),
    metavar="OFFSET",
    help="Cut the log at the start of the batch that holds OFFSET: this batch and all after it are lost.",
)
@click.option(
    "--cut",
    "cut_name",
    metavar="NAME",
    help="Cut the log at the first damage: all after it is lost. NAME confirms it: the log's name, for example "
    "orders-0.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be done; change nothing.")
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object.")
def repair(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, name: str, copy: Path | None, cut_at: int | None, cut_name: str | None, dry_run: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    """Repair a damaged LOG that no process writes. Replaced bytes are kept in .corrupt files, cut bytes in .cut files.

    \b
      pushrep log repair out orders-0 --from-copy /backup/orders-0 --dry-run
      pushrep log repair out orders-0 --from-copy /backup/orders-0
      pushrep log repair out orders-0 --cut orders-0          all from the first damage on is lost

    \b
    Only the damaged range is taken from a copy, and only if offsets, epochs and CRCs match on both sides of it.
    Without an option only indexes and the list of leader epochs are rebuilt; no batch is changed.
    Exit code 1 if the log is still damaged afterwards.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    if sum(option is not None for option in (copy, cut_at, cut_name)) > 1:
        raise click.UsageError("give one of --from-copy, --cut-at and --cut")
    log = log_path(directory, name)
    if cut_name is not None and cut_name != log.name:
        raise click.BadParameter(f"{cut_name!r} is not this log's name: give {log.name}", param_hint="--cut")
    with progress("repairing"):
        report = Repairer(log).repair(copy=copy, cut_at=cut_at, cut=cut_name is not None, dry_run=dry_run)
    outbox = None if report.after is None else outbox_after_cut(checked_log(log), report.after.verified_to)
    lines = chain(_repair_lines(report), outbox_lines(checked_log(log), outbox))
    show_result(report.as_dict() | {"outbox": outbox}, lines, as_json=as_json)
    if not report.is_whole and not dry_run:
        click.get_current_context().exit(1)


def _repair_lines(report: RepairReport) -> Iterator[str]:
    would = "would be " if report.dry_run else ""
    for one in report.spliced:
        yield (
            f"{report.log}: offsets [{one['first_offset']}, {one['end_offset']}) {would}taken from the copy into "
            f"{one['segment']} at byte {one['position']} ({one['reason']})"
        )
    if report.cut is not None:
        taken = f", {size(report.cut.size_bytes)} cut off" if not report.dry_run else ""
        yield (
            f"{report.log}: {would}cut at offset {report.cut.offset}, byte {report.cut.position} of "
            f"{report.cut.segment}{taken}"
        )
    for name in report.rebuilt:
        yield f"{report.log}: {name} {would}rebuilt"
    kept = [*report.kept_as, *(report.cut.kept_as if report.cut is not None else ())]
    if kept:
        yield f"{report.log}: kept aside: {', '.join(kept)}"
    if not (report.spliced or report.cut or report.rebuilt):
        yield f"{report.log}: nothing {'would be' if report.dry_run else 'was'} changed"
    if report.after is not None:
        verdict = "whole" if report.after.is_whole else "still DAMAGED"
        start, end = report.after.log_start_offset, report.after.verified_to
        yield f"{report.log}: {verdict}: offsets [{start}, {end})"
        yield from _finding_lines(report.after)


@log.command(short_help="Cut a log at an offset.")
@directory_argument
@log_argument
@click.argument("offset", type=click.IntRange(0))
@click.option("--force", is_flag=True, help="Cut below the high watermark, too: acknowledged records are removed.")
@click.option("--no-keep", is_flag=True, help="Erase what is cut, and keep none of it in .cut files: for a full disk.")
@click.option("--json", "as_json", is_flag=True, help="The new end as a JSON object.")
def truncate(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, name: str, offset: int, force: bool, no_keep: bool, as_json: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    """Cut LOG at the start of the batch that holds OFFSET: this batch and all after it are removed.

    The removed bytes are kept in .cut files, which pushrep log restore puts back.
    """
    path = checked_log(log_path(directory, name))
    with SegmentLog.open(path) as opened:
        before, aside = opened.log_end_offset, set(leftovers(path))
        try:
            end = opened.truncate_to(offset, force=force, keep=not no_keep)
        except BelowHighWatermark as refused:
            raise click.ClickException(
                f"offset {offset} is below the high watermark {refused.high_watermark}: acknowledged records would be "
                "removed. Add --force to remove them"
            ) from refused
    kept = sorted(name for name, _ in set(leftovers(path)) - aside)
    outbox = outbox_after_cut(path, end)
    ends = {"log_end_offset_before": before, "log_end_offset": end}
    lines = [
        f"{path.name}: the log ended at {before:,}, now it ends at {end:,}",
        *([f"{path.name}: kept aside: {', '.join(kept)}"] if kept else []),
        *outbox_lines(path, outbox),
    ]
    show_result({"log": path.name, **ends, "kept_as": kept, "outbox": outbox}, lines, as_json=as_json)


@log.command(short_help="Append the batches of a file kept aside.")
@directory_argument
@log_argument
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--dry-run", is_flag=True, help="Print which batches would be appended; change nothing.")
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object.")
def restore(directory: Path, name: str, file: Path, dry_run: bool, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Append the whole batches of FILE, a .cut or .corrupt file of LOG, to the log's end.

    \b
      pushrep log restore out orders-0 out/orders-0/00000000000000001000.log.4096.cut --dry-run

    This works only if the first offset of FILE is the log's end: a log that has grown since has other records at those
    offsets. FILE is not changed. Do not use it if replicas hold records from after the cut. Exit code 1 if FILE does
    not fit.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    report = restore_file(log_path(directory, name), file, dry_run=dry_run)
    lines = [f"{report.log}: {report.file} does not fit: {report.refused}"]
    if report.refused is None:
        would = "would put back" if dry_run else "put back"
        span = f"[{report.start_offset}, {report.end_offset})"
        lines = [f"{report.log}: {would} {report.records:,} records, offsets {span}"]
        lines += [f"  the rest of the file was not used: {report.stopped}"] if report.stopped is not None else []
    show_result(report.as_dict(), lines, as_json=as_json)
    if report.refused is not None:
        click.get_current_context().exit(1)


def outbox_after_cut(log: Path, log_end_offset: int) -> dict[str, Any] | None:
    """The outbox of the log, with the PID epoch of its next open (`next_pid_epoch`); None for a log of no outbox.

    It is the stored epoch, or the next one if readers may have seen offsets that the log will assign again. Another
    partition may require the next one, too.
    """
    outbox: dict[str, Any] | None = outbox_of_log(log)
    if outbox is not None:
        outbox["next_pid_epoch"] = outbox["pid_epoch"] + (log_end_offset < outbox["given_up_to"])
    return outbox


def outbox_lines(log: Path, outbox: dict[str, Any] | None) -> Iterator[str]:
    """One line if the outbox's next open begins another PID epoch."""
    if outbox is not None and outbox["next_pid_epoch"] != outbox["pid_epoch"]:
        yield (
            f"{log.name}: readers may have seen offsets up to {outbox['given_up_to']:,}: the outbox's next open begins "
            f"PID epoch {outbox['next_pid_epoch']}, so that their filters let the new records at these offsets through"
        )


@log.command("new-epoch", short_help="Give a restored outbox another PID.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Producer, PID and epoch as a JSON object.")
def new_epoch(directory: Path, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Give the outbox in DIRECTORY another PID. Run it once after you restored DIRECTORY, or its outbox.json, from an
    older copy, and before anything is appended.

    Readers may have seen offsets that were written after the copy was made. With the old PID their replay filters
    would drop the new records at those offsets as replays. After a cut or a lost directory the outbox takes a new PID
    by itself.
    """
    identity = begin_pid_epoch(directory)
    unshipped = not_known_to_be_shipped(directory)
    fields = {"producer": identity.producer, "pid": identity.pid, "pid_epoch": identity.pid_epoch}
    lines = [
        f"{directory}: PID epoch {identity.pid_epoch} begins, the PID is now {identity.pid}",
        *(
            f"offsets [{one.start}, {one.end}) of partition {one.partition} keep their old PID, and topic {one.topic} "
            "has not acknowledged them. If the topic holds other records in their place, they can't be shipped: then "
            f"run pushrep outbox rebase {directory}"
            for one in unshipped
        ),
    ]
    show_result({**fields, "unshipped": [one._asdict() for one in unshipped]}, lines, as_json=as_json)


@log.command(short_help="Remove whole old segments.")
@directory_argument
@any_log_argument
@click.option(
    "--before",
    metavar="TIME|OFFSET",
    required=True,
    help="Remove segments whose records are all older: an ISO 8601 time (UTC if it names no zone), or an offset of "
    "LOG.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be removed; remove nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a log.")
def purge(directory: Path, name: str | None, before: str, dry_run: bool, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Remove whole old segments of one LOG, or of all logs in DIRECTORY (of worker slots: in every slot). A service
    may have it open.

    \b
      pushrep log purge outbox --before 2026-01-31 --dry-run
      pushrep log purge outbox --before 2026-01-31
      pushrep log purge outbox orders-3 --before 120000

    A segment is removed if all its records are older. The newest segment always stays, and so do records that a
    destination has not acknowledged, or that a replica, a replay or the outbox itself still needs: the output names the
    reader that needs them.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    places, topic, partition = outboxes_at(directory), None, None
    if name is not None:
        log = log_path(directory, name)
        places, (topic, partition) = [log.parent], parse_log_name(log.name)
    offset = int(before) if before.isdecimal() else None
    if offset is not None and partition is None:
        raise click.BadParameter(
            "an offset needs one LOG: give DIRECTORY and its name, orders-0 say, or a time", param_hint="--before"
        )
    time_ms = time_ms_of("--before", before) if offset is None else None
    if partition is None:
        log_paths(directory, None)  # raises NotALog if there is none
    wanted = {"before_offset": offset, "before_ms": time_ms, "partition": partition, "dry_run": dry_run}
    for place in places:
        try:
            found = ask(place, "purge", wanted)
        except NobodyAnswers:
            found = purge_closed(place, topic, partition, before_offset=offset, before_ms=time_ms, dry_run=dry_run)
        for one in found:
            one["log"] = shown_below(directory, place / one["log"])
            show_result(one | {"dry_run": dry_run}, [_described(one, is_dry_run=dry_run)], as_json=as_json)


def _described(one: dict[str, Any], *, is_dry_run: bool) -> str:
    count = len(one["segments"])
    what = f"{count} segment{'' if count == 1 else 's'} ({size(one['size_bytes'])})"
    removed, begins = ("would be removed", "would begin") if is_dry_run else ("removed", "begins")
    text = f"{one['log']}: {what} {removed}, the log {begins} at offset {one['log_start_offset']:,}"
    if one["kept_by"] is not None:
        text += f"; {one['kept_by']} needs the old records from offset {one['needed_from']:,} on"
    return text
