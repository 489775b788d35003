"""Repairing a log while nobody writes it: a range from another copy, a cut, new indexes, a cut tail put back.

    what is damaged                 what repairs it
    batches, boundaries, end        the same range of a copy that joins on both sides (repair.py), or a cut
    leader-epoch-checkpoint         the epochs in the batches' headers
    partition.metadata              the copy's, once its batches have joined ours
    .index .timeindex               the batches

Replaced bytes are kept as `<segment>.log.<position>.corrupt`, small files as `<name>.corrupt`, cut bytes as `.cut`;
indexes are not kept, because they can be rebuilt. Order of a splice: write the new file beside the old one, sync
it, keep, rename it over the old one, sync the directory. A crash in between leaves the old log or a better one, and the
same command goes on. Afterwards the log is not in the clean marker, so the next open scans it.

`Splicer` makes the new files of a damaged log with another copy of it, each by a `SegmentRepair`: the same as is made
of a member's batches (segment_repair.py).

    ours   | a | b |  damaged   | e | f |        hole: from the first bad byte to the next batch that both have
    copy   | a | b | c | d | e | f | g |
             near ^            ^ far             the new file: ours a..b, copy c..d, ours e..f

A range is taken only if it joins: the copy has the last batch before the hole and the first one after it, with the same
headers, CRC included. At the log's start or end one side is enough; if nothing of the log is left, both must have the
same id. After damage a batch of this log is kept only if the copy has the same batch at that place; if the damage moved
bytes, the copy's batches are taken up to the segment's end. A segment whose file is missing is taken from the copy with
the copy's file names. The log is changed once all new files are complete.

`restore` appends batches that a cut or a quarantine kept aside, if they begin where the log ends.

    1000.log | ..... |                          the log ends at offset 1042
    1000.log.4096.cut    | 1042-1049 | 1050-1053 | torn ..      fits: two batches are appended, the rest stays aside
    2000.log.corrupt     | 2000 ...                             fits only once the log ends at 2000

The batches are appended with their own offsets and epochs, and synced; the file stays as it is. Batches that are not
whole or do not follow are never restored: a log that went on after the cut has assigned those offsets again.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Clock, Filesystem, LockHeld
from pushrep.errors import BadArgument
from pushrep.log.config import LogConfig
from pushrep.log.cut_files import TailBackup, holds_range, keep_range, move_aside, quarantine_tail
from pushrep.log.directory import DirectoryView, LogDirectory
from pushrep.log.directory_files import (
    CORRUPT_SUFFIX,
    LEADER_EPOCHS_NAME,
    LOCK_NAME,
    PARTITION_METADATA_NAME,
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
from pushrep.log.errors import LogLocked, RepairRefused
from pushrep.log.inspection import LogState, checked_log, read_state, segment_facts
from pushrep.log.published import LogOffsets
from pushrep.log.reader import LogReader
from pushrep.log.recovery import Cut
from pushrep.log.seals import remove_seals
from pushrep.log.segment import Segment
from pushrep.log.segment_log import SegmentLog
from pushrep.log.segment_repair import SegmentRepair, epochs_of_batches, rebuild_indexes
from pushrep.log.verify import BATCH_KINDS, Expected, FindingKind, VerifyReport, known_log_id, segment_name, verify_log
from pushrep.log.walk import CleanEnd, Damage, ScanEnd, ScanRange, TornTail, WholeBatch, scan
from pushrep.records import BatchHeader, CorruptRecordBatch, RecordBatch
from pushrep.records.header import HEADER_BYTES
from pushrep.records.leader_epochs import LeaderEpochs


class Splicer:
    """What a damaged log takes from another copy of it: `repairs`, a whole new file for each segment that changes.

    Use once: `run`. It changes nothing but those files' `.repair`; the caller puts and closes them.
    """

    def __init__(  # noqa: PLR0913 - what is known of both
        self,
        filesystem: Filesystem,
        log: Path,
        copy: Path,
        *,
        start: int,
        expected: Expected,
        epochs: LeaderEpochs | None,
        log_id: UUID | None,
        is_same_log: bool,
    ) -> None:
        """`start`: the log start offset. `epochs`: the list kept with the log. `is_same_log`: both have the same id."""
        self._filesystem, self._log, self._copy, self._expected = filesystem, log, copy, expected
        self._epochs, self._log_id, self._is_same_log = epochs, log_id, is_same_log
        self._copy_bases = list_segments(filesystem, copy)
        self._next_offset, self._epoch = start, -1
        self._near: BatchHeader | None = None  # our batch before the next offset
        self._is_compared = False
        self.repairs: list[SegmentRepair] = []

    def run(self) -> None:
        """Make the new files; none if nothing has to be taken. Raises RepairRefused, OSError."""
        for base, following in pairwise([*list_segments(self._filesystem, self._log), None]):
            assert base is not None
            self._take_missing(base)
            if base < self._next_offset:
                raise RepairRefused(
                    f"{segment_name(base)} begins below offset {self._next_offset}, where the one before it ends: an "
                    "overlap can only be cut, with --cut-at"
                )
            self._take_segment(base, following)
        self._take_missing(self._expected.below or 0, is_last=True)
        if self.repairs and not self._is_compared and not self._is_same_log:
            raise RepairRefused(
                f"nothing of {self._log} is left to compare {self._copy} with, and their ids in partition.metadata "
                "differ or are missing"
            )

    def close(self) -> None:
        """Close all of it; new files that were not put are removed."""
        for repair in self.repairs:
            repair.close()

    def _take_missing(self, limit: int, *, is_last: bool = False) -> None:
        """Take the copy's segments for [next offset, limit), with the copy's names."""
        while self._next_offset < limit:
            end = min([base for base in self._copy_bases if base > self._next_offset] + [limit])
            self._fill(
                self._next_offset,
                end,
                f"no file holds the offsets from {self._next_offset} to {limit}",
                is_newest=is_last and end == limit,
            )

    def _take_segment(self, base: int, following: int | None) -> None:
        """Go over one of our segments; if it is damaged, take what it lacks."""
        limit, first, last = following if following is not None else self._expected.below, None, None
        what = ScanRange(
            base_offset=base,
            end_offset=following,
            recovery_point=self._expected.below or 0,
            leader_epoch=self._epoch,
            epochs=self._epochs,
        )
        with closing(self._filesystem.open(segment_path(self._log, base), writable=False)) as file:
            for step in scan(file, what):
                if isinstance(step, WholeBatch):
                    last = step.batch.header
                    first = first or last
                else:
                    end, is_at_end = step, step.position >= file.size()
        if first is not None and self._near is None and self.repairs:
            self._join_far(first)
        if self._ends_well(end, limit, at_end=is_at_end, is_newest=following is None):
            self._next_offset = end.next_offset
            self._near = last or self._near
            self._epoch = self._epoch if last is None else last.leader_epoch
        else:
            self._fill(base, limit, "", is_newest=following is None)

    def _ends_well(self, end: ScanEnd, limit: int | None, *, at_end: bool, is_newest: bool) -> bool:
        if at_end and end.next_offset in self._copy_bases:
            return True  # whatever is missing after it is whole segments
        if limit is not None and is_newest:
            return end.next_offset >= limit  # the next opening cuts a torn tail after that
        # An overlap is refused when the next segment is looked at.
        return isinstance(end, CleanEnd) and (limit is None or end.next_offset >= limit)

    def _fill(self, base: int, limit: int | None, why: str, *, is_newest: bool = False) -> None:
        """Make the new file of a segment with the copy's batches.

        If nothing of ours follows, a new segment begins where the copy's does, so that one file does not become too
        large.
        """
        repair = SegmentRepair(
            self._filesystem,
            self._log,
            base,
            limit,
            epochs=self._epochs,
            log_id=self._log_id,
            on_done=lambda _repair: None,
            near=self._near,
            is_newest=is_newest,
            why=why,
        )
        self.repairs.append(repair)
        while not repair.is_done:
            self._feed(repair, limit)
        self._next_offset, self._near = repair.next_offset, repair.last_own
        self._is_compared = self._is_compared or repair.is_compared

    def _feed(self, repair: SegmentRepair, limit: int | None) -> None:
        """Give the repair the copy's batches until it is done, or wants others."""
        trusts_own, may_end = repair.trusts_own, limit is not None
        for batch in self._copy_batches(repair.wanted):
            begins = batch.header.base_offset
            is_next = repair.is_past_own and repair.base_offset < begins == repair.next_offset
            if may_end and is_next and begins in self._copy_bases:
                repair.finish()
                return
            repair.add_batch(batch.header, batch.data)
            if repair.is_done or repair.trusts_own is not trusts_own or repair.wanted < batch.header.next_offset:
                return
        if limit is not None or not repair.taken_bytes:
            raise RepairRefused(
                f"{self._copy} does not join, or has whole batches up to offset {repair.next_offset} only, {limit} is "
                "needed: name another copy, or cut with --cut-at"
            )
        repair.finish()

    def _copy_batches(self, offset: int) -> Iterator[RecordBatch]:
        """The copy's whole batches from the one that begins with `offset` on, as far as they follow each other."""
        bases = [base for base in self._copy_bases if base <= offset][-1:]
        bases += [base for base in self._copy_bases if base > offset]
        expected, epoch = None, -1
        for base, following in pairwise([*bases, None]):
            assert base is not None
            if expected is not None and base != expected:
                return
            with closing(self._filesystem.open(segment_path(self._copy, base), writable=False)) as file:
                for step in scan(file, ScanRange(base_offset=base, end_offset=following, leader_epoch=epoch)):
                    if isinstance(step, WholeBatch):
                        epoch = step.batch.header.leader_epoch
                        if step.batch.header.base_offset >= offset:
                            yield step.batch
                    elif isinstance(step, CleanEnd):
                        expected = step.next_offset
                    else:
                        return

    def _join_far(self, header: BatchHeader) -> None:
        """Check that our first batch after the taken range is the copy's, too."""
        far = next(self._copy_batches(header.base_offset), None)
        if far is None:
            return
        if far.header != header:
            raise RepairRefused(
                f"{self._copy} does not join: its batch at offset {far.header.base_offset} is not ours, which is the "
                "first whole one behind the damage"
            )
        self._is_compared = True


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
        with ExitStack() as held:
            repairs: list[SegmentRepair] = []
            with self._alone():
                before = self._verified()
                report = RepairReport(self._log.name, dry_run, before)
                at = cut_at if cut_at is not None else _first_bad(before) if cut else None
                place = None if at is None else self._cut_place(at, before.log_start_offset)
                if copy is not None:
                    splicer = held.enter_context(closing(self._splicer(copy, before.log_start_offset)))
                    splicer.run()
                    repairs = splicer.repairs
                elif place is None and _first_damage(before) is not None:
                    raise RepairRefused(
                        f"{self._log} is damaged from offset {_first_damage(before)} on: name another copy of it with "
                        f"--from-copy, or give up what follows with --cut {self._log.name}"
                    )
                report.spliced = [
                    {"segment": segment_name(repair.base_offset)} | asdict(hole)
                    for repair in repairs
                    for hole in repair.holes
                    if hole.end_offset > hole.first_offset
                ]
                if dry_run:
                    _preview(report, place)
                    return report
                names = segment_facts(self._log, self._filesystem)
            with self._view() as view:
                if segment_facts(self._log, self._filesystem) != names:
                    raise RepairRefused(f"{self._log} was written meanwhile: do it again")
                self._apply(view, report, repairs, place, copy)
        report.after = verify_log(self._log, filesystem=self._filesystem, clock=self._clock)
        return report

    def _apply(
        self,
        view: DirectoryView,
        report: RepairReport,
        repairs: Sequence[SegmentRepair],
        place: CutPlace | None,
        copy: Path | None,
    ) -> None:
        for repair in repairs:
            report.kept_as += repair.keep_replaced()
            repair.put()
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

    def _state(self) -> LogState:
        """The log's state by the directory; this process holds the lock, so nobody writes."""
        return replace(read_state(self._log, self._filesystem), writer_pid=None)

    def _verified(self) -> VerifyReport:
        return verify_log(self._log, filesystem=self._filesystem, clock=self._clock, state=self._state())

    # ---- plans

    def _splicer(self, copy: Path, start: int) -> Splicer:
        copy = checked_log(copy, self._filesystem)
        refuse_compacted(copy, self._filesystem)
        if copy == self._log:
            raise RepairRefused(f"{copy} is the log itself: name the directory of another copy")
        if copy.name != self._log.name:
            raise RepairRefused(f"{copy} is a copy of {copy.name}, not of {self._log.name}")
        log_id = known_log_id(self._log, self._filesystem)
        return Splicer(
            self._filesystem,
            self._log,
            copy,
            start=start,
            expected=Expected.of(self._state()),
            epochs=read_leader_epochs(self._log, self._filesystem),
            log_id=log_id,
            is_same_log=log_id is not None and log_id == known_log_id(copy, self._filesystem),
        )

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

    def _cut(self, view: DirectoryView, place: CutPlace) -> Cut:
        """In the order of every cut: keep a copy, checkpoints, later segments, this one or a move, epochs."""
        with closing(Segment(self._filesystem, self._log, place.base_offset, LogConfig())) as segment:
            size_bytes = max(0, segment.file.size() - place.position)
            keep = quarantine_tail if place.is_bad else keep_range
            tail = keep(self._filesystem, segment.path, segment.file, place.position)
            self._lower_checkpoints(view, place.offset)
            later = [base for base in list_segments(self._filesystem, self._log) if base > place.base_offset]
            kept, later_bytes = move_aside(self._filesystem, self._log, later)
            kept += [] if tail is None else [tail.finish() if isinstance(tail, TailBackup) else tail]
            view.reserve.call(lambda: segment.cut(place.position, place.offset))
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
        with closing(self._filesystem.open(self._log / name, writable=False)) as file:
            return holds_range(self._filesystem, copy / name, file, 0, file.size())

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
            with closing(self._filesystem.open(segment_path(self._log, base))) as file:
                file.sync()
        recovery_point = end if found.is_whole else max(end, view.recovery_point or 0)
        high_watermark = end if view.high_watermark is None else min(end, view.high_watermark)
        if end < view.seen_to:  # the copy ends below what readers have seen of ours
            view.give_up(view.seen_to)
        view.checkpoint(recovery_point=recovery_point, high_watermark=high_watermark)
        view.sync_checkpoints()
        epochs = read_leader_epochs(self._log, self._filesystem)
        epoch = epochs.latest_epoch if epochs is not None else -1
        view.publish(LogOffsets(found.log_start_offset, end, end, high_watermark), epoch)

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
        with (
            LogDirectory.acquire(self._log.parent, self._filesystem, self._clock) as directory,
            closing(directory.attach(self._log.name)) as view,
        ):
            yield view

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock alone: the clean marker stays, so that a refused plan changes nothing."""
        try:
            lock = self._filesystem.lock(self._log.parent / LOCK_NAME)
        except LockHeld as error:
            raise LogLocked(self._log.parent, error.pid) from error
        with closing(lock):
            yield


def _first_damage(report: VerifyReport) -> int | None:
    """The lowest offset that can't be read; None if all batches are whole and in their place."""
    offsets = [f.offset for f in report.findings if f.kind in BATCH_KINDS and f.offset is not None]
    return min(offsets, default=None)


