"""Startpoints for queries that do not follow any: one more pair of offsets and commit in a checkpoint that rests.

    look     stateless? last batch committed? a source that can be moved?      watch   does nothing change for so long?
    resolve  by the store, once; the same answer again after a crash
    append   a copy of the checkpoint, then the pair (checkpoint_pair.py); the query goes on behind it at that offset
    record   the startpoint is consumed

Killed anywhere, the same call finishes it: a pair that is noted is completed, one that is whole is only recorded.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from pushrep.startpoints import Reader, Resolved, Startpoint, StartpointStore, State, resolve
from spark_jobs.checkpoint_files import Checkpoint, QueryRunning, query_id_of, read_checkpoint, snapshot
from spark_jobs.checkpoint_marks import MarksPlace, check_marks
from spark_jobs.checkpoint_pair import Move, Pair, append, free_backup, is_purged, newest_pair, note
from spark_jobs.checkpoint_sources import MovableSource, SourceNotMovable, movable_source
from spark_jobs.errors import SparkJobError
from spark_jobs.marks_stores import Brokers

__all__ = [
    "WATCH_S", "Brokers", "MarksPlace", "Move", "NothingPending", "Pair", "Place", "SparkJobError", "apply",
    "is_interrupted", "preview", "query_id_of", "source_at",
]  # fmt: skip

WATCH_S = 30.0
"""How long a checkpoint is watched, if nobody says otherwise."""


class NothingPending(SparkJobError):
    """No startpoint waits for this consumer at this source: write one, or say where to with --to."""

    def __init__(self, consumer: str, topic: str) -> None:
        super().__init__(
            f"no startpoint waits for {consumer} at {topic}: say where to with --to, or write one with pushrep "
            "startpoint set and name its store and consumer"
        )
        self.consumer, self.topic = consumer, topic


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which checkpoint, which source in it, whose startpoints, and what lies beside.

    `source`: its name in the checkpoint, where there are several; `topic`, where it reads several; `logs`: the
    directory of a source `pushrep`; `marks`: those of the query's ReplayFilteredBatches, if it has any.
    """

    checkpoint: Path
    consumer: str
    source: str | None = None
    topic: str | None = None
    logs: Path | None = None
    marks: MarksPlace | None = None


def tool() -> ModuleType:
    """This module, for the command line, which stands below it and finds it by its entry point."""
    return sys.modules[__name__]


def is_interrupted(place: Place, store: StartpointStore) -> bool:
    """Whether an `apply` before this one was killed between its notes and the end: the next one finishes that."""
    return _unfinished(place, store) is not None


def source_at(place: Place) -> tuple[Checkpoint, str, MovableSource]:
    """The checkpoint, the name of the one source that is meant, and that.

    Raises CheckpointUnreadable, QueryStateful, LastBatchUncommitted, SourceNotMovable.
    """
    found = read_checkpoint(place.checkpoint)
    offsets = {name: offset for name, offset in found.offsets.sources if offset is not None}
    chosen = [name for name in offsets if place.source in (None, name)]
    if len(chosen) != 1:
        why = f"the query has the sources {', '.join(offsets) or 'none'}: say which one, --source"
        raise SourceNotMovable(place.source or "?", why)
    (name,) = chosen
    return found, name, movable_source(place.checkpoint, name, offsets[name], topic=place.topic, logs=place.logs)


def preview(
    place: Place, store: StartpointStore, *, wish: Startpoint | None, partition: int | None, now_ms: int
) -> list[Move]:
    """What `apply` would move now, if `wish` were written for `partition` (None: each); without it, what is pending.

    Writes nothing. Raises as `source_at` does, MarksMissing and MarksUnreachable.
    """
    found, _, source = source_at(place)
    free_backup(place.checkpoint, found.batch + 1)
    moves = []
    for number, before in sorted(source.positions.items()):
        if wish is not None:
            if partition in (None, number):
                moves.append(_resolved(source, wish, 0, Move(number, before, None, 0, wish.reset_marks), now_ms))
            continue
        standing = store.read(place.consumer, source.topic, number)
        if standing is None:
            continue
        wanted = standing.written.startpoint
        move = Move(number, before, None, standing.sequence, wanted.reset_marks, standing.failure)
        if standing.applied is not None:
            move = Move(number, before, standing.applied.offset, standing.sequence, wanted.reset_marks)
        elif standing.state is not State.FAILED:
            move = _resolved(source, wanted, standing.sequence, move, standing.written.created_ms)
        moves.append(move)
    check_marks(place.marks, found.query_id, found.batch, resets=any(move.reset_marks for move in moves))
    return moves


