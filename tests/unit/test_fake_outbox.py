"""A FakeOutbox answers as an Outbox does: the same tests over both. And what only the fake can: failures to order."""

import asyncio
import inspect
import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from filtering import ReplayFilter, StreamMetadata
from filtering.carrier import METADATA_HEADER
from filtering.murmur import default_partition
from pushrep import AsyncOutbox, Durability, Outbox, OutboxConfig
from pushrep.errors import BadArgument
from pushrep.log import LogClosed, LogConfig, OffsetOutOfRange
from pushrep.outbox import (
    BufferFull,
    DeliveryFailed,
    LogStopped,
    ManyReceipt,
    NotEnoughReplicas,
    OutboxClosed,
    RecordRefused,
)
from pushrep.outbox.errors import MetadataNotRising
from pushrep.testing import FakeOutbox
from pushrep.values import to_json
from tests.unit.gated_disk import GatedDisk, LosingDisk, until

SMALL = LogConfig(preallocate_bytes=0)


class Kind:
    """A class of outboxes: how to open one, and read what was appended."""

    def __init__(self, path, *, is_fake):
        self.path, self.is_fake = path, is_fake

    def open(self, *, config=None, carrier="header", **settings):
        opening = FakeOutbox.open if self.is_fake else Outbox.open
        config = config or OutboxConfig(linger_ms=0, log_config=SMALL)
        given = {"durability": Durability.BUFFERED, "config": config, "carrier": carrier, **settings}
        return opening(self.path, "orders", 4, "billing", **given)

    def records(self, outbox, partition):
        outbox.flush()
        return list(outbox.log(partition).records(0))


@pytest.fixture(params=["real", "fake"])
def kind(request, tmp_path):
    return Kind(tmp_path / "outbox", is_fake=request.param == "fake")


# -- one suite for both ------------------------------------------------------------------------------------------------


def test_receipts_give_offsets_of_each_partition(kind):
    with kind.open() as outbox:
        assert [outbox.append(1, b"%d" % n).result(60) for n in range(3)] == [0, 1, 2]
        assert outbox.append(2, None).result(60) == 0
        many = outbox.append_many(1, [b"a", b"b"])
        assert (many.result(60), many.count, isinstance(many, ManyReceipt), many.done()) == (3, 2, True, True)
        called = threading.Event()
        outbox.append(3, b"x").add_done_callback(lambda receipt: called.set() if receipt.done() else None)
        assert called.wait(60)


def test_records_are_what_readers_get(kind):
    upstream = StreamMetadata(7, 5, 40)
    with kind.open() as outbox:
        outbox.append(1, b"plain", timestamp_ms=5)
        outbox.append(1, b"keyed", key=b"k", headers=[("h", b"1"), ("h", None)], timestamp_ms=6)
        outbox.append(1, bytearray(b"buffer"), metadata=upstream, timestamp_ms=7)
        rest = {"keys": [b"a", None], "headers": [[], [("x", b"y")]], "timestamps_ms": [8, 9]}
        outbox.append_many(1, [b"m", None], metadata=StreamMetadata(7, 5, 41), **rest)
        own = [StreamMetadata(outbox.pid, 1, 0), StreamMetadata(outbox.pid, 1, 1)]
        positions = [*own, upstream, StreamMetadata(7, 5, 41), StreamMetadata(7, 5, 42)]
        packed = [(METADATA_HEADER, position.pack()) for position in positions]
        found = kind.records(outbox, 1)
        assert [(one.offset, one.timestamp_ms, one.key, one.value) for one in found] == [
            (0, 5, None, b"plain"), (1, 6, b"k", b"keyed"), (2, 7, None, b"buffer"), (3, 8, b"a", b"m"),
            (4, 9, None, None),
        ]  # fmt: skip
        assert [one.headers for one in found] == [
            (packed[0],), (("h", b"1"), ("h", None), packed[1]), (packed[2],), (packed[3],), (("x", b"y"), packed[4]),
        ]  # fmt: skip
        assert outbox.last_metadata(7, 5) == 42
        assert outbox.last_metadata(outbox.pid, 1) == 1
        assert outbox.last_metadata(8, 5) is None


def test_the_key_carries_the_metadata(kind):
    with kind.open(carrier="key") as outbox:
        outbox.append_many(0, [b"a", b"b"])
        found = kind.records(outbox, 0)
        seen = ReplayFilter()
        assert [seen.admit(one.key) for one in [*found, *found]] == [True, True, False, False]
        with pytest.raises(RecordRefused, match="carrier='header'"):
            outbox.append(0, b"v", key=b"mine")


