"""From the log to what is sent, and from what a topic holds back to the log: with real logs, without a broker."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from filtering import StreamMetadata, pack_keys
from pushrep.env import SYSTEM_CLOCK
from pushrep.kafka.errors import DestinationAhead, OutboxDiverged, ShippingError, ShippingStopped, ShippingTimeout
from pushrep.kafka.progress import EpochPartitions, OffsetRanges, PartitionProgress, ShippingProgress
from pushrep.kafka.resume import Matching, RecordOrigin, whole_batches
from pushrep.kafka.sink_state import FENCE, SinkState
from pushrep.kafka.source import ReusedMemory, SealedReader, ShippedPartition
from pushrep.log import CorruptBatch, Durability, LogConfig, SegmentLog
from pushrep.records import Codec, CorruptRecordBatch, RecordBatch, encode_batch, header
from pushrep.records.header import crc32c
from tests.support.simulated_disk import SimulatedClock

PID = 7
ORIGIN = RecordOrigin(carrier="key", pids={0: PID, 1: 8}, pid_epoch=0)
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
    source.poll()
    found = []
    while (sent := source.next_piece(limit)) is not None:
        found.append(sent)
    return found


def spans(sent):
    return [(one.start, one.end) for one in sent]


def test_only_what_is_below_the_stable_offset_is_shipped(tmp_path):
    """Contract, Kafka as a destination: "It ships below `stable_offset` only"."""
    with SegmentLog.open(tmp_path / "orders-0", has_replicas=True) as log:
        source = ShippedPartition(log, 0, 0)
        append(log, b"a", b"b")
        append(log, b"c")
        assert not source.poll()
        log.advance_high_watermark(2)
        assert source.poll()
        assert spans(pieces(source)) == [(0, 2)]
        log.advance_high_watermark(3)
        assert spans(pieces(source)) == [(2, 3)]


def test_sealed_batches_come_as_they_are(log):
    first, second = append(log, b"a", b"b"), append(log, b"c")
    source = ShippedPartition(log, 0, 0)
    sent = pieces(source)
    assert [bytes(one.batch.data[61:]) for one in sent] == [bytes(one.data[61:]) for one in (first, second)]
    assert [one.log_crc for one in sent] == [first.header.crc, second.header.crc]


def test_after_a_rewind_everything_unacknowledged_comes_again(log):
    for n in range(4):
        append(log, b"%d" % n)
    source = ShippedPartition(log, 0, 0)
    assert len(pieces(source)) == 4
    source.on_acknowledged(2, 0, 2)
    source.rewind()
    assert spans(pieces(source)) == [(2, 3), (3, 4)]


def test_what_the_disk_broke_does_not_become_valid(log):
    """The CRC is computed again for the topic, so it is checked before."""
    append(log, b"good")
    append(log, b"broken")
    file = log.path / "00000000000000000000.log"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    source = ShippedPartition(log, 0, 0)
    source.poll()
    with pytest.raises(CorruptBatch):
        pieces(source)


def test_a_slice_whose_bytes_are_others_by_now_gives_none_of_them(tmp_path):
    """The log was cut and written again between the reading of its headers and of its bytes."""
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(preallocate_bytes=0)) as log:
        log.append([b"aa", b"bb"])
        log.append([b"cc", b"dd"])
        found = log.slices().read(2, 4, LIMIT)
        log.truncate_to(0, force=True)
        log.append([b"a" * 11])
        assert log.size_from(0) == found.position, "the next one begins at the same byte, with another offset"
        log.append([b"ee", b"ff"])
        reader = SealedReader(SimpleNamespace(read=lambda *_: found), ReusedMemory())
        assert reader.read(2, 4) == []


def test_the_records_before_one_that_is_refused_go_first(log):
    append(log, b"a", bytes(5000), b"c")
    source = ShippedPartition(log, 0, 0)
    source.poll()

    def check(_source, piece):
        if piece.batch.header.size_bytes > 1000:
            raise ValueError(piece.start)

    assert spans([source.next_piece(1000, check)]) == [(0, 1)]
    source.on_acknowledged(1, 0, 1)
    for _ in range(2):  # however often it is tried
        with pytest.raises(ValueError, match="1"):
            source.next_piece(1000, check)
    source.skip(OffsetRanges([(1, 2)]))
    assert spans([source.next_piece(1000, check)]) == [(1, 3)]


def test_while_a_refused_record_is_in_flight_no_other_is(log):
    append(log, *[b"%d" % n for n in range(6)])
    source = ShippedPartition(log, 0, 0)
    (batch,) = pieces(source)
    source.isolate(batch, [3])
    source.rewind()
    assert spans([source.next_piece(LIMIT)]) == [(0, 3)]
    source.in_flight = 1
    assert source.next_piece(LIMIT) is None
    source.on_acknowledged(3, 0, 3)
    source.in_flight = 0
    assert spans([source.next_piece(LIMIT)]) == [(3, 4)]
    source.in_flight = 1
    assert source.next_piece(LIMIT) is None
    source.in_flight = 0
    assert spans(pieces(source)) == [(4, 6)]
    source.rewind()
    source.isolate(batch, [])
    assert spans(pieces(source)) == [(3, 4), (4, 5), (5, 6)], "where the broker names none, each goes alone"


def test_the_newest_time_of_what_is_unsent_counts_without_what_is_given_up(log):
    """faults B2: brokers delete a segment by its newest time."""
    for value, time_ms in ((b"a", 10), (b"b", 90), (b"c", 20)):
        keys = pack_keys(PID, 0, log.log_end_offset, 1)
        batch = encode_batch([value], keys=keys, timestamps_ms=time_ms, base_offset=log.log_end_offset)
        log.append(batch, durability=Durability.FLUSHED)
    source = ShippedPartition(log, 0, 0)
    source.poll()
    assert source.has_since(90)
    assert not source.has_since(91)
    assert source.has_since(50), "retention was raised"
    source.skip(OffsetRanges([(1, 2)]))
    assert not source.has_since(50)
    assert source.has_since(20)
    source.next_offset = 3
    assert not source.has_since(0)


def test_a_skipped_record_counts_once_everything_before_it_is_acknowledged(log):
    append(log, b"a")
    append(log, b"given up")
    source = ShippedPartition(log, 0, 0)
    source.skipped = OffsetRanges([(1, 2)])
    source.poll()
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
        matching.match_batch(batch)
    assert matching.next_offsets == {0: 3}


def test_a_hole_is_not_jumped_over(log):
    for n in range(4):
        append(log, b"%d" % n)
    matching = Matching(ORIGIN, [log], {0: 0})
    for n in (0, 2, 3):
        matching.match_batch(sent_to_topic(log)[n])
    assert matching.next_offsets == {0: 1}


HOLES = {
    "from what is known on": (True, [(5, 1), (6, 1), (8, 2)], 5, [(7, 8)]),
    "at once behind what is known": (True, [(6, 1), (7, 1)], 5, [(5, 6)]),
    "filled later, which readers dropped": (True, [(6, 1), (7, 1), (5, 2), (6, 2)], 5, []),
    "given up": (True, [(2, 1), (4, 1)], 2, []),
    "given up, and one beside it": (True, [(2, 1), (5, 1)], 2, [(4, 5)]),
    "late copies of what is known": (True, [(1, 1), (2, 1), (8, 2), (9, 2)], 8, []),
    "a head that retention cut": (False, [(6, 1), (7, 1), (8, 1)], 0, []),
    "a hole behind it": (False, [(6, 1), (8, 1)], 0, [(7, 8)]),
    "a head cut amid copies of another producer": (False, [(1, 1), (2, 1), (8, 2), (9, 2)], 0, []),
    "sent again from the front": (False, [(5, 1), (6, 1), (0, 2), (1, 2)], 0, []),
}


@pytest.mark.parametrize("name", HOLES)
def test_faults_b7_a_record_that_is_missing_before_later_ones_is_a_hole(log, name):
    """faults B7: "matching on resume steps over listed offsets, any other hole" stops; retention cuts only heads."""
    is_whole, held, start, expected = HOLES[name]
    for n in range(10):
        append(log, b"%d" % n)
    matching = Matching(ORIGIN, [log], {0: start}, skipped={0: OffsetRanges([(3, 4)])}, is_whole=is_whole)
    for offset, producer_id in held:
        matching.match_batch(from_producer(next(iter(log.batches(offset, offset + 1))), producer_id))
    assert list(matching.holes(0)) == expected


def test_a_callers_own_record_that_is_not_looked_up_is_no_hole(log):
    for n in range(3):
        append(log, b"%d" % n, pid=4711 if n == 1 else PID)
    matching = Matching(ORIGIN, [log], {0: 0}, is_whole=True)
    for n in (0, 2):
        matching.match_batch(sent_to_topic(log)[n])
    assert not matching.holes(0)


@pytest.mark.parametrize(("pid", "offset", "epoch"), [(PID, 3, 0), (8, 0, 1)], ids=["above LEO", "later epoch"])
def test_a_topic_ahead_of_its_log_is_refused(log, pid, offset, epoch):
    """Contract: "A destination whose tail lies above LEO or in an epoch the log does not have is refused"."""
    append(log, b"a", b"b", b"c")
    matching = Matching(ORIGIN, [log], {0: 3})
    ahead = encode_batch([b"x"], keys=[StreamMetadata(pid, 0, offset).pack()], timestamps_ms=1)
    with pytest.raises(DestinationAhead) as caught:
        matching.match_batch(ahead)
    assert (caught.value.shipped_offset, caught.value.log_end_offset, caught.value.pid_epoch) == (offset, 3, epoch)


def of_topic(value=b"b", *, pid=PID, offset=1, timestamp_ms=1000, **settings):
    key = StreamMetadata(pid, 0, offset).pack()
    return encode_batch([value], keys=[key], timestamps_ms=timestamp_ms, **settings)


def from_producer(batch, producer_id):
    data = bytearray(batch.data)
    data[43:51] = producer_id.to_bytes(8)
    header.write_crc(data, crc32c(data, header.CRC_COVERS_FROM))
    return RecordBatch.check(data)


def with_append_time(batch):
    """The batch as a broker changes it: bit 3 of the attributes, and the broker's time."""
    data = bytearray(batch.data)
    data[22] |= 8
    header.write_crc(data, crc32c(data, header.CRC_COVERS_FROM))
    return RecordBatch.check(data)


