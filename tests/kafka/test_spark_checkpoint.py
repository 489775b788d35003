"""apply-checkpoint and Spark's Kafka source, with a real broker: the query continues at the chosen offset."""

import uuid

import pytest

from filtering import StreamMetadata
from tests.kafka.plain_client import create_topic, plain_producer

pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.slow]


@pytest.fixture
def topic(broker):
    """Two partitions of ten records each; those at 5 and 6 are those at 3 and 4 once more."""
    create_topic(broker.bootstrap_servers, name := f"checkpoint-{uuid.uuid4().hex[:8]}", partitions=2)
    producer = plain_producer(broker.bootstrap_servers)
    for partition in range(2):
        for n in range(10):
            key = StreamMetadata(5, partition, n if n < 5 else n - 2).pack()
            producer.produce(name, b"%d" % n, key, partition=partition)
    assert producer.flush(60) == 0
    return name


def test_a_kafka_source_goes_on_at_the_named_offset(spark_driver, broker, topic, tmp_path):
    told = spark_driver.sent_back(place=tmp_path, servers=broker.bootstrap_servers, topic=topic)
    first, second, third, last, table = told
    assert sorted(map(tuple, first)) == [(partition, n) for partition in range(2) for n in range(10)]
    assert sorted(map(tuple, second)) == [(1, n) for n in range(3, 10)]
    assert sorted(map(tuple, third)) == [(0, 8), (0, 9)]
    assert last == [], "once"
    kept = [0, 1, 2, 3, 4, 7, 8, 9]
    again = [[1, n, str(n) if n >= 4 else "wrong"] for n in kept]
    assert table == [[0, n, "wrong"] for n in kept] + again, "the apply job replaces rows of what comes again"