def test_values_are_serialized_and_keys_choose_the_partition(kind):
    settings = {"serializer": to_json, "key_serializer": str.encode, "partition_by": "key"}
    with kind.open(**settings) as outbox:
        for number in range(20):
            outbox.append(value={"number": number}, key=f"customer-{number % 3}")
        outbox.append_many(1, [{"number": 20}], keys=["mine"])
        found = [(n, record.key, record.value) for n in range(4) for record in kind.records(outbox, n)]
    assert {value for _, _, value in found} == {b'{"number":%d}' % number for number in range(21)}
    assert {(n, key) for n, key, _ in found if key != b"mine"} == {
        (default_partition(key, 4), key) for key in (b"customer-0", b"customer-1", b"customer-2")
    }
    assert [n for n, key, _ in found if key == b"mine"] == [1]


@pytest.mark.parametrize(
    ("append", "argument"),
    [
        (lambda outbox: outbox.append(4, b"v"), "partition"),
        (lambda outbox: outbox.append("1", b"v"), "partition"),
        (lambda outbox: outbox.append(0, "text"), "value"),
        (lambda outbox: outbox.append(0, b"v", headers={"a": b"b"}), "headers"),
        (lambda outbox: outbox.append(0, b"v", timestamp_ms=-1), "timestamp_ms"),
        (lambda outbox: outbox.append(0, b"v", metadata=StreamMetadata(1, 1, 0)), "metadata"),
        (lambda outbox: outbox.append(0, b"v", metadata=StreamMetadata(outbox.pid, 0, 9)), "metadata"),
        (lambda outbox: outbox.append(0, bytes(2 << 20)), "value"),
        (lambda outbox: outbox.append_many(0, []), "values"),
        (lambda outbox: outbox.append_many(0, [b"a"], keys=[]), "keys"),
    ],
)
def test_what_is_refused_is_refused_by_name(kind, append, argument):
    with kind.open() as outbox:
        with pytest.raises(RecordRefused) as refusal:
            append(outbox)
        assert refusal.value.argument == argument
        assert kind.records(outbox, 0) == []
        assert outbox.append(0, b"next").result(60) == 0


def test_source_offsets_rise(kind):
    with kind.open() as outbox:
        outbox.append(1, b"v", metadata=StreamMetadata(7, 1, 5))
        with pytest.raises(MetadataNotRising) as refusal:
            outbox.append_many(1, [b"v", b"w"], metadata=[StreamMetadata(7, 1, 6), StreamMetadata(7, 1, 6)])
        assert (refusal.value.last, refusal.value.got) == (6, 6)
        outbox.append(1, b"v", metadata=StreamMetadata(7, 1, 6)).result(60)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("carrier", "body"),
        ("config", None),
        ("acks", "ALL"),
        ("replicas", ["nowhere"]),
        ("kafka", "localhost:9092"),
        ("health", "127.0.0.1:0"),
    ],
)
def test_wrong_settings_are_refused_by_name(kind, setting, value):
    with pytest.raises(BadArgument) as refusal:
        kind.open(**{setting: value if setting != "config" else 7})
    assert refusal.value.argument == setting


def test_the_key_is_not_carrier_and_partition_at_once(kind):
    with pytest.raises(BadArgument) as refusal:
        kind.open(carrier="key", partition_by="key")
    assert refusal.value.argument == "partition_by"


def test_a_log_is_read_from_any_offset_by_records_and_batches(kind):
    with kind.open() as outbox:
        outbox.append_many(1, [b"0", b"1"]).result(60)
        outbox.append_many(1, [b"2", b"3", b"4"]).result(60)
        outbox.flush()
        log = outbox.log(1)
        assert (log.topic, log.partition) == ("orders", 1)
        assert (log.log_start_offset, log.log_end_offset, log.high_watermark, log.stable_offset) == (0, 5, 5, 5)
        assert [one.value for one in log.records(1, 3)] == [b"1", b"2"]
        assert list(log.records(5)) == []
        assert [one.header.base_offset for one in log.batches(2)] == [2]
        assert [one.header.base_offset for one in log.batches(1, 3)] == [0, 2]
        for read in (lambda: log.records(6), lambda: log.batches(0, 6), lambda: log.records(3, 2)):
            with pytest.raises(OffsetOutOfRange) as refusal:
                list(read())
            assert (refusal.value.start, refusal.value.end) == (0, 5)
        with pytest.raises(RecordRefused):
            outbox.log(4)
    with pytest.raises(OutboxClosed):
        outbox.log(1)
    with pytest.raises(LogClosed) as closed:
        list(log.records(0))
    assert closed.value.path == outbox.directory.absolute() / "orders-1"


