"""ReplayFilter: lets every source record through once, one record at a time or a whole array at a time.

    key ─ parse ─▶ no metadata, or a PID that is not ours ──────────────▶ passes, touches nothing
                └▶ pair's state ─ the rule ─▶ keep or drop ─▶ new state ─▶ .marks() for the commit

Promises, under the prefix condition (what each attempt writes for a pair reaches the log in order and without holes):
every record once, for the life of the marks. Same marks and same rows give the same answers and the same new marks,
wherever the rows are cut into batches; a batch that raises leaves the filter as it was. Time comes in by
`.marks(now_ms=...)` only. Not thread-safe: one filter belongs to one reader.

PairTable holds the pairs met so far, over marks that never change:

    first 12 bytes of a key → slot → marks[slot] · destinations[slot] · advanced_ms[slot] · jumped[slot] · bits

A pair gets its slot when it is first met, with what the given marks say of it, so opening a filter over a million marks
costs nothing for the pairs that do not come. The columns are `array`s: one record reads and writes them without numpy's
cost for a scalar, a batch sees them as numpy arrays without a copy.
"""

import logging
import math
import operator
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from filtering.errors import BadFilterSetting, PairSplit
from filtering.marks import UNKNOWN, HighwaterMarks, check_window, select_rows
from filtering.rule import NO_MARK, Numbers, PairGroups, Verdicts, group_pairs, judge_rows, no_bits, row_bytes
from filtering.stream_metadata import PARTITION_MAX, Keys, StreamMetadata, parse_keys

_PAIR = struct.Struct(">qi")
_PAIR_ROW = np.dtype([("pid", ">i8"), ("partition", ">i4")])
PAIR_BYTES = _PAIR_ROW.itemsize
assert PAIR_BYTES == _PAIR.size == 12, "a pair is the key without its offset"


class PairStates(NamedTuple):
    """Copies of the states of some pairs; slot -1 for a pair that has none yet, mark -1 for one without a mark."""

    pairs: list[bytes]
    slots: Numbers
    marks: Numbers
    destinations: Numbers
    advanced_ms: Numbers
    bitmaps: npt.NDArray[np.uint8]


