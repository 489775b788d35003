"""docs/disk.md, "The disk is full": its commands, on a file system of 16 MiB, end with an outbox that takes records."""

import os
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from pushrep.log import AppendFailed, LogConfig, SegmentLog
from pushrep.outbox import DeliveryFailed, Outbox, OutboxConfig
from tests.house.doc_blocks import blocks_of, commands_of
from tests.programs import PUSHREP

PAGE = Path(__file__).parents[2] / "docs" / "disk.md"
SECTION = "## The disk is full"


@pytest.fixture
def small_disk(tmp_path):
    """An empty file system of 16 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    with ExitStack() as stack:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", place], capture_output=True, text=True, check=False
        )
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
        stack.callback(subprocess.run, ["umount", place], check=True, timeout=60)
        yield place


def run(command, cwd):
    path = f"{PUSHREP.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=cwd,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def commands():
    start = PAGE.read_text().splitlines().index(SECTION)
    blocks = [block for block in blocks_of(PAGE) if block.language == "console" and block.line > start]
    return [command for block in blocks for command in commands_of(block)]


def without_log_lines(output):
    """The output of a command without log lines, because a line about the disk's level may or may not be there."""
    return [line for line in output.splitlines() if " WARNING pushrep" not in line]


@pytest.mark.slow
def test_the_page_ends_with_an_outbox_that_takes_records(small_disk):
    said = {}
    for command in commands():
        said[command] = run(command, small_disk)
    refused, listed, dry, purged, resumed, last = said.values()
    # The disk is looked at once a second: it may be full to the last byte before that.
    assert "disk_refuse_percent=90" in refused or "No space left on device" in refused
    assert "orders-0" in listed
    assert "would be removed" in dry
    assert " removed, the log begins" in purged
    announced = without_log_lines(dry.replace("would be removed", "removed").replace("would begin", "begins"))
    assert announced == without_log_lines(purged), "what was announced, and nothing else"
    assert "appended" in resumed
    assert "appended 1 record" in last
    with SegmentLog.open_reader(small_disk / "outbox" / "orders-0") as log:
        assert log.log_start_offset > 0
        assert [record.value for record in log.records(log.log_end_offset - 1)] == [b"one more"]


@pytest.mark.slow
def test_a_running_service_goes_on_after_a_purge_beside_it(small_disk):
    config = LogConfig(segment_bytes=1 << 20, flush_ms=20)
    with Outbox.open(
        small_disk / "o", topic="orders", partitions=1, producer="p", config=OutboxConfig(log_config=config)
    ) as outbox:
        values = [bytes(10_000) for _ in range(20)]

        def fill():
            while True:
                outbox.append_many(0, values).result(60)

        with pytest.raises(DeliveryFailed) as refused:
            fill()
        assert isinstance(refused.value.__cause__, AppendFailed)
        end = outbox.log(0).log_end_offset
        with (small_disk / "others").open("wb", buffering=0) as others, suppress(OSError):
            while True:
                others.write(bytes(4096))
        assert not os.statvfs(small_disk).f_bfree, "the disk is full to the last block"
        said = run("pushrep log purge o --before 2100-01-01", small_disk)
        assert " removed, the log begins" in said
        assert outbox.append(0, b"at once").result(60) == end
