"""Verify and dump: what they find in a log at rest, byte by byte and case by case."""

import shutil

import pytest

from pushrep.cli.main import run
from pushrep.env import REAL_FILESYSTEM
from pushrep.log import LogConfig, NotALog, SegmentLog
from pushrep.log.directory_files import list_segments, segment_path
from pushrep.log.dump import BadFile, DumpedBatch, DumpedEnd, OffsetWindow, dump_file
from pushrep.log.inspection import lock_holder, logs_at, summarize
from pushrep.log.verify import FindingKind, verify_log
from pushrep.records import RecordBatch, encode_batch
from pushrep.records.header import CRC_COVERS_FROM, HEADER_BYTES, crc32c, write_crc
from pushrep.replay import TO_END, ReplayClient, ReplayRequest

pytestmark = pytest.mark.usefixtures("closes_its_files")

CONFIG = LogConfig(segment_bytes=400, index_interval_bytes=100)
FIRST = "00000000000000000000.log"


def make(path, lists=7, config=CONFIG):
    with SegmentLog.open(path, config) as log:
        for number in range(lists):
            log.append([b"value %d" % number] * 3, timestamps_ms=1_700_000_000_000 + number)
    return path


@pytest.fixture
def log(tmp_path):
    path = make(tmp_path / "logs" / "orders-0")
    assert len(list(path.glob("*.log"))) == 3
    return path


def only(report):
    assert len(report.findings) == 1, report.findings
    return report.findings[0]


def test_a_whole_log_is_whole(log):
    report = verify_log(log)
    assert report.is_whole
    assert (report.log_start_offset, report.verified_to, report.segments) == (0, 21, 3)
    assert (report.batches, report.records) == (7, 21)
    assert report.bytes_read == sum(path.stat().st_size for path in log.glob("*.log"))
    assert report.torn is None


@pytest.mark.parametrize("suffix", ["index", "timeindex"])
@pytest.mark.parametrize(("behind", "rest_bytes"), [(bytes(100), 0), (b"xyz", 3)], ids=["allocated ahead", "no entry"])
def test_zeros_behind_an_index_are_allocated_ahead_and_other_bytes_are_a_fault(log, suffix, behind, rest_bytes):
    """A broker allocates its newest indexes ahead, by 10 MiB, of which an entry of 12 bytes is no divisor."""
    index = log / f"{0:020d}.{suffix}"
    index.write_bytes(index.read_bytes() + behind)
    said = [f"{rest_bytes} bytes at its end are no entry"] if rest_bytes else []
    assert [finding.reason for finding in verify_log(log).findings] == said
    assert [bad.reason for bad in dump_file(index, OffsetWindow()) if isinstance(bad, BadFile)] == said


def test_indexes_of_a_segment_that_was_cut_off_say_nothing_of_the_next_one_of_its_name(log):
    """Whatever left them: a crash between the removals, a restore of single files."""
    base = 9
    left = {path: path.read_bytes() for path in log.glob(f"{base:020d}.*index")}
    assert all(left.values())
    with SegmentLog.open(log, CONFIG) as opened:
        opened.truncate_to(base - 3, force=True)
        for path, data in left.items():
            path.write_bytes(data)
        opened.append([b"value 2"] * 3, timestamps_ms=1_700_000_000_002)
        opened.append([b"value 3"] * 3, timestamps_ms=1_800_000_000_000)
        assert list_segments(REAL_FILESYSTEM, log) == [0, base]
        assert [path.stat().st_size for path in left] == [0, 0], "one batch in it has no entry"
    assert verify_log(log).findings == []


def test_a_log_without_segments_is_whole_only_if_it_never_had_records(log, tmp_path):
    for path in log.glob("0*"):
        path.unlink()
    found = only(verify_log(log))
    assert (found.kind, found.file, found.offset) == (FindingKind.JOINT, FIRST, 0)
    assert found.reason == "no segment is there, but offsets up to 21 were"
    fresh = make(tmp_path / "logs" / "orders-1", lists=0)
    assert verify_log(fresh).is_whole
    for path in fresh.glob("0*"):
        path.unlink()
    assert verify_log(fresh).is_whole


