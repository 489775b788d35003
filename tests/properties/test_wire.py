"""Messages survive the wire, however the stream is cut; what was damaged on the way is refused by name."""

import dataclasses
from enum import IntEnum
from io import BytesIO
from typing import Annotated, get_args, get_origin, get_type_hints
from uuid import UUID

from fastavro import parse_schema, schemaless_reader, schemaless_writer
from hypothesis import given, settings
from hypothesis import strategies as st

from pushrep.election.grants import BALLOT_STRIDE, Grant, Member
from pushrep.records.leader_epochs import EPOCH_MAX
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.calls import PLACE_OF, encode, open_frame
from pushrep.wire.codec import read_schemas
from pushrep.wire.frames import PREFIX_BYTES, FrameLimits, FrameReader
from pushrep.wire.values import Records, Within

LIMITS = FrameLimits()
SCHEMAS = {name: parse_schema(schema) for name, schema in read_schemas().items()}
STRUCTS = sorted(PLACE_OF, key=lambda struct: struct.__name__)
UUIDS = st.uuids(allow_nil=False)
PARTITIONS = st.builds(
    TopicIdPartition, UUIDS, st.from_regex(r"[a-z][a-zA-Z0-9._-]{0,20}", fullmatch=True), st.integers(0, 2**31 - 1)
)
RECORDS = st.lists(st.binary(max_size=200), max_size=3).map(tuple)


def values_of(hint):  # noqa: PLR0911 - a kind of type a line
    """Values of a field's type, over its whole range."""
    if get_origin(hint) is Annotated:
        if get_args(hint)[0] is not int:
            return values_of(get_args(hint)[0])
        (within,) = (note for note in get_args(hint)[1:] if isinstance(note, Within))
        return st.integers(within.low, within.high) | st.sampled_from([within.low, within.high])
    if hint == Records:
        return RECORDS
    if get_origin(hint) is tuple:
        return st.lists(values_of(get_args(hint)[0]), max_size=3).map(tuple)
    if type(None) in get_args(hint):
        (kind,) = (kind for kind in get_args(hint) if kind is not type(None))
        return st.none() | values_of(kind).filter(lambda value: value != UUID(int=0))
    if issubclass(hint, IntEnum):
        return st.sampled_from(hint)
    known = {bool: st.booleans(), str: st.text(max_size=20), UUID: UUIDS, TopicIdPartition: PARTITIONS}
    return known[hint] if hint in known else messages_of(hint)


def messages_of(struct):
    hints = get_type_hints(struct, include_extras=True)
    sent = [field.name for field in dataclasses.fields(struct) if field.init]
    values = {name: values_of(hints[name]) for name in sent}
    return grants(values) if struct is Grant else st.builds(struct, **values)


@st.composite
def grants(draw, values):
    """Grants that do not contradict themselves."""

    def members():
        chosen = draw(st.lists(st.integers(0, 255), min_size=1, max_size=4, unique=True))
        named = draw(st.lists(UUIDS, min_size=len(chosen), max_size=len(chosen), unique=True))
        shown = [draw(st.sampled_from([None, one])) for one in named]
        texts = [draw(st.tuples(st.text(max_size=20), st.text(max_size=20))) for _ in chosen]
        return tuple(Member(i, text[0], one, text[1]) for i, one, text in zip(chosen, shown, texts, strict=True))

    said = {name: draw(value) for name, value in values.items()}
    said["members"], said["previous_members"] = members(), draw(st.sampled_from([(), members()]))
    said["leader"] = draw(st.sampled_from(said["members"])).index
    said["epoch"] = said["leader"] + BALLOT_STRIDE * draw(st.integers(0, EPOCH_MAX // BALLOT_STRIDE - 1))
    said["members_epoch"] = draw(st.integers(0, said["epoch"]))
    said["min_insync_replicas"] = draw(st.integers(1, len(said["members"])))
    said["previous_min_insync_replicas"] = draw(st.integers(1, max(1, len(said["previous_members"]))))
    return Grant(**said)


MESSAGES = st.one_of([messages_of(struct) for struct in STRUCTS])


def joined(value):
    """The same message with its records in one piece, as they come off the wire."""
    if isinstance(value, tuple):
        return tuple(joined(item) for item in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, TopicIdPartition):
        return value
    parts = {field.name: joined(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    if "records" in parts:
        data = b"".join(bytes(part) for part in value.records)
        parts["records"] = (data,) if data else ()
    return type(value)(**parts)


def wire(message, correlation_id=7):
    return b"".join(bytes(part) for part in encode(message, correlation_id))


def reader():
    return FrameReader(open_frame, LIMITS)


def pieces(data, cuts):
    ends = [*sorted(cuts), len(data)]
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(message=MESSAGES, correlation_id=st.integers(0, 2**32 - 1))
def test_a_message_survives_the_wire(message, correlation_id):
    (frame,) = reader().feed(wire(message, correlation_id))
    assert frame.message == joined(message)
    assert frame.correlation_id == correlation_id
    assert (frame.api_key, frame.kind) == PLACE_OF[type(message)]


@given(messages=st.lists(MESSAGES, min_size=1, max_size=3), data=st.data())
def test_a_stream_may_be_cut_anywhere(messages, data):
    stream = b"".join(map(wire, messages))
    cuts = data.draw(st.sets(st.integers(0, len(stream)), max_size=20))
    cut = reader()
    found = [frame.message for piece in pieces(stream, cuts) for frame in cut.feed(piece)]
    assert found == [joined(message) for message in messages]
    assert cut.held_bytes == 0


@given(messages=st.lists(MESSAGES, min_size=1, max_size=3), data=st.data())
def test_the_network_may_write_into_the_frame_itself(messages, data):
    stream = b"".join(map(wire, messages))
    direct, found, at = reader(), [], 0
    while at < len(stream):
        room = direct.get_buffer()
        count = min(len(room), len(stream) - at, data.draw(st.integers(1, 300)))
        room[:count] = stream[at : at + count]
        found += direct.buffer_updated(count)
        at += count
    assert [frame.message for frame in found] == [joined(message) for message in messages]


@given(message=MESSAGES)
def test_a_header_is_the_one_that_fastavro_writes(message):
    schema = SCHEMAS[type(message).__name__]
    header = bytes(encode(message, 7)[0])[PREFIX_BYTES:]
    target = BytesIO()
    schemaless_writer(target, schema, schemaless_reader(BytesIO(header), schema, None))
    assert header == target.getvalue()


@settings(max_examples=10)
@given(message=MESSAGES)
def test_a_stream_of_single_bytes(message):
    slow = reader()
    found = [frame for byte in wire(message) for frame in slow.feed(bytes([byte]))]
    assert [frame.message for frame in found] == [joined(message)]
