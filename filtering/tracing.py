"""OpenTelemetry, for a program that called `instrument()`: nothing of it is loaded before.

    append, add  ─▶ the current context, as the record's headers traceparent and tracestate (W3C Trace Context)
    relay, ship  ─▶ a span for each batch, with links to the contexts in its records; records are not changed here
    consume      ─▶ a span for each read, with the same links; `context_of(record)` for a span around your own work

A record that has a traceparent keeps it: records are known by their content, so a context is stored once, where the
record is made. Names are those of the semantic conventions of messaging (opentelemetry.io). Spans of
batches are of kind CLIENT: a record's own context is that of the span in which it was appended.
"""

import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from filtering.extras import needed_by

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider

Headers = Iterable[tuple[str, bytes | None]]

TRACEPARENT = "traceparent"
_NAMES = (TRACEPARENT, "tracestate")
_LINKS_MAX = 128  # as many as OpenTelemetry's SDK keeps of a span, unless it is told otherwise

active: "_Tracing | None" = None
"""What `instrument` made; None: nothing is traced."""


def instrument(tracer_provider: "TracerProvider | None" = None) -> None:
    """Trace what this process appends, relays, ships and consumes. Call it before an outbox is opened.

    tracer_provider: OpenTelemetry's; None: the global one. Raises MissingExtra.
    """
    global active  # noqa: PLW0603 - one a process
    active = _Tracing(tracer_provider)


def uninstrument() -> None:
    """The reverse of `instrument`."""
    global active  # noqa: PLW0603 - one a process
    active = None


def current_headers() -> tuple[tuple[str, bytes], ...]:
    """The current context as headers; none without tracing, and outside of every span."""
    return () if active is None else active.headers()


def context_of(record: Any) -> "Context":
    """The context that a record of confluent-kafka, aiokafka or pushrep carries, for a span of your own.

    `tracer.start_as_current_span("process orders", context=context_of(record))`. An empty one if it carries none.
    Raises MissingExtra.
    """
    return (active or _Tracing(None)).context(dict(headers_of(record)))


def headers_of(record: Any) -> Headers:
    """A record's headers, whichever client read it."""
    found = record.headers
    return (found() if callable(found) else found) or ()


def now_ns() -> int:
    """For the start of a span; 0, at no cost, without tracing."""
    return 0 if active is None else time.time_ns()


class TracedBatch:
    """A span of one batch, which becomes nobody's current one; without tracing it does nothing.

    system: "kafka", or "pushrep" for its own logs. operation: its name; kind: "send" or "receive". start_ns: of
    `now_ns`. It ends with a `with` block, and says what the block raised.
    """

    def __init__(self, system: str, operation: str, kind: str, destination: str, *, start_ns: int = 0) -> None:
        self._tracing, self._count = active, 0
        self._linked: set[bytes] = set()
        self._span: Span | None = None
        if active is not None:
            self._span = active.tracer.start_span(
                f"{operation} {destination}",
                kind=active.client,
                start_time=start_ns or None,
                attributes={
                    "messaging.system": system,
                    "messaging.operation.name": operation,
                    "messaging.operation.type": kind,
                    "messaging.destination.name": destination,
                },
            )

    @property
    def is_traced(self) -> bool:
        """Whether anybody wants to know."""
        return self._span is not None and self._span.is_recording()

    def set(self, **attributes: str | int) -> None:
        """Attributes, without `messaging.`, and with two underscores where the convention has a dot."""
        if self._span is not None:
            self._span.set_attributes({f"messaging.{name.replace('__', '.')}": one for name, one in attributes.items()})

    def add(self, records: Iterable[Headers]) -> None:
        """More records of the batch, by their headers."""
        if self._span is None or self._tracing is None:
            return
        for headers in records:
            self._count += 1
            values = dict(headers) if len(self._linked) < _LINKS_MAX else {}
            parent = values.get(TRACEPARENT)
            if parent is not None and parent not in self._linked:
                self._linked.add(parent)
                self._span.add_link(self._tracing.span_context(values))

    def end(self, error: str | None = None) -> None:
        """error: what failed, in a word."""
        if self._span is None or self._tracing is None:
            return
        self._span.set_attribute("messaging.batch.message_count", self._count)
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(self._tracing.error)
        self._span.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(None if kind is None else kind.__name__)


def note_received(group: str, records: Iterable[Any], topic: str, start_ns: int) -> None:
    """The span of a read by a consumer group that began at `start_ns`."""
    span = TracedBatch("kafka", "poll", "receive", topic, start_ns=start_ns)
    span.set(consumer__group__name=group)
    span.add(map(headers_of, records))
    span.end()


class _Tracing:
    """What is needed of OpenTelemetry's API."""

    def __init__(self, tracer_provider: "TracerProvider | None") -> None:
        with needed_by("filtering.tracing"):
            from opentelemetry import trace  # noqa: PLC0415 - an extra
            from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
                TraceContextTextMapPropagator,
            )
        self._trace, self._propagator = trace, TraceContextTextMapPropagator()
        self.tracer = trace.get_tracer("pushrep", tracer_provider=tracer_provider)
        self.client, self.error = trace.SpanKind.CLIENT, trace.StatusCode.ERROR

    def headers(self) -> tuple[tuple[str, bytes], ...]:
        carried: dict[str, str] = {}
        self._propagator.inject(carried)
        return tuple((name, value.encode()) for name, value in carried.items())

    def context(self, headers: dict[str, bytes | None]) -> "Context":
        found = {name: value.decode("ascii", "replace") for name in _NAMES if (value := headers.get(name))}
        return self._propagator.extract(found)

    def span_context(self, headers: dict[str, bytes | None]) -> Any:
        return self._trace.get_current_span(self.context(headers)).get_span_context()
