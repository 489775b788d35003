"""How a relay's tasks send, as far as that shows without brokers."""

import pytest

pytest.importorskip("pyspark")

from spark_jobs.relay.sending import Sending


def sending(**client):
    return Sending(
        client={"bootstrap.servers": "h:1", **client},
        topic="t",
        partition_count=1,
        carrier="key",
        source_carrier="key",
        retention_ms=None,
        pids={},
    )


def test_one_request_is_on_its_way_at_a_time():
    """Prefix condition: of several, a broker that forgot the producer could take a later one and refuse the first."""
    name = "max.in.flight.requests.per.connection"
    assert sending().producer_settings() == {"bootstrap.servers": "h:1", name: 1}
    assert sending(**{name: 5}).producer_settings()[name] == 1, "the job refuses another number by name"
