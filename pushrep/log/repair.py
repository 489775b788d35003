"""Repairing a log while nobody writes it: a range from another copy, a cut, new indexes, a cut tail put back.

    what is damaged                 what repairs it
    batches, boundaries, end        the same range of a copy that joins on both sides (repair.py), or a cut
    leader-epoch-checkpoint         the epochs in the batches' headers
    partition.metadata              the copy's, once its batches have joined ours
    .index .timeindex               the batches

Replaced bytes are kept as `<segment>.log.<position>.corrupt`, small files as `<name>.corrupt`, cut bytes as `.cut`;
indexes are not kept, because they can be rebuilt. Order of a splice: keep, write the new file beside the old one, sync
it, rename it over the old one, sync the directory. A crash in between leaves the old log or a better one, and the same
command goes on. Afterwards the log is not in the clean marker, so the next open scans it.

`SplicePlanner` plans what a damaged log takes from another copy of it. It reads both and writes nothing.

    ours   | a | b |  damaged   | e | f |        hole: from the first bad byte to the next batch that both have
    copy   | a | b | c | d | e | f | g |
             near ^            ^ far             the plan for the segment: ours 0..2, copy c..d, ours e..end

A range is taken only if it joins: the copy has the last batch before the hole and the first one after it, with the same
headers, CRC included. At the log's start or end one side is enough; if nothing of the log is left, both must have the
same id. After damage a batch of this log is kept only if the copy has the same batch at that place; if the damage moved
bytes, the copy's batches are taken up to the segment's end. A segment whose file is missing is taken from the copy with
the copy's file names.

`restore` appends batches that a cut or a quarantine kept aside, if they begin where the log ends.

    1000.log | ..... |                          the log ends at offset 1042
    1000.log.4096.cut    | 1042-1049 | 1050-1053 | torn ..      fits: two batches are appended, the rest stays aside
    2000.log.corrupt     | 2000 ...                             fits only once the log ends at 2000

The batches are appended with their own offsets and epochs, and synced; the file stays as it is. Batches that are not
whole or do not follow are never restored: a log that went on after the cut has assigned those offsets again.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Clock, File, Filesystem, LockHeld
from pushrep.errors import BadArgument
from pushrep.log.config import LogConfig
from pushrep.log.cut_files import TailBackup, keep_range, move_aside, quarantine_tail
from pushrep.log.directory import DirectoryView, LogDirectory
from pushrep.log.directory_files import (
    CORRUPT_SUFFIX,
    LEADER_EPOCHS_NAME,
    LOCK_NAME,
    PARTITION_METADATA_NAME,
    REPAIR_SUFFIX,
    SEAL_SUFFIX,
    free_name,
    list_segments,
    read_leader_epochs,
    read_partition_metadata,
    refuse_compacted,
    segment_path,
    write_leader_epochs,
    write_partition_metadata,
)
from pushrep.log.errors import CorruptPartitionMetadata, LogLocked, RepairRefused
from pushrep.log.inspection import LogState, checked_log, read_state
from pushrep.log.published import LogEnds
from pushrep.log.recovery import Cut
from pushrep.log.seals import remove_seals
from pushrep.log.segment import Segment
from pushrep.log.segment_log import SegmentLog
from pushrep.log.segment_repair import epochs_of_batches, rebuild_indexes
from pushrep.log.verify import BATCH_KINDS, Expected, FindingKind, VerifyReport, segment_name, verify_log
from pushrep.log.walk import WINDOW_BYTES, CleanEnd, Damage, ScanEnd, ScanRange, TornTail, WholeBatch, scan
from pushrep.records import BatchHeader, CorruptRecordBatch, RecordBatch
from pushrep.records.header import HEADER_BYTES
from pushrep.records.leader_epochs import LeaderEpochs


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, end) of the log's own segment, or of the copy's segment `copy_base`; end None is the file's end."""

    start: int
    end: int | None
    copy_base: int | None = None


@dataclass(frozen=True, slots=True)
class Hole:
    """A replaced range: offsets [first, end), in our file from byte `position` to `position_end` (None: its end)."""

    position: int
    position_end: int | None
    first_offset: int
    end_offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class SegmentSplice:
    """The pieces of one segment. exists: whether there is an old file to keep a copy of."""

    base_offset: int
    end_offset: int
    exists: bool
    pieces: tuple[Piece, ...]
    holes: tuple[Hole, ...]


