"""From the log to what is sent, and from what a topic holds back to the log: with real logs, without a broker."""

import pytest

from filtering import StreamMetadata, pack_keys
from pushrep.kafka.errors import DestinationAhead, RecordAboveLimit, ShippingStopped, ShippingTimeout
from pushrep.kafka.progress import EpochPartitions, PartitionProgress, Progress
from pushrep.kafka.resume import Matching, Origin, whole_batches
from pushrep.kafka.shipment import Shipment
from pushrep.kafka.source import LogSource
from pushrep.log import CorruptBatch, Durability, LogConfig, SegmentLog
from pushrep.records import encode_batch
from pushrep.seams import SYSTEM_CLOCK

PID = 7
ORIGIN = Origin(carrier="key", pids={0: PID, 1: 8}, pid_epoch=0)
LIMIT = 1 << 20


@pytest.fixture
def log(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(preallocate_bytes=0)) as opened:
        yield opened


def append(log, *values, pid=PID):
    base = log.log_end_offset
    keys = pack_keys(pid, log.partition, base, len(values))
    batch = encode_batch(list(values), keys=keys, timestamps_ms=1000, base_offset=base)
    log.append(batch, durability=Durability.FLUSHED)
    return batch


def pieces(source, limit=LIMIT):
    source.look()
    found = []
    while (sent := source.next_piece(limit)) is not None:
        found.append(sent)
    return found


def spans(sent):
    return [(one.start, one.end) for one in sent]


def test_only_what_is_below_the_stable_offset_is_shipped(tmp_path):
    """Contract, Kafka as a destination: "It ships below `stable_offset` only"."""
    with SegmentLog.open(tmp_path / "orders-0", has_replicas=True) as log:
        source = LogSource(log, 0, 0)
        append(log, b"a", b"b")
        append(log, b"c")
        assert not source.look()
        log.advance_high_watermark(2)
        assert source.look()
        assert spans(pieces(source)) == [(0, 2)]
        log.advance_high_watermark(3)
        assert spans(pieces(source)) == [(2, 3)]


def test_sealed_batches_come_as_they_are(log):
    first, second = append(log, b"a", b"b"), append(log, b"c")
    source = LogSource(log, 0, 0)
    sent = pieces(source)
    assert [bytes(one.batch.data[61:]) for one in sent] == [bytes(one.data[61:]) for one in (first, second)]
    assert [one.log_crc for one in sent] == [first.header.crc, second.header.crc]


def test_after_a_rewind_everything_unacknowledged_comes_again(log):
    for n in range(4):
        append(log, b"%d" % n)
    source = LogSource(log, 0, 0)
    assert len(pieces(source)) == 4
    source.on_acknowledged(2, 0, 2)
    source.rewind()
    assert spans(pieces(source)) == [(2, 3), (3, 4)]


def test_what_the_disk_broke_does_not_become_valid(log):
    """The CRC is computed anew for the topic, so it is checked before."""
    append(log, b"good")
    append(log, b"broken")
    file = log.path / "00000000000000000000.log"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    source = LogSource(log, 0, 0)
    source.look()
    with pytest.raises(CorruptBatch):
        pieces(source)


def test_the_records_before_one_that_is_too_large_go_first(log):
    append(log, b"a", bytes(5000), b"c")
    source = LogSource(log, 0, 0)
    source.look()
    assert spans([source.next_piece(1000)]) == [(0, 1)]
    for _ in range(2):  # however often it is tried
        with pytest.raises(RecordAboveLimit) as caught:
            source.next_piece(1000)
        assert caught.value.offset == 1
    source.skipped = frozenset({1})
    assert spans(pieces(source, 1000)) == [(1, 3)]


def test_a_skipped_record_counts_once_everything_before_it_is_acknowledged(log):
    append(log, b"a")
    append(log, b"given up")
    source = LogSource(log, 0, 0)
    source.skipped = frozenset({1})
    source.look()
    assert spans([source.next_piece(LIMIT)]) == [(0, 1)]
    source.in_flight = 1
    assert pieces(source) == []
    assert source.acknowledged == 0
    source.on_acknowledged(1, 0, 1)
    source.in_flight = 0
    assert pieces(source) == []
    assert source.acknowledged == 2


def sent_to_topic(log, *, repeat=()):
    """The topic's batches: the log's, those numbers again behind them."""
    own = list(log.batches(0))
    return own + [own[n] for n in repeat]


