"""Schema registries: the mock that confluent-kafka brings, and Apicurio from Maven (`make registry`), in a process."""

import itertools
import shutil
import subprocess
import time
from pathlib import Path

import httpx2
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient

from tests.support.kafka_node import free_ports

APICURIO = Path(__file__).parents[2] / ".cache" / "registry"
START_S = 300
_mocks = itertools.count()


@pytest.fixture(scope="session")
def apicurio(tmp_path_factory):
    """Its address, as Confluent's own registry answers."""
    runner = next(iter(APICURIO.glob("*-runner.jar")), None)
    if runner is None or shutil.which("java") is None:
        pytest.skip("no Apicurio here: make registry")
    [port] = free_ports(1)
    log = tmp_path_factory.mktemp("apicurio") / "log"
    with log.open("wb") as out:
        made = subprocess.Popen(
            ["java", "-Xmx256m", "-Dquarkus.http.host=127.0.0.1", f"-Dquarkus.http.port={port}", "-jar", runner],
            stdout=out, stderr=out, cwd=log.parent,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}/apis/ccompat/v7"
    try:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and made.poll() is None:
            try:
                if httpx2.get(f"{url}/subjects").status_code == 200:
                    break
            except httpx2.TransportError:
                time.sleep(0.2)
        else:
            pytest.fail(f"Apicurio did not start: {log.read_text()[-2000:]}")
        yield url
    finally:
        made.kill()
        made.wait()


@pytest.fixture(params=["mock", pytest.param("apicurio", marks=[pytest.mark.java, pytest.mark.slow])])
def registry(request):
    """A client of an empty registry, or of one whose topics nobody else uses."""
    url = f"mock://{next(_mocks)}" if request.param == "mock" else request.getfixturevalue("apicurio")
    with SchemaRegistryClient.new_client({"url": url}) as client:
        yield client


@pytest.fixture
def no_registry():
    """A client of an address where nobody listens."""
    [port] = free_ports(1)
    with SchemaRegistryClient({"url": f"http://127.0.0.1:{port}", "max.retries": 0}) as client:
        yield client
