"""An operator's calls about destinations while a service has the outbox open: they are done, or refused by name.

Contract: "An open outbox answers status, member changes, skip, repartition and the dropping of a destination".
"""

import shutil
import threading
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from filtering import KEY_BYTES, METADATA_HEADER, StreamMetadata
from pushrep import KafkaDestination, LogConfig, Outbox, OutboxConfig
from pushrep.cli.main import run
from pushrep.election.errors import TooFewMembers
from pushrep.election.grants import Destination, Grant, Member
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import BadArgument
from pushrep.kafka.answers import Code
from pushrep.kafka.errors import BeginsAnew, RefusedByTopic
from pushrep.kafka.pipeline import size_alone
from pushrep.kafka.progress import (
    EpochPartitions,
    PartitionProgress,
    ShippingProgress,
    Skip,
    read_progress,
    write_progress,
)
from pushrep.log import LogLocked, StillNeeded
from pushrep.outbox import RecordRefused
from pushrep.outbox.control import CallRefused, ask
from pushrep.outbox.destinations import (
    SkippedRecords,
    Unshipped,
    not_known_to_be_shipped,
    repartition,
    skip_records,
)
from pushrep.outbox.identity import LATER_EPOCHS, new_identity, read_identity
from pushrep.outbox.shipping import GrantedPartitionCounts, origin_of
from pushrep.records import Record, TimestampType
from tests.kafka.cluster import free_ports
from tests.support.outbox_arguments import outbox_arguments

SMALL = LogConfig(segment_bytes=2_000, batch_bytes=1_000, batch_bytes_max=2_000, flush_ms=10)
BEFORE = ShippingProgress(
    topic_id=UUID(int=7), epochs=(EpochPartitions(0, 3),), partitions={0: PartitionProgress(5, 5, 4711)}
)  # fmt: skip


@pytest.fixture
def directory(tmp_path):
    """An outbox of 40 records, of which a topic that was shipped to once has five."""
    with Outbox.open(tmp_path / "outbox", "orders", 1, "test", config=OutboxConfig(log_config=SMALL)) as outbox:
        outbox.append_many(0, [bytes(400)] * 40)
    write_progress(REAL_FILESYSTEM, tmp_path / "outbox", {"old": BEFORE, "older": replace(BEFORE, partitions={})})
    return tmp_path / "outbox"


@pytest.fixture(params=[False, True], ids=["without a destination", "with another one"])
def kafka(request):
    """The service's destination: none, or brokers that can't be reached."""
    (port,) = free_ports(1)
    return KafkaDestination(bootstrap_servers=f"127.0.0.1:{port}", request_timeout_ms=500) if request.param else None


def opened(directory, kafka):
    settings = {"log_config": SMALL, "open_timeout_s": 0.0}
    return Outbox.open(directory, "orders", 1, "test", **outbox_arguments(kafka=kafka, **settings))


@pytest.mark.parametrize("carrier", ["key", "header"])
def test_the_largest_record_can_be_parked(tmp_path, carrier):
    """faults B7: an entry is larger than its record, by the broker's words at most."""
    kafka = KafkaDestination(bootstrap_servers="127.0.0.1:1", on_refused="park")
    given = outbox_arguments(kafka=kafka, log_config=SMALL, open_timeout_s=0.0, carrier=carrier)
    with Outbox.open(tmp_path / "outbox", "orders", 1, "test", **given) as outbox:
        outbox.append(0, bytes(1_800)).result(60)
        with pytest.raises(RecordRefused):
            outbox.append(0, bytes(2_000))
        (record,) = outbox.log(0).records(0)
        words, parking = "\u2014" * 9_000, outbox.facts.shipping.parking
        refused = RefusedByTopic("orders", 0, 0, directory=outbox.directory, code=Code.INVALID_RECORD, why=words)
        parking.park(record, refused, 1_000)
        (parked,) = parking.all()
        assert words.startswith(parked.message)
        assert parking.record(parked.number) == record


