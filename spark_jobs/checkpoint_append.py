"""Empty batches that are appended to a stopped query's checkpoint: offsets, commit and marks of each.

    <checkpoint>-before-<N>/                  a whole copy of the checkpoint: put back, it undoes everything
    <checkpoint>-before-<N>/startpoints.json  what is to be written, complete: the files' texts, the marks, who moved

The copy gets its name when it is whole. From then on the batch is decided, and a killed call is finished by the next
one: marks of batch N first (without offsets/N they are an unfinished batch's, which the filter drops), then offsets/N,
then commits/N, each created, never replaced. If the query planned a batch N of its own meanwhile, the notes are void.

The marks of a query's filter lie outside its checkpoint, in any store that keeps them by batch (LocalMarks, FileMarks,
SqlTable, TopicMarks). Before anything is written, they must be those of the checkpoint's last batch. The appended
batches hold no record: their marks are those of the batch before, and name the partitions that a reset sent back.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from filtering.stream_metadata import OFFSET_MAX
from spark_jobs.batch_marks import BatchMarks, SentBack
from spark_jobs.checkpoint_files import CheckpointUnreadable, QueryRunning, back_up, create
from spark_jobs.errors import CantReplace, MarksMissing, SparkJobError
from spark_jobs.marks import KEEP_ALL, MarksStore
from spark_jobs.marks_stores import Brokers, NoSuchMarks, opened


class MarksUnreachable(SparkJobError):
    """The marks of the query's filter can't be moved along, and a filter would drop or fail: see the message."""

    def __init__(self, location: str | None, why: str) -> None:
        super().__init__(why if location is None else f"marks at {location}: {why}")
        self.location, self.why = location, why


@runtime_checkable
class WithRows(Protocol):
    """A store that commits marks with rows, and needs to know that a batch has none."""

    def stage_nothing(self, query_id: str, batch_id: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Move:
    """One partition goes from `before` to `after` (None: it can't), by startpoint `sequence` (0: not written yet).

    `replace_until`, with `reset_marks`: the rows of records from there on stay as they are.
    """

    partition: int
    before: int
    after: int | None
    sequence: int
    reset_marks: bool
    why: str | None = None
    replace_until: int | None = None


@dataclass(frozen=True, slots=True)
class MarksPlace:
    """Where marks lie: a directory or its URL, a database's URL with its table, or kafka:TOPIC with its brokers."""

    place: str = field(repr=False)  # a database's URL may have a password
    table: str | None = None
    brokers: Brokers | None = None

    def opened(self) -> AbstractContextManager[MarksStore]:
        """The store there, closed at the end; none is made. Raises NoSuchMarks, and what the store itself raises."""
        return opened(self.place, self.table, self.brokers)


def check_marks(  # noqa: PLR0913 - of which batch, and what is to happen to it
    place: MarksPlace | None,
    query_id: str,
    batch: int,
    *,
    topic: str,
    moves: Iterable[Move],
    replaces: bool = False,
) -> str | None:
    """Where the marks of the checkpoint's last batch lie, as people may see it; None if there are none.

    replaces: rows of a table will be replaced where marks are reset. Raises MarksMissing if they are of another one, or
    MarksUnreachable; CantReplace if rows that an earlier move was to replace would stay, or with a window. Makes no
    store.
    """
    resets = {move.partition: move for move in moves if move.reset_marks}
    if place is None and not resets:
        return None
    before, location = marks_at(place, query_id, batch)
    if replaces and any(marks.window for key, marks in before.marks.items() if key.topic == topic):
        for reset in resets.values():
            why = "with a window the earlier marks can't be computed"
            raise CantReplace(topic, reset.partition, reset.after or 0, why)
    for old in before.sent_back:
        move = resets.get(old.partition) if old.topic == topic else None
        if move is not None and move.replace_until is not None and move.before < old.stood_at:
            why = f"an earlier move lets it read again up to {old.stood_at}, and it stands at {move.before}"
            raise CantReplace(topic, old.partition, move.after or 0, f"{why}: wait, or leave the end out")
    return location


def marks_at(place: MarksPlace | None, query_id: str, batch: int) -> tuple[BatchMarks, str]:
    """The marks of a batch, and where they lie. Raises MarksMissing, MarksUnreachable. Makes no store."""
    if place is None:
        raise MarksUnreachable(None, "the startpoint resets marks, and none are named: say where they lie, --marks")
    try:
        with place.opened() as store:
            return _marks_of(store, query_id, batch), store.location
    except NoSuchMarks as error:
        raise MarksUnreachable(error.location, error.why) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class MarksMove:
    """Batches [first, first + count) of a query that hold nothing.

    stood_at: by partition, the position from which it moves. resets: by partition whose marks are reset, the offset
    from which on rows of the table stay; None: all marks are reset.
    """

    query_id: str
    topic: str
    first: int
    count: int
    stood_at: Mapping[int, int]
    resets: Mapping[int, int] | None


def move_marks(place: MarksPlace | None, location: str | None, move: MarksMove) -> None:
    """Give the appended batches their marks. Raises MarksMissing, and MarksUnreachable if they lie elsewhere."""
    if location is None:
        return
    if place is None:
        raise MarksUnreachable(location, "an interrupted call was moving them: name them again, --marks")
    with place.opened() as store:
        if store.location != location:
            why = f"an interrupted call was moving those at {location}: name these again, --marks"
            raise MarksUnreachable(store.location, why)
        left = _moved(_marks_of(store, move.query_id, move.first - 1), move)
        store.drop_from(move.query_id, move.first)
        for batch in range(move.first, move.first + move.count):
            if isinstance(store, WithRows):
                store.stage_nothing(move.query_id, batch)
            store.write(replace(left, batch_id=batch), keep=KEEP_ALL)


def _moved(before: BatchMarks, move: MarksMove) -> BatchMarks:
    """The marks of a batch that holds no record.

    A partition that was sent back keeps its marks: a filter that replaces rows computes from them the marks that the
    partition had there (replacing.py); any other filter resets them.
    """
    if move.resets is None:
        return BatchMarks(before.query_id, before.batch_id)
    known = [one.number for one in before.sent_back] + [key.startpoint_epoch for key in before.marks]
    number = max(known, default=0) + 1
    sent_back = {one[:2]: one for one in before.sent_back}
    for partition, stood_at in move.stood_at.items():
        where = move.topic, partition
        if partition in move.resets:
            sent_back[where] = SentBack(*where, number, stood_at, replace_until=move.resets[partition])
        elif where in sent_back:
            old = sent_back[where]
            sent_back[where] = old._replace(replace_from=max(old.replace_from, stood_at))
    after = tuple(sorted(sent_back.values()))
    return BatchMarks(before.query_id, before.batch_id, marks=before.marks, sent_back=after)


def _marks_of(marks: MarksStore, query_id: str, batch: int) -> BatchMarks:
    found = marks.read(query_id, batch)
    if found is None:
        raise MarksMissing(marks.location, query_id, batch, marks.batches(query_id))
    return found


NOTES_NAME = "startpoints.json"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendedBatches:
    """Batches [first, first + count), and the texts of the files offsets/N and commits/N of each.

    `marks`: where the query's marks lie, if it has any. `all_marks`: a reset is of all marks, since the source does not
    distinguish partitions.
    """

    query_id: str
    consumer: str
    topic: str
    first: int
    count: int
    moves: tuple[Move, ...]
    offsets: str
    commit: str
    marks: str | None
    all_marks: bool

    def backup_of(self, checkpoint: Path) -> Path:
        """Where the copy of the checkpoint as it was before lies."""
        return checkpoint.with_name(f"{checkpoint.name}-before-{self.first}")

    def to_json(self) -> str:
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "moves"}
        names = [name for name in Move.__slots__ if name != "replace_until"]
        more = [[] if move.replace_until is None else [move.replace_until] for move in self.moves]
        moves = [[getattr(move, name) for name in names] + end for move, end in zip(self.moves, more, strict=True)]
        return json.dumps({"version": VERSION, **fields, "moves": moves}, indent=1)

    @classmethod
    def from_json(cls, path: Path, text: str) -> "AppendedBatches":
        """Raises CheckpointUnreadable."""
        try:
            fields = json.loads(text)
            if (version := fields.pop("version")) != VERSION:
                why = f"notes of version {version!r}, this release reads {VERSION}: use the one that wrote them"
                raise CheckpointUnreadable(path, why)
            return cls(**(fields | {"moves": tuple(Move(*move) for move in fields["moves"])}))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointUnreadable(path, f"no notes of an apply-checkpoint ({error})") from error


