"""One side of `benchmarks.pairs`: does a piece of work when told so, with the pushrep that PYTHONPATH names.

Run as a file, so that nothing of this tree is imported. Each line of its input asks for one turn; the answer is the
processor time of it in seconds, all threads, and the wall time. `--turns N` does N turns without being asked, for
`valgrind --tool=callgrind`.
"""

import gc
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from pushrep import outbox as outbox_room
from pushrep.env import SYSTEM_CLOCK
from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.log.verify import verify_log
from pushrep.outbox import Outbox
from pushrep.records import encode_batch
from pushrep.replay import TO_END, ReplayClient, ReplayRequest

try:
    from pushrep.election.grants import Grant, Member
    from pushrep.replicate.leading import Leading
    from pushrep.replicate.node_settings import NodeSettings
    from pushrep.replicate.replica_node import ReplicaNode
    from pushrep.replicate.settings import PushSettings, Replica
    from pushrep.replicate.sockets import Address
except ImportError:  # a tree from before these rooms had their names
    from pushrep.node import NodeSettings, ReplicaNode
    from pushrep.push.leading import Leading
    from pushrep.push.settings import PushSettings, Replica
    from pushrep.push.sockets import Address
    from pushrep.replication.grants import Grant, Member

Turn = Callable[[], float]  # processor seconds
QUIET = {"flush_ms": 3_600_000, "flush_bytes": 1 << 40}  # a flush beside a turn costs what the disk is busy with
WAIT_S = 60.0
LINGER_MS = 60_000  # each watermark rides with the next record: how many go alone depends on who is quick


