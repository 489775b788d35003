"""The outbox as its caller sees it: order, keys, receipts, carriers, positions, refusals."""

import json
import math
import os
import threading
import time
from bisect import bisect
from pathlib import Path

import pytest

from filtering import METADATA_HEADER, StreamMetadata
from pushrep.env import REAL_FILESYSTEM
from pushrep.env.checked_json import checked_json
from pushrep.errors import BadArgument, CorruptFile, ForkedProcess
from pushrep.log import CorruptBatch, Durability, LogConfig, LogLocked, NotALog, SegmentLog
from pushrep.outbox import (
    Acks,
    LogStopped,
    MetadataNotRising,
    Outbox,
    OutboxClosed,
    OutboxDiffers,
    RecordRefused,
    read_identity,
)
from pushrep.outbox.batch import Latch
from pushrep.records import Codec
from tests.support.forks import code_in_fork
from tests.support.outbox_arguments import outbox_arguments


def open_outbox(path, **settings):
    wanted = {"topic": "orders", "partitions": 2, "producer": "billing", **settings}
    return Outbox.open(path, **outbox_arguments(**wanted))


def of_version(data, version):
    fields = {name: value for name, value in json.loads(data).items() if name not in {"version", "crc32c"}}
    return checked_json(fields, version)


def positions(outbox, partition):
    """(source pid, partition, offset) as each record of the log carries it."""
    found = []
    for record in outbox.log(partition).records(0):
        carried = record.key
        if outbox.identity.carrier == "header":
            assert record.headers[-1][0] == METADATA_HEADER, f"offset {record.offset}: ours is the last header"
            carried = record.headers[-1][1]
        metadata = StreamMetadata.unpack(carried)
        found.append((metadata.pid, metadata.partition, metadata.offset))
    return found


@pytest.mark.parametrize("durability", Durability)
@pytest.mark.parametrize("carrier", ["key", "header"])
def test_a_record_carries_our_pid_its_partition_and_its_log_offset(tmp_path, durability, carrier):
    with open_outbox(tmp_path / "outbox", durability=durability, carrier=carrier) as outbox:
        receipts = [outbox.append(n % 2, b"%d" % n) for n in range(10)]
        assert [receipt.result(60) for receipt in receipts] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        assert all(receipt.done() for receipt in receipts)
        for partition in range(2):
            assert positions(outbox, partition) == [(outbox.pid, partition, offset) for offset in range(5)]
            assert [r.value for r in outbox.log(partition).records(0)] == [b"%d" % n for n in range(partition, 10, 2)]


def test_the_pid_stays_when_the_outbox_is_opened_again(tmp_path):
    with open_outbox(tmp_path) as outbox:
        pid, identity = outbox.pid, outbox.identity
        outbox.append(0, b"a")
    with open_outbox(tmp_path) as outbox:
        assert outbox.pid == pid
        assert outbox.append(0, b"b").result(60) == 1
        assert positions(outbox, 0) == [(pid, 0, 0), (pid, 0, 1)]
    assert read_identity(REAL_FILESYSTEM, tmp_path) == identity


def test_two_outboxes_have_two_pids(tmp_path):
    with open_outbox(tmp_path / "a") as a, open_outbox(tmp_path / "b") as b:
        assert a.pid != b.pid


@pytest.mark.parametrize("carrier", ["key", "header"])
def test_upstream_metadata_travels_and_is_found_again(tmp_path, carrier):
    with open_outbox(tmp_path, carrier=carrier) as outbox:
        outbox.append(1, b"x", metadata=StreamMetadata(7, 3, 40))
        outbox.append(1, b"own")
        outbox.append_many(1, [b"y", b"z"], metadata=StreamMetadata(7, 3, 41))
        outbox.append_many(1, [b"p", b"q"], metadata=[StreamMetadata(8, 1, 5), StreamMetadata(7, 3, 50)])
        outbox.flush()
        expected = [(7, 3, 40), (outbox.pid, 1, 1), (7, 3, 41), (7, 3, 42), (8, 1, 5), (7, 3, 50)]
        assert positions(outbox, 1) == expected
        asked = [(7, 3), (8, 1), (outbox.pid, 1), (7, 1), (9, 3)]
        found = [outbox.last_metadata(*pair) for pair in asked]
        assert found == [50, 5, 1, None, None]
    with open_outbox(tmp_path, carrier=carrier) as outbox:
        assert [outbox.last_metadata(*pair) for pair in asked] == found, "the same from the log alone"


