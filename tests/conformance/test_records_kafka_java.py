"""Kafka's own Java classes read every codec's batches, and what they write is read here: their jars, over py4j."""

import os
import random
import shutil
from pathlib import Path

import pytest
from py4j import java_gateway
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JJavaError, get_return_value

from pushrep.records import Codec, CorruptRecordBatch, RecordBatch, encode_batch
from pushrep.records import header as layout
from pushrep.records.batch import compress

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
    with pytest.MonkeyPatch.context() as patch:
        # pyspark's, in a process that had a Spark session, asks Spark's Java machine about this one's errors.
        patch.setattr(java_gateway, "get_return_value", get_return_value)
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


def framed(plain, codec, packed):
    """The batch `plain` with its records as `packed`."""
    header = plain.header._replace(attributes=plain.header.attributes | codec.value, batch_length=49 + len(packed))
    data = bytearray(header.pack() + packed)
    layout.write_crc(data, layout.crc32c(data, layout.CRC_COVERS_FROM))
    return bytes(data)


def whole(codec, *parts):
    return bytes(compress(codec, memoryview(b"".join(parts))))


def each_alone(codec, *parts):
    return b"".join(whole(codec, part) for part in parts)


SKIPPED = bytes.fromhex("502a4d1803000000") + b"abc"
FRAMINGS = {
    "each alone": each_alone,
    "zeros behind": lambda *given: whole(*given) + bytes(20),
    "a few zeros behind": lambda *given: whole(*given) + bytes(3),
    "each alone, zeros behind": lambda *given: each_alone(*given) + bytes(600),
    "other bytes behind": lambda *given: whole(*given) + b"no frame begins here",
    "a skippable frame behind": lambda *given: whole(*given) + SKIPPED,
    "a skippable frame between": lambda codec, *parts: SKIPPED.join(whole(codec, part) for part in parts),
    "an empty one between": lambda codec, *parts: whole(codec, b"").join(whole(codec, part) for part in parts),
    "the second one damaged": lambda *given: each_alone(*given)[:-9],
}
READ_HERE_ALONE = [
    (Codec.LZ4, name)
    for name in ("each alone", "each alone, zeros behind", "a skippable frame between", "an empty one between")
]
"""Kafka's reader takes the first LZ4 frame alone."""


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.NONE])
def test_framings_of_other_writers_are_read_where_kafka_reads_them(java, kafka, codec, framing):
    plain = encode_batch([b"value %d " % n * 5 for n in range(50)], timestamps_ms=NOW)
    payload = bytes(plain.payload())
    batch = framed(plain, codec, FRAMINGS[framing](codec, payload[:999], payload[999:]))
    (theirs,) = each(
        kafka.record.internal.MemoryRecords.readableRecords(java.jvm.java.nio.ByteBuffer.wrap(batch)).batches()
    )
    theirs.ensureValid()
    try:
        want = [(record.offset(), plain_bytes(java, record.value())) for record in each(theirs)]
    except Py4JJavaError:
        if (codec, framing) in READ_HERE_ALONE:
            want = [(record.offset, record.value) for record in plain.records()]
        else:
            with pytest.raises(CorruptRecordBatch):
                RecordBatch.check(batch).records()
            return
    assert [(record.offset, record.value) for record in RecordBatch.check(batch).records()] == want
