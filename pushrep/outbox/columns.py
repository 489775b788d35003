"""A caller's records, checked and put into columns before any of them is accepted.

Sizes are upper bounds of a record's encoded bytes, so that a batch never outgrows what the log takes:

    record   length 5 · attributes 1 · timestamp delta 10 · offset delta 5 · key 5 + k · value 5 + v · count 5
    header   name 5 + 4 per character · value 5 + h           + the 20 bytes of metadata: in k, or as one header
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, repeat
from operator import add
from typing import Any, TypeVar

import numpy as np

from filtering import KEY_BYTES, METADATA_HEADER, StreamMetadata, tracing
from pushrep.env import Clock
from pushrep.outbox.errors import RecordRefused
from pushrep.outbox.settings import OutboxConfig
from pushrep.records import HEADER_BYTES
from pushrep.records.encoder import HeaderColumn, common_length, given_columns, header_columns, header_rows

Header = tuple[str, bytes | None]
Headers = tuple[Header, ...]

_RECORD_BYTES = 36
_HEADER_BYTES = 10
_CHARACTER_BYTES = 4
_BYTES_OR_NULL = {bytes, type(None)}
_LISTS = (tuple, list)
_TIME_END_MS = 1 << 62  # timestamps below it fit a record batch

T = TypeVar("T")


class Columns:
    """`len(values)` records. `keys`, `headers`, `timestamps_ms`: None, or one per record; headers of the same names are
    columns.

    `metadata`: None, the first record's position (the others take the offsets after it), or one per record.
    `ends`: at which byte each record begins, and as one more number where the last one ends.
    """

    __slots__ = ("ends", "headers", "keys", "metadata", "size_bytes", "timestamps_ms", "values")

    def __init__(  # noqa: PLR0913, PLR0917 - a record has these columns
        self,
        values: Sequence[bytes | None],
        ends: Sequence[int],
        keys: Sequence[bytes | None] | None,
        headers: Sequence[Headers] | Sequence[HeaderColumn] | None,
        timestamps_ms: Sequence[int] | None,
        metadata: StreamMetadata | Sequence[StreamMetadata] | None,
    ) -> None:
        self.values, self.keys, self.headers, self.timestamps_ms = values, keys, headers, timestamps_ms
        self.metadata = metadata
        self.ends = ends
        self.size_bytes = ends[-1]


class RecordRules:
    """Checks what may be appended. Its methods raise `RecordRefused`, which names the argument."""

    def __init__(
        self, carrier: str, record_bytes_max: int, why_no_time: Callable[[int, int], str] | None = None
    ) -> None:
        """why_no_time(oldest_ms, newest_ms): why records of these times are refused, empty if they are not."""
        self._carries_key = carrier == "key"
        self._size_max, self._why_no_time = record_bytes_max - HEADER_BYTES, why_no_time
        extra = 0 if self._carries_key else _HEADER_BYTES + len(METADATA_HEADER)
        self.overhead_bytes = _RECORD_BYTES + extra + KEY_BYTES
        """Bytes that a record counts beside its value, key and headers."""

    @classmethod
    def of(cls, carrier: str, config: OutboxConfig, clock: Clock) -> "RecordRules":
        """Those of an outbox with these settings."""
        files = config.log_config

        def why_no_time(oldest_ms: int, newest_ms: int) -> str:
            return files.why_no_time(oldest_ms, newest_ms, clock.wall_ms())

        size_max = min(config.record_bytes_max, config.buffer_bytes)
        return cls(carrier, size_max, why_no_time if files.limits_times else None)

    def one(
        self,
        value: bytes | None,
        key: bytes | None,
        headers: Iterable[Header],
        timestamp_ms: int | None,
        metadata: StreamMetadata | None,
    ) -> Columns:
        """One record's columns."""
        self.check_position(timestamp_ms, metadata)
        value = _as_bytes("value", value)
        size = self.overhead_bytes + (len(value) if value is not None else 0)
        keys: tuple[bytes | None] | None = None
        if key is not None:
            keys = (self._business_key("key", key),)
            size += len(key)
        all_headers: tuple[Headers] | None = None
        context = tracing.current_headers()
        if headers or context:
            kept, header_bytes = self._headers(headers, context)
            all_headers, size = (kept,), size + header_bytes
        times = None if timestamp_ms is None else (timestamp_ms,)
        if size > self._size_max:
            raise self._too_large(size, value, key)
        return Columns((value,), (0, size), keys, all_headers, times, metadata)

    def check_position(self, timestamp_ms: int | None, metadata: StreamMetadata | None) -> None:
        """Refuse a timestamp or metadata of the wrong kind, or a time beyond the limits."""
        if timestamp_ms is not None and (timestamp_ms.__class__ is not int or not 0 <= timestamp_ms < _TIME_END_MS):
            _timestamp("timestamp_ms", timestamp_ms)
        if timestamp_ms is not None and self._why_no_time is not None:
            self._check_times("timestamp_ms", timestamp_ms, timestamp_ms)
        if metadata is not None and not isinstance(metadata, StreamMetadata):
            raise RecordRefused("metadata", f"give a StreamMetadata, not {type(metadata).__name__}")

    def many(
        self,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None,
        headers: Sequence[Iterable[Header]] | Sequence[HeaderColumn] | None,
        timestamps_ms: int | Sequence[int] | None,
        metadata: StreamMetadata | Sequence[StreamMetadata] | None,
    ) -> Columns:
        """The columns of many records; copied, so the caller may change its lists afterwards, unless they are of a
        HeaderColumn.
        """
        values = listed("values", values)
        count = len(values)
        if not count:
            raise RecordRefused("values", "is empty; append at least one record")
        if not set(map(type, values)) <= _BYTES_OR_NULL:
            values = [_as_bytes(f"values[{at}]", value) for at, value in enumerate(values)]
        times, positions = _timestamps(timestamps_ms, count), _metadata(metadata, count)
        if times is not None and self._why_no_time is not None:
            self._check_times("timestamps_ms", min(times), max(times))
        context = tracing.current_headers()
        if headers is None and context:
            headers = [()] * count
        if keys is None and headers is None and (ends := self._equal_ends(values)) is not None:
            return Columns(values, ends, None, None, times, positions)
        added: Iterable[int] = map(add, _lengths(values), repeat(self.overhead_bytes))
        if keys is not None:
            keys = self._all_keys(_column("keys", keys, count))
            added = map(add, added, _lengths(keys))
        kept: list[Headers] | Sequence[HeaderColumn] | None = None
        if headers is not None:
            kept, header_bytes = self._all_headers(headers, context, count)
            added = map(add, added, header_bytes)
        sizes = list(added)
        if max(sizes) > self._size_max:
            at = max(range(count), key=sizes.__getitem__)
            raise self._too_large(sizes[at], values[at], None if keys is None else keys[at], at)
        return Columns(values, [0, *accumulate(sizes)], keys, kept, times, positions)

    def _check_times(self, argument: str, oldest_ms: int, newest_ms: int) -> None:
        assert self._why_no_time is not None, "the caller has looked"
        if why := self._why_no_time(oldest_ms, newest_ms):
            raise RecordRefused(argument, why)

    def _equal_ends(self, values: list[bytes | None]) -> range | None:
        """`ends` of values that all have one size, without a loop over them; None for others."""
        length = common_length(values)
        if length is None:
            return None
        size = length + self.overhead_bytes
        if size > self._size_max:
            raise self._too_large(size, values[0], None, 0)
        return range(0, size * len(values) + 1, size)

    def _all_keys(self, keys: Sequence[bytes | None]) -> list[bytes | None]:
        if not self._carries_key and set(map(type, keys)) <= _BYTES_OR_NULL:
            return list(keys)
        return [None if key is None else self._business_key(f"keys[{at}]", key) for at, key in enumerate(keys)]

    def _all_headers(
        self, headers: Sequence[Iterable[Header]] | Sequence[HeaderColumn], context: Iterable[Header], count: int
    ) -> tuple[list[Headers] | Sequence[HeaderColumn], Iterable[int]]:
        """`_headers` of each; by columns, in a quarter of its time, if all records have headers of the same names."""
        columns = given_columns(headers)
        for values in [headers] if columns is None else [one.values for one in columns]:
            _column("headers", values, count)
        if columns is None:
            columns = header_columns(headers)  # type: ignore[arg-type] # no columns
        if columns is None or context or not self._are_plain(columns):
            rows: Sequence[Any] = headers if given_columns(headers) is None else header_rows(columns or ())
            parts = [self._headers(some, context, at) for at, some in enumerate(rows)]
            return [part[0] for part in parts], [part[1] for part in parts]
        added: Iterable[int] = repeat(sum(_HEADER_BYTES + _CHARACTER_BYTES * len(name) for name, _ in columns))
        for _, values in columns:
            added = map(add, added, _lengths(values))  # type: ignore[arg-type] # no buffer
        return columns, added

    def _are_plain(self, columns: Iterable[HeaderColumn]) -> bool:
        """Whether `_headers` would find nothing to refuse, and nothing to change."""
        return all(
            isinstance(name, str)
            and name.isascii()
            and (self._carries_key or name != METADATA_HEADER)
            and set(map(type, values)) <= _BYTES_OR_NULL
            for name, values in columns
        )

    def _business_key(self, argument: str, key: object) -> bytes:
        if self._carries_key:
            raise RecordRefused(
                argument,
                "this outbox carries the metadata in the key, so a record can't have one of its own; "
                "make the outbox with carrier='header' to keep business keys",
            )
        checked = _as_bytes(argument, key)
        assert checked is not None
        return checked

    def _headers(
        self, headers: Iterable[Header], context: Iterable[Header], at: int | None = None
    ) -> tuple[Headers, int]:
        """The headers kept, and their bytes. With the header carrier our metadata header comes last and is the only one
        of its name. context: of tracing, for a record that brings none. at: the record's index in `append_many`.
        """
        kept: list[Header] = []
        size = 0
        if headers.__class__ not in _LISTS:
            given: object = headers
            if isinstance(given, Mapping):
                raise _refused_headers(at, "give (name, value) pairs, not a dict: headers=list(headers.items())")
            if not isinstance(given, Iterable):
                raise _refused_headers(at, f"give a list of (name, value) pairs, not {type(given).__name__}")
        for header in headers:
            if not (isinstance(header, _LISTS) and len(header) == 2 and isinstance(header[0], str)):
                raise _refused_headers(at, f"a header is (name, bytes or None), got {header!r}")
            name, value = header
            if name == METADATA_HEADER and not self._carries_key:
                continue
            if value is not None and value.__class__ is not bytes:
                value = _as_bytes(_headers_name(at), value)
            if not name.isascii() and name != name.encode(errors="replace").decode():
                # Else sealing fails, and others' records with it.
                raise _refused_headers(at, f"the name {name!r} is no text that UTF-8 can carry")
            size += _HEADER_BYTES + _CHARACTER_BYTES * len(name) + len(value or b"")
            kept.append((name, value))
        if context and all(name != tracing.TRACEPARENT for name, _ in kept):
            kept += context
            size += sum(_HEADER_BYTES + len(name) + len(value or b"") for name, value in context)
        return tuple(kept), size

    def _too_large(self, size: int, value: bytes | None, key: bytes | None, at: int | None = None) -> RecordRefused:
        """The error for a record that is too large; it names the largest part. at: the record's index in
        `append_many`.
        """
        parts = {"value": len(value or b""), "key": len(key or b"")}
        parts["headers"] = size - self.overhead_bytes - sum(parts.values())
        largest = max(parts, key=parts.__getitem__)
        argument = largest if at is None else f"{largest.removesuffix('s')}s[{at}]"
        return RecordRefused(
            argument,
            f"the record may take {size} bytes, more than the {self._size_max} of batch_bytes_max, segment_bytes "
            "or buffer_bytes: split it, or raise them (log_config, buffer_bytes)",
        )


