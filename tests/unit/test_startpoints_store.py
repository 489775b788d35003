"""The directory store: what is pending for whom, one resolution, commits that carry the sequence, fencing, expiry."""

import errno
import json
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from pushrep.env import REAL_FILESYSTEM
from pushrep.env.checked_json import journal_line
from pushrep.env.filesystem import RealFile, RealFilesystem
from pushrep.errors import BadArgument, CorruptFile
from pushrep.startpoints import (
    TTL_S,
    Applied,
    Consumed,
    Expired,
    LogFacts,
    Origin,
    PartitionLost,
    Reader,
    Startpoint,
    StartpointFailed,
    StartpointRefused,
    StartpointStore,
    State,
    StoreUnavailable,
)
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk

TIMES = {offset: 1000 + 10 * offset for offset in range(1000)}


def first_at(ms):
    return next((offset for offset, time in TIMES.items() if time >= ms), None)


def facts_of(start=10, end=100, log_id="a"):
    return LogFacts(start=start, end=end, first_at=first_at, log_id=log_id)


LOG = facts_of()


@pytest.fixture
def clock():
    return SimulatedClock()


@pytest.fixture
def disk(clock):
    return SimulatedDisk(1, clock=clock)


@pytest.fixture
def store(disk, clock):
    return StartpointStore.open(Path("/startpoints"), filesystem=disk, clock=clock)


@pytest.fixture
def real(tmp_path, clock):
    """A store on the real disk, for tests that look into its files."""
    return StartpointStore.open(tmp_path / "startpoints", clock=clock)


def names(store):
    return [type(fact).__name__ for fact in store.history()]


def test_a_startpoint_is_applied_once_and_gone_after_progress_was_committed(store):
    claim = store.claim("billing", "orders", 0)
    assert store.start(claim, LOG).offset == 10
    store.commit(claim, 60, log_id="a")
    sequence = store.write("billing", "orders", 0, Startpoint.specific(20), "nonsense since 20", author="ann")
    assert store.read("billing", "orders", 0).state is State.PENDING

    start = store.start(claim, LOG)
    assert (start.offset, start.origin, start.sequence) == (20, Origin.STARTPOINT, sequence)
    assert store.read("billing", "orders", 0).state is State.APPLIED
    assert store.commit(claim, 20, sequence=sequence) is False, "a start alone is no progress"
    assert store.checkpoint(claim.reader).offset == 60
    assert store.commit(claim, 25, sequence=sequence, log_id="a")
    store.consume(claim, sequence)
    assert store.read("billing", "orders", 0) is None

    again = store.start(store.claim("billing", "orders", 0), LOG)
    assert (again.offset, again.origin, again.sequence) == (25, Origin.CHECKPOINT, sequence)
    assert names(store) == ["Written", "Applied", "Consumed"]
    written = store.history()[0]
    assert (written.author, written.reason) == ("ann", "nonsense since 20")


def test_the_stored_resolution_is_used_again_though_the_log_has_grown(store):
    store.write("billing", "orders", 0, Startpoint.latest(), "skip the rest")
    first = store.start(store.claim("billing", "orders", 0), facts_of(end=100))
    second = store.start(store.claim("billing", "orders", 0), facts_of(end=900))
    assert first == second
    assert first.offset == 100
    assert names(store) == ["Written", "Applied"]


def test_the_newest_wins_and_nothing_older_comes_back(store):
    _, newest = (store.write("billing", "orders", 0, Startpoint.specific(offset), "go") for offset in (20, 30))
    claim = store.claim("billing", "orders", 0)
    start = store.start(claim, LOG)
    assert (start.offset, start.sequence) == (30, newest)
    store.commit(claim, 31, sequence=newest)
    assert store.read("billing", "orders", 0) is None, "the older one is below the committed sequence"
    store.consume(claim, newest)
    assert [fact.sequence for fact in store.history() if isinstance(fact, Consumed)] == [newest], "only that sequence"


def test_newest_is_a_number_and_no_clock(store, clock):
    """A writer whose clock goes ahead does not win over one that writes later."""
    clock.advance(3_600_000)
    first = store.write("billing", "orders", 0, Startpoint.specific(70), "an hour ahead")
    clock.set_wall(clock.wall_ms() - 3_600_000)
    second = store.write("billing", "orders", 0, Startpoint.specific(20), "later")
    assert second > first
    assert store.read("billing", "orders", 0).sequence == second


