"""`pushrep console`: the web pages, until it is stopped (Ctrl-C, SIGTERM)."""

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
        raise click.BadParameter(f"{name!r} is no name: printable, without a colon")
    click.echo(f"{name}:{hashed(click.prompt('Password', hide_input=True, confirmation_prompt=True, err=True))}")
    context.exit()


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
    "--every",
    type=click.FloatRange(0.1),
    default=2.0,
    show_default=True,
    help="Seconds between two refreshes of each place.",
)
@click.option(
    "--avro-schema", "schemas", multiple=True, metavar="TOPIC=FILE", help="For values of Avro, to be shown; repeatable."
)
@click.option(
    "--marks", multiple=True, metavar="DIRECTORY[=FILE]",
    help="A job's --marks, to be shown, and what it writes to --json FILE; repeatable.",
)  # fmt: skip
@click.option("--operate", is_flag=True, help="Startpoints may be set and cancelled; a line of JSON each on stderr.")
@click.option("--passwords", type=PEM, help="Who may log in: lines of --new-password. Wanted off loopback.")
@click.option("--listen-cert", type=PEM, help="The console's own certificate (PEM), for HTTPS. Wanted off loopback.")
@click.option("--listen-key", type=PEM, help="Its private key (PEM).")
@click.option(
    "--new-password", metavar="NAME", is_eager=True, expose_value=False, callback=_new_password,
    help="Ask for a password, print a line for --passwords, and end.",
)  # fmt: skip
@with_place("DIRECTORY/startpoints of each outbox")
@tls_options
def console(  # noqa: PLR0913, PLR0917 - the options
    places: tuple[str, ...], listen: Address, every: float, schemas: tuple[str, ...], marks: tuple[str, ...],
    operate: bool,  # noqa: FBT001
    passwords: Path | None, listen_cert: Path | None, listen_key: Path | None, store: str | None, cert: Path | None,
    key: Path | None, ca: Path | None,
) -> None:  # fmt: skip
    """Show outboxes and nodes in a browser: those in or below each DIRECTORY, and those at HOST:PORT.

    \b
      pushrep console outbox copies
      pushrep console /var/lib/pushrep 10.0.0.7:7400 --operate
      pushrep console --new-password ada >> passwords
      pushrep console --listen 0.0.0.0:8090 --passwords passwords --listen-cert web.pem --listen-key web.key

    Without a place it shows the working directory and those below. Pages update themselves, and are read-only without
    --operate. New outboxes and nodes appear within ten seconds. Prints one line when it listens.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    if (listen_cert is None) != (listen_key is None):
        raise click.UsageError("give --listen-cert and --listen-key, both or none")
    if not listen.is_loopback and (passwords is None or listen_cert is None):
        raise click.UsageError(
            f"{listen} is reached from other machines: give --passwords, --listen-cert and --listen-key, or listen on "
            "127.0.0.1 and use a tunnel"
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
