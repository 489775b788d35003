"""Why records can't be shipped to a Kafka topic, named for what the caller does next.

DestinationRefused, TopicMissing   change or make the topic         ShippingStopped   look at the record it names
AnotherCluster                     correct bootstrap_servers
DestinationAhead                   begin a new PID epoch            ShippingTimeout   wait longer, look at `lag()`
OutboxDiverged                     pushrep outbox rebase            TopicLostRecords  pushrep outbox rebase
RecordsParked                      pushrep outbox parked list       OutboxTakenOver   close one of two instances
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote

from pushrep.errors import PushrepError
from pushrep.records import Record


class ShippingError(PushrepError):
    """The root of the errors of shipping."""


class DestinationRefused(ShippingError):
    """The topic's settings would lose or hide records; `setting` names the one to change. Nothing was sent."""

    def __init__(self, topic: str, setting: str, value: object, why: str) -> None:
        super().__init__(f"topic {topic}: {setting}={value}: {why}")
        self.topic, self.setting, self.value, self.why = topic, setting, value, why


class TopicMissing(ShippingError):
    """There is no such topic. Make it: how many of its partitions are used is fixed at first use."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic} does not exist: make it, with cleanup.policy=delete")
        self.topic = topic


class AnotherCluster(ShippingError):
    """Brokers of another cluster answer where the topic's cluster was. Nothing is sent to them.

    `expected` is the topic's cluster id, `found` theirs.
    """

    def __init__(self, topic: str, servers: str, *, expected: str, found: str) -> None:
        super().__init__(
            f"topic {topic} is in Kafka cluster {expected}, and {servers} answers as cluster {found}: nothing is sent "
            "there. Correct bootstrap_servers. If the outbox is to ship to that cluster from now on, stop the service, "
            f"then: pushrep outbox skip all --directory DIRECTORY --topic {topic}"
        )
        self.topic, self.servers, self.expected, self.found = topic, servers, expected, found


class DestinationAhead(ShippingError):
    """The topic holds records of this outbox that its log does not have: the log was restored from an older copy.

    New records would get offsets that readers have seen. Nothing was sent. `pid_epoch`: of the records in the topic.
    """

    def __init__(self, partition: int, *, shipped_offset: int, log_end_offset: int, pid_epoch: int) -> None:
        super().__init__(
            f"the topic holds offset {shipped_offset} of partition {partition} under PID epoch {pid_epoch}, and the "
            f"log ends at {log_end_offset}: it was restored from an older copy. Stop the service, then: pushrep log "
            "new-epoch DIRECTORY, before anything is appended; pushrep outbox rebase DIRECTORY, if something was"
        )
        self.partition, self.shipped_offset = partition, shipped_offset
        self.log_end_offset, self.pid_epoch = log_end_offset, pid_epoch


class OutboxDiverged(ShippingError):
    """The topic and this log hold different records at one position, and readers take one for the other.

    The log was restored from an older copy and appended to, or two copies of a directory were used. Shipping stops.
    `offset` is the log's, `topic_offset` that of the record in partition `topic_partition` of the topic; `in_log` and
    `in_topic` are both records.
    """

    def __init__(  # noqa: PLR0913 - both records, and where they lie
        self, partition: int, offset: int, *, in_log: Record, in_topic: Record, topic: str, topic_partition: int
    ) -> None:
        differs = [name for name in ("key", "value", "headers", "timestamp_ms")
                   if getattr(in_log, name) != getattr(in_topic, name)]  # fmt: skip
        super().__init__(
            f"offset {offset} of partition {partition} and offset {in_topic.offset} of {topic}-{topic_partition} have "
            f"one position and are two records: {' and '.join(differs)} differ (value in the log: "
            f"{_size(in_log.value)}, in the topic: {_size(in_topic.value)}). The outbox was restored from an older "
            "copy, or copied. Stop the service, then: pushrep outbox rebase DIRECTORY"
        )
        self.partition, self.offset, self.in_log, self.in_topic = partition, offset, in_log, in_topic
        self.topic, self.topic_partition, self.topic_offset = topic, topic_partition, in_topic.offset


def _size(value: bytes | None) -> str:
    return "null" if value is None else f"{len(value)} bytes"


class TopicLostRecords(ShippingError):
    """The topic has lost records that it had acknowledged, for example by an unclean leader election.

    `lost`: by log partition the range [first, end) of its offsets. Shipping stops, so that they can be sent again
    before later records: readers that filter drop a record that comes after its successors.
    """

    def __init__(self, topic: str, lost: Mapping[int, tuple[int, int]]) -> None:
        ranges = ", ".join(f"offsets [{first}, {end}) of partition {p}" for p, (first, end) in lost.items())
        super().__init__(
            f"topic {topic} has lost what it had acknowledged: {ranges}. Stop the service, then: pushrep outbox rebase "
            "DIRECTORY; the next start sends again what the topic lacks"
        )
        self.topic, self.lost = topic, dict(lost)


class ShippingStopped(ShippingError):
    """A partition is stopped until somebody acts; it is retried now and then. `offset` is the first unsent one."""

    def __init__(self, partition: int, offset: int, reason: str) -> None:
        super().__init__(f"partition {partition} is stopped at offset {offset}: {reason}")
        self.partition, self.offset, self.reason = partition, offset, reason


class ShippingTimeout(ShippingError, TimeoutError):
    """Not everything was acknowledged in time. Nothing is lost; sending goes on."""

    def __init__(self, timeout: float, records: int, reason: str | None) -> None:
        why = f"; the last trouble: {reason}" if reason else ""
        super().__init__(f"{records} records were not acknowledged by the topic within {timeout:.3g} s{why}")
        self.timeout, self.records, self.reason = timeout, records, reason


def skip_command(offsets: int | str, partition: int, topic: str, directory: Path) -> str:
    """The command that gives these records up."""
    where = f"--partition {partition} --topic {topic} --directory {quote(str(directory))}"
    return f"pushrep outbox skip {offsets} {where} --reason WHY"


class RefusedByTopic(ShippingError):
    """The topic does not take this record, or would delete it on arrival. Its log partition is stopped there.

    directory: the outbox's. code: the broker's error, as in `answers.Code`; None: it was not sent. why: what is wrong,
    in the broker's words where it said so. setting: the setting that says so, its value and who set it, if one does.
    """

    def __init__(  # noqa: PLR0913 - what was refused, where and why
        self, topic: str, partition: int, offset: int, *, directory: Path, code: int | None, why: str, setting: str = ""
    ) -> None:
        way_out = f"The limit is {setting}: change it, or give the record up" if setting else "Give the record up"
        super().__init__(
            f"topic {topic} does not take the record at offset {offset} of partition {partition}: {why}. {way_out}: "
            f"{skip_command(offset, partition, topic, directory)}"
        )
        self.topic, self.partition, self.offset = topic, partition, offset
        self.code, self.why, self.setting = code, why, setting


class RecordsParked(ShippingError):
    """Everything else is in the topic: these records were refused, and are in the parking log (`on_refused="park"`).

    `places`: partition and offset of each, until an operator ends it.
    """

    def __init__(self, topic: str, places: Sequence[tuple[int, int]], directory: Path) -> None:
        named = ", ".join(f"offset {offset} of partition {partition}" for partition, offset in places[:10])
        more = f" and {len(places) - 10} more" if len(places) > 10 else ""
        super().__init__(
            f"topic {topic} refused {named}{more}: parked. See pushrep outbox parked list --directory "
            f"{quote(str(directory))}"
        )
        self.topic, self.places = topic, tuple(places)


class TopicReplaced(ShippingError):
    """The topic was deleted and made again: everything known of it is void."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic} was deleted and made again")
        self.topic = topic


class OutboxTakenOver(ShippingError):
    """Another instance of this outbox ships to the topic: a promoted member, or a copy of the directory.

    Nothing is sent any more, and brokers refuse what was in flight. With replicas, shipping goes on once enough members
    confirm that this one leads. Without, the next opening of the outbox takes over again.
    """

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(
            f"topic {topic} is shipped to by another instance of this outbox ({why}): see that only one is open, a "
            "directory and not its copy; opening it again takes over"
        )
        self.topic, self.why = topic, why


class BeginsAnew(ShippingError):
    """The session can't go on as it is, for example since what it knows of the topic may be wrong: begin another."""


class KafkaUnreachable(ShippingError):
    """Kafka does not do now what it was asked. The service goes on, and its records are sent later.

    error_code: the broker's, as in `answers.Code`; None: no broker answered. says: what failed, for the message.
    """

    def __init__(self, why: str, says: str = "Kafka can't be reached", error_code: int | None = None) -> None:
        super().__init__(f"{says}: {why}")
        self.why, self.error_code = why, error_code
