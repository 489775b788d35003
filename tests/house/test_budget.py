"""The product stays inside `budget.toml`: who raises a number does it in a commit that says what it buys."""

import tomllib
from pathlib import Path

import pytest

from tests.house.figures import figures

BUDGET = tomllib.loads((Path(__file__).parent / "budget.toml").read_text())


@pytest.fixture(scope="module")
def found():
    return {label.strip(): figure for label, figure in figures().items()}


@pytest.mark.parametrize("label", BUDGET)
def test_no_number_is_above_the_budget(found, label):
    assert found[label] <= BUDGET[label], f"{label}: {found[label]:,} of {BUDGET[label]:,}"
