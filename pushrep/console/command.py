"""`pushrep console`: the web pages, until it is stopped (Ctrl-C, SIGTERM)."""

import signal
import threading
from pathlib import Path

import click

from filtering.extras import needed_by
from pushrep.cli.replica.reaching import client_tls, tls_options
from pushrep.cli.replica.serving import address_option
from pushrep.push.sockets import Address

with needed_by("pushrep console"):
    from pushrep.console.records import read_schemas
    from pushrep.console.watch import PlaceWatch
    from pushrep.console.web import ConsoleServer


@click.command("console")
@click.argument("places", nargs=-1, metavar="[DIRECTORY|HOST:PORT]...")
@click.option(
    "--listen",
    callback=address_option,
    metavar="HOST:PORT",
    default="127.0.0.1:8090",
    show_default=True,
    help="Port 0 lets the system choose.",
)
@click.option(
    "--every", type=click.FloatRange(0.1), default=2.0, show_default=True, help="Seconds between two looks at each."
)
@click.option(
    "--avro-schema", "schemas", multiple=True, metavar="TOPIC=FILE", help="For values of Avro, to be shown; repeatable."
)
@tls_options
def console(  # noqa: PLR0913, PLR0917 - the options
    places: tuple[str, ...], listen: Address, every: float, schemas: tuple[str, ...], cert: Path | None,
    key: Path | None, ca: Path | None,
) -> None:  # fmt: skip
    """Show outboxes and nodes in a browser: those at or below each DIRECTORY, and those that answer at HOST:PORT.

    \b
      pushrep console outbox copies
      pushrep console /var/lib/pushrep 10.0.0.7:7400 --listen 127.0.0.1:8090

    Without a place it looks at and below the present directory. Pages are read-only, and change as what they show does.
    What comes later is found within ten seconds. Prints one line when it listens.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    if not listen.is_loopback:
        raise click.UsageError(f"{listen} is reached from other machines: listen on 127.0.0.1 and use a tunnel")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    watch = PlaceWatch(places or (".",), client_tls(cert, key, ca), every_s=every)
    with ConsoleServer(listen, watch, every_s=every, schemas=read_schemas(schemas)) as server:
        click.echo(f"listening on {server.url}")
        stop.wait()
