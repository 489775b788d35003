"""docs/figures.md, its charts and README's figures say what benchmarks/RESULTS.md says."""

import pytest

from tests.house import charts_page


def test_the_page_is_made_from_the_results():
    assert charts_page.PAGE.read_text() == charts_page.page(), "python -m tests.house.charts_page"


@pytest.mark.parametrize("chart", charts_page.CHARTS_SHOWN, ids=lambda chart: chart.name)
def test_a_chart_is_made_from_the_results_and_is_small(chart):
    kept = (charts_page.CHARTS / f"{chart.name}.svg").read_text()
    assert kept == charts_page.svg(chart), "python -m tests.house.charts_page"
    assert len(kept) < 10_000
    assert "prefers-color-scheme:dark" in kept


def test_readme_shows_four_figures_of_the_results():
    readme = (charts_page.ROOT / "README.md").read_text()
    missing = [str(line) for line in charts_page.OF_README if str(line) not in readme]
    assert not missing, f"README.md wants these rows: {missing}"


def test_a_table_of_the_results_is_read_and_its_notes_are_not():
    text = """## push

**G7: one** (records/s, 3 rounds)

| side | median | min | max | ours ÷ it | min | max | goal |
|---|--:|--:|--:|--:|--:|--:|--:|
| push | 373,045 | 277,457 | 413,617 |  |  |  |  |
| produce() | 0.324 | 0.29 | 0.328 | 1.78 | 1.76 | 2.08 | ≤ 1 missed |

- processor time: 5 | 6
"""
    assert charts_page.results(text) == {
        "push": {
            "G7: one": {
                "push": charts_page.Row(373_045, 277_457, 413_617),
                "produce()": charts_page.Row(0.324, 0.29, 0.328),
            }
        }
    }
