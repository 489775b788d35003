"""Starts brokers: as a process with Maven's jars, or in a container, with the same command and files.

    make jars, Java                   ─▶ process
    PUSHREP_KAFKA_IMAGE=image         ─▶ container of that image
    neither, but an engine answers    ─▶ container of apache/kafka, of the version in pom.xml

A container shares the machine's network, and has the broker's directory at the same path: so its address stays when it
is killed and started again, and a test can read its files. The container engine has to run on this machine.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tests.class_archives import KAFKA, use

if TYPE_CHECKING:
    from docker.models.containers import Container

JARS = Path(__file__).parents[2] / ".cache" / "kafka" / "libs"
POM = Path(__file__).parent / "pom.xml"
IMAGE_VARIABLE = "PUSHREP_KAFKA_IMAGE"
_JARS_IN_IMAGE = "/opt/kafka/libs"
_STOP_TIMEOUT_S = 120


class BrokerProcess(Protocol):
    """One broker that can be started and ended again and again; `end` with SIGKILL leaves what a crash leaves."""

    @property
    def pid(self) -> int:
        """The process id of the JVM on this machine."""
        ...

    def start(self) -> None:
        """Run it, on the data of the last time."""
        ...

    def ended_with(self) -> int | None:
        """The exit code; None while it runs."""
        ...

    def end(self, how: signal.Signals) -> None:
        """Send the signal and wait until it is gone."""
        ...

    def said(self) -> str:
        """The end of its output."""
        ...

    def remove(self) -> None:
        """Take away what is left of it."""
        ...


@cache
def image() -> str | None:
    """The image that brokers run from; None: they run from Maven's jars, or can't run at all."""
    if named := os.environ.get(IMAGE_VARIABLE):
        return named
    return default_image() if no_jars() is not None and _engine_answers() else None


def default_image() -> str:
    version = re.search(r"<artifactId>kafka_2\.13</artifactId><version>([\d.]+)</version>", POM.read_text())
    assert version is not None, "pom.xml names Kafka's version"
    return f"apache/kafka:{version[1]}"


def no_jars() -> str | None:
    """Why Kafka's jars can't be run here, in words for a person; None if they can."""
    if shutil.which("java") is None:
        return "java is not installed: Kafka's tools need Java 17 or newer"
    if not (JARS / ".done").exists():
        return "Kafka's jars are missing: run `make jars`"
    return None


def origin() -> str:
    """The origin of the brokers, for the header of a run."""
    if (name := image()) is not None:
        return f"containers of {name}"
    return "Maven's jars" if no_jars() is None else f"none ({no_jars()})"


def broker_process(home: Path, java: Sequence[str], program: Sequence[str]) -> BrokerProcess:
    """A process that runs `java <options> <program>` in `home`; not started yet."""
    return Process(home, java, program) if image() is None else InContainer(home, java, program)


def run(home: Path, java: Sequence[str], program: Sequence[str]) -> str:
    """Run a tool of Kafka's to its end; its output. Raises RuntimeError if it fails."""
    if image() is None:
        done = subprocess.run([*with_jars(*java), *program], capture_output=True, text=True, timeout=180)
        code, output = done.returncode, done.stdout + done.stderr
    else:
        tool = InContainer(home, java, program)
        tool.start()
        code, output = tool.wait(), tool.said()
        tool.remove()
    if code:
        raise RuntimeError(f"{' '.join(program)} failed: {output}")
    return output


def with_jars(*options: str) -> list[str]:
    """The command that runs a class of Kafka's jars on this machine."""
    if why := no_jars():
        raise RuntimeError(why)
    archive = use(JARS.parents[1] / "java" / KAFKA)
    return [shutil.which("java") or "java", *archive, *options, "-cp", f"{JARS}{os.sep}*"]


class Process:
    """A broker as a process of ours."""

    def __init__(self, home: Path, java: Sequence[str], program: Sequence[str]) -> None:
        self._home, self._command = home, [*with_jars(*java), *program]

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=self._home, start_new_session=True,
            )  # fmt: skip

    @property
    def _log(self) -> Path:
        return self._home / "broker.log"

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended_with(self) -> int | None:
        return self._process.poll()

    def end(self, how: signal.Signals) -> None:
        self._process.send_signal(how)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def remove(self) -> None:
        """A process leaves nothing to remove."""


class InContainer:
    """A broker in a container, which is kept when the broker ends and removed by `remove`."""

    def __init__(self, home: Path, java: Sequence[str], program: Sequence[str]) -> None:
        from testcontainers.core.container import DockerContainer

        name = image()
        assert name is not None, "an image was chosen"
        self._container = (
            DockerContainer(name)
            .with_kwargs(
                entrypoint=["java", *java, "-cp", f"{_JARS_IN_IMAGE}/*"],
                network_mode="host",
                user=f"{os.getuid()}:{os.getgid()}",
                working_dir=str(home),
            )
            .with_volume_mapping(home, str(home), "rw")
            .with_command(list(program))
        )
        self._made = False

    def start(self) -> None:
        if self._made:
            self._docker.start()
        else:
            self._container.start()
            self._made = True

    @property
    def _docker(self) -> "Container":
        return self._container.get_wrapped_container()

    @property
    def pid(self) -> int:
        self._docker.reload()
        return int(self._docker.attrs["State"]["Pid"])

    def ended_with(self) -> int | None:
        self._docker.reload()
        return None if self._docker.status == "running" else int(self._docker.attrs["State"]["ExitCode"])

    def end(self, how: signal.Signals) -> None:
        from docker.errors import APIError

        try:
            self._docker.kill(how.name)
            self._docker.wait(timeout=_STOP_TIMEOUT_S)
        except (APIError, OSError):  # it had ended already, or takes too long
            self._docker.stop(timeout=0)

    def wait(self) -> int:
        """Wait for a program that ends by itself; returns its exit code."""
        return int(self._docker.wait(timeout=120)["StatusCode"])

    def said(self) -> str:
        return self._docker.logs(tail=40).decode(errors="replace")[-2000:]

    def remove(self) -> None:
        self._container.stop()


def _engine_answers() -> bool:
    import docker
    from docker.errors import DockerException

    try:
        return bool(docker.from_env(timeout=5).ping())
    except DockerException:
        return False
