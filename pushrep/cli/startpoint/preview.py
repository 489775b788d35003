"""Places to start as people type and read them, and what one would resolve to: one row per reader that it is for.

earliest  latest  bootstrap      the ends of the log
1234                             an offset
2013-07-04T14:00                 the first record at or after it (UTC if it names no zone); @MS: ms since 1970
-90s -30m -1h -2d                so long before now
-1000 +1                         so many records from where the consumer stands
"""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from pushrep.cli.common import DURATION, parse_duration_s, say_time
from pushrep.cli.input_lines import parse_time_ms
from pushrep.log import NotALogDirectory, SegmentLog
from pushrep.log.slots import log_at, readable_logs
from pushrep.startpoints import Kind, Reader, Resolved, Startpoint, StartpointStore, Target, facts_of, resolve


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


_ENDS = {"earliest": Startpoint.earliest, "latest": Startpoint.latest, "bootstrap": Startpoint.bootstrap}


def parse_place(text: str, *, out_of_range: str = "error", reset_marks: bool = False) -> Startpoint:
    """The startpoint that `text` means. Raises ValueError that says what is wanted (BadArgument is one)."""
    words = text.strip()
    if words.lower() in _ENDS:
        return _ENDS[words.lower()](reset_marks=reset_marks)
    if re.fullmatch(r"[0-9]+", words):
        return Startpoint.specific(int(words), out_of_range=out_of_range, reset_marks=reset_marks)
    if re.fullmatch(r"[+-][0-9]+", words):
        return Startpoint.relative(records=int(words), out_of_range=out_of_range, reset_marks=reset_marks)
    if words.startswith("-") and DURATION.fullmatch(words[1:]):
        ms = -1000 * parse_duration_s(words[1:])
        return Startpoint.relative(ms=ms, out_of_range=out_of_range, reset_marks=reset_marks)
    try:
        ms = parse_time_ms(words.removeprefix("@"))
    except ValueError:
        raise ValueError(
            f"{text!r} is no place: give earliest, latest, bootstrap, an offset, an ISO 8601 time, "
            "-1h (so long before now) or -1000 (so many records back)"
        ) from None
    return Startpoint.timestamp(ms, out_of_range=out_of_range, reset_marks=reset_marks)


def say_place(startpoint: Startpoint) -> str:
    """A startpoint as people read it."""
    value, until = startpoint.value, startpoint.replace_until
    match startpoint.kind:
        case Kind.SPECIFIC_OFFSET:
            return f"offset {value}" if until is None else f"offset {value}, rows below {until} are replaced"
        case Kind.TIMESTAMP:
            return say_time(value or 0)
        case Kind.RELATIVE_RECORDS:
            return f"{value:+} records"
        case Kind.RELATIVE_MS:
            return f"{(value or 0) / 1000:g} s"
        case _:
            return str(startpoint.kind).lower()
