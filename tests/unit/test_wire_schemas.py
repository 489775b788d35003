"""Schemas and classes agree, and versions evolve: an older reader, a newer writer, and the other way round."""

import copy
import dataclasses
from io import BytesIO
from uuid import UUID

import pytest
from fastavro import parse_schema, schemaless_reader, schemaless_writer

from pushrep.election.messages import PushSessionEndReason
from pushrep.errors import BadArgument
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.calls import CALLS, PLACE_OF, VOCABULARY, ApiKey, Vocabulary
from pushrep.wire.codec import missing_fields, read_schemas, released_schemas
from pushrep.wire.error_codes import ERROR_TABLE, ErrorCode
from pushrep.wire.errors import MalformedMessage, NotInVersion, SchemaMismatch
from pushrep.wire.frames import PREFIX_BYTES, FrameKind, FrameLimits, FrameReader, frame_head
from pushrep.wire.push_messages import (
    AppendRecordsPartition,
    AppendRecordsRequest,
    DescribeLogResponse,
    ListedLog,
    ListLogsRequest,
    ListLogsResponse,
    LogDescription,
)
from pushrep.wire.replay_messages import Credit, StartReplayRequest
from pushrep.wire.values import FileSlice

TP = TopicIdPartition(UUID(int=1), "orders", 3)


@pytest.fixture
def schemas():
    return copy.deepcopy(read_schemas(released_schemas()))


def field(schema, *path):
    """The field's own entry in a schema, through arrays and records."""
    for name in path:
        while schema.get("type") == "array":
            schema = schema["items"]
        (found,) = (entry for entry in schema["fields"] if entry["name"] == name)
        schema = found["type"] if isinstance(found["type"], dict) else {"fields": ()}
    return found


def fields_of(schema, *path):
    entry = field(schema, *path)["type"] if path else schema
    return (entry["items"] if entry["type"] == "array" else entry)["fields"]


def wire(vocabulary, message, version):
    return b"".join(bytes(part) for part in vocabulary.encode(message, version, 1))


def heard(vocabulary, data):
    (frame,) = FrameReader(vocabulary.open, FrameLimits()).feed(data)
    return frame.message


def with_older(schemas, call, change):
    """A vocabulary in which today's schemas of a call are version 1, and version 0 is what `change` makes of them."""
    for struct in CALLS[call].values():
        newest = schemas[struct.__name__][0]
        older = copy.deepcopy(newest)
        change(struct.__name__, older, newest)
        schemas[struct.__name__] = {0: older, 1: newest}
    return Vocabulary(schemas)


def lacks_leader_epoch(name, older, newest):
    if name == "ListLogsResponse":
        field(newest, "logs", "leader_epoch")["default"] = -1
        fields_of(older, "logs")[:] = [f for f in fields_of(older, "logs") if f["name"] != "leader_epoch"]


LISTED = ListedLog(outbox_id=UUID(int=7), tp=TP, log_end_offset=9)


def test_what_an_older_writer_left_out_is_at_its_default(schemas):
    vocabulary = with_older(schemas, ApiKey.LIST_LOGS, lacks_leader_epoch)
    message = ListLogsResponse(logs=(LISTED, LISTED))
    old, new = wire(vocabulary, message, 0), wire(vocabulary, message, 1)
    assert len(old) == len(new) - 2, "the older version has one field less in each of two logs"
    assert heard(vocabulary, old) == heard(vocabulary, new) == message


def test_an_older_release_reads_what_a_newer_one_writes_for_it(schemas):
    """The older release has the present classes and files; the newer one has one more version."""
    newer = copy.deepcopy(schemas)
    released = Vocabulary(schemas)
    newer_vocabulary = with_older(newer, ApiKey.LIST_LOGS, lambda *_: None)
    message = ListLogsResponse(logs=(LISTED,))
    assert heard(released, wire(newer_vocabulary, message, 0)) == message
    assert heard(newer_vocabulary, wire(released, message, 0)) == message


def test_what_an_older_version_can_not_say_is_refused_not_lost(schemas):
    vocabulary = with_older(schemas, ApiKey.LIST_LOGS, lacks_leader_epoch)
    message = ListLogsResponse(logs=(LISTED, dataclasses.replace(LISTED, leader_epoch=5)))
    with pytest.raises(NotInVersion, match=r"logs\.leader_epoch") as refused:
        vocabulary.encode(message, 0, 1)
    assert (refused.value.version, refused.value.field) == (0, "logs.leader_epoch")
    assert heard(vocabulary, wire(vocabulary, message, 1)) == message


