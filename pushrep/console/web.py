"""The HTTP application: a route for each page, security headers, and a server in its own thread.

Pages are complete without JavaScript. With it, `/live` sends an event after each change, and the script fetches the
page again.
"""

import asyncio
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, quote

import click
import jinja2
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from pushrep.cli.record_rows import time_text
from pushrep.console import drawing, pages
from pushrep.console.access import ConsoleAccess
from pushrep.console.pages import Severity
from pushrep.console.records import FORMS, RECORDS_A_PAGE, AskedRecords, Schema, records_page
from pushrep.console.startpoints import AskedStartpoint, dry_run, history_of, lines_of, write
from pushrep.console.watch import STEP_S, PlaceWatch, Reading
from pushrep.env import SYSTEM_CLOCK
from pushrep.errors import BadArgument, PushrepError
from pushrep.replicate.sockets import Address
from pushrep.startpoints import STORE_NAME, StartpointStore
from pushrep.status.table import count, size

_HERE = Path(__file__).parent
_HEADERS = {
    # No inline script, no inline style, nothing from other sites.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    # With no-referrer a browser would send our own forms with Origin: null.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_PAGES = (("/", "Fleet"), ("/filter", "Filters"))
_NO_STORE = "no-store"  # pages are confidential
_KEEP_ALIVE_S = 15.0
_STOP_S = 10.0
_FORM_BYTES_MAX = 64 << 10
MARKS_GROUP = "pushrep.marks_looks"
_OPEN = ("/login", "/static/")
_LOG = logging.getLogger("pushrep.console.audit")


class CantListenThere(PushrepError):
    """The console's address is in use, or does not belong to this machine: give another `--listen`."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"can't listen on {address}: {why}")
        self.address, self.why = address, why


class Pages:
    """The handlers of all routes."""

    def __init__(self, watch: PlaceWatch, news: "News", access: ConsoleAccess, settings: "ConsoleSettings") -> None:
        self._watch, self._news, self._access, self._settings = watch, news, access, settings
        self._templates = environment()

    def routes(self) -> list[Route | Mount]:
        """The application's routes. Those that change something exist only with `operate`."""
        changing = [
            Route("/outbox/{name}/startpoints", self.set_startpoint, methods=["POST"]),
            Route("/outbox/{name}/startpoints/{number:int}/cancel", self.cancel_startpoint, methods=["POST"]),
        ]
        return [
            *([Route("/login", self.login, methods=["GET", "POST"])] if self._access.wants_login else []),
            *([Route("/logout", self.logout, methods=["POST"])] if self._access.wants_login else []),
            Route("/", self.fleet),
            Route("/outbox/{name}", self.outbox),
            Route("/outbox/{name}/records", self.records),
            Route("/outbox/{name}/startpoints", self.startpoints, methods=["GET"]),
            *(changing if self._settings.operate else []),
            Route("/node/{name}", self.node),
            Route("/filter", self.filters),
            Route("/live", self.live),
            Mount("/static", StaticFiles(directory=_HERE / "static")),
        ]

    def fleet(self, request: Request) -> Response:
        """All watched places, the worst first."""
        page = pages.fleet(self._watch.readings())
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
        topic, page, why = row.found["topic"], None, None
        try:
            page = records_page(Path(row.found["place"]), topic, asked, self._settings.schemas.get(topic))
        except (PushrepError, click.ClickException, OSError, ValueError) as error:
            why = error.message if isinstance(error, click.ClickException) else str(error)
        title = f"Records of {row.name}"
        return self._shown(request, "records.html", row=row, asked=asked, page=page, why=why, forms=FORMS, title=title)

    def filters(self, request: Request) -> Response:
        """The present marks of each query of `--marks`."""
        looks = [look_at_marks(place) for place in self._settings.marks]
        return self._shown(request, "filter.html", looks=looks, at_ms=SYSTEM_CLOCK.wall_ms(), title="Filters")

    def startpoints(self, request: Request) -> Response:
        """The startpoints of an outbox's topic, and a dry run of the one in the query (fields of AskedStartpoint)."""
        return self._startpoints(request, AskedStartpoint.of(request.query_params))

    async def set_startpoint(self, request: Request) -> Response:
        """Write the form's startpoint, and show the list."""
        asked = AskedStartpoint.of(await self._posted(request))
        return await run_in_threadpool(self._set_startpoint, request, asked)

    async def cancel_startpoint(self, request: Request) -> Response:
        """Cancel a startpoint, and show the list."""
        reason = (await self._posted(request)).get("reason", "")
        return await run_in_threadpool(self._cancel_startpoint, request, reason)

    async def login(self, request: Request) -> Response:
        """Show the login form, or begin a session with the posted name and password."""
        if request.method == "GET":
            return self._shown(request, "login.html", title="Log in", why=None)
        form = await self._posted(request)
        name = form.get("name", "")
        session = await run_in_threadpool(self._access.login, name, form.get("password", ""))
        self._audit(request, name, "logged in" if session is not None else "was refused: wrong name or password")
        if session is None:
            return self._shown(request, "login.html", 401, title="Log in", why="Wrong name or password.")
        request.state.session = session
        return RedirectResponse("/", 303)

    async def logout(self, request: Request) -> Response:
        """End the session."""
        await self._posted(request)
        self._access.logout(request.state.session)
        return RedirectResponse("/login", 303)

    def live(self, request: Request) -> Response:
        """Server-sent events: `news` after a change, and a comment every 15 s to keep the connection alive."""
        return StreamingResponse(self._news.stream(request.is_disconnected), media_type="text/event-stream")

    def error(self, request: Request, error: Exception) -> Response:
        """The page of an HTTPException: an unknown path, or a refused request."""
        assert isinstance(error, HTTPException)
        title = HTTPStatus(error.status_code).phrase
        return self._shown(request, "error.html", error.status_code, title=title, why=error.detail)

    def _startpoints(self, request: Request, asked: AskedStartpoint, why: str | None = None) -> Response:
        row = self._outbox(request)
        directory, topic = Path(row.found["place"]), row.found["topic"]
        run, lines, history = None, [], []
        with self._store(row) as store:
            try:
                lines, history = lines_of(store, topic), history_of(store, topic)
                run = dry_run(directory, store, topic, asked) if asked.place and why is None else None
            except (PushrepError, ValueError) as error:
                why = str(error)
            return self._shown(
                request, "startpoints.html", 200 if why is None else 422, row=row, asked=asked, run=run, lines=lines,
                history=history, why=why, store=store.place, title=f"Startpoints of {row.name}",
            )  # fmt: skip

    def _set_startpoint(self, request: Request, asked: AskedStartpoint) -> Response:
        row = self._outbox(request)
        topic = row.found["topic"]
        try:
            with self._store(row) as store:
                number = write(Path(row.found["place"]), store, topic, asked, self._user(request))
        except (PushrepError, ValueError) as error:
            return self._startpoints(request, asked, str(error))
        did = f"set startpoint {number} of {row.name}, {asked.target(topic)}: {asked.place}"
        self._audit(request, self._user(request), did, asked.reason)
        return RedirectResponse(f"/outbox/{quote(row.name, safe='')}/startpoints", 303)

    def _cancel_startpoint(self, request: Request, reason: str) -> Response:
        row, number = self._outbox(request), request.path_params["number"]
        try:
            with self._store(row) as store:
                store.cancel(number, reason, author=self._user(request))
        except (PushrepError, ValueError) as error:
            return self._startpoints(request, AskedStartpoint(), str(error))
        self._audit(request, self._user(request), f"cancelled startpoint {number} of {row.name}", reason)
        return RedirectResponse(f"/outbox/{quote(row.name, safe='')}/startpoints", 303)

    def _user(self, request: Request) -> str | None:
        return self._access.user(request.state.session)

    @contextmanager
    def _store(self, row: pages.PlaceRow) -> Iterator[StartpointStore]:
        if self._settings.startpoints is not None:
            yield self._settings.startpoints
        else:
            with StartpointStore.open(Path(row.found["place"]) / STORE_NAME) as store:
                yield store

    async def _posted(self, request: Request) -> dict[str, str]:
        """The fields of a posted form, after its checks. Raises HTTPException."""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _FORM_BYTES_MAX:
                raise HTTPException(413, "This form is too large.")
        fields = dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))
        self._access.check_form(request, request.state.session, fields.get("token"))
        return fields

    def _audit(self, request: Request, user: str | None, what: str, reason: str = "") -> None:
        client = request.client.host if request.client else "?"
        line = {"at_ms": SYSTEM_CLOCK.wall_ms(), "user": user, "client": client, "did": what, "reason": reason}
        self._settings.audit(json.dumps(line))

    def _outbox(self, request: Request) -> pages.PlaceRow:
        """The row of the outbox in the path, from its newest reading. Raises HTTPException."""
        row = _row(self._watch.newest(request.path_params["name"]), "outbox")
        if row.found["kind"] != "outbox":
            raise HTTPException(404, str(row.found["why"]))
        return row

    def _shown(self, request: Request, template: str, status_code: int = 200, /, **values: Any) -> Response:
        session = request.state.session
        of_all = {
            "here": request.url.path,
            "operate": self._settings.operate,
            "token": self._access.token(session),
            "user": self._access.user(session),
        }
        text = self._templates.get_template(template).render(values | of_all)
        return HTMLResponse(text, status_code, {"Cache-Control": _NO_STORE})


