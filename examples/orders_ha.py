"""The same order service three times on one machine: the leader is killed, another one continues, no order is lost.

    python examples/orders_ha.py [--kills 3] [--kafka HOST:PORT] [--directory DIR]     starts all of it, kills, reports
    python examples/orders_ha.py service DIR INDEX PORT [HOST:PORT]                    one instance; that starts three

    client ─ POST /orders {"number", "text"} ─▶ instance ─ leads? ─▶ Outbox ─▶ 200, once ALL acknowledged it
           ◀──────────── 503, or no answer ──┘ no: the client asks the next one, with the same number

The client numbers its orders and sends one until it is answered. The number travels as the record's source offset,
so an order that is sent again is found in the log (`last_metadata`) and appended once. Leaders are killed with SIGKILL,
every second one with its node. The report reads the leader's log into a table and counts each order; with --kafka the
leader ships to the topic `orders` there, and the report counts what a consumer with a filter reads of it.
"""

import argparse
import http.client
import json
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from rich.live import Live
from rich.table import Table

from filtering import ReplayFilter, StreamMetadata, producer_id
from pushrep import KafkaDestination, Outbox, OutboxConfig, PushrepError, SegmentLog
from pushrep.outbox import RecordRefused, StandbyState

TOPIC, MEMBERS = "orders", 3
CLIENT = producer_id(application="shop", stream=TOPIC, source="client-1", destination="orders")
TAKEOVER_AFTER_MS = 3_000
CONFIG = OutboxConfig(linger_ms=0, takeover_after_ms=TAKEOVER_AFTER_MS, takeover_pause_ms=0)
ANSWER_S = 5.0


# ---- one instance of the service


class Service:
    """Stands by, answers orders while it leads, and says 503 while it does not."""

    def __init__(self, data: Path, kafka: str | None) -> None:
        self._data, self._outbox, self.state = data, None, "waiting"
        self._destination = None if kafka is None else KafkaDestination(bootstrap_servers=kafka)
        self._one_order = threading.Lock()  # orders of one client come one after the other
        self._changed = threading.Condition()

    def run(self) -> None:
        """For ever."""
        while True:
            with Outbox.stand_by(
                self._data, TOPIC, 1, "orders", kafka=self._destination, on_state=self.on_state, config=CONFIG
            ) as outbox:
                self._outbox = outbox
                with self._changed:
                    self._changed.wait_for(lambda: self.state == StandbyState.DEPOSED.value)
                self._outbox = None

    def on_state(self, state: StandbyState, _why: str) -> None:
        with self._changed:
            self.state = state.value
            self._changed.notify_all()

    def unshipped(self) -> int:
        """Records that the topic has not acknowledged yet."""
        outbox = self._outbox
        if outbox is None or self._destination is None:
            return 0
        return outbox.lag()[f"kafka:{TOPIC}"].records

    def take(self, number: int, text: str) -> bool:
        """Whether the order is in the log, and with ALL at enough members."""
        outbox = self._outbox
        if outbox is None:
            return False
        with self._one_order:
            try:
                known = outbox.last_metadata(CLIENT, 0)
                if known is not None and number <= known:
                    return self._is_held(outbox)
                value = json.dumps({"number": number, "text": text}).encode()
                outbox.append(0, value, metadata=StreamMetadata(CLIENT, 0, number)).result(ANSWER_S)
            except RecordRefused:  # it is on its way since an earlier try
                return self._is_held(outbox)
            except PushrepError:
                return False
            return True

    def _is_held(self, outbox: Outbox) -> bool:
        """Of an order that is in this log: whether enough members have it by now."""
        log, until = outbox.log(0), time.monotonic() + ANSWER_S
        end = log.log_end_offset
        while log.high_watermark < end and time.monotonic() < until and self._outbox is outbox:
            time.sleep(0.01)
        return log.high_watermark >= end


def serve(data: Path, port: int, kafka: str | None) -> None:
    service = Service(data, kafka)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, {"state": service.state, "unshipped": service.unshipped()})

        def do_POST(self) -> None:
            order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            is_taken = service.take(order["number"], order["text"])
            self.answer(200 if is_taken else 503, {"state": service.state})

        def answer(self, code: int, said: dict[str, object]) -> None:
            body = json.dumps(said).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log no requests."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    service.run()


