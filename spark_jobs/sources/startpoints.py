"""Startpoints of a running stream: option `startingStartpoint=<consumer>`, applied between two batches.

    each trigger    the store's size is read; only if it changed, pending startpoints are read
    pending         resolved once (the store keeps the answer); the next batch begins there, in a new epoch: the
                    startpoint's number. Epoch and start stand in the offset that Spark logs, so a batch that is run
                    again is the same batch
    committed       Spark's checkpoint has committed the batch before the one that is planned. Once it has read past the
                    start, the startpoint is consumed

The store's checkpoint of the consumer is only for display: it follows Spark's about once a minute, and at the end of a
run that ends by itself. Spark's decides.
A failed startpoint stops the query with its reason. While a partition bootstraps, the others are not read.

If the store does not answer when a stream starts, the stream fails. Later it continues without new startpoints, says so
in its log and its progress, and applies them when the store answers again; a partition that is new, or comes back,
waits for that. Only `begun` asks the store, once for each batch.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from filtering.stream_metadata import OFFSET_MAX
from pushrep.env import SYSTEM_CLOCK, Clock
from pushrep.startpoints import (
    STORE_NAME,
    Applied,
    BootstrapGate,
    Claim,
    EventLog,
    LogFacts,
    Reader,
    ReaderState,
    StartpointStore,
    State,
    StorePlace,
    StoreUnavailable,
)
from pushrep.startpoints.store import StorePoll
from spark_jobs.batch_marks import LogRange
from spark_jobs.replacing import AskRowsWanted, RowsWanted
from spark_jobs.sources.logs import TopicLogs
from spark_jobs.sources.options import BadOption, SourceOptions
from spark_jobs.sources.planning import Extent, StreamOffset, StreamOffsetUnusable, StreamPosition, StreamStep

FOLLOW_MS = 60_000
"""How far the store's checkpoint may lag behind Spark's while no startpoint waits to be consumed."""

_Answer = TypeVar("_Answer")


def store_place(options: SourceOptions) -> StorePlace:
    """Where the options' startpoints lie."""
    return options.startpoints or StorePlace.parse(Path(options.path) / STORE_NAME)


def wanted_of(options: SourceOptions) -> AskRowsWanted:
    """What a run of the options' consumer is to replace, as its store says.

    Raises what a store raises that does not answer: which rows are to stay can't be guessed.
    """
    consumer = options.startpoint_consumer
    assert consumer is not None, "only a follower of startpoints is sent back"

    def ask(ranges: Mapping[LogRange, int]) -> dict[LogRange, RowsWanted]:
        with store_place(options).open() as store:
            event_log = store.event_log()
        readers = {one: Reader(consumer, one.topic, one.partition) for one in ranges}
        stood_at = _stood_at(event_log, set(readers.values()))
        return {one: _wanted(event_log, stood_at[readers[one]], reset, one) for one, reset in ranges.items()}

    return ask


def _stood_at(event_log: EventLog, readers: AbstractSet[Reader]) -> dict[Reader, dict[int, int]]:
    """Where each of these readers stood when it applied a startpoint, by its number, where that is known."""
    found: dict[Reader, dict[int, int]] = {reader: {} for reader in readers}
    for written in event_log.all_written():
        for reader, state in event_log.readers(written.sequence).items():
            if reader in found and state.applied is not None and state.applied.position is not None:
                found[reader][written.sequence] = state.applied.position
    return found


def _wanted(event_log: EventLog, stood_at: Mapping[int, int], reset: int, one: LogRange) -> RowsWanted:
    """For rows that are read since startpoint `one.startpoint_epoch`, with marks that startpoint `reset` has reset."""
    written = event_log.written(reset)
    until = None if written is None else written.startpoint.replace_until
    return RowsWanted(
        start=max((offset for n, offset in stood_at.items() if reset < n <= one.startpoint_epoch), default=0),
        end=OFFSET_MAX if until is None else until,
        stood_at=stood_at.get(reset, OFFSET_MAX),
    )


