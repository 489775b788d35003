"""The report of a run through Kafka: its picture, its numbers and its kills on one page."""

from typing import Any, Final, NamedTuple

from examples.demo.history import APPLY, BROKER, PRODUCER, RELAY, History, Kill
from examples.demo.kafka.summary import KafkaFindings, KafkaSummary
from examples.demo.picture import Day, Line, Mark, Run
from examples.demo.report import FOOTER, Page, Report, kill_row, render_report
from examples.demo.report import outcome as outcome_of_program

_LOOKS: Final = {
    PRODUCER: ("producer", "kill"),
    BROKER: ("broker", "broker"),
    RELAY: ("relay's JVM", "jvm"),
    APPLY: ("apply's JVM", "jvm"),
}
# What the positions of a kill count; a broker's has none.
_COUNTED_IN: Final = {PRODUCER: "source", RELAY: "first", APPLY: "second", BROKER: None}


class KafkaSample(NamedTuple):
    """How far it was at a moment, in records: log, flights in it (each once), both topics, what each job has read."""

    at_s: float
    logged: int
    flights: int
    first: int
    relayed: int
    second: int
    applied: int


def moments(history: History) -> list[tuple[str | None, list[int]]]:
    """For each kill what its positions count, and the positions: whose event times the check is to find."""
    return [(_COUNTED_IN[kill.program], kill.in_log) for kill in history.kills]


def outcome(kill: Kill) -> str:
    """What came of it."""
    if kill.program == BROKER:
        return "started again on its data" + (f"; back after {kill.back_s:.1f} s" if kill.back_s is not None else "")
    return outcome_of_program(kill)


def render_run(history: History, samples: list[KafkaSample], found: KafkaFindings, summary: KafkaSummary) -> Report:
    """The page and its picture."""
    columns: dict[str, Any] = {name: [getattr(s, name) for s in samples] for name in KafkaSample._fields}
    lines = [
        Line("in the log", columns["logged"], "ink"),
        Line("in the first topic", columns["first"], "again"),
        Line("read by the relay", columns["relayed"], "relay", stepped=True),
        Line("in the second topic", columns["second"], "relay", dashed=True),
        Line("read by the apply job", columns["applied"], "kept", stepped=True),
    ]
    marks = [
        Mark(*_LOOKS[kill.program], kill.at_s, moment)
        for kill, moment in zip(history.kills, found.moments_ms, strict=True)
    ]
    page = Page(
        title="Flights of 2013, through Kafka, Spark and PostgreSQL, and through crashes of each",
        verdict=summary.verdict(),
        right=summary.right,
        cards=(
            ("flights", summary.flights, "ink"),
            ("copies in the first topic", summary.first_copies, "again"),
            ("copies in the second topic", summary.second_copies, "again"),
            ("dropped", summary.relay_dropped + summary.apply_dropped, "again"),
            ("kept", summary.kept, "kept"),
            ("missing", summary.missing, "kill" if summary.missing else "kept"),
            ("twice", summary.twice, "kill" if summary.twice else "kept"),
            ("out of order", summary.misplaced, "kill" if summary.misplaced else "kept"),
        ),
        kills=[kill_row(kill, outcome(kill)) for kill in sorted(history.kills, key=lambda kill: kill.at_s)],
        rows=summary.rows(),
        footer=FOOTER,
        seed=summary.seed,
    )
    days = [Day(*day) for day in found.days]
    return render_report(page, Run(days, columns["at_s"], lines, sorted(marks, key=lambda mark: mark.at_s)))
