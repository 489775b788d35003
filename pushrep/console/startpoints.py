"""The startpoints of one outbox's topic for a page: the list, the history, and a dry run of a new one."""

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
    """The fields of the form, as typed. partition, consumer: empty for all."""

    consumer: str = ""
    partition: str = ""
    place: str = ""
    out_of_range: str = "error"
    ttl: str = "12h"
    reset_marks: str = ""
    reason: str = ""

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> "AskedStartpoint":
        """From the fields of a query or a posted form."""
        return cls(**{name: str(fields.get(name, default)).strip() for name, default in cls._field_defaults.items()})

    def target(self, topic: str) -> Target:
        """The consumers and partitions that it is for. Raises BadArgument."""
        if self.partition and not self.partition.isdecimal():
            raise BadArgument("partition", f"{self.partition!r} is not a number; leave it empty for every partition")
        return Target(self.consumer or None, topic, int(self.partition) if self.partition else None)

    def startpoint(self) -> Startpoint:
        """Where to start. Raises ValueError (BadArgument is one)."""
        return parse_place(self.place, out_of_range=self.out_of_range, reset_marks=bool(self.reset_marks))

    def ttl_s(self) -> int | None:
        """Seconds until it expires; None for never. Raises ValueError."""
        return None if self.ttl == "never" else parse_duration_s(self.ttl)


class DryRun(NamedTuple):
    """What a startpoint would do: a row for each reader, and a summary."""

    rows: Sequence[Row]
    sentence: str


class StartpointLine(NamedTuple):
    """A startpoint that was written."""

    written: Written
    place: str
    state: str
    is_open: bool


def dry_run(directory: Path, store: StartpointStore, topic: str, asked: AskedStartpoint) -> DryRun:
    """Resolve a startpoint without writing it. Raises ValueError and PushrepError for invalid fields."""
    target, startpoint = asked.target(topic), asked.startpoint()
    asked.ttl_s()
    rows = preview(directory, store, target, startpoint, now_ms=SYSTEM_CLOCK.wall_ms())
    check_fits(directory, target, rows, dry_run=True)
    again, passed = sum(row.read_again or 0 for row in rows), sum(row.passed_by or 0 for row in rows)
    dropped = 0 if asked.reset_marks else again
    failing, unknown = sum(row.offset is None for row in rows), sum(row.checkpoint is None for row in rows)
    parts = [f"would read {again:,} offsets again; a replay filter would drop {dropped:,} of them as replays"]
    parts += [f"would skip {passed:,} offsets"] if passed else []
    parts += [f"would fail in {failing} partitions, which it is out of range of"] if failing else []
    parts += [f"{unknown} of {len(rows)} partitions have no checkpoint"] if unknown else []
    return DryRun(rows, f"{target}: {'; '.join(parts)}.")


def write(directory: Path, store: StartpointStore, topic: str, asked: AskedStartpoint, author: str | None) -> int:
    """Write the startpoint and return its number. Raises ValueError and PushrepError before anything is written."""
    target, startpoint, ttl_s = asked.target(topic), asked.startpoint(), asked.ttl_s()
    check_fits(directory, target, preview(directory, store, target, startpoint, now_ms=SYSTEM_CLOCK.wall_ms()))
    return store.write(target.consumer, topic, target.partition, startpoint, asked.reason, author=author, ttl_s=ttl_s)


def lines_of(store: StartpointStore, topic: str) -> list[StartpointLine]:
    """The topic's startpoints, the newest first, 200 at most."""
    log = store.event_log()
    return [
        StartpointLine(one, place_text(one.startpoint), states_of(log, one.sequence), is_open(log, one.sequence))
        for one in reversed(list(log.all_written()))
        if one.target.topic == topic
    ][:_HISTORY_LINES]


def history_of(store: StartpointStore, topic: str) -> list[str]:
    """The events of the topic's startpoints, the newest first, 200 at most."""
    facts = store.history()
    ours = {fact.sequence for fact in facts if isinstance(fact, Written) and fact.target.topic == topic}
    return [line_of(fact) for fact in reversed(facts) if fact.sequence in ours][:_HISTORY_LINES]
