"""The positions kept beside the log: their file, what is read again after a crash, and what is not."""

import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from filtering import StreamMetadata
from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK
from pushrep.log import Durability, LogClosed, LogConfig, SegmentLog
from pushrep.outbox import Outbox, OutboxConfig
from pushrep.outbox import positions as module
from pushrep.outbox.positions import (
    POSITIONS_NAME,
    Positions,
    PositionsFollower,
    PositionsStore,
    decode_positions,
    encode_positions,
)
from tests.support.outbox_arguments import outbox_arguments
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk

HOME = Path("/outbox")
FILE = HOME / "orders-0" / POSITIONS_NAME
PAIRS = st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31 - 1))


@given(
    end=st.integers(0, 2**63 - 1),
    epoch=st.integers(-1, 2**31 - 1),
    highest=st.dictionaries(PAIRS, st.integers(0, 2**63 - 1), max_size=20),
    carrier=st.sampled_from(["key", "header"]),
)
def test_what_is_written_is_read_and_every_flipped_bit_is_found(end, epoch, highest, carrier):
    positions = Positions(end, epoch, highest)
    data = encode_positions(positions, carrier)
    assert decode_positions(data, carrier) == positions
    with pytest.raises(ValueError, match="carrier"):
        decode_positions(data, "key" if carrier == "header" else "header")
    for cut in (0, 10, len(data) - 1):
        with pytest.raises(ValueError, match="bytes"):
            decode_positions(data[:cut], carrier)


def test_every_flipped_bit_is_found():
    data = encode_positions(Positions(12, 3, {(7, 1): 5, (-9, 0): 2**40}), "key")
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 0x80 >> (bit % 8)
        with pytest.raises(ValueError, match=r"."):
            decode_positions(bytes(flipped), "key")


def test_golden_bytes():
    head = (
        b"pushpos\0"
        b"\0\0\0\1"  # version
        b"\0\0\0\1"  # header
        b"\0\0\0\0\0\0\0\x0c"  # end offset
        b"\0\0\0\3"  # leader epoch
    )
    assert encode_positions(Positions(12, 3, {(7, 1): 5}), "header").startswith(head)


class Machine:
    def __init__(self):
        self.clock = SimulatedClock()
        self.disk = SimulatedDisk(clock=self.clock)

    def open(self, **options):
        config = LogConfig(segment_bytes=20_000, preallocate_bytes=0, flush_ms=50)
        options = {"linger_ms": 0, "log_config": config} | options
        return Outbox.open(
            HOME, "orders", 1, "billing", **outbox_arguments(filesystem=self.disk, clock=self.clock, **options)
        )

    def end_process(self):
        self.disk.crash()


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def decoded(monkeypatch):
    """Base offsets of the batches whose keys were read from the log."""
    seen, real = [], module.highest_positions

    def watched(batches, carrier):
        batches = list(batches)
        seen.extend(batch.header.base_offset for batch in batches)
        return real(batches, carrier)

    monkeypatch.setattr(module, "highest_positions", watched)
    return seen


@pytest.mark.parametrize("durability", Durability)
@pytest.mark.parametrize("carrier", ["key", "header"])
def test_a_closed_outbox_reads_nothing_again(machine, decoded, durability, carrier):
    with machine.open(durability=durability, carrier=carrier) as outbox:
        for n in range(30):
            outbox.append_many(0, [b"x"] * 5, metadata=StreamMetadata(7, 3, 5 * n)).result(60)
            outbox.append(0, b"own").result(60)
            machine.clock.advance(20)
        pid = outbox.pid
    at_close = list(decoded)
    decoded.clear()
    with machine.open(durability=durability, carrier=carrier) as outbox:
        assert outbox.last_metadata(7, 3) == 149
        assert outbox.last_metadata(pid, 0) == 179
        assert outbox.last_metadata(7, 4) is None
    assert decoded == []
    if durability is Durability.FLUSHED:
        assert len(at_close) < 12, "the outbox knows what it wrote, but for what is flushed while it writes"


def test_after_a_kill_only_the_tail_is_read(machine, decoded):
    outbox = machine.open()
    for n in range(10):
        outbox.append(0, b"x", metadata=StreamMetadata(7, 0, n)).result(60)
    outbox.close()
    outbox = machine.open()
    for n in range(10, 14):
        outbox.append(0, b"x", metadata=StreamMetadata(7, 0, n)).result(60)
    machine.end_process()
    decoded.clear()
    with machine.open() as again:
        assert decoded == [10, 11, 12, 13]
        assert again.last_metadata(7, 0) == 13
    with pytest.raises(Exception, match=r"."):
        outbox.close()


def test_what_was_not_flushed_does_not_outlive_a_power_cut(machine):
    small = LogConfig(segment_bytes=1000, preallocate_bytes=0, flush_ms=3_600_000)
    outbox = machine.open(durability=Durability.BUFFERED, log_config=small)
    for n in range(40):
        outbox.append(0, b"x" * 50, metadata=StreamMetadata(7, 0, n)).result(60)
        if n == 30:
            outbox.log(0).flush()
    assert outbox.log(0).purge(20) > 0  # syncs the positions before records go that only they know
    machine.disk.lose_power()
    machine.end_process()
    with machine.open() as again:
        assert 31 <= again.log(0).log_end_offset <= 40
        assert again.last_metadata(7, 0) == again.log(0).log_end_offset - 1
    with pytest.raises(Exception, match=r"."):
        outbox.close()


