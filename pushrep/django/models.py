"""The tables of pushrep/tables/schema.py in Django's words; a test compares what the two make.

Rows are inserted by `emit` and deleted by the relay. To look at them: `OutboxRow.objects.filter(topic="orders")`.
"""

from typing import Any

from django.db import models

from pushrep.tables import schema


class NumberField(models.Field):
    """PostgreSQL's `bigint`, or another type; in SQLite always `integer`, which counts by itself as a primary key."""

    postgresql = "bigint"

    def db_type(self, connection: Any) -> str:
        return self.postgresql if connection.vendor == "postgresql" else "integer"

    def from_db_value(self, value: Any, _expression: object, _connection: object) -> int | None:
        """xid8 is text to the driver."""
        return None if value is None else int(value)


class XidField(NumberField):
    """The transaction that inserted a row; 0 in SQLite."""

    postgresql = "xid8"


class IdentityField(models.BigAutoField):
    """An id that only the database gives."""

    def db_type_suffix(self, connection: Any) -> Any:
        if connection.vendor == "postgresql":
            return "GENERATED ALWAYS AS IDENTITY (CACHE 1)"
        return super().db_type_suffix(connection)


class XidDefault(models.Func):
    """The number of the transaction that inserts."""

    arity = 0
    output_field = XidField()

    def as_sql(self, _compiler: object, connection: Any, **_options: Any) -> tuple[str, list[Any]]:
        return schema.CURRENT_XID if connection.vendor == "postgresql" else schema.NO_XID, []


class CreatedDefault(models.Func):
    """The time of the insert, UTC, as ISO 8601 with milliseconds."""

    arity = 0
    output_field = models.TextField()

    def as_sql(self, _compiler: object, connection: Any, **_options: Any) -> tuple[str, list[Any]]:
        now = schema.NOW_POSTGRESQL if connection.vendor == "postgresql" else schema.NOW_SQLITE
        return now.replace("%", "%%"), []


class EventFields(models.Model):
    """What an event is made of."""

    topic = models.TextField()
    partition = models.IntegerField()
    key = models.BinaryField(null=True)
    value = models.BinaryField(null=True)
    headers = models.TextField(null=True)  # noqa: DJ001 - none is not the same as an empty one
    timestamp_ms = models.BigIntegerField(null=True)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"row {self.pk} of topic {self.topic}"


class OutboxRow(EventFields):
    """An event that waits for the relay."""

    id = IdentityField(primary_key=True)
    xid = XidField(db_default=XidDefault(), editable=False)
    created = models.TextField(db_default=CreatedDefault(), editable=False)

    class Meta:
        db_table = "pushrep_outbox"


class ParkedRow(EventFields):
    """An event that the outbox refused; `pushrep tables retry | drop ID`."""

    id = NumberField(primary_key=True)
    xid = XidField()
    created = models.TextField()
    why = models.TextField()

    class Meta:
        db_table = "pushrep_outbox_parked"


class RelayRow(models.Model):
    """How far a topic's one relay is."""

    topic = models.TextField(primary_key=True)
    version = models.IntegerField()
    outbox_id = models.TextField()
    directory_id = models.TextField()
    generation = models.BigIntegerField()
    leader_epoch = models.BigIntegerField()
    system_id = models.TextField()
    epoch = models.IntegerField()
    batch = models.BigIntegerField()
    is_open = models.IntegerField()
    snapshot = models.TextField(null=True)  # noqa: DJ001 - the relay's own
    previous = models.TextField(null=True)  # noqa: DJ001 - the relay's own
    ends = models.TextField()
    relayed = models.BigIntegerField()

    class Meta:
        db_table = "pushrep_outbox_relay"

    def __str__(self) -> str:
        return f"the relay of topic {self.topic}"
