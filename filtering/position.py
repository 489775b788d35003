"""A position of several numbers as one source offset, for records whose producer writes no stream metadata.

    PositionBits(19, 32, 12)        binlog file, place in it, row of the event
    bit   62        44 43          12 11         0
         | file (19)  | place (32)   | row (12)   |      the first part counts most, bit 62 is its highest

The rule compares source offsets and nothing else, so any position serves that can be packed without a change of order.
Each part gets its bits once and for all: other widths would give other offsets, and old marks would lie.
"""

import operator
from typing import Final

from filtering.errors import BadFilterSetting

POSITION_BITS: Final = 63
"""Of a source offset: a signed 64-bit number that is never negative."""


class PositionBits:
    """How many bits each part of a position has, the part that counts most first; at most 63 in all.

    Of two positions the larger one, compared part by part, has the larger offset. Raises BadFilterSetting.
    """

    __slots__ = ("bits",)

    def __init__(self, *bits: int) -> None:
        if not bits or any(type(size) is not int or size < 1 for size in bits) or sum(bits) > POSITION_BITS:
            raise BadFilterSetting("bits", bits, f"for each part a whole number from 1 on, {POSITION_BITS} in all")
        self.bits = bits

    def pack(self, *parts: int) -> int:
        """The source offset of a position. Raises BadFilterSetting for a part that is no number of its bits."""
        if len(parts) != len(self.bits):
            raise BadFilterSetting("parts", parts, f"{len(self.bits)} numbers")
        offset = 0
        for part, size in zip(parts, self.bits, strict=True):
            number = operator.index(part)
            if not 0 <= number < 1 << size:
                raise BadFilterSetting("part", number, f"in [0, 2^{size})")
            offset = offset << size | number
        return offset

    def unpack(self, offset: int) -> tuple[int, ...]:
        """The parts again, of a mark's offset for instance."""
        parts: list[int] = []
        for size in reversed(self.bits):
            parts.append(offset & ((1 << size) - 1))
            offset >>= size
        return tuple(reversed(parts))
