"""The picture: one page that needs nothing else, drawn by plotly with its script inside.

verdict and numbers
upper   records by day of departure: kept, and on top of them the replayed; their sum is what was appended
lower   the same run by the second: how far the log was, and how far behind the stream
kills   a line each in both pictures, with the flights that came again shaded, and a table
"""

from datetime import UTC, datetime
from html import escape
from string import Template
from typing import Any, Final

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from spark_jobs.demo.findings import Findings
from spark_jobs.demo.history import PRODUCER, STREAM, History, Kill
from spark_jobs.demo.summary import Summary

INK, KEPT, REPLAYED, KILL, STREAM_KILL = "#1f2d3d", "#2a9d8f", "#f4a261", "#c1121f", "#6a4c93"
_FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
# Beside its picture's title, above the names of the kills.
_LEGEND: Final = {"orientation": "h", "x": 1, "xanchor": "right", "yanchor": "bottom", "traceorder": "normal"}


def draw(history: History, found: Findings) -> "go.Figure":
    """Both pictures as one figure."""
    figure = make_subplots(
        rows=2,
        cols=1,
        row_heights=[0.58, 0.42],
        vertical_spacing=0.19,
        subplot_titles=("Records by day of departure", "The run itself: records by second since the start"),
    )
    _draw_days(figure, found)
    _draw_run(figure, history)
    _mark_kills(figure, history, found.moments_ms)
    figure.update_layout(
        height=880,
        margin={"l": 70, "r": 24, "t": 84, "b": 48},
        template="plotly_white",
        font={"family": _FONT, "size": 13, "color": INK},
        hovermode="x unified",
        legend={**_LEGEND, "y": figure.layout.yaxis.domain[1] + 0.045},
        legend2={**_LEGEND, "y": figure.layout.yaxis2.domain[1] + 0.045},
    )
    for title in figure.layout.annotations[:2]:
        title.update(x=0, xanchor="left", font={"size": 16, "color": INK}, yshift=36)
    figure.update_yaxes(rangemode="tozero", tickformat=",d", gridcolor="#e8ecf0", zeroline=False)
    figure.update_xaxes(showgrid=False, linecolor="#c5ced6", ticks="outside", tickcolor="#c5ced6")
    figure.update_yaxes(title_text="records a day", row=1, col=1)
    figure.update_yaxes(title_text="records", row=2, col=1)
    figure.update_xaxes(tickformat="%b", dtick="M1", ticklabelmode="period", hoverformat="%a %d %b %Y", row=1, col=1)
    end_s = max((sample.at_s for sample in history.samples), default=1.0)
    figure.update_xaxes(ticksuffix=" s", hoverformat=".1f", range=[0, end_s], row=2, col=1)
    return figure


def _draw_days(figure: "go.Figure", found: Findings) -> None:
    days = [row[0] for row in found.days]
    appended, replayed, kept = (list(column) for column in zip(*(row[1:] for row in found.days), strict=True))
    area: dict[str, Any] = {"x": days, "mode": "lines", "stackgroup": "log", "hovertemplate": "%{y:,}"}
    figure.add_trace(
        go.Scatter(**area, y=kept, name="kept", line={"width": 0, "color": KEPT}, fillcolor=KEPT), row=1, col=1
    )
    figure.add_trace(
        go.Scatter(**area, y=replayed, name="replayed", line={"width": 0, "color": REPLAYED}, fillcolor=REPLAYED),
        row=1,
        col=1,
    )
    line = {"width": 1.2, "color": INK}
    figure.add_trace(
        go.Scatter(x=days, y=appended, name="appended", mode="lines", line=line, hovertemplate="%{y:,}"), row=1, col=1
    )


def _draw_run(figure: "go.Figure", history: History) -> None:
    seconds = [sample.at_s for sample in history.samples]
    lines = (
        ("in the log", [s.appended for s in history.samples], INK, "solid"),
        ("flights in the log", [s.flights for s in history.samples], INK, "dot"),
        ("read and committed by the stream", [s.applied for s in history.samples], KEPT, "solid"),
    )
    for name, values, color, dash in lines:
        line = {"color": color, "dash": dash, "width": 2, "shape": "hv" if color == KEPT else "linear"}
        figure.add_trace(
            go.Scatter(
                x=seconds, y=values, name=name, mode="lines", line=line, hovertemplate="%{y:,}", legend="legend2"
            ),
            row=2,
            col=1,
        )


def _mark_kills(figure: "go.Figure", history: History, moments_ms: list[int | None]) -> None:
    """A line at each kill's event time and second; `moments_ms` is laid out as `moments` asks for it."""
    producers, streams = history.kills_of(PRODUCER), history.kills_of(STREAM)
    for number, (kill, moment) in enumerate(zip([*producers, *streams], moments_ms, strict=True), 1):
        color, label = (KILL, f"kill {number}") if kill.program == PRODUCER else (STREAM_KILL, "JVM kill")
        _line(figure, 1, moment, color, label)
        _line(figure, 2, kill.at_s, color, label)


