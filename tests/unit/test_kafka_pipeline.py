"""A Kafka partition's pipeline against a broker as strict as Kafka's: whatever happens, in order and without holes.

`Broker` is the rule by which brokers take batches of an idempotent producer (ProducerAppendInfo.checkSequence), from
Kafka's documentation; that it is the same as a real one's is tests/kafka/test_shipping.py's business.
"""

import struct
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushrep.kafka.answers import AnswerReaction, BrokerAnswer, Code, reaction_to
from pushrep.kafka.pipeline import Pipeline, SentBatch, connection_lost
from pushrep.records import BatchHeader, RecordBatch, encode_batch

OK = BrokerAnswer(Code.NONE, 0)


def sent(start=0, count=3):
    return SentBatch(0, start, start + count, 7, encode_batch([b"x"] * count, timestamps_ms=1))


def pipeline(*, is_known=True):
    made = Pipeline(0)
    made.begin(9, 0)
    if is_known:
        first = go(made, sent())
        assert list(made.on_answer(first, OK)) == [first]
    return made


def go(made, one):
    made.add(one)
    made.on_sent(one)
    return one


class Broker:
    """One partition's log and the producers' last five batches."""

    def __init__(self):
        self.taken = []  # (producer id, base sequence, the sealed batch's first record)
        self._last = {}

    def append(self, one):
        header = BatchHeader.parse(one.data)
        key, first = header.producer_id, header.base_sequence
        last = (first + header.last_offset_delta) % (1 << 31)
        batches = self._last.setdefault(key, deque(maxlen=5))
        for known_first, known_last, offset in batches:
            if (known_first, known_last) == (first, last):
                return BrokerAnswer(Code.NONE, offset)
        if batches and first != (batches[-1][1] + 1) % (1 << 31):
            return BrokerAnswer(Code.OUT_OF_ORDER_SEQUENCE_NUMBER, -1)
        batches.append((first, last, len(self.taken)))
        self.taken.append(one.start)
        return BrokerAnswer(Code.NONE, len(self.taken) - 1)

    def forget(self):
        """Forget producers like a restarted broker: those of batches whose records are older than
        `producer.id.expiration.ms`.
        """
        self._last.clear()


def test_the_first_batch_under_an_id_goes_alone():
    """Contract, Kafka as a destination: "the first batch under an id that is new ... goes alone"."""
    made = pipeline(is_known=False)
    first = go(made, sent())
    assert not made.may_send
    list(made.on_answer(first, OK))
    for n in range(5):  # a broker remembers as many of each producer; a copy of an older one it would refuse
        assert made.may_send
        assert made.has_room
        go(made, sent(n))
    assert not made.may_send
    assert not made.has_room


def test_after_a_long_silence_the_next_one_goes_alone_again():
    made = pipeline()
    made.has_been_idle()
    go(made, sent())
    assert not made.may_send
    busy = pipeline()
    go(busy, sent())
    busy.has_been_idle()
    assert busy.may_send, "what is in flight keeps the id alive"


def test_after_a_failure_and_over_another_connection_the_next_one_goes_alone():
    """Contract, Kafka as a destination: a broker that starts again on old records has forgotten the producer."""
    made = pipeline()
    first, second = go(made, sent(0)), go(made, sent(3))
    for one in (first, second):
        list(made.on_answer(one, connection_lost("test")))
    made.reopen()
    made.on_sent(first)
    assert not made.may_send
    assert list(made.on_answer(first, OK)) == [first]
    made.on_sent(second)
    assert made.may_send
    list(made.on_answer(second, OK))
    made.meets_another()
    go(made, sent(6))
    assert not made.may_send


def test_old_batches_go_one_by_one():
    """A broker tells by a batch's newest timestamp how long its producer was silent."""
    made = pipeline()
    young, old = sent(0), sent(3)
    old.is_old = True
    go(made, young)
    assert made.may_send
    go(made, old)
    assert not made.may_send
    list(made.on_answer(young, OK))
    assert not made.may_send, "the old one is still on its way"
    list(made.on_answer(old, OK))
    go(made, later := sent(6))
    assert not made.may_send, "the old one's time may have made the broker forget the id by now"
    list(made.on_answer(later, OK))
    go(made, sent(9))
    assert made.may_send


def test_sequences_go_on_and_wrap_after_two_to_the_31st():
    made = pipeline(is_known=False)
    full = encode_batch([b"x"], timestamps_ms=1)
    # A compacted batch: it has a record left of as many offsets as there are.
    struct.pack_into(">i", full.data, 23, (1 << 31) - 3)
    go(made, SentBatch(0, 0, (1 << 31) - 2, 7, RecordBatch(full.data)))
    first, second = go(made, sent()), go(made, sent())
    assert (first.base_sequence, second.base_sequence) == ((1 << 31) - 2, 1)
    header = BatchHeader.parse(second.data)
    assert (header.producer_id, header.base_sequence, header.base_offset) == (9, 1, 0)


def test_acknowledgements_leave_in_order():
    made = pipeline()
    first, second, third = (go(made, sent(n)) for n in range(3))
    assert list(made.on_answer(second, OK)) == []
    assert list(made.on_answer(first, OK)) == [first, second]
    assert list(made.on_answer(third, OK)) == [third]
    assert made.is_empty


