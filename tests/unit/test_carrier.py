"""A filter that finds no metadata says so; what it kept by one carrier is not used by another."""

import pickle

import pytest

from filtering import HighwaterMarks, StreamMetadata, WrongCarrier
from filtering.consumers.assignment import Assignment, FilterSettings, PendingCommit
from filtering.consumers.commits import FORGET_MARKS, Commits, CommittedPosition, Stored, encode

MARKS = HighwaterMarks.from_columns([7], [0], [100], 0)


def record(offset, *, where):
    """(key, header) of a record."""
    metadata = StreamMetadata(7, 0, offset).pack()
    return {"key": (metadata, None), "header": (b"customer", metadata), "nowhere": (None, None)}[where]


class Reader:
    """Reads the records of one partition as the shells do, in batches of `size`; 0: one by one."""

    def __init__(self, size, carrier="key", marks=None):
        self.size, self.yielded, self.at = size, [], 0
        self.by = ("key", "header").index(carrier)
        self.assignment = Assignment(FilterSettings(carrier=carrier), lambda one: one[1])
        self.assignment.assign(("orders", 0), 0, *([] if marks is None else [marks]))

    def read(self, records):
        while records:
            batch, records = records[: self.size or 1], records[self.size or 1 :]
            keys = [one[self.by] for one in batch]
            if self.size:
                spans = {0: (self.at, self.at + len(batch) - 1)}
                passes = self.assignment.admit_columns("orders", keys, 0, spans, batch)
            else:
                passes = [self.assignment.admit(("orders", 0), self.at, keys[0], batch[0])]
            self.at += len(batch)
            self.yielded += [one for one, passed in zip(batch, passes, strict=True) if passed]


@pytest.fixture(params=[0, 1, 7, 100, 500])
def size(request):
    return request.param


def records(count, where):
    return [record(offset, where=where) for offset in range(count)]


def test_faults_s7_the_first_hundred_records_that_carry_it_in_the_header_stop_a_reader_of_keys(size, caplog):
    reader = Reader(size)
    with pytest.raises(WrongCarrier, match="carrier is 'header' for topic orders: its first 100 records") as refused:
        reader.read(records(200, "header"))
    assert (refused.value.setting, refused.value.value, refused.value.right) == ("carrier", "key", "header")
    assert len(reader.yielded) == reader.at < 100, "nothing of the batch was given to anybody"
    assert reader.assignment.position(("orders", 0)) == (reader.at or 0)
    with pytest.raises(WrongCarrier):
        reader.read(records(200, "header")[reader.at :])
    assert [line.levelname for line in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    ("found", "is_said"),
    [
        (records(99, "header"), True),
        (records(50, "header") + records(1, "nowhere") + records(300, "header"), True),
        (records(300, "nowhere"), True),
        (records(1, "nowhere") + records(300, "key"), None),
        (records(1, "key") + records(300, "header"), None),
        (records(300, "key"), False),
    ],
    ids=["too few", "a stranger among them", "none has any", "a stranger first", "strangers later", "all well"],
)
def test_faults_s7_anything_else_stops_nobody_and_is_said_once_with_topic_and_carrier(size, found, is_said, caplog):
    reader = Reader(size)
    reader.read(found)
    assert len(reader.yielded) == len(found)
    lines = [line.getMessage() for line in caplog.records]
    assert len(lines) <= 1
    assert all("topic orders" in line and "carrier='key'" in line for line in lines)
    assert is_said is None or bool(lines) is is_said
    assert reader.assignment.counts["orders"].unkeyed == sum(key is None or len(key) != 20 for key, _ in found)


def test_a_reader_of_headers_is_never_sent_to_the_keys(size, caplog):
    """Any text of 20 letters is metadata by chance."""
    reader = Reader(size, "header")
    reader.read([(b"customer-00000000%03d" % n, None) for n in range(200)])
    assert len(reader.yielded) == 200
    assert "carrier='header'" in caplog.text


def test_marks_say_that_an_earlier_run_found_metadata(size, caplog):
    reader = Reader(size, marks=MARKS)
    reader.read(records(200, "header"))
    assert len(reader.yielded) == 200
    assert len(caplog.records) == bool(size)


def committed(carrier, marks=MARKS):
    """What a commit by this carrier says."""
    steps = Commits("billing", carrier).of([PendingCommit("orders", 0, 10, marks, 0, False)])
    with pytest.raises(StopIteration) as end:
        next(steps)
    return end.value.value[0].metadata


def read(carrier, metadata):
    steps = Commits("billing", carrier).read(("orders", 0), 10, metadata)
    try:
        return next(steps)
    except StopIteration as end:
        return end.value


@pytest.mark.parametrize("carrier", ["key", "header", "function"])
def test_faults_s7_marks_of_another_carrier_are_refused_with_the_way_on(carrier):
    metadata = committed(carrier)
    assert read(carrier, metadata) == CommittedPosition(MARKS, None, 0, carrier)
    for other in {"key", "header", "function"} - {carrier}:
        with pytest.raises(WrongCarrier) as refused:
            read(other, metadata)
        assert (refused.value.value, refused.value.right) == (other, carrier)
        assert "position that group 'billing' committed of orders-0" in str(refused.value)
        assert FORGET_MARKS.format(group="billing", topic="orders") in str(refused.value)
        stored = encode(CommittedPosition(None, Stored(0, 1, "v"), 0, carrier))
        with pytest.raises(WrongCarrier):
            read(other, stored)


def test_a_wrong_carrier_that_left_no_marks_can_be_put_right():
    """As after the warning: what was read by it had no metadata."""
    assert read("header", committed("key", HighwaterMarks())).carrier == "key"


def test_the_error_survives_the_way_from_a_worker():
    error = WrongCarrier("key", "header", "for topic orders")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.right, again.why) == (str(error), error.right, error.why)
