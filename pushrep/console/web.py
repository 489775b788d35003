"""The HTTP application: a route for each page, the check and the headers around each, and a server in its own thread.

    request ─▶ Guard: own Host? password? ─▶ route ─▶ status, records or marks are read ─▶ template

Pages change nothing, and are complete without JavaScript. With it, the script fetches the page again every two seconds.
"""

import asyncio
import ctypes
import gc
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
import jinja2
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from filtering.closing import ClosedAtExit
from pushrep.cli.record_rows import time_text
from pushrep.cli.startpoint import line_of, states_of
from pushrep.cli.startpoint_options import place_text
from pushrep.console import pages
from pushrep.console.access import Admission, ConsoleAccess
from pushrep.console.pages import Severity
from pushrep.console.records import FORMS, RECORDS_A_PAGE, AskedRecords, records_page
from pushrep.console.watch import PAST_S, PlaceWatch, Reading
from pushrep.env import SYSTEM_CLOCK
from pushrep.errors import BadArgument, PushrepError
from pushrep.replicate.budget import FIRST_S, SEND_S, Admitted, ConnectionBudget
from pushrep.replicate.sockets import Address
from pushrep.startpoints import STORE_NAME, StartpointStore
from pushrep.startpoints.model import Written
from pushrep.status.table import count, size