def test_one_written_while_the_older_was_applied_is_next(store):
    claim = store.claim("billing", "orders", 0)
    older = store.write("billing", "orders", 0, Startpoint.specific(20), "go")
    store.start(claim, LOG)
    store.write("billing", "orders", 0, Startpoint.specific(50), "no, there")
    store.commit(claim, 22, sequence=older)
    assert store.start(claim, LOG, position=22).offset == 50


@pytest.mark.parametrize("target", [("billing", "orders", None), (None, "orders", 0), (None, "orders", None)])
def test_a_wide_startpoint_is_taken_by_each_reader_for_itself(store, target):
    wide = store.write(*target, Startpoint.specific(20), "all of you")
    first = store.claim("billing", "orders", 0)
    assert store.start(first, LOG).offset == 20
    store.commit(first, 30, sequence=wide)
    store.consume(first, wide)
    other = ("billing", "orders", 1) if target[2] is None else ("audit", "orders", 0)
    assert store.read(*other).state is State.PENDING
    assert store.start(store.claim(*other), LOG).offset == 20
    assert store.read("billing", "orders", 0) is None
    assert store.read("billing", "payments", 0) is None


def test_reset_passes_a_checkpoint_by_and_not_a_startpoint(store):
    claim = store.claim("billing", "orders", 0)
    store.commit(claim, 60)
    assert store.start(claim, LOG, reset=True).offset == 10
    assert store.start(claim, LOG, default=Startpoint.latest(), reset=True).offset == 100
    store.write("billing", "orders", 0, Startpoint.specific(20), "go")
    assert store.start(claim, LOG, reset=True).offset == 20


def test_a_failed_one_stops_each_start_until_it_is_cancelled(store):
    sequence = store.write("billing", "orders", 0, Startpoint.specific(5), "too far back")
    for _ in range(2):
        with pytest.raises(StartpointFailed, match=r"offset 5 is below the log start: the log holds \[10, 100\)"):
            store.start(store.claim("billing", "orders", 0), LOG)
    assert names(store) == ["Written", "Failed"]
    assert store.start(store.claim("billing", "orders", 1), LOG).origin is Origin.DEFAULT, "its own partition only"
    store.cancel(sequence, "typo")
    assert store.start(store.claim("billing", "orders", 0), LOG).origin is Origin.DEFAULT


def test_a_newer_one_replaces_a_failed_one(store):
    store.write("billing", "orders", 0, Startpoint.specific(5), "too far back")
    claim = store.claim("billing", "orders", 0)
    with pytest.raises(StartpointFailed):
        store.start(claim, LOG)
    store.write("billing", "orders", 0, Startpoint.earliest(), "as far as there is")
    assert store.start(claim, LOG).offset == 10


@pytest.mark.parametrize(("policy", "offset"), [("earliest", 10), ("latest", 100)])
def test_the_policy_answers_and_is_noted(store, policy, offset):
    store.write("billing", "orders", 0, Startpoint.specific(5, out_of_range=policy), "go")
    assert store.start(store.claim("billing", "orders", 0), LOG).offset == offset
    (applied,) = [fact for fact in store.history() if isinstance(fact, Applied)]
    assert "offset 5 is below" in applied.by_policy
    assert (applied.start, applied.end, applied.log_id) == (10, 100, "a")


@pytest.mark.parametrize("log", [facts_of(start=21), facts_of(log_id="b")])
def test_a_stored_offset_that_the_log_lost_fails_and_is_not_resolved_anew(store, log):
    store.write("billing", "orders", 0, Startpoint.specific(20, out_of_range="earliest"), "go")
    claim = store.claim("billing", "orders", 0)
    store.start(claim, LOG)
    with pytest.raises(StartpointFailed, match="it was resolved to 20"):
        store.start(claim, log)


def test_a_relative_one_counts_from_where_the_consumer_stands(store):
    claim = store.claim("billing", "orders", 0)
    first = store.write("billing", "orders", 0, Startpoint.relative(records=-15), "again")
    with pytest.raises(StartpointFailed, match="no checkpoint to count from"):
        store.start(claim, LOG)
    store.cancel(first, "first let it run")
    store.commit(claim, 60)
    store.write("billing", "orders", 0, Startpoint.relative(records=-15), "again")
    assert store.start(claim, LOG).offset == 45
    store.write("billing", "orders", 0, Startpoint.relative(records=-15), "again")
    assert store.start(claim, LOG, position=70).offset == 55, "a running one stands where it reads"


