"""Memory that is reused: it does not change while a caller has a view of it, and no caller waits for it."""

import os
import threading
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from pushrep.replay import slices
from pushrep.replay.slices import Buffers
from pushrep.wire.frames import SPARE_BYTES, FrameLimits, FrameReader, OpenedFrame, frame_head


def frame(body):
    return frame_head((1, 0), 0, 7, b"header", len(body)) + body


@pytest.fixture
def reader():
    def opened(prefix, _header):
        return OpenedFrame(prefix.body_bytes, lambda body: body)

    return FrameReader(opened, FrameLimits(), Buffers(SPARE_BYTES).acquire_kept)


def received(reader, data, size):
    found, at = [], 0
    while at < len(data):
        room = reader.get_buffer()
        count = min(len(room), len(data) - at, size)
        room[:count] = data[at : at + count]
        found += reader.buffer_updated(count)
        at += count
    return found


def test_a_buffer_is_free_when_the_last_view_of_it_is_dropped():
    buffers = Buffers(100)
    view = buffers.acquire()
    assert len(view) == 100
    assert np.frombuffer(view, np.uint8).ctypes.data % 64 == 0, "it begins with a cache line"
    part = view[3:5]
    first = view.obj
    view.release()
    assert buffers.acquire().obj is not first, "somebody looks at two bytes of it"
    part.release()
    assert first in [buffers.acquire().obj for _ in range(2)]


def test_more_than_are_kept_may_be_looked_at():
    buffers = Buffers(8)
    views = [buffers.acquire() for _ in range(20)]
    for number, view in enumerate(views):
        view[:] = bytes([number]) * 8
    assert [bytes(view) for view in views] == [bytes([number]) * 8 for number in range(20)]
    assert buffers.acquire_kept() is None, "who can do without gets none"
    memory = {id(view.obj) for view in views}
    views.clear()
    del view
    assert id(buffers.acquire_kept().obj) in memory, "until one is free"


def test_nobody_waits_for_another_who_takes_one(monkeypatch):
    lock = threading.Lock()
    monkeypatch.setattr(slices, "threading", SimpleNamespace(Lock=lambda: lock))
    buffers = Buffers(8)
    kept = buffers.acquire().obj
    with lock:  # as a fork of the process may find it, whose owner is not there
        assert buffers.acquire().obj is not kept
    assert buffers.acquire().obj is kept


@pytest.mark.parametrize("piece", [1 << 30, 100_000])
def test_bodies_of_frames_stay_what_they_were_as_long_as_they_are_looked_at(reader, piece):
    sent = [os.urandom(size) for size in (300_000, 10, 300_000, 900_000, 70_000, SPARE_BYTES, SPARE_BYTES + 1, 300_000)]
    found = [body for data in sent for body in received(reader, frame(data), piece)]
    assert found == sent
    assert all(body.readonly for body in found)
    memory = {id(body.obj) for body in found}
    del found
    (again,) = received(reader, frame(sent[0]), piece)
    assert again == sent[0]
    assert id(again.obj) in memory, "the memory is used again"


def test_who_keeps_many_small_bodies_does_not_keep_a_whole_buffer_for_each(reader):
    """A list of batches of 70 kB each would take 90 times as much."""
    body = os.urandom(70_000)
    tracemalloc.start()
    try:
        kept = [found for _ in range(60) for found in received(reader, frame(body), 1 << 30)]
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept == [body] * 60
    assert held_bytes < 8 * SPARE_BYTES + 60 * 4 * len(body)


def test_a_body_that_is_claimed_and_not_sent_holds_only_what_came(reader):
    head = frame_head((1, 0), 0, 7, b"header", 300_000)
    assert received(reader, head + bytes(900), 1 << 30) == []
    assert 900 <= reader.held_bytes < 1000
