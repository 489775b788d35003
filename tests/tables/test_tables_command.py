"""`pushrep tables`, as an operator runs it; and a relay that is killed wherever it is."""

import contextlib
import io
import json
import logging
import os
import re
import signal
import threading
import uuid
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import MetaData, text
from sqlalchemy.orm import Session

from filtering import ReplayFilter
from pushrep import LogConfig, OutboxConfig
from pushrep.cli.main import run
from pushrep.log import StillNeeded
from pushrep.outbox.destinations import purge_closed
from pushrep.tables import EVENT_ID, OutboxTable
from tests.programs import PythonProgram
from tests.tables.conftest import OrderPlaced, engine_of, open_outbox, relayed


@pytest.fixture
def orders(engine):
    metadata = MetaData()
    topic = OutboxTable(metadata).topic("orders", OrderPlaced, partitions=2, key=lambda one: one.customer)
    metadata.create_all(engine)
    return topic


@pytest.fixture
def outbox_at(tmp_path) -> Path:
    with open_outbox(tmp_path / "outbox"):
        pass
    return tmp_path / "outbox"


def place(engine, orders, *numbers):
    with Session(engine) as session, session.begin():
        for number in numbers:
            orders.add(session, OrderPlaced(number, f"c{number % 5}"))


SIGNALS = signal.SIGTERM, signal.SIGINT


def called(*arguments):
    """`pushrep tables` in this process: its exit code, what it prints, and its errors."""
    out, err, before = io.StringIO(), io.StringIO(), [signal.getsignal(one) for one in SIGNALS]
    level = logging.getLogger().level
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(["tables", *map(str, arguments)])
    finally:
        for one, handler in zip(SIGNALS, before, strict=True):
            signal.signal(one, handler)
        logging.getLogger().setLevel(level)
    return code, out.getvalue(), err.getvalue()


def tables(*arguments, code=0):
    done, out, err = called(*arguments)
    assert done == code, (done, out, err)
    return out if code == 0 else out + err


def relay_all(engine, dsn, outbox_at, *options, ends_with=signal.SIGTERM):
    """`pushrep tables relay` in this process, which is told to end once no row waits; what it says."""
    is_over = threading.Event()

    def end():
        with engine.connect() as connection:
            while connection.execute(text("SELECT count(*) FROM pushrep_outbox")).scalar() and not is_over.wait(0.005):
                connection.rollback()
        if not is_over.is_set():
            os.kill(os.getpid(), ends_with)

    ending = threading.Thread(target=end)
    ending.start()
    try:
        code, _, err = called("relay", dsn, "--outbox", outbox_at, "--poll-ms", "1", *options)
    finally:
        is_over.set()
        ending.join()
    assert code == 0, err
    return err


def status(dsn, code=0):
    return json.loads(tables("status", dsn, "--topic", "orders", "--json", code=code))


class Relay:
    """`pushrep tables relay` in a process of its own."""

    def __init__(self, dsn, outbox_at, *options):
        command = ["tables", "relay", dsn, "--outbox", outbox_at, "--poll-ms", "1", *options]
        self.process = PythonProgram("-m", "pushrep.cli.main", *command, has_errors=True)

    def end(self, number=signal.SIGTERM):
        with self.process:
            self.process.send_signal(number)
            return self.process.stderr.read()


def wait_relayed(engine, relay):
    """Until no row waits."""
    with engine.connect() as connection:
        while connection.execute(text("SELECT count(*) FROM pushrep_outbox")).scalar():
            connection.rollback()
            assert relay.process.poll() is None, relay.process.stderr.read()


