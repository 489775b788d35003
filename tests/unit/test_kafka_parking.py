"""The parking log: what an entry is, which of two counts, and how many are parked."""

import json
from pathlib import Path

import pytest

from pushrep.kafka.answers import Code
from pushrep.kafka.errors import RefusedByTopic
from pushrep.kafka.parking import AN_HOUR_MAX, IN_A_ROW_MAX, ParkingLog
from pushrep.log import SegmentLog
from pushrep.records import Record, TimestampType

HOUR_MS = 3_600_000


def refused(offset, *, partition=1, code=Code.INVALID_TIMESTAMP):
    return RefusedByTopic("orders", partition, offset, directory=Path("outbox"), code=code, why="out of range")


def record(offset):
    return Record(offset, 17, TimestampType.CREATE_TIME, b"key", b"%d" % offset, (("h", None),))


def parking_of(log):
    made = ParkingLog(log)
    made.append_entry = lambda value, headers: log.append([value], headers=[headers], timestamps_ms=5).base_offset
    return made


@pytest.fixture
def log(tmp_path):
    with SegmentLog.open(tmp_path / "orders.parked-4") as opened:
        yield opened


def test_the_entries_are_these(log):
    """docs/internals/formats/parking.md."""
    parking = parking_of(log)
    parking.park(record(42), refused(42), 1_000)
    parking.finish(0, 2_000)
    refusal, end = log.records(0)
    assert [(name, json.loads(said)) for name, said in (*refusal.headers, *end.headers)] == [
        ("parked", {"topic": "orders", "partition": 1, "offset": 42, "error": "INVALID_TIMESTAMP",
                    "message": "out of range", "at_ms": 1_000}),
        ("parked", {"done": 0, "at_ms": 2_000}),
    ]  # fmt: skip
    assert end.value is None
    for one in (parking, ParkingLog(log)):
        assert one.record(0)._replace(offset=42) == record(42)
        assert [(skip.partition, skip.offset) for skip in one.skips("orders")] == [(1, 42)]
        assert (one.waiting("orders"), one.all()[0].is_done, one.of("another")) == ([], True, [])


def test_of_two_entries_of_an_offset_the_first_counts(log):
    """An append that was not acknowledged may be in the log all the same."""
    first, second = parking_of(log), parking_of(log)
    first.park(record(42), refused(42), 1_000)
    first.park(record(42), refused(42), 1_500)
    second.park(record(42), refused(42), 2_000)
    assert log.log_end_offset == 2, "who knows of the first makes no second"
    second.finish(1, 2_500)
    assert [(one.number, one.is_done) for one in ParkingLog(log).all()] == [(0, False)]


def test_what_is_not_parked(log):
    """faults B7: "only errors about one record"; "ten in a row or 100 an hour stop the partition"."""
    parking, now_ms = parking_of(log), 9 * HOUR_MS
    assert parking.why_not(refused(0), IN_A_ROW_MAX - 1, now_ms) is None
    assert "in a row" in parking.why_not(refused(0), IN_A_ROW_MAX, now_ms)
    for code in (None, Code.RECORD_LIST_TOO_LARGE, Code.POLICY_VIOLATION):
        assert "for itself" in parking.why_not(refused(0, code=code), 0, now_ms)
    for offset in range(AN_HOUR_MAX):
        parking.park(record(offset), refused(offset), now_ms)
    assert "within an hour" in parking.why_not(refused(AN_HOUR_MAX), 0, now_ms + HOUR_MS - 1)
    assert parking.why_not(refused(AN_HOUR_MAX), 0, now_ms + HOUR_MS) is None
    assert parking.why_not(refused(AN_HOUR_MAX, partition=2), 0, now_ms) is None


@pytest.mark.parametrize(
    "said",
    [b"", b"{", b"[" * 60_000, b"[]", b"{}", b'{"done": [0]}', b'{"topic": 1, "more": 2}', b'{"done": 1e999}', None],
)
def test_n8_an_entry_that_says_nothing_is_told_and_passed_over(log, said, caplog):
    """Whoever writes the directory may have written it: the others are known all the same, and the outbox opens."""
    parking = parking_of(log)
    parking.park(record(42), refused(42), 1_000)
    log.append([b"value"], headers=[[("parked", said)]], timestamps_ms=5)
    log.append([b"value"], headers=[[("another", said)]], timestamps_ms=5)
    parking.park(record(43), refused(43), 1_000)
    assert [one.offset for one in ParkingLog(log).all()] == [42, 43]
    assert sum("no entry of a parked record" in one for one in caplog.messages) == 2


def test_n8_an_entry_has_numbers_and_words_where_they_belong(log):
    told = {"topic": "orders", "partition": "1", "offset": 42, "error": [], "message": "m", "at_ms": 1}
    log.append([b"value"], headers=[[("parked", json.dumps(told).encode())]], timestamps_ms=5)
    assert not ParkingLog(log).all()
