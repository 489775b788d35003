"""What brokers answer to a shipper's questions, and what is known of those that take long.

The brokers are simulated, and spoken to over loopback.
"""

import asyncio
import struct

import pytest

from pushrep import KafkaDestination
from pushrep.kafka import cluster as module
from pushrep.kafka.answers import Code
from pushrep.kafka.cluster import DOES_NOT_ANSWER, TAKES_NO_CONNECTION, Cluster, KnownBrokers, PartitionBounds
from pushrep.kafka.errors import AnotherCluster, KafkaUnreachable, TopicMissing
from tests.unit.simulated_brokers import FETCH, FIND, INIT, METADATA, OFFSETS, SILENT, VERSIONS, SimulatedBrokers


@pytest.fixture
def brokers():
    """Two brokers; the topic's three partitions are led by the first, the second, and none."""
    with SimulatedBrokers(nodes=2, partitions=3) as made:
        made.topic[1].leader, made.topic[2].leader = 2, None
        yield made


@pytest.fixture
def asked(brokers):
    """What a question to the brokers gives: asked(lambda cluster: cluster.fetch(0, 0))."""

    def ask(question, *, refreshed=True, known=None, **settings):
        async def answer():
            destination = KafkaDestination(bootstrap_servers=brokers.servers, **settings)
            cluster = Cluster(destination, brokers.name, known)
            try:
                if refreshed:
                    await cluster.refresh()
                return await question(cluster)
            finally:
                await cluster.close()

        return asyncio.run(answer())

    return ask


def test_the_leaders_and_the_readable_range_are_those_of_the_brokers(brokers, asked):
    brokers.topic[0].write(b"0", b"1")
    brokers.topic[1].write(b"2")
    brokers.topic[0].retain(1)

    async def look(cluster):
        assert (cluster.leaders, cluster.partitions) == ({0: 1, 1: 2}, 3)
        assert await cluster.bounds(0) == PartitionBounds(1, 2)
        assert await cluster.ends([0, 1]) == {0: 2, 1: 1}
        found = await cluster.fetch_many({0: 1, 1: 0})
        assert found == {0: brokers.topic[0].batches[0], 1: brokers.topic[1].batches[0]}
        assert await cluster.fetch(1, 1) == b""
        assert await cluster.find_coordinator("a name") == 1
        assert [await cluster.has_topic(name) for name in (brokers.name, "another")] == [True, False]
        assert cluster.connection_of(0) is await cluster.connection(1)
        assert cluster.connection_of(2) is None
        assert await cluster.connection(1) is await cluster.connection(1), "one connection to each broker"
        cluster.drop(1)
        assert cluster.connection_of(0) is None
        broken = await cluster.connection(1)
        broken.close()
        assert cluster.connection_of(0) is None
        assert await cluster.connection(1) is not broken
        return await cluster.init_producer_id()

    assert asked(look) == (brokers.newest_producer_id, 0)


@pytest.mark.parametrize(
    ("request_key", "code", "question", "told"),
    [
        (
            METADATA,
            Code.TOPIC_AUTHORIZATION_FAILED,
            lambda c: c.refresh(),
            "of topic orders: TOPIC_AUTHORIZATION_FAILED",
        ),
        (INIT, Code.CLUSTER_AUTHORIZATION_FAILED, lambda c: c.init_producer_id(), "WRITE on topic 'orders'"),
        (
            INIT,
            Code.COORDINATOR_NOT_AVAILABLE,
            lambda c: c.init_producer_id(),
            "a producer id: COORDINATOR_NOT_AVAILABLE",
        ),
        (FIND, Code.COORDINATOR_NOT_AVAILABLE, lambda c: c.find_coordinator("n"), "id n: COORDINATOR_NOT_AVAILABLE"),
        (OFFSETS, Code.REQUEST_TIMED_OUT, lambda c: c.ends([0]), "the end of orders-0: REQUEST_TIMED_OUT"),
        (FETCH, Code.REQUEST_TIMED_OUT, lambda c: c.fetch(0, 7), "orders-0 from offset 7: REQUEST_TIMED_OUT"),
        (FETCH, Code.TOPIC_AUTHORIZATION_FAILED, lambda c: c.fetch(0, 7), "READ on topic 'orders'"),
        (None, None, lambda c: c.ends([2]), "orders-2: LEADER_NOT_AVAILABLE"),
        (None, None, lambda c: c.connection(3), "broker 3 is not known any more"),
    ],
)
def test_a_refusal_is_named_with_what_was_asked(brokers, asked, request_key, code, question, told):
    async def ask(cluster):
        if request_key is not None:
            brokers.faults[request_key] += [code]
        with pytest.raises(KafkaUnreachable, match=told):
            await question(cluster)

    asked(ask)


def test_one_partition_that_is_refused_keeps_no_other_from_being_answered(brokers, asked):
    brokers.topic[0].write(b"0")
    brokers.topic[1].write(b"1")

    async def ask(cluster):
        brokers.topic[1].leader = 1  # the second broker does not lead it any more
        ends, batches = {}, {}
        assert await cluster.ends([0, 1], ends) == {0: 1}
        assert (await cluster.fetch_many({1: 0, 0: 0}, failed=batches)).keys() == {0}
        for failed in (ends, batches):
            assert [(one, error.error_code) for one, error in failed.items()] == [(1, Code.NOT_LEADER_OR_FOLLOWER)]

    asked(ask)


def test_a_topic_that_is_not_there_is_missing_and_is_not_made(brokers, asked):
    brokers.is_missing = True
    with pytest.raises(TopicMissing, match="orders"):
        asked(lambda cluster: cluster.close())


