"""Schemas and classes agree, and what no class can say is refused on arrival."""

from io import BytesIO
from uuid import UUID

import pytest
from fastavro import parse_schema, schemaless_reader, schemaless_writer

from pushrep.election.messages import PushSessionEndReason
from pushrep.errors import BadArgument
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.calls import CALLS, PLACE_OF, ApiKey, encode, open_frame
from pushrep.wire.codec import read_schemas
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import PREFIX_BYTES, FrameKind, FrameLimits, FrameReader, ProtocolError, frame_head
from pushrep.wire.push_messages import (
    AppendRecordsPartition,
    AppendRecordsRequest,
    DescribeLogResponse,
    ListLogsResponse,
    LogDescription,
)
from pushrep.wire.replay_messages import Credit, StartReplayRequest
from pushrep.wire.values import FileSlice
from tests.support.wire_schemas import expected_schema

TP = TopicIdPartition(UUID(int=1), "orders", 3)


@pytest.fixture
def schemas():
    return read_schemas()


def wire(message):
    return b"".join(bytes(part) for part in encode(message, 1))


def heard(data):
    (frame,) = FrameReader(open_frame, FrameLimits()).feed(data)
    return frame.message


@pytest.mark.parametrize("struct", PLACE_OF, ids=lambda struct: struct.__name__)
def test_a_schema_is_its_class(schemas, struct):
    assert schemas[struct.__name__] == expected_schema(struct)


def test_every_file_is_a_message(schemas):
    assert schemas.keys() == {struct.__name__ for struct in PLACE_OF}


def test_no_array_item_takes_no_bytes(schemas):
    """A count costs nothing to send: if an item did not either, a short header could claim 2**62 of them."""
    for name, schema in schemas.items():
        for items in array_items(schema):
            assert not isinstance(items, dict) or items.get("fields") != [], name
            assert items != "null", name


def array_items(schema):
    if isinstance(schema, dict):
        if schema.get("type") == "array":
            yield schema["items"]
            yield from array_items(schema["items"])
        for entry in schema.get("fields", ()):
            yield from array_items(entry["type"])


def altered(message, change):
    """The frame of a message, its header changed as no class would let it."""
    key, kind = PLACE_OF[type(message)]
    schema = parse_schema(read_schemas()[type(message).__name__])
    datum = schemaless_reader(BytesIO(wire(message)[PREFIX_BYTES:]), schema, None)
    change(datum)
    target = BytesIO()
    schemaless_writer(target, schema, datum)
    return frame_head((key, kind), 0, 1, target.getvalue(), 0)


def test_an_error_code_of_the_future_reads_as_unknown():
    message = DescribeLogResponse(logs=(LogDescription(tp=TP, error_code=ErrorCode.LOG_OFFLINE),))

    def change(datum):
        datum["logs"][0]["error_code"] = 30_000

    assert heard(altered(message, change)).logs[0].error_code is ErrorCode.UNKNOWN_SERVER_ERROR
    assert PushSessionEndReason(99) is PushSessionEndReason.UNKNOWN


def test_the_error_table_is_whole():
    assert all(code.meaning for code in ErrorCode)
    assert ErrorCode.CORRUPT_MESSAGE.retriable
    assert not ErrorCode.LOG_DIVERGED.retriable


def partition(**changes):
    values = {
        "tp": TP,
        "leader_epoch": 1,
        "replica_epoch": 1,
        "session_id": 1,
        "append_offset": 0,
        "previous_epoch": -1,
        "epoch_start_offset": 0,
        "high_watermark": 0,
        "log_start_offset": 0,
    }
    return AppendRecordsPartition(**(values | changes))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("leader_epoch", -1),
        ("leader_epoch", 1 << 31),
        ("replica_epoch", -1),
        ("session_id", 1 << 63),
        ("append_offset", -1),
        ("append_offset", (1 << 63) - 1),
        ("previous_epoch", -2),
        ("epoch_start_offset", -1),
        ("high_watermark", -1),
        ("log_start_offset", -1),
        ("end_session_reason", -2),
    ],
)
def test_a_partition_refuses_impossible_numbers(name, value):
    with pytest.raises(BadArgument, match=name):
        partition(**{name: value})