def test_every_byte_that_is_flipped_is_found(log, torture):
    """The short form flips each third byte of a segment."""
    missed = []
    judged = [path for path in sorted(log.iterdir()) if path.suffix != ".crc32c"]
    assert len(judged) == 13, "three files a segment, two seals, leader epochs and metadata"
    for path in judged:
        data = path.read_bytes()
        stride = torture.count(3, 1) if path.suffix == ".log" else 1
        for at in range(torture.random(path.name).randrange(stride), len(data), stride):
            flipped = bytearray(data)
            flipped[at] ^= 1 << (at % 8)
            path.write_bytes(flipped)
            report = verify_log(log)
            if report.is_whole or not any(finding.file == path.name for finding in report.findings):
                missed.append((path.name, at, report.findings))
        path.write_bytes(data)
    assert not missed, missed
    assert verify_log(log).is_whole


def test_every_prefix_of_a_segment_is_told(log, torture):
    """Each third of them in the short form."""
    stride = torture.count(3, 1)
    for path in sorted(log.glob("*.log")):
        data = path.read_bytes()
        for size in range(torture.random(path.name).randrange(stride), len(data), stride):
            path.write_bytes(data[:size])
            report = verify_log(log)
            assert [f for f in report.findings if f.file == path.name], f"{path.name} cut to {size} bytes"
        path.write_bytes(data)


def test_batches_without_a_leader_epoch_are_whole_to_everybody(tmp_path):
    """-1, as Kafka's builders write it: an opening treats it as 0, and no check calls it damage then."""
    path = tmp_path / "logs" / "orders-0"
    path.mkdir(parents=True)
    for base in (0, 3):
        data = encode_batch([b"x"] * 3, timestamps_ms=1, base_offset=base, leader_epoch=-1).data
        segment_path(path, base).write_bytes(data)
    with SegmentLog.open(path, CONFIG, adopt=True) as log:
        assert (log.leader_epochs.entries, log.log_end_offset) == (((0, 0),), 6)
        assert log.scrub.run_pass().findings == ()
    assert verify_log(path).is_whole
    with ReplayClient(path.parent) as client:
        assert len(list(client.replay(ReplayRequest("orders-0", position=0, length=TO_END)))) == 6


def test_a_damage_is_named_by_segment_byte_offset_and_reason(log):
    path = log / "00000000000000000009.log"
    first_batch = int.from_bytes(path.read_bytes()[8:12], "big") + 12
    data = bytearray(path.read_bytes())
    data[first_batch + 70] ^= 1
    path.write_bytes(data)
    finding = only(verify_log(log))
    assert (finding.kind, finding.file, finding.position, finding.offset) == (
        FindingKind.DAMAGE,
        path.name,
        first_batch,
        12,
    )
    assert "CRC" in finding.reason
    assert verify_log(log).verified_to == 12


@pytest.mark.parametrize(("missing", "kind"), [(0, FindingKind.JOINT), (1, FindingKind.JOINT), (2, FindingKind.END)])
def test_a_missing_segment_is_told(log, missing, kind):
    sorted(log.glob("*.log"))[missing].unlink()
    finding = only(verify_log(log))
    assert finding.kind in {kind, FindingKind.DAMAGE}
    assert finding.offset in {0, 9, 18}


def test_a_torn_tail_of_an_unclean_stop_is_no_damage(log):
    (log.parent / ".pushrep_cleanshutdown").unlink()
    with max(log.glob("*.log")).open("ab") as file:
        file.write(b"torn")
    report = verify_log(log)
    assert report.is_whole
    assert report.torn.offset == 21
    assert "header" in report.torn.reason
    told = report.as_dict()
    assert (told["is_whole"], told["findings"], told["verified_to"]) == (True, [], 21)
    assert told["torn"] == report.torn.as_dict()
    assert (told["torn"]["kind"], told["torn"]["offset"]) == (report.torn.kind.value, 21)


