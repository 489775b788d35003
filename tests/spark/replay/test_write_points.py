"""A driver that is killed after any of its writes, or while a task writes: the next driver continues, and each row is
there once.

All queries of a release run in one Spark, each stops at another write, and one kill -9 ends them. A reader then sees
whole batches. Replaced rows of other batches: test_apply_job.py, tables_program.py.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kafka.cluster import KafkaCluster, missing
from tests.kafka.spark_driver import missing_jars
from tests.postgresql import running_server
from tests.spark.replay.matrix import Log, Release
from tests.spark_programs import PYTHONS

pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(3600)]

ASIDE = ("file aside", "removed")  # linked to its name, on a local disk
BATCH_OF_FILES = ("removed", "rows aside", "removed", "renamed", "marks")
BATCH_OF_A_DATABASE = ("INSERT", "INSERT", "DELETE", "COMMIT")
POINTS = {
    "path": ("removed", *ASIDE, *BATCH_OF_FILES, *BATCH_OF_FILES),
    "catalog": ("CREATE", "ALTER", "INSERT", "marks", "ALTER", "INSERT", "marks"),
    "sqlite": ("CREATE", "CREATE", "COMMIT", "CREATE", "COMMIT", *BATCH_OF_A_DATABASE, *BATCH_OF_A_DATABASE),
    "topic": (*ASIDE, "removed", *ASIDE, "sent", "marks", "sent", "marks"),
    "delta": ("made", "rows", "marks", "rows", "marks"),
}
"""The writes of a query's first two batches, in order."""
POINTS |= {"postgresql": POINTS["sqlite"], "iceberg": POINTS["delta"]}
OWN_FAULT_OF_4_1 = re.compile(r"shown by a second start; the first: .*scala\.collection\.IterableOps\.map")
"""SPARK-57438, over Kafka: docs/spark.md."""


def check_each(release, sinks, number):
    """Kill behind each write of these sinks, 0 in a task; and one behind the last, to which no query comes."""
    forms = {sink: "relay" if sink == "topic" else "foreachBatch" for sink in sinks}
    numbers = {sink: range(sink == "topic", len(POINTS[sink]) + 2) for sink in sinks}
    cells = [(forms[sink], "key", sink, str(n)) for sink in sinks for n in numbers[sink]]
    found = dict(release.through(cells))
    reached = {
        sink: tuple(filter(None, (release.stopped_behind.get(cell) for cell in cells if cell[2] == sink)))
        for sink in sinks
    }
    assert reached == {sink: POINTS[sink] for sink in sinks}, found
    for (*_, sink, n), said in found.items():
        ends = "shown" if int(n) <= len(POINTS[sink]) else "it ended by itself"
        right = said.endswith(ends) or (number.startswith("4.1.") and OWN_FAULT_OF_4_1.match(said))
        assert right, f"{sink}, behind write {n}: {said}"
    print(number, *sinks, f"{len(found)} places", flush=True)  # noqa: T201 - for who ran it


@pytest.mark.parametrize(
    "sinks", [("path", "catalog"), ("sqlite", "postgresql"), ("topic",), ("delta", "iceberg")], ids="-".join
)
@pytest.mark.parametrize("python", PYTHONS or [sys.executable])
def test_kill_9_behind_each_write(python, sinks, tmp_path, torture):
    """This Python's Spark in the long form; and each release that `make spark-releases` names."""
    if not torture.is_long and not PYTHONS:
        pytest.skip("each write of seven sinks takes minutes of both cores: make torture runs it")
    if why := missing() or missing_jars():
        pytest.skip(why)
    asked = [python, "-c", "import pyspark; print(pyspark.__version__)"]
    number = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    with KafkaCluster(tmp_path / "broker") as broker, running_server() as postgresql:
        log = Log(broker.bootstrap_servers, tmp_path / "files")
        release = Release(Path(python), number, tmp_path, log, postgresql)
        if lacks := [why for sink in sinks if (why := release.lacks(sink)) is not None]:
            pytest.skip(f"{number}: {lacks[0]}")
        check_each(release, sinks, number)
