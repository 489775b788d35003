"""The published state of logs inside one process: slots, growth, boots, damage."""

import mmap
import os
from itertools import chain, product, repeat
from pathlib import Path

import pytest

from pushrep.env import RealFilesystem
from pushrep.log.published import (
    PUBLISHED_NAME,
    RECORD_BYTES,
    RECORDS_INITIAL,
    SLOTS_AT,
    LogOffsets,
    PublishedEntry,
    PublishedFile,
    PublishedReader,
    read_boot_id,
    read_published,
)


class OtherBoot(RealFilesystem):
    """The same disk after the machine was started again (or on a system that tells no boot id)."""

    def __init__(self, boot_id, directory):
        self.path = directory / "boot_id"
        if boot_id is not None:
            self.path.write_text(boot_id)

    def open(self, path, *, create=False, writable=True):
        return super().open(self.path if path.name == "boot_id" else path, create=create, writable=writable)


def values(state):
    return (
        state.log_end_offset,
        state.flushed_offset,
        state.high_watermark,
        state.log_start_offset,
        state.leader_epoch,
    )


def test_what_is_published_is_read(tmp_path):
    assert read_published(tmp_path, "orders-0") is None
    file = PublishedFile(tmp_path, os.getpid())
    assert read_published(tmp_path, "orders-0") is None
    entry = file.entry("orders-0")
    assert read_published(tmp_path, "orders-0") is None, "attached, and nothing said yet"
    reader = PublishedReader(tmp_path, "orders-0")
    for n in range(5):
        entry.publish(LogOffsets(n, n + 4, n + 3, n + 2), n - 1)
        state = reader.read()
        assert values(state) == (n + 4, n + 3, n + 2, n, n - 1)
        assert (state.pid, state.ends.stable, state.sequence) == (os.getpid(), n + 2, n + 1)
    assert entry.state() == reader.read() == read_published(tmp_path, "orders-0")


def test_names_that_begin_alike_are_told_apart(tmp_path):
    file = PublishedFile(tmp_path, 1)
    names = ["a-1", "a-12", "a-11", "xa-1", "x" * 249 + "-2147483647"]
    for number, name in enumerate(names):
        file.entry(name).publish(LogOffsets(0, number, 0, 0), 0)
    assert [read_published(tmp_path, name).log_end_offset for name in names] == [0, 1, 2, 3, 4]
    assert read_published(tmp_path, "a-2") is None


def test_the_file_grows_and_old_entries_and_readers_go_on(tmp_path):
    file = PublishedFile(tmp_path, 1)
    first = file.entry("orders-0")
    first.publish(LogOffsets(0, 1, 1, 1), 0)
    reader = PublishedReader(tmp_path, "orders-0")
    assert reader.read().log_end_offset == 1
    late = PublishedReader(tmp_path, f"orders-{3 * RECORDS_INITIAL}")
    assert late.read() is None
    for number in range(1, 3 * RECORDS_INITIAL + 1):
        file.entry(f"orders-{number}").publish(LogOffsets(0, number, 0, 0), 0)
    first.publish(LogOffsets(0, 2, 2, 2), 0)
    assert reader.read().log_end_offset == 2, "through the mapping it had"
    assert late.read().log_end_offset == 3 * RECORDS_INITIAL
    assert (tmp_path / PUBLISHED_NAME).stat().st_size % RECORD_BYTES == 0
    again = PublishedFile(tmp_path, 2)
    assert again.entry("orders-7").state().log_end_offset == 7
    size = (tmp_path / PUBLISHED_NAME).stat().st_size
    again.entry("orders-7")
    assert (tmp_path / PUBLISHED_NAME).stat().st_size == size