def test_a_relative_time_counts_from_when_it_was_written(store, clock):
    clock.set_wall(1000 + 10 * 50)
    store.write("billing", "orders", 0, Startpoint.relative(ms=-95), "again")
    clock.advance(3_600_000)
    assert store.start(store.claim("billing", "orders", 0), LOG).offset == 41


def test_who_lost_the_partition_can_do_nothing(store):
    sequence = store.write("billing", "orders", 0, Startpoint.specific(20), "go")
    old = store.claim("billing", "orders", 0)
    store.start(old, LOG)
    new = store.claim("billing", "orders", 0)
    store.start(new, LOG)
    store.commit(new, 30, sequence=sequence)
    for use in (
        lambda: store.start(old, LOG),
        lambda: store.apply(old, LOG),
        lambda: store.commit(old, 90, sequence=sequence),
        lambda: store.consume(old, sequence),
    ):
        with pytest.raises(PartitionLost) as lost:
            use()
        assert (lost.value.held, lost.value.generation) == (1, 2)
    assert store.checkpoint(new.reader).offset == 30
    assert store.read("billing", "orders", 0) is None
    store.consume(new, sequence)


def test_consumed_comes_after_the_commit_and_applied_before_it(store):
    claim = store.claim("billing", "orders", 0)
    with pytest.raises(StartpointRefused, match="was not applied"):
        store.consume(claim, 1)
    sequence = store.write("billing", "orders", 0, Startpoint.specific(20), "go")
    with pytest.raises(StartpointRefused, match="was not applied"):
        store.commit(claim, 30, sequence=sequence)
    store.start(claim, LOG)
    with pytest.raises(StartpointRefused, match="has not committed"):
        store.consume(claim, sequence)
    store.commit(claim, 30, sequence=sequence)
    store.consume(claim, sequence)
    store.consume(claim, sequence)
    assert names(store) == ["Written", "Applied", "Consumed"]
    with pytest.raises(BadArgument, match="sequence"):
        store.commit(claim, 40, sequence=0)


def test_a_start_marks_what_was_committed_and_not_said(store):
    sequence = store.write("billing", "orders", 0, Startpoint.specific(20), "go")
    claim = store.claim("billing", "orders", 0)
    store.start(claim, LOG)
    store.commit(claim, 30, sequence=sequence)
    assert store.start(store.claim("billing", "orders", 0), LOG).offset == 30
    assert names(store) == ["Written", "Applied", "Consumed"]


def test_what_waited_too_long_is_marked(store, clock):
    waiting = store.write("billing", "orders", None, Startpoint.specific(20), "go")
    store.write("billing", "orders", 1, Startpoint.specific(30), "go", ttl_s=None)
    applied = store.claim("billing", "orders", 0)
    store.start(applied, LOG)
    clock.advance(TTL_S * 1000 - 1)
    assert store.sweep() == []
    clock.advance(1)
    assert store.read("billing", "orders", 2) is None
    assert [fact.sequence for fact in store.history() if isinstance(fact, Expired)] == [waiting]
    assert store.sweep() == []
    assert store.start(applied, LOG).offset == 20, "applied is applied"
    assert store.start(store.claim("billing", "orders", 1), LOG).offset == 30, "no ttl"


def test_every_change_sweeps(store, clock):
    store.write("billing", "orders", 0, Startpoint.specific(20), "go", ttl_s=1)
    clock.advance(1000)
    assert store.start(store.claim("billing", "orders", 0), LOG).origin is Origin.DEFAULT
    assert names(store) == ["Written", "Expired"]


@pytest.mark.parametrize("end", ["cancel", "delete", "expiry", "failure and cancel"])
@pytest.mark.parametrize(("consumer", "partition"), [("billing", 0), (None, 0), ("billing", None), (None, None)])
def test_one_that_was_corrected_does_not_come_back_when_the_newer_one_ends(store, clock, end, consumer, partition):
    """`set --to 100`, corrected to 150, then 150 is cancelled: nobody asked for 100 any more."""
    older = store.write("billing", "orders", 0, Startpoint.specific(20), "a typing error")
    wrong = 5000 if end == "failure and cancel" else 30
    newer = store.write(consumer, "orders", partition, Startpoint.specific(wrong), "corrected", ttl_s=1)
    claim = store.claim("billing", "orders", 0)
    if end == "delete":
        assert newer in store.delete(consumer, "orders", partition, "no")
    elif end == "expiry":
        clock.advance(1000)
    else:
        if end != "cancel":
            with pytest.raises(StartpointFailed):
                store.start(claim, LOG)
        store.cancel(newer, "no")
    assert store.read("billing", "orders", 0) is None
    assert store.start(claim, LOG).origin is Origin.DEFAULT
    assert store.read("billing", "orders", 0, remove=True) is None
    assert store.event_log().superseded_by(older) == newer