class PairTable:
    """Slots over `base`, whose window must be the table's own."""

    def __init__(self, base: HighwaterMarks, window: int) -> None:
        self._base, self._window = base, window
        self._bits_bytes = row_bytes(window)
        self._bits = bytearray()
        self._advanced_ms, self._timed_marks = array("q"), array("q")
        self.slots: dict[bytes, int] = {}
        self.marks, self.destinations, self.jumped = array("q"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self.slots)

    def known_destination(self, pair: bytes) -> int:
        """The destination partition of the pair, -1 if it is not known."""
        slot = self.slots.get(pair)
        if slot is not None:
            return self.destinations[slot]
        entry = self._base.get(*_PAIR.unpack(pair)) if len(self._base) else None
        return UNKNOWN if entry is None or entry.destination_partition is None else entry.destination_partition

    def open(self, pair: bytes) -> int:
        """The pair's slot, given now if it had none."""
        slot = self.slots.get(pair)
        if slot is not None:
            return slot
        entry = self._base.get(*_PAIR.unpack(pair)) if len(self._base) else None
        mark, destination, advanced, bits = entry or (NO_MARK, None, None, bytes(self._bits_bytes))
        slot = self.slots[pair] = len(self.slots)
        self.marks.append(mark)
        self._timed_marks.append(mark)
        self.destinations.append(UNKNOWN if destination is None else destination)
        self._advanced_ms.append(UNKNOWN if advanced is None else advanced)
        self.jumped.append(0)
        self._bits += bits
        return slot

    def bits_of(self, slot: int) -> int:
        """The window of one pair as a number."""
        start = slot * self._bits_bytes
        return int.from_bytes(self._bits[start : start + self._bits_bytes], "little")

    def set_bits(self, slot: int, bits: int) -> None:
        """Replace the window of one pair; bits outside it are dropped."""
        start = slot * self._bits_bytes
        inside = bits & ((1 << min(self._window, self.marks[slot])) - 1)
        self._bits[start : start + self._bits_bytes] = inside.to_bytes(self._bits_bytes, "little")

    def passed_over(self, slot: int, old_mark: int) -> None:
        """Count the offsets that one pair's mark passed over when it rose, and move the pair's window."""
        rise = self.marks[slot] - old_mark
        if old_mark != NO_MARK:
            self.jumped[slot] += rise - 1
        if self._window:
            was_seen = old_mark != NO_MARK and rise <= self._window
            self.set_bits(slot, self.bits_of(slot) << rise | 1 << (rise - 1) if was_seen else 0)

    def read(self, pids: Numbers, partitions: Numbers) -> PairStates:
        """The states of distinct pairs, from their slots or from the base; changes nothing."""
        rows = np.empty(len(pids), _PAIR_ROW)
        rows["pid"], rows["partition"] = pids, partitions
        whole: Any = rows.view(np.dtype((np.void, PAIR_BYTES))).tolist()  # numpy gives bytes for void
        pairs: list[bytes] = whole
        slots = np.fromiter(map(self.slots.get, pairs, repeat(-1)), np.int64, len(pairs))
        states = self._base_states(pairs, slots, pids, partitions)
        met = np.flatnonzero(slots >= 0)
        if len(met):
            states.marks[met] = _view(self.marks)[slots[met]]
            states.destinations[met] = _view(self.destinations)[slots[met]]
            states.bitmaps[met] = self._bits_view()[slots[met]]
        return states

    def write(self, before: PairStates, after: Verdicts, destinations: Numbers) -> None:
        """Store the pairs of `read` as a batch left them; new pairs get a slot."""
        slots = before.slots
        new = np.flatnonzero(slots < 0)
        if len(new):
            slots = slots.copy()
            slots[new] = np.arange(len(new)) + len(self)
            self._append(before, new)
        _view(self.marks)[slots] = after.marks
        _view(self.destinations)[slots] = destinations
        _view(self.jumped)[slots] += after.jumped
        self._bits_view()[slots] = after.bitmaps

    def pairs(self) -> tuple[Numbers, Numbers]:
        """(pids, partitions) of all slots, in the order of slots."""
        rows = np.frombuffer(b"".join(self.slots), _PAIR_ROW)
        return rows["pid"].astype(np.int64), rows["partition"].astype(np.int64)

    def stamp(self, now_ms: int) -> None:
        """Every mark that rose since the last stamp rose at `now_ms`."""
        rose = self._rose()
        _view(self._advanced_ms)[rose] = now_ms
        _view(self._timed_marks)[rose] = _view(self.marks)[rose]

    def expire(self, now_ms: int, ttl_s: float) -> None:
        """Forget marks that last rose more than `ttl_s` before `now_ms`; their pairs are as if never seen."""
        self._base = self._base.without_expired(now_ms=now_ms, ttl_s=ttl_s)
        advanced = _view(self._advanced_ms)
        expired = (advanced != UNKNOWN) & (now_ms - advanced > ttl_s * 1000) & ~self._rose()
        for column, nothing in (
            (self.marks, NO_MARK),
            (self._timed_marks, NO_MARK),
            (self.destinations, UNKNOWN),
            (self._advanced_ms, UNKNOWN),
        ):
            _view(column)[expired] = nothing
        self._bits_view()[expired] = 0

    def snapshot(self) -> HighwaterMarks:
        """The base with what was learnt since; an advance that was not stamped has no time."""
        marks = _view(self.marks)
        # The base may still hold a pair that expired here, so the base's entry of every pair met here is left out.
        pids, partitions = self.pairs()
        rows = self._base.find(pids, partitions)
        rest = self._base.without_rows(rows[rows >= 0])
        known = marks != NO_MARK
        return rest.merge(
            HighwaterMarks.from_columns(
                pids[known],
                partitions[known],
                marks[known],
                _view(self.destinations)[known],
                advanced_ms=np.where(self._rose(), UNKNOWN, _view(self._advanced_ms))[known],
                bitmaps=self._bits_view()[known],
                window=self._window,
            )
        )

    def _rose(self) -> npt.NDArray[np.bool_]:
        return np.not_equal(_view(self.marks), _view(self._timed_marks))

    def _base_states(self, pairs: list[bytes], slots: Numbers, pids: Numbers, partitions: Numbers) -> PairStates:
        count = len(pairs)
        marks, destinations, advanced = (np.full(count, nothing) for nothing in (NO_MARK, UNKNOWN, UNKNOWN))
        bits = no_bits(count, self._window)
        rows = self._base.find(pids, partitions)
        found = np.flatnonzero(rows >= 0)
        if len(found):
            columns = select_rows(self._base.to_columns(), rows[found])
            marks[found], destinations[found] = columns.offsets, columns.destination_partitions
            advanced[found], bits[found] = columns.advanced_ms, columns.bitmaps
        return PairStates(pairs, slots, marks, destinations, advanced, bits)

    def _append(self, states: PairStates, which: Numbers) -> None:
        first = len(self.slots)
        pairs = states.pairs if len(which) == len(states.pairs) else [states.pairs[k] for k in which.tolist()]
        self.slots.update(zip(pairs, range(first, first + len(pairs)), strict=True))
        for column, values in (
            (self.marks, states.marks[which]),
            (self._timed_marks, states.marks[which]),
            (self.destinations, states.destinations[which]),
            (self._advanced_ms, states.advanced_ms[which]),
            (self.jumped, np.zeros(len(which), np.int64)),
        ):
            column.frombytes(values.tobytes())
        self._bits += states.bitmaps[which].tobytes()

    def _bits_view(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._bits, np.uint8).reshape(len(self.slots), self._bits_bytes)


