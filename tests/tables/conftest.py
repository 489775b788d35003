"""Databases to relay from: SQLite in a file, and a PostgreSQL server of the tests, a database a test."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine

from pushrep import Outbox


@pytest.fixture(params=["sqlite", "postgresql"])
def dsn(request, tmp_path) -> Iterator[str]:
    """The URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'shop.db'}"
        return
    yield from new_database(request.getfixturevalue("postgresql"))


@pytest.fixture
def postgresql_dsn(postgresql) -> Iterator[str]:
    yield from new_database(postgresql)


def new_database(server: str) -> Iterator[str]:
    name = f"shop_{uuid.uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
    head, _, tail = server.partition("?")
    base = head.rsplit("/", 1)[0]
    yield f"{base}/{name}" + (f"?{tail}" if tail else "")
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def engine(dsn):
    """The service's own engine."""
    engine = engine_of(dsn)
    yield engine
    engine.dispose()


def engine_of(dsn):
    return create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))


@dataclass(frozen=True)
class OrderPlaced:
    order: int
    customer: str


def open_outbox(directory: Path, topic="orders", partitions=2, producer="shop", **settings) -> Outbox:
    return Outbox.open(directory, topic, partitions, producer, carrier="header", **settings)


def relayed(outbox) -> list[tuple[int, int]]:
    """(partition, order) of each record, by partition and offset."""
    import json

    return [
        (n, json.loads(record.value)["order"])
        for n in range(outbox.identity.partitions)
        for record in outbox.log(n).records(0)
    ]
