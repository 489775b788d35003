"""Outboxes that came back from a copy, against a real topic: shipped once, refused by name, or under a new PID epoch.

What `wait_shipped` promises is judged by a plain consumer: it finds every record by its value. A directory is put back
as a disk that was reverted: nothing in it tells that it is a copy.
"""

import json
import shutil
from functools import partial

import pytest
from confluent_kafka import OFFSET_END, TopicPartition
from confluent_kafka.admin import AdminClient

from filtering import StreamMetadata
from pushrep.cli.main import run
from pushrep.errors import CorruptFile
from pushrep.kafka import (
    DestinationAhead,
    KafkaDestination,
    OutboxDiverged,
    OutboxTakenOver,
    ShippingError,
    ShippingTimeout,
)
from pushrep.log import Durability, LogConfig
from pushrep.outbox import OnDiverged, Outbox, OutboxConfig, begin_pid_epoch
from pushrep.outbox.rebase import rebase as rebase_outbox
from tests.kafka.cluster import free_ports
from tests.kafka.plain_client import add_partitions, consume, create_topic, plain_producer, send
from tests.kafka.topic_reader import read_filtered, same
from tests.support.outbox_arguments import outbox_arguments

pytestmark = [pytest.mark.java, pytest.mark.slow]
WAIT_S = 120


@pytest.fixture
def topic(broker, request):
    """A topic's name that no other test has; the test makes the topic."""
    return "".join(c if c.isalnum() else "-" for c in request.node.name.removeprefix("test_"))[:100]


@pytest.fixture
def opened(broker, topic, tmp_path):
    """Open the test's outbox with its topic as destination. away: with brokers that can't be reached."""

    def open_outbox(partitions=1, *, away=False, directory=None, fence="preferred", **settings):
        servers = f"127.0.0.1:{free_ports(1)[0]}" if away else broker.bootstrap_servers
        destination = KafkaDestination(bootstrap_servers=servers, retry_backoff_ms=20, fence=fence)
        defaults = {"open_timeout_s": 0.0 if away else WAIT_S, "durability": Durability.BUFFERED}
        defaults |= {"log_config": LogConfig(flush_ms=10), "copy_check": False}
        path = directory or tmp_path / "outbox"
        return Outbox.open(
            path, topic, partitions, "test", **outbox_arguments(kafka=destination, **defaults | settings)
        )

    return open_outbox


def revert(directory, backup):
    """Put the contents of a backup into the same files; what came later goes."""
    for path in sorted(directory.rglob("*"), reverse=True):
        if path.is_file() and not (backup / path.relative_to(directory)).exists():
            path.unlink()
    for path in sorted(backup.rglob("*")):
        target = directory / path.relative_to(backup)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        elif path.is_file():
            target.write_bytes(path.read_bytes())


def values(label, count):
    return [f"{label} {n}".encode() for n in range(count)]


def ship(opened, *labels, count=1000, **settings):
    """Append `count` records of each label and wait until they are shipped; the outbox's PID."""
    with opened(**settings) as outbox:
        for label in labels:
            outbox.append_many(0, values(label, count))
        outbox.wait_shipped(WAIT_S)
        return outbox.pid


def append_away(opened, label, count, **settings):
    """Append while the brokers can't be reached."""
    with opened(away=True, **settings) as outbox:
        outbox.append_many(0, values(label, count))
        outbox.flush()
        with pytest.raises(ShippingTimeout):
            outbox.wait_shipped(0)


def in_topic(broker, topic, partitions=1):
    return [one.value for number in range(partitions) for one in consume(broker.bootstrap_servers, topic, number)]


@pytest.fixture
def reverted(broker, topic, opened, tmp_path):
    """1,000 records shipped, a copy made, 1,000 more shipped, the copy put back."""
    create_topic(broker.bootstrap_servers, topic)
    ship(opened, "before")
    shutil.copytree(tmp_path / "outbox", tmp_path / "backup")
    ship(opened, "after the copy")
    revert(tmp_path / "outbox", tmp_path / "backup")
    return tmp_path / "outbox"