def _view(column: "array[int]") -> Numbers:
    """An array's content as numpy, without a copy. While the result is in use the array can't grow (BufferError)."""
    return np.frombuffer(column, np.int64)


_LOG = logging.getLogger(__name__)
_NAMED_IN_LOG = 10

_PAIR_AND_OFFSET = struct.Struct(">12sq").unpack
_NO_MARKS = HighwaterMarks()


def checked_pids(only_pids: Iterable[int] | None) -> frozenset[int] | None:
    """The setting `only_pids`; None: all. Raises BadFilterSetting for what is no collection of PIDs."""
    if only_pids is None:
        return None
    given: Any = only_pids
    allowed = "None, or producer ids: whole numbers of 64 bits, signed, as in [4711]"
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise BadFilterSetting("only_pids", given, allowed)
    found = frozenset(given)
    if any(not isinstance(pid, SupportsIndex) or not -(2**63) <= pid.__index__() < 2**63 for pid in found):
        raise BadFilterSetting("only_pids", given, allowed)
    return frozenset(map(int, found))


def check_ttl(ttl_s: float | None, retention_ms: int | None) -> None:
    """Raises BadFilterSetting unless the marks outlive the records of a topic. `retention_ms` 0: no comparison."""
    if ttl_s is None:
        return
    if retention_ms is None or retention_ms < 0 or ttl_s * 1000 < retention_ms:
        kept = "for a time that was not given" if retention_ms is None else f"for retention.ms={retention_ms}"
        why = (
            f"not below the time for which the topic keeps records, {kept}: marks that are forgotten earlier let these "
            "records pass a second time. Give retention_ms=, the topic's retention.ms (-1: for ever), and a ttl_s that "
            "is not below it; with retention_ms=0 any ttl_s is accepted"
        )
        raise BadFilterSetting("ttl_s", ttl_s, why)


@dataclass(frozen=True, slots=True)
class FilterCounts:
    """Rows since the filter was made: kept + dropped + unkeyed + other_pids is all of them.

    `late` of the dropped were older than the window; `pairs` were met; `jumped` offsets lie in the gaps, over all
    pairs, that marks passed over: 0 as long as nothing is missing.
    """

    kept: int
    dropped: int
    unkeyed: int
    other_pids: int
    late: int
    pairs: int
    jumped: int

    def added_to(self, before: "FilterCounts | None") -> "FilterCounts":
        """The sums of both, with the pairs of the later one, which this is."""
        if before is None:
            return self
        return FilterCounts(
            kept=before.kept + self.kept,
            dropped=before.dropped + self.dropped,
            unkeyed=before.unkeyed + self.unkeyed,
            other_pids=before.other_pids + self.other_pids,
            late=before.late + self.late,
            pairs=self.pairs,
            jumped=before.jumped + self.jumped,
        )