def test_an_ignorable_field_may_be_lost(schemas):
    def lacks_message(name, older, newest):
        if name == "ListLogsResponse":
            field(newest, "error_message").update(default="", ignorable=True)
            older["fields"] = [f for f in older["fields"] if f["name"] != "error_message"]

    vocabulary = with_older(schemas, ApiKey.LIST_LOGS, lacks_message)
    message = ListLogsResponse(error_code=ErrorCode.UNAUTHORISED, error_message="not for you")
    assert heard(vocabulary, wire(vocabulary, message, 0)) == ListLogsResponse(error_code=ErrorCode.UNAUTHORISED)


def test_a_field_that_is_gone_is_skipped_and_written_at_its_default(schemas):
    def had_filter(name, older, _newest):
        if name == "ListLogsRequest":
            older["fields"].insert(0, {"name": "filter", "type": "string", "default": "all"})

    vocabulary = with_older(schemas, ApiKey.LIST_LOGS, had_filter)
    message = ListLogsRequest(outbox_id=UUID(int=3))
    data = wire(vocabulary, message, 0)
    assert b"\x06all" in data
    assert heard(vocabulary, data) == message


def test_a_number_may_grow_wider(schemas):
    def was_int(name, older, _newest):
        if name == "ListLogsResponse":
            field(older, "logs", "log_end_offset")["type"] = "int"

    vocabulary = with_older(schemas, ApiKey.LIST_LOGS, was_int)
    message = ListLogsResponse(logs=(LISTED,))
    assert heard(vocabulary, wire(vocabulary, message, 0)) == message


def break_(schemas, name, change):
    change(schemas[name][max(schemas[name])])
    return schemas


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Credit", lambda s: s["fields"].pop()),
        ("Credit", lambda s: s["fields"].append({"name": "more", "type": "int"})),
        ("Credit", lambda s: s["fields"].reverse()),
        ("Credit", lambda s: s["fields"][0].update(type="int")),
        ("Credit", lambda s: s["fields"][0].update(name="other")),
        ("Credit", lambda s: s.update(name="Debit")),
        ("AppendRecordsRequest", lambda s: fields_of(s, "partitions").pop()),
        ("ListLogsResponse", lambda s: fields_of(s, "logs", "tp").pop()),
    ],
    ids=["field lost", "field more", "order", "type", "name", "record", "in an array", "in a record"],
)
def test_a_schema_that_is_not_its_class_stops_the_start(schemas, name, change):
    with pytest.raises(SchemaMismatch, match=name):
        Vocabulary(break_(schemas, name, change))


def without_default(_name, older, _newest):
    older["fields"] = older["fields"][1:]


def odd_versions(schemas):
    schemas["ListLogsRequest"][1] = schemas["ListLogsRequest"][0]


def lonely_event(schemas):
    schemas["Credit"][2] = schemas["Credit"][1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: s.pop("Credit"), "no schema of Credit"),
        (lambda s: s.update(Debit=s["Credit"]), "schemas of no message"),
        (odd_versions, "other versions than each other"),
        (lonely_event, "other versions than ATTACH"),
    ],
    ids=["absent", "too many", "request without response", "event without call"],
)
def test_a_set_of_schemas_that_does_not_fit_together_stops_the_start(schemas, change, why):
    change(schemas)
    with pytest.raises(SchemaMismatch, match=why):
        Vocabulary(schemas)


def test_a_new_field_needs_a_default(schemas):
    with pytest.raises(SchemaMismatch, match="no default"):
        with_older(schemas, ApiKey.LIST_LOGS, without_default)


def test_a_field_that_goes_needs_a_default(schemas):
    def had_more(_name, older, _newest):
        older["fields"].append({"name": "gone", "type": "int"})

    with pytest.raises(SchemaMismatch, match="no default for it"):
        with_older(schemas, ApiKey.LIST_LOGS, had_more)


def test_a_gap_in_the_versions_is_found(tmp_path):
    for version in (0, 2):
        (tmp_path / f"Credit.{version}.avsc").write_text("{}")
    with pytest.raises(SchemaMismatch, match="gap"):
        read_schemas(tmp_path)


