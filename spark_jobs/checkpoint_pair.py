"""One more pair of offsets and commit for a checkpoint, so noted that a killed call can be finished by the next.

    <checkpoint>-before-<N>/                  a whole copy of the checkpoint: put back, it undoes everything
    <checkpoint>-before-<N>/startpoints.json  what is to be written, complete: the files' texts, the marks, who moved

The copy appears under its name only when it is whole. From then on the pair is decided: marks of batch N first (without
offsets/N they are an unfinished batch's, which the filter drops), then offsets/N, then commits/N, each created, never
replaced. If the query planned a batch N of its own meanwhile, the notes are void.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from spark_jobs.checkpoint_files import CheckpointUnreadable, QueryRunning, back_up, create
from spark_jobs.checkpoint_marks import MarksMove, MarksPlace, move_marks

NOTES_NAME = "startpoints.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Move:
    """One partition: from where to where (None: it does not fit), by which startpoint (0: not written); and why."""

    partition: int
    before: int
    after: int | None
    sequence: int
    reset_marks: bool
    why: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPair:
    """Batches [first, first + count), each with the texts of its two files.

    `marks`: where they lie, if the query has any. `all_marks`: where the source tells no partitions apart, a reset is
    one of all marks.
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
        moves = [[getattr(move, name) for name in Move.__slots__] for move in self.moves]
        return json.dumps({"version": VERSION, **fields, "moves": moves}, indent=1)

    @classmethod
    def from_json(cls, path: Path, text: str) -> "BatchPair":
        """Raises CheckpointUnreadable."""
        try:
            fields = json.loads(text)
            if (version := fields.pop("version")) != VERSION:
                why = f"notes of version {version!r}, this release reads {VERSION}: use the one that wrote them"
                raise CheckpointUnreadable(path, why)
            return cls(**(fields | {"moves": tuple(Move(*move) for move in fields["moves"])}))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointUnreadable(path, f"no notes of an apply-checkpoint ({error})") from error


def newest_pair(checkpoint: Path) -> BatchPair | None:
    """The pair that was noted last, if it is in the checkpoint, in part or whole, or still can be; else None."""
    prefix = f"{checkpoint.name}-before-"
    found = [place for place in checkpoint.parent.glob(f"{prefix}*") if place.name[len(prefix) :].isdigit()]
    for place in sorted(found, key=lambda place: -int(place.name[len(prefix) :]))[:1]:
        notes = place / NOTES_NAME
        if notes.is_file():
            pair = BatchPair.from_json(notes, notes.read_text(encoding="utf-8"))
            return pair if _is_ours(checkpoint, pair) else None
    return None


def free_backup(checkpoint: Path, first: int) -> Path:
    """Where the copy goes. Raises CheckpointUnreadable if there is one of before that batch already."""
    backup = checkpoint.with_name(f"{checkpoint.name}-before-{first}")
    if backup.exists():
        why = "a copy of before this batch is there already, of a pair that is not in the checkpoint: move it away"
        raise CheckpointUnreadable(backup, why)
    return backup


def save_pair(checkpoint: Path, pair: BatchPair) -> Path:
    """Copy the checkpoint and note the pair; the copy's place."""
    backup = free_backup(checkpoint, pair.first)
    making = backup.with_name(f"{backup.name}.tmp")
    shutil.rmtree(making, ignore_errors=True)
    back_up(checkpoint, making)
    (making / NOTES_NAME).unlink(missing_ok=True)  # of a copy that was put back under the checkpoint's name
    create(making / NOTES_NAME, pair.to_json(), making)
    making.rename(backup)
    return backup


def append(checkpoint: Path, pair: BatchPair, marks: MarksPlace | None) -> None:
    """Write what the pair lacks. Raises QueryRunning, MarksMissing, MarksUnreachable."""
    if not (checkpoint / "offsets" / str(pair.first)).exists():
        move_marks(marks, pair.marks, _marks_move(pair))
    for batch in range(pair.first, pair.first + pair.count):
        for kind, text in (("offsets", pair.offsets), ("commits", pair.commit)):
            file = checkpoint / kind / str(batch)
            try:
                create(file, text, pair.backup_of(checkpoint))
            except FileExistsError:
                # A commit is the query's own where it was started on our offsets alone: they hold nothing.
                if kind == "offsets" and file.read_text(encoding="utf-8") != text:
                    raise QueryRunning(checkpoint, f"{kind}/{batch} was written") from None


def is_purged(checkpoint: Path, pair: BatchPair) -> bool:
    """Whether the query has gone on so far behind a pair of `newest_pair` that Spark has let its batches go."""
    planned = _planned(checkpoint)
    return bool(planned) and min(planned) > pair.first


def _marks_move(pair: BatchPair) -> MarksMove:
    resets = {move.partition for move in pair.moves if move.reset_marks}
    return MarksMove(
        query_id=pair.query_id,
        topic=pair.topic,
        first=pair.first,
        count=pair.count,
        stood_at={move.partition: move.before for move in pair.moves},
        resets=None if resets and pair.all_marks else resets,
    )


def _is_ours(checkpoint: Path, pair: BatchPair) -> bool:
    """False if the query planned this batch by itself; what Spark has purged since was ours."""
    file = checkpoint / "offsets" / str(pair.first)
    if file.exists():
        return file.read_text(encoding="utf-8") == pair.offsets
    planned = _planned(checkpoint)
    return is_purged(checkpoint, pair) or (bool(planned) and max(planned) == pair.first - 1)


def _planned(checkpoint: Path) -> list[int]:
    return [int(file.name) for file in (checkpoint / "offsets").glob("*") if file.name.isdigit()]