def test_matching_counts_its_own_records_among_copies_and_strangers(log):
    """Contract: "A restart reads the topic from there to its end and matches its own records in log order"."""
    for n in range(5):
        append(log, b"%d" % n)
    matching = Matching(ORIGIN, [log], {0: 1})
    batches = sent_to_topic(log)
    foreign = encode_batch([b"f", b"g"], keys=pack_keys(99, 0, 1, 2), timestamps_ms=1)
    for batch in (batches[0], foreign, batches[1], batches[1], batches[0], batches[2]):
        matching.take(batch)
    assert matching.next_offsets == {0: 3}


def test_a_hole_is_not_jumped_over(log):
    for n in range(4):
        append(log, b"%d" % n)
    matching = Matching(ORIGIN, [log], {0: 0})
    for n in (0, 2, 3):
        matching.take(sent_to_topic(log)[n])
    assert matching.next_offsets == {0: 1}


@pytest.mark.parametrize(("pid", "offset", "epoch"), [(PID, 3, 0), (8, 0, 1)], ids=["above LEO", "later epoch"])
def test_a_topic_ahead_of_its_log_is_refused(log, pid, offset, epoch):
    """Contract: "A destination whose tail lies above LEO or in an epoch the log does not have is refused"."""
    append(log, b"a", b"b", b"c")
    matching = Matching(ORIGIN, [log], {0: 3})
    ahead = encode_batch([b"x"], keys=[StreamMetadata(pid, 0, offset).pack()], timestamps_ms=1)
    with pytest.raises(DestinationAhead) as caught:
        matching.take(ahead)
    assert (caught.value.shipped_offset, caught.value.log_end_offset, caught.value.pid_epoch) == (offset, 3, epoch)


def test_the_metadata_of_the_header_carrier_is_the_last_one():
    origin = Origin(carrier="header", pids={0: PID}, pid_epoch=0)
    headers = [[("stream-metadata", b"first"), ("other", b"x"), ("stream-metadata", b"last")]]
    (record,) = encode_batch([b"v"], headers=headers, timestamps_ms=1).records()
    assert origin.metadata_of(record) == b"last"
    (bare,) = encode_batch([b"v"], timestamps_ms=1).records()
    assert origin.metadata_of(bare) is None


def test_a_fetch_ends_at_the_batch_that_was_cut_off():
    whole = bytes(encode_batch([b"a"], timestamps_ms=1).data)
    for cut in (0, 1, 30, 61, len(whole) - 1):
        assert len(list(whole_batches(whole * 2 + whole[:cut]))) == 2


def shipment(log, at, *, pid_epoch=0, stored_epoch=0):
    epochs = (EpochPartitions(0, 1),)
    progress = Progress(epochs=epochs, pid_epoch=stored_epoch, partitions={0: at} if at else {})
    return Shipment([log], progress, pid_epoch, SYSTEM_CLOCK)


def test_a_checkpoint_is_believed_if_the_log_has_its_batch(log):
    append(log, b"a", b"b")
    crc = next(log.batches(0)).header.crc
    source = shipment(log, PartitionProgress(2, 5, crc)).sources[0]
    assert (source.acknowledged, source.destination_offset) == (2, 5)


def test_a_log_that_was_cut_and_written_anew_is_shipped_from_its_start(log):
    append(log, b"a", b"b")
    append(log, b"c", pid=8)
    source = shipment(log, PartitionProgress(3, 5, 4711), pid_epoch=1).sources[0]
    assert (source.acknowledged, source.destination_offset) == (0, -1)


def test_a_log_that_ends_below_its_checkpoint_went_back_unless_a_new_epoch_began(log):
    append(log, b"a", b"b")
    with pytest.raises(DestinationAhead) as caught:
        shipment(log, PartitionProgress(3, 5, 1))
    assert (caught.value.shipped_offset, caught.value.log_end_offset) == (2, 2)
    assert shipment(log, PartitionProgress(3, 5, 1), pid_epoch=1).sources[0].acknowledged == 0


def test_waiting_tells_what_stands_in_the_way(log):
    append(log, b"a", b"b")
    shipped = shipment(log, None)
    shipped.told("no broker answers")
    with pytest.raises(ShippingTimeout, match="no broker answers") as caught:
        shipped.wait({0: 2}, 0.0, 0.0)
    assert caught.value.records == 2
    lag = shipped.lag()
    assert (lag.records, lag.stopped, lag.trouble) == (2, (), "no broker answers")
    assert lag.size_bytes > 0
    assert lag.age_ms > 0
    shipped.sources[0].stop("too large", 0)
    with pytest.raises(ShippingStopped, match="offset 0: too large"):
        shipped.wait({0: 2}, None, None)
    shipped.sources[0].on_acknowledged(2, 0, 2)
    shipped.wait({0: 2}, None, None)
    assert shipped.lag().records == 0