def test_the_status_says_what_was_appended_and_that_nothing_is_wrong(kind):
    with kind.open() as outbox:
        outbox.append_many(1, [b"0", b"1"]).result(60)
        with pytest.raises(RecordRefused):
            outbox.append(4, b"v")
        status = outbox.status()
        assert status.is_ready
        assert list(status.problems()) == []
        shown = status.as_dict()
        assert (shown["topic"], shown["partitions"], shown["state"]) == ("orders", 4, "alone")
        assert (shown["log_end_offsets"], shown["high_watermarks"]) == (2, 2)
        assert (shown["appends"]["records"], shown["appends"]["refused"]) == (2, {"RecordRefused": 1})
        assert [one["log_end_offset"] for one in shown["parts"]] == [0, 2, 0, 0]
    with pytest.raises(LogClosed):
        outbox.status()


def test_closed_it_takes_nothing(kind):
    outbox = kind.open()
    outbox.append(0, b"v")
    outbox.close()
    outbox.close()
    for call in (
        lambda: outbox.append(0, b"v"),
        lambda: outbox.append_many(0, [b"v"]),
        outbox.flush,
        lambda: outbox.last_metadata(1, 1),
    ):
        with pytest.raises(OutboxClosed):
            call()


def test_without_a_topic_nothing_is_shipped(kind):
    with kind.open() as outbox:
        with pytest.raises(BadArgument) as refusal:
            outbox.wait_shipped(1)
        assert (refusal.value.argument, outbox.lag()) == ("kafka", {})
        for wait in (outbox.flush, outbox.wait_shipped):
            with pytest.raises(BadArgument):
                wait("soon")


def test_tasks_use_both_alike(kind):
    async def main():
        async with AsyncOutbox(kind.open()) as outbox:
            first = await outbox.append(0, b"v")
            assert await first == 0
            many = await outbox.append_many(0, [b"a", b"b"])
            assert await many == 1
            await outbox.flush()
        with pytest.raises(OutboxClosed):
            await outbox.append(0, b"v")

    asyncio.run(main())


# -- failures ----------------------------------------------------------------------------------------------------------


@contextmanager
def failing(kind, failure, tmp_path):
    """An open outbox whose appends to partition 0 fail so, and what ends that."""
    config = OutboxConfig(linger_ms=0, log_config=SMALL, block_ms=20, buffer_bytes=1 << 20, open_timeout_s=0)
    if kind.is_fake:
        with kind.open(config=config) as outbox:
            outbox.fail(failure)
            yield outbox, outbox.recover
    elif failure == "full":
        disk = GatedDisk()
        with kind.open(config=config, filesystem=disk, durability=Durability.FLUSHED) as outbox, disk.hanging():
            while True:
                try:
                    outbox.append(0, bytes(200_000))
                except BufferFull:
                    break
            yield outbox, disk.gate.set
    elif failure == "stopped":
        disk = LosingDisk()
        with kind.open(config=config, filesystem=disk, durability=Durability.FLUSHED) as outbox:
            disk.fails = True
            with pytest.raises(DeliveryFailed):
                outbox.append(0, b"lost").result(60)

            def recover():
                disk.fails = False

            yield outbox, recover
    else:
        with kind.open(config=config, replicas=["127.0.0.1:1"]) as outbox:
            yield outbox, None


@pytest.mark.parametrize(
    ("failure", "error"), [("full", BufferFull), ("stopped", LogStopped), ("not enough replicas", NotEnoughReplicas)]
)
def test_failures_are_raised_alike_and_nothing_is_taken(kind, failure, error, tmp_path):
    with failing(kind, failure, tmp_path) as (outbox, recover):
        with pytest.raises(error) as one:
            outbox.append(0, bytes(200_000))
        with pytest.raises(error) as many:
            outbox.append_many(0, [bytes(200_000)])
        if failure == "full":
            assert (one.value.buffer_bytes, one.value.block_ms) == (1 << 20, 20)
            assert many.value.wanted_bytes > 200_000
        elif failure == "stopped":
            assert (one.value.topic, one.value.partition) == ("orders", 0)
        else:
            assert (one.value.name, one.value.in_sync, one.value.needed) == ("orders-0", 1, 2)
        if recover is not None:
            recover()

            def takes():
                try:
                    return outbox.append(0, b"again").result(60) >= 0
                except error:
                    return False

            until(takes, "it takes records again")


