"""Kafka's message.timestamp.before.max.ms and after.max.ms: a record of another time is refused when it is appended."""

import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from pushrep import LogConfig, Outbox, OutboxConfig
from pushrep.errors import BadArgument
from pushrep.log import SegmentLog
from pushrep.outbox.errors import RecordRefused
from pushrep.records import RecordBatch, encode_batch
from pushrep.testing import FakeOutbox
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk

LIMITS = LogConfig(message_timestamp_before_max_ms=10_000, message_timestamp_after_max_ms=1000)


def ready(*times):
    """A batch that others made."""
    return RecordBatch(encode_batch([b"a"] * len(times), timestamps_ms=times).data)


@pytest.mark.parametrize(
    ("offset_ms", "why"),
    [
        (-10_000, None),
        (1000, None),
        (-10_001, "10001 ms ago, more than message_timestamp_before_max_ms=10000"),
        (1001, "1001 ms ahead, more than message_timestamp_after_max_ms=1000"),
    ],
)
def test_a_log_takes_times_up_to_its_limits_in_each_form(offset_ms, why):
    clock = SimulatedClock()
    now_ms = clock.wall_ms()
    at_ms = now_ms + offset_ms
    with SegmentLog.open(Path("/logs/orders-0"), LIMITS, filesystem=SimulatedDisk(clock=clock), clock=clock) as log:
        for data, times in ((b"a", at_ms), ([b"a", b"b"], [now_ms, at_ms]), (ready(now_ms, at_ms, now_ms), None)):
            with pytest.raises(BadArgument, match=why) if why else nullcontext():
                log.append(data, timestamps_ms=times)
        log.append(b"now")
        log.append(ready(-1))
        assert log.log_end_offset == (2 if why else 8)


@pytest.mark.parametrize("make", [Outbox.open, FakeOutbox.open], ids=["real", "fake"])
@pytest.mark.parametrize(("offset_ms", "why"), [(-5000, None), (-60_000, "before_max_ms"), (60_000, "after_max_ms")])
def test_an_outbox_refuses_them_to_the_caller(tmp_path, make, offset_ms, why):
    now_ms = time.time_ns() // 1_000_000
    config = OutboxConfig(log_config=LIMITS, copy_check=False)
    with make(tmp_path / "outbox", "orders", 1, "billing", config=config) as outbox:
        outbox.append(0, b"now")
        for append in (
            lambda: outbox.append(0, b"plain", timestamp_ms=now_ms + offset_ms),
            lambda: outbox.append(0, b"with a header", headers=[("h", b"")], timestamp_ms=now_ms + offset_ms),
            lambda: outbox.append_many(0, [b"a", b"b"], timestamps_ms=[now_ms, now_ms + offset_ms]),
        ):
            with pytest.raises(RecordRefused, match=why) if why else nullcontext():
                append()
