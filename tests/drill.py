"""The drill: injects faults into a fleet of real parts, and checks alerts and console pages. `make drill`

    tests.fleet ── scraped every 2 s ──▶ Prometheus, docs/observability/alerts.yml ── which alerts fire ─┐
         └── pushrep console ──▶ Chromium ── a picture, and what it says in words ───────────────────────┴▶ report.html

Each row of FAULTS is a fault: it is injected, exactly its alerts fire, the console shows its text, it is repaired, and
no alert fires any more before the next fault. Only the waiting times of the rules are shortened; the report lists that.
"""

import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import click
import jinja2

from pushrep import ReplayClient, ReplayRequest
from pushrep.health import HealthSettings
from pushrep.replay import NodeAccess
from pushrep.replicate import node_status
from pushrep.replicate.certificates import CertificateFiles, mutual_tls
from pushrep.status.metrics import StatusCollector
from tests import conftest  # noqa: F401 - what every JVM is started with
from tests.fleet import Fleet
from tests.integration.certificates import make_certificates, sign
from tests.integration.conftest import World
from tests.integration.outboxes import QUICK, WAIT_S, open_outbox
from tests.integration.prometheus import fired, prometheus, served, up
from tests.integration.test_alerts import SMALL_SEGMENTS, append_segments, fill, rot, small_disk
from tests.integration.test_console import serve
from tests.kafka.cluster import KafkaCluster
from tests.ports import reserve

KAFKA_AWAY_S, STALLED_S = 5, 5
SETTLED_S = 5  # so long it is looked whether something else fires, too: two scrapes, and the rules behind them
TARGETS = 6  # three nodes, three services
PROGRAMS = ("chromium", "prometheus", "openssl", "java")


class Drill:
    """A running fleet with what watches it; a fault's name is that of the method that injects and repairs it."""

    def __init__(self, stack, root):
        self.root, self._stack, self._of_node = root, stack, {}
        self._ports = [stack.enter_context(reserve()) for _ in range(TARGETS)]
        self.world = World(root)
        stack.callback(self.world.close)
        self.kafka = stack.enter_context(KafkaCluster(root.resolve().with_name("broker")))
        self.made = make_certificates(_made(root.resolve().with_name("certificates")), days=400)
        for index in (1, 2, 3):
            sign(self.made, f"node-{index}", days=400)
        files = {name: str(self.made / f"billing.{end}") for name, end in (("cert", "pem"), ("key", "key"))}
        self._tls = mutual_tls(**files, ca=str(self.made / "ca.pem"))
        self.disk = root / "disk"
        self.no_disk = small_disk(stack, self.disk, "64m")
        self.fleet = stack.enter_context(
            Fleet(
                self.world,
                self.kafka.bootstrap_servers,
                node=self._node,
                both={"push": replace(QUICK, tls=self._tls)},
                orders={"directory": self.disk / "orders", "health": self._health(3)},
                payments={"health": self._health(4)},
            )
        )
        for index in (1, 2, 3):
            self._watch_node(index)
        alone = {"topic": "audit", "producer": "audit", "log_config": SMALL_SEGMENTS}
        self.alone = stack.enter_context(
            open_outbox(self.world, directory=root / "audit", health=self._health(5), **alone)
        )
        append_segments(self.alone)
        self.fleet.append(20)

    def _health(self, number):
        return HealthSettings(listen=self.targets[number])

    @property
    def targets(self):
        return [f"127.0.0.1:{held.getsockname()[1]}" for held in self._ports]

    def _node(self, index):
        files = CertificateFiles(*(self.made / name for name in (f"node-{index}.pem", f"node-{index}.key", "ca.pem")))
        return {"certificates": files}

    def _watch_node(self, index):
        collector = StatusCollector(self.world.nodes[index].status)
        self._of_node[index] = served(self._stack, collector, listen=self.targets[index - 1])

    # ---- faults

    @contextmanager
    def broker_killed(self):
        self.kafka.kill()
        self.fleet.orders.append(0, b'{"order": "while the broker is away"}').result(WAIT_S)
        yield
        self.kafka.start()
        self.kafka.wait_ready()
        self.fleet.orders.wait_shipped(WAIT_S)

    @contextmanager
    def replica_killed(self):
        self.fleet.stop_node(1)
        self._of_node[1].close()
        yield
        self.fleet.start_node(1)
        self._watch_node(1)

    @contextmanager
    def disk_filled(self):
        filler = fill(self.disk, 0.97)
        yield
        filler.unlink()

    @contextmanager
    def certificate_near_expiry(self):
        sign(self.made, "node-3", days=2)
        yield
        sign(self.made, "node-3", days=400)

    @contextmanager
    def segment_damaged(self):
        rot(self.alone.log(0))
        yield
        rot(self.alone.log(0))  # as it was

    @contextmanager
    def consumer_stopped(self):
        outbox = self.fleet.orders
        outbox.append_many(0, [bytes(1000)] * 500).result(WAIT_S)
        access = NodeAccess(tls=self._tls, credit_bytes=64 << 10)
        with (
            ReplayClient(str(self.world.nodes[1].address), node=access) as client,
            client.replay(ReplayRequest(recording="orders-0", position=0)),
        ):
            yield