def test_a_restarted_producer_may_replay_and_rises_from_there(tmp_path):
    with open_outbox(tmp_path) as outbox:
        outbox.append_many(0, [b"v"] * 10, metadata=StreamMetadata(7, 0, 0))
        outbox.flush()
        with pytest.raises(MetadataNotRising, match="source offset 9 of PID 7, partition 0 is not above 9"):
            outbox.append(0, b"again", metadata=StreamMetadata(7, 0, 9))
    with open_outbox(tmp_path) as outbox:
        outbox.append(0, b"again", metadata=StreamMetadata(7, 0, 4)).result(60)
        assert outbox.last_metadata(7, 0) == 9, "what the log has, not what came last"
        with pytest.raises(MetadataNotRising) as refused:
            outbox.append(0, b"back", metadata=StreamMetadata(7, 0, 3))
        assert (refused.value.last, refused.value.got) == (4, 3)


def test_one_refused_position_refuses_the_whole_call(tmp_path):
    with open_outbox(tmp_path) as outbox:
        rising = [StreamMetadata(7, 0, offset) for offset in (1, 2, 2)]
        with pytest.raises(MetadataNotRising):
            outbox.append_many(0, [b"a", b"b", b"c"], metadata=rising)
        assert outbox.append_many(0, [b"a", b"b"], metadata=rising[:2]).result(60) == 0
        assert outbox.log(0).log_end_offset == 2


def test_append_many_cuts_batches_and_keeps_neighbours_together(tmp_path):
    values = [os.urandom(1000) for _ in range(100)]
    with open_outbox(tmp_path, batch_bytes=8192) as outbox:
        outbox.append(0, b"first")
        receipt = outbox.append_many(0, values)
        outbox.append(0, b"last")
        assert receipt.result(60) == 1
        assert receipt.count == 100
        outbox.flush()
        log = outbox.log(0)
        assert [record.value for record in log.records(0)] == [b"first", *values, b"last"]
        assert positions(outbox, 0) == [(outbox.pid, 0, offset) for offset in range(102)]
        sizes = [batch.header.size_bytes for batch in log.batches(0)]
        assert len(sizes) > 10
        assert max(sizes) <= 8192


def test_a_list_of_many_batches_is_synced_once(tmp_path, monkeypatch):
    flushes = []
    flush = SegmentLog.flush
    monkeypatch.setattr(SegmentLog, "flush", lambda log: (flushes.append(log), flush(log)))
    with open_outbox(tmp_path, batch_bytes=8192, linger_ms=60_000) as outbox:
        for size in (1000, 1001):  # equal sizes and unequal ones are cut by different sums
            values = [b"v" * (size + n * (size % 2)) for n in range(100)]
            assert outbox.append_many(0, values).result(60) == (size - 1000) * 100
            assert len(list(outbox.log(0).batches(0))) > 10
        assert len(flushes) == 2, "the tail of a list does not linger, and has no sync of its own"


