"""Kafka's own Java classes read every codec's batches, and what they write is read here: their jars, over py4j."""

import os
import random
import shutil
from pathlib import Path

import pytest
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

from pushrep.records import Codec, RecordBatch, encode_batch

pytestmark = pytest.mark.java

JARS = Path(__file__).parents[2] / ".cache" / "kafka" / "libs"
NOW = 1_700_000_000_000


def records():
    """(time, key, value, headers): more than one block of every codec, nulls, empties, headers."""
    chance = random.Random(7)
    yield NOW, None, None, ()
    yield NOW + 5, b"", b"", (("stream-metadata", bytes(range(20))), ("x", None))
    yield NOW - 9, chance.randbytes(20), chance.randbytes(150_000) * 2, ()
    for n in range(100):
        yield NOW + n, chance.randbytes(20), b"text that repeats " * n, (("stream-metadata", chance.randbytes(20)),)


RECORDS = list(records())


@pytest.fixture(scope="module")
def java():
    """A Java machine with Kafka's classes."""
    if shutil.which("java") is None or not (JARS / ".done").exists():
        why = f"Java or Kafka's jars are missing: install Java 17 and run `make jars` (looked for {JARS.name}/.done)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    port, process = launch_gateway(classpath=f"{JARS}/*", die_on_exit=True, return_proc=True, javaopts=["-Xmx256m"])
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))
    yield gateway
    gateway.shutdown()
    process.stdin.close()
    process.wait(timeout=60)
    if process.stdout is not None:
        process.stdout.close()


@pytest.fixture
def kafka(java):
    return java.jvm.org.apache.kafka.common


def each(iterable):
    """py4j gives collections Python's manners, other iterables not."""
    iterator = iterable.iterator()
    while iterator.hasNext():
        yield iterator.next()


def plain_bytes(java, buffer):
    """The rest of a ByteBuffer, or None for null."""
    return None if buffer is None else bytes(java.jvm.org.apache.kafka.common.utils.Utils.toArray(buffer))


@pytest.mark.parametrize("codec", Codec)
def test_kafka_reads_what_is_written_here(java, kafka, codec):
    times, keys, values, headers = map(list, zip(*RECORDS, strict=True))
    batch = encode_batch(
        values, keys=keys, headers=headers, timestamps_ms=times, codec=codec, base_offset=70, leader_epoch=2
    )
    buffer = java.jvm.java.nio.ByteBuffer.wrap(bytes(batch.data))
    (theirs,) = each(kafka.record.internal.MemoryRecords.readableRecords(buffer).batches())
    theirs.ensureValid()
    assert (theirs.baseOffset(), theirs.lastOffset(), theirs.partitionLeaderEpoch()) == (70, 69 + len(RECORDS), 2)
    assert theirs.compressionType().toString() == codec.name.lower()
    got = [
        (
            record.timestamp(),
            plain_bytes(java, record.key()),
            plain_bytes(java, record.value()),
            tuple((header.key(), header.value()) for header in record.headers()),
        )
        for record in each(theirs)
    ]
    assert got == RECORDS


@pytest.mark.parametrize("codec", Codec)
def test_what_kafka_writes_is_read_here(java, kafka, codec):
    array = java.new_array(kafka.record.internal.SimpleRecord, len(RECORDS))
    for n, (time, key, value, headers) in enumerate(RECORDS):
        theirs = java.new_array(kafka.header.Header, len(headers))
        for index, (name, content) in enumerate(headers):
            theirs[index] = kafka.header.internals.RecordHeader(name, content)
        array[n] = kafka.record.internal.SimpleRecord(time, key, value, theirs)
    compression = kafka.compress.Compression.of(codec.name.lower()).build()
    written = kafka.record.internal.MemoryRecords.withRecords(70, compression, array)
    batch = RecordBatch.check(plain_bytes(java, written.buffer()))
    assert batch.header.codec is codec
    assert batch.header.base_offset == 70
    assert [(r.timestamp_ms, r.key, r.value, r.headers) for r in batch.records()] == RECORDS