def test_numbers_out_of_range_are_refused_on_arrival():
    """The sender's class would not make them: the bytes are written past it."""
    assert CALLS[ApiKey.CREDIT] == {FrameKind.EVENT: Credit}
    header = b"\x02\x01"  # session 1, bytes -1
    with pytest.raises(ProtocolError, match=r"Credit\.bytes"):
        heard(frame_head((ApiKey.CREDIT, FrameKind.EVENT), 0, 1, header, 0))


def test_a_number_that_names_nothing_is_refused_on_arrival():
    """An unknown error code is read as unknown; an unknown value in a request is refused."""
    with pytest.raises(ProtocolError, match="77 is not a valid PositionKind"):
        heard(altered(StartReplayRequest(recording_id=1), lambda datum: datum.update(position_kind=77)))


def test_sizes_that_only_add_up_are_refused():
    """Ten bytes for one partition and ten less than none for the other make none in all."""
    message = AppendRecordsRequest(partitions=(partition(), partition()))

    def change(datum):
        for part, size in zip(datum["partitions"], (10, -10), strict=True):
            part["records_bytes"] = size

    with pytest.raises(ProtocolError, match="records_bytes is -10"):
        heard(altered(message, change))


@pytest.mark.parametrize("topic", ["", ".", "..", "a/b", "../../etc", "a" * 250, "ü", "a\0"])
def test_a_topic_that_is_no_directory_is_refused(topic):
    with pytest.raises(BadArgument, match="topic"):
        TopicIdPartition(UUID(int=1), topic, 0)


@pytest.mark.parametrize(("topic_id", "number"), [(0, 0), (1, -1), (1, 1 << 31)])
def test_an_impossible_partition_is_refused(topic_id, number):
    with pytest.raises(BadArgument):
        TopicIdPartition(UUID(int=topic_id), "orders", number)


def test_a_slice_of_a_file_is_counted_and_passed_on(tmp_path):
    with (tmp_path / "log").open("wb") as file:
        piece = FileSlice(file, 10, 90)
        head, *parts = encode(AppendRecordsRequest(partitions=(partition(records=(piece, b"123")),)), 1)
    assert parts == [piece, b"123"]
    assert int.from_bytes(head[:4]) == len(head) - 4 + 93
    with pytest.raises(BadArgument):
        FileSlice(file, -1, 5)


def test_only_what_its_schema_can_hold_is_sent():
    with pytest.raises(BadArgument, match="schema"):
        encode(ListLogsResponse(error_message=5), 1)


def test_more_records_than_a_frame_can_hold_are_not_sent(tmp_path):
    with (tmp_path / "log").open("wb") as file:
        request = AppendRecordsRequest(partitions=(partition(records=(FileSlice(file, 0, 1 << 30),)),))
    with pytest.raises(BadArgument, match="1073741824 bytes of records exceed a frame"):
        encode(request, 1)


@pytest.mark.parametrize(
    ("header", "frame", "refused"),
    [
        (PREFIX_BYTES, 2 * PREFIX_BYTES, None),
        (2**24 - 1, 2**31 - 1, None),
        (PREFIX_BYTES - 1, 100, "header_bytes_max: 19 is not from 20 to"),
        (2**24, 2**31 - 1, "header_bytes_max: 16777216 is not from 20 to"),
        (PREFIX_BYTES, 2 * PREFIX_BYTES - 1, "frame_bytes_max: 39 is not from"),
        (PREFIX_BYTES, 2**31, "frame_bytes_max: 2147483648 is not from"),
    ],
)
def test_limits_that_no_frame_fits_into_are_refused(header, frame, refused):
    if refused is None:
        assert FrameLimits(header_bytes_max=header, frame_bytes_max=frame).frame_bytes_max == frame
        return
    with pytest.raises(BadArgument, match=refused):
        FrameLimits(header_bytes_max=header, frame_bytes_max=frame)
