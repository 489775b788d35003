r"""The control socket of an open outbox: the command line asks a running service over it.

    ControlServer(directory, calls)         in the service; Outbox.open makes one
    ask(directory, "status")                from any process of the same user

    <directory>/control.sock, mode 0600     one JSON object a line: a question, then its answer
    ▶ {"version": 1, "call": "status", "arguments": {}}\n
    ◀ {"version": 1, "ok": {...}}\n
    ◀ {"version": 1, "error": "NotLeader", "why": "..."}\n       instead, if the call is refused

Versions: a question contains its version. A server that does not know the version answers with the error
UnsupportedVersion in its own version. To a line above the limit, or one that is no JSON object, it answers with an
error, and closes the connection.

One thread accepts connections for all outboxes of the process. Each connection has its own thread, so a slow call
delays no other call. A forked child closes its copies of the sockets: otherwise clients could still connect after the
parent's end, and would get no answer.

A socket's path has at most 107 bytes, and an outbox's path may be longer. So on Linux client and server use the path
/proc/self/fd/<n>/control.sock, where n is an open descriptor of the directory. On other systems the plain path is used;
if it is too long, the call fails with OSError.
"""

import errno
import json
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any, TypeAlias

from pushrep.env import READABLE, REAL_NETWORK, refuse_in_forks, shared_by_process
from pushrep.errors import PushrepError


class ControlError(PushrepError):
    """The base class of the control socket's errors."""


class NobodyAnswers(ControlError):
    """No process answers on the control socket. If no process has the outbox open, use the directory itself."""

    def __init__(self, directory: Path, why: str) -> None:
        super().__init__(f"nobody answers for the outbox in {directory}: {why}")
        self.directory, self.why = directory, why


class CallRefused(ControlError):
    """The outbox answered with an error: `kind` is the name of its class, `why` its message."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind, self.why = kind, why


class BadControlMessage(ControlError):
    """The peer sent bytes that are no message of this protocol; the connection is closed."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the control socket: {why}")
        self.why = why


VERSION = 1
QUESTION_BYTES_MAX = 64 << 10
ANSWER_BYTES_MAX = 16 << 20
"""About 50,000 partitions in one status; of an outbox with more, ask for a part."""
UNSUPPORTED_VERSION, UNKNOWN_CALL, TOO_LARGE = "UnsupportedVersion", "UnknownCall", "AnswerTooLarge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A call: its name and its arguments."""

    call: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION


class Lines:
    """A decoder from bytes to JSON objects. After a BadControlMessage it can't be used any more."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The objects whose lines these bytes complete. Raises BadControlMessage."""
        self._buffer += data
        found = []
        while (end := self._buffer.find(b"\n")) >= 0:
            if end > self._bytes_max:
                break
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            found.append(_object_in(line))
        if len(self._buffer) > self._bytes_max:
            raise BadControlMessage(f"a line is longer than {self._bytes_max} bytes")
        return found


def question_bytes(question: Question) -> bytes:
    """Encode a question. Raises BadControlMessage if it is too long."""
    said = {"version": question.version, "call": question.call, "arguments": dict(question.arguments)}
    data = _line(said)
    if len(data) > QUESTION_BYTES_MAX:
        raise BadControlMessage(f"the question has {len(data)} bytes, {QUESTION_BYTES_MAX} at most")
    return data


def question_in(said: Mapping[str, Any]) -> Question:
    """The question in a received object. Raises BadControlMessage; CallRefused for another version."""
    version, call, arguments = said.get("version"), said.get("call"), said.get("arguments", {})
    if isinstance(version, bool) or not isinstance(version, int):
        raise BadControlMessage("a question names its version, a number")
    if version != VERSION:
        raise CallRefused(UNSUPPORTED_VERSION, f"version {version} is unknown here: call with version {VERSION}")
    if not isinstance(call, str) or not isinstance(arguments, dict):
        raise BadControlMessage("a question has a `call`, a text, and `arguments`, an object")
    return Question(call=call, arguments=arguments)