def _line(figure: "go.Figure", row: int, at: float | None, color: str, label: str) -> None:
    """A dashed line over the height of one picture, its name on top."""
    if at is None:
        return
    figure.add_vline(x=at, line={"color": color, "width": 1.5, "dash": "dash"}, row=row, col=1)
    figure.add_annotation(
        x=at, xref=f"x{row if row > 1 else ''}", y=1, yref=f"y{row if row > 1 else ''} domain", text=label,
        showarrow=False, yanchor="bottom", yshift=14 * (color == STREAM_KILL), font={"color": color, "size": 12},
    )  # fmt: skip


def moments(history: History) -> dict[str, list[list[int]]]:
    """The positions whose event times the check is to find, in the order in which `draw` expects the answers."""
    return {
        "source_offset": [kill.in_log for kill in history.kills_of(PRODUCER)],
        "offset": [kill.in_log for kill in history.kills_of(STREAM)],
    }


def _kill_row(kill: Kill) -> str:
    if kill.program == PRODUCER:
        came = f"resumed {kill.again:,} records behind the end of the log: they entered twice"
    else:
        came = f"inside batch {kill.batch}, with {sum(kill.in_log):,} records committed; the batch ran again"
    cells = (f"{kill.at_s:.1f}&nbsp;s", kill.program, escape(kill.victims()), came)
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def render(history: History, found: Findings, summary: Summary) -> str:
    """The page as HTML."""
    config: dict[str, Any] = {"displayModeBar": False, "responsive": True}
    cards = (
        ("flights", summary.flights, INK),
        ("appended", summary.appended, INK),
        ("replayed", summary.replayed, REPLAYED),
        ("dropped", summary.dropped, REPLAYED),
        ("kept", summary.kept, KEPT),
        ("missing", summary.missing, KILL if summary.missing else KEPT),
        ("twice", summary.twice, KILL if summary.twice else KEPT),
    )
    return _PAGE.substitute(
        font=_FONT,
        ink=INK,
        color=KEPT if summary.right else KILL,
        verdict=escape(summary.verdict()),
        cards="".join(
            f'<div><b style="color:{color}">{count:,}</b><span>{name}</span></div>' for name, count, color in cards
        ),
        figure=draw(history, found).to_html(full_html=False, include_plotlyjs=True, config=config),
        kills="".join(_kill_row(kill) for kill in history.kills),
        rows="".join(
            "<tr>" + "".join(f"<td>{escape(cell).replace('   ', '&emsp;')}</td>" for cell in row) + "</tr>"
            for row in summary.rows()
        ),
        seed=summary.seed,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


_PAGE: Final = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>pushrep demo</title>
<style>
body { font: 15px/1.5 $font; color: $ink; background: #f5f7f9; margin: 0 }
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 48px }
h1 { font-size: 26px; margin: 0 0 4px } h2 { font-size: 17px; margin: 32px 0 8px }
p { margin: 0 0 20px } .verdict { border-left: 5px solid $color; padding-left: 12px; font-size: 18px }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin-bottom: 20px }
.cards div { background: #fff; border-radius: 8px; padding: 10px 18px; flex: 1; min-width: 100px }
.cards b { display: block; font-size: 24px; font-variant-numeric: tabular-nums } .cards span { color: #5c6b7a }
.panel { background: #fff; border-radius: 8px; padding: 12px }
table { border-collapse: collapse; background: #fff; border-radius: 8px; width: 100% }
th, td { text-align: left; padding: 6px 14px; border-bottom: 1px solid #edf0f3; font-variant-numeric: tabular-nums }
.numbers td:not(:first-child), .numbers th:not(:first-child) { text-align: right }
footer { color: #5c6b7a; margin-top: 24px; font-size: 13px }
</style></head><body><main>
<h1>Flights of 2013, through a crash and a replay</h1>
<p class="verdict">$verdict</p>
<div class="cards">$cards</div>
<div class="panel">$figure</div>
<h2>Kills</h2>
<table><tr><th>when</th><th>program</th><th>processes</th><th>what came of it</th></tr>$kills</table>
<h2>Numbers</h2>
<table class="numbers"><tr><th></th><th>records</th><th>seconds</th><th>records/s</th></tr>$rows</table>
<footer>Orange: flights that entered the log twice, because the producer resumed from a saved position behind its end.
The file has the months in the order 1, 10, 11, 12, 2 to 9, and so has the log. Days in UTC. Seed $seed. Made $made.
</footer>
</main></body></html>
""")
