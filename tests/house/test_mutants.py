"""The script behind `make mutants`: which changes it draws, which tests it asks, and what it says of each."""

import ast
import shutil
from pathlib import Path

import pytest

from tests.house import mutants
from tests.house.mutants import NOT_EXECUTED, NOT_SEEN, SEEN, Map, Trials, draw, files_of_tests, statements_of, table

SOURCE = '''"""A toy."""
LIMIT = 3


def grade(points, known=()):
    """Not a change."""
    assert points is not None
    if not known and points < LIMIT:
        raise ValueError(f"{points + 1} is too few")
    known.seen = True
    known.worst: int | None = None
    for one in known:
        _LOG.info("%s of %d", one, 3)
        if one.bad:
            continue
    return points * 2 if points == 7 else None
'''
CHANGES = {
    8: {
        "(not (not known and points < LIMIT))",
        "((not known) or (points < LIMIT))",
        "(known)",
        "((points) <= (LIMIT))",
    },
    9: {"pass"},
    10: {"pass", "False"},
    14: {"(not (one.bad))"},
    15: {"break"},
    16: {"return None", "(not (points == 7))", "((points) != (7))", "((points) // (2))", "(3)", "(8)"},
}


def applied(source, change):
    data = source.encode()
    return (data[: change.start] + change.text.encode() + data[change.end :]).decode()


def test_statements_of_functions_change_and_what_is_for_readers_does_not():
    found = [change for changes in statements_of("toy.py", SOURCE) for change in changes]
    assert {line: {one.text for one in found if one.lines.start == line} for line in CHANGES} == CHANGES
    assert {one.lines.start for one in found} == CHANGES.keys()
    for change in found:
        ast.parse(applied(SOURCE, change))


def test_every_change_of_the_product_is_python():
    changes = draw(mutants.ROOT, mutants.PACKAGES, 100, seed=1)
    small = mutants.ROOT, ["partitioner"], 20
    assert draw(*small, seed=1) == draw(*small, seed=1) != draw(*small, seed=2)
    assert len({(one.path, one.lines) for one in changes}) == 100
    for change in changes:
        ast.parse(applied((mutants.ROOT / change.path).read_text(encoding="utf-8"), change))


RULES = """def fits(n):
    if n < 0:
        return False
    return n < 10


def unused():
    return 1


def half_held(n):
    return n + 1


def program(n):
    return n * 2


if __name__ == "__main__":
    print(program(21))
"""
TESTS = """import subprocess
import sys

from partitioner.rules import fits, half_held

def test_fits():
    assert fits(1)
    assert not fits(-1)
    assert not fits(10)

def test_half():
    half_held(1)

def test_program(tmp_path):
    command = [sys.executable, "-m", "partitioner.rules"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout == "42\\n"

def test_broken():
    half_held(2)
    assert False
"""


@pytest.fixture
def toy(tmp_path):
    root = tmp_path / "toy"
    (root / "partitioner").mkdir(parents=True)
    (root / "partitioner" / "__init__.py").touch()
    (root / "partitioner" / "rules.py").write_text(RULES)
    (root / "tests" / "house").mkdir(parents=True)
    (root / "tests" / "test_toy.py").write_text(TESTS)
    house = Path(mutants.__file__).parent
    shutil.copy(mutants.__file__, root / "tests" / "house")
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(house / "children", root / "tests" / "house" / "children", ignore=without)
    return root


def test_each_change_is_seen_or_not_and_nothing_is_left_behind(toy, tmp_path, capsys):
    before = {path: path.read_bytes() for path in toy.rglob("*") if path.is_file()}
    executed = Map(toy, tmp_path / "maps", ["partitioner"])
    executed.where.mkdir()
    assert files_of_tests(toy, ()) == ["tests/test_toy.py"]
    for _ in range(2):  # the second time it is known
        executed.renew(files_of_tests(toy, ()), "not slow", workers=0)
    said = capsys.readouterr().out
    assert said.count("noting which lines 1 test files execute") == 1
    assert "isn't asked: tests/test_toy.py::test_broken" in said
    rules = toy / "partitioner" / "rules.py"
    rules.write_text("# A line more, since the tests were run.\n" + RULES)
    (tmp_path / "copy").mkdir()
    trials = Trials(toy, tmp_path / "copy", limit_s=120)
    changes = {one.was: one for found in statements_of("partitioner/rules.py", rules.read_text()) for one in found}
    chosen = changes["n < 10"], changes["n + 1"], changes["return 1"], changes["n * 2"]
    tried = [trials.attempt(change, executed.tests_of(change)) for change in chosen]
    assert [(one.outcome, one.by) for one in tried] == [
        (SEEN, "tests/test_toy.py::test_fits"),
        (NOT_SEEN, ""),
        (NOT_EXECUTED, ""),
        (SEEN, "tests/test_toy.py::test_program"),
    ]
    assert table(tried).endswith("2 seen, 1 NOT SEEN, 1 no test executes it: 50 % seen")
    rules.write_text(RULES)
    assert {path: path.read_bytes() for path in toy.rglob("*") if path.is_file() and "pyc" not in path.suffix} == before
    assert (trials.copy / "partitioner" / "rules.py").read_text().endswith(RULES), "for the next change"


def test_a_test_that_fails_without_the_change_says_nothing(toy, tmp_path):
    (tmp_path / "copy").mkdir()
    trials = Trials(toy, tmp_path / "copy", limit_s=120)
    [change] = [one for found in statements_of("partitioner/rules.py", RULES) for one in found if one.was == "n + 1"]
    tests = {"tests/test_toy.py::test_broken": 0.1, "tests/test_toy.py::test_half": 0.2}
    assert trials.attempt(change, tests).outcome == NOT_SEEN


def test_a_change_that_waits_for_ever_is_seen(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "TEST_TIMEOUT_S", 5)
    (toy / "partitioner" / "rules.py").write_text("def down(n):\n    while n:\n        n -= 1\n    return n\n")
    (toy / "tests" / "test_toy.py").write_text("from partitioner.rules import down\n\ndef test_down():\n    down(3)\n")
    (tmp_path / "copy").mkdir()
    source = (toy / "partitioner" / "rules.py").read_text()
    [change] = [one for found in statements_of("partitioner/rules.py", source) for one in found if one.was == "n -= 1"]
    trials = Trials(toy, tmp_path / "copy", limit_s=120)
    tried = trials.attempt(change, {"tests/test_toy.py::test_down": 0.1})
    assert (tried.outcome, tried.by) == (SEEN, "tests/test_toy.py::test_down")
