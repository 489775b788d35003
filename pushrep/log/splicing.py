"""What a damaged log takes from another copy of it: a plan, made by reading both; nothing is written.

    ours   | a | b |  damaged   | e | f |        hole: from the first bad byte to the next batch that both have
    copy   | a | b | c | d | e | f | g |
             near ^            ^ far             the plan for the segment: ours 0..2, copy c..d, ours e..end

A range is taken only if it joins: the last batch before the hole and the first behind it stand in the copy, too, with
the same header, to the CRC. Where there is nothing before (the log's start) or behind (its end), one side has to do;
where nothing of the log is left at all, both must have the same id. Behind damage a batch of ours counts only where
the copy says that it has to stand; where the damage moved bytes, the copy's batches are taken to the segment's end.
A segment whose file is missing comes from the copy under the copy's names.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from pushrep.env import File, Filesystem
from pushrep.errors import PushrepError
from pushrep.log.directory_files import read_cleaned_offset
from pushrep.log.segment_files import list_segments, segment_path
from pushrep.log.segment_look import Expected, segment_name
from pushrep.log.walk import CleanEnd, ScanEnd, ScanRange, TornTail, WholeBatch, scan
from pushrep.records import BatchHeader
from pushrep.records.leader_epochs import LeaderEpochs


class RepairRefused(PushrepError):
    """The repair that was asked for would not give a whole log; nothing was changed. The message says what would."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, end) of the log's own segment, or of the copy's segment `copy_base`; end None is the file's end."""

    start: int
    end: int | None
    copy_base: int | None = None


@dataclass(frozen=True, slots=True)
class Hole:
    """What is replaced: offsets [first, end), which our file has from byte `position` to `position_end` (None: all)."""

    position: int
    position_end: int | None
    first_offset: int
    end_offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class SegmentSplice:
    """How one segment is put together anew; `exists` tells whether there is a file to keep a copy of."""

    base_offset: int
    end_offset: int
    exists: bool
    pieces: tuple[Piece, ...]
    holes: tuple[Hole, ...]


@dataclass(frozen=True, slots=True)
class SplicePlan:
    """The segments that change, where the log ends then, and the leader epochs of its batches."""

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
    """A segment that is being put together."""

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
        self._is_anchored = True  # whether what was taken last is joined to a batch of ours
        self._far: BatchHeader | None = None
        self._epochs = LeaderEpochs()
        self._done: list[SegmentSplice] = []

    def run(self) -> SplicePlan:
        """The plan; without segments if nothing has to be taken. Raises RepairRefused, OSError."""
        bases = list_segments(self._filesystem, self._log)
        for base, following in pairwise([*bases, None]):
            assert base is not None
            if base > self._next_offset and self._expected.accounts_for(self._next_offset, base):
                self._next_offset = base
            elif base > self._next_offset:
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
        """Our segment, holes filled."""
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
        """Our batches from byte `start` to a hole, and the hole; where ours go on behind it, None at the end."""
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
        """The scan, ended by a batch whose epoch contradicts the kept list or whose offsets can't be."""
        what = ScanRange(
            base_offset=base,
            position=position,
            next_offset=self._next_offset,
            end_offset=following,
            recovery_point=self._expected.below or 0,
            leader_epoch=self._previous.leader_epoch if self._previous is not None else -1,
            cleaned_offset=self._expected.cleaned_offset,
        )
        for step in scan(file, what):
            if isinstance(step, WholeBatch) and (reason := self._contradiction(step.batch.header, following)):
                yield TornTail(step.position, self._next_offset, reason)
                return
            yield step

    def _contradiction(self, header: BatchHeader, following: int | None) -> str | None:
        """What the CRC does not cover: is the epoch the kept one, does the last batch end where the log was closed?"""
        epochs, below = self._kept_epochs, self._expected.below
        if epochs is not None and (reason := epochs.contradiction(header.base_offset, header.leader_epoch)):
            return reason
        is_last = following is None and below is not None and header.next_offset > below
        if is_last and header.base_offset > self._next_offset:
            return f"base offset {header.base_offset} where {self._next_offset} is expected"
        return None

    def _ends_well(self, step: ScanEnd, limit: int | None, *, at_end: bool, is_newest: bool) -> bool:
        if at_end and self._next_offset in self._copy_bases:
            return True  # if anything is missing behind it, it is whole segments
        if limit is None:
            return isinstance(step, CleanEnd)
        if not is_newest:  # an overlap is refused when the next segment is looked at
            fits = self._next_offset > limit or self._expected.accounts_for(self._next_offset, limit)
            return isinstance(step, CleanEnd) and fits
        return self._next_offset >= limit  # a torn tail behind the end that was promised is the next opening's to cut

    def _fill(self, file: File, segment: _Open, position: int, limit: int | None, reason: str) -> int | None:
        """Take the copy's batches from here on, until a batch of ours follows; its byte, None at the limit.

        Where nothing of ours is left behind and the copy begins a segment, we do, too: else one file would take in
        what many held.
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
        """Whether the very batch of this header stands at a byte of ours."""
        what = ScanRange(base_offset=base, position=position, next_offset=header.base_offset)
        step = next(scan(file, what, window_bytes=header.size_bytes))
        return isinstance(step, WholeBatch) and step.batch.header == header

    def _take_missing(self, limit: int) -> None:
        """Segments from the copy for [next offset, limit), named as the copy names them."""
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
        """The copy's batches from the next offset on, each with the one behind it, after the near side was compared.

        Raises RepairRefused if it does not join, or has not all up to `limit` (None: up to the copy's own end).
        """
        self._far = None  # what was taken before goes on here: it has no far side of its own
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
        cleaned_offset = read_cleaned_offset(self._copy, self._filesystem)
        for base, following in pairwise([*bases, None]):
            assert base is not None
            if expected is not None and base != expected:
                return
            file = self._filesystem.open(segment_path(self._copy, base), writable=False)
            try:
                what = ScanRange(
                    base_offset=base, end_offset=following, leader_epoch=epoch, cleaned_offset=cleaned_offset
                )
                for step in scan(file, what):
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
        """The first batch of ours behind what was taken has to be the copy's, too."""
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
    """Behind the last piece; one that goes on where it ends makes it longer."""
    end = taken.position + taken.header.size_bytes
    if pieces and pieces[-1].copy_base == taken.base and pieces[-1].end == taken.position:
        pieces[-1] = replace(pieces[-1], end=end)
    else:
        pieces.append(Piece(taken.position, end, taken.base))
