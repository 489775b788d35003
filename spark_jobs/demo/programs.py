"""The commands of the demo's three programs, and the surroundings that they run in.

producer   python -m pushrep.demo.producer       a process and not a call: spark_jobs never imports an Outbox
stream     python -m spark_jobs.jobs.apply       the job that anyone can run; here with the demo's options
check      python -m spark_jobs.demo.check       a JVM of its own, after both are done
"""

import os
import sys
from dataclasses import dataclass

from spark_jobs.demo.output import Output
from spark_jobs.demo.plan import records_per_trigger, save_every
from spark_jobs.demo.processes import Child

TOPIC = "flights"
"""The logs are flights-0, flights-1 and flights-2."""

# The three JVMs live for half a minute each: what the second compiler gains comes too late. Measured for the stream
# over all flights: 31 s of processor time instead of 49 s; for the check 9 s instead of 15 s.
_SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


@dataclass(frozen=True, slots=True)
class Programs:
    """Starts them, all in the same surroundings. `rate` is the producer's, records a second; `cores` are Spark's."""

    output: Output
    flights: int
    rate: float
    cores: int
    source: str

    def producer(self) -> Child:
        """Append from the saved position on."""
        return self._start(
            "producer",
            "pushrep.demo.producer",
            *("--flights", str(self.output.original), "--log", str(self.output.log), "--topic", TOPIC),
            *("--position", str(self.output.position), "--schema", str(self.output.schema)),
            *("--rate", str(self.rate), "--step", str(max(1, min(300, self.flights // 100)))),
            *("--save-every", str(save_every(self.flights)), "--source", self.source),
        )

    def stream(self) -> Child:
        """Apply the log to the table, from the checkpoint on, until it is told to stop."""
        return self._start(
            "stream",
            "spark_jobs.jobs.apply",
            *("--path", str(self.output.log), "--topic", TOPIC),
            *("--value-format", "avro", "--value-schema", str(self.output.schema), "--keep", ""),
            *("--sink", str(self.output.table), "--checkpoint", str(self.output.checkpoint)),
            *("--marks", str(self.output.marks)),
            *("--trigger", "1s", "--max-records-per-trigger", str(records_per_trigger(self.flights)), "--json", "-"),
        )

    def check(self, moments: str) -> Child:
        """Compare the table with the original file."""
        return self._start(
            "check",
            "spark_jobs.demo.check",
            *("--original", str(self.output.original), "--table", str(self.output.table)),
            *("--log", str(self.output.log), "--topic", TOPIC, "--moments", moments),
        )

    def _start(self, name: str, module: str, *arguments: str) -> Child:
        # -P: the output directory is the working directory, and nothing in it is a module.
        return Child.start(
            name,
            [sys.executable, "-P", "-m", module, *arguments],
            directory=self.output.root,
            errors=self.output.errors(name),
            environment=self._environment(),
        )

    def _environment(self) -> dict[str, str]:
        """Spark on this machine alone, without a web page, its temporary files where the demo removes them."""
        scratch = str(self.output.scratch)
        settings = (
            f"--master local[{self.cores}] --driver-memory 1g --conf spark.ui.enabled=false "
            "--conf spark.sql.session.timeZone=UTC --conf spark.sql.shuffle.partitions=2 "
            "--conf spark.ui.showConsoleProgress=false pyspark-shell"
        )
        return {
            **os.environ,
            "TMPDIR": scratch,
            "SPARK_LOCAL_DIRS": scratch,
            "SPARK_SUBMIT_OPTS": f"-Djava.io.tmpdir={scratch} {_SHORT_LIVED}",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_SUBMIT_ARGS": settings,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYTHONUNBUFFERED": "1",
        }
