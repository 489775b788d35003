"""An outbox and its nodes in separate processes, one of which is killed at a named step of a change of members.

    step     the n-th time, since it was told to, that a file of promises, members or epochs is replaced, or that a
             directory of theirs is made
    point    TORN: half of the new file is written · BEFORE: the rename · AFTER: it, before anybody hears of it

The processes are forked, which takes milliseconds. Each writes its lines to a socket; the end of the socket is its end.
"""

import json
import os
import signal
import socket
import threading
import time
import traceback
from enum import Enum
from functools import partial
from pathlib import Path
from select import select
from typing import NamedTuple

from pushrep import Acks, Durability, LogConfig, Outbox, OutboxConfig, PushrepError
from pushrep.env import RealFilesystem
from pushrep.env.threads import SystemClock
from pushrep.log import SegmentLog
from pushrep.outbox import DeliveryFailed, OutboxDiffers
from pushrep.outbox.member_changes import Phase, add_member, remove_member
from pushrep.replicate.certificates import CertificateFiles, mutual_tls
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address

WAIT_S = 120
WATCHED = frozenset(
    {
        "leader-epoch-checkpoint",
        "leader-epoch-checkpoint.crc32c",
        "outbox.json",
        "partition.metadata",
        "promises.json",
    }
)
DIRECTORY = "a directory"
_SMALL = LogConfig(preallocate_bytes=0)
_TEMP = ".tmp"


class Point(Enum):
    """The place in a step where the process is killed."""

    TORN = "torn"
    BEFORE = "before"
    AFTER = "after"


class Kill(NamedTuple):
    """The process ends with SIGKILL at this point of the `step`-th step from now on, counted from 1."""

    step: int
    point: Point


class Killing(RealFilesystem):
    """A file system that counts steps once it is armed, and kills its process at the chosen one."""

    def __init__(self, told: Path, sync_s: float = 0) -> None:
        self._told, self._kill, self._left, self._at = told, None, 0, None
        self._sync_s = sync_s
        self._lock = threading.Lock()

    def arm(self, kill):
        with self._lock:
            self._kill, self._left, self._at = kill, kill.step, None

    def open(self, path, *, create=False, writable=True):
        file = super().open(path, create=create, writable=writable)
        if create and path.name.endswith(_TEMP) and self._begins(path.with_suffix(""), path.name[: -len(_TEMP)]):
            return _Torn(file, self) if self._kill.point is Point.TORN else file
        return _Slow(file, self._sync_s) if self._sync_s and path.suffix == ".log" else file

    def rename(self, source, target):
        if target != self._at:
            super().rename(source, target)
            return
        if self._kill.point is Point.BEFORE:
            self.die()
        super().rename(source, target)
        self.die()

    def make_directory(self, path):
        if self.exists(path):
            return
        if self._begins(path, "promises.json"):
            if self._kill.point is Point.AFTER:
                super().make_directory(path)
            self.die()
        super().make_directory(path)

    def die(self):
        self._told.write_text(self._at.name if self._at.name in WATCHED else DIRECTORY)
        os.kill(os.getpid(), signal.SIGKILL)

    def _begins(self, path, name):
        with self._lock:
            if self._kill is None or self._at is not None or name not in WATCHED:
                return False
            self._left -= 1
            if self._left == 0:
                self._at = path
            return self._left == 0


