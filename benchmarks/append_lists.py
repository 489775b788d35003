"""G2, G3, G6: lists of records, each list on disk before the next (D1): `append_many` and the log beside LMDB,
RocksDB, SQLite and bare writes of the same bytes.

A list is about 1 MB: 10,000 records of 100 B or 1,000 of 1 KiB, one transaction and one sync on every side. Keys of the
stores are record numbers that rise (LMDB with append=True, its fastest way). G6 is what the same records take on disk
when everything is closed: the log with the 20-byte key of an outbox, the stores with their number of 8 bytes.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.harness import AtMost, compare, random_values, scratch, spread
from pushrep.log import Durability, SegmentLog
from pushrep.outbox import Outbox
from pushrep.records import encode_batch

LISTS = 40  # a round: the stores have to bring their tables to disk meanwhile, as they would in the long run
LIST_BYTES = 1_000_000
G2 = {"LMDB putmulti": 1.0, "rocksdict WriteBatch": 1.3, "SQLite FULL": 4.0}
G3 = {"LMDB putmulti": 1.3, "rocksdict WriteBatch": 2.5, "bare write + fdatasync": 0.5}
KEY_BYTES, OVERHEAD_BYTES_MAX = 20, 12

Write = Callable[[list[bytes]], object]


def run(rounds: int) -> dict[str, Any]:
    """Two comparisons and the bytes on disk, by title."""
    results = {}
    for title, size, goals in (("G2: lists of 100 B, D1", 100, G2), ("G3: lists of 1 KiB, D1", 1024, G3)):
        results[title], on_disk = _lists(size, rounds, goals)
        if size == 100:
            results["G6: bytes on disk a record, 100 B values"] = _sizes(on_disk)
    return results


def _lists(size: int, rounds: int, goals: dict[str, float]) -> tuple[dict[str, Any], dict[str, float]]:
    """The comparison, and bytes a record on disk of each side after it."""
    values = random_values(LIST_BYTES // size, size)
    openers: dict[str, Callable[[Path], Any]] = {
        "append_many": _outbox,
        "SegmentLog.append": _log,
        "LMDB putmulti": _lmdb,
        "rocksdict WriteBatch": _rocksdb,
        "SQLite FULL": _sqlite,
        "bare write + fdatasync": _bare,
    }
    with scratch("append-lists") as root:
        paths = {name: root / f"side-{number}" for number, name in enumerate(openers)}
        with ExitStack() as stack:
            sides = {name: _side(stack.enter_context(open_(paths[name])), values) for name, open_ in openers.items()}
            result = compare(sides, rounds=rounds, goals=goals)
        records = LISTS * len(values) * (rounds + 1)
        return result, {name: _bytes_in(path) / records for name, path in paths.items()}


def _side(write: Write, values: list[bytes]) -> Callable[[], float]:
    def side() -> float:
        for _ in range(LISTS):
            write(values)
        return LISTS * len(values)

    return side


def _sizes(on_disk: dict[str, float]) -> dict[str, Any]:
    ours = on_disk.pop("append_many")
    on_disk.pop("bare write + fdatasync")
    content = KEY_BYTES + 100.0
    limit = content + OVERHEAD_BYTES_MAX
    rates = {"append_many": ours, "key + value": content, **on_disk}
    return {
        "unit": "bytes/record", "rounds": 1, "ours": "append_many",
        "rates": {name: spread([value]) for name, value in rates.items()},
        "ratios": {"key + value": spread([ours / content]) | AtMost(limit / content).cells()},
        "notes": [f"goal: at most key + value + {OVERHEAD_BYTES_MAX} B; {ours - content:.2f} B more, indexes included"],
    }  # fmt: skip


def _bytes_in(path: Path) -> int:
    """Blocks that the files take, so that a sparse file counts for what it holds."""
    files = [path, *path.rglob("*")] if path.is_dir() else list(path.parent.glob(path.name + "*"))
    return sum(file.stat().st_blocks * 512 for file in files if file.is_file())


@contextmanager
def _outbox(path: Path) -> Iterator[Write]:
    with Outbox.open(path, topic="outbox", partitions=1, producer="benchmark") as outbox:
        yield lambda values: outbox.append_many(0, values).result()


@contextmanager
def _log(path: Path) -> Iterator[Write]:
    with SegmentLog.open(path / "lists-0") as log:
        yield lambda values: log.append(values, durability=Durability.FLUSHED)


@contextmanager
def _lmdb(path: Path) -> Iterator[Write]:
    import lmdb  # noqa: PLC0415 - `make bench` installs the peers

    numbers = count()
    with lmdb.open(str(path), map_size=8 << 30) as store:

        def write(values: list[bytes]) -> None:
            with store.begin(write=True) as transaction, transaction.cursor() as cursor:
                cursor.putmulti([(next(numbers).to_bytes(8), value) for value in values], append=True)

        yield write


@contextmanager
def _rocksdb(path: Path) -> Iterator[Write]:
    from rocksdict import Options, Rdict, WriteBatch, WriteOptions  # noqa: PLC0415

    synced = WriteOptions()
    synced.sync = True
    store, numbers = Rdict(str(path), Options(raw_mode=True)), count()

    def write(values: list[bytes]) -> None:
        batch = WriteBatch(raw_mode=True)
        for value in values:
            batch.put(next(numbers).to_bytes(8), value)
        store.write(batch, synced)

    try:
        yield write
    finally:
        store.close()


@contextmanager
def _sqlite(path: Path) -> Iterator[Write]:
    table = sqlite3.connect(path)
    table.execute("PRAGMA journal_mode = WAL")
    table.execute("PRAGMA synchronous = FULL")
    table.execute("CREATE TABLE log (n INTEGER PRIMARY KEY, value BLOB)")

    def write(values: list[bytes]) -> None:
        with table:
            table.executemany("INSERT INTO log (value) VALUES (?)", zip(values, strict=True))

    try:
        yield write
    finally:
        table.close()


@contextmanager
def _bare(path: Path) -> Iterator[Write]:
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    encoded = b""  # the same list every time: only the writing is this side's

    def write(values: list[bytes]) -> None:
        nonlocal encoded
        encoded = encoded or bytes(encode_batch(values, timestamps_ms=0).data)
        os.write(fd, encoded)
        os.fdatasync(fd)

    try:
        yield write
    finally:
        os.close(fd)
