"""What every `Network` must do, asked of any of them: the real one and the simulated one answer alike."""

import errno
import socket
from collections.abc import Callable
from contextlib import closing

from pushrep.env import Network, Socket
from pushrep.env.network import READABLE, WRITABLE, HostPort

_WAIT_S = 30.0
_SOON_S = 0.01


def examine_network(network: Network, host: str) -> None:
    """Raise AssertionError naming the first promise of `Network` that does not hold; it listens on `host`."""
    for examine in (_streams, _endings, _refusals, _timeouts, _pollers, _threads):
        examine(network, host)


class _Pair:
    """Two ends of one connection."""

    def __init__(self, network: Network, host: str) -> None:
        listener = network.listen((host, 0))
        with closing(listener):
            self.address: HostPort = listener.getsockname()[:2]
            self.one = network.connect(self.address, _WAIT_S)
            self.other, _ = listener.accept()
        self.other.settimeout(_WAIT_S)

    def close(self) -> None:
        self.one.close()
        self.other.close()


def _streams(network: Network, host: str) -> None:
    with closing(_Pair(network, host)) as pair:
        sent = bytes(range(256)) * 2
        _send(pair.one, sent)
        _equal("what is sent arrives in order", _receive(pair.other, len(sent)), sent)
        count = pair.other.sendmsg([memoryview(b"ab"), memoryview(b"cd")])
        _equal("several pieces are one stream", _receive(pair.one, count), b"abcd"[:count])


def _endings(network: Network, host: str) -> None:
    with closing(_Pair(network, host)) as pair:
        _send(pair.one, b"last words")
        pair.one.close()
        _equal("what was sent before a close arrives", _receive(pair.other, 10), b"last words")
        _equal("then the end", _some(pair.other), b"")
        _equal("and it stays the end", _some(pair.other), b"")
        _refused("reading what was closed here", lambda: _some(pair.one), errno.EBADF)
        pair.one.close()
    with closing(_Pair(network, host)) as pair:
        pair.one.shutdown(socket.SHUT_WR)
        _equal("one direction ends alone", _some(pair.other), b"")
        _send(pair.other, b"still")
        _equal("the other direction goes on", _receive(pair.one, 5), b"still")
        _refused("sending after shutdown", lambda: pair.one.send(memoryview(b"x")), errno.EPIPE)
    with closing(_Pair(network, host)) as pair:
        ended: list[bytes] = []
        reader = network.threads.thread(lambda: ended.append(_some(pair.other)), "reader")
        reader.start()
        pair.other.shutdown(socket.SHUT_RDWR)
        reader.join(_WAIT_S)
        _equal("shutdown ends a call that waits in another thread", ended, [b""])


def _refusals(network: Network, host: str) -> None:
    listener = network.listen((host, 0))
    address = listener.getsockname()[:2]
    _refused("listening where somebody listens", lambda: network.listen(address).close(), errno.EADDRINUSE)
    done: list[str] = []
    acceptor = network.threads.thread(lambda: _accept_until_closed(listener.accept, done), "acceptor")
    acceptor.start()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    acceptor.join(_WAIT_S)
    _equal("a listener that is shut down ends accept", done, ["over"])
    _refused("connecting where nobody listens", lambda: network.connect(address, _WAIT_S).close(), errno.ECONNREFUSED)


def _accept_until_closed(accept: Callable[[], object], done: list[str]) -> None:
    try:
        accept()
    except OSError:
        done.append("over")


def _timeouts(network: Network, host: str) -> None:
    with closing(_Pair(network, host)) as pair:
        pair.one.settimeout(_SOON_S)
        try:
            _some(pair.one)
        except TimeoutError:
            pass
        else:
            raise AssertionError("a read waited for less than its time")
        pair.one.setblocking(False)
        _refused("a read that may not wait", lambda: _some(pair.one), errno.EAGAIN)
        sent = 0
        while True:  # until the buffers are full
            try:
                sent += pair.one.send(memoryview(bytes(4096)))
            except BlockingIOError:
                break
        _equal("a full stream took something", sent > 0, True)
        _equal("and loses nothing of it", _receive(pair.other, sent), bytes(sent))


def _pollers(network: Network, host: str) -> None:
    with closing(_Pair(network, host)) as pair, closing(network.poller()) as poller:
        pair.one.setblocking(False)
        poller.register(pair.one, READABLE, "one")
        _equal("nothing is ready", poller.select(_SOON_S), [])
        _send(pair.other, b"x")
        _equal("bytes make a socket readable", poller.select(_WAIT_S), [("one", READABLE)])
        _equal("until they are read", poller.select(_WAIT_S), [("one", READABLE)])
        _receive(pair.one, 1)
        poller.modify(pair.one, READABLE | WRITABLE, "renamed")
        _equal("room makes it writable", poller.select(_WAIT_S), [("renamed", WRITABLE)])
        poller.modify(pair.one, READABLE, "one")
        poller.wake()
        _equal("a wake ends the next select", poller.select(_WAIT_S), [])
        _equal("once", poller.select(_SOON_S), [])
        waker = network.threads.thread(poller.wake, "waker")
        waker.start()
        _equal("a wake of another thread ends a select", poller.select(_WAIT_S), [])
        pair.other.close()
        _equal("the end makes it readable", poller.select(_WAIT_S), [("one", READABLE)])
        _equal("it is the end", _some(pair.one), b"")
        poller.unregister(pair.one)
        _equal("what is not registered is not reported", poller.select(_SOON_S), [])


def _threads(network: Network, _host: str) -> None:
    threads = network.threads
    event = threads.event()
    seen: list[object] = []
    thread = threads.thread(lambda: seen.append(event.wait(_WAIT_S)), "waiter")
    _equal("a thread that was not started", thread.is_alive(), False)
    thread.start()
    _equal("an event that is not set", event.wait(_SOON_S), False)
    _equal("a thread that waits is alive", thread.is_alive(), True)
    event.set()
    thread.join(_WAIT_S)
    _equal("an event wakes who waits", (seen, event.is_set(), thread.is_alive()), ([True], True, False))
    condition = threads.condition()

    def notify() -> None:
        with condition:
            seen.append("news")
            condition.notify_all()

    notifier = threads.thread(notify, "notifier")
    with condition:
        _equal("a condition that does not hold", condition.wait_for(lambda: "news" in seen, _SOON_S), False)
    notifier.start()
    with condition:
        _equal("a condition that comes to hold", condition.wait_for(lambda: "news" in seen, _WAIT_S), True)
    notifier.join(_WAIT_S)


def _send(sock: Socket, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[sock.send(view) :]


def _some(sock: Socket) -> bytes:
    buffer = bytearray(4096)
    return bytes(buffer[: sock.recv_into(memoryview(buffer))])


def _receive(sock: Socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        buffer = memoryview(bytearray(min(4096, size - len(found))))
        count = sock.recv_into(buffer)
        if not count:
            raise AssertionError(f"the stream ended after {len(found)} of {size} bytes")
        found += buffer[:count]
    return bytes(found)


def _equal(promise: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise AssertionError(f"{promise}: {got!r} instead of {wanted!r}")


def _refused(what: str, call: Callable[[], object], code: int) -> None:
    try:
        call()
    except OSError as error:
        _equal(f"{what}: errno", error.errno, code)
    else:
        raise AssertionError(f"{what} was not refused")