def listed(argument: str, given: object) -> list[Any]:
    """The values or keys of many records, which a caller may have given as any type."""
    if isinstance(given, bytes | bytearray | str | Mapping) or not isinstance(given, Iterable):
        raise RecordRefused(argument, f"give a list of {argument}, not one {type(given).__name__}")
    return list(given)


def _lengths(column: Sequence[bytes | None]) -> list[int]:
    try:
        return list(map(len, column))  # type: ignore[arg-type] # a null has none
    except TypeError:
        return [len(value or b"") for value in column]


def _headers_name(at: int | None) -> str:
    return "headers" if at is None else f"headers[{at}]"


def _refused_headers(at: int | None, why: str) -> RecordRefused:
    return RecordRefused(_headers_name(at), why)


def _as_bytes(argument: str, value: object) -> bytes | None:
    if value is None or value.__class__ is bytes:
        return value  # the caller has just checked its class
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    setting = {"v": "serializer", "k": "key_serializer"}.get(argument[0])  # of a header there is none
    hint = "" if setting is None else f", or open the outbox with {setting}="
    raise RecordRefused(argument, f"give bytes or None, not {type(value).__name__}{hint}")


def _timestamp(argument: str, timestamp_ms: object) -> int:
    if isinstance(timestamp_ms, bool) or not isinstance(timestamp_ms, int):
        raise RecordRefused(argument, f"give whole milliseconds since 1970 UTC, not {timestamp_ms!r}")
    if not 0 <= timestamp_ms < _TIME_END_MS:
        raise RecordRefused(argument, f"{timestamp_ms} is not a time in [0, 2^62) milliseconds since 1970 UTC")
    return timestamp_ms


