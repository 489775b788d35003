"""OpenTelemetry's SDK with an exporter in memory: what a test's spans are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

from filtering import tracing


class Spans:
    """What was exported so far; `tracer` makes spans of the test's own."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer: Tracer = self._provider.get_tracer("test")

    def named(self, name: str) -> list[object]:
        """Those of a name, in the order in which they ended."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    @contextmanager
    def traced(self) -> Iterator[None]:
        """The block is traced into these spans."""
        tracing.instrument(self._provider)
        try:
            yield
        finally:
            tracing.uninstrument()


def context_carried(record: Any) -> tuple[int, int]:
    """Trace and span of the context that a record carries; zeros: of none."""
    return ids_of(trace.get_current_span(tracing.context_of(record)).get_span_context())


def ids_of(context: trace.SpanContext) -> tuple[int, int]:
    """Trace and span."""
    return context.trace_id, context.span_id