@pytest.mark.parametrize("count", [1500, 100])
def test_records_that_took_used_offsets_while_brokers_were_away_are_never_said_to_be_shipped(
    broker, topic, opened, reverted, count
):
    """identity T1, T2: the same position with other content stops the shipping, also behind `new-epoch`."""
    append_away(opened, "appended to the copy", count)
    for _ in range(2):
        with pytest.raises(OutboxDiverged) as caught:
            opened()
        error = caught.value
        assert (error.partition, error.offset, error.topic_offset) == (0, 1000, error.in_topic.offset)
        assert (error.in_log.value, error.in_topic.value) == (b"appended to the copy 0", b"after the copy 0")
        begin_pid_epoch(reverted)
    assert b"appended to the copy 0" not in in_topic(broker, topic)


def test_appends_are_told_at_once_or_go_on_by_the_setting(opened, reverted, broker, topic):
    """identity T1: "`append` tells at once (a setting chooses: refuse or go on)"."""
    append_away(opened, "appended to the copy", 100)
    with opened(open_timeout_s=0.0) as outbox:  # it is found out later
        with pytest.raises(OutboxDiverged, match="pushrep outbox rebase"):
            outbox.wait_shipped(WAIT_S)
        with pytest.raises(OutboxDiverged):
            outbox.append(0, b"refused")
    with opened(on_diverged=OnDiverged.GO_ON) as outbox:
        outbox.append(0, b"taken").result(WAIT_S)
        assert "two records" in outbox.lag()[f"kafka:{topic}"].trouble
        with pytest.raises(OutboxDiverged):
            outbox.wait_shipped(WAIT_S)


def test_nothing_was_appended_yet_and_a_new_epoch_is_enough(broker, topic, opened, reverted):
    with pytest.raises(DestinationAhead) as caught:
        opened()
    assert (caught.value.shipped_offset, caught.value.log_end_offset) == (1000, 1000)
    begin_pid_epoch(reverted)
    pid = ship(opened, "new")
    found = read_filtered(broker.bootstrap_servers, topic, 1)
    assert [one.value for one in found.of(pid, 0)] == values("new", 1000)
    assert found.copies == 0


def test_used_offsets_are_found_behind_a_head_that_retention_cut(broker, topic, opened, reverted):
    """identity T1: any record of the topic with a PID of the outbox is looked up in its log."""
    append_away(opened, "appended to the copy", 1500)
    cut_head(broker, topic, 1500)
    with pytest.raises(OutboxDiverged) as caught:
        opened()
    assert caught.value.topic_offset == 1500, "the first that is left"
    assert caught.value.in_topic.value == f"after the copy {caught.value.offset - 1000}".encode()


def test_used_offsets_are_found_without_a_checkpoint_behind_records_of_others(broker, topic, opened, reverted):
    """identity T1: "Without a known destination offset a partition is read from its start, not only its tail"."""
    append_away(opened, "appended to the copy", 1500)
    (reverted / "destinations.json").unlink()
    producer = plain_producer(broker.bootstrap_servers)
    send(producer, topic, ((b"k", b"another's %d" % n) for n in range(2000)))
    with pytest.raises(OutboxDiverged) as caught:
        opened()
    assert caught.value.offset == 1000


def cut_head(broker, topic, offset=OFFSET_END):
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
    asked = TopicPartition(topic, 0, offset)
    cut = next(iter(admin.delete_records([asked]).values())).result(WAIT_S).low_watermark
    assert offset in {cut, OFFSET_END}


def test_two_clones_one_after_the_other(broker, topic, opened, tmp_path):
    """identity T1: the second clone finds the first one's records in its place, and reports it."""
    create_topic(broker.bootstrap_servers, topic)
    ship(opened, "before", count=500)
    shutil.copytree(tmp_path / "outbox", tmp_path / "backup")
    append_away(opened, "of the clone", 500)
    shutil.copytree(tmp_path / "outbox", tmp_path / "clone")
    revert(tmp_path / "outbox", tmp_path / "backup")
    ship(opened, "of the original", count=500)
    revert(tmp_path / "outbox", tmp_path / "clone")
    with pytest.raises(OutboxDiverged):
        opened()