def test_read_with_remove_consumes_at_once(store):
    store.write("billing", "orders", 0, Startpoint.specific(20), "older")
    newer = store.write("billing", "orders", 0, Startpoint.specific(30), "newer")
    assert store.read("billing", "orders", 0).sequence == newer
    assert store.read("billing", "orders", 0, remove=True).written.startpoint == Startpoint.specific(30)
    assert store.read("billing", "orders", 0, remove=True) is None, "the older one does not come back"


def test_cancel_and_delete(store):
    one = store.write("billing", "orders", 0, Startpoint.specific(20), "go")
    two = store.write("billing", "orders", 0, Startpoint.specific(30), "go")
    wide = store.write("billing", "orders", None, Startpoint.earliest(), "go")
    store.cancel(wide, "not all of them", author="ann")
    assert store.read("billing", "orders", 0) is None, "the older ones were superseded"
    with pytest.raises(StartpointRefused, match="is cancelled already"):
        store.cancel(wide, "again")
    with pytest.raises(StartpointRefused, match="there is no startpoint 99"):
        store.cancel(99, "a typo")
    other = store.write("billing", "orders", 1, Startpoint.latest(), "go")
    assert store.delete("billing", "orders", 0, "all of these") == [one, two]
    assert store.read("billing", "orders", 1).sequence == other
    assert store.delete_all("start over") == [other]
    assert store.delete_all("start over") == []


def test_a_consumed_one_can_not_be_cancelled(store):
    sequence = store.write("billing", "orders", 0, Startpoint.specific(20), "go")
    store.read("billing", "orders", 0, remove=True)
    with pytest.raises(StartpointRefused, match="consumed"):
        store.cancel(sequence, "too late")


def test_cancelling_an_applied_one_gives_the_checkpoint_back(store):
    claim = store.claim("billing", "orders", 0)
    store.commit(claim, 60)
    sequence = store.write("billing", "orders", 0, Startpoint.specific(20), "go")
    store.start(claim, LOG)
    store.cancel(sequence, "not that far")
    assert store.start(store.claim("billing", "orders", 0), LOG).offset == 60


def test_one_of_each_partition_is_written_in_one_step(store):
    wanted = {n: Startpoint.specific(20 + n, reset_marks=True, replace_until=30 + n) for n in (4, 0)}
    sequences = store.write_each("billing", "orders", wanted, "rates", author="ann")
    assert list(sequences) == [4, 0]
    for n, sequence in sequences.items():
        found = store.read("billing", "orders", n)
        assert (found.sequence, found.written.startpoint) == (sequence, wanted[n])
        assert (found.written.author, found.written.reason) == ("ann", "rates")
    assert sequences[4] < sequences[0]
    assert len({fact.created_ms for fact in store.history()}) == 1
    with pytest.raises(BadArgument, match="partition"):
        store.write_each("billing", "orders", {7: Startpoint.earliest(), -1: Startpoint.earliest()}, "rates")
    assert store.read("billing", "orders", 7) is None, "all or none"


def test_what_was_applied_keeps_where_the_reader_stood(store):
    claim = store.claim("billing", "orders", 0)
    first = store.write("billing", "orders", 0, Startpoint.specific(20), "go")
    assert store.apply(claim, LOG).position is None, "nobody knew"
    store.commit(claim, 60, sequence=first)
    store.write("billing", "orders", 0, Startpoint.specific(30), "go")
    assert store.apply(claim, LOG).position == 60
    store.write("billing", "orders", 0, Startpoint.specific(40), "go")
    assert store.apply(claim, LOG, position=70).position == 70
    assert [fact.position for fact in store.history() if isinstance(fact, Applied)] == [None, 60, 70]


