"""`pushrep promote`: makes a replica the leader of its outbox. pushrep.outbox.promotion does the work."""

from pathlib import Path

import click

from pushrep.cli.options import tls_options
from pushrep.election.candidate import LEADER_ALIVE_MS
from pushrep.election.errors import TooFewMembers, label
from pushrep.outbox.promotion import Promotion, promote
from pushrep.replicate.certificates import MutualTls
from pushrep.replicate.settings import PushSettings


@click.command("promote", short_help="Make a replica the leader.")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option(
    "--catch-up",
    is_flag=True,
    help="If another member holds more records, fetch these first.  [default: refuse, and name that member]",
)
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Lead although too few members answer, or although the log here is damaged and no other is left. Acknowledged "
    "records may be lost.",
)
@click.option(
    "--lost",
    type=click.IntRange(0, 255),
    multiple=True,
    metavar="INDEX",
    help="With --accept-loss: the directory of this member is destroyed; remove it from the list. Repeat it for more.",
)
@click.option(
    "--new",
    multiple=True,
    metavar="HOST:PORT",
    help="With --accept-loss: add this node to the list of members; it is sent all records. Repeat it for more.",
)
@click.option("--depose", is_flag=True, help="Replace the leader although it may be alive.  [default: refuse then]")
@click.option(
    "--leader-alive-ms",
    type=click.IntRange(1),
    default=LEADER_ALIVE_MS,
    show_default=True,
    help="Milliseconds: a leader that members had contact with within this time counts as one that may be alive.",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    help="Seconds to wait for the answers of the other members.",
)
@tls_options
def promote_command(  # noqa: PLR0913, PLR0917 - the options
    directory: Path,
    timeout_s: float,
    tls: MutualTls | None,
    lost: tuple[int, ...],
    new: tuple[str, ...],
    leader_alive_ms: int,
    *,
    depose: bool,
    catch_up: bool,
    accept_loss: bool,
) -> None:
    """Make the replica in DIRECTORY the leader of all partitions of its outbox, when the leader is lost.

    \b
      pushrep promote copies/7b0d3c1e-6f1a-4d2e-9a55-0c6a3f1be2aa
      pushrep promote copies/7b0d3c1e-6f1a-4d2e-9a55-0c6a3f1be2aa --catch-up

    DIRECTORY is <data>/<outbox id> of a node. A running node releases the directory. So many other members have to
    answer that no record acknowledged with ALL is lost. If members had contact with the leader within
    --leader-alive-ms, the command refuses without --depose.

    Afterwards open the service's Outbox on DIRECTORY, with the replicas that the command prints. The old leader is
    fenced; `pushrep replica adopt` moves its directory under a node, where it follows the new leader.

    If members are destroyed, give --accept-loss with --lost for each of them, and --new for each node in their place;
    then the outbox continues with acks ALL (docs/replication.md). Records that other members hold beyond this replica
    are kept aside in their directories when they connect to the new leader, and they get its records.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    try:
        done = promote(
            directory,
            catch_up=catch_up,
            accept_loss=accept_loss,
            lost=lost,
            new=new,
            depose=depose,
            leader_alive_ms=leader_alive_ms,
            push=PushSettings(tls=tls),
            timeout_s=timeout_s,
        )
    except TooFewMembers as error:
        gone = sorted({*lost, *error.silent})
        known = " ".join([*(f"--lost {index}" for index in gone), *["--new HOST:PORT"] * len(gone)])
        raise click.ClickException(
            f"{error}. Nothing was changed. If their directories are destroyed: pushrep promote {directory} "
            f"--accept-loss {known}"
        ) from error
    _print_promotion(directory, done)


def _print_promotion(directory: Path, done: Promotion) -> None:
    grant, granted = done.grant, done.granted
    click.echo(f"member {grant.leader} leads outbox {grant.outbox_id} ({grant.topic}) under epoch {grant.epoch}")
    for partition, log in sorted(done.logs.items()):
        click.echo(
            f"  {grant.topic}-{partition}: high watermark {log.high_watermark}, log end {log.log.log_end_offset}, "
            f"epoch {log.granted.epoch}"
        )
    if grant.accepted_loss:
        click.echo(f"accepted loss: without {grant.accepted_loss}")
        click.echo(
            f"generation {label(grant.generation)} begins: records that other members hold beyond it are kept aside "
            "when they connect to this leader"
        )
    if granted.unreached:
        click.echo(
            f"members {list(granted.unreached)} did not answer and are not fenced: records that they accept from the "
            "old leader until they get this grant are kept aside, too"
        )
    for damaged in granted.damaged:
        click.echo(f"damaged, and no other member sent what is missing: {damaged}")
    if not granted.is_read:
        click.echo("not every sealed segment was checked for damage: the outbox checks the rest while it is open")
    listed = ", ".join(f'"{address}"' for address in done.replicas)
    click.echo(f"open the service's Outbox on {directory} with replicas=[{listed}]")
