"""Chunks of rows, which the steps of filter_replays exchange instead of rows, and the rule over them. No Spark.

    rows ─▶ gathered to GATHER_BYTES ─▶ by (topic, partition), by pair, in log order ─▶ cut to CHUNK_BYTES ─▶ chunks
    chunk: topic · pid · source partition · partition · epochs · first log offset · rows · places · data
           places: the log offset of each row, then the source offset of each, int64 in this machine's byte order
           data:   an Arrow IPC stream of the rows, with unchanged types and values of all columns

For each topic a task sends one more chunk, of the source partition CARRIER and without rows: its `places` are the
carrier by which the topic is read, `first_offset` is 1 if a row had metadata. So the state keeps the carrier, too.

The decision reads `places`, and opens `data` only if some rows of the chunk pass and some do not. Rows that the filter
does not check (no metadata, another PID) are in chunks without places, under a negative source partition, which no pair
has.

    a pair's chunks in any order ─▶ one array of source offsets in log order ─▶ ReplayFilter
                                                                                     │
    data of chunks that pass whole, as it came · data of the others, cut down ◀──────┘
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from filtering.carrier import FIRST_RECORDS, first_records_in_header
from filtering.marks import HighwaterMarks
from filtering.replay_filter import FilterCounts
from filtering.rule import group_pairs
from filtering.stream_metadata import METADATA_HEADER, Keys, parse_keys
from spark_jobs.columns import FilterRule
from spark_jobs.decide import EPOCH_COLUMNS, Epoch, epochs_mixed
from spark_jobs.row_decision import check_once, check_places, log_partitions, only_epoch

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
CARRIER = -(1 << 31)


def is_outside(source_partition: int) -> bool:
    """Whether chunks with this number hold rows that the filter does not check."""
    return source_partition < 0


def pack_rows(  # noqa: PLR0913 - the rows, and how they are read
    batches: Iterable[pa.RecordBatch],
    key: str,
    *,
    travels: bool = False,
    only_pids: Iterable[int] | None = None,
    carrier: str | None = None,
    is_first: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Rows with topic, partition, offset, a key and maybe epochs → chunks (PACKED).

    key: the column with the bytes that may be metadata. travels: it is a column of the frame itself, and stays in its
    rows. only_pids: the PIDs that the filter checks; None: all. carrier: sent along; None: it is not. is_first: these
    rows may be the first of all. Raises FrameUnusable, WrongCarrier.
    """
    wanted_bytes = [GATHER_BYTES]
    ours = None if only_pids is None else np.array(sorted(only_pids), np.int64)
    keyed: dict[str, bool] = {}  # the topics, and whether a row of them had metadata
    for rows in _gathered(batches, wanted_bytes):
        keys = parse_keys(rows.column(key))
        if is_first and travels and not keys.valid.all():
            _refuse_metadata_in_header(rows, keys)
        is_first = False
        # The data of all chunks is written into one buffer, which becomes the column `data` without another copy.
        sink, ends = pa.BufferOutputStream(), [0]
        chunks: list[tuple[Any, ...]] = []
        for *head, own in _chunks(rows, rows if travels else rows.drop_columns([key]), keys, ours):
            chunks.append(tuple(head))
            keyed[head[0]] = keyed.get(head[0], False) or not is_outside(head[2])
            write_rows(own, sink)
            ends.append(sink.tell())
        columns: list[Any] = [list(column) for column in zip(*chunks, strict=True)]
        arrays: list[Any] = [
            pa.array(cells, kind) for cells, (_, kind) in zip(columns, _PACKED_FIELDS[:-1], strict=True)
        ]
        buffers = [None, pa.py_buffer(np.array(ends, np.int32).tobytes()), sink.getvalue()]
        data = pa.Array.from_buffers(pa.binary(), len(chunks), buffers)
        if ends[-1] < len(chunks) * SMALL_BYTES:
            wanted_bytes[0] = min(2 * wanted_bytes[0], GATHER_BYTES_MAX)
        yield pa.RecordBatch.from_arrays([*arrays, data], schema=_PACKED_ARROW)
    if carrier is not None and keyed:
        yield _carrier_chunks(carrier.encode(), keyed)


