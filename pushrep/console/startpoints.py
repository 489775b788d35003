"""Startpoints of one outbox's topic as a page shows them: pending ones, the history, and what a new one would do."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pushrep.cli.common import parse_duration_s
from pushrep.cli.startpoint import check_fits, is_open, line_of, states_of
from pushrep.cli.startpoint_options import Row, parse_place, place_text, preview
from pushrep.env import SYSTEM_CLOCK
from pushrep.errors import BadArgument
from pushrep.startpoints import Startpoint, StartpointStore, Target
from pushrep.startpoints.model import Written

_HISTORY_LINES = 200


class AskedStartpoint(NamedTuple):
    """A form's fields, as they were typed. partition, consumer: empty for every one."""

    consumer: str = ""
    partition: str = ""
    place: str = ""
    out_of_range: str = "error"
    ttl: str = "12h"
    reset_marks: str = ""
    reason: str = ""

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> "AskedStartpoint":
        """Of a query or a posted form."""
        return cls(**{name: str(fields.get(name, default)).strip() for name, default in cls._field_defaults.items()})

    def target(self, topic: str) -> Target:
        """Whom it is for. Raises BadArgument."""
        if self.partition and not self.partition.isdecimal():
            raise BadArgument("partition", f"{self.partition!r} is no number; leave it empty for every partition")
        return Target(self.consumer or None, topic, int(self.partition) if self.partition else None)

    def startpoint(self) -> Startpoint:
        """Where. Raises ValueError, which BadArgument is."""
        return parse_place(self.place, out_of_range=self.out_of_range, reset_marks=bool(self.reset_marks))

    def ttl_s(self) -> int | None:
        """How long it may wait. Raises ValueError."""
        return None if self.ttl == "never" else parse_duration_s(self.ttl)


class DryRun(NamedTuple):
    """What a startpoint would do: a row for each reader, and one sentence."""

    rows: Sequence[Row]
    sentence: str


class StartpointLine(NamedTuple):
    """One that was written."""

    written: Written
    place: str
    state: str
    is_open: bool


def dry_run(directory: Path, store: StartpointStore, topic: str, asked: AskedStartpoint) -> DryRun:
    """Nothing is written. Raises ValueError and PushrepError for invalid fields."""
    target, startpoint = asked.target(topic), asked.startpoint()
    asked.ttl_s()
    rows = preview(directory, store, target, startpoint, now_ms=SYSTEM_CLOCK.wall_ms())
    check_fits(directory, target, rows, dry_run=True)
    again, passed = sum(row.read_again for row in rows), sum(row.passed_by for row in rows)
    dropped = 0 if asked.reset_marks else again
    failing, unknown = sum(row.offset is None for row in rows), sum(row.checkpoint is None for row in rows)
    parts = [f"would read {again:,} again, {dropped:,} of them dropped as replays where a replay filter follows"]
    parts += [f"would pass {passed:,} by, which are never read"] if passed else []
    parts += [f"would stop {failing} that it does not fit"] if failing else []
    parts += [f"no checkpoint is kept of {unknown} of {len(rows)} partitions"] if unknown else []
    return DryRun(rows, f"{target}: {'; '.join(parts)}.")


def write(directory: Path, store: StartpointStore, topic: str, asked: AskedStartpoint, author: str | None) -> int:
    """Write it; its number. Raises ValueError and PushrepError, and writes nothing then."""
    target, startpoint, ttl_s = asked.target(topic), asked.startpoint(), asked.ttl_s()
    check_fits(directory, target, preview(directory, store, target, startpoint, now_ms=SYSTEM_CLOCK.wall_ms()))
    return store.write(target.consumer, topic, target.partition, startpoint, asked.reason, author=author, ttl_s=ttl_s)


def lines_of(store: StartpointStore, topic: str) -> list[StartpointLine]:
    """Those of the topic, the newest first."""
    log = store.event_log()
    return [
        StartpointLine(one, place_text(one.startpoint), states_of(log, one.sequence), is_open(log, one.sequence))
        for one in reversed(list(log.all_written()))
        if one.target.topic == topic
    ][:_HISTORY_LINES]


def history_of(store: StartpointStore, topic: str) -> list[str]:
    """What happened to those of the topic, the newest first."""
    facts = store.history()
    ours = {fact.sequence for fact in facts if isinstance(fact, Written) and fact.target.topic == topic}
    return [line_of(fact) for fact in reversed(facts) if fact.sequence in ours][:_HISTORY_LINES]
