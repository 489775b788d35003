"""examples/orders_ha.py: a leader is killed, another takes its orders, and its own report finds each of them once."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "orders_ha.py"


@pytest.mark.slow
def test_every_order_is_once_in_the_log_after_the_leader_was_killed(tmp_path, torture):
    kills = 20 if torture.is_long else 1
    command = [sys.executable, str(EXAMPLE), "--kills", str(kills), "--directory", str(tmp_path / "world")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 * (kills + 1), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost: none" in done.stdout
    assert "each once and in order: yes" in done.stdout