class StreamStartpoints:
    """The startpoints of one consumer, for one stream; it claims each partition that it meets."""

    def __init__(self, options: SourceOptions, logs: TopicLogs, consumer: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._place = store_place(options)
        self._place_words = options.given.get("startpoints", self._place.name)
        self._opened: StartpointStore | None = None
        self._consumer, self._topic, self._logs, self._clock = consumer, options.topic, logs, clock
        self._claims: dict[int, Claim] = {}
        self._poll: StorePoll | None = None  # None: the stream has not begun
        self._bootstraps: dict[tuple[int, int], int | None] = {}  # by partition and epoch, the end of its bootstrap
        self._seen: tuple[int, frozenset[int]] | None = None
        self._followed_ms: int | None = None
        self._unconsumed: dict[int, int] = {}  # partition -> startpoint that it was given and has not consumed

    def begun(self, before: StreamOffset | None, extents: Mapping[int, Extent]) -> dict[int, StreamPosition]:
        """Position and epoch of the partitions that a new startpoint moves.

        Raises BadOption at a start where the store does not answer, and what else the store raises, StartpointFailed
        among it.
        """
        found: dict[int, StreamPosition] = {}
        try:
            self._find_startpoints(before, extents, found)
        except StoreUnavailable as error:
            if self._poll is not None:
                return found  # startpoints that were applied are stored: they are found again
            why = f"it has to answer when a stream starts: {error}"
            raise BadOption("startpoints", self._place_words, why) from error
        self._poll = self._poll or StorePoll(self._store, self._clock)
        return found

    def readable(self, extents: Mapping[int, Extent]) -> dict[int, Extent]:
        """Without partitions whose start is not known yet, since the store has not answered."""
        return {partition: extent for partition, extent in extents.items() if partition in self._claims}

    def run_ends(self, before: StreamOffset) -> None:
        """Write to the store where the run ends, if it answers: until the next run this is what people see."""
        self._followed_ms = None
        with suppress(StoreUnavailable):
            self._follow(before.positions)

    def away(self) -> str | None:
        """For people: that the store does not answer, and why; None while it does."""
        return None if self._poll is None else self._poll.words()

    def _find_startpoints(
        self, before: StreamOffset | None, extents: Mapping[int, Extent], found: dict[int, StreamPosition]
    ) -> None:
        positions = before.positions if before is not None else {}
        size_bytes = self._store.size_bytes() if self._poll is None else self._poll.poll_size()
        if self.away() is not None:
            self._seen = None  # so that all is asked again
        for partition in sorted(extents.keys() - self._claims.keys()):
            self._claims[partition] = self._asked(partial(self._met, partition, positions.get(partition)))
        self._follow(positions)
        seen = (size_bytes, frozenset(extents))
        if self._seen == seen:
            return
        for partition, extent in sorted(extents.items()):
            position = positions.get(partition)
            begins = self._asked(partial(self._begins, partition, position, extent))
            if begins is not None:
                found[partition] = begins
        # A start counts only once Spark has logged it: until then it is looked up again.
        self._seen = None if found else seen

    def held(self, before: StreamOffset | None, step: StreamStep) -> StreamStep:
        """The step while partitions bootstrap: all others read nothing. Does not ask the store."""
        bootstrap = BootstrapGate()
        positions = before.positions if before is not None else {}
        for partition, (start, _) in step.ranges.items():
            position = step.begun.get(partition, positions.get(partition))
            epoch = position.epoch if position is not None else 0
            bootstrap.start(partition, start, self._bootstraps[partition, epoch])
        ranges = {p: (start, end if bootstrap.may_read(p) else start) for p, (start, end) in step.ranges.items()}
        return replace(step, ranges=ranges)

    def _met(self, partition: int, position: StreamPosition | None) -> Claim:
        """Claim a partition, and remember up to where it bootstraps, if it does. That never changes within an epoch."""
        claim = self._store.claim(self._consumer, self._topic, partition)
        epoch = position.epoch if position is not None else 0
        reader_state = self._reader_state(claim, epoch)
        applied = reader_state.applied if reader_state is not None else None
        self._bootstraps[partition, epoch] = applied.until if applied is not None else None
        return claim

    @property
    def _store(self) -> StartpointStore:
        # Opened at first use: Spark pickles a new reader for its executors, and a store can't be pickled.
        if self._opened is None:
            self._opened = self._place.open()
        return self._opened

    def close(self) -> None:
        """Close the store; the stream has stopped."""
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.close()

    def _asked(self, question: Callable[[], _Answer]) -> _Answer:
        """The store's answer; at a start it is waited for. Raises StoreUnavailable in a stream that has begun."""
        return question() if self._poll is None else self._poll.ask(question)

    def _begins(self, partition: int, position: StreamPosition | None, extent: Extent) -> StreamPosition | None:
        """Where a new startpoint moves the partition; None if there is none."""
        applied = self._applied(partition, position, extent)
        if applied is None:
            return None
        marks_epoch = self._marks_epoch(partition, applied, position)
        self._unconsumed[partition] = applied.sequence
        self._bootstraps[partition, applied.sequence] = applied.until
        return StreamPosition(applied.offset, extent.log_id, applied.sequence, marks_epoch)

    def _applied(self, partition: int, position: StreamPosition | None, extent: Extent) -> Applied | None:
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

    def _marks_epoch(self, partition: int, applied: Applied, before: StreamPosition | None) -> int:
        """The newest startpoint up to this one that resets marks, as a replay filter behind the stream then does."""
        reader_state = self._reader_state(self._claims[partition], applied.sequence)
        if reader_state is not None and reader_state.written.startpoint.reset_marks:
            return applied.sequence
        return before.marks_epoch if before is not None else 0

    def _follow(self, positions: Mapping[int, StreamPosition]) -> None:
        """Write to the store what Spark has committed: at once to consume a startpoint, else every FOLLOW_MS."""
        now_ms = self._clock.monotonic_ms()
        is_due = self._followed_ms is None or now_ms - self._followed_ms >= FOLLOW_MS
        for partition, position in positions.items():
            if partition in self._claims and (is_due or partition in self._unconsumed):
                self._asked(partial(self._report_applied, partition, position))
        if is_due:
            self._followed_ms = now_ms

    def _report_applied(self, partition: int, position: StreamPosition) -> None:
        claim = self._claims[partition]
        reader_state = self._reader_state(claim, position.epoch)
        is_open = reader_state is not None and reader_state.state is State.APPLIED
        sequence = max(position.epoch, self._store.checkpoint(claim.reader).sequence)
        done = self._store.commit(claim, position.offset, sequence=sequence, log_id=position.log_id)
        if is_open and done:
            self._store.consume(claim, position.epoch)
        if is_open and not done:
            self._unconsumed[partition] = position.epoch
        elif position.epoch >= self._unconsumed.get(partition, 0):
            self._unconsumed.pop(partition, None)

    def _reader_state(self, claim: Claim, epoch: int) -> ReaderState | None:
        if epoch == 0:
            return None
        reader_state = self._store.reader_state(epoch, claim.reader)
        if reader_state is None:
            why = f"{self._store.place} has no such startpoint; set option startpoints to the store of before"
            raise StreamOffsetUnusable(f"epoch={epoch}", why)
        return reader_state
