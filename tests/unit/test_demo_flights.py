"""The flights as records: positions, times, values, and what is refused."""

import io
import json
from datetime import UTC, datetime, timedelta, timezone

import pytest
from fastavro import parse_schema, schemaless_reader

from examples.demo.flights import COLUMNS, NotFlights, chunks, departure_ms, encode, parse_row, schema_json

HEADER = ",".join(COLUMNS)
EWR = "2013,1,1,517,515,2,830,819,11,UA,1545,N14228,EWR,IAH,227,1400,5,15,2013-01-01T10:00:00Z"
LGA = "2013,1,1,533,529,4,850,830,20,UA,1714,N24211,LGA,IAH,227,1416,5,29,2013-01-01T10:00:00Z"
NEVER_LEFT = "2013,1,1,NA,1935,NA,NA,2240,NA,AA,791,NA,LGA,DFW,NA,1389,19,35,2013-01-02T00:00:00Z"
PAST_MIDNIGHT = "2013,1,2,42,2359,43,518,442,36,B6,707,N580JB,JFK,SJU,189,1598,23,59,2013-01-03T04:00:00Z"


def read(value):
    return schemaless_reader(io.BytesIO(value), parse_schema(json.loads(schema_json())), None)


def row(line):
    return parse_row(line.split(","))


def steps(lines, start=(0, 0, 0), rows=2):
    return list(chunks([HEADER, *lines], start, rows))


def test_a_value_comes_back_with_every_column_and_null_for_na():
    found = read(encode(row(NEVER_LEFT)))
    assert tuple(found) == COLUMNS
    assert [name for name in COLUMNS if found[name] is None] == [
        "dep_time", "dep_delay", "arr_time", "arr_delay", "tailnum", "air_time",
    ]  # fmt: skip
    assert found["time_hour"] == datetime(2013, 1, 2, tzinfo=UTC)
    assert (found["origin"], found["distance"]) == ("LGA", 1389)


@pytest.mark.parametrize(
    ("line", "clock"),
    [(EWR, (1, 5, 17)), (LGA, (1, 5, 33)), (NEVER_LEFT, (1, 19, 35)), (PAST_MIDNIGHT, (3, 0, 42))],
)
def test_the_timestamp_is_the_departure_by_new_yorks_clock(line, clock):
    winter = timezone(timedelta(hours=-5))
    left = datetime.fromtimestamp(departure_ms(row(line)) / 1000, winter)
    assert (left.day, left.hour, left.minute) == clock


def test_offsets_count_within_the_airport_over_all_steps():
    found = steps([EWR, LGA, EWR, EWR, LGA], rows=2)
    assert [[(c.partition, c.first_offset, len(c.values)) for c in step] for step in found] == [
        [(0, 0, 1), (2, 0, 1)],
        [(0, 1, 2)],
        [(2, 1, 1)],
    ]


def test_what_lies_below_the_start_is_counted_and_left_out():
    found = steps([EWR, LGA, EWR, EWR, LGA], start=(2, 0, 1))
    assert [[(c.partition, c.first_offset, len(c.values)) for c in step] for step in found] == [
        [(0, 2, 1)],
        [(2, 1, 1)],
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (EWR.replace(",EWR,", ",BOS,"), "line 3 is no flight: origin is 'BOS'"),
        (EWR.replace(",1400,", ",far,"), "line 3 is no flight: distance is 'far', not a number"),
        (EWR.replace(",UA,1545", ",UA,NA"), "line 3 is no flight: flight is NA"),
        (EWR + ",more", "line 3 is no flight: 20 columns"),
        ("2013,1", "line 3 is no flight"),
    ],
)
def test_a_broken_line_is_named(line, why):
    with pytest.raises(NotFlights, match=why):
        steps([EWR, line])


def test_another_table_is_refused_at_its_header():
    with pytest.raises(NotFlights, match="line 1 is no flight: the header is 'a,b'"):
        list(chunks(["a,b", EWR], (0, 0, 0), 10))
