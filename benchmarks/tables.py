"""G27: the relay from a table of PostgreSQL, 100 B, one writer, beside COPY out of the same table; the time to the log.

Rows wait, with a key as a service gives one; the relay finds them by polling, appends them, and has deleted them when
its time is taken. Its peer reads the same rows by COPY into this process, and keeps nothing. Server and outbox sync.

The time to the log begins when `commit` has returned to the service, and ends when the record is in the log.
With --long: a million rows wait when a relay starts, in a process of its own, in PostgreSQL and in SQLite.
"""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import psutil
import psycopg
from sqlalchemy import Engine, MetaData, create_engine
from sqlalchemy.orm import Session

from benchmarks.harness import AtMost, Timed, compare, random_values, scratch, spread
from pushrep.outbox import Outbox
from pushrep.tables import OutboxTable, TableRelay
from tests.postgresql import Server, newest

ROWS, LONG_ROWS = 100_000, 1_000_000
COMMITS = 100
WOKEN_MS, POLL_MS = 20, 100
TABLE = OutboxTable(MetaData())
TOPIC = TABLE.topic("orders", bytes, partitions=1, key=lambda value: value[:8])
_COLUMNS = "topic, partition, key, value"


def run(rounds: int) -> dict[str, Any]:
    """Rows a second beside COPY, and the time to the log of two ways to relay."""
    with ExitStack() as stack:
        root = stack.enter_context(scratch("tables"))
        server = stack.enter_context(_server())
        dsn = server.url()
        engine = create_engine(_sqlalchemy(dsn))
        stack.callback(engine.dispose)
        TABLE.tables.rows.metadata.create_all(engine)
        values = random_values(10_000, 100)
        with _relay_process(root / "outbox", dsn, "--poll-ms", "10") as process, psycopg.connect(dsn) as asking:
            asking.autocommit = True
            _until(lambda: _relayed_rows(asking) is not None, 0.01)
            process.send_signal(signal.SIGSTOP)
            sides = {"relay": lambda: _relayed(process, asking, values), "COPY": lambda: _copied(asking, values)}
            rates = compare(sides, rounds=rounds, goals={"COPY": 0.3})
        outbox = stack.enter_context(Outbox.open(root / "outbox", "orders", 1, "benchmark", carrier="header"))
        woken = [_to_log(outbox, engine, dsn, values, table=TABLE, poll_ms=3_600_000) for _ in range(rounds)]
        polled = [_to_log(outbox, engine, dsn, values, poll_ms=POLL_MS) for _ in range(rounds)]
    return {
        f"G27: {ROWS:,} rows of 100 B, PostgreSQL": rates,
        "G27: from commit to log, a thread of the service, p50 of a round": _limited("woken", woken, WOKEN_MS),
        f"G27: from commit to log, by a poll each {POLL_MS} ms, p50 of a round": _limited("polled", polled, POLL_MS),
    }


def run_long(_rounds: int) -> dict[str, Any]:
    """A million rows that wait."""
    values = random_values(10_000, 100)
    with scratch("tables") as root, _server() as server:
        file = root / "shop.db"
        return {
            "a million rows wait, PostgreSQL": _backlog(root / "of-postgresql", server.url(), values),
            "a million rows wait, SQLite": _backlog(root / "of-sqlite", f"sqlite:///{file}", values),
        }


def _server() -> Server:
    return Server(newest(), fsync="on", autovacuum="on")


def _sqlalchemy(dsn: str) -> str:
    return dsn.replace("postgresql://", "postgresql+psycopg://")


