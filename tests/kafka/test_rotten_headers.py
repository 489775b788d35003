"""Any bit of any header may flip in the log of an outbox that ships: the topic gets the right records before it, and no
more.

The last of the reading ways of tests/readers; the others do not need a broker. Each bit has a log, all in one outbox,
so that one session with a real broker is enough; a plain consumer is the judge. Shipping changes base offset and CRC,
so no reader of the topic could detect the damage.
"""

from contextlib import ExitStack
from functools import partial

import pytest

from filtering import StreamMetadata
from pushrep.kafka import KafkaDestination, ShippingStopped, recovery, sink_session
from pushrep.log import LogConfig
from pushrep.outbox import Outbox, OutboxConfig
from tests.integration.outboxes import wait_until
from tests.kafka.plain_client import consume, consume_all, create_topic
from tests.readers.small_logs import CONFIG, DENSE, TOPIC, record_at, write_logs
from tests.support.outbox_arguments import outbox_arguments

pytestmark = [pytest.mark.java, pytest.mark.slow]
WAIT_S = 120
_LOGS_MAX = 300  # so many descriptors are open at a time


def test_one_rotten_bit_of_a_header_sends_no_wrong_record(broker, tmp_path, torture):
    (log,) = write_logs(tmp_path / "whole", [DENSE])
    chosen = torture.random("shipped")
    # What a CRC covers rots in one way, so that each of its bits rots in one of the batches.
    flips = [
        flip
        for flip in log.flips(torture)
        if not flip.is_covered or not torture.is_long or flip.bit % len(log.batches) == flip.batch
    ]
    if not torture.is_long:  # one of each field
        flips = list({flip.field: flip for flip in chosen.sample(flips, len(flips))}.values())
    for first in range(0, len(flips), _LOGS_MAX):
        name = f"rotten-{first}"
        assert list(faults_of(broker, name, tmp_path / name, flips[first : first + _LOGS_MAX])) == []


def faults_of(broker, topic, directory, flips):
    """A log for each flip is shipped; what is wrong with what comes out."""
    given = {"partitions": len(flips), "producer": "test", "log_config": CONFIG, "copy_check": False}
    with Outbox.open(directory / "first", TOPIC, **outbox_arguments(**given)) as outbox:
        record, topic_id = record_of(outbox.pid), outbox.log(0).log_id
    logs = write_logs(directory / "outbox", [DENSE] * len(flips), topic_id, record)
    (directory / "first" / "outbox.json").rename(directory / "outbox" / "outbox.json")
    with Outbox.open(directory / "outbox", TOPIC, **outbox_arguments(**given)):
        pass  # makes indexes and seals
    kafka = KafkaDestination(bootstrap_servers=broker.bootstrap_servers, topic=topic, retry_backoff_ms=20)
    with (
        Outbox.open(
            directory / "outbox", TOPIC, **outbox_arguments(**given, kafka=kafka, open_timeout_s=0.0)
        ) as outbox,
        ExitStack() as rotten,
    ):
        for log, flip in zip(logs, flips, strict=True):
            assert log.end, "what stands there is looked at before it rots"
            rotten.enter_context(log.flipped(flip))
        create_topic(broker.bootstrap_servers, topic, len(flips), retention_ms=-1)  # nothing is sent before

        def is_over():
            lag = outbox.lag()[f"kafka:{topic}"]
            return lag.records == sum(logs[one.partition].end - one.offset for one in lag.stopped)

        wait_until(is_over, "each log is shipped, or stopped")
        stopped = {one.partition: one.reason for one in outbox.lag()[f"kafka:{topic}"].stopped}
        with pytest.raises(ShippingStopped):
            outbox.wait_shipped(WAIT_S)
    seen = consume_all(broker.bootstrap_servers, topic, range(len(flips)))
    for partition, (log, flip) in enumerate(zip(logs, flips, strict=True)):
        got = [(one.timestamp_ms, one.key, one.value, one.headers) for one in seen[partition]]
        reason = stopped.get(partition)
        if got != [one[1:] for one in log.records[: len(got)]]:
            yield str(flip), "wrong records"
        elif len(got) < len(log.records) and reason is None:
            yield str(flip), f"a silent end behind {len(got)} records"
        elif reason is not None and "holds no whole batch" not in reason:
            yield str(flip), reason


def record_of(pid):
    """A record as an outbox with this PID would append it."""
    return lambda partition, offset: record_at(offset)._replace(key=StreamMetadata(pid, partition, offset).pack())


@pytest.mark.parametrize("is_newest", [True, False])
def test_a_batch_that_rotted_once_it_was_shipped_stops_its_own_partition_until_it_is_whole(
    broker, tmp_path, monkeypatch, is_newest
):
    """The test can't tell whether this log is still the shipped one; no record of another log was shipped before."""
    for module in (recovery, sink_session):
        monkeypatch.setattr(module, "STOPPED_RETRY_MS", 200)
    create_topic(broker.bootstrap_servers, topic := f"rotten-behind-{is_newest}", 2)
    large = b"not shipped yet" * 200
    kafka = KafkaDestination(bootstrap_servers=broker.bootstrap_servers, retry_backoff_ms=20)
    config = LogConfig(preallocate_bytes=0, segment_bytes=4096)
    opened = partial(
        Outbox.open, tmp_path, topic, 2, "test", config=OutboxConfig(log_config=config, open_timeout_s=WAIT_S)
    )
    with opened(kafka=kafka) as outbox:
        append(outbox, b"shipped")
        outbox.wait_shipped(WAIT_S)
    if not is_newest:  # else the opening finds it
        with opened() as outbox:
            for _ in range(2):  # the second one in the next segment
                append(outbox, large)
    segment = tmp_path / f"{topic}-0" / f"{0:020d}.log"
    whole = segment.read_bytes()
    segment.write_bytes(whole[:70] + bytes([whole[70] ^ 1]) + whole[71:])
    with opened(kafka=kafka) as outbox:
        with pytest.raises(ShippingStopped, match="damaged from" if is_newest else "no whole batch") as caught:
            outbox.wait_shipped(WAIT_S)
        assert caught.value.partition == 0
        outbox.append(1, b"of the other one").result(WAIT_S)
        wait_until(lambda: values(broker, topic, 1)[-1] == b"of the other one", "it is shipped", 0.1)
        segment.write_bytes(whole)
        if not is_newest:
            wait_until(lambda: not outbox.lag()[f"kafka:{topic}"].stopped, "it is looked at again")
            outbox.wait_shipped(WAIT_S)
    with opened(kafka=kafka) as outbox:
        append(outbox, b"behind")
        outbox.wait_shipped(WAIT_S)
    before = [b"shipped"] if is_newest else [b"shipped", large, large]
    assert values(broker, topic, 0) == [*before, b"behind"]
    assert values(broker, topic, 1) == [*before, b"of the other one", b"behind"]


def append(outbox, value):
    for partition in range(2):
        outbox.append(partition, value).result(WAIT_S)


def values(broker, topic, partition):
    return [one.value for one in consume(broker.bootstrap_servers, topic, partition)]
