"""A run in numbers: one value, shown as a table, as JSON and at the head of the report."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol, Self

from rich import box
from rich.table import Table

from examples.demo.history import PRODUCER, STREAM, Findings, History

ZERO_IF_RIGHT: Final = frozenset({"missing", "twice", "not in the file", "out of order"})


class _Found(Protocol):
    """What either check finds of the table."""

    @property
    def flights(self) -> int: ...
    @property
    def kept(self) -> int: ...
    @property
    def missing(self) -> int: ...
    @property
    def twice(self) -> int: ...
    @property
    def foreign(self) -> int: ...
    @property
    def carriers(self) -> list[tuple[str, int | None, int | None]]: ...
    @property
    def wrong_carriers(self) -> list[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSummary:
    """What both demos say of their table and of its way. Counts are records, times seconds."""

    seed: int
    flights: int
    kept: int
    missing: int
    twice: int
    foreign: int
    carriers: int
    carriers_wrong: tuple[str, ...]
    producer_kills: int
    apply_s: float
    check_s: float
    total_s: float
    right: bool

    def result_rows(self, *more: tuple[str, int]) -> list[tuple[str, str, str, str]]:
        """The rows at the end: what should be 0, `more` of it, whether the carriers agree, and the time of all."""
        zeros = [("missing", self.missing), ("twice", self.twice), ("not in the file", self.foreign), *more]
        agree = self.carriers - len(self.carriers_wrong)
        return [
            *((what, f"{count:,}", "", "") for what, count in zeros),
            ("carriers with the same miles", f"{agree} of {self.carriers}", f"{self.check_s:.1f}", ""),
            ("all of it", "", f"{self.total_s:.1f}", ""),
        ]

    def wrongs(self, *more: tuple[int, str]) -> list[str]:
        """What is wrong with the table, in words."""
        counts = ((self.missing, "missing"), (self.twice, "twice"), (self.foreign, "that the file doesn't have"), *more)
        wrong = [f"{count:,} {what}" for count, what in counts if count]
        return [*wrong, f"other miles for {', '.join(self.carriers_wrong)}"] if self.carriers_wrong else wrong


def of_table(seed: int, history: History, found: _Found) -> dict[str, Any]:
    """The fields of TableSummary, but for `right`."""
    return {
        "seed": seed,
        "flights": found.flights,
        "kept": found.kept,
        "missing": found.missing,
        "twice": found.twice,
        "foreign": found.foreign,
        "carriers": len(found.carriers),
        "carriers_wrong": tuple(found.wrong_carriers),
        "producer_kills": len(history.kills_of(PRODUCER)),
        "apply_s": round(history.apply_s, 3),
        "check_s": round(history.check_s, 3),
        "total_s": round(history.total_s, 3),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(TableSummary):
    """The demo through the log.

    `dropped` is what the replay filter itself counted, `replayed` what plain SQL finds twice in the log: they are equal
    when the filter is right.
    """

    appended: int
    replayed: int
    dropped: int
    stream_kills: int
    append_s: float

    @classmethod
    def of(cls, seed: int, history: History, found: Findings, dropped: int) -> Self:
        """Put the run and its check together."""
        return cls(
            **of_table(seed, history, found),
            appended=found.appended,
            replayed=found.replayed,
            dropped=dropped,
            stream_kills=len(history.kills_of(STREAM)),
            append_s=round(history.append_s, 3),
            right=found.right and dropped == found.replayed,
        )

    def to_dict(self) -> dict[str, Any]:
        """For --json and summary.json; rates are added, records a second."""
        return {
            **asdict(self),
            "append_records_per_s": round(rate(self.appended, self.append_s)),
            "apply_records_per_s": round(rate(self.appended, self.apply_s)),
        }

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(what, records, seconds, records/s), for the table and the report."""
        return [
            ("flights in the original file", f"{self.flights:,}", "", ""),
            ("appended to the log", f"{self.appended:,}", *speed(self.appended, self.append_s)),
            ("   of these replayed", f"{self.replayed:,}", "", ""),
            ("read by the stream", f"{self.dropped + self.kept:,}", *speed(self.appended, self.apply_s)),
            ("   dropped as replays", f"{self.dropped:,}", "", ""),
            ("   kept in the table", f"{self.kept:,}", "", ""),
            *self.result_rows(),
        ]

    def verdict(self) -> str:
        """One sentence."""
        if self.right:
            return (
                f"Every flight is in the table once, after kill -9 of the producer ({self.producer_kills} times) "
                f"and of the stream's JVM ({self.stream_kills})."
            )
        wrong = self.wrongs()
        if self.dropped != self.replayed:
            wrong.append(f"{self.dropped:,} dropped where {self.replayed:,} were replayed")
        return f"The table is wrong: {'; '.join(wrong)}."

    def table(self) -> Table:
        """For a terminal."""
        return table_of(self.seed, self.rows())


def table_of(seed: int, rows: Iterable[tuple[str, str, str, str]]) -> Table:
    """Rows (what, records, seconds, records/s) for a terminal; what should be 0 and is not stands out."""
    table = Table(box=box.SIMPLE_HEAD, title=f"seed {seed}", title_justify="left", title_style="dim")
    table.add_column("")
    for column in ("records", "seconds", "records/s"):
        table.add_column(column, justify="right")
    for what, *cells in rows:
        bad = what.strip() in ZERO_IF_RIGHT and cells[0] != "0"
        table.add_row(what, *cells, style="bold red" if bad else "bold" if "kept" in what else None)
    return table


def rate(records: int, seconds: float) -> float:
    """Records a second; 0 where no time was taken."""
    return records / seconds if seconds else 0.0


def speed(records: int, seconds: float) -> tuple[str, str]:
    """Both as text."""
    return f"{seconds:.1f}", f"{rate(records, seconds):,.0f}"
