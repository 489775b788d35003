"""When whom to kill on the road through Kafka: drawn from one seed, counted in records and batches, not in seconds.

    flights in the log       0 ────x──────────────x──── all    the producer dies as its progress passes x
    work of all three        0 ──────b──────────b────── all    the broker dies, if it is our own
    relay and apply          batch 0 · 1 · ✗2 · 2 · 3 ...      each dies once inside a batch, which then runs again

How far a killed process really was is up to the machine; what it left behind is measured, not planned.
"""

import random
from dataclasses import dataclass
from typing import Self

from spark_jobs.demo.plan import InsideBatch, apart


@dataclass(frozen=True, slots=True)
class KafkaPlan:
    """The draws of one seed: the producer's as ProducerPlan tells them.

    `broker_kills`: a third of what is shipped, read by the relay and read by the apply job, when the broker is killed:
    whoever is slow, each of them has something to do at some of the kills.
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
