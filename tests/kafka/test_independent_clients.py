"""Independent clients read the topic of sealed batches: kcat and Kafka's console consumer.

Each prints all fields of all records, which are compared byte by byte with the log. kcat is Debian's package of that
name; without it its test is skipped.
"""

import shutil
import subprocess

import pytest

from pushrep import KafkaDestination
from pushrep.log import LogConfig
from pushrep.outbox import Outbox, OutboxConfig
from pushrep.records import Codec
from tests.kafka.cluster import QUICK_START, java
from tests.kafka.plain_client import create_topic

pytestmark = pytest.mark.java
WAIT_S = 120
BEGAN_MS = 1_700_000_000_000
OPENING_RECORDS = 40


@pytest.fixture(scope="module", params=["header", "key"])
def shipped(request, broker, tmp_path_factory):
    """(topic, records): batches of every codec in partition 0 of a topic, and what the log they came from holds, by the
    topic's offsets.
    """
    topic = f"independent-clients-{request.param}"
    create_topic(broker.bootstrap_servers, topic, retention_ms=-1)
    directory = tmp_path_factory.mktemp("outbox")
    destination = KafkaDestination(bootstrap_servers=broker.bootstrap_servers, retry_backoff_ms=20)
    for codec in Codec:
        with Outbox.open(
            directory,
            topic,
            1,
            "test",
            kafka=destination,
            carrier=request.param,
            config=OutboxConfig(open_timeout_s=WAIT_S, log_config=LogConfig(flush_ms=10, codec=codec)),
        ) as outbox:
            for first in range(0, OPENING_RECORDS, 8):
                append_batch(outbox, codec, first)
            outbox.wait_shipped(WAIT_S)
            log = outbox.log(0)
            records, codecs = list(log.records(0)), {batch.header.codec for batch in log.batches(0)}
    assert codecs == set(Codec), "each is there"
    # In the topic the marker of each opening takes an offset, too.
    return topic, [record._replace(offset=record.offset + record.offset // OPENING_RECORDS + 1) for record in records]


def append_batch(outbox, codec, first):
    """Eight records: null and empty keys and values, bytes that are no text, repeated and null headers."""
    numbers = range(first, first + 8)
    outbox.append_many(
        0,
        [[f"{codec.name} {n}".encode() * 30, b"", b"\x00\xff\n\x80", "größer".encode()][n % 4] for n in numbers],
        keys=[[None, b"", b"\xfe\x00key", b"key %d" % n][n // 2 % 4] for n in numbers]
        if outbox.identity.carrier == "header"
        else None,
        headers=[[[], [("a", b"\xff"), ("a", b"")], [("null", None)]][n % 3] for n in numbers],
        timestamps_ms=[BEGAN_MS + 997 * n for n in numbers],
    ).result(WAIT_S)


def printed_headers(record, after_name):
    return b",".join(
        name.encode() + after_name + (b"NULL" if value is None else value) for name, value in record.headers
    )


def up_to_zeros(record):
    """kcat prints a header's value as C prints a string, up to its first zero byte."""
    return record._replace(headers=[(name, value and value.split(b"\0")[0]) for name, value in record.headers])


def test_kcat_reads_what_sealed_batches_wrote(broker, shipped):
    """Contract: the sealed batches as they are, for a client of another make, with every codec."""
    if (kcat := shutil.which("kcat")) is None:
        pytest.skip("kcat is not installed: apt-get install kcat")
    topic, records = shipped
    command = [kcat, "-b", broker.bootstrap_servers, "-C", "-q", "-e", "-t", topic, "-p", "0", "-o", "beginning"]
    read = subprocess.run(
        [*command, "-X", "check.crcs=true", "-f", "%o %T %K %S [%k] [%s] %h\n"], capture_output=True, timeout=120
    )
    expected = b"".join(
        b"%d %d %d %d [%b] [%b] %b\n" % (
            record.offset, record.timestamp_ms,
            -1 if record.key is None else len(record.key), len(record.value),
            record.key or b"", record.value,
            printed_headers(up_to_zeros(record), b"="),
        )
        for record in records
    )  # fmt: skip
    assert read.stdout == expected, read.stderr[-2000:]


def test_the_console_consumer_reads_what_sealed_batches_wrote(broker, shipped):
    """Contract: the sealed batches as they are, for Kafka's own consumer in Java, with every codec."""
    topic, records = shipped
    told = ("timestamp", "offset", "headers", "key")
    prints = [part for name in told for part in ("--formatter-property", f"print.{name}=true")]
    read = subprocess.run(
        [
            *java("-Xmx256m", *QUICK_START), "org.apache.kafka.tools.consumer.ConsoleConsumer",
            "--bootstrap-server", broker.bootstrap_servers, "--topic", topic, "--partition", "0",
            "--offset", "earliest", "--max-messages", str(len(records)), "--timeout-ms", "60000", *prints,
            "--formatter-property", "null.literal=NULL",
        ],
        capture_output=True, timeout=120,
    )  # fmt: skip
    expected = b"".join(
        b"\t".join((
            b"CreateTime:%d" % record.timestamp_ms,
            b"Offset:%d" % record.offset,
            printed_headers(record, b":") or b"NO_HEADERS",
            b"NULL" if record.key is None else record.key,
            record.value,
        )) + b"\n"
        for record in records
    )  # fmt: skip
    assert read.stdout == expected, read.stderr[-2000:]
