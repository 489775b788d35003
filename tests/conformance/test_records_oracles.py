"""aiokafka's and kafka-python's codecs are the oracles: what they write is read here, and the other way round."""

import itertools
import random
import warnings

import pytest
from aiokafka.record.default_records import DefaultRecordBatch as AiokafkaBatch
from aiokafka.record.default_records import DefaultRecordBatchBuilder as AiokafkaBuilder
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy as AiokafkaPlainBuilder
from aiokafka.record.default_records import _DefaultRecordBatchPy as AiokafkaPlainBatch

from pushrep.records import Codec, HeaderColumn, RecordBatch, TimestampType, encode_batch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # kafka-python reads its schemas by an old importlib call
    from kafka.record.default_records import DefaultRecordBatch as KafkaPythonBatch
    from kafka.record.default_records import DefaultRecordBatchBuilder as KafkaPythonBuilder

BUILDERS = {"aiokafka": AiokafkaBuilder, "aiokafka plain": AiokafkaPlainBuilder, "kafka-python": KafkaPythonBuilder}
READERS = {"aiokafka": AiokafkaBatch, "aiokafka plain": AiokafkaPlainBatch, "kafka-python": KafkaPythonBatch}
NOW = 1_700_000_000_000


def cases():
    chance = random.Random(2013)
    text = b'{"carrier":"AA","distance":1089,"origin":"JFK"}'
    yield "one", [(NOW, b"key", b"value", ())]
    yield "nulls and empty", [(NOW, None, None, ()), (NOW, b"", b"", ()), (NOW, None, b"", ()), (NOW, b"", None, ())]
    yield "times out of order", [(NOW + d, b"k", b"v", ()) for d in (5, -5, 1 << 40, -(1 << 39), 0)]
    yield (
        "headers",
        [
            (NOW, b"k", b"v", (("stream-metadata", bytes(range(20))),)),
            (NOW, b"k", b"v", (("a", b""), ("a", None), ("snö", b"x" * 200))),
            (NOW, b"k", b"v", ()),
        ],
    )
    yield "big", [(NOW, b"k" * 9_000, chance.randbytes(1_500_000), (("h", b"y" * 70_000),)), (NOW, None, text, ())]
    yield "many equal", [(NOW, chance.randbytes(20), chance.randbytes(100), ()) for _ in range(9_000)]
    yield (
        "many ragged",
        [
            (NOW + chance.randrange(9_999), chance.choice([None, b"", b"key"]), text * chance.randrange(9), ())
            for _ in range(3_000)
        ],
    )


CASES = dict(cases())


def each_codec():
    """Each oracle with each codec and case. kafka-python takes long for large batches: in the short form they are plain
    or of one codec; small ones are of every codec, and large ones of aiokafka, too.
    """

    def marks(oracle, codec, case):
        is_dear = oracle == "kafka-python" and case in {"big", "many equal"} and codec not in {Codec.NONE, Codec.ZSTD}
        return [pytest.mark.long] if is_dear else []

    return [pytest.param(*each, marks=marks(*each)) for each in itertools.product(BUILDERS, Codec, CASES)]


def ours(records, codec, **fields):
    times, keys, values, headers = map(list, zip(*records, strict=True))
    return encode_batch(values, keys=keys, headers=headers, timestamps_ms=times, codec=codec, **fields)


def theirs(builder, records, codec):
    built = builder(
        magic=2,
        compression_type=int(codec),
        is_transactional=0,
        producer_id=77,
        producer_epoch=3,
        base_sequence=1_000,
        batch_size=1 << 30,
    )
    for n, (time, key, value, headers) in enumerate(records):
        assert built.append(n, timestamp=time, key=key, value=value, headers=list(headers)) is not None
    return bytes(built.build())


