"""`pushrep console`: serves the web pages until Ctrl-C or SIGTERM."""

import signal
import threading
from functools import partial
from pathlib import Path

import click

from filtering.extras import needed_by
from pushrep.cli.options import PEM, client_tls, tls_options
from pushrep.cli.replica import address_option
from pushrep.cli.startpoint_options import store_or, with_place
from pushrep.replicate.sockets import Address

with needed_by("pushrep console"):
    from pushrep.console.access import hashed, read_passwords
    from pushrep.console.records import read_schemas
    from pushrep.console.watch import PlaceWatch
    from pushrep.console.web import ConsoleServer, ConsoleSettings


def _new_password(context: click.Context, _parameter: click.Parameter, name: str | None) -> None:
    if name is None:
        return
    if not name.isprintable() or ":" in name:
        raise click.BadParameter(f"{name!r} can't be a name: give printable characters without a colon")
    click.echo(f"{name}:{hashed(click.prompt('Password', hide_input=True, confirmation_prompt=True, err=True))}")
    context.exit()


@click.command("console", short_help="Serve web pages of outboxes and nodes.")
@click.argument("places", nargs=-1, metavar="[DIRECTORY|HOST:PORT]...")
@click.option(
    "--listen",
    callback=address_option,
    metavar="HOST:PORT",
    default="127.0.0.1:8090",
    show_default=True,
    help="The address to serve the pages at. Port 0: the system chooses a port. Off loopback it needs --passwords, "
    "--listen-cert and --listen-key.",
)
@click.option(
    "--every",
    type=click.FloatRange(0.1),
    default=2.0,
    show_default=True,
    help="Seconds between two readings of each place.",
)
@click.option(
    "--avro-schema",
    "schemas",
    multiple=True,
    metavar="TOPIC=FILE",
    help="The Avro schema (JSON) of TOPIC's values, to show them as Avro. Repeat it for more.",
)
@click.option(
    "--marks", multiple=True, metavar="PLACE",
    help="The --marks directory of a Spark job, or its database and table (sqlite:shop.db#orders), to show its filter. "
    "Repeat it for more.",
)  # fmt: skip
@click.option(
    "--operate",
    is_flag=True,
    help="Let users set and cancel startpoints; each change is also one JSON line on standard error.  [default: "
    "read-only]",
)
@click.option("--passwords", type=PEM, help="A file with the users that may log in, lines of --new-password.")
@click.option("--listen-cert", type=PEM, help="A PEM file: the console's certificate, for HTTPS.")
@click.option("--listen-key", type=PEM, help="A PEM file: the private key of --listen-cert.")
@click.option(
    "--new-password", metavar="NAME", is_eager=True, expose_value=False, callback=_new_password,
    help="Ask for a password, print the line for --passwords, and exit.",
)  # fmt: skip
@with_place("DIRECTORY/startpoints of each outbox")
@tls_options
def console(  # noqa: PLR0913, PLR0917 - the options
    places: tuple[str, ...], listen: Address, every: float, schemas: tuple[str, ...], marks: tuple[str, ...],
    operate: bool,  # noqa: FBT001
    passwords: Path | None, listen_cert: Path | None, listen_key: Path | None, store: str | None, cert: Path | None,
    key: Path | None, ca: Path | None,
) -> None:  # fmt: skip
    """Serve web pages that show outboxes and nodes: those in or below each DIRECTORY, and nodes at HOST:PORT.

    \b
      pushrep console outbox copies
      pushrep console /var/lib/pushrep 10.0.0.7:7400 --operate
      pushrep console --new-password ada >> passwords
      pushrep console --listen 0.0.0.0:8090 --passwords passwords --listen-cert web.pem --listen-key web.key

    Without an argument it shows the working directory and the directories below. Pages update themselves. New outboxes
    and nodes appear within ten seconds. The command prints one line when it listens.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    if (listen_cert is None) != (listen_key is None):
        raise click.UsageError("give both --listen-cert and --listen-key, or neither")
    if not listen.is_loopback and (passwords is None or listen_cert is None):
        raise click.UsageError(
            f"other machines reach {listen}: give --passwords, --listen-cert and --listen-key, or listen on 127.0.0.1 "
            f"and "
            "use an SSH tunnel"
        )
    settings = ConsoleSettings(
        every_s=every,
        schemas=read_schemas(schemas),
        startpoints=None if store is None else store_or(store, Path()),
        marks=marks,
        operate=operate,
        audit=partial(click.echo, err=True),
        passwords=None if passwords is None else read_passwords(passwords),
        certificate=None if listen_cert is None or listen_key is None else (listen_cert, listen_key),
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    watch = PlaceWatch(places or (".",), client_tls(cert, key, ca), every_s=every)
    with ConsoleServer(listen, watch, settings) as server:
        click.echo(f"listening on {server.url}")
        stop.wait()
