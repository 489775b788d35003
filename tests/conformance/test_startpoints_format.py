"""Golden bytes of the startpoint store, and a second reader from docs/internals/formats/startpoints.md alone."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from pushrep.startpoints import Checkpoint, LogFacts, Reader, Startpoint, StartpointFailed, StartpointStore
from tests.support.simulated_disk import SimulatedClock

GOLDEN = Path(__file__).parent / "golden" / "startpoints"
DOC = Path(__file__).parents[2] / "docs" / "internals" / "formats" / "startpoints.md"
LOG = LogFacts(start=10, end=100, first_at=lambda ms: 42 if ms <= 5000 else None, log_id="log-1")


def live(directory):
    """One of each event, and of each kind of startpoint."""
    clock = SimulatedClock(1_700_000_000_000)
    store = StartpointStore.open(directory, clock=clock)
    store.write(
        "billing",
        "orders",
        0,
        Startpoint.timestamp(5000, reset_marks=True),
        "falsch f\u00fcr alle seit 5",
        author="ann",
    )
    claim = store.claim("billing", "orders", 0)
    store.start(claim, LOG)
    store.commit(claim, 45, sequence=1, log_id="log-1")
    store.consume(claim, 1)
    clock.advance(1000)
    store.write(None, "orders", None, Startpoint.specific(500, out_of_range="latest"), "all", author="ann", ttl_s=None)
    store.start(store.claim("audit", "orders", 3), LOG)
    store.write("billing", "orders", None, Startpoint.relative(ms=-60_000), "tasks", author="ann", ttl_s=3600)
    store.fan_out("billing", "orders", {"a": [0, 1]})
    store.write("billing", "orders", 7, Startpoint.specific(5), "too far", author="ann")
    with pytest.raises(StartpointFailed):
        store.start(store.claim("billing", "orders", 7), LOG)
    store.cancel(6, "typo", author="bob")
    for startpoint in (Startpoint.earliest(), Startpoint.latest(), Startpoint.relative(records=-5)):
        store.write("billing", "other", 0, startpoint, "kinds", author="ann", ttl_s=1)
    clock.advance(1000)
    store.write("billing", "other", 1, Startpoint.bootstrap(), "kinds", author="ann")
    store.start(store.claim("billing", "other", 1), LOG)
    store.claim("b\u00e9ta", "other", 2, task="t")
    return store


def files(directory):
    """{name: bytes} of what the format page promises."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.startswith(".lock")
    }


def test_the_golden_bytes_are_written(tmp_path):
    live(tmp_path / "store")
    assert files(tmp_path / "store") == files(GOLDEN)


def test_the_golden_bytes_are_read(tmp_path):
    store = StartpointStore.open(GOLDEN)
    assert store.history() == live(tmp_path / "store").history()
    found = store.checkpoint(Reader("billing", "orders", 0))
    assert found == Checkpoint(
        reader=Reader("billing", "orders", 0), generation=1, offset=45, sequence=1, log_id="log-1"
    )
    assert len(store.checkpoints()) == 5


def crc32c(data):
    """Castagnoli's, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def documented_fields():
    """{event: field names in their order}, from the table of the journal's section."""
    section = DOC.read_text(encoding="utf-8").split("## startpoints.journal")[1].split("\n## ")[0]
    found = {}
    for event, cell in re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE):
        names = re.findall(r"(?:^|· |then )`(\w+)`", cell.replace("as `consumed`", ""))
        found[event] = (found["consumed"] if cell.startswith("as `consumed`") else []) + names
    return found


def test_a_reader_that_knows_only_the_page():
    fields = documented_fields()
    assert set(fields) == {"written", "applied", "consumed", "failed", "expired", "cancelled"}
    head, *transactions = (GOLDEN / "startpoints.journal").read_bytes().split(b"\n")[:-1]
    seen, last = set(), 0
    for line in (head, *transactions):
        assert line[:8] == b"%08x" % crc32c(line[9:])
        assert line[8:9] == b" "
    assert json.loads(head[9:]) == {"format": "pushrep.startpoints", "version": 1}
    assert head.decode() in DOC.read_text(encoding="utf-8"), "the page's first line is the true one"
    for line in transactions:
        for fact in json.loads(line[9:]):
            event = fact.pop("event")
            assert list(fact) == fields[event]
            seen.add(event)
            if event == "written":
                assert fact["sequence"] > last
                last = fact["sequence"]
                assert list(fact["startpoint"]) == ["kind", "value", "out_of_range", "reset_marks", "replace_until"]
    assert seen == set(fields)
    for path in (GOLDEN / "checkpoints").iterdir():
        found = json.loads(path.read_text(encoding="utf-8"))
        words = "\0".join((found["consumer"], found["topic"], str(found["partition"]), found["task"] or ""))
        assert path.stem == hashlib.sha256(words.encode()).hexdigest()[:32]
        crc = found.pop("crc32c")
        assert crc == crc32c(json.dumps(found, sort_keys=True, separators=(",", ":")).encode())
        names = re.findall(r'"(\w+)":', DOC.read_text(encoding="utf-8").split("```json")[1].split("```")[0])
        assert sorted([*found, "crc32c"]) == names
        assert found["generation"] >= 1