def test_a_lost_checkpoint_makes_no_copies(broker, topic, opened, tmp_path):
    """identity T1: the topic's content is found from its start, by content; a moved directory continues unchanged."""
    create_topic(broker.bootstrap_servers, topic)
    ship(opened, "before")
    (tmp_path / "outbox" / "destinations.json").unlink()
    (tmp_path / "outbox").rename(tmp_path / "moved")
    pid = ship(opened, "behind", directory=tmp_path / "moved")
    with opened(directory=tmp_path / "moved") as outbox:
        records = list(outbox.log(0).records(0))
    found = read_filtered(broker.bootstrap_servers, topic, 1)
    assert same(found.of(pid, 0), records)
    assert found.copies == 0


def test_a_damaged_checkpoint_is_removed_as_its_error_says_though_the_topic_has_grown(broker, topic, opened, tmp_path):
    """What the error proposes works: the number of used partitions is found in the topic."""
    create_topic(broker.bootstrap_servers, topic, 2)
    with opened(4) as outbox:
        for partition in range(4):
            outbox.append_many(partition, values(f"of {partition}", 50))
        outbox.wait_shipped(WAIT_S)
    add_partitions(broker.bootstrap_servers, topic, 4)
    file = tmp_path / "outbox" / "destinations.json"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CorruptFile, match="or remove it: then the topic is read from its start"):
        opened(4)
    file.unlink()
    with opened(4) as outbox:
        outbox.append_many(3, values("behind", 50))
        outbox.wait_shipped(WAIT_S)
    found = read_filtered(broker.bootstrap_servers, topic, 4)
    assert found.copies == 0
    assert [one.value for one in found.of(outbox.pid, 3)] == values("of 3", 50) + values("behind", 50)
    assert in_topic(broker, topic, 2)[-50:] == values("behind", 50), "in partition 1 of the topic, as before"


def test_another_content_under_a_callers_own_metadata_but_not_another_time(broker, topic, opened, tmp_path):
    """identity T1: timestamps of records with the caller's own metadata may differ: it appended them again."""
    create_topic(broker.bootstrap_servers, topic, retention_ms=-1)

    def relay(first, end, label, **settings):
        with opened(**settings) as outbox:
            for n in range(first, end):
                outbox.append(0, f"{label} {n}".encode(), timestamp_ms=n, metadata=StreamMetadata(4711, 0, n))
            outbox.flush()
            if not settings:
                outbox.wait_shipped(WAIT_S)

    relay(0, 100, "one")
    shutil.copytree(tmp_path / "outbox", tmp_path / "backup")
    relay(100, 200, "one")
    revert(tmp_path / "outbox", tmp_path / "backup")
    with opened(away=True) as outbox:  # the same records again, at another time
        for n in range(100, 200):
            outbox.append(0, f"one {n}".encode(), timestamp_ms=5_000, metadata=StreamMetadata(4711, 0, n))
        outbox.flush()
    with opened() as outbox:
        outbox.wait_shipped(WAIT_S)
    assert in_topic(broker, topic) == [f"one {n}".encode() for n in range(200)]
    revert(tmp_path / "outbox", tmp_path / "backup")
    relay(100, 200, "two", away=True)
    with pytest.raises(OutboxDiverged) as caught:
        opened()
    assert caught.value.in_topic.value == b"one 100"


