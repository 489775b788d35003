"""Certificates and allow list of a running node, read again when a file changes, or on SIGHUP.

files, every 5 s; `soon` ─▶ changed? ─▶ TLS context of new connections · new rules · replays without a right are ended └
                                 an error is logged, and the old one stays
"""

import logging
import ssl
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from pushrep.errors import BadArgument
from pushrep.replicate.certificates import expires_s, mutual_tls

_LOG = logging.getLogger("pushrep.node")
_LOOK_EVERY_S = 5.0
_WARN_BEFORE_S = 14 * 24 * 3600
_WARN_EVERY_S = 24 * 3600


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
    """Watches `files` in a thread of its own until `stop`. reload: may raise BadArgument, which is logged.

    expires_s: when a certificate expires, called after each look; None without one. now_s: the wall clock.
    """

    def __init__(
        self,
        files: Iterable[Path],
        reload: Callable[[], None],
        expires_s: Callable[[], int | None],
        now_s: Callable[[], float],
        look_every_s: float = _LOOK_EVERY_S,
    ) -> None:
        self._files, self._reload, self._expires_s, self._now_s = tuple(files), reload, expires_s, now_s
        self._look_every_s = look_every_s
        self._seen = signatures(self._files)
        self._wake, self._is_stopping, self._is_asked = threading.Event(), False, False
        self._warned_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="pushrep-node-reload", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def soon(self) -> None:
        """Reload in the thread, even if no file has changed; safe in a signal handler."""
        self._is_asked = True
        self._wake.set()

    def stop(self) -> None:
        """End the thread."""
        self._is_stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._warn()
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

    def _warn(self) -> None:
        """Warn once a day, from two weeks before a certificate expires."""
        expires_s, now_s = self._expires_s(), self._now_s()
        if expires_s is None or now_s < expires_s - _WARN_BEFORE_S:
            return
        if self._warned_s is None or now_s >= self._warned_s + _WARN_EVERY_S:
            self._warned_s = now_s
            left_s = expires_s - now_s
            state = f"expires in {left_s / 3600:.0f} h" if left_s > 0 else "has expired"
            _LOG.warning("this node's certificate, or its CA's, %s: put a new one in its place", state)


def signatures(files: Iterable[Path]) -> list[tuple[int, int, int] | None]:
    """What changes with each file; None for one that is not there."""
    return [_signature(path) for path in files]


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
