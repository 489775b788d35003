"""A small fleet: two outboxes, three nodes, a broker, a Spark query. For the console's browser test and the drill.

    orders     of billing, on nodes 1 and 2, shipped to a topic
    payments   of shop, on nodes 2 and 3; the apply job `sums` follows it into a table, and its startpoints

Outboxes and nodes run in this process, broker and query in separate processes.
"""

import json
import sys
from contextlib import ExitStack, suppress

import pytest

from pushrep import Acks, KafkaDestination
from pushrep.outbox.directory_handover import HandoverSocket
from tests.integration.outboxes import WAIT_S, open_outbox, wait_for_all, wait_until
from tests.kafka.plain_client import create_topic, delete_topic
from tests.spark_programs import SparkPrograms, said

CONSUMER = "sums"
NODES = (1, 2, 3)
_STARTS_WITHIN = 4  # times as long as anything else: Spark starts meanwhile
_QUIET = ("spark.ui.enabled=false", "spark.sql.shuffle.partitions=1", "spark.driver.host=127.0.0.1")


class Fleet:
    """`with Fleet(world, servers) as fleet:`; what it started is over at the end.

    world: makes the nodes, on ports that they keep. servers: the broker's. node(index): its settings. both, orders,
    payments: of `Outbox.open`. query: options of the apply job.
    """

    def __init__(self, world, servers, *, node=lambda _: {}, both=None, orders=None, payments=None, query=()):
        self.world, self._servers, self._node, self._query_options = world, servers, node, query
        self._given = {"orders": (both or {}) | (orders or {}), "payments": (both or {}) | (payments or {})}
        self._handovers, self._resources = {}, ExitStack()
        self.events, self.table = world.root / "sums.events", world.root / "sums-table"
        self.marks = world.root / "sums-checkpoint-marks"

    def __enter__(self):
        with self._resources:
            self._resources.callback(lambda: [self.stop_node(index) for index in list(self._handovers)])
            for index in NODES:
                self.start_node(index)
            self.payments = self._open("payments", (2, 3), topic="payments", producer="shop")
            self.query = self._resources.enter_context(SparkPrograms(self.world.root.resolve())).start(
                self._job(), PUSHREP_TESTS_PYTHON=sys.executable
            )
            create_topic(self._servers, "orders", partitions=2)
            self._resources.callback(delete_topic, self._servers, "orders")
            kafka = KafkaDestination(bootstrap_servers=self._servers, retry_backoff_max_ms=200)
            self.orders = self._open("orders", (1, 2), kafka=kafka)
            self._resources = self._resources.pop_all()
        return self

    def __exit__(self, *_):
        self._resources.close()

    def _open(self, name, nodes, **settings):
        given = {
            "directory": self.world.root / name,
            "partitions": 2,
            "acks": Acks.ALL,
            **settings,
            **self._given[name],
        }
        return self._resources.enter_context(open_outbox(self.world, *nodes, **given))

    def _job(self):
        root, table, path = (one.resolve() for one in (self.world.root, self.table, self.payments.directory))
        return [
            *(sys.executable, "-m", "spark_jobs.jobs.apply", "--path", path, "--topic", "payments"),
            *("--consumer", CONSUMER, "--sink", f"{table}/", "--checkpoint", root / "sums-checkpoint"),
            *("--json", root / self.events.name, "--trigger", "500ms", *self._query_options),
            *(part for setting in _QUIET for part in ("--conf", setting)),
        ]

    def start_node(self, index):
        """A node that answers for its directory; where it was stopped, again at its address."""
        self.world.node(index, **self._node(index))
        self._handovers[index] = HandoverSocket(self.world.nodes[index])

    def stop_node(self, index):
        """Stop a node for good."""
        self._handovers.pop(index).close()
        self.world.nodes[index].stop()

    def append(self, count):
        """So many records into each partition; they are held, on disk, shipped and applied when it returns."""
        for outbox in (self.orders, self.payments):
            for partition in range(2):
                outbox.append_many(partition, [b'{"order": %d}' % n for n in range(count)]).result(WAIT_S)
            outbox.flush(WAIT_S)
            wait_for_all(outbox, *(one.address for one in outbox.status().members if not one.is_leader))
        self.orders.wait_shipped(WAIT_S)
        self.wait_applied()

    def wait_applied(self):
        """Wait until the query has applied all records of payments."""
        total = sum(self.payments.log(n).log_end_offset for n in range(2))

        def is_so():
            assert self.query.poll() is None, said(self.query)
            return sum(one["rows"] for one in self.batches()) >= total

        for _ in range(_STARTS_WITHIN):
            with suppress(pytest.fail.Exception):
                return wait_until(is_so, "the query reads all")
        return wait_until(is_so, "the query reads all")

    def batches(self):
        """The query's event of each batch, from whole lines only."""
        lines = self.events.read_text().split("\n")[:-1] if self.events.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == "batch"]
