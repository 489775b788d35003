"""Computes what the pages show from readings of `pushrep status --json`, bars and lines of SVG included. No clock, no
disk.

Templates show the values of a status themselves. This module adds severities, rates, the days until a disk is full, the
state of a node as its leaders report it, and the severity of each problem.
"""

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any, NamedTuple

from markupsafe import Markup

from pushrep.console.watch import STEP_S, Point, Reading
from pushrep.outbox.status import PAUSE_MS
from pushrep.status.table import size
from pushrep.status.text import relayed_text  # noqa: F401 - the pages' templates call it

PARTITIONS_A_PAGE = 200
_DAY_S = 86_400
_RATE_S = 10.0  # the least time over which a rate is taken
_SPARK_POINTS = 30
_ABOVE = 1.1  # of the highest value: a constant one does not lie on the chart's border
_MISSING_S = 3 * STEP_S
_FILLING_S = 600.0  # the least time over which the growth of a disk's used bytes is measured
_DAYS_SHOWN = 3650
_BROKEN = {"appends", "acknowledgements", "shipping"}  # what a problem blocks that is more than a warning

Points = Sequence[tuple[float, float | None]]
"""(seconds ago, value or None), the newest last."""
_BAR_WIDTH = 240
_SEEN = 3  # units: the least width of a part, so that it is visible
_SPARK_WIDTH, _SPARK_HEIGHT = 90, 20
_CHART_WIDTH, _CHART_HEIGHT = 640, 120


class Severity(IntEnum):
    """How urgent something is. The pages show each with a word, a colour and a shape."""

    FINE = 0
    IDLE = 1
    """No process has it open, and nothing is wrong."""
    WARN = 2
    """It works, with a problem."""
    BROKEN = 3
    """Records are refused, or can't be read."""


class PlaceRow(NamedTuple):
    """The row of a place. findings: its problems, each with its `severity`. rate: records a second; disk: free space,
    as text.
    """

    name: str
    title: str
    severity: Severity
    reading: Reading
    findings: Sequence[Mapping[str, Any]] = ()
    rate: float | None = None
    rates: Sequence[tuple[float, float | None]] = ()
    disk: str = "-"

    @property
    def found(self) -> Mapping[str, Any]:
        """The PLACE of `pushrep status --json`."""
        return self.reading.found


class NodeRow(NamedTuple):
    """The row of a node, with what its leaders report. name: of its page; None if the console does not watch the node.

    lag: records of all outboxes that the node has not acknowledged; partitions, in_sync: of all outboxes.
    """

    address: str
    name: str | None
    severity: Severity
    state: str
    outboxes: tuple[str, ...]
    in_sync: int
    partitions: int
    sessions: int
    lag: int
    lag_bytes: int
    trouble: str


class Series(NamedTuple):
    """Values of the last `past_s` seconds as (seconds ago, value), the newest last; None for a missing value."""

    title: str
    unit: str
    points: Sequence[tuple[float, float | None]]

    @property
    def now(self) -> float | None:
        """The newest value."""
        return self.points[-1][1] if self.points else None

    @property
    def top(self) -> float:
        """The top of the scale: 1, 2 or 5 times a power of ten, above the highest value."""
        highest = max((value for _, value in self.points if value is not None), default=0)
        if highest <= 0:
            return 1
        power = 10.0 ** math.floor(math.log10(highest))
        return next(step * power for step in (1, 2, 5, 10, 20) if step * power >= highest * _ABOVE)


class Fleet(NamedTuple):
    """All places, the worst first. empty: directories that hold none yet. others: those that are neither outboxes nor
    nodes. wrong: those with problems.
    """

    summary: str
    empty: Sequence[str]
    outboxes: list[PlaceRow]
    nodes: list[NodeRow]
    others: list[PlaceRow]
    wrong: list[PlaceRow]


class Partitions(NamedTuple):
    """The partitions of an outbox on one page.

    total: how many were chosen; behind: how many are behind; longest: the highest log end offset.
    """

    shown: list[Mapping[str, Any]]
    first: int
    total: int
    behind: int
    longest: int


