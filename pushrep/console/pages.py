"""What the pages show beside the values of `pushrep status --json`: readings in, rows out. No clock, no disk, no HTML.

Templates show the status values themselves. This module computes the rest: which is worst, rates, the days until a disk
is full, a node as its leaders see it, and what to do about each problem.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from pushrep.cli.common import size
from pushrep.console.watch import STEP_S, Point, Reading
from pushrep.problems import BLOCKS

PARTITIONS_A_PAGE = 200
_DAY_S = 86_400
_RATE_S = 10.0  # the least time over which a rate is taken
_SPARK_POINTS = 30
_FILLING_S = 600.0  # the least time over which a disk's filling is measured
_DAYS_SHOWN = 3650

ADVICE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "not_answering": (
            "Its process may be stuck, or it is no outbox, node or log.",
            "pushrep status {at}",
        ),
        "not_leading": ("Start the nodes that are down, or open it again.", "pushrep status {at} --partitions"),
        "under_min_insync": ("Bring a member back, or replace a lost one.", "pushrep replica status {at} --partitions"),
        "disk_full": ("Free space: appends go on by themselves then.", "pushrep log ls {at}"),
        "damaged": ("See what is damaged before anything else.", "pushrep log verify {at}"),
        "log_offline": ("See the node's log and its disk; then start the node again.", "pushrep log verify {at}"),
        "kafka_away": ("See whether the brokers answer; records wait in the outbox.", "pushrep status {at} --watch"),
        "shipping_stopped": ("Let the topic take the record, or skip it.", "pushrep outbox skip --help"),
        "log_waits": ("The node's log says what it waits for.", "pushrep log verify {at}"),
        "segment_damaged": (
            "A member that answers repairs it. Without one, see what it held.",
            "pushrep log verify {at}",
        ),
        "replica_away": ("See the node's log, and whether its address answers.", "pushrep status {at} --watch"),
        "replay_stalled": (
            "Start its consumer again, or end it: pushrep replica stop-session.",
            "pushrep status {at}",
        ),
        "disk_filling": ("Free space, or let retention go further.", "pushrep log ls {at}"),
        "certificate_expires": ("Put a new one in its place; a service reads it at its start.", "pushrep certs --help"),
    }
)
"""What to do about each problem: words, and a command for a shell, to be copied."""
assert ADVICE.keys() == BLOCKS.keys(), "every problem says what to do"
_OF_A_NEWER_VERSION = ("It runs a newer pushrep, whose command says more.", "pushrep status {at}")


class Severity(IntEnum):
    """How urgent something is. Each has a word, a colour and a shape."""

    FINE = 0
    IDLE = 1
    """No process has it open, and nothing is wrong."""
    WARN = 2
    """It works, with a problem."""
    BROKEN = 3
    """Records are refused, or can't be read."""


class Trouble(NamedTuple):
    """A problem, and what to do."""

    severity: Severity
    problem: str
    why: str
    advice: str
    command: str


class PlaceRow(NamedTuple):
    """A place as a row. rate: records a second; disk: how much is left, in words."""

    name: str
    title: str
    severity: Severity
    reading: Reading
    findings: tuple[Trouble, ...] = ()
    rate: float | None = None
    rates: Sequence[float | None] = ()
    disk: str = "-"

    @property
    def found(self) -> Mapping[str, Any]:
        """As `pushrep status --json` has it."""
        return self.reading.found


