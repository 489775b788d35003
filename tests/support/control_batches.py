"""Control batches: what a transaction's markers look like to a reader."""

from pushrep.records import header as layout
from pushrep.records.header import crc32c


def as_control(batch: bytes) -> bytes:
    """The same batch as a marker, which is no data."""
    data = bytearray(batch)
    data[22] |= 0x20  # bit 5 of the attributes, bytes 21 and 22
    layout.write_crc(data, crc32c(data, layout.CRC_COVERS_FROM))
    return bytes(data)
