"""A Spark job as a process: started, read, killed with its JVM and the JVM's workers, whatever they were doing."""

import json
import os
import subprocess
import sys

from tests.spark_programs import ROOT, WORKERS_PYTHON, kill_session

_LIBS = ROOT / ".cache" / "spark-kafka" / "libs"
_CONNECTOR = ("spark-sql-kafka-0-10", "spark-token-provider-kafka-0-10", "kafka-clients", "commons-pool2")
_QUIET = ("spark.ui.enabled=false", "spark.sql.shuffle.partitions=2", "spark.driver.host=127.0.0.1")


def connector():
    """(the value of spark.jars, why Spark's Kafka connector can't be used or None)."""
    jars = sorted(_LIBS.glob("*.jar"))
    missing = [name for name in _CONNECTOR if not any(jar.name.startswith(name) for jar in jars)]
    why = f"Spark's Kafka connector lacks {', '.join(missing)}: run `make jars`" if missing else None
    return ",".join(map(str, jars)), why


class SparkJob:
    """`python -m spark_jobs.jobs.<job> arguments`, in a separate process group; `events` has its events."""

    def __init__(self, place, job, *arguments):
        place.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {
            "PYSPARK_PYTHON": WORKERS_PYTHON,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PYSPARK_SUBMIT_ARGS": "--master local[2] --driver-memory 1g pyspark-shell",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(place / "scratch"),
        }
        self._events, self._errors = place / "events.jsonl", place / "errors"
        confs = (part for setting in _QUIET for part in ("--conf", setting))
        command = [sys.executable, "-m", f"spark_jobs.jobs.{job}", "--json", str(self._events), *confs, *arguments]
        with self._errors.open("ab") as errors:
            self.process = subprocess.Popen(
                command, cwd=place, env=environment, stdin=subprocess.DEVNULL,
                stdout=errors, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def is_running(self):
        return self.process.poll() is None

    @property
    def events(self):
        """The events of this job and of earlier ones in this place, without an incomplete last line."""
        lines = self._events.read_text().splitlines(keepends=True) if self._events.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n") and line.startswith("{")]

    @property
    def told(self):
        return self._errors.read_text(errors="replace")[-4000:]

    def wait(self, timeout_s):
        """Wait for the job to end by itself; returns its exit code."""
        return self.process.wait(timeout_s)

    def kill(self):
        """kill -9 for Python, its JVM and the JVM's workers; all are gone when this returns."""
        kill_session(self.process)
