"""Another program moves, removes, replaces and cuts a log's files at any moment between its appends. What was
acknowledged as on disk is there, or the log says that it is not; and no file of another directory is touched.

The judge knows nothing of the product: it parses the segments' bytes by itself.

Who reads in another container has other process ids, so the last test runs on the real file system, with a reader in a
namespace of its own.
"""

import json
import shutil
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from uuid import UUID

import google_crc32c
import pytest

from pushrep.log import CorruptLog, Durability, FileRemoved, LogClosed, LogConfig, LogPoisoned, SegmentLog
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk

HOME, ELSEWHERE = Path("/data"), Path("/data.bak")
NAME = "orders-0"
FOREIGN = b"another's"


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at


def batch_at(data, at):
    """(offset, values, where it ends) of the whole batch there; None if there is none."""
    if at + 61 > len(data):
        return None
    offset, length = struct.unpack_from(">qi", data, at)
    end = at + 12 + length
    crc = struct.unpack_from(">I", data, at + 17)[0]
    if length < 49 or end > len(data) or crc != google_crc32c.value(data[at + 21 : end]):
        return None
    count, values = struct.unpack_from(">i", data, at + 57)[0], []
    at += 61
    for _ in range(count):
        _, at = varint(data, at)
        at += 1  # attributes
        for _ in range(2):  # time and offset
            _, at = varint(data, at)
        fields = []
        for _ in range(2):
            size, at = varint(data, at)
            fields.append(data[at : at + size] if size >= 0 else None)
            at += max(size, 0)
        headers, at = varint(data, at)
        assert headers == 0
        values.append(fields[1])
    return offset, values, end


def parsed(disk, log):
    """The values of the log's segments by offset, up to the first hole."""
    values = []
    for name in sorted(name for name in disk.names(log) or () if name.endswith(".log")):
        data, at = disk.contents(log / name), 0
        if int(name[:20]) != len(values):
            break
        while (found := batch_at(data, at)) is not None:
            offset, more, at = found
            if offset != len(values):
                return values
            values += more
    return values


