"""A record that a topic does not take stops its own log partition, at its own offset, until it is skipped."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from threading import Event

import pytest

from filtering import StreamMetadata
from pushrep.cli.main import run
from pushrep.env import REAL_FILESYSTEM
from pushrep.kafka import KafkaDestination, RecordsParked, ShippingStopped
from pushrep.kafka.progress import read_progress
from pushrep.kafka.sink_session import SinkSession
from pushrep.log import Durability, LogConfig
from pushrep.outbox import Outbox
from pushrep.records import Codec, encode_batch
from tests.integration.outboxes import wait_until
from tests.kafka.plain_client import alter_topic, create_topic
from tests.kafka.topic_reader import read_filtered, same
from tests.support.outbox_arguments import outbox_arguments

pytestmark = [pytest.mark.java, pytest.mark.slow]
WAIT_S = 120
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@pytest.fixture
def topic(request):
    """A topic's name that no other test has; the test makes the topic."""
    return "".join(c if c.isalnum() else "-" for c in request.node.name.removeprefix("test_"))[:100]


@pytest.fixture
def opened(broker, topic, tmp_path):
    """Open the test's outbox, with its topic as destination unless `kafka` is None."""

    def open_outbox(partitions, on_refused="stop", **settings):
        servers = broker.bootstrap_servers
        destination = KafkaDestination(bootstrap_servers=servers, retry_backoff_ms=20, on_refused=on_refused)
        settings = {"kafka": destination, "durability": Durability.BUFFERED, "open_timeout_s": WAIT_S} | settings
        return Outbox.open(tmp_path / "outbox", topic, partitions, "test", **outbox_arguments(**settings))

    return open_outbox


def now_ms():
    return time.time_ns() // 1_000_000


def commands_in(reason):
    """The command that a reason ends with, as arguments of `run`, with a reason of its own."""
    return [*shlex.split(reason[reason.index("pushrep outbox skip") :])[1:-1], "a test"]


def test_one_record_stops_one_partition_at_its_own_offset(broker, topic, opened, tmp_path):
    """faults B1, B2, S5, S6: records that a broker refuses, or would delete, are in two of four partitions.

    They are there before the service starts, which starts all the same. Of a batch with a refused record all before it
    is shipped; a late record with a young one behind it is kept by the topic, since brokers delete by a segment's
    newest time; the commands that the reasons print work as they are, and change nothing when they are repeated.
    """
    create_topic(broker.bootstrap_servers, topic, 4)
    now = now_ms()
    with opened(4, kafka=None) as outbox:
        times = [now + n for n in range(20)]
        times[11] = now + 2 * HOUR_MS
        outbox.append_many(0, [b"%d" % n for n in range(20)], timestamps_ms=times)
        outbox.append(1, b"late, alone", timestamp_ms=now - 8 * DAY_MS)
        outbox.append(2, b"late", timestamp_ms=0)
        for partition in (2, 3):
            outbox.append_many(partition, [b"young"] * 100, timestamps_ms=now)
    with opened(4) as outbox:
        state = outbox.facts.shipping.sink.state
        wait_until(lambda: len(state.lag().stopped) == 2, "both are known")
        state.wait({2: 101, 3: 100}, WAIT_S, None)
        first, second = state.lag().stopped
        assert [(one.partition, one.offset) for one in (first, second)] == [(0, 11), (1, 0)]
        assert "INVALID_TIMESTAMP" in first.reason
        assert "message.timestamp.after.max.ms=3600000 (the default)" in first.reason
        assert str(now + 2 * HOUR_MS) in first.reason, "in the broker's words"
        assert "retention.ms=604800000 (the default)" in second.reason
        with pytest.raises(ShippingStopped, match="offset 11 of partition 0"):
            outbox.wait_shipped(WAIT_S)
        commands = [commands_in(one.reason) for one in (first, second)]
        assert [run(one) for one in commands] == [0, 0]
        outbox.wait_shipped(WAIT_S)
        assert [run(one) for one in commands] == [0, 0], "again"
        logs, pid = {n: list(outbox.log(n).records(0)) for n in range(4)}, outbox.pid
    assert [run(one) for one in commands] == [0, 0], "and on a closed outbox"
    skipped = read_progress(REAL_FILESYSTEM, tmp_path / "outbox")[topic].skipped
    assert [one[:3] for one in skipped] == [(0, 11, "a test"), (1, 0, "a test")]
    del logs[0][11], logs[1][0]
    found = read_filtered(broker.bootstrap_servers, topic, 4)
    assert all(same(found.of(pid, partition), records) for partition, records in logs.items())


