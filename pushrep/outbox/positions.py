"""Which upstream positions a log holds: the highest source offset of each (PID, source partition).

Read from the records' keys or headers, a whole batch at a time and with no Python object per record; memory grows with
the pairs, not with the log.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from filtering import KEY_BYTES, METADATA_HEADER, parse_keys
from filtering.rule import group_pairs
from pushrep.outbox.source_order import Pair
from pushrep.records import RecordBatch
from pushrep.records.columns import RecordColumns

_NAME = np.frombuffer(METADATA_HEADER.encode(), np.uint8)


def highest_positions(batches: Iterable[RecordBatch], carrier: str) -> dict[Pair, int]:
    """(pid, source partition) -> highest source offset in the batches; records without metadata count for nothing."""
    highest: dict[Pair, int] = {}
    for batch in batches:
        if batch.header.is_control:
            continue
        keys = parse_keys(packed_metadata(batch.columns(), carrier))
        if not keys.valid.any():
            continue
        groups = group_pairs(keys.pids[keys.valid], keys.partitions[keys.valid])
        maxima = np.maximum.reduceat(groups.together(keys.offsets[keys.valid]), groups.starts)
        for pid, partition, offset in zip(
            groups.pids.tolist(), groups.partitions.tolist(), maxima.tolist(), strict=True
        ):
            if highest.get((pid, partition), -1) < offset:
                highest[pid, partition] = offset
    return highest


def packed_metadata(columns: RecordColumns, carrier: str) -> npt.NDArray[np.uint8]:
    """The 20 bytes of every record that has them, in log order: shape (n, 20), not yet checked for being metadata."""
    is_key = columns.key_length == KEY_BYTES
    starts = columns.key_start[is_key] if carrier == "key" else _last_header_starts(columns)
    payload = np.frombuffer(columns.payload, np.uint8)
    return _pieces(payload, starts, KEY_BYTES)


def _last_header_starts(columns: RecordColumns) -> npt.NDArray[np.int32]:
    """Where each record's last `stream-metadata` header has its value, for those whose value has 20 bytes."""
    headers = columns.headers
    payload = np.frombuffer(columns.payload, np.uint8)
    rows = np.flatnonzero(headers.name_length == len(_NAME))
    names = _pieces(payload, headers.name_start[rows], len(_NAME))
    rows = rows[(names == _NAME).all(axis=1)]
    record = headers.record[rows]
    if not len(rows):
        return np.empty(0, np.int32)
    rows = rows[np.append(record[1:] != record[:-1], True)]
    starts: npt.NDArray[np.int32] = headers.value_start[rows[headers.value_length[rows] == KEY_BYTES]]
    return starts


def _pieces(data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.uint8]:
    """`width` bytes from each of `starts` on, as rows; the positions were checked when the batch was decoded."""
    if not len(starts):
        return np.empty((0, width), np.uint8)
    # Overlapping windows cost nothing until rows of them are taken; twice as fast as a matrix of positions.
    windows = as_strided(data, (len(data) - width + 1, width), (1, 1), writeable=False)
    rows: npt.NDArray[np.uint8] = windows[starts]
    return rows