def test_a_stray_file_is_found(tmp_path):
    (tmp_path / "Credit.avsc").write_text("{}")
    with pytest.raises(SchemaMismatch, match="name"):
        read_schemas(tmp_path)


def test_no_array_item_takes_no_bytes(schemas):
    """A count costs nothing to send: if an item did not either, a short header could claim 2**62 of them."""
    for name, versions in schemas.items():
        for version, schema in versions.items():
            for items in array_items(schema):
                assert not isinstance(items, dict) or items.get("fields") != [], f"{name}.{version}"
                assert items != "null", f"{name}.{version}"


def array_items(schema):
    if isinstance(schema, dict):
        if schema.get("type") == "array":
            yield schema["items"]
            yield from array_items(schema["items"])
        for entry in schema.get("fields", ()):
            yield from array_items(entry["type"])


def test_missing_fields_knows_named_types():
    point = {"type": "record", "name": "Point", "fields": [{"name": "x", "type": "int"}, {"name": "y", "type": "int"}]}
    pair = {"type": "record", "name": "Pair", "fields": [{"name": "a", "type": point}, {"name": "b", "type": "Point"}]}
    flat = {"type": "record", "name": "Point", "fields": [{"name": "x", "type": "int"}]}
    other = {"type": "record", "name": "Pair", "fields": [{"name": "a", "type": flat}, {"name": "b", "type": "Point"}]}
    assert [path for path, _ in missing_fields(pair, other)] == [("a", "y"), ("b", "y")]


def altered(message, change):
    """The frame of a message in version 0, its header changed as no class would let it."""
    key, kind = PLACE_OF[type(message)]
    schema = parse_schema(read_schemas(released_schemas())[type(message).__name__][0])
    datum = schemaless_reader(BytesIO(wire(VOCABULARY, message, 0)[PREFIX_BYTES:]), schema, None)
    change(datum)
    target = BytesIO()
    schemaless_writer(target, schema, datum)
    return frame_head((key, kind), 0, 1, target.getvalue(), 0)


def test_an_error_code_of_the_future_reads_as_unknown():
    message = DescribeLogResponse(logs=(LogDescription(tp=TP, error_code=ErrorCode.LOG_OFFLINE),))

    def change(datum):
        datum["logs"][0]["error_code"] = 30_000

    assert heard(VOCABULARY, altered(message, change)).logs[0].error_code is ErrorCode.UNKNOWN_SERVER_ERROR
    assert PushSessionEndReason(99) is PushSessionEndReason.UNKNOWN


def test_the_error_table_is_whole():
    assert ERROR_TABLE.keys() == set(ErrorCode)
    assert all(row.meaning for row in ERROR_TABLE.values())
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
    with pytest.raises(MalformedMessage, match=r"Credit\.bytes"):
        heard(VOCABULARY, frame_head((ApiKey.CREDIT, FrameKind.EVENT), 0, 1, header, 0))


def test_a_number_that_names_nothing_is_refused_on_arrival():
    """An unknown error code is read as unknown; an unknown value in a request is refused."""
    with pytest.raises(MalformedMessage, match="77 is not a valid PositionKind"):
        heard(VOCABULARY, altered(StartReplayRequest(recording_id=1), lambda datum: datum.update(position_kind=77)))


def test_sizes_that_only_add_up_are_refused():
    """Ten bytes for one partition and ten less than none for the other make none in all."""
    message = AppendRecordsRequest(partitions=(partition(), partition()))

    def change(datum):
        for part, size in zip(datum["partitions"], (10, -10), strict=True):
            part["records_bytes"] = size

    with pytest.raises(MalformedMessage, match="records_bytes is -10"):
        heard(VOCABULARY, altered(message, change))


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
        head, *parts = VOCABULARY.encode(AppendRecordsRequest(partitions=(partition(records=(piece, b"123")),)), 0, 1)
    assert parts == [piece, b"123"]
    assert int.from_bytes(head[:4]) == len(head) - 4 + 93
    with pytest.raises(BadArgument):
        FileSlice(file, -1, 5)


def test_only_what_its_schema_can_hold_is_sent():
    with pytest.raises(BadArgument, match="schema"):
        VOCABULARY.encode(ListLogsResponse(error_message=5), 0, 1)
    with pytest.raises(BadArgument, match="not spoken"):
        VOCABULARY.encode(ListLogsRequest(), 1, 1)
