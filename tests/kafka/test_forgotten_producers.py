"""Brokers without state of a producer: of several batches they may refuse the first and accept the second.

A broker accepts any first sequence number of a producer id without state: a new one, one without batches for
`producer.id.expiration.ms`, and one whose records are older than that, after a restart of the broker. A producer with
only one batch in flight leaves no gap then. The judge is the replay filter over the topic's records.
"""

import itertools

import pytest

from filtering import StreamMetadata
from pushrep.kafka import KafkaDestination
from pushrep.log import Durability
from pushrep.outbox import Outbox, OutboxConfig
from tests.integration.outboxes import wait_until
from tests.kafka.cluster import KafkaCluster, missing
from tests.kafka.plain_client import create_topic
from tests.kafka.spoiling import VALUE_BYTES_MIN, SpoilingProxy
from tests.kafka.topic_reader import read_filtered

pytestmark = [pytest.mark.java, pytest.mark.slow]

PID, IN_2013_MS, EXPIRATION_MS, WAIT_S = 7, 1_370_000_000_000, 1000, 120
VALUE = b"%020d"
assert len(VALUE % 0) == VALUE_BYTES_MIN
_topics = (f"forgotten-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def proxy():
    with SpoilingProxy() as made:
        yield made


@pytest.fixture(scope="module")
def forgetful(proxy, tool_or_skip, tmp_path_factory):
    """A broker that forgets silent producers at once, reached through the proxy."""
    tool_or_skip(missing())
    settings = {
        "producer.id.expiration.ms": str(EXPIRATION_MS),
        "producer.id.expiration.check.interval.ms": "100",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{proxy.port}",
    }
    made = KafkaCluster(tmp_path_factory.mktemp("forgetful"), settings=settings)
    proxy.target = int(made.bootstrap_servers.rpartition(":")[2])  # whoever waits for it may be sent here already
    with made as cluster:
        yield cluster


@pytest.fixture
def topic(forgetful):
    create_topic(forgetful.bootstrap_servers, name := next(_topics), retention_ms=-1)
    return name


def confluent(cluster, topic):
    from partitioner.confluent import SourcePartitionProducer

    settings = {"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0, "linger.ms": 0}
    return SourcePartitionProducer({**settings, "batch.num.messages": 1, "socket.timeout.ms": 3000}, topic)


def produce(producer, offsets):
    for offset in offsets:
        producer.produce(StreamMetadata(PID, 0, offset), VALUE % offset, timestamp_ms=IN_2013_MS + offset)


def visible(cluster, topic, pid=PID):
    """The source offsets that a reader behind the filter sees."""
    return [
        StreamMetadata.unpack(one.key).offset for one in read_filtered(cluster.bootstrap_servers, topic, 1).of(pid, 0)
    ]


def known_producers(cluster, topic):
    """The number of producer ids in the partition's state at the broker; None if it does not answer now."""
    from kafka import KafkaAdminClient, TopicPartition
    from kafka.errors import KafkaError

    admin = KafkaAdminClient(bootstrap_servers=cluster.bootstrap_servers)
    try:
        [states] = admin.describe_producers([TopicPartition(topic, 0)]).values()
    except KafkaError as error:
        if not error.retriable:
            raise
        return None  # its leader is to come
    finally:
        admin.close()
    return len(states.active_producers)


def test_a_new_producer_whose_first_batch_is_refused_leaves_no_hole(forgetful, proxy, topic):
    """Contract: "what each attempt writes for a pair reaches the log in order and without holes"."""
    with confluent(forgetful, topic) as producer:
        before = proxy.spoiled
        proxy.spoil_next()
        produce(producer, range(20))
        producer.flush()
        assert proxy.spoiled == before + 1
    assert visible(forgetful, topic) == list(range(20))


def test_records_of_2013_reach_a_broker_that_starts_again_without_a_hole(forgetful, proxy, topic):
    """Brokers measure a producer's silence by its records' times: this one has forgotten it when it is back."""
    with confluent(forgetful, topic) as producer:
        produce(producer, range(100))
        producer.flush()
        forgetful.shut_down()  # after a kill it would know the producer from its log, until it looks
        produce(producer, range(100, 120))
        before = proxy.spoiled
        proxy.spoil_next()
        forgetful.start()
        producer.flush(2 * WAIT_S)
        assert proxy.spoiled == before + 1
    assert visible(forgetful, topic) == list(range(120))


@pytest.mark.filterwarnings("ignore:.*Use files:DeprecationWarning")  # by kafka-python, at its import
def test_an_outbox_ships_gapless_to_a_broker_that_forgot_it(forgetful, proxy, topic, tmp_path):
    """Contract: "the first batch under an id that is new, or idle for longer than `producer.id.expiration.ms`, goes
    alone". Behind a fence, which is renewed in time, a broker does not forget it.
    """
    destination = KafkaDestination(bootstrap_servers=forgetful.bootstrap_servers, retry_backoff_ms=20, fence="off")
    count = itertools.count()

    def append(outbox, batches):
        before = proxy.spoiled
        proxy.spoil_next()
        for _ in range(batches):
            outbox.append_many(0, [VALUE % next(count)])
            outbox.flush()
        outbox.wait_shipped(WAIT_S)
        assert proxy.spoiled == before + 1

    with Outbox.open(
        tmp_path,
        topic,
        1,
        "test",
        kafka=destination,
        durability=Durability.BUFFERED,
        config=OutboxConfig(open_timeout_s=WAIT_S),
    ) as outbox:
        for _ in range(2):
            append(outbox, 20)
            wait_until(lambda: known_producers(forgetful, topic) == 0, "the broker forgets who is silent", 0.2)
        append(outbox, 20)
        found = read_filtered(forgetful.bootstrap_servers, topic, 1)
        assert [one.value for one in found.of(outbox.pid, 0)] == [VALUE % n for n in range(60)]
        assert found.copies == 0
