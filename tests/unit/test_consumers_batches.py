"""librdkafka's messages as columns: the same as asking each of them; events and mixtures are left to the slow path."""

from confluent_kafka import KafkaError, Message
from hypothesis import given
from hypothesis import strategies as st

from filtering import StreamMetadata
from filtering.consumers.assignment import Assignment, FilterSettings
from filtering.consumers.confluent import columns_of, passing

KEYS = st.one_of(
    st.none(),
    st.binary(max_size=21),
    st.builds(lambda pid, offset: StreamMetadata(pid, 0, offset).pack(), st.integers(0, 1), st.integers(0, 9)),
)
LOGS = st.lists(st.tuples(st.sampled_from([0, 1, 255, 256]), KEYS), min_size=1, max_size=40)
EVENT = Message(topic="t", partition=0, offset=5, error=KafkaError(KafkaError._PARTITION_EOF))


def messages_of(log, topic="t"):
    """A record of each (partition, key), at offsets that leave gaps; a pair's PID is of its partition."""
    found = []
    for at, (partition, key) in enumerate(log):
        metadata = StreamMetadata.try_unpack(key)
        own = None if metadata is None else StreamMetadata(metadata.pid % 2 + 2 * partition, 0, metadata.offset)
        where = {"topic": topic, "partition": partition, "offset": 100 + 2 * at}
        found.append(Message(**where, key=key if own is None else own.pack(), value=b"%d" % at))
    return found


def reading(log):
    made = Assignment(FilterSettings())
    for partition in {partition for partition, _ in log}:
        made.assign(("t", partition), None)
    return made


@given(LOGS)
def test_a_batch_in_columns_is_as_many_records_one_by_one(log):
    messages, batch, singly = messages_of(log), reading(log), reading(log)
    columns = columns_of(messages, batch.topics, Message.key)
    kept = passing(messages, batch.admit_columns(*columns))
    wanted = [one for one in messages if singly.admit(("t", one.partition()), one.offset(), one.key())]
    assert [one.value() for one in kept] == [one.value() for one in wanted]
    assert batch.counts == singly.counts
    for one in batch:
        assert (batch.position(one), batch.began(one)) == (singly.position(one), singly.began(one))
    assert batch.due(7) == singly.due(7)


@given(LOGS, st.data())
def test_with_an_event_among_them_there_are_no_columns(log, data):
    messages = messages_of(log)
    messages.insert(data.draw(st.integers(0, len(messages))), EVENT)
    assert columns_of(messages, reading(log).topics, Message.key) is None


@given(LOGS, LOGS)
def test_records_of_two_topics_are_told_apart_also_when_one_has_just_gone(log, other):
    """A batch may have records of a partition that was revoked while it was fetched: its topic must still be known."""
    made = reading(log)
    made.assign(("u", 0), None)
    made.drop([("u", 0)])
    assert columns_of(messages_of(log) + messages_of(other, "u"), made.topics, Message.key) is None
    assert columns_of(messages_of(log), made.topics, Message.key).topic == "t"
