"""Whole old segments are removed by an operator and by the outbox's retention, but never records that a reader
needs.
"""

import json
from uuid import UUID

import pytest
from click.testing import CliRunner

from pushrep.cli.main import cli
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import BadArgument
from pushrep.kafka.parking import parking_name
from pushrep.kafka.progress import PartitionProgress, ShippingProgress, write_progress
from pushrep.log import LogConfig, SegmentLog
from pushrep.log.retention import deletable
from pushrep.log.segment import SealedSegment
from pushrep.outbox import Outbox
from pushrep.outbox.control import CallRefused, ask
from pushrep.outbox.positions import POSITIONS_NAME
from tests.support.outbox_arguments import outbox_arguments

SMALL = LogConfig(segment_bytes=1000, preallocate_bytes=0)
SEALED = [SealedSegment(base, base + 10, 100) for base in (0, 10, 20, 30)]


@pytest.mark.parametrize(
    ("wanted", "floor", "gone"),
    [
        ({"before_offset": 20}, 99, [0, 10]),
        ({"before_offset": 29}, 99, [0, 10]),
        ({"before_offset": 99}, 15, [0]),
        ({"before_offset": 9}, 99, []),
        ({"before_ms": 25}, 99, [0, 10]),
        ({"before_ms": 1000}, 99, [0, 10]),
        ({}, 99, []),
    ],
)
def test_what_may_go(wanted, floor, gone):
    newest_ms = {0: 5, 10: 24, 20: -1, 30: 3}  # one without a time stays, and keeps what is behind it
    chosen = deletable(SEALED, floor, lambda segment: newest_ms[segment.base_offset], **wanted)
    assert [segment.base_offset for segment in chosen] == gone


def open_outbox(path, **more):
    return Outbox.open(
        path, **outbox_arguments(topic="orders", partitions=2, producer="p", **{"log_config": SMALL, **more})
    )


def fill(outbox, partition=0, day=1):
    for n in range(20):
        outbox.append(partition, bytes(300), timestamp_ms=day * 86_400_000 + n).result(60)


def purge(*arguments):
    done = CliRunner().invoke(cli, ["log", "purge", *map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.output.splitlines()]


def start_of(path, partition=0):
    with SegmentLog.open_reader(path / f"orders-{partition}") as log:
        return log.log_start_offset


@pytest.mark.parametrize("is_open", [True, False], ids=["beside the service", "closed"])
def test_old_segments_go_and_positions_stay(tmp_path, is_open):
    outbox = open_outbox(tmp_path)
    fill(outbox, 0, day=1)
    fill(outbox, 1, day=9)
    outbox.flush()
    if not is_open:
        outbox.close()
    zero, one = purge(tmp_path, "--before", "1970-01-05", "--dry-run")
    assert start_of(tmp_path) == 0
    assert (one["segments"], zero["kept_by"]) == ([], None)
    assert len(zero["segments"]) > 3
    assert purge(tmp_path, "--before", "1970-01-05") == [one_ | {"dry_run": False} for one_ in (zero, one)]
    assert start_of(tmp_path) == zero["log_start_offset"] > 10
    assert start_of(tmp_path, 1) == 0
    (only,) = purge(tmp_path, "orders-1", "--before", "9")
    assert start_of(tmp_path, 1) == only["log_start_offset"] <= 9
    outbox.close()
    with open_outbox(tmp_path) as again:
        assert again.last_metadata(again.pid, 0) == 19, "what is gone is known all the same"


def test_a_destination_keeps_what_it_lacks_until_it_is_dropped(tmp_path):
    with open_outbox(tmp_path) as outbox:
        fill(outbox)
    at = {0: PartitionProgress(7, 7, 0)}
    write_progress(REAL_FILESYSTEM, tmp_path, {"topic-1": ShippingProgress(topic_id=UUID(int=1), partitions=at)})
    for is_open in (False, True):
        outbox = open_outbox(tmp_path) if is_open else None
        (found, _) = purge(tmp_path, "--before", "2100-01-01")
        assert (found["kept_by"], found["needed_from"]) == ("kafka:topic-1", 7)
        words = ["log", "purge", str(tmp_path), "--before", "2100-01-01", "--dry-run"]
        (told, _) = CliRunner().invoke(cli, words, catch_exceptions=False).output.splitlines()
        assert told.endswith("; kafka:topic-1 needs the old records from offset 7 on")
        assert start_of(tmp_path) <= 7
        if outbox is not None:
            outbox.close()


def test_what_a_destination_lacks_of_the_logs_keeps_nothing_of_the_parking_log(tmp_path):
    with open_outbox(tmp_path) as outbox:
        name = parking_name(outbox.identity.topic, outbox.identity.partitions)
    with SegmentLog.open(tmp_path / name, SMALL) as log:
        for _ in range(20):
            log.append([bytes(300)], timestamps_ms=1)
    write_progress(REAL_FILESYSTEM, tmp_path, {"topic-1": ShippingProgress(topic_id=UUID(int=1))})
    (*_, found) = purge(tmp_path, "--before", "2100-01-01")
    assert (found["log"], found["kept_by"]) == (name, None)
    assert not (tmp_path / name / POSITIONS_NAME).exists(), "its records are nobody's positions"


def test_an_outbox_that_ships_keeps_a_week_unless_a_retention_is_set(tmp_path):
    with open_outbox(tmp_path / "plain") as outbox:
        assert kept(outbox) == (None, None), "without a destination nothing goes"
    path = tmp_path / "shipped"
    with open_outbox(path) as outbox:
        fill(outbox)
    write_progress(REAL_FILESYSTEM, path, {"t": ShippingProgress(topic_id=UUID(int=1))})
    for config, wanted in (
        (SMALL, (7 * 86_400_000, None)),
        (LogConfig(retention_ms=-1), (None, None)),
        (LogConfig(retention_bytes=5000), (None, 5000)),
        (LogConfig(retention_bytes=-1), (None, None)),
        (LogConfig(retention_ms=5), (5, None)),
    ):
        with open_outbox(path, log_config=config) as outbox:
            assert kept(outbox) == wanted
    with pytest.raises(BadArgument, match="retention_ms"):
        LogConfig(retention_ms=-2)


def kept(outbox):
    return outbox.log(0).config.retention


@pytest.mark.parametrize(
    ("argument", "value"),
    [("partition", 2), ("partition", "0"), ("before_offset", "7"), ("before_offset", -1), ("before_ms", True)],
)
def test_a_call_with_what_is_no_number_or_partition_is_refused(tmp_path, argument, value):
    with open_outbox(tmp_path), pytest.raises(CallRefused, match=argument) as refused:
        ask(tmp_path, "purge", {"dry_run": True, argument: value})
    assert refused.value.kind == "BadArgument"


def test_usage_is_refused_by_name(tmp_path):
    with open_outbox(tmp_path):
        pass
    for arguments, said in (
        ((tmp_path, "--before", "12"), "orders-0 say"),
        ((tmp_path, "--before", "yesterday"), "nor an ISO 8601 time"),
        ((tmp_path / "none", "--before", "12"), "orders-0 say"),
    ):
        done = CliRunner().invoke(cli, ["log", "purge", *map(str, arguments)])
        assert (done.exit_code, said in done.output) == (2, True), done.output
