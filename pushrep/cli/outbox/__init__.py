"""`pushrep outbox`: what an operator does to an outbox's destinations."""

import click

from pushrep.cli.outbox.destinations import drop, rebase_command, repartition_command, skip


@click.group()
def outbox() -> None:
    """Change where an outbox's records go: skip one, use more partitions, drop a topic, free it from a copy."""


outbox.add_command(skip)
outbox.add_command(repartition_command)
outbox.add_command(rebase_command)
outbox.add_command(drop)
