"""The settings of an outbox that may change at each opening. Each class checks its values when it is made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Annotated, Any

from filtering.extras import needed_by
from pushrep.election.standby import TAKEOVER_AFTER_MS, TAKEOVER_PAUSE_MS, TakeoverTimes
from pushrep.errors import BadArgument
from pushrep.kafka.destination import KafkaDestination
from pushrep.log import Durability, LogConfig
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address
from pushrep.settings import DURATION_MAX_MS, DURATION_MAX_S, Between, check, with_near_names
from pushrep.values import MakesBytes, PartitionBy, refuse_serializer

RETENTION_DEFAULT_MS = 7 * 86_400_000
"""How long an outbox with a destination keeps what the topic has, if nothing else is said: as Kafka's own topics."""
_MEMBERS_MAX = 256  # an index has 8 bits
_TAKEOVER_AFTER_MIN_MS = 2_000  # a leader sends a heartbeat once a second

_Ms = Annotated[int, Between(0, DURATION_MAX_MS)]
_MsFromOne = Annotated[int, Between(1, DURATION_MAX_MS)]
_Seconds = Annotated[float, Between(0, DURATION_MAX_S)]


class Acks(Enum):
    """Which members must have a record before its receipt is done."""

    LOCAL = auto()
    """The leader alone, with the outbox's durability."""

    ALL = auto()
    """Every in-sync member, and at least `min_insync_replicas` members, the leader counted."""


class OnDiverged(Enum):
    """What `open` and `append` do if the topic holds other records than the log, which stops shipping."""

    REFUSE = auto()
    """They raise the error that stopped shipping."""

    GO_ON = auto()
    """They go on. Nothing is shipped until `pushrep outbox rebase`."""


@with_near_names
@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxConfig:
    """Limits, times and sizes of an outbox: `Outbox.open(..., config=OutboxConfig(linger_ms=20))`. Any of them may be
    another at the next opening. Raises BadArgument, which names the setting.

    linger_ms: how long a batch waits for more records. 0: it does not wait. Asking a receipt for its result writes its
        batch at once.
    buffer_bytes: the memory for records that are not acknowledged yet. If it is used up, `append` waits.
    block_ms: how long `append` waits for memory before it raises `BufferFull`.
    close_timeout_s: how long `close` waits for records that are not acknowledged yet: for the disk, with ALL for
        replicas, too.
    open_timeout_s: how long `open` waits for answers of the replicas, with ALL for `min_insync_replicas` in-sync
        members, and for Kafka's brokers. Afterwards the outbox opens without them, and goes on connecting.
    min_insync_replicas: with ALL, how many members must hold a record before it is acknowledged, this one counted.
        None: more than half of the members. Fixed together with the replicas.
    delivery_timeout_ms: with ALL, a record that too few members have after this time fails as "may be delivered".
    replica_lag_max_ms: a replica that lacks a record for longer than this is no longer in sync.
    takeover_after_ms: a standby looks for a takeover once the leader was silent for so long, and a leader gives the
        lead up once it reached no majority, or could not append, for so long. The same on every member.
    takeover_pause_ms: the shortest time between two takeovers; the first one does not wait. The same on every member.
    on_diverged: what `open` and `append` do if the topic holds other records than this log, which stops shipping.
        refuse: they raise `OutboxDiverged`. go_on: they go on, and `lag()` shows the trouble.
    create: whether to make an outbox if the directory has none. False: raise `NoOutbox`, so that a mistyped path makes
        no new one.
    accept_loss: whether to open an outbox with a partition whose directory held records and is missing, with a PID of
        the next epoch. With replicas its records are fetched; if no replica that answers has all of them, `LogNotFit`
        is raised.
    copy_check: whether to detect a directory that is a copy of another one (a restored backup, a clone). A copy gets a
        PID with its own epoch; with replicas `DirectoryIsCopy` is raised.
    log_config: the files and the disk: sizes, compression, retention, the limits at which appends are refused.
    push: TLS, limits and timeouts of the connections to replicas.
    """

    linger_ms: _Ms = 5
    buffer_bytes: Annotated[int, Between(1)] = 64 << 20
    block_ms: _Ms = 60_000
    close_timeout_s: _Seconds = 30.0
    open_timeout_s: _Seconds = 5.0
    min_insync_replicas: Annotated[int | None, Between(1, _MEMBERS_MAX)] = None
    delivery_timeout_ms: _MsFromOne = 120_000
    replica_lag_max_ms: _MsFromOne = 30_000
    takeover_after_ms: Annotated[int, Between(_TAKEOVER_AFTER_MIN_MS, DURATION_MAX_MS)] = TAKEOVER_AFTER_MS
    takeover_pause_ms: _Ms = TAKEOVER_PAUSE_MS
    on_diverged: OnDiverged = OnDiverged.REFUSE
    create: bool = True
    accept_loss: bool = False
    copy_check: bool = True
    log_config: LogConfig = field(default_factory=LogConfig)
    push: PushSettings = field(default_factory=PushSettings)

    def __post_init__(self) -> None:
        check(self)
        if self.buffer_bytes < (least := self.log_config.batch_target_bytes):
            raise BadArgument("buffer_bytes", f"{self.buffer_bytes} is less than one batch of batch_bytes={least}")

    @property
    def record_bytes_max(self) -> int:
        """The largest batch, and so the largest record, that the log takes."""
        return self.log_config.batch_limit_bytes

    @property
    def takeover_times(self) -> TakeoverTimes:
        """The times of standing by."""
        return TakeoverTimes(takeover_after_ms=self.takeover_after_ms, takeover_pause_ms=self.takeover_pause_ms)


