"""Requests to a transaction coordinator, and batches under producer ids of other instances."""

import asyncio
from collections.abc import Iterable

from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields

from pushrep.kafka import KafkaDestination
from pushrep.kafka.cluster import Cluster
from pushrep.kafka.requests import ProduceBatches, answers_of
from pushrep.kafka.topic import look_at_topic
from pushrep.records import encode_batch

_NOW_MS = 1_790_000_000_000


class _DescribeTransactionsResponse0(Response):
    API_KEY = 65
    API_VERSION = 0
    _TOPIC = (("topic", CompactString("utf-8")), ("partitions", CompactArray(Int32)), ("tags", TaggedFields))
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "states",
            CompactArray(
                ("error_code", Int16), ("transactional_id", CompactString("utf-8")), ("state", CompactString("utf-8")),
                ("timeout_ms", Int32), ("start_ms", Int64), ("producer_id", Int64), ("producer_epoch", Int16),
                ("topics", CompactArray(*_TOPIC)), ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )  # fmt: skip


class _DescribeTransactionsRequest0(RequestStruct):
    API_KEY = 65
    API_VERSION = 0
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _DescribeTransactionsResponse0
    SCHEMA = Schema(("ids", CompactArray(CompactString("utf-8"))), ("tags", TaggedFields))


class DescribeTransaction(Request[_DescribeTransactionsRequest0]):
    API_KEY = 65

    def __init__(self, transactional_id):
        self._id = transactional_id

    def build(self, request_struct_class):
        return request_struct_class([self._id], {})


def with_cluster(servers: str, topic: str, what):
    """Run a coroutine function with a Cluster, and return its result."""

    async def run():
        cluster = Cluster(KafkaDestination(bootstrap_servers=servers), topic)
        try:
            await cluster.refresh()
            return await what(cluster)
        finally:
            await cluster.close()

    return asyncio.run(run())


def is_forgotten(servers: str, topic: str, transactional_id: str) -> bool:
    """Whether the coordinator has forgotten the transactional id. This request does not refresh it."""

    async def ask(cluster):
        node = await cluster.find_coordinator(transactional_id)
        [state] = (await cluster.ask(node, DescribeTransaction(transactional_id))).states
        return state[0] == 105  # TRANSACTIONAL_ID_NOT_FOUND

    return with_cluster(servers, topic, ask)


def send_under(servers: str, topic: str, partitions: Iterable[int], producer, sequence: int = 0) -> dict[int, int]:
    """Send one record into each partition under this producer id and epoch, as a late instance would; the codes."""
    topic_id = look_at_topic(KafkaDestination(bootstrap_servers=servers), topic).topic_id
    batch = encode_batch([b"foreign"], timestamps_ms=_NOW_MS)

    async def send(cluster):
        found = {}
        for partition in partitions:
            connection = await cluster.connection(cluster.leaders[partition])
            data = {partition: batch.with_producer(*producer, sequence)}
            answers, _ = answers_of(await connection.send(ProduceBatches(topic, topic_id, data, 10_000)))
            found[partition] = answers[partition].error_code
        return found

    return with_cluster(servers, topic, send)