def test_records_are_skipped_before_the_first_start_by_time_and_size(broker, topic, opened, tmp_path, capsys):
    """faults B7: "a range, or a predicate over what is in the log when it is given, works whether the destination was
    used before or not".
    """
    create_topic(broker.bootstrap_servers, topic, 2, max_message_bytes=5_000)
    now = now_ms()
    with opened(2, kafka=None) as outbox:
        outbox.append_many(0, [b"a", b"late", b"late", b"d", bytes(6_000)], timestamps_ms=[now, 1, 2, now, now])
        outbox.append_many(1, [b"e", b"ahead", b"g", b"h", b"i"], timestamps_ms=[now, now + 9 * HOUR_MS, now, now, now])
        outbox.flush()
        logs, pid = {n: list(outbox.log(n).records(0)) for n in range(2)}, outbox.pid
    where = ["--directory", str(tmp_path / "outbox"), "--reason", "a test"]
    assert run(["outbox", "skip", "--before", "2020-01-01", *where]) == 0
    assert "offset 1 to 2 of partition 0" in capsys.readouterr().out
    assert run(["outbox", "skip", "--after", str(now + HOUR_MS), *where]) == 0
    assert run(["outbox", "skip", "--larger-than", "5000", *where]) == 0
    assert run(["outbox", "skip", "2-3", "--partition", "1", *where]) == 0
    assert run(["outbox", "skip", "1-3", "--partition", "1", *where]) == 0, "which is given up already"
    assert run(["outbox", "skip", "3-5", "--partition", "1", *where]) == 1, "the log ends at 5"
    assert run(["outbox", "skip", *where]) == 2, "all of it is called all"
    skipped = read_progress(REAL_FILESYSTEM, tmp_path / "outbox")[topic].skipped
    assert [(one.partition, one.offset, one.end) for one in skipped] == [
        (0, 1, 3), (1, 1, None), (0, 4, None), (1, 2, 4)
    ]  # fmt: skip
    with opened(2, batch_bytes=5_000) as outbox:
        outbox.wait_shipped(WAIT_S)
    found = read_filtered(broker.bootstrap_servers, topic, 2)
    assert same(found.of(pid, 0), [logs[0][0], logs[0][3]])
    assert same(found.of(pid, 1), [logs[1][0], logs[1][4]])


def test_a_record_that_is_missing_before_later_ones_stops_its_partition(broker, topic, opened, tmp_path):
    """faults B1, B7: whoever does not know what was given up sends it not behind its successors, where every filtering
    reader would drop it. Its partition stops, appends and the other one go on; both ways out work as they are printed.
    """
    create_topic(broker.bootstrap_servers, topic, 2)
    with opened(2, kafka=None) as outbox:
        for partition in range(2):
            outbox.append_many(partition, [b"%d" % n for n in range(10)])
    where = ["--topic", topic, "--directory", str(tmp_path / "outbox"), "--reason", "a test"]
    assert run(["outbox", "skip", "5", "--partition", "0", *where]) == 0
    assert run(["outbox", "skip", "7-8", "--partition", "1", *where]) == 0
    with opened(2) as outbox:
        outbox.wait_shipped(WAIT_S)
    (tmp_path / "outbox" / "destinations.json").unlink()
    for _ in range(2):  # the second time by what the first one wrote down
        with opened(2) as outbox:
            with pytest.raises(ShippingStopped) as caught:
                outbox.wait_shipped(WAIT_S)
            assert (caught.value.partition, caught.value.offset) == (0, 5)
            assert f"{topic}-0 lacks offset 5 of partition 0 and holds later ones" in caught.value.reason
            state = outbox.facts.shipping.sink.state
            assert [(one.partition, one.offset) for one in state.lag().stopped] == [(0, 5), (1, 7)]
            outbox.append(0, b"behind").result()
    command = shlex.split(caught.value.reason.partition(". Else")[0].partition("before: ")[2])
    with opened(2) as outbox:
        assert run([*command[1:-1], "a test"]) == 0
        assert [one.partition for one in outbox.lag()[f"kafka:{topic}"].stopped] == [1], "0 goes on"
        outbox.facts.shipping.sink.state.wait({0: 12}, WAIT_S, None)
        reason, pid = outbox.lag()[f"kafka:{topic}"].stopped[0].reason, outbox.pid
    command = shlex.split(reason.partition("then: ")[2])
    assert run([*command[1:], "--bootstrap-servers", broker.bootstrap_servers]) == 0
    with opened(2) as outbox:
        outbox.wait_shipped(WAIT_S)
        records, again = list(outbox.log(0).records(0)), outbox.pid
    del records[5]
    found = read_filtered(broker.bootstrap_servers, topic, 2)
    assert same(found.of(pid, 0), records)
    assert [one.value for one in found.of(again, 1)] == [b"7", b"8"], "under a PID of their own"
    assert found.copies == 0