class News:
    """Notifies each open page of changes, at most once in `every_s`."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._number = 0
        self._stopping = threading.Event()

    def notify(self) -> None:
        """Note a change. May be called from any thread."""
        self._number += 1

    def stop(self) -> None:
        """End all streams."""
        self._stopping.set()

    async def stream(self, is_gone: Callable[[], Awaitable[bool]]) -> AsyncIterator[str]:
        """Yield events until the browser disconnects, or `stop`."""
        sent, silent_s = self._number, 0.0
        yield f"retry: 2000\n\nevent: hello\ndata: {sent}\n\n"
        while not self._stopping.is_set() and not await is_gone():
            await asyncio.sleep(min(0.2, self._every_s))
            silent_s += min(0.2, self._every_s)
            if self._number != sent and silent_s >= self._every_s:
                sent, silent_s = self._number, 0.0
                yield f"event: news\ndata: {sent}\n\n"
            elif silent_s >= _KEEP_ALIVE_S:
                silent_s = 0.0
                yield ": nothing new\n\n"


def look_at_marks(place: str) -> Mapping[str, Any]:
    """The marks of a query. The result has `why` if they can't be read.

    spark_jobs reads them; this package may not import it, and finds it by its entry point.
    """
    for entry in entry_points(group=MARKS_GROUP):
        found: Mapping[str, Any] = entry.load()(place)
        return found
    return {"place": place, "why": f"this installation has no entry point in {MARKS_GROUP}: install pushrep again"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSettings:
    """The settings of a console.

    every_s: the least time between two events of a page, in seconds. schemas: Avro schemas by topic. startpoints: the
    store of all outboxes; None: each outbox has its own. marks: of queries, see look_at_marks. operate: whether users
    may set and cancel startpoints. audit: called with one JSON line for each change and login. passwords: hashes by
    name, see access.py; None: no login. certificate: the files of a certificate and its key, for HTTPS.
    """

    every_s: float = 2.0
    schemas: Mapping[str, Schema] = field(default_factory=dict)
    startpoints: StartpointStore | None = None
    marks: Sequence[str] = ()
    operate: bool = False
    audit: Callable[[str], object] = _LOG.info
    passwords: Mapping[str, str] | None = None
    certificate: tuple[Path, Path] | None = None


class ConsoleServer:
    """A server that listens from its construction until `stop`. A context manager. Raises CantListenThere,
    BadArgument.
    """

    def __init__(self, address: Address, watch: PlaceWatch, settings: ConsoleSettings | None = None) -> None:
        settings = settings or ConsoleSettings()
        self._watch, self._news = watch, News(settings.every_s)
        cert, key = settings.certificate or (None, None)
        config = uvicorn.Config(
            application(watch, self._news, settings),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=1,
            ssl_certfile=cert,
            ssl_keyfile=key,
        )
        try:
            config.load()
        except (OSError, ValueError) as error:
            raise BadArgument("certificate", f"{settings.certificate} can't be used: {error}") from error
        self._socket = _listen(address)
        host, port = self._socket.getsockname()[:2]
        self.address = Address(host, port)
        """The address that the server listens on."""
        self.url = f"http{'' if cert is None else 's'}://{self.address}"
        watch.on_news = self._news.notify
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="pushrep-console-http")
        watch.start()
        self._thread.start()

    def stop(self) -> None:
        """Stop the server and the watch. When this returns, no request is answered any more."""
        self._news.stop()
        self._server.should_exit = True
        self._thread.join(_STOP_S)
        self._watch.stop()
        with suppress(OSError):
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def application(watch: PlaceWatch, news: News, settings: ConsoleSettings) -> Starlette:
    """The ASGI application, with access checks and headers around each route."""
    access = ConsoleAccess(settings.passwords, is_tls=settings.certificate is not None)
    shown = Pages(watch, news, access, settings)
    found = Starlette(routes=shown.routes(), exception_handlers={HTTPException: shown.error})

    async def guarded(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        request.state.session = session = access.session(request)
        if not access.is_ours(request):
            answer: Response = PlainTextResponse("This console has another name: use localhost or 127.0.0.1.", 421)
        elif access.wants_login and access.user(session) is None and not request.url.path.startswith(_OPEN):
            answer = RedirectResponse("/login", 303)
        else:
            answer = await go_on(request)
        if request.state.session != request.cookies.get(access.cookie):
            answer.set_cookie(
                access.cookie, request.state.session, httponly=True, samesite="strict", secure=access.is_tls
            )
        answer.headers.update(_HEADERS)
        return answer

    found.add_middleware(BaseHTTPMiddleware, dispatch=guarded)
    return found


def _row(reading: Reading | None, kind: str) -> pages.PlaceRow:
    if reading is None or reading.found["kind"] not in {kind, "unknown"}:
        raise HTTPException(404, f"There is no {kind} of this name: it may have been removed.")
    return pages.row_of(reading)


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((address.host, address.port))
        found.listen(128)
    except OSError as error:
        found.close()
        raise CantListenThere(str(address), error.strerror or str(error)) from error
    return found


def environment() -> jinja2.Environment:
    """For the pages' templates, with all that they call; what they show is escaped."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"count": _count, "size": size, "rate": _rate, "clock": _clock, "time": time_text}
    words: Mapping[str, Any] = {
        "calc": pages,
        "drawing": drawing,
        "pages": _PAGES,
        "step_s": STEP_S,
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


def _clock(ms: int) -> str:
    return f"{time_text(ms)[11:19]} UTC"