def fleet(readings: Iterable[Reading], empty: Sequence[str] = ()) -> Fleet:
    """The page of all places. empty: watched directories that hold none yet."""
    rows = sorted(map(row_of, readings), key=lambda one: (-one.severity, one.name))
    by_kind = {kind: [one for one in rows if one.found["kind"] == kind] for kind in ("outbox", "node")}
    nodes = sorted(
        node_rows(by_kind["outbox"], by_kind["node"]), key=lambda one: (-one.severity, -one.lag, one.address)
    )
    wrong = [one for one in rows if one.findings]
    counts = f"{_many(len(by_kind['outbox']), 'outbox', 'outboxes')}, {_many(len(nodes), 'node', 'nodes')}"
    unwell = len({one.name for one in rows if one.severity >= Severity.WARN})
    unwell += sum(one.severity >= Severity.WARN and one.name is None for one in nodes)
    summary = f"{counts}. {_many(unwell, 'needs', 'need') + ' attention.' if unwell else 'No problems.'}"
    summary = summary if rows else "No outboxes and no nodes yet."
    others = [one for one in rows if one.found["kind"] not in by_kind]
    return Fleet(summary, empty, by_kind["outbox"], nodes, others, wrong)


def row_of(reading: Reading) -> PlaceRow:
    """The row of one place."""
    found, past = reading.found, reading.past
    findings = tuple(
        one | {"severity": Severity.BROKEN if one["blocks"] in _BROKEN else Severity.WARN} for one in found["problems"]
    )
    is_idle = found["state"] in {"closed", "at rest"}
    of_all = [*(one["severity"] for one in findings), *map(severity_of, found.get("members", ()))]
    severity = max(of_all, default=Severity.FINE) or (Severity.IDLE if is_idle else Severity.FINE)
    title = f"{found['topic']} of {found['producer']}" if found["kind"] == "outbox" else found["kind"]
    rates = rates_of(past)[-_SPARK_POINTS:]
    return PlaceRow(reading.name, title, severity, reading, findings, rate_of(past), rates, _disk_left(found, past))


def node_rows(outboxes: Iterable[PlaceRow], nodes: Iterable[PlaceRow]) -> Iterator[NodeRow]:
    """The rows of the watched nodes, and of the nodes that the watched outboxes push to."""
    seen: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    given = {one.found.get("address") or one.found["place"]: one for one in nodes}
    for row in outboxes:
        for member in row.found["members"]:
            if member["lag"] is not None:
                seen.setdefault(member["address"], []).append((row.name, member))
    for address in given.keys() | seen.keys():
        pushed, own = seen.get(address, []), given.get(address)
        lags = [member["lag"] for _, member in pushed]
        in_sync, partitions = sum(lag["in_sync"] for lag in lags), sum(lag["partitions"] for lag in lags)
        trouble = "; ".join(sorted({member["trouble"] for _, member in pushed if member["trouble"]}))
        state = "in trouble" if trouble else "behind" if any(map(is_behind, lags)) else "in sync"
        severity = Severity.FINE if state == "in sync" else Severity.WARN
        if own is not None and (own.severity > severity or not pushed):
            severity, state = own.severity, own.findings[0]["problem"] if own.findings else own.found["state"]
        yield NodeRow(
            address=address,
            name=None if own is None else own.name,
            severity=severity,
            state=state.replace("_", " "),
            outboxes=tuple(name for name, _ in pushed),
            in_sync=in_sync,
            partitions=partitions,
            sessions=sum(member["sessions"] for _, member in pushed),
            lag=sum(lag["records"] for lag in lags),
            lag_bytes=sum(lag["size_bytes"] for lag in lags),
            trouble=trouble,
        )


