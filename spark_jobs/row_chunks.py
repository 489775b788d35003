"""Chunks of rows, which the steps of filter_replays exchange instead of rows. Arrow and numpy, no Spark.

    rows ─▶ gathered to GATHER_BYTES ─▶ by (topic, partition), by pair, in log order ─▶ cut to CHUNK_BYTES ─▶ chunks
    chunk: topic · pid · source partition · partition · epochs · first log offset · rows · places · data
           places: the log offset of each row, then the source offset of each, int64 in this machine's byte order
           data:   an Arrow IPC stream of the rows, with unchanged types and values of all columns

The decision reads `places`, and opens `data` only if some rows of the chunk pass and some do not. Rows that the filter
does not check (no metadata, another PID) are in chunks without places, under a negative source partition, which no pair
has.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from filtering.rule import group_pairs
from filtering.stream_metadata import parse_keys
from spark_jobs.mark_epochs import EPOCH_COLUMNS, Epoch
from spark_jobs.row_decision import check_places, log_partitions, only_epoch

CHUNK_BYTES = 1 << 20
"""The most bytes of a chunk's `data`, unless a single row is larger. A sixteenth is reserved for the stream's
header.
"""

GATHER_BYTES, GATHER_BYTES_MAX = 8 << 20, 64 << 20
"""Bytes of rows that are gathered before they are cut into chunks, at first and at most. Spark passes 10,000 rows at a
time, and a chunk of a few rows costs as much as one of a thousand. More bytes do not fit into the processor's cache (a
million rows of 16 pairs take 0.25 s, with 32 MiB 0.57 s), so the number is doubled only while chunks are smaller than
SMALL_BYTES on average, as with thousands of pairs.
"""
SMALL_BYTES = 64 << 10

PACKED = (
    "topic string, pid bigint, source_partition int, partition int, startpoint_epoch bigint, marks_epoch bigint, "
    "first_offset bigint, rows int, places binary, data binary"
)
_PACKED_FIELDS: Any = [
    ("topic", pa.string()),
    ("pid", pa.int64()),
    ("source_partition", pa.int32()),
    ("partition", pa.int32()),
    ("startpoint_epoch", pa.int64()),
    ("marks_epoch", pa.int64()),
    ("first_offset", pa.int64()),
    ("rows", pa.int32()),
    ("places", pa.binary()),
    ("data", pa.binary()),
]
_PACKED_ARROW = pa.schema(_PACKED_FIELDS)

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Packing:
    """How rows are packed. key: the column with the bytes that may be metadata. only_pids: the PIDs that the filter
    checks; None: all. travels: `key` is a column of the frame itself, and stays in its rows.
    """

    key: str
    travels: bool = False
    only_pids: frozenset[int] | None = None


def is_outside(source_partition: int) -> bool:
    """Whether chunks with this number hold rows that the filter does not check."""
    return source_partition < 0


def pack_rows(batches: Iterable[pa.RecordBatch], packing: Packing) -> Iterator[pa.RecordBatch]:
    """Rows with topic, partition, offset, a key and maybe epochs → chunks (PACKED).

    Raises SparkJobError for a row without topic, partition or offset, EpochsMixed.
    """
    gatherer = _Gatherer()
    for rows in gatherer.joined(batches):
        # The data of all chunks is written into one buffer, which becomes the column `data` without another copy.
        sink, ends = pa.BufferOutputStream(), [0]
        chunks: list[tuple[Any, ...]] = []
        for *head, own in _chunks(rows, packing):
            chunks.append(tuple(head))
            write_rows(own, sink)
            ends.append(sink.tell())
        columns: list[Any] = [list(column) for column in zip(*chunks, strict=True)]
        arrays: list[Any] = [
            pa.array(cells, kind) for cells, (_, kind) in zip(columns, _PACKED_FIELDS[:-1], strict=True)
        ]
        buffers = [None, pa.py_buffer(np.array(ends, np.int32).tobytes()), sink.getvalue()]
        data = pa.Array.from_buffers(pa.binary(), len(chunks), buffers)
        gatherer.learn(ends[-1], len(chunks))
        yield pa.RecordBatch.from_arrays([*arrays, data], schema=_PACKED_ARROW)


def unpack_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A column `data` → the rows in it. Small chunks are joined, because the cost of a batch in Spark is constant."""
    waiting: list[pa.RecordBatch] = []
    waiting_bytes = 0
    for batch in batches:
        for data in batch.column("data"):
            rows = opened(data.as_buffer())
            waiting.append(rows)
            waiting_bytes += rows.nbytes
            if waiting_bytes >= CHUNK_BYTES // 2:
                yield _joined(waiting)
                waiting, waiting_bytes = [], 0
    if waiting:
        yield _joined(waiting)


def opened(data: Any) -> pa.RecordBatch:
    """The rows of a chunk's data, without a copy."""
    with pa.ipc.open_stream(data) as reader:
        return reader.read_next_batch()


def closed(rows: pa.RecordBatch) -> bytes:
    """Rows as a chunk's data."""
    sink = pa.BufferOutputStream()
    write_rows(rows, sink)
    return sink.getvalue().to_pybytes()