@dataclass(frozen=True, slots=True)
class SplicePlan:
    """The segments that change, the log's end afterwards, and the leader epochs of its batches."""

    segments: tuple[SegmentSplice, ...]
    end_offset: int
    epochs: LeaderEpochs


class _CopyBatch(NamedTuple):
    base: int  # of the copy's segment
    position: int
    header: BatchHeader

    @property
    def begins_segment(self) -> bool:
        return self.position == 0 and self.header.base_offset == self.base


@dataclass(slots=True)
class _Open:
    """A segment that is being planned."""

    base_offset: int
    exists: bool
    pieces: list[Piece]
    holes: list[Hole]


class SplicePlanner:
    """Plans the repair of one log from a copy. Use once: `run`."""

    def __init__(  # noqa: PLR0913 - what is known of both
        self,
        filesystem: Filesystem,
        log: Path,
        copy: Path,
        *,
        start: int,
        expected: Expected,
        epochs: LeaderEpochs | None,
        same_id: bool,
    ) -> None:
        """`start`: the log start offset. `epochs`: the list kept with the log. `same_id`: both have the same one."""
        self._filesystem, self._log, self._copy = filesystem, log, copy
        self._expected, self._kept_epochs, self._same_id = expected, epochs, same_id
        self._copy_bases = list_segments(filesystem, copy)
        self._next_offset = start
        self._previous: BatchHeader | None = None
        self._previous_is_own = False
        self._is_anchored = True  # whether the last range taken joins a batch of ours
        self._far: BatchHeader | None = None
        self._epochs = LeaderEpochs()
        self._done: list[SegmentSplice] = []

    def run(self) -> SplicePlan:
        """The plan; it has no segments if nothing has to be taken. Raises RepairRefused, OSError."""
        bases = list_segments(self._filesystem, self._log)
        for base, following in pairwise([*bases, None]):
            assert base is not None
            if base > self._next_offset:
                self._take_missing(base)
            elif base < self._next_offset:
                raise RepairRefused(
                    f"{segment_name(base)} begins below offset {self._next_offset}, where the one before it ends: an "
                    "overlap can only be cut, with --cut-at"
                )
            self._take_segment(base, following)
        below = self._expected.below
        if below is not None and self._next_offset < below:
            self._take_missing(below)
        if not self._is_anchored and not self._same_id:
            raise RepairRefused(
                f"nothing of {self._log} is left to compare {self._copy} with, and their ids in partition.metadata "
                "differ or are missing"
            )
        return SplicePlan(tuple(self._done), self._next_offset, self._epochs)

    def _take_segment(self, base: int, following: int | None) -> None:
        """Plan one of our segments, its holes filled."""
        segment = _Open(base, exists=True, pieces=[], holes=[])
        file = self._filesystem.open(segment_path(self._log, base), writable=False)
        try:
            position: int | None = 0
            while position is not None:
                position = self._take_own(file, segment, position, following)
        finally:
            file.close()
        self._finish(segment)

    def _take_own(self, file: File, segment: _Open, start: int, following: int | None) -> int | None:
        """Take our batches from byte `start` to a hole, and fill it; the byte where ours go on after it, None at the
        end.
        """
        position = start
        for step in self._own_steps(file, segment.base_offset, start, following):
            if isinstance(step, WholeBatch):
                self._joins_far(step.batch.header)
                self._note(step.batch.header, own=True)
                position = step.end
                continue
            limit = following if following is not None else self._expected.below
            if self._ends_well(step, limit, at_end=position >= file.size(), is_newest=following is None):
                segment.pieces.append(Piece(start, None))
                return None
            segment.pieces.append(Piece(start, position))
            reason = getattr(step, "reason", f"it ends there, not at {limit}")
            return self._fill(file, segment, position, limit, reason)
        raise AssertionError("a scan ends with an answer")

    def _own_steps(self, file: File, base: int, position: int, following: int | None) -> Iterator[WholeBatch | ScanEnd]:
        """The scan, ended by a batch whose epoch is not the list's, or whose offsets are impossible."""
        what = ScanRange(
            base_offset=base,
            position=position,
            next_offset=self._next_offset,
            end_offset=following,
            recovery_point=self._expected.below or 0,
            leader_epoch=self._previous.leader_epoch if self._previous is not None else -1,
        )
        for step in scan(file, what):
            if isinstance(step, WholeBatch) and (reason := self._contradiction(step.batch.header, following)):
                yield TornTail(step.position, self._next_offset, reason)
                return
            yield step

    def _contradiction(self, header: BatchHeader, following: int | None) -> str | None:
        """Why a batch is not the one that was written, by the fields that no CRC covers; None if it is."""
        epochs, below = self._kept_epochs, self._expected.below
        if epochs is not None and (reason := epochs.contradiction(header.base_offset, header.leader_epoch)):
            return reason
        is_last = following is None and below is not None and header.next_offset > below
        if is_last and header.base_offset > self._next_offset:
            return f"base offset {header.base_offset} where {self._next_offset} is expected"
        return None

    def _ends_well(self, step: ScanEnd, limit: int | None, *, at_end: bool, is_newest: bool) -> bool:
        if at_end and self._next_offset in self._copy_bases:
            return True  # whatever is missing after it is whole segments
        if limit is None:
            return isinstance(step, CleanEnd)
        if not is_newest:  # an overlap is refused when the next segment is looked at
            return isinstance(step, CleanEnd) and self._next_offset >= limit
        return self._next_offset >= limit  # the next opening cuts a torn tail after that

    def _fill(self, file: File, segment: _Open, position: int, limit: int | None, reason: str) -> int | None:
        """Take the copy's batches from here on, until a batch of ours follows; its byte, None at the limit.

        If nothing of ours follows, a new segment begins where the copy's does, so that one file does not become too
        large.
        """
        first, at, size = self._next_offset, position, file.size()
        for taken, following in self._copy_run(limit):
            is_begun = self._next_offset > segment.base_offset and (at >= size or at == position)
            if is_begun and limit is not None and taken.begins_segment:
                break
            _add(segment.pieces, taken)
            at += taken.header.size_bytes
            self._note(taken.header, own=False)
            if limit is not None and self._next_offset == limit:
                self._far = following.header if following is not None else None
                break
            if following is not None and self._own_stands(file, segment.base_offset, at, following.header):
                self._is_anchored = True
                segment.holes.append(Hole(position, at, first, self._next_offset, reason))
                return at
        segment.holes.append(Hole(position, None, first, self._next_offset, reason))
        return None

    def _own_stands(self, file: File, base: int, position: int, header: BatchHeader) -> bool:
        """Whether our file has the batch of this header at `position`."""
        what = ScanRange(base_offset=base, position=position, next_offset=header.base_offset)
        step = next(scan(file, what, window_bytes=header.size_bytes))
        return isinstance(step, WholeBatch) and step.batch.header == header

    def _take_missing(self, limit: int) -> None:
        """Take the copy's segments for [next offset, limit), with the copy's names."""
        segment: _Open | None = None
        first, why = self._next_offset, f"no file holds the offsets from {self._next_offset} to {limit}"
        for taken, following in self._copy_run(limit):
            if segment is None or taken.begins_segment:
                if segment is not None:
                    segment.holes.append(Hole(0, None, first, self._next_offset, why))
                    self._finish(segment)
                first, segment = self._next_offset, _Open(self._next_offset, exists=False, pieces=[], holes=[])
            _add(segment.pieces, taken)
            self._note(taken.header, own=False)
            if self._next_offset == limit:
                self._far = following.header if following is not None else None
                break
        if segment is not None:
            segment.holes.append(Hole(0, None, first, self._next_offset, why))
            self._finish(segment)

    def _copy_run(self, limit: int | None) -> Iterator[tuple[_CopyBatch, _CopyBatch | None]]:
        """The copy's batches from the next offset on, each with the one after it.

        Raises RepairRefused if the copy does not join on the near side, or ends below `limit` (None: no limit).
        """
        self._far = None  # the range taken before goes on here, so it has no far side of its own
        near = self._previous if self._previous_is_own else None
        batches = self._copy_batches(self._next_offset if near is None else near.base_offset)
        if near is not None:
            found = next(batches, None)
            if found is None or found.header != near:
                raise RepairRefused(
                    f"{self._copy} does not join: its batch at offset {near.base_offset} is not ours, which is the "
                    "last whole one before the damage; it is another log's copy, or an older one"
                )
            self._is_anchored = True
        elif self._previous is None:
            self._is_anchored = False
        before = next(batches, None)
        if before is None or before.header.base_offset != self._next_offset:
            raise RepairRefused(f"{self._copy} holds no batch that begins with offset {self._next_offset}")
        while before is not None:
            following = next(batches, None)
            end = before.header.next_offset
            if limit is not None and end > limit:
                raise RepairRefused(f"{self._copy} does not join: one batch holds offsets on both sides of {limit}")
            if limit is not None and end < limit and following is None:
                raise RepairRefused(
                    f"{self._copy} has whole batches up to offset {end} only, {limit} is needed: name another copy, "
                    "or cut with --cut-at"
                )
            yield before, following
            before = following

    def _copy_batches(self, offset: int) -> Iterator[_CopyBatch]:
        """The copy's whole batches from the one that begins with `offset` on, as far as they follow each other."""
        bases = [base for base in self._copy_bases if base <= offset][-1:]
        bases += [base for base in self._copy_bases if base > offset]
        expected, epoch = None, -1
        for base, following in pairwise([*bases, None]):
            assert base is not None
            if expected is not None and base != expected:
                return
            file = self._filesystem.open(segment_path(self._copy, base), writable=False)
            try:
                for step in scan(file, ScanRange(base_offset=base, end_offset=following, leader_epoch=epoch)):
                    if not isinstance(step, WholeBatch):
                        if not isinstance(step, CleanEnd):
                            return
                        expected = step.next_offset
                        continue
                    epoch = step.batch.header.leader_epoch
                    if step.batch.header.base_offset >= offset:
                        yield _CopyBatch(base, step.position, step.batch.header)
            finally:
                file.close()

    def _joins_far(self, header: BatchHeader) -> None:
        """Check that our first batch after the taken range is the copy's, too."""
        far, self._far = self._far, None
        if self._previous is None or self._previous_is_own or far is None:
            return
        if far != header:
            raise RepairRefused(
                f"{self._copy} does not join: its batch at offset {far.base_offset} is not ours, which is the first "
                "whole one behind the damage"
            )
        self._is_anchored = True

    def _note(self, header: BatchHeader, *, own: bool) -> None:
        self._previous, self._previous_is_own = header, own
        self._next_offset = header.next_offset
        self._epochs = self._epochs.assigned(max(0, header.leader_epoch), header.base_offset)

    def _finish(self, segment: _Open) -> None:
        if not segment.holes:
            return
        pieces = tuple(piece for piece in segment.pieces if piece.end is None or piece.end > piece.start)
        self._done.append(
            SegmentSplice(segment.base_offset, self._next_offset, segment.exists, pieces, tuple(segment.holes))
        )


