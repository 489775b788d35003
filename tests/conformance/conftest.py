"""Kafka's own tools as judges: their jars come by `make jars`; without them a test skips, in CI it fails."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.class_archives import SETTINGS

JARS = Path(__file__).parents[2] / ".cache" / "kafka" / "libs"


@pytest.fixture(scope="session")
def kafka_tool():
    """Run a main class of Kafka's with arguments: `kafka_tool(class_name, *arguments) -> its output`."""
    if shutil.which("java") is None or not (JARS / ".done").exists():
        why = "Java or Kafka's jars are missing: install Java 17 and run `make jars`"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)

    def run(main_class, *arguments):
        command = ["java", "-Xmx256m", *SETTINGS, "-cp", f"{JARS}/*", main_class, *map(str, arguments)]
        # Without the options that all other JVMs of the tests get: java says that it picked them up.
        environment = {name: value for name, value in os.environ.items() if name != "JDK_JAVA_OPTIONS"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, f"{main_class} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    return run