def test_failures_of_the_fake_are_counted_and_have_a_partition():
    with FakeOutbox() as outbox:
        outbox.fail("full", partition=2, times=2)
        outbox.append(1, b"v")
        for _ in range(2):
            with pytest.raises(BufferFull):
                outbox.append(2, b"v")
        assert outbox.append(2, b"v").result() == 0
        assert outbox.append_many(2, [bytes(1000)] * 1000).result() == 1
        with pytest.raises(RecordRefused):
            outbox.fail("full", partition=4)
        for never in (0, -1, "once"):
            with pytest.raises(BadArgument, match="times"):
                outbox.fail("full", times=never)
        with pytest.raises(BadArgument) as refusal:
            outbox.fail("slow")
        assert refusal.value.argument == "failure"


@pytest.mark.parametrize("serializer", [None, to_json])
def test_a_task_meets_the_failure_at_once_and_as_often_as_ordered(serializer):
    async def main():
        async with AsyncOutbox(FakeOutbox(serializer=serializer)) as outbox, asyncio.timeout(30):
            for append in (lambda: outbox.append(0, b"v"), lambda: outbox.append_many(0, [b"v"])):
                outbox.outbox.fail("full", times=1)
                with pytest.raises(BufferFull) as full:
                    await append()
                assert full.value.block_ms == outbox.outbox.facts.settings.config.block_ms
                await append()

    asyncio.run(main())


def test_the_fakes_memory_is_no_limit():
    with FakeOutbox(config=OutboxConfig(buffer_bytes=1 << 20, log_config=SMALL)) as outbox:
        for _ in range(20):
            outbox.append_many(0, [bytes(100_000)] * 5)
        assert len(outbox.records(0)) == 100


# -- signatures, fixture, systems --------------------------------------------------------------------------------------


def names_of(function):
    return {name: one.kind for name, one in inspect.signature(function).parameters.items() if name != "self"}


def test_it_has_the_outbox_s_signatures():
    for name in ("append", "append_many", "last_metadata", "flush", "wait_shipped", "close", "log", "lag", "status"):
        assert names_of(getattr(FakeOutbox, name)) == names_of(getattr(Outbox, name)), name
    assert names_of(FakeOutbox.__init__) == names_of(Outbox.open), "its constructor takes what open takes"
    assert [*names_of(FakeOutbox.__init__)] == [*names_of(Outbox.open)], "in the same order"


def test_workers_and_standbys_get_one_alike(tmp_path):
    assert FakeOutbox.open_slot(tmp_path, "orders", 2, "billing", 3).append(1, b"v").result() == 0
    assert FakeOutbox.stand_by(tmp_path, "orders", None, "billing", on_state=print).identity.carrier == "key"
    assert FakeOutbox.stand_by(tmp_path, "orders", 2, "billing", partition_by="key").append(value=b"v").result() == 0
    assert not list(tmp_path.iterdir())


def test_the_status_shows_the_failures_that_a_test_ordered():
    with FakeOutbox() as outbox:
        outbox.fail("stopped", partition=2)
        assert outbox.status().is_ready, "the other partitions take records"
        assert [one.partition for one in outbox.status().stopped] == [2]
        outbox.fail("full", times=1)
        assert not outbox.status().is_ready
        with pytest.raises(BufferFull):
            outbox.append(0, b"v")
        assert outbox.status().is_ready
        with pytest.raises(RecordRefused):
            outbox.records(4)


def test_it_starts_no_thread(tmp_path):
    code = "from pushrep.testing import FakeOutbox; import threading\nwith FakeOutbox() as one: one.append(0, b'v')\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print(threading.active_count())"], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert not list(tmp_path.iterdir())


PLUGIN = """
def test_append(pushrep_outbox):
    assert pushrep_outbox.append(3, b"v").result() == 0
    assert [one.value for one in pushrep_outbox.records(3)] == [b"v"]

def test_each_has_its_own(pushrep_outbox):
    assert pushrep_outbox.records(3) == []

def test_nothing_is_loaded_for_others():
    import sys
    assert sorted(name for name in sys.modules if name.startswith(("pushrep", "filtering"))) == LOADED
"""


def test_the_plugin_brings_the_fixture_and_loads_nothing(tmp_path):
    loaded = ["pushrep", "pushrep.importing", "pushrep.pytest_plugin"]
    (tmp_path / "test_alone.py").write_text(PLUGIN.replace("LOADED", repr(loaded)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "pushrep.pytest_plugin", "test_alone.py", "-k"]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for wanted, count in (("loaded", 1), ("append or own", 2)):
        done = subprocess.run([*command, wanted], capture_output=True, text=True, cwd=tmp_path, env=alone)
        assert f"{count} passed" in done.stdout, done.stdout + done.stderr
