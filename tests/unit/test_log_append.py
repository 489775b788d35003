"""Appending: what can be given, where it goes, what is refused, and what is left of a write that failed."""

import errno
import inspect
import os
import random
import resource
import signal
import sys
import threading
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path

import pytest

from pushrep.env import REAL_FILESYSTEM, RealFilesystem
from pushrep.env.filesystem import RealFile
from pushrep.errors import BadArgument, ForkedProcess
from pushrep.log import (
    AppendFailed,
    CorruptLog,
    Durability,
    InvalidLogName,
    LogClosed,
    LogConfig,
    LogLocked,
    LogPoisoned,
    NotALog,
    SegmentLog,
    StillNeeded,
)
from pushrep.log.config import POSITION_MAX
from pushrep.log.directory import DirectoryView
from pushrep.log.directory_files import INDEX_SUFFIX, TIME_INDEX_SUFFIX, DirectoryLock, list_segments
from pushrep.log.flush_scheduler import CommitRequest, GroupCommitLeader
from pushrep.log.published import LogOffsets
from pushrep.log.segment import Segment
from pushrep.log.writer import LogWriter
from pushrep.records import (
    HEADER_BYTES,
    Codec,
    CorruptRecordBatch,
    HeaderColumn,
    RecordBatch,
    RecordTooLarge,
    encode_batch,
)
from pushrep.records.header import CRC_COVERS_FROM, crc32c, write_crc
from tests.support.forks import code_in_fork
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk
from tests.unit.gated_disk import GatedDisk, LosingDisk, until

BUFFERED = Durability.BUFFERED
PATH = Path("/logs/orders-0")


@pytest.fixture
def log(tmp_path):
    with SegmentLog.open(tmp_path / "orders-7") as opened:
        yield opened


def test_one_value_a_list_and_a_ready_batch(log):
    assert log.append(b"one") == (0, 0)
    assert log.append([b"two", None, b""], keys=[b"k", None, b""], timestamps_ms=[5, 6, 4]) == (1, 3)
    ready = encode_batch([b"x", b"y"], timestamps_ms=9, base_offset=77)
    assert log.append(ready) == (4, 5)
    assert (ready.header.base_offset, ready.header.leader_epoch) == (4, 0), "stamped"
    records = list(log.records(0))
    assert [r.offset for r in records] == list(range(6))
    assert [r.value for r in records] == [b"one", b"two", None, b"", b"x", b"y"]
    assert [r.key for r in records[1:4]] == [b"k", None, b""]
    assert [r.timestamp_ms for r in records[1:]] == [5, 6, 4, 9, 9]
    assert (log.topic, log.partition) == ("orders", 7)
    assert log.log_end_offset == log.flushed_offset == log.high_watermark == log.stable_offset == 6


def test_a_long_list_becomes_batches_of_the_wanted_size(tmp_path):
    config = LogConfig(batch_bytes=5000)
    values = [b"%05d" % n * (n % 40) for n in range(3000)]
    keys = b"".join(b"%020d" % n for n in range(3000))
    headers = HeaderColumn("n", [b"%d" % n for n in range(3000)])
    with SegmentLog.open(tmp_path / "orders-0", config) as log:
        assert log.append(values, keys=keys, headers=headers, timestamps_ms=range(3000)) == (0, 2999)
        sizes = [batch.header.size_bytes for batch in log.batches(0)]
        assert max(sizes) <= 5000
        assert min(sizes[:-1]) > 2500, "no needlessly small ones"
        for n, record in enumerate(log.records(0)):
            assert record == (n, n, 0, b"%020d" % n, values[n], (("n", b"%d" % n),))


def test_headers_per_record_may_be_iterators(log):
    log.append([b"a", b"b"], headers=[iter([("x", b"1")]), []])
    assert [record.headers for record in log.records(0)] == [(("x", b"1"),), ()]


@pytest.mark.parametrize("codec", Codec)
def test_a_record_that_is_too_large_is_refused_with_its_size_and_nothing_is_written(tmp_path, codec):
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(batch_bytes_max=10_000, codec=codec)) as log:
        with pytest.raises(RecordTooLarge) as refused:
            log.append([b"small", os.urandom(20_000), b"small"])
        assert refused.value.size >= 20_000
        assert (refused.value.limit, refused.value.setting) == (10_000, "batch_bytes_max")
        with pytest.raises(RecordTooLarge):
            log.append(encode_batch([os.urandom(20_000)], timestamps_ms=0))
        assert log.log_end_offset == 0
        assert log.append(b"small") == (0, 0)


@pytest.mark.parametrize("count", [2, 3])
def test_records_that_a_codec_makes_larger_than_the_limit_are_two_batches(tmp_path, count):
    draw, size = random.Random(count), 300_000
    values = [draw.randbytes(size) for _ in range(count)]
    fits = HEADER_BYTES + count * (size + 36)  # as much as records of this size take without a codec, at most
    config = LogConfig(codec=Codec.SNAPPY, batch_bytes=fits, batch_bytes_max=fits)
    with SegmentLog.open(tmp_path / "orders-0", config) as log:
        log.append(values)
        assert [record.value for record in log.records(0)] == values
        assert len(list(log.batches(0))) == 2, "each half of them in one"