DEFAULT_CONFIG = OutboxConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxSettings:
    """What one opening is given beside its directory and its fixed settings; see `Outbox.open`. acks None: ALL with
    replicas, else LOCAL. Raises BadArgument.
    """

    replicas: Sequence[str] = ()
    kafka: KafkaDestination | None = None
    acks: Acks | None = None
    durability: Durability = Durability.FLUSHED
    serializer: MakesBytes | None = None
    key_serializer: MakesBytes | None = None
    partition_by: PartitionBy = None
    health: Any = None  # a HealthSettings, which is checked below: its module brings an HTTP server
    config: OutboxConfig = DEFAULT_CONFIG

    def __post_init__(self) -> None:
        check(self)
        refuse_serializer("serializer", self.serializer)
        refuse_serializer("key_serializer", self.key_serializer)
        if self.health is not None:
            from pushrep.health import HealthSettings  # noqa: PLC0415 - see above

            if not isinstance(self.health, HealthSettings):
                raise BadArgument("health", f"give a HealthSettings, not {type(self.health).__name__}")
        if self.kafka is not None:
            with needed_by("Outbox.open(kafka=...)"):  # an extra of its own, which a standby loads before it waits
                import pushrep.kafka.sink  # noqa: F401, PLC0415
        try:
            addresses = {Address.parse(text) for text in self.replicas}
        except BadArgument as error:
            raise BadArgument("replicas", error.why) from error
        if not len(addresses) == len(self.replicas) < _MEMBERS_MAX:
            raise BadArgument("replicas", f"give each address once, {_MEMBERS_MAX - 1} at most: {self.replicas}")
        if self.acks is Acks.ALL and not self.replicas:
            raise BadArgument(
                "acks",
                "ALL needs replicas=[...], or --replica of a command: without them a record is in this log alone",
            )
        if (least := self.config.min_insync_replicas) is not None:
            if not self.replicas:
                raise BadArgument("min_insync_replicas", "there are no replicas: leave it out")
            if least > len(self.replicas) + 1:
                raise BadArgument(
                    "min_insync_replicas", f"give a number between 1 and {len(self.replicas) + 1}, not {least}"
                )

    def refuse_keys(self, carrier: str) -> None:
        """Raise BadArgument for a setting of keys where the metadata takes the key of each record."""
        of_keys = {"key_serializer": self.key_serializer is not None, "partition_by": self.partition_by == "key"}
        for name, is_given in of_keys.items():
            if carrier == "key" and is_given:
                why = "this outbox carries the metadata in the key, so a record can't have one of its own"
                raise BadArgument(name, f"{why}: make the outbox with carrier='header'")

    @property
    def needs_all(self) -> bool:
        """Whether receipts wait for replicas."""
        return bool(self.replicas) and self.acks is not Acks.LOCAL

    def log_config(self, *, ships: bool, kept: Mapping[str, Any]) -> LogConfig:
        """The config of the logs. ships: whether the outbox has a destination: then the default of retention_ms is 7
        days. kept: settings that stand above those of this opening. Raises BadArgument.
        """
        config = replace(self.config.log_config, **kept)
        if not ships or config.retention_ms is not None or config.retention_bytes is not None:
            return config
        return replace(config, retention_ms=RETENTION_DEFAULT_MS)