def test_a_learned_limit_condemns_no_record(broker, topic, opened):
    """faults B4, S5: the topic stores records uncompressed, so a limit on what is sent compressed is only learned. The
    record of 60 KB is taken alone, and the one of 120 KB is refused by the topic's own limit.
    """
    create_topic(broker.bootstrap_servers, topic, compression_type="uncompressed")
    with opened(1, log_config=LogConfig(codec=Codec.ZSTD), batch_bytes=400_000) as outbox:
        outbox.append(0, b"first")
        outbox.wait_shipped(WAIT_S)
        alter_topic(broker.bootstrap_servers, topic, max_message_bytes=100_000)
        outbox.append_many(0, [b"%d" % n * 20_000 for n in range(30)])
        outbox.append(0, bytes(60_000))
        outbox.append(0, bytes(120_000))
        outbox.append(0, b"behind")
        with pytest.raises(ShippingStopped, match="offset 32 of partition 0: MESSAGE_TOO_LARGE") as caught:
            outbox.wait_shipped(WAIT_S)
        assert "max.message.bytes=100000 (set for the topic)" in caught.value.reason
        assert run(commands_in(caught.value.reason)) == 0
        outbox.wait_shipped(WAIT_S)
        records, pid = list(outbox.log(0).records(0)), outbox.pid
    del records[32]
    assert same(read_filtered(broker.bootstrap_servers, topic, 1).of(pid, 0), records)


def parking(outbox, topic):
    return outbox.facts.shipping.sink.state.parking.of(topic)


def test_a_parked_record_lets_its_partition_go_on(broker, topic, opened, tmp_path, capsys):
    """faults B7: what a broker refuses one record for is parked, in order; `wait_shipped` says so until an operator has
    dealt with each; a record that is sent again gets a key of its own. A restart passes what is parked, although
    destinations.json is gone.
    """
    create_topic(broker.bootstrap_servers, topic, 2, max_message_bytes=20_000)
    now = now_ms()
    with opened(2, on_refused="park", batch_bytes=20_000) as outbox:
        outbox.append_many(
            0, [b"%d" % n for n in range(20)], timestamps_ms=[now] * 11 + [now + 2 * HOUR_MS] + [now] * 8
        )
        outbox.append(1, os.urandom(30_000))
        outbox.append(1, b"foreign", metadata=StreamMetadata(4711, 1, 9), timestamp_ms=now + 2 * HOUR_MS)
        outbox.append(1, b"behind")
        with pytest.raises(RecordsParked) as caught:
            outbox.wait_shipped(WAIT_S)
        assert sorted(caught.value.places) == [(0, 11), (1, 0), (1, 1)]
        assert outbox.lag()[f"kafka:{topic}"].records == 0
        logs, pid = {n: list(outbox.log(n).records(0)) for n in range(2)}, outbox.pid
        kept = {one.place[1:]: one for one in parking(outbox, topic)}
        assert kept[0, 11].error == "INVALID_TIMESTAMP"
        assert "out of range" in kept[0, 11].message
        assert kept[1, 0].error == "MESSAGE_TOO_LARGE"
        record = outbox.facts.shipping.sink.state.parking.record(kept[0, 11].number)
        assert record._replace(offset=11) == logs[0][11]
        command = shlex.split(str(caught.value).partition("See ")[2])
        assert run(command[1:]) == 0
        assert "out of range" in capsys.readouterr().out
    (tmp_path / "outbox" / "destinations.json").unlink()
    with opened(2, on_refused="park", batch_bytes=20_000) as outbox:
        with pytest.raises(RecordsParked):
            outbox.wait_shipped(WAIT_S)
        assert len(parking(outbox, topic)) == 3
        where = ["--directory", str(outbox.directory)]
        resend = ["outbox", "parked", "resend", *where, "--json"]
        assert run([*resend, str(kept[1, 1].number)]) == 1
        assert "metadata" in capsys.readouterr().err
        alter_topic(broker.bootstrap_servers, topic, max_message_bytes=1_000_000)
        assert run([*resend, str(kept[1, 0].number)]) == 0
        assert json.loads(capsys.readouterr().out) == {"resent": [{"partition": 1, "offset": 3}]}
        assert run(["outbox", "parked", "done", str(kept[0, 11].number), *where]) == 0
        with pytest.raises(RecordsParked, match="offset 1 of partition 1: parked"):
            outbox.wait_shipped(WAIT_S)
    assert run(["outbox", "parked", "done", str(kept[1, 1].number), *where]) == 0, "on a closed outbox"
    assert run(["outbox", "parked", "done", "999", *where]) == 1
    with opened(2, batch_bytes=20_000) as outbox:
        outbox.wait_shipped(WAIT_S)
        logs[1].append(next(outbox.log(1).records(3)))
    assert logs[1][3].value == logs[1][0].value
    del logs[0][11], logs[1][:2]
    found = read_filtered(broker.bootstrap_servers, topic, 2)
    assert all(same(found.of(pid, partition), records) for partition, records in logs.items())


