"""Where a sealed segment ends, by its index and headers: right, or no answer."""

import struct
from itertools import count

import pytest

from pushrep.env import REAL_FILESYSTEM
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.recovery import sealed_end
from pushrep.log.segment import Segment
from pushrep.log.walk import ScanRange

TIMES = count(1_000)
CONFIG = LogConfig(segment_bytes=20_000, batch_bytes=1500, index_interval_bytes=4096)


@pytest.fixture
def rolled(tmp_path):
    """The path of a closed log of several segments, and their base offsets."""
    path = tmp_path / "orders-0"
    with SegmentLog.open(path, CONFIG) as log:
        for _ in range(30):
            log.append([b"v" * 100] * 30, timestamps_ms=next(TIMES), durability=Durability.BUFFERED)
    return path, sorted(int(file.stem) for file in path.glob("*.log"))


def end_of(path, base):
    return sealed_end(REAL_FILESYSTEM, path, ScanRange(base_offset=base), CONFIG.index_interval_bytes)


def test_every_sealed_segment_ends_where_the_next_begins(rolled):
    path, bases = rolled
    assert len(bases) > 4
    assert [end_of(path, base) for base in bases[:-1]] == bases[1:]


def test_without_entries_headers_are_hopped_from_the_beginning(rolled):
    """A segment that no entry was due for: its last batch begins within the first interval."""
    path, bases = rolled
    (path / f"{bases[1]:020d}.index").write_bytes(b"")
    assert sealed_end(REAL_FILESYSTEM, path, ScanRange(base_offset=bases[1]), 20_000) == bases[2]
    assert sealed_end(REAL_FILESYSTEM, path, ScanRange(base_offset=bases[1]), 10_000) is None


@pytest.mark.parametrize(
    ("suffix", "change"),
    [
        ("index", None),
        ("timeindex", None),
        ("index", lambda data: b""),
        ("index", lambda data: data[:8]),
        ("index", lambda data: data[:-8]),
        ("index", lambda data: data[:-3]),
        ("timeindex", lambda data: b""),
        ("timeindex", lambda data: data[:12]),
        ("timeindex", lambda data: data[:-12]),
        ("timeindex", lambda data: data[:-5]),
        ("timeindex", lambda data: data[:-4] + struct.pack(">i", 10_000)),
        ("index", lambda data: data + struct.pack(">ii", 0, 0)),
        ("index", lambda data: data[:-8] + struct.pack(">ii", 7, 100)),
        ("index", lambda data: data + struct.pack(">ii", -1, -1)),
        ("index", lambda data: data + struct.pack(">ii", 10_000, 1 << 30)),
        ("log", lambda data: data[:-1]),
        ("log", lambda data: data + b"\0"),
        ("log", lambda data: data + b"\0" * 4096),
        ("log", lambda data: b""),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_does_not_fit_gives_no_answer_and_opening_heals_or_refuses(rolled, suffix, change):
    path, bases = rolled
    file = path / f"{bases[1]:020d}.{suffix}"
    whole = file.read_bytes()
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(whole))
    assert end_of(path, bases[1]) != bases[2]
    if suffix != "log":
        with SegmentLog.open(path, CONFIG) as log:
            assert len(list(log.records(0))) == 900
        assert end_of(path, bases[1]) == bases[2], "the open that did look has made the index again"
        assert file.read_bytes() == whole


def test_opening_after_a_clean_stop_walks_the_newest_segment_only(rolled, monkeypatch):
    path, bases = rolled
    walked = []
    walk = Segment.walk
    monkeypatch.setattr(Segment, "walk", lambda self, *how: (walked.append(self.base_offset), walk(self, *how))[1])
    with SegmentLog.open(path, CONFIG):
        assert walked == [bases[-1]]
