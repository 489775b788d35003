"""Sealed batches out of a log's files, into memory that is used again: fresh pages cost more than what is read there.

    slice of a segment ─ read ─▶ memory of 1 MiB, page by page ─ CRC checked ─▶ batches ─ patched in place ─▶ the wire
                                   ▲─────────── when nobody looks into it any more ◀──────────────────────────┘

What is small is not worth a whole buffer, and gets bytes of its own. What is too large, or not plainly as it should be,
is left to the log's own reader, which says what is the matter.
"""

from os import preadv

import numpy as np

from pushrep.log.slicing import LogSlices
from pushrep.records import BatchHeader, CorruptRecordBatch, RecordBatch

_PAGE_BYTES = 4096
BUFFER_BYTES = (1 << 20) + _PAGE_BYTES
"""Kafka's own max.message.bytes is 1 MiB and twelve bytes."""
_BUFFERS_MAX = 16
_WORTHWHILE_BYTES = BUFFER_BYTES // 4


class ReusedMemory:
    """Buffers of BUFFER_BYTES, as many as are looked into at a time and `_BUFFERS_MAX` at most. For one thread."""

    def __init__(self) -> None:
        self._buffers: list[
            tuple[bytearray, int]
        ] = []  # and where a page begins: the kernel copies a third faster there

    def take(self) -> memoryview | None:
        """One that nobody looks into; None if there is none."""
        for number, (buffer, _) in enumerate(self._buffers):
            try:
                buffer.append(buffer.pop())  # a view of it forbids that; it moves nothing
            except BufferError:
                continue
            self._buffers.append(self._buffers.pop(number))
            break
        else:
            if len(self._buffers) == _BUFFERS_MAX:
                return None
            made = bytearray(BUFFER_BYTES + _PAGE_BYTES)
            self._buffers.append((made, -np.frombuffer(made, np.uint8).ctypes.data % _PAGE_BYTES))
        buffer, start = self._buffers[-1]
        return memoryview(buffer)[start : start + BUFFER_BYTES]


class SealedReader:
    """The batches of one log. For one thread."""

    def __init__(self, slices: LogSlices, memory: ReusedMemory) -> None:
        self._slices, self._memory = slices, memory

    def read(self, offset: int, limit: int) -> list[RecordBatch]:
        """Some from the one that holds `offset` on, up to `limit`; empty where the log's own reader has to look.

        Those in reused memory can be written to. Raises OSError.
        """
        found = self._slices.read(offset, limit, BUFFER_BYTES)
        if found is None or found.size_bytes > BUFFER_BYTES:
            return []
        view = self._memory.take() if found.size_bytes >= _WORTHWHILE_BYTES else None
        if view is None:
            data = memoryview(found.file.read_at(found.size_bytes, found.position))
        else:
            read_bytes = preadv(found.file.fileno(), [view[: found.size_bytes]], found.position)
            data = view[:read_bytes]  # of a file that was cut meanwhile less: behind it lies what was read before
        return _checked(data, found.base_offset)


def _checked(data: memoryview, base_offset: int) -> list[RecordBatch]:
    """Those before the first that is not whole, or does not follow."""
    batches: list[RecordBatch] = []
    position = 0
    try:
        while position < len(data):
            header = BatchHeader.parse(data, position)
            end = position + header.size_bytes
            if header.base_offset != base_offset or end > len(data):
                break
            batches.append(RecordBatch.check(data[position:end], header))
            position, base_offset = end, header.next_offset
    except CorruptRecordBatch:
        pass
    return batches
