"""Brokers are asked again while coordinators and leaders move, and no longer than the caller waits."""

import asyncio
from typing import NamedTuple

import pytest

pytest.importorskip("confluent_kafka")
pytest.importorskip("aiokafka")

from aiokafka import TopicPartition as AioPartition
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    GroupCoordinatorNotAvailableError,
    NoError,
    NotCoordinatorForGroupError,
    UnknownTopicOrPartitionError,
)
from aiokafka.structs import OffsetAndMetadata
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, Message, TopicPartition

from filtering import MissingRight
from filtering.consumers import confluent
from filtering.consumers.aiokafka import ask_committed
from filtering.consumers.aiokafka import failure_of as failure_of_aiokafka
from filtering.consumers.confluent_client import (
    ask_bounds,
    ask_brokers,
    failure_of,
    failure_of_transaction,
    is_too_early,
    send,
)
from filtering.retry import Backoff, Failure, RetryPolicy

PASSING = [
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
]


class Refusing:
    """A client whose calls fail with these first, each of them once; then the real one's answer, or `answer`."""

    def __init__(self, *failures, answer=None):
        self.failures, self.answer, self.calls = list(failures), answer, 0

    def __call__(self, *_, **__):
        self.calls += 1
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, BaseException):
                raise failure
            return failure
        return self.answer


@pytest.mark.parametrize("code", PASSING, ids=lambda code: KafkaError(code).name())
def test_a_passing_failure_is_asked_again(code):
    call = Refusing(KafkaException(KafkaError(code)), KafkaException(KafkaError(code)), answer="here")
    assert ask_brokers(call) == "here"
    assert call.calls == 3


@pytest.mark.parametrize(
    "error",
    [
        KafkaException(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)),
        KafkaException(KafkaError(KafkaError.ILLEGAL_GENERATION)),
        KafkaException(KafkaError(KafkaError._TRANSPORT, "", True)),
        ValueError("a typo"),
    ],
    ids=["not allowed", "another generation", "fatal", "no answer of a broker"],
)
def test_any_other_failure_is_raised_at_once(error):
    call = Refusing(error, answer="here")
    with pytest.raises(type(error)) as raised:
        ask_brokers(call)
    assert raised.value is error
    assert call.calls == 1


def test_what_never_passes_ends_with_the_last_failure():
    code = KafkaError.NOT_COORDINATOR
    call = Refusing(*[KafkaException(KafkaError(code)) for _ in range(10_000)])
    with pytest.raises(KafkaException, match="coordinator"):
        ask_brokers(call, timeout_s=0.2)
    assert call.calls > 1


def test_a_topic_that_is_not_there_is_waited_for_a_little(monkeypatch):
    """Some brokers do not know a new topic yet."""
    missing = KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
    assert ask_brokers(Refusing(missing, answer=2)) == 2
    monkeypatch.setattr("filtering.retry.APPEARS_WITHIN_S", 0.1)
    call = Refusing(*[missing] * 10_000)
    with pytest.raises(KafkaException, match="topic"):
        ask_brokers(call, timeout_s=3600)


def test_the_time_that_is_left_is_the_calls():
    left = []

    def question(left_s):
        left.append(left_s)
        if len(left) < 3:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    ask_brokers(question, 30)
    assert 30 >= left[0] > left[1] > left[2] > 0


def test_bounds_without_an_answer_are_asked_for_again():
    client = type("Client", (), {"get_watermark_offsets": Refusing(None, answer=(3, 9))})()
    assert ask_bounds(client, "orders", 0) == (3, 9)


def test_a_step_of_a_transaction_is_repeated_only_where_the_client_says_so():
    retriable = KafkaException(KafkaError(KafkaError._TIMED_OUT, "", False, True))
    abortable = KafkaException(KafkaError(KafkaError._TIMED_OUT, "", False, False, True))
    plain = KafkaException(KafkaError(KafkaError._TIMED_OUT))
    found = [failure_of_transaction(one).name for one in (retriable, abortable, plain)]
    assert found == ["TRANSIENT", "PERMANENT", "PERMANENT"]
    assert failure_of(abortable).name == "PERMANENT"