# ---- the client


class Client:
    """Orders, one after the other, each until it is answered."""

    def __init__(self, ports: list[int]) -> None:
        self.answered, self.gaps, self.leader = 0, [], None
        self._ports, self._stop = ports, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        at, number, last = 0, 1, None
        while not self._stop.is_set():
            if ask(self._ports[at], {"number": number, "text": f"order {number}"})[0] == 200:
                now, before = time.monotonic(), last
                self.answered, self.leader, last = number, at, now
                if before is not None and now - before > 1:
                    self.gaps.append(now - before)
                number += 1
            else:
                at = (at + 1) % len(self._ports)
                self._stop.wait(0.05)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


def ask(port: int, order: dict[str, object] | None = None) -> tuple[int, dict[str, Any]]:
    """(the answer's code, the instance's own state); 0 without an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2 * ANSWER_S)
    try:
        connection.request("POST" if order else "GET", "/orders", json.dumps(order).encode() if order else None)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError):
        return 0, {"state": "dead"}
    finally:
        connection.close()


# ---- all of it


class World:
    """Three machines, as far as one can be three: a node and an instance each, in directories of their own."""

    def __init__(self, root: Path, kafka: str | None) -> None:
        self.root, self.kafka = root, kafka
        self._held = [socket.socket() for _ in range(2 * MEMBERS)]
        for one in self._held:  # bound, so that nobody else is given the port, also while its process is dead
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in self._held]
        self.node_ports, self.ports = ports[:MEMBERS], ports[MEMBERS:]
        self.processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}

    def data(self, index: int) -> Path:
        return self.root / f"data-{index}"

    def start_node(self, index: int) -> None:
        address = f"127.0.0.1:{self.node_ports[index]}"
        command = [
            "-m",
            "pushrep.cli.main",
            "replica",
            "serve",
            str(self.data(index)),
            "--listen",
            address,
            "--allow",
            "any",
        ]
        process = self._start("node", index, command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit(f"node {index} does not start:\n{(self.root / f'node-{index}.log').read_text()}")

    def start_service(self, index: int) -> None:
        command = [__file__, "service", str(self.root), str(index), str(self.ports[index])]
        self._start("service", index, [*command, *([] if self.kafka is None else [self.kafka])])

    def _start(self, kind: str, index: int, command: list[str], **pipes: object) -> "subprocess.Popen[bytes]":
        with (self.root / f"{kind}-{index}.log").open("ab") as log:
            pipes = {"stdout": log, **pipes}
            process = subprocess.Popen([sys.executable, *command], stderr=log, **pipes)  # noqa: S603
        self.processes[kind, index] = process
        return process

    def create(self) -> None:
        members = ",".join(f"127.0.0.1:{port}" for port in self.node_ports)
        command = [sys.executable, "-m", "pushrep.cli.main", "outbox", "create", str(self.data(0)), "--topic", TOPIC]
        subprocess.run([*command, "--members", members], check=True, stdout=subprocess.DEVNULL)  # noqa: S603

    def kill(self, kind: str, index: int) -> None:
        process = self.processes.pop((kind, index))
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def end(self) -> None:
        for kind, index in sorted(self.processes, reverse=True):  # services first
            with suppress(OSError):
                self.kill(kind, index)
        for one in self._held:
            one.close()

    def log_of(self, index: int) -> Path:
        (log,) = self.data(index).glob(f"*/{TOPIC}-0")
        return log


def picture(world: World, client: Client, doing: str) -> Table:
    table = Table(title=doing)
    for name in ("instance", "state", "node"):
        table.add_column(name)
    for index, port in enumerate(world.ports):
        node = "running" if ("node", index) in world.processes else "dead"
        table.add_row(str(index), ask(port)[1]["state"], node)
    gaps = ", ".join(f"{gap:.1f} s" for gap in client.gaps)
    table.caption = f"{client.answered:,} orders acknowledged; without an answer for {gaps or '-'}"
    return table


def run(root: Path, kills: int, kafka: str | None) -> int:
    world = World(root, kafka)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        if kafka is not None:
            make_topic(kafka)
        for index in range(MEMBERS):
            world.start_node(index)
        world.create()
        for index in range(MEMBERS):
            world.start_service(index)
        client = Client(world.ports)
        with Live(picture(world, client, "starting"), transient=not sys.stdout.isatty()) as live:

            def until(doing: str, more: int) -> None:
                wanted = client.answered + more
                while client.answered < wanted:
                    live.update(picture(world, client, doing))
                    time.sleep(0.2)

            until("starting", 50)
            for number in range(kills):
                leader = client.leader
                assert leader is not None, "somebody answered"
                world.kill("service", leader)
                if number % 2:
                    world.kill("node", leader)
                until(f"kill -9 of instance {leader}{' and its node' if number % 2 else ''}", 50)
                if number % 2:
                    world.start_node(leader)
                world.start_service(leader)
                until(f"instance {leader} is back", 50)
        client.end()
        leader = client.leader
        assert leader is not None, "somebody answered"
        while ask(world.ports[leader])[1].get("unshipped"):
            time.sleep(0.2)
        world.end()
        shipped = None if kafka is None else orders_in(kafka)
        return report(world.log_of(leader), client, root / "orders.sqlite", shipped)
    finally:
        world.end()


def make_topic(kafka: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.create_topics([NewTopic(TOPIC, 1)])[TOPIC].result(30)


def orders_in(kafka: str) -> list[int]:
    """The numbers of the topic's orders, as a consumer with a filter reads them, up to the topic's end."""
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": "report", "enable.partition.eof": True})
    filter_, numbers = ReplayFilter(), []
    try:
        consumer.assign([TopicPartition(TOPIC, 0, 0)])
        while True:
            message = consumer.poll(1)
            if message is None:
                continue
            if message.error() is not None:
                if message.error().code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the client's name of it
                    return numbers
            elif filter_.admit(message.key(), 0):
                numbers.append(json.loads(message.value())["number"])
    finally:
        consumer.close()


def report(log: Path, client: Client, table: Path, shipped: list[int] | None) -> int:
    """The log's orders in a table, one row a record; 1 if any was lost, is there twice, or out of order, there or in
    what was shipped.
    """
    database = sqlite3.connect(table)
    database.execute("CREATE TABLE orders (offset INTEGER PRIMARY KEY, number INTEGER, text TEXT)")
    with SegmentLog.open_reader(log, isolation="written") as reader:
        rows = [(one.offset, *json.loads(one.value or b"").values()) for one in reader.records(0)]
    database.executemany("INSERT INTO orders VALUES (?, ?, ?)", rows)
    database.commit()
    numbers = [number for (number,) in database.execute("SELECT number FROM orders ORDER BY offset")]
    database.close()
    lost = sorted(set(range(1, client.answered + 1)) - set(numbers))
    is_right = not lost and numbers == list(range(1, len(numbers) + 1))
    print(f"acknowledged: {client.answered:,}; in the table: {len(numbers):,}; lost: {lost or 'none'}")
    print(f"each once and in order: {'yes' if is_right else 'NO'}")
    if shipped is not None:
        is_shipped = shipped == numbers
        print(f"in the topic: {len(shipped):,}, {'the same, each once and in order' if is_shipped else 'NOT the same'}")
        is_right = is_right and is_shipped
    print(f"times without an answer: {', '.join(f'{gap:.1f} s' for gap in client.gaps) or 'none above 1 s'}")
    return 0 if is_right else 1


def main() -> int:
    if sys.argv[1:2] == ["service"]:
        root, index, port, *kafka = sys.argv[2:]
        serve(Path(root) / f"data-{index}", int(port), kafka[0] if kafka else None)
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3, help="how often a leader is killed")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a broker without a topic `orders`: it is made")
    parser.add_argument("--directory", type=Path, help="where it all lies; a temporary one, which goes, by default")
    options = parser.parse_args()
    with ExitStack() as stack:
        if options.directory is None:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orders-ha-")))
        else:
            root = options.directory
            root.mkdir(parents=True)
        return run(root, options.kills, options.kafka)


if __name__ == "__main__":
    sys.exit(main())
