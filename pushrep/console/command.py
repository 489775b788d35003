"""`pushrep console`: serves the web pages until Ctrl-C or SIGTERM."""

from pathlib import Path

import click

from filtering.extras import needed_by
from pushrep.cli.common import stopped_by_signal
from pushrep.cli.options import ADDRESS, PEM, tls_options
from pushrep.cli.startpoint_options import store_or, with_place
from pushrep.replicate.certificates import MutualTls
from pushrep.replicate.sockets import Address
from pushrep.status.terminal import say

with needed_by("pushrep console"):
    from pushrep.console.access import ConsoleAccess, kept_password
    from pushrep.console.watch import PlaceWatch
    from pushrep.console.web import ConsoleServer, ConsoleSettings


@click.command("console", short_help="Serve web pages of outboxes and nodes.")
@click.argument("places", nargs=-1, metavar="[DIRECTORY|HOST:PORT]...")
@click.option(
    "--listen",
    type=ADDRESS,
    metavar="HOST:PORT",
    default="127.0.0.1:8090",
    show_default=True,
    help="The address to serve the pages at. Port 0: the system chooses a port. Off loopback it needs --password-file, "
    "--listen-cert and --listen-key.",
)
@click.option(
    "--password-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file with the password that each request has to carry. If it is not there, the console makes it.",
)
@click.option("--listen-cert", type=PEM, help="A PEM file: the console's certificate, for HTTPS.")
@click.option("--listen-key", type=PEM, help="A PEM file: the private key of --listen-cert.")
@click.option(
    "--marks", multiple=True, metavar="PLACE",
    help="The --marks directory of a Spark job, or its database and table (sqlite:shop.db#orders), to show its filter. "
    "Repeat it for more.",
)  # fmt: skip
@with_place("DIRECTORY/startpoints of each outbox")
@tls_options
def console(  # noqa: PLR0913, PLR0917 - the options
    places: tuple[str, ...], listen: Address, password_file: Path | None, listen_cert: Path | None,
    listen_key: Path | None, marks: tuple[str, ...], store: str | None, tls: MutualTls | None,
) -> None:  # fmt: skip
    """Serve web pages that show outboxes and nodes: those in or below each DIRECTORY, and nodes at HOST:PORT.

    \b
      pushrep console outbox copies
      pushrep console /var/lib/pushrep 10.0.0.7:7400
      pushrep console --listen 0.0.0.0:8090 --password-file password --listen-cert web.pem --listen-key web.key

    Without an argument it shows the working directory and the directories below. Pages change nothing, and update
    themselves. New outboxes and nodes appear within ten seconds. The command prints one line when it listens.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    if (listen_cert is None) != (listen_key is None):
        raise click.UsageError("give both --listen-cert and --listen-key, or neither")
    if not listen.is_loopback and (password_file is None or listen_cert is None):
        raise click.UsageError(
            f"other machines reach {listen}: give --password-file, --listen-cert and --listen-key, or listen on "
            "127.0.0.1 and use an SSH tunnel"
        )
    password = None
    if password_file is not None:
        password, is_new = kept_password(password_file)
        if is_new:
            say(f"{password_file} has the console's password; any name goes with it", err=True)
    settings = ConsoleSettings(
        access=ConsoleAccess(listen=listen, password=password),
        startpoints=None if store is None else store_or(store, Path()),
        marks=marks,
        certificate=None if listen_cert is None or listen_key is None else (listen_cert, listen_key),
    )
    stop = stopped_by_signal()
    watch = PlaceWatch(places or (".",), tls)
    with ConsoleServer(watch, settings) as server:
        say(f"listening on {server.url}")
        stop.wait()