FOUND = {
    "the same record": (of_topic(), None),
    "another value": (of_topic(b"x"), OutboxDiverged),
    "another header": (of_topic(headers=[[("h", b"1")]]), OutboxDiverged),
    "another time": (of_topic(timestamp_ms=1001), OutboxDiverged),
    "another time, by the broker": (with_append_time(of_topic(timestamp_ms=1001)), None),
    "of another outbox": (of_topic(b"x", pid=99), None),
    "above the end, of an earlier epoch": (of_topic(b"x", pid=6, offset=9), None),
    "another record there, of an earlier epoch": (of_topic(b"x", pid=6), None),
    "another record there": (of_topic(b"x", offset=2), OutboxDiverged),
    "below the start": (of_topic(b"x", offset=0), None),
}


@pytest.mark.parametrize("is_next", [True, False], ids=["the next", "not the next"])
@pytest.mark.parametrize("name", FOUND)
def test_a_record_of_the_topic_is_ours_by_its_content(tmp_path, name, is_next):
    """identity T1: the 20 bytes and the content; also of one that is not the next one of its log."""
    batch, expected = FOUND[name]
    origin = RecordOrigin(carrier="key", pids={0: 6, 1: PID, 2: 8}, pid_epoch=1)
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(preallocate_bytes=0)) as log:
        append(log, b"gone")
        append(log, b"b")
        append(log, b"a caller's own", pid=4711)
        append(log, b"c")
        log.delete_records(1)
        matching = Matching(origin, [log], {0: 1 if is_next else 3})
        if expected is None:
            matching.match_batch(batch)
            held = name in {"the same record", "another time, by the broker"}
            assert list(matching.held.get(0, [])) == ([(1, 2)] if held else [])
            return
        with pytest.raises(expected) as caught:
            matching.match_batch(batch)
        assert caught.value.in_topic == batch.records()[0]
        assert caught.value.in_log.offset == caught.value.offset
        assert next(iter(log.records(caught.value.offset))) == caught.value.in_log


