"""The relay job's words: what is refused before anything starts, by the option's name."""

import pytest

pytest.importorskip("pyspark")

from click.testing import CliRunner

from spark_jobs.errors import BadJobOption
from spark_jobs.jobs.relay import main
from spark_jobs.jobs.relaying import RelayOptions

KAFKA = {"kafka.bootstrap.servers": "a:1"}


def options(**given):
    told = {"topic": "t", "checkpoint": "c", "marks": "m", "source": "kafka", "source_options": KAFKA}
    return RelayOptions(**told | {"application": "billing", "to_topic": "out"} | given)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"source_options": KAFKA | {"FAILONDATALOSS": "False"}}, "failOnDataLoss"),
        (
            {"source": "pushrep", "path": "p", "source_options": {"failOnDataLoss": "false"}, "to_servers": "a:1"},
            "failOnDataLoss",
        ),
        ({"source": "rate"}, "--source="),
        ({"source": "pushrep", "path": "p", "source_options": {}}, "--to-servers"),
        ({"to_topic": "t"}, "--to-topic"),
        ({"to_topic": " "}, "--to-topic"),
        ({"application": ""}, "--application"),
        ({"to_options": {"acks": "1"}}, "--to-option acks"),
        ({"to_options": {"max.in.flight": "5"}}, "--to-option max.in.flight"),
        ({"to_options": {"max.in.flight.requests.per.connection": "2"}}, "--to-option max.in.flight"),
        ({"to_options": {"message.timeout.ms": "5"}}, "--to-option message.timeout.ms"),
        ({"to_options": {"bootstrap.servers": "b:1"}}, "--to-servers"),
        ({"trigger": "realtime"}, "Real-Time Mode"),
    ],
)
def test_refused_by_name(given, names):
    """Contract "Spark": the relay refuses failOnDataLoss=false; jobs refuse Real-Time Mode."""
    with pytest.raises(BadJobOption, match=names):
        options(**given)


def test_what_the_source_is_asked_for():
    """Contract "Spark": jobs default to read_committed; headers travel on."""
    read = options(max_records_per_trigger=5).reader_options()
    assert read == {
        "subscribe": "t",
        "startingOffsets": "earliest",
        "kafka.isolation.level": "read_committed",
        "includeHeaders": "true",
        "maxOffsetsPerTrigger": "5",
        **KAFKA,
    }


def test_the_client_of_the_destination_in_one_cluster_and_in_two():
    one = options(to_options={"security.protocol": "ssl"})
    assert one.client() == {"bootstrap.servers": "a:1", "security.protocol": "ssl"}
    two = options(to_servers="b:1", to_options={"security.protocol": "ssl"}, to_topic="t")
    assert two.client() == {"bootstrap.servers": "b:1", "security.protocol": "ssl"}
    assert (one.carrier_out(), options(carrier="header").carrier_out()) == ("key", "header")


def test_the_command_says_it_in_one_line():
    given = ["--source", "kafka", "--topic", "t", "--application", "a", "--to-topic", "out", "--checkpoint", "c"]
    answer = CliRunner().invoke(main, given)
    assert answer.exit_code == 1
    assert answer.output.startswith("error: --to-servers: ")
