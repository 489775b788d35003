"""What the relay refuses with a real broker, each by name, and the topic afterwards."""

import json
import time
import uuid

import pytest
from confluent_kafka.admin import AdminClient

from filtering import StreamMetadata
from tests.kafka.plain_client import alter_topic, consume, create_topic, plain_producer

pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.slow]

HOUR_MS = 3_600_000


class Relay:
    """A source of twenty records, a destination, a checkpoint; `.run(...)` is the job's command."""

    def __init__(self, driver, servers, place):
        self._driver, self.servers, self.place = driver, servers, place
        tag = uuid.uuid4().hex[:8]
        self.source, self.destination = f"refused-in-{tag}", f"refused-out-{tag}"

    def fill(self, timestamp_ms=0):
        producer = plain_producer(self.servers)
        for n in range(20):
            key = StreamMetadata(7, 0, n).pack()
            producer.produce(self.source, b"%d" % n, key, 0, timestamp=timestamp_ms or int(time.time() * 1000))
        assert producer.flush(60) == 0

    def run(self, *more, source=None):
        return self._driver.job(
            name="relay",
            arguments=[
                *("--source", "kafka", "--source-option", f"kafka.bootstrap.servers={self.servers}"),
                *("--topic", source or self.source, "--to-topic", self.destination, "--application", "billing"),
                *("--checkpoint", str(self.place / "checkpoint"), "--to-option", "log_level=0", *more),
            ],
        )

    def sent(self):
        return len(consume(self.servers, self.destination))

    def make_anew(self, topic):
        admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})
        admin.delete_topics([topic])[topic].result(60)
        create_topic(self.servers, topic)


@pytest.fixture
def relay(spark_driver, broker, tmp_path):
    return Relay(spark_driver, broker.bootstrap_servers, tmp_path)


def refused(answer, *words):
    code, said = answer
    assert code == 1, said
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, said
    assert not [word for word in words if word not in lines[0]], lines[0]


def test_a_compacted_destination(relay):
    """Contract "When it is safe": jobs read the topic's settings at start and refuse compaction, by name."""
    create_topic(relay.servers, relay.source)
    create_topic(relay.servers, relay.destination, cleanup_policy="compact")
    refused(relay.run(), "--to-topic", "cleanup.policy")
    assert not (relay.place / "checkpoint").exists()


def test_a_retention_shorter_than_the_records_are_old(relay):
    """Contract "When it is safe": retention compares record timestamps with the clock; nothing old is sent to die."""
    create_topic(relay.servers, relay.source, retention_ms=-1)
    create_topic(relay.servers, relay.destination, retention_ms=HOUR_MS)
    relay.fill(timestamp_ms=1_700_000_000_000)
    refused(relay.run(), f"retention.ms={HOUR_MS}", "record 0 of", relay.destination)
    assert relay.sent() == 0
    alter_topic(relay.servers, relay.destination, retention_ms=-1)
    code, said = relay.run()
    assert (code, relay.sent()) == (0, 20), said


def test_topics_that_were_made_anew_and_another_relay_s_checkpoint(relay):
    """Contract "PIDs": a source is its incarnation, the topic's id, and so is a destination."""
    create_topic(relay.servers, relay.source)
    create_topic(relay.servers, relay.destination)
    relay.fill()
    code, said = relay.run()
    assert (code, relay.sent()) == (0, 20), said
    refused(relay.run("--application", "audit"), "--application", "'billing'")
    create_topic(relay.servers, other := f"{relay.source}-2")
    refused(relay.run(source=other), f"--topic='{other}'", relay.source)
    code, said = relay.run()
    assert (code, relay.sent()) == (0, 20), said
    relay.make_anew(relay.destination)
    refused(relay.run(), "--to-topic", "was made anew")
    assert relay.sent() == 0
    relay.make_anew(relay.source)
    relay.fill()
    refused(relay.run(), "made anew")
    assert json.loads((relay.place / "checkpoint-relay" / "epoch-0.json").read_text())["application"] == "billing"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--source-option", "failOnDataLoss=false"), "--source-option failOnDataLoss"),
        (("--trigger", "realtime"), "Real-Time Mode admits no Python operator"),
        (("--to-option", "acks=1"), "--to-option acks"),
    ],
)
def test_options_that_lose_records(relay, more, named):
    """Contract "Spark": the relay refuses failOnDataLoss=false; jobs refuse Real-Time Mode."""
    create_topic(relay.servers, relay.source)
    create_topic(relay.servers, relay.destination)
    refused(relay.run(*more), named)
    assert not (relay.place / "checkpoint").exists()


def test_topics_that_are_not_there(relay):
    create_topic(relay.servers, relay.source)
    refused(relay.run(), "--to-topic", relay.destination)
    create_topic(relay.servers, relay.destination)
    refused(relay.run(source="refused-none"), "--topic='refused-none'")
