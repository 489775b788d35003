"""The nine rules of the contract by number, tested with the store; rule 9 is continued in test_mark_epochs.py."""

import threading
from pathlib import Path

import pytest

from pushrep.startpoints import (
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
)
from tests.support.simulated_disk import SimulatedClock, SimulatedDisk

BILLING = Reader("billing", "orders", 0)


def log_of(end, start=0):
    """A record a second, from 0 on."""
    return LogFacts(start=start, end=end, first_at=lambda ms: next((n for n in range(end) if 1000 * n >= ms), None))


@pytest.fixture
def clock():
    return SimulatedClock()


@pytest.fixture
def store(clock):
    disk = SimulatedDisk(1, clock=clock)
    return StartpointStore.open(Path("/startpoints"), filesystem=disk, clock=clock)


@pytest.fixture
def claim(store):
    return store.claim("billing", "orders", 0)


def write(store, startpoint, partition=0, **more):
    return store.write("billing", "orders", partition, startpoint, "why", author="ann", **more)


def test_rule_1_startpoint_before_checkpoint_before_default_and_before_a_reset(store, claim):
    log = log_of(100)
    assert store.start(claim, log, default=Startpoint.latest()).offset == 100
    store.commit(claim, 40)
    start = store.start(claim, log, default=Startpoint.latest())
    assert (start.offset, start.origin) == (40, Origin.CHECKPOINT)
    number = write(store, Startpoint.specific(7))
    start = store.start(claim, log, default=Startpoint.latest(), reset=True)
    assert (start.offset, start.origin, start.sequence) == (7, Origin.STARTPOINT, number)


@pytest.mark.parametrize(
    "startpoint", [Startpoint.latest(), Startpoint.relative(records=-5), Startpoint.timestamp(95_000)]
)
def test_rule_2_resolved_once_and_the_stored_offset_is_used_again(store, claim, startpoint):
    store.commit(claim, 100)
    write(store, startpoint)
    first = store.start(claim, log_of(100))
    again = store.claim("billing", "orders", 0)  # after a crash
    assert store.start(again, log_of(200), position=150) == first
    applied = store.reader_state(1, BILLING).applied
    assert (applied.start, applied.end) == (0, 100), "the range of that moment is kept"


def test_rule_3_the_commit_carries_the_sequence_and_comes_after_progress(store, claim):
    number = write(store, Startpoint.specific(50))
    with pytest.raises(StartpointRefused, match="was not applied"):
        store.commit(claim, 60, sequence=number)
    store.start(claim, log_of(100))
    assert not store.commit(claim, 50, sequence=number), "no progress past it yet"
    assert store.read("billing", "orders", 0) is not None
    with pytest.raises(StartpointRefused, match="has not committed"):
        store.consume(claim, number)
    newer = write(store, Startpoint.specific(10))
    assert store.commit(claim, 51, sequence=number)
    store.consume(claim, number)
    assert store.reader_state(newer, BILLING).state is State.PENDING, "consumed names only that sequence"
    assert store.read("billing", "orders", 0).sequence == newer, "the newest above the committed one"
    thief = store.claim("billing", "orders", 0)
    for what in (lambda: store.apply(claim, log_of(100)), lambda: store.consume(claim, number)):
        with pytest.raises(PartitionLost):
            what()
    assert store.apply(thief, log_of(100)).offset == 10


@pytest.mark.parametrize("startpoint", [Startpoint.specific, Startpoint.timestamp])
def test_rule_4_what_does_not_fit_follows_the_policy_and_never_silently(store, claim, startpoint):
    write(store, startpoint(500_000))
    for _ in range(2):
        with pytest.raises(StartpointFailed):
            store.start(claim, log_of(100))
    for policy, offset in (("earliest", 3), ("latest", 100)):
        number = write(store, startpoint(500_000, out_of_range=policy))
        assert store.start(claim, log_of(100, start=3)).offset == offset
        assert store.reader_state(number, BILLING).applied.by_policy, "the history says why"


def test_rule_5_pending_ones_expire_are_swept_and_marked(store, claim, clock):
    short = write(store, Startpoint.specific(1), partition=1, ttl_s=60)
    usual = write(store, Startpoint.specific(2))
    never = write(store, Startpoint.specific(3), partition=2, ttl_s=None)
    clock.advance(60_000)
    assert store.sweep() == [short]
    clock.advance(12 * 3600 * 1000 - 60_001)
    assert store.sweep() == []
    clock.advance(1)
    assert store.read("billing", "orders", 0) is None
    assert [fact.sequence for fact in store.history() if isinstance(fact, Expired)] == [short, usual]
    clock.advance(10**12)
    assert store.read("billing", "orders", 2).sequence == never
    applied = write(store, Startpoint.specific(4))
    store.start(claim, log_of(100))
    clock.advance(10**12)
    assert store.sweep() == []
    assert store.read("billing", "orders", 0).sequence == applied, "what was applied does not expire"


def test_rule_6_one_partition_s_apply_touches_no_other_and_fan_out_merges(store, claim):
    wide = write(store, Startpoint.specific(5), partition=None)
    store.start(claim, log_of(100))
    other = Reader("billing", "orders", 1)
    assert store.reader_state(wide, other).state is State.PENDING
    own = write(store, Startpoint.specific(9), partition=1, task="b")
    copies = store.fan_out("billing", "orders", {"a": [0, 1], "b": [0, 1]})
    assert set(copies) == {("a", 0), ("a", 1), ("b", 0)}, "task b keeps its newer one"
    assert store.read("billing", "orders", 1, task="b").sequence == own
    assert store.fan_out("billing", "orders", {"a": [0, 1], "b": [0, 1]}) == {}, "nobody gets a second copy"


