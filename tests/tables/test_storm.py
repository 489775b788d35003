"""Writers by every way that PostgreSQL has, while writers, relay and server are killed. The tables judge the outbox.

The long form writes a million rows by eight writers.
"""

import json
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress

import psycopg
import pytest

from pushrep.tables import EVENT_ID
from tests.tables.conftest import engine_of, open_outbox
from tests.tables.storm import OUTBOX, PARTITIONS, SCHEMA
from tests.tables.test_servers import binaries, pooled, shop  # noqa: F401 - a fixture


class Storm:
    """What runs, and what is killed."""

    def __init__(self, server, dsn, directory, rng, writers):
        self.server, self.dsn, self.rng = server, dsn, rng
        self._relay_words = [
            sys.executable,
            "-m",
            "pushrep.cli.main",
            "tables",
            "relay",
            dsn,
            "--outbox",
            str(directory),
            "--topic",
            "orders",
        ]
        self._relay_words += ["--partitions", str(PARTITIONS), "--poll-ms", "5"]
        engine = engine_of(server.url("shop"))
        OUTBOX.tables.rows.metadata.create_all(engine)
        engine.dispose()
        with psycopg.connect(server.url("shop")) as connection:
            connection.execute(SCHEMA)
        self.relay, self.relay_said = None, directory.with_name("relay.txt")
        self.writers = [None] * writers
        self.kills = Counter()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        for one in [self.relay, *self.writers]:
            if one is not None:
                one.kill()
                one.wait()

    def start(self):
        """What does not run."""
        if self.relay is None:
            with self.relay_said.open("ab") as said:
                self.relay = subprocess.Popen(self._relay_words, stderr=said)
        assert self.relay.poll() is None, self.relay_said.read_text()
        for index, one in enumerate(self.writers):
            if one is None:
                command = [sys.executable, "-m", "tests.tables.storm", self.dsn, str(index), str(self.rng.random())]
                self.writers[index] = subprocess.Popen(command)

    def kill(self, what):
        self.kills[what] += 1
        if what == "server":
            self.server.kill()
            self.server.start()
        elif what == "relay":
            self.relay.kill()
            self.relay.wait()
            self.relay = None
        else:
            self.end_writer(self.rng.randrange(len(self.writers)))
        self.start()

    def end_writer(self, index):
        self.writers[index].kill()
        self.writers[index].wait()
        self.writers[index] = None

    def ask(self, statement):
        with psycopg.connect(self.server.url("shop"), autocommit=True) as connection:
            return connection.execute(statement).fetchall()

    def written(self):
        return self.ask("SELECT (SELECT coalesce(sum(n), 0) FROM account) + (SELECT count(*) FROM note)")[0][0]

    def settle(self):
        """No writer any more, no transaction that is half done; until every row is relayed."""
        for index in range(len(self.writers)):
            self.end_writer(index)
        others = "FROM pg_stat_activity WHERE datname = 'shop' AND pid <> pg_backend_pid()"
        busy = f"SELECT count(*) {others} AND state <> 'idle'"
        while self.ask(busy)[0][0]:  # what a writer said last may still be carried out
            time.sleep(0.05)
        self.end_prepared()
        while self.ask("SELECT count(*) FROM pushrep_outbox")[0][0]:
            assert self.relay.poll() is None, self.relay_said.read_text()
            time.sleep(0.05)
        self.relay.send_signal(signal.SIGTERM)
        self.relay.wait()
        self.relay = None

    def end_prepared(self):
        """Of writers that were killed in between; one that lives may lose the race, and goes on."""
        with psycopg.connect(self.server.url("shop"), autocommit=True) as connection:
            for (name,) in connection.execute("SELECT gid FROM pg_prepared_xacts").fetchall():
                with suppress(psycopg.errors.UndefinedObject):
                    connection.execute(f"{self.rng.choice(['COMMIT', 'ROLLBACK'])} PREPARED '{name}'")


def check(storm, directory):
    """Each event of the tables once, no other; those of an account in their order, by their numbers without a gap."""
    wanted = dict(storm.ask("SELECT id, n FROM account"))
    notes = [number for (number,) in storm.ask("SELECT number FROM note")]
    of_account, noted, ids = defaultdict(list), [], set()
    with open_outbox(directory, partitions=PARTITIONS, producer="pushrep-tables") as outbox:
        for n in range(PARTITIONS):
            for record in outbox.log(n).records(0):
                event = json.loads(record.value)
                ids.add(dict(record.headers)[EVENT_ID])
                if "note" in event:
                    noted.append(event["note"])
                else:
                    of_account[event["account"]].append(event["n"])
    assert {account: list(range(1, n + 1)) for account, n in wanted.items() if n} == of_account
    assert Counter(noted) == Counter(notes)
    assert len(ids) == len(noted) + sum(map(len, of_account.values()))
    return len(ids)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["straight", "pooled"])
def test_each_committed_row_once_whatever_is_killed(binaries, way, tmp_path, torture):  # noqa: F811
    rng = torture.random("storm", way, str(binaries))
    rows, writers, every_s = (1_000_000, 8, 2.0) if torture.is_long else (1_000, 3, 0.5)
    with shop(binaries) as server:
        if way == "pooled":
            with pooled(server) as dsn:
                run(server, dsn, tmp_path, rng, rows, writers, every_s)
        else:
            run(server, server.url("shop"), tmp_path, rng, rows, writers, every_s)


def run(server, dsn, tmp_path, rng, rows, writers, every_s):
    directory = tmp_path / "outbox"
    with Storm(server, dsn, directory, rng, writers) as storm:
        victims = ["server", "relay", "writer"]
        while storm.written() < rows or victims:
            time.sleep(rng.uniform(0, 2 * every_s))
            storm.end_prepared()
            storm.kill(victims.pop() if victims else rng.choice(["relay", "relay", "writer", "server"]))
        storm.settle()
        count = check(storm, directory)
        sys.stdout.write(f"{count:,} rows, kills: {dict(storm.kills)}\n")