def test_the_relay_makes_the_outbox_and_status_shows_how_far_it_is(engine, dsn, orders, tmp_path, caplog):
    assert "give --topic" in tables("relay", dsn, "--outbox", tmp_path / "new", code=2)
    assert "--config is for the Kafka client" in tables(
        "relay", dsn, "--outbox", tmp_path, "--config", __file__, code=2
    )
    place(engine, orders, 1, 2, 3)
    shown = status(dsn)
    assert (shown["rows"]["waiting"], shown["rows_relayed"], shown["batch"]) == (3, 0, None)
    assert (shown["outbox_id"], shown["is_open"], shown["is_moved"], shown["parked"]) == (None, False, False, [])
    assert "no relay of this topic ever ran: pushrep tables relay --help" in tables("status", dsn, "--topic", "orders")
    given = ("--topic", "orders", "--partitions", "2", "--producer", "till")
    assert "3 rows relayed\n" in relay_all(engine, dsn, tmp_path / "new", *given)
    with open_outbox(tmp_path / "new", producer="till") as outbox:
        assert sorted(number for _, number in relayed(outbox)) == [1, 2, 3]
        outbox_id = outbox.identity.outbox_id
    place(engine, orders, 4)
    assert "1 row relayed\n" in relay_all(engine, dsn, tmp_path / "new", ends_with=signal.SIGINT), (
        "its settings are known"
    )
    begun = [f"the relay of topic orders goes on behind batch {batch}" for batch in (0, 1)]
    assert [one.getMessage() for one in caplog.records if one.name == "pushrep.tables"] == begun
    shown = status(dsn)
    assert (shown["rows"]["waiting"], shown["rows_relayed"], shown["batch"]) == (0, 4, "1-2")
    assert (shown["outbox_id"], shown["is_open"], shown["is_moved"]) == (outbox_id, False, False)
    assert tables("status", dsn, "--topic", "orders") == "topic orders: 4 rows relayed, 0 wait\n"
    with engine.begin() as connection:
        connection.execute(text("UPDATE pushrep_outbox_relay SET system_id = 'another'"))
    assert status(dsn, code=1)["is_moved"]
    assert "pushrep tables adopt" in tables("relay", dsn, "--outbox", tmp_path / "new", code=1)


def test_parked_rows_are_retried_or_dropped(engine, dsn, orders, outbox_at):
    with engine.begin() as connection:
        for partition in (7, 8, 1):
            statement = "INSERT INTO pushrep_outbox (topic, partition, value) VALUES ('orders', :partition, NULL)"
            connection.execute(text(statement), {"partition": partition})
    said = tables("relay", dsn, "--outbox", outbox_at, code=1)
    assert "row 1 of topic orders can't be appended: partition" in said
    relay_all(engine, dsn, outbox_at, "--on-refused", "park")
    parked = status(dsn, code=1)["parked"]
    assert [one["id"] for one in parked] == [1, 2]
    assert all("partition" in one["why"] for one in parked)
    told = tables("status", dsn, "--topic", "orders", code=1)
    assert "parked row  why" in told
    assert "pushrep tables retry ID; or pushrep tables drop ID" in told
    with engine.begin() as connection:
        connection.execute(text("UPDATE pushrep_outbox_parked SET partition = 0 WHERE id = 1"))
    assert json.loads(tables("retry", dsn, 1, "--topic", "orders", "--json")) == {"retried": [1]}
    assert called("retry", dsn, 1, "--topic", "orders") == (0, "0 rows wait again\n", "not parked: 1\n")
    assert json.loads(tables("drop", dsn, 2, 5, "--topic", "refunds", "--json")) == {"dropped": []}
    assert called("drop", dsn, 6, 2, 5, "--topic", "orders") == (0, "1 row are dropped\n", "not parked: 5, 6\n")
    assert json.loads(tables("drop", dsn, 2, "--topic", "orders", "--json")) == {"dropped": []}
    assert status(dsn)["rows"]["waiting"] == 1


