"""docker-compose.yml stays valid: it is checked as compose does, its names exist, and each service runs.

`docker compose config` checks it if it is installed. The published schema of the compose specification, and rules that
the schema lacks (see `test_names_lead_somewhere`), are always checked. Then each service runs as a plain process: its
command, environment and health check as in the file, at a separate address.
"""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from pushrep import KafkaDestination
from pushrep.outbox import Acks, Outbox, OutboxConfig
from pushrep.replicate.certificates import mutual_tls
from pushrep.replicate.settings import PushSettings
from tests.kafka.cluster import missing
from tests.kafka.compose import FILE, Machine, read_document, read_project
from tests.kafka.plain_client import consume, create_topic
from tests.kafka.spark_driver import missing_jars

ROOT = FILE.parent


@pytest.fixture(scope="module")
def document():
    return read_document()


@pytest.fixture(scope="module")
def services(document):
    return read_project(document)


def test_docker_compose_config_takes_it(services):
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker compose is not installed; the specification's schema judges the file in the next test")
    told = subprocess.run(
        [docker, "compose", "--file", FILE, "--profile", "*", "config", "--services"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 0, told.stderr
    assert set(told.stdout.split()) == set(services)


def test_it_follows_the_schema_of_the_compose_specification():
    judged = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", FILE],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert judged.returncode == 0, judged.stdout + judged.stderr


def test_names_lead_somewhere(document, services):
    """Volumes, needed services, health checks that are waited for, addresses of services with ports they listen on."""
    used = {volume for service in services.values() for volume in service.volumes}
    assert {volume for volume in used if not volume.startswith(".")} == set(document["volumes"]), "each used, each told"
    for service in services.values():
        for needed, condition in service.needs.items():
            is_checked = condition == "service_healthy"
            assert is_checked == bool(services[needed].health), f"{service.name} waits for {needed}"
        words = " ".join((*service.command, *service.health, *service.environment.values()))
        for host, port in re.findall(r"(?<![\w.-])([a-z][a-z0-9-]*):(\d{4,5})\b", words):
            assert host in services, f"{service.name}: {host}:{port} is no service"
            of_it = " ".join((*services[host].command, *services[host].environment.values(), *services[host].health))
            assert re.search(rf"\b{port}\b", of_it) or port == "5432", f"{service.name}: {host} has no port {port}"


def test_images_are_pinned_and_versions_are_the_tests_own(services):
    pom = (ROOT / "tests" / "kafka" / "pom.xml").read_text(encoding="utf-8")
    kafka = re.search(r"<artifactId>kafka_2.13</artifactId><version>([\d.]+)</version>", pom)[1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    images = {service.image for service in services.values()}
    assert {f"apache/kafka:{kafka}", f"pushrep:{project['version']}"} <= images
    from_lines = re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    loose = [image for image in (*images, *from_lines) if not re.search(r":\d+\.\d+", image)]
    assert not loose, f"name a version: {loose}"


def test_what_is_published_is_published_on_loopback_once(services):
    published = [port for service in services.values() for port in service.ports]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
    places = [port.rsplit(":", 1)[0] for port in published]
    assert len(places) == len(set(places)), "each place on this machine once"


def test_the_image_copies_what_is_there_and_docker_is_shown(document):
    told = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    copied = {word for line in re.findall(r"^COPY (?!--)(.+) \S+$", told, re.MULTILINE) for word in line.split()}
    assert not [name for name in copied if not (ROOT / name).exists()]
    shown = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == shown, ".dockerignore shows what is copied, and nothing else"
    extras = re.search(r"'\.\[([\w,-]+)\]'", told)[1].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras) <= set(project["optional-dependencies"])
    assert document["x-pushrep"]["build"] == "."


@pytest.mark.parametrize("spoil", [None, "another", "missing", "one more"])
def test_n11_the_image_takes_no_jar_whose_sum_is_another(tmp_path, spoil):
    """The step of the Dockerfile behind Maven's, on files of our own with sums of our own."""
    (check,) = re.findall(r"^    && (cd /jars .*)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    (tmp_path / "jars").mkdir()
    for name in "ab":
        (tmp_path / "jars" / f"{name}.jar").write_bytes(name.encode())
    sums = subprocess.run("sha256sum *.jar > ../jars.sha256", shell=True, cwd=tmp_path / "jars")
    assert sums.returncode == 0
    if spoil == "another":
        (tmp_path / "jars" / "a.jar").write_bytes(b"b")
    elif spoil == "missing":
        (tmp_path / "jars" / "a.jar").unlink()
    elif spoil is not None:
        (tmp_path / "jars" / "c.jar").write_bytes(b"c")
    told = subprocess.run(check.replace("/jars", f"{tmp_path}/jars"), shell=True, capture_output=True)
    assert (told.returncode == 0) is (spoil is None), told


@pytest.mark.java
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="gives each service an address of its own in 127/8, as Linux has it"
)
def test_every_service_runs_as_a_plain_process(services, tmp_path, tool_or_skip, torture):
    """Up as `docker compose up --wait` does it; then each is used, and the demo runs: in the long form to its end.

    The short form leaves the second of Spark's workers out, which is the first one under another name.
    """
    tool_or_skip(missing() or missing_jars())
    if not torture.is_long:
        first = services["spark-worker-1"]
        services = {name: one for name, one in services.items() if one != replace(first, name="spark-worker-2")}
    with Machine(services, tmp_path) as machine:
        up = [name for name, service in services.items() if not service.profiles]
        first = [name for name in up if not services[name].needs]
        with ThreadPoolExecutor() as pool:
            list(pool.map(machine.start, first))
        for name in up:
            if name not in first:
                for needed in services[name].needs:
                    machine.wait_healthy(needed)
                machine.start(name)
        for name in up:
            machine.wait_healthy(name)
        assert set(services) - set(up) == {"demo"}
        workers = [name for name in up if name.startswith("spark-worker")]
        assert_outbox_ships_and_replicates(machine, tmp_path)
        assert_postgres_asks_for_the_password(machine, services["postgres"])
        assert_spark_has(machine, workers)
        assert_the_demo_runs(machine, is_long=torture.is_long)


def assert_outbox_ships_and_replicates(machine, tmp_path):
    """An outbox with both replicas, acknowledged by them, shipped to the three brokers."""
    tls = machine.volume("tls")
    at = machine.addresses
    servers = machine.brokers()
    create_topic(servers, "orders", 3)
    replicas = [f"{at[f'replica-{n}']}:7400" for n in (1, 2)]
    destination = KafkaDestination(bootstrap_servers=servers)
    with Outbox.open(
        tmp_path / "outbox",
        "orders",
        3,
        "billing",
        kafka=destination,
        replicas=replicas,
        acks=Acks.ALL,
        config=OutboxConfig(
            min_insync_replicas=3,
            open_timeout_s=60,
            delivery_timeout_ms=60_000,
            push=PushSettings(tls=mutual_tls(cert=tls / "billing.pem", key=tls / "billing.key", ca=tls / "ca.pem")),
        ),
    ) as outbox:
        for partition in range(3):
            outbox.append(partition, b"an order").result(60)
        outbox.wait_shipped(60)
    assert [seen.value for partition in range(3) for seen in consume(servers, "orders", partition)] == [b"an order"] * 3


def assert_spark_has(machine, workers):
    """Check the JSON page of Spark's master, whose port is published."""

    def look():
        with urllib.request.urlopen(f"http://{machine.addresses['spark-master']}:8080/json/", timeout=30) as page:
            alive = json.load(page)["aliveworkers"]
        if alive != len(workers):
            raise NotYet(f"{alive} workers: {[machine.said(worker) for worker in workers]}")

    patiently(look)


def assert_the_demo_runs(machine, *, is_long):
    """The short form ends it by SIGTERM when it has made its topics, before Spark is half started."""
    machine.start("demo", "--limit", "6000", "--rate", "800", "--kills", "1", "--seed", "7")
    if is_long:
        assert machine.wait_ended("demo", 300) == 0, machine.said("demo")
        executors = [machine.home(worker).glob("work/app-*/*") for worker in ("spark-worker-1", "spark-worker-2")]
        assert any(map(list, executors)), "its jobs ran on the cluster"
        return
    admin = AdminClient({"bootstrap.servers": machine.brokers(), "log_level": 0})

    def look():
        if (code := machine.ended_with("demo")) is not None:
            raise AssertionError(f"the demo ended with {code}: {machine.said('demo')}")
        if not [topic for topic in admin.list_topics(timeout=30).topics if topic.endswith("-relayed")]:
            raise NotYet(machine.said("demo"))

    patiently(look)
    assert machine.terminate("demo") == 130, machine.said("demo")


class NotYet(Exception):
    """The output so far of the service that the test waits for."""


def patiently(look):
    for attempt in Retrying(
        stop=stop_after_delay(120), wait=wait_fixed(0.2), retry=retry_if_exception_type((NotYet, KafkaException)),
        reraise=True,
    ):  # fmt: skip
        with attempt:
            look()


def assert_postgres_asks_for_the_password(machine, service):
    import psycopg

    own = service.environment
    place = {"host": machine.addresses["postgres"], "user": own["POSTGRES_USER"], "dbname": own["POSTGRES_DB"]}
    with psycopg.connect(**place, password=own["POSTGRES_PASSWORD"]) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(**place, password="another")