def test_fan_out_gives_each_task_its_own(store):
    wide = store.write("billing", "orders", None, Startpoint.specific(20), "go")
    own = store.write("billing", "orders", 0, Startpoint.specific(30), "only here", task="b")
    copies = store.fan_out("billing", "orders", {"a": [0, 1], "b": [0]})
    first, second = copies["a", 0], copies["a", 1]
    assert copies == {("a", 0): first, ("a", 1): second}
    assert own < first < second
    assert store.read("billing", "orders", 0, task="b").sequence == own, "newer of its own"
    assert store.fan_out("billing", "orders", {"a": [0, 1], "b": [0]}) == {}, "once"
    later = store.fan_out("billing", "orders", {"a": [0], "c": [2]})
    assert later.keys() == {("c", 2)}, "who came later"
    copy = store.history()[2]
    assert (copy.origin, copy.startpoint, copy.reason) == (wide, Startpoint.specific(20), "go")
    claim = store.claim("billing", "orders", 0, task="a")
    assert store.start(claim, LOG).sequence == first
    assert store.read("billing", "orders", 1, task="a").state is State.PENDING
    with pytest.raises(BadArgument, match="task"):
        store.fan_out("billing", "orders", {"": [0]})


@pytest.mark.parametrize("is_failed", [False, True])
def test_a_copy_of_a_fan_out_that_was_cancelled_is_neither_undone_by_its_origin_nor_copied_again(store, is_failed):
    tasks = {"a": [0], "b": [0]}
    store.write("billing", "orders", None, Startpoint.specific(5000 if is_failed else 20), "go")
    copies = store.fan_out("billing", "orders", tasks)
    claim = store.claim("billing", "orders", 0, task="a")
    if is_failed:
        with pytest.raises(StartpointFailed):
            store.start(claim, LOG)
        assert store.fan_out("billing", "orders", tasks) == {}
    store.cancel(copies["a", 0], "not this one")
    assert store.read("billing", "orders", 0, task="a") is None
    assert store.fan_out("billing", "orders", tasks) == {}
    assert store.start(claim, LOG).origin is Origin.DEFAULT
    assert store.read("billing", "orders", 0, task="b").sequence == copies["b", 0], "the other's stays"


@pytest.mark.parametrize(
    ("startpoint", "until"),
    [
        (Startpoint.specific(20), 30),
        (Startpoint.timestamp(20, reset_marks=True), 30),
        (Startpoint.specific(20, reset_marks=True), 20),
        (Startpoint.specific(20, reset_marks=True), True),
        (Startpoint.specific(20, reset_marks=True), 1 << 63),
    ],
)
def test_where_rows_stay_from_is_behind_an_offset_that_resets_marks(startpoint, until):
    with pytest.raises(BadArgument, match="replace_until"):
        replace(startpoint, replace_until=until)


def test_fan_out_is_one_transaction(real):
    real.write("billing", "orders", None, Startpoint.specific(20), "go")
    real.fan_out("billing", "orders", {"a": range(50), "b": range(50)})
    assert len((real.place / "startpoints.journal").read_bytes().splitlines()) == 3


def test_a_checkpoint_of_another_log_is_refused(store):
    claim = store.claim("billing", "orders", 0)
    store.commit(claim, 60, log_id="a")
    with pytest.raises(StartpointRefused, match="made anew"):
        store.start(claim, facts_of(log_id="b"))
    with pytest.raises(StartpointRefused, match="the log starts at 61"):
        store.start(claim, facts_of(start=61))
    store.write("billing", "orders", 0, Startpoint.earliest(), "it was lost")
    assert store.start(claim, facts_of(start=61, log_id="b")).offset == 61


def test_a_default_that_does_not_fit_is_refused(store):
    with pytest.raises(StartpointRefused, match="offset 5 is below"):
        store.start(store.claim("billing", "orders", 0), LOG, default=Startpoint.specific(5))


def test_a_bootstrap_interrupted_after_a_commit_goes_on_as_one(store):
    sequence = store.write("billing", "orders", 0, Startpoint.bootstrap(), "read the table first")
    claim = store.claim("billing", "orders", 0)
    assert (store.start(claim, LOG).offset, store.start(claim, facts_of(end=300)).until) == (10, 100)
    store.commit(claim, 99, sequence=sequence)
    assert store.start(claim, facts_of(end=300)).until == 100
    store.commit(claim, 100, sequence=sequence)
    assert store.start(claim, facts_of(end=300)).until is None


