"""`pushrep replica`: nodes that keep copies of other services' logs. pushrep.node does the work."""

import click

from pushrep.cli.replica.serving import serve


@click.group()
def replica() -> None:
    """Keep copies of other services' logs, pushed here as they are written."""


replica.add_command(serve)