def test_what_is_on_its_way_to_the_parking_log_when_a_session_ends_is_not_shipped_by_the_next(
    broker, topic, opened, monkeypatch
):
    """faults B7: each is in the topic or parked, not both, although the topic takes the record by now."""
    create_topic(broker.bootstrap_servers, topic, 2, max_message_bytes=20_000)
    sessions = []

    class Noted(SinkSession):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            sessions.append(self)

    monkeypatch.setattr("pushrep.kafka.sink.SinkSession", Noted)
    with opened(2, on_refused="park", batch_bytes=20_000) as outbox:
        state = outbox.facts.shipping.sink.state
        is_asked, goes_on = Event(), Event()
        entries = iter(range(2))

        def held(value, headers):
            is_asked.set()
            assert goes_on.wait(WAIT_S)
            state.parking.log.append(encode_batch([value], headers=[headers], timestamps_ms=now_ms()))
            return next(entries)

        state.parking.append_entry = held
        outbox.append(0, os.urandom(30_000))
        outbox.append(0, b"behind")
        assert is_asked.wait(WAIT_S)
        alter_topic(broker.bootstrap_servers, topic, max_message_bytes=1_000_000)
        sessions[0].stop()
        wait_until(lambda: len(sessions) > 1, "the next session begins")
        outbox.append(1, b"by the next session")
        state.wait({1: 1}, WAIT_S, None)
        goes_on.set()
        with pytest.raises(RecordsParked) as caught:
            outbox.wait_shipped(WAIT_S)
        assert caught.value.places == ((0, 0),)
        pid = outbox.pid
    found = read_filtered(broker.bootstrap_servers, topic, 2)
    assert [one.value for one in found.of(pid, 0)] == [b"behind"]


def test_ten_in_a_row_stop_a_partition(broker, topic, opened):
    """faults B7: "a broker's wrong clock must not park the stream"."""
    create_topic(broker.bootstrap_servers, topic)
    ahead = now_ms() + 2 * HOUR_MS
    with opened(1, on_refused="park") as outbox:
        outbox.append_many(0, [b"%d" % n for n in range(15)], timestamps_ms=ahead)
        with pytest.raises(ShippingStopped, match=r"stopped at offset 10: not parked: 10 records in a row.*offset 10 "):
            outbox.wait_shipped(WAIT_S)
        assert [one.offset for one in parking(outbox, topic)] == list(range(10))


SERVICE = """
import os, sys, time
from pushrep import Durability, KafkaDestination, Outbox
from pushrep.kafka import parking
directory, topic, servers, crash = sys.argv[1:]
append = parking.ParkingLog._append
def killed(self, fields, record):
    if crash == "before":
        os.kill(os.getpid(), 9)
    number = append(self, fields, record)
    os.kill(os.getpid(), 9)
parking.ParkingLog._append = killed
with Outbox.open(
    directory, topic, 1, "test", kafka=KafkaDestination(bootstrap_servers=servers, on_refused="park")
) as outbox:
    now = time.time_ns() // 1_000_000
    if outbox.log(0).log_end_offset == 0:
        outbox.append_many(0, [b"%d" % n for n in range(9)], timestamps_ms=[now] * 4 + [now + 9_000_000] + [now] * 4)
    outbox.wait_shipped(60)
"""


def test_kill_9_between_parking_and_progress(broker, topic, opened, tmp_path):
    """faults B7: a record is on disk in the parking log before progress passes it; killed before and after that, each
    record is in the topic or parked, once.
    """
    create_topic(broker.bootstrap_servers, topic)
    arguments = [str(tmp_path / "outbox"), topic, broker.bootstrap_servers]
    for crash in ("before", "after"):
        done = subprocess.run([sys.executable, "-c", SERVICE, *arguments, crash], check=False, timeout=WAIT_S)
        assert done.returncode == -signal.SIGKILL
    with opened(1, on_refused="park") as outbox:
        with pytest.raises(RecordsParked):
            outbox.wait_shipped(WAIT_S)
        records, pid = list(outbox.log(0).records(0)), outbox.pid
        assert [one.offset for one in parking(outbox, topic)] == [4]
    del records[4]
    assert same(read_filtered(broker.bootstrap_servers, topic, 1).of(pid, 0), records)
