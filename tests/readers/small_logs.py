"""A small log of three segments, every other batch compressed.

| 0-1 2-4 5-6 | 7-8 9-11 12-13 | 14-15 16-18 19-20 |
"""

import base64
import os
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

from pushrep.log import LogConfig, SegmentLog
from tests.readers.batch_bytes import FIELDS, HEADER_BYTES, RawBatch, RawRecord, build_batch, parse_batches

LOG_ID = UUID(int=12)
TOPIC, NAME = "orders", "orders-0"
FIRST_MS = 1_700_000_000_000
_AT_END = ("recovery-point-offset-checkpoint", "replication-offset-checkpoint")
CONFIG = LogConfig(preallocate_bytes=0, index_interval_bytes=100)


class Layout(NamedTuple):
    """segments: base -> its batches, each the offsets of its records and the offset behind it."""

    segments: dict[int, list[tuple[Sequence[int], int]]]


DENSE = Layout({
    base: [(range(base + first, base + behind), base + behind) for first, behind in ((0, 2), (2, 5), (5, 7))]
    for base in (0, 7, 14)
})  # fmt: skip
_BITS = {"base offset": 4, "length": 2, "leader epoch": 2}  # of what says where a batch stands


@dataclass(frozen=True)
class Flip:
    """One bit of the header of batch number `batch` of the log; `bit` counts from the header's first."""

    batch: int
    bit: int

    @property
    def field(self):
        return next(name for name, (start, end) in FIELDS.items() if start <= self.bit // 8 < end)

    @property
    def is_covered(self):
        """Whether the batch's CRC covers the byte."""
        return self.bit // 8 >= FIELDS["crc"][0]

    def __str__(self):
        return f"batch {self.batch}, {self.field}, bit {self.bit} of the header"


@dataclass(frozen=True)
class SmallLog:
    """`batches`: as the bytes alone tell them, before anything was flipped."""

    path: Path
    bases: tuple[int, ...]

    @cached_property
    def batches(self):
        return tuple(batch for _, batch in self._places)

    @cached_property
    def records(self):
        return tuple(record for batch in self.batches for record in batch.records)

    @cached_property
    def end(self):
        return self.batches[-1].next_offset

    @cached_property
    def _places(self) -> list[tuple[Path, RawBatch]]:
        return [
            (path, batch)
            for path in (self.path / f"{base:020d}.log" for base in self.bases)
            for batch in parse_batches(path.read_bytes())
        ]

    def between(self, start, end):
        return [record for record in self.records if start <= record.offset < end]

    def first_since(self, timestamp_ms):
        return next((record.offset for record in self.records if record.timestamp_ms >= timestamp_ms), None)

    def flips(self, torture):
        """All bits of all headers; in the short form some of every field of every header, other ones with each seed."""
        number_of_batches, chosen = range(len(self.batches)), torture.random("header bits")
        if torture.is_long:
            return [Flip(number, bit) for number in number_of_batches for bit in range(8 * HEADER_BYTES)]
        return [
            Flip(number, bit)
            for number in number_of_batches
            for name, (start, end) in FIELDS.items()
            for bit in sorted(chosen.sample(range(8 * start, 8 * end), _BITS.get(name, 1)))
        ]

    @contextmanager
    def flipped(self, flip):
        path, batch = self._places[flip.batch]
        at, mask = batch.position + flip.bit // 8, 0x80 >> flip.bit % 8
        descriptor = os.open(path, os.O_RDWR)
        try:
            (byte,) = os.pread(descriptor, 1, at)
            os.pwrite(descriptor, bytes([byte ^ mask]), at)
            try:
                yield
            finally:
                os.pwrite(descriptor, bytes([byte]), at)
        finally:
            os.close(descriptor)


def record_at(offset):
    """Times rise by 1 or fall by 2, so that no order of offsets is one of times."""
    return RawRecord(
        offset,
        FIRST_MS + 10 * offset - (30 if offset % 5 == 4 else 0),
        None if offset % 3 == 0 else b"key %d" % offset,
        None if offset % 7 == 6 else b"value %d " % offset * (1 + offset % 4),
        (("n", b"%d" % offset), ("none", None)) if offset % 2 else (),
    )


def make_log(directory):
    """Write its files byte by byte, and let the product open and close it once, which makes indexes."""
    (log,) = write_logs(directory, [DENSE])
    with SegmentLog.open(log.path, CONFIG) as opened:
        assert (opened.log_id, opened.damaged_from) == (LOG_ID, None)
    assert not list(log.path.glob("*.seal"))
    return log


def write_logs(directory, layouts, log_id=LOG_ID, record=lambda _, offset: record_at(offset)):
    """The files of one partition for each layout, of one topic, with the records `record(partition, offset)`."""
    logs = [
        _write_log(directory / f"{TOPIC}-{n}", layout, log_id, partial(record, n)) for n, layout in enumerate(layouts)
    ]
    checkpoints = {name: [log.end for log in logs] for name in _AT_END}
    for name, offsets in checkpoints.items():
        lines = [f"{TOPIC} {n} {offset}\n" for n, offset in enumerate(offsets) if offset]
        if lines:
            (directory / name).write_text(f"0\n{len(lines)}\n{''.join(lines)}")
    return logs


def _write_log(path, layout, log_id, record):
    path.mkdir(parents=True)
    number = 0
    for base, batches in layout.segments.items():
        data = b""
        for offsets, next_offset in batches:
            records = [record(offset) for offset in offsets]
            epoch = 0 if base < 14 else 1
            data += build_batch(offsets[0], records, next_offset=next_offset, epoch=epoch, gzip=number % 2 == 1)
            number += 1
        (path / f"{base:020d}.log").write_bytes(data)
    topic_id = base64.urlsafe_b64encode(log_id.bytes).decode().rstrip("=")
    (path / "partition.metadata").write_text(f"version: 0\ntopic_id: {topic_id}\n")
    return SmallLog(path, tuple(layout.segments))
