"""Real brokers: without Java or Kafka's jars a test skips, in CI it fails."""

import os

import pytest

from pushrep.startpoints import store
from tests.kafka.cluster import KafkaCluster, missing
from tests.kafka.lost_answers import LosesAnswers
from tests.kafka.spark_driver import SparkDriver, missing_jars


@pytest.fixture
def producers(monkeypatch):
    """Stores that are opened from here on have producers whose answers may get lost."""
    monkeypatch.setattr("pushrep.kafka.startpoints.Producer", LosesAnswers)
    yield LosesAnswers
    LosesAnswers.lost = LosesAnswers.away = None


@pytest.fixture(scope="session")
def tool_or_skip():
    """Call it with a reason why something is missing, or None."""

    def decide(why):
        if why is not None:
            (pytest.fail if os.environ.get("CI") else pytest.skip)(why)

    return decide


_shared = {}  # the clusters of the fixtures of these names


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if "broker" in item.fixturenames and "broker" in _shared:
        _shared["broker"].wake()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """The broker rests behind the tests of this directory, the three behind those of a file; who asks wakes them."""
    for name, cluster in _shared.items():
        here, there = (one and (one.path.parent if name == "broker" else one.path) for one in (item, nextitem))
        if here != there and not (nextitem and name in nextitem.fixturenames):
            cluster.rest()


@pytest.fixture(autouse=True)
def patient_readers(monkeypatch):
    """A running reader waits for its store as long as a stalled machine may need; by default it would continue without
    it.
    """
    for name in ("LOOK_WITHIN_S", "ASK_WITHIN_S"):
        monkeypatch.setattr(store, name, 120.0)


@pytest.fixture(scope="session")
def broker(tool_or_skip, tmp_path_factory):
    """One real broker for all tests; who kills it starts it again and waits until it serves."""
    tool_or_skip(missing())
    with KafkaCluster(tmp_path_factory.mktemp("broker")) as cluster:
        _shared["broker"] = cluster
        yield cluster


@pytest.fixture(scope="session")
def _three_brokers(tool_or_skip, tmp_path_factory):
    tool_or_skip(missing())
    with KafkaCluster(tmp_path_factory.mktemp("brokers"), nodes=3) as cluster:
        _shared["three_brokers"] = cluster
        yield cluster


@pytest.fixture
def three_brokers(_three_brokers):
    """Three real brokers for all tests; who kills one starts it again and waits until it serves."""
    _three_brokers.wake()
    return _three_brokers


@pytest.fixture(scope="session")
def spark_driver(tool_or_skip, tmp_path_factory):
    """One Spark with Kafka's connector in a separate process, shared by all tests that need no other settings."""
    pytest.importorskip("pyspark")
    tool_or_skip(missing() or missing_jars())
    with SparkDriver(tmp_path_factory.mktemp("spark-driver")) as driver:
        yield driver