def _add(pieces: list[Piece], taken: _CopyBatch) -> None:
    """Add a piece; one that continues the last piece extends it."""
    end = taken.position + taken.header.size_bytes
    if pieces and pieces[-1].copy_base == taken.base and pieces[-1].end == taken.position:
        pieces[-1] = replace(pieces[-1], end=end)
    else:
        pieces.append(Piece(taken.position, end, taken.base))


@dataclass(slots=True)
class RepairReport:
    """What a repair did, or with `dry_run` would do. after: the verification that followed it."""

    log: str
    dry_run: bool
    before: VerifyReport
    spliced: list[dict[str, Any]] = field(default_factory=list)
    cut: Cut | None = None
    rebuilt: list[str] = field(default_factory=list)
    kept_as: list[str] = field(default_factory=list)
    after: VerifyReport | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing is damaged now."""
        return self.after.is_whole if self.after is not None else self.before.is_whole

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return {
            "log": self.log,
            "dry_run": self.dry_run,
            "is_whole": self.is_whole,
            "before": self.before.as_dict(),
            "spliced": self.spliced,
            "cut": None if self.cut is None else asdict(self.cut),
            "rebuilt": self.rebuilt,
            "kept_as": self.kept_as,
            "after": None if self.after is None else self.after.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class CutPlace:
    """The place of a cut: the segment, the byte in it, the log's end afterwards; whether the cut bytes are bad."""

    base_offset: int
    position: int
    offset: int
    is_bad: bool