def _timed(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _values(count: int, size_bytes: int) -> list[bytes]:
    source = random.Random(1)
    return [source.randbytes(size_bytes) for _ in range(count)]


def _outbox_settings(**given: Any) -> dict[str, Any]:
    """Settings of Outbox.open: a tree from before OutboxConfig takes them one by one."""
    made = getattr(outbox_room, "OutboxConfig", None)
    return given if made is None else {"config": made(**given)}


@contextmanager
def _append(root: Path, size_bytes: int, count: int) -> Iterator[Turn]:
    """Batches of one record to a log of their own, into the page cache."""
    batch = encode_batch(_values(1, size_bytes), timestamps_ms=1)

    def turn() -> float:
        path = root / "orders-0"
        try:
            with SegmentLog.open(path, LogConfig(**QUIET)) as log:
                append, buffered = log.append, Durability.BUFFERED
                append(batch, durability=buffered)

                def work() -> None:
                    for _ in range(count):
                        append(batch, durability=buffered)

                return _timed(work)
        finally:
            shutil.rmtree(root)
            root.mkdir()

    yield turn


@contextmanager
def _outbox(root: Path, count: int) -> Iterator[Turn]:
    values = _values(count, 100)

    def turn() -> float:
        try:
            with Outbox.open(root / "outbox", topic="orders", partitions=1, producer="benchmark") as outbox:

                def work() -> None:
                    for receipt in [outbox.append(0, value) for value in values]:
                        receipt.result()

                outbox.append(0, values[0]).result()
                return _timed(work)
        finally:
            shutil.rmtree(root)
            root.mkdir()

    yield turn


@contextmanager
def _node(root: Path) -> Iterator[ReplicaNode]:
    settings = NodeSettings(address=Address("127.0.0.1", 0), allow=frozenset({"any"}), log_config=LogConfig(**QUIET))
    with ReplicaNode(root / "node", settings) as node:
        yield node


@contextmanager
def _push(root: Path, size_bytes: int, per_batch: int, count: int) -> Iterator[Turn]:
    """Leader and node in one process: batch by batch, each acknowledged before the next."""
    values = _values(per_batch, size_bytes)
    with ExitStack() as stack:
        node = stack.enter_context(_node(root))
        grant = Grant(
            outbox_id=uuid4(),
            epoch=256,
            leader=0,
            members=(Member(0), Member(1)),
            min_insync_replicas=2,
            members_epoch=256,
            pid_epoch=0,
            topic_id=UUID(int=1),
            topic="orders",
            partitions=1,
            carrier="key",
        )
        config = LogConfig(**QUIET)
        log = stack.enter_context(SegmentLog.open(root / "leader" / "orders-0", config, has_replicas=True))
        leading = Leading(
            grant.outbox_id,
            grant,
            {0: log},
            [Replica(1, node.address)],
            durability=Durability.BUFFERED,
            settings=PushSettings(watermark_linger_ms=LINGER_MS),
        )
        leading.start()
        stack.callback(leading.close)
        done = threading.Event()

        def one() -> None:
            batch = encode_batch(values, timestamps_ms=1)
            result = log.append(batch, durability=Durability.BUFFERED)
            done.clear()
            leading.partitions[0].on_append(result.base_offset, [batch], SYSTEM_CLOCK.monotonic_ms())
            leading.partitions[0].when_replicated(log.log_end_offset, lambda _: done.set())
            if not done.wait(WAIT_S):
                raise TimeoutError("not acknowledged")

        def work() -> None:
            for _ in range(count):
                one()

        one()
        yield lambda: _timed(work)


def _filled(path: Path, size_bytes: int, batch_bytes: int, *, per_value: int = 1000) -> None:
    values = _values(batch_bytes // per_value, per_value)
    with SegmentLog.open(path, LogConfig(segment_bytes=16 << 20)) as log:
        for _ in range(size_bytes // batch_bytes):
            log.append(encode_batch(values, timestamps_ms=1), durability=Durability.BUFFERED)


@contextmanager
def _replay(root: Path, size_bytes: int, batch_bytes: int, times: int, *, records: bool = False) -> Iterator[Turn]:
    _filled(root / "orders-0", size_bytes, batch_bytes)
    with ReplayClient(root) as client:

        def work() -> None:
            for _ in range(times):
                replay = client.replay(ReplayRequest("orders-0", length=TO_END))
                assert sum(1 for _ in (replay if records else replay.batches()))

        yield lambda: _timed(work)


@contextmanager
def _replay_node(root: Path, batch_bytes: int, times: int) -> Iterator[Turn]:
    with ExitStack() as stack:
        node = stack.enter_context(_node(root))
        where = str(node.address)
        config = LogConfig(segment_bytes=16 << 20)
        outbox = stack.enter_context(
            Outbox.open(
                root / "out",
                topic="orders",
                partitions=1,
                producer="bench",
                replicas=[where],
                **_outbox_settings(log_config=config),
            )
        )
        values = _values(batch_bytes // 1000, 1000)
        for _ in range((32 << 20) // batch_bytes):
            outbox.append_many(0, values).result(timeout=WAIT_S)
        while any(lag.records for lag in outbox.lag().values()):
            time.sleep(0.05)
        client = stack.enter_context(ReplayClient(where))

        def work() -> None:
            for _ in range(times):
                replay = client.replay(ReplayRequest("orders-0", length=TO_END, bound="written"))
                assert sum(1 for _ in replay.batches())

        yield lambda: _timed(work)


@contextmanager
def _reader(root: Path, what: str, size_bytes: int, batch_bytes: int, times: int) -> Iterator[Turn]:
    path = root / "orders-0"
    _filled(path, size_bytes, batch_bytes)
    with ExitStack() as stack:
        log = None if what in {"verify", "open"} else stack.enter_context(SegmentLog.open(path))

        def work() -> None:
            for _ in range(times):
                if what == "verify":
                    assert verify_log(path).is_whole
                elif what == "open":
                    SegmentLog.open(path).close()
                elif what == "batches":
                    assert sum(1 for _ in log.batches(0))
                elif what == "slices":
                    slices, offset, end = log.slices(), 0, log.log_end_offset
                    while offset < end:
                        offset = slices.read(offset, end, 1 << 20).end_offset
                else:
                    step = log.log_end_offset // 200
                    for offset in range(0, log.log_end_offset, step):
                        log.read(offset, 1)

        yield lambda: _timed(work)


ROWS: dict[str, Callable[[Path], object]] = {
    "append 500 B": lambda root: _append(root, 430, 4_000),
    "append 50 KB": lambda root: _append(root, 50_000, 800),
    "outbox, 100 B": lambda root: _outbox(root, 10_000),
    "push 100 B": lambda root: _push(root, 100, 1, 150),
    "push 256 KB": lambda root: _push(root, 1000, 256, 60),
    "directory replay, 4 KB": lambda root: _replay(root, 32 << 20, 4_000, 2),
    "directory replay, 64 KB": lambda root: _replay(root, 64 << 20, 64_000, 2),
    "directory replay, records": lambda root: _replay(root, 32 << 20, 64_000, 2, records=True),
    "node replay, 64 KB": lambda root: _replay_node(root, 64_000, 2),
    "verify": lambda root: _reader(root, "verify", 64 << 20, 4_000, 2),
    "open": lambda root: _reader(root, "open", 32 << 20, 4_000, 20),
    "read batches": lambda root: _reader(root, "batches", 32 << 20, 4_000, 1),
    "slices": lambda root: _reader(root, "slices", 64 << 20, 50_000, 5),
    "read by offset": lambda root: _reader(root, "offset", 32 << 20, 4_000, 1),
}


def main(row: str, turns: int | None) -> None:
    root = Path(tempfile.mkdtemp(prefix="pairs-", dir=Path.cwd()))
    try:
        with ROWS[row](root) as turn:  # type: ignore[attr-defined]
            if turns is not None:
                for _ in range(turns):
                    turn()
                return
            turn()
            print("ready", flush=True)
            for _ in sys.stdin:
                gc.collect()
                print(turn(), flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
