"""A relay and real PostgreSQL servers that are killed, restored from a disk copy, promoted, dumped, or pooled."""

import shutil
import subprocess
import threading
from contextlib import contextmanager

import psycopg
import pytest
from sqlalchemy import MetaData
from sqlalchemy.orm import Session

from pushrep.tables import DatabaseMoved, DatabaseWentBack, OutboxTable, TableRelay, UnfitDatabase
from pushrep.tables.database import RelayDatabase
from tests.postgresql import OLDEST, USER, Server, as_server, newest
from tests.tables.conftest import OrderPlaced, engine_of, open_outbox, relayed

TOPIC = OutboxTable(MetaData()).topic("orders", OrderPlaced, partitions=2, key=lambda one: one.customer)


@pytest.fixture(params=["newest", "oldest"])
def binaries(request):
    """The oldest and the newest PostgreSQL that are to be had."""
    if request.param == "oldest" and not (OLDEST / "postgres").exists():
        pytest.skip("no PostgreSQL 14: make test fetches it")
    return newest() if request.param == "newest" else OLDEST


@contextmanager
def shop(*arguments, **settings):
    with Server(*arguments, **settings) as server:
        with psycopg.connect(server.url(), autocommit=True) as admin:
            admin.execute("CREATE DATABASE shop")
        create(server)
        yield server


def create(server):
    engine = engine_of(server.url("shop"))
    TOPIC.outbox.tables.rows.metadata.create_all(engine)
    engine.dispose()


def place(server, *numbers):
    engine = engine_of(server.url("shop"))
    with Session(engine) as session, session.begin():
        for number in numbers:
            TOPIC.add(session, OrderPlaced(number, f"c{number % 3}"))
    engine.dispose()


def relay_all(outbox, dsn):
    """Until none waits; raises what stops the relay."""
    stop, failed = threading.Event(), []
    relay = TableRelay(outbox, dsn, poll_ms=1)

    def run():
        try:
            relay.run(stop)
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive() and not ((rows := relay.status().rows) is not None and rows.waiting == 0):
        thread.join(0.01)
    stop.set()
    thread.join()
    if failed:
        raise failed[0]


def numbers(outbox):
    return sorted(number for _, number in relayed(outbox))


def test_the_servers_whole_surface_reaches_the_outbox_once(binaries, tmp_path):
    """COPY, a trigger, savepoints, a two-phase commit, asynchronous commits, an aborted and a long transaction."""
    with shop(binaries) as server, open_outbox(tmp_path / "outbox") as outbox:
        dsn = server.url("shop")
        insert = "INSERT INTO pushrep_outbox (topic, partition, value) VALUES ('orders', 0, %s)"
        long = psycopg.connect(dsn)
        long.execute(insert, [b'{"order": 1}'])
        with psycopg.connect(dsn) as service:
            service.execute("CREATE TABLE ledger (n int)")
            service.execute(
                "CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO pushrep_outbox "
                "(topic, partition, value) VALUES ('orders', 1, convert_to(json_build_object('order', NEW.n)::text, "
                "'utf8')); RETURN NULL; END $$"
            )
            service.execute("CREATE TRIGGER tell AFTER INSERT ON ledger FOR EACH ROW EXECUTE FUNCTION tell()")
        with psycopg.connect(dsn) as service:
            service.execute("SET synchronous_commit = off")
            service.execute("INSERT INTO ledger VALUES (2), (3)")
            with service.cursor().copy("COPY pushrep_outbox (topic, partition, value) FROM STDIN") as copy:
                for number in (4, 5):
                    copy.write_row(("orders", 0, b'{"order": %d}' % number))
            service.execute("SAVEPOINT a")
            service.execute(insert, [b'{"order": 90}'])
            service.execute("ROLLBACK TO a")
            service.execute("SAVEPOINT b")
            service.execute(insert, [b'{"order": 6}'])
        with psycopg.connect(dsn) as aborted:
            aborted.execute(insert, [b'{"order": 91}'])
            aborted.rollback()
        with psycopg.connect(dsn, autocommit=True) as service:
            for number, name in ((7, "kept"), (92, "given up")):
                service.execute("BEGIN")
                service.execute(insert, [b'{"order": %d}' % number])
                service.execute(f"PREPARE TRANSACTION '{name}'")
            relay_all(outbox, dsn)
            assert numbers(outbox) == [2, 3, 4, 5, 6]
            service.execute("COMMIT PREPARED 'kept'")
            held = told(dsn)
            assert held.who in {"prepared transaction given up", f"process {long.info.backend_pid} of postgres"}
            long.commit()
            assert told(dsn).who == "prepared transaction given up", "it has no process"
            service.execute("ROLLBACK PREPARED 'given up'")
            assert told(dsn) is None
        long.close()
        relay_all(outbox, dsn)
        assert numbers(outbox) == [1, 2, 3, 4, 5, 6, 7]


