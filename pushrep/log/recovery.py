"""Opening a log: gather facts, plan, scan, cut a torn tail, rebuild indexes, report.

`recovery_plan` decides from facts, without touching a file, where the scan begins.

    bases            0          1000        2000        3000 (newest)
    recovery point                      ^ 1870
    normal           ........... trusted .............. | end of the newest
    abnormal         .. trusted .| 1000: from the batch that holds 1870 on ...................|

    listed in the marker  size as listed   -> the scan begins
    no                    -                   abnormal, at the recovery point
    yes                   no                  abnormal, at the recovery point: written to since
    yes                   yes                 normal, at the recovery point in the newest segment, or some segments
                                              earlier where `verify_last_segments` says so

An abnormal opening goes back to the first segment whose base is not above the recovery point and whose first batch is
whole; without one, to the first segment. Source: RocketMQ's recoverNormally and recoverAbnormally, by offsets instead
of clocks.

`Recovery` carries the plan out:

    segments before the plan's first     does each end where the next begins? by its headers (`sealed_end`), else a scan
    the first and all behind it          abnormal: synced, dropped from the cache, scanned as the disk holds them. If
                                         nothing is above the recovery point, a scan of the cache is enough
    a torn tail                          kept aside and cut (moved, if the disk has no room for both); later segments
                                         moved aside whole
    damage                               nothing is touched; the log ends there and takes no appends. In a copy of a
                                         directory the checkpoint may be newer than the file: there damage at the end
                                         of the newest segment is a torn tail, if no whole batch follows it
    damage of a sealed segment that      as if the scrub had found it: the log goes on behind it, another member repairs
    another member can repair            it (segment_repair.py)
Progress (the recovery point) is saved after each segment, so that a recovery that is killed goes on where it was.

`sealed_end` finds where a sealed segment ends by its last index entry and a few headers, without a scan:

    .index       ... | rel, pos |           .log   ... | batch | batch | batch | end of the file
                       `------ pos ------------------> header, header, header: the offset behind the last
    .timeindex   ... | time, rel |                     none of them is newer

Opening a log calls it for every segment that is not scanned, so it costs little more than opening three files. It does
not check the bytes between the headers: a read or `pushrep log verify` does. The indexes of a sealed segment end with
the newest time, and with an offset entry that has at most index_interval_bytes (or one batch) after it. An index that
ends otherwise was emptied or cut short: then `sealed_end` returns None, the segment is scanned, and the scan rebuilds
its indexes.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice, pairwise
from pathlib import Path
from typing import Protocol
from uuid import UUID

import numpy as np

from pushrep.env import Clock, File, Filesystem, file_size
from pushrep.log.config import LogConfig
from pushrep.log.cut_files import TailBackup, end_moves, move_aside, quarantine_tail, remove_segments
from pushrep.log.directory_files import (
    INDEX_SUFFIX,
    TIME_INDEX_SUFFIX,
    CleanLog,
    half_made_in,
    orphan_indexes_in,
    segment_path,
    segments_in,
    swaps_in,
)
from pushrep.log.errors import CorruptLog, LogPoisoned
from pushrep.log.indexes import IndexFile
from pushrep.log.scrub import ScrubFinding
from pushrep.log.seals import HeadersCrc, read_seal, remove_seals
from pushrep.log.segment import OFFSET_ENTRY, TIME_ENTRY, Segment
from pushrep.log.walk import (
    CleanEnd,
    Damage,
    ScanEnd,
    ScanRange,
    TornTail,
    WholeBatch,
    from_index_entry,
    holds_whole_batch,
    scan,
    scan_headers,
)
from pushrep.records import BatchRun
from pushrep.records.header import OFFSET_MAX
from pushrep.records.leader_epochs import LeaderEpochs


class Opening(Enum):
    """How the log was closed."""

    NORMAL = "normal"
    """Closed clean: the marker lists the log with its present size."""
    ABNORMAL = "abnormal"
    """Its process or the machine stopped: everything from the recovery point on is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """Scan `bases[first:]`; in the first of them from the batch that holds `start_offset` on.

    recovery_point: below it a bad batch is damage, from it on a torn tail.
    """

    opening: Opening
    reason: str
    first: int
    start_offset: int
    recovery_point: int


