"""The settings of an outbox that may change at each opening. Each class checks its values when it is made."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, cast

from pushrep.election.standby import TakeoverTimes
from pushrep.errors import BadArgument
from pushrep.kafka.destination import KafkaDestination
from pushrep.log import Durability, LogConfig
from pushrep.outbox.errors import SettingRefused
from pushrep.records import Codec
from pushrep.replicate.settings import PushSettings
from pushrep.replicate.sockets import Address

if TYPE_CHECKING:
    from pushrep.health import HealthSettings

BATCH_BYTES = 256 << 10
"""Small enough that a batch stays in the processor's cache while it is encoded and its CRC is computed."""
BUFFER_BYTES = 64 << 20
_MEMBERS_MAX = 256  # an index has 8 bits
_TAKEOVER_AFTER_MIN_MS = 2_000  # a leader sends a heartbeat once a second
_DURATION_MAX_MS = 1 << 40
"""34 years. The operating system's waits fail for a few centuries or more."""


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


_WORDS = (
    ("on_diverged", OnDiverged, "OnDiverged.REFUSE or GO_ON"),
    ("durability", Durability, "Durability.FLUSHED or BUFFERED"),
    ("codec", Codec, "a pushrep.Codec"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """The settings of replication; see `Outbox.open`. acks None: ALL with replicas, else LOCAL.

    Raises SettingRefused.
    """

    replicas: Sequence[str] = ()
    acks: Acks | None = None
    min_insync_replicas: int | None = None
    delivery_timeout_ms: int = 120_000
    replica_lag_max_ms: int = 30_000
    open_timeout_s: float = 5.0
    push: PushSettings | None = None

    def __post_init__(self) -> None:
        if isinstance(self.replicas, str) or not all(isinstance(one, str) for one in self.replicas):
            raise SettingRefused("replicas", f"give a list of 'host:port', not {self.replicas!r}")
        try:
            addresses = {Address.parse(text) for text in self.replicas}
        except BadArgument as error:
            raise SettingRefused("replicas", error.why) from error
        if not len(addresses) == len(self.replicas) < _MEMBERS_MAX:
            raise SettingRefused("replicas", f"give each address once, {_MEMBERS_MAX - 1} at most: {self.replicas}")
        if not isinstance(self.acks, Acks | None):
            raise SettingRefused("acks", f"give Acks.LOCAL or Acks.ALL, not {self.acks!r}")
        if self.acks is Acks.ALL and not self.replicas:
            raise SettingRefused(
                "acks",
                "ALL needs replicas=[...], or --replica of a command: without them a record is in this log alone",
            )
        if self.min_insync_replicas is not None:
            if not self.replicas:
                raise SettingRefused("min_insync_replicas", "there are no replicas: leave it out")
            _check_number("min_insync_replicas", self.min_insync_replicas, 1, int, len(self.replicas) + 1)
        for setting in ("delivery_timeout_ms", "replica_lag_max_ms"):
            _check_number(setting, getattr(self, setting), 1, int, _DURATION_MAX_MS)
        _check_number("open_timeout_s", self.open_timeout_s, 0, int | float, _DURATION_MAX_MS // 1000)
        if not isinstance(self.push, PushSettings | None):
            raise SettingRefused("push", f"give a PushSettings, not {type(self.push).__name__}")

    @property
    def needs_all(self) -> bool:
        """Whether receipts wait for replicas."""
        return bool(self.replicas) and self.acks is not Acks.LOCAL


RETENTION = ("retention_ms", "retention_bytes")
"""Settings of an outbox, and of its `LogConfig` if the outbox's are None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxSettings:
    """All settings of an outbox; see `Outbox.open`. Raises SettingRefused, which names the argument."""

    replicas: ReplicaSettings
    kafka: KafkaDestination | None
    on_diverged: OnDiverged
    durability: Durability
    codec: Codec
    linger_ms: int
    batch_bytes: int
    buffer_bytes: int
    block_ms: int
    close_timeout_s: float
    accept_loss: bool
    copy_check: bool
    retention_ms: int | None
    retention_bytes: int | None
    log_config: LogConfig
    health: "HealthSettings | None"

    def __post_init__(self) -> None:
        if self.kafka is not None and not isinstance(self.kafka, KafkaDestination):
            raise SettingRefused("kafka", f"give a KafkaDestination, not {type(self.kafka).__name__}")
        check_flags(accept_loss=self.accept_loss, copy_check=self.copy_check)
        _check_health(self.health)
        for setting, kind, known in _WORDS:
            if not isinstance(value := getattr(self, setting), kind):
                raise SettingRefused(setting, f"give {known}, not {value!r}")
        for setting in ("linger_ms", "block_ms"):
            _check_number(setting, getattr(self, setting), 0, int, _DURATION_MAX_MS)
        for setting in ("batch_bytes", "buffer_bytes"):
            _check_number(setting, getattr(self, setting), 1, int)
        _check_number("close_timeout_s", self.close_timeout_s, 0, int | float, _DURATION_MAX_MS // 1000)
        for setting in RETENTION:
            if (value := getattr(self, setting)) is not None:
                _check_number(setting, value, -1, int)
        if self.batch_bytes > self.record_bytes_max:
            raise SettingRefused(
                "batch_bytes",
                f"{self.batch_bytes} exceeds the largest batch of the log, {self.record_bytes_max}",
            )
        if self.buffer_bytes < self.batch_bytes:
            raise SettingRefused(
                "buffer_bytes", f"{self.buffer_bytes} is less than one batch of batch_bytes={self.batch_bytes}"
            )

    @property
    def record_bytes_max(self) -> int:
        """The largest batch, and so the largest record, that the log takes."""
        return self.log_config.batch_limit_bytes


def checked_times(takeover_after_ms: object, takeover_pause_ms: object) -> TakeoverTimes:
    """The times of `Outbox.stand_by`, checked. Raises SettingRefused."""
    _check_number("takeover_after_ms", takeover_after_ms, _TAKEOVER_AFTER_MIN_MS, int, _DURATION_MAX_MS)
    _check_number("takeover_pause_ms", takeover_pause_ms, 0, int, _DURATION_MAX_MS)
    return TakeoverTimes(
        takeover_after_ms=cast("int", takeover_after_ms), takeover_pause_ms=cast("int", takeover_pause_ms)
    )


def checked_config(value: LogConfig | None) -> LogConfig:
    """The argument `log_config`; for None its default. Raises SettingRefused."""
    config = value if value is not None else LogConfig()
    if not isinstance(config, LogConfig):
        raise SettingRefused("log_config", f"give a LogConfig, not {type(config).__name__}")
    return config


def _check_health(value: object) -> None:
    if value is None:
        return
    from pushrep.health import HealthSettings  # noqa: PLC0415 - brings an HTTP server

    if not isinstance(value, HealthSettings):
        raise SettingRefused("health", f"give a HealthSettings, not {type(value).__name__}")


def check_flags(**flags: object) -> None:
    """Raise SettingRefused for a flag that is neither True nor False: the text "no" is true in Python."""
    for setting, value in flags.items():
        if not isinstance(value, bool):
            raise SettingRefused(setting, f"give True or False, not {value!r}")


def _check_number(setting: str, value: object, least: int, kind: object, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:  # type: ignore[arg-type, operator]
        allowed = f"of at least {least}" if most == math.inf else f"between {least} and {most}"
        raise SettingRefused(setting, f"give a number {allowed}, got {value!r}")
