"""Startpoints of a running stream: option `startingStartpoint=<consumer>`, applied between two batches, live.

    each trigger    the store's size is looked at; only if it changed, what is pending
    pending         resolved once (the store keeps the answer); the next batch begins there, in a new epoch: the
                    startpoint's number. Epoch and start stand in the offset that Spark logs, so a batch that is run
                    again is the same batch
    committed       Spark's own checkpoint says so: the batch before the one that is planned. Progress past the start
                    consumes the startpoint

The store's checkpoint of the consumer follows Spark's about once a minute, for people who look; Spark's is the truth.
A failed startpoint stops the query with its reason. Bootstrapping partitions hold the others still.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from pushrep.seams import SYSTEM_CLOCK, Clock
from pushrep.startpoints import (
    STORE_NAME,
    Applied,
    BootstrapGate,
    Claim,
    LogFacts,
    Standing,
    StartpointStore,
    State,
    StorePlace,
)
from spark_jobs.sources.logs import TopicLogs
from spark_jobs.sources.options import SourceOptions
from spark_jobs.sources.planning import Extent
from spark_jobs.sources.positions import CheckpointUnusable, Position, StreamOffset
from spark_jobs.sources.progress import Step

FOLLOW_MS = 60_000
"""How far the store's checkpoint may lag behind Spark's, where no startpoint waits to be consumed."""


class StreamStartpoints:
    """The startpoints of one consumer, for one stream; it claims each partition that it meets."""

    def __init__(self, options: SourceOptions, logs: TopicLogs, consumer: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        beside = StorePlace.parse(Path(options.path) / STORE_NAME)
        self._place = options.startpoints if options.startpoints is not None else beside
        self._opened: StartpointStore | None = None
        self._consumer, self._topic, self._logs, self._clock = consumer, options.topic, logs, clock
        self._claims: dict[int, Claim] = {}
        self._seen: tuple[int, frozenset[int]] | None = None
        self._followed_ms: int | None = None
        self._unconsumed: dict[int, int] = {}  # partition -> startpoint that it was given and has not consumed

    def begun(self, before: StreamOffset | None, extents: Mapping[int, Extent]) -> dict[int, Position]:
        """Where partitions begin anew, by startpoints that the stream has not taken yet: position and epoch.

        Raises what the store raises, StartpointFailed among it.
        """
        positions = before.positions if before is not None else {}
        size_bytes = self._store.size_bytes()
        for partition in extents.keys() - self._claims.keys():
            self._claims[partition] = self._store.claim(self._consumer, self._topic, partition)
        self._follow(positions)
        seen = (size_bytes, frozenset(extents))
        if self._seen == seen:
            return {}
        found = {}
        for partition, extent in sorted(extents.items()):
            position = positions.get(partition)
            applied = self._applied(partition, position, extent)
            if applied is not None:
                found[partition] = Position(
                    applied.offset, extent.log_id, applied.sequence, self._marks_epoch(partition, applied, position)
                )
                self._unconsumed[partition] = applied.sequence
        # What was found is taken only once Spark has logged it: until then it is found again.
        self._seen = None if found else seen
        return found

    def held(self, before: StreamOffset | None, step: Step) -> Step:
        """The step while a partition bootstraps: those that don't read nothing."""
        gate = BootstrapGate()
        positions = before.positions if before is not None else {}
        for partition, (start, _) in step.ranges.items():
            line = step.begun.get(partition, positions.get(partition))
            standing = self._standing(self._claims[partition], line.epoch if line is not None else 0)
            applied = standing.applied if standing is not None else None
            gate.start(partition, start, applied.until if applied is not None else None)
        ranges = {p: (start, end if gate.may_read(p) else start) for p, (start, end) in step.ranges.items()}
        return replace(step, ranges=ranges)

    @property
    def _store(self) -> StartpointStore:
        # Not before the first use: Spark sends a fresh reader to its executors, and a store can't travel.
        if self._opened is None:
            self._opened = self._place.open()
        return self._opened

    def close(self) -> None:
        """Let the store go; the stream has stopped."""
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.close()

    def _applied(self, partition: int, position: Position | None, extent: Extent) -> Applied | None:
        pending = self._store.read(self._consumer, self._topic, partition)
        if pending is None or pending.sequence <= (position.epoch if position is not None else 0):
            return None
        log = LogFacts(
            start=extent.start,
            end=max(extent.start, extent.end),
            first_at=partial(self._logs.first_at, partition),
            log_id=extent.log_id,
        )
        stands_at = position.offset if position is not None else None
        return self._store.apply(self._claims[partition], log, position=stands_at)

    def _marks_epoch(self, partition: int, applied: Applied, before: Position | None) -> int:
        """The newest startpoint of this line that resets marks: a replay filter behind the stream forgets at it."""
        standing = self._standing(self._claims[partition], applied.sequence)
        if standing is not None and standing.written.startpoint.reset_marks:
            return applied.sequence
        return before.marks_epoch if before is not None else 0

    def _follow(self, positions: Mapping[int, Position]) -> None:
        """Tell the store what Spark has committed: what was made of startpoints at once, the rest now and then."""
        now_ms = self._clock.monotonic_ms()
        is_due = self._followed_ms is None or now_ms - self._followed_ms >= FOLLOW_MS
        for partition, position in positions.items():
            claim = self._claims.get(partition)
            if claim is None or not (is_due or partition in self._unconsumed):
                continue
            standing = self._standing(claim, position.epoch)
            is_open = standing is not None and standing.state is State.APPLIED
            sequence = max(position.epoch, self._store.checkpoint(claim.reader).sequence)
            done = self._store.commit(claim, position.offset, sequence=sequence, log_id=position.log_id)
            if is_open and done:
                self._store.consume(claim, position.epoch)
            if is_open and not done:
                self._unconsumed[partition] = position.epoch
            elif position.epoch >= self._unconsumed.get(partition, 0):
                self._unconsumed.pop(partition, None)
        if is_due:
            self._followed_ms = now_ms

    def _standing(self, claim: Claim, epoch: int) -> Standing | None:
        if epoch == 0:
            return None
        standing = self._store.standing(epoch, claim.reader)
        if standing is None:
            why = f"{self._store.place} has no such startpoint; set option startpoints to the store of before"
            raise CheckpointUnusable(f"epoch={epoch}", why)
        return standing