def answer_bytes(value: Any) -> bytes:
    """Encode a result. If it is too long, the answer is an error instead."""
    data = _line({"version": VERSION, "ok": value})
    if len(data) > ANSWER_BYTES_MAX:
        return refusal_bytes(TOO_LARGE, f"the answer has {len(data)} bytes, {ANSWER_BYTES_MAX} at most: ask for less")
    return data


def refusal_bytes(kind: str, why: str) -> bytes:
    """Encode an error answer."""
    return _line({"version": VERSION, "error": kind, "why": why})


def value_in(said: Mapping[str, Any]) -> Any:
    """The result in an answer. Raises CallRefused for an error answer, BadControlMessage."""
    if "error" in said:
        raise CallRefused(str(said["error"]), str(said.get("why", "")))
    if said.get("version") != VERSION or "ok" not in said:
        raise BadControlMessage("the message is no answer")
    return said["ok"]


def _line(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"


def _object_in(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadControlMessage(f"a line is no JSON: {type(error).__name__}") from error
    if not isinstance(said, dict):
        raise BadControlMessage(f"a line is no object, but {type(said).__name__}")
    return said


SOCKET_NAME = "control.sock"
_OWNER_ONLY = 0o600
_DESCRIPTORS = Path("/proc/self/fd")
_BACKLOG = 16


def listen_in(directory: Path) -> socket.socket:
    """A listening socket in this directory, in place of the socket of an earlier process. Raises OSError.

    The caller holds the directory's lock, so no other process listens.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK((directory / SOCKET_NAME).lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "the file is no socket", str(directory / SOCKET_NAME))
        (directory / SOCKET_NAME).unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(directory) as path:
            listener.bind(path)
        (directory / SOCKET_NAME).chmod(_OWNER_ONLY)  # no client can connect before `listen`
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def connect_to(directory: Path, timeout_s: float) -> socket.socket:
    """A connection to the socket in this directory. Raises OSError: FileNotFoundError or ConnectionRefusedError if no
    process listens.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with _short(directory) as path:
            connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def remove_socket(directory: Path) -> None:
    """Remove the socket's file, if it exists."""
    with suppress(OSError):
        (directory / SOCKET_NAME).unlink()


@contextmanager
def _short(directory: Path) -> Iterator[str]:
    """A path of the socket that is short enough, valid in the block."""
    if not _DESCRIPTORS.is_dir():
        yield str(directory / SOCKET_NAME)
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield str(_DESCRIPTORS / str(descriptor) / SOCKET_NAME)
    finally:
        os.close(descriptor)


TIMEOUT_S = 60.0
_READ_BYTES = 64 << 10


def ask(directory: Path, call: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float = TIMEOUT_S) -> Any:
    """Call the outbox in `directory`, and return its answer, a JSON value.

    timeout_s: the limit for connecting, and for each part of the answer. Raises NobodyAnswers, CallRefused,
    BadControlMessage.
    """
    try:
        with connect_to(directory, timeout_s) as connection:
            connection.sendall(question_bytes(Question(call=call, arguments=arguments or {})))
            return value_in(_first_line(connection))
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
        raise NobodyAnswers(directory, "no process has it open") from error
    except PermissionError as error:
        raise NobodyAnswers(directory, f"{SOCKET_NAME} is another user's") from error
    except TimeoutError as error:
        raise NobodyAnswers(directory, f"no answer within {timeout_s} s") from error
    except OSError as error:
        raise NobodyAnswers(directory, f"{SOCKET_NAME}: {error.strerror or error}") from error


def _first_line(connection: socket.socket) -> dict[str, Any]:
    lines = Lines(ANSWER_BYTES_MAX)
    while data := connection.recv(_READ_BYTES):
        if found := lines.feed(data):
            return found[0]
    raise BadControlMessage("it was closed before the answer")


_LOG = logging.getLogger("pushrep.outbox")
CONNECTIONS_MAX = 16
_IDLE_S = 30.0
_STOP_S = 5.0
_AGAIN_S = 0.5

Calls: TypeAlias = Mapping[str, Callable[[Mapping[str, Any]], Any]]
"""The functions for the calls, by name: from arguments to a JSON value. An exception becomes an error answer."""


class ControlServer:
    """Answers calls on the control socket of `directory` until `close`. Raises OSError if it can't listen."""

    def __init__(self, directory: Path, calls: Calls) -> None:
        self.directory, self._calls = directory.resolve(), calls
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._stopping = threading.Event()
        self._listener = listen_in(self.directory)
        self._listener.setblocking(False)
        refuse_in_forks(self)
        self._acceptor = _ACCEPTORS.acquire(None, _Acceptor)
        self._acceptor.add(self._listener, self._accept)

    def close(self) -> None:
        """Remove the socket's file, and wait up to 5 s for running calls. A second call does nothing."""
        with self._lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
        remove_socket(self.directory)
        self._acceptor.remove(self._listener)
        _ACCEPTORS.release(self._acceptor)
        self._listener.close()
        with self._lock:
            open_now = dict(self._open)
        deadline = monotonic() + _STOP_S
        for connection, thread in open_now.items():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # running calls are still answered
            thread.join(max(0.0, deadline - monotonic()))

    def disown(self) -> None:
        """In a forked child: close the copies of the sockets. The file stays, for the parent."""
        for copy in (self._listener, *self._open):
            copy.close()

    def _accept(self) -> None:
        """Accept a connection, and answer its calls in its own thread."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # the client hung up
            return
        except OSError as error:
            _LOG.warning("the control socket of %s: %s", self.directory, error)
            self._stopping.wait(_AGAIN_S)  # no descriptor is free, perhaps only for a moment
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
        except OSError as error:  # the peer sent nothing, read nothing or hung up
            _LOG.debug("the control socket: %s", error)
        finally:
            with self._lock:
                self._open.pop(connection, None)
            connection.close()


def answer_line(line: bytes, calls: Calls) -> bytes:
    """The answer to one question (a line without its end). Raises BadControlMessage."""
    (said,) = Lines(QUESTION_BYTES_MAX).feed(line + b"\n")
    return _answer(said, calls)


def _answer(said: Mapping[str, Any], calls: Calls) -> bytes:
    try:
        question = question_in(said)
        call = calls.get(question.call)
        if call is None:
            known = ", ".join(sorted(calls))
            return refusal_bytes(UNKNOWN_CALL, f"there is no call {question.call!r}, only {known}")
        return answer_bytes(call(question.arguments))
    except CallRefused as error:
        return refusal_bytes(error.kind, error.why)
    except BadControlMessage:
        raise
    except (PushrepError, OSError) as error:
        return refusal_bytes(type(error).__name__, str(error))
    except Exception as error:  # noqa: BLE001 - a bug ends one call, not the service
        _LOG.exception("the control socket: %r failed", said.get("call"))
        return refusal_bytes(type(error).__name__, f"it failed: {error}; the service's log has more")


class _Acceptor:
    """Waits for connections to all control sockets of this process, in one thread."""

    def __init__(self) -> None:
        self._poller = REAL_NETWORK.poller()
        self._todo: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="pushrep-control", daemon=True)
        self._thread.start()

    def add(self, listener: socket.socket, on_connect: Callable[[], None]) -> None:
        """From now on call `on_connect()`, in the acceptor's thread, when a client connects to `listener`."""
        self._do(lambda: self._poller.register(listener, READABLE, on_connect))

    def remove(self, listener: socket.socket) -> None:
        """Forget the listener. When this returns, its function is not called any more."""
        self._do(lambda: self._poller.unregister(listener))

    def end(self) -> None:
        """End the thread. The caller has removed every listener."""
        self._is_over = True
        self._poller.wake()
        self._thread.join()
        self._poller.close()

    def _do(self, act: Callable[[], object]) -> None:
        """Run `act` in the poller's thread, and wait for it: one thread has to register and select."""
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
                except Exception:  # noqa: BLE001 - an error of one socket must not stop the others
                    _LOG.exception("the control socket")


_ACCEPTORS = shared_by_process(_Acceptor.end)