def test_adopting_says_what_a_restored_database_costs(engine, dsn, orders, outbox_at):
    """The state as it was before two batches, and the rows of the second again."""
    place(engine, orders, 1)
    relay_all(engine, dsn, outbox_at)
    with engine.connect() as connection:
        before = connection.execute(text("SELECT * FROM pushrep_outbox_relay")).one()._asdict()
    place(engine, orders, 2, 3)
    with engine.connect() as connection:
        rows = [one._asdict() for one in connection.execute(text("SELECT * FROM pushrep_outbox ORDER BY id"))]
    relay_all(engine, dsn, outbox_at)
    with engine.begin() as connection:
        sets = ", ".join(f"{name} = :{name}" for name in before if name != "topic")
        connection.execute(text(f"UPDATE pushrep_outbox_relay SET {sets}"), before)
        names = [name for name in rows[0] if name != "xid"]
        own = "OVERRIDING SYSTEM VALUE " if engine.dialect.name == "postgresql" else ""
        insert = (
            f"INSERT INTO pushrep_outbox ({', '.join(names)}) {own}VALUES ({', '.join(f':{name}' for name in names)})"
        )
        for row in rows:
            connection.execute(text(insert), {name: row[name] for name in names})
    assert "batch 1-2" in tables("relay", dsn, "--outbox", outbox_at, code=1)
    found = json.loads(tables("adopt", dsn, "--outbox", outbox_at, "--dry-run", "--json"))
    assert (found["epoch"], found["waiting"], found["missing"]) == (2, 2, {})
    assert sorted(found["twice"]) == ["1-2-2", "1-2-3"]
    assert any("batch 1-2" in one for one in found["findings"])
    told = tables("adopt", dsn, "--outbox", outbox_at, "--dry-run")
    assert told.endswith("\n2 rows would be relayed in epoch 2\n")
    assert "may come twice, as their rows wait again: 1-2-" in told
    assert status(dsn)["batch"] == "1-1", "a dry run changes nothing"
    assert tables("adopt", dsn, "--outbox", outbox_at).endswith("\n2 rows will be relayed in epoch 2\n")
    place(engine, orders, 4)
    relay_all(engine, dsn, outbox_at)
    assert status(dsn)["batch"] == "2-1"


@pytest.mark.parametrize("dsn", ["sqlite"], indirect=True)
def test_adopting_another_outbox_says_what_is_gone(engine, dsn, orders, outbox_at, tmp_path):
    """What the database gave to the first one is not in the second."""
    place(engine, orders, *range(6))
    told = tables("adopt", dsn, "--outbox", outbox_at, "--dry-run")
    assert told == "the database knows no relay of this topic yet\n6 rows would be relayed in epoch 1\n"
    relay_all(engine, dsn, outbox_at)
    with open_outbox(outbox_at) as outbox:
        first, ends = outbox.identity.outbox_id, {n: outbox.log(n).log_end_offset for n in range(2)}
    with open_outbox(tmp_path / "new"):
        pass
    told = tables("adopt", dsn, "--outbox", tmp_path / "new")
    assert f"so far the rows went to outbox {first}\n" in told
    for partition, end in ends.items():
        assert f"gone: the records [0, {end}) of partition {partition}, and their rows\n" in told
    assert told.endswith("0 rows will be relayed in epoch 2\n")
    place(engine, orders, 9)
    relay_all(engine, dsn, tmp_path / "new")
    assert "relayed into outbox" in tables("relay", dsn, "--outbox", outbox_at, code=1)


def test_a_database_that_is_away_is_told_by_the_exit_code(tmp_path):
    said = tables("status", "postgresql://nobody@127.0.0.1:1/shop", "--topic", "orders", code=3)
    assert "error: the database: " in said
    assert "give a URL" in tables("status", "orders", "--topic", "orders", code=1)
    assert "neither postgresql nor sqlite" in tables("status", "mysql://a/b", "--topic", "orders", code=1)


@pytest.mark.slow
def test_a_relay_that_is_killed_anywhere_relays_each_row_once(engine, dsn, orders, outbox_at, torture):
    """Rows are added while relays are killed with -9 at random moments; in the long form many of them."""
    rng, number = torture.random("tables"), 0
    kills = 200 if torture.is_long else 5
    for _ in range(kills):
        relay = Relay(dsn, outbox_at)
        for _ in range(rng.randrange(1, 20)):
            with Session(engine) as session:
                for _ in range(rng.randrange(1, 40)):
                    orders.add(session, OrderPlaced(number, f"c{number % 5}"))
                    number += 1
                if rng.random() < 0.2:
                    session.rollback()
                    continue
                session.commit()
        relay.process.poll()
        relay.end(signal.SIGKILL)
    relay = Relay(dsn, outbox_at)
    wait_relayed(engine, relay)
    relay.end()
    check(outbox_at, orders)


