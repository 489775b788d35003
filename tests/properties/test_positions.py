"""Positions of several numbers in one source offset: they keep their order, and come out as they went in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from filtering import BadFilterSetting, FilteringError, PositionBits


@st.composite
def widths_and_positions(draw):
    widths = draw(st.lists(st.integers(1, 63), min_size=1, max_size=5).filter(lambda bits: sum(bits) <= 63))
    # Next to each other as often as far apart.
    part = [st.one_of(st.integers(0, min(3, 2**bits - 1)), st.integers(0, 2**bits - 1)) for bits in widths]
    return widths, draw(st.tuples(*part)), draw(st.tuples(*part))


@given(widths_and_positions())
def test_positions_are_ordered_as_their_offsets_are(drawn):
    widths, one, other = drawn
    packing = PositionBits(*widths)
    first, second = packing.pack(*one), packing.pack(*other)
    assert (first < second, first == second) == (one < other, one == other)
    assert packing.unpack(first) == one
    assert 0 <= first < 2**63


@pytest.mark.parametrize("bits", [(), (0,), (64,), (32, 32), (1, -1), (True, 3), (1.0,)])
def test_bits_that_fit_no_offset_are_refused(bits):
    with pytest.raises(BadFilterSetting, match="bits"):
        PositionBits(*bits)


@pytest.mark.parametrize("part", [-1, 2**12, 2**70])
def test_a_part_outside_of_its_bits_is_refused(part):
    with pytest.raises(BadFilterSetting, match=r"\[0, 2\^12\)") as refused:
        PositionBits(19, 12).pack(1, part)
    assert refused.value.value == part
    assert isinstance(refused.value, FilteringError)


def test_what_is_no_number_and_other_counts_of_parts_are_refused():
    with pytest.raises(TypeError):
        PositionBits(19).pack("3")
    with pytest.raises(BadFilterSetting, match="2 numbers"):
        PositionBits(19, 12).pack(1)
