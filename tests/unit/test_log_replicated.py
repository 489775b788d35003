"""What replication does with a log: appends unchanged batches, begins epochs, sets a watermark, begins an empty log."""

from uuid import UUID

import pytest

from pushrep.errors import BadArgument, PushrepError
from pushrep.log import Durability, LogConfig, LogEndMoved, SegmentLog
from pushrep.log.verify import verify_log
from pushrep.records import CorruptRecordBatch, RecordBatch, encode_batch

BUFFERED = Durability.BUFFERED
SMALL = LogConfig(segment_bytes=4096, preallocate_bytes=0)
ID = UUID(int=7)


def batch(base_offset, epoch, *values):
    made = encode_batch(values or [b"x"], timestamps_ms=1)
    made.stamp(base_offset, epoch)
    return RecordBatch.check(bytes(made.data))


def test_a_replica_holds_the_bytes_that_its_leader_holds(tmp_path):
    with SegmentLog.open(tmp_path / "a" / "orders-0", SMALL) as leader:
        leader.begin_epoch(256, 0)
        for number in range(40):
            leader.append([b"%d" % number * 50] * 3, durability=BUFFERED)
        leader.begin_epoch(512, leader.log_end_offset)
        leader.append(b"of the second epoch")
        with SegmentLog.open(tmp_path / "b" / "orders-0", SMALL, log_id=leader.log_id, has_replicas=True) as replica:
            replica.append_as_is(list(leader.batches(0)))
            assert replica.log_end_offset == leader.log_end_offset == 121
            assert replica.leader_epochs.entries == leader.leader_epochs.entries == ((256, 0), (512, 120))
            assert replica.log_id == leader.log_id
    names = sorted(path.name for path in (tmp_path / "a" / "orders-0").glob("*.log"))
    assert len(names) > 1, "several segments"
    for name in names:
        ours, theirs = (tmp_path / side / "orders-0" / name for side in "ab")
        assert ours.read_bytes() == theirs.read_bytes(), name


@pytest.mark.parametrize("base_offset", [0, 2, 5])
def test_batches_that_do_not_follow_are_refused_whole(tmp_path, base_offset):
    with SegmentLog.open(tmp_path / "orders-0", has_replicas=True) as log:
        log.append_as_is([batch(0, 1, b"a", b"b", b"c")])
        with pytest.raises(LogEndMoved):
            log.append_as_is([batch(3, 1), batch(base_offset if base_offset != 5 else 5, 1)])
        assert log.log_end_offset == 3