def test_after_close_everything_raises(real):
    claim = real.claim("billing", "orders", 0)
    real.close()
    real.close()
    for use in (
        lambda: real.write("billing", "orders", 0, Startpoint.earliest(), "go"),
        lambda: real.read("billing", "orders", 0),
        lambda: real.read("billing", "orders", 0, remove=True),
        lambda: real.start(claim, LOG),
        lambda: real.commit(claim, 1),
        real.history,
        real.event_log,
        real.sweep,
        real.checkpoints,
        real.size_bytes,
        lambda: real.checkpoint(claim.reader),
    ):
        with pytest.raises(StartpointRefused):
            use()
    with StartpointStore.open(real.place) as again, StartpointStore.open(real.place) as twice:
        assert again.checkpoint(claim.reader) == twice.checkpoint(claim.reader)


@pytest.mark.parametrize("location", ["kafka://localhost:9092/startpoints", "kafka:startpoints"])
def test_a_store_in_a_topic_is_refused_by_name(location):
    with pytest.raises(StoreUnavailable, match=r"pushrep\.startpoints\.store_at"):
        StartpointStore.open(location)


def test_places_that_can_be_no_store(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreUnavailable):
        StartpointStore.open(tmp_path / "file").write("billing", "orders", 0, Startpoint.earliest(), "go")
    assert StartpointStore.open(tmp_path / "none").history() == []
    assert not (tmp_path / "none").exists(), "looking makes nothing"


class LostBytes(RealFilesystem):
    """A disk that still opens files and can't read them: a share that went, a bad block."""

    is_lost = False

    def open(self, path, *, create=False, writable=True):
        with closing(super().open(path, create=create, writable=writable)) as file:
            return LosingFile(self, file, path)


class LosingFile(RealFile):
    def __init__(self, disk, file, path):
        super().__init__(os.dup(file.fileno()), path)
        self.disk = disk

    def read_at(self, size, position):
        if self.disk.is_lost:
            raise OSError(errno.ESTALE, "Stale file handle")
        return super().read_at(size, position)


def test_a_disk_that_can_not_be_read_is_a_store_that_is_away(tmp_path):
    """It is no other error: a consumer that follows the store continues while the store is unavailable."""
    disk = LostBytes()
    with StartpointStore.open(tmp_path, filesystem=disk) as store:
        store.write("billing", "orders", 0, Startpoint.earliest(), "go")
        reader = StartpointStore.open(tmp_path, filesystem=disk)
        assert len(reader.history()) == 1
        store.write("billing", "orders", 0, Startpoint.earliest(), "again")
        claim = store.claim("billing", "orders", 1)
        store.commit(claim, 7)
        disk.is_lost = True
        for use in (
            reader.history,
            lambda: store.write("billing", "orders", 0, Startpoint.earliest(), "more"),
            reader.checkpoints,
            lambda: reader.checkpoint(claim.reader),
        ):
            with pytest.raises(StoreUnavailable, match="Stale file handle"):
                use()
        disk.is_lost = False
        assert len(reader.history()) == 2
        assert [one.offset for one in reader.checkpoints()] == [7]


def test_a_held_lock_is_waited_for_and_then_named(tmp_path):
    store = StartpointStore.open(tmp_path)
    lock = REAL_FILESYSTEM.lock(tmp_path / ".lock")
    with store.within(0.05), pytest.raises(StoreUnavailable, match=f"process {os.getpid()} held its lock"):
        store.write("billing", "orders", 0, Startpoint.earliest(), "go")
    lock.close()
    assert store.write("billing", "orders", 0, Startpoint.earliest(), "go") == 1


def test_who_has_little_time_waits_no_longer_for_a_held_lock(tmp_path):
    """A running reader: `within` counts for all that its thread asks inside, and for no other."""
    store = StartpointStore.open(tmp_path)
    with closing(REAL_FILESYSTEM.lock(tmp_path / ".lock")), store.within(0.05), store.within(600):
        with pytest.raises(StoreUnavailable, match=r"held its lock for 0\.0\d* s"):
            store.claim("billing", "orders", 0)
        with pytest.raises(StoreUnavailable):
            store.write("billing", "orders", 0, Startpoint.earliest(), "go")
    assert store.write("billing", "orders", 0, Startpoint.earliest(), "go") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("", "orders", 0), "consumer"),
        (("*", "orders", 0), "consumer"),
        (("a\nb", "orders", 0), "consumer"),
        (("billing", "or/ders", 0), "topic"),
        (("billing", "orders", -1), "partition"),
        (("billing", "orders", True), "partition"),
    ],
)
def test_what_can_be_no_target_is_refused_by_name(store, arguments, named):
    with pytest.raises(BadArgument) as refused:
        store.write(*arguments, Startpoint.earliest(), "go")
    assert refused.value.argument == named


