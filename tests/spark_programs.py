"""Spark drivers and jobs as programs, each in a separate process session, killed with its JVM and the JVM's workers."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from examples.demo.processes import processes
from tests.class_archives import KAFKA, use

ROOT = Path(__file__).parents[1]
WORKERS_PYTHON = str(Path(__file__).with_name("worker_python"))
"""PYSPARK_PYTHON for the tests' Sparks: worker_forks.py."""
PYTHONS = [python for python in os.environ.get("PUSHREP_SPARK_PYTHONS", "").split(":") if python]
"""With other releases of Spark, each in an environment of its own, as `make spark-releases` names them."""
QUIET = "--conf spark.ui.enabled=false --conf spark.sql.shuffle.partitions=2"
"""Options of spark-submit: a web page that nobody reads, and 200 tasks for a few rows, take longer than the work."""
_GONE_S = 120
# Five batches are enough to die in one and go on.
QUICK_DEMO = f"""\
import sys
from tests.support import kafka_node
from examples.demo import plan
plan.BATCHES_MIN = 5
kafka_node.QUICK_START += {tuple(use(ROOT / ".cache" / "java" / KAFKA))}
sys.executable = {WORKERS_PYTHON!r}
"""
"""Python code that a demo's process runs first. A demo starts its Sparks' Pythons as its own `sys.executable`."""


class SparkPrograms:
    """`with SparkPrograms(place) as programs: programs.start(command)`; none of them is left at the end.

    submit: spark-submit's options, for programs that start Spark by themselves.
    """

    def __init__(self, place, submit=f"--master local[2] --driver-memory 1g {QUIET}"):
        self._place, self._started = place, []
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PYSPARK_PYTHON": WORKERS_PYTHON,
            "PYSPARK_DRIVER_PYTHON": WORKERS_PYTHON,
            "PYSPARK_SUBMIT_ARGS": f"{submit} pyspark-shell",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(place / "scratch"),
        }

    def start(self, command, **environment):
        """Start the program, and return its process; standard output is a pipe, standard error is in
        `process.errors`.
        """
        errors = (self._place / f"errors-{len(self._started)}").open("w+")
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=self._place,
            env=self._environment | environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        process.errors = errors
        self._started.append(process)
        return process

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self._started:
            kill_session(process)
            process.stdout.close()
            process.errors.close()


def said(process):
    """The end of its standard error, for messages."""
    process.errors.seek(0)
    return process.errors.read()[-9000:]


def kill_session(process):
    """kill -9 for a program, its JVM and the JVM's workers, and wait until all are gone; a zombie is."""
    deadline_s = time.monotonic() + _GONE_S
    while alive := [one for one in processes() if one.session == process.pid and one.alive]:
        for member in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
        process.poll()
        assert time.monotonic() < deadline_s, f"alive after kill -9: {alive}"
        time.sleep(0.01)
    process.wait(timeout=_GONE_S)
