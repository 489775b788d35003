"""The report of a run: its picture, its numbers and its kills on one page."""

from spark_jobs.demo.findings import Findings
from spark_jobs.demo.history import PRODUCER, STREAM, History, Kill
from spark_jobs.demo.picture import INK, KEPT, KILL, REPLAYED, STREAM_KILL, Mark, Page, PictureLine, draw
from spark_jobs.demo.picture import render as render_page
from spark_jobs.demo.summary import Summary

FOOTER = (
    "Orange: flights that entered the log twice, because the producer resumed from a saved position behind its end."
)


def moments(history: History) -> dict[str, list[list[int]]]:
    """The positions whose event times the check is to find, in the order in which `_marks` expects the answers."""
    return {
        "source_offset": [kill.in_log for kill in history.kills_of(PRODUCER)],
        "offset": [kill.in_log for kill in history.kills_of(STREAM)],
    }


def _lines(history: History) -> list[PictureLine]:
    samples = history.samples
    return [
        PictureLine("in the log", [s.appended for s in samples], INK),
        PictureLine("flights in the log", [s.flights for s in samples], INK, "dot"),
        PictureLine("read and committed by the stream", [s.applied for s in samples], KEPT, stepped=True),
    ]


def _marks(history: History, moments_ms: list[int | None]) -> list[Mark]:
    """`moments_ms` is laid out as `moments` asks for it."""
    kills = [*history.kills_of(PRODUCER), *history.kills_of(STREAM)]
    return [
        Mark(f"kill {number}", KILL, kill.at_s, moment)
        if kill.program == PRODUCER
        else Mark("JVM kill", STREAM_KILL, kill.at_s, moment, lifted=True)
        for number, (kill, moment) in enumerate(zip(kills, moments_ms, strict=True), 1)
    ]


def outcome(kill: Kill) -> str:
    """What came of it."""
    if kill.program == PRODUCER:
        return f"resumed {kill.again:,} records behind the end of the log: they entered twice"
    return f"inside batch {kill.batch}, with {sum(kill.in_log):,} records committed; the batch ran again"


def kill_row(kill: Kill, came: str) -> tuple[str, str, str, str]:
    """Cells of the table of kills."""
    return f"{kill.at_s:.1f}\N{NO-BREAK SPACE}s", kill.program, kill.victims(), came


def render(history: History, found: Findings, summary: Summary) -> str:
    """The page as HTML."""
    seconds = [sample.at_s for sample in history.samples]
    figure = draw(found.days, seconds, _lines(history), _marks(history, found.moments_ms))
    page = Page(
        title="Flights of 2013, through a crash and a replay",
        verdict=summary.verdict(),
        right=summary.right,
        cards=(
            ("flights", summary.flights, INK),
            ("appended", summary.appended, INK),
            ("replayed", summary.replayed, REPLAYED),
            ("dropped", summary.dropped, REPLAYED),
            ("kept", summary.kept, KEPT),
            ("missing", summary.missing, KILL if summary.missing else KEPT),
            ("twice", summary.twice, KILL if summary.twice else KEPT),
        ),
        kills=[kill_row(kill, outcome(kill)) for kill in history.kills],
        rows=summary.rows(),
        footer=FOOTER,
        seed=summary.seed,
    )
    return render_page(page, figure)