def test_a_new_writer_goes_on_above_the_sequence_it_finds(tmp_path):
    entry = PublishedFile(tmp_path, 1).entry("orders-0")
    for n in range(3):
        entry.publish(LogOffsets(0, 100 + n, 0, 0), 0)
    entry = PublishedFile(tmp_path, 2).entry("orders-0")
    entry.publish(LogOffsets(0, 50, 0, 0), 0)
    state = read_published(tmp_path, "orders-0")
    assert (state.log_end_offset, state.pid, state.sequence) == (50, 2, 4)


def test_another_start_of_the_machine_hides_what_was_published_before(tmp_path):
    entry = PublishedFile(tmp_path, 1).entry("orders-0")
    entry.publish(LogOffsets(0, 1, 1, 1), 0)
    entry.publish(LogOffsets(0, 2, 2, 2), 0)
    rebooted = OtherBoot("11111111-2222-3333-4444-555555555555", tmp_path)
    assert read_published(tmp_path, "orders-0", rebooted) is None
    entry = PublishedFile(tmp_path, 2, rebooted).entry("orders-0")
    assert entry.state() is None
    entry.publish(LogOffsets(0, 1, 1, 1), 0)
    assert read_published(tmp_path, "orders-0", rebooted).sequence == 3
    assert read_published(tmp_path, "orders-0").log_end_offset == 2, "the older start's slot stands beside it"


def test_without_a_boot_id_nothing_is_believed(tmp_path):
    filesystem = OtherBoot(None, tmp_path)
    assert read_boot_id(filesystem) == bytes(16)
    PublishedFile(tmp_path, 1, filesystem).entry("orders-0").publish(LogOffsets(0, 1, 1, 1), 0)
    assert read_published(tmp_path, "orders-0", filesystem) is None


def test_the_boot_id_is_this_machines():
    assert read_boot_id().hex() == Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")


def test_clearing_takes_back_what_was_said(tmp_path):
    entry = PublishedFile(tmp_path, 1).entry("orders-0")
    entry.publish(LogOffsets(0, 1, 1, 1), 0)
    entry.clear()
    assert read_published(tmp_path, "orders-0") is None
    entry.publish(LogOffsets(0, 0, 0, 0), 0)
    assert read_published(tmp_path, "orders-0").log_end_offset == 0


def test_a_reader_finds_a_file_that_was_made_anew(tmp_path):
    PublishedFile(tmp_path, 1).entry("orders-0").publish(LogOffsets(0, 1, 1, 1), 0)
    reader = PublishedReader(tmp_path, "orders-0")
    assert reader.read().log_end_offset == 1
    (tmp_path / PUBLISHED_NAME).unlink()
    assert reader.read() is None
    PublishedFile(tmp_path, 1).entry("orders-0").publish(LogOffsets(0, 7, 7, 7), 0)
    assert reader.read().log_end_offset == 7


@pytest.mark.parametrize("size", [0, 1, 19, RECORD_BYTES - 1, RECORD_BYTES, RECORD_BYTES + 1, 2 * RECORD_BYTES])
def test_a_cut_file_is_none_to_readers_and_mended_by_the_writer(tmp_path, size):
    PublishedFile(tmp_path, 1).entry("orders-0").publish(LogOffsets(0, 1, 1, 1), 0)
    os.truncate(tmp_path / PUBLISHED_NAME, size)
    state = read_published(tmp_path, "orders-0")
    assert (state is None) == (size < 2 * RECORD_BYTES)
    entry = PublishedFile(tmp_path, 2).entry("orders-0")
    entry.publish(LogOffsets(0, 9, 9, 9), 0)
    assert read_published(tmp_path, "orders-0").log_end_offset == 9


