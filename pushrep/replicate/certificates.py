"""Mutual TLS by paths of PEM files, for both sides of a connection.

    PushSettings(tls=mutual_tls(cert="billing.pem", key="billing.key", ca="ca.pem"))            who pushes
    NodeSettings(tls=mutual_tls(cert="node.pem", key="node.key", ca="ca.pem", is_server=True))  who listens

Each side shows its certificate and takes only one that `ca` signed; a client also wants the replica's host name in it.
"""

import ssl
from pathlib import Path

from pushrep.errors import BadArgument


def mutual_tls(*, cert: Path | str, key: Path | str, ca: Path | str, is_server: bool = False) -> ssl.SSLContext:
    """What both sides need. Raises BadArgument, which names the file that can't be used and why."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    for argument, path in (("cert", cert), ("key", key), ("ca", ca)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise BadArgument(argument, f"{path} can't be read: {error.strerror or error}") from error
    try:
        context.load_verify_locations(ca)
    except (ssl.SSLError, ValueError) as error:
        raise BadArgument("ca", f"{ca} holds no certificate in PEM: {_reason(error)}") from error
    try:
        context.load_cert_chain(cert, key, password=_refuse_password)
    except (ssl.SSLError, ValueError) as error:
        raise BadArgument("cert", f"{cert} and the key {key} can't be used together: {_reason(error)}") from error
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _refuse_password() -> str:
    raise ValueError("the key is protected by a password; give one without")  # else OpenSSL asks at the terminal


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error).replace("_", " ").lower()