@pytest.mark.parametrize("is_next", [True, False], ids=["the next", "not the next"])
@pytest.mark.parametrize("key", [b"k", b"another", None])
def test_under_the_header_carrier_the_key_is_content(log, is_next, key):
    """identity T1: "the content agree: value, headers, timestamp ...; the key under the header carrier"."""

    def of_one(key):
        headers = [[("stream-metadata", StreamMetadata(PID, 0, 0).pack())]]
        return encode_batch([b"v"], keys=[key], headers=headers, timestamps_ms=1000)

    log.append(of_one(b"k"))
    matching = Matching(RecordOrigin(carrier="header", pids={0: PID}, pid_epoch=0), [log], {0: 0 if is_next else 1})
    if key == b"k":
        matching.match_batch(of_one(key))
        assert list(matching.held[0]) == [(0, 1)]
        return
    with pytest.raises(OutboxDiverged) as caught:
        matching.match_batch(of_one(key))
    assert (caught.value.in_log.key, caught.value.in_topic.key) == (b"k", key)


def test_what_is_skipped_is_not_looked_for(log):
    """identity T4: the originals of a rebase are skipped, and the topic's records in their place do not count as
    ours.
    """
    for n in range(4):
        append(log, b"%d" % n)
    matching = Matching(ORIGIN, [log], {0: 0}, skipped={0: OffsetRanges([(1, 3)])})
    batches = sent_to_topic(log)
    for batch in (batches[0], of_topic(b"another"), batches[3]):
        matching.match_batch(batch)
    assert matching.next_offsets == {0: 4}
    assert list(matching.held[0]) == [(0, 1), (3, 4)]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=12), st.integers(0, 40), st.integers(0, 9))