def _carrier_chunks(carrier: bytes, keyed: Mapping[str, bool]) -> pa.RecordBatch:
    nothing = dict.fromkeys(("pid", "partition", "startpoint_epoch", "marks_epoch", "rows"), 0)
    chunk = {**nothing, "source_partition": CARRIER, "places": carrier, "data": b""}
    rows = [{**chunk, "topic": topic, "first_offset": int(was_keyed)} for topic, was_keyed in keyed.items()]
    return pa.RecordBatch.from_pylist(rows, schema=_PACKED_ARROW)


def _refuse_metadata_in_header(rows: pa.RecordBatch, keys: Keys) -> None:
    """Raise WrongCarrier if the first records of a topic, none of which has metadata in the key, have it there."""
    if "headers" not in rows.schema.names:  # as without `includeHeaders`: then nobody can say
        return
    for (topic, _), own in log_partitions(rows.column("topic"), np.zeros(rows.num_rows, np.int64)):
        of_topic = np.arange(rows.num_rows) if own is None else own
        first: Any = pa.array(of_topic[:FIRST_RECORDS])
        if len(first) == FIRST_RECORDS and not keys.valid[of_topic].any():
            carried = rows.column("headers").take(first).to_pylist()
            last = [{one["key"]: one["value"] for one in headers or ()}.get(METADATA_HEADER) for headers in carried]
            if parse_keys(last).valid.all():
                raise first_records_in_header(str(topic))


def unpack_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A column `data` → the rows in it. Small chunks are joined, because the cost of a batch in Spark is constant."""
    chunks = (opened(data.as_buffer()) for batch in batches for data in batch.column("data"))
    yield from _gathered(chunks, [CHUNK_BYTES // 2])


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


def _gathered(batches: Iterable[pa.RecordBatch], wanted_bytes: list[int]) -> Iterator[pa.RecordBatch]:
    """Batches joined until they have enough bytes: the one number in `wanted_bytes`, which may change meanwhile."""
    waiting: list[pa.RecordBatch] = []
    waiting_bytes = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        waiting.append(batch)
        waiting_bytes += batch.nbytes
        if waiting_bytes >= wanted_bytes[0]:
            yield _joined(waiting)
            waiting, waiting_bytes = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else cast("Any", pa).concat_batches(batches)  # the stubs lack it


def _chunks(
    rows: pa.RecordBatch, sent: pa.RecordBatch, keys: Keys, only_pids: Numbers | None
) -> Iterator[tuple[Any, ...]]:
    """The chunks as tuples in the order of PACKED, with rows of `sent` in place of `data`."""
    topic, partition, offset = (rows.column(name) for name in ("topic", "partition", "offset"))
    check_places(topic, partition, offset)
    offsets = np.asarray(offset).astype(np.int64)
    ours = keys.valid if only_pids is None else keys.valid & np.isin(keys.pids, only_pids)
    epoch_columns = [rows.column(name).fill_null(0) for name in EPOCH_COLUMNS if name in rows.schema.names]
    for where, some in log_partitions(topic, np.asarray(partition).astype(np.int64)):
        own = np.arange(len(offsets)) if some is None else some
        pids = np.where(ours[own], keys.pids[own], 0)
        partitions = np.where(ours[own], keys.partitions[own], -1 - where[1])
        pairs = Keys(pids, partitions, keys.offsets[own], ours[own])
        yield from _by_pair(sent, offsets, where, only_epoch(where, epoch_columns, own), own, pairs)


def _by_pair(  # noqa: PLR0913, PLR0917 - a log partition's rows, and where they are
    sent: pa.RecordBatch, offsets: Numbers, where: tuple[str | None, int], epoch: Epoch, own: Numbers, pairs: Keys
) -> Iterator[tuple[Any, ...]]:
    """The chunks of one log partition's pairs; `own` are its rows, in the order of `pairs`."""
    groups = group_pairs(pairs.pids, pairs.partitions)
    rows, source_offsets = groups.together(own), groups.together(pairs.offsets)
    if groups.order is not None or len(rows) < sent.num_rows:
        sent = sent.take(pa.array(rows))  # type: ignore[arg-type] # pyarrow's stubs know no index arrays
    log_offsets = offsets[rows]
    for k, (start, size) in enumerate(zip(groups.starts.tolist(), groups.sizes.tolist(), strict=True)):
        data, log, source = sent.slice(start, size), log_offsets[start : start + size], source_offsets[start:][:size]
        if not (log[1:] > log[:-1]).all():  # a shuffle changed the order, or a join multiplied rows
            order = np.argsort(log, kind="stable")
            data, log, source = data.take(pa.array(order)), log[order], source[order]  # type: ignore[arg-type]
        pair = (where[0], int(groups.pids[k]), int(groups.partitions[k]))
        for low, high in _cuts(data):
            places = b"" if is_outside(pair[2]) else np.stack([log[low:high], source[low:high]]).tobytes()
            head = (*pair, where[1], epoch.startpoint, epoch.marks, int(log[low]), high - low, places)
            yield *head, data.slice(low, high - low)


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


