"""The pages over HTTP: a route each, what a browser may do with them, and a server in a thread of its own.

A page is whole without a script. With one, `/live` says that there is something new, and the page is fetched again.
"""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click
import jinja2
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from pushrep.cli.common import count, size
from pushrep.cli.record_rows import time_text
from pushrep.console import drawing, pages
from pushrep.console.pages import Severity
from pushrep.console.records import FORMS, RECORDS_A_PAGE, AskedRecords, Schema, records_page
from pushrep.console.watch import STEP_S, PlaceWatch
from pushrep.env import SYSTEM_CLOCK
from pushrep.errors import PushrepError
from pushrep.push.sockets import Address

_HERE = Path(__file__).parent
_HEADERS = {
    # No inline script, no inline style, nothing from elsewhere.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_PAGES = (("/", "Fleet"),)
_NO_STORE = "no-store"  # pages tell what only operators may know
_KEEP_ALIVE_S = 15.0
_STOP_S = 10.0


class CantListenThere(PushrepError):
    """The console's address is taken, or none of this machine: give another `--listen`."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"can't listen on {address}: {why}")
        self.address, self.why = address, why


class Pages:
    """Requests in, pages out."""

    def __init__(self, watch: PlaceWatch, news: "News", schemas: Mapping[str, Schema]) -> None:
        self._watch, self._news, self._schemas = watch, news, schemas
        self._templates = _environment()

    def routes(self) -> list[Route | Mount]:
        """Of the application."""
        return [
            Route("/", self.fleet),
            Route("/outbox/{name}", self.outbox),
            Route("/outbox/{name}/records", self.records),
            Route("/node/{name}", self.node),
            Route("/live", self.live),
            Mount("/static", StaticFiles(directory=_HERE / "static")),
        ]

    def fleet(self, _request: Request) -> Response:
        """Everything that is watched, worst first."""
        page = pages.fleet(self._watch.readings())
        return self._shown("fleet.html", page=page, at_ms=SYSTEM_CLOCK.wall_ms(), here="/", title="Fleet")

    def outbox(self, request: Request) -> Response:
        """One outbox: ?from= and ?only=behind choose partitions."""
        row = self._row(request, "outbox")
        only_behind = request.query_params.get("only") == "behind"
        parts = pages.partitions_shown(row.found, _number(request, "from"), only_behind=only_behind)
        return self._shown("outbox.html", row=row, parts=parts, only_behind=only_behind, here="/", title=row.name)

    def node(self, request: Request) -> Response:
        """One node: ?from= chooses logs."""
        row = self._row(request, "node")
        last = max(0, len(row.found.get("logs", ())) - 1)
        first = min(_number(request, "from"), last) // pages.PARTITIONS_A_PAGE * pages.PARTITIONS_A_PAGE
        return self._shown("node.html", row=row, first=first, here="/", title=row.name)

    def records(self, request: Request) -> Response:
        """Some records of one log of an outbox; their payloads only with ?payloads=shown."""
        row = self._row(request, "outbox")
        query = request.query_params
        asked = AskedRecords(
            partition=_number(request, "partition"),
            start=query.get("from", "latest").strip(),
            form=query.get("as", "text") if query.get("as") in FORMS else "text",
            payloads=query.get("payloads") == "shown",
        )
        topic, page, why = row.found.get("topic", ""), None, None
        try:
            page = records_page(Path(row.found["place"]), topic, asked, self._schemas.get(topic))
        except (PushrepError, click.ClickException, OSError) as error:
            why = error.message if isinstance(error, click.ClickException) else str(error)
        title = f"Records of {row.name}"
        return self._shown("records.html", row=row, asked=asked, page=page, why=why, forms=FORMS, here="/", title=title)

    def live(self, request: Request) -> Response:
        """Server-sent events: `news` when there is something new, a comment where nothing is for long."""
        return StreamingResponse(self._news.stream(request.is_disconnected), media_type="text/event-stream")

    def error(self, _request: Request, error: Exception) -> Response:
        """What is no page."""
        assert isinstance(error, HTTPException)
        return self._shown("error.html", error.status_code, title="Not here", here="", why=error.detail)

    def _row(self, request: Request, kind: str) -> pages.PlaceRow:
        reading = self._watch.ask(request.path_params["name"])
        if reading is None or reading.found["kind"] not in {kind, "unknown"}:
            raise HTTPException(404, f"There is no {kind} of that name: it may have been removed.")
        return pages.row_of(reading)

    def _shown(self, template: str, status_code: int = 200, **values: Any) -> Response:
        text = self._templates.get_template(template).render(values)
        return HTMLResponse(text, status_code, {"Cache-Control": _NO_STORE})


class News:
    """Tells every open page that there is something new, at most once in `every_s`."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._number = 0
        self._stopping = threading.Event()

    def tell(self) -> None:
        """From any thread."""
        self._number += 1

    def stop(self) -> None:
        """Every stream ends."""
        self._stopping.set()

    async def stream(self, is_gone: Callable[[], Awaitable[bool]]) -> AsyncIterator[str]:
        """Events until the reader is gone."""
        told, silent_s = self._number, 0.0
        yield f"retry: 2000\n\nevent: hello\ndata: {told}\n\n"
        while not self._stopping.is_set() and not await is_gone():
            await asyncio.sleep(min(0.2, self._every_s))
            silent_s += min(0.2, self._every_s)
            if self._number != told and silent_s >= self._every_s:
                told, silent_s = self._number, 0.0
                yield f"event: news\ndata: {told}\n\n"
            elif silent_s >= _KEEP_ALIVE_S:
                silent_s = 0.0
                yield ": nothing new\n\n"


class ConsoleServer:
    """Listens once it is made, until `stop`; use it in `with`. Raises CantListenThere.

    every_s: how often what is watched is looked at, and pages are told. schemas: Avro's, by topic.
    """

    def __init__(
        self, address: Address, watch: PlaceWatch, *, every_s: float = 2.0, schemas: Mapping[str, Schema] | None = None
    ) -> None:
        self._watch, self._news = watch, News(every_s)
        self._socket = _listen(address)
        host, port = self._socket.getsockname()[:2]
        self.address = Address(host, port)
        """Where it listens."""
        self.url = f"http://{self.address}"
        watch.on_news = self._news.tell
        config = uvicorn.Config(
            application(watch, self._news, schemas or {}),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="pushrep-console-http")
        watch.start()
        self._thread.start()

    def stop(self) -> None:
        """Answers nobody any more when it returns."""
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


def application(watch: PlaceWatch, news: News, schemas: Mapping[str, Schema]) -> Starlette:
    """What the server serves."""
    shown = Pages(watch, news, schemas)
    found = Starlette(routes=shown.routes(), exception_handlers={HTTPException: shown.error})
    found.add_middleware(BaseHTTPMiddleware, dispatch=_guarded)
    return found


async def _guarded(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
    answer = await go_on(request) if _is_ours(request) else PlainTextResponse("This console has another name.", 421)
    answer.headers.update(_HEADERS)
    return answer


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _is_ours(request: Request) -> bool:
    """Whether it is asked for by a name of this machine: another site's name may be made to point here, too."""
    return Address((request.url.hostname or "").strip("[]"), 1).is_loopback


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


def _environment() -> jinja2.Environment:
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
        "mode": "read-only",
        "step_s": STEP_S,
        "calc_records": RECORDS_A_PAGE,
        "glyphs": {Severity.FINE: "●", Severity.IDLE: "○", Severity.WARN: "▲", Severity.BROKEN: "■"},
    }
    found.globals |= words
    return found


def _count(number: object) -> str:
    """Thousands apart; a dash where nobody knows: a look leaves such a field out."""
    return count(round(number)) if isinstance(number, int | float) else "-"


def _rate(per_second: float | None) -> str:
    if per_second is None:
        return "-"
    return f"{per_second:,.0f}" if per_second >= 10 or per_second == 0 else f"{per_second:.1f}"


def _clock(ms: int) -> str:
    return f"{time_text(ms)[11:19]} UTC"
