"""Which log is it? Segments without an id are refused by name, links are followed by writer and reader alike."""

import pytest

from pushrep.log import CorruptPartitionMetadata, InvalidLogName, LogLocked, SegmentLog
from pushrep.log.directory_files import PARTITION_METADATA_NAME


def test_segments_without_an_id_are_refused_until_they_are_adopted(tmp_path):
    path = tmp_path / "orders-0"
    with SegmentLog.open(path) as log:
        log.append([b"a", b"b"])
        old = log.log_id
    metadata = path / PARTITION_METADATA_NAME
    kept = metadata.read_bytes()
    metadata.unlink()
    before = sorted(file.name for file in path.iterdir())
    with pytest.raises(CorruptPartitionMetadata, match="adopt=True") as caught:
        SegmentLog.open(path)
    assert caught.value.path == metadata
    assert sorted(file.name for file in path.iterdir()) == before, "nothing was changed"
    with SegmentLog.open(path, adopt=True) as log:
        assert log.log_id != old
        assert [r.value for r in log.records(0)] == [b"a", b"b"]
        new = log.log_id
    with SegmentLog.open(path) as log:
        assert log.log_id == new, "adopted once"
    metadata.write_bytes(kept)
    with SegmentLog.open(path, adopt=True) as log:
        assert log.log_id == old, "an id that is there is kept"


def test_a_log_behind_a_link_is_one_log(tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / "logs").mkdir()
    real, link = tmp_path / "big" / "orders-0", tmp_path / "logs" / "orders-0"
    link.symlink_to(real)
    with SegmentLog.open(link) as log:
        log.append([b"a"] * 3)
        assert log.path == real
        assert not (tmp_path / "logs" / ".lock").exists(), "the lock is where the log is"
        with pytest.raises(LogLocked):
            SegmentLog.open(real)
        for path in (link, real):
            with SegmentLog.open_reader(path) as reader:
                assert (reader.path, reader.log_end_offset) == (real, 3)
    with SegmentLog.open(real) as log:
        assert log.log_end_offset == 3


def test_a_link_of_another_name_is_refused_by_both(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0"):
        pass
    (tmp_path / "payments-0").symlink_to(tmp_path / "orders-0")
    for use in (SegmentLog.open, SegmentLog.open_reader):
        with pytest.raises(InvalidLogName, match="it is a link to"):
            use(tmp_path / "payments-0")
