"""`manage.py pushrep_relay`: `pushrep tables relay` for a database of the project's settings."""

import sys
from typing import Any

import click
from django.core.management.base import BaseCommand
from django.db import DEFAULT_DB_ALIAS, connections
from sqlalchemy import URL

from pushrep.cli.main import run
from pushrep.cli.tables import relay
from pushrep.errors import BadArgument

_OURS = {"table"}  # the app's is fixed


class Command(BaseCommand):
    """All options but --database are those of `pushrep tables relay`."""

    help = "Append each committed row of a topic to its outbox, once, until SIGTERM or Ctrl-C."

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="The alias of the database with the rows.")
        for option in _options():
            parser.add_argument(*option.opts, help=(option.help or "").replace("%", "%%"), required=option.required)

    def handle(self, *_arguments: Any, **given: Any) -> None:
        words = ["tables", "relay", dsn_of(connections[given["database"]])]
        for option in _options():
            name = option.opts[0].lstrip("-").replace("-", "_")
            if (value := given.get(name)) is not None:
                words += [option.opts[0], str(value)]
        if code := run(words):
            sys.exit(code)


def _options() -> list[click.Option]:
    return [one for one in relay.params if isinstance(one, click.Option) and one.name not in _OURS]


def dsn_of(connection: Any) -> str:
    """The URL of a database of the project's, as the relay takes it. Raises BadArgument."""
    given = connection.get_connection_params()
    if connection.vendor == "sqlite":
        return URL.create("sqlite", database=str(given["database"])).render_as_string(hide_password=False)
    if connection.vendor != "postgresql":
        raise BadArgument("database", f"{connection.vendor} is neither postgresql nor sqlite")
    from psycopg import pq  # noqa: PLC0415 - SQLite needs none

    known = {one.keyword.decode() for one in pq.Conninfo.get_defaults()}
    # A host may be the folder of a socket, or several hosts: so in the query.
    query = {name: str(value) for name, value in given.items() if name in known and value not in {"", None}}
    user, password, database = (query.pop(name, None) for name in ("user", "password", "dbname"))
    url = URL.create("postgresql+psycopg", user, password, database=database, query=query)
    return url.render_as_string(hide_password=False)