def test_ranges_of_offsets_are_as_the_set(spans, start, length):
    ranges = OffsetRanges((at, at + size) for at, size in spans)
    plain = {n for at, size in spans for n in range(at, at + size)}
    assert {n for first, end in ranges for n in range(first, end)} == plain
    assert all(end < first for (_, end), (first, _) in pairwise(ranges)), "none touches the next"
    assert sum(end - start for start, end in ranges) == len(plain)
    asked = set(range(start, start + length))
    assert ranges.meets(start, start + length) == bool(plain & asked)
    assert {n for first, end in ranges.missing(start, start + length) for n in range(first, end)} == asked - plain
    assert ranges.end_of(start) == next(n for n in range(start, 60) if n not in plain)
    assert (start in ranges) == (start in plain)


def test_the_metadata_of_the_header_carrier_is_the_last_one():
    origin = RecordOrigin(carrier="header", pids={0: PID}, pid_epoch=0)
    headers = [[("stream-metadata", b"first"), ("other", b"x"), ("stream-metadata", b"last")]]
    (record,) = encode_batch([b"v"], headers=headers, timestamps_ms=1).records()
    assert origin.metadata_of(record) == b"last"
    (bare,) = encode_batch([b"v"], timestamps_ms=1).records()
    assert origin.metadata_of(bare) is None


def test_a_fetch_ends_at_the_batch_that_was_cut_off():
    whole = bytes(encode_batch([b"a"], timestamps_ms=1).data)
    for cut in (0, 1, 30, 61, len(whole) - 1):
        assert len(list(whole_batches(whole * 2 + whole[:cut]))) == 2


def test_messages_from_before_record_batches_are_refused_by_name():
    whole = bytes(encode_batch([b"a"], timestamps_ms=1, base_offset=6).data)
    for magic in (0, 1):
        old = (7).to_bytes(8) + (20).to_bytes(4) + bytes(4) + bytes([magic]) + bytes(15)
        read = whole_batches(whole + old)
        assert next(read).header.base_offset == 6
        with pytest.raises(CorruptRecordBatch, match=f"magic {magic}.*before Kafka 0.11"):
            next(read)


def test_a_batch_of_others_that_can_not_be_read_is_nobodys(log):
    append(log, b"a")
    data = bytearray(encode_batch([b"x" * 50], codec=Codec.GZIP, timestamps_ms=1).data)
    data[61:71] = bytes(10)  # no gzip, and the CRC is right
    header.write_crc(data, crc32c(data, header.CRC_COVERS_FROM))
    matching = Matching(ORIGIN, [log], {0: 0})
    matching.match_batch(RecordBatch.check(data))
    matching.match_batch(sent_to_topic(log)[0])
    assert matching.next_offsets == {0: 1}


def state(log, at, *, pid_epoch=0, stored_epoch=0):
    epochs = (EpochPartitions(0, 1),)
    progress = ShippingProgress(epochs=epochs, pid_epoch=stored_epoch, partitions={0: at} if at else {})
    return SinkState([log], progress, pid_epoch, SYSTEM_CLOCK, "orders", "broker:9092")


def test_troubles_that_take_turns_are_logged_once_each_until_nothing_is_in_the_way(log, caplog):
    sink = state(log, None)
    for trouble in ("no broker", "no leader", "no broker", "no leader", None, "no broker"):
        sink.set_trouble(trouble)
    assert [record.args[0] for record in caplog.records] == ["no broker", "no leader", "no broker"]
    assert sink.trouble == "no broker"


def test_a_head_that_was_cut_is_told(log):
    """identity T1"""
    sink, told = state(log, None), []
    sink.on_head_cut = told.append
    sink.head_was_cut("orders-0", 3, 7)
    assert told == ["orders-0 begins at 7, and was read up to 3: records of this outbox may be gone"]