def test_columns_of_every_kind_reach_the_log(tmp_path):
    with open_outbox(tmp_path, carrier="header", log_config=LogConfig(codec=Codec.ZSTD)) as outbox:
        outbox.append(0, b"plain")
        outbox.append(0, b"timed", timestamp_ms=1000)
        outbox.append(0, b"keyed", key=b"k", headers=[("a", b"1"), (METADATA_HEADER, b"old"), ("b", None)])
        outbox.append(0, None, key=b"tombstone")
        outbox.append_many(0, [b"m", b"n"], keys=[None, b"n"], headers=[(), [("c", b"")]], timestamps_ms=[5, 6])
        outbox.append_many(0, [b"o"], timestamps_ms=7)
        outbox.append(0, bytearray(b"copied"))
        outbox.flush()
        records = list(outbox.log(0).records(0))
        assert [r.value for r in records] == [b"plain", b"timed", b"keyed", None, b"m", b"n", b"o", b"copied"]
        assert [r.key for r in records] == [None, None, b"k", b"tombstone", None, b"n", None, None]
        assert [r.headers[:-1] for r in records] == [
            (), (), (("a", b"1"), ("b", None)), (), (), (("c", b""),), (), (),
        ]  # fmt: skip
        times = [r.timestamp_ms for r in records]
        assert times[1] == 1000
        assert times[4:7] == [5, 6, 7]
        assert times[0] == times[2] == times[3], "without a time of its own a record has its batch's"
        assert {batch.header.codec for batch in outbox.log(0).batches(0)} == {Codec.ZSTD}


def test_headers_stay_on_a_key_carrier(tmp_path):
    with open_outbox(tmp_path) as outbox:
        outbox.append(0, b"v", headers=[("trace", b"1")]).result(60)
        (record,) = outbox.log(0).records(0)
        assert record.headers == (("trace", b"1"),)


@pytest.mark.parametrize(
    ("arguments", "argument", "why"),
    [
        ((2, b"v"), "partition", "2 is not one of the 2"),
        ((-1, b"v"), "partition", "-1 is not one of the 2"),
        ((0, "text"), "value", "give bytes or None, not str"),
        ((0, b"v", b"key"), "key", "carrier='header'"),
        ((0, b"v", None, ["h"]), "headers", "a header is"),
        ((0, b"v", None, [("h", 1)]), "headers", "give bytes or None, not int"),
        ((0, b"v", None, (), -1), "timestamp_ms", "-1 is not a time"),
        ((0, b"v", None, (), 1.5), "timestamp_ms", "whole milliseconds"),
        ((0, b"v", None, (), None, b"12345678901234567890"), "metadata", "give a StreamMetadata, not bytes"),
        ((0, b"v", None, (), None, StreamMetadata(7, 1, 0)), "metadata", "belongs to partition 1 of 2"),
        ((0, bytes(1 << 20)), "value", "batch_bytes_max"),
        (([0], b"v"), "partition", "is not one of the 2"),
        ((0, b"v", None, 5), "headers", "give a list of .name, value. pairs, not int"),
        ((0, b"v", None, [("\ud800", b"h")]), "headers", "UTF-8"),
    ],
)
def test_a_refused_record_is_named_and_leaves_nothing(tmp_path, arguments, argument, why):
    with open_outbox(tmp_path) as outbox:
        with pytest.raises(RecordRefused, match=why) as refused:
            outbox.append(*arguments)
        assert refused.value.argument == argument
        assert outbox.append(0, b"next").result(60) == 0


def test_a_header_that_cant_be_written_fails_its_own_record_only(tmp_path):
    """Found when the batch is sealed, it would take down whatever others put into the batch."""
    with open_outbox(tmp_path, linger_ms=60_000) as outbox:
        others = outbox.append(0, b"somebody else's")
        with pytest.raises(RecordRefused, match="headers"):
            outbox.append(0, b"v", headers=[("\ud800", b"")])
        assert others.result(60) == 0


def test_who_waits_may_wait_for_ever_in_so_many_words(tmp_path):
    with open_outbox(tmp_path) as outbox:
        assert outbox.append(0, b"one").result(math.inf) == 0
        assert outbox.append_many(0, [b"many"]).result(math.inf) == 1
        outbox.append(0, b"flushed")
        outbox.flush(math.inf)


