"""The buffer shared by replicas: counted once, bounded, evicted oldest first; its count is always what is held."""

import gc

from hypothesis import given
from hypothesis import strategies as st

from pushrep.replicate.pusher import Buffered, MemoryTracker


def test_the_last_user_frees_the_bytes():
    memory = MemoryTracker(100)
    entry = memory.hold(0, 1, (b"x" * 60,), 2)
    memory.release(entry)
    assert memory.used_bytes == 60
    memory.release(entry)
    assert memory.used_bytes == 0
    assert entry.parts is None


def test_the_oldest_goes_for_a_newer_one():
    memory = MemoryTracker(100)
    first, second = memory.hold(0, 1, (b"x" * 60,), 1), memory.hold(1, 2, (b"y" * 30, b"z" * 20), 1)
    assert (first.parts, second.parts) == (None, (b"y" * 30, b"z" * 20))
    assert (memory.used_bytes, memory.evicted_bytes) == (50, 60)
    memory.release(first)
    assert memory.used_bytes == 50, "it was given up already"


def test_what_is_larger_than_everything_is_not_kept():
    memory = MemoryTracker(100)
    kept = memory.hold(0, 1, (b"x" * 50,), 1)
    assert memory.hold(1, 2, (b"y" * 101,), 1) is None
    assert kept.parts is not None


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 3), st.integers(0, 5)), max_size=60))
def test_the_count_is_what_is_held_and_comes_to_nothing(steps):
    memory = MemoryTracker(100)
    held = []
    for size, users, release in steps:
        entry = memory.hold(0, 1, (b"x" * size,), users)
        held += [entry] * users
        for _ in range(min(release, len(held))):
            memory.release(held.pop(0))
        assert memory.used_bytes == sum(one.size_bytes for one in set(held) if one.parts is not None) <= 100
    for entry in held:
        memory.release(entry)
    assert memory.used_bytes == 0


def test_what_was_released_is_swept_out_and_what_is_held_stays_in_turn():
    """Of the many that came and went since, none is kept for its place in the queue; the oldest that is held still
    goes first.
    """
    memory = MemoryTracker(100)
    first, second = memory.hold(0, 1, (b"x" * 30,), 1), memory.hold(1, 2, (b"y" * 30,), 1)
    for n in range(5_000):
        memory.release(memory.hold(n, n + 1, (b"z",), 1))
    gc.collect()
    assert sum(isinstance(one, Buffered) for one in gc.get_objects()) < 2_000
    assert memory.hold(2, 3, (b"a" * 50,), 1) is not None
    assert (first.parts, second.parts, memory.used_bytes) == (None, (b"y" * 30,), 80)
    assert memory.hold(3, 4, (b"b" * 50,), 1) is not None
    assert (second.parts, memory.used_bytes, memory.evicted_bytes) == (None, 100, 60)
