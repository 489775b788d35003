"""Checkpoints, the clean marker and partition.metadata: golden bytes, Kafka's own files, what is refused."""

from uuid import UUID

import pytest

from pushrep.log.directory_files import (
    PARTITION_METADATA_NAME,
    BadLogFile,
    CheckpointFile,
    CleanLog,
    decode_checkpoint,
    decode_clean_marker,
    decode_partition_metadata,
    encode_checkpoint,
    encode_clean_marker,
    encode_partition_metadata,
    read_checkpoint,
    read_partition_metadata,
    write_checkpoint,
    write_partition_metadata,
)
from pushrep.log.errors import CorruptPartitionMetadata

GOLDEN_CHECKPOINT = b"0\n4\norders 0 1042\norders 2 977\norders 10 0\n#crc32c# 0 1231099365\n"
GOLDEN_MARKER = b"0\n3\norders-0 1042 88120 3\norders-10 0 0 -1\n#crc32c# 3545257889\n"
TOPIC_ID = UUID("d4acf4a9-2f56-4570-ba91-5d85d21d2ff2")
GOLDEN_METADATA = b"version: 0\ntopic_id: 1Kz0qS9WRXC6kV2F0h0v8g\ncrc32c: 546c8642\n"


def test_golden_checkpoint():
    offsets = {"orders-10": 0, "orders-2": 977, "orders-0": 1042}
    assert encode_checkpoint(offsets) == GOLDEN_CHECKPOINT
    assert decode_checkpoint(GOLDEN_CHECKPOINT) == offsets


def test_golden_marker():
    logs = {"orders-10": CleanLog(0, 0, -1), "orders-0": CleanLog(1042, 88120, 3)}
    assert encode_clean_marker(logs) == GOLDEN_MARKER
    assert decode_clean_marker(GOLDEN_MARKER) == logs


def test_golden_partition_metadata():
    assert encode_partition_metadata(TOPIC_ID) == GOLDEN_METADATA
    assert decode_partition_metadata(GOLDEN_METADATA) == TOPIC_ID


def test_kafkas_own_files_have_no_crc_and_are_read():
    assert decode_checkpoint(b"0\n2\norders 1 977\norders 0 1042\n") == {"orders-0": 1042, "orders-1": 977}
    assert decode_checkpoint(b"0\n0\n") == {}
    assert decode_partition_metadata(b"version: 0\ntopic_id: 1Kz0qS9WRXC6kV2F0h0v8g\n") == TOPIC_ID


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"0\n",
        b"0\n1\n",
        b"1\n0\n",  # version
        b"0\n1\norders 0 5",  # cut off
        b"0\n2\norders 0 5\n",
        b"0\n0\norders 0 5\n",
        b"0\n1\norders 0\n",
        b"0\n1\norders 0 5 6\n",
        b"0\n1\norders  0 5\n",
        b"0\n1\norders -1 5\n",
        b"0\n1\norders 0 -5\n",
        b"0\n1\norders 0 05\n",
        b"0\n1\norders 0 +5\n",
        b"0\n1\norders 0 1_0\n",
        b"0\n1\norders 0 9223372036854775808\n",
        b"0\n1\norders 2147483648 5\n",
        b"0\n1\nor#ers 0 5\n",
        b"0\n1\n\xc3\xa4 0 5\n",
        b"0\n2\norders 0 5\norders 0 5\n",
        b"0\n1\r\norders 0 5\n",
        b"0\n1\n#crc32c# 0 5\n",
        b"0\n2\n#crc32c# 0 5\norders 0 5\n",  # ours is the last line
    ],
)
def test_bad_checkpoints_are_refused_and_count_as_absent(tmp_path, data):
    with pytest.raises(BadLogFile):
        decode_checkpoint(data)
    (tmp_path / CheckpointFile.RECOVERY_POINT.value).write_bytes(data)
    assert read_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT) == {}


def test_a_marker_without_its_crc_is_bad():
    with pytest.raises(BadLogFile, match="CRC"):
        decode_clean_marker(b"0\n1\norders-0 1042 88120 3\n")
    with pytest.raises(BadLogFile, match="CRC"):
        decode_clean_marker(b"0\n0\n")


@pytest.mark.parametrize("log", [(-1, 0, 0), (0, -1, 0), (0, 0, -2), (2**63, 0, 0), (0, 0, 2**31)])
def test_a_clean_log_refuses_nonsense(log):
    with pytest.raises(ValueError, match=r"a log ends|a leader epoch"):
        CleanLog(*log)


def test_a_checkpoint_larger_than_any_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / CheckpointFile.RECOVERY_POINT.value
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert read_checkpoint(tmp_path, CheckpointFile.RECOVERY_POINT) == {}


def test_the_files_are_told_apart(tmp_path):
    for number, checkpoint in enumerate(CheckpointFile):
        write_checkpoint(tmp_path, checkpoint, {"orders-0": number})
    kept = tuple(read_checkpoint(tmp_path, one) for one in CheckpointFile)
    assert kept == tuple({"orders-0": number} for number in range(4))
    assert read_checkpoint(tmp_path / "none", CheckpointFile.RECOVERY_POINT) == {}


def test_partition_metadata_is_absent_or_whole_or_refused_by_name(tmp_path):
    assert read_partition_metadata(tmp_path) is None
    write_partition_metadata(tmp_path, TOPIC_ID)
    assert read_partition_metadata(tmp_path) == TOPIC_ID
    path = tmp_path / PARTITION_METADATA_NAME
    for data in (
        b"",
        b"version: 1\ntopic_id: 1Kz0qS9WRXC6kV2F0h0v8g\n",
        b"version: 0\ntopic_id: 1Kz0qS9WRXC6kV2F0h0v8\n",
        b"version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAA\n",
        GOLDEN_METADATA + b"\n",
        bytes(8192),
    ):
        path.write_bytes(data)
        with pytest.raises(CorruptPartitionMetadata, match="restore it") as refused:
            read_partition_metadata(tmp_path)
        assert refused.value.path == path


def test_the_zero_uuid_is_no_id():
    with pytest.raises(ValueError, match="zero uuid"):
        encode_partition_metadata(UUID(int=0))
