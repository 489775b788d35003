"""Settings that are changed while a log or an outbox is open: what goes by them at once, and what a restart finds."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pushrep import LogConfig, Outbox, OutboxConfig
from pushrep.cli.main import run
from pushrep.cli.status import look_at
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import BadArgument, CorruptFile
from pushrep.kafka.parking import parking_config, parking_name
from pushrep.log import AppendFailed, LogPoisoned, SegmentLog
from pushrep.log.directory_files import list_segments
from pushrep.log.disk import DiskLevel
from pushrep.log.segment_log import logs_status
from pushrep.outbox.kept_settings import DYNAMIC_SETTINGS, FILE_NAME, KeptSettings, read_kept
from pushrep.outbox.settings import RETENTION_DEFAULT_MS, OutboxSettings
from pushrep.settings import settings_of
from tests.integration.outboxes import wait_until
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk

PATH = Path("/logs/orders-0")
SMALL = LogConfig(segment_bytes=1000, batch_bytes_max=500, preallocate_bytes=0, flush_ms=50)
DAY_MS = 86_400_000
GOLDEN = b"""{
 "crc32c": 2036542276,
 "log": {
  "retention_ms": 86400000,
  "segment_ms": null
 },
 "version": 1
}
"""


def test_only_what_kafka_changes_while_it_runs_and_the_disks_limits_can_be_changed():
    of_kafka = {"segment_bytes", "segment_ms", "retention_ms", "retention_bytes"}
    assert DYNAMIC_SETTINGS.keys() == of_kafka | {name for name in settings_of(LogConfig) if name.startswith("disk_")}


@pytest.fixture
def clock():
    return SimulatedClock()


@pytest.fixture
def disk(clock):
    return SimulatedDisk(clock=clock)


@pytest.fixture
def log(disk, clock):
    with SegmentLog.open(PATH, SMALL, filesystem=disk, clock=clock) as log:
        yield log


def fill(log, clock, records=10, age_ms=0):
    for n in range(records):
        log.append(b"%03d" % n * 100, timestamps_ms=clock.wall_ms() - age_ms)


def test_retention_by_time_and_size_goes_by_what_was_changed_last(log, clock):
    fill(log, clock, age_ms=2 * DAY_MS)
    fill(log, clock)
    assert log.apply_retention() == ()
    log.configure(replace(SMALL, retention_ms=DAY_MS))
    assert log.config.retention_ms == DAY_MS
    assert log.apply_retention() == (0, 2, 4, 6)
    log.configure(replace(SMALL, retention_bytes=2000))
    assert log.apply_retention() == (8, 10, 12)
    log.configure(SMALL)
    assert log.apply_retention() == ()


def test_the_newest_segment_ends_by_the_new_size_and_time(disk, log, clock):
    log.configure(replace(SMALL, segment_bytes=100_000))
    fill(log, clock)
    assert len(list_segments(disk, PATH)) == 1
    log.configure(SMALL)
    fill(log, clock, records=1)
    assert len(list_segments(disk, PATH)) == 2
    log.configure(replace(SMALL, segment_bytes=100_000, segment_ms=1000))
    clock.advance(1001)
    fill(log, clock, records=1)
    assert len(list_segments(disk, PATH)) == 3


def test_the_limits_of_the_disk_hold_at_once_and_the_old_ones_are_forgotten(disk, log, clock):
    disk.capacity_bytes = 1 << 20
    limits = {name: 0 for name in DYNAMIC_SETTINGS if name.endswith("_percent")}
    full = replace(SMALL, **limits)
    log.configure(full)
    with pytest.raises(AppendFailed, match="too full"):
        log.append(b"none")
    assert log.why_no_append()
    assert logs_status("", [log]).disk.level is DiskLevel.FULL
    log.configure(SMALL)
    log.append(b"one")
    assert (log.why_no_append(), logs_status("", [log]).disk.level) == ("", DiskLevel.ROOM)


def test_a_log_in_trouble_comes_back_with_the_settings_that_it_has_now(disk, log, clock):
    fill(log, clock, records=1)
    log.configure(replace(SMALL, segment_bytes=100_000))
    disk.fail_sync()
    with pytest.raises(LogPoisoned):
        fill(log, clock, records=1)
    log.reopen()
    fill(log, clock)
    assert len(list_segments(disk, PATH)) == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"flush_ms": 1}, "flush_ms: can't be changed while the log is open"),
        ({"segment_bytes": 499}, "segment_bytes: the largest batch would have 499 bytes instead of 500"),
    ],
)
def test_what_an_open_log_can_not_change_is_refused_by_name(log, change, named):
    with pytest.raises(BadArgument, match=named):
        log.configure(replace(SMALL, **change))
    assert log.config is SMALL


# An outbox.


def opened(directory, **settings):
    config = OutboxConfig(log_config=LogConfig(**settings), copy_check=False)
    return Outbox.open(directory, "orders", 2, "billing", config=config)


@pytest.fixture
def change(capfd):
    """`pushrep outbox set`: exit code, and what it printed."""

    def call(*arguments):
        capfd.readouterr()
        code = run(["outbox", "set", *map(str, arguments)])
        sys.stdout.flush()
        said = capfd.readouterr()
        return code, said.out if code == 0 else said.err

    return call


def of(outbox, name):
    return {getattr(outbox.log(n).config, name) for n in range(2)}


def test_what_is_changed_in_an_open_outbox_holds_at_once_and_after_each_restart(tmp_path, change):
    directory = tmp_path / "outbox"
    with opened(directory, retention_ms=5) as outbox:
        assert change(directory) == (0, "nothing is changed: what the service gives at opening holds\n")
        said = "retention_ms = 86400000\nsegment_ms = none\n"
        assert change(directory, f"retention_ms={DAY_MS}", "segment_ms=none") == (0, said)
        assert (of(outbox, "retention_ms"), of(outbox, "segment_ms")) == ({DAY_MS}, {None})
        assert (directory / FILE_NAME).read_bytes() == GOLDEN
        assert look_at(str(directory))[0]["settings"] == {"retention_ms": DAY_MS, "segment_ms": None}
    with opened(directory, retention_ms=5, segment_ms=7) as outbox:
        assert (of(outbox, "retention_ms"), of(outbox, "segment_ms")) == ({DAY_MS}, {None})
        assert change(directory, "--delete", "retention_ms", "--json") == (
            0, json.dumps({"directory": str(directory), "settings": {"segment_ms": None}}) + "\n",
        )  # fmt: skip
        assert (of(outbox, "retention_ms"), of(outbox, "segment_ms")) == ({5}, {None})


def test_what_is_too_old_by_a_new_retention_is_removed_at_once(tmp_path, change):
    """Not with the next pass, which is five minutes away."""
    directory = tmp_path / "outbox"
    with opened(directory, segment_bytes=1000, batch_bytes_max=1000) as outbox:
        for _ in range(20):
            outbox.append(0, b"old" * 100, timestamp_ms=1).result(10)
        assert change(directory, "retention_ms=86400000")[0] == 0
        wait_until(lambda: outbox.log(0).log_start_offset == 20, "old records are still there")


def test_each_worker_slot_that_is_there_is_changed_open_or_not(tmp_path, change):
    directory = tmp_path / "workers"
    with Outbox.open_slot(directory, "orders", 1, "billing"):
        Outbox.open_slot(directory, "orders", 1, "billing").close()
        assert change(directory, "segment_ms=7") == (0, "slot-0:\nsegment_ms = 7\nslot-1:\nsegment_ms = 7\n")
    with Outbox.open_slot(directory, "orders", 1, "billing") as outbox:
        assert outbox.log(0).config.segment_ms == 7


def test_a_slot_that_is_opened_later_has_them_until_it_has_its_own(tmp_path, change):
    directory = tmp_path / "workers"

    def worker():
        return Outbox.open_slot(directory, "orders", 1, "billing")

    def segment_ms(*outboxes):
        return [outbox.log(0).config.segment_ms for outbox in outboxes]

    usual = LogConfig().segment_ms
    with worker() as first:
        change(directory, "segment_ms=7")
        with worker() as second:
            assert segment_ms(first, second) == [7, 7]
            assert look_at(str(second.directory))[0]["settings"] == {"segment_ms": 7}
            change(second.directory, "segment_ms=8")
            with worker() as third:
                assert segment_ms(first, second, third) == [7, 8, 7]
                change(directory, "--delete", "segment_ms")
                assert segment_ms(first, second, third) == [usual] * 3
    change(directory, "segment_ms=9")
    with worker() as first, worker() as second, worker() as third, worker() as later:
        assert segment_ms(first, second, third, later) == [9] * 4


def test_a_later_slot_whose_own_settings_contradict_them_names_the_file_above_the_slots(tmp_path, change):
    directory = tmp_path / "workers"
    with Outbox.open_slot(directory, "orders", 1, "billing"):
        assert change(directory, "disk_refuse_percent=86")[0] == 0
        config = OutboxConfig(log_config=LogConfig(disk_pressed_percent=88))
        with pytest.raises(BadArgument, match=re.escape(str(directory / FILE_NAME))):
            Outbox.open(directory / "slot-1", "orders", 1, "billing", config=config)


def test_a_closed_outbox_gets_them_at_its_next_opening(tmp_path, change, capfd):
    directory = tmp_path / "outbox"
    opened(directory).close()
    assert change(directory, "retention_bytes=4096") == (0, "retention_bytes = 4096\n")
    assert look_at(str(directory))[0]["settings"] == {"retention_bytes": 4096}
    assert run(["status", str(directory)]) == 0
    sys.stdout.flush()
    assert "changed by pushrep outbox set: retention_bytes=4096" in capfd.readouterr().out
    with opened(directory) as outbox:
        assert of(outbox, "retention_bytes") == {4096}
    assert change(directory, "--delete", "retention_bytes")[0] == 0
    with opened(directory) as outbox:
        assert of(outbox, "retention_bytes") == {None}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["linger_ms=20"], "linger_ms: can't be changed while an outbox is open: give it to the next opening"),
        (["batch_bytes_max=2000"], "batch_bytes_max: can't be changed while an outbox is open"),
        (["retention_mss=20"], "retention_mss: is no setting; did you mean retention_ms?"),
        (["--delete", "codec"], "codec: can't be changed while an outbox is open"),
        (["retention_ms=-2"], "retention_ms: give a whole number of at least -1 or None, not -2"),
        (["retention_ms=soon"], "retention_ms: give a whole number of at least -1 or None, not 'soon'"),
        (["disk_refuse_percent=80"], "they rise from 0 to 100, not 75, 85, 80"),
        (["retention_ms"], "'retention_ms' is not NAME=VALUE"),
    ],
)
@pytest.mark.parametrize("is_open", [True, False])
def test_what_can_not_be_changed_is_refused_by_name_and_changes_nothing(tmp_path, change, arguments, named, is_open):
    directory = tmp_path / "outbox"
    outbox = opened(directory)
    try:
        if not is_open:
            outbox.close()
        code, said = change(directory, "retention_bytes=7", *arguments)
        assert code != 0
        assert named in said
        assert not (directory / FILE_NAME).exists()
        assert not is_open or of(outbox, "retention_bytes") == {None}
    finally:
        outbox.close()


def test_segments_that_would_not_hold_the_open_logs_batches_are_refused_before_anything_is_kept(tmp_path, change):
    """At the next opening the batches are smaller, too."""
    directory = tmp_path / "outbox"
    with opened(directory) as outbox:
        usual = of(outbox, "segment_bytes")
        code, said = change(directory, "segment_bytes=4096")
        assert code != 0
        assert "segment_bytes: the largest batch would have 4096 bytes instead of" in said
        assert not (directory / FILE_NAME).exists()
        assert of(outbox, "segment_bytes") == usual


def test_what_lies_above_an_outbox_that_is_no_slot_is_not_its_own(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(GOLDEN)
    with opened(tmp_path / "outbox") as outbox:
        assert of(outbox, "retention_ms") == {LogConfig().retention_ms}


def test_no_outbox_is_named(tmp_path, change):
    code, said = change(tmp_path, "retention_ms=5")
    assert code != 0
    assert str(tmp_path) in said


def test_the_parking_log_keeps_all_and_has_the_other_settings(tmp_path, change):
    """Its retention is never, whatever the other logs have."""
    directory = tmp_path / "outbox"
    opened(directory).close()
    path = directory / parking_name("orders", 2)
    SegmentLog.open(path, parking_config(LogConfig())).close()
    with opened(directory) as outbox:
        assert change(directory, "retention_ms=5", "segment_ms=7")[0] == 0
        parking = outbox.facts.appenders[2].log
        assert (parking.config.retention, parking.config.segment_ms) == ((None, None), 7)


def test_the_default_of_an_outbox_with_a_destination_gives_way_as_to_an_openings_own(tmp_path):
    held = type("Held", (), {"filesystem": REAL_FILESYSTEM, "path": tmp_path})
    kept = KeptSettings(held, OutboxSettings(), ships=True)
    assert kept.log_config.retention_ms == RETENTION_DEFAULT_MS
    kept.change([], [], {"retention_bytes": 10}, ())
    assert kept.log_config.retention == (None, 10)
    kept.change([], [], {}, ["retention_bytes"])
    assert kept.log_config.retention_ms == RETENTION_DEFAULT_MS


def test_a_file_that_is_damaged_or_of_others_is_named_with_what_to_do(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(GOLDEN)
    assert read_kept(REAL_FILESYSTEM, tmp_path) == {"retention_ms": DAY_MS, "segment_ms": None}
    (tmp_path / FILE_NAME).write_bytes(GOLDEN.replace(b"8640", b"8641"))
    with pytest.raises(CorruptFile, match=r"checksum.*remove it: then the settings of the opening hold"):
        read_kept(REAL_FILESYSTEM, tmp_path)


def test_an_opening_whose_own_settings_contradict_them_names_the_file_and_the_way_out(tmp_path, change):
    directory = tmp_path / "outbox"
    with opened(directory):
        assert change(directory, "disk_refuse_percent=86")[0] == 0
    with pytest.raises(BadArgument, match=r"75, 88, 86; some are of .*settings\.json: pushrep outbox set --delete"):
        opened(directory, disk_pressed_percent=88)
    assert change(directory, "--delete", "disk_refuse_percent")[0] == 0
    opened(directory, disk_pressed_percent=88).close()
