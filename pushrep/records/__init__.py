"""Record batches v2, Kafka's unit of append, checksum, replication and compression. Pure: no clock, disk or network.

encode_batch(values, ...) -> RecordBatch          one batch, encoded once and never again
RecordBatch.check(data)   -> RecordBatch          bytes from a disk or a wire, verified
batch.records()           -> list[Record]         batch.rows()                            the same, made one by one
                                                  batch.stamp(...), batch.with_producer(...)        patch its header
"""

from pushrep.records.batch import DECOMPRESSED_BYTES_MAX, RecordBatch
from pushrep.records.columns import HeaderColumns, RecordColumns
from pushrep.records.decoder import RecordCursor, RecordRows
from pushrep.records.encoder import HeaderColumn, Headers, Keys, encode_batch
from pushrep.records.header import (
    HEADER_BYTES,
    HEADER_OVERHEAD_BYTES_MAX,
    RECORD_OVERHEAD_BYTES_MAX,
    BatchHeader,
    BatchRun,
    Codec,
    CorruptRecordBatch,
    Record,
    RecordTooLarge,
    TimestampType,
    UnsupportedCodec,
)

__all__ = [
    "DECOMPRESSED_BYTES_MAX",
    "HEADER_BYTES",
    "HEADER_OVERHEAD_BYTES_MAX",
    "RECORD_OVERHEAD_BYTES_MAX",
    "BatchHeader",
    "BatchRun",
    "Codec",
    "CorruptRecordBatch",
    "HeaderColumn",
    "HeaderColumns",
    "Headers",
    "Keys",
    "Record",
    "RecordBatch",
    "RecordColumns",
    "RecordCursor",
    "RecordRows",
    "RecordTooLarge",
    "TimestampType",
    "UnsupportedCodec",
    "encode_batch",
]
