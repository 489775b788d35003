"""Waiting for a socket: what ends a wait, also what came before it began; and the check of what comes."""

import asyncio
import socket
import threading
import time

import pytest

from pushrep.env import REAL_NETWORK
from pushrep.replay.waiting import ReplayWaiter

FOR_EVER_S = 600


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def waiting():
    made = ReplayWaiter(REAL_NETWORK)
    yield made
    made.close()


def test_bytes_end_a_wait_of_the_same_socket_and_of_the_next_one(waiting, pair):
    ours, theirs = pair
    theirs.send(b"x")
    waiting.wait(ours, FOR_EVER_S)
    waiting.wait(ours, FOR_EVER_S)  # nobody took them
    ours.close()  # a connection that broke: the next one may get its number
    others, peer = socket.socketpair()
    with others, peer:
        peer.send(b"x")
        waiting.wait(others, FOR_EVER_S)


def test_a_wake_before_anybody_waits_ends_the_first_wait_and_only_that(waiting, pair):
    waiting.wake()
    waiting.wait(pair[0], FOR_EVER_S)
    began = time.monotonic()
    waiting.wait(pair[0], 0.05)
    assert time.monotonic() - began >= 0.04


def test_a_wake_before_an_event_loop_waits_ends_its_wait(waiting, pair):
    async def wait():
        waiting.wake()
        await waiting.wait_async(pair[0], FOR_EVER_S)
        threading.Timer(0.01, waiting.wake).start()
        await waiting.wait_async(pair[0], FOR_EVER_S)

    asyncio.run(wait())


def test_a_socket_that_went_without_another_in_its_place_is_waited_for_in_vain(waiting, pair):
    waiting.wait(pair[0], 0)
    pair[0].close()
    waiting.wait(None, 0)
    waiting.wait(None, 0.001)


class NotedPoller:
    """A poller whose waiter does not return at once when it is notified."""

    def __init__(self):
        self.inside, self.woken, self.closed = threading.Event(), threading.Event(), threading.Event()
        self.was_closed_inside = None

    def register(self, sock, mask, data): ...
    def unregister(self, sock): ...
    def select(self, _timeout_s):
        self.inside.set()
        assert self.woken.wait(30)
        self.was_closed_inside = self.closed.wait(0.1)

    def wake(self):
        assert not self.closed.is_set(), "its pipe may be somebody else's file by now"
        self.woken.set()

    def close(self):
        self.closed.set()


class OnePoller:
    """A network with that one."""

    def __init__(self):
        self.made = NotedPoller()

    def poller(self):
        return self.made


def test_a_close_lets_go_of_the_descriptors_when_nobody_waits_in_them_any_more(pair):
    network = OnePoller()
    waiting = ReplayWaiter(network)
    waiter = threading.Thread(target=waiting.wait, args=(pair[0], FOR_EVER_S))
    waiter.start()
    assert network.made.inside.wait(30)
    waiting.close()
    waiting.wake()
    waiter.join(30)
    assert network.made.closed.is_set()
    assert network.made.was_closed_inside is False
