"""The demo as a user runs it, with fewer flights: the same programs, the same kills, the same check."""

import json
import signal
import subprocess
import sys
import time

import pytest

from examples.demo.processes import processes
from tests.programs import mentioning
from tests.spark_programs import QUICK_DEMO

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

FLIGHTS = 6000
SHORT = ("--limit", str(FLIGHTS), "--rate", "800", "--seed", "20130101")


def command(out, *options):
    program = f"{QUICK_DEMO}from examples.demo.__main__ import demo; demo()"
    return [sys.executable, "-c", program, "--out", str(out), *SHORT, *options]


def descendants_of(pid):
    """Everything alive that `pid` or its descendants started, by parent."""
    everyone = list(processes())
    found = {pid}
    while more := {p.pid for p in everyone if p.parent in found} - found:
        found |= more
    return [p for p in everyone if p.pid in found - {pid} and p.alive]


def full_run(out):
    done = subprocess.run(command(out, "--json"), capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"
    told = json.loads(done.stdout)
    assert told == json.loads((out / "summary.json").read_text())
    assert (told["flights"], told["kept"]) == (FLIGHTS, FLIGHTS)
    assert (told["missing"], told["twice"], told["foreign"], told["carriers_wrong"]) == (0, 0, 0, [])
    assert (told["producer_kills"], told["stream_kills"]) == (3, 1)
    assert told["replayed"] == told["dropped"] == told["appended"] - FLIGHTS
    assert told["replayed"] > 100, "the kills must make records enter twice"
    assert mentioning(out) == [], "a program was left behind"
    page = (out / "report.html").read_text()
    assert "Every flight is in the table once" in page
    assert 'src="http' not in page, "self-contained"
    assert page.count(": producer, at ") + page.count(": Spark&#x27;s JVM, at ") == 16, "4 kills, 2 charts, 2 widths"
    assert len(page) < 300_000
    assert (out / "picture.svg").read_text().startswith("<svg")
    assert json.loads((out / "flights.avsc").read_text())["name"] == "Flight"
    assert not (out / "scratch").exists()


def interrupted_run(out):
    """Press Ctrl-C as soon as there is a JVM; returns the output."""
    demo = subprocess.Popen(command(out), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        # The stream's JVM has a driver for parent; the demo's own child is only asked for its version.
        while not any(p.name == "java" and p.parent != demo.pid for p in descendants_of(demo.pid)):
            assert demo.poll() is None, demo.stdout.read()
            time.sleep(0.05)
        demo.send_signal(signal.SIGINT)
        said, _ = demo.communicate(timeout=240)
    finally:
        demo.kill()
        demo.wait()
        demo.stdout.close()
    assert demo.returncode == 130, said
    return said


def test_flights_come_out_once_and_a_second_run_replaces_the_first_and_ends_at_ctrl_c(tmp_path):
    out = tmp_path / "demo-out"
    full_run(out)
    (out / "notes.txt").write_text("mine")
    said = interrupted_run(out)
    assert "replacing what the last demo left" in said
    assert "nothing is left running" in said
    assert mentioning(out) == [], "a program was left behind"
    assert not (out / "report.html").exists(), "the old report would tell of another run"
    assert (out / "notes.txt").read_text() == "mine"
