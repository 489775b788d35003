"""Every statement of push replication, startpoints and replay filtering has its test; so has a replica's table."""

import re
from functools import cache
from pathlib import Path

import pytest

from pushrep.election.follower import LEADER_CHECKS, SESSION_CHECKS, RequestFinding
from pushrep.wire.error_codes import ErrorCode

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "internals" / "statements.md").read_text(encoding="utf-8")
NUMBERS = {"L": 5, "S": 5, "A": 3, "H": 2, "E": 3, "R": 2, "Q": 2}
NUMBERED = {f"{letter}{n}" for letter, count in NUMBERS.items() for n in range(1, count + 1)}
BEFORE_THE_TABLE = {check.error.name for check in (*LEADER_CHECKS, *SESSION_CHECKS)}
REFUSALS = BEFORE_THE_TABLE | {ErrorCode.UNKNOWN_TOPIC_ID.name, ErrorCode.KAFKA_STORAGE_ERROR.name}

STARTPOINTS = {str(rule) for rule in range(1, 10)}
PROMISES = {
    "kinds", "bootstrap", "newest", "readers", "states", "record", "topic", "crash", "processes", "groups", "plain",
    "source", "export", "command", "away", "repair", "replaced", "kept",
}  # fmt: skip

FILTERING = {
    "key", "carrier", "pid", "rule", "order", "given", "split", "window", "ttl", "counts", "place", "prefix",
    "alone", "stops", "position", "again", "assignment", "transaction", "operator", "batches", "adopt",
    "stores", "object stores", "sql", "relay", "killed", "twice", "changed", "back", "tables", "F8",
}  # fmt: skip


def lines(heading):
    """{first cell: tests} of the table below a heading."""
    part = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")][2:]
    return {row[0].strip(): re.findall(r"`(tests/[\w/.]+::\w+)`", row[-1]) for row in rows}


IDENTITY = {
    "A1",
    "A2",
    "A3",
    "A4",
    "A5",
    "C1",
    "C2",
    "C3",
    "M1",
    "M2",
    "M3",
    "M4",
    "M5",
    "M6",
    "M7",
    "M8",
    "O2",
    "O5",
    "O1",
    "O4",
    "O7",
    "O6",
    "O8",
    "P1",
    "P2",
    "P3",
    "P4",
    "T1",
    "T2",
    "T3",
    "T4",
    "T5",
}


@cache
def functions(path):
    """The names of a test file's own; to parse the files took seconds."""
    return set(re.findall(r"^def (\w+)\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize(
    ("heading", "wanted"),
    [
        ("PushManager", NUMBERED),
        ("What a replica finds", {finding.name for finding in RequestFinding}),
        ("What a replica refuses", REFUSALS),
        ("Startpoints", STARTPOINTS | PROMISES),
        ("Replay filtering", FILTERING),
        ("Identity", IDENTITY),
    ],
)
def test_every_statement_has_a_line(heading, wanted):
    assert lines(heading).keys() == wanted


@pytest.mark.parametrize(
    "heading",
    [
        "PushManager",
        "What a replica finds",
        "What a replica refuses",
        "Together",
        "Startpoints",
        "Replay filtering",
        "Identity",
    ],
)
def test_every_line_names_tests_that_are_there(heading):
    for statement, tests in lines(heading).items():
        assert tests, f"{statement} has no test"
        for test in tests:
            path, _, name = test.partition("::")
            assert name in functions(path), f"{statement}: {test} is not there"


def test_a_numbered_statement_stands_in_the_name_of_its_test():
    for number, tests in lines("PushManager").items():
        for test in tests:
            assert test.partition("::")[2].startswith(f"test_{number.lower()}_"), f"{number}: {test}"


def test_a_rule_of_startpoints_stands_in_the_name_of_its_tests():
    for number, tests in lines("Startpoints").items():
        for test in tests if number in STARTPOINTS else ():
            assert re.search(rf"_rules?_(\d_and_)?{number}_", test), f"{number}: {test}"
