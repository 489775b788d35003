"""Pages of the console with 1,000 partitions and 200 nodes: from the request to the whole answer, and its bytes.

The outbox is a real one, open in this process and asked anew for each page. The nodes are one node's real status under
200 names. Time is this process' processor time: it answers for the console, and for the outbox that is asked.
"""

import http.client
import time
from collections.abc import Mapping
from typing import Any
from unittest import mock

from benchmarks.harness import AtMost, scratch, spread
from pushrep.cli.status import look_at
from pushrep.console import watch
from pushrep.console.access import ConsoleAccess
from pushrep.console.web import ConsoleServer, ConsoleSettings
from pushrep.log import LogConfig
from pushrep.outbox import Outbox, OutboxConfig
from pushrep.outbox.directory_handover import HandoverSocket
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.sockets import Address

PARTITIONS, NODES = 1_000, 200
MS_MAX, KB_MAX = 150, 300
SMALL = LogConfig(preallocate_bytes=0)
PAGES = {
    "fleet": "/",
    "outbox": "/outbox/outbox",
    "node": "/node/node-0",
    "records": "/outbox/outbox/records?from=0&payloads=shown",
    "startpoints": "/outbox/outbox/startpoints",
}


def run(rounds: int) -> dict[str, Any]:
    """Each page, asked when the look before it is too old to serve."""
    times: dict[str, list[float]] = {name: [] for name in PAGES}
    sizes: dict[str, list[float]] = {name: [] for name in PAGES}
    with scratch("console") as root:
        settings = NodeSettings(address=Address("127.0.0.1", 0), allow=frozenset({"any"}), log_config=SMALL)
        with ReplicaNode(root / "node", settings) as node, HandoverSocket(node):
            status = look_at(str(root / "node"))[0]
        with Outbox.open(
            root / "outbox", "orders", PARTITIONS, "billing", config=OutboxConfig(log_config=SMALL)
        ) as outbox:
            for partition in range(PARTITIONS):
                outbox.append_many(partition, [b"x" * 100] * 20)
            outbox.flush()
            parts = look_at(str(root / "outbox"), with_partitions=True)[0]["parts"]
            status["logs"] = [one | {"outbox_id": outbox.identity.outbox_id, "topic": "orders"} for one in parts]

            def look(place: str, *rest: Any, **more: Any) -> list[Mapping[str, Any]]:
                if place.startswith("node-"):
                    return [status | {"place": place, "address": f"10.0.0.{place[5:]}:7400"}]
                return look_at(place, *rest, **more)

            settings = ConsoleSettings(access=ConsoleAccess(listen=Address("127.0.0.1", 0)))
            places = [str(root / "outbox"), *(f"node-{number}" for number in range(NODES))]
            with (
                mock.patch.object(watch, "look_at", look),
                ConsoleServer(watch.PlaceWatch(places, every_s=3600), settings) as server,
            ):
                for turn in range(rounds + 1):
                    for name, path in PAGES.items():
                        time.sleep(1.1)
                        began = time.process_time()
                        size = _get(server, path)
                        milliseconds = (time.process_time() - began) * 1000
                        if turn:
                            times[name].append(milliseconds)
                            sizes[name].append(size / 1000)
    return {
        f"Console, {PARTITIONS:,} partitions, {NODES} nodes: processor time of a page": _row(
            times, "ms", MS_MAX, rounds
        ),
        "Console: bytes of a page": _row(sizes, "kB", KB_MAX, rounds),
    }


def _row(values: dict[str, list[float]], unit: str, limit: float, rounds: int) -> dict[str, Any]:
    worst = max(values, key=lambda name: max(values[name]))
    rates = {name: spread(found) for name, found in values.items()} | {"limit": spread([limit])}
    ratios = {"limit": spread([value / limit for value in values[worst]]) | AtMost(1).cells()}
    return {"unit": unit, "rounds": rounds, "ours": worst, "rates": rates, "ratios": ratios, "notes": []}


def _get(server: ConsoleServer, path: str) -> int:
    connection = http.client.HTTPConnection(*server.address, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    if answer.status != 200:
        raise AssertionError(f"{path}: {answer.status}")
    return len(body)