def told(dsn):
    database = RelayDatabase(dsn, "pushrep_outbox", "orders")
    try:
        return database.rows().snapshot
    finally:
        database.close()


def test_without_the_right_to_statistics_status_says_so(tmp_path):
    with shop(newest()) as server:
        with psycopg.connect(server.url("shop"), autocommit=True) as owner:
            owner.execute("CREATE USER relay")
            owner.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO relay")
        database = RelayDatabase(server.url("shop").replace("postgres@", "relay@"), "pushrep_outbox", "orders")
        with psycopg.connect(server.url("shop")) as other:
            other.execute("CREATE TABLE held (id int)")
            rows = database.rows()
        database.close()
        assert not rows.sees_all
        assert rows.snapshot is None


def test_a_restored_disk_copy_is_refused_by_name_or_goes_on_where_nothing_was_relayed_since(binaries, tmp_path):
    with shop(binaries) as server, open_outbox(tmp_path / "outbox") as outbox:
        place(server, 1, 2)
        relay_all(outbox, server.url("shop"))
        place(server, 3)
        server.stop()
        copy = server.copy_to(server.home / "copy")
        server.start()
        relay_all(outbox, server.url("shop"))
        assert numbers(outbox) == [1, 2, 3]
        server.kill()
        with Server(binaries, copy) as restored, pytest.raises(DatabaseWentBack, match="batch 1-2"):
            relay_all(outbox, restored.url("shop"))
        server.start()
        relay_all(outbox, server.url("shop"))
        server.stop()
        second = server.copy_to(server.home / "second")
        with Server(binaries, second) as restored:
            place(restored, 4)
            relay_all(outbox, restored.url("shop"))
        assert numbers(outbox) == [1, 2, 3, 4]


def test_a_dump_in_another_server_is_refused_by_name(tmp_path):
    with shop(newest()) as server, Server(newest()) as other, open_outbox(tmp_path / "outbox") as outbox:
        place(server, 1)
        relay_all(outbox, server.url("shop"))
        place(server, 2)
        dump = server.home / "dump.sql"
        as_server(newest() / "pg_dump", "-d", server.url("shop"), "-C", "-f", dump)
        as_server(newest() / "psql", "-q", "-d", other.url(), "-f", dump)
        with pytest.raises(DatabaseMoved, match="was made in database"):
            relay_all(outbox, other.url("shop"))
        relay_all(outbox, server.url("shop"))
        assert numbers(outbox) == [1, 2]


def test_another_database_of_the_same_server_is_refused_by_name(binaries, tmp_path):
    with shop(binaries) as server, open_outbox(tmp_path / "outbox") as outbox:
        place(server, 1)
        relay_all(outbox, server.url("shop"))
        with psycopg.connect(server.url(), autocommit=True) as admin:
            admin.execute("CREATE DATABASE other TEMPLATE shop")
        with pytest.raises(DatabaseMoved):
            relay_all(outbox, server.url("other"))


@contextmanager
def standby_of(server):
    """A standby that streams from it, asynchronously."""
    data = server.home / "standby"
    as_server(newest() / "pg_basebackup", "-d", server.url(), "-D", data, "-X", "stream", "-c", "fast")
    as_server("touch", data / "standby.signal")
    with Server(server.binaries, data, primary_conninfo=f"host={server.home} user=postgres") as standby:
        yield standby


def caught_up(server, standby):
    with psycopg.connect(server.url(), autocommit=True) as one, psycopg.connect(standby.url(), autocommit=True) as two:
        end = one.execute("SELECT pg_current_wal_lsn()").fetchone()[0]
        ahead = "SELECT coalesce(pg_last_wal_replay_lsn() >= %s::pg_lsn, false)"
        while not two.execute(ahead, [end]).fetchone()[0]:
            pass


def promote(standby):
    with psycopg.connect(standby.url(), autocommit=True) as admin:
        assert admin.execute("SELECT pg_promote(true, 60)").fetchone()[0]


