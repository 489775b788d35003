"""The demo's picture: what it shows of a run, and that it can be read in light and dark, wide and narrow."""

import re
from datetime import date, timedelta
from xml.etree import ElementTree as ET

import pytest

from examples.demo.picture import COLORS, NARROW, WIDE, Day, Line, Mark, Run, _placed, picture, pictures

FIRST = date(2013, 1, 1)


def a_run(kills=4):
    days = [Day(str(FIRST + timedelta(n)), 900 + n % 7, n % 50, 900 + n % 7 - n % 50) for n in range(365)]
    seconds = [n / 4 for n in range(240)]
    lines = [
        Line("in the log", [n * 1400 for n in range(240)], "ink"),
        Line("flights in the log", [n * 1300 for n in range(240)], "ink", dashed=True),
        Line("read and committed by the stream", [n // 10 * 13000 for n in range(240)], "kept", stepped=True),
    ]
    moments = [1357000000000 + 6_000_000_000 * n for n in range(kills)]
    return Run(days, seconds, lines, [Mark("producer", "kill", 10.0 + n, ms) for n, ms in enumerate(moments)])


def test_it_is_an_svg_without_a_script_that_says_what_it_shows():
    drawn = picture(a_run())
    root = ET.fromstring(drawn)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "kept" in root.get("aria-label")
    assert len(drawn) < 100_000
    assert "<script" not in drawn
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text.endswith(" producer")] == [f"{n} producer" for n in (1, 2, 3, 4)] * 2
    assert {"kept", "replayed, dropped", "appended", "Jan", "Dec", "in the log"} <= set(texts)


def test_both_widths_stay_on_their_sheets():
    """Text is laid out by a width of 6.9 pixels a character."""
    wide, narrow = re.findall(r"<svg.*?</svg>", pictures(a_run()), re.DOTALL)
    for drawn, width in ((wide, WIDE), (narrow, NARROW)):
        for text in ET.fromstring(drawn).iter("text"):
            x, long = float(text.get("x")), 6.9 * len(text.text)
            left = {"middle": x - long / 2, "end": x - long}.get(text.get("text-anchor"), x)
            assert left >= 0, text.text
            assert left + long <= width, text.text


def test_a_kill_has_the_same_number_in_both_charts():
    """The first one, of a broker, has no event time."""
    run = a_run(2)
    run.marks.insert(0, Mark("broker", "broker", 5.0, None))
    texts = re.findall(r'class="kill"[^>]*>(\d \w+)<', picture(run))
    assert texts == ["2 producer", "3 producer", "1 broker", "2 producer", "3 producer"]


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("kills", [1, 4, 7])
def test_names_of_kills_never_stand_on_each_other(width, kills):
    marks = [(mark.at_s, number, mark) for number, mark in enumerate(a_run(kills).marks, 1)]
    placed = _placed(marks, width, 60.0)
    long = 6.9 * (len("1 producer") if width == WIDE else 1)
    for n, (x, row) in enumerate(placed):
        assert all(other_row != row or x - other >= long for other, other_row in placed[:n])


def luminance(color):
    parts = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_every_color_can_be_read_on_its_ground():
    """WCAG 2.1: a contrast of at least 4.5."""
    schemes = COLORS.split("@media")
    assert len(schemes) == 2, "light and dark"
    for scheme in schemes:
        found = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
        ground = luminance(found.pop("ground"))
        found.pop("grid")  # lines behind everything
        for name, color in found.items():
            light, dark = sorted((luminance(color), ground), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, name
