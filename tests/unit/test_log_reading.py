"""Reading by offset and by time, in the writing process and beside it, and cutting."""

import errno
import os
import struct
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from pushrep.env import REAL_FILESYSTEM, RealFilesystem
from pushrep.log import (
    BelowHighWatermark,
    CorruptBatch,
    Durability,
    LogClosed,
    LogConfig,
    NotALog,
    OffsetOutOfRange,
    SegmentLog,
    flush_scheduler,
    list_logs,
)
from pushrep.log.directory_files import list_segments, segment_path
from pushrep.log.published import PUBLISHED_NAME
from pushrep.log.segment import Segment
from pushrep.log.writer import LogWriter
from pushrep.records import BatchHeader, RecordBatch, encode_batch

pytestmark = pytest.mark.usefixtures("closes_its_files")

BUFFERED = Durability.BUFFERED
CONFIG = LogConfig(segment_bytes=3000, batch_bytes=400, index_interval_bytes=500, flush_ms=600_000)
TIMES = [1000 + n * 10 - (35 if n % 5 == 4 else 0) for n in range(500)]  # every fifth is late


@pytest.fixture
def log(tmp_path):
    """500 records over many segments, the last 50 of them not flushed."""
    with SegmentLog.open(tmp_path / "orders-0", CONFIG) as opened:
        for first in range(0, 500, 50):
            values = [b"value %d" % n for n in range(first, first + 50)]
            opened.append(values, timestamps_ms=TIMES[first : first + 50], durability=BUFFERED)
            if first == 400:
                opened.flush()
        yield opened


@pytest.fixture(params=["writer", "written"])
def readable(request, log):
    """Both readers of a log: the log itself, and a separate reader."""
    if request.param == "writer":
        yield log
        return
    with SegmentLog.open_reader(log.path, isolation="written") as reader:
        yield reader


class WatchedOpens(RealFilesystem):
    """Keeps the names of the files that were opened."""

    def __init__(self):
        self.opened = []

    def open(self, path, *, create=False, writable=True):
        self.opened.append(path.name)
        return super().open(path, create=create, writable=writable)


def test_reading_on_into_segments_that_were_begun_meanwhile_needs_no_index(log):
    filesystem = WatchedOpens()
    with SegmentLog.open_reader(log.path, isolation="written", filesystem=filesystem) as reader:
        at = 450
        for _ in reader.batches(at):
            pass
        before, at = list_segments(REAL_FILESYSTEM, log.path), log.log_end_offset
        log.append([b"x" * 300] * 30, durability=BUFFERED)
        assert len(list_segments(REAL_FILESYSTEM, log.path)) > len(before) + 2
        filesystem.opened.clear()
        assert [record.offset for record in reader.records(at)] == [*range(at, at + 30)]
    assert [name for name in filesystem.opened if "index" in name] == []


def test_any_range_of_records(readable):
    for start, end in [(0, 500), (0, 0), (500, 500), (17, 18), (49, 51), (123, 456)]:
        assert [(r.offset, r.value) for r in readable.records(start, end)] == [
            (n, b"value %d" % n) for n in range(start, end)
        ]
    assert len(list(readable.records(450))) == 50


def test_read_gives_whole_batches_within_the_limit(readable):
    offset, reads = 0, 0
    while data := readable.read(offset, 1000):
        assert len(data) <= 1000
        position = 0
        while position < len(data):
            size = 12 + int.from_bytes(data[position + 8 : position + 12])
            batch = RecordBatch.check(data[position : position + size])
            assert batch.header.base_offset <= offset < batch.header.next_offset
            offset, position = batch.header.next_offset, position + size
        reads += 1
    assert offset == 500
    assert reads > 10
    assert len(readable.read(3, 1)) > 61, "at least one batch, whatever the limit"


def test_batches_cover_the_range(readable):
    headers = [batch.header for batch in readable.batches(60, 333)]
    assert headers[0].base_offset <= 60 < headers[0].next_offset
    assert headers[-1].base_offset < 333 <= headers[-1].next_offset
    assert all(a.next_offset == b.base_offset for a, b in pairwise(headers))


