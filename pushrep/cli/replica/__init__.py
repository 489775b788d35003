"""`pushrep replica`: nodes that keep copies of other services' logs, and an outbox's members as operators see them."""

import click

from pushrep.cli.replica.members import add, adopt_command, moved_command, remove, replace
from pushrep.cli.replica.serving import serve, sessions, stop_session
from pushrep.cli.replica.status import status


@click.group()
def replica() -> None:
    """Keep copies of other services' logs, pushed here as they are written; see how far an outbox's copies are."""


replica.add_command(adopt_command)
replica.add_command(add)
replica.add_command(moved_command)
replica.add_command(remove)
replica.add_command(replace)
replica.add_command(serve)
replica.add_command(sessions)
replica.add_command(stop_session)
replica.add_command(status)