def write_rows(rows: pa.RecordBatch, sink: Any) -> None:
    """Write rows as a chunk's data into an Arrow output stream, which stays open."""
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)


def places_of(places: bytes) -> tuple[Numbers, Numbers]:
    """(log offsets, source offsets) of a chunk's rows; the log offsets ascend."""
    log_offsets, source_offsets = np.frombuffer(places, np.int64).reshape(2, -1)
    return log_offsets, source_offsets


class _Gatherer:
    """Gathers batches until they have enough bytes; more bytes while the resulting chunks are small."""

    def __init__(self) -> None:
        self._wanted_bytes = GATHER_BYTES

    def joined(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        waiting: list[pa.RecordBatch] = []
        waiting_bytes = 0
        for batch in batches:
            if not batch.num_rows:
                continue
            waiting.append(batch)
            waiting_bytes += batch.nbytes
            if waiting_bytes >= self._wanted_bytes:
                yield _joined(waiting)
                waiting, waiting_bytes = [], 0
        if waiting:
            yield _joined(waiting)

    def learn(self, data_bytes: int, chunks: int) -> None:
        """Adapt to the size of the last chunks: `data_bytes` in `chunks`."""
        if data_bytes < chunks * SMALL_BYTES:
            self._wanted_bytes = min(2 * self._wanted_bytes, GATHER_BYTES_MAX)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else cast("Any", pa).concat_batches(batches)  # the stubs lack it


def _chunks(rows: pa.RecordBatch, packing: Packing) -> Iterator[tuple[Any, ...]]:
    """The chunks as tuples in the order of PACKED, with rows in place of `data`."""
    topic, partition, offset = (rows.column(name) for name in ("topic", "partition", "offset"))
    check_places(topic, partition, offset)
    offsets = np.asarray(offset).astype(np.int64)
    keys = parse_keys(rows.column(packing.key))
    ours = keys.valid
    if packing.only_pids is not None:
        ours = ours & np.isin(keys.pids, np.array(sorted(packing.only_pids), np.int64))
    epoch_columns = [rows.column(name).fill_null(0) for name in EPOCH_COLUMNS if name in rows.schema.names]
    sent = rows if packing.travels else rows.drop_columns([packing.key])
    for where, some in log_partitions(topic, np.asarray(partition).astype(np.int64)):
        own = np.arange(len(offsets)) if some is None else some
        governed = ours[own]
        pairs = Pairs(
            own,
            np.where(governed, keys.pids[own], 0),
            np.where(governed, keys.partitions[own], -1 - where[1]),
            keys.offsets[own],
        )
        yield from _by_pair(sent, offsets, where, only_epoch(where, epoch_columns, own), pairs)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The rows of one log partition as columns: index in the batch, pair, source offset."""

    rows: Numbers
    pids: Numbers
    partitions: Numbers
    offsets: Numbers


def _by_pair(
    sent: pa.RecordBatch, offsets: Numbers, where: tuple[str | None, int], epoch: Epoch, pairs: Pairs
) -> Iterator[tuple[Any, ...]]:
    """The chunks of one log partition's pairs."""
    groups = group_pairs(pairs.pids, pairs.partitions)
    rows, source_offsets = groups.together(pairs.rows), groups.together(pairs.offsets)
    if groups.order is not None or len(rows) < sent.num_rows:
        sent = sent.take(pa.array(rows))  # type: ignore[arg-type] # pyarrow's stubs know no index arrays
    log_offsets = offsets[rows]
    for k, (start, size) in enumerate(zip(groups.starts.tolist(), groups.sizes.tolist(), strict=True)):
        own, log, source = sent.slice(start, size), log_offsets[start : start + size], source_offsets[start:][:size]
        if not (log[1:] > log[:-1]).all():  # a shuffle changed the order, or a join multiplied rows
            order = np.argsort(log, kind="stable")
            own, log, source = own.take(pa.array(order)), log[order], source[order]  # type: ignore[arg-type]
        pair = (where[0], int(groups.pids[k]), int(groups.partitions[k]))
        for low, high in _cuts(own):
            places = b"" if is_outside(pair[2]) else np.stack([log[low:high], source[low:high]]).tobytes()
            head = (*pair, where[1], epoch.startpoint, epoch.marks, int(log[low]), high - low, places)
            yield *head, own.slice(low, high - low)


def _cuts(rows: pa.RecordBatch) -> Iterator[tuple[int, int]]:
    """Yield [low, high) of pieces whose data has at most CHUNK_BYTES, unless a single row is larger."""
    most = CHUNK_BYTES - CHUNK_BYTES // 16
    waiting = [(0, rows.num_rows)]
    while waiting:
        low, high = waiting.pop()
        size = rows.slice(low, high - low).nbytes
        if size <= most or high - low == 1:
            yield low, high
            continue
        # Equal numbers of rows by the average size; a piece that is still too large is cut again.
        pieces = min(high - low, -(-size // most))
        edges = [low + (high - low) * n // pieces for n in range(pieces + 1)]
        waiting.extend(zip(edges[-2::-1], edges[:0:-1], strict=True))
