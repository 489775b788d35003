"""The picture of a run, as SVG without a script: two charts over each other, light or dark as the reader's system is.

    records by day of departure     kept, and on top of them the replayed; the line over both is what was appended
    records by second of the run    how far each program was
    a dashed line for each kill, in both; kills are numbered in the order of time

A chart is drawn once for a wide screen and once for a narrow one: text that a phone scales down is not read.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from html import escape
from typing import Final, NamedTuple

FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
COLORS: Final = """\
:root { --ground: #ffffff; --ink: #1f2d3d; --muted: #52606e; --grid: #e3e8ed; --kept: #14776c; --again: #b45309;
  --kill: #b91c1c; --jvm: #6a4c93; --broker: #7a4a12; --relay: #2b6a99 }
@media (prefers-color-scheme: dark) { :root { --ground: #141c24; --ink: #e6edf3; --muted: #a3b1bf; --grid: #2b3743;
  --kept: #4fd1c0; --again: #f6ad55; --kill: #ff8a80; --jvm: #c4a7ff; --broker: #e0b070; --relay: #7cc0f0 } }
"""
"""Each has a contrast of at least 4.5 with the ground, in both schemes."""
STYLE: Final = f"""\
{COLORS}.picture text {{ font: 13px {FONT}; fill: var(--ink); font-variant-numeric: tabular-nums }}
.picture .title {{ font-size: 16px; font-weight: 600 }} .picture .axis {{ fill: var(--muted); font-size: 12px }}
.picture .grid {{ stroke: var(--grid) }} .picture .frame {{ stroke: var(--muted) }}
.picture path {{ fill: none; stroke-width: 2 }} .picture .dashed {{ stroke-dasharray: 2 4 }}
.picture .kill {{ paint-order: stroke; stroke: var(--ground); stroke-width: 4 }}
.picture .mark {{ stroke-dasharray: 5 4; stroke-width: 1.5 }} .picture .day {{ fill: transparent }}
"""
WIDE, NARROW = 960, 360
_CHART_HEIGHT: Final = 210
_CHAR: Final = 6.9
"""Pixels of a character of 13 px, with some room: what a legend's items are laid out by."""


class Line(NamedTuple):
    """How far one program was: records at each of the run's seconds. color: a name in COLORS."""

    name: str
    records: Sequence[int]
    color: str
    dashed: bool = False
    stepped: bool = False
    """It moves by batches."""


class Mark(NamedTuple):
    """A kill: its second, and the event time (ms since 1970 UTC) that was reached; None: not known."""

    label: str
    color: str
    at_s: float
    moment_ms: int | None


class Day(NamedTuple):
    """Records by day of departure (YYYY-MM-DD); appended = replayed + kept."""

    day: str
    appended: int
    replayed: int
    kept: int


class Run(NamedTuple):
    """What is drawn; the lines' records are of the `seconds`, the marks in the order of time."""

    days: Sequence[Day]
    seconds: Sequence[float]
    lines: Sequence[Line]
    marks: Sequence[Mark]


def picture(run: Run) -> str:
    """A file of its own, for a wide screen."""
    body, height = _drawn(run, WIDE, hover=False)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" viewBox="0 0 {WIDE} {height}" role="img" '
        f'aria-label="{_spoken(run)}"><style>{STYLE}</style>'
        f'<rect width="{WIDE}" height="{height}" rx="8" fill="var(--ground)"/>{body}</svg>\n'
    )


def pictures(run: Run) -> str:
    """For a page that has STYLE and shows `.wide` or `.narrow`."""
    drawn = []
    for width, name in ((WIDE, "wide"), (NARROW, "narrow")):
        body, height = _drawn(run, width, hover=True)
        drawn.append(
            f'<svg class="picture {name}" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{_spoken(run)}">{body}</svg>'
        )
    return "".join(drawn)


def _spoken(run: Run) -> str:
    kept, replayed = (sum(getattr(day, name) for day in run.days) for name in ("kept", "replayed"))
    return escape(f"{kept:,} records kept, {replayed:,} replayed ones dropped, {len(run.marks)} kills")


Placed = tuple[float, int, Mark]
"""Where a kill stands on a chart's own scale, its number in the order of time, and the kill."""


class _Chart(NamedTuple):
    """A chart's place on the sheet and its scales: x from 0 to `x_max`, y from 0 to `y_max`."""

    left: float
    right: float
    top: float
    bottom: float
    x_max: float
    y_max: float

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * value / (self.x_max or 1)

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * value / (self.y_max or 1)

    def path(self, values: Iterable[tuple[float, float]], *, stepped: bool = False) -> str:
        points: list[str] = []
        before: float | None = None
        for value_x, value_y in values:
            x, y = self.x(value_x), self.y(value_y)
            if stepped and before is not None and y != before:
                points.append(f"{x:.1f},{before:.1f}")
            points.append(f"{x:.1f},{y:.1f}")
            before = y
        return "M" + " ".join(points)


def _drawn(run: Run, width: int, *, hover: bool) -> tuple[str, int]:
    """The two charts and how high they are together."""
    parts: list[str] = []
    top = 8.0
    first = date.fromisoformat(run.days[0].day)
    at = [(date.fromisoformat(day.day) - first).days for day in run.days]

    items = [("kept", "kept", False), ("replayed, dropped", "again", False), ("appended", "ink", False)]
    top = _heading(parts, "Records by day of departure", items, width, top)
    marks = [
        (mark.moment_ms / 86_400_000 - (first - date(1970, 1, 1)).days, number, mark)
        for number, mark in enumerate(run.marks, 1)
        if mark.moment_ms is not None
    ]
    chart = _chart(width, top, at[-1], max(day.appended for day in run.days), _rows(marks, width, at[-1]))
    parts += _grid(chart)
    parts += _months(chart, first, at[-1], every=1 if width == WIDE else 3)
    parts.append(_area(chart, at, [0] * len(at), [day.kept for day in run.days], "kept"))
    parts.append(_area(chart, at, [day.kept for day in run.days], [day.appended for day in run.days], "again"))
    appended = chart.path(zip(at, (day.appended for day in run.days), strict=True))
    parts.append(f'<path d="{appended}" style="stroke: var(--ink); stroke-width: 1"/>')
    if hover:
        parts += _days(chart, at, run.days)
    parts += _marked(chart, marks, width)

    end_s = max(run.seconds, default=1.0)
    items = [(line.name, line.color, line.dashed) for line in run.lines]
    top = _heading(parts, "The run itself: records by second", items, width, chart.bottom + 44)
    marks = [(mark.at_s, number, mark) for number, mark in enumerate(run.marks, 1)]
    most = max((max(line.records, default=0) for line in run.lines), default=0)
    chart = _chart(width, top, end_s, most, _rows(marks, width, end_s))
    parts += _grid(chart)
    parts += _seconds(chart, end_s)
    for line in run.lines:
        way = chart.path(zip(run.seconds, line.records, strict=True), stepped=line.stepped)
        dashed = ' class="dashed"' if line.dashed else ""
        parts.append(f'<path{dashed} d="{way}" style="stroke: var(--{line.color})"/>')
    parts += _marked(chart, marks, width)
    return "".join(parts), round(chart.bottom + 32)


def _heading(parts: list[str], title: str, items: Sequence[tuple[str, str, bool]], width: int, top: float) -> float:
    """Title, and below it the legend in as many rows as it needs; where the chart may begin."""
    parts.append(f'<text class="title" x="12" y="{top + 16:.0f}">{escape(title)}</text>')
    x, y = 12.0, top + 40
    for name, color, dashed in items:
        needs = 26 + _CHAR * len(name) + 14
        if x > 12 and x + needs > width - 8:
            x, y = 12.0, y + 20
        style = f"stroke: var(--{color}); stroke-width: 4" + ("; stroke-dasharray: 2 4" if dashed else "")
        parts.append(f'<line x1="{x:.0f}" x2="{x + 18:.0f}" y1="{y - 4:.0f}" y2="{y - 4:.0f}" style="{style}"/>')
        parts.append(f'<text x="{x + 24:.0f}" y="{y:.0f}">{escape(name)}</text>')
        x += needs
    return y + 10


def _chart(width: int, top: float, x_max: float, most: float, rows_of_marks: int) -> _Chart:
    top += 18 * rows_of_marks + 4
    return _Chart(62, width - 16, top, top + _CHART_HEIGHT, x_max, (most or 1) * 1.04)


def _text_of(number: int, mark: Mark, width: int) -> str:
    """Beside a mark: its number, and on a wide sheet whom it killed."""
    return f"{number} {mark.label}" if width == WIDE else str(number)


def _placed(marks: Sequence[Placed], width: int, x_max: float) -> list[tuple[float, int]]:
    """For each mark its x and the row of its label, so that labels stand beside or over each other, never on one."""
    scale, ends, found = (width - 78) / (x_max or 1), [0.0] * 8, []
    for at, number, mark in marks:
        half = _CHAR * len(_text_of(number, mark, width)) / 2 + 3
        x = min(max(62 + at * scale, 12 + half), width - 12 - half)
        row = next((row for row, end in enumerate(ends) if end <= x - half), len(ends) - 1)
        ends[row] = x + half
        found.append((x, row))
    return found


def _rows(marks: Sequence[Placed], width: int, x_max: float) -> int:
    return 1 + max((row for _, row in _placed(marks, width, x_max)), default=0)


def _marked(chart: _Chart, marks: Sequence[Placed], width: int) -> Iterator[str]:
    placed = _placed(marks, width, chart.x_max)
    for (at, _, mark), (_, row) in zip(marks, placed, strict=True):
        foot, line = chart.top - 6 - 18 * row, chart.x(at)
        style = f"stroke: var(--{mark.color})"
        yield f'<line class="mark" x1="{line:.1f}" x2="{line:.1f}" y1="{foot + 3:.0f}" y2="{chart.bottom:.0f}" '
        yield f'style="{style}"><title>{escape(f"kill -9: {mark.label}, at {mark.at_s:.1f} s")}</title></line>'
    for (_, number, mark), (x, row) in zip(marks, placed, strict=True):
        place = f'x="{x:.1f}" y="{chart.top - 6 - 18 * row:.0f}" text-anchor="middle"'
        yield f'<text class="kill" {place} style="fill: var(--{mark.color})">'
        yield f"{escape(_text_of(number, mark, width))}</text>"


def _grid(chart: _Chart) -> Iterator[str]:
    step = _step(chart.y_max / 5)
    value = 0
    while value <= chart.y_max:
        y = chart.y(value)
        kind = "grid" if value else "frame"
        yield f'<line class="{kind}" x1="{chart.left}" x2="{chart.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="axis" x="{chart.left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:,}</text>'
        value += step


def _step(about: float) -> int:
    """A round number of at least `about`: 1, 2 or 5 with zeros."""
    size = 1
    while True:
        for factor in (1, 2, 5):
            if factor * size >= about:
                return factor * size
        size *= 10


def _months(chart: _Chart, first: date, days: int, *, every: int) -> Iterator[str]:
    for month in range(1, 13, every):
        begin = (date(first.year, month, 1) - first).days
        if 0 <= begin <= days:
            x = chart.x(begin)
            yield f'<line class="frame" x1="{x:.1f}" x2="{x:.1f}" y1="{chart.bottom}" y2="{chart.bottom + 5}"/>'
            yield f'<text class="axis" x="{x + 3:.1f}" y="{chart.bottom + 18}">{date(first.year, month, 1):%b}</text>'


def _seconds(chart: _Chart, end_s: float) -> Iterator[str]:
    step = _step(end_s / (8 if chart.right > NARROW else 4))
    for second in range(0, int(end_s) + 1, step):
        x = chart.x(second)
        yield f'<line class="frame" x1="{x:.1f}" x2="{x:.1f}" y1="{chart.bottom}" y2="{chart.bottom + 5}"/>'
        anchor = "start" if second == 0 else "middle"
        yield f'<text class="axis" x="{x:.1f}" y="{chart.bottom + 18}" text-anchor="{anchor}">{second} s</text>'


def _area(chart: _Chart, at: Sequence[int], low: Sequence[int], high: Sequence[int], color: str) -> str:
    over = chart.path(zip(at, high, strict=True))
    under = chart.path(zip(reversed(at), reversed(low), strict=True))
    return f'<path d="{over} L{under[1:]} Z" style="fill: var(--{color}); stroke: none"/>'


def _days(chart: _Chart, at: Sequence[int], days: Sequence[Day]) -> Iterator[str]:
    """What a pointer over a day is told."""
    width = chart.x(1) - chart.x(0)
    for begin, day in zip(at, days, strict=True):
        said = f"{date.fromisoformat(day.day):%a %d %b}: {day.kept:,} kept, {day.replayed:,} replayed"
        yield f'<rect class="day" x="{chart.x(begin) - width / 2:.1f}" y="{chart.top:.0f}" width="{width:.1f}" '
        yield f'height="{chart.bottom - chart.top:.0f}"><title>{said}</title></rect>'
