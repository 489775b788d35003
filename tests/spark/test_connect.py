"""Both forms and the source over Spark Connect: a server in a JVM of its own, and a client without any."""

import json
import sys
from pathlib import Path

import pyspark
import pytest

from tests.ports import reserve
from tests.spark_programs import SparkPrograms, said

pytest.importorskip("grpc")

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1500)]

SUBMIT = Path(sys.executable).with_name("spark-submit")
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.python.authenticate.socketTimeout": "120s",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
}
ENVIRONMENT = {
    "SPARK_HOME": str(Path(pyspark.__file__).parent),
    "PYSPARK_SUBMIT_ARGS": "",
    "PUSHREP_TESTS_PRELOADED": "pyspark.sql.connect.session pyspark.sql.connect.streaming.worker.foreach_batch_worker",
}


def test_the_forms_and_the_source_over_a_connect_server(tmp_path, torture):
    if not torture.is_long:
        pytest.skip("a server beside Spark's own takes minutes of both cores: make torture runs it")
    held = reserve()
    port = held.getsockname()[1]
    settings = SETTINGS | {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
    }
    command = [SUBMIT, "--master", "local[2]", "--driver-memory", "1g"]
    command += [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    program = Path(__file__).parent / "replay" / "releases_program.py"
    with SparkPrograms(tmp_path) as programs:
        held.close()
        server = programs.start(command, **ENVIRONMENT)
        client = programs.start([sys.executable, program, tmp_path, f"sc://127.0.0.1:{port}"])
        out, _ = client.communicate(timeout=1400)
        assert client.returncode == 0, said(client) + said(server)
    told = json.loads(out.splitlines()[-1])
    assert [told[form] for form in ("source", "operator", "served")] == ["ran"] * 3
