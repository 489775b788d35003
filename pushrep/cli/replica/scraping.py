"""`pushrep replica serve --metrics`: the page that Prometheus scrapes."""

from collections.abc import Iterator
from contextlib import contextmanager

import click

from pushrep.node import CantListen, ReplicaNode
from pushrep.node.reloading import CertificateFiles
from pushrep.push.sockets import Address


@contextmanager
def metrics_of(node: ReplicaNode, address: Address | None, files: CertificateFiles | None) -> Iterator[str]:
    """Serve them at `address`, by mutual TLS if there are certificates; what is to be said of it. Raises CantListen."""
    if address is None:
        yield ""
        return
    try:
        from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415 - an extra

        from pushrep.node.metrics import NodeCollector  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"--metrics needs the Python package {error.name!r}, which is not installed: install pushrep with the "
            "extra metrics"
        ) from error
    registry = CollectorRegistry()
    registry.register(NodeCollector(node))
    try:
        server, thread = start_http_server(
            address.port,
            address.host,
            registry,
            certfile=None if files is None else str(files.cert),
            keyfile=None if files is None else str(files.key),
            client_cafile=None if files is None else str(files.ca),
            client_auth_required=files is not None,
        )
    except OSError as error:
        raise CantListen(str(address), error.strerror or str(error)) from error
    try:
        where = Address(address.host, server.server_port)
        yield f", metrics at {'http' if files is None else 'https'}://{where}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
