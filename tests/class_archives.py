"""`python -m tests.class_archives DIRECTORY`: what Spark's JVM loads at each start, once and for all.

A JVM that maps its classes from such an archive (JDK 13 and newer: application class-data sharing) starts with less
than half of the processor time; the tests start dozens. tests/conftest.py names the archive to every JVM. One that was
made for other jars or another Java is left aside by the JVM itself, which then starts as it always did.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SPARK = "spark.jsa"
SETTINGS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""A test's JVM lives for seconds: Java's second compiler would never earn back what it costs, half of its CPU time."""
_TIMEOUT_S = 900


def java_options(archive: Path) -> str:
    """JDK_JAVA_OPTIONS for every JVM of the tests."""
    if not archive.exists():
        return " ".join(SETTINGS)
    # An archive that does not fit is no news, and what a JVM says of itself stands in its program's output.
    return " ".join([*SETTINGS, f'"-XX:SharedArchiveFile={archive}"', "-Xlog:disable", "-Xlog:all=error:stderr"])


def make_spark(archive: Path) -> None:
    """Run the apply job over a small log, with an archive of what its JVM loaded. Raises RuntimeError."""
    from pushrep import Outbox

    with tempfile.TemporaryDirectory() as name:
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
        archive.parent.mkdir(parents=True, exist_ok=True)
        archive.write_bytes((home / SPARK).read_bytes())


if __name__ == "__main__":
    make_spark(Path(sys.argv[1]).resolve() / SPARK)
