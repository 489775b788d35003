"""From a caller's argument to the batches that are written: one value, a list of values, or an encoded batch.

A list becomes batches of about `batch_bytes`. None exceeds `batch_limit_bytes`: a single record that would is refused
before anything is written. Encoding happens before the log's lock is taken; offsets are stamped in later, because the
CRC does not cover them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from pushrep.errors import BadArgument
from pushrep.log.config import BATCH_BYTES_LIMIT, LogConfig
from pushrep.records import (
    HEADER_BYTES,
    Codec,
    CorruptRecordBatch,
    HeaderColumn,
    RecordBatch,
    RecordTooLarge,
    encode_batch,
)
from pushrep.records.encoder import Headers, Keys, common_length, encode_alone

Appendable: TypeAlias = bytes | bytearray | memoryview | RecordBatch | Sequence[bytes | None]

_RECORD_OVERHEAD_BYTES = 36
"""Length 5, attributes 1, timestamp delta 10, offset delta 5, key length 5, value length 5, header count 5."""


def to_batches(
    data: Appendable,
    keys: Keys | None,
    headers: Headers | None,
    timestamps_ms: int | Sequence[int],
    config: LogConfig,
) -> list[RecordBatch]:
    """The batches to write, at least one. Raises RecordTooLarge, CorruptRecordBatch, BadArgument."""
    if isinstance(data, RecordBatch):
        if not data.is_own:
            _refuse_unreadable(RecordBatch.check(data.data))
        _refuse_above_limit(data.header.size_bytes, config)
        return [data]
    if isinstance(data, bytes | bytearray | memoryview):
        if keys is None and headers is None and timestamps_ms.__class__ is int:
            return [_alone(bytes(data), timestamps_ms, config)]
        values: Sequence[bytes | None] = [bytes(data)]
    else:
        values = data
    _refuse_unfit(values, timestamps_ms)
    try:
        columns = _Columns(values, keys, headers, timestamps_ms)
        return [batch for start, end in columns.cuts(config) for batch in columns.encoded(start, end, config)]
    except BadArgument:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        _name_what_is_wrong(values, keys, headers)
        raise BadArgument("append", f"the records can't be encoded: {error}") from error


def _alone(value: bytes, timestamp_ms: int, config: LogConfig) -> RecordBatch:
    """One plain value: looking for places to cut would cost more than encoding it."""
    _refuse_above_limit(len(value), config, BATCH_BYTES_LIMIT if config.codec else None)
    batch = (
        encode_alone(value, timestamp_ms)
        if config.codec is Codec.NONE
        else encode_batch((value,), timestamps_ms=timestamp_ms, codec=config.codec)
    )
    _refuse_above_limit(batch.header.size_bytes, config)
    return batch


class _Columns:
    """The records to encode, column by column; any range of them can be encoded."""

    def __init__(
        self,
        values: Sequence[bytes | None],
        keys: Keys | None,
        headers: Headers | None,
        timestamps_ms: int | Sequence[int],
    ) -> None:
        self._values, self._keys, self._timestamps_ms = values, keys, timestamps_ms
        # Iterated twice, for sizes and for bytes.
        self._headers = headers if headers is None or isinstance(headers, HeaderColumn) else [tuple(h) for h in headers]
        for name, column in (("keys", keys), ("headers", headers), ("timestamps_ms", timestamps_ms)):
            if isinstance(column, bytes | bytearray | memoryview):
                if len(column) % len(values):
                    raise BadArgument(name, f"{len(column)} bytes are not {len(values)} pieces of equal size")
            elif isinstance(column, Sequence) and not isinstance(column, HeaderColumn) and len(column) != len(values):
                raise BadArgument(name, f"has {len(column)} entries for {len(values)} values")

    def cuts(self, config: LogConfig) -> Iterator[tuple[int, int]]:
        """Ranges of records that make a batch of at most `batch_bytes` each, or of one record."""
        target = config.batch_target_bytes - HEADER_BYTES
        ends = np.cumsum(self._sizes())
        start, count = 0, len(self._values)
        while start < count:
            before = int(ends[start - 1]) if start else 0
            end = max(start + 1, int(np.searchsorted(ends, before + target, side="right")))
            yield start, end
            start = end

    def encoded(self, start: int, end: int, config: LogConfig) -> Iterator[RecordBatch]:
        """The records [start, end) as one batch; as more if that one exceeds the limit (a codec may make data larger).

        Raises RecordTooLarge for a single record that exceeds it.
        """
        values = self._values[start:end]
        if end - start == 1 and (value := values[0]) is not None:
            # Compressed it might fit, but a reader would have to hold all of it uncompressed.
            _refuse_above_limit(len(value), config, BATCH_BYTES_LIMIT if config.codec else None)
        batch = encode_batch(
            values,
            keys=_part(self._keys, start, end, len(self._values)),
            headers=self._part_of_headers(start, end),
            timestamps_ms=self._timestamps_ms
            if isinstance(self._timestamps_ms, int)
            else self._timestamps_ms[start:end],
            codec=config.codec,
        )
        if batch.header.size_bytes <= config.batch_limit_bytes:
            yield batch
        elif end - start == 1:
            _refuse_above_limit(batch.header.size_bytes, config)
        else:
            middle = (start + end) // 2
            yield from self.encoded(start, middle, config)
            yield from self.encoded(middle, end, config)

    def _sizes(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """The largest size of each record, uncompressed."""
        count = len(self._values)
        sizes = _lengths(self._values, count) + _RECORD_OVERHEAD_BYTES
        if self._keys is not None:
            sizes += _lengths(self._keys, count)
        if isinstance(self._headers, HeaderColumn):
            sizes += _lengths(self._headers.values, count) + len(self._headers.name.encode()) + 10
        elif self._headers is not None:
            each = (sum(len(n) * 4 + len(v or b"") + 10 for n, v in headers) for headers in self._headers)
            sizes += np.fromiter(each, np.int64, count)
        return sizes

    def _part_of_headers(self, start: int, end: int) -> Headers | None:
        if isinstance(self._headers, HeaderColumn):
            part = _part(self._headers.values, start, end, len(self._values))
            return HeaderColumn(self._headers.name, part if part is not None else [])
        return None if self._headers is None else self._headers[start:end]


def _lengths(column: Keys, count: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    if isinstance(column, bytes | bytearray | memoryview):
        return np.full(count, len(column) // count, np.int64)
    if (length := common_length(column)) is not None:
        return np.full(count, length, np.int64)
    try:
        return np.fromiter(map(len, column), np.int64, count)  # type: ignore[arg-type]
    except TypeError:  # some are None
        return np.fromiter((len(item or b"") for item in column), np.int64, count)


def _part(column: Keys | None, start: int, end: int, count: int) -> Keys | None:
    if isinstance(column, bytes | bytearray | memoryview):
        size = len(column) // count
        return column[start * size : end * size]
    return None if column is None else column[start:end]


def _refuse_unreadable(batch: RecordBatch) -> None:
    """Refuse what a log may not hold, or what nobody could read: each batch has a data record for each of its offsets.

    A batch that was encoded here needs none of it. A replica's batches come from a log, which did it.
    """
    header = batch.header
    if header.is_control:
        raise CorruptRecordBatch("it is a control batch: a log of one writer has no transactions to end")
    if not 1 <= header.record_count == header.last_offset_delta + 1:
        raise CorruptRecordBatch(f"{header.record_count} records for {header.last_offset_delta + 1} offsets")
    batch.columns()  # as many offsets as records, and ascending: each from 0 on has its record


def refuse_times(batches: Iterable[RecordBatch], config: LogConfig, now_ms: int) -> None:
    """Raise BadArgument if a record's own time lies beyond the limits of the settings. -1, no time, never does."""
    for batch in batches:
        times = batch.columns().timestamps_ms
        times = times[times >= 0]
        if len(times) and (why := config.why_no_time(int(times.min()), int(times.max()), now_ms)):
            raise BadArgument("timestamps_ms", why)


