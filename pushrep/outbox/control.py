r"""The control socket of an open outbox, and of a node: the command line asks a running service over it.

    ControlServer(directory, calls_of)      in the service; Outbox.open makes one
    ask(directory, "status")                from any process of the same user

    <directory>/control.sock, mode 0600     one JSON object a line: a question, then its answer
    ▶ {"version": 1, "call": "status", "arguments": {}}\n
    ◀ {"version": 1, "ok": {...}}\n
    ◀ {"version": 1, "error": "NotLeader", "why": "..."}\n       instead, if the call is refused

Versions: a question contains its version. A server that does not know the version answers with the error
UnsupportedVersion in its own version. To a line above the limit, or one that is no question, it answers with the error
BadControlMessage, and closes the connection.

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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from filtering.closing import ClosedAtExit, closed_on_error
from pushrep.env import READABLE, REAL_NETWORK, refuse_in_forks, shared_by_process
from pushrep.env.checked_json import BadJsonFile, parse_json
from pushrep.errors import PushrepError


class NobodyAnswers(PushrepError):
    """No process answers on the control socket. If no process has the outbox open, use the directory itself."""

    def __init__(self, directory: Path, why: str) -> None:
        super().__init__(f"nobody answers for the outbox in {directory}: {why}")
        self.directory, self.why = directory, why


class CallRefused(PushrepError):
    """The other side answered with an error, or with bytes that are no answer. `kind` is the name of the error's class,
    `why` its message.
    """

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind, self.why = kind, why


VERSION = 1
QUESTION_BYTES_MAX = 64 << 10
_BAD_MESSAGE = "BadControlMessage"


def _line(**said: Any) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"


def _object_in(line: bytes) -> dict[str, Any]:
    """The object in a line. Raises CallRefused of the kind `_BAD_MESSAGE`."""
    if not line.endswith(b"\n"):
        raise CallRefused(
            _BAD_MESSAGE, f"the connection ended in a line, or it has more than {QUESTION_BYTES_MAX} bytes"
        )
    try:
        said = parse_json(line)
    except BadJsonFile as error:
        raise CallRefused(_BAD_MESSAGE, f"a line can't be read: {error}") from error
    if not isinstance(said, dict):
        raise CallRefused(_BAD_MESSAGE, f"a line is no object, but {type(said).__name__}")
    return said


SOCKET_NAME = "control.sock"
_OWNER_ONLY = 0o600
_DESCRIPTORS = Path("/proc/self/fd")
_BACKLOG = 16


def _listen_in(directory: Path) -> socket.socket:
    """A listening socket in this directory, in place of the socket of an earlier process. Raises OSError.

    The caller holds the directory's lock, so no other process listens.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK((directory / SOCKET_NAME).lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "the file is no socket", str(directory / SOCKET_NAME))
        (directory / SOCKET_NAME).unlink()
    with closed_on_error(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        with _short(directory) as path:
            listener.bind(path)
        (directory / SOCKET_NAME).chmod(_OWNER_ONLY)  # no client can connect before `listen`
        listener.listen(_BACKLOG)
    return listener


def connect_to(directory: Path, timeout_s: float) -> socket.socket:
    """A connection to the socket in this directory. Raises OSError: FileNotFoundError or ConnectionRefusedError if no
    process listens.
    """
    with closed_on_error(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        connection.settimeout(timeout_s)
        with _short(directory) as path:
            connection.connect(path)
    return connection


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


def ask(directory: Path, call: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float = 60.0) -> Any:
    """Call the outbox in `directory`, and return its answer, a JSON value.

    timeout_s: the limit for connecting, and for each part of the answer. Raises NobodyAnswers, CallRefused.
    """
    try:
        with connect_to(directory, timeout_s) as connection:
            return ask_over(connection, call, arguments or {})
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
        raise NobodyAnswers(directory, "no process has it open") from error
    except PermissionError as error:
        raise NobodyAnswers(directory, f"{SOCKET_NAME} is another user's") from error
    except TimeoutError as error:
        raise NobodyAnswers(directory, f"no answer within {timeout_s} s") from error
    except OSError as error:
        raise NobodyAnswers(directory, f"{SOCKET_NAME}: {error.strerror or error}") from error


def ask_over(connection: socket.socket, call: str, arguments: Mapping[str, Any]) -> Any:
    """As `ask`, over an open connection. Raises CallRefused, OSError."""
    connection.sendall(_line(version=VERSION, call=call, arguments=arguments))
    with connection.makefile("rb") as lines:
        answer = _object_in(lines.readline())
    if "error" in answer:
        raise CallRefused(str(answer["error"]), str(answer.get("why", "")))
    if answer.get("version") != VERSION or "ok" not in answer:
        raise CallRefused(_BAD_MESSAGE, "the message is no answer")
    return answer["ok"]


_LOG = logging.getLogger("pushrep.outbox")
CONNECTIONS_MAX = 64
_IDLE_S = 30.0
_STOP_S = 5.0
_AGAIN_S = 0.5


class ControlPeer(NamedTuple):
    """Who calls. held: closed when the connection ends."""

    connection: socket.socket
    held: ExitStack


Calls: TypeAlias = Mapping[str, Callable[[Mapping[str, Any]], Any]]
"""The functions for the calls, by name: from arguments to a JSON value. An exception becomes an error answer."""


class ControlServer(ClosedAtExit):
    """Answers on the control socket of `directory` until `close`. calls_of(peer): the calls on a new connection.

    Raises OSError if it can't listen.
    """

    def __init__(self, directory: Path, calls_of: Callable[[ControlPeer], Calls]) -> None:
        self.directory, self._calls_of = directory.resolve(), calls_of
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._stopping = threading.Event()
        self._listener = _listen_in(self.directory)
        self._inode = (self.directory / SOCKET_NAME).lstat().st_ino
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
        path = self.directory / SOCKET_NAME
        with suppress(OSError):
            if path.lstat().st_ino == self._inode:  # else it is another's, at the path of a directory that was moved
                path.unlink()
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
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            _LOG.warning("the control socket of %s: %s", self.directory, error)
            self._stopping.wait(_AGAIN_S)  # no descriptor is free, perhaps only for a moment
            return
        connection.settimeout(_IDLE_S)
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
        try:
            with connection.makefile("rb") as lines, ExitStack() as held:
                calls, is_sound = self._calls_of(ControlPeer(connection, held)), True
                while is_sound and (line := lines.readline(QUESTION_BYTES_MAX + 1)):
                    try:
                        answer = _answer(line, calls)
                    except CallRefused as error:
                        is_sound = error.kind != _BAD_MESSAGE
                        answer = _line(version=VERSION, error=error.kind, why=error.why)
                    connection.sendall(answer)
        except (OSError, PushrepError) as error:  # the peer sent nothing, read nothing or hung up
            _LOG.debug("the control socket of %s: %s", self.directory, error)
        finally:
            with self._lock:
                self._open.pop(connection, None)
            connection.close()


def _answer(line: bytes, calls: Calls) -> bytes:
    question = _object_in(line)
    version, name, arguments = question.get("version"), question.get("call"), question.get("arguments", {})
    if version != VERSION:
        raise CallRefused("UnsupportedVersion", f"version {version} is unknown here: call with version {VERSION}")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise CallRefused(_BAD_MESSAGE, "a question has a `call`, a text, and `arguments`, an object")
    if (call := calls.get(name)) is None:
        raise CallRefused("UnknownCall", f"there is no call {name!r}, only {', '.join(sorted(calls))}")
    try:
        return _line(version=VERSION, ok=call(arguments))
    except (PushrepError, OSError) as error:
        raise CallRefused(type(error).__name__, str(error)) from error
    except Exception as error:
        _LOG.exception("the control socket: %r failed", name)
        raise CallRefused(type(error).__name__, f"it failed: {error}; the service's log has more") from error


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