def partitions_shown(found: Mapping[str, Any], first: int, *, only_behind: bool) -> Partitions:
    """The page of partitions that holds number `first`. only_behind: choose those that are behind."""
    parts = found.get("parts", ())
    behind = [one for one in parts if shipped_of(one, stable_of(one)) < one["log_end_offset"]]
    chosen = behind if only_behind else list(parts)
    first = min(max(0, first), max(0, len(chosen) - 1)) // PARTITIONS_A_PAGE * PARTITIONS_A_PAGE
    longest = max((one["log_end_offset"] for one in parts), default=0)
    return Partitions(chosen[first : first + PARTITIONS_A_PAGE], first, len(chosen), len(behind), longest)


def stable_of(part: Mapping[str, Any]) -> int:
    """min(high watermark, flushed offset): the first offset that readers can't read yet."""
    stable: int = min(part["high_watermark"], part["flushed_offset"])
    return stable


def shipped_of(part: Mapping[str, Any], otherwise: Any = None) -> Any:
    """The first offset that some topic has not acknowledged; `otherwise` without a topic, or if it is unknown."""
    return min(part.get("shipped", {}).values(), default=otherwise)


def severity_of(member: Mapping[str, Any]) -> Severity:
    """The severity of an outbox's member."""
    lag = member["lag"]
    return Severity.WARN if member.get("trouble") or (lag and is_behind(lag)) else Severity.FINE


def is_behind(lag: Mapping[str, Any]) -> bool:
    """Whether a replica left the in-sync set, or has not acknowledged a record for 5 s: a process that is stopped stays
    in sync for a while, though nothing is acknowledged any more.
    """
    return bool(lag["in_sync"] < lag["partitions"] or lag["age_ms"] >= PAUSE_MS)


def rate_of(past: Sequence[Point]) -> float | None:
    """Records a second, since the newest point that is at least ten seconds old; None if there is no such point yet."""
    older = [point for point in past if past[-1].at_s - point.at_s >= _RATE_S]
    if not older:
        return None
    return max(0, past[-1].end - older[-1].end) / (past[-1].at_s - older[-1].at_s)


def rates_of(past: Sequence[Point]) -> Sequence[tuple[float, float | None]]:
    """(seconds ago, records a second since the point before); None if a reading between them is missing. The newest
    point is left out while it is too near to the one before for a rate.
    """
    return [
        (
            past[-1].at_s - after.at_s,
            None if took_s > _MISSING_S else max(0, after.end - before.end) / took_s,
        )
        for before, after in pairwise(past)
        if (took_s := after.at_s - before.at_s) >= STEP_S / 2
    ]


def past_s(past: Sequence[Point]) -> float:
    """The time from the oldest point to the newest: the width of all charts of a page."""
    return past[-1].at_s - past[0].at_s if past else 0.0


def series_of(past: Sequence[Point]) -> Iterator[Series]:
    """The charts of an outbox."""
    yield Series("Appended", "records a second", rates_of(past))
    for title, lags in (
        ("Lag of the slowest replica", [point.replica_lag for point in past]),
        ("Lag of the topic", [point.topic_lag for point in past]),
    ):
        if any(lag is not None for lag in lags):
            ago = [past[-1].at_s - point.at_s for point in past]
            yield Series(title, "records", list(zip(ago, lags, strict=True)))


