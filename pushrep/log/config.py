"""The settings of a log, and the durability that a caller asks for. Each class checks its values when it is made."""

from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Annotated, NamedTuple

from pushrep.errors import BadArgument
from pushrep.records import HEADER_BYTES, Codec
from pushrep.settings import DURATION_MAX_MS, DYNAMIC, Between, check, settings_of, with_near_names

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

POSITION_MAX = (1 << 31) - 1
"""Kafka's offset index keeps positions and relative offsets as signed 32-bit numbers."""

BATCH_BYTES_LIMIT = 64 * MIB
"""No batch is larger. A length field above this is damage, so a scan never needs more memory."""

_BATCH_BYTES_MIN = HEADER_BYTES + 64
_NEVER = -1
_Count = Annotated[int, Between(0)]
_FromOne = Annotated[int, Between(1)]
_Ms = Annotated[int, Between(1, DURATION_MAX_MS)]
_Percent = Annotated[int, Between(0, 100), DYNAMIC]
_FreeBytes = Annotated[int, Between(0), DYNAMIC]
_InSegment = Annotated[int, Between(0, POSITION_MAX)]


class Durability(Enum):
    """Where appended records are when `append` returns."""

    BUFFERED = auto()
    """In the operating system's page cache: they survive the end of this process, but no power cut."""

    FLUSHED = auto()
    """On disk: they survive both. One fdatasync serves all waiting callers."""


class AppendResult(NamedTuple):
    """The offsets of the appended records; both are in the log."""

    base_offset: int
    last_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLimits:
    """Percentages and free bytes of the file system, the `disk_*` of LogConfig; disk.py says what each does."""

    warn_percent: int = 75
    pressed_percent: int = 85
    refuse_percent: int = 90
    warn_free_bytes: int = 40 << 30
    pressed_free_bytes: int = 20 << 30
    refuse_free_bytes: int = 10 << 30

    def __post_init__(self) -> None:
        percents = self.warn_percent, self.pressed_percent, self.refuse_percent
        if not 0 <= percents[0] <= percents[1] <= percents[2] <= 100:
            raise BadArgument(
                "disk_warn_percent, disk_pressed_percent, disk_refuse_percent",
                f"they rise from 0 to 100, not {', '.join(map(str, percents))}",
            )
        free = self.warn_free_bytes, self.pressed_free_bytes, self.refuse_free_bytes
        if not free[0] >= free[1] >= free[2] >= 0:
            raise BadArgument(
                "disk_warn_free_bytes, disk_pressed_free_bytes, disk_refuse_free_bytes",
                f"they fall, down to 0 at least, not {', '.join(map(str, free))}",
            )


