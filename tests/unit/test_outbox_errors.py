"""An error's fields are for code: each is what the error was made with, under the same name."""

import inspect
from pathlib import Path
from types import ModuleType

import pytest

from pushrep.election import errors as election
from pushrep.outbox import errors as outbox
from pushrep.replicate import errors as replicate
from pushrep.wire.error_codes import ErrorCode

MADE_WITH = {
    "path": Path("orders"), "directory": Path("orders"), "slots": 2, "pids": (7, None), "ends": {"orders-0": 9},
    "timeout_s": 1.5, "timeout": 2.5, "partition": 3, "last": 4, "got": 5, "failed": 6, "stored": "a", "pid": 8,
    "buffer_bytes": 9, "wanted_bytes": 10, "block_ms": 11, "may_be_delivered": True, "delivered": 12, "topic": "t",
    "name": "t-0", "in_sync": 1, "needed": 13, "argument": "value", "why": "for a reason", "setting": "carrier",
    "reason": "of the disk", "what_ends_it": "a reboot", "leader": 14, "epoch": 15, "generation": 16 << 32,
    "rival": 17 << 32, "answered": 18, "silent": (19,), "own": (20, 21), "member": 22, "theirs": (23, 24),
    "is_fenced": True, "contacts": {25: 26}, "remedy": "a remedy", "method": "push", "address": "a:1",
    "code": ErrorCode.UNAUTHORISED,
}  # fmt: skip
IN_THE_WORDS_ALONE = {
    "OutboxDiffers.setting", "LogStopped.reason", "LogStopped.what_ends_it", "DeliveryFailed.reason", "NotLeader.why",
    "LogNotFit.remedy", "Refusal.why",
}  # fmt: skip


def made_in(module: ModuleType):
    classes = (one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__)
    return [one for one in classes if issubclass(one, Exception) and "__init__" in vars(one)]


@pytest.mark.parametrize("kind", [*made_in(outbox), *made_in(election), *made_in(replicate)])
def test_an_error_carries_what_it_was_made_with(kind):
    given = {name: MADE_WITH[name] for name in list(inspect.signature(kind).parameters)}
    error = kind(**given)
    told = {name for name in given if f"{kind.__name__}.{name}" in IN_THE_WORDS_ALONE}
    assert {name: getattr(error, name) for name in given.keys() - told} == {
        name: given[name] for name in given.keys() - told
    }
    assert all(given[name] in str(error) for name in told)


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
