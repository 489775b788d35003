"""examples/producer_service.py: what it appends once is not appended twice."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "producer_service.py"


def test_the_second_run_goes_on_where_the_first_ended(tmp_path):
    for began, end in ((0, 1000), (1000, 2000)):
        command = [sys.executable, "-W", "error", str(EXAMPLE), str(tmp_path / "outbox")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            f"orders-{partition}: began at order {began}, the log ends at {end}" for partition in range(2)
        ]
