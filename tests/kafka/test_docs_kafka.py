"""The examples of the documentation that need a broker run unchanged, with a real one."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.house import doc_blocks
from tests.kafka.plain_client import create_topic, delete_topic

pytestmark = [pytest.mark.java, pytest.mark.slow]
DOCS = Path(__file__).parents[2] / "docs"
TOPICS = {
    "kafka.md": {"orders": {"partitions": 4, "retention_ms": -1}},
    "clients.md": {"payments": {"partitions": 4}, "startpoints": {"cleanup_policy": "compact"}},
}
"""What the examples of a page expect to be there."""


def pages():
    for path in sorted(DOCS.rglob("*.md")):
        if any(block.needs_kafka for block in doc_blocks.blocks_of(path)):
            yield path


@pytest.mark.parametrize("path", list(pages()), ids=lambda path: path.name)
def test_examples_run_against_a_broker(broker, path, tmp_path):
    with ExitStack() as stack:
        for topic, settings in TOPICS.get(path.name, {}).items():
            create_topic(broker.bootstrap_servers, topic, **settings)
            stack.callback(delete_topic, broker.bootstrap_servers, topic)
        done = subprocess.run(
            [sys.executable, "-W", "error", doc_blocks.__file__, str(path), f"--with-kafka={broker.bootstrap_servers}"],
            cwd=tmp_path, capture_output=True, text=True, timeout=280,
        )  # fmt: skip
    assert done.returncode == 0, f"{path.name}: {done.stdout[-3000:]}\n{done.stderr[-5000:]}"
