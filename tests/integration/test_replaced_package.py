"""An installation is replaced while programs run from it: what is open goes on without the package's files."""

import subprocess
import sys
from shutil import copytree, ignore_patterns

import pytest

from tests.house.figures import PACKAGES, ROOT
from tests.ports import reserve

BEGIN = """
import sys, threading, urllib.error, urllib.request
from pathlib import Path

site, work, listen = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
sys.path.insert(0, str(site))
import pushrep
from pushrep import KafkaDestination, LogConfig, Outbox, OutboxConfig, ReplayClient, ReplayRequest
from pushrep.health import HealthSettings
from pushrep.outbox.control import ask
from pushrep.outbox.errors import StandbyCancelled
from pushrep.replay import TO_END
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address

assert Path(pushrep.__file__).is_relative_to(site), pushrep.__file__
kafka = KafkaDestination(bootstrap_servers="127.0.0.1:9", retry_backoff_ms=1, retry_backoff_max_ms=2)
config = OutboxConfig(
    log_config=LogConfig(preallocate_bytes=0, segment_bytes=4096),
    push=PushSettings(backoff_min_ms=1, backoff_max_ms=2),
    open_timeout_s=0.1,
    close_timeout_s=0.1,
    block_ms=10,
)
more = {"kafka": kafka, "health": HealthSettings(listen=listen), "config": config}

def ours():
    return {name for name in sys.modules if name.split(".")[0] in ("filtering", "partitioner", "pushrep", "spark_jobs")}

"""
EVERY_PATH = """
def get(path):
    try:
        with urllib.request.urlopen(f"http://{listen}{path}") as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.read()

node = ReplicaNode(work / "node", NodeSettings(address=Address("127.0.0.1", 0), allow=frozenset({"any"})))
outbox = Outbox.open(work / "outbox", "orders", 1, "billing", replicas=[str(node.address)], **more)
client = ReplayClient(work / "outbox", logs=[outbox.log(0)])
at_open = ours()
for package in list(site.iterdir()):
    package.rename(site / f"was-{package.name}")
for n in range(200):
    receipt = outbox.append(0, b"%d" % n + bytes(100), headers=[("x", b"y")])
    receipt.result(60)
assert len(list((work / "outbox/orders-0").glob("*.log"))) > 1, "segments are rolled"
assert len(list(client.replay(ReplayRequest("orders-0", length=TO_END)))) == 200
assert outbox.lag() and outbox.status().as_dict() and node.status().as_dict()
(one,) = ask(work / "outbox", "status", {"first": 0, "count": 1})["destinations"]
assert one["trouble"], "no broker is there"
assert ask(work / "outbox", "metrics") and b"pushrep_build_info" in get("/metrics")
assert b"problems" in get("/readyz") and b"leads" in get("/leader")
node.stop()
outbox.append(0, b"alone")
receipt = outbox.append(0, b"alone")
for call in (lambda: receipt.result(0.01), lambda: outbox.append(1, b""), lambda: outbox.flush(0.01)):
    try:
        call()
    except pushrep.PushrepError as error:
        print(type(error).__name__)
client.close()
try:
    outbox.close()
except pushrep.PushrepError as error:
    print(type(error).__name__)
print(*(ours() - at_open))
print(*at_open)
"""
STANDING_BY = """
cancel = threading.Event()
try:
    Outbox.stand_by(work, "orders", 1, "billing", cancel=cancel, on_state=lambda _, __: cancel.set(), **more)
except StandbyCancelled:
    print(*ours())
"""


@pytest.fixture
def told(tmp_path):
    """Runs a story in a program of its own; the lines that it printed."""
    held = reserve()

    def run(story):
        words = [str(tmp_path / "site"), str(tmp_path), f"127.0.0.1:{held.getsockname()[1]}"]
        done = subprocess.run([sys.executable, "-c", BEGIN + story, *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    for package in PACKAGES:
        copytree(ROOT / package, tmp_path / "site" / package, ignore=ignore_patterns("__pycache__"))
    with held:
        yield run


def test_what_is_open_goes_on_and_a_standby_takes_over_without_the_files_of_the_package(told):
    (waiting,) = told(STANDING_BY)
    *met, new, at_open = told(EVERY_PATH)
    assert met == ["ReceiptTimeout", "RecordRefused", "ReceiptTimeout", "DeliveryFailed"], "a member is away"
    assert not new, "imported after it was open"
    missing = set(at_open.split()) - set(waiting.split()) - {"pushrep.replicate.replica_node"}
    assert not missing, "a standby would import them when it takes over"