def test_every_flipped_bit_is_found(tmp_path):
    """A record's two slots hold two states: a flip costs one of them, never makes a third."""
    path = tmp_path / PUBLISHED_NAME
    entry = PublishedFile(tmp_path, 1).entry("orders-0")
    entry.publish(LogOffsets(0, 1, 1, 1), 0)
    entry.publish(LogOffsets(0, 2, 2, 2), 0)
    good = {1: entry.state().sequence - 1, 2: entry.state().sequence}
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 2 * RECORD_BYTES) as mapped:
        for bit in range(2 * RECORD_BYTES * 8):
            mapped[bit // 8] ^= 1 << bit % 8
            state = read_published(tmp_path, "orders-0")
            if state is not None:
                assert good[state.log_end_offset] == state.sequence, f"bit {bit} made a state that nobody published"
            in_newest = SLOTS_AT[0] <= bit // 8 - RECORD_BYTES < SLOTS_AT[0] + 68
            assert not in_newest or state.log_end_offset == 1, f"bit {bit} of the newest slot was not noticed"
            mapped[bit // 8] ^= 1 << bit % 8
    assert read_published(tmp_path, "orders-0").log_end_offset == 2


def test_a_damaged_header_or_name_costs_only_what_it_told(tmp_path):
    path = tmp_path / PUBLISHED_NAME
    PublishedFile(tmp_path, 1).entry("orders-0").publish(LogOffsets(0, 1, 1, 1), 0)
    data = bytearray(path.read_bytes())
    data[RECORD_BYTES + 8] ^= 1  # a letter of the name
    path.write_bytes(data)
    file = PublishedFile(tmp_path, 2)
    file.entry("orders-0").publish(LogOffsets(0, 5, 5, 5), 0)
    assert read_published(tmp_path, "orders-0").log_end_offset == 5
    reader = PublishedReader(tmp_path, "orders-0")
    assert reader.read() is not None
    with path.open("r+b") as raw:
        raw.write(b"x")  # the magic: what a writer's next opening clears in place
    mended = PublishedFile(tmp_path, 3).entry("orders-0")
    assert reader.read() is None
    mended.publish(LogOffsets(0, 6, 6, 6), 0)
    assert reader.read().log_end_offset == 6


def test_a_file_that_claims_to_be_huge_is_refused_by_name(tmp_path):
    published = PublishedFile(tmp_path, 7)
    published.entry("orders-0").publish(LogOffsets(2, 5, 4, 3), 1)
    os.truncate(tmp_path / PUBLISHED_NAME, 1 << 38)  # a minute to read, and more than the memory holds
    with pytest.raises(OSError, match=PUBLISHED_NAME):
        PublishedFile(tmp_path, 8)
    with pytest.raises(OSError, match=PUBLISHED_NAME):
        read_published(tmp_path, "orders-0")


class WrittenMeanwhile:
    """A published record whose writer advances by so many half slots after each copy that a reader makes."""

    def __init__(self, moments):
        self._moments, self._now, self._steps = moments, 0, repeat(0)

    def __getitem__(self, part):
        copy = self._moments[self._now][part]
        self._now = min(self._now + next(self._steps), len(self._moments) - 1)
        return copy

    def begin(self, now, steps):
        self._now, self._steps = now, chain(steps, repeat(0))


def test_a_reader_never_goes_back_wherever_the_writer_is_while_it_copies():
    boot_id, record, moments = read_boot_id(), mmap.mmap(-1, RECORD_BYTES), []
    writer = PublishedEntry(record, 0, os.getpid(), boot_id)
    for n in range(1, 12):
        before = record[:]
        writer.publish(LogOffsets(n, n, n, n), n)
        slot = SLOTS_AT[n % 2]
        moments += [before, before[:slot] + record[slot : slot + 34] + before[slot + 34 :]]
    moments.append(record[:])
    mapped = WrittenMeanwhile(moments)
    reader = PublishedEntry(mapped, 0, os.getpid(), boot_id)
    for published, steps in product(range(1, 5), product(range(6), repeat=4)):
        mapped.begin(2 * published, steps)
        state = reader.state()
        assert state.leader_epoch >= published, f"{published} was there, then by {steps} half slots a copy"
        assert state.log_end_offset == state.leader_epoch