def test_a_flush_that_meets_the_close_says_closed(tmp_path, monkeypatch):
    outbox = open_outbox(tmp_path)
    monkeypatch.setattr(
        "pushrep.outbox.partition_appender.raise_unseen_failure", lambda appenders: (monkeypatch.undo(), outbox.close())
    )
    with pytest.raises(OutboxClosed):
        outbox.flush()


def test_our_own_pid_is_refused_as_metadata(tmp_path):
    with open_outbox(tmp_path) as outbox, pytest.raises(RecordRefused, match="this outbox's own"):
        outbox.append(0, b"v", metadata=StreamMetadata(outbox.pid, 0, 0))


def test_flush_waits_for_no_batch_whose_only_record_was_refused(tmp_path):
    with open_outbox(tmp_path, linger_ms=60_000) as outbox:
        with pytest.raises(RecordRefused):
            outbox.append(0, b"v", metadata=StreamMetadata(outbox.pid, 0, 0))
        outbox.flush(timeout=2)


def test_a_record_too_large_is_refused_by_its_largest_part(tmp_path):
    with open_outbox(tmp_path, carrier="header") as outbox:
        with pytest.raises(RecordRefused, match=r"^key: the record may take"):
            outbox.append(0, b"v", key=bytes(1 << 20))
        with pytest.raises(RecordRefused, match=r"^keys\[1\]: the record may take"):
            outbox.append_many(0, [b"v", b"w"], keys=[None, bytes(1 << 20)])


@pytest.mark.parametrize("carrier", ["key", "header"])
def test_the_largest_record_is_the_same_whichever_way_it_comes(tmp_path, carrier):
    with open_outbox(
        tmp_path, carrier=carrier, log_config=LogConfig(batch_bytes=1_000, batch_bytes_max=2_000)
    ) as outbox:

        def takes(append, *given, **more):
            try:
                return append(0, *given, **more) is not None
            except RecordRefused:
                return False

        largest = bisect(range(2_100), False, key=lambda size: not takes(outbox.append, bytes(size))) - 1
        assert 1_500 < largest < 2_000
        for size, is_taken in ((largest, True), (largest + 1, False)):
            value = bytes(size)
            assert takes(outbox.append, value) is is_taken
            assert takes(outbox.append, value, timestamp_ms=1) is is_taken
            assert takes(outbox.append_many, [value] * 2) is is_taken
            assert takes(outbox.append_many, [b"", value]) is is_taken
            assert takes(outbox.append, value[4:], headers=[("h", b"four")]) is False, (
                "a header takes more than its value"
            )


def test_a_latch_that_is_open_lets_everybody_through():
    latch = Latch()
    assert not latch.wait(0)
    assert not latch.wait(-1.0)
    latch.open()
    assert [latch.wait(timeout) for timeout in (0, None, 1e12)] == [True] * 3


