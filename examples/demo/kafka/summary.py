"""What the check of a run through Kafka found, and the run in numbers: a table, JSON, and the head of the report."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from rich.table import Table

from examples.demo.history import APPLY, BROKER, RELAY, History
from examples.demo.summary import TableSummary, of_table, rate, speed, table_of


@dataclass(frozen=True, slots=True)
class KafkaFindings:
    """Records unless said otherwise. Right: `missing`, `twice`, `foreign` and `misplaced` are 0.

    `twice` counts the copies too many, `foreign` rows that the file doesn't have, `misplaced` rows that come after one
    that the file has later in their source partition. `first` and `second` are the records in the topics, `.._copies`
    those that are there for a second time. `carriers` are rows (carrier, miles in the file, miles in the table); `days`
    rows (day, in the first topic, of these copies, in the table) by event time; `moments_ms` the event times of the
    asked positions; `relay_batches` and `apply_batches` what of each batch came out, each record counted once.
    """

    flights: int
    kept: int
    missing: int
    twice: int
    foreign: int
    misplaced: int
    first: int
    first_copies: int
    second: int
    second_copies: int
    carriers: list[tuple[str, int | None, int | None]]
    days: list[tuple[str, int, int, int]]
    moments_ms: list[int | None]
    relay_batches: dict[int, int]
    apply_batches: dict[int, int]

    @property
    def wrong_carriers(self) -> list[str]:
        """Carriers whose distances don't add up to the same miles in both."""
        return [carrier for carrier, expected, found in self.carriers if expected != found]

    @property
    def right(self) -> bool:
        """Every flight once, in order, and nothing else; and each topic holds every flight."""
        wrong = self.missing or self.twice or self.foreign or self.misplaced or self.wrong_carriers
        once = {self.kept, self.first - self.first_copies, self.second - self.second_copies}
        return not wrong and once == {self.flights}

    @classmethod
    def from_json(cls, text: str | bytes) -> "KafkaFindings":
        """Read what the check program printed."""
        facts: dict[str, Any] = {name: value for name, value in json.loads(text).items() if name in _NAMES}
        for name in ("carriers", "days"):
            facts[name] = [tuple(row) for row in facts[name]]
        for name in ("relay_batches", "apply_batches"):  # JSON has text for keys
            facts[name] = {int(batch): rows for batch, rows in facts[name].items()}
        return cls(**facts)


_NAMES = frozenset(field.name for field in fields(KafkaFindings))


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSummary(TableSummary):
    """The demo through Kafka.

    `logged` are the records in the outbox's log. What the two jobs' filters counted as dropped, and what plain SQL
    finds twice in the topics that they read, are equal when the filters are right. `copies_shipped`: records of the
    first topic that the log has once and the topic twice.
    """

    logged: int
    first: int
    first_copies: int
    copies_shipped: int
    relay_dropped: int
    second: int
    second_copies: int
    apply_dropped: int
    misplaced: int
    broker_kills: int
    relay_kills: int
    apply_kills: int
    ship_s: float
    relay_s: float

    @classmethod
    def of(cls, seed: int, history: History, found: KafkaFindings, counted: "Counted") -> Self:
        """Put the run and its check together."""
        agree = (counted.relay_dropped, counted.apply_dropped) == (found.first_copies, found.second_copies)
        return cls(
            **of_table(seed, history, found),
            logged=counted.logged,
            first=found.first,
            first_copies=found.first_copies,
            copies_shipped=found.first - counted.logged,
            relay_dropped=counted.relay_dropped,
            second=found.second,
            second_copies=found.second_copies,
            apply_dropped=counted.apply_dropped,
            misplaced=found.misplaced,
            broker_kills=len(history.kills_of(BROKER)),
            relay_kills=len(history.kills_of(RELAY)),
            apply_kills=len(history.kills_of(APPLY)),
            ship_s=round(history.append_s, 3),
            relay_s=round(counted.relay_s, 3),
            right=found.right and agree and found.first >= counted.logged,
        )

    def to_dict(self) -> dict[str, Any]:
        """For --json and summary.json; rates are added, records a second."""
        return {
            **asdict(self),
            "relay_records_per_s": round(rate(self.first, self.relay_s)),
            "apply_records_per_s": round(rate(self.second, self.apply_s)),
        }

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(what, records, seconds, records/s), for the table and the report."""
        return [
            ("flights in the original file", f"{self.flights:,}", "", ""),
            ("appended to the log", f"{self.logged:,}", "", ""),
            ("in the first topic", f"{self.first:,}", *speed(self.first, self.ship_s)),
            ("   of these raw copies", f"{self.first_copies:,}", "", ""),
            ("   that only shipping made", f"{self.copies_shipped:,}", "", ""),
            ("   dropped by the relay", f"{self.relay_dropped:,}", *speed(self.first, self.relay_s)),
            ("in the second topic", f"{self.second:,}", "", ""),
            ("   of these raw copies", f"{self.second_copies:,}", "", ""),
            ("   dropped by the apply job", f"{self.apply_dropped:,}", *speed(self.second, self.apply_s)),
            ("kept in the PostgreSQL table", f"{self.kept:,}", "", ""),
            *self.result_rows(("out of order", self.misplaced)),
        ]

    def verdict(self) -> str:
        """One sentence."""
        if self.right:
            broker = f"the broker ({self.broker_kills})" if self.broker_kills else "no broker, which is yours"
            return (
                f"Every flight is in the table once and in order, after kill -9 of the producer ({self.producer_kills} "
                f"times), {broker}, the relay's JVM ({self.relay_kills}) and the apply job's ({self.apply_kills})."
            )
        wrong = self.wrongs((self.misplaced, "out of order"))
        for topic, records, copies, dropped in (
            ("first", self.first, self.first_copies, self.relay_dropped),
            ("second", self.second, self.second_copies, self.apply_dropped),
        ):
            if records - copies != self.flights:
                wrong.append(f"{records - copies:,} flights in the {topic} topic")
            if dropped != copies:
                wrong.append(f"{dropped:,} dropped where the {topic} topic has {copies:,} copies")
        if self.copies_shipped < 0:
            wrong.append(f"{-self.copies_shipped:,} records of the log that the first topic lacks")
        return f"The table is wrong: {'; '.join(wrong)}."

    def table(self) -> Table:
        """For a terminal."""
        return table_of(self.seed, self.rows())


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What the programs reported: records in the log, records that the filters dropped; and when the relay was done."""

    logged: int
    relay_dropped: int
    apply_dropped: int
    relay_s: float
