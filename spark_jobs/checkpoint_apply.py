"""Startpoints for queries that do not follow any: a stopped query's checkpoint gets one more, empty batch.

    look      is it stateless, its last batch committed, its source one that can be moved?
    watch     does nothing in the checkpoint change for a while?
    resolve   by the store, once; the same answer again after a crash
    append    a copy of the checkpoint, then the batch (checkpoint_append.py), which ends at the new position
    record    the startpoint is consumed

Killed anywhere, the same call finishes it: a batch that is noted is completed, a complete one is only recorded. A
request of the call itself is written after the watch, so a refused call leaves nothing pending.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from pushrep.startpoints import Reader, Resolved, Startpoint, StartpointStore, State, resolve
from spark_jobs.checkpoint_append import (
    AppendedBatches,
    MarksPlace,
    Move,
    append,
    check_marks,
    free_backup,
    is_purged,
    marks_at,
    newest_appended,
    save_notes,
)
from spark_jobs.checkpoint_files import (
    MovableSource,
    QueryCheckpoint,
    QueryRunning,
    SourceNotMovable,
    movable_source,
    query_id_of,
    read_checkpoint,
    snapshot,
)
from spark_jobs.errors import CantUndo, SparkJobError
from spark_jobs.job_sink import Replaced, Sink
from spark_jobs.marks_stores import Brokers

__all__ = [
    "WATCH_S",
    "AppendedBatches",
    "Brokers",
    "CheckpointPlace",
    "MarksPlace",
    "Move",
    "NothingPending",
    "PlanChanged",
    "Request",
    "Sink",
    "SparkJobError",
    "apply",
    "did",
    "finish",
    "is_interrupted",
    "look_at_repair",
    "preview",
    "query_id_of",
    "source_at",
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


class PlanChanged(SparkJobError):
    """The moves are not those that were shown: somebody wrote a startpoint, or the query ran on. Look again."""

    def __init__(self, shown: Sequence[Move], now: Sequence[Move]) -> None:
        super().__init__(
            f"shown were moves of {_partitions(shown)}, now there would be moves of {_partitions(now)}: nothing was "
            "written, call again and look at the new preview"
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A startpoint that the call itself gives, for one partition or for all (None), with its reason and author."""

    startpoint: Startpoint
    partition: int | None
    reason: str
    author: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlace:
    """Which checkpoint, which source in it, whose startpoints, and where the query's logs and marks lie.

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
    """This module. The command line, which may not import spark_jobs, loads it by an entry point."""
    return sys.modules[__name__]


def is_interrupted(place: CheckpointPlace, store: StartpointStore) -> bool:
    """Whether an earlier `apply` was killed after it had written its notes: the next one finishes that."""
    return _unfinished(place, store) is not None


def did(store: StartpointStore, appended: AppendedBatches, request: Request) -> bool:
    """Whether these batches are of a call that asked for the same: then a repeated call has what it asked for."""
    move = appended.moves[0]
    reader_state = store.reader_state(move.sequence, Reader(appended.consumer, appended.topic, move.partition))
    if reader_state is None:
        return False
    written = reader_state.written
    return written.startpoint == request.startpoint and written.target.partition == request.partition


def source_at(place: CheckpointPlace) -> tuple[QueryCheckpoint, str, MovableSource]:
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
    place: CheckpointPlace, store: StartpointStore, *, request: Request | None, now_ms: int, replaces: bool = False
) -> list[Move]:
    """What `apply` would move now: by the request if there is one, and nothing else; without it, what is pending.

    replaces: the query's job replaces rows of its table where marks are reset; then CantReplace is raised, too, where
    it can't. Writes nothing. Raises as `source_at` does, NothingPending, MarksMissing and MarksUnreachable.
    """
    found, name, source = source_at(place)
    free_backup(place.checkpoint, found.batch + 1)
    if request is not None and request.partition not in {None, *source.positions}:
        known = ", ".join(map(str, sorted(source.positions)))
        raise SourceNotMovable(
            name, f"the query has read partitions {known} of {source.topic}, not {request.partition}"
        )
    moves = []
    for number in sorted(source.positions):
        if request is not None:
            if request.partition in (None, number):
                moves.append(_resolved(source, request.startpoint, 0, number, now_ms))
            continue
        reader_state = store.read(place.consumer, source.topic, number)
        if reader_state is None:
            continue
        wanted, sequence = reader_state.written.startpoint, reader_state.sequence
        if reader_state.applied is not None:
            move = _move(source, wanted, sequence, number, reader_state.applied.offset)
        elif reader_state.state is State.FAILED:
            move = _move(source, wanted, sequence, number, None, reader_state.failure)
        else:
            move = _resolved(source, wanted, sequence, number, reader_state.written.created_ms)
        moves.append(move)
    if not moves:
        raise NothingPending(place.consumer, source.topic)
    if source.is_v1 and any(move.replace_until is not None for move in moves):
        raise SourceNotMovable(name, "rows of files have no offsets, so none are replaced: leave out where rows stay")
    check_marks(place.marks, found.query_id, found.batch, topic=source.topic, moves=moves, replaces=replaces)
    return moves


def look_at_repair(place: CheckpointPlace, sink: Sink) -> Replaced:
    """What the newest repair of the query replaced in the sink, and what `sink.undo` would put back. Writes nothing.

    Raises as `source_at` does, MarksMissing, MarksUnreachable, and CantUndo: no partition was sent back, it is not read
    through yet, or the table can't give the rows of before back.
    """
    sink.refuse_without_versions()
    found, _, source = source_at(place)
    where = str(place.checkpoint)
    if place.marks is None:
        raise CantUndo(
            where, "the marks of the job tell which partitions a repair sent back: say where they lie, --marks"
        )
    marks, _ = marks_at(place.marks, found.query_id, found.batch)
    sent_back = [one for one in marks.sent_back if one.topic == source.topic]
    if not sent_back:
        raise CantUndo(where, f"no partition of {source.topic} was sent back with --reset-marks")
    number = max(one.number for one in sent_back)
    for one in sent_back:
        if one.number == number and (position := source.positions[one.partition]) < one.stood_at:
            why = f"partition {one.partition} is read again up to {one.stood_at} and stands at {position}"
            raise CantUndo(where, f"{why}: let the job read to there (--trigger available-now), and call again")
    return sink.replaced(found.query_id, number)


def finish(
    place: CheckpointPlace,
    store: StartpointStore,
    *,
    watch_s: float = WATCH_S,
    sleep: Callable[[float], None] = time.sleep,
) -> AppendedBatches | None:
    """Complete what a killed `apply` left half done; None if there is nothing.

    Raises QueryRunning, MarksMissing, MarksUnreachable.
    """
    noted = _unfinished(place, store)
    if noted is None:
        return None
    _watch(place.checkpoint, watch_s, sleep)
    if not is_purged(place.checkpoint, noted):
        append(place.checkpoint, noted, place.marks)
    _record(store, noted)
    return noted


def apply(  # noqa: PLR0913 - what to move, and how to watch
    place: CheckpointPlace,
    store: StartpointStore,
    *,
    request: Request | None = None,
    shown: Sequence[Move] | None = None,
    now_ms: int = 0,
    watch_s: float = WATCH_S,
    sleep: Callable[[float], None] = time.sleep,
) -> AppendedBatches:
    """Append the request, or what is pending, to the checkpoint of a stopped, stateless query, and record its use.

    `shown`: the answer of `preview` that the operator saw, at `now_ms`; no other partition moves. `watch_s`: longer
    than the query's trigger interval; so long nothing in the checkpoint may change. Raises as `preview` does,
    QueryRunning, PlanChanged, and StartpointFailed where one does not fit: then a request is cancelled again.
    """
    if request is None and (finished := finish(place, store, watch_s=watch_s, sleep=sleep)) is not None:
        return finished
    expected = preview(place, store, request=request, now_ms=now_ms) if shown is None else shown
    _watch(place.checkpoint, watch_s, sleep)
    planned = preview(place, store, request=request, now_ms=now_ms)
    if [_identity(move) for move in planned] != [_identity(move) for move in expected]:
        raise PlanChanged(expected, planned)
    sequences = {move.partition: move.sequence for move in planned}
    if request is None:
        appended = _resolved_batches(place, store, sequences)
    else:
        topic = source_at(place)[2].topic
        sequence = store.write(
            place.consumer, topic, request.partition, request.startpoint, request.reason, author=request.author
        )
        try:
            appended = _resolved_batches(place, store, dict.fromkeys(sequences, sequence))
        except Exception:
            store.cancel(sequence, "apply-checkpoint could not carry it out", author=request.author)
            raise
    marks = check_marks(place.marks, appended.query_id, appended.first - 1, topic=appended.topic, moves=appended.moves)
    appended = replace(appended, marks=marks)
    save_notes(place.checkpoint, appended)
    append(place.checkpoint, appended, place.marks)
    _record(store, appended)
    return appended


def _watch(checkpoint: Path, watch_s: float, sleep: Callable[[float], None]) -> None:
    """Raises QueryRunning if anything changes within `watch_s`."""
    before = snapshot(checkpoint)
    sleep(watch_s)
    if snapshot(checkpoint) != before:
        raise QueryRunning(checkpoint, "files changed")


def _identity(move: Move) -> tuple[int, int, int, bool]:
    """What must not differ from the preview. The offset of a time may: the log may have grown."""
    return (move.partition, move.before, move.sequence, move.after is None)


def _partitions(moves: Sequence[Move]) -> str:
    named = ", ".join(f"{move.partition} (at {move.before}, startpoint {move.sequence})" for move in moves)
    return f"partitions {named}" if named else "no partition"


def _resolved_batches(place: CheckpointPlace, store: StartpointStore, sequences: Mapping[int, int]) -> AppendedBatches:
    """Apply, in the store, the startpoint of this sequence for each of these partitions. The batches that move them."""
    found, name, source = source_at(place)
    moves = []
    for number, before in sorted(source.positions.items()):
        reader_state = store.read(place.consumer, source.topic, number)
        if reader_state is None or reader_state.sequence != sequences.get(number):
            continue
        startpoint = reader_state.written.startpoint
        facts = source.facts(number, startpoint)
        claim = store.claim(place.consumer, source.topic, number)
        applied = store.apply(claim, facts, position=before)
        if applied is not None:
            moves.append(_move(source, startpoint, applied.sequence, number, applied.offset, applied.by_policy))
    if not moves:
        raise NothingPending(place.consumer, source.topic)
    offset = source.moved({move.partition: move.after for move in moves if move.after is not None})
    return AppendedBatches(
        query_id=found.query_id,
        consumer=place.consumer,
        topic=source.topic,
        first=found.batch + 1,
        # At a restart Spark asks its older sources for the last committed range again: the second batch makes it empty.
        count=2 if source.is_v1 else 1,
        moves=tuple(moves),
        offsets=found.offsets.with_offset(name, offset).text(),
        commit=found.commit,
        marks=None,
        all_marks=source.is_v1,
    )


def _unfinished(place: CheckpointPlace, store: StartpointStore) -> AppendedBatches | None:
    """The batches that were noted last, unless the store says that their startpoints are consumed: that call ended."""
    noted = newest_appended(place.checkpoint)
    return noted if noted is not None and _waiting(store, noted) else None


def _waiting(store: StartpointStore, appended: AppendedBatches) -> list[Move]:
    found = []
    for move in appended.moves:
        reader_state = store.reader_state(move.sequence, Reader(appended.consumer, appended.topic, move.partition))
        if reader_state is not None and reader_state.state is State.APPLIED:
            found.append(move)
    return found


def _record(store: StartpointStore, appended: AppendedBatches) -> None:
    """Record that the startpoints of these batches are consumed, whatever was written since."""
    for move in _waiting(store, appended):
        claim = store.claim(appended.consumer, appended.topic, move.partition)
        store.consume(claim, move.sequence, committed=move.sequence)


def _resolved(source: MovableSource, startpoint: Startpoint, sequence: int, partition: int, created_ms: int) -> Move:
    facts = source.facts(partition, startpoint)
    answer = resolve(startpoint, facts, created_ms=created_ms, position=source.positions[partition])
    after, why = (answer.offset, answer.by_policy) if isinstance(answer, Resolved) else (None, answer.why)
    return _move(source, startpoint, sequence, partition, after, why)


def _move(  # noqa: PLR0913, PLR0917 - what a move is made of
    source: MovableSource,
    startpoint: Startpoint,
    sequence: int,
    partition: int,
    after: int | None,
    why: str | None = None,
) -> Move:
    """Raises SourceNotMovable for a startpoint that only a job that follows startpoints can honour."""
    if startpoint.append_only:
        words = (
            f"startpoint {sequence} is append-only; a moved query takes that from its job's --append-only: "
            "cancel it, and call again with --to and --reset-marks"
        )
        raise SourceNotMovable(f"of {source.topic}", words)
    before = source.positions[partition]
    return Move(partition, before, after, sequence, startpoint.reset_marks, why, startpoint.replace_until)
