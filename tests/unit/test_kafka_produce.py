"""The produce request by topic id: its encoder compared with the schema, and the decoding of a broker's answer."""

from io import BytesIO
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from pushrep.kafka.answers import BrokerAnswer
from pushrep.kafka.requests import ProduceBatches, answers_of

VERSION_13, VERSION_7 = {0: (0, 13)}, {0: (3, 9)}
ANSWER = bytes.fromhex(
    "02" + "00000000000000000000000000000007" + "03"  # one topic, two partitions
    "00000001" "0000" "0000000000000005" "ffffffffffffffff" "0000000000000000" "01" "00" "00"
    "00000002" "000a" "ffffffffffffffff" "ffffffffffffffff" "0000000000000000" "01" "0474 6f6f" "00"
    "00" "0000012c" "00"
)  # fmt: skip


@given(st.dictionaries(st.integers(0, 2**31 - 1), st.binary(max_size=300), max_size=4), st.integers(1, 2**31 - 1))
def test_the_encoder_writes_what_the_schema_says(batches, timeout_ms):
    request = ProduceBatches("orders", UUID(int=7), batches, timeout_ms).prepare(VERSION_13)
    fields = [request.__dict__[name] for name in request.SCHEMA.names]
    assert request.encode() == request.SCHEMA.encode(fields)


def test_brokers_before_4_1_get_the_topics_name():
    request = ProduceBatches("orders", UUID(int=7), {3: b"batch"}, 1000).prepare(VERSION_7)
    assert request.API_VERSION == 7
    assert request.topics == [("orders", [(3, b"batch")])]


def test_an_answer_by_topic_id():
    request = ProduceBatches("orders", UUID(int=7), {}, 1).prepare(VERSION_13)
    response = request.RESPONSE_TYPE.decode(BytesIO(ANSWER))
    assert answers_of(response) == ({1: BrokerAnswer(0, 5), 2: BrokerAnswer(10, -1, "too")}, 300)
