"""Released formats do not change: each file of golden/records/ is written and read as when it was released.

The lines of a file are hexadecimal; `#` begins a comment. The tests with the foreign codecs use the same cases.
"""

from pathlib import Path

import pytest

from pushrep.records import HeaderColumn, RecordBatch, encode_batch

GOLDEN = Path(__file__).parent / "golden" / "records"
KEY = bytes.fromhex("9a36bd1b1d3817ff000000010000000000000000")
CASES = {
    "one_value": {"values": [b"value"], "timestamps_ms": 1_700_000_000_000},
    "nulls": {"values": [None, b"", None], "keys": [b"", None, None], "timestamps_ms": 0},
    "times": {"values": [b"a", b"b", b"c"], "timestamps_ms": [1_700_000_000_000, 1_699_999_999_999, 1_700_000_000_200]},
    "headers": {
        "values": [b"a", b"b"],
        "headers": [(("x", b"1"), ("x", None), ("ü", b"")), ()],
        "timestamps_ms": -1,
    },
    "metadata_key": {"values": [b"v" * 70], "keys": KEY, "timestamps_ms": 5, "base_offset": 1 << 40, "leader_epoch": 7},
    "metadata_header": {
        "values": [b"v"],
        "headers": HeaderColumn("stream-metadata", KEY),
        "timestamps_ms": 5,
        "producer_id": 4711,
        "producer_epoch": 2,
        "base_sequence": 90,
    },
    "offset_delta_of_two_bytes": {"values": [b"%d" % (n % 10) for n in range(66)], "timestamps_ms": 5},
}


def golden(name):
    lines = (GOLDEN / f"{name}.hex").read_text().splitlines()
    return bytes.fromhex("".join(line.partition("#")[0] for line in lines))


def test_every_file_has_its_case():
    assert {path.stem for path in GOLDEN.glob("*.hex")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_written_as_released(name):
    assert bytes(encode_batch(**CASES[name]).data) == golden(name)


@pytest.mark.parametrize("name", CASES)
def test_read_as_released(name):
    case = CASES[name]
    records = RecordBatch.check(golden(name)).records()
    count = len(case["values"])
    keys, headers, times = case.get("keys"), case.get("headers"), case["timestamps_ms"]
    if isinstance(keys, bytes):
        keys = [keys]
    if isinstance(headers, HeaderColumn):
        headers = [((headers.name, headers.values),)]
    base = case.get("base_offset", 0)
    assert [r.offset for r in records] == list(range(base, base + count))
    assert [r.value for r in records] == case["values"]
    assert [r.key for r in records] == (keys or [None] * count)
    assert [r.headers for r in records] == (headers or [()] * count)
    assert [r.timestamp_ms for r in records] == (times if isinstance(times, list) else [times] * count)
