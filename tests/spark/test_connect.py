"""Both forms and the source over Spark Connect: a server in a separate JVM, and a client without a JVM."""

import json
import sqlite3
import sys
import time
from contextlib import closing
from itertools import islice
from pathlib import Path

import pyspark
import pytest

from tests.ports import reserve
from tests.spark.replay.matrix import Log
from tests.spark_programs import SparkPrograms, kill_session, said

pytest.importorskip("grpc")

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1500)]

PROGRAM = Path(__file__).with_name("connect_program.py")
KILLS, FILES_EACH, TRIES = 10, 3, 3
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


class Server:
    """Spark Connect at one address, however often it is started."""

    def __init__(self, programs, place, port):
        self.address = f"sc://127.0.0.1:{port}"
        settings = SETTINGS | {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(port),
            "spark.sql.warehouse.dir": str(place / "warehouse"),
        }
        command = [SUBMIT, "--master", "local[2]", "--driver-memory", "1g"]
        command += [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
        self._start = lambda: programs.start(command, **ENVIRONMENT)
        self.process = self._start()

    def restart(self):
        kill_session(self.process)
        self.process = self._start()


@pytest.fixture
def programs(tmp_path, torture):
    if not torture.is_long:
        pytest.skip("a server beside Spark's own takes minutes of both cores: make torture runs it")
    with SparkPrograms(tmp_path) as programs:
        yield programs


@pytest.fixture
def server(programs, tmp_path):
    with reserve() as held:
        yield Server(programs, tmp_path, held.getsockname()[1])


def test_the_forms_and_the_source_over_a_connect_server(server, programs, tmp_path):
    program = Path(__file__).parent / "replay" / "releases_program.py"
    client = programs.start([sys.executable, program, tmp_path, server.address])
    out, _ = client.communicate(timeout=1400)
    assert client.returncode == 0, said(client) + said(server.process)
    told = json.loads(out.splitlines()[-1])
    assert [told[form] for form in ("source", "operator", "served")] == ["ran"] * 3


@pytest.mark.timeout(3600)
def test_kill_9_of_client_and_server_at_random_changes_nothing(server, programs, tmp_path, torture):
    """A client that is gone leaves its query to the server, where the next client starts it again."""
    rng, killed = torture.random("connect"), []
    log = Log(None, tmp_path / "made", batches=(KILLS + 1) * FILES_EACH)
    made = iter(sorted(log.files.iterdir(), key=lambda path: int(path.stem)))
    (tmp_path / "files").mkdir()

    def client():
        for path in islice(made, FILES_EACH):
            path.rename(tmp_path / "files" / path.name)
        return programs.start([sys.executable, PROGRAM, tmp_path, server.address])

    for _ in range(KILLS):
        running, also_server = client(), rng.random() < 0.5
        killed.append((running.stdout.readline().strip(), also_server))
        # No synchronisation: the moment is meant to be anywhere inside or between the batches.
        time.sleep(rng.random() * 6)
        kill_session(running)
        if also_server:
            server.restart()
            for first in tmp_path.glob("checkpoint/offsets/.0.*.tmp"):  # half written: see docs/spark.md
                first.unlink()
        found = rows_in(tmp_path / "found.db")
        assert len(found) == len(set(found)), (killed, torture.seed)
    failed = []
    while (last := client()).wait(600) != 0:
        failed.append(said(last))
        assert len(failed) < TRIES, (failed, killed, said(server.process))
    print(killed, failed)  # noqa: T201 - for who ran it
    assert list(map(list, rows_in(tmp_path / "found.db"))) == log.kept, f"seed {torture.seed}, {killed}"


def rows_in(path):
    with closing(sqlite3.connect(path, timeout=60)) as database:
        database.execute("create table if not exists found (batch, partition, place)")
        return database.execute("select partition, place from found order by 1, 2").fetchall()
