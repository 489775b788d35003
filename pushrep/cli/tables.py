"""`pushrep tables relay | status | adopt | retry | drop`: rows of a service's own transactions go into an outbox.

relay     until it is stopped: each committed row is appended once       pushrep/tables/relay.py
adopt     after a restore of the database or of the outbox               pushrep/tables/adopt.py
retry     parked rows wait again, as new rows       drop      they are deleted
"""

import logging
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pushrep.cli.common import log_at_least, stopped_by_signal
from pushrep.cli.options import client_properties_option, health_of, health_option, kafka_of, tls_options
from pushrep.env import REAL_FILESYSTEM
from pushrep.outbox import Outbox, OutboxConfig, read_identity
from pushrep.outbox.identity import identity_in
from pushrep.replicate.certificates import MutualTls
from pushrep.replicate.settings import PushSettings
from pushrep.status.table import many
from pushrep.status.table import table as table_of
from pushrep.status.terminal import say, show_result, width
from pushrep.status.text import relayed_text
from pushrep.status.value import plain
from pushrep.tables.adopt import adopt
from pushrep.tables.database import RelayDatabase, database_errors
from pushrep.tables.errors import DatabaseFailed
from pushrep.tables.relay import TableRelay

_DSN = click.argument("dsn")
_TABLE = click.option(
    "--table", default="pushrep_outbox", show_default=True, help="The name that the service gave its OutboxTable."
)
_TOPIC = click.option("--topic", required=True, help="The topic whose rows are meant.")
_OUTBOX = click.option(
    "--outbox",
    "directory",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="The directory of the topic's outbox.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object.")
_IDS = click.argument("ids", metavar="ID...", type=click.IntRange(1), nargs=-1, required=True)


@click.group()
def tables() -> None:
    """Bring rows of a service's own database transactions into an outbox, each once.

    DSN is SQLAlchemy's URL of the database: postgresql://USER@HOST/DATABASE or sqlite:///FILE. A password may stay in
    PGPASSWORD or ~/.pgpass.
    """


@tables.command(short_help="Relay committed rows until it is stopped.")
@_DSN
@_OUTBOX
@click.option("--topic", help="The topic, when the outbox is made; fixed.  [default: the outbox's]")
@click.option("--partitions", type=click.IntRange(1), default=1, show_default=True, help="The same.")
@click.option("--producer", default="pushrep-tables", show_default=True, help="The same: a part of the PID.")
@_TABLE
@click.option("--poll-ms", type=click.IntRange(1), default=100, show_default=True, help="How often it looks for rows.")
@click.option(
    "--on-refused",
    type=click.Choice(["stop", "park"]),
    default="stop",
    show_default=True,
    help="What happens to a row that the outbox refuses.",
)
@click.option("--bootstrap-servers", metavar="HOST:PORT,...", help="Ship to Kafka.  [default: ship nothing]")
@client_properties_option
@health_option
@tls_options
def relay(  # noqa: PLR0913, PLR0917 - one parameter an option
    dsn: str, directory: Path, topic: str | None, partitions: int, producer: str, table: str,
    poll_ms: int, on_refused: str, bootstrap_servers: str | None, config: Path | None, health: str | None,
    tls: MutualTls | None,
) -> None:  # fmt: skip
    """Append each committed row of a topic to its outbox, once, until SIGTERM or Ctrl-C.

    \b
      pushrep tables relay postgresql://shop@db/shop --outbox outbox/orders --topic orders --partitions 4

    Of an outbox and of a topic's rows there is one relay; a second one stops by name. Killed anywhere, the next start
    goes on. While the database or the outbox's disk is away, it tries again. It stops, with exit code 1, for a row that
    the outbox refuses (see --on-refused), and when the database or the outbox was restored: pushrep tables adopt --help
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    kafka = kafka_of(bootstrap_servers, config)
    stored = read_identity(REAL_FILESYSTEM, directory)
    if stored is None and topic is None:
        raise click.UsageError(f"there is no outbox in {directory} yet: give --topic, with --partitions and --producer")
    if stored is not None:
        topic, partitions, producer = topic or stored.topic, stored.partitions, stored.producer
    replicas = [] if stored is None else [address for _, address in stored.replicas]
    log_at_least(logging.INFO)
    stop = stopped_by_signal()
    with (
        database_errors(),
        Outbox.open(
            directory, str(topic), partitions, producer, replicas=replicas, kafka=kafka, carrier="header",
            health=health_of(health, tls), config=OutboxConfig(push=PushSettings(tls=tls)),
        ) as outbox,
    ):  # fmt: skip
        made = TableRelay(outbox, dsn, table=table, poll_ms=poll_ms, on_refused=on_refused)
        made.run(stop)
        say(f"{many(made.status().relayed, 'row')} relayed", err=True)


@tables.command(short_help="Show what waits, and how far the relay is.")
@_DSN
@_TOPIC
@_TABLE
@_JSON
@click.pass_context
def status(ctx: click.Context, dsn: str, topic: str, table: str, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Show how many rows wait, since when, which are parked, and what keeps deleted rows from vacuum. Exit code: 0
    nothing is parked, 1 rows are, 3 the database did not tell.
    """
    try:
        with closing(RelayDatabase(dsn, table, topic)) as database, database_errors():
            system_id = database.check()
            state, rows, parked = database.state(), database.rows(), database.parked()
    except DatabaseFailed as error:
        say(f"error: {error}", err=True)
        ctx.exit(3)
    shown: dict[str, Any] = {
        "topic": topic,
        "rows": plain(rows),
        "rows_relayed": 0 if state is None else state.relayed,
        "batch": None if state is None else f"{state.batch.epoch}-{state.batch.batch}",
        "is_open": state is not None and state.batch.is_open,
        "outbox_id": None if state is None else state.holder.outbox_id,
        "is_moved": state is not None and state.system_id != system_id,
        "parked": [{"id": row_id, "why": why} for row_id, why in parked],
    }
    lines = [f"topic {topic}: {relayed_text(shown['rows_relayed'], shown['rows'])}"]
    if state is None:
        lines.append("no relay of this topic ever ran: pushrep tables relay --help")
    if parked:
        lines += table_of(["parked row", "why"], [(str(row_id), why) for row_id, why in parked], width())
        lines.append("correct what refuses them, then: pushrep tables retry ID; or pushrep tables drop ID")
    show_result(shown, lines, as_json=as_json)
    ctx.exit(1 if parked or shown["is_moved"] else 0)