def test_a_promoted_standby_that_has_the_state_goes_on_and_one_that_lost_it_is_refused(binaries, tmp_path):
    with shop(binaries) as server, open_outbox(tmp_path / "outbox") as outbox, standby_of(server) as standby:
        place(server, 1)
        relay_all(outbox, server.url("shop"))
        caught_up(server, standby)
        with pytest.raises(UnfitDatabase, match="standby"):
            relay_all(outbox, standby.url("shop"))
        both = f"postgresql://postgres@/shop?host={standby.home},{server.home}&target_session_attrs=read-write"
        place(server, 2)
        relay_all(outbox, both)
        caught_up(server, standby)
        lost = standby.home / "lost"
        standby.stop()
        standby.copy_to(lost)
        standby.start()
        place(server, 3)
        relay_all(outbox, both)
        caught_up(server, standby)
        server.kill()
        promote(standby)
        place(standby, 4)
        relay_all(outbox, both)
        assert numbers(outbox) == [1, 2, 3, 4]
        with Server(binaries, lost) as behind:
            promote(behind)
            with pytest.raises(DatabaseWentBack, match="batch"):
                relay_all(outbox, behind.url("shop"))


def test_a_running_relay_goes_on_at_the_promoted_standby(binaries, tmp_path):
    with shop(binaries) as server, open_outbox(tmp_path / "outbox") as outbox, standby_of(server) as standby:
        both = f"postgresql://postgres@/shop?host={server.home},{standby.home}&target_session_attrs=read-write"
        with TableRelay(outbox, both, poll_ms=1) as relay:
            place(server, 1, 2)
            wait_for(relay, outbox, 2)
            caught_up(server, standby)
            server.kill()
            promote(standby)
            place(standby, 3)
            wait_for(relay, outbox, 3)
        assert numbers(outbox) == [1, 2, 3]


def wait_for(relay, outbox, count):
    waits = threading.Event()
    while sum(outbox.log(n).log_end_offset for n in range(2)) < count:
        assert not relay.status().is_stopped, relay.status().trouble
        waits.wait(0.02)
    while (rows := relay.status().rows) is None or rows.waiting:
        waits.wait(0.02)


@contextmanager
def pooled(server):
    """PgBouncer in transaction mode before it; the URL of its database."""
    if shutil.which("pgbouncer") is None:
        pytest.skip("PgBouncer is not installed")
    home = server.home / "pool"
    config = server.home / "pgbouncer.ini"
    config.write_text(
        f"[databases]\n* = host={server.home} user=postgres\n[pgbouncer]\nlisten_addr =\nunix_socket_dir = {home}\n"
        "listen_port = 5432\nadmin_users = postgres\npool_mode = transaction\nauth_type = any\ndefault_pool_size = 4\n"
        f"server_login_retry = 1\nmax_client_conn = 100\nlogfile = {home}/log\n"
    )
    home.mkdir()
    home.chmod(0o777)
    config.chmod(0o644)
    process = subprocess.Popen(["pgbouncer", str(config)], stderr=subprocess.DEVNULL, cwd="/", **USER)
    try:
        yield f"postgresql://postgres@/shop?host={home}"
    finally:
        process.terminate()
        process.wait()


def test_behind_a_pooler_that_gives_each_transaction_another_session(tmp_path):
    with shop(newest()) as server, pooled(server) as dsn, open_outbox(tmp_path / "outbox") as outbox:
        with TableRelay(outbox, dsn, poll_ms=1) as relay:
            for number in range(30):
                place(server, number)
            wait_for(relay, outbox, 30)
            server.kill()
            server.start()
            place(server, 30)
            wait_for(relay, outbox, 31)
        assert numbers(outbox) == list(range(31))


def test_a_pooler_that_leads_to_another_database_by_now_is_found_out_by_the_next_write(tmp_path):
    """A copy of it, say of a move to a newer server: the connection to the pooler stays, so nothing else tells."""
    with shop(newest()) as server, pooled(server) as dsn, open_outbox(tmp_path / "outbox") as outbox:
        relay = TableRelay(outbox, dsn, poll_ms=1).start()
        place(server, 1)
        wait_for(relay, outbox, 1)
        with psycopg.connect(server.url(), autocommit=True) as admin:
            admin.execute("CREATE DATABASE copy")
        as_server(newest() / "pg_dump", "-d", server.url("shop"), "-f", server.home / "dump.sql")
        as_server(newest() / "psql", "-q", "-d", server.url("copy"), "-f", server.home / "dump.sql")
        config = server.home / "pgbouncer.ini"
        elsewhere = f"[databases]\nshop = host={server.home} user=postgres dbname=copy\n"
        config.write_text(config.read_text().replace("[databases]\n", elsewhere))
        with psycopg.connect(dsn.replace("/shop", "/pgbouncer"), autocommit=True) as console:
            console.execute("RELOAD")
        with psycopg.connect(server.url("copy")) as service:
            service.execute("INSERT INTO pushrep_outbox (topic, partition, value) VALUES ('orders', 0, '{}')")
        waits = threading.Event()
        while not relay.status().is_stopped:
            waits.wait(0.02)
        with pytest.raises(DatabaseMoved):
            relay.close()
        assert numbers(outbox) == [1]
