"""A real Prometheus over a real run: every panel of the board shows data, and a killed replica fires its alerts.

Skipped where prometheus is not installed. Its rules fire at once here (`for` is 0): how long they wait is held by the
cases beside them.
"""

import json
import shutil
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.request import urlopen

import pytest

from filtering import ReplayFilter, StreamMetadata
from pushrep import KafkaDestination, ReplayClient, ReplayRequest
from pushrep.health import HealthSettings
from pushrep.outbox import RecordRefused
from pushrep.replicate.certificates import CertificateFiles
from pushrep.status import JobStatus
from pushrep.status.metrics import StatusCollector
from tests.integration.certificates import make_certificates
from tests.integration.outboxes import open_outbox, wait_until
from tests.integration.prometheus import ask, firing, prometheus, served, up
from tests.integration.test_alerts import promtool
from tests.ports import reserve

BOARD = Path(__file__).parents[2] / "docs" / "observability" / "dashboard.json"
# a node's certificate, a job with one gap, a Kafka that is not there
OF_THE_WORLD = {"PushrepCertificateExpires", "PushrepFilterGap", "PushrepKafkaAway"}

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed: apt-get install prometheus"
)


def queries():
    """(panel, expression) of the board."""
    panels = [panel for panel in json.loads(BOARD.read_text())["panels"] if panel["type"] != "row"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]


def shows(url, expression):
    """Whether a query returns data that are numbers."""
    found = ask(url, "query", query=expression.replace("$__rate_interval", "10s"))
    return bool(found) and any(sample["value"][1] != "NaN" for sample in found["result"])


class Job:
    """A job with a filter that sees every record twice, and one gap."""

    def __init__(self):
        self._filter = ReplayFilter()

    @property
    def counts(self):
        return {"orders": self._filter.counts}

    def read(self, offset):
        for _ in range(2):
            self._filter.admit(StreamMetadata(1, 0, offset + (offset > 3)).pack())


def run_until(stop, outbox, job, client):
    """Append, be refused, replay and filter."""
    number = 0
    while not stop.wait(0.05):
        outbox.append(0, b"%d" % number).result(60)
        with suppress(RecordRefused):
            outbox.append(0, "no bytes")
        list(client.replay(ReplayRequest(recording="orders-0", position=number, length=1)))
        job.read(number)
        number += 1


@needs_prometheus
def test_every_panel_shows_data_of_a_real_run_and_a_killed_replica_fires_its_alerts(world, tmp_path):
    made = make_certificates(tmp_path)
    world.node(1)
    world.node(2)
    world.node(3, certificates=CertificateFiles(made / "node.pem", made / "node.key", made / "ca.pem"))
    stop = threading.Event()
    with ExitStack() as stack:
        brokers, port = stack.enter_context(reserve()), stack.enter_context(reserve()).getsockname()[1]
        kafka = KafkaDestination(bootstrap_servers=f"127.0.0.1:{brokers.getsockname()[1]}")
        health = HealthSettings(listen=f"127.0.0.1:{port}")
        outbox = stack.enter_context(open_outbox(world, 1, 2, kafka=kafka, open_timeout_s=2, health=health))
        nodes = [served(stack, StatusCollector(node.status), status=node.status) for node in world.nodes.values()]
        job = Job()
        jobs = served(stack, StatusCollector(lambda: JobStatus(name="sums", counts=job.counts)))
        client = stack.enter_context(ReplayClient(str(world.nodes[1].address)))
        thread = threading.Thread(target=run_until, args=(stop, outbox, job, client))
        thread.start()
        stack.callback(thread.join)
        stack.callback(stop.set)
        targets = [f"127.0.0.1:{port}", *(str(one.address) for one in (*nodes, jobs))]
        url = stack.enter_context(prometheus(tmp_path, targets))
        missing = dict.fromkeys(queries())

        def all_show():
            for query in [one for one in missing if shows(url, one[1])]:
                del missing[query]
            return not missing

        with suppress(pytest.fail.Exception):
            wait_until(all_show, "every panel shows data")
        assert list(missing) == []
        for target in targets:  # of a service, nodes and a job, as they serve it
            with urlopen(f"http://{target}/metrics") as answer:
                promtool("check", "metrics", input=answer.read().decode())
        # One that can't be scraped in time is down for that moment.
        wait_until(lambda: set(up(url).values()) == {"1"} and firing(url) <= OF_THE_WORLD, "nothing else fires")
        world.nodes[2].stop()
        nodes[1].close()
        seen = []  # what fires beside those of the world; the rules are asked again until it is right

        def fires_of_the_kill():
            seen[:] = sorted(firing(url) - OF_THE_WORLD)
            return seen == ["PushrepDown", "PushrepReplicaAway"]

        with suppress(pytest.fail.Exception):
            wait_until(fires_of_the_kill, "these and no other")
        assert seen == ["PushrepDown", "PushrepReplicaAway"]
