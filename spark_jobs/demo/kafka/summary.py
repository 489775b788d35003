"""A run through Kafka in numbers: one value, shown as a table, as JSON and at the head of the report."""

from dataclasses import asdict, dataclass
from typing import Any, Self

from rich.table import Table

from spark_jobs.demo.history import APPLY, BROKER, RELAY, History
from spark_jobs.demo.kafka.findings import KafkaFindings
from spark_jobs.demo.summary import TableSummary, of_table, rate, speed, table_of


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
    """What the programs told: records in the log, records that the filters dropped; and when the relay was done."""

    logged: int
    relay_dropped: int
    apply_dropped: int
    relay_s: float
