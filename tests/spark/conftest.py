"""One Spark for every test here: small, quiet, and gone at the end with its JVM and its files."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from tests.spark_programs import WORKERS_PYTHON

LOG4J = """\
status = error
rootLogger.level = off
"""


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """local[2], two shuffle partitions, Arrow, the RocksDB state store; warehouse and scratch in a temporary place."""
    _remember_names_of_java()
    home = tmp_path_factory.mktemp("spark")
    (home / "log4j2.properties").write_text(LOG4J)
    os.environ["PYSPARK_PYTHON"] = WORKERS_PYTHON
    session = (
        SparkSession.builder.master("local[2]")
        .appName("pushrep-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={home / 'log4j2.properties'}")
        .config("spark.local.dir", str(home / "scratch"))
        .config("spark.sql.warehouse.dir", str(home / "warehouse"))
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.execution.arrow.pyspark.enabled", "true")
        .config("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        .config(
            "spark.sql.streaming.stateStore.providerClass",
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        )
        .getOrCreate()
    )
    gateway = session.sparkContext._gateway
    yield session
    for query in session.streams.active:
        query.stop()
    session.stop()
    _end_jvm(gateway)


def _remember_names_of_java() -> None:
    """`jvm.org.apache.spark.X` is asked name by name, and each package is looked for as a class in 250 jars."""
    from py4j.java_gateway import JavaPackage, JVMView

    for kind in (JVMView, JavaPackage):
        if kind.__getattr__.__module__ == __name__:
            return

        def kept(self, name, ask=kind.__getattr__):
            found = self.__dict__[name] = ask(self, name)
            return found

        kind.__getattr__ = kept


def _end_jvm(gateway) -> None:
    """Spark leaves its JVM to the end of Python; a test session waits until it is gone."""
    from pyspark import SparkContext

    gateway.shutdown()
    process = gateway.proc
    process.stdin.close()
    try:
        process.wait(timeout=120)
    finally:
        if process.poll() is None:
            process.kill()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    SparkContext._gateway = SparkContext._jvm = None


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A place for a query's checkpoint."""
    return str(tmp_path / "checkpoint")


@pytest.fixture(autouse=True)
def no_query_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails inside a stream must not leave it running for the next one."""
    yield
    if "spark" in request.fixturenames:
        for query in request.getfixturevalue("spark").streams.active:
            with contextlib.suppress(Exception):
                query.stop()
