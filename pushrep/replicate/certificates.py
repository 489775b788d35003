"""Mutual TLS by paths of PEM files, for both sides of a connection.

    PushSettings(tls=mutual_tls(cert="billing.pem", key="billing.key", ca="ca.pem"))                  the leader
    NodeSettings(certificates=CertificateFiles(Path("node.pem"), Path("node.key"), Path("ca.pem")))  the node

Each side shows its certificate and accepts only one that `ca` signed; a client also checks the replica's host name.

`Reloading`: certificates and allow list of a running node, read again when a file changes, or on SIGHUP.

files, every 5 s; `soon` ─▶ changed? ─▶ TLS context of new connections · new rules · replays without a right are ended └
                                 an error is logged, and the old one stays
"""

import logging
import re
import ssl
import threading
from calendar import timegm
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from time import strptime
from typing import NamedTuple

from pushrep.errors import BadArgument

_LOG = logging.getLogger("pushrep.node")
_LOOK_EVERY_S = 5.0
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class MutualTls(ssl.SSLContext):
    """A context of `mutual_tls`, which knows when its certificate expires."""

    expires_s: int | None = None
    """As `expires_s` below, of the files that it was made from; None where it can't be read."""
    files: tuple[Path | str, Path | str, Path | str]
    """cert, key, ca."""

    def reload(self) -> None:
        """Read the files again for new connections; open ones go on. A removed CA is trusted until a new context is
        made. Raises BadArgument; then nothing has changed.
        """
        cert, key, ca = self.files
        fresh = mutual_tls(cert=cert, key=key, ca=ca)
        self.load_verify_locations(ca)
        self.load_cert_chain(cert, key, password=_refuse_password)
        self.expires_s = fresh.expires_s


def mutual_tls(*, cert: Path | str, key: Path | str, ca: Path | str, is_server: bool = False) -> MutualTls:
    """A TLS context for either side. Raises BadArgument, which names the file that can't be used and why."""
    context = MutualTls(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
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
    context.verify_mode, context.files = ssl.CERT_REQUIRED, (cert, key, ca)
    with suppress(BadArgument):
        context.expires_s = expires_s(cert, ca)
    return context


def _refuse_password() -> str:
    raise ValueError("the key is protected by a password; give one without")  # else OpenSSL asks at the terminal


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error).replace("_", " ").lower()


def expires_s(cert: Path | str | None, ca: Path | str | None = None) -> int:
    """When a certificate expires, or its CA if that is earlier, Unix time. Raises BadArgument.

    cert: PEM; its first one counts, the others are its chain. ca: PEM; of several CAs the last to expire counts,
    because an old one may be beside its successor.
    """
    found = [] if cert is None else [_not_after_s(_certificates(cert)[0], cert)]
    if ca is not None:
        found.append(max(_not_after_s(one, ca) for one in _certificates(ca)))
    return min(found)


def _certificates(path: Path | str) -> list[str]:
    try:
        found = _PEM.findall(Path(path).read_text(encoding="ascii", errors="replace"))
    except OSError as error:
        raise BadArgument("cert", f"{path} can't be read: {error.strerror or error}") from error
    if not found:
        raise BadArgument("cert", f"{path} holds no certificate in PEM")
    return found


def _not_after_s(pem: str, path: Path | str) -> int:
    """Of X.509 in DER (RFC 5280, 4.1). Raises BadArgument.

    Certificate { tbsCertificate { [0] version?, serial, signature, issuer, validity { notBefore, notAfter } ... } }
    """
    try:
        parts = _children(_children(ssl.PEM_cert_to_DER_cert(pem))[0][1])
        parts = _children(parts[0][1]) if parts[0][0] == 0x30 else parts
        if parts[0][0] == 0xA0:
            parts = parts[1:]
        kind, value = _children(parts[3][1])[1]
        return timegm(strptime(value.decode("ascii"), "%y%m%d%H%M%SZ" if kind == 0x17 else "%Y%m%d%H%M%SZ"))
    except (ValueError, IndexError) as error:
        raise BadArgument("cert", f"{path}: when it expires can't be read: {error}") from error


def _children(data: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of each DER element in `data`. Raises ValueError, IndexError."""
    found, at = [], 0
    while at < len(data):
        tag, length, at = data[at], data[at + 1], at + 2
        if length & 0x80:
            count = length & 0x7F
            length, at = int.from_bytes(data[at : at + count]), at + count
        if at + length > len(data):
            raise ValueError("a part ends behind the whole")
        found.append((tag, data[at : at + length]))
        at += length
    return found


class CertificateFiles(NamedTuple):
    """PEM files: a node's certificate, its key, the authority for its peers'."""

    cert: Path
    key: Path
    ca: Path

    def context(self) -> ssl.SSLContext:
        """A server's context of mutual TLS, from the present files. Raises BadArgument."""
        return mutual_tls(cert=self.cert, key=self.key, ca=self.ca, is_server=True)

    def expires_s(self) -> int:
        """When the first of certificate and CA expires, Unix time. Raises BadArgument."""
        return expires_s(self.cert, self.ca)


class Reloading:
    """Watches `files` in a thread of its own until `stop`. reload: may raise BadArgument, which is logged."""

    def __init__(self, files: Iterable[Path], reload: Callable[[], None], look_every_s: float = _LOOK_EVERY_S) -> None:
        self._files, self._reload, self._look_every_s = tuple(files), reload, look_every_s
        self._seen = signatures(self._files)
        self._wake, self._is_stopping, self._is_asked = threading.Event(), False, False
        self._thread = threading.Thread(target=self._run, name="pushrep-node-reload", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def soon(self) -> None:
        """Reload in the thread, even if no file has changed; safe in a signal handler."""
        self._is_asked = True
        self._wake.set()

    def stop(self) -> None:
        """End the thread, if it was started."""
        self._is_stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.wait(self._look_every_s)
            self._wake.clear()
            if self._is_stopping:
                return
            found = signatures(self._files)
            if found == self._seen and not self._is_asked:
                continue
            self._is_asked, self._seen = False, found
            try:
                self._reload()
                _LOG.warning("read again: %s", ", ".join(map(str, self._files)) or "nothing, no files were given")
            except BadArgument as error:
                _LOG.error("what was read before stays in use: %s", error)
            except Exception:  # noqa: BLE001 - the node goes on with what it has
                _LOG.exception("what was read before stays in use")


def signatures(files: Iterable[Path]) -> list[tuple[int, int, int] | None]:
    """What changes with each file; None for one that is not there."""
    found: list[tuple[int, int, int] | None] = []
    for path in files:
        try:
            seen = path.stat()
        except OSError:
            found.append(None)
        else:
            found.append((seen.st_mtime_ns, seen.st_size, seen.st_ino))
    return found