def newest_appended(checkpoint: Path) -> AppendedBatches | None:
    """What was noted last, if it is in the checkpoint, in part or whole, or still can get there; else None."""
    prefix = f"{checkpoint.name}-before-"
    found = [place for place in checkpoint.parent.glob(f"{prefix}*") if place.name[len(prefix) :].isdigit()]
    for place in sorted(found, key=lambda place: -int(place.name[len(prefix) :]))[:1]:
        notes = place / NOTES_NAME
        if notes.is_file():
            appended = AppendedBatches.from_json(notes, notes.read_text(encoding="utf-8"))
            return appended if _is_ours(checkpoint, appended) else None
    return None


def free_backup(checkpoint: Path, first: int) -> Path:
    """The place of the copy. Raises CheckpointUnreadable if a copy from before that batch is there already."""
    backup = checkpoint.with_name(f"{checkpoint.name}-before-{first}")
    if backup.exists():
        why = "a copy of before this batch is there already, and the checkpoint has no such batch: move it away"
        raise CheckpointUnreadable(backup, why)
    return backup


def save_notes(checkpoint: Path, appended: AppendedBatches) -> Path:
    """Copy the checkpoint, and note in the copy what is to be appended; where the copy lies."""
    backup = free_backup(checkpoint, appended.first)
    making = backup.with_name(f"{backup.name}.tmp")
    shutil.rmtree(making, ignore_errors=True)
    back_up(checkpoint, making)
    (making / NOTES_NAME).unlink(missing_ok=True)  # of a copy that was put back under the checkpoint's name
    create(making / NOTES_NAME, appended.to_json(), making)
    making.rename(backup)
    return backup