class Client:
    """A client with one record, and the answers of a coordinator that moves."""

    def __init__(self, **calls):
        self.assigned = []
        for name, call in calls.items():
            setattr(self, name, call)

    def assign(self, partitions):
        self.assigned = partitions

    def poll(self, _):
        return Message(topic="orders", partition=0, offset=0, key=b"\0" * 20, value=b"v")

    def close(self):
        pass


class Answered(NamedTuple):
    """A partition in an answer, as the client gives one that failed."""

    topic: str
    partition: int
    error: KafkaError


def test_a_consumer_is_assigned_and_commits_while_its_coordinator_moves(monkeypatch):
    moved = KafkaException(KafkaError(KafkaError.NOT_COORDINATOR))
    inside = [Answered("orders", 0, KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS))]
    committed = Refusing(moved, inside, answer=[TopicPartition("orders", 0, OFFSET_INVALID)])
    commit = Refusing(moved, inside, answer=[TopicPartition("orders", 0, 1)])
    client = Client(committed=committed, commit=commit)
    monkeypatch.setattr(confluent, "Consumer", lambda _: client)
    reader = confluent.ReplayFilteredConsumer({"bootstrap.servers": "127.0.0.1:9", "group.id": "g", "log_level": 0})
    reader.assign([TopicPartition("orders", 0)])
    assert [(one.topic, one.partition, one.offset) for one in client.assigned] == [("orders", 0, OFFSET_INVALID)]
    assert committed.calls == 3
    assert reader.poll(0).offset() == 0
    reader.commit()
    assert commit.calls == 3


class Admin:
    def __init__(self, *answers):
        self.answers = list(answers)

    async def list_consumer_group_offsets(self, group, partitions):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_aiokafkas_answer_without_what_was_asked_for_is_no_answer():
    """The client hands over an empty one for "not coordinator": taken as "nothing committed" it replays everything."""
    place = AioPartition("orders", 0)
    whole = {place: OffsetAndMetadata(7, "")}
    admin = Admin(NotCoordinatorForGroupError(), {}, GroupCoordinatorNotAvailableError(), whole)
    assert asyncio.run(ask_committed(admin, "g", [place])) == whole
    assert admin.answers == []
    with pytest.raises(GroupCoordinatorNotAvailableError, match="orders"):
        asyncio.run(ask_committed(Admin(*[{}] * 10_000), "g", [place], 0.2))
    with pytest.raises(MissingRight, match="READ on group 'g'"):
        asyncio.run(ask_committed(Admin(GroupAuthorizationFailedError()), "g", [place]))
    assert asyncio.run(ask_committed(Admin(), "g", [])) == {}


def test_pauses_double_up_to_the_longest_and_are_random_from_the_least_share_on():
    backoff = Backoff(first_s=0.1, longest_s=2.0, least=0.5)
    assert backoff.pause_s(0) == 0.0
    for failures, most_s in ((1, 0.1), (2, 0.2), (5, 1.6), (6, 2.0), (10_000, 2.0)):
        pauses = {backoff.pause_s(failures) for _ in range(50)}
        assert 0.5 * most_s <= min(pauses) < max(pauses) <= most_s
    assert {Backoff(0.1, 2.0, least=1.0).pause_s(2) for _ in range(9)} == {0.2}