class Round:
    """One log, and what it was told: `values` by offset, of which `promised` were acknowledged as on disk."""

    def __init__(self, random):
        self.random = random
        self.disk = SimulatedDisk(random.getrandbits(32), clock=SimulatedClock())
        # With it, what is published is known to the next process, too.
        self.disk.place_file(Path("/proc/sys/kernel/random/boot_id"), str(UUID(int=7)).encode())
        self.config = LogConfig(
            segment_bytes=random.choice([400, 1500, 100_000]),
            batch_bytes=300,
            preallocate_bytes=random.choice([0, 700, 16 << 20]),
            flush_ms=600_000,
        )
        self.values, self.promised = [], 0
        self.home = HOME
        # is_changed: nothing more may be acknowledged; is_touched: it may be said, but nothing is lost.
        self.is_changed = self.is_touched = self.is_gone = self.is_over = False
        self.open()

    @property
    def place(self):
        return self.home / NAME

    @property
    def newest(self):
        return self.place / max(name for name in self.disk.names(self.place) if name.endswith(".log"))

    def open(self):
        self.log = SegmentLog.open(HOME / NAME, self.config, filesystem=self.disk, clock=self.disk.clock)
        self.promised = max(self.promised, self.log.flushed_offset)
        self.is_file_open = False  # before its first append

    # ---- what the service does

    def append(self):
        values = [self.random.randbytes(self.random.randrange(120)) for _ in range(self.random.randint(1, 4))]
        durability = self.random.choice(list(Durability))
        self.values = [*self.values[: self.log.log_end_offset], *values]
        result = self.log.append(values, durability=durability)
        assert result.last_offset == len(self.values) - 1
        self.is_file_open = True
        if durability is Durability.FLUSHED:
            self.acknowledged()

    def flush(self):
        if self.log.flushed_offset < self.log.log_end_offset:
            self.log.flush()
            self.acknowledged()

    def acknowledged(self):
        self.promised = self.log.log_end_offset
        assert not self.is_changed, "acknowledged into a file that is another"
        assert parsed(self.disk, self.place)[: self.promised] == self.values[: self.promised]

    def close_and_open(self):
        self.back()
        self.log.close()
        assert not self.is_changed, "its close has not said so"
        self.open()
        self.judge()

    # ---- what others do

    def move(self):
        """`mv data data.bak`, and another directory at its place."""
        if self.home == HOME:
            self.disk.move(HOME, ELSEWHERE)
            self.home = ELSEWHERE
            for name in {*self.disk.names(ELSEWHERE / NAME), "00000000000000000009.log"}:
                self.disk.place_file(HOME / NAME / name, FOREIGN)
            for name in self.disk.names(ELSEWHERE):
                self.disk.place_file(HOME / name, FOREIGN)
            assert self.log.moved_ms() is not None

    def back(self):
        if self.home == ELSEWHERE:
            for directory in (HOME, HOME / NAME):
                for name in self.disk.names(directory):
                    assert self.disk.contents(directory / name) == FOREIGN, f"{directory / name} is another's"
            assert "00000000000000000009.log" in self.disk.names(HOME / NAME), "removed, though it is another's"
            self.disk.remove_tree(HOME)
            self.disk.move(ELSEWHERE, HOME)
            self.home = HOME

    def remove(self):
        self.disk.unlink(self.newest)
        self.is_changed, self.is_gone = True, self.is_touched or not self.is_file_open

    def replace(self):
        """logrotate with `create`."""
        is_empty = not self.disk.contents(self.newest)
        self.disk.place_file(self.newest, b"")
        # An empty file for an empty one that is not open: nobody can tell, and nothing is lost.
        self.is_changed, self.is_gone = self.is_file_open or not is_empty, self.is_touched or not self.is_file_open

    def cut(self):
        """logrotate with `copytruncate`, or a cut anywhere."""
        data = self.disk.contents(self.newest)
        size = self.random.choice([0, self.random.randrange(len(data) + 1)])
        self.disk.cut(self.newest, size)
        self.is_touched = True
        end = 0
        while (found := batch_at(data, end)) is not None:
            end = found[2]
        if size < end:  # not only what is allocated ahead; a batch may end with zeros, too
            self.is_changed = self.is_gone = True

    # ---- the judge

    def judge(self):
        found, end, damaged_from = parsed(self.disk, self.place), self.log.log_end_offset, self.log.damaged_from
        assert found[:end] == self.values[:end], "not what was appended"
        if damaged_from is None:
            assert end >= self.promised, f"{self.promised} were on disk, {end} are there, and nothing is said"
            assert [record.value for record in self.log.records(0)] == found[:end]
            self.promised = self.log.flushed_offset
        else:
            assert self.is_gone, "what is still open is written back"
            assert damaged_from == end < self.promised
            self.is_over = True

    def step(self):
        ours = [self.append] * 6 + [self.flush, self.close_and_open]
        others = [self.move, self.back]
        if not self.is_changed:
            others += [self.remove, self.replace, self.cut]
        try:
            self.random.choice(ours + others)()
        except LogPoisoned:
            self.go_on()

    def go_on(self):
        """Something stopped the log: it is opened again, in place or by another process."""
        assert self.is_changed or self.is_touched, "stopped without a reason"
        try:
            with suppress(LogClosed):  # its close has said so
                assert isinstance(self.log.stopped_by, FileRemoved)
                if self.random.random() < 0.8:
                    self.log.reopen()
                    self.is_changed = self.is_touched = self.is_file_open = False
                    self.judge()
                    return
            self.back()
            with suppress(LogPoisoned):
                self.log.close()
            self.open()
            self.is_changed = self.is_touched = False
            self.judge()
        except CorruptLog:  # its only segment is gone
            assert self.is_gone, "what is still open is written back"
            self.is_over = True


def test_faults_what_others_do_to_a_logs_files_loses_nothing_in_silence(torture):
    for number in range(torture.count(5, 1000)):
        one = Round(torture.random(number))
        for _ in range(60):
            one.step()
            if one.is_over:
                break
        assert one.values, f"round {number}"


DAY_MS = 86_400_000
STRANGE_MS = (-1, 4_102_444_800_000)