@pytest.mark.parametrize(
    ("values", "columns", "why"),
    [
        ([], {}, "values: is empty"),
        (b"abc", {}, "values: give a list of values, not one bytes"),
        ([b"a", 1], {}, r"values\[1\]: give bytes or None, not int"),
        (None, {}, "values: give a list of values, not one NoneType"),
        ([b"a"], {"keys": [b"k"]}, r"keys\[0\]: this outbox carries"),
        ([b"a"], {"headers": []}, "headers: has 0 entries for 1 values"),
        ([b"a"], {"timestamps_ms": [1, 2]}, "timestamps_ms: has 2 entries"),
        ([b"a", b"b"], {"timestamps_ms": [1, -2]}, "timestamps_ms: -2 is not a time"),
        ([b"a", b"b"], {"timestamps_ms": [1, "2"]}, r"timestamps_ms\[1\]: give whole milliseconds"),
        ([b"a", b"b"], {"timestamps_ms": [1, 2.5]}, r"timestamps_ms\[1\]: give whole milliseconds"),
        ([b"a"], {"headers": [{"h": b"h"}]}, r"headers\[0\]: give \(name, value\) pairs, not a dict"),
        ([b"a"], {"headers": [7]}, r"headers\[0\]: give a list of \(name, value\) pairs, not int"),
        ([b"a"], {"headers": [[("\ud800", b"h")]]}, r"headers\[0\]: .* UTF-8"),
        ([b"a"], {"metadata": [b"12345678901234567890"]}, "metadata: give a StreamMetadata"),
        ([b"a", b"b"], {"metadata": StreamMetadata(7, 0, 2**63 - 1)}, "metadata: 2 source offsets from"),
        ([b"a", bytes(1 << 20)], {}, r"values\[1\]: the record may take"),
        ([b"a"], {"headers": [[("h", bytes(1 << 20))]]}, r"headers\[0\]: the record may take"),
        ([bytes(1000)] * 70_000, {}, "values: .* exceed buffer_bytes"),
    ],
)
def test_refused_lists_are_named_and_leave_nothing(tmp_path, values, columns, why):
    with open_outbox(tmp_path) as outbox:
        with pytest.raises(RecordRefused, match=why):
            outbox.append_many(0, values, **columns)
        assert outbox.append(0, b"next").result(60) == 0


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"replicas": "127.0.0.1:7400"}, "replicas"),
        ({"replicas": ["127.0.0.1"]}, "replicas"),
        ({"replicas": ["127.0.0.1:7400", "127.0.0.1:7400"]}, "replicas"),
        ({"replicas": [f"127.0.0.1:{port}" for port in range(1, 257)]}, "replicas"),
        ({"min_insync_replicas": 1}, "min_insync_replicas"),
        ({"replicas": ["127.0.0.1:7400"], "min_insync_replicas": 3}, "min_insync_replicas"),
        ({"delivery_timeout_ms": 0}, "delivery_timeout_ms"),
        ({"replica_lag_max_ms": 0}, "replica_lag_max_ms"),
        ({"open_timeout_s": -1}, "open_timeout_s"),
        ({"push": {}}, "push"),
        ({"kafka": object()}, "kafka"),
        ({"acks": Acks.ALL}, "acks"),
        ({"acks": "all"}, "acks"),
        ({"durability": "FLUSHED"}, "durability"),
        ({"carrier": "body"}, "carrier"),
        ({"topic": "a/b"}, "topic"),
        ({"producer": ""}, "producer"),
        ({"partitions": 0}, "partitions"),
        ({"partitions": "2"}, "partitions"),
        ({"linger_ms": -1}, "linger_ms"),
        ({"batch_bytes": 0}, "batch_bytes"),
        ({"buffer_bytes": 100}, "buffer_bytes"),
        ({"block_ms": 1.5}, "block_ms"),
        ({"close_timeout_s": -1}, "close_timeout_s"),
        ({"close_timeout_s": float("inf")}, "close_timeout_s"),
        ({"linger_ms": 10**18}, "linger_ms"),
        ({"block_ms": 10**18}, "block_ms"),
        ({"log_config": {"segment_bytes": 1000}}, "log_config"),
        ({"producer": "\ud800"}, "producer"),
        ({"create": "no"}, "create"),
        ({"accept_loss": "no"}, "accept_loss"),
        ({"copy_check": 0}, "copy_check"),
    ],
)
def test_a_refused_setting_is_named_and_makes_nothing(tmp_path, settings, setting):
    with pytest.raises(BadArgument, match=f"^{setting}: ") as refused:
        open_outbox(tmp_path / "outbox", **settings)
    assert refused.value.argument == setting
    assert not (tmp_path / "outbox").exists()


