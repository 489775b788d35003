"""CRC-32C by the processor's instruction, over any buffer, without copying it.

google-crc32c takes only objects that promise not to move; bytearray and memoryview do not, a numpy view of them does.
The view makes 27 GB/s where a copy into `bytes` first makes 15-17 (512 KiB on one core, benchmarks/records_codec.py).
"""

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from pushrep.records.model import Buffer


def crc32c_of_bytes(data: bytes) -> int:
    """The same of all of `data`: for a few hundred bytes, where the view costs more than the sum."""
    return int(google_crc32c.value(data))


def crc32c_in_place(data: NDArray[np.uint8]) -> int:
    """The same of all of a view: for who makes one of many neighbours, and slices it."""
    return int(google_crc32c.value(data))


def crc32c(data: Buffer, start: int = 0, end: int | None = None) -> int:
    """CRC-32C (Castagnoli, RFC 3720 B.4) of `data[start:end]` as an unsigned 32-bit number."""
    count = (len(data) if end is None else end) - start
    if count <= 0:
        return 0
    return int(google_crc32c.value(np.frombuffer(data, np.uint8, count, start)))