def test_epochs_that_fall_are_refused_whole_and_an_epoch_without_a_record_gives_way(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0", SMALL, has_replicas=True) as log:
        log.append_as_is([batch(0, 5)])
        for falling in ([batch(1, 3)], [batch(1, 6), batch(2, 5)]):
            with pytest.raises(CorruptRecordBatch, match="leader epoch falls from"):
                log.append_as_is(falling)
            assert (log.log_end_offset, log.leader_epochs.entries) == (1, ((5, 0),))
        log.begin_epoch(9, 1)
        log.append_as_is([batch(1, 6)])
        assert log.leader_epochs.entries == ((5, 0), (6, 1)), "nobody wrote a record in epoch 9"
    assert verify_log(log.path).findings == []


def test_the_watermark_moves_by_word_alone_and_outlives_a_kill(tmp_path):
    log = SegmentLog.open(tmp_path / "orders-0", has_replicas=True)
    log.append_as_is([batch(0, 1, b"a", b"b", b"c")])
    assert log.high_watermark == 0
    log.advance_high_watermark(2)
    log.advance_high_watermark(1)
    assert log.high_watermark == 2, "it only rises"
    log.flush()
    with SegmentLog.open_reader(tmp_path / "orders-0") as reader:
        assert reader.stable_offset == 2, "other processes see it at once"
    log.advance_high_watermark(9)
    assert log.high_watermark == 3, "never above the log end"
    log.close()
    with SegmentLog.open(tmp_path / "orders-0", has_replicas=True) as log:
        assert log.high_watermark == 3
        log.append_as_is([batch(3, 1)])
        assert log.high_watermark == 3
    with SegmentLog.open(tmp_path / "orders-0") as log:
        assert log.high_watermark == 4, "without replicas it is the log end"


def test_a_checkpoint_holds_the_watermark_and_not_the_log_end(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0", has_replicas=True) as log:
        log.append_as_is([batch(0, 1, b"a", b"b", b"c")])
        log.advance_high_watermark(1)
    (tmp_path / ".pushrep_published").unlink()
    with SegmentLog.open(tmp_path / "orders-0", has_replicas=True) as log:
        assert (log.high_watermark, log.log_end_offset) == (1, 3)


def test_an_epoch_without_a_record_outlives_close_and_cut(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0", has_replicas=True) as log:
        log.append_as_is([batch(0, 1, b"a", b"b"), batch(2, 256), batch(3, 257)])
        assert log.truncate_to(2) == 2
        assert log.leader_epochs.entries == ((1, 0), (256, 2)), "what is below may be safe only by that"
    with SegmentLog.open(tmp_path / "orders-0", has_replicas=True) as log:
        assert log.leader_epochs.latest_epoch == 256
        assert log.append(b"c").base_offset == 2
        assert next(log.batches(2)).header.leader_epoch == 256


@pytest.mark.parametrize(
    ("epoch", "offset"), [(6, 0), (6, 2), (6, 4), (4, 3)], ids=["at the start", "below", "above", "an older one"]
)
def test_an_epoch_that_the_records_contradict_is_refused_by_name(tmp_path, epoch, offset):
    """Its entry would be removed by the next opening, which trusts the records."""
    with SegmentLog.open(tmp_path / "orders-0", has_replicas=True) as log:
        log.append_as_is([batch(0, 5, b"a", b"b", b"c")])
        with pytest.raises(BadArgument, match=f"can't begin at {offset}: .* ends at 3, with a record of 5"):
            log.begin_epoch(epoch, offset)
        log.begin_epoch(5, 3)  # it goes on: no news
        assert log.leader_epochs.entries == ((5, 0),)
        log.begin_epoch(6, 3)
    with SegmentLog.open(tmp_path / "orders-0", has_replicas=True) as log:
        assert log.leader_epochs.entries == ((5, 0), (6, 3))


def test_a_log_begins_anew_where_its_leader_starts(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0", SMALL, has_replicas=True) as log:
        old = [batch(at, 1, bytes(900)) for at in range(9)]
        log.append_as_is(old)
        kept = log.begin_anew(100, 256)
        assert len(kept) == 3
        assert all(name.endswith(".stale") for name in kept)
        assert (log.log_start_offset, log.log_end_offset, log.high_watermark) == (100, 100, 100)
        log.append_as_is([batch(100, 256, b"new")])
    with SegmentLog.open(tmp_path / "orders-0", SMALL, has_replicas=True) as log:
        assert [record.value for record in log.records(100)] == [b"new"]
        assert log.leader_epochs.entries == ((256, 100),)
        stale = b"".join((log.path / name).read_bytes() for name in kept)
        assert stale == b"".join(bytes(one.data) for one in old), "nothing is thrown away"


class Values:
    """A derived store of (offset, epoch, value)."""

    name = "values"

    def __init__(self):
        self.told = []

    @property
    def end_offset(self):
        return self.told[-1][0] + 1 if self.told else 0

    @property
    def last(self):
        return self.told[-1][:2] if self.told else None

    def cut_to(self, offset):
        self.told = [told for told in self.told if told[0] < offset]

    def destroy(self):
        self.told = []

    def dispatch(self, batch):
        self.told += [(record.offset, batch.header.leader_epoch, record.value) for record in batch.records()]

    def sync(self):
        pass


def test_a_derived_store_holds_nothing_of_what_was_set_aside(tmp_path):
    store = Values()
    with SegmentLog.open(tmp_path / "orders-0", SMALL, has_replicas=True, derived=[store]) as log:
        log.append_as_is([batch(at, 1, b"old") for at in range(20)])
        log.advance_high_watermark(20)
    assert store.end_offset == 20
    with SegmentLog.open(tmp_path / "orders-0", SMALL, has_replicas=True, derived=[store]) as log:
        log.begin_anew(10, 7)
        log.append_as_is([batch(at, 7, b"new") for at in range(10, 30)])
        log.advance_high_watermark(30)
    assert store.told == [(at, 7, b"new") for at in range(10, 30)]


def test_a_stop_in_the_middle_of_beginning_anew_leaves_a_log_that_opens(tmp_path, monkeypatch):
    log = SegmentLog.open(tmp_path / "orders-0", SMALL, has_replicas=True)
    log.append_as_is([batch(at, 1, bytes(900)) for at in range(9)])
    log.flush()
    with monkeypatch.context() as patched:
        patched.setattr("pushrep.log.writer.Segment.create", _no_disk)
        with pytest.raises(PushrepError):
            log.begin_anew(100, 256)
    log.close()
    with SegmentLog.open(tmp_path / "orders-0", SMALL, has_replicas=True) as log:
        log.begin_anew(100, 256)
        assert log.log_end_offset == 100


def _no_disk(*_):
    raise OSError(5, "the disk is gone")


def test_epochs_without_a_record_are_forgotten_durably_and_those_with_one_are_refused(tmp_path):
    with SegmentLog.open(tmp_path / "orders-0", SMALL, has_replicas=True) as log:
        log.begin_epoch(512, 0)
        log.forget_epochs_above(256)
        assert log.leader_epochs.entries == ((0, 0),), "a log has one epoch at least"
        log.append_as_is([batch(0, 256), batch(1, 512)])
        with pytest.raises(BadArgument):
            log.forget_epochs_above(256)
        assert log.leader_epochs.entries == ((256, 0), (512, 1))
        log.truncate_to(1, keep=True)
        assert log.leader_epochs.latest_epoch == 512, "an epoch that starts at a cut stays in the list"
        log.forget_epochs_above(256)
        log.forget_epochs_above(256)
    with SegmentLog.open(tmp_path / "orders-0", SMALL, has_replicas=True) as log:
        assert log.leader_epochs.entries == ((256, 0),)
    (kept,) = (tmp_path / "orders-0").glob("*.cut")
    assert kept.read_bytes() == bytes(batch(1, 512).data), "what was cut is kept to the byte"
