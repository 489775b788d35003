"""Django: the tables of an outbox as an app, and events in the transaction of `atomic`.

    INSTALLED_APPS = [..., "pushrep.django"]             and `manage.py migrate` makes the tables
    orders = outbox.topic("orders", OrderPlaced, partitions=4, key=...)
    with transaction.atomic():
        order.save()                                     the change
        emit(orders, OrderPlaced(order.pk))              and what tells of it: both are there, or neither

`manage.py pushrep_relay` brings the rows into an outbox. The tables are those that OutboxTable makes.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from filtering.extras import needed_by

with needed_by("pushrep.django"):
    from django.apps import apps as installed  # `apps` is a module here
    from django.db import connections, router, transaction

from sqlalchemy import MetaData

from pushrep.tables.errors import NotInTransaction, UnfitDatabase
from pushrep.tables.outbox_table import Event, OutboxTable, TableTopic

__all__ = ["emit", "outbox"]

outbox = OutboxTable(MetaData())
"""Of the app's tables: `outbox.topic(...)` declares a topic."""


def emit(
    topic: TableTopic[Event],
    event: Event,
    *,
    using: str | None = None,
    headers: Iterable[tuple[str, bytes | None]] = (),
    timestamp_ms: int | None = None,
) -> None:
    """Insert the event's row in the transaction that is open; its commit is the event's.

    topic: of `outbox.topic`. using: the database's alias; by default where the router writes the app's rows, which has
    to be where the change is written. Save, or lock by `select_for_update`, what the key names before: then events of a
    key are in the order of their commits. headers, timestamp_ms: as `TableTopic.add`. Raises what it raises, and
    UnfitDatabase for another database than PostgreSQL and SQLite.
    """
    alias = router.db_for_write(installed.get_model("pushrep", "OutboxRow")) if using is None else using
    connection: Any = connections[alias]
    if connection.vendor not in {"postgresql", "sqlite"}:
        raise UnfitDatabase(f"{connection.vendor} is neither postgresql nor sqlite")
    statement, values = topic.insertion(event, headers, timestamp_ms, mark="%s")
    if connection.get_autocommit():
        raise NotInTransaction
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
    if outbox.is_woken(topic.name):
        transaction.on_commit(partial(outbox.wake, topic.name), using=alias)
