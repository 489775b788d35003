"""Real brokers: without Java or Kafka's jars a test skips, in CI it fails."""

import os

import pytest


@pytest.fixture(scope="session")
def tool_or_skip():
    """Call it with a reason why something is missing, or None."""

    def decide(why):
        if why is not None:
            (pytest.fail if os.environ.get("CI") else pytest.skip)(why)

    return decide
