"""What is on the wire stays as it is: a file of golden/protocol/ is one message.

The lines of a file are hexadecimal; `#` begins a comment. All fields of a message have different values.
"""

import dataclasses
from enum import IntEnum
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints
from uuid import UUID

import pytest

from pushrep.election.grants import BALLOT_STRIDE, Grant
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.calls import PLACE_OF, encode, open_frame
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import PREFIX_BYTES, FrameLimits, FrameReader
from pushrep.wire.values import Records, Within, optional_of

GOLDEN = Path(__file__).parent / "golden" / "protocol"
CORRELATION_ID = 0x01020304
STRUCTS = {struct.__name__: struct for struct in PLACE_OF}
NAMES = sorted(STRUCTS)


class Sampler:
    """Fills a message: numbers count up and take one byte or all the bytes that their type can take, in turn."""

    def __init__(self):
        self.count = 0

    def value(self, name, hint):
        self.count += 1
        if get_origin(hint) is Annotated and get_args(hint)[0] is int:
            (within,) = (note for note in get_args(hint)[1:] if isinstance(note, Within))
            return self.count if self.count % 2 else within.high - self.count
        if hint == Records or get_origin(hint) is Annotated:
            return (b"the first batch ", b"the second batch")
        if get_origin(hint) is tuple:
            return tuple(self.value(name, get_args(hint)[0]) for _ in range(2))
        hint = UUID if hint == UUID | None else hint
        if issubclass(hint, IntEnum):
            return ErrorCode.LOG_DIVERGED if hint is ErrorCode else list(hint)[-1]
        if dataclasses.is_dataclass(hint):
            return self.message(hint)
        return {bool: True, str: f"{name}-ü", UUID: UUID(int=self.count << 64 | 0xFF)}[hint]

    def message(self, struct):
        if struct is TopicIdPartition:
            return TopicIdPartition(UUID(int=self.count << 64 | 0xAA), f"orders.{self.count}", self.count)
        hints = get_type_hints(struct, include_extras=True)
        said = {}
        for name in (field.name for field in dataclasses.fields(struct) if field.init):
            part = optional_of(hints[name])
            if part in {None, UUID}:
                said[name] = self.value(name, hints[name])
            else:  # it stands in columns of its own
                parts = get_type_hints(part, include_extras=True)
                said[name] = part(**{inner: self.value(f"{name}_{inner}", hint) for inner, hint in parts.items()})
        if struct is Grant:  # one that does not contradict itself
            leader = said["members"][0].index
            said |= {"leader": leader, "epoch": leader + BALLOT_STRIDE * 300, "members_epoch": 300}
            said |= {"min_insync_replicas": 2, "previous_min_insync_replicas": 1}
        return struct(**said)


def golden(name):
    lines = (GOLDEN / f"{name}.hex").read_text(encoding="ascii").splitlines()
    return bytes.fromhex("".join(line.partition("#")[0] for line in lines))


def received(value):
    """Records come off the wire in one piece."""
    if isinstance(value, tuple):
        return tuple(received(item) for item in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, TopicIdPartition):
        return value
    parts = {field.name: received(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    if "records" in parts:
        parts["records"] = (b"".join(value.records),)
    return type(value)(**parts)


def test_every_message_has_its_file():
    assert {path.name for path in GOLDEN.glob("*")} == {f"{name}.hex" for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_written_as_its_file(name):
    parts = encode(Sampler().message(STRUCTS[name]), CORRELATION_ID)
    assert b"".join(parts) == golden(name), f"{name} is written otherwise"


@pytest.mark.parametrize("name", NAMES)
def test_read_as_its_file(name):
    (frame,) = FrameReader(open_frame, FrameLimits()).feed(golden(name))
    assert frame.message == received(Sampler().message(STRUCTS[name]))
    assert frame.correlation_id == CORRELATION_ID


def test_the_prefix_is_as_it_is_drawn():
    data = golden("AppendRecordsRequest")
    assert int.from_bytes(data[0:4]) == len(data) - 4
    assert data[4:6] == (2).to_bytes(2), "api key"
    assert data[6:8] == bytes(2), "version"
    assert data[8:12] == bytes([1, 2, 3, 4]), "correlation id"
    assert data[12] == 0, "a request"
    header_bytes = int.from_bytes(data[13:16])
    assert data[PREFIX_BYTES + header_bytes :] == b"the first batch the second batch" * 2