def append(checkpoint: Path, appended: AppendedBatches, marks: MarksPlace | None) -> None:
    """Write what is missing of these batches. Raises QueryRunning, MarksMissing, MarksUnreachable."""
    if not (checkpoint / "offsets" / str(appended.first)).exists():
        move_marks(marks, appended.marks, _marks_move(appended))
    for batch in range(appended.first, appended.first + appended.count):
        for kind, text in (("offsets", appended.offsets), ("commits", appended.commit)):
            file = checkpoint / kind / str(batch)
            try:
                create(file, text, appended.backup_of(checkpoint))
            except FileExistsError:
                # The query may have started on our offsets and written the commit itself: the batch is empty.
                if kind == "offsets" and file.read_text(encoding="utf-8") != text:
                    raise QueryRunning(checkpoint, f"{kind}/{batch} was written") from None


def is_purged(checkpoint: Path, appended: AppendedBatches) -> bool:
    """Whether the query has run on so far that Spark has removed what `newest_appended` found."""
    planned = _planned(checkpoint)
    return bool(planned) and min(planned) > appended.first


def _marks_move(appended: AppendedBatches) -> MarksMove:
    resets = {
        move.partition: OFFSET_MAX if move.replace_until is None else move.replace_until
        for move in appended.moves
        if move.reset_marks
    }
    return MarksMove(
        query_id=appended.query_id,
        topic=appended.topic,
        first=appended.first,
        count=appended.count,
        stood_at={move.partition: move.before for move in appended.moves},
        resets=None if resets and appended.all_marks else resets,
    )


def _is_ours(checkpoint: Path, appended: AppendedBatches) -> bool:
    """Whether batch `first` is the one noted, or not there yet; False if the query planned one of its own.

    If Spark has purged the file since, the batch was ours.
    """
    file = checkpoint / "offsets" / str(appended.first)
    if file.exists():
        return file.read_text(encoding="utf-8") == appended.offsets
    planned = _planned(checkpoint)
    return is_purged(checkpoint, appended) or (bool(planned) and max(planned) == appended.first - 1)


def _planned(checkpoint: Path) -> list[int]:
    return [int(file.name) for file in (checkpoint / "offsets").glob("*") if file.name.isdigit()]
