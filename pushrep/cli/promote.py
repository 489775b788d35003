"""`pushrep promote`: a replica becomes the leader of its outbox. pushrep.outbox.promotion does the work."""

from pathlib import Path

import click

from pushrep.cli.options import client_tls, tls_options
from pushrep.election.candidate import LEADER_ALIVE_MS
from pushrep.election.errors import TooFewMembers, label
from pushrep.outbox.promotion import Promotion, promote
from pushrep.replicate.settings import PushSettings


@click.command("promote")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--catch-up", is_flag=True, help="Another member holds more: fetch that first, instead of refusing.")
@click.option("--accept-loss", is_flag=True, help="Lead although too few answer, or this damaged log is the last one.")
@click.option(
    "--lost",
    type=click.IntRange(0, 255),
    multiple=True,
    metavar="INDEX",
    help="With --accept-loss: this member's directory is destroyed; it leaves the list. Can be given again.",
)
@click.option(
    "--new",
    multiple=True,
    metavar="HOST:PORT",
    help="With --accept-loss: a node that comes into the list, to be given everything. Can be given again.",
)
@click.option("--depose", is_flag=True, help="Take the lead also from a leader that may be alive, instead of refusing.")
@click.option(
    "--leader-alive-ms",
    type=click.IntRange(1),
    default=LEADER_ALIVE_MS,
    show_default=True,
    help="A leader that members were in contact with so lately may be alive.",
)
@click.option("--member", type=click.IntRange(0, 255), help="Its index, if the node listens under another address.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    help="Seconds to wait for the others' answers.",
)
@tls_options
def promote_command(  # noqa: PLR0913, PLR0917 - the options
    directory: Path,
    member: int | None,
    timeout_s: float,
    cert: Path | None,
    key: Path | None,
    ca: Path | None,
    lost: tuple[int, ...],
    new: tuple[str, ...],
    leader_alive_ms: int,
    *,
    depose: bool,
    catch_up: bool,
    accept_loss: bool,
) -> None:
    """Make the replica in DIRECTORY the leader of its outbox, all partitions: when the leader is lost.

    \b
      pushrep promote copies/7b0d3c1e-6f1a-4d2e-9a55-0c6a3f1be2aa
      pushrep promote copies/7b0d3c1e-6f1a-4d2e-9a55-0c6a3f1be2aa --catch-up

    DIRECTORY is <data>/<outbox id> of a node, which may be running: it releases the directory. Enough other members
    have to answer, so that nothing acknowledged with ALL is lost. If members heard from the leader within the last
    seconds, it may be alive: then this refuses without --depose. Then open the service's Outbox on DIRECTORY, with
    the replicas that are printed. Name members that are lost for good with --lost, and nodes that take their places
    with --new; then the outbox continues with ALL (docs/replication.md). After --accept-loss, what other members hold
    beyond this replica is kept aside in their directories when they reach the new leader, and they get its records.
    The old leader is refused from now on; `pushrep replica adopt` puts its directory under a node, where it follows.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    push = PushSettings(tls=client_tls(cert, key, ca))
    try:
        done = promote(
            directory,
            catch_up=catch_up,
            accept_loss=accept_loss,
            member=member,
            lost=lost,
            new=new,
            depose=depose,
            leader_alive_ms=leader_alive_ms,
            push=push,
            timeout_s=timeout_s,
        )
    except TooFewMembers as error:
        gone = sorted({*lost, *error.silent})
        known = " ".join([*(f"--lost {index}" for index in gone), *["--new HOST:PORT"] * len(gone)])
        raise click.ClickException(
            f"{error}. Nothing was changed. If their directories are destroyed: pushrep promote {directory} "
            f"--accept-loss {known}"
        ) from error
    _print_promotion(done)


def _print_promotion(done: Promotion) -> None:
    grant = done.grant
    click.echo(f"member {grant.leader} leads outbox {grant.outbox_id} ({grant.topic}) under epoch {grant.epoch}")
    for one in done.partitions:
        click.echo(
            f"  {grant.topic}-{one.partition}: high watermark {one.high_watermark}, log end {one.log_end_offset}, "
            f"epoch {one.epoch}"
        )
    if done.accepted_loss:
        click.echo(f"accepted loss: without {done.accepted_loss}")
        click.echo(
            f"generation {label(grant.generation)} begins: what others hold beyond it is kept aside when they reach it"
        )
    if done.unreached:
        click.echo(
            f"members {list(done.unreached)} were not reached, so they are not fenced: what they take until they get "
            "this grant is kept aside, too"
        )
    for damaged in done.damaged:
        click.echo(f"damaged, and no other member gave what is missing: {damaged}")
    if not done.is_read:
        click.echo("not every sealed segment could be read for damage meanwhile: the outbox does it while it is open")
    listed = ", ".join(f'"{address}"' for address in done.replicas)
    click.echo(f"open the service's Outbox on {done.directory} with replicas=[{listed}]")