class Fault(NamedTuple):
    """A fault. inject: breaks something, and repairs it after its `yield`. path: a page of the console; says: a pattern
    for it.
    """

    what: str
    how: str
    alerts: frozenset[str]
    path: str
    says: str
    inject: Callable[[Drill], AbstractContextManager[None]]


FAULTS = (
    Fault(
        "Broker killed", "kill -9 of the only broker; the outbox goes on taking records.",
        frozenset({"PushrepKafkaAway"}), "/", "kafka away", Drill.broker_killed,
    ),
    Fault(
        "Replica killed", "Node 1 is gone, and with it its metrics.",
        frozenset({"PushrepReplicaAway", "PushrepDown"}), "/", "replica away", Drill.replica_killed,
    ),
    Fault(
        "Disk filled", "Another's file takes the disk of the outbox to 97 %.",
        frozenset({"PushrepDiskFull"}), "/", "disk full", Drill.disk_filled,
    ),
    Fault(
        "Certificate near expiry", "Node 3 is given a certificate for two days, while it runs.",
        frozenset({"PushrepCertificateExpires"}), "/", "certificate expires", Drill.certificate_near_expiry,
    ),
    Fault(
        "Damaged segment", "One bit of a sealed segment of an outbox without replicas flips.",
        frozenset({"PushrepSegmentDamaged"}), "/", "segment damaged", Drill.segment_damaged,
    ),
    Fault(
        "Consumer stopped", "A consumer replays from node 1, and takes nothing any more.",
        frozenset({"PushrepReplayStalled"}), "/", "replay stalled", Drill.consumer_stopped,
    ),
)  # fmt: skip
NOT_DRILLED = frozenset(
    {
        "PushrepNotLeading", "PushrepUnderMinInsync", "PushrepDamaged", "PushrepLogOffline", "PushrepShippingStopped",
        "PushrepLogWaits", "PushrepDiskFilling", "PushrepFilterGap", "PushrepNobodyLeads",
        "PushrepLogStopped", "PushrepRecordsParked", "PushrepNotAcknowledged", "PushrepFenceWaits", "PushrepSlotWaits",
        "PushrepDirectoryMoved", "PushrepRetentionHeld", "PushrepTableStopped", "PushrepTableWaits",
        "PushrepRowsParked", "PushrepVacuumHeld",
    }
)  # fmt: skip
"""Alerts that no fault of the drill is for; cases beside the rules hold them."""


@dataclass
class Shown:
    """The result of a fault. pictures: by colour scheme. wrong: what differs from what is expected."""

    fault: Fault
    alerts: list[dict] = field(default_factory=list)
    after_s: float = 0.0
    console: list[str] = field(default_factory=list)
    pictures: dict[str, str] = field(default_factory=dict)
    wrong: str = ""

    @property
    def word(self):
        """The text on the console that matches the fault's pattern; None if there is none."""
        found = [re.search(self.fault.says, line) for line in self.console]
        return next((one[0] for one in found if one), None)


