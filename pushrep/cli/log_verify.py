"""`pushrep log verify`: reads every byte of a log and reports damage; it can compare the log with another copy."""

from pathlib import Path

import click

from pushrep.cli.common import show_json
from pushrep.cli.log_names import any_log_argument, directory_argument, log_paths
from pushrep.cli.progress import adding, progress
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import BadArgument
from pushrep.log.directory_files import list_segments, read_partition_metadata, shown_below, slot_directories
from pushrep.log.verify import BATCH_KINDS, Finding, FindingKind, VerifyReport, bytes_to_verify, verify_log
from pushrep.replay import ReplayClient
from pushrep.replay.client import compare_copies, why_not_held
from pushrep.replicate.election_state import find_election_state
from pushrep.status.table import size


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
        click.echo(f"{log}: the same as at {where}: {what}")
    else:
        click.echo(f"{log}: DIFFERS from {where} from offset {found.differs_at} on; below it the same: {what}")
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
    FindingKind.EPOCH: "pushrep log repair",
    FindingKind.JOINT: "restore the file, or pushrep log repair",
    FindingKind.END: "pushrep log repair",
    FindingKind.SEAL: "pushrep log repair",
    FindingKind.HOLE: "consume the topic from a broker",
    FindingKind.INDEX: "pushrep log repair",
    FindingKind.FILE: "pushrep log repair, or restore the file from a copy",
}
assert _REMEDIES.keys() == set(FindingKind), "each kind of finding has its remedy"


@click.command(short_help="Read every byte and report damage.")
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
        if as_json:
            show_json(report.as_dict() | ({"members": members} if members else {}))
        else:
            _print_report(report)
            for one in members:
                verdict = "holds it" if one["why_not"] is None else f"does not hold it: {one['why_not']}"
                click.echo(f"  [{one['start']}, {one['end']}): member {one['member']}, {one['address']}, {verdict}")
        if against is not None:
            whole = verify_against(log, against) and whole
    if not whole:
        click.get_current_context().exit(1)


def _print_report(report: VerifyReport) -> None:
    speed = f", {size(int(report.bytes_read / report.seconds))}/s" if report.seconds else ""
    beside = f", beside the writer, pid {report.writer_pid}" if report.writer_pid is not None else ""
    verdict = f"whole: offsets [{report.log_start_offset}, {report.verified_to})"
    if not report.is_whole:
        verdict = f"DAMAGED ({len(report.findings)}): whole below offset {report.verified_to}"
    click.echo(
        f"{report.log}: {verdict}, {report.records:,} records in {report.batches:,} batches and "
        f"{report.segments} segments, {size(report.bytes_read)}{speed}{beside}"
    )
    print_findings(report)


def print_findings(report: VerifyReport) -> None:
    """A line for each damage, and one for a torn tail."""
    for finding in report.findings:
        click.echo(f"  {finding.kind.value}: {place(finding)}: {finding.reason} -> {_REMEDIES[finding.kind]}")
    if report.torn is not None:
        click.echo(
            f"  torn tail, above the last flush; the next open cuts it off: {place(report.torn)}: {report.torn.reason}"
        )


def place(finding: Finding) -> str:
    """File, byte and offset of a finding; it may lack byte and offset."""
    parts = [finding.file]
    if finding.position is not None:
        parts.append(f"byte {finding.position}")
    if finding.offset is not None:
        parts.append(f"offset {finding.offset}")
    return " ".join(parts)