class ClockRound:
    """One log with retention by time, whose machine's wall clock is set; the judge goes by the time that really passed.

    Removal rests for a day after a step, so nothing is removed that is younger than a day. The clock is looked at
    between any two steps, as every half minute: two steps that cancel each other are seen by nobody. A record without a
    time is as old as the newest one of its segment that has one.
    """

    def __init__(self, random):
        self.random, self.clock = random, SimulatedClock()
        self.disk = SimulatedDisk(random.getrandbits(32), clock=self.clock)
        self.disk.place_file(Path("/proc/sys/kernel/random/boot_id"), str(UUID(int=7)).encode())
        self.config = LogConfig(
            segment_bytes=400, batch_bytes=300, preallocate_bytes=0, retention_ms=random.choice([DAY_MS, 7 * DAY_MS])
        )
        self.begun_ms, self.removed = [], 0  # of each offset, by the clock that nobody sets
        self.open()

    def open(self):
        self.log = SegmentLog.open(HOME / NAME, self.config, filesystem=self.disk, clock=self.clock)

    def append(self):
        strange_ms = self.random.choice(STRANGE_MS) if self.random.random() < 0.1 else None
        self.log.append([b"." * self.random.randrange(200)], timestamps_ms=strange_ms)
        self.begun_ms.append(self.clock.boot_ms() if strange_ms != -1 else None)

    def pass_time(self):
        self.clock.advance(self.random.choice([1_000, DAY_MS // 20, DAY_MS // 2, 2 * DAY_MS]))

    def set_clock(self):
        self.clock.set_wall(
            self.clock.wall_ms() + self.random.choice([-1, 1]) * self.random.randint(61_000, 40 * DAY_MS)
        )

    def step_clock(self):
        self.retain()
        self.set_clock()

    def close_and_open(self):
        self.retain()
        self.log.close()
        if self.random.random() < 0.5:
            self.set_clock()
        self.open()

    def retain(self):
        while self.log.apply_retention():
            pass

    def step(self):
        ours = [self.append] * 5 + [self.pass_time, self.retain, self.retain, self.close_and_open, self.step_clock]
        self.random.choice(ours)()
        for offset in range(self.removed, self.log.log_start_offset):
            if (begun_ms := self.begun_ms[offset]) is not None:
                age_ms = self.clock.boot_ms() - begun_ms
                assert age_ms >= DAY_MS, f"record {offset} was removed when it was {age_ms} ms old"
        self.removed = self.log.log_start_offset


def test_faults_f3_no_step_of_the_wall_clock_removes_a_young_record(torture):
    removed = 0
    for number in range(torture.count(5, 1000)):
        one = ClockRound(torture.random(number))
        for _ in range(150):
            one.step()
        one.log.close()
        removed += one.removed
    assert removed, "nothing was ever removed: it shows nothing"


IN_A_CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
LOOK = """
import json, os, sys
from pushrep.replay import TO_END, ReplayClient, ReplayRequest
assert os.getpid() == 1, "it is in no namespace of its own"
for line in sys.stdin:
    with ReplayClient(json.loads(line)) as client:
        is_live = [one.is_live for one in client.recordings()]
        given = client.replay(ReplayRequest("orders-0", length=TO_END, bound="written"))
        print(json.dumps([is_live, [[one.offset, one.value.hex()] for one in given]]), flush=True)
"""


@pytest.fixture
def look():
    """(directory of logs) -> whether a reader in another namespace of processes sees a writer, and all that it reads"""
    if shutil.which("unshare") is None or subprocess.run([*IN_A_CONTAINER, "true"], capture_output=True).returncode:
        pytest.skip("this user may make no namespace of processes")
    command = [*IN_A_CONTAINER, sys.executable, "-W", "error", "-c", LOOK]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:

        def ask(directory):
            print(json.dumps(str(directory)), file=reader.stdin, flush=True)
            is_live, given = json.loads(reader.stdout.readline())
            return is_live, [(offset, bytes.fromhex(value)) for offset, value in given]

        yield ask
        reader.stdin.close()


class RealRound:
    """One log on the real file system, opened, closed, moved, cut and grown; and who looks from another namespace."""

    def __init__(self, random, root, look):
        self.random, self.root, self.look_from_there = random, root, look
        self.home, self.values, self.log = root / "data", [], None
        self.config = LogConfig(
            segment_bytes=random.choice([400, 1500, 100_000]),
            batch_bytes=300,
            preallocate_bytes=random.choice([0, 700]),
            flush_ms=600_000,
        )
        self.open()
        self.append()

    def open(self):
        if self.log is None:
            self.log = SegmentLog.open(self.home / NAME, self.config)
            assert self.log.log_end_offset == len(self.values)

    def append(self):
        self.open()
        values = [self.random.randbytes(self.random.randrange(120)) for _ in range(self.random.randint(1, 4))]
        self.log.append(values, durability=self.random.choice(list(Durability)))
        self.values += values

    def close(self):
        if self.log is not None:
            self.log.close()
            self.log = None

    def move(self):
        moved = self.root / self.random.choice(["data", "data.bak", "elsewhere"])
        if not moved.exists():
            self.home.rename(moved)
            self.home = moved
            if self.log is not None:
                assert self.log.moved_ms() is not None
                self.close()  # its path leads to it no more

    def cut_and_grow(self):
        self.open()
        del self.values[self.log.truncate_to(self.random.randint(1, len(self.values)), force=True) :]
        self.append()

    def look(self):
        is_live, given = self.look_from_there(self.home)
        assert is_live == [self.log is not None]
        assert given == list(enumerate(self.values))

    def step(self):
        self.random.choice([self.open, self.append, self.append, self.close, self.move, self.cut_and_grow])()
        if self.random.random() < 0.4:
            self.look()


def test_faults_f4_a_reader_in_another_namespace_sees_the_writer_and_its_records_whatever_was_done(
    torture, tmp_path, look
):
    for number in range(torture.count(5, 300)):
        (tmp_path / str(number)).mkdir()
        one = RealRound(torture.random(number), tmp_path / str(number), look)
        for _ in range(20):
            one.step()
        one.look()
        one.close()
        one.look()
        shutil.rmtree(tmp_path / str(number))
