"""The report of a run: one page that needs nothing else, and its picture as a file of its own.

verdict and numbers
pictures        picture.py: records by day of departure, and the run by the second, with a line for each kill
kills           in the order of time, as they are numbered in the pictures
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from string import Template
from typing import Final, NamedTuple

from examples.demo.history import PRODUCER, STREAM, Findings, History, Kill
from examples.demo.picture import FONT, STYLE, Day, Line, Mark, Run, picture, pictures
from examples.demo.summary import Summary


class Page(NamedTuple):
    """What stands around the pictures. cards: (name, count, color); kills and rows: cells of their tables' rows."""

    title: str
    verdict: str
    right: bool
    cards: Sequence[tuple[str, int, str]]
    kills: Iterable[Sequence[str]]
    rows: Iterable[Sequence[str]]
    footer: str
    seed: int


class Report(NamedTuple):
    """The page as HTML, and its wide picture as a file of its own."""

    page: str
    picture: str


def render_report(page: Page, run: Run) -> Report:
    """Both, as text."""
    return Report(render_page(page, pictures(run)), picture(run))


def render_page(page: Page, drawn: str) -> str:
    """The page as HTML; drawn: its pictures."""
    return _PAGE.substitute(
        font=FONT,
        style=STYLE,
        color="kept" if page.right else "kill",
        title=escape(page.title),
        verdict=escape(page.verdict),
        cards="".join(
            f'<div><b style="color: var(--{color})">{count:,}</b><span>{name}</span></div>'
            for name, count, color in page.cards
        ),
        figure=drawn,
        kills="".join(_row((f"{number}", *cells)) for number, cells in enumerate(page.kills, 1)),
        rows="".join(map(_row, page.rows)),
        footer=escape(page.footer),
        seed=page.seed,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _row(cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<td>{escape(cell).replace('   ', '&emsp;')}</td>" for cell in cells) + "</tr>"


_PAGE: Final = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
$style
body { font: 15px/1.5 $font; color: var(--ink); background: var(--grid); margin: 0 }
main { max-width: 1040px; margin: 0 auto; padding: 32px 24px 48px }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 8px } h2 { font-size: 17px; margin: 32px 0 8px }
p { margin: 0 0 20px } .verdict { border-left: 5px solid var(--$color); padding-left: 12px; font-size: 18px }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(104px, 1fr)); gap: 12px; margin-bottom: 20px }
.cards div, .panel { background: var(--ground); border-radius: 8px; padding: 10px 14px }
.cards b { display: block; font-size: 22px; font-variant-numeric: tabular-nums } .cards span { color: var(--muted) }
.panel svg { display: block; width: 100%; height: auto } .narrow { display: none !important }
.scroll { overflow-x: auto; border-radius: 8px; background: var(--ground) }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: 6px 12px; border-bottom: 1px solid var(--grid); font-variant-numeric: tabular-nums }
.numbers td:not(:first-child), .numbers th:not(:first-child) { text-align: right }
footer { background: var(--ground); color: var(--muted); border-radius: 8px; padding: 10px 14px; margin-top: 24px;
  font-size: 13px }
@media (max-width: 640px) {
  main { padding: 16px 10px 32px } h1 { font-size: 21px } th, td { padding: 6px 8px; font-size: 13px }
  .panel { padding: 6px 0 } .wide { display: none !important } .panel .narrow { display: block !important }
}
</style></head><body><main>
<h1>$title</h1>
<p class="verdict">$verdict</p>
<div class="cards">$cards</div>
<div class="panel">$figure</div>
<h2>Kills, by <code>kill -9</code></h2>
<div class="scroll" tabindex="0" role="region" aria-label="Kills"><table>
<tr><th>no.</th><th>at</th><th>program</th><th>processes</th><th>what came of it</th></tr>$kills</table></div>
<h2>Numbers</h2>
<div class="scroll" tabindex="0" role="region" aria-label="Numbers"><table class="numbers">
<tr><th>what</th><th>records</th><th>seconds</th><th>records/s</th></tr>$rows</table></div>
<footer>$footer
The file has the months in the order 1, 10, 11, 12, 2 to 9, and so has the log. Days in UTC. Seed $seed. Made $made.
</footer>
</main></body></html>
""")


FOOTER = (
    "Replayed: flights that entered the log twice, because the producer resumed from a saved position behind its end."
)


def moments(history: History) -> dict[str, list[list[int]]]:
    """The positions whose event times the check is to find, in the order in which `_marks` expects the answers."""
    return {
        "source_offset": [kill.in_log for kill in history.kills_of(PRODUCER)],
        "offset": [kill.in_log for kill in history.kills_of(STREAM)],
    }


def _lines(history: History) -> list[Line]:
    samples = history.samples
    return [
        Line("in the log", [s.appended for s in samples], "ink"),
        Line("flights in the log", [s.flights for s in samples], "ink", dashed=True),
        Line("read and committed by the stream", [s.applied for s in samples], "kept", stepped=True),
    ]


def _marks(history: History, moments_ms: list[int | None]) -> list[Mark]:
    """`moments_ms` is laid out as `moments` asks for it."""
    asked = [*history.kills_of(PRODUCER), *history.kills_of(STREAM)]
    marks = [
        Mark("producer", "kill", kill.at_s, moment)
        if kill.program == PRODUCER
        else Mark("Spark's JVM", "jvm", kill.at_s, moment)
        for kill, moment in zip(asked, moments_ms, strict=True)
    ]
    return sorted(marks, key=lambda mark: mark.at_s)


def outcome(kill: Kill) -> str:
    """What came of it."""
    if kill.program == PRODUCER:
        return f"resumed {kill.again:,} records behind the end of the log: they entered twice"
    return f"inside batch {kill.batch}, with {sum(kill.in_log):,} records committed; the batch ran again"


def kill_row(kill: Kill, came: str) -> tuple[str, str, str, str]:
    """Cells of the table of kills."""
    return f"{kill.at_s:.1f}\N{NO-BREAK SPACE}s", kill.program, kill.victims(), came


def render(history: History, found: Findings, summary: Summary) -> Report:
    """The page and its picture."""
    seconds = [sample.at_s for sample in history.samples]
    run = Run([Day(*day) for day in found.days], seconds, _lines(history), _marks(history, found.moments_ms))
    page = Page(
        title="Flights of 2013, through a crash and a replay",
        verdict=summary.verdict(),
        right=summary.right,
        cards=(
            ("flights", summary.flights, "ink"),
            ("appended", summary.appended, "ink"),
            ("replayed", summary.replayed, "again"),
            ("dropped", summary.dropped, "again"),
            ("kept", summary.kept, "kept"),
            ("missing", summary.missing, "kill" if summary.missing else "kept"),
            ("twice", summary.twice, "kill" if summary.twice else "kept"),
        ),
        kills=[kill_row(kill, outcome(kill)) for kill in sorted(history.kills, key=lambda kill: kill.at_s)],
        rows=summary.rows(),
        footer=FOOTER,
        seed=summary.seed,
    )
    return render_report(page, run)