def _timestamps(timestamps_ms: int | Sequence[int] | None, count: int) -> list[int] | None:
    if timestamps_ms is None:
        return None
    if isinstance(timestamps_ms, int):
        return [_timestamp("timestamps_ms", timestamps_ms)] * count
    column = _column("timestamps_ms", timestamps_ms, count)
    times: list[int] = np.asarray(column).tolist() if hasattr(column, "dtype") else list(column)
    if set(map(type, times)) != {int}:
        times = [_timestamp(f"timestamps_ms[{at}]", time) for at, time in enumerate(times)]
    _timestamp("timestamps_ms", min(times))
    _timestamp("timestamps_ms", max(times))
    return times


def _metadata(
    metadata: StreamMetadata | Sequence[StreamMetadata] | None, count: int
) -> StreamMetadata | list[StreamMetadata] | None:
    if metadata is None or isinstance(metadata, StreamMetadata):
        return metadata
    positions = list(_column("metadata", metadata, count))
    if set(map(type, positions)) != {StreamMetadata}:
        raise RecordRefused("metadata", "give a StreamMetadata, or one per record")
    return positions


def _column(argument: str, column: Sequence[T], count: int) -> Sequence[T]:
    try:
        length = len(column)
    except TypeError:
        raise RecordRefused(argument, f"give a list, not {type(column).__name__}") from None
    if length != count:
        raise RecordRefused(argument, f"has {length} entries for {count} values")
    return column