@pytest.mark.parametrize("damage", ["flipped", "missing", "empty"])
def test_a_bad_file_is_built_again(machine, damage, caplog):
    with machine.open() as outbox:
        outbox.append_many(0, [b"x"] * 5, metadata=StreamMetadata(7, 0, 0)).result(60)
    if damage == "flipped":
        machine.disk.flip_bit(FILE, 8 * 40)
    elif damage == "empty":
        machine.disk.open(FILE).truncate(0)
    else:
        machine.disk.remove(FILE)
    with machine.open() as outbox:
        assert outbox.last_metadata(7, 0) == 4
    assert ("counts as absent" in caplog.text) == (damage != "missing")
    assert machine.disk.exists(FILE)


def test_retention_takes_no_positions_away(machine):
    config = LogConfig(segment_bytes=300, preallocate_bytes=0, batch_bytes_max=300, flush_ms=50)
    with machine.open(log_config=config) as outbox:
        outbox.append(0, b"x", metadata=StreamMetadata(9, 0, 77)).result(60)
        for n in range(30):
            outbox.append(0, b"x" * 50, metadata=StreamMetadata(7, 0, n)).result(60)
        log = outbox.log(0)
        log.purge(25)
        assert log.log_start_offset > 1
    machine.end_process()
    with machine.open(log_config=config) as outbox:
        assert outbox.last_metadata(9, 0) == 77, "its record is gone, its position is not"
        assert outbox.last_metadata(7, 0) == 29


def test_a_cut_log_forgets_what_was_cut(machine):
    with machine.open() as outbox:
        for n in range(10):
            outbox.append(0, b"x", metadata=StreamMetadata(7, 0, n)).result(60)
    with SegmentLog.open(HOME / "orders-0", filesystem=machine.disk, clock=machine.clock) as log:
        log.truncate_to(4, force=True)  # by a tool that knows no derived stores
    with machine.open() as outbox:
        assert outbox.last_metadata(7, 0) == 3


def test_a_hole_in_what_was_noted_waits_for_the_log(tmp_path):
    store = PositionsStore(tmp_path / POSITIONS_NAME, "key", REAL_FILESYSTEM)
    store.follow(lambda: 10)
    store.add(0, 4, 0, [((7, 0), 3)])
    store.add(6, 9, 0, [((7, 0), 8)])
    store.add(9, 20, 0, [((7, 0), 30)])
    assert (store.end_offset, store.last, store.highest) == (4, (3, 0), {(7, 0): 3})
    store.sync()
    again = PositionsStore(tmp_path / POSITIONS_NAME, "key", REAL_FILESYSTEM)
    assert (again.end_offset, again.highest) == (4, {(7, 0): 3})
    again.cut_to(4)
    assert again.end_offset == 4
    again.cut_to(3)
    assert (again.end_offset, again.last, again.highest) == (0, None, {})
    assert not (tmp_path / POSITIONS_NAME).exists()


def wait_for_positions(path, end_offset):
    pause = threading.Event()
    for _ in range(1_200):
        known = Positions(0, -1, {})
        with suppress(FileNotFoundError):  # it is thrown away just now, or not made yet
            known = decode_positions(path.read_bytes(), "key")
        if known.end_offset == end_offset:
            return known.highest
        pause.wait(0.05)
    raise AssertionError(known)


def test_who_follows_a_log_keeps_its_positions_as_it_grows_and_throws_away_those_of_another(tmp_path, monkeypatch):
    """Beside who has it open, whose epoch at the file's end is 0."""
    monkeypatch.setattr(module, "_FOLLOW_S", 0.01)
    readers, open_reader = [], SegmentLog.open_reader
    monkeypatch.setattr(
        SegmentLog, "open_reader", lambda *at, **how: readers.append(open_reader(*at, **how)) or readers[-1]
    )
    path = tmp_path / "orders-0" / POSITIONS_NAME
    with Outbox.open(tmp_path, "orders", 1, "billing", config=OutboxConfig(linger_ms=0)) as outbox:
        outbox.append_many(0, [b"x"] * 10, metadata=StreamMetadata(7, 0, 0)).result(60)
        path.write_bytes(encode_positions(Positions(5, 9, {(7, 0): 999}), "key"))
        follower = PositionsFollower([path.parent, tmp_path / "orders-1"], "key", REAL_FILESYSTEM, SYSTEM_CLOCK)
        try:
            assert wait_for_positions(path, 10) == {(7, 0): 9}
            outbox.append_many(0, [b"x"] * 10, metadata=StreamMetadata(7, 0, 10)).result(60)
            assert wait_for_positions(path, 20) == {(7, 0): 19}
        finally:
            follower.stop()
        for reader in readers:
            with pytest.raises(LogClosed):
                reader.ends()