def test_bytes_behind_a_clean_end_are_told(log):
    with max(log.glob("*.log")).open("ab") as file:
        file.write(bytes(4))
    finding = only(verify_log(log))
    assert finding.kind is FindingKind.END
    assert "closed with" in finding.reason


def test_without_any_checkpoint_every_bad_byte_counts(log, tmp_path):
    alone = tmp_path / "elsewhere" / "orders-0"
    shutil.copytree(log, alone)
    assert verify_log(alone).is_whole
    with max(alone.glob("*.log")).open("ab") as file:
        file.write(b"torn")
    assert only(verify_log(alone)).kind is FindingKind.DAMAGE


def test_nothing_is_written_and_no_lock_taken(log):
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in log.parent.rglob("*") if path.is_file()}
    verify_log(log)
    summarize(log)
    for file in log.glob("*.log"):
        list(dump_file(file, OffsetWindow()))
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in log.parent.rglob("*") if path.is_file()}
    assert after == before


def test_progress_adds_up(log):
    told = []
    report = verify_log(log, on_bytes=told.append)
    assert sum(told) == report.bytes_read


def test_beside_a_writer_it_ends_where_the_log_ended_when_it_began(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0", CONFIG) as log:
        log.append([b"value"] * 3)
        report = verify_log(log.path, on_bytes=lambda _bytes: [log.append([b"value"] * 9) for _ in range(5)])
        assert len(list_segments(REAL_FILESYSTEM, log.path)) > 3
    assert (report.segments, report.verified_to) == (1, 3)


def test_who_writes_is_known_without_taking_the_lock(log):
    assert lock_holder(log.parent) is None
    with SegmentLog.open(log, CONFIG) as opened:
        holder = lock_holder(log.parent)
        opened.append(b"more")
        summary = summarize(log)
        assert summary.writer_pid == holder
        assert (summary.known_by, summary.log_end_offset, summary.is_clean) == ("writer", 22, False)
        report = verify_log(log)
        assert report.is_whole
        assert report.verified_to == 22
    assert lock_holder(log.parent) is None
    assert summarize(log).is_clean


def test_logs_are_found_by_directory_and_by_name(log, tmp_path):
    make(tmp_path / "logs" / "orders-1", lists=1)
    assert [path.name for path in logs_at(tmp_path / "logs")] == ["orders-0", "orders-1"]
    assert logs_at(log) == [log]
    with pytest.raises(NotALog):
        logs_at(tmp_path)
    with pytest.raises(NotALog):
        logs_at(tmp_path / "nowhere")


def test_a_dump_shows_the_window_and_ends_with_the_end(log):
    entries = list(dump_file(log / FIRST, OffsetWindow(4, 6)))
    assert [entry.batch.header.base_offset for entry in entries] == [3]
    entries = list(dump_file(log / FIRST, OffsetWindow()))
    assert all(isinstance(entry, DumpedBatch) for entry in entries[:-1])
    assert isinstance(entries[-1], DumpedEnd)
    assert entries[-1].is_clean


def test_a_dump_stops_at_damage(log):
    data = bytearray((log / FIRST).read_bytes())
    data[-1] ^= 1
    (log / FIRST).write_bytes(data)
    end = list(dump_file(log / FIRST, OffsetWindow()))[-1]
    assert not end.is_clean
    assert end.end.next_offset == 6
    assert end.rest_bytes > 61


def test_a_dump_says_which_records_can_not_be_decoded(tmp_path, capsys):
    """A batch is whole by its checksum; only who decodes it finds out."""
    batch = bytearray(encode_batch([b"value"] * 3, timestamps_ms=1).data)
    batch[HEADER_BYTES:] = b"\xff" * (len(batch) - HEADER_BYTES)
    write_crc(batch, crc32c(batch, CRC_COVERS_FROM))
    with SegmentLog.open(tmp_path / "orders-0") as log:
        log.append_as_is([RecordBatch(batch)])  # a replica's leader refuses such a batch
    for as_json, sign in (([], "can't be decoded: "), (["--json"], '"undecodable": ')):
        assert run(["log", "dump", str(tmp_path), "orders-0", "--records", *as_json]) == 0
        assert sign in capsys.readouterr().out
