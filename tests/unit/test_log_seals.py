"""Seals and the scrub: what a segment was when it was rolled, who removes a seal, and what is found by it."""

import errno
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import google_crc32c
import pytest

from pushrep.env import REAL_FILESYSTEM, RealFilesystem
from pushrep.env.filesystem import RealFile
from pushrep.log import AppendFailed, CorruptBatch, Durability, LogConfig, SegmentLog
from pushrep.log.directory_files import (
    CLEAN_MARKER_NAME,
    BadLogFile,
    CheckpointFile,
    encode_checkpoint,
    read_partition_metadata,
)
from pushrep.log.inspection import leftovers
from pushrep.log.published import PUBLISHED_NAME
from pushrep.log.repair import Repairer
from pushrep.log.seals import SEAL_BYTES, Seal, decode_seal, encode_seal, read_seal, write_seal
from pushrep.log.verify import FindingKind, verify_log
from pushrep.log.writer import LogWriter
from pushrep.replay import TO_END, ReplayClient, ReplayFailed, ReplayRefused, ReplayRequest
from tests.readers.batch_bytes import parse_batches
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk

pytestmark = pytest.mark.usefixtures("closes_its_files")

SMALL = LogConfig(segment_bytes=1024)
SMALL_UNSCRUBBED = LogConfig(segment_bytes=1024, scrub_bytes_per_s=0)

GOLDEN = bytes.fromhex(
    "707573687365616c00000002aabbccdd"  # magic, version, CRC of the first batch
    "000102030405060708090a0b0c0d0e0f0000000387654321"  # topic id, partition, CRC of the headers
    "00000000000000640000000000000096"  # base offset, end offset
    "000000000000040000000000000000051122334400000300"  # size, batches, CRC and position of the last batch
)


SEALED = Seal(
    log_id=UUID("00010203-0405-0607-0809-0a0b0c0d0e0f"),
    partition=3,
    base_offset=100,
    end_offset=150,
    size_bytes=1024,
    batches=5,
    headers_crc=0x87654321,
    first_crc=0xAABBCCDD,
    last_crc=0x11223344,
    last_position=768,
)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"log_id": UUID(int=1)}, "of log 00010203-0405-0607-0809-0a0b0c0d0e0f, this is 00000000-"),
        ({"partition": 4}, "of partition 3, this is 4"),
        ({"base_offset": 99}, "as the segment that begins at 100"),
        ({"end_offset": 151}, "5 batches to 151 in 1024 bytes where 5 to 150 in 1024 were sealed"),
        ({"size_bytes": 1023}, "in 1023 bytes where"),
        ({"batches": 6}, "6 batches to 150"),
        ({"headers_crc": 1}, "CRC-32C is 0x00000001, sealed was 0x87654321"),
        ({}, None),
    ],
)
def test_o6_a_seal_tells_a_segment_of_anything_else_from_its_own(other, why):
    told = SEALED.contradiction(replace(SEALED, **other))
    assert told is None if why is None else why in (told or "nothing")


def test_a_seal_has_the_bytes_that_are_documented():
    seal = SEALED
    data = encode_seal(seal)
    assert data[:80] == GOLDEN
    assert data == GOLDEN + struct.pack(">I", google_crc32c.value(GOLDEN))
    assert len(data) == SEAL_BYTES == 84
    assert decode_seal(data) == seal


