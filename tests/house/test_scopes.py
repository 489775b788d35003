"""A test run whose processes end goes on: each test of it is run once, and the run ends."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTES = """
import os
def note(name):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(name + "\\n")
"""


def run(directory, processes):
    """Run a directory's tests in so many processes; returns the ended program."""
    options = ["-n", str(processes), "-p", "no:randomly", "-p", "no:cacheprovider", "-p", "tests.scopes"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", directory, "-c", "/dev/null", *options, directory],
        cwd=ROOT,
        env={"NOTES": str(directory / "notes"), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize(
    ("processes", "ends_in"),
    [(1, {"test_b.py::1"}), (2, {"test_c.py::1", "test_e.py::0"}), (3, {"test_a.py::0"})],
)
def test_each_test_is_run_once_though_processes_end(tmp_path, processes, ends_in):
    everything = []
    for letter, count in zip("abcdefghij", (2, 2, 2, 1, 1, 1, 3, 1, 1, 1), strict=True):
        text = NOTES
        for n in range(count):
            everything.append(name := f"test_{letter}.py::{n}")
            text += f"def test_{n}():\n    note({name!r})\n" + ("    os._exit(1)\n" if name in ends_in else "")
        (tmp_path / f"test_{letter}.py").write_text(text)
    ended = run(tmp_path, processes)
    assert Counter((tmp_path / "notes").read_text().split()) == Counter(everything), ended.stdout
    assert f"{len(ends_in)} failed, {len(everything) - len(ends_in)} passed" in ended.stdout, ended.stdout


def test_a_run_that_stands_still_ends_with_what_each_process_does(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "from tests.scopes import Standstill\n"
        "def pytest_configure(config):\n"
        "    if not hasattr(config, 'workerinput'):\n"
        "        config.pluginmanager.register(Standstill(10))\n"
    )
    (tmp_path / "test_it.py").write_text("import threading\ndef test_waits():\n    threading.Event().wait()\n")
    ended = run(tmp_path, 1)
    assert ended.returncode == pytest.ExitCode.INTERNAL_ERROR, ended.stdout
    assert "no test began or ended for 10 s; running: test_it.py::test_waits" in ended.stderr
    assert re.search(r'test_it.py", line 3 in test_waits', ended.stderr), ended.stderr
