"""Health and metrics over HTTP: a server for services, nodes and jobs.

    GET /livez      200 while the process answers
    GET /readyz     200 where requests may be sent, else 503; {"ready": bool, "problems": [Problem.as_dict(), ...]}
    GET /leader     200 where the leader is, else 503; {"leads": bool, "member": the leader's, "address": ...}
    GET /metrics    for Prometheus; 404 without a registry (the extra `metrics`)
    HEAD            as GET, without the body
    another path    404
    another Host    421, without TLS: than that of `listen`, a loopback name or address; off loopback every address

With certificates the server uses TLS. A client without a certificate may read /livez and /readyz, but gets problems
without `subject`, `why` and `command`, which name topics and members, and /leader without `member` and `address`;
/metrics answers it with 403. A certificate that `ca` did not sign fails the handshake. Changed certificate files are
used from the next connection on.

A connection has one request, of at most 16 KiB, and ten seconds in all; with a certificate, which counts as a role in
the budget (replicate/budget.py), 30 seconds behind the handshake.
"""

import json
import logging
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BufferedIOBase
from pathlib import Path
from socket import AF_INET, AF_INET6, socket
from typing import TYPE_CHECKING, Any

from filtering.closing import ClosedAtExit
from pushrep.env.network import BACKLOG
from pushrep.errors import BadArgument, PushrepError
from pushrep.replicate.access import UNPROVEN
from pushrep.replicate.budget import REQUEST_S, Admitted, ConnectionBudget
from pushrep.replicate.certificates import CertificateFiles, signatures
from pushrep.replicate.sockets import Address
from pushrep.settings import check
from pushrep.status import PlaceStatus, Problem, Status

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

_LOG = logging.getLogger("pushrep.health")
_CONNECTIONS_MAX = 256
_HEAD_BYTES_MAX = 16 << 10
_STOP_LOOK_S = 0.1
_JSON, _TEXT = "application/json", "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """The address and the certificates of a HealthServer. Raises BadArgument.

    listen: HOST:PORT; with port 0 the system chooses one. Off loopback, give cert, key and ca, or `plain`.
    cert: the server's certificate (PEM). With cert, key and ca the server uses TLS.
    key: the server's private key (PEM).
    ca: the CA that signs the certificates of clients that may read /metrics (PEM).
    plain: whether to listen off loopback without TLS: anybody who can connect may read all answers.
    """

    listen: str
    cert: str | None = None
    key: str | None = None
    ca: str | None = None
    plain: bool = False

    def __post_init__(self) -> None:
        check(self, "health.")
        try:
            address = Address.parse(self.listen)
        except BadArgument as error:
            raise BadArgument("health.listen", f"{self.listen!r} is not host:port") from error
        files = (self.cert, self.key, self.ca)
        if any(files) and not all(files):
            raise BadArgument("health.cert", "give cert, key and ca, all three or none")
        if not address.is_loopback and not self.cert and not self.plain:
            raise BadArgument(
                "health.listen",
                f"{address} is reached from other machines: give cert, key and ca, or plain=True if that is meant",
            )

    def expires_s(self) -> int | None:
        """When the certificate of the next connection or its CA expires (Unix time); None: no readable certificate."""
        with suppress(BadArgument):
            return None if self.files is None else self.files.expires_s()
        return None

    @property
    def files(self) -> CertificateFiles | None:
        """The three files; None without them."""
        return CertificateFiles(*map(Path, (self.cert, self.key, self.ca))) if self.cert else None  # type: ignore[arg-type]


class HealthServer(ClosedAtExit):
    """The HTTP server, in threads of its own until `close`; see the module's docstring.

    status: called for each /readyz and /metrics, in any thread. registry: the metrics of /metrics, if not those of the
    status. is_shared: whether other processes of this user may listen at the address, too. Raises BadArgument if the
    address or a certificate file can't be used.
    """

    def __init__(
        self,
        settings: HealthSettings,
        status: Callable[[], Status],
        registry: "CollectorRegistry | None" = None,
        *,
        is_shared: bool = False,
    ) -> None:
        listen = Address.parse(settings.listen)
        if registry is None:
            with suppress(ImportError):  # probes need no extra
                from prometheus_client import CollectorRegistry  # noqa: PLC0415 - an extra

                from pushrep.status.metrics import StatusCollector  # noqa: PLC0415

                registry = CollectorRegistry()
                registry.register(StatusCollector(status))
        try:
            self._server = _Server(listen, settings, status, registry, is_shared=is_shared)
        except OSError as error:
            raise BadArgument("health.listen", f"can't listen on {listen}: {error.strerror or error}") from error
        self.budget = self._server.budget
        """What its peers hold."""
        self.address = Address(listen.host, self._server.server_address[1])
        """The address, with the port that the system chose."""
        self.url = f"{'https' if settings.cert else 'http'}://{self.address}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_STOP_LOOK_S,), name="pushrep-health", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port. A second call does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self.budget.stop()
        self._thread.join()


class _Server(HTTPServer):
    request_queue_size = BACKLOG

    def __init__(
        self,
        listen: Address,
        settings: HealthSettings,
        status: Callable[[], Status],
        registry: "CollectorRegistry | None",
        *,
        is_shared: bool,
    ) -> None:
        self.address_family = AF_INET6 if ":" in listen.host else AF_INET
        self.allow_reuse_port = is_shared
        self.listen, self.status, self.registry = listen, status, registry
        files = settings.files
        self._certificates = None if files is None else _Certificates(files)
        super().__init__((listen.host, listen.port), _Handler)
        self.budget = ConnectionBudget("health", _LOG, connections_max=_CONNECTIONS_MAX)

    @property
    def has_tls(self) -> bool:
        return self._certificates is not None

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, so that a slow peer delays no other."""
        one = self.budget.admit(str(client_address[0]), request)
        try:
            threading.Thread(
                target=self._serve, args=(one, client_address), name="pushrep-health-peer", daemon=True
            ).start()
        except RuntimeError:  # the system has no thread left
            self.shutdown_request(request)
            one.leave()

    def _serve(self, one: Admitted, client_address: Any) -> None:
        try:
            if self._certificates is not None and one.secure(self._certificates.context()) not in UNPROVEN:
                if not one.promote():
                    return
                one.expect(REQUEST_S)
            self.finish_request(one, client_address)  # type: ignore[arg-type]  # _Handler takes it
        except Exception:  # noqa: BLE001 - as socketserver does
            self.handle_error(one.socket, client_address)  # type: ignore[arg-type]
        finally:
            self.shutdown_request(one.socket)  # type: ignore[arg-type]
            one.leave()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:  # noqa: ARG002
        """Log a failed connection at DEBUG: the peer hung up, or uses no TLS."""
        _LOG.debug("a connection of %s ended", client_address, exc_info=True)


