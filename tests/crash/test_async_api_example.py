"""examples/async_api.py under load, killed and started again: every order answered with 201 is in the log, once."""

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from pushrep.log import SegmentLog

EXAMPLE = Path(__file__).parents[2] / "examples" / "async_api.py"
WAIT_S = 120
CLIENTS = 16


class Service:
    """The example as a process; its log lines are read by a thread, so that the pipe never fills."""

    def __init__(self, directory, loop):
        command = [sys.executable, str(EXAMPLE), str(directory), "--port", "0", "--loop", loop]
        self.popen = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.lines, self.port = [], None
        for line in self.popen.stderr:
            self.lines.append(line)
            if found := re.search(r"running on http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                break
        else:
            pytest.fail("".join(self.lines))
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.popen.stderr))
        self.reader.start()

    def end(self, number):
        self.popen.send_signal(number)
        code = self.popen.wait(WAIT_S)
        self.reader.join(WAIT_S)
        self.popen.stderr.close()
        return code


class Load:
    """Clients that order one thing after another until the service is gone."""

    def __init__(self, port, name):
        self.kept, self.unknown, self.changed = {}, set(), threading.Condition()
        self.threads = [threading.Thread(target=self.order, args=(port, f"{name}-{n}")) for n in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    def order(self, port, name):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        number = 0
        while True:
            item = f"{name}-{number}"
            number += 1
            try:
                body = json.dumps({"item": item})
                connection.request("POST", f"/orders/{name}", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                said = json.loads(answer.read())
            except (OSError, ValueError, http.client.HTTPException):
                self.unknown.add(item)
                connection.close()
                return
            with self.changed:
                if answer.status == 201:
                    self.kept[item] = (said["partition"], said["offset"])
                else:
                    self.unknown.add(item)
                self.changed.notify_all()

    def wait_for(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.kept) >= count, WAIT_S), "orders are answered"

    def join(self):
        for thread in self.threads:
            thread.join(WAIT_S)


@pytest.mark.slow
def test_every_201_is_in_the_log_once(tmp_path, torture):
    directory, kept, unknown = tmp_path / "orders-outbox", {}, set()
    for number in range(torture.count(2, 20)):
        service = Service(directory, ("uvloop", "asyncio")[number % 2])
        load = Load(service.port, f"run{number}")
        load.wait_for(150)
        assert service.end(signal.SIGKILL) == -signal.SIGKILL
        load.join()
        kept |= load.kept
        unknown |= load.unknown
    service = Service(directory, "uvloop")
    load = Load(service.port, "last")
    load.wait_for(10)
    code = service.end(signal.SIGTERM)  # uvicorn answers what is under way, and closes the outbox
    load.join()
    assert code in {0, -signal.SIGTERM}, "".join(service.lines)
    kept |= load.kept
    held = Counter()
    for partition in range(3):
        with SegmentLog.open_reader(directory / f"orders-{partition}") as log:
            for record in log.records(0):
                item = json.loads(record.value)["order"]["item"]
                held[item] += 1
                assert kept.get(item, (partition, record.offset)) == (partition, record.offset)
    assert kept.keys() <= held.keys(), f"answered with 201 and lost: {sorted(kept.keys() - held.keys())[:5]}"
    assert max(held.values()) == 1
    assert held.keys() <= kept.keys() | unknown | load.unknown
    assert "still open" not in "".join(service.lines), "the service closed it"
