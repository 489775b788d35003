"""Frames in pieces: from memory and from files, over sockets that take as much as they like."""

import os
import socket
import threading
from contextlib import ExitStack

import pytest

from pushrep.env import REAL_FILESYSTEM, REAL_NETWORK
from pushrep.replicate.sockets import pieces_of, send_all, send_some
from pushrep.wire.values import FileSlice

SIZE = 3 << 20


@pytest.fixture
def file(tmp_path):
    (tmp_path / "records").write_bytes(os.urandom(SIZE))
    opened = REAL_FILESYSTEM.open(tmp_path / "records", writable=False)
    yield opened
    opened.close()


@pytest.fixture
def ends():
    """Two ends of a connection, and what comes out of the second one until the first hangs up."""
    here, there = socket.socketpair()
    received = bytearray()

    def read():
        while data := there.recv(1 << 16):
            received.extend(data)

    thread = threading.Thread(target=read)
    thread.start()

    def finish():
        here.close()
        thread.join()
        return bytes(received)

    with there:
        yield here, finish
        here.close()
        thread.join()


def parts_of(file):
    whole = FileSlice(file, 0, SIZE)
    return [b"head", b"", memoryview(b"more"), FileSlice(file, 1000, 1 << 20), FileSlice(file, 0, 0), b"tail", whole]


def joined(parts):
    return b"".join(
        part.file.read_at(part.size_bytes, part.position) if isinstance(part, FileSlice) else bytes(part)
        for part in parts
    )


def test_memory_and_slices_of_files_arrive_in_order(file, ends):
    here, finish = ends
    here.setblocking(False)
    pieces, sent = pieces_of(parts_of(file)), 0
    while pieces:
        try:
            sent += send_some(here, pieces)
        except BlockingIOError:
            continue
    expected = joined(parts_of(file))
    assert sent == len(expected)
    assert finish() == expected


@pytest.mark.parametrize("timeout_s", [None, 30])
def test_who_waits_sends_all_of_it(file, ends, timeout_s):
    here, finish = ends
    here.settimeout(timeout_s)
    send_all(here, parts_of(file))
    assert finish() == joined(parts_of(file))


class Telling(socket.socket):
    """A socket that records the flags of each send."""

    def sendmsg(self, buffers, ancillary=(), flags=0):
        buffers = list(buffers)
        self.__dict__.setdefault("told", []).append((len(buffers), flags))
        return super().sendmsg(buffers, ancillary, flags)


@pytest.mark.skipif(not hasattr(socket, "MSG_MORE"), reason="this system has no MSG_MORE")
def test_the_head_of_a_frame_waits_for_the_slice_that_follows_it(file):
    here, there = socket.socketpair()
    with there, Telling(fileno=here.detach()) as telling:
        telling.setblocking(False)
        pieces = pieces_of([b"head", b"more", FileSlice(file, 0, 10), b"tail"])
        while pieces:
            send_some(telling, pieces)
        assert telling.told == [(2, socket.MSG_MORE), (1, 0)]
        assert there.recv(22, socket.MSG_WAITALL) == b"headmore" + file.read_at(10, 0) + b"tail"


@pytest.mark.parametrize("blocking", [False, True])
def test_a_file_that_was_cut_meanwhile_ends_the_connection(file, ends, blocking):
    here, _ = ends
    here.setblocking(blocking)
    with pytest.raises(ConnectionError, match="not there any more"):
        send_some(here, [FileSlice(file, SIZE, 10)])


def test_n4_who_comes_while_nobody_accepts_waits_and_is_not_dropped():
    """A dropped one asks again after a second and more."""
    with ExitStack() as stack:
        listener = stack.enter_context(REAL_NETWORK.listen(("127.0.0.1", 0)))
        for _ in range(300):
            stack.enter_context(socket.create_connection(listener.getsockname(), 0.5))