def test_rule_6_a_fan_out_gives_nothing_to_who_has_met_the_startpoint_itself(store):
    """A task that applied it, failed it, or committed behind it, and was killed before it was marked as consumed."""
    store.write("billing", "orders", None, Startpoint.specific(50), "why", author="ann")
    applied, failed, committed, other = (store.claim("billing", "orders", n, task="a") for n in range(4))
    store.apply(applied, log_of(100))
    with pytest.raises(StartpointFailed):
        store.apply(failed, log_of(10))
    store.apply(committed, log_of(100))
    store.commit(committed, 51, sequence=1)
    assert set(store.fan_out("billing", "orders", {"a": range(4)})) == {("a", other.reader.partition)}


USES = {
    "apply": lambda store, claim: store.apply(claim, log_of(1)),
    "cancel": lambda store, _: store.cancel(1, "why"),
    "checkpoint": lambda store, _: store.checkpoint(BILLING),
    "checkpoints": lambda store, _: store.checkpoints(),
    "claim": lambda store, _: store.claim("billing", "orders", 0),
    "commit": lambda store, claim: store.commit(claim, 1),
    "consume": lambda store, claim: store.consume(claim, 1),
    "delete": lambda store, _: store.delete("billing", "orders", 0, "why"),
    "delete_all": lambda store, _: store.delete_all("why"),
    "event_log": lambda store, _: store.event_log(),
    "fan_out": lambda store, _: store.fan_out("billing", "orders", {"a": [0]}),
    "history": lambda store, _: store.history(),
    "read": lambda store, _: store.read("billing", "orders", 0),
    "reader_state": lambda store, _: store.reader_state(1, BILLING),
    "size_bytes": lambda store, _: store.size_bytes(),
    "start": lambda store, claim: store.start(claim, log_of(1)),
    "sweep": lambda store, _: store.sweep(),
    "write": lambda store, _: write(store, Startpoint.latest()),
    "write_each": lambda store, _: store.write_each("billing", "orders", {0: Startpoint.latest()}, "why"),
}


def test_rule_7_use_after_close_raises_and_closing_again_is_fine(store, claim):
    assert USES.keys() == {name for name in vars(StartpointStore) if name[0] != "_"} - {"open", "close", "within"}
    write(store, Startpoint.earliest())
    store.close()
    store.close()
    said = {}
    for name, use in USES.items():
        try:
            use(store, claim)
        except StartpointRefused as refused:
            said[name] = "is closed" in str(refused)
    assert said == dict.fromkeys(USES, True)


def test_rule_7_writers_at_once_lose_nothing(tmp_path):
    """Writers of one process; several processes are in tests/crash/test_startpoints_kill9.py."""
    stores = [StartpointStore.open(tmp_path) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda s=s: [write(s, Startpoint.specific(n)) for n in range(5)]) for s in stores
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert [fact.sequence for fact in stores[0].history()] == list(range(1, 21))


def test_rule_8_without_checkpoints_removed_when_read_or_once_records_were_processed(store):
    first = write(store, Startpoint.specific(5))
    assert store.read("billing", "orders", 0, remove=True).sequence == first
    assert store.read("billing", "orders", 0) is None, "gone with that very call"
    second = write(store, Startpoint.specific(6))
    assert store.read("billing", "orders", 0).sequence == second
    third = write(store, Startpoint.specific(7))  # while records of the second are processed
    store.read("billing", "orders", 0, remove=True, only=second)
    assert store.read("billing", "orders", 0).sequence == third, "only the one that was processed"
    store.read("billing", "orders", 0, remove=True, only=third)
    assert [fact.sequence for fact in store.history() if isinstance(fact, Consumed)] == [first, third]


def test_rule_9_reset_marks_is_part_of_the_startpoint(store, claim):
    number = write(store, Startpoint.specific(50, reset_marks=True))
    start = store.start(claim, log_of(100))
    assert (start.sequence, start.reset_marks) == (number, True)
    store.commit(claim, 51, sequence=number)
    store.consume(claim, number)
    again = store.start(claim, log_of(100))
    assert (again.origin, again.sequence, again.reset_marks) == (Origin.CHECKPOINT, number, True), "the epoch goes on"


def test_rule_8_what_failed_is_not_removed_by_reading_it(store, claim):
    failed = write(store, Startpoint.specific(50))
    with pytest.raises(StartpointFailed):
        store.start(claim, log_of(10))
    before = store.history()
    for _ in range(2):
        found = store.read("billing", "orders", 0, remove=True)
        assert (found.sequence, found.state) == (failed, State.FAILED), "it stops the start until somebody cancels it"
    assert store.history() == before


def test_rule_3_what_the_reader_s_own_commit_names_is_not_applied_again(store, claim):
    """A Kafka group's commit carries it; the store may not know yet."""
    number = write(store, Startpoint.specific(50))
    assert store.apply(claim, log_of(100)).offset == 50
    assert store.apply(claim, log_of(100), committed=number) is None
    assert store.apply(claim, log_of(100), committed=number - 1).offset == 50


@pytest.mark.parametrize(("found", "offset"), [(None, 2), (10, 2), (9, 9), (2, 2), (0, 2)])
def test_a_time_is_an_offset_of_the_log_or_the_policys(store, claim, found, offset):
    """Its look-up may lag behind the log's ends: it names a record that is gone, or one beyond the end."""
    write(store, Startpoint.timestamp(1000, out_of_range="earliest"))
    log = LogFacts(start=2, end=10, first_at=lambda ms: found)
    assert store.start(claim, log).offset == offset
