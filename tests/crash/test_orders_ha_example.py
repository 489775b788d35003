"""examples/orders_ha.py: a leader is killed, another takes its orders, and its own report finds each of them once."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "orders_ha.py"


def report_of(root, kills, *more):
    command = [sys.executable, str(EXAMPLE), "--kills", str(kills), "--directory", str(root), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 * (kills + 1), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost: none" in done.stdout
    assert "each once and in order: yes" in done.stdout
    return done.stdout


@pytest.mark.long  # with a broker, tests/kafka/test_shipping_standbys.py looks at the same and at the topic
def test_every_order_is_once_in_the_log_after_the_leader_was_killed(tmp_path):
    report_of(tmp_path / "world", 20)
