"""`pushrep replica`: runs a node that keeps copies of other services' logs; shows and changes the members of an outbox.

`serve` runs a node, with health and metrics, until Ctrl-C or SIGTERM.
"""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from pushrep.cli.common import stopped_by_signal
from pushrep.cli.options import (
    ADDRESS,
    PEM,
    copy_check_option,
    node_log_options,
    pem_files,
    replay_options,
    setting_option,
)
from pushrep.cli.replica_members import replica
from pushrep.errors import BadArgument
from pushrep.health import HealthServer, HealthSettings
from pushrep.log import LogConfig
from pushrep.outbox.control import ask
from pushrep.outbox.directory_handover import HandoverSocket
from pushrep.replay.plan import ReplaySettings
from pushrep.replicate.access import AUDIT
from pushrep.replicate.certificates import CertificateFiles
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.sockets import Address
from pushrep.status.terminal import say


@contextmanager
def health_of(node: ReplicaNode, address: Address | None, files: CertificateFiles | None) -> Iterator[str]:
    """Serve health and metrics at `address`; yields the text for the line that `serve` prints. Raises BadArgument."""
    if address is None:
        yield ""
        return
    cert, key, ca = (None, None, None) if files is None else map(str, files)
    # plain=True: `serve` has checked already whether this address may be off loopback without TLS.
    settings = HealthSettings(listen=str(address), cert=cert, key=key, ca=ca, plain=True)
    with HealthServer(settings, node.status) as server:
        yield f", metrics at {server.url}/metrics"


@replica.command(short_help="Keep copies of other services' logs.")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--listen",
    type=ADDRESS,
    metavar="HOST:PORT",
    default="127.0.0.1:7400",
    show_default=True,
    help="The address for leaders and replays. Port 0: the system chooses a port. An address that other machines reach "
    "needs --cert, --key and --ca, or --plain.",
)
@click.option(
    "--allow",
    multiple=True,
    metavar="WHO",
    help="Allow an identity something. NAME=PATTERN:ROLE,ROLE gives a certificate's NAME these roles (create, lead, "
    "read, keep, list) on outboxes whose id or topic matches PATTERN, for example billing=orders-*:create,lead. NAME "
    'alone may create outboxes, and lead and list its own. An outbox id, or "any": everybody may do everything there. '
    "Repeat it for more.  [default: nothing is allowed]",
)
@click.option(
    "--allow-file",
    type=PEM,
    help="A file with more rules of --allow, one a line. It is read again when it changes, and on SIGHUP.",
)
@click.option(
    "--flush", is_flag=True, help="Fsync before each answer.  [default: only if the leader's request asks for it]"
)
@click.option("--cert", type=PEM, help="A PEM file: this node's certificate for mutual TLS. Needs --key and --ca.")
@click.option("--key", type=PEM, help="A PEM file: the private key of --cert.")
@click.option("--ca", type=PEM, help="A PEM file: the CA that signed the certificates of leaders and clients.")
@click.option(
    "--plain",
    is_flag=True,
    help="Listen off loopback without TLS: nobody is authenticated, every caller has the identity `anonymous`.",
)
@setting_option(NodeSettings, "connections_max", "--max-connections")
@click.option(
    "--metrics",
    type=ADDRESS,
    metavar="HOST:PORT",
    help="Serve /livez, /readyz and, with the extra metrics, /metrics at this address, with --cert over TLS; /metrics "
    "then needs a client certificate signed by --ca.  [default: serve nothing]",
)
@replay_options
@node_log_options
@copy_check_option
def serve(  # noqa: PLR0913, PLR0917 - the options
    directory: Path,
    listen: Address,
    allow: tuple[str, ...],
    allow_file: Path | None,
    cert: Path | None,
    key: Path | None,
    ca: Path | None,
    max_connections: int,
    metrics: Address | None,
    replay: ReplaySettings,
    log_config: LogConfig,
    *,
    flush: bool,
    plain: bool,
    copy_check: bool,
) -> None:
    """Keep copies of other services' logs in DIRECTORY, until Ctrl-C or SIGTERM.

    \b
      pushrep replica serve copies --allow any --metrics 127.0.0.1:9400
      pushrep replica serve copies --allow any --replay max_sessions=100 --log retention_ms=604800000
      pushrep replica serve copies --listen 0.0.0.0:7400 --cert n.pem --key n.key --ca ca.pem --allow billing

    The node prints one line when it listens. A leader's records are in DIRECTORY/<outbox id>/<topic>-<n>, byte for byte
    the same as in the leader's log: the commands of `pushrep log`, and `pushrep replay`, work there.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    AUDIT.setLevel(logging.INFO)
    files = pem_files(cert, key, ca)
    for address in (listen, metrics):
        if address is not None and not address.is_loopback and files is None and not plain:
            raise click.UsageError(
                f"other machines reach {address}: give --cert, --key and --ca, or --plain to listen without TLS"
            )
    try:
        if files is not None:
            files.context()  # a file that can't be used is wrong usage
        settings = NodeSettings(
            address=listen,
            allow=frozenset(allow),
            allow_file=allow_file,
            flush=flush,
            copy_check=copy_check,
            certificates=files,
            plain_off_loopback=plain,
            connections_max=max_connections,
            log_config=log_config,
            replay=replay,
        )
    except BadArgument as error:
        raise click.UsageError(str(error)) from error
    stop = stopped_by_signal()
    with ReplicaNode(directory, settings) as node, HandoverSocket(node), health_of(node, metrics, files) as shown:
        if files is not None or allow_file is not None:
            signal.signal(signal.SIGHUP, lambda *_: node.reloading.soon())
        say(f"listening on {node.address}, replica epoch {node.replica_epoch}{shown}")
        stop.wait()


_DATA = click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))


@replica.command("stop-session", short_help="End a replay session of a node.")
@_DATA
@click.argument("session", metavar="SESSION")
def stop_session(directory: Path, session: str) -> None:
    """End a replay SESSION of the node in DIRECTORY, by the number that `pushrep status DIRECTORY` shows.

    \b
      pushrep replica stop-session copies 0000000151a2b3c4

    The subscriber gets the end reason of the session. The node writes the call to its audit log.
    """  # noqa: D301 - as above
    try:
        number = int(session, 16)
    except ValueError as error:
        raise click.BadParameter(
            f"{session!r} is not a session's number: give 16 digits, 0 to f, as `pushrep status` shows them",
            param_hint="SESSION",
        ) from error
    is_stopped = ask(directory, "stop-replay", {"session_id": number})["stopped"]
    say(f"session {number:016x} {'was stopped' if is_stopped else 'is not running'}")