_LOG = logging.getLogger("pushrep.console")
_HERE = Path(__file__).parent
_HEADERS = {
    # No inline script, no inline style, nothing from other sites.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_PAGES = (("/", "Fleet"), ("/filter", "Filters"))
_NO_STORE = "no-store"  # pages are confidential
_CONNECTIONS_MAX = 64
"""Over TLS each costs asyncio some 0.5 MiB."""
_BACKLOG = 32
"""So many are accepted before those that were closed for them are gone, too."""
_GIVES_BACK_S = 5.0
_STOP_S = 10.0
_WRONG_S = 1.0
_WRONG_MAX = 16
_STARTPOINTS_SHOWN = 200
_MINUTES_FROM_S = 100  # a shorter time is said in seconds


class Guard:
    """Around the whole application: what `ConsoleAccess` refuses reaches no route; each answer has the headers.

    A wrong password is answered after a second, and at once if 16 of them wait already. A right one never waits.
    """

    def __init__(self, within: ASGIApp, access: ConsoleAccess) -> None:
        self._within, self._access, self._waiting = within, access, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        access = self._access.check(headers.get("host", ""), headers.get("authorization", ""))
        answer = self._within if access is Admission.ALLOWED else await self._refusal(access)
        await answer(scope, receive, with_headers)

    async def _refusal(self, access: Admission) -> Response:
        if access is Admission.OTHER_HOST:
            return PlainTextResponse("This console has another name: use its address, or localhost.", 421)
        if access is Admission.WRONG_PASSWORD:
            if self._waiting >= _WRONG_MAX:
                return PlainTextResponse("Too many wrong passwords at once.", 429)
            self._waiting += 1
            try:
                await asyncio.sleep(_WRONG_S)
            finally:
                self._waiting -= 1
        asks = {"WWW-Authenticate": 'Basic realm="pushrep console", charset="UTF-8"'}
        return PlainTextResponse("This console wants its password; any name goes with it.", 401, asks)


class _Connection(socket.socket):
    """One that was accepted; asyncio closes it."""

    left: Callable[[], object] = staticmethod(lambda: None)

    def close(self) -> None:
        super().close()
        self.left()


class _Listener(socket.socket):
    """Every connection that it accepts is within the budget, its handshake too."""

    def __init__(self, family: int) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self.budget = ConnectionBudget("console", _LOG, connections_max=_CONNECTIONS_MAX)
        self.open: dict[tuple[str, int], Admitted] = {}
        """By the peer's address."""

    def accept(self) -> tuple[socket.socket, Any]:
        sock, address = super().accept()
        peer = _Connection(fileno=sock.detach())
        one = self.open[address[:2]] = self.budget.admit(address[0], peer)

        def left() -> None:
            self.open.pop(address[:2], None)
            one.leave()

        peer.left = left
        return peer, address

    async def serve(self, within: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is allowed, which is a role."""
        one = self.open.get(tuple(scope["client"] or ())[:2])
        if one is not None:
            one.promote()
            one.expect(SEND_S)
        await within(scope, receive, send)
        if one is not None:
            one.expect(FIRST_S)  # for the next whole request


class Pages:
    """The handlers of all routes."""

    def __init__(self, watch: PlaceWatch, settings: "ConsoleSettings") -> None:
        self._watch, self._settings = watch, settings
        self._templates = environment()

    def routes(self) -> list[Route | Mount]:
        """The application's routes: each is read with GET."""
        return [
            Route("/", self.fleet),
            Route("/outbox/{name}", self.outbox),
            Route("/outbox/{name}/records", self.records),
            Route("/outbox/{name}/startpoints", self.startpoints),
            Route("/node/{name}", self.node),
            Route("/filter", self.filters),
            Mount("/static", StaticFiles(directory=_HERE / "static")),
        ]

    def fleet(self, request: Request) -> Response:
        """All watched places, the worst first."""
        page = pages.fleet(self._watch.readings(), self._watch.empty)
        return self._shown(request, "fleet.html", page=page, at_ms=SYSTEM_CLOCK.wall_ms(), title="Fleet")

    def outbox(self, request: Request) -> Response:
        """One outbox. ?from= and ?only=behind choose partitions."""
        row = _row(self._watch.ask(request.path_params["name"]), "outbox")
        only_behind = request.query_params.get("only") == "behind"
        parts = pages.partitions_shown(row.found, _number(request, "from"), only_behind=only_behind)
        return self._shown(request, "outbox.html", row=row, parts=parts, only_behind=only_behind, title=row.name)

    def node(self, request: Request) -> Response:
        """One node. ?from= chooses logs."""
        row = _row(self._watch.ask(request.path_params["name"]), "node")
        last = max(0, len(row.found.get("logs", ())) - 1)
        first = min(_number(request, "from"), last) // pages.PARTITIONS_A_PAGE * pages.PARTITIONS_A_PAGE
        return self._shown(request, "node.html", row=row, first=first, title=row.name)

    def records(self, request: Request) -> Response:
        """Records of one log of an outbox, with payloads only if ?payloads=shown."""
        row = self._outbox(request)
        query = request.query_params
        asked = AskedRecords(
            partition=_number(request, "partition"),
            start=query.get("from", "latest").strip(),
            form=query.get("as", "text") if query.get("as") in FORMS else "text",
            payloads=query.get("payloads") == "shown",
        )
        page, why = None, None
        try:
            page = records_page(Path(row.found["place"]), row.found["topic"], asked)
        except (PushrepError, click.ClickException, OSError, ValueError) as error:
            why = error.message if isinstance(error, click.ClickException) else str(error)
        title = f"Records of {row.name}"
        return self._shown(request, "records.html", row=row, asked=asked, page=page, why=why, forms=FORMS, title=title)

    def startpoints(self, request: Request) -> Response:
        """The startpoints of an outbox's topic and their history, the newest first, 200 of each at most."""
        row = self._outbox(request)
        topic = row.found["topic"]
        lines, history, why = [], [], None
        with self._store(row) as store:
            try:
                log, facts = store.event_log(), store.history()
                ours = [one for one in log.all_written() if one.target.topic == topic]
                lines = [(one, place_text(one.startpoint), states_of(log, one.sequence)) for one in reversed(ours)]
                written = {fact.sequence for fact in facts if isinstance(fact, Written) and fact.target.topic == topic}
                history = [line_of(fact) for fact in reversed(facts) if fact.sequence in written]
            except PushrepError as error:
                why = str(error)
            return self._shown(
                request, "startpoints.html", row=row, lines=lines[:_STARTPOINTS_SHOWN],
                history=history[:_STARTPOINTS_SHOWN], why=why, store=store.place, title=f"Startpoints of {row.name}",
            )  # fmt: skip

    def filters(self, request: Request) -> Response:
        """The present marks of each query of `--marks`."""
        looks = [look_at_marks(place) for place in self._settings.marks]
        return self._shown(request, "filter.html", looks=looks, at_ms=SYSTEM_CLOCK.wall_ms(), title="Filters")

    def error(self, request: Request, error: Exception) -> Response:
        """The page of an HTTPException: an unknown path, or a place that is not there."""
        assert isinstance(error, HTTPException)
        title, why = "Nothing here", error.detail
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            title, why = "Read-only", "This console only shows; commands change."
        elif why == HTTPStatus.NOT_FOUND.phrase:  # no route, and no file of /static
            why = f"There is no page at {request.scope['path']}."
        return self._shown(request, "error.html", error.status_code, title=title, why=why)

    def _store(self, row: pages.PlaceRow) -> AbstractContextManager[StartpointStore]:
        given = self._settings.startpoints
        return StartpointStore.open(Path(row.found["place"]) / STORE_NAME) if given is None else nullcontext(given)

    def _outbox(self, request: Request) -> pages.PlaceRow:
        """The row of the outbox in the path, from its newest reading. Raises HTTPException."""
        row = _row(self._watch.newest(request.path_params["name"]), "outbox")
        if row.found["kind"] != "outbox":
            raise HTTPException(404, f"It can't be read: {row.found['why']}.")
        return row

    def _shown(self, request: Request, template: str, status_code: int = 200, /, **values: Any) -> Response:
        text = self._templates.get_template(template).render(values, here=request.scope["path"])
        return HTMLResponse(text, status_code, {"Cache-Control": _NO_STORE})


def look_at_marks(place: str) -> Mapping[str, Any]:
    """The marks of a query, by what its job has as `--marks`. The result has `why` if they can't be read.

    spark_jobs reads them; this package may not import it, and finds it by its entry point.
    """
    for entry in entry_points(group="pushrep.marks_looks"):
        found: Mapping[str, Any] = entry.load()(place)
        return found
    return {"place": place, "why": "this installation has no entry point pushrep.marks_looks: install pushrep again"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSettings:
    """The settings of a console.

    access: its address, and who may read it. startpoints: the store of all outboxes; None: each outbox has its own.
    marks: places of queries, see look_at_marks. certificate: the files of a certificate and its key, for HTTPS.
    """

    access: ConsoleAccess
    startpoints: StartpointStore | None = None
    marks: Sequence[str] = ()
    certificate: tuple[Path, Path] | None = None


class ConsoleServer(ClosedAtExit):
    """A server that listens from its construction until `close`. A context manager. Raises BadArgument for an address
    that is in use or not this machine's, and for a certificate that can't be used.
    """

    def __init__(self, watch: PlaceWatch, settings: ConsoleSettings) -> None:
        self._watch = watch
        cert, key = settings.certificate or (None, None)
        self._socket = _listen(settings.access.listen)
        self.budget = self._socket.budget
        """What its peers hold."""
        config = uvicorn.Config(
            application(watch, settings, self._socket),
            loop="asyncio",
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,  # nobody's X-Forwarded-For is believed
            timeout_graceful_shutdown=1,
            ssl_certfile=cert,
            ssl_keyfile=key,
            backlog=_BACKLOG,
        )
        try:
            config.load()
        except (OSError, ValueError) as error:
            self._release()
            raise BadArgument("certificate", f"{settings.certificate} can't be used: {error}") from error
        host, port = self._socket.getsockname()[:2]
        self.address = Address(host, port)
        """The address that the server listens on."""
        self.url = f"http{'' if cert is None else 's'}://{self.address}"
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), name="pushrep-console-http")
        watch.start()
        self._thread.start()

    async def _serve(self) -> None:
        giving_back = asyncio.create_task(self._give_back())
        await self._server.serve(sockets=[self._socket])
        giving_back.cancel()
        # Over TLS asyncio would wait for the browser's own goodbye, and leave the sockets to the garbage collector.
        for connection in list(self._server.server_state.connections):
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()
        await asyncio.sleep(0)

    async def _give_back(self) -> None:
        """Seconds after a flood the system has its memory again. Of connections that were closed for others asyncio
        leaves cycles, over TLS with 256 KiB each, and the C library keeps the space of what was freed.
        """
        seen = 0
        while True:
            await asyncio.sleep(_GIVES_BACK_S)
            if (closed := sum(self.budget.closed.values())) >= seen + _CONNECTIONS_MAX:
                seen = closed
                gc.collect()
                _trim()

    def close(self) -> None:
        """Stop the server and the watch. When this returns, no request is answered any more."""
        self._server.should_exit = True
        self._thread.join(_STOP_S)
        self._watch.stop()
        self._release()

    def _release(self) -> None:
        with suppress(OSError):
            self._socket.close()
        self.budget.stop()


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def application(watch: PlaceWatch, settings: ConsoleSettings, listener: _Listener) -> ASGIApp:
    """The ASGI application, inside of its guard."""
    shown = Pages(watch, settings)
    found = Starlette(routes=shown.routes(), exception_handlers={HTTPException: shown.error})
    return Guard(partial(listener.serve, found), settings.access)


def _row(reading: Reading | None, kind: str) -> pages.PlaceRow:
    if reading is None or reading.found["kind"] not in {kind, "unknown"}:
        raise HTTPException(404, f"There is no {kind} of this name: it may have been removed.")
    return pages.row_of(reading)


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _listen(address: Address) -> _Listener:
    found = _Listener(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((address.host, address.port))
        found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        found.budget.stop()
        raise BadArgument("listen", f"can't listen on {address}: {error.strerror or error}") from error
    return found


def environment() -> jinja2.Environment:
    """For the pages' templates, with all that they call; all values are escaped."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"count": _count, "size": size, "rate": _rate, "span": _span, "clock": _clock, "time": time_text}
    words: Mapping[str, Any] = {
        "calc": pages,
        "pages": _PAGES,
        "calc_records": RECORDS_A_PAGE,
        "glyphs": {Severity.FINE: "●", Severity.IDLE: "○", Severity.WARN: "▲", Severity.BROKEN: "■"},
    }
    found.globals |= words
    return found


def _count(number: object) -> str:
    """The number with commas between thousands; a dash for a field that the reading lacks."""
    return count(round(number)) if isinstance(number, int | float) else "-"


def _rate(per_second: float | None) -> str:
    if per_second is None:
        return "-"
    return f"{per_second:,.0f}" if per_second >= 10 or per_second == 0 else f"{per_second:.1f}"


def _span(seconds: float) -> str:
    """As after "the last": `48 seconds`, `12 minutes`, `hour`."""
    if seconds < _MINUTES_FROM_S:
        return f"{max(1, round(seconds))} seconds"
    return "hour" if seconds >= PAST_S - _MINUTES_FROM_S else f"{round(seconds / 60)} minutes"


def _clock(ms: int) -> str:
    return f"{time_text(ms)[11:19]} UTC"