KILLED_AT = """
import os, signal, sys
from importlib import import_module
from pushrep.cli.main import run

side, module, path, nth, *words = sys.argv[1:]
owner = import_module(module)
*outer, name = path.split(".")
for one in outer:
    owner = getattr(owner, one)
call, calls = getattr(owner, name), 0

def killed(*given, **named):
    global calls
    calls += 1
    if side == "before" and calls == int(nth):
        os.kill(os.getpid(), signal.SIGKILL)
    result = call(*given, **named)
    if calls == int(nth):
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(owner, name, killed)
sys.exit(run(words))
"""
DATABASE = "pushrep.tables.database"
APPEND = ("pushrep.outbox.outbox", "Outbox.append_serialized_many")
FLUSH = ("pushrep.outbox.outbox", "Outbox.flush")
STEPS = {
    "state not written": ("before", DATABASE, "RelayDatabase.create", 1),
    "state written": ("behind", DATABASE, "RelayDatabase.create", 1),
    "batch not begun": ("before", DATABASE, "RelayDatabase.begin_batch", 1),
    "batch begun": ("behind", DATABASE, "RelayDatabase.begin_batch", 1),
    "nothing appended": ("before", *APPEND, 1),
    "one partition appended, perhaps": ("behind", *APPEND, 1),
    "all appended, perhaps": ("behind", *APPEND, 2),
    "appended, not flushed": ("before", *FLUSH, 2),
    "flushed": ("behind", *FLUSH, 2),
    "batch not closed": ("before", DATABASE, "RelayDatabase.close_batch", 1),
    "rows parked and deleted, state not changed": ("before", DATABASE, "update", 1),
    "batch closed": ("behind", DATABASE, "RelayDatabase.close_batch", 1),
    "state written, no note": ("before", "pushrep.outbox.relay_note", "RelayNotes.write", 1),
    "the second note not written": ("before", "pushrep.outbox.relay_note", "RelayNotes.write", 2),
}


def killed_relay(step, *words):
    with PythonProgram("-c", KILLED_AT, *STEPS[step], "tables", "relay", *words, has_errors=True) as relay:
        said = relay.stderr.read()
    assert relay.returncode == -signal.SIGKILL, (step, said)


def test_an_open_batch_keeps_its_records_whoever_opens_the_outbox(engine, dsn, orders, outbox_at):
    """Its relay was killed; then somebody opens the outbox without a relay, to ship it, or purges it."""
    place(engine, orders, *range(100))
    killed_relay("batch not closed", dsn, "--outbox", outbox_at)
    with open_outbox(outbox_at, config=OutboxConfig(log_config=LogConfig(segment_bytes=2_000))) as outbox:
        ends = [outbox.log(n).log_end_offset for n in range(2)]
        for n, end in enumerate(ends):
            with pytest.raises(StillNeeded, match="table relay"):
                outbox.log(n).delete_records(end)
            outbox.append(n, b'{"order": -1}').result(60)  # in a segment of its own
    purge = {"before_offset": max(ends), "before_ms": None, "dry_run": False}
    purged = purge_closed(outbox_at, None, None, **purge)
    assert [(one["kept_by"], one["needed_from"], one["segments"]) for one in purged] == [("table relay", 0, [])] * 2
    relay = Relay(dsn, outbox_at)
    wait_relayed(engine, relay)
    relay.end()
    assert all(one["segments"] for one in purge_closed(outbox_at, None, None, **purge | {"dry_run": True}))
    with open_outbox(outbox_at) as outbox:
        assert sorted(number for _, number in relayed(outbox)) == [-1, -1, *range(100)]


