"""What stops the way from a log to a Kafka topic, named for what the caller does next.

DestinationRefused, TopicMissing   change or make the topic         ShippingStopped   look at the record it names
DestinationAhead                   begin a new PID epoch            ShippingTimeout   wait longer, look at `lag()`
CorruptDestinationsFile            restore or remove the file
"""

from pathlib import Path

from pushrep.errors import PushrepError


class ShippingError(PushrepError):
    """Anything that keeps records from reaching a Kafka topic."""


class DestinationRefused(ShippingError):
    """The topic's settings would lose or hide records; `setting` names the one to change. Nothing was sent."""

    def __init__(self, topic: str, setting: str, value: object, why: str) -> None:
        super().__init__(f"topic {topic}: {setting}={value}: {why}")
        self.topic, self.setting, self.value, self.why = topic, setting, value, why


class TopicMissing(ShippingError):
    """There is no such topic; make it, since its number of partitions is fixed at first use."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic} does not exist: make it, with cleanup.policy=delete")
        self.topic = topic


class DestinationAhead(ShippingError):
    """The topic holds records of this outbox that its log does not have: the log went back, as by a restored copy.

    What is appended now would take offsets that readers have seen already. Nothing was sent.
    """

    def __init__(self, partition: int, *, shipped_offset: int, log_end_offset: int, pid_epoch: int) -> None:
        super().__init__(
            f"the topic holds offset {shipped_offset} of partition {partition} under PID epoch {pid_epoch}, and the "
            f"log ends at {log_end_offset}: it was restored from an older copy; begin a new PID epoch before the "
            "first append (pushrep.outbox.begin_pid_epoch)"
        )
        self.partition, self.shipped_offset = partition, shipped_offset
        self.log_end_offset, self.pid_epoch = log_end_offset, pid_epoch


class CorruptDestinationsFile(ShippingError):
    """destinations.json can't be believed: restore it, or remove it to ship again from the log's start.

    It holds how many partitions of the topic are used. A topic that has grown since needs `pushrep outbox repartition`
    after the file was removed: readers would meet records of one pair in two partitions.
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}; restore it from a copy, or remove it to ship again from the log's start")
        self.path, self.why = path, why


class ShippingStopped(ShippingError):
    """A partition goes no further until somebody acts; it is tried again now and then. `offset` is the first unsent."""

    def __init__(self, partition: int, offset: int, reason: str) -> None:
        super().__init__(f"partition {partition} is stopped at offset {offset}: {reason}")
        self.partition, self.offset, self.reason = partition, offset, reason


class ShippingTimeout(ShippingError, TimeoutError):
    """Not everything was acknowledged in time; nothing is lost, it is still being sent."""

    def __init__(self, timeout: float, records: int, reason: str | None) -> None:
        why = f"; the last trouble: {reason}" if reason else ""
        super().__init__(f"{records} records were not acknowledged by the topic within {timeout} s{why}")
        self.timeout, self.records, self.reason = timeout, records, reason


class RecordAboveLimit(ShippingError):
    """A single record that the topic does not take: its max.message.bytes is smaller."""

    def __init__(self, offset: int, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"the record at offset {offset} makes a batch of {size_bytes} bytes, above max.message.bytes="
            f"{limit_bytes}: raise that, or give the record up: pushrep outbox skip {offset} --reason ..."
        )
        self.offset, self.size_bytes, self.limit_bytes = offset, size_bytes, limit_bytes


class TopicReplaced(ShippingError):
    """The topic of this name is another one now: what was known of it is void."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic} was deleted and made again")
        self.topic = topic


class NotPinned(ShippingError):
    """How many partitions are used is not known to enough members yet; it is said again until it is."""

    def __init__(self, why: str) -> None:
        super().__init__(f"how many partitions are used is not kept by enough members yet: {why}")
        self.why = why


class KafkaUnreachable(ShippingError):
    """No broker answered; the service goes on, and what it appends is sent later."""

    def __init__(self, why: str) -> None:
        super().__init__(f"Kafka can't be reached: {why}")
        self.why = why
