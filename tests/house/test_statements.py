"""Every statement of push replication, startpoints and replay filtering has its test; so has a replica's table."""

import re
from functools import cache

import pytest

from pushrep.election.follower import LEADER_CHECKS, SESSION_CHECKS, RequestFinding
from pushrep.wire.error_codes import ErrorCode
from tests.house.statements_page import PAGE, STATEMENTS, held_by, page

NUMBERS = {"L": 5, "S": 5, "A": 3, "H": 2, "E": 3, "R": 2, "Q": 2}
IDENTITY = {"A": 5, "C": 3, "M": 8, "O": 8, "P": 4, "T": 5}
STARTPOINTS = {str(rule) for rule in range(1, 10)}
BEFORE_THE_TABLE = {error.name for error, _ in (*LEADER_CHECKS, *SESSION_CHECKS)}
REFUSALS = BEFORE_THE_TABLE | {ErrorCode.UNKNOWN_TOPIC_ID.name, ErrorCode.KAFKA_STORAGE_ERROR.name}


def numbered(counts):
    return {f"{letter}{n}" for letter, count in counts.items() for n in range(1, count + 1)}


@cache
def functions(path):
    """The names of a test file's own; to parse the files took seconds."""
    return set(re.findall(r"^(?:def |class )?(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))


def test_the_page_is_made_of_the_statements():
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "python -m tests.house.statements_page"


@pytest.mark.parametrize(
    ("heading", "wanted"),
    [
        ("PushManager", numbered(NUMBERS)),
        ("What a replica finds", {finding.name for finding in RequestFinding}),
        ("What a replica refuses", REFUSALS),
        ("Startpoints", STARTPOINTS),
        ("Identity", numbered(IDENTITY) - {"O3"}),
    ],
)
def test_every_statement_has_a_line(heading, wanted):
    ids = {row[0] for row in STATEMENTS[heading]}
    assert wanted <= ids
    assert all(one.islower() or one in wanted for one in ids), "no other number"


@pytest.mark.parametrize("heading", STATEMENTS)
def test_every_line_names_tests_that_are_there(heading):
    for row in STATEMENTS[heading]:
        tests = list(held_by(row))
        assert tests, f"{row[:2]} has no test"
        for path, name in tests:
            assert name in functions(path), f"{row[:2]}: {path.name}::{name} is not there"


def test_each_behaviour_of_a_peer_says_how_it_is_here():
    assert {row[0] for row in STATEMENTS["Peers"]} == {"Aeron Archive", "Samza", "Kafka", "RocketMQ"}
    for _, statement, *_ in STATEMENTS["Peers"]:
        kind, _, behaviour = statement.partition(": ")
        assert kind in {"same", "on purpose", "not offered"}, statement
        assert kind == "same" or "; here " in behaviour, statement


def test_a_number_stands_in_the_names_of_its_tests():
    for row in STATEMENTS["PushManager"]:
        for _, name in held_by(row):
            assert name.startswith(f"test_{row[0].lower()}_"), f"{row[0]}: {name}"
    for row in STATEMENTS["Startpoints"]:
        for _, name in held_by(row) if row[0] in STARTPOINTS else ():
            assert re.search(rf"_rules?_(\d_and_)?{row[0]}_", name), f"{row[0]}: {name}"
