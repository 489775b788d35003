"""The scrub reads sealed segments again and again, slowly, so that damage is found before the records are needed.

    every open directory of logs    log by log, at `scrub_bytes_per_s`; then a pause of `scrub_pause_s`
      each batch                    in its place, its CRC                             as recovery and verify scan
                                    its leader epoch                                  as the log's list of them says
      the whole segment             as its seal says                                  seals.py
      no seal                       made, where all of that holds; reported
      whatever is wrong             reported: logged as an error, kept in `findings` until a later pass finds it whole,
                                    or the segment is gone

It changes only seals; a damaged segment is repaired from another member (segment_repair.py). One thread serves all
directories of a process, on the machine's clock; it reads a piece, then waits to keep the rate. A segment that was cut,
removed, repaired or reopened meanwhile is skipped.
"""

import logging
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol
from uuid import UUID

from pushrep.env import Clock, Filesystem
from pushrep.errors import PushrepError
from pushrep.log.directory_files import segment_path
from pushrep.log.errors import is_reading_short
from pushrep.log.flush_scheduler import Flusher
from pushrep.log.seals import HeadersCrc, Seal, read_seal
from pushrep.log.walk import CleanEnd, ScanEnd, ScanRange, scan_vectorised
from pushrep.records import BatchRun
from pushrep.records.leader_epochs import LeaderEpochs

_LOG = logging.getLogger("pushrep.log")

FIRST_MS = 60_000
"""When the first pass begins: a process that ends before scrubs nothing."""
_PIECE_BYTES = 256 << 10


class Scrubbed(Protocol):
    """What the scrub needs of a log."""

    @property
    def path(self) -> Path: ...
    @property
    def log_id(self) -> UUID: ...
    @property
    def leader_epochs(self) -> LeaderEpochs: ...
    def sealed(self) -> list[tuple[int, int]]:
        """(base, base of the next one) of every segment but the newest, ascending."""
        ...

    def cuts(self) -> int:
        """How often the log was cut."""
        ...

    def keep_seal(self, seal: Seal, cuts: int) -> bool:
        """Write the seal, unless the log was cut since `cuts`; whether it was written. Raises OSError."""
        ...


@dataclass(frozen=True, slots=True)
class ScrubFinding:
    """What is wrong with a segment of offsets [base_offset, end_offset): where its whole batches end, and why.

    found_ms: when that was found first, wall clock.
    """

    log: str
    segment: str
    position: int
    offset: int
    reason: str
    base_offset: int
    end_offset: int
    found_ms: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ScrubStatus:
    """Counts since the directory was opened. passes: completed ones; passed_ms: when the last one ended (wall clock),
    None without one. seals_made: for segments that had none. damaged: segments found damaged; repaired: of these, with
    another member's batches.
    """

    passes: int = 0
    passed_ms: int | None = None
    bytes_read: int = 0
    segments: int = 0
    seals_made: int = 0
    damaged: int = 0
    repaired: int = 0
    findings: tuple[ScrubFinding, ...] = ()


