"""What an apply would resolve to, seen before it is written: one row per reader that the startpoint is for."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from pushrep.log import NotALogDirectory, SegmentLog
from pushrep.log.slots import log_at, readable_logs
from pushrep.startpoints import Reader, Resolved, Startpoint, StartpointStore, Target, facts_of, resolve


class Row(NamedTuple):
    """A reader's start if the startpoint were applied now. `consumer` None: one without a checkpoint."""

    consumer: str | None
    partition: int
    task: str
    checkpoint: int | None
    log_start: int
    log_end: int
    offset: int | None
    why: str | None
    reset_marks: bool

    @property
    def read_again(self) -> int:
        """How many offsets it has committed already and would read again."""
        if self.offset is None or self.checkpoint is None:
            return 0
        return max(0, min(self.checkpoint, self.log_end) - self.offset)

    @property
    def passed_by(self) -> int:
        """How many offsets it would never read."""
        if self.offset is None or self.checkpoint is None:
            return 0
        return max(0, self.offset - max(self.checkpoint, self.log_start))

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "read_again": self.read_again, "passed_by": self.passed_by}


def partitions_of(directory: Path, topic: str) -> list[int]:
    """The partitions of the topic that lie in the directory; empty if there is no such directory."""
    try:
        return [partition for name, partition in readable_logs(directory) if name == topic]
    except NotALogDirectory:
        return []


def preview(
    directory: Path, store: StartpointStore, target: Target, startpoint: Startpoint, *, now_ms: int
) -> list[Row]:
    """A row for each partition that has a log here, and each consumer that is known in it."""
    checkpoints = [found for found in store.checkpoints() if target.covers(found.reader)]
    rows = []
    with ExitStack() as opened:
        for partition in partitions_of(directory, target.topic):
            if target.partition not in (None, partition):
                continue
            reader = opened.enter_context(SegmentLog.open_reader(log_at(directory, target.topic, partition)))
            log = facts_of(reader)
            known: list[tuple[Reader | None, int | None]] = [
                (found.reader, found.offset) for found in checkpoints if found.reader.partition == partition
            ]
            for who, offset in known or [(None, None)]:
                answer = resolve(startpoint, log, created_ms=now_ms, position=offset)
                rows.append(
                    Row(
                        consumer=who.consumer if who is not None else target.consumer,
                        partition=partition,
                        task=who.task if who is not None else target.task or "",
                        checkpoint=offset,
                        log_start=log.start,
                        log_end=log.end,
                        offset=answer.offset if isinstance(answer, Resolved) else None,
                        why=answer.by_policy if isinstance(answer, Resolved) else answer.why,
                        reset_marks=startpoint.reset_marks,
                    )
                )
    return rows