def test_a_broker_that_does_not_answer_in_time_gets_another_connection(brokers, asked, monkeypatch):
    """A late answer would be taken for that to a later request."""
    monkeypatch.setattr(module, "_FETCH_WAIT_MS", 0)

    async def ask(cluster):
        kept = await cluster.connection(1)
        brokers.faults[OFFSETS] += [SILENT]
        with pytest.raises(TimeoutError):
            await cluster.ends([0])
        assert cluster.silent(0.0).keys() == {1}, "it has led a partition, and given no answer"
        assert await cluster.ends([0]) == {0: 0}
        assert cluster.silent(0.0) == {}
        assert await cluster.connection(1) is not kept

    asked(ask, request_timeout_ms=50)


def test_a_connection_that_is_made_while_the_cluster_closes_is_closed_too(asked, monkeypatch):
    closing, made, connect = [], [], module.Connection.connect

    async def then_close(self):
        found = await connect(self)
        made.append(self)
        closing.append(asyncio.ensure_future(closing.pop().close()))  # in the next turn of the loop: all is connected
        return found

    async def ask(cluster):
        closing.append(cluster)
        monkeypatch.setattr(module.Connection, "connect", then_close)
        await cluster.connection(1)
        await closing[0]
        assert [one.connected() for one in made] == [False]

    asked(ask)


def test_what_a_broker_is_waited_for_is_told_until_it_answers():
    async def wait():
        cluster = Cluster(KafkaDestination(bootstrap_servers="b:1"), "orders", KnownBrokers(addresses={1: ("b", 9)}))

        def silent():
            return {node: why for node, (why, _) in cluster.silent(0.0).items()}

        with cluster.awaiting(1, DOES_NOT_ANSWER):
            assert silent() == {1: "broker 1 at b:9 does not answer"}
            assert cluster.silent(60.0) == {}
            with cluster.awaiting(1, TAKES_NO_CONNECTION):
                assert silent() == {1: "broker 1 at b:9 takes no connection"}
            assert silent().keys() == {1}, "the other request waits on"
        assert silent() == {}
        for error, is_told in ((TimeoutError, True), (asyncio.CancelledError, False), (KafkaUnreachable, False)):
            with pytest.raises(error), cluster.awaiting(1, DOES_NOT_ANSWER):
                raise error("no answer")
            assert silent() == {}, "it leads nothing, and nobody waits"
            cluster.leaders = {0: 1}
            assert bool(silent()) == is_told, error
            cluster.leaders = {}
        with cluster.awaiting(1, DOES_NOT_ANSWER):
            with pytest.raises(asyncio.CancelledError), cluster.awaiting(1, DOES_NOT_ANSWER):
                raise asyncio.CancelledError
            assert silent().keys() == {1}, "one of two questions was given up"

    asyncio.run(wait())


def test_brokers_of_another_cluster_are_not_asked_and_said(brokers, asked):
    with pytest.raises(AnotherCluster) as told:
        asked(lambda cluster: cluster.refresh(), known=KnownBrokers("our cluster"))
    assert (told.value.expected, told.value.found) == ("our cluster", "a cluster")

    async def ask(cluster):
        brokers.cluster_id = "another"
        with pytest.raises(KafkaUnreachable, match=r"broker 1 at .* is of cluster another now"):
            await cluster.connection(1)
        with pytest.raises(KafkaUnreachable, match="broker 1 is not known any more"):
            await cluster.connection(1)

    async def ask_anew(cluster):
        await cluster.refresh()
        cluster.drop(1)
        cluster.drop(2)
        await ask(cluster)

    asked(ask_anew, known=KnownBrokers("a cluster"))


def test_who_was_seen_alive_is_asked_where_no_named_address_is_left(brokers, asked):
    known = KnownBrokers()
    asked(lambda cluster: cluster.refresh(), known=known)
    servers = brokers.servers

    async def alone():
        left = Cluster(KafkaDestination(bootstrap_servers="127.0.0.1:1"), brokers.name, known)
        every = left.destination.bootstrap_servers.split(",")
        assert every[-1] == "127.0.0.1:1"
        assert set(every[:-1]) == set(servers.split(","))
        await left.refresh()
        assert set(left.destination.bootstrap_servers.split(",")) == set(servers.split(","))
        await left.close()

    asyncio.run(alone())
    brokers.down = {1, 2}
    with pytest.raises(KafkaUnreachable):
        asked(lambda cluster: cluster.refresh(), refreshed=False)


def test_the_token_of_the_callers_function_is_what_a_broker_gets():
    """aiokafka's own words to it: a request for versions, the mechanism, and the token."""
    frames = []

    async def serve(reader, writer):
        spoken = struct.pack(">hi" + "hhh" * 3, 0, 3, 17, 0, 1, 36, 0, 1, VERSIONS, 0, 0)
        for answer in (spoken, struct.pack(">hih", 0, 1, 11) + b"OAUTHBEARER"):
            (size,) = struct.unpack(">i", await reader.readexactly(4))
            frames.append(await reader.readexactly(size))
            writer.write(struct.pack(">i", 4 + len(answer)) + frames[-1][4:8] + answer)
        (size,) = struct.unpack(">i", await reader.readexactly(4))
        frames.append(await reader.readexactly(size))
        writer.close()

    async def ask():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            destination = KafkaDestination(
                bootstrap_servers=f"127.0.0.1:{server.sockets[0].getsockname()[1]}",
                security_protocol="SASL_PLAINTEXT",
                sasl_mechanism="OAUTHBEARER",
                sasl_oauth_token=lambda: ("the token", 1e10),
            )
            cluster = Cluster(destination, "orders")
            with pytest.raises(KafkaUnreachable):
                await cluster.refresh()
            await cluster.close()

    asyncio.run(ask())
    assert b"auth=Bearer the token\x01" in frames[-1]