class Scrub:
    """The scrub of one directory. Thread-safe. Without a `scrubber` (a simulated clock) only `run_pass` reads."""

    def __init__(self, filesystem: Filesystem, scrubber: Flusher | None, clock: Clock) -> None:
        self.bytes_per_s, self.pause_s = 0, 0
        self._filesystem, self._scrubber, self._clock = filesystem, scrubber, clock
        self._turn = threading.RLock()  # held while a piece is read
        self._logs: dict[str, Scrubbed] = {}  # name of a log's directory to the log
        self._status = ScrubStatus()
        self._walk: Iterator[int] | None = None
        self._walked: Scrubbed | None = None
        self._paused = False
        self._replaced: set[tuple[Path, int]] = set()  # segments whose file was replaced since their scan began
        self._urgent: dict[tuple[Scrubbed, int], Callable[[], None]] = {}
        if scrubber is not None:
            scrubber.attach(self)

    @property
    def status(self) -> ScrubStatus:
        """The findings so far, without segments that were cut or removed since."""
        status = self._status
        current = tuple(one for one in status.findings if not self._is_gone(one))
        return status if current == status.findings else replace(status, findings=current)

    def add(self, log: Scrubbed, bytes_per_s: int, pause_s: int) -> None:
        """A log was opened; the last one's settings hold for the directory. 0 bytes a second: nothing is read."""
        with self._turn:
            self.bytes_per_s, self.pause_s = bytes_per_s, pause_s
            self._logs[log.path.name] = log
        self._schedule_next(FIRST_MS)

    def remove(self, log: Scrubbed) -> None:
        """A log is about to be closed or cut: when this returns, nothing of it is being read."""
        with self._turn:
            if self._is_open(log):
                del self._logs[log.path.name]
            if self._walked is log:
                self._end_walk()

    def pause(self) -> None:
        """Read nothing until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False
        self._schedule_next(0)

    def report(self, log: Scrubbed, found: ScrubFinding) -> None:
        """Add a finding; it stays until a later pass finds the segment whole, or it is repaired."""
        with self._turn:
            known = next((one for one in self._status.findings if one == found), None)
            if known is None:
                self._status = replace(self._status, damaged=self._status.damaged + 1)
                _LOG.error(
                    "%s: %s byte %d offset %d: %s", log.path, found.segment, found.position, found.offset, found.reason
                )
            self._is_whole(log, found.base_offset)
            since_ms = self._clock.wall_ms() if known is None else known.found_ms
            findings = (*self._status.findings, replace(found, found_ms=since_ms))
            self._status = replace(self._status, findings=findings)

    def repaired(self, log: Scrubbed, base: int) -> None:
        """The segment was repaired and checked."""
        with self._turn:
            self._replaced.add((log.path, base))
            self._is_whole(log, base)
            self._status = replace(self._status, repaired=self._status.repaired + 1)

    def end(self) -> None:
        """The directory is about to be closed."""
        if self._scrubber is not None:
            self._scrubber.detach(self)
        with self._turn:
            self._logs.clear()
            self._end_walk()

    def soon(self, log: Scrubbed, base: int, when_whole: Callable[[], None] = lambda: None) -> None:
        """Read this segment next: a roll could not seal it, its index is wrong, or a reader found damage.

        From any thread; never waits. when_whole: called in the scrub's thread if the segment is whole. Does nothing
        without a scrub in the background, or if the segment is known to be damaged: else a reader that retries would
        delay a pass for ever.
        """
        known = any(one.base_offset == base and one.log == log.path.name for one in self._status.findings)
        if self._scrubber is not None and self.bytes_per_s and not known:
            self._urgent.setdefault((log, base), when_whole)
            self._schedule_next(0)

    def run_pass(self, gave_up: Callable[[], bool] = lambda: False) -> ScrubStatus:
        """Read everything once, now, at full speed, until the end or `gave_up()`; the status then."""
        with self._turn:
            self._end_walk()
            for _ in self._pass():
                if gave_up():
                    break
            return self.status

    def flush_in_background(self) -> None:
        """The scrub thread's call: read one piece."""
        if self._paused or not self.bytes_per_s:
            return  # `resume` or `add` schedules the next call
        with self._turn:
            if self._walk is None:
                self._walk = self._urgent_ones() if self._urgent else self._pass()
            size = 0
            for piece in self._walk:
                size += piece
                if size >= _PIECE_BYTES:
                    break
            else:
                self._walk = None
        if self._walk is not None:
            self._schedule_next(max(1, 1000 * size // self.bytes_per_s))
        else:
            self._schedule_next(1000 * self.pause_s if self._status.passes else FIRST_MS)

    def _is_open(self, log: Scrubbed) -> bool:
        return self._logs.get(log.path.name) is log

    def _is_gone(self, found: ScrubFinding) -> bool:
        log = self._logs.get(found.log)
        return log is not None and (found.base_offset, found.end_offset) not in log.sealed()

    def _schedule_next(self, delay_ms: int) -> None:
        if self._scrubber is not None and self.bytes_per_s:
            self._scrubber.soon(self, delay_ms)

    def _end_walk(self) -> None:
        self._walk = self._walked = None

    def _pass(self) -> Iterator[int]:
        """Read every sealed segment of every log; yields the bytes read."""
        for log in list(self._logs.values()):
            if not self._is_open(log):
                continue  # it was closed
            self._walked = log
            for base, following in log.sealed():
                yield from self._urgent_ones()
                if not self._is_open(log):
                    break  # closed while the segment was read
                self._walked = log
                yield from self._look_at(log, base, following)
        self._walked = None
        self._status = replace(self._status, passes=self._status.passes + 1, passed_ms=self._clock.wall_ms())

    def _urgent_ones(self) -> Iterator[int]:
        """Read the segments that `soon` asked for."""
        while self._urgent:
            (log, base), when_whole = self._urgent.popitem()
            following = dict(log.sealed()).get(base)
            if not self._is_open(log) or following is None:
                continue  # it was closed, or cut
            self._walked = log
            if not (yield from self._look_at(log, base, following)):
                self._urgent.setdefault((log, base), when_whole)
                return
            name = segment_path(Path(), base).name
            if not any((found.log, found.segment) == (log.path.name, name) for found in self._status.findings):
                when_whole()

    def _look_at(self, log: Scrubbed, base: int, following: int) -> Generator[int, None, bool]:
        """Returns whether it is judged: not while the system is short of something."""
        try:
            yield from self._segment(log, base, following)
        except FileNotFoundError:
            pass  # removed by retention
        except (OSError, PushrepError) as error:
            if is_reading_short(error):
                _LOG.warning("%s: segment %d can't be read now, it is read later: %s", log.path, base, error)
                return False
            self._found(log, base, following, CleanEnd(0, base), str(error))
        return True

    def _segment(self, log: Scrubbed, base: int, following: int) -> Iterator[int]:
        headers = HeadersCrc()
        end: ScanEnd | None = None
        cuts = log.cuts()
        self._replaced.discard((log.path, base))
        what = ScanRange(base_offset=base, end_offset=following, recovery_point=following, epochs=log.leader_epochs)
        with closing(self._filesystem.open(segment_path(log.path, base), writable=False)) as file:
            file.drop_cache()  # read from the disk, not from the page cache
            for step in scan_vectorised(file, what):
                if not isinstance(step, BatchRun):
                    end = step
                    break
                headers.add_run(step)
                read = int(step.size_bytes.sum())
                self._status = replace(self._status, bytes_read=self._status.bytes_read + read)
                yield read
        is_same = (base, following) in log.sealed() and cuts == log.cuts() and (log.path, base) not in self._replaced
        if not is_same or end is None:
            return  # it was cut, removed or repaired meanwhile
        self._status = replace(self._status, segments=self._status.segments + 1)
        if (seal := self._judge(log, base, following, end, headers)) is not None:
            self._keep_seal(log, seal, cuts)

    def _judge(self, log: Scrubbed, base: int, following: int, end: ScanEnd, headers: HeadersCrc) -> Seal | None:
        """Returns the seal that it lacks."""
        if not isinstance(end, CleanEnd) or end.next_offset != following:
            why = end.reason if not isinstance(end, CleanEnd) else f"it ends at {end.next_offset}, not at {following}"
            self._found(log, base, following, end, why)
            return None
        seal = read_seal(self._filesystem, log.path, base)
        found = headers.seal(log.log_id, log.path, base, end.next_offset, end.position)
        why_not = None if seal is None else seal.contradiction(found)
        if why_not is not None:
            self._found(log, base, following, CleanEnd(0, base), why_not)
            return None
        self._is_whole(log, base)
        return found if seal is None else None

    def _keep_seal(self, log: Scrubbed, seal: Seal, cuts: int) -> None:
        with suppress(OSError):  # on a full disk: a later pass makes it
            if log.keep_seal(seal, cuts):
                self._status = replace(self._status, seals_made=self._status.seals_made + 1)
                name = segment_path(Path(), seal.base_offset).name
                _LOG.info("%s: %s had no seal, its offsets and CRCs hold: it was sealed", log.path, name)

    def _found(self, log: Scrubbed, base: int, following: int, end: ScanEnd, reason: str) -> None:
        name = segment_path(Path(), base).name
        found = ScrubFinding(log.path.name, name, end.position, end.next_offset, reason, base, following)
        self.report(log, found)

    def _is_whole(self, log: Scrubbed, base: int) -> None:
        gone = (log.path.name, segment_path(Path(), base).name)
        kept = tuple(found for found in self._status.findings if (found.log, found.segment) != gone)
        self._status = replace(self._status, findings=kept)