def test_a_copied_directory_goes_on_under_a_pid_of_its_own(broker, topic, opened, tmp_path):
    """identity C2 before T1: the copy's records have positions of their own, beside the original."""
    opened = partial(opened, copy_check=True)
    create_topic(broker.bootstrap_servers, topic)
    original = ship(opened, "before")
    shutil.copytree(tmp_path / "outbox", tmp_path / "restored for a test")
    with opened() as running:
        running.append_many(0, values("of the original", 1000))
        running.wait_shipped(WAIT_S)
        append_away(opened, "of the copy", 500, directory=tmp_path / "restored for a test")
        copy = ship(opened, directory=tmp_path / "restored for a test")
        running.append_many(0, values("of the original, later", 10))
        running.wait_shipped(WAIT_S)
    found = read_filtered(broker.bootstrap_servers, topic, 1)
    assert [one.value for one in found.of(copy, 0)] == values("of the copy", 500)
    assert [one.value for one in found.of(original, 0)] == [
        *values("before", 1000), *values("of the original", 1000), *values("of the original, later", 10),
    ]  # fmt: skip
    assert found.copies == 0


def rebase(directory, broker, *options):
    return run(["outbox", "rebase", str(directory), "--bootstrap-servers", broker.bootstrap_servers, *options])


@pytest.mark.parametrize(("count", "carrier"), [(1500, "key"), (100, "header")])
def test_rebase_frees_an_outbox_that_has_diverged(broker, topic, opened, tmp_path, capsys, count, carrier):
    """identity T4: what the topic does not hold comes under a new PID epoch, once; the originals are never sent."""
    opened = partial(opened, carrier=carrier)
    create_topic(broker.bootstrap_servers, topic)
    first = ship(opened, "before")
    shutil.copytree(tmp_path / "outbox", tmp_path / "backup")
    ship(opened, "after the copy")
    revert(tmp_path / "outbox", tmp_path / "backup")
    append_away(opened, "appended to the copy", count)
    with pytest.raises(OutboxDiverged):
        opened()
    before = (tmp_path / "outbox" / "outbox.json").read_bytes()
    assert rebase(tmp_path / "outbox", broker, "--dry-run") == 0
    said = capsys.readouterr().out
    assert f"{count:,} records [1000, {1000 + count})" in said
    assert "see them twice" in said
    assert (tmp_path / "outbox" / "outbox.json").read_bytes() == before
    assert rebase(tmp_path / "outbox", broker, "--json") == 0
    assert json.loads(capsys.readouterr().out)["records"] == count
    for _ in range(2):
        pid = ship(opened, "behind", count=10)
    assert pid != first
    found = read_filtered(broker.bootstrap_servers, topic, 1, carrier)
    assert [one.value for one in found.of(pid, 0)] == [
        *values("appended to the copy", count), *values("behind", 10), *values("behind", 10),
    ]  # fmt: skip
    assert [one.value for one in found.of(first, 0)] == values("before", 1000) + values("after the copy", 1000)
    assert found.copies == 0
    with Outbox.open(
        tmp_path / "outbox", topic, 1, "test", carrier=carrier, config=OutboxConfig(copy_check=False)
    ) as outbox:
        assert sum(1 for _ in outbox.log(0).records(0)) == 1000 + 2 * count + 20


def test_rebase_frees_an_outbox_whose_topic_is_ahead(broker, topic, opened, reverted, capsys):
    """identity T4: "frees an outbox that T1 or `DestinationAhead` stopped"; `new-epoch` points to it."""
    append_away(opened, "appended to the copy", 100)
    cut_head(broker, topic, 1500)
    with pytest.raises(DestinationAhead):
        opened()
    assert run(["log", "new-epoch", str(reverted)]) == 0
    said = capsys.readouterr().out
    assert "offsets [1000, 1100) of partition 0" in said
    assert "pushrep outbox rebase" in said
    assert rebase(reverted, broker) == 0
    pid = ship(opened, "behind", count=10)
    found = read_filtered(broker.bootstrap_servers, topic, 1)
    assert [one.value for one in found.of(pid, 0)] == values("appended to the copy", 100) + values("behind", 10)