def recovery_plan(  # noqa: PLR0913 - what is known before a batch is read
    bases: Sequence[int],
    first_batch_is_whole: Callable[[int], bool],
    *,
    newest_bytes: int,
    recovery_point: int | None,
    clean: CleanLog | None,
    verify_last_segments: int = 0,
) -> RecoveryPlan:
    """The plan for a log with at least one segment.

    bases: base offsets of the segments, ascending. newest_bytes: size of the newest segment's file. recovery_point: as
    checkpointed, None if there is none. clean: the log's line of the marker. `first_batch_is_whole(base)`: whether the
    segment begins with a whole batch of its range; called for as few segments as possible, newest first.
    """
    first = len(bases) - 1
    if clean is not None and clean.last_segment_bytes == newest_bytes:
        first = max(0, len(bases) - max(1, verify_last_segments))
        return RecoveryPlan(
            opening=Opening.NORMAL,
            reason="closed clean",
            first=first,
            start_offset=bases[first] if verify_last_segments else max(bases[first], clean.end_offset),
            recovery_point=clean.end_offset,  # the marker is written after everything below is on disk
        )
    recovery_point = max(bases[0], recovery_point or 0)
    while first > 0 and (bases[first] > recovery_point or not first_batch_is_whole(bases[first])):
        first -= 1
    return RecoveryPlan(
        opening=Opening.ABNORMAL,
        reason="it was not closed" if clean is None else "it changed after it was closed",
        first=first,
        start_offset=max(bases[first], recovery_point),
        recovery_point=recovery_point,
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """What was cut off the log's end: `size_bytes` from byte `position` of `segment` on, later segments included.

    kept_as: the files that hold it now; empty for zeros alone.
    """

    offset: int
    segment: str
    position: int
    size_bytes: int
    reason: str
    kept_as: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """How a log was opened. `str()` of it is a sentence.

    damaged_from: first offset that was known to be on disk and can't be read; None if all is well. damaged_segments:
    damaged sealed segments of a log with replicas, for another member to repair; the log goes on after them.
    """

    opening: Opening
    reason: str
    segments_scanned: int
    bytes_scanned: int
    log_start_offset: int
    log_end_offset: int
    cut: Cut | None
    damaged_from: int | None
    damage: str | None
    seconds: float
    damaged_segments: tuple[ScrubFinding, ...] = ()

    def __str__(self) -> str:
        known = f"offsets [{self.log_start_offset}, {self.log_end_offset})"
        work = f"{self.segments_scanned} segments and {self.bytes_scanned} bytes scanned in {self.seconds:.3f} s"
        parts = [f"{self.opening.value} opening ({self.reason}): {known}, {work}"]
        if self.cut is not None:
            kept = f", kept as {', '.join(self.cut.kept_as)}" if self.cut.kept_as else ""
            parts.append(
                f"cut {self.cut.size_bytes} bytes behind offset {self.cut.offset} at byte {self.cut.position} of "
                f"{self.cut.segment} ({self.cut.reason}){kept}"
            )
        if self.damaged_from is not None:
            parts.append(f"DAMAGED from offset {self.damaged_from} on ({self.damage}): read-only below it")
        parts += [
            f"{one.segment} is DAMAGED from offset {one.offset} on ({one.reason}): for another member to repair"
            for one in self.damaged_segments
        ]
        return "; ".join(parts)


_HOPS_MAX = 64  # with more headers than this to read, a scan costs no more


def sealed_end(filesystem: Filesystem, directory: Path, what: ScanRange, index_interval_bytes: int) -> int | None:
    """The end offset of a segment whose indexes reach to its end; None if the headers don't show it. Raises OSError."""
    times = IndexFile(filesystem, segment_path(directory, what.base_offset, TIME_INDEX_SUFFIX), TIME_ENTRY)
    offsets = IndexFile(filesystem, segment_path(directory, what.base_offset, INDEX_SUFFIX), OFFSET_ENTRY)
    if not (times.is_whole and offsets.is_whole):
        return None
    with closing(filesystem.open(segment_path(directory, what.base_offset), writable=False)) as log:
        begun = from_index_entry(log, what, offsets.last)
        if offsets.last is not None and begun is what:
            return None
        return _end(log, begun, times.last or (-1, -1), index_interval_bytes)


def _end(log: File, begun: ScanRange, newest: tuple[int, int], interval_bytes: int) -> int | None:
    """Follow the headers to the end of the file, if they are few."""
    end, before, expected = begun.position, begun.position, begun.first_offset
    for position, _, next_offset, size, _, _, newest_ms in islice(scan_headers(log, begun), _HOPS_MAX):
        if newest_ms > newest[0]:
            return None
        before, end, expected = position, position + size, next_offset
    if end != log.size() or expected is None:
        return None
    # The last header should have had an index entry, or the segment has no batch of the newest time.
    is_short = before - begun.position > interval_bytes or newest[1] >= expected - begun.base_offset
    return None if is_short else expected


class Progress(Protocol):
    """Where recovery stores its progress; on disk when a method returns, unless `soon` is set."""

    def proven(self, recovery_point: int, *, soon: bool = False) -> None:
        """Everything below is whole and on disk. soon: write it later, together with other logs' checkpoints."""
        ...

    def about_to_cut(self, offset: int) -> None:
        """The log is about to be cut at `offset`: no checkpoint may stay above it."""
        ...


@dataclass(frozen=True, slots=True)
class Recovered:
    """A recovered log: its segments, the newest opened for writing, the epochs of the scanned batches.

    has_news: the recovery point changed and may not be on disk yet.
    """

    bases: tuple[int, ...]
    active: Segment
    report: RecoveryReport
    epochs_seen: tuple[tuple[int, int], ...]
    has_news: bool
    log_id: UUID


class Recovery:
    """Opens the files of one log. Use once: `run`."""

    def __init__(  # noqa: PLR0913 - what a log stands on
        self,
        filesystem: Filesystem,
        directory: Path,
        config: LogConfig,
        clock: Clock,
        progress: Progress,
        *,
        log_id: UUID,
        is_copy: bool = False,
        epochs: LeaderEpochs | None = None,
        repairable_below: int = 0,
        is_suspect: bool = False,
    ) -> None:
        """is_suspect: another program has changed the newest segment, so it is scanned from its first batch on.

        repairable_below: sealed segments that end there or before may stay damaged, as other members have them.

        epochs: the stored list. It has an epoch on disk before the first batch of it is written, so a batch of an epoch
        that it lacks is damaged. In a copy of a directory the list may be older than the batches, and is not used.
        """
        self._kept_epochs = None if is_copy else epochs
        self._log_id, self._repairable_below = log_id, repairable_below
        self._damaged: list[ScrubFinding] = []
        self._is_copy, self._is_suspect = is_copy, is_suspect
        self._filesystem, self._directory, self._config = filesystem, directory, config
        self._clock, self._progress = clock, progress
        self._started_ms = clock.monotonic_ms()
        self._segments_scanned = self._bytes_scanned = 0
        self._epochs: list[tuple[int, int]] = []
        self._unsettled: Sequence[int] = ()
        self._has_news = False
        self._moving: Sequence[str] = ()
        self._closed_at: int | None = None
        self._checkpointed = 0
        self._headers: HeadersCrc | None = None

    def run(
        self,
        recovery_point: int | None,
        log_start_offset: int | None,
        clean: CleanLog | None,
        *,
        checkpointed: int = 0,
    ) -> Recovered:
        """Bring the log into a state that can be trusted. Raises CorruptLog, LogPoisoned, OSError.

        recovery_point: everything below was on disk. It is below the log start only where a cut of the batch that holds
        that was stopped; if it is None, everything below the log start was on disk. checkpointed: below it the index
        entries were on disk, too.
        """
        self._checkpointed = checkpointed
        if recovery_point is None:  # that checkpoint was lost
            recovery_point = log_start_offset or None
        names = self._filesystem.list(self._directory)
        bases = segments_in(names)
        self._refuse_odd_names(names, bases)
        # Their removal was not finished, or a power cut undid it.
        below = [base for base, next_base in pairwise(bases) if next_base <= (log_start_offset or 0)]
        remove_segments(self._filesystem, self._directory, below)
        bases = bases[len(below) :]
        self._moving = end_moves(self._filesystem, self._directory, names)
        for name in (*orphan_indexes_in(names), *half_made_in(names)):
            self._filesystem.remove(self._directory / name)
        if not bases:
            return self._new(recovery_point, log_start_offset)
        if log_start_offset is not None and bases[0] > log_start_offset:
            missing = (segment_path(Path(), log_start_offset).name, segment_path(Path(), bases[0]).name)
            raise CorruptLog(
                self._directory, missing, f"the log starts at {log_start_offset}, its first file is missing"
            )
        plan = recovery_plan(
            bases,
            self._first_batch_is_whole,
            newest_bytes=self._size(bases[-1]),
            recovery_point=recovery_point,
            clean=clean,
            verify_last_segments=self._config.verify_last_segments,
        )
        if plan.opening is Opening.ABNORMAL:
            if self._is_suspect:
                plan = replace(plan, start_offset=bases[plan.first])
            bases = self._without_empty_newest(bases, plan)
            self._unsettled = bases[plan.first :]
        elif clean is not None:
            self._closed_at = clean.end_offset
            if bases[-1] > clean.end_offset:
                why = f"the log was closed clean at {clean.end_offset}: this is another's"
                raise CorruptLog(self._directory, (segment_path(Path(), bases[-1]).name,), why)
        recovered = self._carry_out(plan, bases, log_start_offset)
        if plan.opening is Opening.NORMAL and recovered.report.damaged_from is not None:
            # The marker is valid, but the scanned batches contradict it: scan the same range again, as the disk holds
            # it.
            plan = replace(plan, opening=Opening.ABNORMAL, reason="it was closed clean, but is damaged")
            self._unsettled = bases[plan.first :]
            return self._carry_out(plan, bases, log_start_offset)
        return recovered

    def _new(self, recovery_point: int | None, log_start_offset: int | None) -> Recovered:
        start = log_start_offset or 0
        if recovery_point is not None and recovery_point > start:
            why = f"no segment is there, but offsets up to {recovery_point} were on disk"
            raise CorruptLog(self._directory, (segment_path(Path(), start).name,), why)
        active = Segment.create(self._filesystem, self._directory, start, self._config)
        plan = RecoveryPlan(
            opening=Opening.NORMAL, reason="a new log", first=0, start_offset=start, recovery_point=start
        )
        return self._recovered(plan, [start], active, start)

    def _first_batch_is_whole(self, base: int) -> bool:
        with closing(self._filesystem.open(segment_path(self._directory, base), writable=False)) as file:
            return isinstance(next(scan(file, ScanRange(base_offset=base))), WholeBatch)

    def _size(self, base: int) -> int:
        return file_size(self._filesystem, segment_path(self._directory, base)) or 0

    def _without_empty_newest(self, bases: list[int], plan: RecoveryPlan) -> list[int]:
        """Remove an empty newest file, left by a roll that was not finished: never one that had records on disk."""
        is_begun = len(bases) > 1 and plan.first < len(bases) - 1 and bases[-1] >= plan.recovery_point
        if is_begun and self._size(bases[-1]) == 0:
            move_aside(self._filesystem, self._directory, bases[-1:])
            return bases[:-1]
        return bases

    def _settle(self) -> None:
        """Let the scan read what the disk holds, not the page cache."""
        bases, self._unsettled = self._unsettled, ()
        for base in bases:
            with closing(self._filesystem.open(segment_path(self._directory, base))) as file:
                try:
                    file.sync()
                    file.drop_cache()
                except OSError as error:
                    raise LogPoisoned(self._directory, error) from error

    def _carry_out(self, plan: RecoveryPlan, bases: list[int], log_start_offset: int | None) -> Recovered:
        start = bases[0] if log_start_offset is None else log_start_offset
        for number, base in enumerate(bases):
            next_base = bases[number + 1] if number + 1 < len(bases) else None
            what, interval_bytes = ScanRange(base_offset=base), self._config.index_interval_bytes
            if number < plan.first and sealed_end(self._filesystem, self._directory, what, interval_bytes) == next_base:
                continue
            segment = Segment(self._filesystem, self._directory, base, self._config)
            try:
                end = self._judged(segment, plan, number, next_base)
                if isinstance(end, Damage):
                    segment.close()
                    if self._is_for_others(segment, end, plan, next_base):
                        continue
                    if end.next_offset < segment.next_offset:  # all of it was scanned
                        segment = Segment(self._filesystem, self._directory, base, self._config)
                    return self._recovered(plan, bases[: number + 1], segment, start, damage=end)
                if isinstance(end, TornTail):
                    cut = self._cut(segment, end, bases[number + 1 :])
                    return self._finished(plan, bases[: number + 1], segment, cut, start)
                if next_base is None:
                    return self._finished(plan, bases, segment, None, start)
                self._settle_sealed(segment, proven=number >= plan.first and plan.opening is Opening.ABNORMAL)
            except BaseException:
                segment.close()
                raise
        raise AssertionError("a log has a newest segment")

    def _judged(self, segment: Segment, plan: RecoveryPlan, number: int, next_base: int | None) -> ScanEnd:
        """How the scan of the segment ended, or what is wrong with it although its batches are whole. Raises
        CorruptLog.
        """
        end = self._walk(segment, plan, number, next_base)
        if self._is_copy and isinstance(end, Damage) and next_base is None:
            goes_on = holds_whole_batch(segment.file, end.position, end.next_offset)
            return end if goes_on else TornTail(end.position, end.next_offset, f"{end.reason}; a copy ends here")
        if self._closed_at is not None and isinstance(end, TornTail):
            return Damage(end.position, end.next_offset, end.reason)  # a clean close leaves no torn tail
        if not isinstance(end, CleanEnd) or next_base is None:
            return end
        if end.next_offset < next_base and self._is_repairable(plan, next_base):
            return Damage(end.position, end.next_offset, f"it ends at {end.next_offset}, not at {next_base}")
        if segment.next_offset != next_base:
            names = (segment.path.name, segment_path(Path(), next_base).name)
            kind = "a gap" if segment.next_offset < next_base else "an overlap"
            why = f"the first ends at {segment.next_offset}, the second begins at {next_base}: {kind}"
            raise CorruptLog(self._directory, names, why)
        why_not = self._broken_seal(segment)
        return end if why_not is None else Damage(0, segment.base_offset, why_not)

    def _is_repairable(self, plan: RecoveryPlan, next_base: int) -> bool:
        """Whether all of the segment was on disk, and its end offset is known."""
        return next_base <= min(plan.recovery_point, self._repairable_below)

    def _is_for_others(self, segment: Segment, damage: Damage, plan: RecoveryPlan, next_base: int | None) -> bool:
        """Whether another member is to repair the segment; then add it to the report."""
        if next_base is None or plan.opening is not Opening.ABNORMAL or not self._is_repairable(plan, next_base):
            return False
        name, where = segment.path.name, (damage.position, damage.next_offset, damage.reason)
        self._damaged.append(ScrubFinding(self._directory.name, name, *where, segment.base_offset, next_base))
        return True

    def _walk(self, segment: Segment, plan: RecoveryPlan, number: int, next_base: int | None) -> ScanEnd:
        """Scan a segment as the plan says; how the scan ended.

        Few of ten thousand logs were written to just before a kill. So the first scan uses the page cache: if it finds
        nothing above the recovery point, it is enough. Else the segment is synced, dropped from the cache and scanned
        again.
        """
        in_plan = number >= plan.first
        start_offset = None if not in_plan else max(segment.base_offset, plan.start_offset)
        start_at: int | None = None
        self._headers = HeadersCrc() if next_base is not None else None
        closed_at = self._closed_at if next_base is None else None
        for step in segment.walk(plan.recovery_point, next_base, start_offset, closed_at, self._kept_epochs):
            proven = isinstance(step, BatchRun | CleanEnd) and step.next_offset <= plan.recovery_point
            if in_plan and self._unsettled and not proven:
                self._epochs.clear()
                self._settle()
                return self._walk(segment, plan, number, next_base)
            if not isinstance(step, BatchRun):
                if in_plan:
                    self._segments_scanned += 1
                    self._bytes_scanned += step.position - (step.position if start_at is None else start_at)
                return step
            start_at = int(step.position[0]) if start_at is None else start_at
            if start_at == 0 and self._headers is not None:
                self._headers.add_run(step)
            if in_plan:
                self._note_epochs(step)
        raise AssertionError("a scan ends with an answer")

    def _broken_seal(self, segment: Segment) -> str | None:
        """Why a completely scanned segment is not the one that was sealed; None if it is."""
        if self._headers is None or (segment.size_bytes and not self._headers.batches):
            return None
        seal = read_seal(self._filesystem, self._directory, segment.base_offset)
        found = (segment.base_offset, segment.next_offset, segment.size_bytes)
        return None if seal is None else seal.contradiction(self._headers.seal(self._log_id, self._directory, *found))

    def _note_epochs(self, run: BatchRun) -> None:
        """Note where each epoch begins; epochs never fall."""
        known = self._epochs[-1][0] if self._epochs else None
        if known == run.leader_epoch[-1]:
            return
        epochs, firsts = np.unique(run.leader_epoch, return_index=True)
        for epoch, offset in zip(epochs.tolist(), run.base_offset[firsts].tolist(), strict=True):
            if known is None or epoch > known:
                self._epochs.append((epoch, offset))

    def _refuse_odd_names(self, names: Sequence[str], bases: Sequence[int]) -> None:
        if swaps := swaps_in(names):
            why = "a broker was stopped while it replaced segments by these: start that broker once, or restore"
            raise CorruptLog(self._directory, tuple(swaps), why)
        if bases and bases[-1] > OFFSET_MAX:
            names_above = tuple(segment_path(Path(), base).name for base in bases if base > OFFSET_MAX)
            raise CorruptLog(self._directory, names_above, "no offset is as high as its name, 2^63 - 1 is the highest")

    def _settle_sealed(self, segment: Segment, *, proven: bool) -> None:
        segment.index_time()
        segment.sync_indexes(retaken=proven)
        if proven:
            self._progress.proven(segment.next_offset)
        segment.close()

    def _cut(self, segment: Segment, torn: TornTail, later: Sequence[int]) -> Cut:
        tail_bytes = segment.file.size() - torn.position
        tail = quarantine_tail(self._filesystem, segment.path, segment.file, torn.position)
        self._progress.about_to_cut(torn.next_offset)
        kept, later_bytes = move_aside(self._filesystem, self._directory, later)
        if isinstance(tail, TailBackup):
            tail, self._moving = tail.finish(), ()
        segment.file.truncate(torn.position)
        return Cut(
            offset=torn.next_offset,
            segment=segment.path.name,
            position=torn.position,
            size_bytes=tail_bytes + later_bytes,
            reason=torn.reason,
            kept_as=tuple([tail] if tail else []) + tuple(reversed(kept)),
        )

    def _finished(
        self, plan: RecoveryPlan, bases: Sequence[int], segment: Segment, cut: Cut | None, start: int
    ) -> Recovered:
        """The recovered log, its newest segment ready for appends and on disk."""
        remove_seals(self._filesystem, self._directory, [segment.base_offset])  # it goes on
        segment.trim()
        end_moves(self._filesystem, self._directory, self._moving)  # only zeros were left to move
        segment.index_time()  # as a clean close does
        rises = cut is not None or segment.next_offset > min(plan.recovery_point, self._checkpointed)
        segment.sync_indexes(retaken=rises)
        if plan.opening is Opening.ABNORMAL:
            # A log that was not cut is on disk: below the recovery point before this opening, above it since `_settle`.
            # Each segment's name was on disk before its first batch. So ten thousand logs of a killed process are not
            # synced twice.
            if cut is not None:
                segment.file.sync()
            if cut is not None or segment.size_bytes == 0:
                self._filesystem.sync_directory(self._directory)
            self._progress.proven(segment.next_offset, soon=True)
            self._has_news = rises
        return self._recovered(plan, bases, segment, start, cut=cut)

    def _recovered(  # noqa: PLR0913 - the parts of one report
        self,
        plan: RecoveryPlan,
        bases: Sequence[int],
        active: Segment,
        start: int,
        *,
        cut: Cut | None = None,
        damage: Damage | None = None,
    ) -> Recovered:
        active.close()  # opened again by the first append
        report = RecoveryReport(
            opening=plan.opening,
            reason=plan.reason,
            segments_scanned=self._segments_scanned,
            bytes_scanned=self._bytes_scanned,
            log_start_offset=min(start, active.next_offset),  # higher if the log is damaged below its start
            log_end_offset=active.next_offset,
            cut=cut,
            damaged_from=damage.next_offset if damage else None,
            damage=damage.reason if damage else None,
            damaged_segments=tuple(self._damaged),
            seconds=(self._clock.monotonic_ms() - self._started_ms) / 1000,
        )
        return Recovered(tuple(bases), active, report, tuple(self._epochs), self._has_news, self._log_id)
