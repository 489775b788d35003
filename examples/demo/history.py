"""What happened during a run, and what the check found: plain values, written by the supervisor and the check.

Times are seconds since the run began; records and rows are counted, never estimated.
"""

import json
from dataclasses import dataclass, field
from typing import Final

PRODUCER: Final = "producer"
STREAM: Final = "stream"
RELAY: Final = "relay"
APPLY: Final = "apply"
BROKER: Final = "broker"


@dataclass(slots=True)
class Kill:
    """One `kill -9`: of whom, when, and what came of it.

    `processes` are (pid, name) of everything that died. A producer's kill gets `in_log` and `resumes_at` (next source
    offsets per partition) when its successor has opened the log; a stream's has `batch` and `in_log`, the log offsets
    up to which it had committed. A broker's gets `back_s`: how long it did not answer.
    """

    program: str
    at_s: float
    processes: list[tuple[int, str]]
    batch: int | None = None
    in_log: list[int] = field(default_factory=list)
    resumes_at: list[int] = field(default_factory=list)
    back_s: float | None = None

    def victims(self) -> str:
        """The killed processes, in a few words: what there is one of by name and pid, the rest by number."""
        names = [name for _, name in self.processes]
        alone = [f"{name} {pid}" for pid, name in self.processes if names.count(name) == 1]
        many = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names) if names.count(name) > 1]
        return ", ".join(alone + many)

    @property
    def again(self) -> int:
        """Records that enter the log a second time because of it."""
        return sum(self.in_log) - sum(self.resumes_at) if self.resumes_at else 0


@dataclass(frozen=True, slots=True)
class Sample:
    """How far it was at a moment: records in the log, flights in it (each counted once), records read and committed."""

    at_s: float
    appended: int
    flights: int
    applied: int


@dataclass(slots=True)
class History:
    """Everything a report needs of the run itself."""

    kills: list[Kill] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    append_s: float = 0.0
    apply_s: float = 0.0
    check_s: float = 0.0
    total_s: float = 0.0

    def kills_of(self, program: str) -> list[Kill]:
        """The kills of one program, in order."""
        return [kill for kill in self.kills if kill.program == program]


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