def commands_for(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Shell commands for a place, each with a title."""
    at = shlex.quote(found["place"])
    yield "Status in a terminal", f"pushrep status {at}"
    if found["kind"] == "outbox":
        yield "Newest records", f"pushrep replay {at} {shlex.quote(found['topic'])} --from latest"
    if "directory" in found or found["kind"] == "logs":
        yield "Logs: segments, size, writer", f"pushrep log ls {at}"
    if found["kind"] == "outbox" and found["pid"] is None and any(one["records"] for one in found["destinations"]):
        yield "Ship the remaining records", f"pushrep ship {at} --bootstrap-servers HOST:PORT"


def _disk_left(found: Mapping[str, Any], past: Sequence[Point]) -> str:
    """`3.2 days, 1.4 GiB`: the time until the disk is full at its present growth, and its free bytes; `1.4 GiB free` if
    it does not grow, or has been watched for less than ten minutes.
    """
    if (disk := found.get("disk")) is None:
        return "-"
    free = disk["size_bytes"] - disk["used_bytes"]
    known = [(point.at_s, point.disk_used) for point in past if point.disk_used is not None]
    took_s, grown = (known[-1][0] - known[0][0], known[-1][1] - known[0][1]) if known else (0.0, 0)
    days = free / grown * took_s / _DAY_S if grown > 0 and took_s >= _FILLING_S else _DAYS_SHOWN
    return f"{size(free)} free" if days >= _DAYS_SHOWN else f"{days:,.1f} days, {size(free)}"


def _many(number: int, one: str, more: str) -> str:
    return f"{number:,} {one if number == 1 else more}"


def partition_bar(start: int, shipped: int | None, stable: int, end: int, *, longest: int) -> Markup:
    """The bar of one log: shipped records, stable records, and the rest. longest: the highest end in the table.

    shipped: None if the outbox ships to no topic: then stable records are drawn as shipped ones, for nothing more
    happens to them. A part that is not empty is at least 3 units wide.
    """
    ends = (start, stable if shipped is None else shipped, stable, end)
    at = [round(_BAR_WIDTH * offset / max(1, longest)) for offset in ends]
    at[1], at[2] = max(at[0], min(at[1], at[3])), max(at[0], min(at[2], at[3]))
    if end > stable:
        at[2] = min(at[2], at[3] - _SEEN)
    at[1] = min(at[1], at[2] - _SEEN if shipped is not None and stable > shipped else at[2])
    parts = [
        f'<path class={name} d="M{left} 0H{right}V9H{left}z"/>'
        for name, left, right in zip(("s", "h", "t"), at, at[1:], strict=False)
        if right > left
    ]
    # Attributes without quotes, which HTML allows: a page has hundreds of bars.
    return Markup(  # noqa: S704 - only numbers and constants of this module
        f'<svg class=bar viewBox="-6 0 {_BAR_WIDTH + 6} 9" preserveAspectRatio=none aria-hidden=true>'
        f"{''.join(parts)}</svg>"
    )


def sparkline(points: Points) -> Markup:
    """A small line of past values, from 0 to a quarter above the highest."""
    top = 1.25 * max((value for _, value in points if value is not None), default=0)
    path = _line(points, max((ago for ago, _ in points), default=0), top, _SPARK_WIDTH, _SPARK_HEIGHT)
    return Markup(  # noqa: S704 - as above
        f'<svg class=spark viewBox="0 -1 {_SPARK_WIDTH} {_SPARK_HEIGHT + 2}" aria-hidden=true><path d="{path}"/></svg>'
    )


def chart(points: Points, past_s: float, top: float) -> Markup:
    """A large line of the values of the last `past_s` seconds, from 0 to `top`."""
    path = _line(points, past_s, top, _CHART_WIDTH, _CHART_HEIGHT)
    return Markup(  # noqa: S704 - as above
        f'<svg class=chart viewBox="0 -2 {_CHART_WIDTH} {_CHART_HEIGHT + 4}" preserveAspectRatio=none '
        f'aria-hidden=true><path class=grid d="M0 0H{_CHART_WIDTH}M0 {_CHART_HEIGHT / 2:g}H{_CHART_WIDTH}'
        f'M0 {_CHART_HEIGHT}H{_CHART_WIDTH}"/><path class=line d="{path}"/></svg>'
    )


def _line(points: Points, past_s: float, top: float, width: int, height: int) -> str:
    """An SVG path. A single value between two missing ones becomes a short line."""

    def steps() -> Iterator[str]:
        is_drawing = False
        for ago_s, value in points:
            if value is not None:
                x, y = width * (1 - ago_s / (past_s or 1)), height * (1 - value / (top or 1))
                yield f"L{x:.1f} {y:.1f}" if is_drawing else f"M{x:.1f} {y:.1f}h.1"
            is_drawing = value is not None

    return "".join(steps())
