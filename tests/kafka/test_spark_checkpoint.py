"""apply-checkpoint and Spark's own Kafka source, with a real broker: the query goes on at the named offset."""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from filtering import StreamMetadata
from tests.kafka.plain_client import create_topic, plain_producer
from tests.spark_programs import WORKERS_PYTHON

pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
LIBS = ROOT / ".cache" / "spark-kafka" / "libs"
CONNECTOR = ("spark-sql-kafka-0-10", "spark-token-provider-kafka-0-10", "kafka-clients", "commons-pool2")


@pytest.fixture
def connector():
    pytest.importorskip("pyspark")
    jars = sorted(LIBS.glob("*.jar"))
    missing = [name for name in CONNECTOR if not any(jar.name.startswith(name) for jar in jars)]
    if missing:
        pytest.skip(f"Spark's Kafka connector is not whole, {', '.join(missing)} not there: run `make jars`")
    return ",".join(map(str, jars))


@pytest.fixture
def topic(broker):
    """Two partitions of ten records each; those at 5 and 6 are those at 3 and 4 once more."""
    create_topic(broker.bootstrap_servers, name := f"checkpoint-{uuid.uuid4().hex[:8]}", partitions=2)
    producer = plain_producer(broker.bootstrap_servers)
    for partition in range(2):
        for n in range(10):
            key = StreamMetadata(5, partition, n if n < 5 else n - 2).pack()
            producer.produce(name, b"%d" % n, key, partition=partition)
    assert producer.flush(60) == 0
    return name


def test_a_kafka_source_goes_on_at_the_named_offset(broker, topic, connector, tmp_path):
    program = ROOT / "tests" / "spark" / "kafka_stream_program.py"
    own = os.environ | {
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": WORKERS_PYTHON,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "SPARK_LOCAL_DIRS": str(tmp_path / "scratch"),
        "PYSPARK_SUBMIT_ARGS": "--driver-memory 1g --conf spark.ui.enabled=false pyspark-shell",
    }
    command = [sys.executable, str(program), str(tmp_path), broker.bootstrap_servers, topic, connector]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second, third, last, table = json.loads((tmp_path / "runs.json").read_text())
    assert sorted(map(tuple, first)) == [(partition, n) for partition in range(2) for n in range(10)]
    assert sorted(map(tuple, second)) == [(1, n) for n in range(3, 10)]
    assert sorted(map(tuple, third)) == [(0, 8), (0, 9)]
    assert last == [], "once"
    kept = [0, 1, 2, 3, 4, 7, 8, 9]
    again = [[1, n, str(n) if n >= 4 else "wrong"] for n in kept]
    assert table == [[0, n, "wrong"] for n in kept] + again, "the apply job replaces rows of what comes again"