def test_a_destination_is_dropped_while_the_outbox_is_open(directory, kafka):
    with opened(directory, kafka) as outbox:
        with pytest.raises(StillNeeded, match="kafka:old"):
            outbox.log(0).purge(20)
        assert run(["outbox", "skip", "all", "--directory", str(directory), "--topic", "older"]) == 0
        assert run(["outbox", "skip", "all", "--directory", str(directory), "--topic", "old"]) == 0
        assert run(["outbox", "skip", "all", "--directory", str(directory), "--topic", "old"]) == 1, (
            "it is not there any more"
        )
        if kafka is None:
            assert outbox.log(0).purge(20) > 0
    assert not read_progress(REAL_FILESYSTEM, directory).keys() & {"old", "older"}, "nor did the close bring it back"


@pytest.mark.parametrize("kafka", [True], indirect=True, ids=[""])
def test_what_the_service_ships_to_is_not_dropped_under_its_feet(directory, kafka, capsys):
    with opened(directory, kafka):
        assert run(["outbox", "skip", "all", "--directory", str(directory), "--topic", "orders"]) == 1
        assert "open the outbox without it" in capsys.readouterr().err
        where = ["--directory", str(directory), "--reason", "a test"]
        assert run(["outbox", "skip", "7", "--topic", "old", *where]) == 1
        assert "ships to orders" in capsys.readouterr().err
        assert run(["outbox", "skip", "7", "--topic", "orders", *where]) == 0


def test_repartition_waits_for_the_service_to_stop(directory, kafka, capsys):
    """A PID is constant from an open to a close: `pushrep outbox repartition` is refused, and changes nothing."""
    before = read_identity(REAL_FILESYSTEM, directory)
    with opened(directory, kafka):
        assert run(["outbox", "repartition", str(directory), "--topic", "old"]) == 1
        assert "is open in this very process" in capsys.readouterr().err
    assert read_identity(REAL_FILESYSTEM, directory) == before
    assert read_progress(REAL_FILESYSTEM, directory)["old"].epochs == BEFORE.epochs
    raised = repartition(directory, topic="old")
    assert raised.pid != before.pid
    [_, new] = read_progress(REAL_FILESYSTEM, directory)["old"].epochs
    assert (new.pid_epoch, new.starts) == (raised.pid_epoch, {0: 40})


@pytest.mark.parametrize("name", ["partition", "start", "end", "before_ms", "after_ms", "larger_than_bytes"])
def test_what_is_to_be_skipped_is_named_in_whole_numbers(name):
    for value in ("7", -1, True, 1.5):
        with pytest.raises(BadArgument, match=name):
            SkippedRecords(reason="why", **{name: value})


# -- which records are given up ----------------------------------------------------------------------------------------