class PairName(NamedTuple):
    """A pair inside its destination topic."""

    topic: str
    pid: int
    source_partition: int


class PairChunk(NamedTuple):
    """Some rows of one pair, in log order."""

    partition: int
    epoch: Epoch
    first_offset: int
    places: bytes
    data: bytes


class PairMarks(NamedTuple):
    """Marks that hold one pair (and maybe others), and the startpoint epoch of the rows that raised them."""

    epoch: int = 0
    marks: HighwaterMarks = HighwaterMarks()


class PairAnswer(NamedTuple):
    """`kept`: the data of the rows that pass, chunk by chunk, in log order; read it once."""

    kept: Iterator[bytes]
    after: PairMarks
    counts: FilterCounts


def decide_pair(
    name: PairName, chunks: Iterable[PairChunk], known: PairMarks, rule: FilterRule, *, now_ms: int | None
) -> PairAnswer:
    """Which rows of one pair's chunks pass, and its marks after them; `known` are those before.

    Chunks may come in any order, and overlap if the frame was shuffled before: then rows are sorted by log offset. A
    row passes iff its source offset is above the mark and above those of its pair's rows before it in the log.

    `now_ms`: the time of the batch, at whose end `ttl_s` is judged; None: nothing expires.
    Raises PairSplit, FrameUnusable.
    """
    in_order = sorted(chunks, key=lambda chunk: (chunk.partition, chunk.first_offset))
    epoch = _epoch_of(name, in_order)
    marks = known.marks if known.epoch >= epoch.marks else HighwaterMarks()
    places = [places_of(chunk.places) for chunk in in_order]
    log_offsets, source_offsets = (np.concatenate(column) for column in zip(*places, strict=True))
    sizes = np.array([len(own) for own, _ in places])
    partitions = np.repeat(np.array([chunk.partition for chunk in in_order]), sizes)
    # In several partitions the order does not matter: the filter refuses the pair.
    order = None if (log_offsets[1:] > log_offsets[:-1]).all() else np.lexsort((log_offsets, partitions))
    count = len(source_offsets)
    filter_ = rule.new_filter(marks)
    passes = filter_.admit_batch(
        Keys(
            np.full(count, name.pid, np.int64),
            np.full(count, name.source_partition, np.int64),
            source_offsets if order is None else source_offsets[order],
            np.ones(count, np.bool_),
        ),
        partitions if order is None else partitions[order],
    )
    if order is not None:
        check_once(name.topic, in_order[0].partition, log_offsets[order])
        passes = passes[np.argsort(order)]
    after = PairMarks(epoch.startpoint, filter_.marks(now_ms))
    counts = filter_.counts if rule.counts_gaps else replace(filter_.counts, jumped=0)
    return PairAnswer(_kept(in_order, sizes.tolist(), passes), after, counts)


def _epoch_of(name: PairName, chunks: list[PairChunk]) -> Epoch:
    """The epoch of the first log partition. A pair in a second one is refused before this matters."""
    partition, epoch = chunks[0].partition, chunks[0].epoch
    epochs = {chunk.epoch for chunk in chunks if chunk.partition == partition}
    if len(epochs) > 1:
        raise epochs_mixed(name.topic, partition, (e.startpoint for e in epochs))
    return epoch


def _kept(chunks: list[PairChunk], sizes: list[int], passes: npt.NDArray[np.bool_]) -> Iterator[bytes]:
    low = 0
    for chunk, size in zip(chunks, sizes, strict=True):
        own = passes[low : low + size]
        low += size
        if own.all():
            yield chunk.data
        elif own.any():
            yield closed(opened(chunk.data).filter(pa.array(own)))