def test_other_words_are_refused_by_name(store):
    for words, named in [
        ({"reason": " "}, "reason"),
        ({"reason": "\ud800"}, "reason"),
        ({"author": ""}, "author"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": 1.5}, "ttl_s"),
    ]:
        with pytest.raises(BadArgument) as refused:
            store.write("billing", "orders", 0, Startpoint.earliest(), **({"reason": "go"} | words))
        assert refused.value.argument == named
    with pytest.raises(BadArgument, match="task"):
        store.write(None, "orders", 0, Startpoint.earliest(), "go", task="a")
    assert store.history() == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: Startpoint.specific(-1),
        lambda: Startpoint.specific(1 << 63),
        lambda: Startpoint.specific(True),
        lambda: Startpoint.specific(None),
        lambda: Startpoint.timestamp(-1),
        Startpoint.relative,
        lambda: Startpoint.relative(records=1, ms=-1),
        lambda: Startpoint.relative(records=0),
        lambda: Startpoint.relative(ms=0),
        lambda: Startpoint.specific(1, out_of_range="nearest"),
    ],
)
def test_startpoints_that_mean_nothing_are_refused_at_birth(make):
    with pytest.raises(BadArgument):
        make()


def journal_of(store):
    return store.place / "startpoints.journal"


def test_a_torn_end_is_cut_and_kept_aside(real):
    real.write("billing", "orders", 0, Startpoint.earliest(), "go")
    whole = journal_of(real).read_bytes()
    torn = whole.splitlines()[1][:40]
    journal_of(real).write_bytes(whole + torn)
    assert len(real.history()) == 1
    assert journal_of(real).read_bytes() == whole + torn, "looking changes nothing"
    assert real.write("billing", "orders", 1, Startpoint.earliest(), "go") == 2
    assert journal_of(real).read_bytes().startswith(whole)
    assert (real.place / "startpoints.cut").read_bytes() == torn


def test_damage_before_whole_lines_is_refused(real):
    for partition in range(3):
        real.write("billing", "orders", partition, Startpoint.earliest(), "go")
    data = bytearray(journal_of(real).read_bytes())
    data[data.index(b"orders") + 1] ^= 1
    journal_of(real).write_bytes(data)
    real = StartpointStore.open(real.place)
    with pytest.raises(CorruptFile, match="is damaged and whole lines follow"):
        real.history()
    with pytest.raises(CorruptFile, match="is damaged and whole lines follow"):
        real.write("billing", "orders", 0, Startpoint.earliest(), "go")
    assert journal_of(real).read_bytes() == data


def test_other_files_and_versions_are_refused(real):
    real.write("billing", "orders", 0, Startpoint.earliest(), "go")
    journal_of(real).write_text("hello\n")
    with pytest.raises(CorruptFile, match="no journal of startpoints"):
        real.history()

    journal_of(real).write_bytes(journal_line({"format": "pushrep.startpoints", "version": 2}))
    with pytest.raises(CorruptFile, match="version 2, this pushrep reads 1"):
        real.history()
    head = journal_line({"format": "pushrep.startpoints", "version": 1})
    journal_of(real).write_bytes(head + journal_line([{"event": "postponed", "sequence": 1}]))
    with pytest.raises(CorruptFile, match="is nothing that this pushrep knows"):
        real.history()


HEAD = journal_line({"format": "pushrep.startpoints", "version": 1})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (HEAD[:-10], "its first line is no journal of startpoints"),
        (b"\n", "its first line is no journal of startpoints"),
        (journal_line(["format"]), "its first line is no journal of startpoints"),
        (HEAD + journal_line([1]), "is nothing that this pushrep knows"),
    ],
    ids=["half a line", "an empty line", "another head", "no facts"],
)
def test_what_is_no_journal_is_refused_by_reader_and_writer_and_stays(real, data, why):
    real.write("billing", "orders", 0, Startpoint.earliest(), "go")
    journal_of(real).write_bytes(data)
    for use in (real.history, lambda: real.write("billing", "orders", 1, Startpoint.earliest(), "go")):
        with pytest.raises(CorruptFile, match=why):
            use()
    assert journal_of(real).read_bytes() == data