@pytest.mark.slow
def test_a_relay_that_is_killed_at_each_step_relays_or_parks_each_row_once(engine, dsn, orders, outbox_at):
    """Every start finds what the one before left at its step, and rows that came since."""
    refused = []
    for at, step in enumerate(STEPS):
        place(engine, orders, *range(10 * at, 10 * at + 5))
        with engine.begin() as connection:
            row = "INSERT INTO pushrep_outbox (topic, partition, key) VALUES ('orders', 7, '') RETURNING id"
            refused.append(connection.execute(text(row)).scalar())
        place(engine, orders, *range(10 * at + 5, 10 * at + 10))
        killed_relay(step, dsn, "--outbox", outbox_at, "--poll-ms", "1", "--on-refused", "park")
    relay = Relay(dsn, outbox_at, "--on-refused", "park")
    wait_relayed(engine, relay)
    relay.end()
    check(outbox_at, orders)
    with open_outbox(outbox_at) as outbox:
        assert sorted(number for _, number in relayed(outbox)) == list(range(10 * len(STEPS)))
    shown = status(dsn, code=1)
    assert [one["id"] for one in shown["parked"]] == refused
    assert shown["rows_relayed"] == 10 * len(STEPS)


def check(outbox_at, orders):
    seen, newest = Counter(), {}
    readers = ReplayFilter()
    with open_outbox(outbox_at) as outbox:
        for n in range(2):
            for record in outbox.log(n).records(0):
                headers = dict(record.headers)
                assert readers.admit(headers["stream-metadata"])
                seen[headers[EVENT_ID].rpartition(b"-")[2]] += 1
                event = json.loads(record.value)
                assert newest.get(record.key, -1) < event["order"], "in order by key"
                newest[record.key] = event["order"]
    assert set(seen.values()) == {1}


def test_the_rights_on_the_page_are_enough(postgresql_dsn, outbox_at):
    """The page's GRANT lines, for two users of the database who have nothing else."""
    page = (Path(__file__).parents[2] / "docs" / "tables.md").read_text(encoding="utf-8")
    metadata = MetaData()
    table = OutboxTable(metadata, keep_rows=True)
    topic = table.topic("orders", OrderPlaced, partitions=2, key=lambda one: one.customer)
    owner = engine_of(postgresql_dsn)
    metadata.create_all(owner)
    grants = re.findall(r"^ +(GRANT [^;]*;)", page, re.MULTILINE)
    assert len(grants) == 6
    users = {name: f"{name}_{uuid.uuid4().hex}" for name in ("service", "relay")}
    with owner.begin() as connection:
        for user in users.values():
            connection.execute(text(f"CREATE USER {user}"))
        for grant in grants:
            who = re.search(r"TO (\w+);", grant)[1]
            connection.execute(text(grant.replace(f"TO {who};", f"TO {users[who]};")))
    service, dsn = (postgresql_dsn.replace("postgres:@", f"{users[name]}:@") for name in ("service", "relay"))
    engine = engine_of(service)
    try:
        place(engine, topic, 1, 2)
        with owner.begin() as connection:
            statement = "INSERT INTO pushrep_outbox (topic, partition, value) VALUES ('orders', 7, NULL)"
            connection.execute(text(statement))
        relay = Relay(dsn, outbox_at, "--on-refused", "park")
        wait_relayed(owner, relay)
        relay.end()
        assert json.loads(tables("retry", dsn, 3, "--topic", "orders", "--json")) == {"retried": [3]}
        assert status(dsn)["rows"]["sees_all"]
        assert "epoch 2" in tables("adopt", dsn, "--outbox", outbox_at)
        relay = Relay(dsn, outbox_at, "--on-refused", "park")
        wait_relayed(owner, relay)
        relay.end()
        [parked] = status(dsn, code=1)["parked"]
        assert json.loads(tables("drop", dsn, parked["id"], "--topic", "orders", "--json"))["dropped"]
    finally:
        engine.dispose()
        with owner.begin() as connection:
            for user in users.values():
                connection.execute(text(f"DROP OWNED BY {user}"))
                connection.execute(text(f"DROP USER {user}"))
        owner.dispose()
