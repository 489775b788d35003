"""`pushrep log verify LOG --against ADDRESS`: two copies of a log, compared over the network."""

from pathlib import Path

import click

from pushrep.cli.log.showing import size
from pushrep.errors import BadArgument
from pushrep.log.slots import slot_directories
from pushrep.replay import ReplayClient
from pushrep.replay.comparing import compare_copies


def verify_against(log: Path, where: str) -> bool:
    """Compare and tell; whether both hold the same. Raises ReplayRefused, NodeUnreachable."""
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
        click.echo(f"{log}: DIFFERS from {where} from offset {found.differs_at} on; the same before: {what}")
    return found.is_same
