"""Many workers with slots in one directory: gunicorn and celery workers that are killed at random."""

import contextlib
import http.client
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from uuid import UUID

import psutil
import pytest

from filtering import StreamMetadata
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import BadArgument, ForkedProcess
from pushrep.kafka.progress import PartitionProgress, ShippingProgress, write_progress
from pushrep.log import SegmentLog
from pushrep.outbox import NoFreeSlot, Outbox, slot_directories
from pushrep.outbox.status import workers_status
from tests.programs import PUSHREP
from tests.support.forks import code_in_fork
from tests.support.outbox_arguments import outbox_arguments
from tests.unit.gated_disk import until

ROOT = Path(__file__).parents[2]
WAIT_S = 120
KILLS = 2


def open_slot(path, **more):
    return Outbox.open_slot(path, "orders", 1, "p", **outbox_arguments(**more))


def held_in(directory):
    """(slot, offset) -> value of every record of every slot; the PIDs of the slots."""
    held, pids = {}, set()
    for path in slot_directories(directory):
        with SegmentLog.open_reader(path / "orders-0") as log:
            for record in log.records(0):
                held[path.name, record.offset] = record.value
                pids.add((path.name, StreamMetadata.unpack(record.key).pid))
    return held, pids


def check(held, pids, kept):
    assert len(pids) == len({slot for slot, _ in pids}) == len({pid for _, pid in pids}), "one PID a slot, for ever"
    for place, value in kept.items():
        assert held[place] == value, "what was acknowledged is where it was said to be"
    counts = Counter(held.values())
    assert all(counts[value] == 1 for value in kept.values()), "and nowhere else"


def test_each_worker_gets_a_slot_and_a_freed_one_is_taken_again(tmp_path):
    first, second = open_slot(tmp_path), open_slot(tmp_path)
    assert [first.directory.name, second.directory.name] == ["slot-0", "slot-1"]
    with pytest.raises(NoFreeSlot, match="all 2 slots") as refused:
        open_slot(tmp_path, slots=2)
    assert refused.value.pids == (os.getpid(), os.getpid())
    pid = first.pid
    first.append(0, b"a").result(60)
    first.close()
    with open_slot(tmp_path) as again:
        assert (again.directory.name, again.pid) == ("slot-0", pid)
        assert again.append(0, b"b").result(60) == 1
    second.close()
    with pytest.raises(BadArgument, match="directory above its slots"):
        open_slot(tmp_path / "slot-0")
    with pytest.raises(BadArgument, match="slots: give a whole number between 1 and"):
        open_slot(tmp_path, slots=0)


def test_a_fork_is_shown_the_way(tmp_path):
    with open_slot(tmp_path) as outbox:

        def child():
            with pytest.raises(ForkedProcess, match=r"Outbox\.open_slot"):
                outbox.append(0, b"")
            with open_slot(tmp_path) as own:
                own.append(0, b"mine").result(60)
                assert own.directory.name == "slot-1"

        assert code_in_fork(child) == 0


def worker(directory, number):
    with open_slot(directory, slots=8) as outbox:
        outbox.append(0, b"%d" % number).result(60)


def test_processes_of_multiprocessing_that_start_at_once_get_each_their_own(tmp_path):
    spawn = multiprocessing.get_context("fork")
    workers = [spawn.Process(target=worker, args=(tmp_path, number)) for number in range(6)]
    for one in workers:
        one.start()
    for one in workers:
        one.join(WAIT_S)
    assert [one.exitcode for one in workers] == [0] * 6
    assert sorted(held_in(tmp_path)[0].values()) == [b"%d" % number for number in range(6)]


