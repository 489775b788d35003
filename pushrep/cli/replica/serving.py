"""`pushrep replica serve`: a node until it is told to stop (Ctrl-C, SIGTERM)."""

import logging
import signal
import ssl
import threading
from pathlib import Path

import click

from pushrep.cli.replica.scraping import Certificates, metrics_of
from pushrep.errors import BadArgument
from pushrep.node import NodeSettings, ReplicaNode
from pushrep.outbox.letting_go import LetGoDoor
from pushrep.push.certificates import mutual_tls
from pushrep.push.sockets import Address

_PATH = click.Path(path_type=Path, dir_okay=False)


def _address(_context: click.Context, _parameter: click.Parameter, text: str) -> Address:
    try:
        return Address.parse(text)
    except BadArgument as error:
        raise click.BadParameter(error.why) from error


def _optional_address(context: click.Context, parameter: click.Parameter, text: str | None) -> Address | None:
    return None if text is None else _address(context, parameter, text)


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--listen",
    callback=_address,
    metavar="HOST:PORT",
    default="127.0.0.1:7400",
    show_default=True,
    help="Port 0 lets the system choose. An address that other machines reach wants --cert, or --plain.",
)
@click.option(
    "--allow",
    multiple=True,
    metavar="WHO",
    help='Who may create logs here: an outbox id, the name in a certificate, or "any". Can be given again.',
)
@click.option("--flush", is_flag=True, help="Answer after fsync always, not only when the leader asks for it.")
@click.option("--cert", type=_PATH, help="This node's certificate (PEM), with --key and --ca: mutual TLS.")
@click.option("--key", type=_PATH, help="Its private key (PEM).")
@click.option("--ca", type=_PATH, help="Who signs the certificates of leaders (PEM).")
@click.option("--plain", is_flag=True, help="Listen off loopback without TLS: anybody who reaches the port may write.")
@click.option("--max-connections", type=click.IntRange(1), default=1024, show_default=True)
@click.option(
    "--metrics",
    callback=_optional_address,
    metavar="HOST:PORT",
    help="Serve metrics for Prometheus there; with --cert by TLS, to who shows a certificate of --ca.",
)
@click.option("--verbose", "-v", is_flag=True, help="Say on standard error who comes and goes.")
def serve(  # noqa: PLR0913, PLR0917 - the options
    directory: Path,
    listen: Address,
    allow: tuple[str, ...],
    cert: Path | None,
    key: Path | None,
    ca: Path | None,
    max_connections: int,
    metrics: Address | None,
    *,
    flush: bool,
    plain: bool,
    verbose: bool,
) -> None:
    """Keep copies of other services' logs in DIRECTORY, until Ctrl-C or SIGTERM.

    \b
      pushrep replica serve copies --allow any --metrics 127.0.0.1:9400
      pushrep replica serve copies --listen 0.0.0.0:7400 --cert n.pem --key n.key --ca ca.pem --allow billing

    Prints one line when it listens. What a leader has pushed lies in DIRECTORY/<outbox id>/<topic>-<n>, in the leader's
    own bytes: every `pushrep log` and `pushrep read` command works on it.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s")
    tls = _server_tls(cert, key, ca)
    for address in (listen, metrics):
        if address is not None and not address.is_loopback and tls is None and not plain:
            raise click.UsageError(
                f"{address} is reached from other machines: give --cert, --key and --ca, or say --plain if that is "
                "meant"
            )
    settings = NodeSettings(
        address=listen,
        allow=frozenset(allow),
        flush=flush,
        tls=tls,
        plain_off_loopback=plain,
        connections_max=max_connections,
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    files = None if cert is None or key is None or ca is None else Certificates(cert, key, ca)
    with ReplicaNode(directory, settings) as node, LetGoDoor(node), metrics_of(node, metrics, files) as shown:
        click.echo(f"listening on {node.address}, replica epoch {node.replica_epoch}{shown}")
        stop.wait()


def _server_tls(cert: Path | None, key: Path | None, ca: Path | None) -> ssl.SSLContext | None:
    """Mutual TLS: clients show a certificate of `ca`, too."""
    given = [path for path in (cert, key, ca) if path is not None]
    if not given:
        return None
    if cert is None or key is None or ca is None:
        raise click.UsageError("give --cert, --key and --ca, all three or none")
    try:
        return mutual_tls(cert=cert, key=key, ca=ca, is_server=True)
    except BadArgument as error:
        raise click.UsageError(str(error)) from error
