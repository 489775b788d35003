"""A whole record batch: its bytes, its header, and the ways to look inside."""

from pushrep.records import header as layout
from pushrep.records.columns import RecordColumns, decode_columns, rows_of_columns
from pushrep.records.compression import DECOMPRESSED_BYTES_MAX, decompress
from pushrep.records.decoder import RecordRows, read_small_batch, read_uniform, scan, scanned_rows
from pushrep.records.header import BatchHeader, crc32c
from pushrep.records.model import Buffer, CorruptRecordBatch, Record

_COLUMNS_WORTHWHILE = 160  # records; for fewer, a hundred numpy calls cost more than decoding one by one


class RecordBatch:
    """The bytes of one batch and their header. The constructor does not check the CRC; `check` does. is_checked: the
    bytes were checked, or made here. Raises CorruptRecordBatch unless `data` is exactly one batch by its length field.
    """

    __slots__ = ("data", "header", "is_checked")

    def __init__(self, data: Buffer, header: BatchHeader | None = None) -> None:
        self.data: Buffer = data
        self.header: BatchHeader = BatchHeader.parse(data) if header is None else header
        self.is_checked = header is not None
        if self.header.batch_length + layout.LENGTH_ENDS_AT != len(data):
            raise CorruptRecordBatch(f"{len(data)} bytes, the length field says {self.header.size_bytes}")

    @classmethod
    def check(cls, data: Buffer, header: BatchHeader | None = None) -> "RecordBatch":
        """`data` as a batch whose length, magic and CRC were verified; raises CorruptRecordBatch with the reason.

        `header`: of these very bytes, if they were parsed before.
        """
        batch = cls(data, header)
        crc = crc32c(data, layout.CRC_COVERS_FROM)
        if crc != batch.header.crc:
            raise CorruptRecordBatch(f"CRC-32C is {crc:#010x}, the header says {batch.header.crc:#010x}")
        batch.is_checked = True
        return batch

    def __len__(self) -> int:
        return self.header.record_count

    def __repr__(self) -> str:
        first, end = self.header.base_offset, self.header.next_offset
        return f"RecordBatch([{first}, {end}), {len(self)} records, {self.header.size_bytes} bytes)"

    def records(self, *, decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX) -> list[Record]:
        """Every record, offsets ascending. A control batch gives its markers: see `header.is_control`.

        Raises CorruptRecordBatch, also if the records take more than `decompressed_bytes_max`, and UnsupportedCodec.
        """
        return list(self.rows(decompressed_bytes_max=decompressed_bytes_max))

    def rows(self, *, decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX) -> RecordRows:
        """The same, each Record made only when it is taken; decoding happens first. Raises as `records`."""
        header, payload = self.header, self.payload(decompressed_bytes_max=decompressed_bytes_max)
        if (uniform := read_uniform(header, payload)) is not None:
            return uniform
        if header.record_count < _COLUMNS_WORTHWHILE:
            data = payload.tobytes()
            few = read_small_batch(header, data)
            return few if few is not None else scanned_rows(scan(header, data), data, header.timestamp_type)
        return rows_of_columns(decode_columns(header, payload), header.timestamp_type)

    def columns(self, *, decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX) -> RecordColumns:
        """The same records as numpy columns of positions, without Python code per record. Raises as `records` does."""
        return decode_columns(self.header, self.payload(decompressed_bytes_max=decompressed_bytes_max))

    def payload(self, *, decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX) -> memoryview:
        """The encoded records, decompressed; no copy where they are not compressed. Raises as `records` does."""
        records = memoryview(self.data)[layout.HEADER_BYTES :]
        return decompress(self.header.codec, records, decompressed_bytes_max)

    def stamp(self, base_offset: int, leader_epoch: int) -> None:
        """Write base offset and leader epoch; in place where `data` is writable, else into a copy of its own.

        The CRC covers neither. A batch that has both already, as a leader's at its replica, is not changed.
        """
        if self.header.base_offset == base_offset and self.header.leader_epoch == leader_epoch:
            return
        layout.stamp(self._writable(), base_offset, leader_epoch)
        header = self.header
        fields = (base_offset, header.batch_length, leader_epoch, *header[3:])
        self.header = tuple.__new__(BatchHeader, fields)  # a quarter of `_replace`

    def with_producer(self, producer_id: int, producer_epoch: int, base_sequence: int) -> bytes:
        """This batch as an idempotent producer sends it: base offset 0, the producer's fields, the CRC redone.

        The batch itself stays as it is; the records are not encoded again.
        """
        data = bytearray(self.data)
        layout.stamp(data, 0, -1)
        layout.write_producer(data, producer_id, producer_epoch, base_sequence)
        layout.write_crc(data, crc32c(data, layout.CRC_COVERS_FROM))
        return bytes(data)

    def _writable(self) -> bytearray | memoryview:
        if isinstance(self.data, bytes) or (isinstance(self.data, memoryview) and self.data.readonly):
            self.data = bytearray(self.data)
        return self.data