def run(*command):
    done = subprocess.run([PUSHREP, *map(str, command)], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_commands_see_all_slots_as_one(tmp_path):
    with open_slot(tmp_path) as first, open_slot(tmp_path) as second:
        for number, outbox in enumerate((first, second)):
            outbox.append(0, b"value %d" % number).result(60)
        assert run("replay", tmp_path, "orders", "--format", "raw").splitlines() == ["value 0", "value 1"]
        found = json.loads(run("status", tmp_path, "--json"))["places"]
        assert [Path(one["directory"]).name for one in found] == ["slot-0", "slot-1"]
        assert {one["pid"] for one in found} == {os.getpid()}
    at = {0: PartitionProgress(0, 0, 0)}
    write_progress(
        REAL_FILESYSTEM, tmp_path / "slot-1", {"orders": ShippingProgress(topic_id=UUID(int=1), partitions=at)}
    )
    found = json.loads(run("status", tmp_path, "--json"))["places"]
    assert [one["pid"] for one in found] == [None, None]
    assert [[to["records"] for to in one["destinations"]] for one in found] == [[1], [1]], "what dead workers left"


def test_faults_b8_who_answers_for_the_workers_names_a_slot_that_nobody_ships(tmp_path):
    with open_slot(tmp_path) as first:
        open_slot(tmp_path).close()
        with open_slot(tmp_path) as second:
            second.append(0, b"left").result(60)
            assert second.directory.name == "slot-1"
        told = lambda: [(one.name, one.subject) for one in workers_status(first.status()).problems()]  # noqa: E731
        at = {0: PartitionProgress(1, 0, 0)}  # the topic that the other worker ships to
        write_progress(
            REAL_FILESYSTEM, tmp_path / "slot-0", {"orders": ShippingProgress(topic_id=UUID(int=1), partitions=at)}
        )
        assert told() == [], "another worker may ship it in a moment"
        for path in [tmp_path / "slot-1", *(tmp_path / "slot-1").rglob("*")]:
            os.utime(path, (0, 60))
        assert told() == [("slot_waits", "slot-1")]


def workers_of(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


class Clients:
    """Threads that post numbers until they are stopped. kept: the numbers that were answered with 201."""

    def __init__(self, port, count=8):
        self.port, self.kept, self.changed, self.stop = port, {}, threading.Condition(), threading.Event()
        self.threads = [threading.Thread(target=self.post, args=(n * 1_000_000,)) for n in range(count)]
        for thread in self.threads:
            thread.start()

    def post(self, number):
        while not self.stop.is_set():
            number += 1
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
            with contextlib.suppress(OSError, ValueError, http.client.HTTPException), contextlib.closing(connection):
                connection.request("POST", f"/orders/{number}")
                answer = connection.getresponse()
                said = json.loads(answer.read())
                with self.changed:
                    if answer.status == 201:
                        self.kept[said["slot"], said["offset"]] = b"%d" % number
                        self.changed.notify_all()
            self.stop.wait(0.01)

    def wait_for_more(self, more):
        with self.changed:
            wanted = len(self.kept) + more
            assert self.changed.wait_for(lambda: len(self.kept) >= wanted, WAIT_S)

    def end(self):
        self.stop.set()
        for thread in self.threads:
            thread.join(WAIT_S)


@pytest.mark.slow
def test_gunicorn_workers_that_are_killed_lose_nothing_that_was_acknowledged(tmp_path, torture):
    outbox, draw = tmp_path / "outbox", torture.random("gunicorn")
    command = [sys.executable, "-m", "gunicorn", "--workers", "3", "--threads", "4", "--bind", "127.0.0.1:0"]
    environment = os.environ | {"OUTBOX": str(outbox), "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
    with (tmp_path / "log").open("w+") as log:
        served = subprocess.Popen([*command, "worker_api:app"], cwd=tmp_path, env=environment, stderr=log)
        try:
            said = (tmp_path / "log").read_text
            until(lambda: "Listening at" in said() or served.poll() is not None, "gunicorn listens")
            assert served.poll() is None, said()
            clients = Clients(int(re.search(r"Listening at: http://127\.0\.0\.1:(\d+)", said())[1]))
            for _ in range(torture.count(KILLS, 40)):
                clients.wait_for_more(40)
                if found := workers_of(served):
                    draw.choice(found).kill()
            clients.wait_for_more(40)
            clients.end()
        finally:
            served.send_signal(signal.SIGTERM)
            served.wait(WAIT_S)
    assert len(clients.kept) > 100
    check(*held_in(outbox), clients.kept)


@pytest.mark.slow
def test_celery_workers_that_are_killed_lose_nothing_that_was_acknowledged(tmp_path, torture):
    (tmp_path / "queue").mkdir()
    environment = os.environ | {"CELERY_ROOT": str(tmp_path), "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}
    fill = f"from celery_program import order\nfor n in range({torture.count(1000, 3000)}): order.delay(n)"
    subprocess.run([sys.executable, "-c", fill], cwd=tmp_path, env=environment, check=True, timeout=WAIT_S)
    command = [sys.executable, "-m", "celery", "-A", "celery_program", "worker", "--concurrency", "3", "-l", "warning"]

    def kept():
        lines = [line for path in tmp_path.glob("kept-*") for line in path.read_text().splitlines(keepends=True)]
        words = [line.split() for line in lines if line.endswith("\n")]
        return {(slot, int(offset)): number.encode() for slot, offset, number in words}

    with (tmp_path / "log").open("w+") as log:
        served = subprocess.Popen(
            [*command, "--without-mingle", "--without-gossip", "--without-heartbeat"],
            cwd=tmp_path, env=environment, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            workers = 3 + torture.count(KILLS, 20)
            until(lambda: len(list(tmp_path.glob("kept-*"))) >= workers or served.poll() is not None, "others go on")
            assert served.poll() is None, (tmp_path / "log").read_text()
            before = len(kept())
            until(lambda: len(kept()) >= before + 30, "and on")
        finally:
            for one in [*workers_of(served), psutil.Process(served.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            served.wait(WAIT_S)
    check(*held_in(tmp_path / "outbox"), kept())


def test_no_outbox_is_made_beside_slots(tmp_path):
    """Such an outbox would lock out every worker at its next start: a directory of slots can't be an outbox, too."""
    open_slot(tmp_path / "workers").close()
    with pytest.raises(BadArgument, match=r"Outbox\.open_slot"):
        Outbox.open(tmp_path / "workers", "orders", 1, "p")
    open_slot(tmp_path / "workers").close()
