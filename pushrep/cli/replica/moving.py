"""`pushrep replica moved`: a copy of a directory takes its original's place. pushrep.outbox.moving does the work."""

from pathlib import Path

import click

from pushrep.outbox.moving import moved


@click.command("moved")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
def moved_command(directory: Path) -> None:
    """Say that DIRECTORY was moved here, whole, and that its original is gone for good.

    \b
      pushrep replica moved copies/7b0d3c1e-6f1a-4d2e-9a55-0c6a3f1be2aa

    For the directory of an outbox, with or without replicas, or of one member below a node. Not for a restored backup:
    what the original got or promised after the backup was made is not in it.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    click.echo(f"{directory} is directory {moved(directory).directory_id.hex} from now on")