@pytest.mark.parametrize(("start", "end"), [(501, None), (-1, None), (0, 501), (10, 5)])
def test_out_of_range_says_the_range(readable, start, end):
    with pytest.raises(OffsetOutOfRange) as refused:
        readable.records(start, end)
    assert (refused.value.start, refused.value.end) == (0, 500)


def test_the_first_record_at_or_after_a_time(readable):
    for time in [0, 999, 1000, 1001, 1234, 2500, 3333, 5980]:
        wanted = next((n for n in range(500) if TIMES[n] >= time), None)
        assert readable.offset_for_timestamp(time) == wanted, time
    assert readable.offset_for_timestamp(max(TIMES)) == TIMES.index(max(TIMES))
    assert readable.offset_for_timestamp(max(TIMES) + 1) is None


@pytest.mark.parametrize("suffix", [None, ".timeindex", ".index"], ids=["whole", "no time index", "no index"])
def test_the_record_with_the_largest_time(tmp_path, suffix):
    """Kafka's ListOffsets -3: of several with that time the first one, wherever it lies, within what can be read."""
    with SegmentLog.open(tmp_path / "orders-0", CONFIG) as log, SegmentLog.open_reader(log.path) as reader:
        assert log.offset_of_largest_timestamp() is None
        for largest in (35, 130, 135, 187, 199):
            for first in range(log.log_end_offset, log.log_end_offset + 200, 20):
                numbers = range(first % 200, first % 200 + 20)
                times = [9000 + largest if n in {largest, largest + 7} else 1000 + n % 50 for n in numbers]
                log.append([b"%d" % n * 20 for n in numbers], timestamps_ms=times, durability=BUFFERED)
            log.flush()
            for path in log.path.glob(f"*{suffix}"):
                path.unlink()
            at = log.log_end_offset - 200 + largest
            assert (log.offset_of_largest_timestamp(), reader.offset_of_largest_timestamp()) == (at, at)
        log.delete_records(at + 1)
        assert log.offset_of_largest_timestamp() is None, "it was the last record"