class _Torn:
    """A file of which half is written."""

    def __init__(self, file, filesystem):
        self._file, self._filesystem = file, filesystem

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write_at(self, data, position):
        self._file.write_at(bytes(data)[: len(data) // 2], position)
        self._filesystem.die()


class _Slow:
    """A file of a slow disk."""

    def __init__(self, file, sync_s):
        self._file, self._sync_s = file, sync_s

    def __getattr__(self, name):
        return getattr(self._file, name)

    def sync(self):
        time.sleep(self._sync_s)
        self._file.sync()


class Child:
    """A forked process: `work(socket)` in it, lines here."""

    def __init__(self, siblings, work):
        self.socket, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                for one in (self, *siblings):
                    one.socket.close()
                work(theirs)
                code = 0
            except BaseException:  # noqa: BLE001 - it goes no further than this process
                traceback.print_exc()
            finally:
                os._exit(code)
        theirs.close()
        self._lines = self.socket.makefile("r")
        self.code = None

    def tell(self, *words):
        self.socket.sendall((json.dumps(words) + "\n").encode())

    def hear(self):
        """The next line of the process; None if it is dead."""
        assert select([self.socket], [], [], WAIT_S)[0], "it says nothing"
        try:
            line = self._lines.readline()
        except ConnectionResetError:
            line = ""
        if not line.endswith("\n"):
            self.end()
            return None
        return json.loads(line)

    def ask(self, *words):
        self.tell(*words)
        answer = self.hear()
        assert answer is not None, f"it died of {words}: {self.code}"
        return answer

    def end(self):
        """Kill it if it lives."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._lines.close()
            self.socket.close()


def _commands(line):
    with line.makefile("r") as lines:
        for text in lines:
            yield json.loads(text)


def _say(line, *words):
    line.sendall((json.dumps(words) + "\n").encode())


def serve(line, directory, listen, told, tls=None, sync_s=0):
    """A node that runs until its control socket closes. tls: the directory of its certificate; only `billing` may
    lead.
    """
    filesystem = Killing(told, sync_s)
    allow, files = "any", None
    if tls is not None:
        allow, files = "billing", CertificateFiles(tls / "127.0.0.1.pem", tls / "127.0.0.1.key", tls / "ca.pem")
    settings = NodeSettings(
        address=Address.parse(listen), allow=frozenset({allow}), certificates=files, log_config=_SMALL
    )
    node = ReplicaNode(directory, settings, filesystem=filesystem)
    _say(line, str(node.address))
    for word, *given in _commands(line):
        if word == "arm":
            filesystem.arm(Kill(given[0], Point(given[1])))
        elif word == "reload":
            node.reload()
        elif word == "jump":
            jump(given[0])
        _say(line, word)


def jump(ms):
    """This process's wall clock, for good."""
    before = SystemClock.wall_ms
    SystemClock.wall_ms = lambda clock: before(clock) + ms


def lead(line, root, replicas, told, kill, tls=None):
    """A service that appends one record after the other, and executes commands meanwhile."""
    filesystem = Killing(told)
    if kill is not None:
        filesystem.arm(kill)
    shown = _shown(tls)
    try:
        outbox = Outbox.open(
            root / "outbox",
            "orders",
            1,
            "billing",
            replicas=replicas,
            acks=Acks.ALL,
            durability=Durability.BUFFERED,
            filesystem=filesystem,
            config=OutboxConfig(
                linger_ms=0,
                delivery_timeout_ms=100,
                open_timeout_s=WAIT_S,
                log_config=_SMALL,
                push=PushSettings(backoff_min_ms=1, backoff_max_ms=50, watermark_linger_ms=1, tls=shown),
            ),
        )
    except OutboxDiffers as error:
        _say(line, "differs", error.stored)
        return
    _say(line, "open")
    producing = Producing(outbox, root / "acked")
    for word, *given in _commands(line):
        if word == "arm":
            filesystem.arm(Kill(given[0], Point(given[1])))
            _say(line, "armed")
        elif word in {"reload", "jump"}:
            jump(given[0]) if word == "jump" else shown.reload()
            _say(line, word)
        elif word == "append":
            _say(line, *producing.append())
        elif word == "produce":
            producing.start()
            _say(line, "produces")
        elif word == "rest":
            producing.stop()
            _say(line, "rests")
        elif word in {"members", "lag", "troubles"}:
            _say(line, *_told(outbox, word))
        elif word == "add":
            _say(line, *_finished(partial(add_member, outbox.facts, *given)))
        elif word == "remove":
            _say(line, *_finished(partial(remove_member, outbox.facts, *given)))


def _shown(tls):
    if tls is None:
        return None
    return mutual_tls(cert=tls / "billing.pem", key=tls / "billing.key", ca=tls / "ca.pem")


def _told(outbox, word):
    if word == "lag":
        return [one.records + one.partitions - one.in_sync for one in outbox.lag().values()]
    if word == "troubles":
        return [str(one) for one in outbox.status().members]
    grant = outbox.facts.replication.grant
    if grant is None:  # it is about to lead by another one, which names a directory
        return [[], []]
    return [[one.index for one in members] for members in (grant.members, grant.previous_members)]


def _finished(step):
    """Steps until the change is done, whatever refuses one meanwhile; who it was about, and all members."""
    pause, last = threading.Event(), None
    for _ in range(WAIT_S * 100):
        try:
            done = step()
            if done.phase is Phase.DONE:
                return done.member, [one.index for one in done.members]
        except PushrepError as error:
            last = error
        pause.wait(0.01)
    raise AssertionError("it is never done") from last


class Producing:
    """Appends with ALL; what was acknowledged is in a file, `offset value` a line, before anything else happens."""

    def __init__(self, outbox, acked):
        self._outbox, self._acked = outbox, os.open(acked, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._number, self._stop, self._thread = 0, threading.Event(), None

    def append(self):
        value = f"{os.getpid()}-{self._number}"
        self._number += 1
        try:
            offset = self._outbox.append(0, value.encode()).result(WAIT_S)
        except (DeliveryFailed, PushrepError) as error:
            return "refused", type(error.__cause__ or error).__name__
        os.write(self._acked, f"{offset} {value}\n".encode())
        return ("acked",)

    def start(self):
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self):
        self._stop.set()
        self._thread.join()

    def _run(self):
        while not self._stop.wait(0.01):
            self.append()


class World:
    """The service in `outbox`, the nodes in directories by their names."""

    def __init__(self, root, tls=None):
        root.mkdir()
        self.root, self.told, self.tls = root, root / "step", tls
        self.nodes, self.addresses, self.leader = {}, {}, None
        self._ports = []

    def _child(self, work):
        living = [one for one in (self.leader, *self.nodes.values()) if one is not None and one.code is None]
        return Child(living, work)

    def serve(self, name, sync_s=0):
        """Start the node, where it was before. sync_s: how long each sync of a segment lasts at least."""
        if name not in self.addresses:
            self.addresses[name] = self._new_address()
        listen = self.addresses[name]
        node = self._child(lambda line: serve(line, self.root / name, listen, self.told, self.tls, sync_s))
        self.nodes[name] = node
        assert node.hear() == [listen]

    def _new_address(self):
        """An address that no other process gets while the node is down: a socket is bound to it."""
        port = socket.socket()
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        self._ports.append(port)
        return f"127.0.0.1:{port.getsockname()[1]}"

    def lead(self, names, kill=None):
        """Open the outbox with these nodes, or with those that it names where they are others; False if it died."""
        replicas = [self.addresses[name] for name in names]
        while True:
            self.leader = self._child(lambda line: lead(line, self.root, replicas, self.told, kill, self.tls))  # noqa: B023
            heard = self.leader.hear()
            if heard is None or heard[0] == "open":
                return heard is not None
            replicas = heard[1]
            self.leader.end()

    def revive(self, names, timeout_s=0.0):
        """Wait so long for a word of the service or the death of one of these nodes; they are started again."""
        nodes = {self.nodes[name].socket: name for name in names if name in self.nodes}
        ready, _, _ = select([self.leader.socket, *nodes], [], [], timeout_s)
        for name in [nodes[one] for one in ready if one in nodes]:
            node = self.nodes[name]
            assert (node.hear(), node.code) == (None, -signal.SIGKILL), "a node says nothing unasked"
            self.serve(name)
        return self.leader.socket in ready

    def wait_for_all(self, names):
        """Wait until every member holds everything and is in sync; these nodes may be killed meanwhile."""
        pause = threading.Event()
        for _ in range(WAIT_S * 100):
            if not any(self.leader.ask("lag")):
                return
            self.revive(names)
            pause.wait(0.01)
        raise AssertionError(f"never caught up: {self.leader.ask('lag')}, {self.leader.ask('troubles')}")

    def wait_for_members(self, indexes):
        """Wait until the members are these, and no change is in progress."""
        pause = threading.Event()
        for _ in range(WAIT_S * 100):
            if (found := self.leader.ask("members")) == [indexes, []]:
                return
            pause.wait(0.01)
        raise AssertionError(f"the members are {found}, not {indexes}")

    def append(self):
        """A record that all members acknowledge; on a slow disk not the first one in time."""
        for _ in range(WAIT_S * 10):
            if self.leader.ask("append") == ["acked"]:
                return
        raise AssertionError("nothing is acknowledged")

    def acked(self):
        """The acknowledged values by offset."""
        lines = (self.root / "acked").read_text().splitlines()
        acked = {}
        for line in lines:
            offset, value = line.split()
            assert acked.setdefault(int(offset), value) == value, f"offset {offset} was acknowledged twice"
        return acked

    def held(self, name):
        """The records in the copy of a node, or in the outbox, by offset."""
        (place,) = [self.root / name] if name == "outbox" else (self.root / name).glob("*-*-*-*-*")
        with SegmentLog.open_reader(place / "orders-0", isolation="written") as reader:
            return {record.offset: record.value.decode() for record in reader.records(0)}

    def close(self):
        for child in (self.leader, *self.nodes.values()):
            if child is not None:
                child.end()
        for port in self._ports:
            port.close()
