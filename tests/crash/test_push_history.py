"""Appends and reads of several clients with their real-time order, through kills and promotions, must be linearizable.

The judge is Porcupine (a linearizability checker in Go, `make judge`), or a small model in Python if Go is missing. An
append without an answer counts as done if its value is in the log at the end; if not, no read may have seen it.

Limits: one partition; only the leader is read; the old leader is dead before another is promoted, because a leader that
is only cut off may answer reads from its log, which is not promised to be the newest.
"""

import json
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.crash.history_program import next_chain
from tests.crash.test_push_processes import Three, values_of

PROGRAM = Path(__file__).with_name("history_program.py")
JUDGE = Path(__file__).parents[2] / ".cache" / "history_judge" / "judge"
CLIENTS = 4
WAIT_S = 120


class Group(Three):
    """Three members; the one that leads serves clients at `port`."""

    program_path = PROGRAM

    def lead(self, index):
        super().lead(index)
        self.port = int(next(line for line in self.program.lines if line.startswith("leads")).split()[1])


class Client(threading.Thread):
    """One operation after the other, each noted with when it began and when its answer came."""

    def __init__(self, group, number):
        super().__init__(daemon=True)
        self.group, self.number = group, number
        self.operations, self.done = [], 0
        self.over = threading.Event()
        self._file = None

    def run(self):
        count = 0
        while not self.over.is_set():
            count += 1
            value = f"{self.number}-{count}"
            request = "read" if count % 3 == 0 else f"append {value}"
            start = time.monotonic_ns()
            answer = self._ask(request).split()
            end = time.monotonic_ns()
            if request == "read" and answer[0] == "ok":
                found = {"kind": "read", "count": int(answer[1]), "chain": answer[2] if len(answer) > 2 else ""}
                self._note(start, end, found)
            elif request != "read":
                self._note(start, end, {"kind": "append", "value": value, "offset": int(answer[1])} if answer[0] == "ok"
                           else {"kind": "append", "value": value, "offset": None})  # fmt: skip
            if answer[0] == "lost":
                self.over.wait(0.05)

    def _ask(self, request):
        try:
            if self._file is None:
                sock = socket.create_connection(("127.0.0.1", self.group.port), 10)
                sock.settimeout(WAIT_S)
                self._file = sock.makefile("rw")
                sock.close()
            self._file.write(request + "\n")
            self._file.flush()
            if answer := self._file.readline():
                return answer
        except OSError:
            pass
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()
        return "lost"

    def _note(self, start, end, found):
        self.operations.append({"client": self.number, "start": start, "end": end, **found})
        self.done += 1

    def stop(self):
        self.over.set()
        self.join(WAIT_S)
        assert not self.is_alive()
        if self._file is not None:
            self._file.close()


def decided(operations, log):
    """Appends without an answer get the offset at which their value is in the log at the end, and end with all others;
    those that are not there are left out."""
    offsets = {value: offset for offset, value in enumerate(log)}
    latest = max(operation["end"] for operation in operations)
    for operation in operations:
        if operation["kind"] == "append" and operation["offset"] is None:
            if operation["value"] not in offsets:
                continue
            operation = {**operation, "offset": offsets[operation["value"]], "end": latest + 1}  # noqa: PLW2901
        yield operation


def what_is_wrong(operations, log):
    """The model. Returns None, or why this is not the history of one log.

    Offsets give the order of appends, and a read comes after as many appends as it saw: so each operation has one
    place. What remains to check is that no operation that ended before another began is placed after it.
    """
    chains = [""]
    for value in log:
        chains.append(next_chain(chains[-1], value))
    placed = []
    for operation in operations:
        if operation["kind"] == "append":
            if operation["offset"] >= len(log) or log[operation["offset"]] != operation["value"]:
                return f"lost: {operation}"
            placed.append(((operation["offset"] + 1, 0), operation))
        else:
            if operation["count"] >= len(chains) or chains[operation["count"]] != operation["chain"]:
                return f"read what is not in the log: {operation}"
            placed.append(((operation["count"], 1), operation))
    placed.sort(key=lambda pair: pair[0])
    latest_start, starter = -1, None
    for place, operation in placed:
        if operation["end"] < latest_start and place != starter[0]:
            return f"{operation} ended before {starter[1]} began, and comes after it"
        if operation["start"] > latest_start:
            latest_start, starter = operation["start"], (place, operation)
    return None


