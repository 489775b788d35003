"""The jobs by spark-submit --py-files, in a Python that does not have pushrep: relay into a topic, apply from there."""

import json
import subprocess
import sys
import sysconfig
import uuid
from importlib.util import find_spec
from pathlib import Path

import pyarrow.dataset as ds
import pytest

import pushrep
from filtering import StreamMetadata
from tests.kafka.cluster import missing
from tests.kafka.plain_client import create_topic, plain_producer
from tests.kafka.spark_driver import LIBS, environment, missing_jars, own_spark_home
from tests.kafka.topic_reader import read_filtered
from tests.spark_programs import kill_session

pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.slow]

RECORDS, SOURCES = 200, 2
DEADLINE_S = 240
PROGRAM = """
import json
from pyspark.sql import SparkSession
from filtering import StreamMetadata
from spark_jobs import filter_replays

rocksdb = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
spark = SparkSession.builder.config("spark.sql.streaming.stateStore.providerClass", rocksdb).getOrCreate()
rows = [("t", StreamMetadata(7, 0, n).pack(), at) for at, n in enumerate([*range(100), *range(60, 120)])]
schema = "topic string, key binary, partition int, offset long"
spark.createDataFrame([(t, bytearray(key), 0, at) for t, key, at in rows], schema).write.parquet("in")
kept = filter_replays(spark.readStream.schema(schema).parquet("in"))
options = {"path": "out", "checkpointLocation": "checkpoint"}
kept.writeStream.format("parquet").options(**options).trigger(availableNow=True).start().awaitTermination()
print(json.dumps({"kept": spark.read.parquet("out").count()}))
"""
QUIET = ("spark.ui.enabled=false", "spark.sql.shuffle.partitions=2", "spark.driver.host=127.0.0.1")


@pytest.fixture
def bare_python(tmp_path):
    """A Python with everything that pushrep needs, and without pushrep."""
    pytest.importorskip("pyspark")
    home = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=180)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    # Only this directory: what its own .pth files add, such as an editable install of pushrep, stays away.
    (own / "others.pth").write_text(str(Path(find_spec("pyspark").origin).parents[1]))
    python = home / "bin" / "python"
    code = (
        "import pyspark, confluent_kafka, importlib.util as u; print(u.find_spec('pushrep'), u.find_spec('spark_jobs'))"
    )
    told = subprocess.run([python, "-c", code], cwd=tmp_path, env=bare(), capture_output=True, text=True, timeout=180)
    assert told.stdout.split() == ["None", "None"], told.stderr
    return python


def bare():
    return {name: value for name, value in environment().items() if not name.startswith("PYTHON")}


@pytest.fixture
def submit(tool_or_skip, bare_python, tmp_path):
    """Run a job's file far from its package, by spark-submit with the zip; its events."""
    tool_or_skip(missing() or missing_jars())
    zip_, packages = tmp_path / "pushrep.zip", ("filtering", "partitioner", "pushrep", "spark_jobs")
    subprocess.run(
        [sys.executable, "-m", "zipfile", "-c", zip_, *packages], cwd=Path(pushrep.__file__).parents[1], check=True
    )
    started = []

    def job(name, master, *arguments):
        (file := tmp_path / f"{name}.py").write_bytes(Path(find_spec(f"spark_jobs.jobs.{name}").origin).read_bytes())
        return run(file, master, *arguments, "--json", "-")

    def run(file, master, *arguments):
        python = {name: str(bare_python) for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")}
        own = {} if master.startswith("local[") else {"SPARK_HOME": str(own_spark_home(tmp_path))}
        process = subprocess.Popen(
            [
                *(Path(sys.executable).with_name("spark-submit"), "--master", master, "--driver-memory", "1g"),
                *(part for setting in QUIET for part in ("--conf", setting)),
                *("--py-files", zip_, "--jars", ",".join(map(str, sorted(LIBS.glob("*.jar"))))),
                *(file, *arguments),
            ],
            cwd=tmp_path,
            env=bare() | python | own,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        out, said = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, said[-3000:]
        return [json.loads(line) for line in out.splitlines() if line.startswith("{")]

    job.run = run
    yield job
    for process in started:
        kill_session(process)


def test_relay_and_apply_need_no_pushrep_in_the_cluster_s_python(broker, submit, tmp_path, torture):
    """Contract "Spark", jobs: by spark-submit with --py-files; workers get the zip from their driver.

    The long form: executors that are other processes, and the apply job behind the relay.
    """
    master = "local-cluster[1,1,1024]" if torture.is_long else "local[2]"
    servers, tag = broker.bootstrap_servers, uuid.uuid4().hex[:8]
    first, second = (f"zip-{name}-{tag}" for name in ("first", "second"))
    create_topic(servers, first, partitions=SOURCES)
    create_topic(servers, second, partitions=SOURCES)
    producer = plain_producer(servers)
    for start in (0, 60):  # the second run of the producer came back from a position that lagged
        for partition in range(SOURCES):
            for n in range(start, start + 140):
                producer.produce(first, b"%d" % n, StreamMetadata(7, partition, n).pack(), partition)
    assert producer.flush(60) == 0
    kafka = ("--source", "kafka", "--source-option", f"kafka.bootstrap.servers={servers}")
    relayed = submit(
        *("relay", master, *kafka, "--topic", first, "--to-topic", second, "--application", "zip"),
        *("--checkpoint", tmp_path / "relay", "--to-option", "log_level=0"),
    )
    assert (relayed[-1]["event"], relayed[-1]["kept"]) == ("stopped", SOURCES * RECORDS)
    found = read_filtered(servers, second, SOURCES)
    assert sorted((partition, [int(one.value) for one in seen]) for (_, partition), seen in found.visible.items()) == [
        (partition, list(range(RECORDS))) for partition in range(SOURCES)
    ]
    if not torture.is_long:
        return
    applied = submit(
        *("apply", "local[2]", *kafka, "--topic", second, "--sink", tmp_path / "table", "--value-format", "string"),
        *("--checkpoint", tmp_path / "apply"),
    )
    assert applied[-1]["event"] == "stopped"
    rows = ds.dataset(tmp_path / "table", format="parquet", partitioning="hive").to_table(["partition", "value"])
    found = sorted((row["partition"], int(row["value"])) for row in rows.to_pylist())
    assert found == [(partition, n) for partition in range(SOURCES) for n in range(RECORDS)]


@pytest.mark.long  # the short form: tests/spark/replay/test_filter_replays_stream.py looks at the path that workers get
def test_a_program_with_the_operator_needs_no_pushrep_there_either(submit, tmp_path):
    """The worker beside the driver, in which Spark names the operator's state, gets no archives from Spark."""
    (program := tmp_path / "program.py").write_text(PROGRAM)
    assert submit.run(program, "local[2]") == [{"kept": 120}]