class ReplayFilter:
    """Keeps a record iff its source offset is above its pair's mark, then moves the mark there.

    `window`: an offset at most so far below the mark passes too if it was never seen (window / 8 bytes for a pair).
    `only_pids`: records of other PIDs pass untouched. `ttl_s`: at `.marks(now_ms=...)` a pair whose mark last rose
    longer ago is forgotten; it must not be shorter than the topic keeps records. `marks` is never changed.
    Raises BadFilterSetting.
    """

    def __init__(
        self,
        marks: HighwaterMarks = _NO_MARKS,
        *,
        window: int = 0,
        only_pids: Iterable[int] | None = None,
        ttl_s: float | None = None,
    ) -> None:
        self._window = check_window(window)
        self._only_pids = checked_pids(only_pids)
        self._only_list = np.array(sorted(self._only_pids or ()), np.int64)
        if ttl_s is not None and not (isinstance(ttl_s, int | float) and 0 < ttl_s < math.inf):
            raise BadFilterSetting("ttl_s", ttl_s, "None or a number of seconds above 0")
        self._ttl_s = ttl_s
        self._table = PairTable(marks.with_window(self._window), self._window)
        self._kept = self._dropped = self._other_pids = self._late = 0
        self.unkeyed = 0
        """As in `counts`, of which it is the cheap part."""
        self.all_dropped: tuple[tuple[int, int], ...] = ()
        """The pairs of the last `admit_batch` of which no row passed, as with a re-used PID or a reset source."""
        self._warned: set[tuple[int, int]] = set()
        self._slots, self._marks, self._destinations = self._table.slots, self._table.marks, self._table.destinations

    def admit(self, key: bytes | None, destination_partition: int | None = None) -> bool:
        """Whether this record passes; remembers it. `destination_partition` is where in the topic it was read.

        Raises PairSplit, and BadFilterSetting for a partition that is none; both leave the filter as it was.
        """
        try:
            pair, offset = _PAIR_AND_OFFSET(key)  # type: ignore[arg-type]
            slot = self._slots[pair]
        except (struct.error, TypeError, BufferError, KeyError):
            return self._meet(key, destination_partition)
        if destination_partition is None or UNKNOWN < destination_partition == self._destinations[slot]:
            mark = self._marks[slot]
            if offset > mark:
                self._marks[slot] = offset
                self._kept += 1
                if offset != mark + 1 or self._window:
                    self._table.passed_over(slot, mark)
                return True
            if offset >= 0:
                if self._window and self._fills(slot, mark - offset):
                    self._kept += 1
                    return True
                self._dropped += 1
                return False
        return self._meet(key, destination_partition)

    def _meet(self, key: object, destination_partition: int | None) -> bool:
        """As `admit`, for what it does not know: a pair's first record, and records that the rule is not for."""
        destination = _destination(destination_partition)
        metadata = StreamMetadata.try_unpack(key)
        if metadata is None:
            self.unkeyed += 1
            return True
        if self._only_pids is not None and metadata.pid not in self._only_pids:
            self._other_pids += 1
            return True
        packed = metadata.pack()
        known = self._table.known_destination(packed[:PAIR_BYTES])
        if UNKNOWN not in (known, destination) and known != destination:
            raise PairSplit(metadata.pid, metadata.partition, known, destination)
        slot = self._table.open(packed[:PAIR_BYTES])
        if destination != UNKNOWN:
            self._destinations[slot] = destination
        return self.admit(packed)

    def _fills(self, slot: int, behind: int) -> bool:
        """Whether an offset so far behind the mark is inside the window and was not seen; then it is remembered."""
        if behind > self._window:
            self._late += 1
            return False
        bits = self._table.bits_of(slot)
        if behind == 0 or bits >> (behind - 1) & 1:
            return False
        self._table.set_bits(slot, bits | 1 << (behind - 1))
        return True

    def admit_batch(self, keys: Any, destination_partition: Any = None) -> npt.NDArray[np.bool_]:
        """Which of these rows pass, in log order; as n calls of `admit`, without a Python step per row.

        `keys`: whatever `parse_keys` reads, or its `Keys`. `destination_partition`: one for all rows, or an integer
        array of one for each. Raises PairSplit, BadFilterSetting; each leaves the filter as it was.
        """
        parsed = parse_keys(keys)
        destinations = _destinations(destination_partition, len(parsed.valid))
        passes = np.ones(len(parsed.valid), np.bool_)
        governed = parsed.valid if self._only_pids is None else parsed.valid & np.isin(parsed.pids, self._only_list)
        self.all_dropped = ()
        if governed.all():
            if len(passes):
                passes = self._judge(parsed, destinations)
        elif governed.any():
            rows = np.flatnonzero(governed)
            ours = Keys(parsed.pids[rows], parsed.partitions[rows], parsed.offsets[rows], parsed.valid[rows])
            passes[rows] = self._judge(ours, destinations if isinstance(destinations, int) else destinations[rows])
        keyed = int(np.count_nonzero(parsed.valid))
        self.unkeyed += len(passes) - keyed
        self._other_pids += keyed - int(np.count_nonzero(governed))
        return passes

    def marks(self, now_ms: int | None = None) -> HighwaterMarks:
        """The marks to commit with the rows that passed so far.

        `now_ms` (milliseconds since 1970) becomes the last advance of every pair whose mark rose since the last
        call with a time, and with `ttl_s` it decides which pairs are forgotten, here and in what comes after. Without
        it nothing expires, and a pair that rose has no known advance.
        """
        if now_ms is not None:
            self._table.stamp(int(now_ms))
            if self._ttl_s is not None:
                self._table.expire(int(now_ms), self._ttl_s)
        return self._table.snapshot()

    @property
    def counts(self) -> FilterCounts:
        """What became of the rows so far."""
        return FilterCounts(
            kept=self._kept,
            dropped=self._dropped,
            unkeyed=self.unkeyed,
            other_pids=self._other_pids,
            late=self._late,
            pairs=len(self._table),
            jumped=sum(self._table.jumped),
        )

    @property
    def pairs(self) -> tuple[Numbers, Numbers]:
        """(pids, partitions) of the pairs met so far, as columns."""
        return self._table.pairs()

    @property
    def gaps(self) -> dict[tuple[int, int], int]:
        """Gaps: for each (pid, partition) how many offsets its mark passed over. Pairs without gaps are left out.

        With a window some of them may have come in later.
        """
        pids, partitions = self._table.pairs()
        rows = zip(pids.tolist(), partitions.tolist(), self._table.jumped, strict=True)
        return {(pid, partition): jumped for pid, partition, jumped in rows if jumped}

    def _judge(self, keys: Keys, destinations: int | Numbers) -> npt.NDArray[np.bool_]:
        """Which of the rows pass; all are of pairs that the rule judges. If it raises, nothing was remembered."""
        groups = group_pairs(keys.pids, keys.partitions)
        before = self._table.read(groups.pids, groups.partitions)
        agreed = _agreed_destinations(groups, before.destinations, destinations)
        after = judge_rows(groups.together(keys.offsets), groups, before.marks, before.bitmaps, self._window)
        self._table.write(before, after, agreed)
        kept = int(after.kept.sum())
        self._kept += kept
        self._dropped += len(keys.offsets) - kept
        self._late += after.late
        self._name_all_dropped(groups, after.kept)
        return groups.back(after.keep)

    def _name_all_dropped(self, groups: PairGroups, kept: Numbers) -> None:
        """Remember and log the pairs of which nothing passed; each is logged once until something of it passes."""
        silent = np.flatnonzero(kept == 0)
        if self._warned:
            passing = np.flatnonzero(kept)
            self._warned.difference_update(
                zip(groups.pids[passing].tolist(), groups.partitions[passing].tolist(), strict=True)
            )
        if not len(silent):
            return
        self.all_dropped = tuple(zip(groups.pids[silent].tolist(), groups.partitions[silent].tolist(), strict=True))
        fresh = [pair for pair in self.all_dropped if pair not in self._warned]
        if fresh:
            self._warned.update(fresh)
            _LOG.warning(
                "every row of %d (pid, partition) pairs in this batch was dropped as a replay: %s%s; a part of the "
                "source that is read again looks like this, and so does a re-used PID, or a source that began again at "
                "offset 0",
                len(fresh),
                fresh[:_NAMED_IN_LOG],
                " and more" if len(fresh) > _NAMED_IN_LOG else "",
            )


