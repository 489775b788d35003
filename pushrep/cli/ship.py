"""`pushrep ship`: ships the records of an outbox to Kafka while no service has it open."""

import time
from pathlib import Path
from typing import Any

import click

from pushrep.cli.common import show_json
from pushrep.cli.options import client_properties_option, copy_check_option
from pushrep.cli.progress import progress
from pushrep.env import REAL_FILESYSTEM
from pushrep.kafka import KafkaDestination, ShippingTimeout
from pushrep.kafka.destination import destination_of
from pushrep.kafka.progress import ShippingProgress, read_progress
from pushrep.kafka.sink_state import DestinationLag
from pushrep.log import LogLocked
from pushrep.log.directory_files import outboxes_at
from pushrep.outbox import Acks, Outbox, OutboxConfig
from pushrep.outbox.identity import identity_in

_LOOK_S = 0.25


@click.command(short_help="Ship an outbox whose service does not run.")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--bootstrap-servers", required=True, metavar="HOST:PORT,...", help="Kafka brokers to connect to first.")
@click.option("--topic", help="The Kafka topic.  [default: the outbox's topic]")
@client_properties_option
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0),
    help="Seconds; afterwards exit with 1 if records are left.  [default: no limit]",
)
@copy_check_option
@click.option("--json", "as_json", is_flag=True, help="The result as one JSON object.")
def ship(  # noqa: PLR0913, PLR0917 - one parameter an option
    directory: Path, bootstrap_servers: str, topic: str | None, config: Path | None, timeout_s: float | None,
    copy_check: bool, as_json: bool,  # noqa: FBT001 - click's
) -> None:  # fmt: skip
    """Ship the records of the outbox in DIRECTORY to its Kafka topic, until brokers have acknowledged all.

    \b
      pushrep ship outbox --bootstrap-servers broker-1:9092,broker-2:9092
      pushrep ship outbox --bootstrap-servers broker:9093 --config client.properties --json

    For an outbox that no service has open. It continues where the last shipping ended. If it is interrupted, run it
    again. Exit code 1 if a broker refuses a record (the error has its offset), or after --timeout.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    destination = destination_of(bootstrap_servers, topic, config)
    places = outboxes_at(directory)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for place in places:
        try:
            found = _ship_one(place, destination, topic, deadline, copy_check=copy_check)
        except LogLocked as error:
            if place == directory:
                raise
            click.echo(f"{place.name}: skipped, process {error.pid} has it open", err=True)
            continue
        name = "" if place == directory else f"{place.name}: "
        if as_json:
            show_json(found if place == directory else {"slot": place.name, **found})
        else:
            click.echo(f"{name}{found['shipped']:,} records shipped to {found['topic']} in {found['seconds']:.1f} s")


def _ship_one(
    directory: Path,
    destination: KafkaDestination,
    topic: str | None,
    deadline: float | None,
    *,
    copy_check: bool,
) -> dict[str, Any]:
    identity = identity_in(REAL_FILESYSTEM, directory)
    known = read_progress(REAL_FILESYSTEM, directory).get(topic or identity.topic, ShippingProgress()).partitions
    started = time.monotonic()
    timeout_s = None if deadline is None else max(0.0, deadline - started)
    wait_s = destination.request_timeout_ms / 1000
    with Outbox.open(
        directory, identity.topic, identity.partitions, identity.producer,
        carrier=identity.carrier, kafka=destination,
        replicas=[address for _, address in identity.replicas], acks=Acks.LOCAL if identity.replicas else None,
        config=OutboxConfig(
            create=False, batch_bytes=1, copy_check=copy_check,
            open_timeout_s=wait_s if timeout_s is None else min(wait_s, timeout_s),
        ),
    ) as outbox:  # fmt: skip
        name = next(name for name in outbox.lag() if name.startswith("kafka:"))
        logs = [outbox.log(n) for n in range(identity.partitions)]
        shipped = sum(
            log.log_end_offset - (known[n].acknowledged if n in known else log.log_start_offset)
            for n, log in enumerate(logs)
        )
        _wait(outbox, name, shipped, timeout_s, deadline)
        ends = [log.log_end_offset for log in logs]
    seconds = round(time.monotonic() - started, 3)
    return {"topic": name.removeprefix("kafka:"), "shipped": shipped, "log_end_offsets": ends, "seconds": seconds}


def _wait(outbox: Outbox, name: str, records: int, timeout_s: float | None, deadline: float | None) -> None:
    """Wait until all is acknowledged, with a progress bar on a terminal. Raises ShippingTimeout after the deadline."""
    with progress("shipping", records, unit="records") as show:
        while True:
            left = _LOOK_S if deadline is None else max(0.0, min(_LOOK_S, deadline - time.monotonic()))
            try:
                outbox.wait_shipped(left)
            except ShippingTimeout as error:
                lag = _lag(outbox, name)
                show(records - lag.records, note=lag.trouble or "")
                if deadline is not None and time.monotonic() >= deadline:
                    raise ShippingTimeout(timeout_s or 0.0, error.records, error.reason) from None
                continue
            return


def _lag(outbox: Outbox, name: str) -> DestinationLag:
    lag = outbox.lag()[name]
    assert isinstance(lag, DestinationLag), "it is the topic's"
    return lag
