"""What a cut keeps in .cut files: exact to the byte, never over an older file, not twice, and nothing after a
failure.
"""

import errno
from pathlib import Path

import pytest

from pushrep.env import REAL_FILESYSTEM, read_whole
from pushrep.log.cut_files import keep_range, move_aside
from pushrep.log.directory_files import half_made_in
from pushrep.log.errors import NoRoomToCut
from tests.support.simulated_disk import SimulatedDisk

HOME = Path("/logs/orders-0")
SEGMENT = HOME / f"{0:020d}.log"


class Place:
    def __init__(self, data):
        self.disk = SimulatedDisk()
        self.disk.make_directory(HOME)
        self.file = self.disk.open(SEGMENT, create=True)
        self.become(data)

    def become(self, data):
        self.file.truncate(0)
        self.file.write_at(data, 0)

    def keep(self, *where, **how):
        return keep_range(self.disk, SEGMENT, self.file, *where, **how)

    def names(self):
        return [name for name in self.disk.list(HOME) if name != SEGMENT.name]

    def bytes_of(self, name):
        return read_whole(self.disk, HOME / name, 1 << 20)


@pytest.mark.parametrize(
    "tail", [b"x", b"\0", b"ends with zeros\0\0\0", b"\0\0\0begins with them", bytes(5000), b"a" + bytes(9000) + b"b\0"]
)
def test_every_byte_is_there(tail):
    place = Place(b"good" + tail)
    name = place.keep(4)
    assert name == f"{SEGMENT.name}.4.cut"
    assert place.names() == [name]
    assert place.bytes_of(name) == tail
    place.disk.lose_power()
    assert place.bytes_of(name) == tail, "it is on disk under its name"


def test_a_range_and_nothing():
    place = Place(b"0123456789")
    assert place.bytes_of(place.keep(3, 7, suffix=".corrupt")) == b"3456"
    assert place.keep(10) is place.keep(4, 4) is None


def test_another_tail_of_the_same_place_is_kept_beside_the_first():
    place = Place(b"good")
    kept = {}
    for tail in (b"one", b"two", b"three"):
        place.become(b"good" + tail)
        kept[place.keep(4)] = tail
    assert len(kept) == 3
    assert {name: place.bytes_of(name) for name in kept} == kept


def test_the_same_tail_is_kept_once():
    place = Place(b"good and bad")
    first = place.keep(4)
    place.become(b"good but other")
    second = place.keep(4)
    place.become(b"good and bad")
    assert place.keep(4) == first != second
    assert place.names() == sorted([first, second])


def test_a_segment_that_was_moved_aside_stays_when_another_of_its_name_follows():
    place = Place(b"one")
    names = []
    for data in (b"one", b"two"):
        file = place.disk.open(SEGMENT, create=True)
        file.truncate(0)
        file.write_at(data, 0)
        names += move_aside(place.disk, HOME, [0])[0]
    assert [place.bytes_of(name) for name in names] == [b"one", b"two"]


def test_a_copy_that_has_no_room_leaves_nothing_behind():
    place = Place(b"good" + b"x" * 1000)
    place.disk.capacity_bytes = place.disk.used_bytes() + 999
    with pytest.raises(NoRoomToCut, match="1000 bytes at most") as refused:
        place.keep(4)
    assert (refused.value.wanted_bytes, refused.value.errno) == (1000, errno.ENOSPC)
    assert place.names() == []
    place.disk.capacity_bytes += 1
    assert place.bytes_of(place.keep(4)) == b"x" * 1000


def test_a_copy_that_fails_leaves_nothing_behind():
    place = Place(b"good" + b"x" * 1000)
    place.disk.fail_sync()
    with pytest.raises(OSError, match="Input/output"):
        place.keep(4)
    assert place.names() == []


def test_half_of_a_copy_is_no_copy():
    place = Place(b"good" + b"x" * 1000)
    place.disk.open(HOME / f"{SEGMENT.name}.4.cut.part", create=True).write_at(b"y" * 5000, 0)
    assert half_made_in(place.disk.list(HOME)) == [f"{SEGMENT.name}.4.cut.part"]
    assert place.bytes_of(place.keep(4)) == b"x" * 1000
    assert half_made_in(place.disk.list(HOME)) == []


def test_zeros_at_the_end_take_no_room(tmp_path):
    path = tmp_path / SEGMENT.name
    path.write_bytes(b"good" + b"x" * 5000 + bytes(4 << 20))
    file = REAL_FILESYSTEM.open(path)
    try:
        kept = tmp_path / keep_range(REAL_FILESYSTEM, path, file, 4)
    finally:
        file.close()
    assert kept.read_bytes() == path.read_bytes()[4:]
    assert kept.stat().st_blocks * 512 < 100_000