def test_a_failure_closes_it_until_every_answer_is_in_and_is_retried_first():
    """Contract: "a failed batch stops its partition and is retried first"; the same bytes in the same order."""
    made = pipeline()
    first, second, third = (go(made, sent(n)) for n in range(3))
    bytes_before = [one.data for one in (first, second, third)]
    list(made.on_answer(first, BrokerAnswer(Code.NOT_LEADER_OR_FOLLOWER, -1)))
    assert not made.may_send
    assert not made.is_drained
    list(made.on_answer(second, BrokerAnswer(Code.OUT_OF_ORDER_SEQUENCE_NUMBER, -1)))
    list(made.on_answer(third, BrokerAnswer(Code.OUT_OF_ORDER_SEQUENCE_NUMBER, -1)))
    assert made.is_drained
    assert made.verdict() == (first, AnswerReaction.REFRESH), "the later ones failed because of the first"
    made.reopen()
    again = []
    while (one := made.waiting()) is not None:
        made.on_sent(one)
        again.append(one)
    assert again == [first, second, third]
    assert [one.data for one in again] == bytes_before


def test_what_was_acknowledged_behind_a_lost_answer_is_not_split():
    made = pipeline()
    first, second = go(made, sent(0)), go(made, sent(3))
    list(made.on_answer(second, OK))  # so the first is in the topic as well
    list(made.on_answer(first, BrokerAnswer(Code.MESSAGE_TOO_LARGE, -1)))
    assert made.verdict() == (first, AnswerReaction.RESYNC)


def test_taking_back_gives_the_sequence_numbers_back():
    made = pipeline()
    first, second = go(made, sent(0)), go(made, sent(3))
    list(made.on_answer(first, BrokerAnswer(Code.MESSAGE_TOO_LARGE, -1)))
    list(made.on_answer(second, BrokerAnswer(Code.OUT_OF_ORDER_SEQUENCE_NUMBER, -1)))
    assert made.verdict() == (first, AnswerReaction.SPLIT)
    assert made.forget(first) == [first, second]
    assert made.may_send
    assert go(made, sent(0, 1)).base_sequence == first.base_sequence
    assert not made.may_send, "as after every failure the first one goes alone"


@pytest.mark.parametrize("code", [code for code in Code if reaction_to(code) is not AnswerReaction.DONE])
def test_every_error_closes_the_pipeline(code):
    made = pipeline()
    one = go(made, sent())
    assert list(made.on_answer(one, BrokerAnswer(code, -1))) == []
    assert made.is_drained
    assert made.verdict()[0] is one


def test_a_code_without_a_name_is_tried_again():
    assert reaction_to(4711) is AnswerReaction.RETRY
    assert Code.name_of(4711) == "error 4711"


@given(st.data())
def test_whatever_gets_lost_the_broker_has_it_once_and_in_order(data):
    """Responses and requests are lost at random; in the end each batch is there once, in order."""
    made, broker = Pipeline(0), Broker()
    made.begin(9, 0)
    todo, total, done = deque(range(12)), 12, []
    wire = deque()
    for _ in range(150):
        if len(done) == total:
            break
        if made.is_drained:
            wire.clear()
            _, reaction = made.verdict()
            assert reaction in {AnswerReaction.RETRY, AnswerReaction.REFRESH}, "the broker's state never gets lost here"
            made.reopen()
        step = data.draw(st.sampled_from(["send", "answer", "lose request", "lose answer"]))
        if step == "send" and made.may_send:
            one = made.waiting()
            if one is None and todo and made.has_room:
                one = sent(todo.popleft())
                made.add(one)
            if one is not None:
                made.on_sent(one)
                wire.append(one)
        elif wire and step == "answer":
            one = wire.popleft()
            done += made.on_answer(one, broker.append(one))
        elif wire and step == "lose answer":
            one = wire.popleft()
            broker.append(one)
            done += made.on_answer(one, connection_lost("test"))
        elif wire and step == "lose request":  # the connection broke: nothing behind it arrives either
            while wire:
                done += made.on_answer(wire.popleft(), connection_lost("test"))
    assert broker.taken == sorted(set(broker.taken)), "each once, in order"
    assert [one.start for one in done] == broker.taken[: len(done)]


def recovered(made, broker, following):
    """Continue after a failure as ShippingRecovery does: the same batches again, or a new id after what the topic
    holds.
    """
    if made.verdict()[1] is not AnswerReaction.RESYNC:
        made.reopen()
        return following
    made.begin(made.producer_id + 1, 0)
    return max(broker.taken, default=-1) + 1


@given(st.data())
def test_a_broker_that_forgets_producers_gets_copies_and_never_a_hole(data):
    """Prefix condition: batches that are sent again begin at some record and continue from there without a gap."""
    made, broker, wire = Pipeline(0), Broker(), deque()
    following, total = 0, 12
    made.begin(9, 0)
    for _ in range(80):
        if made.is_drained:
            wire.clear()
            following = recovered(made, broker, following)
        step = data.draw(st.sampled_from(["send", "send", "answer", "refuse", "restart"]))
        if step == "send" and made.may_send:
            if made.waiting() is None and following < total and made.has_room:
                made.add(sent(following))
                following += 1
            if (one := made.waiting()) is not None:
                made.on_sent(one)
                wire.append(one)
        elif wire and step == "answer":
            one = wire.popleft()
            list(made.on_answer(one, broker.append(one)))
        elif wire and step == "refuse":  # it does not lead yet
            list(made.on_answer(wire.popleft(), BrokerAnswer(Code.NOT_LEADER_OR_FOLLOWER, -1)))
        elif step == "restart":  # its records are old, so it reads nothing of producers from its log
            for number in range(data.draw(st.integers(0, len(wire)))):
                broker.append(wire[number])
            broker.forget()
            while wire:
                list(made.on_answer(wire.popleft(), connection_lost("test")))
            made.meets_another()
    mark = -1
    for start in broker.taken:
        assert start <= mark + 1, f"a hole: {broker.taken}"
        mark = max(mark, start)