class Repairer:
    """Repairs one log. Every method holds the writer's lock while it runs, and raises LogLocked beside a writer."""

    def __init__(self, log: Path, *, filesystem: Filesystem = REAL_FILESYSTEM, clock: Clock = SYSTEM_CLOCK) -> None:
        """Raises NotALog, CompactedLog."""
        self._log, self._filesystem, self._clock = checked_log(log, filesystem), filesystem, clock
        refuse_compacted(self._log, filesystem)

    def repair(
        self, *, copy: Path | None = None, cut_at: int | None = None, cut: bool = False, dry_run: bool = False
    ) -> RepairReport:
        """Repair batches from `copy`, or by a cut at the batch that holds `cut_at`, or with `cut` at the first damage;
        indexes and epochs in any case.

        Raises LogLocked; RepairRefused if the copy does not join, nothing says how batches are to be repaired, or a cut
        would leave damage below it. Nothing was changed then. Raises OSError.
        """
        with self._alone():
            state = self._state()
            before = self._verified()
            report = RepairReport(self._log.name, dry_run, before)
            at = cut_at if cut_at is not None else _first_bad(before) if cut else None
            place = None if at is None else self._cut_place(at, before.log_start_offset)
            plan = None if copy is None else self._splice_plan(copy, state, before.log_start_offset)
            if copy is None and place is None and _first_damage(before) is not None:
                raise RepairRefused(
                    f"{self._log} is damaged from offset {_first_damage(before)} on: name another copy of it with "
                    f"--from-copy, or give up what follows with --cut {self._log.name}"
                )
            if dry_run:
                _preview(report, plan, place)
                return report
        self._apply(report, plan, place, copy)
        return report

    def _apply(self, report: RepairReport, plan: SplicePlan | None, place: CutPlace | None, copy: Path | None) -> None:
        with self._view() as view:
            for segment in plan.segments if plan is not None else ():
                assert copy is not None
                self._splice(segment, copy, report)
            if place is not None:
                view.give_up(max(view.seen_to, report.before.verified_to))
                report.cut = view.reserve.call(partial(self._cut, view, place))
            self._repair_small_files(report, copy)
            self._drop_seals_that_lie(report, copy)
            named = {
                finding.file.split(".")[0] for finding in self._verified().findings if finding.kind is FindingKind.INDEX
            }
            report.rebuilt += rebuild_indexes(self._filesystem, self._log, [int(stem) for stem in sorted(named)])
            self._settle(view, place.offset if place is not None else None)
        report.after = verify_log(self._log, filesystem=self._filesystem, clock=self._clock)

    def _state(self) -> LogState:
        """The log's state by the directory; this process holds the lock, so nobody writes."""
        return replace(read_state(self._log, self._filesystem), writer_pid=None)

    def _verified(self) -> VerifyReport:
        return verify_log(self._log, filesystem=self._filesystem, clock=self._clock, state=self._state())

    # ---- plans

    def _splice_plan(self, copy: Path, state: LogState, start: int) -> SplicePlan:
        copy = checked_log(copy, self._filesystem)
        refuse_compacted(copy, self._filesystem)
        if copy == self._log:
            raise RepairRefused(f"{copy} is the log itself: name the directory of another copy")
        if copy.name != self._log.name:
            raise RepairRefused(f"{copy} is a copy of {copy.name}, not of {self._log.name}")
        ids = [self._id(self._log), self._id(copy)]
        planner = SplicePlanner(
            self._filesystem,
            self._log,
            copy,
            start=start,
            expected=Expected.of(state),
            epochs=read_leader_epochs(self._log, self._filesystem),
            same_id=ids[0] == ids[1] is not None,
        )
        return planner.run()

    def _id(self, log: Path) -> str | None:
        try:
            found = read_partition_metadata(log, self._filesystem)
        except CorruptPartitionMetadata:
            return None
        return None if found is None else str(found)

    def _cut_place(self, offset: int, start: int) -> CutPlace:
        """The place of the batch that holds `offset`, or of damage that begins there."""
        bases = [base for base in list_segments(self._filesystem, self._log) if base <= offset]
        if not bases or offset < start:
            raise RepairRefused(f"no segment of {self._log} holds offset {offset}: it can't be cut there")
        file = self._filesystem.open(segment_path(self._log, bases[-1]), writable=False)
        before = bases[-1]
        try:
            for step in scan(file, ScanRange(base_offset=bases[-1])):
                if isinstance(step, WholeBatch):
                    if step.batch.header.next_offset > offset:
                        return CutPlace(bases[-1], step.position, before, is_bad=False)
                    before = step.batch.header.next_offset
                    continue
                if step.next_offset < offset:
                    why = step.reason if isinstance(step, TornTail | Damage) else "the segment ends there"
                    raise RepairRefused(
                        f"{segment_name(bases[-1])} has whole batches up to offset {step.next_offset} only ({why}): "
                        f"cut at {step.next_offset} or below"
                    )
                return CutPlace(bases[-1], step.position, step.next_offset, is_bad=True)
        finally:
            file.close()
        raise AssertionError("a scan ends with an answer")

    # ---- deeds

    def _splice(self, segment: SegmentSplice, copy: Path, report: RepairReport) -> None:
        path = segment_path(self._log, segment.base_offset)
        if segment.exists:
            file = self._filesystem.open(path, writable=False)
            try:
                for hole in segment.holes:
                    where = (hole.position, hole.position_end)
                    kept = keep_range(self._filesystem, path, file, *where, suffix=CORRUPT_SUFFIX)
                    report.kept_as += [kept] if kept else []
            finally:
                file.close()
        temp = path.with_name(path.name + REPAIR_SUFFIX)
        try:
            self._put_together(temp, segment, copy)
        except OSError:
            if self._filesystem.exists(temp):
                self._filesystem.remove(temp)  # so that a full disk does not become fuller
            raise
        remove_seals(self._filesystem, self._log, [segment.base_offset])
        self._filesystem.rename(temp, path)
        self._filesystem.sync_directory(self._log)
        report.spliced += _spliced(segment)

    def _put_together(self, temp: Path, segment: SegmentSplice, copy: Path) -> None:
        target = self._filesystem.open(temp, create=True)
        try:
            target.truncate(0)
            for piece in segment.pieces:
                base, directory = segment.base_offset, self._log
                if piece.copy_base is not None:
                    base, directory = piece.copy_base, copy
                self._append_piece(target, segment_path(directory, base), piece)
            target.sync()
            self._check_spliced(target, segment)
        finally:
            target.close()

    def _append_piece(self, target: File, source: Path, piece: Piece) -> None:
        file = self._filesystem.open(source, writable=False)
        try:
            end = file.size() if piece.end is None else piece.end
            for start in range(piece.start, end, WINDOW_BYTES):
                data = file.read_at(min(WINDOW_BYTES, end - start), start)
                target.write_at(data, target.size())
        finally:
            file.close()

    def _check_spliced(self, file: File, segment: SegmentSplice) -> None:
        """Read the new file again before it replaces the old one."""
        for step in scan(file, ScanRange(base_offset=segment.base_offset)):
            if not isinstance(step, WholeBatch) and step.next_offset < segment.end_offset:
                raise RepairRefused(
                    f"{segment_name(segment.base_offset)} put together anew ends at {step.next_offset}, not at "
                    f"{segment.end_offset}: the copy changed meanwhile; stop its writer and try again"
                )

    def _cut(self, view: DirectoryView, place: CutPlace) -> Cut:
        """In the order of every cut: keep a copy, checkpoints, later segments, this one or a move, epochs."""
        segment = Segment(self._filesystem, self._log, place.base_offset, LogConfig())
        try:
            size_bytes = max(0, segment.file.size() - place.position)
            keep = quarantine_tail if place.is_bad else keep_range
            tail = keep(self._filesystem, segment.path, segment.file, place.position)
            self._lower_checkpoints(view, place.offset)
            later = [base for base in list_segments(self._filesystem, self._log) if base > place.base_offset]
            kept, later_bytes = move_aside(self._filesystem, self._log, later)
            kept += [] if tail is None else [tail.finish() if isinstance(tail, TailBackup) else tail]
            view.reserve.call(lambda: segment.cut(place.position, place.offset))
        finally:
            segment.close()
        self._filesystem.sync_directory(self._log)
        epochs = read_leader_epochs(self._log, self._filesystem)
        if epochs is not None and epochs.cut_from(place.offset) != epochs:
            cut = partial(write_leader_epochs, self._log, epochs.cut_from(place.offset), self._filesystem)
            view.reserve.call(cut)
        return Cut(
            offset=place.offset,
            segment=segment.path.name,
            position=place.position,
            size_bytes=size_bytes + later_bytes,
            reason="cut by name",
            kept_as=tuple(reversed(kept)),
        )

    def _repair_small_files(self, report: RepairReport, copy: Path | None) -> None:
        bad = {finding.file for finding in report.before.findings if finding.kind is FindingKind.FILE}
        remove_seals(self._filesystem, self._log, [int(name[:20]) for name in bad if name.endswith(SEAL_SUFFIX)])
        if LEADER_EPOCHS_NAME in bad:
            report.kept_as.append(self._keep_whole(LEADER_EPOCHS_NAME))
            write_leader_epochs(self._log, epochs_of_batches(self._filesystem, self._log), self._filesystem)
            report.rebuilt.append(LEADER_EPOCHS_NAME)
        if PARTITION_METADATA_NAME in bad and copy is not None:
            log_id = read_partition_metadata(copy, self._filesystem)
            if log_id is not None:
                report.kept_as.append(self._keep_whole(PARTITION_METADATA_NAME))
                write_partition_metadata(self._log, log_id, self._filesystem)
                report.rebuilt.append(PARTITION_METADATA_NAME)

    def _drop_seals_that_lie(self, report: RepairReport, copy: Path | None) -> None:
        """Remove seals that contradict bytes which a copy has as well: they are wrong, and the scrub makes new ones."""
        for finding in report.before.findings if copy is not None else ():
            if finding.kind is FindingKind.SEAL and self._is_as_in(finding.file, copy):
                remove_seals(self._filesystem, self._log, [int(finding.file[:20])])
                report.rebuilt.append(Path(finding.file).with_suffix(SEAL_SUFFIX).name)

    def _is_as_in(self, name: str, copy: Path | None) -> bool:
        assert copy is not None
        if not self._filesystem.exists(copy / name):
            return False
        with ExitStack() as opened:
            ours, theirs = (
                opened.enter_context(closing(self._filesystem.open(where / name, writable=False)))
                for where in (self._log, copy)
            )
            if ours.size() != theirs.size():
                return False
            starts = range(0, ours.size(), WINDOW_BYTES)
            return all(ours.read_at(WINDOW_BYTES, at) == theirs.read_at(WINDOW_BYTES, at) for at in starts)

    def _keep_whole(self, name: str) -> str:
        path = self._log / name
        target = free_name(self._filesystem, path.with_name(name + CORRUPT_SUFFIX))
        self._filesystem.rename(path, target)
        self._filesystem.sync_directory(self._log)
        return target.name

    def _settle(self, view: DirectoryView, cut_at: int | None) -> None:
        """Raise the recovery point to the end of what is whole and on disk, and publish the log's end to readers."""
        found = self._verified()
        end = found.verified_to if cut_at is None else min(cut_at, found.verified_to)
        if found.torn is not None and found.torn.offset is not None:
            end = min(end, found.torn.offset)  # above it, a torn tail would count as damage
        for base in list_segments(self._filesystem, self._log):
            file = self._filesystem.open(segment_path(self._log, base))
            try:
                file.sync()
            finally:
                file.close()
        recovery_point = end if found.is_whole else max(end, view.recovery_point or 0)
        high_watermark = end if view.high_watermark is None else min(end, view.high_watermark)
        if end < view.seen_to:  # the copy ends below what readers have seen of ours
            view.give_up(view.seen_to)
        view.checkpoint(recovery_point=recovery_point, high_watermark=high_watermark)
        view.sync_checkpoints()
        epochs = read_leader_epochs(self._log, self._filesystem)
        epoch = epochs.latest_epoch if epochs is not None else -1
        view.publish(LogEnds(found.log_start_offset, end, end, high_watermark), epoch)

    def _lower_checkpoints(self, view: DirectoryView, offset: int) -> None:
        remembered = {
            "recovery_point": view.recovery_point,
            "high_watermark": view.high_watermark,
        }
        view.checkpoint(**{name: offset for name, value in remembered.items() if value is not None and value > offset})
        view.sync_checkpoints()
        view.lower_published(offset)

    @contextmanager
    def _view(self) -> Iterator[DirectoryView]:
        """The log's view, held as by its writer; released as after an unclean stop."""
        directory = LogDirectory.acquire(self._log.parent, self._filesystem, self._clock)
        try:
            view = directory.attach(self._log.name)
            try:
                yield view
            finally:
                view.close_unclean()
        finally:
            directory.release()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock alone: the clean marker stays, so that a refused plan changes nothing."""
        try:
            lock = self._filesystem.lock(self._log.parent / LOCK_NAME)
        except LockHeld as error:
            raise LogLocked(self._log.parent, error.pid) from error
        try:
            yield
        finally:
            lock.close()


def _first_damage(report: VerifyReport) -> int | None:
    """The lowest offset that can't be read; None if all batches are whole and in their place."""
    offsets = [f.offset for f in report.findings if f.kind in BATCH_KINDS and f.offset is not None]
    return min(offsets, default=None)


