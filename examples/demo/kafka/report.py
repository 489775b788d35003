"""The report of a run through Kafka: its picture, its numbers and its kills on one page."""

from typing import Any, Final, NamedTuple

from examples.demo.history import APPLY, BROKER, PRODUCER, RELAY, History, Kill
from examples.demo.kafka.summary import KafkaFindings, KafkaSummary
from examples.demo.report import (
    BROKER_KILL,
    FOOTER,
    INK,
    KEPT,
    KILL,
    RELAYED,
    REPLAYED,
    STREAM_KILL,
    Mark,
    Page,
    PictureLine,
    draw,
    kill_row,
    render_page,
)
from examples.demo.report import outcome as outcome_of_program

_LOOKS: Final = {
    PRODUCER: ("producer", KILL, False),
    BROKER: ("broker", BROKER_KILL, True),
    RELAY: ("relay JVM", STREAM_KILL, True),
    APPLY: ("apply JVM", STREAM_KILL, True),
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


def render_run(history: History, samples: list[KafkaSample], found: KafkaFindings, summary: KafkaSummary) -> str:
    """The page as HTML."""
    columns: dict[str, Any] = {name: [getattr(s, name) for s in samples] for name in KafkaSample._fields}
    lines = [
        PictureLine("in the log", columns["logged"], INK),
        PictureLine("in the first topic", columns["first"], REPLAYED),
        PictureLine("read by the relay", columns["relayed"], RELAYED, stepped=True),
        PictureLine("in the second topic", columns["second"], RELAYED, "dot"),
        PictureLine("read by the apply job", columns["applied"], KEPT, stepped=True),
    ]
    marks = []
    for number, (kill, moment) in enumerate(zip(history.kills, found.moments_ms, strict=True), 1):
        label, color, lifted = _LOOKS[kill.program]
        marks.append(Mark(f"{number} {label}", color, kill.at_s, moment, lifted))
    page = Page(
        title="Flights of 2013, through Kafka, Spark and PostgreSQL, and through crashes of each",
        verdict=summary.verdict(),
        right=summary.right,
        cards=(
            ("flights", summary.flights, INK),
            ("copies in the first topic", summary.first_copies, REPLAYED),
            ("copies in the second topic", summary.second_copies, REPLAYED),
            ("dropped", summary.relay_dropped + summary.apply_dropped, REPLAYED),
            ("kept", summary.kept, KEPT),
            ("missing", summary.missing, KILL if summary.missing else KEPT),
            ("twice", summary.twice, KILL if summary.twice else KEPT),
            ("out of order", summary.misplaced, KILL if summary.misplaced else KEPT),
        ),
        kills=[kill_row(kill, outcome(kill)) for kill in history.kills],
        rows=summary.rows(),
        footer=FOOTER,
        seed=summary.seed,
    )
    return render_page(page, draw(found.days, columns["at_s"], lines, marks))
