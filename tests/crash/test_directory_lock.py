"""The directory of logs between processes: real ones, killed and forked, and readers beside a writer."""

import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack

import pytest

from pushrep.log import SegmentLog
from pushrep.log.directory import LogDirectory
from pushrep.log.directory_files import CLEAN_MARKER_NAME
from pushrep.log.errors import LogLocked
from pushrep.log.published import PublishedReader, read_published
from pushrep.replay import ReplayClient

PRELUDE = """
import os, sys
from pathlib import Path
from pushrep.errors import ForkedProcess
from pushrep.log.directory_files import CLEAN_MARKER_NAME, CleanLog
from pushrep.log.directory import LogDirectory
from pushrep.log.errors import LogClosed, LogLocked
from pushrep.log.published import LogOffsets
path = Path(sys.argv[1])
"""
HOLD = """
directory = LogDirectory.acquire(path)
view = directory.attach("orders-0")
(path / "orders-0").mkdir(exist_ok=True)
view.publish(LogOffsets(0, 5, 4, 3), 1)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path):
    """start(script): a process that runs it on tmp_path and has printed its first line; ended after the test."""
    processes = []

    def run(script):
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(script), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in processes:
        process.kill()
        if not process.stdout.closed:
            process.communicate(timeout=60)


def finish(process):
    """Let the process run to its end; returns (exit code, the rest of its output)."""
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def test_the_other_process_is_named_and_its_kill_frees_the_lock_and_leaves_no_marker(tmp_path, start):
    directory = LogDirectory.acquire(tmp_path)
    (tmp_path / "orders-0").mkdir()
    directory.release()
    assert (tmp_path / CLEAN_MARKER_NAME).exists()
    holder = start(HOLD)
    with pytest.raises(LogLocked, match=f"process {holder.pid}") as refused:
        LogDirectory.acquire(tmp_path)
    assert (refused.value.pid, refused.value.directory) == (holder.pid, tmp_path)
    holder.send_signal(signal.SIGKILL)
    finish(holder)
    assert not (tmp_path / CLEAN_MARKER_NAME).exists(), "a crash must look like one"
    state = read_published(tmp_path, "orders-0")
    assert (state.log_end_offset, state.pid) == (5, holder.pid), "what it published outlives it"
    directory = LogDirectory.acquire(tmp_path)
    assert directory.attach("orders-0").clean is None
    directory.release()


def test_an_orderly_end_without_release_frees_the_lock_and_leaves_no_marker(tmp_path, start):
    assert finish(start(HOLD))[0] == 0
    assert not (tmp_path / CLEAN_MARKER_NAME).exists()
    LogDirectory.acquire(tmp_path).release()


def test_a_fork_can_use_nothing_and_releases_nothing(tmp_path, start):
    script = """
    def refused(use, error):
        try:
            use()
        except error:
            return True
        return False

    directory = LogDirectory.acquire(path)
    (path / "orders-0").mkdir()
    view = directory.attach("orders-0")
    view.publish(LogOffsets(0, 5, 5, 5), 0)
    child = os.fork()
    if child == 0:
        uses = [
            lambda: view.publish(LogOffsets(0, 9, 9, 9), 0),
            lambda: view.checkpoint(recovery_point=9), view.sync_checkpoints,
            lambda: view.close(CleanLog(9, 9, 9)), view.close, directory.release,
            lambda: directory.attach("orders-1"),
        ]
        wrong = [n for n, use in enumerate(uses) if not refused(use, ForkedProcess)]
        try:
            LogDirectory.acquire(path)
        except LogLocked as error:
            os._exit(len(wrong) if error.pid == os.getppid() else 90)
        os._exit(91)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("ready", flush=True)
    sys.stdin.readline()
    view.close(CleanLog(5, 5, 0))
    directory.release()
    sys.exit(status)
    """
    parent = start(script)
    with pytest.raises(LogLocked, match=f"process {parent.pid}"):
        LogDirectory.acquire(tmp_path)  # the child is gone; its end freed nothing
    assert not (tmp_path / CLEAN_MARKER_NAME).exists()
    assert read_published(tmp_path, "orders-0").log_end_offset == 5
    assert finish(parent)[0] == 0, "the exit code counts the calls that a fork could make"
    assert (tmp_path / CLEAN_MARKER_NAME).exists()


def test_a_fork_that_lives_on_does_not_keep_its_dead_parents_lock(tmp_path, start):
    script = """
    directory = LogDirectory.acquire(path)
    child = os.fork()
    if child == 0:
        print("ready", flush=True)
        sys.stdin.read()
        os._exit(0)
    os.waitpid(child, 0)
    """
    parent = start(script)
    parent.send_signal(signal.SIGKILL)
    parent.wait(timeout=60)
    LogDirectory.acquire(tmp_path).release()
    parent.communicate(timeout=60)  # closes the child's standard input: it ends


IN_A_CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
LOOK = """
import sys
from pushrep.replay import FOLLOW, ReplayClient, ReplayRequest
with ReplayClient(sys.argv[1]) as client:
    print([one.is_live for one in client.recordings()], flush=True)
    replay = client.replay(ReplayRequest("orders-0", length=FOLLOW if sys.argv[2] == "follow" else int(sys.argv[2])))
    for record in replay:
        print(record.offset, flush=True)
        if record.offset == 5:
            break