def test_a_policy_calls_again_so_often_and_raises_the_last_error():
    pauses = []
    policy = RetryPolicy(
        is_retriable=lambda error: isinstance(error, OSError), backoff=Backoff(1.0, 2.0, least=1.0), attempts=4
    )
    call = Refusing(*(OSError(number) for number in range(9)))
    with pytest.raises(OSError, match="3"):
        policy.call(call, sleep=pauses.append)
    assert (call.calls, pauses) == (4, [1.0, 2.0, 2.0])
    call = Refusing(OSError(), ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        policy.call(call, sleep=pauses.append)
    assert call.calls == 2


def test_a_policy_begins_no_call_that_its_time_is_over_for():
    policy = RetryPolicy(
        is_retriable=lambda _: True,
        backoff=Backoff(3600.0, 3600.0, least=1.0),
        within_s=lambda error: 7200.0 if isinstance(error, OSError) else 60.0,
    )
    call = Refusing(OSError(), KeyError("short"), answer="never")
    with pytest.raises(KeyError):
        policy.call(call, sleep=lambda _: None)
    assert call.calls == 2


def test_a_policy_that_is_stopped_raises_the_error_that_came_before_it():
    failures, stopped = [], iter([False, True])
    policy = RetryPolicy(is_retriable=lambda error: isinstance(error, OSError), backoff=Backoff(0.1, 1.0))
    call = Refusing(OSError(1), OSError(2), OSError(3), answer="never")
    with pytest.raises(OSError, match="2"):
        policy.call(call, sleep=lambda _: True, is_stopped=lambda: next(stopped), on_failure=failures.append)
    assert [str(error) for error in failures] == ["1", "2"]


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (UnknownTopicOrPartitionError(), Failure.NOT_THERE),
        (NoError(), Failure.TRANSIENT),
        (TimeoutError(), Failure.TRANSIENT),
        (NotCoordinatorForGroupError(), Failure.TRANSIENT),
        (GroupAuthorizationFailedError(), Failure.PERMANENT),
        (ValueError(), Failure.PERMANENT),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else one.name,
)
def test_aiokafkas_failures_are_told_apart(error, failure):
    assert failure_of_aiokafka(error) is failure


class Sending:
    """A producer whose queue is full, or that is broken, at these records; reports: an error for each record, by place.

    lost: records of which no report comes.
    """

    def __init__(self, full=(), broken=(), reports=(), lost=()):
        self.full, self.broken, self.reports, self.lost = list(full), list(broken), dict(reports), set(lost)
        self.sent, self.fatal = [], None

    def produce(self, topic, value, key, *, on_delivery):
        if len(self.sent) in self.full:
            self.full.remove(len(self.sent))
            raise BufferError
        if len(self.sent) in self.broken:
            raise KafkaException(KafkaError(KafkaError._FATAL))
        self.sent.append((topic, key, value, on_delivery))

    def poll(self, timeout_s):
        assert timeout_s > 0, "a full queue is waited for"

    def flush(self, _timeout_s):
        if self.fatal is not None:
            raise SystemError from self.fatal
        for at, (_, key, _, told) in enumerate(self.sent):
            if at not in self.lost:
                told(self.reports.get(at), f"report of {key}")


RECORDS = [("a", b"1"), ("b", b"2"), ("c", b"3")]


def test_records_are_sent_in_order_also_through_a_full_queue():
    producer = Sending(full=[0, 1, 1])
    assert send(producer, "marks", RECORDS, 1) == ["report of a", "report of b", "report of c"]
    assert [one[:3] for one in producer.sent] == [("marks", key, value) for key, value in RECORDS]


@pytest.mark.parametrize(
    ("producer", "code"),
    [
        (
            Sending(reports={1: KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)}),
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
        ),
        (Sending(lost=[2]), KafkaError._TIMED_OUT),
        (Sending(broken=[1]), KafkaError._FATAL),
    ],
    ids=["refused", "no report", "broken"],
)
def test_no_record_that_is_not_there_counts_as_sent(producer, code):
    with pytest.raises(KafkaException) as raised:
        send(producer, "marks", RECORDS, 1)
    assert raised.value.args[0].code() == code


@pytest.mark.parametrize("broken", [[], [1]])
def test_a_fatal_error_of_the_client_is_raised_as_itself(broken):
    producer = Sending(broken=broken)
    producer.fatal = KafkaException(KafkaError(KafkaError.INVALID_PRODUCER_EPOCH))
    with pytest.raises(KafkaException) as raised:
        send(producer, "marks", RECORDS, 1)
    assert raised.value is producer.fatal


def test_only_a_partition_that_has_just_come_is_too_early_to_seek():
    assert is_too_early(KafkaException(KafkaError(KafkaError._STATE)))
    assert not is_too_early(KafkaException(KafkaError(KafkaError._FATAL)))
    assert not is_too_early(ValueError())
