"""`pushrep replay`: what it prints in each format, where it begins and ends, and that every end is a clean one."""

import json
import signal
import socket
import sys
from uuid import UUID

import pytest

from pushrep.cli import main as cli_main
from pushrep.log import Durability, SegmentLog
from pushrep.replay import ReplayClient
from pushrep.replay.plan import RecordingInfo, RecordingState
from tests.programs import PythonProgram

COMMAND = ("-m", "pushrep.cli.main", "replay")


@pytest.fixture
def pushrep(capfdbinary):
    """Run a command line in this process: (exit code, output, errors)."""

    def run(*arguments):
        capfdbinary.readouterr()
        code = cli_main.run(["replay", *(str(argument) for argument in arguments)])
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        return code, out, err.decode()

    return run


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """orders-1: 30 records, a second apart, in batches of four; empty-0."""
    directory = tmp_path_factory.mktemp("logs")
    with SegmentLog.open(directory / "orders-1") as log:
        for first in range(0, 30, 4):
            numbers = range(first, min(first + 4, 30))
            log.append(
                [b"value %d" % n for n in numbers],
                keys=[b"k" if n % 2 else None for n in numbers],
                headers=[[("h", b"\xff")] if n == 3 else [] for n in numbers],
                timestamps_ms=[1_700_000_000_000 + n * 1000 for n in numbers],
                durability=Durability.BUFFERED,
            )
    SegmentLog.open(directory / "empty-0").close()
    return directory


def lines(*numbers):
    return b"".join(b"value %d\n" % n for n in numbers)


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ([], range(30)),
        (["--from", "0"], range(30)),
        (["--from", "earliest", "--count", "3"], range(3)),
        (["--from", "5", "--count", "6"], range(5, 11)),
        (["--from", "5", "--count", "0"], []),
        (["--from", "7", "--until", "9"], [7, 8]),
        (["--until", "4"], range(4)),
        (["--from", "2023-11-14T22:13:30Z", "--until", "2023-11-14T22:13:33"], range(10, 13)),
        (["--count", "7", "--follow"], range(7)),
        (["--count", "100"], range(30)),
        (["--bound", "written"], range(30)),
        (["--from", "latest"], range(20, 30)),
        (["--from", "latest", "--count", "40"], range(30)),
        (["--from", "max-timestamp"], [29]),
    ],
    ids=str,
)
def test_where_it_begins_and_ends(pushrep, logs, options, numbers):
    assert pushrep(logs, "orders-1", "--format", "raw", *options) == (0, lines(*numbers), "")


@pytest.mark.parametrize("first", [0, 30])
def test_until_an_offset_ends_a_following_one_before_anything_lies_behind(pushrep, logs, first):
    options = ["--from", first, "--follow", "--until", 30, "--format", "raw"]
    assert pushrep(logs, "orders-1", *options)[:2] == (0, lines(*range(first, 30)))


def test_json_says_all_of_a_record(pushrep, logs):
    code, out, _ = pushrep(logs, "orders-1", "--from", "3", "--count", "1")
    assert code == 0
    assert json.loads(out) == {
        "partition": 1,
        "offset": 3,
        "timestamp_ms": 1_700_000_003_000,
        "key": "k",
        "value": "value 3",
        "headers": [{"name": "h", "value_base64": "/w=="}],
    }


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["orders-1", "--from", "31"], 1, "position 31 is outside"),
        (["orders-1", "--from", "30"], 1, "end of a stopped recording"),
        (["orders-2"], 1, "has no log orders-2; it has empty-0, orders-1"),
        (["order"], 1, "has no log order; it has empty-0, orders-1"),
        (["orders-1", "--from", "yesterday"], 2, "'yesterday' is neither earliest, latest, an offset"),
        (["orders-1", "--until", "tomorrow"], 2, "--until"),
        (["empty-0"], 0, "nothing to replay"),
    ],
)
def test_refusals_name_what_is_wrong(pushrep, logs, arguments, code, told):
    got, out, err = pushrep(logs, *arguments)
    assert (got, out) == (code, b"")
    assert told in err


def test_a_node_that_is_not_there_is_told_in_a_line(pushrep):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    code, _, err = pushrep(address, "orders-1")
    assert (code, f"error: {address}: " in err) == (1, True)


def test_following_is_seen_at_once_and_ctrl_c_ends_it_clean(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as log:
        log.append([b"old"])
        command = (*COMMAND, tmp_path, "orders-0", "--from", "1", "--follow", "--format", "raw")
        with PythonProgram(*command, has_errors=True) as running:
            try:
                for n in range(5):
                    log.append([b"new %d" % n])
                    assert running.stdout.readline() == f"new {n}\n", "a record is not kept back for the next one"
            finally:
                running.send_signal(signal.SIGINT)
            out, err = running.stdout.read(), running.stderr.read()
    assert (running.returncode, out) == (130, "")
    assert "5 records; continue with --from 6" in err
    assert "Traceback" not in err


def test_a_reader_that_goes_away_ends_it_quietly(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as log:
        log.append([b"x" * 1000] * 2000)
    with PythonProgram(*COMMAND, tmp_path, "orders-0", has_errors=True) as running:
        running.stdout.readline()
        running.stdout.close()
        err = running.stderr.read()
    assert (running.returncode, err) == (141, "")


LISTED = [
    RecordingInfo(
        recording_id=4, topic="orders", partition=0, log_id=UUID(int=1), start_offset=10, stable_offset=20_000,
        end_offset=30_000, is_live=True, state=RecordingState.VALID, outbox_id=UUID(int=2),
    ),
    RecordingInfo(
        recording_id=None, topic="orders", partition=1, log_id=None, start_offset=0, stable_offset=0, end_offset=0,
        is_live=False, state=RecordingState.INVALID, invalid="its first file is missing",
    ),
    RecordingInfo(
        recording_id=5, topic="rates", partition=0, log_id=UUID(int=3), start_offset=0, stable_offset=9, end_offset=9,
        is_live=False, state=RecordingState.VALID, damaged_from=1_000, origin="h:1/7",
    ),
]  # fmt: skip


def test_recordings_are_listed_with_all_that_is_known_of_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ReplayClient, "recordings", lambda *_, **__: LISTED)
    assert cli_main.run(["recording", "list", str(tmp_path)]) == 0
    rows = [
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in capsys.readouterr().out.splitlines()
    ]
    assert rows == [
        ["log", "id", "start", "stable end", "state", "outbox"],
        ["orders-0", "4", "10", "20,000", "live", str(UUID(int=2))],
        ["orders-1", "0", "0", "invalid: its first file is missing"],
        ["rates-0", "5", "0", "9", "stopped, damaged from 1,000 on"],
    ]
    assert cli_main.run(["recording", "list", str(tmp_path), "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert shown[0] == {
        "recording_id": 4, "name": "orders-0", "log_id": str(UUID(int=1)), "outbox_id": str(UUID(int=2)),
        "start_offset": 10, "stable_offset": 20_000, "end_offset": 30_000, "is_live": True, "state": "VALID",
        "damaged_from": None, "invalid": None, "origin": None,
    }  # fmt: skip
    nothing = dict.fromkeys(("recording_id", "log_id", "outbox_id", "damaged_from", "origin"))
    assert shown[1].items() >= {**nothing, "state": "INVALID", "invalid": "its first file is missing"}.items()
    assert shown[2].items() >= {"is_live": False, "damaged_from": 1_000, "origin": "h:1/7"}.items()