"""


@pytest.mark.parametrize("length", ["6", "follow"])
def test_faults_f4_a_reader_in_another_container_sees_the_writer_and_waits_for_it(tmp_path, length):
    if shutil.which("unshare") is None or subprocess.run([*IN_A_CONTAINER, "true"], capture_output=True).returncode:
        pytest.skip("this user may make no namespace of processes")
    command = [*IN_A_CONTAINER, sys.executable, "-W", "error", "-c", LOOK, str(tmp_path), length]
    with ExitStack() as stack:
        log = stack.enter_context(SegmentLog.open(tmp_path / "orders-0"))
        log.append([b"before"] * 3)
        reader = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(reader.kill)
        assert reader.stdout.readline() == "[True]\n", "it has a writer, whose pid means nothing there"
        assert [reader.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
        log.append([b"after"] * 3)
        assert reader.stdout.read() == "3\n4\n5\n", "it waited for what was missing"
        assert reader.wait() == 0
    with ReplayClient(tmp_path) as client:
        assert [one.is_live for one in client.recordings()] == [False]


KEEP = """
import sys
from pushrep.log import LogConfig, SegmentLog
config = LogConfig(segment_bytes=1000, retention_ms=3_600_000, flush_ms=60_000)
with SegmentLog.open(sys.argv[1], config) as log:
    for _ in range(40):
        log.append(b"two hours old by the record, and recent" * 5, timestamps_ms=int(sys.argv[2]))
    print(len(log.apply_retention()), log.retention_held is not None)
"""


def test_faults_f3_a_step_between_the_machines_own_two_clocks_is_seen_after_a_restart(tmp_path):
    """Its time since the start seems ten days longer, in a namespace: as if the wall clock were set back so far."""
    in_a_namespace = ["unshare", "--time", "--boottime", str(10 * 86_400), "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*in_a_namespace, "true"], capture_output=True).returncode:
        pytest.skip("this user may make no namespace of clocks")

    def kept(*prefix):
        two_hours_old_ms = time.time_ns() // 1_000_000 - 7_200_000
        command = [
            *prefix,
            sys.executable,
            "-W",
            "error",
            "-c",
            KEEP,
            str(tmp_path / "orders-0"),
            str(two_hours_old_ms),
        ]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout

    assert kept() == kept() == "4 False\n"
    assert kept(*in_a_namespace) == "0 True\n"
    assert kept(*in_a_namespace) == "0 True\n", "it is kept over a restart"


def test_a_reader_beside_a_publishing_process_sees_only_whole_states_in_order(tmp_path, start):
    """The writer publishes rows whose numbers depend on each other, and grows the file meanwhile, until it is
    stopped.
    """
    rounds, ended = 60_000, 1 << 30
    script = f"""
    import select
    directory = LogDirectory.acquire(path)
    view = directory.attach("orders-0")
    view.publish(LogOffsets(0, 4, 3, 2), 0)
    print("ready", flush=True)
    sys.stdin.readline()
    n = 0
    while n % 200 or n < {rounds} or not select.select([sys.stdin], [], [], 0)[0]:
        n += 1
        view.publish(LogOffsets(n * 7, n * 7 + 4, n * 7 + 3, n * 7 + 2), n)
        if n % 200 == 0 and n <= {rounds}:
            directory.attach(f"others-{{n}}").publish(LogOffsets(n, n, n, n), 0)
    view.publish(LogOffsets({ended} * 7, {ended} * 7 + 4, {ended} * 7 + 3, {ended} * 7 + 2), {ended})
    """
    writer = start(script)
    reader, late = PublishedReader(tmp_path, "orders-0"), PublishedReader(tmp_path, f"others-{rounds}")
    writer.stdin.write("go\n")
    writer.stdin.flush()
    seen, last, is_told = set(), 0, False
    while last < ended:
        if not is_told and last >= rounds and len(seen) > 10:  # they have run together
            is_told = True
            writer.stdin.write("enough\n")
            writer.stdin.flush()
        state = reader.read()
        assert state is not None, "a valid slot stands at every moment"
        n = state.leader_epoch
        told = (state.log_end_offset, state.flushed_offset, state.high_watermark, state.log_start_offset)
        assert told == (n * 7 + 4, n * 7 + 3, n * 7 + 2, n * 7), "a state that nobody published"
        assert n >= last, "an older state after a newer one"
        assert state.pid == writer.pid
        last = n
        seen.add(n)
    assert finish(writer)[0] == 0
    assert late.read().log_end_offset == rounds, "a record that the grown file got"