def _write(connection: psycopg.Connection[Any], values: list[bytes], rows: int) -> None:
    """One writer, a transaction for each 10,000 rows."""
    for _ in range(rows // len(values)):
        with connection.cursor().copy(f"COPY pushrep_outbox ({_COLUMNS}) FROM STDIN") as copy:
            for value in values:
                copy.write_row(("orders", 0, value[:8], value))


def _relayed_rows(asking: psycopg.Connection[Any]) -> int | None:
    found = asking.execute("SELECT relayed FROM pushrep_outbox_relay").fetchone()
    return None if found is None else int(found[0])


def _relayed(process: subprocess.Popen[bytes], asking: psycopg.Connection[Any], values: list[bytes]) -> Timed:
    """The relay's process stands still but for its turn."""
    _write(asking, values, ROWS)
    done = (_relayed_rows(asking) or 0) + ROWS
    began = time.perf_counter()
    process.send_signal(signal.SIGCONT)
    _until(lambda: _relayed_rows(asking) == done, 0.005)
    taken_s = time.perf_counter() - began
    process.send_signal(signal.SIGSTOP)
    return Timed(ROWS, taken_s)


def _copied(asking: psycopg.Connection[Any], values: list[bytes]) -> Timed:
    _write(asking, values, ROWS)
    began, count = time.perf_counter(), 0
    with asking.cursor().copy(f"COPY pushrep_outbox (id, {_COLUMNS}, headers, created) TO STDOUT") as copy:
        for _ in copy:
            count += 1
    taken_s = time.perf_counter() - began
    asking.execute("DELETE FROM pushrep_outbox")
    assert count == ROWS
    return Timed(ROWS, taken_s)


def _to_log(outbox: Outbox, engine: Engine, dsn: str, values: list[bytes], **settings: Any) -> float:
    """Milliseconds, p50 of the commits."""
    log, taken = outbox.log(0), []
    with TableRelay(outbox, dsn, **settings):
        for number, value in enumerate(values[:COMMITS]):
            end = log.log_end_offset
            with Session(engine) as session, session.begin():
                TOPIC.add(session, value)
            began = time.perf_counter()
            _until(lambda end=end: log.log_end_offset > end, 0.0002)
            taken.append(1000 * (time.perf_counter() - began))
            time.sleep(0.005 + number % 7 / 100)  # so that commits fall anywhere between two polls
    return sorted(taken)[COMMITS // 2]


def _until(holds: Callable[[], bool], pause_s: float) -> None:
    while not holds():
        time.sleep(pause_s)


def _limited(name: str, taken_ms: list[float], limit_ms: float) -> dict[str, Any]:
    ratios = {"limit": spread([one / limit_ms for one in taken_ms]) | AtMost(1.0).cells()}
    rates = {name: spread(taken_ms), "limit": spread([limit_ms])}
    return {"unit": "ms", "rounds": len(taken_ms), "ours": name, "rates": rates, "ratios": ratios}


def _backlog(directory: Path, dsn: str, values: list[bytes]) -> dict[str, Any]:
    """A relay's process meets a million rows; its memory, and what `status` takes meanwhile."""
    engine = create_engine(_sqlalchemy(dsn))
    TABLE.tables.rows.metadata.create_all(engine)
    if dsn.startswith("sqlite"):
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        rows = [{"topic": "orders", "partition": 0, "key": value[:8], "value": value} for value in values]
        for _ in range(LONG_ROWS // len(values)):
            with engine.begin() as connection:
                connection.execute(TABLE.tables.rows.insert(), rows)
    else:
        with psycopg.connect(dsn, autocommit=True) as connection:
            _write(connection, values, LONG_ROWS)
    began = time.perf_counter()
    with _relay_process(directory, dsn) as process, _Watched(process, engine) as watched:
        shown, asked = [], []
        while not shown or shown[-1]["rows_relayed"] < LONG_ROWS:
            asking = time.perf_counter()
            shown.append(_status(dsn))
            asked.append(time.perf_counter() - asking)
        taken_s = time.perf_counter() - began
    engine.dispose()
    return {
        "unit": "rows/s",
        "rounds": 1,
        "ours": "relay",
        "rates": {"relay": spread([LONG_ROWS / taken_s])},
        "ratios": {},
        "notes": [
            f"{taken_s:.1f} s from the start of its process until no row waits",
            f"memory of the relay's process: {watched.first_mib:.0f} MiB when it began, at most {watched.most_mib:.0f}",
            f"`pushrep tables status` beside it, {len(asked)} times: {_told(asked)}",
            f"a commit of the service beside it, each 0.1 s: {_told(watched.commits_s)}",
        ],
    }


def _told(seconds: list[float]) -> str:
    return f"{1000 * spread(seconds)['median']:.0f} ms, at most {1000 * max(seconds):.0f}"


@contextmanager
def _relay_process(directory: Path, dsn: str, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    words = ["tables", "relay", dsn, "--outbox", str(directory), "--topic", "orders", "--producer", "benchmark"]
    process = subprocess.Popen([sys.executable, "-m", "pushrep.cli.main", *words, *more], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.send_signal(signal.SIGCONT)
        process.wait()


def _status(dsn: str) -> dict[str, Any]:
    words = ["tables", "status", dsn, "--topic", "orders", "--json"]
    done = subprocess.run([sys.executable, "-m", "pushrep.cli.main", *words], check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout))


class _Watched:
    """A process's resident memory, and how long a service's commits take meanwhile."""

    def __init__(self, process: subprocess.Popen[bytes], engine: Engine) -> None:
        self._process, self._engine = psutil.Process(process.pid), engine
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.first_mib = self.most_mib = 0.0
        self.commits_s: list[float] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        other = TABLE.topic("others", bytes, partitions=1)
        while not self._ended.wait(0.1):
            mib = self._process.memory_info().rss / 2**20
            self.first_mib = self.first_mib or mib
            self.most_mib = max(mib, self.most_mib)
            began = time.perf_counter()
            with Session(self._engine) as session, session.begin():
                other.add(session, b"beside")
            self.commits_s.append(time.perf_counter() - began)