@with_near_names
@dataclass(frozen=True, kw_only=True)  # without slots: what each append asks is computed once
class LogConfig:
    """How a log is laid out and flushed. Names follow Kafka's topic settings where it has them.

    segment_bytes: a new segment file begins before this size would be exceeded, 1 GiB.
    segment_ms: a new segment file begins, too, once the timestamps in it would span this time; None: never by time. The
        wall clock counts for records without a time, or more than an hour ahead.
    index_interval_bytes: the log has at most one index entry for each so many bytes.
    batch_bytes: a batch is sealed before it would exceed this size, and a list of values is split into batches of about
        it: 256 KiB fit into the processor's cache. A larger record gets a batch of its own.
    batch_bytes_max: the size of the largest batch, and so of the largest record (Kafka's max.message.bytes).
    message_timestamp_before_max_ms: a record whose own time is further before the wall clock than this is refused when
        it is appended; None: none is.
    message_timestamp_after_max_ms: the same for a time after the wall clock. A topic has such limits, too (an hour
        after by default): what it would refuse is then refused to the caller, and stops no shipping.
    codec: the compression of the batches that are made here: none, gzip, snappy, lz4 or zstd. A replica's are its
        leader's.
    preallocate_bytes: the most space that is allocated for the newest file ahead of its data; the file is truncated to
        its data at roll and close. A small file doubles, by 64 KiB at least. 0: nothing is allocated ahead. All logs
        of a directory together allocate at most 1 GiB, or a twentieth of a smaller disk, but each log may have 64 KiB.
    flush_bytes: a flush begins once so many appended bytes are not on disk; at twice as many, appends wait for it.
    flush_ms: a flush begins this time after the first appended byte that is not on disk, at the latest.
    verify_last_segments: how many of the newest segments are scanned at opening even after a clean stop. 0: none.
    retention_ms: a segment is removed once its newest record is older than this; -1: never. None, and no
        retention_bytes: 7 days in an outbox with a Kafka destination, else never. A record that a destination, a
        replica or a replay needs is not removed.
    retention_bytes: the oldest segment is removed, too, while the log is at least this large without it; None or -1:
        never.
    retention_files: the most segments that one pass of retention removes; if more are due, the next pass follows at
        once.
    lease_max_s: a lease of a replay that is not renewed within this time is broken, and holds back no segments.
    disk_warn_percent: from this usage on a warning is logged, once.
    disk_pressed_percent: from this usage on leases are broken, and retention runs at once.
    disk_refuse_percent: from this usage on appends are refused, until it is below disk_pressed_percent again.
    disk_warn_free_bytes: disk_warn_percent applies only while at most so many bytes are free, 40 GiB.
    disk_pressed_free_bytes: disk_pressed_percent applies only while at most so many bytes are free, 20 GiB.
    disk_refuse_free_bytes: disk_refuse_percent applies only while at most so many bytes are free, 10 GiB.
    scrub_bytes_per_s: the rate at which the scrub reads sealed segments again, to find damage. 0: no scrub. The log
        that was opened last sets it for its directory.
    scrub_pause_s: the pause between the end of one pass of the scrub and the next pass.
    open_files_max: the most files that the logs of a directory have open for writing; the least recently used file is
        closed, and opened again for the next append. The log that was opened last sets it for its directory. The files
        of all directories together take at most half of the process's descriptors (`ulimit -n`).
    """

    segment_bytes: Annotated[int, Between(_BATCH_BYTES_MIN, POSITION_MAX), DYNAMIC] = GIB
    segment_ms: Annotated[int | None, Between(1), DYNAMIC] = None
    index_interval_bytes: _InSegment = 4096
    batch_bytes: Annotated[int, Between(1, BATCH_BYTES_LIMIT)] = 256 * KIB
    batch_bytes_max: Annotated[int, Between(_BATCH_BYTES_MIN, BATCH_BYTES_LIMIT)] = MIB
    message_timestamp_before_max_ms: Annotated[int | None, Between(0)] = None
    message_timestamp_after_max_ms: Annotated[int | None, Between(0)] = None
    codec: Codec = Codec.NONE
    preallocate_bytes: _InSegment = 16 * MIB
    flush_bytes: _FromOne = 64 * MIB
    flush_ms: _Ms = 1000
    verify_last_segments: _Count = 0
    retention_ms: Annotated[int | None, Between(-1), DYNAMIC] = None
    retention_bytes: Annotated[int | None, Between(-1), DYNAMIC] = None
    retention_files: _FromOne = 4
    lease_max_s: _FromOne = 600
    disk_warn_percent: _Percent = 75
    disk_pressed_percent: _Percent = 85
    disk_refuse_percent: _Percent = 90
    disk_warn_free_bytes: _FreeBytes = 40 * GIB
    disk_pressed_free_bytes: _FreeBytes = 20 * GIB
    disk_refuse_free_bytes: _FreeBytes = 10 * GIB
    scrub_bytes_per_s: _Count = 4 * MIB
    scrub_pause_s: _FromOne = 3600
    open_files_max: _FromOne = 4096

    def __post_init__(self) -> None:
        check(self)
        _ = self.disk_limits  # the limits have to rise

    def refuse_change(self, to: "LogConfig") -> None:
        """Raise BadArgument if a log that is open can't go on with `to` in the place of this."""
        for name, setting in settings_of(LogConfig).items():
            if not setting.is_dynamic and getattr(to, name) != getattr(self, name):
                raise BadArgument(name, "can't be changed while the log is open")
        before, after = self.batch_limit_bytes, to.batch_limit_bytes
        if before != after:
            why = f"the largest batch would have {after} bytes instead of {before}, which only an opening can change"
            raise BadArgument("segment_bytes", why)

    @cached_property
    def limits_times(self) -> bool:
        """Whether records are refused by their time."""
        return (self.message_timestamp_before_max_ms, self.message_timestamp_after_max_ms) != (None, None)

    def why_no_time(self, oldest_ms: int, newest_ms: int, now_ms: int) -> str:
        """Why records from `oldest_ms` to `newest_ms` are refused at this time; empty if they are not."""
        before, after = self.message_timestamp_before_max_ms, self.message_timestamp_after_max_ms
        if before is not None and oldest_ms < now_ms - before:
            return f"{oldest_ms} is {now_ms - oldest_ms} ms ago, more than message_timestamp_before_max_ms={before}"
        if after is not None and newest_ms > now_ms + after:
            return f"{newest_ms} is {newest_ms - now_ms} ms ahead, more than message_timestamp_after_max_ms={after}"
        return ""

    @property
    def retention(self) -> tuple[int | None, int | None]:
        """retention_ms and retention_bytes; None for no limit."""
        by_time, by_size = self.retention_ms, self.retention_bytes
        return None if by_time == _NEVER else by_time, None if by_size == _NEVER else by_size

    @property
    def disk_limits(self) -> DiskLimits:
        """The three limits as one value."""
        return DiskLimits(
            warn_percent=self.disk_warn_percent,
            pressed_percent=self.disk_pressed_percent,
            refuse_percent=self.disk_refuse_percent,
            warn_free_bytes=self.disk_warn_free_bytes,
            pressed_free_bytes=self.disk_pressed_free_bytes,
            refuse_free_bytes=self.disk_refuse_free_bytes,
        )

    @cached_property
    def batch_limit_bytes(self) -> int:
        """The largest batch that fits: a batch never spans two segments."""
        return min(self.batch_bytes_max, self.segment_bytes)

    @cached_property
    def batch_target_bytes(self) -> int:
        """The size that a batch of many records does not exceed."""
        return min(self.batch_bytes, self.batch_limit_bytes)
