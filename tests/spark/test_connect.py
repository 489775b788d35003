"""Both forms and the source over Spark Connect: a server in a separate JVM, and a client without a JVM; random kills.

The kills are of a query that is no job of ours, over Spark Connect and classic, under this Python's Spark or each that
PUSHREP_SPARK_PYTHONS names: PUSHREP_TORTURE=1 make spark-releases
"""

import json
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from itertools import islice
from pathlib import Path

import psutil
import pytest

from tests.ports import reserve
from tests.spark.replay.matrix import Log
from tests.spark_programs import PYTHONS, ROOT, SparkPrograms, kill_session, said

pytest.importorskip("grpc")

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1500)]

PROGRAM = Path(__file__).with_name("connect_program.py")
KILLS, FILES_EACH, TRIES = 10, 3, 3
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
PRELOADED = "pyspark.sql.connect.session pyspark.sql.connect.streaming.worker.foreach_batch_worker"


class Server:
    """Spark Connect of one Python's release at one address, however often it is started."""

    def __init__(self, programs, place, port, python):
        asked = [python, "-c", "import pyspark; print(pyspark.__path__[0], pyspark.__version__)"]
        home, release = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
        jars = (ROOT / ".cache" / "spark-tables" / release.rpartition(".")[0]).glob("spark-connect*.jar")
        if release.startswith("3.") and len(psutil.net_if_addrs()) > 1:
            pytest.skip(f"{release} listens at every address: run it where there is none but loopback (unshare --net)")
        self.address = f"sc://127.0.0.1:{port}"
        settings = SETTINGS | {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(port),
            "spark.sql.warehouse.dir": str(place / "warehouse"),
            "spark.jars": ",".join(map(str, jars)),
        }
        command = [Path(home, "bin", "spark-submit"), "--master", "local[2]", "--driver-memory", "1g"]
        command += [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
        own = {"SPARK_HOME": home, "PYSPARK_SUBMIT_ARGS": "", "PUSHREP_TESTS_PYTHON": str(python)}
        self._start = lambda: programs.start(command, **own, PUSHREP_TESTS_PRELOADED=PRELOADED)
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
def start_server(programs, tmp_path):
    with reserve() as held:
        yield lambda python: Server(programs, tmp_path, held.getsockname()[1], python)


def test_the_forms_and_the_source_over_a_connect_server(start_server, programs, tmp_path):
    server = start_server(sys.executable)
    program = Path(__file__).parent / "replay" / "releases_program.py"
    client = programs.start([sys.executable, program, tmp_path, server.address])
    out, _ = client.communicate(timeout=1400)
    assert client.returncode == 0, said(client) + said(server.process)
    told = json.loads(out.splitlines()[-1])
    assert [told[form] for form in ("source", "operator", "served")] == ["ran"] * 3


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("over", ["connect", "classic"])
@pytest.mark.parametrize("python", PYTHONS or [sys.executable])
def test_kill_9_at_random_changes_nothing(start_server, programs, tmp_path, torture, python, over):
    """A client that is gone leaves its query to the server, where the next client starts it again."""
    rng, killed = torture.random("random kills", over), []  # whether with the JVM, behind how many batches
    log = Log(None, tmp_path / "made", batches=(KILLS + 1) * FILES_EACH)
    made = iter(sorted(log.files.iterdir(), key=lambda path: int(path.stem)))
    (tmp_path / "files").mkdir()
    server = start_server(python) if over == "connect" else None

    def client():
        for path in islice(made, FILES_EACH):
            path.rename(tmp_path / "files" / path.name)
        where = server.address if server else "local[2]"
        return programs.start([python, PROGRAM, tmp_path, where], PUSHREP_TESTS_PYTHON=python)

    for _ in range(KILLS):
        running, also_jvm = client(), server is None or rng.random() < 0.5
        assert running.stdout.readline() == "started\n", (killed, said(running))
        # No synchronisation: the moment is meant to be anywhere inside or between the batches.
        time.sleep(rng.random() * 6)
        kill_session(running)
        killed.append((also_jvm, len(list(tmp_path.glob("checkpoint/commits/[0-9]*")))))
        if also_jvm:
            if server:
                server.restart()
            for first in tmp_path.glob("checkpoint/offsets/.0.*.tmp"):  # half written: see docs/spark.md
                first.unlink()
        found = rows_in(tmp_path / "found.db")
        assert len(found) == len(set(found)), (killed, torture.seed)
    failed = []
    while (last := client()).wait(600) != 0:
        failed.append(said(last))
        assert len(failed) < TRIES, (failed, killed, server and said(server.process))
    print(over, killed, failed)  # noqa: T201 - for who ran it
    assert list(map(list, rows_in(tmp_path / "found.db"))) == log.kept, f"seed {torture.seed}, {killed}"


def rows_in(path):
    with closing(sqlite3.connect(path, timeout=60)) as database:
        database.execute("create table if not exists found (batch, partition, place)")
        return database.execute("select partition, place from found order by 1, 2").fetchall()
