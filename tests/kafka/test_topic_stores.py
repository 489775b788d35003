"""A store in a topic that was deleted and made again."""

import itertools

import pytest
from confluent_kafka.admin import AdminClient
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from pushrep.errors import CorruptFile
from pushrep.kafka import KafkaDestination
from pushrep.kafka.startpoints import open_store
from pushrep.kafka.topic import look_at_topic
from pushrep.startpoints import Startpoint
from tests.kafka.plain_client import create_topic

pytestmark = [pytest.mark.java, pytest.mark.slow]
_names = (f"topic-stores-{number}" for number in itertools.count())


@pytest.fixture
def destination(broker):
    create_topic(broker.bootstrap_servers, name := next(_names), cleanup_policy="compact")
    return KafkaDestination(bootstrap_servers=broker.bootstrap_servers, topic=name)


def make_anew(destination):
    """Delete the topic and make it again; every broker knows that when this returns."""
    before = look_at_topic(destination, destination.topic).topic_id
    admin = AdminClient({"bootstrap.servers": destination.bootstrap_servers, "log_level": 0})
    admin.delete_topics([destination.topic])[destination.topic].result(60)
    create_topic(destination.bootstrap_servers, destination.topic, cleanup_policy="compact")
    still = Retrying(retry=retry_if_result(lambda now: now == before), stop=stop_after_delay(60), wait=wait_fixed(0.1))
    still(lambda: look_at_topic(destination, destination.topic).topic_id)


def test_a_store_of_startpoints_whose_topic_was_made_anew_says_so(destination):
    with open_store(destination) as old:
        for _ in range(2):
            old.write("billing", "orders", 0, Startpoint.earliest(), "go")
        make_anew(destination)
        with open_store(destination) as new:
            sequences = [new.write("billing", "orders", 0, Startpoint.latest(), "there") for _ in range(3)]
            for use in (old.history, lambda: old.write("billing", "orders", 0, Startpoint.earliest(), "go")):
                with pytest.raises(CorruptFile, match=r"deleted and made again.*restart this program"):
                    use()
            assert [fact.sequence for fact in new.history()] == sequences