@pytest.mark.parametrize(
    ("setting", "value"), [("topic", "other"), ("partitions", 3), ("producer", "shop"), ("carrier", "header")]
)
def test_what_was_fixed_at_creation_is_refused_by_name(tmp_path, setting, value):
    with open_outbox(tmp_path) as outbox:
        stored = getattr(outbox.identity, setting)
    with pytest.raises(OutboxDiffers) as refused:
        open_outbox(tmp_path, **{setting: value})
    assert (refused.value.argument, refused.value.stored, refused.value.got) == (setting, stored, value)
    with open_outbox(tmp_path):
        pass  # and the lock is free again


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data.replace(b"billing", b"bilking"), "checksum"),
        (lambda data: data[:20], "no JSON object with a crc32c.*restore it from a copy"),
        (lambda _: b"[]", "no JSON object with a crc32c.*restore it from a copy"),
        (lambda data: data.replace(b'"version": 1', b'"version": 2'), "checksum"),
        (lambda data: of_version(data, 2), r"its version is 2, this pushrep reads 1.*wrote it$"),
        (None, "is missing beside logs"),
    ],
)
def test_a_damaged_identity_is_never_made_anew(tmp_path, damage, why):
    open_outbox(tmp_path).close()
    path = tmp_path / "outbox.json"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptFile, match=why) as refused:
        open_outbox(tmp_path)
    assert refused.value.path == path


def flip_bit(log, position):
    (file,) = log.glob("*.log")
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def test_a_damaged_log_stops_its_partition_only(tmp_path):
    with open_outbox(tmp_path) as outbox:
        outbox.append(0, b"whole").result(60)
        outbox.append_many(0, [b"value"] * 20)
    flip_bit(tmp_path / "orders-0", 300)
    with open_outbox(tmp_path) as outbox:
        with pytest.raises(LogStopped, match="damaged from offset 1 on"):
            outbox.append(0, b"never")
        records = outbox.log(0).records(0)
        assert next(records).value == b"whole"
        with pytest.raises(CorruptBatch, match="no whole batch for offset 1"):
            next(records)
        assert outbox.append(1, b"goes on").result(60) == 0


@pytest.mark.parametrize("carrier", ["key", "header"])
def test_a_log_that_cant_be_read_refuses_the_open_and_frees_the_directory(tmp_path, carrier):
    with open_outbox(tmp_path, carrier=carrier, batch_bytes=2000) as outbox:
        outbox.append_many(0, [b"value"] * 2000)
    flip_bit(tmp_path / "orders-0", 100)  # far before the end, which is all that a clean open scans
    (tmp_path / "orders-0" / "outbox-positions").unlink()  # so that the log is read for them
    with pytest.raises(CorruptBatch):
        open_outbox(tmp_path, carrier=carrier)
    with SegmentLog.open(tmp_path / "orders-1") as log:
        assert log.log_end_offset == 0, "the lock is free"


def test_the_directory_may_not_be_a_file_or_held(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotALog):
        open_outbox(tmp_path / "file")
    with open_outbox(tmp_path / "held"), pytest.raises(LogLocked) as locked:
        open_outbox(tmp_path / "held")
    assert locked.value.pid == os.getpid()


def test_a_closed_outbox_refuses_every_use(tmp_path):
    outbox = open_outbox(tmp_path)
    receipt = outbox.append(0, b"before")
    outbox.close()
    outbox.close()
    assert receipt.result(0) == 0, "close decided it"
    for use in (
        lambda: outbox.append(0, b"after"),
        lambda: outbox.append_many(0, [b"after"]),
        lambda: outbox.last_metadata(outbox.pid, 0),
        lambda: outbox.log(0),
        outbox.flush,
    ):
        with pytest.raises(OutboxClosed):
            use()
    with SegmentLog.open(tmp_path / "orders-0") as log:
        assert [record.value for record in log.records(0)] == [b"before"]
        assert log.recovery.opening.name == "NORMAL", "closed clean"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 on: what we do here on purpose
def test_a_forked_child_is_refused_and_harms_nothing(tmp_path):
    outbox = open_outbox(tmp_path, linger_ms=60_000)
    pending = outbox.append(0, b"parent's")

    def in_fork():
        told = []
        for use in (
            lambda: outbox.append(0, b"child's"),
            lambda: outbox.append_many(0, [b"child's"]),
            lambda: pending.result(1),
            lambda: outbox.last_metadata(outbox.pid, 0),
            lambda: outbox.log(0),
            outbox.flush,
            outbox.close,
        ):
            try:
                use()
            except ForkedProcess:
                told.append("F")
            except BaseException as error:  # noqa: BLE001 - the parent shows it
                told.append(repr(error))
        assert "".join(told) == "F" * 7

    assert code_in_fork(in_fork) == 0, "see the child's words in the captured stderr"
    assert pending.result(60) == 0
    outbox.close()
    with open_outbox(tmp_path) as outbox:
        assert [record.value for record in outbox.log(0).records(0)] == [b"parent's"]