@tables.command("adopt", short_help="Go on after a restore of one of both.")
@_DSN
@_OUTBOX
@_TABLE
@click.option("--dry-run", is_flag=True, help="Only say what would be.")
@_JSON
def adopt_command(dsn: str, directory: Path, table: str, dry_run: bool, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Let this outbox be the one that the topic's rows go to, whatever the database says; stop every relay first.

    It says what the restore costs: events that may come twice, since their rows wait again (under new event-ids), and
    records that the outbox had and does not hold, whose rows are gone.
    """
    stored = identity_in(REAL_FILESYSTEM, directory)
    with (
        database_errors(),
        Outbox.open(
            directory, stored.topic, stored.partitions, stored.producer, carrier=stored.carrier,
            replicas=[address for _, address in stored.replicas], config=OutboxConfig(create=False),
        ) as outbox,
        closing(RelayDatabase(dsn, table, stored.topic)) as database,
    ):  # fmt: skip
        found = adopt(outbox, database, dry_run=dry_run)
    verb = "would be relayed" if dry_run else "will be relayed"
    lines = [
        *found.findings,
        *(
            f"gone: the records [{first:,}, {end:,}) of partition {partition}, and their rows"
            for partition, (first, end) in found.missing.items()
        ),
        *([f"may come twice, as their rows wait again: {', '.join(found.twice)}"] if found.twice else []),
        f"{many(found.waiting, 'row')} {verb} in epoch {found.epoch}",
    ]
    show_result(asdict(found), lines, as_json=as_json)


@tables.command(short_help="Let parked rows wait again.")
@_DSN
@_IDS
@_TOPIC
@_TABLE
@_JSON
def retry(dsn: str, ids: tuple[int, ...], topic: str, table: str, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Insert the parked rows of these IDs anew, behind all that wait; they get new IDs."""
    _end_parked(RelayDatabase(dsn, table, topic), ids, again=True, as_json=as_json)


@tables.command(short_help="Delete parked rows.")
@_DSN
@_IDS
@_TOPIC
@_TABLE
@_JSON
def drop(dsn: str, ids: tuple[int, ...], topic: str, table: str, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Delete the parked rows of these IDs for good: no reader ever gets their events."""
    _end_parked(RelayDatabase(dsn, table, topic), ids, again=False, as_json=as_json)


def _end_parked(database: RelayDatabase, ids: tuple[int, ...], *, again: bool, as_json: bool) -> None:
    with database_errors(), closing(database):
        database.check()
        found = database.end_parked(ids, again=again)
    text = f"{many(len(found), 'row')} {'wait again' if again else 'are dropped'}"
    show_result({"retried" if again else "dropped": found}, [text], as_json=as_json)
    if (missing := sorted(set(ids) - set(found))) and not as_json:
        say(f"not parked: {', '.join(map(str, missing))}", err=True)