INDEX_DAMAGE = {
    "removed": None,
    "emptied": lambda data, entry: b"",
    "one entry left": lambda data, entry: data[:entry],
    "half of it": lambda data, entry: data[: len(data) // entry // 2 * entry],
    "without its last entry": lambda data, entry: data[:-entry],
    "cut inside of an entry": lambda data, entry: data[: -entry // 2],
    "zeros, as a power cut leaves them": lambda data, entry: bytes(len(data)),
    "the second half zeros": lambda data, entry: data[: len(data) // 2].ljust(len(data), b"\0"),
    "entries of another segment": lambda data, entry: data[entry:],
    "earlier than it was": lambda data, entry: earlier(data) if entry == 12 else data,
}


def earlier(data):
    """Every time earlier than the batch that it is of."""
    entries = struct.iter_unpack(">qi", data)
    return b"".join(struct.pack(">qi", time - 200, offset) for time, offset in entries)


@pytest.mark.parametrize("suffix", ["index", "timeindex"])
@pytest.mark.parametrize("damage", INDEX_DAMAGE)
def test_an_index_is_never_trusted_above_the_log(log, suffix, damage):
    """segment_log.md: both rebuildable, never trusted above the log. Of every sealed segment at once."""
    path, times = log.path, [*range(min(TIMES) - 1, max(TIMES) + 2, 61), *TIMES[::17], max(TIMES)]
    log.close()
    *sealed, _ = sorted(path.glob(f"*.{suffix}"))
    assert len(sealed) > 3
    for file in sealed:
        assert file.stat().st_size >= 2 * (12 if suffix == "timeindex" else 8)
        data = file.read_bytes()
        file.unlink()
        if INDEX_DAMAGE[damage] is not None:
            file.write_bytes(INDEX_DAMAGE[damage](data, 12 if suffix == "timeindex" else 8))
    wanted = [next((n for n in range(500) if TIMES[n] >= time), None) for time in times]

    def check(readable):
        assert [readable.offset_for_timestamp(time) for time in times] == wanted
        assert [record.offset for record in readable.records(0)] == list(range(500))
        for offset in range(0, 500, 29):
            assert next(readable.batches(offset)).header.base_offset <= offset

    with SegmentLog.open_reader(path) as reader:
        check(reader)  # before anybody mends anything
    with SegmentLog.open(path, CONFIG) as again:
        check(again)


def test_a_stable_reader_stops_at_what_is_flushed(log):
    with SegmentLog.open_reader(log.path) as reader:
        assert (reader.log_start_offset, reader.stable_offset, reader.log_end_offset) == (0, 450, 500)
        assert (reader.flushed_offset, reader.high_watermark) == (450, 500)
        assert len(list(reader.records(0))) == 450
        assert reader.read(450, 1000) == b""
        assert reader.offset_for_timestamp(TIMES[480]) is None
        log.flush()
        assert len(list(reader.records(450))) == 50
        assert reader.log_id == log.log_id
        before = reader
    for use in (lambda: before.stable_offset, lambda: before.records(0)):
        with pytest.raises(LogClosed):
            use()


def test_a_reader_follows_rolls(log):
    with SegmentLog.open_reader(log.path, isolation="written") as reader:
        for n in range(500, 700):
            log.append([b"value %d" % n], durability=BUFFERED)
            assert [r.value for r in reader.records(n)] == [b"value %d" % n]


def test_without_a_published_state_the_checkpoints_say_how_far(log):
    path = log.path
    log.close()
    (path.parent / PUBLISHED_NAME).unlink()
    with SegmentLog.open_reader(path) as reader:
        assert reader.stable_offset == reader.log_end_offset == 500
        assert len(list(reader.records(0))) == 500


def test_a_reader_writes_nothing_and_needs_a_log(tmp_path, log):
    log.close()  # its background writes checkpoints
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    with SegmentLog.open_reader(log.path) as reader:
        list(reader.records(0))
        reader.offset_for_timestamp(3000)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    with pytest.raises(NotALog):
        SegmentLog.open_reader(tmp_path / "orders-1")
    assert not (tmp_path / "orders-1").exists()
    with pytest.raises(ValueError, match="isolation"):
        SegmentLog.open_reader(log.path, isolation="dirty")
    assert list_logs(tmp_path) == [("orders", 0)]


@pytest.mark.parametrize("offset", [0, 1, 49, 50, 123, 499])
def test_a_cut_goes_to_the_base_of_the_batch_and_stays_after_reopening(tmp_path, log, offset):
    bases = [batch.header.base_offset for batch in log.batches(0)]
    end = log.truncate_to(offset, force=True)
    assert end == max(base for base in bases if base <= offset)
    assert log.log_end_offset == log.flushed_offset == log.stable_offset == end
    assert [r.offset for r in log.records(0)] == list(range(end))
    assert log.append([b"new"], timestamps_ms=9_999_999) == (end, end)
    assert log.offset_for_timestamp(9_000_000) == end
    log.close()
    with SegmentLog.open(tmp_path / "orders-0", CONFIG) as again:
        assert again.recovery.opening.value == "normal"
        assert [r.offset for r in again.records(0)] == list(range(end + 1))


def test_a_cut_below_the_high_watermark_has_to_be_meant(log):
    with pytest.raises(BelowHighWatermark) as refused:
        log.truncate_to(100)
    assert (refused.value.offset, refused.value.high_watermark) == (100, 500)
    assert log.truncate_to(500) == log.truncate_to(10_000) == log.log_end_offset == 500
    with pytest.raises(OffsetOutOfRange):
        log.truncate_to(-1, force=True)


def test_buffered_appends_reach_the_disk_in_the_background(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(flush_ms=1)) as log:
        log.append([b"x"], durability=BUFFERED)
        flushed = threading.Event()
        flush_scheduler.process_flusher().attach(watcher := _Watcher(log, flushed))
        flush_scheduler.process_flusher().soon(watcher, 1)
        assert flushed.wait(30), "the flusher did not come"
        flush_scheduler.process_flusher().detach(watcher)
        assert log.flushed_offset == 1
    names = [thread.name for thread in threading.enumerate()]
    assert "pushrep-flusher" not in names, "the last log that closes ends the thread"


class _Watcher:
    """Looks each millisecond, on the flusher's own thread, whether the log was flushed."""

    def __init__(self, log, flushed):
        self.log, self.flushed = log, flushed

    def flush_in_background(self):
        if self.log.flushed_offset == 1:
            self.flushed.set()
        else:
            flush_scheduler.process_flusher().soon(self, 1)


def test_flush_bytes_bound_what_is_not_on_disk(tmp_path):
    config = LogConfig(flush_bytes=10_000, flush_ms=600_000)
    with SegmentLog.open(tmp_path / "orders-0", config) as log:
        for _ in range(200):
            log.append([b"v" * 1000], durability=BUFFERED)
            assert log.log_end_offset - log.flushed_offset <= 2 * 10, "appends wait when the disk is behind"


def append_same_size(log, count, records):
    """`count` batches of 1300 bytes, whatever number of records they have."""
    for _ in range(count):
        batches = (encode_batch([b"x" * n, *[b"y" * 50] * (records - 1)], timestamps_ms=5) for n in range(1300))
        log.append(next(batch for batch in batches if len(batch.data) == 1300), durability=BUFFERED)


def test_where_a_read_ended_is_not_believed_after_a_cut(tmp_path):
    """Other batches of the same sizes are there now: to continue at the old byte position would skip records."""
    with SegmentLog.open(tmp_path / "orders-0", LogConfig()) as log:
        append_same_size(log, 8, 10)
        reader = SegmentLog.open_reader(log.path, isolation="written")
        assert RecordBatch.check(reader.read(10, 4 * 1300)[-1300:]).header.next_offset == 50
        log.truncate_to(0, force=True)
        append_same_size(log, 8, 12)
        header = RecordBatch.check(reader.read(50, 1)).header
        assert header.base_offset <= 50 < header.next_offset
        assert [record.offset for record in reader.records(50)] == list(range(50, 96))


def test_a_reader_finds_its_way_after_a_cut_that_moved_the_segments(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0", CONFIG) as log:
        for n in range(100):
            log.append(b"%d" % n * 40, durability=BUFFERED)
        reader = SegmentLog.open_reader(log.path, isolation="written")
        assert len(list(reader.records(0))) == 100
        log.truncate_to(7, force=True)
        for n in range(7, 100):
            log.append(b"%d" % n * 57, durability=BUFFERED)
        for start in range(100):
            assert [record.offset for record in reader.records(start)] == list(range(start, 100))
            header = RecordBatch.check(reader.read(start, 1)).header
            assert header.base_offset <= start < header.next_offset


@pytest.mark.parametrize("beside", [False, True])
def test_a_read_during_a_cut_is_out_of_range_and_not_corrupt(tmp_path, monkeypatch, beside):
    """The cut is published to readers before the files change."""
    with SegmentLog.open(tmp_path / "orders-0", CONFIG) as log:
        log.append([b"value"] * 300)
        readable = SegmentLog.open_reader(log.path) if beside else log
        answers = []

        def read_and_cut(*args):
            with pytest.raises(OffsetOutOfRange) as error:
                list(readable.records(100))
            answers.append(error.value.end)
            cut(*args)

        cut = Segment.cut
        monkeypatch.setattr(Segment, "cut", read_and_cut)
        end = log.truncate_to(50, force=True)
        assert answers == [end]


def test_a_reader_that_comes_to_the_end_of_a_cut_is_out_of_range(tmp_path):
    """The reader got records from before the cut, and no segment begins any more where these end."""
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(segment_bytes=2000, preallocate_bytes=0)) as log:
        append_same_size(log, 6, 10)
        assert list_segments(REAL_FILESYSTEM, log.path) == [0, 10, 20, 30, 40, 50]
        batches = log.batches(0)
        next(batches)
        log.truncate_to(20, force=True)
        assert next(batches).header.base_offset == 10
        with pytest.raises(OffsetOutOfRange):
            next(batches)


def test_who_waits_for_a_flush_is_let_go_when_its_records_are_cut(tmp_path, monkeypatch):
    with SegmentLog.open(tmp_path / "orders-0", CONFIG) as log:
        log.append(b"stays")
        flush_to = LogWriter.flush_to

        def cut_first(writer, *arguments):
            monkeypatch.undo()
            log.truncate_to(1, force=True)
            flush_to(writer, *arguments)

        monkeypatch.setattr(LogWriter, "flush_to", cut_first)
        # At a given offset, so that this thread appends and syncs for itself, as the main thread does.
        waiting = threading.Thread(target=lambda: log.append([b"goes"] * 3, base_offset=1), daemon=True)
        waiting.start()
        waiting.join(60)
        assert not waiting.is_alive(), "it syncs for ever for records that are not there any more"
        assert (log.log_end_offset, log.flushed_offset) == (1, 1)


def test_a_log_that_may_not_be_read_is_refused(tmp_path, monkeypatch, log):
    def refuse(self, directory):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))

    monkeypatch.setattr(RealFilesystem, "list", refuse)
    with pytest.raises(NotALog, match="may not be read by this user"):
        SegmentLog.open_reader(log.path)
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("damage", "segments"), [(Path.unlink, 1), (Path.unlink, 2), (lambda path: path.write_bytes(b""), 1)]
)
def test_a_time_index_that_is_lost_is_made_anew_from_the_first_record_on(tmp_path, damage, segments):
    config = LogConfig(index_interval_bytes=0, segment_bytes=1000, preallocate_bytes=0)
    with SegmentLog.open(tmp_path / "orders-0", config) as log:
        log.append(b"of the past and the future", timestamps_ms=9000)
        for number in range(12 * segments):
            log.append(b"value", timestamps_ms=100 + number)
    before = {path.name: path.read_bytes() for path in log.path.iterdir()}
    damage(log.path / f"{0:020d}.timeindex")
    with SegmentLog.open(log.path, config) as log:
        assert log.offset_for_timestamp(5000) == 0
    assert {path.name: path.read_bytes() for path in log.path.iterdir()} == before