def test_many_threads_keep_their_own_order(tmp_path):
    kept = {}

    def produce(name):
        receipts = []
        for n in range(300):
            receipts.append((outbox.append(n % 2, b"%d %d" % (name, n)), n % 2))
            if n % 50 == 0:
                many = outbox.append_many(1, [b"%d many %d.%d" % (name, n, m) for m in range(20)])
                receipts.append((many, 1))
        kept[name] = [(receipt.result(60), partition) for receipt, partition in receipts]

    config = LogConfig(segment_bytes=20_000)
    with open_outbox(tmp_path, batch_bytes=2000, linger_ms=1, log_config=config) as outbox:
        threads = [threading.Thread(target=produce, args=(name,)) for name in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for partition in range(2):
            records = list(outbox.log(partition).records(0))
            assert positions(outbox, partition) == [(outbox.pid, partition, n) for n in range(len(records))]
            for name in range(6):
                offsets = [offset for offset, where in kept[name] if where == partition]
                assert offsets == sorted(set(offsets)), f"thread {name} was told offsets out of order"
                mine = [record for record in records if record.value.startswith(b"%d " % name)]
                singles = [int(r.value.split()[1]) for r in mine if b"many" not in r.value]
                assert singles == sorted(singles), f"thread {name}'s records are out of order"
                many = [r.offset for r in mine if b"many" in r.value]
                assert all(many[at + 19] - many[at] == 19 for at in range(0, len(many), 20)), "neighbours stay together"


@pytest.mark.timeout(3600)  # the long form makes ten thousand directories
def test_many_partitions_take_little_of_the_disk_few_descriptors_and_no_time_each(tmp_path, torture, monkeypatch):
    """Ten thousand files grown 16 MiB ahead of their data, as one is, would be 160 GB for nothing."""
    count, open_files_max = torture.count(200, 10_000), 64
    together_bytes, value = 1 << 30, bytes(24 << 10)
    if not torture.is_long:  # so that few logs reach the limit that they have together
        together_bytes, value = 8 << 20, bytes(240 << 10)
        monkeypatch.setattr("pushrep.log.directory.AHEAD_BYTES_MAX", together_bytes)
    ahead_bytes = max(together_bytes, (64 << 10) * count)
    settings = {"partitions": count, "log_config": LogConfig(open_files_max=open_files_max)}
    descriptors, began_s = open_descriptors(), time.process_time()
    with open_outbox(tmp_path / "many", **settings) as outbox:
        assert taken_bytes(outbox.directory) < (24 << 10) * count, "nothing is set aside before a record comes"
        for partition in range(count):
            outbox.append(partition, value)
        outbox.flush()
        ahead = taken_bytes(outbox.directory) - (len(value) + (24 << 10)) * count
        assert 0.5 * ahead_bytes < ahead < ahead_bytes, "docs/disk.md: 1 GiB together at most, or 64 KiB each"
        assert open_descriptors() < descriptors + open_files_max + 20
    assert taken_bytes(tmp_path / "many") < (len(value) + (32 << 10)) * count, "a clean close gives it back"
    with open_outbox(tmp_path / "many", **settings) as outbox:
        assert sum(outbox.log(partition).log_end_offset for partition in range(count)) == count
        assert open_descriptors() < descriptors + open_files_max + 20
    assert time.process_time() - began_s < 0.1 * count, "two openings, in processor time"


def open_descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def taken_bytes(directory):
    """The bytes that the file system has allocated for the files below a directory."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*"))
