"""The filter's working state: the pairs met so far, over marks that are never touched.

    first 12 bytes of a key → slot → marks[slot] · destinations[slot] · advanced_ms[slot] · jumped[slot] · bits

A pair gets its slot when it is first met, with what the base marks say of it, so that opening a filter over a million
marks costs nothing for the pairs that do not come. The columns are `array`s: one record reads and writes them without
numpy's cost for a scalar, a batch sees them as numpy arrays without a copy.
"""

import struct
from array import array
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from filtering import mark_columns, window_bits
from filtering.highwater import HighwaterMarks
from filtering.mark_columns import UNKNOWN
from filtering.rule import NO_MARK, Verdicts

Numbers = npt.NDArray[np.int64]

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
        self._bits_bytes = window_bits.row_bytes(window)
        self._bits = bytearray()
        self._advanced_ms, self._timed_marks = array("q"), array("q")
        self.slots: dict[bytes, int] = {}
        self.marks, self.destinations, self.jumped = array("q"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self.slots)

    def known_destination(self, pair: bytes) -> int:
        """Where the pair lives, -1 if nobody told."""
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
        """Take over what a batch made of the pairs that `read` gave; those without a slot get theirs."""
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
        # An expired pair may still stand in the base, so the base's word on every pair met here is taken out.
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
        """What the base says of these pairs."""
        count = len(pairs)
        marks, destinations, advanced = (np.full(count, nothing) for nothing in (NO_MARK, UNKNOWN, UNKNOWN))
        bits = window_bits.empty(count, self._window)
        rows = self._base.find(pids, partitions)
        found = np.flatnonzero(rows >= 0)
        if len(found):
            columns = mark_columns.select_rows(self._base.to_columns(), rows[found])
            marks[found], destinations[found] = columns.offsets, columns.destination_partitions
            advanced[found], bits[found] = columns.advanced_ms, columns.bitmaps
        return PairStates(pairs, slots, marks, destinations, advanced, bits)

    def _append(self, states: PairStates, which: Numbers) -> None:
        """Slots for some of these pairs, holding the states as they were read from the base."""
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
    """An array's content as numpy, without a copy. Let it go before the array grows: an exported one cannot."""
    return np.frombuffer(column, np.int64)
