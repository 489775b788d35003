"""Where a stream stands: the offset that Spark logs for each batch, as JSON. Pure.

    before the first batch   {"version": 1, "topic": "orders", "startingOffsets": "earliest"}      the option's words
    end of each batch        {"version": 1, "topic": "orders",
                              "partitions": {"0": {"epoch": 0, "offset": 23, "log": "<uuid>"}},    next offset to read
                              "start": {"0": 12}}                                                  where it began

Spark asks for the words again as long as no batch is committed, so what they meant on the day must stand in what it
logs: a partition that has no predecessor (all of them in batch 0, a new one later) carries its start in the end
offset. Killed before the first commit, batch 0 is read again from there and is the same batch, whatever was appended.

`log` is the log's own id: offsets of a log that was made anew under the same name mean other records. `epoch` is the
number of the startpoint that the partition's run started from, 0 for none (see `startpoints`); `marks`, only where
there is one, that of the newest startpoint of this line that let the marks of a replay filter begin anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spark_jobs.errors import SparkJobError

VERSION = 1


class StreamOffsetUnusable(SparkJobError):
    """The checkpoint's source offset is not for this source as it is configured now; `field` says in what."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"source pushrep: the checkpoint's offset can't be used, {field}: {why}")
        self.field = field


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Next offset to read in one partition, of which log, in which startpoint epoch, see the file's map."""

    offset: int
    log_id: str
    epoch: int = 0
    marks_epoch: int = 0


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The end of a batch: a position per partition, and the starts of those that this batch reads first."""

    topic: str
    positions: Mapping[int, StreamPosition]
    starts: Mapping[int, int]

    def to_json(self) -> dict[str, Any]:
        """The dict that Spark writes; keys in ascending partition order, so equal offsets are equal texts."""
        return {
            "version": VERSION,
            "topic": self.topic,
            "partitions": {str(partition): _entry(position) for partition, position in sorted(self.positions.items())},
            "start": {str(partition): offset for partition, offset in sorted(self.starts.items())},
        }

    @classmethod
    def from_json(cls, logged: Mapping[str, Any], topic: str) -> "StreamOffset | None":
        """Read what Spark logged; None for the words of a stream without a batch. Raises StreamOffsetUnusable."""
        if logged.get("version") != VERSION:
            why = f"this source reads {VERSION}; use the release that wrote it, or a new checkpoint"
            raise StreamOffsetUnusable(f"version={logged.get('version')!r}", why)
        if logged.get("topic") != topic:
            why = f"option topic is {topic!r} now; set it back, or use a new checkpoint"
            raise StreamOffsetUnusable(f"topic={logged.get('topic')!r}", why)
        if "partitions" not in logged:
            return None
        positions = {
            int(partition): StreamPosition(entry["offset"], entry["log"], entry["epoch"], entry.get("marks", 0))
            for partition, entry in logged["partitions"].items()
        }
        return cls(topic, positions, {int(partition): offset for partition, offset in logged["start"].items()})


def _entry(position: StreamPosition) -> dict[str, Any]:
    entry = {"epoch": position.epoch, "offset": position.offset, "log": position.log_id}
    return entry | ({"marks": position.marks_epoch} if position.marks_epoch else {})


def initial_words(topic: str, given: Mapping[str, str]) -> dict[str, Any]:
    """What a stream without a batch stands at: the option's words, not what they mean today."""
    option = "startingTimestamp" if "startingTimestamp" in given else "startingOffsets"
    return {"version": VERSION, "topic": topic, option: given.get(option, "earliest")}