def _first_bad(report: VerifyReport) -> int | None:
    """The first damage; else the torn tail, which a cut that was stopped may have left of it."""
    damaged, torn = _first_damage(report), report.torn
    return damaged if damaged is not None or torn is None else torn.offset


def _preview(report: RepairReport, place: CutPlace | None) -> None:
    if place is not None:
        report.cut = Cut(place.offset, segment_name(place.base_offset), place.position, 0, "would be cut by name", ())
    report.rebuilt += [f.file for f in report.before.findings if f.kind in {FindingKind.INDEX, FindingKind.FILE}]


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
    with ExitStack() as held:
        if dry_run:
            opened: SegmentLog | LogReader = SegmentLog.open_reader(log, isolation="written", filesystem=filesystem)
        else:
            opened = SegmentLog.open(log, filesystem=filesystem, clock=clock)
        held.enter_context(opened)
        end = opened.log_end_offset
        found, refused, stopped = _fitting(file, int(match[1]), end, filesystem)
        if isinstance(opened, SegmentLog):
            for at in range(0, len(found), _TOGETHER):
                opened.append_as_is(found[at : at + _TOGETHER])
            opened.flush()
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


def _fitting(
    file: Path, segment: int, end: int, filesystem: Filesystem
) -> tuple[list[RecordBatch], str | None, str | None]:
    """(the whole batches that follow offset `end`, why there is none, why no more)."""
    with closing(filesystem.open(file, writable=False)) as opened:
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
