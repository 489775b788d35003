"""`python -m tests.class_archives DIRECTORY`: archives of the classes that the JVMs of Spark and of a broker load.

A JVM that maps its classes from such an archive (JDK 13 and newer: application class-data sharing) starts with less
than half of the processor time; the tests start dozens. tests/conftest.py names the archive to every JVM. A JVM ignores
one that was made for other jars or another Java, and then starts without.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SPARK, KAFKA = "spark.jsa", "kafka.jsa"
SETTINGS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:ReservedCodeCacheSize=240m")
"""A test's JVM lives for seconds: Java's second compiler would never earn back what it costs, half of its CPU time.
Without that one Java keeps 48 MiB of compiled code instead of 240 MiB. The tests' Spark compiles more than that within
minutes, and Java would throw code away and compile it again."""
INTERPRETED = "-Dspark.sql.codegen.wholeStage=false -Dspark.sql.codegen.factoryMode=NO_CODEGEN"
"""Of Spark's JVMs: a plan for a few rows is interpreted. To write, compile and load Java for each took a quarter of the
CPU time of a streaming test. README's examples run as a reader's do, with generated code."""
FORKLESS = (
    "-Dspark.sql.streaming.checkpointFileManagerClass="
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
"""Of Spark's JVMs, too. Spark's own manager starts `readlink` four times a file that it renames: a sixth of a streaming
test's CPU time."""
_TIMEOUT_S = 900


def java_options(archive: Path) -> str:
    """JDK_JAVA_OPTIONS for every JVM of the tests."""
    return " ".join([*SETTINGS, *(f'"{option}"' for option in use(archive))])


def use(archive: Path) -> list[str]:
    """The options of a JVM with this archive; none where it was not made."""
    # Without these log settings a JVM prints into its program's output that an archive does not fit.
    return [f"-XX:SharedArchiveFile={archive}", "-Xlog:disable", "-Xlog:all=error:stderr"] if archive.exists() else []


def make_kafka(archive: Path) -> None:
    """Start a broker and shut it down. Raises RuntimeError."""
    from tests.kafka.cluster import QUICK_START, KafkaCluster

    archive.unlink(missing_ok=True)  # a JVM that has it in use writes none
    with tempfile.TemporaryDirectory(dir=archive.parent) as name:
        made = Path(name) / KAFKA
        jvm = (*QUICK_START, f"-XX:ArchiveClassesAtExit={made}", "-Xlog:disable")
        with KafkaCluster(Path(name) / "cluster", jvm=jvm) as cluster:
            cluster.shut_down()
        if not made.exists():
            raise RuntimeError("the broker left no archive")
        made.replace(archive)  # a JVM that has the one before mapped keeps that


def make_spark(archive: Path) -> None:
    """Run the apply job over a small log, with an archive of what its JVM loaded. Raises RuntimeError."""
    from pushrep import Outbox

    with tempfile.TemporaryDirectory(dir=archive.parent) as name:
        home = Path(name)
        for _ in range(2):
            with Outbox.open(home / "log", "orders", 2, "archive") as box:
                box.append_many(0, [b"value"] * 10)
        job = [
            *(
                sys.executable,
                "-m",
                "spark_jobs.jobs.apply",
                "--path",
                home / "log",
                "--topic",
                "orders",
                "--json",
                "-",
            ),
            *("--sink", home / "table", "--value-format", "string", "--checkpoint", home / "checkpoint"),
            *("--max-records-per-trigger", "11"),
        ]
        own = {
            "JDK_JAVA_OPTIONS": " ".join([*SETTINGS, f'"-XX:ArchiveClassesAtExit={home / SPARK}"', "-Xlog:disable"]),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_SUBMIT_ARGS": "--master local[2] --driver-memory 1g --conf spark.ui.enabled=false pyspark-shell",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(home / "scratch"),
        }
        # Its JVM writes the archive when it ends, after the job, and has the job's output open for so long.
        done = subprocess.run(
            job, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_TIMEOUT_S
        )
        if done.returncode or not (home / SPARK).exists():
            raise RuntimeError(f"the job ended with {done.returncode}: {done.stdout[-2000:]}")
        (home / SPARK).replace(archive)


if __name__ == "__main__":
    directory = Path(sys.argv[1]).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        for making in [pool.submit(make_spark, directory / SPARK), pool.submit(make_kafka, directory / KAFKA)]:
            making.result()
