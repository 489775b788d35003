"""Through a real broker: records reach consumers with the context of their append; spans of batches link to it."""

import asyncio
import itertools

import pytest

from pushrep import KafkaDestination, Outbox
from tests.kafka.plain_client import create_topic
from tests.support.spans import Spans, context_carried, ids_of

pytestmark = [pytest.mark.java, pytest.mark.slow]

WAIT_S = 120
_names = (f"traced-{number}" for number in itertools.count())


def test_a_trace_goes_from_append_over_the_topic_to_both_consumers(broker, tmp_path):
    from filtering.consumers.aiokafka import ReplayFilteredConsumer as AsyncConsumer
    from filtering.consumers.confluent import ReplayFilteredConsumer

    servers, topic, spans = broker.bootstrap_servers, next(_names), Spans()
    create_topic(servers, topic, partitions=1)

    def read(consumer, take):
        consumer.subscribe([topic])
        found = []
        while len(found) < 3:
            found += take(consumer)
        return found

    async def read_async():
        async with AsyncConsumer(
            topic, group_id="c", bootstrap_servers=servers, auto_offset_reset="earliest"
        ) as consumer:
            return [await consumer.getone() for _ in range(3)]

    settings = {"bootstrap.servers": servers, "auto.offset.reset": "earliest", "log_level": 0}
    with spans.traced():
        with Outbox.open(tmp_path, topic, 1, "shop", kafka=KafkaDestination(bootstrap_servers=servers)) as outbox:
            with spans.tracer.start_as_current_span("request") as request:
                outbox.append_many(0, [b"a", b"b"])
            outbox.append(0, b"of no request")
            outbox.wait_shipped(WAIT_S)
        with ReplayFilteredConsumer(settings | {"group.id": "a"}) as consumer:
            batches = read(consumer, lambda one: one.consume(500, timeout_s=1))
        with ReplayFilteredConsumer(settings | {"group.id": "b"}) as consumer:
            polled = read(consumer, lambda one: [found] if (found := one.poll(1)) else [])
        awaited = asyncio.run(read_async())
    mine = ids_of(request.get_span_context())
    for records in (batches, polled, awaited):
        assert [context_carried(record) for record in records] == [mine, mine, (0, 0)]
    sent = spans.named(f"send {topic}")
    assert sum(one.attributes["messaging.batch.message_count"] for one in sent) == 3
    assert [ids_of(link.context) for one in sent for link in one.links] == [mine]
    for group, count in (("a", 3), ("b", 3), ("c", 3)):
        reads = [
            one for one in spans.named(f"poll {topic}") if one.attributes["messaging.consumer.group.name"] == group
        ]
        assert sum(one.attributes["messaging.batch.message_count"] for one in reads) == count
        assert {ids_of(link.context) for one in reads for link in one.links} == {mine}
