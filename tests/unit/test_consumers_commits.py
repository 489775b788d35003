"""Positions with their marks: the bytes of a commit, and the books of a consumer against a model."""

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from filtering import BadFilterSetting, CorruptMarks, HighwaterMarks, PairSplit, ReplayFilter, StreamMetadata
from filtering.consumers.assignment import Assignment, FilterSettings, PendingCommit
from filtering.consumers.commits import (
    METADATA_CHARACTERS_MAX,
    NOTHING,
    CommitPosition,
    Commits,
    CommittedPosition,
    DeleteMarks,
    ReadMarks,
    Stored,
    decode,
    encode,
    pack_marks,
    unpack_marks,
)

MARKS = HighwaterMarks.from_columns([7, 7, 9], [0, 1, 0], [100, 5, 2**40], [3, 3, 3], advanced_ms=1_700_000_000_000)
GOLDEN = (
    '{"pushrep":2,"carrier":"key",'
    '"marks":"eNrzCPf1ZmBgYGRAAGYozY4klgIRZ+w+/zSDAUkepo8VizwnhGJEMhcir58auxAA+GMLUQ==","startpoint":12}'
)


@given(
    st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31 - 1)), unique=True, max_size=30),
    st.integers(0, 2**40),
    st.integers(0, 2**53),
)
def test_what_is_encoded_comes_back(pairs, offset, startpoint):
    marks = HighwaterMarks.from_columns([p for p, _ in pairs], [n for _, n in pairs], [offset] * len(pairs), 0)
    assert decode(encode(CommittedPosition(marks, None, startpoint, "key"))) == CommittedPosition(
        marks, None, startpoint, "key"
    )
    stored = Stored(3, offset, "group/topic/3/abc")
    assert decode(encode(CommittedPosition(None, stored, startpoint, "key"))) == CommittedPosition(
        None, stored, startpoint, "key"
    )
    assert unpack_marks(pack_marks(marks)) == marks


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (lambda packed: packed[:-1], "end early"),
        (lambda packed: b"", "end early"),
        (lambda packed: zlib.compress(bytes((64 << 20) + 1), 1), "larger than marks can be"),
        (lambda packed: b"y" + packed[1:], "can't be inflated"),
        (lambda packed: zlib.compress(b"no marks"), "marks"),
    ],
    ids=["cut", "empty", "64 MiB and more", "no zlib", "something else"],
)
def test_what_are_no_whole_marks_is_refused_whatever_size_it_says(bad, why):
    with pytest.raises(CorruptMarks, match=why):
        unpack_marks(bad(pack_marks(MARKS)))


def test_the_released_bytes_are_read():
    """Other implementations may compress differently; committed bytes must stay readable."""
    assert decode(GOLDEN) == CommittedPosition(MARKS, None, 12, "key")


@pytest.mark.parametrize("behind", ["", "\0", "1\3", "\0{}", '{"pushrep":2}'], ids=repr)
def test_what_a_client_left_behind_it_counts_for_nothing(behind):
    """One client's commit has a NUL at its end; where it has none, librdkafka's client reads on in its memory."""
    assert decode(GOLDEN + behind) == CommittedPosition(MARKS, None, 12, "key")


def test_metadata_of_others_counts_as_none():
    for metadata in (None, "", "leader", "{}", "[1]", "12", '{"other": 1}', "{"):
        assert decode(metadata) == NOTHING


def test_a_damaged_position_is_refused_wherever_a_character_changed():
    metadata = encode(CommittedPosition(MARKS, None, 12, "key"))
    for at in range(len(metadata)):
        damaged = metadata[:at] + chr(ord(metadata[at]) ^ 1) + metadata[at + 1 :]
        try:
            found = decode(damaged)
        except CorruptMarks:
            continue
        same = found.marks == MARKS  # the last character of base64 has spare bits; the number is not under a checksum
        assert same or found == NOTHING or found.marks is None, f"character {at} changed the marks without a word"


@pytest.mark.parametrize(
    "fields",
    [
        {"pushrep": 1}, {"marks": 7}, {"marks": "%%"}, {"marks": "AAAA"}, {"stored": [1, 2]}, {"stored": [-1, 2, "v"]},
        {"startpoint": -1}, {"carrier": None}, {"carrier": ""}, {"carrier": 7},
    ],
)  # fmt: skip
def test_each_wrong_field_is_refused(fields):
    with pytest.raises(CorruptMarks):
        decode(json.dumps({"pushrep": 2, "carrier": "key"} | fields))


def test_a_hundred_pairs_fit_beside_an_offset():
    pids = [int.from_bytes(bytes(range(i, i + 8)), signed=True) for i in range(100)]
    marks = HighwaterMarks.from_columns(pids, range(100), range(10**6, 10**6 + 100), 5, advanced_ms=1_700_000_000_000)
    assert len(encode(CommittedPosition(marks, None, 0, "header"))) <= METADATA_CHARACTERS_MAX


def key(pid, partition, offset):
    return StreamMetadata(pid, partition, offset).pack()