def test_a_rebase_that_is_killed_is_finished_by_the_next_one(broker, topic, opened, reverted, monkeypatch):
    """identity T4: nothing is appended twice, nothing is left out, and nothing is shipped in between."""
    append_away(opened, "appended to the copy", 1200)
    with monkeypatch.context() as patched:
        patched.setattr("pushrep.outbox.rebase._finished", None)  # dies behind the last append
        with pytest.raises(TypeError):
            rebase_in_process(reverted, broker)
    with pytest.raises(ShippingError, match="a rebase was interrupted"):
        opened()
    with Outbox.open(reverted, topic, 1, "test", config=OutboxConfig(copy_check=False)) as outbox:
        assert outbox.log(0).log_end_offset == 1000 + 2 * 1200
        outbox.append_many(0, values("in between", 5))
    assert rebase(reverted, broker) == 0
    pid = ship(opened, "behind", count=10)
    found = read_filtered(broker.bootstrap_servers, topic, 1)
    assert [one.value for one in found.of(pid, 0)] == [
        *values("appended to the copy", 1200), *values("in between", 5), *values("behind", 10),
    ]  # fmt: skip


def rebase_in_process(directory, broker):
    return rebase_outbox(directory, KafkaDestination(bootstrap_servers=broker.bootstrap_servers))


def test_rebase_refuses_records_with_a_callers_own_metadata_by_name(broker, topic, opened, tmp_path, capsys):
    """identity T4: "Records with the caller's own metadata are refused by name"."""
    create_topic(broker.bootstrap_servers, topic)
    ship(opened, "before", count=10)
    with opened(away=True) as outbox:
        outbox.append(0, b"a relay's", metadata=StreamMetadata(4711, 0, 77))
    assert rebase(tmp_path / "outbox", broker) == 1
    assert "StreamMetadata(pid=4711, partition=0, offset=77)" in capsys.readouterr().err


@pytest.mark.parametrize("is_away", [False, True], ids=["at the open", "later"])
def test_behind_a_head_that_was_cut_unread_later_appends_are_under_another_pid(
    broker, topic, opened, reverted, is_away, caplog
):
    """identity T1: "A known one below the topic's start: later appends leap the PID epoch, with a warning"."""
    cut_head(broker, topic)  # all that the lost continuation had shipped
    with opened(open_timeout_s=0.0 if is_away else WAIT_S) as outbox:
        if is_away:
            outbox.append_many(0, values("before it is known", 10))
        outbox.wait_shipped(WAIT_S)
        before, pid = StreamMetadata.unpack(next(outbox.log(0).records(999)).key).pid, outbox.pid
        assert pid != before
        outbox.append_many(0, values("behind it", 10))
        outbox.wait_shipped(WAIT_S)
        assert outbox.last_metadata(pid, 0) == outbox.log(0).log_end_offset - 1
    assert "begins PID epoch" in caplog.text
    with opened() as outbox:
        assert outbox.pid == pid, "and once"
        outbox.wait_shipped(WAIT_S)
    found = read_filtered(broker.bootstrap_servers, topic, 1)
    assert [one.value for one in found.of(pid, 0)][-10:] == values("behind it", 10)
    assert found.copies == 0


def test_a_service_that_was_away_for_longer_than_retention_goes_on(broker, topic, opened, tmp_path):
    """identity T1, a mirror image: nothing is hidden where the topic begins where it was known to end."""
    create_topic(broker.bootstrap_servers, topic)
    before = ship(opened, "before", count=100)
    append_away(opened, "not shipped yet", 50)
    cut_head(broker, topic)
    pid = ship(opened, "behind", count=10)
    assert pid == before
    assert in_topic(broker, topic) == values("not shipped yet", 50) + values("behind", 10)