def test_a_damaged_checkpoint_is_refused(real):
    claim = real.claim("billing", "orders", 0)
    real.commit(claim, 60)
    (path,) = (real.place / "checkpoints").iterdir()
    fields = json.loads(path.read_text())
    for change, why in [({"offset": 61}, "checksum"), ({"version": 9}, "checksum")]:
        path.write_text(json.dumps(fields | change))
        with pytest.raises(CorruptFile, match=why):
            real.start(claim, LOG)
    path.write_text("{}")
    with pytest.raises(CorruptFile, match="no checkpoint"):
        real.start(claim, LOG)


def test_a_checkpoint_under_another_name_is_refused(real):
    real.commit(real.claim("billing", "orders", 0), 60)
    (path,) = (real.place / "checkpoints").iterdir()
    other = real.claim("billing", "orders", 1)
    (wrong,) = [p for p in (real.place / "checkpoints").iterdir() if p != path]
    wrong.write_bytes(path.read_bytes())
    with pytest.raises(CorruptFile, match="where billing at orders-1's belongs"):
        real.start(other, LOG)


@pytest.fixture
def simulated(store):
    store.write("billing", "orders", 0, Startpoint.earliest(), "go")
    return store


def test_a_full_disk_leaves_nothing_and_says_so(simulated, disk):
    disk.capacity_bytes = disk.usage(Path("/startpoints")).used_bytes + 20
    with pytest.raises(StoreUnavailable, match="nothing was written"):
        simulated.write("billing", "orders", 1, Startpoint.earliest(), "go")
    disk.capacity_bytes = None
    assert [fact.sequence for fact in simulated.history()] == [1]
    assert simulated.write("billing", "orders", 1, Startpoint.earliest(), "go") == 2


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_failed_sync_promises_nothing_that_a_power_cut_takes(simulated, disk, failing):
    """The first sync is of what others wrote, the second of our line, the third of taking it back."""
    disk.fail_sync(max(1, failing - 1), after=min(1, failing - 1))
    if failing == 1:
        assert simulated.write("billing", "orders", 1, Startpoint.earliest(), "go") == 2, "it went to new pages"
    else:
        outcome = "nothing was written" if failing == 2 else "whether it was written is not known"
        with pytest.raises(StoreUnavailable, match=outcome):
            simulated.write("billing", "orders", 1, Startpoint.earliest(), "go")
    disk.lose_power()
    assert [fact.sequence for fact in simulated.history()] == ([1, 2] if failing == 1 else [1])
    assert simulated.write("billing", "orders", 1, Startpoint.earliest(), "go") == (3 if failing == 1 else 2)


def test_the_reader_of_a_fact_tells_who():
    assert str(Reader("billing", "orders", 0, "a")) == "billing at orders-0 (task a)"


def test_what_was_seen_and_taken_back_is_forgotten(real, clock):
    """A line that was read while its writer had not synced it, and that the writer then cut off again."""
    real.write("billing", "orders", 0, Startpoint.earliest(), "go")
    whole = journal_of(real).read_bytes()
    other = StartpointStore.open(real.place, clock=clock)
    other.write("billing", "orders", 0, Startpoint.latest(), "this one is taken back")
    assert real.read("billing", "orders", 0).sequence == 2
    journal_of(real).write_bytes(whole)
    assert real.read("billing", "orders", 0).sequence == 1
    assert len(real.history()) == 1
    assert real.write("billing", "orders", 0, Startpoint.specific(5), "in its place, and longer than it was") == 2
    assert other.read("billing", "orders", 0).written.startpoint == Startpoint.specific(5)
    assert other.write("billing", "orders", 0, Startpoint.latest(), "go") == 3


def test_a_journal_that_contradicts_itself_is_refused(real):
    from pushrep.startpoints.model import to_json

    real.write("billing", "orders", 0, Startpoint.earliest(), "go")
    with journal_of(real).open("ab") as file:
        file.write(journal_line([to_json(Expired(sequence=9, at_ms=0))]))
    for use in (lambda: real.read("billing", "orders", 0), real.sweep, real.event_log):
        with pytest.raises(CorruptFile, match="startpoint 9, which was never written"):
            use()