AT_MS = 1_000
LARGE_BYTES = size_alone(Record(0, AT_MS, TimestampType.CREATE_TIME, bytes(KEY_BYTES), bytes(700)))


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Two logs, of which the first begins above 0: every third record is large, and their times go up and down."""
    with Outbox.open(
        tmp_path_factory.mktemp("outbox"), "orders", 2, "test", config=OutboxConfig(log_config=SMALL)
    ) as outbox:
        for partition, count in ((0, 24), (1, 9)):
            for n in range(count):
                value = bytes(700 if n % 3 == 0 else 20)
                outbox.append(partition, value, timestamp_ms=AT_MS + n * 7 % 10).result(60)
        outbox.log(0).purge(6)
        assert 0 < outbox.log(0).log_start_offset <= 6
        yield {n: outbox.log(n) for n in range(2)}


def _offsets(skips):
    return {(one.partition, at) for one in skips for at in range(one.offset, one.end or one.offset + 1)}


SOME = st.none() | st.integers(0, 26)


@settings(max_examples=40)
@given(
    partition=st.none() | st.integers(0, 1), start=st.integers(0, 26), end=SOME, acknowledged=st.integers(0, 10),
    skipped=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 24), st.integers(1, 4)), max_size=3),
    before_ms=st.none() | st.integers(AT_MS - 1, AT_MS + 11), after_ms=st.none() | st.integers(AT_MS - 1, AT_MS + 11),
    larger_than_bytes=st.none() | st.integers(LARGE_BYTES - 1, LARGE_BYTES),
)  # fmt: skip
@example(0, 20, 24, 0, [], None, None, None)  # up to the newest record
@example(0, 20, 25, 0, [], None, None, None)
@example(0, 6, None, 0, [], None, None, LARGE_BYTES - 1)
@example(0, 6, None, 0, [], None, None, LARGE_BYTES)
def test_those_for_which_all_that_is_named_holds_are_given_up_once(
    logs, partition, start, end, acknowledged, skipped, before_ms, after_ms, larger_than_bytes
):
    """Against each record by itself. A plain range has to be unshipped as a whole, beside what is given up already."""
    progress = ShippingProgress(
        partitions={0: PartitionProgress(acknowledged, acknowledged, 7)},
        skipped=tuple(Skip(n, at, "before", 1, at + count) for n, at, count in skipped),
    )
    given_up, open_ = _offsets(progress.skipped), set()
    wanted = SkippedRecords(
        reason="why", partition=partition, start=start, end=end, before_ms=before_ms, after_ms=after_ms,
        larger_than_bytes=larger_than_bytes,
    )  # fmt: skip
    chosen = logs if partition is None else [partition]
    for n in chosen:
        for record in logs[n].records(logs[n].log_start_offset):
            is_meant = start <= record.offset < (26 if end is None else end) and (
                (before_ms is None or record.timestamp_ms < before_ms)
                and (after_ms is None or record.timestamp_ms > after_ms)
                and (larger_than_bytes is None or size_alone(record) > larger_than_bytes)
            )
            if is_meant and (n or record.offset >= acknowledged) and (n, record.offset) not in given_up:
                open_.add((n, record.offset))
    is_plain = (before_ms, after_ms, larger_than_bytes) == (None, None, None) and end is not None
    if is_plain and {(n, at) for n in chosen for at in range(start, end)} - given_up - open_:
        with pytest.raises(BadArgument, match="is not among those that are still to be shipped"):
            wanted.found_in(progress, logs, 4711)
        return
    found = wanted.found_in(progress, logs, 4711)
    assert _offsets(found) == open_
    assert {(one.reason, one.at_ms) for one in found} <= {("why", 4711)}
    assert all(one.end is None or one.end > one.offset + 1 for one in found), "one record is named by its offset"
    assert not _offsets(found) & {(one.partition, one.end or one.offset + 1) for one in found}, "whole ranges"


def test_nothing_is_noted_of_a_topic_for_which_nothing_is_given_up(tmp_path):
    """Else the logs would keep all for it from then on, whether it is ever shipped to or not."""
    Outbox.open(tmp_path, "orders", 1, "test").close()
    assert skip_records(tmp_path, SkippedRecords(reason="why", before_ms=1)) == []
    assert read_progress(REAL_FILESYSTEM, tmp_path) == {}


def test_commands_are_refused_in_a_process_that_has_the_outbox_open_itself(directory):
    with Outbox.open(directory, "orders", 1, "test"), pytest.raises(LogLocked, match="open in this very process"):
        skip_records(directory, SkippedRecords(reason="why", start=5, end=7), topic="old")


def test_a_partition_that_is_not_there_is_refused(logs):
    for partition in (2, 7):
        with pytest.raises(BadArgument, match="is not one of the 2"):
            SkippedRecords(reason="why", partition=partition).found_in(ShippingProgress(), logs, 0)


def test_what_is_given_up_of_a_closed_outbox_is_on_disk_and_no_more_unshipped_by_name(directory):
    with pytest.raises(BadArgument, match="name a destination"):
        skip_records(directory, SkippedRecords(reason="why", end=7), topic="unknown")
    write_progress(REAL_FILESYSTEM, directory, {"old": BEFORE})
    with pytest.raises(BadArgument, match="there are: old"):  # nor is it the only one that is meant
        skip_records(directory, SkippedRecords(reason="why", end=7), topic="unknown")
    write_progress(REAL_FILESYSTEM, directory, {"old": BEFORE, "older": replace(BEFORE, partitions={})})
    (skip,) = skip_records(directory, SkippedRecords(reason="why", start=5, end=7), topic="old")
    assert (skip.offset, skip.end) == (5, 7)
    assert skip_records(directory, SkippedRecords(reason="why", start=5, end=7), topic="old") == []
    assert _offsets(read_progress(REAL_FILESYSTEM, directory)["old"].skipped) == {(0, 5), (0, 6)}
    (first,) = skip_records(directory, SkippedRecords(reason="why", end=1), topic="orders")
    assert (first.offset, first.end) == (0, None), "before the first start that ships"
    known = read_progress(REAL_FILESYSTEM, directory)
    assert known.keys() == {"old", "older", "orders"}
    assert set(not_known_to_be_shipped(directory)) == {
        Unshipped("old", 0, 5, 40), Unshipped("older", 0, 0, 40), Unshipped("orders", 0, 0, 40)
    }  # fmt: skip
    write_progress(REAL_FILESYSTEM, directory, {"old": replace(BEFORE, partitions={0: PartitionProgress(40, 40, 1)})})
    assert not_known_to_be_shipped(directory) == []


def test_a_log_that_is_missing_hides_no_unshipped_records_of_others(tmp_path):
    with Outbox.open(tmp_path, "orders", 2, "test") as outbox:
        outbox.append(1, b"value").result(60)
    write_progress(REAL_FILESYSTEM, tmp_path, {"old": replace(BEFORE, partitions={})})
    shutil.rmtree(tmp_path / "orders-0")
    assert not_known_to_be_shipped(tmp_path) == [Unshipped("old", 1, 0, 1)]


# -- parked records ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carrier", ["key", "header"])
def test_a_parked_record_is_sent_again_once_and_said_to_be_done(tmp_path, carrier):
    kafka = KafkaDestination(bootstrap_servers="127.0.0.1:1", on_refused="park")
    given = outbox_arguments(kafka=kafka, open_timeout_s=0.0, carrier=carrier)
    with Outbox.open(tmp_path / "outbox", "orders", 2, "test", **given) as outbox:

        def call(name, *numbers):
            return ask(outbox.directory, name, {"numbers": numbers})

        def waiting():
            return [one.number for one in outbox.facts.shipping.parking.waiting("orders")]

        for name in ("parked-done", "parked-resend"):
            with pytest.raises(CallRefused, match="parked"):
                call(name, 0)
        key = b"key" if carrier == "header" else None
        headers = [("a", b"1"), ("b", None)]
        outbox.append(1, b"mine", key, headers, timestamp_ms=7).result(60)
        outbox.append(1, b"another's", metadata=StreamMetadata(99, 1, 5)).result(60)
        outbox.append(0, b"done").result(60)
        for partition, offset in ((1, 0), (1, 1), (0, 0)):
            (record,) = outbox.log(partition).records(offset, offset + 1)
            refused = RefusedByTopic(
                "orders", partition, offset, directory=outbox.directory, code=Code.INVALID_RECORD, why="no"
            )
            outbox.facts.shipping.parking.park(record, refused, 1_000)
        mine, others, done = waiting()
        with pytest.raises(CallRefused, match="is not that of a parked record"):
            call("parked-done", mine, 4711)
        with pytest.raises(CallRefused, match="carries the caller's own metadata") as refused:
            call("parked-resend", mine, others)
        assert refused.value.kind == "ShippingError"
        assert waiting() == [mine, others, done], "all or none"
        assert outbox.log(1).log_end_offset == 2
        assert call("parked-done", done) is True
        assert waiting() == [mine, others]
        assert call("parked-resend", mine) == [[1, 2]]
        assert call("parked-resend", mine) == [], "nothing is sent twice"
        assert waiting() == [others]
        (again,) = outbox.log(1).records(2)
        assert (again.value, again.timestamp_ms) == (b"mine", 7)
        assert [one for one in again.headers if one[0] != METADATA_HEADER] == headers
        assert carrier == "key" or again.key == key


def test_without_a_destination_nothing_is_skipped_and_of_another_topic_neither(directory, kafka):
    with opened(directory, kafka) as outbox:
        named = "topic" if kafka else "kafka"
        with pytest.raises(BadArgument) as refused:
            outbox.facts.shipping.skip(SkippedRecords(reason="why", end=7), "old")
        assert refused.value.argument == named
        if kafka is None:
            assert outbox.lag() == {}
            with pytest.raises(BadArgument, match="without a destination"):
                outbox.wait_shipped(0)
        else:
            assert [one.offset for one in outbox.facts.shipping.skip(SkippedRecords(reason="why", end=7))] == [0]
            assert outbox.facts.shipping.skip(SkippedRecords(reason="why", end=7)) == [], "it is on disk"
            assert outbox.lag().keys() == {"kafka:orders"}


def test_records_of_the_pid_epochs_around_the_present_one_and_of_those_that_were_shipped_are_its_own():
    now = 1 << 20
    identity = replace(new_identity(producer="p", topic="orders", partitions=1, carrier="key"), pid_epoch=now)
    progress = ShippingProgress(pid_epoch=100, pid_epochs=(200,), epochs=(EpochPartitions(300, 3),))
    pids = origin_of(identity, [progress, ShippingProgress()]).pids
    around = range(now - LATER_EPOCHS, now + LATER_EPOCHS + 1)
    assert pids == {
        epoch: replace(identity, pid_epoch=epoch).pid for epoch in (*range(LATER_EPOCHS), 100, 200, 300, *around)
    }


class Leads:
    """The part of a Replication that keeps a grant, which `too_few` members may refuse to change."""

    def __init__(self, grant, trouble=None):
        self.grant, self.trouble, self.step_lock = grant, trouble, threading.Lock()

    def change_members(self, change):
        assert self.step_lock.locked(), "another step of a change of members could come between"
        if self.trouble is not None:
            raise self.trouble
        self.grant = change(self.grant, self.grant.epoch + 256)


GRANT = Grant(
    outbox_id=UUID(int=1), epoch=256, leader=0, members=tuple(map(Member, range(3))), min_insync_replicas=2,
    members_epoch=0, pid_epoch=0, topic_id=UUID(int=2), topic="orders", partitions=1, carrier="key",
    destinations=(Destination(UUID(int=8), 4), Destination(UUID(int=7), 3), Destination(UUID(int=7), 6)),
)  # fmt: skip


def test_how_many_partitions_are_used_is_in_a_new_grant_before_it_counts():
    leads = Leads(GRANT)
    counts = GrantedPartitionCounts(leads)
    assert (counts.known(UUID(int=7)), counts.known(UUID(int=9))) == ((3, 6), ())
    counts.keep(UUID(int=7), (3, 6))
    assert leads.grant is GRANT, "no grant for what each member knows already"
    counts.keep(UUID(int=7), (3, 6, 9))
    assert counts.known(UUID(int=7)) == (3, 6, 9)
    assert counts.known(UUID(int=8)) == (4,)
    assert leads.grant.epoch == 512


@pytest.mark.parametrize(
    "trouble", [TooFewMembers(answered=1, needed=2, silent=(1, 2)), OSError("the disk")], ids=["members", "disk"]
)
def test_what_too_few_members_keep_begins_anew_and_so_does_who_does_not_lead(trouble):
    counts = GrantedPartitionCounts(Leads(GRANT, trouble))
    with pytest.raises(BeginsAnew, match=r"is not kept by enough members yet: ") as raised:
        counts.keep(UUID(int=9), (1,))
    assert raised.value.__cause__ is trouble
    counts = GrantedPartitionCounts(Leads(None))
    for asked in (lambda: counts.known(UUID(int=7)), lambda: counts.keep(UUID(int=7), ())):
        with pytest.raises(BeginsAnew, match="too few members answer"):
            asked()
