"""examples/web_api.py with two replicas as processes: its machine is lost, a replica is promoted, nothing answered with
201 is lost; the old leader is refused, adopted by a node, and is a copy again.
"""

import http.client
import json
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from pushrep.env import REAL_FILESYSTEM
from pushrep.outbox import read_identity
from tests.programs import PUSHREP, PythonProgram

EXAMPLE = Path(__file__).parents[2] / "examples" / "web_api.py"
WAIT_S = 120
CUSTOMERS = ("ada", "bob", "eve", "kim")


class Process:
    """A process; its first line of output means that it is ready."""

    def __init__(self, *command):
        self.program = PythonProgram(*command, has_errors=True)
        self.first_line = self.program.stdout.readline()

    def address(self):
        found = re.search(r"127\.0\.0\.1:\d+", self.first_line)
        if found is None:
            pytest.fail(f"{self.first_line!r} {self.program.stderr.read()}")
        return found[0]

    def end(self, number):
        with self.program:
            self.program.send_signal(number)
            errors = self.program.stderr.read()
        return self.program.returncode, errors


class Shop:
    """Processes below one directory; all are ended."""

    def __init__(self, root):
        self.root, self.processes = root, []

    def start(self, *command):
        process = Process(*command)
        self.processes.append(process)
        return process

    def node(self, name, listen="127.0.0.1:0"):
        command = ("-m", "pushrep.cli.main", "replica", "serve", self.root / name)
        return self.start(*command, "--listen", listen, "--allow", "any")

    def serve(self, directory, *replicas):
        options = [option for address in replicas for option in ("--replica", address)]
        options += ["--port", "0", "--replica-lag-max-ms", "1000", "--timeout-s", "90"]
        return self.start(EXAMPLE, directory, *options)

    def stop(self):
        for process in self.processes:
            if process.program.returncode is None:
                process.end(signal.SIGKILL)


@pytest.fixture
def shop(tmp_path):
    made = Shop(tmp_path)
    yield made
    made.stop()


def call(address, path, body=None):
    """(status, what was answered)."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"http://{address}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


class Customers:
    """Each orders one thing after another, until the service is gone; `kept` is what was answered with 201."""

    def __init__(self, address, first):
        self.address, self.kept = address, {name: [] for name in CUSTOMERS}
        self.changed = threading.Condition()
        self.threads = [threading.Thread(target=self.order, args=(name, first)) for name in CUSTOMERS]
        for thread in self.threads:
            thread.start()

    def order(self, name, number):
        while True:
            try:
                status, _ = call(self.address, f"/orders/{name}", {"number": number})
            except (OSError, ValueError, http.client.HTTPException):  # it is gone
                return
            with self.changed:
                if status == 201:
                    self.kept[name].append(number)
                self.changed.notify_all()
            number += 1
            time.sleep(0.02)

    def wait_for(self, each):
        """Wait until each client has so many."""
        with self.changed:
            assert self.changed.wait_for(lambda: all(len(kept) >= each for kept in self.kept.values()), WAIT_S)

    def join(self):
        for thread in self.threads:
            thread.join(WAIT_S)
        return self.kept


def wait_until(what, why):
    pause = threading.Event()
    for _ in range(WAIT_S * 20):
        if what():
            return
        pause.wait(0.05)
    pytest.fail(f"never so: {why}")


def run(*command):
    done = subprocess.run([PUSHREP, *map(str, command)], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def missing(address, kept):
    """The numbers that were answered with 201 and are missing."""
    gone = {}
    for name, numbers in kept.items():
        status, orders = call(address, f"/orders/{name}")
        assert status == 200
        held = [order["number"] for order in orders]
        assert held == sorted(set(held)), "in order, each once"
        gone[name] = set(numbers) - set(held)
    return gone


@pytest.mark.slow
def test_what_was_answered_with_201_outlives_the_machine(shop):
    nodes = [shop.node(f"copy-{n}") for n in (1, 2)]
    old = shop.root / "orders-outbox"
    service = shop.serve(old, *[node.address() for node in nodes])
    wait_until(lambda: call(service.address(), "/health")[0] == 200, "it takes orders")
    customers = Customers(service.address(), 0)
    customers.wait_for(10)
    service.end(signal.SIGKILL)
    kept = customers.join()
    outbox_id = read_identity(REAL_FILESYSTEM, old).outbox_id
    lost = shop.root / "the lost machine's disk"
    shutil.move(old, lost)

    copy = shop.root / "copy-1" / outbox_id
    output = run("promote", copy, "--catch-up", "--depose", "--timeout-s", 60)
    assert f"open the service's Outbox on {copy}" in output
    replicas = re.findall(r'"(127[^"]*)"', output.splitlines()[-1])
    assert replicas == [nodes[1].address()]
    service = shop.serve(copy, *replicas)
    wait_until(lambda: call(service.address(), "/health")[0] == 200, "the promoted one takes orders")
    assert missing(service.address(), kept) == {name: set() for name in CUSTOMERS}
    customers = Customers(service.address(), 1_000_000)
    customers.wait_for(5)
    service.end(signal.SIGKILL)
    for name, numbers in customers.join().items():
        kept[name] += numbers

    refused = shop.serve(lost, *[node.address() for node in nodes])
    while refused.first_line:  # the others took longer to answer than it waits for them: it is there, and takes nothing
        assert call(refused.address(), "/orders/ada", {"number": 3_000_000})[0] == 503, "the old leader serves nobody"
        refused.end(signal.SIGKILL)
        refused = shop.serve(lost, *[node.address() for node in nodes])
    code, errors = refused.end(0)  # by itself
    assert code != 0
    assert "NotLeader" in errors
    third = shop.node("copy-3")
    assert outbox_id in run("replica", "adopt", shop.root / "copy-3", lost)
    service = shop.serve(copy, *replicas, third.address())
    wait_until(lambda: call(service.address(), "/health")[1].get("in_sync") == 3, "three copies again")
    assert missing(service.address(), kept) == {name: set() for name in CUSTOMERS}
    assert call(service.address(), "/orders/ada", {"number": 2_000_000})[0] == 201
    code, errors = service.end(signal.SIGINT)
    assert code == 0, errors