@pytest.mark.parametrize("bit", range(0, 84 * 8, 37))
def test_a_seal_with_a_rotten_bit_is_none(bit):
    data = bytearray(GOLDEN + struct.pack(">I", google_crc32c.value(GOLDEN)))
    data[bit // 8] ^= 0x80 >> bit % 8
    with pytest.raises(BadLogFile):
        decode_seal(bytes(data))


def test_a_seal_of_another_version_is_none():
    """Though its CRC is right: what its fields mean is not known here."""
    data = bytearray(GOLDEN)
    data[11] += 1
    with pytest.raises(BadLogFile, match="version 3 where 2 is read"):
        decode_seal(bytes(data) + struct.pack(">I", google_crc32c.value(bytes(data))))


def fill(log: SegmentLog, count: int, size: int = 20) -> None:
    for first in range(0, count, 10):
        log.append([b"%06d" % n + bytes(size) for n in range(first, first + 10)], durability=Durability.BUFFERED)


def made(path: Path, count: int = 100, config: LogConfig = SMALL) -> Path:
    with SegmentLog.open(path, config) as log:
        fill(log, count)
    return path


def bases(path: Path) -> list[int]:
    return sorted(int(file.stem) for file in path.glob("*.log"))


def seals(path: Path) -> list[int]:
    return sorted(int(file.stem) for file in path.glob("*.seal"))


def test_each_segment_that_rolls_is_sealed_and_verify_holds_it_against_that(tmp_path):
    """identity O6."""
    path = made(tmp_path / "orders-0")
    assert seals(path) == bases(path)[:-1] != []
    for base, following in zip(bases(path), bases(path)[1:], strict=False):
        seal = read_seal(REAL_FILESYSTEM, path, base)
        assert seal is not None
        assert (seal.log_id, seal.partition, seal.end_offset) == (read_partition_metadata(path), 0, following)
        assert seal.size_bytes == (path / f"{base:020d}.log").stat().st_size
    report = verify_log(path)
    assert report.is_whole
    assert report.sealed == len(seals(path))
    assert leftovers(path) == []


def test_a_segment_of_another_log_in_the_place_of_one_is_found(tmp_path):
    """identity O6: it has the same offsets, the same size, and every CRC is right."""
    path, other = made(tmp_path / "orders-0"), tmp_path / "orders-1"
    with SegmentLog.open(other, SMALL) as log:
        for first in range(0, 100, 10):
            log.append([b"%06d" % n + b"x" * 20 for n in range(first, first + 10)], durability=Durability.BUFFERED)
    name = f"{bases(path)[1]:020d}.log"
    assert (other / name).stat().st_size == (path / name).stat().st_size
    (path / name).write_bytes((other / name).read_bytes())
    found = verify_log(path).findings
    assert [(finding.kind, finding.file) for finding in found] == [(FindingKind.SEAL, name)]
    (tmp_path / ".pushrep_cleanshutdown").unlink()
    (tmp_path / "recovery-point-offset-checkpoint").unlink()
    (tmp_path / ".pushrep_published").unlink()
    with SegmentLog.open(path, SMALL) as log:
        assert log.damaged_from == bases(path)[1], "the scan of an opening finds it, too"


@contextmanager
def _owner(path: Path) -> Iterator[Callable[[int], list[bytes]]]:
    with SegmentLog.open(path, SMALL) as log:
        yield lambda start: [record.value for record in log.records(start)]


@contextmanager
def _reader(path: Path) -> Iterator[Callable[[int], list[bytes]]]:
    with SegmentLog.open_reader(path, isolation="written") as log:
        yield lambda start: [record.value for record in log.records(start)]


@contextmanager
def _slices(path: Path) -> Iterator[Callable[[int], list[bytes]]]:
    """As they are pushed, shipped and sent: where there is no slice, the log's own read raises."""
    with SegmentLog.open(path, SMALL) as log:
        slices = log.slices()

        def read(start: int) -> list[bytes]:
            values = []
            while start < log.log_end_offset:
                found = slices.read(start, log.log_end_offset, 1 << 20)
                data = log.read(start, 1) if found is None else found.file.read_at(found.size_bytes, found.position)
                batches = parse_batches(data)
                values += [record.value for batch in batches for record in batch.records]
                start = batches[-1].next_offset
            return values

        yield read


@contextmanager
def _replay(path: Path) -> Iterator[Callable[[int], list[bytes]]]:
    with ReplayClient(path.parent) as client:
        yield lambda start: [record.value for record in client.replay(ReplayRequest(path.name, start, TO_END))]


_KAFKAS = (".log", ".index", ".timeindex")


def foreign(path: Path, base: int, *suffixes: str) -> None:
    """Put another log's files in the place of the segment's: the same offsets and size, and every CRC is right."""
    with SegmentLog.open(path.parent / "other" / path.name, SMALL) as log:
        for first in range(0, 400, 10):
            log.append([b"%06d" % n + b"x" * 20 for n in range(first, first + 10)], durability=Durability.BUFFERED)
    for suffix in suffixes:
        restored = path / f"{base:020d}{suffix}"
        was = restored.stat().st_size
        restored.write_bytes((log.path / restored.name).read_bytes())
        assert restored.stat().st_size == was


@pytest.mark.parametrize("suffixes", [_KAFKAS, (*_KAFKAS, ".seal")], ids=["without its seal", "with it"])
@pytest.mark.parametrize("way", [_owner, _reader, _slices, _replay])
def test_o6_no_record_of_a_segment_of_another_log_is_given(tmp_path, way, suffixes):
    """identity O6: a restore into the wrong directory; found by the first read, from wherever it begins."""
    path = made(tmp_path / "orders-0", 400)
    first, second, third, *_ = bases(path)
    foreign(path, second, *suffixes)
    with way(path) as read:
        for start in (second, second + 15):
            with pytest.raises((CorruptBatch, ReplayFailed, ReplayRefused), match="sealed"):
                read(start)
        with pytest.raises((CorruptBatch, ReplayFailed, ReplayRefused), match="sealed"):
            read(first)
        assert len(read(third + 10)) == 390 - third, "what lies behind it is ours"


@pytest.mark.parametrize("odd", ["too long", "a directory"])
@pytest.mark.parametrize("way", [_owner, _reader, _slices, _replay])
def test_o6_a_seal_that_can_not_be_read_keeps_nobody_from_the_records(tmp_path, way, odd):
    """They can be read without it; verify names it."""
    path = made(tmp_path / "orders-0", 400)
    seal = path / f"{bases(path)[1]:020d}.seal"
    if odd == "too long":
        seal.write_bytes(seal.read_bytes() * 9)
    else:
        seal.unlink()
        seal.mkdir()
    with way(path) as read:
        assert len(read(0)) == 400
    if odd == "too long":
        assert [finding.file for finding in verify_log(path).findings] == [seal.name]
    else:
        with pytest.raises(IsADirectoryError, match=seal.name):
            verify_log(path)


@pytest.mark.parametrize("at", [0, -1], ids=["first batch", "last batch"])
def test_o6_one_batch_of_another_log_at_an_end_of_its_segment_is_enough(tmp_path, at):
    """A copy of the same log that went another way later has the same first batches."""
    path = made(tmp_path / "orders-0", 400)
    base = bases(path)[1]
    segment = path / f"{base:020d}.log"
    ours = segment.read_bytes()
    foreign(path, base, ".log")
    batch, theirs, mixed = parse_batches(ours)[at], segment.read_bytes(), bytearray(ours)
    behind = batch.position + batch.size
    mixed[batch.position : behind] = theirs[batch.position : behind]
    segment.write_bytes(mixed)
    with _reader(path) as read, pytest.raises(CorruptBatch, match="sealed"):
        read(base)


def test_o6_a_damaged_last_batch_costs_no_record_before_it(tmp_path):
    """Damage is no foreign segment: the walk gives what is whole."""
    path = made(tmp_path / "orders-0")
    base, following, *_ = bases(path)[1:]
    segment = path / f"{base:020d}.log"
    last = parse_batches(segment.read_bytes())[-1]
    for position in (last.position + 17, last.position + 70):  # its CRC, a record
        flip(segment, position)
        with SegmentLog.open_reader(path, isolation="written") as log:
            given, records = [], log.records(base, following)
            with pytest.raises(CorruptBatch) as raised:
                given.extend(record.offset for record in records)
        assert (given, raised.value.offset) == (list(range(base, last.base_offset)), last.base_offset)
        flip(segment, position)


def test_a_segment_with_its_seal_from_another_log_is_found(tmp_path):
    """identity O6: the log's id; by verify, the scrub and an opening that scans it."""
    path, other = made(tmp_path / "orders-0"), made(tmp_path / "orders-1")
    for suffix in (".log", ".seal", ".index", ".timeindex"):
        name = f"{bases(path)[1]:020d}{suffix}"
        (path / name).write_bytes((other / name).read_bytes())
    (finding,) = verify_log(path).findings
    assert finding.kind is FindingKind.SEAL
    assert str(read_partition_metadata(other)) in finding.reason
    with SegmentLog.open(path, SMALL) as log:
        (found,) = log.scrub.run_pass().findings
    assert found.reason == finding.reason
    with SegmentLog.open(path, replace(SMALL, verify_last_segments=100)) as log:
        assert (log.damaged_from, log.recovery.damage) == (bases(path)[1], finding.reason)


def test_o6_a_sealed_segment_that_is_scanned_from_its_middle_on_is_not_held_against_its_seal(tmp_path):
    """Its first headers were not seen: an opening after a kill begins where the log was last known to be on disk."""
    config = replace(SMALL_UNSCRUBBED, segment_bytes=10_000, index_interval_bytes=100)
    path = made(tmp_path / "orders-0", 1_000, config)
    first, second, *_ = bases(path)
    for name in (CLEAN_MARKER_NAME, PUBLISHED_NAME):
        (tmp_path / name).unlink()
    middle = {path.name: (first + second) // 2}
    (tmp_path / CheckpointFile.RECOVERY_POINT.value).write_bytes(encode_checkpoint(middle))
    with SegmentLog.open(path, config) as log:
        report = log.recovery
        assert report.bytes_scanned < sum(file.stat().st_size for file in path.glob("*.log")), "not from its start"
        assert (report.segments_scanned, report.damage) == (len(bases(path)), None)
        assert len(list(log.records(0))) == 1_000


def test_a_segment_with_its_seal_from_another_partition_of_the_topic_is_found(tmp_path):
    """identity O6: Kafka's partitions of one topic share an id."""
    path, other = made(tmp_path / "orders-0"), tmp_path / "orders-1"
    other.mkdir()
    (other / "partition.metadata").write_bytes((path / "partition.metadata").read_bytes())
    made(other)
    name = f"{bases(path)[1]:020d}"
    for suffix in (".log", ".seal", ".index", ".timeindex"):
        (path / f"{name}{suffix}").write_bytes((other / f"{name}{suffix}").read_bytes())
    (finding,) = verify_log(path).findings
    assert finding.kind is FindingKind.SEAL
    assert "partition 1" in finding.reason
    with SegmentLog.open(path, SMALL) as log:
        (found,) = log.scrub.run_pass().findings
    assert found.reason == finding.reason
    for file in (".pushrep_cleanshutdown", "recovery-point-offset-checkpoint", ".pushrep_published"):
        (tmp_path / file).unlink()
    with SegmentLog.open(path, SMALL) as log:
        assert log.damaged_from == bases(path)[1]


@pytest.mark.parametrize("size", [20, 30], ids=["of the same shape", "of another shape"])
def test_a_segment_that_was_cut_while_the_scrub_read_it_gets_no_seal_of_what_it_was(tmp_path, monkeypatch, size):
    """identity O6: the scrub waits for an append, and behind it the segment is another."""
    path = made(tmp_path / "orders-0")
    base, keep = bases(path)[1], LogWriter.keep_seal
    (path / f"{base:020d}.seal").unlink()
    with SegmentLog.open(path, SMALL_UNSCRUBBED) as log:

        def cut_before(writer, *given):
            log.truncate_to(base + 10, force=True)
            fill(log, 100, size)
            return keep(writer, *given)

        monkeypatch.setattr(LogWriter, "keep_seal", cut_before)
        assert log.scrub.run_pass().seals_made == 0
    assert verify_log(path).findings == []


def test_who_cuts_a_sealed_segment_removes_its_seal(tmp_path):
    """identity O6: what is written behind the cut is sealed by its own roll, or by the scrub."""
    path = made(tmp_path / "orders-0")
    with SegmentLog.open(path, SMALL_UNSCRUBBED) as log:
        log.truncate_to(bases(path)[1] + 10, force=True)
        assert seals(path) == bases(path)[:1]
        fill(log, 100)
    assert verify_log(path).is_whole
    assert bases(path)[1] not in seals(path), "not every batch of it was seen as it was written"
    with SegmentLog.open(path, SMALL) as log:
        log.apply_retention()
        log.purge(bases(path)[1])
    assert set(seals(path)) <= set(bases(path))


@pytest.fixture
def done(monkeypatch) -> list[tuple[str, Path]]:
    """What is done on the disk, and to which path: remove (also by a new name), sync, truncate."""
    done: list[tuple[str, Path]] = []

    def noting(owner, name, what):
        original = getattr(owner, name)

        def noted(*arguments):
            done.append(what(*arguments))
            return original(*arguments)

        monkeypatch.setattr(owner, name, noted)

    noting(RealFilesystem, "remove", lambda _self, one: ("remove", one))
    noting(RealFilesystem, "rename", lambda _self, one, _to: ("remove", one))
    noting(RealFilesystem, "sync_directory", lambda _self, one: ("sync", one))
    noting(RealFile, "truncate", lambda file, _size: ("truncate", file.path))
    return done


@pytest.mark.parametrize("keep", [False, True])
def test_o6_a_seal_is_gone_from_the_disk_before_its_segment_is_cut(tmp_path, done, keep):
    """A kill between the two would leave a seal that the segment contradicts."""
    path = made(tmp_path / "orders-0")
    base, later = bases(path)[1], bases(path)[2]
    with SegmentLog.open(path, LogConfig(segment_bytes=1024, scrub_bytes_per_s=0)) as log:
        done.clear()
        log.truncate_to(base + 10, force=True, keep=keep)
    removed, cut = (
        done.index(("remove", path / f"{base:020d}.seal")),
        done.index(("truncate", path / f"{base:020d}.log")),
    )
    assert ("sync", path) in done[removed:cut]
    removed, gone = (
        done.index(("remove", path / f"{later:020d}.seal")),
        done.index(("remove", path / f"{later:020d}.log")),
    )
    assert ("sync", path) in done[removed:gone], "of a segment that goes whole, too"


class NoRoom(RealFilesystem):
    """Makes no new segment while it `is_full`."""

    is_full = False

    def open(self, path, *, create=False, writable=True):
        if self.is_full and create and path.suffix == ".log":
            raise OSError(errno.ENOSPC, "no room for a file", str(path))
        return super().open(path, create=create, writable=writable)


def test_o6_a_roll_that_is_undone_takes_the_seal_back(tmp_path):
    disk = NoRoom()
    path = tmp_path / "orders-0"
    with SegmentLog.open(path, LogConfig(segment_bytes=1024, scrub_bytes_per_s=0), filesystem=disk) as log:
        fill(log, 10)
        disk.is_full = True
        with pytest.raises(AppendFailed, match="no room for a file"):
            fill(log, 100, size=30)
        disk.is_full = False
        sealed = bases(path)[-1]
        log.append(b"it still has room for this")
        assert bases(path)[-1] == sealed
        fill(log, 200)
    assert len(bases(path)) > 3
    assert verify_log(path).is_whole, "the seal would be of less than the segment holds"


def sealed_newest(path: Path) -> int:
    """As a roll leaves it that was stopped behind the seal."""
    newest = bases(path)[-1]
    seal = read_seal(REAL_FILESYSTEM, path, bases(path)[0])
    assert seal is not None
    write_seal(REAL_FILESYSTEM, path, replace(seal, base_offset=newest))
    return newest


def test_o6_a_segment_that_goes_on_has_no_seal(tmp_path):
    path = made(tmp_path / "orders-0", 110)
    newest = sealed_newest(path)
    with SegmentLog.open(path, LogConfig(segment_bytes=1024, scrub_bytes_per_s=0)) as log:
        fill(log, 100)
        assert newest in bases(path)[:-1]
    assert verify_log(path).is_whole, "the seal would be of less than the segment holds"


def test_o6_an_opening_removes_the_seal_before_it_cuts_a_torn_tail(tmp_path, done):
    path = made(tmp_path / "orders-0", 110)
    newest = sealed_newest(path)
    for name in (CLEAN_MARKER_NAME, PUBLISHED_NAME):
        (tmp_path / name).unlink()
    segment = path / f"{newest:020d}.log"
    segment.write_bytes(segment.read_bytes() + b"torn")
    done.clear()
    with SegmentLog.open(path, SMALL) as log:
        assert log.recovery.cut is not None
    removed, cut = done.index(("remove", path / f"{newest:020d}.seal")), done.index(("truncate", segment))
    assert ("sync", path) in done[removed:cut]


def test_o6_a_segment_that_is_written_anew_behind_a_cut_is_compared_anew(tmp_path):
    path = made(tmp_path / "orders-0", 400)
    base = bases(path)[1]
    with SegmentLog.open(path, LogConfig(segment_bytes=1024, scrub_bytes_per_s=0)) as log:
        assert len(list(log.records(0))) == 400, "each segment was read, and passed"
        log.truncate_to(base - 10, force=True)
        fill(log, 400)
        assert base in seals(path)
        foreign(path, base, ".log")
        with pytest.raises(CorruptBatch, match="sealed"):
            log.read(base, 1)


def test_the_scrub_seals_what_has_none(tmp_path):
    """identity O6, O8."""
    path = made(tmp_path / "orders-0")
    kept = {file.name: file.read_bytes() for file in path.glob("*.seal")}
    (path / min(kept)).unlink()
    with SegmentLog.open(path, SMALL) as log:
        status = log.scrub.run_pass()
    assert (status.passes, status.seals_made, status.findings) == (1, 1, ())
    assert {file.name: file.read_bytes() for file in path.glob("*.seal")} == kept


def test_o6_a_seal_that_the_scrub_reports_survives_a_power_cut(tmp_path):
    """identity O6: that it was made is reported; bits that rot after that are to be found."""
    disk, path = SimulatedDisk(), Path("/logs/orders-0")
    with SegmentLog.open(path, SMALL, filesystem=disk, clock=SimulatedClock()) as log:
        fill(log, 100)
        seal = f"{0:020d}.seal"
        disk.remove(path / seal)
        disk.sync_directory(path)
        assert log.scrub.run_pass().seals_made == 1
        assert seal in disk.names(path, synced=True)


def test_o6_a_seal_for_another_size_is_found_by_scrub_verify_and_opening(tmp_path):
    path = made(tmp_path / "orders-0")
    seal = min(path.glob("*.seal"))
    old = decode_seal(seal.read_bytes())
    seal.write_bytes(encode_seal(replace(old, size_bytes=old.size_bytes + 1)))
    with SegmentLog.open(path, SMALL) as log:
        (found,) = log.scrub.run_pass().findings
        assert "were sealed" in found.reason
        assert (found.position, found.offset) == (0, old.base_offset)
    (finding,) = verify_log(path).findings
    assert (finding.kind, finding.offset) == (FindingKind.SEAL, old.base_offset)
    with SegmentLog.open(path, replace(SMALL, verify_last_segments=100)) as log:
        assert log.damaged_from == old.base_offset


def test_repair_removes_a_seal_that_is_damaged_itself(tmp_path):
    path = made(tmp_path / "orders-0")
    seal = min(path.glob("*.seal"))
    data = bytearray(seal.read_bytes())
    data[60] ^= 1
    seal.write_bytes(data)
    report = Repairer(path).repair()
    assert report.after.is_whole
    assert not seal.exists()


def test_repair_from_a_copy_of_the_same_bytes_removes_a_seal_that_lies(tmp_path):
    path = made(tmp_path / "orders-0")
    copy = shutil.copytree(path.parent, tmp_path / "copy") / path.name
    seal = min(path.glob("*.seal"))
    old = decode_seal(seal.read_bytes())
    seal.write_bytes(encode_seal(replace(old, headers_crc=old.headers_crc ^ 1)))
    assert [finding.kind for finding in verify_log(path).findings] == [FindingKind.SEAL]
    segment = copy / seal.with_suffix(".log").name
    there = segment.rename(tmp_path / "elsewhere")
    assert not Repairer(path).repair(copy=copy).after.is_whole, "the copy has no such segment to compare with"
    there.rename(segment)
    repaired = Repairer(path).repair(copy=copy)
    assert (repaired.after.is_whole, repaired.rebuilt) == (True, [seal.name])


@pytest.mark.parametrize("bit", [99, 127], ids=["much", "by one"])
def test_o6_a_last_batch_of_an_epoch_that_never_was_is_not_sealed(tmp_path, bit, caplog):
    """identity O6: the epoch is of no offset in its segment; the list of leader epochs has the start of each."""
    path = made(tmp_path / "orders-0")
    first = bases(path)[0]
    segment, seal = path / f"{first:020d}.log", path / f"{first:020d}.seal"
    whole = segment.read_bytes()
    rotten, (*_, last) = bytearray(whole), parse_batches(whole)
    rotten[last.position + bit // 8] ^= 0x80 >> bit % 8
    segment.write_bytes(rotten)
    seal.unlink()
    with SegmentLog.open(path, SMALL) as log:
        status = log.scrub.run_pass()
        assert (status.seals_made, seal.exists()) == (0, False)
        (finding,) = status.findings
        assert (finding.position, finding.offset) == (last.position, last.base_offset)
        assert "leader epoch" in finding.reason
        assert finding.reason in caplog.text
        segment.write_bytes(whole)
        assert (log.scrub.run_pass().findings, seal.exists()) == ((), True)


@pytest.mark.parametrize("at", [3, 14, 70], ids=["base offset", "leader epoch", "a record"])
def test_the_scrub_reports_a_rotten_bit_until_it_is_whole_again(tmp_path, at, caplog):
    """identity O8: nothing is changed."""
    path = made(tmp_path / "orders-0")
    segment = path / f"{bases(path)[1]:020d}.log"
    whole = segment.read_bytes()
    rotten = bytearray(whole)
    rotten[at] ^= 2
    with SegmentLog.open(path, SMALL) as log:
        assert log.scrub.run_pass().findings == ()
        segment.write_bytes(rotten)
        (finding,) = log.scrub.run_pass().findings
        assert (finding.log, finding.segment, finding.offset) == ("orders-0", segment.name, bases(path)[1])
        assert segment.name in caplog.text
        log.scrub.run_pass()
        assert len(log.scrub.status.findings) == 1
        assert segment.read_bytes() == rotten
        segment.write_bytes(whole)
        assert log.scrub.run_pass().findings == ()


def test_o8_the_scrub_reports_a_segment_that_can_not_be_read_from_its_first_byte_on(tmp_path):
    path = made(tmp_path / "orders-0")
    base = bases(path)[1]
    with SegmentLog.open(path, SMALL) as log:
        (path / f"{base:020d}.log").unlink()
        (path / f"{base:020d}.log").mkdir()
        (found,) = log.scrub.run_pass().findings
        assert (found.position, found.offset) == (0, base)
        assert "directory" in found.reason


def test_the_scrub_reads_by_itself_while_a_log_is_open(tmp_path, monkeypatch):
    """identity O8: at the configured rate, in a separate thread."""
    monkeypatch.setattr("pushrep.log.scrub.FIRST_MS", 1)
    path = made(tmp_path / "orders-0")
    with SegmentLog.open(path, LogConfig(segment_bytes=1024, scrub_bytes_per_s=1 << 30)) as log:
        wait_until(lambda: log.scrub.status.passes > 0)
        assert log.scrub.status.segments >= len(seals(path))


class Delays(list):
    """A scrub whose waits return at once, and are recorded."""

    def attach(self, _scrub):
        pass

    def detach(self, _scrub):
        pass

    def soon(self, _scrub, delay_ms):
        self.append(delay_ms)


@pytest.fixture
def delays(monkeypatch):
    delays = Delays()
    monkeypatch.setattr("pushrep.log.directory.process_scrubber", lambda: delays)
    return delays


def test_o8_the_scrub_keeps_to_its_rate_and_reads_nothing_while_it_is_paused(tmp_path, monkeypatch, delays):
    monkeypatch.setattr("pushrep.log.scrub._PIECE_BYTES", 1024)
    assert LogConfig().scrub_bytes_per_s == 4 << 20
    path = made(tmp_path / "orders-0", 300)
    delays.clear()
    with SegmentLog.open(path, LogConfig(segment_bytes=1024, scrub_bytes_per_s=100, scrub_pause_s=7)) as log:
        scrub = log.scrub

        def piece():
            before = scrub.status.bytes_read
            scrub.flush_in_background()
            return scrub.status.bytes_read - before

        read = piece()
        assert read
        assert delays[1:] == [1000 * read // 100]
        scrub.pause()
        assert (piece(), len(delays)) == (0, 2)
        scrub.resume()
        assert delays[2:] == [0]
        while not scrub.status.passes:
            read = piece()
            assert delays[-1] == (7000 if scrub.status.passes else 1000 * read // 100)
        assert scrub.status.bytes_read == sum((path / f"{base:020d}.log").stat().st_size for base in bases(path)[:-1])


def test_o6_a_segment_that_was_taken_up_again_gets_its_seal_when_it_rolls(tmp_path):
    """The scrub makes the seal at once, because not all of its batches were seen when they were written."""
    path = made(tmp_path / "orders-0", 110)
    taken_up = bases(path)[-1]
    with SegmentLog.open(path, SMALL) as log:
        fill(log, 100)
        assert taken_up in bases(path)[:-1]
        wait_until(lambda: taken_up in seals(path))
        assert log.scrub.status.passes == 0, "no pass had to come"
    assert verify_log(path).is_whole


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_o7_a_damaged_index_is_made_anew_while_the_log_is_open(tmp_path):
    config = LogConfig(segment_bytes=1 << 20, index_interval_bytes=100, preallocate_bytes=0)
    path = tmp_path / "orders-0"
    with SegmentLog.open(path, config) as log:
        fill(log, 5000, size=300)
    index = path / f"{bases(path)[0]:020d}.index"
    whole = index.read_bytes()
    with SegmentLog.open(path, config) as log:
        for at in range(7, len(whole), 8):
            flip(index, at)
        for offset in range(3, bases(path)[1], 50):
            assert next(log.records(offset)).offset == offset
        assert log.ignored_index_entries
        wait_until(lambda: index.read_bytes() == whole)
        before = log.ignored_index_entries
        assert next(log.records(3)).offset == 3
        assert log.ignored_index_entries == before
        log.append(b"goes on")
    assert leftovers(path) == []
    assert verify_log(path).is_whole


def test_a_segment_that_is_cut_while_it_is_read_is_no_finding(tmp_path):
    """identity O8."""
    with SegmentLog.open(tmp_path / "orders-0", LogConfig(segment_bytes=2 << 20, preallocate_bytes=0)) as log:
        fill(log, 120, size=20_000)  # more than the scrub reads at once
        cut_to, end = 10, log.log_end_offset

        def after_a_piece():
            if log.log_end_offset == end:
                log.truncate_to(cut_to, force=True)

        status = log.scrub.run_pass(after_a_piece)
        assert (log.log_end_offset, status.passes, status.damaged) == (cut_to, 1, 0)


class Reads(RealFilesystem):
    """Records from which logs files were opened."""

    def __init__(self):
        self.logs = []

    def open(self, path, *, create=False, writable=True):
        self.logs.append(path.parent)
        return super().open(path, create=create, writable=writable)


@pytest.mark.usefixtures("delays")
def test_o8_a_log_that_is_closed_while_another_is_read_before_its_turn_is_read_no_more(tmp_path):
    path, urgent_path = made(tmp_path / "orders-0", 400), made(tmp_path / "urgent-0", 400)
    damaged, filesystem, logs_read = urgent_path / f"{bases(urgent_path)[0]:020d}.log", Reads(), []
    log = SegmentLog.open(path, SMALL, filesystem=filesystem)
    with SegmentLog.open(urgent_path, SMALL, filesystem=filesystem) as urgent:

        def after_a_piece():
            logs_read.append(filesystem.logs[-1])
            if logs_read == [path]:
                flip(damaged, -1)
                with pytest.raises(CorruptBatch):  # now that segment's turn is next
                    list(urgent.records(0))
                flip(damaged, -1)
            elif logs_read == [path, urgent_path]:
                log.close()
                filesystem.logs.clear()

        assert urgent.scrub.run_pass(after_a_piece).findings == ()
        assert filesystem.logs.count(urgent_path) > 1, "the pass went on"
        assert path not in filesystem.logs


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
