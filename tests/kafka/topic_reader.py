"""Reads a topic and judges it: which records the filter lets through, in which order, and how many are copies."""

from typing import NamedTuple

from filtering import METADATA_HEADER, ReplayFilter, StreamMetadata
from pushrep.records import Record
from tests.kafka.plain_client import Seen, consume_all


class Found(NamedTuple):
    """`visible`: (pid, source partition) to its records in the topic's order; `copies`: that the filter dropped."""

    visible: dict[tuple[int, int], list[Seen]]
    copies: int

    def of(self, pid: int, partition: int) -> list[Seen]:
        return self.visible.get((pid, partition), [])


def read_filtered(servers: str, topic: str, partitions: int, carrier: str = "key") -> Found:
    """Read all of a topic's partitions through one filter."""
    filter_, visible, copies = ReplayFilter(), {}, 0
    for partition, found in consume_all(servers, topic, range(partitions)).items():
        for seen in found:
            key = seen.key if carrier == "key" else dict(seen.headers)[METADATA_HEADER]
            if filter_.admit(key, partition):
                metadata = StreamMetadata.unpack(key)
                visible.setdefault((metadata.pid, metadata.partition), []).append(seen)
            else:
                copies += 1
    return Found(visible, copies)


def same(seen: list[Seen], records: list[Record]) -> bool:
    """Whether a consumer sees exactly these records, in order, field by field."""
    return [(one.key, one.value, one.timestamp_ms, one.headers) for one in seen] == [
        (one.key, one.value, one.timestamp_ms, tuple(one.headers)) for one in records
    ]