SAID = r"""() => {
  const found = [...document.querySelectorAll(".findings li > p")];
  const findings = found.map(one => one.innerText.replace(/\s*\n\s*/g, " · "));
  const heads = [...document.querySelectorAll("#session-table thead th")].map(one => one.innerText);
  const rows = [...document.querySelectorAll("#session-table tbody tr")];
  return [...findings, ...rows.map(row => [...row.cells].map((cell, n) => `${heads[n]} ${cell.innerText}`).join(", "))];
}"""
"""What is wrong, and the replay sessions, in the words of a page."""


def wait_for(what, for_s=WAIT_S):
    """Whether `what` became true within `for_s` seconds."""
    until = time.monotonic() + for_s
    while not (found := what()) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def is_calm(url):
    """Whether all targets answer, and no alert fires."""
    return list(up(url).values()) == ["1"] * TARGETS and not fired(url)


def names(alerts):
    return frozenset(one["labels"]["alertname"] for one in alerts)


def drilled(drill, url, pages, fault):
    """One fault from the first moment to the last."""
    shown, seen = Shown(fault), {}

    def look():
        seen.update({json.dumps(one["labels"]): one for one in fired(url)})
        return names(seen.values())

    if not wait_for(lambda: is_calm(url)):
        shown.wrong = f"before it not all is well: {sorted(names(fired(url)))} fire, {up(url)} answer"
        return shown
    with fault.inject(drill):
        began_s = time.monotonic()
        wait_for(lambda: look() >= fault.alerts)
        shown.after_s = time.monotonic() - began_s
        wait_for(lambda: look() > fault.alerts, SETTLED_S)
        shown.alerts = list(seen.values())
        for scheme, page in pages.items():
            page.goto(page.base + fault.path)
            wait_for(lambda page=page: any(re.search(fault.says, line) for line in page.evaluate(SAID)))
            shown.console = page.evaluate(SAID)
            shown.pictures[scheme] = b64encode(page.screenshot()).decode()
    if names(shown.alerts) != fault.alerts:
        shown.wrong = f"{sorted(fault.alerts)} had to fire, and nothing else"
    elif shown.word is None:
        shown.wrong = f"the console does not say {fault.says!r}"
    return shown


def main(out):
    """Run it; the exit code."""
    from playwright import sync_api

    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        click.echo(f"the drill wants {', '.join(missing)}", err=True)
        return 2
    began_s = time.monotonic()
    out.mkdir(exist_ok=True)
    logging.basicConfig(filename=out / "fleet.log", filemode="w", format="%(asctime)s %(name)s %(message)s")
    node_status.STALLED_MS = 1000 * STALLED_S
    report = out.resolve() / "report.html"
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        stack.callback(os.chdir, Path.cwd())
        os.chdir(place)  # what is shown has short paths
        drill = Drill(stack, _made(Path("fleet")))
        url = stack.enter_context(prometheus(Path(place), drill.targets))
        server = stack.enter_context(serve(drill.root))
        browser = stack.enter_context(sync_api.sync_playwright()).chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        pages = {}
        for scheme in ("light", "dark"):
            pages[scheme] = page = browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 700})
            page.base = server.url
        wait_for(lambda: is_calm(url))
        click.echo(f"all of it runs, {time.monotonic() - began_s:.0f} s")
        found = []
        for fault in FAULTS:
            why_not = drill.no_disk if fault.inject is Drill.disk_filled else None
            found.append(Shown(fault, wrong=why_not) if why_not else drilled(drill, url, pages, fault))
            told = found[-1].wrong or ", ".join(sorted(names(found[-1].alerts)))
            click.echo(f"{fault.what}: {told}, {found[-1].after_s:.1f} s")
        calm = wait_for(lambda: is_calm(url))
        browser.close()
    report.write_text(_page(found, calm=calm, took_s=time.monotonic() - began_s), encoding="utf-8")
    click.echo(f"{report}, {time.monotonic() - began_s:.0f} s")
    return int(not calm or any(one.wrong for one in found))


def _made(directory):
    directory.mkdir(parents=True)
    return directory


def _page(found, **more):
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    parts = {"kafka_s": KAFKA_AWAY_S, "stalled_s": STALLED_S, "names": lambda one: sorted(names(one.alerts))}
    report = environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return report.render(found=found, **parts, **more)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "drill-out")))
