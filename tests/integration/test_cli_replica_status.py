"""`pushrep replica status`: what an operator sees of an outbox that is open in another process, or in none."""

import json
import os
import pty
import signal
import subprocess
import sys

import pytest

from pushrep import Acks, Outbox
from pushrep.cli.main import run
from tests.integration.outboxes import WAIT_S, open_outbox, wait_for_all, wait_until
from tests.programs import PythonProgram

COMMAND = (sys.executable, "-m", "pushrep.cli.main", "replica", "status")


@pytest.fixture
def pushrep(capfd):
    def call(*arguments):
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        sys.stdout.flush()
        return (code, *capfd.readouterr())

    return call


def test_status_shows_sessions_lag_sets_epochs_and_offsets(world, pushrep):
    """Contract of the command: sessions, lag in records, bytes and seconds, in-sync set, epochs, HWM, LEO, flushed."""
    world.node(1)
    world.node(2)
    far = str(world.nodes[2].address)
    with open_outbox(world, 1, 2, partitions=2, acks=Acks.LOCAL) as outbox:
        for number in range(10):
            outbox.append(number % 2, b"both").result(WAIT_S)
        wait_for_all(outbox)
        world.nodes[2].stop()
        for partition in range(2):
            outbox.append(partition, b"x" * 3000).result(WAIT_S)
        wait_until(lambda: not outbox.lag()[far].in_sync, "it left")  # an idle one would not
        wait_for_all(outbox, world.nodes[1].address)
        wait_until(lambda: all(outbox.log(n).high_watermark == 6 for n in range(2)), "the watermark follows")
        code, output, _ = pushrep("replica", "status", outbox.directory, "--partitions", "--json")
        assert code == 0
        found = json.loads(output)
        assert found["state"] == "leading"
        assert found["epoch"] == outbox.log(0).leader_epochs.latest_epoch
        assert (found["log_end_offsets"], found["flushed_offsets"], found["in_sync_min"]) == (12, 12, 2)
        leader, near, away = found["members"]
        assert (leader["is_leader"], leader["lag"]) == (True, None)
        assert (near["lag"]["records"], near["lag"]["in_sync"], near["sessions"]) == (0, 2, 2)
        assert (away["lag"]["records"], away["lag"]["in_sync"], away["address"]) == (2, 0, far)
        assert 6000 <= away["lag"]["size_bytes"] <= 6000 + 2 * 4500
        first, second = found["parts"]
        assert (first["high_watermark"], first["log_end_offset"], first["in_sync"]) == (6, 6, [0, 1])
        assert [session["replica"] for session in second["sessions"]] == [1, 2]
        assert first["sessions"][0]["acknowledged"] == 6

        code, output, _ = pushrep("replica", "status", outbox.directory, "--partitions")
        assert code == 0
        for text in ("leading", far, "2 of 2", "0 of 2", "pushing", "smallest in-sync set 2"):
            assert text in output


def test_status_of_an_outbox_that_nobody_has_open_comes_from_its_files(world, pushrep):
    world.node(1)
    with open_outbox(world, 1) as outbox:
        outbox.append(0, b"both").result(WAIT_S)
        wait_for_all(outbox)
    code, output, _ = pushrep("replica", "status", outbox.directory, "--json", "--partitions")
    assert code == 0
    found = json.loads(output)
    assert (found["state"], found["pid"], found["log_end_offsets"]) == ("closed", None, 1)
    assert [one["index"] for one in found["members"]] == [0, 1]
    assert found["parts"][0]["log_end_offset"] == 1
    code, output, _ = pushrep("replica", "status", outbox.directory)
    assert code == 0
    assert "closed" in output
    assert str(world.nodes[1].address) in output


def test_status_says_what_holds_an_outbox_and_does_not_answer(tmp_path, pushrep):
    with Outbox.open(tmp_path / "outbox", "orders", 1, "billing") as outbox:
        (outbox.directory / "control.sock").unlink()
        code, output, _ = pushrep("replica", "status", outbox.directory)
        assert code == 0
        assert f"does not answer, pid {os.getpid()}" in output


def test_status_where_no_outbox_is_refuses_by_name(tmp_path, pushrep):
    code, output, errors = pushrep("replica", "status", tmp_path)
    assert (code, output) == (1, "")
    assert errors.startswith("error: ")
    assert str(tmp_path) in errors


def test_watch_into_a_pipe_prints_a_look_after_another_and_ends_on_ctrl_c(tmp_path):
    with Outbox.open(tmp_path / "outbox", "orders", 1, "billing") as outbox:
        words = ("replica", "status", outbox.directory, "--watch", "--every", "0.1", "--json")
        with PythonProgram("-m", "pushrep.cli.main", *words, has_errors=True) as watch:
            try:
                assert json.loads(watch.stdout.readline())["log_end_offsets"] == 0
                outbox.append(0, b"a").result(WAIT_S)
                while json.loads(watch.stdout.readline())["log_end_offsets"] == 0:
                    pass
            finally:
                watch.send_signal(signal.SIGINT)
            rest, errors = watch.stdout.read(), watch.stderr.read()
    assert (watch.returncode, errors) == (0, "")
    assert all(json.loads(line) for line in rest.splitlines()), "no half line"


def test_watch_at_a_terminal_draws_over_what_it_drew_and_leaves_the_cursor(tmp_path):
    ours, theirs = pty.openpty()
    with Outbox.open(tmp_path / "outbox", "orders", 1, "billing") as outbox:
        watch = subprocess.Popen(
            [*COMMAND, str(outbox.directory), "--watch", "--every", "0.1"],
            stdout=theirs, stderr=subprocess.PIPE, env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        os.close(theirs)
        try:
            seen = b""
            while seen.count(b"producer billing") < 3:
                seen += os.read(ours, 4096)
            watch.send_signal(signal.SIGINT)
            while b"\x1b[?25h" not in seen:  # the cursor is shown again
                seen += os.read(ours, 4096)
            _, errors = watch.communicate(timeout=WAIT_S)
        finally:
            watch.kill()
            watch.wait()
            os.close(ours)
    assert (watch.returncode, errors) == (0, b"")
    assert b"\x1b[1A" in seen, "it goes up and draws over"
