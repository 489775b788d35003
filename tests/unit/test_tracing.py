"""The context of a span is stored with a record where it is made, and never changed; spans of batches link to it."""

import asyncio
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
from opentelemetry import trace

from filtering import tracing
from filtering.extras import MissingExtra
from pushrep import AsyncOutbox, Durability, Outbox, OutboxConfig
from pushrep.log import LogConfig
from pushrep.outbox import RecordRefused
from pushrep.testing import FakeOutbox
from pushrep.values import to_json
from tests.support.spans import Spans, context_carried, ids_of


@pytest.fixture
def spans():
    spans = Spans()
    with spans.traced():
        yield spans


def outbox_in(tmp_path, carrier="header"):
    config = OutboxConfig(linger_ms=0, log_config=LogConfig(preallocate_bytes=0))
    return Outbox.open(tmp_path, "orders", 2, "shop", durability=Durability.BUFFERED, carrier=carrier, config=config)


def stored(outbox):
    outbox.flush()
    return list(outbox.log(0).records(0))


@pytest.mark.parametrize("carrier", ["key", "header"])
def test_records_carry_the_context_of_the_span_in_which_they_are_appended(tmp_path, spans, carrier):
    with outbox_in(tmp_path, carrier) as outbox:
        outbox.append(0, b"outside")
        with spans.tracer.start_as_current_span("request") as request:
            outbox.append(0, b"plain")
            outbox.append(0, b"headers", headers=[("mine", b"1")])
            outbox.append_many(0, [b"a", b"b"])
            outbox.append_many(0, [b"a", b"b"], headers=[[("mine", b"1")], []])
        outbox.append(0, b"behind it")
        found = stored(outbox)
    assert [context_carried(one) for one in found] == [(0, 0), *[ids_of(request.get_span_context())] * 6, (0, 0)]
    headers = [dict(one.headers) for one in found]
    assert [one.get("mine") for one in headers] == [None, None, b"1", None, None, b"1", None, None]
    assert "tracestate" not in headers[1], "none was given"


def test_a_record_that_has_a_context_keeps_it(tmp_path, spans):
    theirs = b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"
    with outbox_in(tmp_path) as outbox, spans.tracer.start_as_current_span("forwarder"):
        outbox.append(0, b"forwarded", headers=[("traceparent", theirs), ("tracestate", b"a=b")])
        [record] = stored(outbox)
    assert [value for name, value in record.headers if name == "traceparent"] == [theirs]
    context = trace.get_current_span(tracing.context_of(record)).get_span_context()
    assert (context.trace_id, context.span_id) == (int("1" * 32, 16), int("2" * 16, 16))
    assert context.trace_state.to_header() == "a=b"


def test_in_an_event_loop_too_the_first_value_of_a_type_carries_the_context(spans):
    """It is serialized in a thread, which has no span of its own."""

    async def main():
        async with AsyncOutbox(FakeOutbox(serializer=to_json)) as outbox:
            with spans.tracer.start_as_current_span("request") as request:
                for _ in range(2):
                    await outbox.append(0, {"order": 1})
            return request.get_span_context(), outbox.outbox.records(0)

    context, found = asyncio.run(main())
    assert [context_carried(one) for one in found] == [ids_of(context)] * 2, "first in a thread, then in the loop"


def test_its_bytes_count(spans):
    with FakeOutbox() as outbox:
        limit = outbox.facts.settings.config.record_bytes_max

        def fits(size):
            try:
                outbox.append(0, bytes(size))
            except RecordRefused:
                return False
            return True

        largest = next(size for size in range(limit - 300, limit) if not fits(size)) - 1
        with spans.tracer.start_as_current_span("request"):
            assert not fits(largest)
            assert fits(largest - 100)


def test_contexts_are_read_from_the_records_of_every_client(spans):
    with spans.tracer.start_as_current_span("request") as request:
        headers = list(tracing.current_headers())
    for record in (SimpleNamespace(headers=lambda: headers), SimpleNamespace(headers=tuple(headers))):
        assert context_carried(record) == ids_of(request.get_span_context())
    for empty in (SimpleNamespace(headers=lambda: None), SimpleNamespace(headers=[("traceparent", b"\xff")])):
        assert context_carried(empty) == (0, 0)


def test_a_batch_links_to_each_context_once_and_says_what_failed(spans):
    contexts = []
    for _ in range(200):
        with spans.tracer.start_as_current_span("request"):
            contexts.append(tracing.current_headers())
    span = tracing.TracedBatch("kafka", "send", "send", "orders", start_ns=tracing.now_ns())
    span.set(destination__partition__id="3")
    span.add([contexts[0], contexts[0], (), contexts[1]])
    span.end("NOT_LEADER")
    with suppress(ZeroDivisionError), tracing.TracedBatch("pushrep", "relay", "send", "orders") as many:
        many.add(contexts)
        raise ZeroDivisionError
    [sent], [relayed] = spans.named("send orders"), spans.named("relay orders")
    assert len(sent.links) == 2
    assert sent.attributes == {
        "messaging.system": "kafka", "messaging.operation.name": "send", "messaging.operation.type": "send",
        "messaging.destination.name": "orders", "messaging.destination.partition.id": "3",
        "messaging.batch.message_count": 4, "error.type": "NOT_LEADER",
    }  # fmt: skip
    assert (sent.kind, sent.status.status_code) == (trace.SpanKind.CLIENT, trace.StatusCode.ERROR)
    assert (len(relayed.links), relayed.attributes["messaging.batch.message_count"]) == (128, 200)
    assert relayed.attributes["error.type"] == "ZeroDivisionError"


def test_nothing_is_loaded_without_it(tmp_path):
    code = f"""
import sys
from pushrep import Outbox, KafkaDestination
from pushrep.testing import FakeOutbox
import pushrep.tables, pushrep.kafka.sink_session, filtering.tracing
with Outbox.open({str(tmp_path / "outbox")!r}, "orders", 1, "shop") as outbox:
    outbox.append(0, b"v", headers=[("a", b"b")]).result()
    outbox.append_many(0, [b"v"]).result()
with FakeOutbox() as outbox:
    outbox.append(0, b"v")
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_extra_it_says_which_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for call in (tracing.instrument, lambda: tracing.context_of(SimpleNamespace(headers=()))):
        with pytest.raises(MissingExtra) as missing:
            call()
        assert missing.value.extra == "tracing"
    assert tracing.active is None
