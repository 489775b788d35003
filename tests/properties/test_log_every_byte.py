"""Every prefix of a log of three segments, and every single byte of it flipped: through opening, verify and repair.
The short form takes each third of them, and each thirteenth through repair.

    | 0.log .......... | 9.log .......... | 18.log ..........   21 records in 7 batches, all bytes one after the other
            ^ at: the byte that is flipped, or where the prefix ends

Each is opened twice: first with nothing promised, when all from the bad batch on may be cut (and all its bytes are
kept); then with everything promised, when nothing may change and the error has to name the place. "Never hangs" is a
limit on the calls to the disk, "never grows memory" a limit on the bytes that a wrong length field makes the scan read.
"""

import tracemalloc
from bisect import bisect_right
from pathlib import Path

import pytest

from pushrep.env import read_whole
from pushrep.log import CorruptBatch, CorruptLog, LogConfig, SegmentLog
from pushrep.log.config import BATCH_BYTES_LIMIT
from pushrep.log.directory_files import CLEAN_MARKER_NAME, CheckpointFile, write_checkpoint
from pushrep.log.published import PUBLISHED_NAME
from pushrep.log.repair import Repairer
from pushrep.log.verify import verify_log
from pushrep.records import BatchHeader
from tests.simulation.power_cuts import end_process
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk

HOME, COPY = Path("/logs/orders-0"), Path("/copy/orders-0")
CONFIG = LogConfig(segment_bytes=400, index_interval_bytes=100)
VALUES = [b"value %d" % (n // 3) for n in range(21)]
STEPS_MAX = 3000
"""Calls to the disk that any of this takes: a whole opening of the log takes a few hundred."""
OUTSIDE_OF_CRC = {*range(8), *range(12, 16)}


class Whole:
    """The log as it was: its files, its bytes one after the other, where segments and batches begin among them."""

    def __init__(self):
        disk = SimulatedDisk()
        with SegmentLog.open(HOME, CONFIG, filesystem=disk, clock=SimulatedClock()) as log:
            for number in range(7):
                log.append([b"value %d" % number] * 3, timestamps_ms=1_700_000_000_000 + number)
        self.files = {}
        for directory in (HOME.parent, HOME):
            for name in disk.list(directory):
                if directory / name != HOME:
                    self.files[directory / name] = read_whole(disk, directory / name, 1 << 20)
        del self.files[HOME.parent / CLEAN_MARKER_NAME]
        self.names = [path for path in self.files if path.suffix == ".log"]
        self.bytes = b"".join(self.files[path] for path in self.names)
        self.starts = [sum(len(self.files[path]) for path in self.names[:n]) for n in range(len(self.names))]
        self.batches, at = [], 0
        while at < len(self.bytes):
            header = BatchHeader.parse(self.bytes, at)
            self.batches.append((at, header.base_offset))
            at += header.size_bytes

    def batch_at(self, at):
        """(where the batch begins that holds this byte, its first offset); the end behind the last one."""
        if at >= len(self.bytes):
            return len(self.bytes), len(VALUES)
        return self.batches[bisect_right(self.batches, (at, len(VALUES))) - 1]

    def place(self, at):
        """(the segment's file, the position in it) of a byte."""
        n = bisect_right(self.starts, at) - 1
        return self.names[n], at - self.starts[n]


WHOLE = Whole()
assert len(WHOLE.names) == 3
assert len(WHOLE.batches) == 7


class Case:
    """The log with other bytes: `data` is what is left of it, cut into its segments."""

    def __init__(self, data, promised):
        self.disk, self.clock = SimulatedDisk(), SimulatedClock()
        self.data, self.promised = bytes(data), promised
        for path, content in WHOLE.files.items():
            if path.parent == HOME:
                self.write(COPY / path.name, content)
            if path in WHOLE.names:
                start = WHOLE.starts[WHOLE.names.index(path)]
                content = self.data[start : start + len(content)]  # noqa: PLW2901
                if not content and start:
                    continue
            self.write(path, content)
        for checkpoint in (CheckpointFile.RECOVERY_POINT, CheckpointFile.HIGH_WATERMARK):
            write_checkpoint(HOME.parent, checkpoint, {HOME.name: promised}, self.disk)

    def write(self, path, data):
        self.disk.make_directory(path.parent)
        file = self.disk.open(path, create=True)
        file.write_at(data, 0)
        file.close()

    def open(self):
        return SegmentLog.open(HOME, CONFIG, filesystem=self.disk, clock=self.clock)

    def verify(self):
        return verify_log(HOME, filesystem=self.disk, clock=self.clock)

    def repairer(self):
        return Repairer(HOME, filesystem=self.disk, clock=self.clock)

    def segments(self, directory=HOME):
        return {
            name: read_whole(self.disk, directory / name, 1 << 20)
            for name in self.disk.list(directory)
            if name.endswith(".log")
        }

    def all_bytes(self):
        """The bytes of the log, and of the files kept aside after it, in the order of the log."""
        parts = {}
        for name in self.disk.list(HOME):
            if ".log" in name:
                base, _, rest = name.partition(".log")
                at = rest.removeprefix(".").removesuffix("cut").rstrip(".")
                parts[base, int(at or 0)] = read_whole(self.disk, HOME / name, 1 << 20)
        return b"".join(parts[key] for key in sorted(parts))

    def end(self):
        end_process(self.disk)


def prefixes():
    return [(f"the first {size} bytes", WHOLE.bytes[:size], size) for size in range(len(WHOLE.bytes))]


def flips(*, inside_of_crc):
    made = []
    for at in range(len(WHOLE.bytes)):
        if (at - WHOLE.batch_at(at)[0] in OUTSIDE_OF_CRC) is not inside_of_crc:
            data = bytearray(WHOLE.bytes)
            data[at] ^= 0x55
            made.append((f"byte {at} flipped", bytes(data), at))
    return made


def some_of(cases, torture, *, short):
    """All of them in the long form, else each `short`-th."""
    stride = torture.count(short, 1)
    return cases[torture.random(short, len(cases)).randrange(stride) :: stride]


def values(log):
    return [record.value for record in log.records(log.log_start_offset, log.log_end_offset)]


def test_nothing_promised_all_before_the_bad_batch_is_there_and_every_byte_behind_it_is_kept(torture):
    for told, data, at in some_of(prefixes() + flips(inside_of_crc=True), torture, short=6):
        begins, offset = WHOLE.batch_at(at)
        case = Case(data, promised=0)
        report = case.verify()
        assert report.is_whole, f"{told}: never promised is no damage: {report.findings}"
        with case.open() as log:
            assert log.damaged_from is None, told
            assert values(log) == VALUES[:offset], f"{told}: {log.recovery}"
            cut = log.recovery.cut
            if not data[begins:].strip(b"\0"):  # zeros at the end of all can't be told from space allocated ahead
                assert cut is None, f"{told}: {log.recovery}"
                data = data[:begins]  # noqa: PLW2901
            else:
                path, position = WHOLE.place(begins)
                assert (cut.offset, cut.segment, cut.position) == (offset, path.name, position), told
                assert cut.size_bytes == len(data) - begins, told
            assert case.all_bytes() == data, f"{told}: kept to the byte"
            assert log.append(b"next").base_offset == offset, told
        assert case.disk.steps < STEPS_MAX, told
        case.end()


def test_everything_promised_the_place_is_named_and_nothing_is_changed(torture):
    """Opening scans only the newest segment, by design: damage before it is found by the first read there."""
    for told, data, at in some_of(prefixes() + flips(inside_of_crc=True), torture, short=6):
        begins, offset = WHOLE.batch_at(at)
        case = Case(data, promised=len(VALUES))
        before = case.segments()
        report = case.verify()
        assert min(f.offset for f in report.findings if f.offset is not None) == offset, f"{told}: {report.findings}"
        path, position = WHOLE.place(begins)
        # A segment that is missing altogether is told as the end of the one before it.
        named = {(f.file, f.position) for f in report.findings}
        assert (path.name, position) in named or (not position and path.name not in before), f"{told}: {named}"
        judge_opening(case, told, offset, path)
        assert {name: part for name, part in case.segments().items() if part} == {
            name: part for name, part in before.items() if part
        }, f"{told}: nothing good is deleted"
        assert case.disk.steps < STEPS_MAX, told
        case.end()


def judge_opening(case, told, offset, path):
    try:
        log = case.open()
    except CorruptLog as refused:
        names = refused.names
        assert path.name in names, f"{told}: {refused}"  # noqa: PT017 - most of them open
        return
    with log:
        if log.damaged_from is not None:
            assert log.damaged_from == offset, told
            assert values(log) == VALUES[:offset], told
            return
        assert values_up_to(log, offset) == VALUES[:offset], told
        with pytest.raises(CorruptBatch) as found:
            values(log)
        assert (found.value.offset, found.value.segment) == (offset, path), told


def test_what_lies_outside_of_the_crc_is_judged_by_its_order():
    """Base offset and epoch of a batch: what can't be true is no batch; what could is never read as another record."""
    for told, data, at in flips(inside_of_crc=False):
        _begins, offset = WHOLE.batch_at(at)
        for promised in (0, len(VALUES)):
            case = Case(data, promised)
            report = case.verify()
            assert report.findings or report.torn is not None, f"{told}, promised {promised}: nobody sees it"
            with case.open() as log:
                try:
                    found = values(log)
                except CorruptBatch as error:
                    found = values_up_to(log, error.offset)
                assert found == VALUES[: len(found)], f"{told}, promised {promised}"
                # A seal says that a header changed, not which: then none of its segment is read.
                by_seal = "sealed was" in (log.recovery.damage or "")
                readable = int(WHOLE.place(at)[0].stem) if by_seal else offset
                assert len(found) >= readable, f"{told}, promised {promised}: {log.recovery}"
            assert case.disk.steps < STEPS_MAX, told
            case.end()


def values_up_to(log, end):
    return [record.value for record in log.records(0, end)] if end else []


def test_a_copy_mends_each_of_them_to_the_byte(torture):
    everything = prefixes() + flips(inside_of_crc=True) + flips(inside_of_crc=False)
    for told, data, _at in some_of(everything, torture, short=13):
        case = Case(data, promised=len(VALUES))
        assert case.repairer().repair(copy=COPY).is_whole, told
        assert case.segments() == case.segments(COPY), f"{told}: the very files"
        with case.open() as log:
            assert values(log) == VALUES, told
        assert case.disk.steps < STEPS_MAX, told
        case.end()


def test_a_cut_by_name_gives_up_what_follows_and_keeps_it(torture):
    for told, data, at in some_of(prefixes() + flips(inside_of_crc=True), torture, short=13):
        offset = WHOLE.batch_at(at)[1]
        case = Case(data, promised=len(VALUES))
        assert case.repairer().repair(cut=True).is_whole, told
        with case.open() as log:
            assert values(log) == VALUES[:offset], told
            assert log.append(b"next").base_offset == offset, told
        assert case.verify().is_whole, told
        assert data in case.all_bytes() or case.all_bytes().startswith(data[: WHOLE.batch_at(at)[0]]), told
        assert case.disk.steps < STEPS_MAX, told
        case.end()


@pytest.mark.parametrize("at", range(8, 12))
def test_a_length_that_lies_takes_no_more_memory_than_the_largest_batch(tmp_path, at):
    """A real file with 200 MiB behind the batch: the scan looks at no more than what a batch may be."""
    path = tmp_path / "orders-0"
    with SegmentLog.open(path) as log:
        log.append([b"value"] * 100)
        log.append([b"value"] * 100)
    (tmp_path / CLEAN_MARKER_NAME).unlink()
    write_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT, {path.name: 0})
    (tmp_path / PUBLISHED_NAME).unlink()  # the machine stopped: nothing is known to be on disk
    (segment,) = path.glob("*.log")
    data = bytearray(segment.read_bytes())
    begins = BatchHeader.parse(data).size_bytes
    data[begins + at] = 3  # for the highest byte 48 MiB, for the others less
    with segment.open("wb") as file:
        file.write(data)
        file.truncate(200 << 20)
    tracemalloc.start()
    try:
        with SegmentLog.open(path) as log:
            assert log.log_end_offset == 100
            assert log.recovery.cut.position == begins
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * BATCH_BYTES_LIMIT, f"{peak >> 20} MiB at the most"