def _destination(partition: object) -> int:
    if partition is None:
        return UNKNOWN
    try:
        number = operator.index(partition)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(partition, bool) or not 0 <= number <= PARTITION_MAX:
        raise BadFilterSetting("destination_partition", partition, "None or a partition number from 0 on")
    return number


def _destinations(partitions: Any, count: int) -> int | Numbers:
    """One number for all rows (-1: not known), or a column."""
    if partitions is None or np.ndim(partitions) == 0:
        return _destination(partitions)
    column = np.asarray(partitions)
    if column.shape != (count,) or (count and not np.issubdtype(column.dtype, np.integer)):
        raise BadFilterSetting("destination_partition", f"{column.dtype} of shape {column.shape}", f"{count} integers")
    if count and not 0 <= column.min() <= column.max() <= PARTITION_MAX:
        raise BadFilterSetting("destination_partition", int(column.min()), "a partition number from 0 on")
    return column.astype(np.int64)


def _agreed_destinations(groups: PairGroups, known: Numbers, given: int | Numbers) -> Numbers:
    """Where each pair lives after these rows. Raises PairSplit for the first row that lies elsewhere."""
    if isinstance(given, int):
        if given == UNKNOWN:
            return known
        expected = np.where(known == UNKNOWN, given, known)
        if (expected == given).all():
            return expected
        given = np.full(int(groups.sizes.sum()), given)
    together = groups.together(given)
    expected = np.where(known == UNKNOWN, together[groups.starts], known)
    wrong = np.flatnonzero(np.repeat(expected, groups.sizes) != together)
    if not len(wrong):
        return expected
    place = int(wrong[0] if groups.order is None else wrong[np.argmin(groups.order[wrong])])
    k = int(np.searchsorted(groups.starts, place, "right")) - 1
    raise PairSplit(int(groups.pids[k]), int(groups.partitions[k]), int(expected[k]), int(together[place]))
