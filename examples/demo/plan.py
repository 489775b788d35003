"""Which process to kill when: everything random about a demo, drawn from one seed and fixed before it begins.

    flights      0 ─────x───────────x─────────────x──── all     the producer dies three times, as its progress passes x
    stream     batch 0 · 1 · 2 · 3 · ✗4 · 4 · 5 · 6 ...         the JVM dies inside one batch, which then runs again

    through Kafka: the producer likewise; relay and apply job each die once inside a batch; the demo's own broker dies
    work of all three        0 ──────b──────────b────── all

Moments are counted in records and batches, not seconds, so that a slow machine meets the same plan. How far a killed
process really was is up to the machine; what it left behind is measured, not planned.
"""

import random
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, Self

PRODUCER_KILLS: Final = 3
BATCHES_MIN: Final = 14
"""A trigger takes at most this part of all records, so that there are batches enough to die in one."""
_EARLIEST, _LATEST, _APART = 0.08, 0.86, 0.12  # of all flights; apart, so that each restart gets somewhere


class InsideBatch(NamedTuple):
    """A moment in a stream: which batch, and how far in, a fraction of the time a batch has taken so far."""

    batch: int
    depth: float

    @classmethod
    def draw(cls, rng: random.Random) -> Self:
        """One of the first half of the batches, not at its edges."""
        return cls(rng.randint(2, BATCHES_MIN // 2), rng.uniform(0.2, 0.8))


class ProducerPlan(Protocol):
    """When the producer dies.

    `producer_kills`: flights appended for the first time when the kill comes, rising. `producer_delays_s`: how much
    later the signal goes out, so that it lands between two lines of progress.
    """

    @property
    def producer_kills(self) -> tuple[int, ...]: ...
    @property
    def producer_delays_s(self) -> tuple[float, ...]: ...


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """The draws of one seed: the producer's moments as ProducerPlan has them, and the stream's."""

    seed: int
    producer_kills: tuple[int, ...]
    producer_delays_s: tuple[float, ...]
    stream_kill: InsideBatch

    @classmethod
    def draw(cls, seed: int, flights: int) -> Self:
        """The plan of this seed for that many flights."""
        rng = random.Random(seed)  # noqa: S311 - a repeatable draw, no secret
        kills = apart(rng, flights, PRODUCER_KILLS)
        delays_s = tuple(rng.random() * 0.15 for _ in kills)
        return cls(seed, kills, delays_s, stream_kill=InsideBatch.draw(rng))


def apart(rng: random.Random, flights: int, count: int) -> tuple[int, ...]:
    """So many moments in a run, in flights, rising: uniform over all placements that keep a distance."""
    # Points of a shorter line, pushed apart again.
    room = _LATEST - _EARLIEST - _APART * (count - 1)
    points = sorted(rng.random() * room for _ in range(count))
    return tuple(int(flights * (_EARLIEST + p + _APART * n)) for n, p in enumerate(points))


def records_per_trigger(flights: int) -> int:
    """The most that one batch of the stream takes."""
    return max(1, flights // BATCHES_MIN)


def save_every(flights: int) -> int:
    """Records between two saves of the producer's position: a kill repeats one to two times as many."""
    return max(20, flights // 80)


def new_seed() -> int:
    """A seed for a run that was given none; short, so that it can be typed again."""
    return random.SystemRandom().randrange(1_000_000)


@dataclass(frozen=True, slots=True)
class KafkaPlan:
    """The draws of one seed: the producer's as ProducerPlan has them.

    `broker_kills`: a third of what is shipped, read by the relay and read by the apply job, when the broker is killed:
    whichever is slow, each of them has something to do at some of the kills.
    """

    seed: int
    producer_kills: tuple[int, ...]
    producer_delays_s: tuple[float, ...]
    broker_kills: tuple[int, ...]
    relay_kill: InsideBatch
    apply_kill: InsideBatch

    @classmethod
    def draw(cls, seed: int, flights: int, kills: int) -> Self:
        """The plan of this seed for that many flights; producer and broker die `kills` times each."""
        rng = random.Random(seed)  # noqa: S311 - a repeatable draw, no secret
        producer_kills = apart(rng, flights, kills)
        delays_s = tuple(rng.random() * 0.15 for _ in producer_kills)
        return cls(
            seed,
            producer_kills,
            delays_s,
            broker_kills=apart(rng, flights, kills),
            relay_kill=InsideBatch.draw(rng),
            apply_kill=InsideBatch.draw(rng),
        )
