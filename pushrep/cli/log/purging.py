"""`pushrep log purge`: old segments go, asked of the open outbox or done in a directory that nobody has open."""

from pathlib import Path
from typing import Any

import click

from pushrep.cli.input_lines import parse_time_ms
from pushrep.cli.log.showing import show_json, size
from pushrep.log.inspection import logs_at
from pushrep.log.log_names import is_log_name, parse_log_name
from pushrep.log.slots import OUTBOX_FILE_NAME, outboxes_at, shown_below
from pushrep.outbox.control import NobodyAnswers, ask
from pushrep.outbox.purging import purge_closed


@click.command()
@click.argument("path", metavar="DIRECTORY|LOG", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option(
    "--before", metavar="TIME|OFFSET", required=True, help="What is older: an ISO 8601 time, or an offset of one LOG."
)
@click.option("--dry-run", is_flag=True, help="Say what would go; remove nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a log.")
def purge(path: Path, before: str, dry_run: bool, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Remove whole old segments of one LOG, or of all logs of a DIRECTORY (of worker slots: of every slot), beside the
    service that has it open, too.

    \b
      pushrep log purge outbox --before 2026-01-31 --dry-run
      pushrep log purge outbox --before 2026-01-31
      pushrep log purge outbox/orders-3 --before 120000

    A segment goes if all its records are older. Never the newest one, and never what a destination has not
    acknowledged, what a replica, a replay or the outbox's own books still need: the answer says who keeps the rest.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    path = path.absolute()
    places, topic, partition = outboxes_at(path), None, None
    if is_log_name(path.name) and not any((place / OUTBOX_FILE_NAME).exists() for place in places):
        places, (topic, partition) = [path.parent], parse_log_name(path.name)
    offset = int(before) if before.isdecimal() else None
    if offset is not None and partition is None:
        raise click.BadParameter("an offset is one of one LOG: DIRECTORY/<topic>-<n>", param_hint="--before")
    time_ms = _time_ms(before) if offset is None else None
    if partition is None:
        logs_at(path)  # raises NotALog where there is none
    wanted = {"before_offset": offset, "before_ms": time_ms, "partition": partition, "dry_run": dry_run}
    for place in places:
        try:
            found = ask(place, "purge", wanted)
        except NobodyAnswers:
            found = purge_closed(place, topic, partition, before_offset=offset, before_ms=time_ms, dry_run=dry_run)
        for one in found:
            one["log"] = shown_below(path, place / one["log"])
            if as_json:
                show_json(one | {"dry_run": dry_run})
            else:
                click.echo(_sentence(one, is_dry_run=dry_run))


def _sentence(one: dict[str, Any], *, is_dry_run: bool) -> str:
    count = len(one["segments"])
    what = f"{count} segment{'' if count == 1 else 's'} ({size(one['size_bytes'])})"
    verb = "would go" if is_dry_run else "went"
    text = f"{one['log']}: {what} {verb}, the log begins at offset {one['log_start_offset']:,}"
    if one["kept_by"] is not None:
        text += f"; the rest that is as old is needed from offset {one['needed_from']:,} on by {one['kept_by']}"
    return text


def _time_ms(text: str) -> int:
    try:
        return parse_time_ms(text)
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} is neither an offset nor an ISO 8601 time", param_hint="--before"
        ) from error
