"""The listening side: a thread that accepts for all outboxes of the process, a thread for each connection.

A call is carried out in its connection's thread, so one that takes its time holds up nobody else. A fork of the process
closes its copies of the sockets: else its parent's death would leave one that connects and never answers.
"""

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any, TypeAlias

from pushrep.env import READABLE, REAL_NETWORK, shared_by_process
from pushrep.errors import PushrepError
from pushrep.outbox.control import place
from pushrep.outbox.control.errors import BadControlMessage, CallRefused
from pushrep.outbox.control.protocol import (
    QUESTION_BYTES_MAX,
    UNKNOWN_CALL,
    Lines,
    answer_bytes,
    question_in,
    refusal_bytes,
)
from pushrep.outbox.partition_appender import refuse_in_forks

_LOG = logging.getLogger("pushrep.outbox")
CONNECTIONS_MAX = 16
_IDLE_S = 30.0
_STOP_S = 5.0
_AGAIN_S = 0.5
_READ_BYTES = 64 << 10

Calls: TypeAlias = Mapping[str, Callable[[Mapping[str, Any]], Any]]
"""What is answered, by name: arguments in, a value of JSON out. A PushrepError or OSError is the answer as well."""


class ControlServer:
    """Answers on the control socket of `directory` until `close`. Raises OSError if it can't listen."""

    def __init__(self, directory: Path, calls: Calls) -> None:
        self.directory, self._calls = directory.resolve(), calls
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._stopping = threading.Event()
        self._listener = place.listen(self.directory)
        self._listener.setblocking(False)
        refuse_in_forks(self)
        self._acceptor = _ACCEPTORS.acquire(None, _Acceptor)
        self._acceptor.add(self._listener, self._accept)

    def close(self) -> None:
        """Take the name away, and answer nobody any more. A second call does nothing."""
        with self._lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
        place.remove(self.directory)
        self._acceptor.remove(self._listener)
        _ACCEPTORS.release(self._acceptor)
        self._listener.close()
        with self._lock:
            open_now = dict(self._open)
        deadline = monotonic() + _STOP_S
        for connection, thread in open_now.items():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # what is being carried out is still answered
            thread.join(max(0.0, deadline - monotonic()))

    def disown(self) -> None:
        """In a fork: close the copies, and leave the name to the parent."""
        for copy in (self._listener, *self._open):
            copy.close()

    def _accept(self) -> None:
        """Somebody connects."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # it went
            return
        except OSError as error:
            _LOG.warning("the control socket of %s: %s", self.directory, error)
            self._stopping.wait(_AGAIN_S)  # out of descriptors: perhaps not for long
            return
        connection.setblocking(True)
        thread = threading.Thread(target=self._converse, args=(connection,), name="pushrep-control-call", daemon=True)
        with self._lock:
            is_refused = self._stopping.is_set() or len(self._open) >= CONNECTIONS_MAX
            if not is_refused:
                self._open[connection] = thread
        if is_refused:
            connection.close()
        else:
            thread.start()

    def _converse(self, connection: socket.socket) -> None:
        lines = Lines(QUESTION_BYTES_MAX)
        try:
            connection.settimeout(_IDLE_S)
            while data := connection.recv(_READ_BYTES):
                for said in lines.feed(data):
                    connection.sendall(_answer(said, self._calls))
        except BadControlMessage as error:
            _LOG.warning("%s", error)
            with suppress(OSError):
                connection.sendall(refusal_bytes(type(error).__name__, error.why))
        except OSError as error:  # a peer that said nothing, or took nothing, or went
            _LOG.debug("the control socket: %s", error)
        finally:
            with self._lock:
                self._open.pop(connection, None)
            connection.close()


def answer_line(line: bytes, calls: Calls) -> bytes:
    """What is answered to one question, a line without its end. Raises BadControlMessage."""
    (said,) = Lines(QUESTION_BYTES_MAX).feed(line + b"\n")
    return _answer(said, calls)


def _answer(said: Mapping[str, Any], calls: Calls) -> bytes:
    try:
        question = question_in(said)
        call = calls.get(question.call)
        if call is None:
            known = ", ".join(sorted(calls))
            return refusal_bytes(UNKNOWN_CALL, f"{question.call!r} is not answered here, but {known}")
        return answer_bytes(call(question.arguments))
    except CallRefused as error:
        return refusal_bytes(error.kind, error.why)
    except BadControlMessage:
        raise
    except (PushrepError, OSError) as error:
        return refusal_bytes(type(error).__name__, str(error))
    except Exception as error:  # noqa: BLE001 - a fault of ours ends one call, not the service
        _LOG.exception("the control socket: %r failed", said.get("call"))
        return refusal_bytes(type(error).__name__, f"it failed: {error}; the service's log has more")


class _Acceptor:
    """Waits for whoever connects to any control socket of this process, in one thread."""

    def __init__(self) -> None:
        self._poller = REAL_NETWORK.poller()
        self._todo: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="pushrep-control", daemon=True)
        self._thread.start()

    def add(self, listener: socket.socket, on_connect: Callable[[], None]) -> None:
        """Call `on_connect()` whenever somebody connects."""
        self._do(lambda: self._poller.register(listener, READABLE, on_connect))

    def remove(self, listener: socket.socket) -> None:
        """No more, when this returns."""
        self._do(lambda: self._poller.unregister(listener))

    def end(self) -> None:
        """End the thread; all were removed."""
        self._is_over = True
        self._poller.wake()
        self._thread.join()
        self._poller.close()

    def _do(self, act: Callable[[], object]) -> None:
        """In the thread that waits, for one thread registers and selects."""
        done = threading.Event()

        def carry_out() -> None:
            try:
                act()
            finally:
                done.set()

        self._todo.put(carry_out)
        self._poller.wake()
        done.wait()

    def _run(self) -> None:
        while not self._is_over:
            calls = [ready.data for ready in self._poller.select(None)]
            while not self._todo.empty():
                calls.append(self._todo.get())
            for call in calls:
                try:
                    call()
                except Exception:  # noqa: BLE001 - one socket that fails keeps no other from being answered
                    _LOG.exception("the control socket")


_ACCEPTORS = shared_by_process(_Acceptor.end)
