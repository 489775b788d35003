"""The outbox in the service's own database transaction: OutboxTable for the service, TableRelay for its rows.

service's transaction ─▶ row in OutboxTable ─▶ TableRelay ─▶ Outbox ─▶ replicas, Kafka, replay
"""

from filtering.extras import needed_by

with needed_by("pushrep.tables"):
    import sqlalchemy  # noqa: F401 - an extra of its own

from pushrep.outbox.status import OldestSnapshot, RelayStatus, TableRows
from pushrep.tables.decide import EVENT_ID, EventId
from pushrep.tables.errors import (
    AnotherRelay,
    DatabaseFailed,
    DatabaseMoved,
    DatabaseWentBack,
    NotInTransaction,
    OutboxWentBack,
    RowRefused,
    TablesDiffer,
    TablesError,
    UnfitDatabase,
    WentBack,
)
from pushrep.tables.outbox_table import OutboxTable, PendingRow, TableTopic
from pushrep.tables.relay import TableRelay

__all__ = [
    "EVENT_ID",
    "AnotherRelay",
    "DatabaseFailed",
    "DatabaseMoved",
    "DatabaseWentBack",
    "EventId",
    "NotInTransaction",
    "OldestSnapshot",
    "OutboxTable",
    "OutboxWentBack",
    "PendingRow",
    "RelayStatus",
    "RowRefused",
    "TableRelay",
    "TableRows",
    "TableTopic",
    "TablesDiffer",
    "TablesError",
    "UnfitDatabase",
    "WentBack",
]