def apply(
    place: Place, store: StartpointStore, *, watch_s: float = WATCH_S, sleep: Callable[[float], None] = time.sleep
) -> Pair:
    """Append what is pending to the checkpoint of a stopped, stateless query, and say in the store that it is used.

    `watch_s`: longer than the query's trigger interval; so long nothing in the checkpoint may change. Raises as
    `preview` does, QueryRunning, NothingPending, and StartpointFailed where one does not fit.
    """
    noted = _unfinished(place, store)
    if noted is None:
        source_at(place)  # what is refused is refused before anybody waits
    before = snapshot(place.checkpoint)
    sleep(watch_s)
    if snapshot(place.checkpoint) != before:
        raise QueryRunning(place.checkpoint, "files changed")
    if noted is not None:
        if not is_purged(place.checkpoint, noted):
            append(place.checkpoint, noted, place.marks)
        _record(store, noted)
        return noted
    pair = _resolved_pair(place, store)
    resets = any(move.reset_marks for move in pair.moves)
    pair = replace(pair, marks=check_marks(place.marks, pair.query_id, pair.first - 1, resets=resets))
    note(place.checkpoint, pair)
    append(place.checkpoint, pair, place.marks)
    _record(store, pair)
    return pair


def _resolved_pair(place: Place, store: StartpointStore) -> Pair:
    found, name, source = source_at(place)
    moves = []
    for number, before in sorted(source.positions.items()):
        standing = store.read(place.consumer, source.topic, number)
        if standing is None:
            continue
        wish = standing.written.startpoint
        facts = source.facts(number, wish)
        claim = store.claim(place.consumer, source.topic, number)
        applied = store.apply(claim, facts, position=before)
        if applied is not None:
            moves.append(Move(number, before, applied.offset, applied.sequence, wish.reset_marks, applied.by_policy))
    if not moves:
        raise NothingPending(place.consumer, source.topic)
    offset = source.moved({move.partition: move.after for move in moves if move.after is not None})
    return Pair(
        query_id=found.query_id,
        consumer=place.consumer,
        topic=source.topic,
        first=found.batch + 1,
        # Spark asks its older sources at a restart for the last committed range again: the second pair empties it.
        count=2 if source.is_v1 else 1,
        moves=tuple(moves),
        offsets=found.offsets.with_offset(name, offset).text(),
        commit=found.commit,
        marks=None,
        all_marks=source.is_v1,
    )


def _unfinished(place: Place, store: StartpointStore) -> Pair | None:
    """The pair that was noted last, while the store does not say that it is used (else the copy was put back)."""
    noted = newest_pair(place.checkpoint)
    return noted if noted is not None and _waiting(store, noted) else None


def _waiting(store: StartpointStore, pair: Pair) -> list[Move]:
    found = []
    for move in pair.moves:
        standing = store.standing(move.sequence, Reader(pair.consumer, pair.topic, move.partition))
        if standing is not None and standing.state is State.APPLIED:
            found.append(move)
    return found


def _record(store: StartpointStore, pair: Pair) -> None:
    """Say that the pair's are used: those, whatever was written since."""
    for move in _waiting(store, pair):
        claim = store.claim(pair.consumer, pair.topic, move.partition)
        store.consume(claim, move.sequence, committed=move.sequence)


def _resolved(source: MovableSource, wish: Startpoint, sequence: int, move: Move, created_ms: int) -> Move:
    facts = source.facts(move.partition, wish)
    answer = resolve(wish, facts, created_ms=created_ms, position=move.before)
    after, why = (answer.offset, answer.by_policy) if isinstance(answer, Resolved) else (None, answer.why)
    return Move(move.partition, move.before, after, sequence, wish.reset_marks, why)