@given(st.data())
def test_what_a_commit_says_is_what_a_filter_from_the_start_would_know(data):  # noqa: PLR0912 - a model's steps
    """Model: records in topic order. A consumer that begins at a committed position with its marks gives the same
    records as one that was never away.
    """
    count = data.draw(st.integers(1, 60))
    records = [
        (data.draw(st.integers(0, 1)), key(7, data.draw(st.integers(0, 2)) * 2, data.draw(st.integers(0, 30))))
        for _ in range(count)
    ]
    logs = {0: [], 1: []}
    for partition, one in records:
        logs[partition].append(one if partition == 0 else key(8, *_rest(one)))
    expected = {n: _kept(log, n) for n, log in logs.items()}
    reading, kept, committed = Assignment(FilterSettings()), {0: [], 1: []}, {0: (0, HighwaterMarks()), 1: None}
    committed[1] = committed[0]
    done = {0: [], 1: []}
    for partition in (0, 1):
        reading.assign(("t", partition), 0)
    while any(reading.position(("t", n)) < len(logs[n]) for n in logs):
        step = data.draw(st.sampled_from(["one", "batch", "commit", "crash"]))
        if step == "crash":
            reading = Assignment(FilterSettings())
            for partition, (offset, marks) in committed.items():
                reading.assign(("t", partition), offset, marks)
                kept[partition] = list(done[partition])
            if not data.draw(st.booleans()):
                continue
        if step == "commit":
            due = reading.due(1)
            reading.committed(due)
            for one in due:
                committed[one.partition], done[one.partition] = (one.offset, one.marks), list(kept[one.partition])
            continue
        for partition in (0, 1):
            at = reading.position(("t", partition))
            end = min(len(logs[partition]), at + data.draw(st.integers(1, 20)))
            if step == "batch" and end > at:
                offsets = list(range(at, end))
                passes = reading.admit_columns("t", logs[partition][at:end], partition, {partition: (at, end - 1)})
                kept[partition] += [offset for offset, passed in zip(offsets, passes, strict=True) if passed]
            else:
                for offset in range(at, end):
                    if reading.admit(("t", partition), offset, logs[partition][offset]):
                        kept[partition].append(offset)
    assert kept == expected


def _rest(one):
    metadata = StreamMetadata.unpack(one)
    return metadata.partition + 1, metadata.offset


def _kept(log, partition):
    rule = ReplayFilter()
    return [offset for offset, one in enumerate(log) if rule.admit(one, partition)]


def test_a_pair_in_two_partitions_is_refused():
    reading = Assignment(FilterSettings())
    reading.assign(("t", 0), 0)
    reading.assign(("t", 1), 0)
    assert reading.admit(("t", 0), 0, key(7, 4, 1))
    with pytest.raises(PairSplit):
        reading.admit(("t", 1), 0, key(7, 4, 2))
    assert reading.position(("t", 1)) == 0, "a refused record moves nothing"


def test_a_dropped_partition_is_forgotten_with_its_marks():
    reading = Assignment(FilterSettings())
    for partition in (0, 1):
        reading.assign(("t", partition), 0)
        reading.admit(("t", partition), 0, key(7, partition, 5))
    reading.drop([("t", 0)])
    assert [one.partition for one in reading.due(1)] == [1]
    with pytest.raises(BadFilterSetting):
        reading.admit(("t", 0), 1, key(7, 0, 6))
    reading.assign(("t", 0), 0)
    assert reading.admit(("t", 0), 0, key(7, 0, 5)), "nothing is remembered of it"
    assert not reading.admit(("t", 1), 1, key(7, 1, 5)), "the other partition's marks stayed"
    assert reading.counts["t"].kept == 3


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"enable.auto.commit": True, "group.id": "g"}, BadFilterSetting),
        ({"auto.commit.enable": "true", "group.id": "g"}, BadFilterSetting),
        ({}, BadFilterSetting),
    ],
)
def test_settings_that_would_part_positions_from_marks_are_refused(config, error):
    from filtering.consumers.confluent import ReplayFilteredConsumer

    with pytest.raises(error) as refusal:
        ReplayFilteredConsumer({"bootstrap.servers": "127.0.0.1:1", **config})
    assert next(iter(config), "group.id") in str(refusal.value)


def test_marks_that_could_not_be_read_are_deleted_once_another_position_is_committed():
    commits, old = Commits("g", "key"), Stored(0, 5, "g/t/0/old")
    reading = commits.read(("t", 0), 10, encode(CommittedPosition(None, old, 0, "key")))
    assert next(reading) == ReadMarks(("t", 0), old)
    with pytest.raises(TimeoutError):
        reading.throw(TimeoutError("their topic is away"))
    due = PendingCommit("t", 0, 20, HighwaterMarks(), 0, has_new_startpoint=False)
    assert list(commits.stored([CommitPosition(due, "{}", None)])) == [DeleteMarks(old)]


def test_a_commit_of_before_a_move_says_nothing_of_the_startpoint_behind_it():
    assignment, place = Assignment(FilterSettings(carrier="key")), ("orders", 0)
    assignment.assign(place, 5)
    assignment.admit(place, 5, StreamMetadata(7, 0, 5).pack())
    before = assignment.due(0)
    assignment.move(place, 20, 3, reset_marks=True)
    assignment.committed(before)
    assert assignment.due(0) == [], "a move alone commits nothing"
    assignment.admit(place, 20, StreamMetadata(7, 0, 20).pack())
    [due] = assignment.due(0)
    assert (due.offset, due.startpoint, due.has_new_startpoint) == (21, 3, True)
