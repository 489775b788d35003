"""A writer of the storm, until it is ended: python -m tests.tables.storm DSN WRITER SEED

It writes by every way that PostgreSQL has, and each event's row in the transaction of what the event tells of:

    account(id, n)       each change of an account is locked, and is event n of its key     order by key
    note(number)         copied, by a trigger, beside savepoints and long transactions      once each

The tables themselves say afterwards which events there have to be, whatever was killed in between.
"""

import random
import sys
import time
from dataclasses import dataclass
from itertools import count

import psycopg
from sqlalchemy import MetaData

from pushrep.tables import OutboxTable

ACCOUNTS, PARTITIONS, BLOCK = 40, 4, 10_000
SCHEMA = f"""
CREATE TABLE account (id int PRIMARY KEY, n int NOT NULL);
INSERT INTO account SELECT id, 0 FROM generate_series(0, {ACCOUNTS - 1}) id;
CREATE TABLE note (number bigint PRIMARY KEY);
CREATE TABLE ledger (number bigint);
CREATE SEQUENCE block;
CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO note VALUES (NEW.number);
    INSERT INTO pushrep_outbox (topic, partition, value) VALUES ('orders', NEW.number % {PARTITIONS},
        convert_to(json_build_object('note', NEW.number)::text, 'utf8'));
    RETURN NULL; END $$;
CREATE TRIGGER tell AFTER INSERT ON ledger FOR EACH ROW EXECUTE FUNCTION tell();
"""


@dataclass
class Changed:
    account: int
    n: int


@dataclass
class Noted:
    note: int


OUTBOX = OutboxTable(MetaData())
CHANGED = OUTBOX.topic("orders", Changed, partitions=PARTITIONS, key=lambda one: str(one.account))
NOTED = OUTBOX.topic("orders", Noted, partitions=PARTITIONS)


class Writer:
    """On one connection, and one more for transactions that are open for long."""

    def __init__(self, dsn, number, rng):
        self.dsn, self.number, self.rng = dsn, number, rng
        self.long, self.left = None, 0
        # A pooler that gives each transaction another session knows no prepared statement.
        self.main = psycopg.connect(dsn, prepare_threshold=None)
        block = self.main.execute("SELECT nextval('block')").fetchone()[0]
        self.main.commit()
        self.numbers = count(block * BLOCK)

    def one(self):
        if self.rng.random() < 0.3:
            self.main.execute("SET LOCAL synchronous_commit = off")
        if self.rng.random() < 0.1:
            self.hold()
        kind = self.rng.choice([self.change, self.change, self.copy, self.trigger, self.savepoints])
        kind(self.main)
        roll = self.rng.random()
        if roll < 0.1:
            self.main.rollback()
        elif roll < 0.2:
            self.in_two_phases()
        else:
            self.main.commit()

    def note(self, connection):
        number = next(self.numbers)
        connection.execute("INSERT INTO note VALUES (%s)", [number])
        NOTED.add(connection, Noted(number))

    def change(self, connection):
        # In the order of their ids, else two writers would wait for each other.
        for account in sorted(self.rng.sample(range(ACCOUNTS), self.rng.randrange(1, 4))):
            changed = "UPDATE account SET n = n + 1 WHERE id = %s RETURNING n"
            n = connection.execute(changed, [account]).fetchone()[0]
            CHANGED.add(connection, Changed(account, n))

    def copy(self, connection):
        many = [next(self.numbers) for _ in range(self.rng.randrange(1, 200))]
        with connection.cursor() as cursor:
            with cursor.copy("COPY note FROM STDIN") as copy:
                for number in many:
                    copy.write_row((number,))
            with cursor.copy("COPY pushrep_outbox (topic, partition, value) FROM STDIN") as copy:
                for number in many:
                    copy.write_row(("orders", number % PARTITIONS, b'{"note": %d}' % number))

    def trigger(self, connection):
        for _ in range(self.rng.randrange(1, 5)):
            connection.execute("INSERT INTO ledger VALUES (%s)", [next(self.numbers)])

    def savepoints(self, connection):
        for _ in range(self.rng.randrange(1, 4)):
            connection.execute("SAVEPOINT here")
            self.note(connection)
            if self.rng.random() < 0.5:
                connection.execute("ROLLBACK TO here")
        self.note(connection)

    def in_two_phases(self):
        """A prepared transaction outlives its writer: who drives the storm ends what is left."""
        name = f"{self.number}-{next(self.numbers)}"
        self.main.execute(f"PREPARE TRANSACTION '{name}'")
        self.main.commit()
        self.main.autocommit = True
        verb = "ROLLBACK" if self.rng.random() < 0.3 else "COMMIT"
        self.main.execute(f"{verb} PREPARED '{name}'")
        self.main.autocommit = False

    def hold(self):
        """A transaction stays open over many of the others. It locks no account: that would stop them all."""
        if self.long is None:
            self.long = psycopg.connect(self.dsn, prepare_threshold=None)
        if self.left == 0:
            self.left = self.rng.randrange(1, 6)
        else:
            self.left -= 1
        self.note(self.long)
        if self.left == 0:
            self.long.rollback() if self.rng.random() < 0.3 else self.long.commit()


def main(dsn, number, seed):
    rng = random.Random(f"{seed} {number}")
    while True:
        try:
            writer = Writer(dsn, number, rng)
            while True:
                writer.one()
        except psycopg.Error:  # the server is away, or somebody ended what was prepared: what was open is rolled back
            time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