class NodeRow(NamedTuple):
    """A node as its leaders see it. name: of its page; None if the console was not given the node.

    lag: records that it is not known to hold, of all outboxes; partitions, in_sync: of all outboxes.
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
    """The values of the last hour, one each `STEP_S`, the newest last; None where nothing is known."""

    title: str
    unit: str
    values: Sequence[float | None]

    @property
    def now(self) -> float | None:
        """The newest."""
        return self.values[-1] if self.values else None

    @property
    def highest(self) -> float:
        """The top of the scale."""
        return max((value for value in self.values if value is not None), default=0)


class Fleet(NamedTuple):
    """All places, the worst first. others: neither outboxes nor nodes."""

    summary: str
    outboxes: list[PlaceRow]
    nodes: list[NodeRow]
    others: list[PlaceRow]
    wrong: list[PlaceRow]


class Partitions(NamedTuple):
    """Those of an outbox on a page. total: of those chosen; behind: how many are behind; longest: the highest end."""

    shown: list[Mapping[str, Any]]
    first: int
    total: int
    behind: int
    longest: int


def fleet(readings: Iterable[Reading]) -> Fleet:
    """All of them."""
    rows = sorted(map(row_of, readings), key=lambda one: (-one.severity, one.name))
    by_kind = {kind: [one for one in rows if one.found["kind"] == kind] for kind in ("outbox", "node")}
    nodes = sorted(
        node_rows(by_kind["outbox"], by_kind["node"]), key=lambda one: (-one.severity, -one.lag, one.address)
    )
    wrong = [one for one in rows if one.findings]
    counts = f"{_many(len(by_kind['outbox']), 'outbox', 'outboxes')}, {_many(len(nodes), 'node', 'nodes')}"
    unwell = len({one.name for one in rows if one.severity >= Severity.WARN})
    unwell += sum(one.severity >= Severity.WARN and one.name is None for one in nodes)
    summary = f"{counts}. {_many(unwell, 'wants', 'want') + ' a look.' if unwell else 'Nothing is wrong.'}"
    summary = summary if rows else "Nothing is watched yet."
    others = [one for one in rows if one.found["kind"] not in by_kind]
    return Fleet(summary, by_kind["outbox"], nodes, others, wrong)


def row_of(reading: Reading) -> PlaceRow:
    """One place."""
    found, past = reading.found, reading.past
    at = shlex.quote(found["place"])
    findings = tuple(
        Trouble(
            Severity.BROKEN if one["blocks"] else Severity.WARN, one["problem"], one["why"], advice,
            command.format(at=at),
        )
        for one in found["problems"]
        for advice, command in [ADVICE.get(one["problem"], _OF_A_NEWER_VERSION)]
    )  # fmt: skip
    is_idle = found["state"] in {"closed", "at rest"}
    of_all = [*(one.severity for one in findings), *map(severity_of, found.get("members", ()))]
    severity = max(of_all, default=Severity.FINE) or (Severity.IDLE if is_idle else Severity.FINE)
    title = f"{found['topic']} of {found['producer']}" if found["kind"] == "outbox" else found["kind"]
    rates = rates_of(past)[-_SPARK_POINTS:]
    return PlaceRow(reading.name, title, severity, reading, findings, rate_of(past), rates, _disk_left(found, past))


def node_rows(outboxes: Iterable[PlaceRow], nodes: Iterable[PlaceRow]) -> Iterator[NodeRow]:
    """The nodes that the console was given, and those to which the outboxes push."""
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
        state = "in trouble" if trouble else "behind" if in_sync < partitions else "in sync"
        severity = Severity.FINE if state == "in sync" else Severity.WARN
        if own is not None and (own.severity > severity or not pushed):
            severity, state = own.severity, own.findings[0].problem if own.findings else own.found["state"]
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
    """From the `first` on; only_behind: those that are behind."""
    parts = found.get("parts", ())
    behind = [one for one in parts if shipped_of(one, stable_of(one)) < one["log_end_offset"]]
    chosen = behind if only_behind else list(parts)
    first = min(max(0, first), max(0, len(chosen) - 1)) // PARTITIONS_A_PAGE * PARTITIONS_A_PAGE
    longest = max((one["log_end_offset"] for one in parts), default=0)
    return Partitions(chosen[first : first + PARTITIONS_A_PAGE], first, len(chosen), len(behind), longest)


def stable_of(part: Mapping[str, Any]) -> int:
    """The first offset that readers can't read yet."""
    stable: int = min(part["high_watermark"], part["flushed_offset"])
    return stable


def shipped_of(part: Mapping[str, Any], otherwise: Any = None) -> Any:
    """The first offset that some topic has not acknowledged; `otherwise` without a topic, or if it is not known."""
    return min(part.get("shipped", {}).values(), default=otherwise)


def severity_of(member: Mapping[str, Any]) -> Severity:
    """Of a member of an outbox."""
    lag = member["lag"]
    is_behind = lag is not None and lag["in_sync"] < lag["partitions"]
    return Severity.WARN if member.get("trouble") or is_behind else Severity.FINE


def rate_of(past: Sequence[Point]) -> float | None:
    """Records a second, between now and the newest point that is ten seconds older; None: not known yet."""
    older = [point for point in past if past[-1].at_s - point.at_s >= _RATE_S]
    if not older:
        return None
    return max(0, past[-1].end - older[-1].end) / (past[-1].at_s - older[-1].at_s)


def rates_of(past: Sequence[Point]) -> tuple[float | None, ...]:
    """Between each two points; None if a reading is missing between them."""
    return tuple(
        None if after.at_s - before.at_s > 3 * STEP_S else max(0, after.end - before.end) / (after.at_s - before.at_s)
        for before, after in pairwise(past)
        if after.at_s > before.at_s
    )


def series_of(past: Sequence[Point]) -> Iterator[Series]:
    """The charts of an outbox."""
    yield Series("Appended", "records a second", rates_of(past))
    for title, lags in (
        ("Behind: the slowest replica", [point.replica_lag for point in past]),
        ("Behind: the topic", [point.topic_lag for point in past]),
    ):
        if any(lag is not None for lag in lags):
            yield Series(title, "records", lags)


def commands_for(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Commands for the same in a shell."""
    at = shlex.quote(found["place"])
    yield "The same in a terminal", f"pushrep status {at} --watch"
    if found["kind"] == "outbox":
        yield "Its newest records", f"pushrep read {at} {shlex.quote(found['topic'])} --from latest"
    if "directory" in found or found["kind"] == "logs":
        yield "Segments, who writes them", f"pushrep log ls {at}"
    if found["kind"] == "outbox" and found["pid"] is None and any(one["records"] for one in found["destinations"]):
        yield "Ship what is left", f"pushrep ship {at} --bootstrap-servers HOST:PORT"


def _disk_left(found: Mapping[str, Any], past: Sequence[Point]) -> str:
    """`3.2 days, 1.4 GiB`: until it is full at the present rate; without a known rate the bytes alone."""
    if (disk := found.get("disk")) is None:
        return "-"
    free = disk["size_bytes"] - disk["used_bytes"]
    known = [(point.at_s, point.disk_used) for point in past if point.disk_used is not None]
    took_s, grown = (known[-1][0] - known[0][0], known[-1][1] - known[0][1]) if known else (0.0, 0)
    days = free / grown * took_s / _DAY_S if grown > 0 and took_s >= _FILLING_S else _DAYS_SHOWN
    return f"{size(free)} free" if days >= _DAYS_SHOWN else f"{days:,.1f} days, {size(free)}"


def _many(number: int, one: str, more: str) -> str:
    return f"{number:,} {one if number == 1 else more}"