def _first_bad(report: VerifyReport) -> int | None:
    """The first damage; else the torn tail, which a cut that was stopped may have left of it."""
    damaged, torn = _first_damage(report), report.torn
    return damaged if damaged is not None or torn is None else torn.offset


def _preview(report: RepairReport, plan: SplicePlan | None, place: CutPlace | None) -> None:
    for segment in plan.segments if plan is not None else ():
        report.spliced += _spliced(segment)
    if place is not None:
        report.cut = Cut(place.offset, segment_name(place.base_offset), place.position, 0, "would be cut by name", ())
    report.rebuilt += [f.file for f in report.before.findings if f.kind in {FindingKind.INDEX, FindingKind.FILE}]


def _spliced(segment: SegmentSplice) -> list[dict[str, Any]]:
    return [{"segment": segment_name(segment.base_offset)} | asdict(hole) for hole in segment.holes]


_SET_ASIDE = re.compile(r"([0-9]{20})\.log(?:\.[0-9]+)?\.(?:cut|corrupt|stale)(?:\.[0-9]+)?")
_TOGETHER = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What was restored, or would be. refused: why nothing of the file fits. stopped: why its rest was left."""

    log: str
    file: str
    dry_run: bool
    start_offset: int
    end_offset: int
    batches: int
    records: int
    refused: str | None
    stopped: str | None

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


def restore(
    log: Path,
    file: Path,
    *,
    dry_run: bool = False,
    filesystem: Filesystem = REAL_FILESYSTEM,
    clock: Clock = SYSTEM_CLOCK,
) -> RestoreReport:
    """Append the whole batches of `file`, which was kept aside from this log, if they follow its end.

    Takes the writer's lock, except for a dry run, which changes nothing. Raises NotALog, LogLocked, LogDamaged,
    OSError, BadArgument for a file of another name.
    """
    log = checked_log(log, filesystem)
    match = _SET_ASIDE.fullmatch(file.name)
    if match is None:
        raise BadArgument(
            "file", f"{file.name} is none that a cut leaves: <segment>.log[.<byte>].cut, .corrupt, .stale"
        )
    if dry_run:
        with SegmentLog.open_reader(log, isolation="written", filesystem=filesystem) as reader:
            end = reader.log_end_offset
        return _restore_report(log, file, end, *_fitting(file, int(match[1]), end, filesystem), dry_run=True)
    with SegmentLog.open(log, filesystem=filesystem, clock=clock) as opened:
        end = opened.log_end_offset
        found, refused, stopped = _fitting(file, int(match[1]), end, filesystem)
        for at in range(0, len(found), _TOGETHER):
            opened.append_as_is(found[at : at + _TOGETHER])
        opened.flush()
        return _restore_report(log, file, end, found, refused, stopped, dry_run=False)


def _fitting(
    file: Path, segment: int, end: int, filesystem: Filesystem
) -> tuple[list[RecordBatch], str | None, str | None]:
    """(the whole batches that follow offset `end`, why there is none, why no more)."""
    opened = filesystem.open(file, writable=False)
    try:
        try:
            first = BatchHeader.parse(opened.read_at(HEADER_BYTES, 0))
        except CorruptRecordBatch as error:
            return [], f"it begins with no batch: {error.reason}", None
        if first.base_offset != end:
            return [], f"it begins with offset {first.base_offset}, the log ends at {end}", None
        found = []
        for step in scan(opened, ScanRange(base_offset=segment, next_offset=end)):
            if isinstance(step, WholeBatch):
                found.append(RecordBatch.check(bytes(step.batch.data)))
            elif step.position < opened.size():
                stopped = getattr(step, "reason", "zeros follow")
                return found, None if found else stopped, f"byte {step.position}, offset {step.next_offset}: {stopped}"
        return found, None, None
    finally:
        opened.close()


def _restore_report(  # noqa: PLR0913, PLR0917 - the parts of one report
    log: Path,
    file: Path,
    end: int,
    found: list[RecordBatch],
    refused: str | None,
    stopped: str | None,
    *,
    dry_run: bool,
) -> RestoreReport:
    return RestoreReport(
        log=log.name,
        file=file.name,
        dry_run=dry_run,
        start_offset=end,
        end_offset=found[-1].header.next_offset if found else end,
        batches=len(found),
        records=sum(batch.header.record_count for batch in found),
        refused=refused,
        stopped=stopped,
    )
