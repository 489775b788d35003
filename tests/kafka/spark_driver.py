"""A Spark driver in a separate process, with Kafka's connector, and readers of the tables that its queries write."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from importlib.resources import files
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Self

from examples.demo.processes import processes
from tests.kafka.spark_driver_program import ANSWER
from tests.spark_programs import ROOT, WORKERS_PYTHON, kill_session

LIBS = ROOT / ".cache" / "spark-kafka" / "libs"
CONNECTOR = ("spark-sql-kafka-0-10", "spark-token-provider-kafka-0-10", "kafka-clients", "commons-pool2")
DEADLINE_S = 240


class OrderFailed(Exception):
    """An error of an order in the driver, as text."""


def missing_jars() -> str | None:
    """Which of the connector's jars are not there, in words; None if all are."""
    jars = sorted(LIBS.glob("*.jar"))
    missing = [name for name in CONNECTOR if not any(jar.name.startswith(name) for jar in jars)]
    return f"Spark's Kafka connector lacks {', '.join(missing)}: run `make jars`" if missing else None


def environment() -> dict[str, str]:
    """The environment of a separate Spark: this checkout and this Python, on loopback."""
    return os.environ | {
        "PYSPARK_PYTHON": WORKERS_PYTHON,
        "PYSPARK_DRIVER_PYTHON": WORKERS_PYTHON,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def own_spark_home(directory: Path) -> Path:
    """pyspark's files under another roof: the workers of a local cluster keep theirs beside them."""
    home = directory / "spark-home"
    home.mkdir(exist_ok=True)
    for entry in Path(str(files("pyspark"))).iterdir():
        if entry.name != "work" and not (home / entry.name).exists():
            (home / entry.name).symlink_to(entry)
    return home


class SparkDriver:
    """`with SparkDriver(directory) as driver: driver.run(place=..., options=...)`; orders: spark_driver_program.py."""

    def __init__(self, directory: Path, master: str = "local[2]", answer_s: float = DEADLINE_S) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._answer_s = answer_s
        self._begin(directory, master)

    def restart(self) -> None:
        """A new driver in the place of one that has ended."""
        self.__exit__()
        self._begin(self._directory, self._master)

    def _begin(self, directory: Path, master: str) -> None:
        self._directory, self._master = directory, master
        self._errors = (directory / "driver.log").open("w+")
        jars = ",".join(map(str, sorted(LIBS.glob("*.jar"))))
        program = Path(__file__).with_name("spark_driver_program.py")
        own = environment()
        if not master.startswith("local["):
            # Only a cluster of its own has a home of its own: no archive of classes fits another one.
            own |= {"SPARK_HOME": str(own_spark_home(directory))}
        self._process = subprocess.Popen(
            [sys.executable, str(program), master, jars, str(directory / "scratch")],
            cwd=directory, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            text=True, start_new_session=True,
        )  # fmt: skip
        self._answers: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._answer()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        kill_session(self._process)
        self._reader.join(120)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def __getattr__(self, order: str) -> Any:
        """An order and its answer. Raises OrderFailed."""

        def give(**more: Any) -> Any:
            told = {name: str(value) if isinstance(value, Path) else value for name, value in more.items()}
            print(json.dumps({"do": order, **told}), file=self._process.stdin, flush=True)
            return self._answer()

        return give

    @property
    def pid(self) -> int:
        """The process id of the driver's Python."""
        return self._process.pid

    @property
    def elsewhere(self) -> Path:
        """The directory that is viewfs://all/elsewhere for Spark."""
        return self._directory / "scratch-elsewhere"

    def executors(self) -> set[int]:
        """The process ids of a local cluster's executors."""
        return {
            one.pid
            for one in processes()
            if one.session == self._process.pid and one.alive and "CoarseGrainedExecutorBackend" in _command(one.pid)
        }

    def _answer(self) -> Any:
        try:
            line = self._answers.get(timeout=self._answer_s)
        except Empty:
            said = self._said()
            self.restart()  # a late answer would be taken for that of the next order
            raise OrderFailed(f"the driver did not answer within {self._answer_s} s: {said}") from None
        if not line:
            raise OrderFailed(f"the driver has ended: {self._said()}")
        answer = json.loads(line)
        if "error" in answer:
            raise OrderFailed(answer["error"])
        return answer["is"]

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(line.removeprefix(ANSWER))
        self._answers.put("")

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-3000:]


def table(place: Path) -> set[tuple[str, int, int]]:
    """(topic, partition, offset) of each row that a query wrote; duplicates are an error."""
    rows = by_batch(place)
    found = [row for batch in rows.values() for row in batch]
    assert len(found) == len(set(found)), "a row stands twice in the table"
    return set(found)


def by_batch(place: Path) -> dict[int, list[tuple[str, int, int]]]:
    """The same by batch."""
    import pyarrow.dataset as ds

    if not any((place / "table").glob("batch_id=*")):
        return {}
    rows: dict[int, list[tuple[str, int, int]]] = {}
    found = ds.dataset(place / "table", format="parquet", partitioning="hive").to_table()
    for row in found.to_pylist():
        rows.setdefault(row["batch_id"], []).append((row["topic"], row["partition"], row["offset"]))
    return {batch: sorted(found) for batch, found in rows.items()}


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""
