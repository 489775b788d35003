"""The settings of an outbox that may differ from open to open; values refuse nonsense at birth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from pushrep.log import Durability
from pushrep.outbox.errors import SettingRefused
from pushrep.records import Codec

BATCH_BYTES = 256 << 10
"""Stays in the processor's cache while it is encoded and summed."""
BUFFER_BYTES = 64 << 20
_DURATION_MAX_MS = 1 << 40
"""34 years; the system's own waits end at a few centuries, and fail beyond."""


class Acks(Enum):
    """Who must have a record before its receipt says so."""

    LOCAL = auto()
    """This machine's log, by the outbox's durability."""

    ALL = auto()
    """The log and every in-sync replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxSettings:
    """See `Outbox.open`; raises `SettingRefused`, which names the argument."""

    durability: Durability
    codec: Codec
    linger_ms: int
    batch_bytes: int
    buffer_bytes: int
    block_ms: int
    close_timeout_s: float
    record_bytes_max: int  # the largest batch that the log takes

    def __post_init__(self) -> None:
        if not isinstance(self.durability, Durability):
            raise SettingRefused("durability", f"give Durability.FLUSHED or BUFFERED, not {self.durability!r}")
        if not isinstance(self.codec, Codec):
            raise SettingRefused("codec", f"give a pushrep.Codec, not {self.codec!r}")
        for setting in ("linger_ms", "block_ms"):
            _check_number(setting, getattr(self, setting), 0, int, _DURATION_MAX_MS)
        for setting in ("batch_bytes", "buffer_bytes"):
            _check_number(setting, getattr(self, setting), 1, int)
        _check_number("close_timeout_s", self.close_timeout_s, 0, int | float, _DURATION_MAX_MS // 1000)
        if self.batch_bytes > self.record_bytes_max:
            raise SettingRefused(
                "batch_bytes", f"{self.batch_bytes} exceeds what the log takes as one batch, {self.record_bytes_max}"
            )
        if self.buffer_bytes < self.batch_bytes:
            raise SettingRefused(
                "buffer_bytes", f"{self.buffer_bytes} does not hold one batch of batch_bytes={self.batch_bytes}"
            )


def _check_number(setting: str, value: object, least: int, kind: object, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:  # type: ignore[arg-type, operator]
        allowed = f"of at least {least}" if most == math.inf else f"between {least} and {most}"
        raise SettingRefused(setting, f"give a number {allowed}, got {value!r}")


def refuse_for_now(replicas: Sequence[str], kafka: object, acks: Acks) -> None:
    """Raise `SettingRefused` for what this version can't do, rather than promise it."""
    if replicas:
        raise SettingRefused("replicas", "this version has no replication yet; leave it out")
    if kafka is not None:
        raise SettingRefused("kafka", "this version ships to no Kafka topic yet; leave it out")
    if not isinstance(acks, Acks):
        raise SettingRefused("acks", f"give Acks.LOCAL or Acks.ALL, not {acks!r}")
    if acks is Acks.ALL:
        raise SettingRefused("acks", "ALL needs replicas, which this version does not have yet; use Acks.LOCAL")
