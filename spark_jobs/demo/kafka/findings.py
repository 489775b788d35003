"""What the check of the road through Kafka found, as it travels from the check's process to the demo's."""

import json
from dataclasses import dataclass, fields
from typing import Any


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
