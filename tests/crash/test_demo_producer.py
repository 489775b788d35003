"""The demo's producer under kill -9: no record is missing from the log, and it reports what its stale position
repeats.
"""

import json
import os
import random
import signal

import pytest

from examples.demo.flights import COLUMNS
from examples.demo.producer import BadPosition, LaggingPosition, load_position, save_position, start_offsets
from filtering import StreamMetadata
from pushrep.log import SegmentLog
from tests.programs import PythonProgram

MANY = 15_000  # more than is appended while this process, which wants to kill it, gets no processor for a while
ROW = "2013,1,1,517,515,2,830,819,11,UA,{flight},N14228,{origin},IAH,227,1400,5,15,2013-01-01T10:00:00Z"


def write_flights(path, count, seed):
    rng = random.Random(seed)
    lines = [ROW.format(flight=n, origin=rng.choice(["EWR", "JFK", "LGA"])) for n in range(count)]
    path.write_text("\n".join([",".join(COLUMNS), *lines]) + "\n")
    return [sum(f",{origin}," in line for line in lines) for origin in ("EWR", "JFK", "LGA")]


def start(tmp_path, rate):
    options = {
        "flights": tmp_path / "flights.csv", "log": tmp_path / "log", "position": tmp_path / "position.json",
        "schema": tmp_path / "flights.avsc", "rate": rate, "step": 10, "save-every": 300,
    }  # fmt: skip
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return PythonProgram("-m", "examples.demo.producer", *arguments, has_errors=True)


def hear(process, until):
    """Read what it tells up to the first `appended` past `until` records (None: to its end)."""
    told = []
    for line in process.stdout:
        told.append(json.loads(line))
        if until is not None and told[-1]["event"] == "appended" and sum(told[-1]["next_offsets"]) > until:
            break
    return told


def end(process, number=None):
    if number is not None:
        process.send_signal(number)
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    return process.wait(120), said


def source_offsets(tmp_path, partition):
    with SegmentLog.open_reader(tmp_path / "log" / f"flights-{partition}", isolation="written") as log:
        return [StreamMetadata.unpack(r.key) for r in log.records(log.log_start_offset)]


def test_kills_repeat_records_and_lose_none(tmp_path):
    flights = write_flights(tmp_path / "flights.csv", MANY, seed=1)
    again = 0
    for until in (700, 1900, 2800):
        process = start(tmp_path, rate=1000)
        told = hear(process, until)
        assert end(process, signal.SIGKILL)[0] == -signal.SIGKILL
        again += sum(told[0]["in_log"]) - sum(told[0]["resumes_at"])
    process = start(tmp_path, rate=0)
    told = hear(process, None)
    assert end(process) == (0, "")
    again += sum(told[0]["in_log"]) - sum(told[0]["resumes_at"])
    assert told[-1]["event"] == "finished"
    assert told[-1]["next_offsets"] == flights
    appended = 0
    for partition, count in enumerate(flights):
        found = source_offsets(tmp_path, partition)
        appended += len(found)
        assert len({m.pid for m in found}) == 1, "one producer id over all restarts"
        assert {m.partition for m in found} == {partition}
        ahead = [m.offset for m in found]
        highest = -1
        for offset in ahead:
            assert offset <= highest + 1, f"a hole before source offset {offset} of partition {partition}"
            highest = max(highest, offset)
        assert highest == count - 1
    assert sum(told[-1]["log_ends"]) == appended
    assert appended - sum(flights) == again > 300


def test_sigterm_closes_cleanly(tmp_path):
    write_flights(tmp_path / "flights.csv", MANY, seed=2)
    process = start(tmp_path, rate=1000)
    hear(process, 100)
    code, said = end(process, signal.SIGTERM)
    assert (code, said) == (143, "")
    with SegmentLog.open(tmp_path / "log" / "flights-0") as log:
        assert log.recovery.opening.value == "normal", "a clean close leaves a log that opens without a scan"


def test_a_position_ahead_of_the_log_makes_no_hole():
    assert start_offsets([5, 9, 0], [7, 3, 0]) == [5, 3, 0]


def test_the_position_lags_by_one_save():
    lagging = LaggingPosition([0, 0], every=10)
    assert lagging.advance(9, [5, 4]) is None
    assert lagging.advance(1, [6, 4]) == [0, 0]
    assert lagging.advance(12, [12, 10]) == [6, 4]
    assert lagging.advance(10, [20, 12]) == [12, 10]


def test_a_saved_position_comes_back(tmp_path):
    path = tmp_path / "position.json"
    assert load_position(path) == [0, 0, 0], "nothing was saved"
    save_position(path, [1, 2, 3])
    assert load_position(path) == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no saved position"),
        ("[1, 2, 3]", "no saved position"),
        ('{"version": 2, "next_offsets": [0, 0, 0]}', "version 2"),
        ('{"version": 1, "next_offsets": [0, -1, 0]}', "next_offsets is"),
        ('{"version": 1, "next_offsets": [0, 1]}', "next_offsets is"),
        ('{"version": 1, "next_offsets": 7}', "next_offsets is 7"),
    ],
)
def test_a_bad_position_is_refused_with_the_way_on(tmp_path, text, why):
    path = tmp_path / "position.json"
    path.write_text(text)
    with pytest.raises(BadPosition, match=why) as refused:
        load_position(path)
    assert os.fspath(path) in str(refused.value)
    assert "remove the file" in str(refused.value)
