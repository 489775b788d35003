"""pushrep.django in a project of Django's own: migrations, `emit`, and `manage.py pushrep_relay`."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import MetaData, inspect, text

from pushrep.tables import OutboxTable
from tests.integration.outboxes import wait_until
from tests.programs import PythonProgram
from tests.tables.conftest import engine_of, new_database, open_outbox, relayed

PROJECT = Path(__file__).with_name("django_project")


MANAGE = f"""
import runpy, sys
sys.path.insert(0, {str(PROJECT)!r})
runpy.run_path({str(PROJECT / "manage.py")!r}, run_name="__main__")
"""


class Project:
    """The project, on a database."""

    def __init__(self, dsn):
        self._dsn = dsn

    def start(self, *words):
        return PythonProgram("-c", MANAGE, *words, has_errors=True, DSN=self._dsn)

    def run(self, *words, code=0):
        with self.start(*words) as process:
            said = process.stderr.read()
            assert process.wait() == code, said
        return said


@pytest.fixture
def project(dsn):
    made = Project(dsn)
    made.run("migrate", "--verbosity", "0")
    return made


def wait_relayed(engine, process):
    def is_empty():
        assert process.poll() is None, process.stderr.read()
        with engine.connect() as connection:
            return not connection.execute(text("SELECT count(*) FROM pushrep_outbox")).scalar()

    wait_until(is_empty, "all rows are relayed", 0.05)


def test_each_committed_event_is_relayed_once_though_the_relay_is_killed(engine, dsn, project, tmp_path):
    words = ("pushrep_relay", "--outbox", tmp_path / "outbox", "--topic", "orders", "--partitions", "2")
    kept = []
    for first in (0, 10):
        with project.start(*words, "--poll-ms", "1") as relay:
            numbers = range(first, first + 10)
            project.run("place", *numbers)
            kept += [number for number in numbers if number % 5 != 4]
            if first:
                wait_relayed(engine, relay)
            relay.send_signal(signal.SIGTERM if first else signal.SIGKILL)
            said = relay.stderr.read()
    assert "rows relayed" in said
    with open_outbox(tmp_path / "outbox", producer="pushrep-tables") as outbox:
        assert sorted(number for _, number in relayed(outbox)) == kept
    with engine.connect() as connection:
        assert connection.execute(text("SELECT number FROM shop_order ORDER BY number")).scalars().all() == kept


def test_migrations_make_the_tables_that_outbox_table_makes(engine, dsn, project, request, tmp_path):
    assert project.run("makemigrations", "--check", "--dry-run") == ""
    more = {"postgresql": lambda: next(other), "sqlite": lambda: f"sqlite:///{tmp_path / 'other.db'}"}
    if engine.dialect.name == "postgresql":
        other = new_database(request.getfixturevalue("postgresql"))
    beside = engine_of(more[engine.dialect.name]())
    metadata = MetaData()
    OutboxTable(metadata)
    metadata.create_all(beside)
    for name in ("pushrep_outbox", "pushrep_outbox_parked", "pushrep_outbox_relay"):
        assert look(engine, name) == look(beside, name), name
    beside.dispose()
    if engine.dialect.name == "postgresql":
        assert next(other, None) is None  # it is dropped


def look(engine, name):
    """What a table is made of, apart from the order of its columns."""
    if engine.dialect.name == "sqlite":
        with engine.connect() as connection:
            made = connection.execute(text("SELECT sql FROM sqlite_master WHERE name = :name"), {"name": name}).scalar()
            found = connection.execute(text(f"PRAGMA table_info({name})")).all()
        columns = {
            one.name: (one.type.lower(), one.notnull, re.sub(r"[()]", "", one.dflt_value or ""), one.pk)
            for one in found
        }
        return columns, "AUTOINCREMENT" in made
    looked = inspect(engine)
    with engine.connect() as connection:
        statement = (
            "SELECT column_name, data_type, is_nullable, column_default, is_identity, identity_generation, "
            "identity_increment FROM information_schema.columns WHERE table_name = :name ORDER BY column_name"
        )
        columns = connection.execute(text(statement), {"name": name}).all()
        sequence = text("SELECT seqcache FROM pg_sequence WHERE seqrelid = to_regclass(:name)")
        caches = connection.execute(sequence, {"name": f"{name}_id_seq"}).scalars().all()
    # Django makes an index for LIKE beside each primary key of text.
    indexes = [one["name"] for one in looked.get_indexes(name) if not one["name"].endswith("_like")]
    return columns, looked.get_pk_constraint(name)["constrained_columns"], indexes, caches


def test_a_wrong_use_is_told_as_the_command_line_tells_it(tmp_path):
    project = Project(f"sqlite:///{tmp_path / 'shop.db'}")
    assert "give --topic" in project.run("pushrep_relay", "--outbox", tmp_path / "outbox", code=2)


def test_the_projects_database_is_the_relays(tmp_path, monkeypatch):
    """In a program of its own: Django takes its settings once in a process."""
    program = """
import os, sys, json
import django
from django.conf import settings
password = "p@ss/w:rd ?&%"
settings.configure(INSTALLED_APPS=["pushrep.django"], DATABASES={"default": {
    "ENGINE": "django.db.backends.postgresql", "NAME": "shop", "USER": "a user", "PASSWORD": password,
    "HOST": "one,two", "OPTIONS": {"target_session_attrs": "read-write", "isolation_level": 3, "pool": False}}})
django.setup()
from django.db import connections
from sqlalchemy import make_url
from pushrep.django.management.commands.pushrep_relay import dsn_of
url = make_url(dsn_of(connections["default"]))
print(json.dumps([url.username, url.password == password, url.database, dict(url.query)]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    user, is_same, database, query = json.loads(done.stdout)
    assert (user, is_same, database) == ("a user", True, "shop")
    assert (query["host"], query["target_session_attrs"]) == ("one,two", "read-write")
