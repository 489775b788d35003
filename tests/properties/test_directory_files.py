"""The small files of a directory: what is written is read, and no flipped bit or cut is believed."""

from bisect import bisect_left
from contextlib import suppress
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushrep.log.directory_files import (
    LEADER_EPOCHS_CRC_NAME,
    LEADER_EPOCHS_NAME,
    BadLogFile,
    CleanLog,
    decode_checkpoint,
    decode_clean_marker,
    decode_leader_epochs,
    decode_partition_metadata,
    encode_checkpoint,
    encode_clean_marker,
    encode_leader_epochs,
    encode_partition_metadata,
    log_name,
    read_leader_epochs,
    write_leader_epochs,
)
from pushrep.records.leader_epochs import LeaderEpochs

OFFSETS = st.integers(0, 2**63 - 1)
TOPICS = st.text("abcXYZ019._-", min_size=1, max_size=20).filter(lambda topic: topic not in {".", ".."})
NAMES = st.builds(log_name, TOPICS, st.integers(0, 2**31 - 1))
CLEAN_LOGS = st.builds(CleanLog, OFFSETS, OFFSETS, st.integers(-1, 2**31 - 1))
ENTRIES = st.lists(st.tuples(st.integers(0, 2**31 - 1), OFFSETS), max_size=8).map(
    lambda pairs: tuple(zip(sorted({p[0] for p in pairs}), sorted({p[1] for p in pairs}), strict=False))
)


def mutations(data):
    """(what was done, the bytes) for every flipped bit and every length that is shorter."""
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit} flipped", bytes(flipped)
    for size in range(len(data)):
        yield f"cut to {size} bytes", data[:size]


@given(st.dictionaries(NAMES, OFFSETS, max_size=8))
def test_checkpoints_round_trip(offsets):
    assert decode_checkpoint(encode_checkpoint(offsets)) == offsets


@given(st.dictionaries(NAMES, CLEAN_LOGS, max_size=8))
def test_markers_round_trip(logs):
    assert decode_clean_marker(encode_clean_marker(logs)) == logs


@given(st.integers(1, 2**128 - 1))
def test_partition_metadata_round_trips(number):
    topic_id = UUID(int=number)
    assert decode_partition_metadata(encode_partition_metadata(topic_id)) == topic_id


@given(ENTRIES)
def test_leader_epochs_round_trip(entries):
    epochs = LeaderEpochs(entries)
    assert decode_leader_epochs(encode_leader_epochs(epochs)) == epochs


@given(st.binary(max_size=80))
def test_arbitrary_bytes_are_refused_by_name(data):
    for decode in (decode_checkpoint, decode_clean_marker, decode_leader_epochs):
        with suppress(BadLogFile):
            decode(data)
    with suppress(ValueError):
        decode_partition_metadata(data)


@pytest.mark.parametrize("offsets", [{}, {"orders-0": 1042}, {"orders-0": 0, "orders-1": 2**63 - 1, "a.b_c-7": 12}])
def test_no_mutated_checkpoint_is_believed(offsets):
    for what, data in mutations(encode_checkpoint(offsets)):
        with pytest.raises(BadLogFile):
            pytest.fail(f"{what}: {data!r} was read as {decode_checkpoint(data)}")


@pytest.mark.parametrize("logs", [{}, {"orders-0": CleanLog(1042, 88120, 3), "orders-1": CleanLog(0, 0, -1)}])
def test_no_mutated_marker_is_believed(logs):
    for what, data in mutations(encode_clean_marker(logs)):
        with pytest.raises(BadLogFile):
            pytest.fail(f"{what}: {data!r} was read as {decode_clean_marker(data)}")


def test_no_mutated_partition_metadata_is_believed():
    topic_id = UUID("d4acf4a9-2f56-4570-ba91-5d85d21d2ff2")
    data = encode_partition_metadata(topic_id)
    kafkas = data[: data.index(b"crc32c")]
    for what, mutated in mutations(data):
        if mutated in {kafkas, kafkas[:-1]}:  # cut exactly behind Kafka's part: its own file, and a right one
            assert decode_partition_metadata(mutated) == topic_id
            continue
        with pytest.raises(ValueError, match=r"not the lines|CRC"):
            pytest.fail(f"{what}: {mutated!r} was read as {decode_partition_metadata(mutated)}")


@pytest.mark.parametrize("name", [LEADER_EPOCHS_NAME, LEADER_EPOCHS_CRC_NAME])
def test_no_mutated_leader_epochs_are_believed(tmp_path, name):
    epochs = LeaderEpochs(((3, 10), (5, 40), (6, 95)))
    write_leader_epochs(tmp_path, LeaderEpochs(((3, 10),)))
    write_leader_epochs(tmp_path, epochs)
    data = (tmp_path / name).read_bytes()
    for what, mutated in mutations(data):
        (tmp_path / name).write_bytes(mutated)
        found = read_leader_epochs(tmp_path)
        # The CRC file also holds the CRC of the list before: a flip in that half takes nothing away.
        assert found is None or (name == LEADER_EPOCHS_CRC_NAME and found == epochs), f"{what}: read as {found}"


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4), st.integers(0, 30)), max_size=30), st.integers(-1, 8))
def test_leader_epochs_agree_with_a_model_that_keeps_one_epoch_per_offset(steps, asked):
    """Appending, cutting the end and raising the start, against a list of (offset, epoch)."""
    model = []  # (offset, epoch), one per record
    epochs, end, start = LeaderEpochs(), 0, 0
    for epoch, count, cut in steps:
        if cut < 20:
            at = max(start, min(cut, end))
            if cut % 2:
                model, end = [r for r in model if r[0] < at], at
                epochs = epochs.cut_from(end)
            elif model:
                start = min(at, model[-1][0])
                model = [r for r in model if r[0] >= start]
                epochs = epochs.cut_below(start)
        if count and epoch >= epochs.latest_epoch:
            epochs = epochs.assigned(epoch, end)
            model += [(end + n, epoch) for n in range(count)]
            end += count
    for offset, epoch in model:
        assert epochs.epoch_of(offset) == epoch
    known = sorted({epoch for _, epoch in model})
    if known and known[-1] == epochs.latest_epoch and known[0] <= asked <= known[-1]:
        answer = known[bisect_left(known, asked + 1) - 1]
        last = max(offset for offset, epoch in model if epoch == answer)
        assert epochs.end_of(asked, end) == (answer, last + 1)
