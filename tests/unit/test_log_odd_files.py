"""A file that is missing, not a regular file, or a link: each entry point of a log refuses it by name, and none writes
through it.

The entry points are a table, and so are the odd files. A call that blocks is ended by an alarm, and fails the test.
"""

import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from pushrep.env import REAL_FILESYSTEM
from pushrep.env.filesystem import IS_DIRECTORY, IS_NO_FILE
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.verify import verify_log
from pushrep.outbox import Outbox, OutboxConfig
from pushrep.replay import TO_END, ReplayClient, ReplayRequest
from pushrep.replicate.connecting import ReplicaClient
from pushrep.replicate.node_settings import NodeSettings
from pushrep.replicate.replica_node import ReplicaNode
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.push_messages import DescribeLogRequest, DescribeLogResponse

pytestmark = pytest.mark.usefixtures("closes_its_files")

OUTBOX = UUID(int=1)
SMALL = LogConfig(segment_bytes=2048, index_interval_bytes=64)
WAIT_S = 120
"""So long nothing may take here; the machine may be busy."""


def open_log(log: Path) -> Any:
    with SegmentLog.open(log, SMALL) as opened:
        if opened.damaged_from is not None:
            raise AssertionError(f"damaged from offset {opened.damaged_from} on")
        return list(opened.records(opened.log_start_offset))


def read_all(log: Path) -> Any:
    with SegmentLog.open_reader(log) as reader:
        return list(reader.records(0))


def read_bytes(log: Path) -> Any:
    with SegmentLog.open_reader(log) as reader:
        return [reader.read(at, 100) for at in range(0, 200, 10)]


def read_since(log: Path) -> Any:
    with SegmentLog.open_reader(log) as reader:
        return reader.offset_for_timestamp(100)


def replay_all(log: Path) -> Any:
    with ReplayClient(log.parent) as client:
        return list(client.replay(ReplayRequest(log.name, position=0, length=TO_END)))


def verify_all(log: Path) -> Any:
    found = verify_log(log).findings
    if found:
        raise AssertionError(" ".join(f"{f.file}: {f.reason}" for f in found))
    return found


WAYS: dict[str, Callable[[Path], Any]] = {
    "opening": open_log,
    "records": read_all,
    "read": read_bytes,
    "offset_for_timestamp": read_since,
    "replay": replay_all,
    "verify": verify_all,
}


def missing(path: Path) -> None:
    path.unlink()


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def dangling(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("nothing"))


def sparse(path: Path) -> None:
    path.unlink()
    with path.open("wb") as file:
        file.truncate(3 << 30)


def behind_a_hole(path: Path) -> None:
    os.truncate(path, 3 << 30)


ODD: dict[str, Callable[[Path], None]] = {
    kind.__name__: kind for kind in (missing, directory, pipe, dangling, sparse, behind_a_hole)
}