def test_two_clones_at_one_time(broker, topic, opened, tmp_path):
    """identity T1 with T3: the second clone fences the first, and finds its records; no record counts as shipped that
    readers do not see.
    """
    create_topic(broker.bootstrap_servers, topic)
    first_pid = ship(opened, "before", count=500)
    shutil.copytree(tmp_path / "outbox", tmp_path / "clone")
    with opened() as original, opened(directory=tmp_path / "clone") as clone:
        original.append_many(0, values("of the original", 500)).result(WAIT_S)
        with pytest.raises(OutboxTakenOver):
            original.wait_shipped(WAIT_S)
        clone.append_many(0, values("of the clone", 500))
        clone.wait_shipped(WAIT_S)
    with pytest.raises(OutboxDiverged):
        opened()
    found = read_filtered(broker.bootstrap_servers, topic, 1)
    assert [one.value for one in found.of(first_pid, 0)] == values("before", 500) + values("of the clone", 500)
    assert rebase(tmp_path / "outbox", broker) == 0
    pid = ship(opened, "behind", count=10)
    found = read_filtered(broker.bootstrap_servers, topic, 1)
    assert [one.value for one in found.of(pid, 0)] == values("of the original", 500) + values("behind", 10)


def test_two_clones_at_one_time_that_nobody_shuts_out(broker, topic, opened, tmp_path):
    """identity T1, T2, without the right to fence: what the other one wrote between is held against the log, too."""
    opened = partial(opened, fence="off")
    create_topic(broker.bootstrap_servers, topic)
    pid = ship(opened, "before", count=500)
    shutil.copytree(tmp_path / "outbox", tmp_path / "clone")
    with opened() as original, opened(directory=tmp_path / "clone") as clone:
        original.append_many(0, values("of the original", 500))
        original.wait_shipped(WAIT_S)
        clone.append_many(0, values("of the clone", 500))
        with pytest.raises(OutboxDiverged) as caught:
            clone.wait_shipped(WAIT_S)
        assert (caught.value.in_log.value, caught.value.in_topic.value) == (b"of the clone 0", b"of the original 0")
        with pytest.raises(OutboxDiverged):
            clone.append(0, b"refused")
        original.append_many(0, values("of the original, later", 5))
        with pytest.raises(OutboxDiverged):
            original.wait_shipped(WAIT_S)
    found = read_filtered(broker.bootstrap_servers, topic, 1)
    assert [one.value for one in found.of(pid, 0)][:1000] == values("before", 500) + values("of the original", 500)


def test_what_others_write_between_stops_nothing(broker, topic, opened, tmp_path):
    """The same look, at records of strangers and at markers: each wait returns, and nothing is left unread."""
    create_topic(broker.bootstrap_servers, topic)
    producer = plain_producer(broker.bootstrap_servers)
    with opened(fence="off") as outbox:
        for n in range(20):
            send(producer, topic, [(b"k", b"another's %d" % n)])
            outbox.append_many(0, values(f"of {n},", 10))
            outbox.wait_shipped(WAIT_S)
    ours = [value for value in in_topic(broker, topic) if value.startswith(b"of ")]
    assert ours == [value for n in range(20) for value in values(f"of {n},", 10)]


def test_a_moved_directory_ships_each_record_once(broker, topic, opened, tmp_path):
    """identity C1 with T1, a mirror image: under its own PID if it is known to be the same, else under a new one."""
    opened = partial(opened, copy_check=True)
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    create_topic(broker.bootstrap_servers, topic)
    pid = ship(opened, "before", count=100)
    (tmp_path / "outbox").rename(first)
    assert ship(opened, "renamed", count=100, directory=first) == pid
    move_to_another_file_system(first, second)
    assert run(["replica", "moved", str(second)]) == 0
    assert ship(opened, "moved", count=100, directory=second) == pid
    move_to_another_file_system(second, third)
    copy = ship(opened, "not told", count=100, directory=third)
    assert copy != pid
    found = read_filtered(broker.bootstrap_servers, topic, 1)
    labels = ("before", "renamed", "moved")
    assert [one.value for one in found.of(pid, 0)] == [value for label in labels for value in values(label, 100)]
    assert [one.value for one in found.of(copy, 0)] == values("not told", 100)
    assert found.copies == 0


def move_to_another_file_system(directory, to):
    shutil.copytree(directory, to)
    shutil.rmtree(directory)
