"""The books of a gapless producer: whatever fails, and whenever, what goes out again is a suffix in order."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from filtering import StreamMetadata
from partitioner import BadPartitionerSetting, OffsetNotAbove, PartitionStopped
from partitioner.confluent import with_required_settings
from partitioner.in_flight_queue import InFlightQueue


class Pending(NamedTuple):
    partition: int
    metadata: StreamMetadata


def pending(partition, offset, pid=7):
    return Pending(partition, StreamMetadata(pid, partition, offset))


def taken(books, partition, offset):
    one = pending(partition, offset)
    books.check(one.partition, one.metadata)
    books.enqueue(one)
    return one


def test_an_offset_that_is_not_above_the_last_is_refused():
    books = InFlightQueue()
    taken(books, 0, 5)
    for offset in (5, 4):
        with pytest.raises(OffsetNotAbove) as refusal:
            taken(books, 0, offset)
        assert (refusal.value.metadata.offset, refusal.value.highest) == (offset, 5)
    books.check(0, StreamMetadata(8, 0, 1))  # another PID counts for itself
    taken(books, 0, 9)  # a hole upstream is the source's affair


def test_nothing_goes_past_a_record_that_failed_for_good():
    books = InFlightQueue()
    first, second = taken(books, 0, 1), taken(books, 0, 2)
    other = taken(books, 1, 1)
    books.fail(first, ValueError("too large"))
    with pytest.raises(PartitionStopped, match=r"offset 1 .*too large.*retry\(0\)"):
        taken(books, 0, 3)
    taken(books, 1, 2)
    assert [one.metadata.offset for one in books.outgoing() if one.partition == 0] == []
    assert other in list(books.outgoing())
    books.resume(0)
    assert [one for one in books.outgoing() if one.partition == 0] == [first, second]


def test_of_records_that_were_refused_together_only_those_and_what_is_before_them_go_first():
    books = InFlightQueue()
    zero, one, _two = (taken(books, 0, n) for n in range(3))
    taken(books, 1, 0)
    assert books.outgoing({one.metadata}) == [zero, one]


def test_a_failure_behind_another_record_stops_nothing():
    books = InFlightQueue()
    first, second = taken(books, 0, 1), taken(books, 0, 2)
    books.fail(second, ValueError("purged"))
    assert books.stopped == {}
    assert list(books.outgoing()) == [first, second]


def test_an_acknowledgement_behind_a_hole_does_not_count():
    books = InFlightQueue()
    first, second = taken(books, 0, 1), taken(books, 0, 2)
    assert not books.acknowledge(second)
    assert list(books.outgoing()) == [first, second], "the second goes out again, behind the first"
    assert books.acknowledge(first)
    assert not books.acknowledge(first), "a late report of an older attempt changes nothing"
    assert books.acknowledge(second)
    assert len(books) == 0


@given(st.lists(st.tuples(st.sampled_from(["take", "deliver", "lose"]), st.integers(0, 2)), max_size=60))
def test_every_attempt_is_in_order_and_the_log_holds_a_prefix(steps):
    """Model: a log per partition that appends what is sent and may lose the connection at any time."""
    books, on_the_way, log, count = InFlightQueue(), {0: [], 1: [], 2: []}, {0: [], 1: [], 2: []}, 0
    for what, partition in steps:
        way = on_the_way[partition]
        if what == "take":
            count += 1
            way.append(taken(books, partition, count))
        elif what == "deliver" and way:
            one = way.pop(0)
            log[partition].append(one.metadata.offset)
            books.acknowledge(one)
        elif what == "lose":  # delivered or not, nobody heard of it: everything not acknowledged goes out again
            if way:
                log[partition].append(way[0].metadata.offset)
            on_the_way = {each: [one for one in books.outgoing() if one.partition == each] for each in on_the_way}
    for partition, way in on_the_way.items():
        for one in way:
            log[partition].append(one.metadata.offset)
        kept, mark = [], 0
        for offset in log[partition]:
            if offset > mark:
                kept.append(offset)
                mark = offset
        assert sorted(set(log[partition])) == kept, "after filtering nothing is missing, and the order is the source's"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable.idempotence", False), ("acks", 1), ("request.required.acks", "0"),
        ("enable.gapless.guarantee", "false"),
        ("message.timeout.ms", 300_000), ("delivery.timeout.ms", "120000"), ("queuing.strategy", "lifo"),
        ("delivery.report.only.error", True), ("transactional.id", "t"),
        ("partitioner", "random"), ("on_delivery", print), ("default.topic.config", {"acks": 1}),
        ("max.in.flight", 2), ("max.in.flight.requests.per.connection", "5"),
    ],
)  # fmt: skip
def test_confluents_settings_that_break_the_prefix_condition_are_refused_by_name(name, value):
    from partitioner.confluent import SourcePartitionProducer

    with pytest.raises(BadPartitionerSetting) as refusal:
        SourcePartitionProducer({"bootstrap.servers": "127.0.0.1:1", name: value}, "orders")
    assert refusal.value.setting == name


def test_confluents_settings_are_held_also_where_the_user_says_the_same_by_another_name():
    held = with_required_settings({"max.in.flight": "1", "request.required.acks": -1, "linger.ms": 5})
    assert {name: held[name] for name in ("max.in.flight.requests.per.connection", "acks", "linger.ms")} == {
        "max.in.flight.requests.per.connection": 1, "acks": "all", "linger.ms": 5,
    }  # fmt: skip
    assert "max.in.flight" not in held, "the client takes the last of two names"


class Lines:
    def __init__(self):
        self.all = []

    def log(self, level, message, *values):
        self.all.append(message % values)


def test_librdkafka_warns_of_no_setting_that_this_producer_needs(capfd):
    from confluent_kafka import Producer

    lines = Lines()
    wanted = with_required_settings({"bootstrap.servers": "127.0.0.1:1", "queuing.strategy": "fifo", "logger": lines})
    client = Producer(wanted)
    while len(lines.all) < 4:  # that nobody answers there; what it says of settings is among the first
        client.poll(0.1)
    assert not [line for line in lines.all if "CONFWARN" in line]
    assert capfd.readouterr().err == ""
