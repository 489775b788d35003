"""The logs of one topic as the source reads them: beside their writer, without a lock, never a byte written.

Readers are opened when first asked and kept: the driver asks the same logs at every trigger.

A range of offsets is cut into tasks by bytes. Walking every batch header of a large log would read half of it, so
`cut_range` (pure) measures the density (bytes per record) at a few record batches and assumes it around them:

    start ----p0----|----p1----|----p2----|----p3---- end      sections of equal record counts, a probe in each one

Sizes are estimates; the cuts lie at record batches, so that no batch is decoded by two tasks.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from filtering.closing import close_all
from pushrep.log import LogReader, NotALog, OffsetOutOfRange, SegmentLog
from pushrep.log.directory_files import in_its_slot, log_at, outboxes_at, readable_logs, shown_name
from pushrep.log.published import read_published
from pushrep.records import BatchHeader
from spark_jobs.errors import SparkJobError
from spark_jobs.sources.options import BadOption
from spark_jobs.sources.planning import Extent

SECTIONS = 8


class BatchSpan(NamedTuple):
    """Where one record batch lies: offsets [base, end), and its size in the log."""

    base: int
    end: int
    size_bytes: int

    @property
    def density(self) -> float:
        """Log bytes per offset."""
        return self.size_bytes / max(1, self.end - self.base)


Probe: TypeAlias = Callable[[int], BatchSpan]
"""The record batch that holds an offset."""


def cut_range(start: int, end: int, probe: Probe, piece_bytes: int) -> list[tuple[int, int]]:
    """[start, end), not empty, as contiguous pieces of about `piece_bytes` each, cut where a record batch begins.

    Measured at SECTIONS + 1 record batches at most; at the first one alone if by it the range is much smaller than a
    piece.
    """
    count, first = end - start, probe(start)
    sections = 1 if first.end >= end or first.density * count < piece_bytes / 2 else min(SECTIONS, count)
    edges = [count * section // sections for section in range(sections + 1)]
    middles = [start + (low + high) // 2 for low, high in pairwise(edges)]
    densities = [first.density] if sections == 1 else [probe(middle).density for middle in middles]
    sizes = np.cumsum(
        [0.0, *(density * (high - low) for density, (low, high) in zip(densities, pairwise(edges), strict=True))]
    )
    pieces = max(1, round(sizes[-1] / piece_bytes))
    inner = np.interp([sizes[-1] * piece / pieces for piece in range(1, pieces)], sizes, edges)
    bases = {probe(start + min(int(at), count - 1)).base for at in inner}
    return list(pairwise([start, *sorted(base for base in bases if start < base < end), end]))


# Plans end at a log's stable offset. What was planned is read as "written": to ask for the stable offset again would
# refuse a batch that is run again while the writer is down and only its last checkpoint knows the end.
PLANNED: Literal["written"] = "written"


class EndUnknown(SparkJobError):
    """No writer has opened the log since the machine started, so its end is not known up to `offset`; start it."""

    def __init__(self, topic: str, partition: int, offset: int, known: int) -> None:
        super().__init__(
            f"source pushrep: {shown_name(topic, partition)} is to be read up to {offset}, but without its writer only "
            f"the offsets below {known} are known to be there since the machine started. Start the writer, then this "
            "query"
        )
        self.topic, self.partition, self.offset, self.known = topic, partition, offset, known


class TopicLogs:
    """Readers of `<path>/<topic>-<n>`: of the `chosen` partitions, or of every one that is there.

    In a directory of worker slots, of those of every slot: a partition is the log's number (log/directory_files.py).
    """

    def __init__(self, path: str, topic: str, chosen: tuple[int, ...] | None) -> None:
        self._directory, self._topic, self._chosen = Path(path), topic, chosen
        self._readers: dict[int, LogReader] = {}
        self._inodes: list[int | None] = []

    def close(self) -> None:
        readers, self._readers = self._readers, {}
        close_all(reader.close for reader in readers.values())

    def present(self) -> list[int]:
        """Every partition of the topic that is there, ascending. Raises BadOption if there is none."""
        path = str(self._directory)
        try:
            logs = readable_logs(self._directory)
        except NotALog as error:
            raise BadOption("path", path, f"it is no directory of logs, {error.why}") from error
        present = [partition for topic, partition in logs if topic == self._topic]
        if not present:
            holds = ", ".join(sorted({topic for topic, _ in logs})) or "no logs"
            raise BadOption("topic", self._topic, f"there is no log of it in {path}, which holds {holds}")
        return present

    def partitions(self) -> list[int]:
        """Those that there are to read, ascending. Raises BadOption."""
        present = self.present()
        if self._chosen is None:
            return present
        chosen = set(self._chosen)
        if missing := sorted(chosen - {in_its_slot(partition) for partition in present}):
            known = sorted({in_its_slot(partition) for partition in present})
            raise BadOption("partitions", None, f"it names {missing}, topic {self._topic!r} has {known}")
        return [partition for partition in present if in_its_slot(partition) in chosen]

    def extents(self) -> dict[int, Extent]:
        """What each partition holds below its stable offset, now. One that is just being made is left out."""
        self._follow_directory()
        extents = {}
        for partition in self.partitions():
            reader = self.reader(partition)
            start = reader.log_start_offset
            log_id = reader.log_id
            if log_id is not None:
                extents[partition] = Extent(start, max(start, reader.stable_offset), str(log_id))
        return extents

    def reader(self, partition: int) -> LogReader:
        """The partition's reader; opened on first use."""
        if partition not in self._readers:
            self._readers[partition] = SegmentLog.open_reader(
                log_at(self._directory, self._topic, partition), isolation=PLANNED
            )
        return self._readers[partition]

    def reader_if_there(self, partition: int) -> LogReader | None:
        """The partition's reader; None if there is no such log."""
        try:
            return self.reader(partition)
        except NotALog:
            return None

    def first_at(self, partition: int, ms: int) -> int | None:
        """Offset of the first record at or after `ms` since 1970; None if there is none."""
        return self.reader(partition).offset_for_timestamp(ms)

    def pieces(self, partition: int, start: int, end: int, piece_bytes: int) -> list[tuple[int, int]]:
        """[start, end), not empty, as `cut_range` cuts it."""
        reader = self.reader(partition)

        def probe(offset: int) -> BatchSpan:
            try:
                batch = reader.read(offset, 1)
            except OffsetOutOfRange:  # retention came in between: the reader of the range reports it
                batch = b""
            if not batch:  # a compacted log may end in a hole
                return BatchSpan(offset, end, 1)
            header = BatchHeader.parse(batch)
            return BatchSpan(header.base_offset, header.next_offset, header.size_bytes)

        return cut_range(start, end, probe, piece_bytes)

    def _follow_directory(self) -> None:
        # A replaced directory's old files stay alive while they are mapped.
        inodes = [path.stat().st_ino if path.exists() else None for path in outboxes_at(self._directory)]
        if inodes != self._inodes:
            self.close()
            self._inodes = inodes


def written_end(reader: LogReader) -> int | None:
    """The log's end, stable or not. None if no writer ran since the machine started: only checkpoints know it then.

    Checkpoints lag by up to a second of appends, so a lower end in them is no loss.
    """
    return None if read_published(reader.path.parent, reader.path.name) is None else reader.log_end_offset