def test_the_model_sees_what_is_no_history():
    log = ["a", "b"]
    one, two = next_chain("", "a"), next_chain(next_chain("", "a"), "b")
    append = {"client": 1, "start": 1, "end": 2, "kind": "append", "value": "a", "offset": 0}
    other = {"client": 2, "start": 3, "end": 4, "kind": "append", "value": "b", "offset": 1}
    read = {"client": 3, "start": 5, "end": 6, "kind": "read", "count": 2, "chain": two}
    assert what_is_wrong([append, other, read], log) is None
    assert what_is_wrong([append, other, {**read, "count": 1, "chain": one}], log), "a stale read"
    assert what_is_wrong([append, other, {**read, "chain": one}], log), "a read of something else"
    assert what_is_wrong([append, {**other, "offset": 2}], log), "a lost append"
    assert what_is_wrong([{**append, "start": 9, "end": 10}, other], log), "an append before its time"
    assert what_is_wrong([append, other, {**read, "start": 3, "count": 1, "chain": one}], log) is None, "at once"


@pytest.fixture
def group(tmp_path):
    made = Group(tmp_path)
    yield made
    made.stop()


@pytest.mark.slow
def test_appends_and_reads_of_many_clients_are_one_history(group, torture):
    """Killed leaders that come back, promoted members, killed replicas."""
    clients = [Client(group, number) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        for number in range(torture.count(3, 15)):
            wait_for(clients, torture.count(30, 200))
            if number % 3 == 0:
                group.kill_leader()
                group.promote()
            elif number % 3 == 1:
                group.kill_leader()
                group.lead(group.leader)
            else:
                victim = max(group.nodes)
                group.kill_replica(victim)
                group.serve(victim)
        wait_for(clients, torture.count(30, 200))
    finally:
        for client in clients:
            client.stop()
    group.kill_leader()
    log = [value.decode() for _, value in sorted(values_of(group.directory(group.leader) / "orders-0").items())]
    operations = list(decided([one for client in clients for one in client.operations], log))
    assert {one["kind"] for one in operations} == {"append", "read"}
    assert what_is_wrong(operations, log) is None
    if JUDGE.exists():
        lines = "".join(json.dumps(one) + "\n" for one in operations)
        judged = subprocess.run([JUDGE], input=lines, capture_output=True, text=True, timeout=120)
        assert judged.returncode == 0, f"{judged.stdout}{judged.stderr}"


def wait_for(clients, count):
    """Wait until all clients together have done so many more operations."""
    wanted = sum(client.done for client in clients) + count
    deadline = time.monotonic() + WAIT_S
    pause = threading.Event()
    while sum(client.done for client in clients) < wanted:
        assert time.monotonic() < deadline, "the clients get no answers"
        pause.wait(0.01)


@pytest.mark.skipif(not JUDGE.exists(), reason="the judge is not built: `make judge` needs Go")
def test_the_judge_sees_what_is_no_history():
    append = {"client": 1, "start": 1, "end": 2, "kind": "append", "value": "a", "offset": 0}
    stale = {"client": 2, "start": 3, "end": 4, "kind": "read", "count": 0, "chain": ""}
    for operations, code in (([append, stale], 1), ([append, {**stale, "start": 1}], 0)):
        lines = "".join(json.dumps(one) + "\n" for one in operations)
        assert subprocess.run([JUDGE], input=lines, capture_output=True, text=True, timeout=120).returncode == code