def test_the_segment_limits_a_record_too(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(segment_bytes=1000)) as log:
        with pytest.raises(RecordTooLarge, match="segment_bytes"):
            log.append(b"x" * 1000)
        log.append(b"x" * 900)


@pytest.mark.parametrize(
    ("data", "columns", "message"),
    [
        ([], {}, "empty"),
        ("text", {}, "encode"),
        (None, {}, "append: takes bytes, a list of them or a RecordBatch, not NoneType"),
        ({b"a"}, {}, "append: takes bytes, a list of them or a RecordBatch, not set"),
        ([b"a", "b"], {}, r"values\[1\]: give bytes or None, not 'b'"),
        ([b"a", 1], {}, r"values\[1\]: give bytes or None, not 1"),
        ([b"a", b"b"], {"keys": [b"k"]}, "keys: has 1 entries for 2 values"),
        ([b"a", b"b"], {"keys": b"123"}, "keys"),
        ([b"a", b"b"], {"keys": [b"k", "l"]}, r"keys\[1\]: give bytes or None, not 'l'"),
        ([b"a"], {"keys": 5}, "keys: give one entry per value"),
        ([b"a", b"b"], {"timestamps_ms": [1]}, "timestamps_ms"),
        ([b"a"], {"timestamps_ms": 1.5}, "timestamps_ms: give whole milliseconds"),
        ([b"a"], {"timestamps_ms": True}, "timestamps_ms: give whole milliseconds"),
        (b"a", {"timestamps_ms": True}, "timestamps_ms: give whole milliseconds"),
        ([b"a"], {"timestamps_ms": 1 << 63}, "timestamps_ms: .* outside"),
        ([b"a"], {"headers": [[], []]}, "headers"),
        ([b"a"], {"headers": [("a", b"b")]}, r"headers\[0\]: give a list of"),
        ([b"a"], {"headers": [[("a", "b")]]}, r"headers\[0\]: give a list of"),
        ([b"a"], {"headers": [[("\ud800", b"b")]]}, r"headers\[0\]: give a list of"),
        ([b"a"], {"headers": 5}, "headers: give one entry per value"),
        ([b"a"], {"headers": HeaderColumn("n", [5])}, "append: the records can't be encoded"),
        ([b"a"], {"headers": HeaderColumn(5, [b"x"])}, "append: the records can't be encoded"),
        (b"a", {"durability": "FLUSHED"}, "durability: give Durability.FLUSHED or BUFFERED, not 'FLUSHED'"),
        (b"a", {"durability": None}, "durability"),
        (encode_batch([b"a"], timestamps_ms=5), {"keys": [b"k"]}, "keys: a ready RecordBatch has its own"),
        (encode_batch([b"a"], timestamps_ms=5), {"timestamps_ms": 6}, "timestamps_ms: a ready RecordBatch has its own"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(log, data, columns, message):
    with pytest.raises(BadArgument, match=message):
        log.append(data, **columns)
    assert log.log_end_offset == 0


def test_a_ready_batch_is_checked_before_it_is_written(log):
    """An invalid batch would be damage for every reader, and none could read past it."""
    data = bytearray(encode_batch([b"value"], timestamps_ms=5).data)
    assert log.append(RecordBatch(bytes(data))) == (0, 0)
    data[-1] ^= 1
    with pytest.raises(CorruptRecordBatch, match="CRC"):
        log.append(RecordBatch(data))
    assert [record.value for record in log.records(0)] == [b"value"]


def changed(batch, **fields):
    """A batch with other fields in its header, and a CRC that fits."""
    data = bytearray(batch.header._replace(**fields).pack()) + batch.data[HEADER_BYTES:]
    write_crc(data, crc32c(data, CRC_COVERS_FROM))
    return data


TWO = encode_batch([b"first", b"second"], timestamps_ms=5)
SECOND_RECORD = TWO.data.index(b"first") + len(b"first") + 1  # behind the headers' count


def undecodable():
    data = bytearray(TWO.data)
    data[HEADER_BYTES:] = b"\xff" * (len(data) - HEADER_BYTES)
    write_crc(data, crc32c(data, CRC_COVERS_FROM))
    return data


def with_a_hole():
    """Two records at the deltas 0 and 5; the third byte behind a record's length is its offset delta, zigzag."""
    data = changed(TWO, last_offset_delta=5)
    data[SECOND_RECORD + 3] = 5 << 1
    write_crc(data, crc32c(data, CRC_COVERS_FROM))
    return data


def falling():
    data = bytearray(TWO.data)
    data[SECOND_RECORD + 3] = 0
    write_crc(data, crc32c(data, CRC_COVERS_FROM))
    return data


UNREADABLE = {
    "1 records for 2 offsets": lambda: changed(TWO, record_count=1),
    "2 records for 6 offsets": with_a_hole,
    "record 1 has offset delta 0 after 0": falling,
    "0 records for 1 offsets": lambda: changed(encode_batch([b""], timestamps_ms=5), record_count=0),
    "control batch": lambda: changed(TWO, attributes=0x20),
    "1 records for 1000000 offsets": lambda: changed(
        encode_batch([b"one"], timestamps_ms=5), last_offset_delta=999_999
    ),
    "varint|claims|behind": undecodable,
}


@pytest.mark.parametrize("why", UNREADABLE)
@pytest.mark.parametrize("made", [RecordBatch, RecordBatch.check], ids=["unchecked", "checked"])
def test_a_ready_batch_that_nobody_could_read_is_refused_by_its_fault(log, why, made):
    log.append(b"before")
    with pytest.raises(CorruptRecordBatch, match=why):
        log.append(made(UNREADABLE[why]()))
    assert log.append(RecordBatch(bytes(TWO.data))) == (1, 2)
    assert [record.value for record in log.records(0)] == [b"before", b"first", b"second"]


def test_many_may_close_at_once(tmp_path):
    """The second `close` must not release the directory again: another log would lose its lock."""
    with SegmentLog.open(tmp_path / "orders-0") as other:
        log = SegmentLog.open(tmp_path / "orders-1")
        log.append(b"value")
        meeting = threading.Barrier(2)
        errors = []

        def side_by_side(frame, event, _arg):
            """The two go through `close` line by line, until one has to wait for the other."""
            if frame.f_code is not SegmentLog.close.__code__:
                return None
            if event == "line":
                with suppress(threading.BrokenBarrierError):
                    meeting.wait(0.3)
            return side_by_side

        def close():
            before = sys.gettrace()
            try:
                sys.settrace(side_by_side)
                log.close()
            except Exception as error:  # noqa: BLE001 - shown below
                errors.append(error)
            finally:
                sys.settrace(before)

        threads = [threading.Thread(target=close) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert other.append(b"still locked") == (0, 0)


def test_a_new_segment_takes_no_index_entries_of_one_that_was_cut_off_there(tmp_path):
    indexes = [tmp_path / f"{7:020d}{suffix}" for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX)]
    for index in indexes:
        index.write_bytes(bytes(range(24)))
    segment = Segment.create(REAL_FILESYSTEM, tmp_path, 7, LogConfig(preallocate_bytes=0))
    assert [index.read_bytes() for index in indexes] == [b"", b""]
    assert len(segment.index) == len(segment.time_index) == 0
    segment.close()


def test_an_interruption_while_a_segment_is_made_leaves_no_second_one(tmp_path, monkeypatch):
    """The second segment would be there, unnoticed, until the records after the interruption overlap it."""
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(segment_bytes=300)) as log:
        log.append(b"x" * 200)
        synced = RealFilesystem.sync_directory

        def interrupt(*args):
            synced(*args)
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(RealFilesystem, "sync_directory", interrupt)
        with pytest.raises(KeyboardInterrupt):
            log.append(b"y" * 200)
        log.append(b"small")
        log.append(b"z" * 200)
    with SegmentLog.open(log.path) as log:
        assert [record.value[:5] for record in log.records(0)] == [b"xxxxx", b"small", b"zzzzz"]


def lines_before_finally(code):
    """(file, line) of each line of a function, up to where it gives back what it took."""
    source, first = inspect.getsourcelines(code)
    stripped = [line.strip() for line in source]
    end = stripped.index("finally:") if "finally:" in stripped else len(stripped)
    return {(code.co_filename, first + number) for number in range(end)}


@pytest.mark.parametrize("end", ["flush", "close"])
def test_an_interruption_while_others_wait_for_the_turn_lets_them_go(tmp_path, end):
    """Ctrl-C at every line from before the turn to sync is taken to the end of the sync."""
    log = SegmentLog.open(tmp_path / "orders-0", LogConfig(flush_ms=600_000))
    codes = {LogWriter.flush_to.__code__, GroupCommitLeader.acquire.__code__}
    lines = set(chain.from_iterable(map(lines_before_finally, codes)))

    def trace(frame, event, arg):
        if frame.f_code not in codes:
            return None
        at = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and at in lines:
            lines.remove(at)
            raise KeyboardInterrupt
        return trace

    interrupted = 0
    for n in range(40):
        log.append(b"%d" % n, durability=BUFFERED)
        before = sys.gettrace()
        try:
            sys.settrace(trace)
            log.flush()
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(before)
    assert interrupted > 10
    others = threading.Thread(target=getattr(log, end), daemon=True)
    others.start()
    others.join(60)
    assert not others.is_alive(), "who was interrupted kept the turn"
    log.close()
    with SegmentLog.open(log.path) as opened:
        assert opened.log_end_offset == 40


@pytest.mark.parametrize("where", ["write", "take back"])
def test_an_interruption_leaves_nothing_of_the_append_or_a_log_to_open_again(tmp_path, monkeypatch, where):
    log = SegmentLog.open(tmp_path / "orders-0")
    log.append(b"before")

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Segment, "index_batch", interrupt)
    if where == "take back":
        monkeypatch.setattr(RealFile, "truncate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        log.append(b"interrupted")
    monkeypatch.undo()
    if where == "write":
        assert log.append(b"after") == (1, 1)
    else:
        with pytest.raises(LogPoisoned, match="KeyboardInterrupt"):
            log.append(b"after")
    log.close()
    with SegmentLog.open(log.path) as opened:
        assert next(opened.records(0)).value == b"before"
        assert opened.append(b"on") == (opened.log_end_offset - 1,) * 2


class Injected(BaseException):
    """What a debugger or a watchdog raises in a thread of its choice."""


@pytest.mark.parametrize("kind", [Injected, TimeoutError])
@pytest.mark.parametrize("where", ["before the write", "behind the write", "in the sync"])
def test_an_exception_that_is_injected_into_the_leader_comes_out_of_no_other_append(tmp_path, monkeypatch, kind, where):
    disk, made, outcomes, armed = GatedDisk(), [], {}, []
    appended, synced = Segment.append, RealFile.sync

    def inject(here):
        if armed and where == here:
            raise armed.pop()

    def append_to_segment(segment, batch):
        inject("before the write")
        appended(segment, batch)

    class Counted(CommitRequest):
        def __init__(self, batches):
            super().__init__(batches)
            made.append(self)

        def written(self):
            inject("behind the write")
            super().written()

    def append(value):
        try:
            outcomes[value] = log.append(value).base_offset
        except kind:
            outcomes[value] = None

    def sync(file):
        synced(file)
        if file.path.suffix == ".log":
            inject("in the sync")

    monkeypatch.setattr(RealFile, "sync", sync)
    log = SegmentLog.open(tmp_path / "orders-0", filesystem=disk)

    monkeypatch.setattr(Segment, "append", append_to_segment)
    monkeypatch.setattr("pushrep.log.writer.CommitRequest", Counted)
    threads = [threading.Thread(target=append, args=(b"%d" % n,)) for n in range(5)]
    with disk.hanging():
        threads[0].start()
        until(lambda: log.log_end_offset == 1, "the first thread leads, and hangs in its sync")
        armed.append(kind())
        for thread in threads[1:]:
            thread.start()
        until(lambda: len(made) == 5, "the others have queued theirs")
    for thread in threads:
        thread.join(60)
    assert list(outcomes.values()).count(None) == 1, "it is raised once, in the thread that led"
    offsets = {value: offset for value, offset in outcomes.items() if offset is not None}
    written = [(record.value, record.offset) for record in log.records(0)]
    assert len(dict(written)) == len(written), "each is written once, at most"
    assert {value: offset for value, offset in written if outcomes[value] is not None} == offsets
    log.close()


def test_segments_roll_by_size_and_never_exceed_it(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(segment_bytes=5000, batch_bytes=1000)) as log:
        for _ in range(30):
            log.append([b"v" * 90] * 20, durability=BUFFERED)
    files = sorted((tmp_path / "orders-0").glob("*.log"))
    assert len(files) > 5
    assert all(file.stat().st_size <= 5000 for file in files)
    assert all(file.with_suffix(".index").exists() and file.with_suffix(".timeindex").exists() for file in files)


def test_segments_roll_by_the_time_of_their_records(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(segment_ms=1000)) as log:
        for time in (5000, 5999, 5000, 6000, 6500, 7000):
            log.append(b"v", timestamps_ms=time, durability=BUFFERED)
    assert [int(f.stem) for f in sorted((tmp_path / "orders-0").glob("*.log"))] == [0, 3, 5]


@pytest.mark.parametrize("strange", [-1, 4_102_444_800_000])
def test_faults_f3_times_that_can_not_be_believed_end_no_segment_and_keep_none_open(strange):
    clock = SimulatedClock()
    disk, path = SimulatedDisk(clock=clock), Path("/logs/orders-0")
    with SegmentLog.open(path, LogConfig(segment_ms=1000), filesystem=disk, clock=clock) as log:
        for _ in range(12):
            log.append(b"v", timestamps_ms=strange)
            clock.advance(300)
        log.append(b"v")
        log.append(b"v", timestamps_ms=strange)
    assert list_segments(disk, path) == [0, 5, 10]


def test_faults_f3_a_time_that_is_ahead_of_the_clock_by_less_than_an_hour_is_believed():
    clock = SimulatedClock()
    disk, path = SimulatedDisk(clock=clock), Path("/logs/orders-0")
    with SegmentLog.open(path, LogConfig(segment_ms=1000), filesystem=disk, clock=clock) as log:
        for ahead_ms in (3_000_000, 3_000_999, 3_001_000):
            log.append(b"v", timestamps_ms=clock.wall_ms() + ahead_ms)
    assert list_segments(disk, path) == [0, 2]


def test_space_allocated_ahead_is_cut_off_at_roll_and_close(tmp_path):
    path = tmp_path / "orders-0"
    config = LogConfig(segment_bytes=20_000, preallocate_bytes=8192)
    with SegmentLog.open(path, config) as log:
        log.append([b"v" * 100] * 10)
        file = path / f"{0:020d}.log"
        assert file.stat().st_size > 8192
        for _ in range(20):
            log.append([b"v" * 100] * 20)
        assert file.stat().st_size <= 20_000
        size = sum(batch.header.size_bytes for batch in log.batches(0))
    assert sum(f.stat().st_size for f in path.glob("*.log")) == size


def test_a_log_grows_ahead_by_what_it_holds_so_that_idle_ones_stay_small(tmp_path):
    path = tmp_path / "orders-0"
    with SegmentLog.open(path, LogConfig(preallocate_bytes=1 << 20)) as log:
        file, end = path / f"{0:020d}.log", 0
        while end < 4 << 20:
            log.append([b"v" * 1000] * 50, durability=BUFFERED)
            end = sum(batch.header.size_bytes for batch in log.batches(0))
            assert end <= file.stat().st_size <= end + max(64 << 10, min(end, 1 << 20)) + (60 << 10)


def test_a_disk_without_room_ahead_still_takes_what_fits():
    disk, clock = SimulatedDisk(), SimulatedClock()
    with SegmentLog.open(PATH, filesystem=disk, clock=clock) as log:
        disk.capacity_bytes = disk.used_bytes() + 20_000
        for n in range(100):
            assert log.append(b"%03d" % n, durability=BUFFERED) == (n, n)
        disk.capacity_bytes = None
    with SegmentLog.open(PATH, filesystem=disk, clock=clock) as log:
        assert [record.value for record in log.records(0)] == [b"%03d" % n for n in range(100)]


def test_many_threads_append_without_mixing(log):
    def work(number):
        for n in range(20):
            result = log.append([b"%d %d %d" % (number, n, i) for i in range(5)], durability=list(Durability)[n % 2])
            assert result.last_offset - result.base_offset == 4

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = [tuple(map(int, record.value.split())) for record in log.records(0)]
    assert len(rows) == 8 * 20 * 5
    for start in range(0, len(rows), 5):
        assert [row[2] for row in rows[start : start + 5]] == list(range(5)), "a list stays in one piece"
        assert len({row[:2] for row in rows[start : start + 5]}) == 1
    for number in range(8):
        mine = [row[1] for row in rows if row[0] == number]
        assert mine == sorted(mine), "each thread's appends keep their order"


def test_a_full_disk_refuses_leaves_nothing_and_works_again():
    disk, clock = SimulatedDisk(), SimulatedClock()
    config = LogConfig(batch_bytes=300, preallocate_bytes=0)  # so that a full disk is full at once
    with SegmentLog.open(PATH, config, filesystem=disk, clock=clock) as log:
        log.append([b"safe"] * 3)
        disk.capacity_bytes = disk.used_bytes() + 700
        with pytest.raises(AppendFailed) as refused:
            log.append([b"%d" % n * 50 for n in range(20)])
        assert refused.value.errno == errno.ENOSPC
        assert "free space" in str(refused.value)
        assert log.log_end_offset == 3
        assert len(list(log.records(0))) == 3
        disk.capacity_bytes = None
        assert log.append([b"more"]) == (3, 3)
        assert [r.value for r in log.records(2)] == [b"safe", b"more"]


def test_a_full_disk_in_the_middle_of_a_roll_takes_the_new_segment_back():
    disk, clock = SimulatedDisk(), SimulatedClock()
    config = LogConfig(segment_bytes=600, batch_bytes=300)
    with SegmentLog.open(PATH, config, filesystem=disk, clock=clock) as log:
        log.append([b"safe" * 10] * 3)
        names = disk.list(PATH)
        for room in range(0, 3000, 150):
            disk.capacity_bytes = disk.used_bytes() + room
            try:
                log.append([b"%03d" % n * 20 for n in range(25)])
            except AppendFailed:
                assert [name for name in disk.list(PATH) if name.endswith(".log")] == [
                    name for name in names if name.endswith(".log")
                ], room
                assert log.log_end_offset == 3
            else:
                break
            finally:
                disk.capacity_bytes = None
        assert log.log_end_offset == 28
        assert [r.offset for r in log.records(0)] == list(range(28))


def test_the_file_size_limit_of_the_process_is_a_refusal_too(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(preallocate_bytes=0)) as log:
        log.append([b"safe"])
        size = (tmp_path / "orders-0" / f"{0:020d}.log").stat().st_size
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
            with pytest.raises(AppendFailed, match="ulimit") as refused:
                log.append([b"x" * 100_000], durability=BUFFERED)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)
        assert refused.value.errno == errno.EFBIG
        assert (tmp_path / "orders-0" / f"{0:020d}.log").stat().st_size == size, "cut back to where it was"
        assert log.append([b"x" * 100_000]) == (1, 1)


def test_a_failed_sync_poisons_until_the_log_is_opened_again():
    disk, clock = SimulatedDisk(), SimulatedClock()
    log = SegmentLog.open(PATH, filesystem=disk, clock=clock)
    log.append([b"safe"])
    disk.fail_sync()
    with pytest.raises(LogPoisoned):
        log.append([b"doubtful"])
    for again in (lambda: log.append([b"no"]), lambda: log.append([b"no"], durability=BUFFERED), log.flush):
        with pytest.raises(LogPoisoned):
            again()
    assert log.flushed_offset == log.stable_offset == 1
    log.close()
    with SegmentLog.open(PATH, filesystem=disk, clock=clock) as log:
        assert log.recovery.opening.value == "abnormal", "its close wrote no marker"
        log.append([b"works"])


def test_readers_holders_and_leases_stay_when_a_stopped_log_is_opened_again_in_place(tmp_path):
    disk, config = LosingDisk(), LogConfig(segment_bytes=300, batch_bytes=100, preallocate_bytes=0, flush_ms=600_000)
    with SegmentLog.open(tmp_path / "orders-0", config, filesystem=disk) as log:
        log.append([b"%d" % n * 30 for n in range(9)])
        log.hold("a destination", lambda: 4)
        lease = log.acquire_lease("a replay", 2)
        records = log.records(0)
        reader = SegmentLog.open_reader(log.path)
        assert next(records).offset == 0
        log.append([b"only in memory"], durability=BUFFERED)
        disk.fails = True
        with pytest.raises(LogPoisoned):
            log.flush()
        disk.fails = False
        log.reopen()
        assert (log.log_end_offset, log.stopped_by, log.recovery.opening.value) == (9, None, "abnormal")
        assert log.append([b"after"]) == (9, 9)
        assert [record.offset for record in records] == list(range(1, 9)), "what it began goes on to its end"
        assert [record.value for record in log.records(9)] == [b"after"]
        assert [record.value for record in reader.records(9)] == [b"after"]
        with pytest.raises(StillNeeded, match="a replay"):
            log.purge(9)
        assert log.leases == (lease,)
        log.reopen()  # of a log that is well: nothing
        assert log.log_end_offset == 10
        reader.close()


def test_a_segment_takes_no_batch_whose_offsets_its_index_could_not_name(tmp_path):
    """Compressed records may be so many: an entry has 31 bits for the distance to the base offset."""
    segment = Segment.create(REAL_FILESYSTEM, tmp_path, 100, LogConfig())
    batch = encode_batch([b"x"] * 3, timestamps_ms=1, base_offset=100)
    segment.append(batch)
    most = POSITION_MAX - 3
    assert segment.has_room(batch.header._replace(last_offset_delta=most))
    assert not segment.has_room(batch.header._replace(last_offset_delta=most + 1))
    segment.close()


@pytest.mark.parametrize("is_told", [False, True])
def test_a_close_tells_that_a_sync_in_the_background_failed_unless_a_call_has_told_it(tmp_path, is_told):
    disk = LosingDisk()
    log = SegmentLog.open(tmp_path / "orders-0", LogConfig(preallocate_bytes=0, flush_ms=300), filesystem=disk)
    disk.fails = True
    for n in range(10):
        log.append(b"%d" % n, durability=BUFFERED)
    until(lambda: log.stopped_by is not None, "it is flushed in the background")
    if is_told:
        with pytest.raises(LogPoisoned):
            log.append(b"no", durability=BUFFERED)
        log.close()
    else:
        with pytest.raises(LogPoisoned, match="Input/output error"):
            log.close()
    with SegmentLog.open(log.path) as opened:
        assert opened.log_end_offset == 0
        assert opened.recovery.opening.value == "abnormal"


USES = {
    "acquire_lease": lambda log: log.acquire_lease("a reader", 0),
    "advance_high_watermark": lambda log: log.advance_high_watermark(1),
    "append": lambda log: log.append(b"y"),
    "append_as_is": lambda log: log.append_as_is([encode_batch([b"y"], timestamps_ms=1, base_offset=1)]),
    "apply_retention": lambda log: log.apply_retention(),
    "batches": lambda log: log.batches(0),
    "begin_anew": lambda log: log.begin_anew(5, 5),
    "begin_epoch": lambda log: log.begin_epoch(1, 1),
    "begin_epochs": lambda log: log.begin_epochs([(log, 1, 1)]),
    "beginning_epoch": lambda log: log.beginning_epoch(1, 1),
    "configure": lambda log: log.configure(LogConfig()),
    "damaged_from": lambda log: log.damaged_from,
    "delete_records": lambda log: log.delete_records(0),
    "drop_holder": lambda log: log.drop_holder("a destination"),
    "ends": lambda log: log.ends(),
    "flush": lambda log: log.flush(),
    "flushed_offset": lambda log: log.flushed_offset,
    "forget_epochs_above": lambda log: log.forget_epochs_above(0),
    "high_watermark": lambda log: log.high_watermark,
    "history": lambda log: log.history(),
    "hold": lambda log: log.hold("a destination", lambda: 0),
    "leader_epochs": lambda log: log.leader_epochs,
    "leases": lambda log: log.leases,
    "log_end_offset": lambda log: log.log_end_offset,
    "log_start_offset": lambda log: log.log_start_offset,
    "offset_for_timestamp": lambda log: log.offset_for_timestamp(0),
    "offset_of_largest_timestamp": lambda log: log.offset_of_largest_timestamp(),
    "purge": lambda log: log.purge(0),
    "purge_old": lambda log: log.purge_old(before_offset=0),
    "quarantine": lambda log: log.quarantine(),
    "read": lambda log: log.read(0, 1),
    "read_to_repair": lambda log: log.read_to_repair(0, 1),
    "records": lambda log: log.records(0),
    "reopen": lambda log: log.reopen(),
    "repair_segment": lambda log: log.repair_segment(0),
    "size_from": lambda log: log.size_from(0),
    "slices": lambda log: log.slices(),
    "stable_offset": lambda log: log.stable_offset,
    "state": lambda log: log.state(),
    "stopped_by": lambda log: log.stopped_by,
    "truncate_to": lambda log: log.truncate_to(0, force=True),
    "when_stopped": lambda log: log.when_stopped(print),
    "why_no_append": lambda log: log.why_no_append(),
}
AFTER_CLOSE = {
    "close",
    "config",
    "damaged_segments",
    "disk",
    "ignored_index_entries",
    "moved_ms",
    "retention_held",
    "scrub",
}
OF_NO_LOG = {"open", "open_reader", "run_beside_others"}


def test_every_use_of_a_closed_log_says_so(tmp_path):
    assert {name for name in dir(SegmentLog) if name[0] != "_"} == USES.keys() | AFTER_CLOSE | OF_NO_LOG
    log = SegmentLog.open(tmp_path / "orders-0")
    log.append(b"x")
    log.close()
    log.close()
    for use in USES.values():
        with pytest.raises(LogClosed):
            use(log)


@pytest.mark.usefixtures("closes_its_files")
def test_who_waited_while_a_close_was_interrupted_opens_no_file_and_hears_that_the_log_is_closed(tmp_path, monkeypatch):
    log = SegmentLog.open(tmp_path / "orders-0")
    log.append(b"not flushed", durability=BUFFERED)
    writers, close = [], LogWriter.close

    def watched(writer):
        writers.append(writer)
        return close(writer)

    def interrupt(_file):
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(LogWriter, "close", watched)
        interrupted.setattr(RealFile, "sync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            log.close()
    [writer] = writers
    for woken in (writer.flush, lambda: writer.append_together([encode_batch([b"late"], timestamps_ms=1)])):
        with pytest.raises(LogClosed):
            woken()


def test_every_use_in_a_forked_child_says_so(tmp_path):
    log = SegmentLog.open(tmp_path / "orders-0")
    log.append(b"x")

    def in_child():
        signal.alarm(10)  # a use that is carried out may wait for a thread of the parent
        done = []
        for name, use in USES.items() | {("close", SegmentLog.close)}:
            try:
                use(log)
            except ForkedProcess:
                continue
            done.append(name)
        assert done == [], "carried out by a child, whose parent writes"

    assert code_in_fork(in_child) == 0
    assert log.append(b"y").base_offset == 1
    log.close()


def test_what_can_not_be_a_log_is_refused(tmp_path):
    with pytest.raises(InvalidLogName, match="orders"):
        SegmentLog.open(tmp_path / "orders")
    with pytest.raises(InvalidLogName):
        SegmentLog.open(tmp_path / "or ders-0")
    (tmp_path / "file-0").touch()
    with pytest.raises(NotALog, match="it is a file"):
        SegmentLog.open(tmp_path / "file-0")
    with pytest.raises(NotALog, match="file"):
        SegmentLog.open(tmp_path / "file-0" / "orders-0")
    with SegmentLog.open(tmp_path / "orders-0"), pytest.raises(LogLocked) as refused:
        SegmentLog.open(tmp_path / "orders-0")
    assert refused.value.pid == os.getpid()
    DirectoryLock(tmp_path, REAL_FILESYSTEM).close()  # no refusal has kept it


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_write_permission_is_refused(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(NotALog, match="may not be written"):
        SegmentLog.open(tmp_path / "closed" / "orders-0")
    (tmp_path / "orders-0").mkdir(mode=0o500)
    with pytest.raises(NotALog, match="may not be written"):
        SegmentLog.open(tmp_path / "orders-0")


class Forbidding(RealFilesystem):
    """Refuses to make or open what lies below one path, as the system does for a user without rights."""

    def __init__(self, below):
        self.below = below

    def open(self, path, *, create=False, writable=True):
        self.check(path, writable=writable)
        return super().open(path, create=create, writable=writable)

    def lock(self, path):
        self.check(path, writable=True)
        return super().lock(path)

    def check(self, path, *, writable):
        if writable and path.is_relative_to(self.below):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


@pytest.mark.parametrize("below", ["orders-0", "."])
def test_missing_rights_are_named_with_the_path(tmp_path, below):
    with pytest.raises(NotALog, match="may not be written") as refused:
        SegmentLog.open(tmp_path / "orders-0", filesystem=Forbidding(tmp_path / below))
    assert str(tmp_path / below) in str(refused.value)
    SegmentLog.open(tmp_path / "orders-0").close()


def test_what_is_flushed_is_published_before_anybody_is_told(tmp_path, monkeypatch):
    """A second waiter goes as soon as it sees the flushed offset; who reads beside the log has to see it by then."""
    published, publish = [0], DirectoryView.publish

    def watched(view, ends, leader_epoch):
        seen_here.append(log.flushed_offset)
        assert seen_here[-1] <= published[-1], "a waiter would be let go before this is published"
        publish(view, ends, leader_epoch)
        published.append(LogOffsets(*ends).flushed)

    seen_here = []
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(flush_ms=600_000)) as log:
        monkeypatch.setattr(DirectoryView, "publish", watched)
        for n in range(3):
            log.append(b"%d" % n)
            assert published[-1] == log.flushed_offset == n + 1
        assert seen_here == [0, 0, 1, 1, 2, 2], "once for the append, once for its sync"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("segment_bytes", 10),
        ("segment_bytes", 1 << 31),
        ("batch_bytes_max", 65 << 20),
        ("flush_ms", 0),
        ("segment_ms", 0),
        ("preallocate_bytes", -1),
        ("flush_ms", 10**18),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(setting, value):
    with pytest.raises(BadArgument, match=setting):
        LogConfig(**{setting: value})


@pytest.mark.parametrize(("setting", "value"), [("flush_ms", "1"), ("segment_bytes", 1e6), ("codec", "zstd")])
def test_a_setting_of_another_type_is_refused_by_name(setting, value):
    with pytest.raises(BadArgument, match=setting):
        LogConfig(**{setting: value})


def test_a_config_of_another_type_is_refused_and_makes_nothing(tmp_path):
    with pytest.raises(BadArgument, match="config: give a LogConfig, not dict"):
        SegmentLog.open(tmp_path / "logs" / "orders-0", {"segment_bytes": 1000})
    assert not (tmp_path / "logs").exists()


def test_the_last_offset_of_all_is_named(tmp_path):
    """2^63 - 1 is where a log ends for good: the offset behind the last record has to be one."""
    path = tmp_path / "orders-0"
    path.mkdir()
    (path / f"{2**63 - 3:020d}.log").touch()
    with SegmentLog.open(path, adopt=True) as log:
        with pytest.raises(AppendFailed, match=f"3 records from offset {2**63 - 3} on"):
            log.append([b"a", b"b", b"c"])
        assert log.append([b"a", b"b"]).last_offset == 2**63 - 2
        with pytest.raises(AppendFailed, match="begin a new log"):
            log.append(b"c")
        assert [record.value for record in log.records(2**63 - 3)] == [b"a", b"b"]
    with SegmentLog.open(path) as log:
        assert log.log_end_offset == 2**63 - 1


@pytest.mark.parametrize("number", [2**63, 10**20 - 1])
def test_a_segment_named_above_all_offsets_is_refused_by_its_name(tmp_path, number):
    path = tmp_path / "orders-0"
    path.mkdir()
    (path / f"{number:020d}.log").touch()
    with pytest.raises(CorruptLog, match="no offset is as high") as refused:
        SegmentLog.open(path, adopt=True)
    assert refused.value.names == (f"{number}.log".zfill(24),)


def test_many_logs_together_set_aside_no_more_than_their_directory_may(tmp_path, monkeypatch):
    monkeypatch.setattr("pushrep.log.directory.AHEAD_BYTES_MAX", 1 << 20)
    config = LogConfig(preallocate_bytes=16 << 20)
    with ExitStack() as stack:
        logs = [stack.enter_context(SegmentLog.open(tmp_path / f"orders-{n}", config)) for n in range(8)]
        for log in logs:
            for _ in range(4):
                log.append([bytes(256 << 10)])
        sizes = [(tmp_path / f"orders-{n}" / f"{0:020}.log").stat().st_size for n in range(8)]
    data = 4 * ((256 << 10) + 100)
    assert max(sizes) <= data + (1 << 20) // 8, "an eighth each"
    assert min(sizes) > data - 1000
