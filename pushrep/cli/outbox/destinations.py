"""`pushrep outbox skip`, `repartition`, `drop-destination`: on the directory, or asked of the open outbox."""

from pathlib import Path
from typing import Any

import click

from pushrep.cli.log.showing import show_json
from pushrep.outbox.control import NobodyAnswers, ask
from pushrep.outbox.destinations import drop_destination, repartition, skip_record

_DIRECTORY = click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
_TOPIC = click.option("--topic", help="Which Kafka topic, where the outbox has shipped to several.")
_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object.")


@click.command()
@click.argument("offset", type=click.IntRange(0))
@click.option("--directory", type=click.Path(path_type=Path, file_okay=False), default=".", show_default=True)
@click.option("--partition", type=click.IntRange(0), default=0, show_default=True, help="The log's partition.")
@click.option("--reason", required=True, help="Why it is given up; kept with the record's offset.")
@_TOPIC
@_JSON
def skip(  # noqa: PLR0913, PLR0917 - one parameter an option
    offset: int, directory: Path, partition: int, reason: str, topic: str | None, as_json: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    """Never ship the record at OFFSET, which the topic does not take; those behind it go on.

    \b
      pushrep outbox skip 1042 --directory outbox --partition 3 --reason "12 MB, the topic takes 1 MB"

    Readers of the topic see a gap there. The record stays in the log.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    arguments: dict[str, Any] = {"partition": partition, "offset": offset, "reason": reason}
    try:
        ask(directory, "skip", arguments | ({} if topic is None else {"topic": topic}))
    except NobodyAnswers:
        skip_record(directory, partition, offset, reason, topic=topic)
    if as_json:
        show_json(arguments)
    else:
        click.echo(f"offset {offset:,} of partition {partition} will not be shipped: {reason}")


@click.command("repartition")
@_DIRECTORY
@_TOPIC
@_JSON
def repartition_command(directory: Path, topic: str | None, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Let what is appended from now on go to all partitions that the topic has at the next start.

    Nobody may have the outbox in DIRECTORY open: it goes on under a new PID, which begins with its next start. What is
    in the log and not shipped yet goes to the partitions that were used so far. A service that appends with the
    metadata of its own sources has to take new PIDs for them, too.
    """
    try:
        ask(directory, "repartition")  # a service that has it open says why not
    except NobodyAnswers:
        identity = repartition(directory, topic=topic)
    if as_json:
        show_json({"pid": identity.pid, "pid_epoch": identity.pid_epoch})
    else:
        click.echo(f"the next start goes on as PID {identity.pid}, epoch {identity.pid_epoch}, with all partitions")


@click.command("drop-destination")
@_DIRECTORY
@click.argument("topic")
def drop(directory: Path, topic: str) -> None:
    """Keep nothing in the logs of DIRECTORY for TOPIC any more, and forget how far it is.

    Shipped to again, it gets everything from the logs' start. A service that has the outbox open lets go of it at once;
    one that ships to it now refuses.
    """
    try:
        ask(directory, "drop-destination", {"topic": topic})
    except NobodyAnswers:
        drop_destination(directory, topic)
    click.echo(f"nothing is kept for topic {topic} any more")