class _Certificates:
    """The TLS context of the present files; while they can't be used, of the last files that could."""

    def __init__(self, files: CertificateFiles) -> None:
        self._files, self._lock = files, threading.Lock()
        self._seen, self._context = signatures(files), self._read()

    def context(self) -> ssl.SSLContext:
        with self._lock:
            if (found := signatures(self._files)) != self._seen:
                self._seen = found
                try:
                    self._context = self._read()
                except BadArgument as error:
                    _LOG.warning("certificates of health and metrics can't be read again: %s", error)
            return self._context

    def _read(self) -> ssl.SSLContext:
        context = self._files.context()
        context.verify_mode = ssl.CERT_OPTIONAL
        return context


class _Head:
    """Of a request, whose lines are read."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file, self._left = file, _HEAD_BYTES_MAX
        self.close = file.close

    def readline(self, size: int) -> bytes:
        line = self._file.readline(min(size, self._left))
        self._left -= len(line)
        if not self._left:
            raise ConnectionError(f"a request of more than {_HEAD_BYTES_MAX} bytes")
        return line


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "pushrep", ""

    def setup(self) -> None:
        """The request is what the budget admitted."""
        self.request = self.request.socket
        super().setup()
        self.rfile = _Head(self.rfile)  # type: ignore[assignment]

    def do_GET(self) -> None:
        """See the module's docstring."""
        if not self._is_own_host():
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, _TEXT, b"this server has another name: use its address\n")
            return
        match self.path.partition("?")[0]:
            case "/livez":
                self._answer(HTTPStatus.OK, _TEXT, b"ok\n")
            case "/readyz":
                self._ready()
            case "/leader":
                self._leader()
            case "/metrics":
                self._metrics()
            case _:
                self._answer(HTTPStatus.NOT_FOUND, _TEXT, b"look at /livez, /readyz, /leader, /metrics\n")

    def do_HEAD(self) -> None:
        """As GET, without the body."""
        self.do_GET()

    def _status(self) -> Status:
        try:
            return self.server.status()
        except (PushrepError, OSError) as error:  # the outbox or node is being closed
            return PlaceStatus(found=(Problem("not_answering", "process", str(error)),))

    def _leader(self) -> None:
        leads = self._status().leads
        told = {"leads": leads.is_here, "member": leads.member, "address": leads.address}
        self._answer_json(told if self._is_known() else {"leads": leads.is_here}, is_ok=leads.is_here)

    def _ready(self) -> None:
        status = self._status()
        ready, shown = status.is_ready, status.as_dict()["problems"]
        if not self._is_known():
            shown = [{name: one[name] for name in ("problem", "since_ms", "blocks")} for one in shown]
        self._answer_json({"ready": ready, "problems": shown}, is_ok=ready)

    def _answer_json(self, told: dict[str, Any], *, is_ok: bool) -> None:
        body = json.dumps(told).encode() + b"\n"
        self._answer(HTTPStatus.OK if is_ok else HTTPStatus.SERVICE_UNAVAILABLE, _JSON, body)

    def _metrics(self) -> None:
        if self.server.registry is None:
            self._answer(HTTPStatus.NOT_FOUND, _TEXT, b"no metrics: install pushrep with the extra metrics\n")
        elif not self._is_known():
            self._answer(HTTPStatus.FORBIDDEN, _TEXT, b"metrics need a client certificate\n")
        else:
            from prometheus_client.exposition import choose_encoder  # noqa: PLC0415 - an extra

            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, kind, encode(self.server.registry))

    def _is_own_host(self) -> bool:
        """Over TLS the certificate says whose name it is. A probe may send no Host; a browser always does."""
        return self.server.has_tls or all(map(self.server.listen.is_own_host, self.headers.get_all("Host", ())))

    def _is_known(self) -> bool:
        if not self.server.has_tls:
            return True
        assert isinstance(self.connection, ssl.SSLSocket), "made in finish_request"
        return bool(self.connection.getpeercert())

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Log each request at DEBUG: a probe every few seconds would fill the log."""
        _LOG.debug(format, *args)
