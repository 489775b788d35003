"""What the tables refuse, named for what the caller does next.

NotInTransaction     begin a transaction, then `add`
UnfitDatabase        another database, or another server of this one
TablesDiffer         create or migrate the tables
DatabaseFailed       see what the database says
AnotherRelay         stop one of the two
OutboxWentBack       pushrep tables adopt
DatabaseWentBack     pushrep tables adopt
DatabaseMoved        pushrep tables adopt
RowRefused           correct the row, or park it
"""

import shlex

from pushrep.errors import PushrepError

ADOPT = "pushrep tables adopt DSN --outbox {}"


class TablesError(PushrepError):
    """The root of this room's errors."""


class NotInTransaction(TablesError):
    """`add` was called outside of a transaction: the event would not share the fate of the change that it tells of."""

    def __init__(self) -> None:
        super().__init__(
            "the connection commits each statement by itself (autocommit): begin a transaction, change the row, then "
            "add the event in it"
        )


class UnfitDatabase(TablesError):
    """The relay can't work on this database; the message says why."""


class TablesDiffer(TablesError):
    """A table of the outbox is not there, or of another version: create it with the service's MetaData, or migrate."""


class DatabaseFailed(TablesError):
    """The database does not answer, or refuses a statement; the message is its own."""


class AnotherRelay(TablesError):
    """The rows of `topic` are relayed into another outbox, or under a newer grant of this one. One relay may go on."""

    def __init__(self, topic: str, outbox_id: str, why: str) -> None:
        super().__init__(
            f"the rows of topic {topic} are relayed into outbox {outbox_id}, {why}: stop one of the two. If the other "
            f"one is gone for good: {ADOPT.format('DIR')}"
        )
        self.topic, self.outbox_id = topic, outbox_id


class StateChanged(AnotherRelay):
    """The state under this very holder is not the one that the relay wrote last: the database went back, for one."""


class WentBack(TablesError):
    """Database and outbox do not continue each other, so the relay stops: rows would be missing or come twice."""

    def __init__(self, topic: str, why: str, outbox: str) -> None:
        super().__init__(
            f"topic {topic}: {why}. Find out which of the two was restored; then, to go on from the database as it is, "
            f"{ADOPT.format(shlex.quote(outbox))}, which first lists what may be missing or come twice"
        )
        self.topic, self.why = topic, why


class OutboxWentBack(WentBack):
    """The outbox lacks records that the database gave it and deleted: it is an old one, or a new directory."""


class DatabaseWentBack(WentBack):
    """The outbox holds records of batches that the database knows nothing of: an older state of it was restored."""


class DatabaseMoved(WentBack):
    """The state was made in another database: this is a dump or a logical copy of it."""


class RowRefused(TablesError):
    """The outbox refuses the row `row_id`, and so would each try: the relay stops there, or parks it."""

    def __init__(self, topic: str, row_id: int, why: str) -> None:
        super().__init__(
            f"row {row_id} of topic {topic} can't be appended: {why}. Correct or delete it, or let the relay go on "
            "without it: on_refused='park'"
        )
        self.topic, self.row_id, self.why = topic, row_id, why
