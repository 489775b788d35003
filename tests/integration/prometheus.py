"""A real Prometheus of Debian's package for tests: what it scrapes, what it answers, which alerts fire."""

import json
import re
import subprocess
import tempfile
import urllib.parse
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from prometheus_client import CollectorRegistry

from pushrep.health import HealthServer, HealthSettings
from pushrep.status import PlaceStatus
from tests.ports import reserve

RULES = Path(__file__).parents[2] / "docs" / "observability" / "alerts.yml"


def quick_rules():
    """The rules without their `for`."""
    return re.sub(r"for: \d+m", "for: 0m", RULES.read_text())


@contextmanager
def prometheus(root, targets):
    """Start Prometheus, and yield its URL. It scrapes `targets` every two seconds, evaluates the rules each second, and
    begins without data.
    """
    (root / "alerts.yml").write_text(quick_rules())
    config = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [{"job_name": "pushrep", "static_configs": [{"targets": targets}]}],
    }
    (root / "prometheus.yml").write_text(json.dumps(config))
    with reserve() as held, ExitStack() as stack:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        command = [
            "prometheus",
            f"--config.file={root / 'prometheus.yml'}",
            f"--storage.tsdb.path={tempfile.mkdtemp(dir=root)}",
        ]
        command += [f"--web.listen-address={address}", "--log.level=error"]
        process = stack.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        stack.callback(process.kill)  # what it has stored is nobody's, and it may miss a signal while it starts
        yield f"http://{address}"


def ask(url, path, **arguments):
    """The data of an answer; None while it does not answer."""
    with (
        suppress(OSError),
        urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}", timeout=10) as answer,
    ):
        return json.load(answer)["data"]
    return None


def fired(url):
    """The alerts that fire, as Prometheus tells them."""
    found = ask(url, "alerts") or {"alerts": []}
    return [one for one in found["alerts"] if one["state"] == "firing"]


def firing(url):
    """Their names."""
    return {one["labels"]["alertname"] for one in fired(url)}


def up(url):
    """The targets that were scraped, by whether they answered."""
    found = ask(url, "query", query="up") or {"result": []}
    return {sample["metric"]["instance"]: sample["value"][1] for sample in found["result"]}


def served(stack, *collectors, status=PlaceStatus, listen="127.0.0.1:0"):
    """A server of these collectors' metrics, until `stack` ends."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return stack.enter_context(HealthServer(HealthSettings(listen=listen), status, registry))
