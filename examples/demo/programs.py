"""The commands of the demo's three programs, and the surroundings that they run in.

producer   python -m examples.demo.producer       a process and not a call: an ordinary user of Outbox, which is killed
stream     python -m spark_jobs.jobs.apply       the job that anyone can run; here with the demo's options
check      python -m examples.demo.check       a JVM of its own, after both are done
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.demo.output import Output
from examples.demo.plan import records_per_trigger, save_every
from examples.demo.processes import Child

REPOSITORY = str(Path(__file__).parents[2])
"""Where `examples` is imported from."""
TOPIC = "flights"
"""The logs are flights-0, flights-1 and flights-2."""

# The three JVMs live for half a minute each: what the second compiler gains comes too late. Measured for the stream
# over all flights: 31 s of processor time instead of 49 s; for the check 9 s instead of 15 s.
_SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


@dataclass(frozen=True, slots=True)
class Pace:
    """What a run appends: so many `flights` of `source`, `rate` records a second."""

    flights: int
    rate: float
    source: str


@dataclass(frozen=True, slots=True)
class DemoSurroundings:
    """Starts the programs of a demo, all in the same surroundings. `cores` are each Spark's.

    master: of a cluster, whose workers see `output` under the same path; None: Spark on this machine alone.
    """

    output: Output
    cores: int
    master: str | None = None

    def producer(self, pace: Pace, topic: str, *more: str) -> Child:
        """Append from the saved position on."""
        return self.start(
            "producer",
            "examples.demo.producer",
            *("--flights", str(self.output.original), "--log", str(self.output.log), "--topic", topic),
            *("--position", str(self.output.position), "--schema", str(self.output.schema)),
            *("--rate", str(pace.rate), "--step", str(max(1, min(300, pace.flights // 100)))),
            *("--save-every", str(save_every(pace.flights)), "--source", pace.source),
            *more,
        )

    def start(self, name: str, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Child:
        """A program of ours; its environment, unless given, is Spark's: without a web page."""
        # -P: the output directory is the working directory, and nothing in it is a module.
        command = [sys.executable, "-P", "-m", module, *arguments]
        environment = self._environment() if environment is None else environment
        paths = os.pathsep.join(filter(None, (REPOSITORY, environment.get("PYTHONPATH"))))
        return self.start_command(name, command, {**environment, "PYTHONPATH": paths})

    def start_command(self, name: str, command: Sequence[str], environment: Mapping[str, str] = os.environ) -> Child:
        """Any program; what it says goes to its file of errors."""
        return Child.start(
            name, command, directory=self.output.root, errors=self.output.errors(name), environment=environment
        )

    def _environment(self) -> dict[str, str]:
        """Spark's temporary files lie where the demo removes them."""
        scratch = str(self.output.scratch)
        # Of a cluster one job would take every core, and the next one wait.
        where = f"local[{self.cores}]" if self.master is None else f"{self.master} --conf spark.cores.max={self.cores}"
        settings = (
            f"--master {where} --driver-memory 1g --conf spark.ui.enabled=false "
            "--conf spark.sql.session.timeZone=UTC --conf spark.sql.shuffle.partitions=2 "
            "--conf spark.ui.showConsoleProgress=false "
            # On a busy machine a Python process may need more than Spark's 15 s to connect.
            "--conf spark.python.authenticate.socketTimeout=120s pyspark-shell"
        )
        return {
            **os.environ,
            "TMPDIR": scratch,
            "SPARK_LOCAL_DIRS": scratch,
            "SPARK_SUBMIT_OPTS": f"-Djava.io.tmpdir={scratch} {_SHORT_LIVED}",
            **({"SPARK_LOCAL_IP": "127.0.0.1"} if self.master is None else {}),
            "PYSPARK_SUBMIT_ARGS": settings,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYTHONUNBUFFERED": "1",
        }


@dataclass(frozen=True, slots=True)
class Programs:
    """The three of `make demo`."""

    output: Output
    surroundings: DemoSurroundings
    pace: Pace

    def producer(self) -> Child:
        """Append from the saved position on."""
        return self.surroundings.producer(self.pace, TOPIC)

    def stream(self) -> Child:
        """Apply the log to the table, from the checkpoint on, until it is stopped."""
        return self.surroundings.start(
            "stream",
            "spark_jobs.jobs.apply",
            *("--path", str(self.output.log), "--topic", TOPIC),
            *("--value-format", "avro", "--value-schema", str(self.output.schema), "--keep", ""),
            *("--sink", str(self.output.table), "--checkpoint", str(self.output.checkpoint)),
            *("--marks", str(self.output.marks)),
            *(
                "--trigger",
                "1s",
                "--max-records-per-trigger",
                str(records_per_trigger(self.pace.flights)),
                "--json",
                "-",
            ),
        )

    def check(self, moments: str) -> Child:
        """Compare the table with the original file."""
        return self.surroundings.start(
            "check",
            "examples.demo.check",
            *("--original", str(self.output.original), "--table", str(self.output.table)),
            *("--log", str(self.output.log), "--topic", TOPIC, "--moments", moments),
        )
