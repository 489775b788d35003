"""What an error was made with is on it under the same name, for code, and in its words, for who reads them at night."""

import errno
import inspect
import os
from pathlib import Path
from uuid import UUID

import pytest

from pushrep import errors, values
from pushrep.election import errors as election
from pushrep.errors import PushrepError
from pushrep.kafka import errors as kafka
from pushrep.log import errors as log
from pushrep.outbox import control
from pushrep.outbox import errors as outbox
from pushrep.records import Record, TimestampType
from pushrep.records import header as records
from pushrep.replay import node_connection, plan, replay
from pushrep.replicate import errors as replicate
from pushrep.startpoints import model as startpoints
from pushrep.tables import errors as tables
from pushrep.wire import frames
from pushrep.wire.error_codes import ErrorCode

MODULES = (
    errors, values, records, log, outbox, control, kafka, election, replicate, frames, plan, node_connection, replay,
    startpoints, tables,
)  # fmt: skip
NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
RECORD = Record(offset=901, timestamp_ms=0, key=None, value=b"a", headers=(), timestamp_type=TimestampType.CREATE_TIME)
OTHER = Record(offset=902, timestamp_ms=0, key=None, value=b"b", headers=(), timestamp_type=TimestampType.CREATE_TIME)
MADE_WITH = {
    "address": "a.example:1", "answered": 118, "argument": "an argument", "block_ms": 111, "buffer_bytes": 109,
    "by": "a holder", "cause": NO_ROOM, "cleaned_offset": 127, "code": ErrorCode.UNAUTHORISED, "contacts": {125: 126},
    "copy_of": UUID(int=128), "cut_offset": 129, "damaged_from": 130, "delivered": 112,
    "directory": Path("a/directory"), "end": 131, "ends": {"orders-0": 132}, "epoch": 115, "error_code": 133,
    "expected": 134, "expected_bytes": 135, "failed": 106, "found": 136, "found_bytes": 137, "generation": 116 << 32,
    "got": 105, "held": 138, "high_watermark": 139, "in_log": RECORD, "in_sync": 101, "in_topic": OTHER,
    "is_fenced": True, "is_own": True, "kind": "a call", "last": 104, "leader": 114, "leader_epoch": 140,
    "limit": 141, "location": Path("a/location"), "log_end_offset": 142, "lost": {143: (144, 145)},
    "may_be_delivered": True, "member": 122, "method": "push", "name": "orders-1", "names": ("one", "another"),
    "needed": 113, "needed_from": 146, "number": 147, "offset": 148, "outbox": "an outbox", "outbox_id": "of an outbox",
    "own": (120, 121), "owner_pid": 149, "partition": 103, "path": Path("a/path"), "pid": 108, "pid_epoch": 150,
    "pids": (107, None), "place": Path("a/place"), "places": ((151, 152),), "position": 153, "reader": "a reader",
    "reason": "of the disk", "records": 154, "remedy": "a remedy", "rival": 117 << 32, "row_id": 155,
    "says": "nothing works", "segment": 156, "sequence": 157, "servers": "b.example:2", "setting": "a setting",
    "shipped_offset": 158, "silent": (119,), "size": 159, "slots": 102, "start": 160, "stored": "a value",
    "theirs": (123, 124), "timeout": 2.5, "timeout_s": 1.5, "topic": "payments", "topic_partition": 161,
    "value": "another value", "wanted_bytes": 110, "what": "a thing", "what_ends_it": "a reboot", "why": "for a reason",
}  # fmt: skip
NO_FIELD = {
    "AnotherRelay": {"why"}, "AppendFailed": {"cause"}, "DeliveryFailed": {"reason"}, "KafkaUnreachable": {"says"},
    "LogNotFit": {"remedy"}, "LogStopped": {"reason", "what_ends_it"}, "NoRoomToCut": {"cause"}, "NotLeader": {"why"},
    "OutboxDiffers": {"setting"}, "RecordsParked": {"directory"}, "Refusal": {"why"}, "RefusedByTopic": {"directory"},
    "WentBack": {"outbox"},
}  # fmt: skip
"""What an error has in its words alone; of a cause it has the number, which tests of their own hold."""
NO_WORDS = {
    "AppendFailed": {"cause"}, "CallRefused": {"kind"}, "KafkaUnreachable": {"error_code"}, "NoRoomToCut": {"cause"},
    "NotLeader": {"leader", "epoch"}, "Refusal": {"code"}, "RefusedByTopic": {"code"},
    "ReplayFailed": {"segment"}, "ReplayRefused": {"start", "end", "segment"}, "ReplayTruncated": {"leader_epoch"},
    "DeliveryFailed": {"may_be_delivered"}, "LogLocked": {"is_own"}, "NoFreeSlot": {"pids"},
    "NotAhead": {"is_fenced"}, "OutboxDiverged": {"in_log", "in_topic"}, "RivalGenerations": {"generation", "rival"},
}  # fmt: skip
"""What an error has for code alone, or says in another form."""


def kinds():
    for module in MODULES:
        for one in vars(module).values():
            is_ours = isinstance(one, type) and issubclass(one, PushrepError) and one.__module__ == module.__name__
            if is_ours and "__init__" in vars(one):
                yield one


def words_of(value):
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, tuple):
        return [word for one in value for word in words_of(one)]
    if isinstance(value, ErrorCode):
        return [value.name]
    return [value.hex if isinstance(value, UUID) else str(value)]


@pytest.mark.parametrize("kind", [*kinds()])
def test_an_error_carries_and_names_what_it_was_made_with(kind):
    given = {name: MADE_WITH[name] for name in inspect.signature(kind).parameters}
    error = kind(**given)
    no_field, no_words = (exempt.get(kind.__name__, set()) for exempt in (NO_FIELD, NO_WORDS))
    assert {name for name in given if getattr(error, name, None) != given[name]} == no_field, "on the error"
    unnamed = {name for name in given if not all(word in str(error) for word in words_of(given[name]))}
    assert unnamed == no_words, f"in its words: {error}"


@pytest.mark.parametrize(
    ("delivered", "may_be", "says"),
    [
        (0, False, "failed, it is not in the log: why"),
        (0, True, "failed, it may still be delivered: why"),
        (3, True, "failed, the first 3 records are in the log, of the rest: it may still be delivered: why"),
    ],
)
def test_a_failed_delivery_says_what_became_of_the_records(delivered, may_be, says):
    failed = outbox.DeliveryFailed(
        topic="t", partition=1, may_be_delivered=may_be, reason="why", delivered=delivered
    )  # fmt: skip
    assert str(failed) == f"append to t-1 {says}"