def test_a_base_offset_that_lies_hides_no_records_behind_it(tmp_path):
    """The base offset is outside of the CRC. No cleaner has compacted this log, so no offset before the batch can be
    missing.
    """
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(segment_bytes=20_000, preallocate_bytes=0)) as log:
        for number in range(60):
            log.append([b"%d " % number + b"x" * 1000])
    base = list_segments(REAL_FILESYSTEM, log.path)[1]
    path, position = segment_path(log.path, base), 0
    data = bytearray(path.read_bytes())
    for _ in range(base, 30):
        position += BatchHeader.parse(data, position).size_bytes
    assert BatchHeader.parse(data, position).base_offset == 30
    data[position : position + 8] = (33).to_bytes(8)
    path.write_bytes(data)
    with SegmentLog.open_reader(log.path) as reader:
        got, records = [], reader.records(0)
        with pytest.raises(CorruptBatch, match="base offset 33 where 30 is expected") as damage:
            got.extend(record.offset for record in records)
        assert got == list(range(30))
        assert (damage.value.segment, damage.value.offset) == (path, 30)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(("cut_at", "ends_at"), [(8, 5), (10, None), (13, None), (3, 0)])
def test_faults_f5_records_of_two_histories_never_follow_each_other(tmp_path, beside, cut_at, ends_at):
    """What comes behind the cut fits byte for byte, under the same leader epoch."""
    config = LogConfig(segment_bytes=1000, flush_ms=600_000)
    with SegmentLog.open(tmp_path / "orders-0", config) as log:
        for _ in range(4):
            log.append([b"old" * 20] * 5, timestamps_ms=1)
        read = (SegmentLog.open_reader(log.path) if beside else log).records(0)
        assert [next(read).offset for _ in range(10)] == list(range(10))
        log.truncate_to(cut_at, force=True)
        while log.log_end_offset < 25:
            log.append([b"new" * 20] * 5, timestamps_ms=1)
        if ends_at is None:
            assert [(record.offset, record.value) for record in read] == [(n, b"new" * 20) for n in range(10, 20)]
        else:
            with pytest.raises(OffsetOutOfRange) as refused:
                next(read)
            assert (refused.value.offset, refused.value.end) == (10, 5)


def test_a_cut_of_the_batch_in_which_the_log_starts_takes_the_start_along(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0") as log:
        for _ in range(2):
            log.append([b"x"] * 10)
        assert log.delete_records(15) == 15
        assert log.truncate_to(17, force=True) == 10
        assert (log.log_start_offset, log.log_end_offset) == (10, 10), "a log never starts above its end"
        assert log.append(b"y").base_offset == 10
        assert [record.value for record in log.records(10)] == [b"y"]
    with SegmentLog.open(tmp_path / "orders-0") as log:
        assert (log.log_start_offset, log.log_end_offset) == (10, 11)
