"""Whether batches that came from elsewhere join: no CRC covers a base offset, so its witness is the batch before it.

expected      | 10-14 | 15-19 |   hole   | 30-33 |       a hole counts only below what the sender says was cleaned
   10 ────────▶                          ^ 30 <= cleaned_offset, else it is damage
"""

from collections.abc import Iterable


def misjoined(
    batches: Iterable[tuple[int, int]], expected: int, cleaned_offset: int, *, may_begin_below: bool = False
) -> str | None:
    """Why batches of offsets [base, next) do not follow each other from `expected` on; None if they do.

    cleaned_offset: the sender's word that offsets below it may be missing, 0 without one. may_begin_below: the first
    may hold `expected` in its middle.
    """
    for base_offset, next_offset in batches:
        if base_offset != expected:
            is_begun = may_begin_below and base_offset < expected < next_offset
            if not is_begun and not expected < base_offset <= cleaned_offset:
                what = f"base offset {base_offset} came where {expected} is expected"
                return what if base_offset < expected else f"{what}, and nobody announced a hole"
        expected, may_begin_below = next_offset, False
    return None
