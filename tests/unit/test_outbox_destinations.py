"""An operator's calls about destinations while a service has the outbox open: they are done, or refused by name.

Contract: "An open outbox answers status, member changes, skip, repartition and the dropping of a destination".
"""

from dataclasses import replace
from uuid import UUID

import pytest

from pushrep import KafkaDestination, LogConfig, Outbox, OutboxConfig
from pushrep.cli.main import run
from pushrep.env import REAL_FILESYSTEM
from pushrep.errors import BadArgument
from pushrep.kafka.answers import Code
from pushrep.kafka.errors import RefusedByTopic
from pushrep.kafka.progress import EpochPartitions, PartitionProgress, ShippingProgress, read_progress, write_progress
from pushrep.log import StillNeeded
from pushrep.outbox import RecordRefused
from pushrep.outbox.destinations import SkippedRecords, repartition
from pushrep.outbox.identity import read_identity
from tests.kafka.cluster import free_ports
from tests.support.outbox_arguments import outbox_arguments

SMALL = LogConfig(segment_bytes=2_000, batch_bytes=1_000, batch_bytes_max=2_000, flush_ms=10)
BEFORE = ShippingProgress(
    topic_id=UUID(int=7), epochs=(EpochPartitions(0, 3),), partitions={0: PartitionProgress(5, 5, 4711)}
)  # fmt: skip


@pytest.fixture
def directory(tmp_path):
    """An outbox of 40 records, of which a topic that was shipped to once has five."""
    with Outbox.open(tmp_path / "outbox", "orders", 1, "test", config=OutboxConfig(log_config=SMALL)) as outbox:
        outbox.append_many(0, [bytes(400)] * 40)
    write_progress(REAL_FILESYSTEM, tmp_path / "outbox", {"old": BEFORE, "older": replace(BEFORE, partitions={})})
    return tmp_path / "outbox"


@pytest.fixture(params=[False, True], ids=["without a destination", "with another one"])
def kafka(request):
    """The service's destination: none, or brokers that can't be reached."""
    (port,) = free_ports(1)
    return KafkaDestination(bootstrap_servers=f"127.0.0.1:{port}", request_timeout_ms=500) if request.param else None


def opened(directory, kafka):
    settings = {"log_config": SMALL, "open_timeout_s": 0.0}
    return Outbox.open(directory, "orders", 1, "test", **outbox_arguments(kafka=kafka, **settings))


@pytest.mark.parametrize("carrier", ["key", "header"])
def test_the_largest_record_can_be_parked(tmp_path, carrier):
    """faults B7: an entry is larger than its record, by the broker's words at most."""
    kafka = KafkaDestination(bootstrap_servers="127.0.0.1:1", on_refused="park")
    given = outbox_arguments(kafka=kafka, log_config=SMALL, open_timeout_s=0.0, carrier=carrier)
    with Outbox.open(tmp_path / "outbox", "orders", 1, "test", **given) as outbox:
        outbox.append(0, bytes(1_800)).result(60)
        with pytest.raises(RecordRefused):
            outbox.append(0, bytes(2_000))
        (record,) = outbox.log(0).records(0)
        words, parking = "\u2014" * 9_000, outbox.facts.shipping.parking
        refused = RefusedByTopic("orders", 0, 0, directory=outbox.directory, code=Code.INVALID_RECORD, why=words)
        parking.park(record, refused, 1_000)
        (parked,) = parking.all()
        assert words.startswith(parked.message)
        assert parking.record(parked.number) == record


def test_a_destination_is_dropped_while_the_outbox_is_open(directory, kafka):
    with opened(directory, kafka) as outbox:
        with pytest.raises(StillNeeded, match="kafka:old"):
            outbox.log(0).purge(20)
        assert run(["outbox", "skip", "all", "--directory", str(directory), "--topic", "older"]) == 0
        assert run(["outbox", "skip", "all", "--directory", str(directory), "--topic", "old"]) == 0
        assert run(["outbox", "skip", "all", "--directory", str(directory), "--topic", "old"]) == 1, (
            "it is not there any more"
        )
        if kafka is None:
            assert outbox.log(0).purge(20) > 0
    assert not read_progress(REAL_FILESYSTEM, directory).keys() & {"old", "older"}, "nor did the close bring it back"


@pytest.mark.parametrize("kafka", [True], indirect=True, ids=[""])
def test_what_the_service_ships_to_is_not_dropped_under_its_feet(directory, kafka, capsys):
    with opened(directory, kafka):
        assert run(["outbox", "skip", "all", "--directory", str(directory), "--topic", "orders"]) == 1
        assert "open the outbox without it" in capsys.readouterr().err
        where = ["--directory", str(directory), "--reason", "a test"]
        assert run(["outbox", "skip", "7", "--topic", "old", *where]) == 1
        assert "ships to orders" in capsys.readouterr().err
        assert run(["outbox", "skip", "7", "--topic", "orders", *where]) == 0


def test_repartition_waits_for_the_service_to_stop(directory, kafka, capsys):
    """A PID is constant from an open to a close: `pushrep outbox repartition` is refused, and changes nothing."""
    before = read_identity(REAL_FILESYSTEM, directory)
    with opened(directory, kafka):
        assert run(["outbox", "repartition", str(directory), "--topic", "old"]) == 1
        assert "is open in this very process" in capsys.readouterr().err
    assert read_identity(REAL_FILESYSTEM, directory) == before
    assert read_progress(REAL_FILESYSTEM, directory)["old"].epochs == BEFORE.epochs
    raised = repartition(directory, topic="old")
    assert raised.pid != before.pid
    [_, new] = read_progress(REAL_FILESYSTEM, directory)["old"].epochs
    assert (new.pid_epoch, new.starts) == (raised.pid_epoch, {0: 40})


@pytest.mark.parametrize("name", ["partition", "start", "end", "before_ms", "after_ms", "larger_than_bytes"])
def test_what_is_to_be_skipped_is_named_in_whole_numbers(name):
    for value in ("7", -1, True, 1.5):
        with pytest.raises(BadArgument, match=name):
            SkippedRecords(reason="why", **{name: value})