def _refuse_above_limit(size: int, config: LogConfig, limit: int | None = None) -> None:
    if size > (limit or config.batch_limit_bytes):
        setting = "segment_bytes" if config.segment_bytes < config.batch_bytes_max else "batch_bytes_max"
        raise RecordTooLarge(size, limit or config.batch_limit_bytes, setting)


def refuse_columns(**columns: object) -> None:
    """An encoded batch has its own keys, headers and times: others beside it are refused, not ignored."""
    for name, column in columns.items():
        if column is not None:
            raise BadArgument(name, "a ready RecordBatch has its own; leave it out")


def _refuse_unfit(values: object, timestamps_ms: object) -> None:
    """Refuse arguments that are no list of values or no timestamps, before their entries are read."""
    if isinstance(values, str):  # it is a sequence, too
        raise BadArgument("append", "takes bytes: encode the text first, for example with .encode()")
    if not (hasattr(values, "__len__") and hasattr(values, "__getitem__")) or isinstance(values, Mapping):
        raise BadArgument("append", f"takes bytes, a list of them or a RecordBatch, not {type(values).__name__}")
    if not len(values):
        raise BadArgument("append", "the list of values is empty; give at least one")
    if isinstance(timestamps_ms, bool) or not (isinstance(timestamps_ms, int) or hasattr(timestamps_ms, "__len__")):
        raise BadArgument("timestamps_ms", f"give whole milliseconds, one or one per value, not {timestamps_ms!r}")


def _name_what_is_wrong(values: object, keys: object, headers: object) -> None:
    """After a failed encoding: raise BadArgument for the first entry of a wrong type."""
    _check_column(
        "values", values, "bytes or None", lambda item: isinstance(item, bytes | bytearray | memoryview | None)
    )
    if not isinstance(keys, bytes | bytearray | memoryview | None):
        _check_column(
            "keys", keys, "bytes or None", lambda item: isinstance(item, bytes | bytearray | memoryview | None)
        )
    if not isinstance(headers, HeaderColumn | None):
        _check_column(
            "headers",
            headers,
            "a list of (text, bytes or None)",
            lambda item: isinstance(item, Iterable) and all(map(_is_header, item)),
        )


def _check_column(name: str, column: object, wanted: str, fits: Callable[[object], bool]) -> None:
    if not isinstance(column, Iterable) or isinstance(column, str):
        raise BadArgument(name, f"give one entry per value, {wanted}, not {type(column).__name__}")
    for at, item in enumerate(column):
        if not fits(item):
            raise BadArgument(f"{name}[{at}]", f"give {wanted}, not {item!r:.60}")


def _is_header(header: object) -> bool:
    if not (isinstance(header, tuple | list) and len(header) == 2 and isinstance(header[0], str)):
        return False
    try:
        header[0].encode()
    except UnicodeEncodeError:
        return False
    return isinstance(header[1], bytes | bytearray | memoryview | None)