@pytest.mark.parametrize(("oracle", "codec", "case"), each_codec())
def test_what_they_write_is_read(oracle, codec, case):
    records = CASES[case]
    batch = RecordBatch.check(theirs(BUILDERS[oracle], records, codec))
    got = [(r.timestamp_ms, r.key, r.value, r.headers) for r in batch.records()]
    assert got == records
    header = batch.header
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (77, 3, 1_000)
    assert header.last_offset == len(records) - 1
    assert header.max_timestamp_ms == max(each[0] for each in records)
    assert header.timestamp_type is TimestampType.CREATE_TIME


@pytest.mark.parametrize(("oracle", "codec", "case"), each_codec())
def test_what_is_written_they_read(oracle, codec, case):
    records = CASES[case]
    batch = ours(records, codec, base_offset=5_000, leader_epoch=9)
    foreign = READERS[oracle](bytes(batch.data))
    assert foreign.validate_crc()
    assert (foreign.base_offset, foreign.compression_type, foreign.max_timestamp) == (
        5_000,
        int(codec),
        batch.header.max_timestamp_ms,
    )
    got = [(r.offset, r.timestamp, r.key, r.value, tuple(map(tuple, r.headers))) for r in foreign]
    assert got == [(5_000 + n, *each) for n, each in enumerate(records)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("oracle", BUILDERS)
def test_uncompressed_batches_are_the_same_bytes(oracle, case):
    records = CASES[case]
    mine = ours(records, Codec.NONE)
    assert mine.with_producer(77, 3, 1_000)[57:] == theirs(BUILDERS[oracle], records, Codec.NONE)[57:]
    # Byte 12 is the leader epoch, which each fills in its own way; the CRC covers all else.
    assert mine.with_producer(77, 3, 1_000)[16:57] == theirs(BUILDERS[oracle], records, Codec.NONE)[16:57]


def test_a_header_column_is_read_by_them():
    values, metadata = [b"v" * 50] * 300, random.Random(1).randbytes(20 * 300)
    batch = encode_batch(values, headers=HeaderColumn("stream-metadata", metadata), timestamps_ms=NOW)
    for reader in READERS.values():
        got = [tuple(map(tuple, record.headers)) for record in reader(bytes(batch.data))]
        assert got == [(("stream-metadata", metadata[20 * n : 20 * n + 20]),) for n in range(300)]


def test_stamped_and_re_produced_batches_stay_valid_for_them():
    batch = ours(CASES["one"], Codec.ZSTD)
    batch.stamp(123_456, 7)
    for reader in READERS.values():
        assert reader(bytes(batch.data)).validate_crc()
        sent = reader(bytes(batch.with_producer(1, 2, 3)))
        assert sent.validate_crc()
        assert (sent.base_offset, sent.producer_id, sent.producer_epoch, sent.base_sequence) == (0, 1, 2, 3)


def test_a_transactional_batch_is_known_as_one():
    built = AiokafkaPlainBuilder(2, 0, 1, 5, 1, 0, 1 << 20)
    built.append(0, NOW, b"k", b"v", [])
    header = RecordBatch.check(bytes(built.build())).header
    assert header.is_transactional
    assert not header.is_control


@pytest.mark.parametrize("oracle", READERS)
def test_control_batches_and_log_append_time_agree_with_them(oracle):
    # A commit marker: key = version i16, type i16 (1 commit); value = version i16, coordinator epoch i32.
    marker = encode_batch([b"\0\0\0\0\0\x07"], keys=[b"\0\0\0\x01"], timestamps_ms=NOW, producer_id=9, producer_epoch=1)
    header = marker.header._replace(attributes=0x38, max_timestamp_ms=NOW + 50)
    batch = RecordBatch(header.pack() + bytes(marker.data[61:]))
    (record,) = batch.records()
    foreign = READERS[oracle](bytes(batch.data))
    (theirs,) = foreign
    assert foreign.is_control_batch
    assert batch.header.is_control
    assert (record.key, record.value) == (theirs.key, theirs.value)
    assert (record.timestamp_ms, record.timestamp_type) == (theirs.timestamp, TimestampType.LOG_APPEND_TIME)
