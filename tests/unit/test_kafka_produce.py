"""The produce request by topic id: its encoder compared with the schema, and the decoding of a broker's answer."""

from io import BytesIO
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from pushrep.kafka.answers import BrokerAnswer
from pushrep.kafka.requests import ProduceBatches, answers_of

VERSION_13, VERSION_8 = {0: (0, 13)}, {0: (3, 9)}
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
    request = ProduceBatches("orders", UUID(int=7), {3: b"batch"}, 1000).prepare(VERSION_8)
    assert request.API_VERSION == 8
    assert request.topics == [("orders", [(3, b"batch")])]


def test_an_answer_names_the_records_that_were_refused():
    """KIP-467: by their numbers in the batch."""
    response = ProduceBatches("orders", UUID(int=7), {}, 1).prepare(VERSION_8).RESPONSE_TYPE()
    response.topics = [("orders", [(3, 32, -1, -1, 0, [(11, "out of range"), (13, None)], "some are refused")])]
    response.throttle_time_ms = 0
    refused = BrokerAnswer(32, -1, "some are refused", ((11, "out of range"), (13, "")))
    assert answers_of(response) == ({3: refused}, 0)


def test_an_answer_by_topic_id():
    request = ProduceBatches("orders", UUID(int=7), {}, 1).prepare(VERSION_13)
    response = request.RESPONSE_TYPE.decode(BytesIO(ANSWER))
    assert answers_of(response) == ({1: BrokerAnswer(0, 5), 2: BrokerAnswer(10, -1, "too")}, 300)
