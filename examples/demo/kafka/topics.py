"""The topics of the demo through Kafka, made and watched by a plain client: `python -m examples.demo.kafka.topics`.

make     two topics that keep records of 2013 (retention.ms=-1); returns when every broker knows them
watch    where they end, one JSON object a line, for as long as it runs:
           {"event": "ends", "asked_at_s": 17.2, "ends": {"flights": [10, 20, 30], "flights-relayed": [0, 0, 0]}}
           {"event": "away", "why": "..."}     while no broker answers

`asked_at_s` is this machine's monotonic clock before the question: the answer is not older.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Final

import click
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from filtering.retry import Backoff, RetryPolicy
from pushrep.errors import PushrepError

MADE_WITHIN_S: Final = 60.0
LOOK_EVERY_S: Final = 0.2
ANSWER_WITHIN_S: Final = 2.0
_QUIET: Final = {"log_level": 0}
_LATER: Final = frozenset(
    {
        KafkaError._TIMED_OUT,  # noqa: SLF001 - the client's own names of its local errors
        KafkaError._TRANSPORT,  # noqa: SLF001
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NOT_CONTROLLER,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.INVALID_REPLICATION_FACTOR,
    }
)


class TopicsNotMade(PushrepError):
    """The brokers refuse to make the topics, or did not within a minute."""


class TopicsNotKnown(TopicsNotMade):
    """Not yet; asked again they may be."""


_PATIENTLY: Final = RetryPolicy(
    # A broker that just starts has no controller yet, and knows of no broker that could hold a topic.
    is_retriable=lambda error: isinstance(error, TopicsNotKnown | KafkaException),
    backoff=Backoff(LOOK_EVERY_S, LOOK_EVERY_S, least=1.0),
    within_s=MADE_WITHIN_S,
)


def client(servers: str) -> AdminClient:
    """Says nothing about brokers that are away: that is this demo's daily bread."""
    return AdminClient({"bootstrap.servers": servers, "socket.timeout.ms": 3000, **_QUIET})


def make_topics(servers: str, topics: Sequence[str], partitions: int) -> None:
    """Make them, and wait until each broker names all of their partitions. Raises TopicsNotMade."""
    admin, left = client(servers), set(topics)
    attempts = count(1)
    _PATIENTLY.call(lambda: _refuse_those_of(admin, left))
    _PATIENTLY.call(lambda: _ask_for(admin, left, partitions, is_first=next(attempts) == 1))
    _PATIENTLY.call(lambda: _check_all_know(admin, topics, partitions))


def _check_all_know(admin: AdminClient, topics: Sequence[str], partitions: int) -> None:
    for broker in admin.list_topics(timeout=ANSWER_WITHIN_S).brokers.values():
        _check_known(f"{broker.host}:{broker.port}", topics, partitions)


def _refuse_those_of(admin: AdminClient, topics: set[str]) -> None:
    """Looked at before anything is asked for: later on it may be our own question, unanswered, that made them."""
    if there := sorted(topics & set(admin.list_topics(timeout=ANSWER_WITHIN_S).topics)):
        raise TopicsNotMade(f"topic {there[0]} was not made: it already exists")


def _ask_for(admin: AdminClient, left: set[str], partitions: int, *, is_first: bool) -> None:
    """Ask for what is left to make, and take out of `left` what is made."""
    # compression and copies are the brokers' own; only the age of the records must not count
    wanted = [NewTopic(topic, partitions, -1, config={"retention.ms": "-1"}) for topic in sorted(left)]
    for topic, made in admin.create_topics(wanted, operation_timeout=ANSWER_WITHIN_S).items():
        try:
            made.result(MADE_WITHIN_S)
        except KafkaException as error:
            code = error.args[0].code()
            # Asked before, it may have been made by the question that was not answered.
            if code != KafkaError.TOPIC_ALREADY_EXISTS or is_first:
                kind = TopicsNotKnown if code in _LATER else TopicsNotMade
                raise kind(f"topic {topic} was not made: {error.args[0].str()}") from error
        left.discard(topic)


def _check_known(broker: str, topics: Sequence[str], partitions: int) -> None:
    known = client(broker).list_topics(timeout=ANSWER_WITHIN_S).topics
    for topic in topics:
        led = [one for one in known[topic].partitions.values() if one.leader >= 0] if topic in known else []
        if len(led) < partitions:
            raise TopicsNotKnown(f"broker {broker} knows {len(led)} of {partitions} partitions of topic {topic}")


class Ends:
    """Where topics end, asked of their leaders one by one; `topics`: their partitions. Close it."""

    def __init__(self, servers: str, topics: Mapping[str, int]) -> None:
        self._servers, self._topics = servers, topics
        self._consumer: Consumer | None = None

    def ask(self) -> dict[str, list[int]]:
        """Per topic the end of each partition. Raises KafkaException while a leader is away."""
        if self._consumer is None:
            # An admin client's list_offsets goes on with the leader's old epoch after a restart, and is refused.
            settings = {"bootstrap.servers": self._servers, "group.id": "pushrep-demo", **_QUIET}
            self._consumer = Consumer(settings)
        try:
            return {topic: [self._end(topic, n) for n in range(count)] for topic, count in self._topics.items()}
        except KafkaException:
            self.close()
            raise

    def close(self) -> None:
        """The next question makes a client again."""
        if self._consumer is not None:
            consumer, self._consumer = self._consumer, None
            consumer.close()

    def _end(self, topic: str, partition: int) -> int:
        assert self._consumer is not None, "made before the first question"
        place = TopicPartition(topic, partition)
        found = self._consumer.get_watermark_offsets(place, ANSWER_WITHIN_S, cached=False)
        if found is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))  # noqa: SLF001 - the client's own name
        return int(found[1])


def print_event(event: str, **facts: Any) -> None:
    """One line; a reader that went away ends the program by BrokenPipeError."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


@click.group()
def main() -> None:
    """The demo's topics."""


@main.command()
@click.option("--servers", required=True, help="HOST:PORT, several with commas.")
@click.option("--partitions", type=click.IntRange(1), default=3)
@click.argument("topics", nargs=-1, required=True)
def make(servers: str, partitions: int, topics: tuple[str, ...]) -> None:
    """Make TOPICS."""
    try:
        make_topics(servers, topics, partitions)
    except (TopicsNotMade, KafkaException) as error:
        raise click.ClickException(f"{servers}: {error}") from error


@main.command()
@click.option("--servers", required=True, help="HOST:PORT, several with commas.")
@click.option("--partitions", type=click.IntRange(1), default=3)
@click.argument("topics", nargs=-1, required=True)
def watch(servers: str, partitions: int, topics: tuple[str, ...]) -> None:
    """Print where TOPICS end, until the end of this program."""
    ends = Ends(servers, dict.fromkeys(topics, partitions))
    while True:
        asked_at_s = time.monotonic()
        try:
            print_event("ends", ends=ends.ask(), asked_at_s=asked_at_s)
        except KafkaException as error:
            print_event("away", why=str(error))
        time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    main()
