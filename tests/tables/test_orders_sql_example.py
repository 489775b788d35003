"""examples/orders_sql.py under load, killed and started again: each order's event is in the outbox, once."""

import http.client
import json
import re
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import text

from filtering import ReplayFilter
from tests.programs import PythonProgram
from tests.tables.conftest import engine_of, open_outbox

EXAMPLE = Path(__file__).parents[2] / "examples" / "orders_sql.py"
WAIT_S = 120


class Service:
    """The example as a process; its log lines are read by a thread, so that the pipe never fills."""

    def __init__(self, directory, dsn):
        self.process = PythonProgram(EXAMPLE, directory, "--dsn", dsn, "--port", "0", has_errors=True)
        said = []
        for line in self.process.stderr:
            said.append(line)
            if found := re.search(r"running on http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                break
        else:
            pytest.fail("".join(said))
        self.reader = threading.Thread(target=self.process.stderr.read)
        self.reader.start()

    def end(self, number):
        with self.process:
            self.process.send_signal(number)
            self.process.wait(WAIT_S)
            self.reader.join(WAIT_S)

    def ask(self, method, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            assert answer.status < 300, answer.read()
            return json.loads(answer.read())
        finally:
            connection.close()

    def order_until_gone(self, customer, answered):
        while True:
            try:
                answered.append(self.ask("POST", f"/orders/{customer}")["id"])
            except (OSError, http.client.HTTPException, ValueError):
                return


@pytest.mark.slow
def test_each_order_has_its_event_once_through_kills(dsn, tmp_path, torture):
    rng, answered = torture.random("orders"), []
    for _ in range(torture.count(3, 100)):
        service = Service(tmp_path, dsn)
        clients = [threading.Thread(target=service.order_until_gone, args=(f"c{n}", answered)) for n in range(4)]
        wanted = len(answered) + rng.randrange(1, 60)
        for client in clients:
            client.start()
        while len(answered) < wanted and any(client.is_alive() for client in clients):
            clients[0].join(0.002)
        service.end(signal.SIGKILL)
        for client in clients:
            client.join()
    service = Service(tmp_path, dsn)
    counts = service.ask("GET", "/orders")
    while counts["events"] < counts["orders"]:
        counts = service.ask("GET", "/orders")
    service.end(signal.SIGTERM)
    engine = engine_of(dsn)
    with engine.connect() as connection:
        placed = set(connection.execute(text("SELECT id FROM orders")).scalars())
    engine.dispose()
    readers, events = ReplayFilter(), Counter()
    with open_outbox(tmp_path / "outbox", partitions=4, producer="orders") as outbox:
        for n in range(4):
            for record in outbox.log(n).records(0):
                assert readers.admit(dict(record.headers)["stream-metadata"])
                events[json.loads(record.value)["order"]] += 1
    assert set(answered) <= placed
    assert set(events) == placed
    assert set(events.values()) == {1}