@pytest.fixture
def log(tmp_path: Path, made: Path) -> Path:
    return shutil.copytree(made, tmp_path / "logs") / "orders-0"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "orders-0"
    with SegmentLog.open(path, SMALL) as opened:
        for first in range(0, 200, 10):
            values = [b"%06d" % n + b"." * 20 for n in range(first, first + 10)]
            opened.append(values, timestamps_ms=list(range(first, first + 10)), durability=Durability.BUFFERED)
    assert len(list(path.glob("*.log"))) >= 3
    return path.parent


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """End a call that would wait or scan without end."""

    def too_long(*_: object) -> None:
        raise AssertionError(f"it took more than {WAIT_S} seconds")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(WAIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def fill(log: Path) -> None:
    with SegmentLog.open(log, SMALL) as opened:
        for _ in range(100):
            opened.append(b"more" * 50)


def told(do: Callable[[], Any]) -> Any:
    """The result of the call, or the text of its error."""
    try:
        return do()
    except Exception as error:  # noqa: BLE001 - as in `named`
        return str(error)


def named(way: Callable[[Path], Any], log: Path, *names: str) -> None:
    with pytest.raises(Exception) as refused:  # noqa: PT011 - which error it is differs; that it names the file is held
        way(log)
    told = str(refused.value)
    assert any(name in told for name in names), f"{type(refused.value).__name__}: {told}"


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("which", [0, 1, -1], ids=["first", "middle", "newest"])
def test_a_segment_that_is_no_plain_file_is_named_at_once(log, which, way, kind):
    """identity P3."""
    segments = sorted(log.glob("*.log"))
    if way == "opening":
        crash(log)
    ODD[kind](segments[which])
    if way == "offset_for_timestamp":
        # What the answer does not need may be as it is.
        answer = told(lambda: WAYS[way](log))
        assert answer in {100, None} if kind == "missing" else answer == 100 or segments[which].name in answer
        return
    before = looks(log)
    # What is missing is told by the name of the segment before it, of itself, or by what is known of its offsets.
    names = [segments[which].name]
    if kind == "missing":
        names += [segments[which - 1].name, "starts at", "the log holds", "offset 0", "from offset 150"]
    named(WAYS[way], log, *names)
    if way != "opening":
        assert looks(log) == before, "who only reads changed something"


def looks(log: Path) -> dict[Path, tuple[int, int, int]]:
    found = {path: path.lstat() for path in log.iterdir()}
    return {path: (stat.st_mode, stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


def crash(log: Path) -> None:
    """The directory after a kill: without the clean marker."""
    (log.parent / ".pushrep_cleanshutdown").unlink()


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize(("mode", "why"), [(stat.S_IFDIR, IS_DIRECTORY), (stat.S_IFSOCK, IS_NO_FILE)])
def test_what_stands_there_is_said_in_words(tmp_path, mode, why, writable):
    """identity P3."""
    path = tmp_path / "it"
    if mode == stat.S_IFDIR:
        path.mkdir()
    else:
        os.mknod(path, mode | 0o600)
    with pytest.raises(OSError, match=why) as refused:
        REAL_FILESYSTEM.open(path, writable=writable)
    assert refused.value.filename == str(path)


def test_an_error_of_a_descriptor_names_its_file(tmp_path):
    """Calls by descriptor leave the name out; "Invalid argument" alone came out of a reader with a rotten index."""
    file = REAL_FILESYSTEM.open(tmp_path / "it", create=True)
    with pytest.raises(OSError, match="Invalid argument") as refused:
        file.read_at(1, -1)
    file.close()
    assert refused.value.filename == str(tmp_path / "it")


SMALL_FILES = (
    "orders-0/{last}.index",
    "orders-0/{last}.timeindex",
    "orders-0/leader-epoch-checkpoint",
    "orders-0/partition.metadata",
    "recovery-point-offset-checkpoint",
    "replication-offset-checkpoint",
    "log-start-offset-checkpoint",
    ".pushrep_published",
    ".pushrep_cleanshutdown",
    ".pushrep_reserve",
    ".lock",
    "cleaner-offset-checkpoint",
    "given-up-offset-checkpoint",
    "orders-0/leader-epoch-checkpoint.crc32c",
)


@pytest.mark.parametrize("kind", ["directory", "pipe", "dangling"])
@pytest.mark.parametrize("name", SMALL_FILES)
def test_a_small_file_that_is_no_plain_file_is_named_at_once(log, name, kind):
    """identity P3."""
    last = max(path.stem for path in log.glob("*.log"))
    path = log.parent / name.format(last=last)
    if not path.exists():
        path.write_bytes(b"")
    ODD[kind](path)
    named(open_log, log, path.name)


@pytest.mark.parametrize("name", [*SMALL_FILES, "orders-0/{last}.log", "orders-0/{last}.seal", "directory-id.json"])
@pytest.mark.parametrize("kept", ["empty", "full"])
def test_nothing_is_written_through_a_link(log, name, kept, tmp_path):
    """identity P3: whatever a link leads to keeps its bytes, and the link is named or left alone."""
    last = max(path.stem for path in log.glob("*.log"))
    path = log.parent / name.format(last=last)
    victim = tmp_path / "of another owner"
    victim.write_bytes(b"" if kept == "empty" else b"another owner's bytes" * 100)
    before = victim.read_bytes()
    path.unlink(missing_ok=True)
    path.symlink_to(victim)
    answer = told(lambda: fill(log))
    assert answer is None or path.name in answer or "is damaged from" in answer
    assert victim.read_bytes() == before


OF_OUTBOX = (
    "outbox.json",
    "directory-id.json",
    "promises.json",
    "destinations.json",
    "settings.json",
    "orders-0/outbox-positions",
)


@pytest.fixture(scope="module")
def made_outbox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "outbox"
    open_outbox(path)
    return path


def open_outbox(path: Path) -> None:
    with Outbox.open(path, "orders", partitions=1, producer="billing", config=OutboxConfig(copy_check=False)) as outbox:
        outbox.append(0, b"value").result(WAIT_S)


@pytest.mark.parametrize("kind", ["pipe", "dangling"])
@pytest.mark.parametrize("name", OF_OUTBOX)
def test_a_file_of_an_outbox_that_is_no_plain_file_is_named_at_once(made_outbox, tmp_path, name, kind):
    """identity P3."""
    path = shutil.copytree(made_outbox, tmp_path / "outbox") / name
    if not path.exists():
        path.write_bytes(b"")
    ODD[kind](path)
    named(open_outbox, tmp_path / "outbox", path.name)


@pytest.mark.parametrize("name", OF_OUTBOX)
def test_no_file_of_an_outbox_is_written_through_a_link(made_outbox, tmp_path, name):
    """identity P3."""
    path = shutil.copytree(made_outbox, tmp_path / "outbox") / name
    victim = tmp_path / "of another owner"
    victim.write_bytes(path.read_bytes() if path.exists() else b"another owner's bytes")
    before = victim.read_bytes()
    path.unlink(missing_ok=True)
    path.symlink_to(victim)
    told(lambda: open_outbox(tmp_path / "outbox"))
    assert victim.read_bytes() == before
    assert path.is_symlink(), "and none is put in its place"


OF_NODE = (
    ".lock",
    "replica-epoch.json",
    "{outbox}/owner.json",
    "{outbox}/promises.json",
    "{outbox}/.pushrep_recordings",
)


@pytest.mark.parametrize("name", OF_NODE)
def test_no_file_of_a_node_is_written_through_a_link(tmp_path, name):
    """identity P3."""
    victim, directory = tmp_path / "of another owner", tmp_path / "node"
    victim.write_bytes(b"another owner's bytes" * 100)
    path = directory / name.format(outbox=OUTBOX)
    path.parent.mkdir(parents=True)
    path.symlink_to(victim)
    told(lambda: describe(directory))
    assert victim.read_bytes() == b"another owner's bytes" * 100
    assert path.is_symlink(), "and none is put in its place"


def describe(directory: Path) -> None:
    """A leader looks at an outbox of a node, for the first time, and a recording is made there."""
    settings = NodeSettings(address=Address("127.0.0.1", 0), allow=frozenset({"any"}))
    tp = TopicIdPartition(UUID(int=2), "orders", 0)
    with ReplicaNode(directory, settings) as node, ReplicaClient(node.address, PushSettings()) as client:
        client.ask(DescribeLogRequest(outbox_id=OUTBOX, create=True, partitions=(tp,)), DescribeLogResponse)