def test_lag_is_the_age_since_the_append_whatever_time_a_record_has(log):
    """faults S4: "not by the record's own timestamp"; stored by minutes, so that a restart knows it, too."""
    clock = SimulatedClock()
    epochs = (EpochPartitions(0, 1),)
    sink = SinkState([log], ShippingProgress(epochs=epochs), 0, clock, "orders", "broker:9092")
    sink.note_ends()
    for seconds in range(1, 601):
        clock.advance(1_000)
        if seconds in {100, 400}:
            append(log, b"of 1970")
        sink.note_ends()
    assert abs(sink.lag().age_ms - 501_000) <= 1_000
    again = SinkState([log], sink.current(), 0, clock, "orders", "broker:9092")
    assert abs(again.lag().age_ms - 501_000) <= 60_000
    sink.sources[0].on_acknowledged(1, 0, 5)
    assert abs(sink.lag().age_ms - 201_000) <= 1_000
    sink.note_ends()
    assert abs(sink.lag().age_ms - 201_000) <= 1_000
    sink.sources[0].on_acknowledged(2, 0, 6)
    sink.note_ends()
    assert (sink.lag().age_ms, sink.current().appended) == (None, {})


def test_what_keeps_some_records_waiting_is_told_after_five_seconds(log):
    """faults B3, S4: a partition without a leader, a broker that is away, a fence that waits."""
    clock = SimulatedClock()
    sink = SinkState([log], ShippingProgress(epochs=(EpochPartitions(0, 1),)), 0, clock, "orders", "broker:9092")
    assert "have not answered yet" in sink.trouble
    sink.begin()
    sink.set_trouble("orders-1 has no leader", ("leader", 1))
    clock.advance(4_999)
    sink.set_trouble("a transaction is open", FENCE)
    assert (sink.trouble, sink.trouble_ms(), sink.fence_waits()) == (None, None, None)
    clock.advance(1)
    assert (sink.trouble, sink.trouble_ms()) == ("orders-1 has no leader", 5_000)
    clock.advance(5_000)
    assert sink.fence_waits() == ("a transaction is open", 5_001)
    sink.set_trouble(None, ("leader", 1))
    assert sink.trouble == "a transaction is open"
    sink.set_trouble("no broker answers")
    assert (sink.trouble, sink.trouble_ms()) == ("no broker answers", 0), "what stops everything comes first"
    sink.set_trouble(None)
    sink.set_trouble(None, FENCE)
    assert sink.trouble is None


def test_a_checkpoint_is_believed_if_the_log_has_its_batch(log):
    append(log, b"a", b"b")
    crc = next(log.batches(0)).header.crc
    source = state(log, PartitionProgress(2, 5, crc)).sources[0]
    assert (source.acknowledged, source.destination_offset) == (2, 5)


def test_a_log_that_was_cut_and_written_anew_is_shipped_from_its_start(log):
    append(log, b"a", b"b")
    append(log, b"c", pid=8)
    source = state(log, PartitionProgress(3, 5, 4711), pid_epoch=1).sources[0]
    assert (source.acknowledged, source.destination_offset) == (0, -1)


def test_a_log_that_ends_below_its_checkpoint_went_back_unless_a_new_epoch_began(log):
    append(log, b"a", b"b")
    with pytest.raises(DestinationAhead) as caught:
        state(log, PartitionProgress(3, 5, 1))
    assert (caught.value.shipped_offset, caught.value.log_end_offset) == (2, 2)
    assert state(log, PartitionProgress(3, 5, 1), pid_epoch=1).sources[0].acknowledged == 0


def test_waiting_tells_what_stands_in_the_way(log):
    append(log, b"a", b"b")
    shipped = state(log, None)
    shipped.sources[0].is_matching = False
    shipped.set_trouble("no broker answers")
    with pytest.raises(ShippingTimeout, match="no broker answers") as caught:
        shipped.wait({0: 2}, 0.0, 0.0)
    assert caught.value.records == 2
    lag = shipped.lag()
    assert (lag.records, lag.stopped, lag.trouble) == (2, (), "no broker answers")
    assert lag.size_bytes > 0
    assert lag.age_ms > 0
    shipped.sources[0].stop(ShippingError("too large"), 0, 0)
    with pytest.raises(ShippingStopped, match="offset 0: too large"):
        shipped.wait({0: 2}, None, None)
    shipped.sources[0].on_acknowledged(2, 0, 2)
    shipped.wait({0: 2}, None, None)
    assert shipped.lag().records == 0


def test_what_was_acknowledged_is_written_down_though_the_topics_offset_is_not_known(log):
    """identity T1: such a partition is read from its start; sent again is what it lacks behind the checkpoint only."""
    append(log, b"a", b"b")
    crc = next(log.batches(0)).header.crc
    shipped = state(log, PartitionProgress(2, -1, crc))  # as `pushrep outbox rebase` leaves it; no broker answers
    again = SinkState([log], shipped.current(), 0, SYSTEM_CLOCK, "orders", "broker:9092").sources[0]
    assert (again.acknowledged, again.destination_offset) == (2, -1)
