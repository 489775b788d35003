"""What the check found, as it travels from the check's process to the demo's."""

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Findings:
    """What the check found, in records unless said otherwise. Right: `missing`, `twice` and `foreign` are 0.

    `twice` counts the copies too many, `foreign` rows that the file doesn't have. `carriers` are rows (carrier, miles
    in the file, miles in the table); `days` rows (day, appended, replayed, kept) by event time; `moments_ms` the event
    times of the asked log positions; `batches` the table's rows by the stream's batch.
    """

    flights: int
    kept: int
    missing: int
    twice: int
    foreign: int
    appended: int
    replayed: int
    carriers: list[tuple[str, int | None, int | None]]
    days: list[tuple[str, int, int, int]]
    moments_ms: list[int | None]
    batches: dict[int, int]

    @property
    def wrong_carriers(self) -> list[str]:
        """Carriers whose distances don't add up to the same miles in both."""
        return [carrier for carrier, expected, found in self.carriers if expected != found]

    @property
    def right(self) -> bool:
        """Every flight once, and nothing else."""
        return not (self.missing or self.twice or self.foreign or self.wrong_carriers) and self.flights == self.kept

    @classmethod
    def from_json(cls, text: str | bytes) -> "Findings":
        """Read what the check program printed."""
        facts = json.loads(text)
        facts["carriers"] = [tuple(row) for row in facts["carriers"]]
        facts["days"] = [tuple(row) for row in facts["days"]]
        facts["batches"] = {int(batch): rows for batch, rows in facts["batches"].items()}  # JSON has text for keys
        return cls(**facts)
