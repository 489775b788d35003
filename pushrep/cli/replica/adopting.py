"""`pushrep replica adopt`: the directory of an old leader goes under a node. pushrep.outbox.adoption does the work."""

from pathlib import Path

import click

from pushrep.outbox.adoption import adopt


@click.command("adopt")
@click.argument("data", type=click.Path(path_type=Path, file_okay=False))
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
def adopt_command(data: Path, directory: Path) -> None:
    """Move the outbox in DIRECTORY under the node that keeps its copies in DATA; it follows the new leader from there.

    \b
      pushrep replica adopt copies outbox

    For a leader that was replaced while it was away (NotLeader). The node may be running. What only this directory held
    is cut aside, not deleted. Give its address to the service that leads now, as one more of `replicas`.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    click.echo(f"{directory} is {adopt(data, directory)} now")
