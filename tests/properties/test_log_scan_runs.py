"""The vectorised scan gives the same results as the scan batch by batch, for any file content."""

from contextlib import suppress
from itertools import combinations, pairwise, product, takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushrep.env import read_whole
from pushrep.log import LogConfig
from pushrep.log.indexes import IndexCheck
from pushrep.log.segment import OFFSET_ENTRY, TIME_ENTRY, Segment
from pushrep.log.walk import (
    CleanEnd,
    ScanRange,
    WholeBatch,
    from_index_entry,
    scan,
    scan_headers,
    scan_vectorised,
)
from pushrep.records import BatchHeader, BatchRun, Codec, CorruptRecordBatch, RecordBatch, encode_batch
from pushrep.records.header import CRC_COVERS_FROM, checked_run, crc32c, write_crc
from pushrep.records.leader_epochs import LeaderEpochs
from tests.support.simulated_disk import SimulatedDisk

BASE = 100
EDGES = (-(1 << 31), -2, -1, 0, 1, 2, 3, 7, 49, 61, (1 << 31) - 1)
WIDE = (*EDGES, -(1 << 63), 1 << 31, BASE + (1 << 31), (1 << 63) - 10, (1 << 63) - 2, (1 << 63) - 1)
FIELDS = BatchHeader._fields
BITS = {"magic": 8, "attributes": 16, "producer_epoch": 16, "crc": 32}
IS_WIDE = {"base_offset", "base_timestamp_ms", "max_timestamp_ms", "producer_id"}


def batch(values, offset, epoch, time_ms, codec=Codec.NONE):
    encoded = encode_batch(values, timestamps_ms=time_ms, base_offset=offset, leader_epoch=epoch, codec=codec)
    return bytes(encoded.data)


@st.composite
def batches(draw, count_max=12):
    """Batches in order: holes between their offsets, epochs that rise, times that go to and fro."""
    offset, epoch, found = BASE, draw(st.integers(-1, 2)), []
    for _ in range(draw(st.integers(0, count_max))):
        offset += draw(st.sampled_from([0, 0, 0, 1, 5]))
        epoch += draw(st.sampled_from([0, 0, 0, 1]))
        values = [b"v" * draw(st.integers(0, 90))] * draw(st.integers(1, 4))
        codec = draw(st.sampled_from([Codec.NONE, Codec.NONE, Codec.GZIP]))
        found.append(batch(values, offset, epoch, draw(st.integers(-1, 6)), codec))
        offset += len(values)
    return found


def with_fields(data, *, fits, **fields):
    """The batch with other numbers in its header; with `fits` the CRC is made to fit, as a wrong writer would."""
    fields = {name: wrapped(name, value) for name, value in fields.items()}
    changed = bytearray(BatchHeader.parse(data)._replace(**fields).pack() + data[61:])
    if fits:
        write_crc(changed, crc32c(changed, CRC_COVERS_FROM))
    return bytes(changed)


def wrapped(name, value):
    bits = BITS.get(name, 64 if name in IS_WIDE else 32)
    value %= 1 << bits
    return value - (1 << bits) if name != "crc" and value >= 1 << (bits - 1) else value


def edges(name):
    return WIDE if name in IS_WIDE else EDGES


def field_changed(draw, data):
    name = draw(st.sampled_from(FIELDS))
    return with_fields(data, fits=draw(st.booleans()), **{name: draw(st.sampled_from(edges(name)))})


@st.composite
def files(draw):
    """The bytes of a segment: whole, cut, with something behind, flipped, with a batch changed, twice or missing."""
    parts = draw(batches())
    kind = draw(st.sampled_from(["whole", "cut", "zeros", "rubbish", "flip", "field", "field", "twice", "missing"]))
    at = draw(st.integers(0, len(parts) - 1)) if parts else 0
    if parts and kind == "field":
        parts[at] = field_changed(draw, parts[at])
    elif parts and kind == "twice":
        parts.insert(at, parts[at])
    elif parts and kind == "missing":
        del parts[at]
    data = bytearray(b"".join(parts))
    if data and kind == "flip":
        data[draw(st.integers(0, len(data) - 1))] ^= draw(st.integers(1, 255))
    elif data and kind == "cut":
        del data[draw(st.integers(0, len(data) - 1)) :]
    elif kind == "zeros":
        data += bytes(draw(st.integers(1, 200)))
    elif kind == "rubbish":
        data += draw(st.binary(min_size=1, max_size=80))
    return bytes(data)


def file_of(data):
    disk = SimulatedDisk()
    disk.make_directory(Path("/logs"))
    file = disk.open(Path("/logs/x"), create=True)
    file.write_at(data, 0)
    return file


@pytest.mark.parametrize("base_offset", [(1 << 63) - 1, 1 << 63, 10**20 - 1])
def test_a_name_that_no_offset_has_is_judged_alike(base_offset):
    file = file_of(batch([b"value"], 0, 0, 0))
    for what in (ScanRange(base_offset=base_offset), ScanRange(base_offset=0, end_offset=base_offset)):
        found = list(one_by_one(scan_vectorised(file, what)))
        assert found == list(one_by_one(scan(file, what)))


ranges = st.builds(
    ScanRange,
    position=st.just(0),  # of a tuple's fields what stands not here would be drawn by its type
    last_offset=st.none(),
    closed_at=st.none(),
    may_lack_records=st.just(False),
    epochs=st.none(),
    base_offset=st.sampled_from([BASE, BASE, BASE, BASE - 5, BASE + 1]),
    next_offset=st.sampled_from([None, None, BASE, BASE + 1]),
    end_offset=st.sampled_from([None, None, BASE + 1, BASE + 8, BASE + 40]),
    recovery_point=st.sampled_from([0, BASE, BASE + 6, BASE + 500]),
    leader_epoch=st.sampled_from([-1, -1, 0, 1]),
)


def one_by_one(steps):
    """The steps of either scan in one form."""
    for step in steps:
        if isinstance(step, WholeBatch):
            yield step.position, step.batch.header
        elif isinstance(step, BatchRun):
            yield from step.headers()
        else:
            yield step


histories = st.sampled_from([None, None, LeaderEpochs(((0, BASE),)), LeaderEpochs(((0, BASE - 5), (1, BASE + 4)))])


@given(files(), ranges, histories, st.sampled_from([1, 70, 150, 400, 1 << 16]))
def test_both_scans_see_the_same_batches_and_the_same_end(data, what, epochs, window_bytes):
    file, what = file_of(data), what._replace(epochs=epochs)
    assert list(one_by_one(scan_vectorised(file, what, window_bytes=window_bytes))) == list(
        one_by_one(scan(file, what))
    )


@given(files(), ranges)
def test_by_headers_alone_the_same_batches_are_in_their_place(data, what):
    """Up to the first that the whole scan refuses; that may be whole but for its CRC, and then more may follow it."""
    file = file_of(data)
    scanned = [(step.position, step.batch.header) for step in scan(file, what) if isinstance(step, WholeBatch)]
    by_scan = [(at, h.base_offset, h.next_offset, h.size_bytes, h.leader_epoch) for at, h in scanned]
    found = [tuple(one[:5]) for one in scan_headers(file, what)]
    if what.end_offset is not None:  # what reaches into the next segment is the opener's to refuse, and no reader's
        by_scan = list(takewhile(lambda one: one[2] <= what.end_offset, by_scan))
    assert found[: len(by_scan)] == by_scan
    for (_, _, next_offset, *_), (position, base_offset, *_) in pairwise(found[len(by_scan) - 1 :] if by_scan else []):
        assert base_offset == next_offset
        assert crc_is_wrong(data, position) or crc_is_wrong(data, found[len(by_scan)][0])
    if not by_scan and found:
        assert crc_is_wrong(data, found[0][0])


def crc_is_wrong(data, position):
    header = BatchHeader.parse(data, position)
    return crc32c(data[position : position + header.size_bytes], CRC_COVERS_FROM) != header.crc


@given(batches().filter(bool), ranges, st.integers(-2, 2), st.integers(0, 11))
def test_an_index_entry_leads_to_its_own_batch_or_nowhere(parts, what, off_by, number):
    data, at = b"".join(parts), sum(map(len, parts[: number % len(parts)]))
    header = BatchHeader.parse(data, at)
    what = what._replace(next_offset=None, end_offset=None)
    entry = (header.last_offset - what.base_offset + off_by, at)
    begun = from_index_entry(file_of(data), what, entry)
    is_true = off_by == 0 and entry[0] >= 0 and header.base_offset >= what.base_offset
    is_true = is_true and header.leader_epoch >= what.leader_epoch
    assert (begun.position, begun.first_offset) == ((at, header.base_offset) if is_true else (0, what.base_offset))
    steps = [scan(file_of(data), what._replace(position=at, last_offset=what.base_offset + entry[0]))]
    steps.append(scan_vectorised(file_of(data), what._replace(position=at, last_offset=what.base_offset + entry[0])))
    first, second = (next(iter(one_by_one(step))) for step in steps)
    assert first == second
    assert (first == (at, header)) is is_true or entry[0] < 0


@given(files())
def test_a_run_takes_what_a_check_of_each_batch_takes(data):
    assert list(checked_run(data, 7, 1 << 20).headers()) == [(7 + at, header) for at, header in checked_alone(data)]


def checked_alone(data):
    """(position, header) of the whole batches at the beginning of `data`; each is checked alone."""
    found, at = [], 0
    with suppress(CorruptRecordBatch):
        while True:
            header = BatchHeader.parse(data, at)
            RecordBatch.check(data[at : at + header.size_bytes], header)
            found.append((at, header))
            at += header.size_bytes
    return found


@pytest.mark.parametrize(
    "names",
    [
        *FIELDS,
        ("record_count", "last_offset_delta"),
        ("base_offset", "last_offset_delta"),
        ("record_count", "attributes"),
    ],
)
@pytest.mark.parametrize("window_bytes", [200, 1 << 16])
def test_both_scans_judge_every_field_alike(names, window_bytes):
    parts = [batch([b"value"] * 4, BASE + 10 * n, 1, 0) for n in range(4)]
    parts[2] = with_fields(parts[2], fits=True, last_offset_delta=9)  # compacted: there is room for another count
    names = (names,) if isinstance(names, str) else names
    for values in product(*(edges(name) for name in names)):
        for end_offset, fits in ((None, False), (None, True), (BASE + 29, True), (BASE + 50, True)):
            changed = with_fields(parts[2], fits=fits, **dict(zip(names, values, strict=True)))
            file = file_of(b"".join([*parts[:2], changed, parts[3]]))
            for epochs in (None, LeaderEpochs(((1, BASE),)))[: 1 + ("leader_epoch" in names)]:
                what = ScanRange(base_offset=BASE, end_offset=end_offset, epochs=epochs)
                found = list(one_by_one(scan_vectorised(file, what, window_bytes=window_bytes)))
                assert found == list(one_by_one(scan(file, what))), (names, values, fits, end_offset, epochs)
        taken = [header for _, header in checked_run(changed, 0, 1 << 20).headers()]
        assert taken == [header for _, header in checked_alone(changed)], (names, values)


@given(batches().filter(bool), st.integers(1, 12))
def test_the_columns_of_a_run_are_the_fields_of_its_headers(parts, count):
    run = checked_run(b"".join(parts), 0, 1 << 20)
    assert len(run) == len(parts)
    first = run.first(count)
    assert list(first.headers()) == list(run.headers())[:count]
    for number, (position, header) in enumerate(run.headers()):
        assert (run.position[number], run.size_bytes[number]) == (position, header.size_bytes)
        assert (run.base_offset[number], run.last_offset[number]) == (header.base_offset, header.last_offset)
        assert (run.leader_epoch[number], run.record_count[number]) == (header.leader_epoch, header.record_count)
        assert run.max_timestamp_ms[number] == header.max_timestamp_ms
        again = BatchRun.of(position, header)
        assert (list(again.headers()), again.end) == ([(position, header)], position + header.size_bytes)
    assert (run.end, run.next_offset) == (position + header.size_bytes, header.next_offset)


@pytest.mark.parametrize("window_bytes", [400, 1 << 16])
def test_neighbours_come_in_one_run_and_a_batch_above_the_window_alone(window_bytes):
    small, large = [batch([b"v" * 20], BASE + n, 0, 0) for n in range(6)], batch([b"v" * 200_000], BASE + 6, 0, 0)
    data = b"".join(small) + large + batch([b"v"], BASE + 7, 0, 0)
    *runs, end = scan_vectorised(file_of(data), ScanRange(base_offset=BASE), window_bytes=window_bytes)
    assert sum(len(run) for run in runs) == 8
    assert len(runs) <= 4, "batches that a window holds are checked together, and the first large one is no end"
    assert end == CleanEnd(len(data), BASE + 8)


TIMES = (3, 1, 3, 5, 5, 2, 5, 9)


@pytest.mark.parametrize("window_bytes", [200, 1 << 16])
@pytest.mark.parametrize("struct", [OFFSET_ENTRY, TIME_ENTRY])
def test_indexes_are_judged_by_runs_as_batch_by_batch(struct, window_bytes):
    parts = [batch([b"value"] * 2, BASE + 2 * n, 0, time) for n, time in enumerate(TIMES)]
    file = file_of(b"".join(parts))
    runs = list(scan_vectorised(file, ScanRange(base_offset=BASE), window_bytes=window_bytes))[:-1]
    true = [(header.last_offset - BASE, at) for run in runs for at, header in run.headers()]
    if struct is TIME_ENTRY:
        true = [(time, relative) for time, (relative, _) in zip(TIMES, true, strict=True)]
    wrong = [(first + a, second + b) for first, second in true for a in (-1, 0, 1, 2) for b in (-1, 0, 1, 2)]
    cases = [[entry] for entry in wrong] + [list(pair) for pair in combinations(true, 2)]
    cases += [[true[0], entry] for entry in wrong] + [[entry, true[-1]] for entry in wrong]
    faulty = 0
    for entries in cases:
        data = b"".join(struct.pack(*entry) for entry in entries)
        files = (data, b"") if struct is OFFSET_ENTRY else (b"", data)
        by_runs, by_batches = IndexCheck(BASE, *files), IndexCheck(BASE, *files)
        for run in runs:
            by_runs.run(run, few=0)
            for position, header in run.headers():
                by_batches.batch(position, header)
        assert by_runs.faults(None) == by_batches.faults(None), entries
        faulty += bool(by_runs.faults(None))
    assert 0 < faulty < len(cases)


@given(batches(), st.sampled_from([0, 100, 300]), st.sampled_from([70, 200, 1 << 16]))
def test_a_walk_makes_the_index_entries_that_appends_make(parts, interval, window_bytes):
    disk, config, segments = SimulatedDisk(), LogConfig(index_interval_bytes=interval), []
    for log in (Path("/logs/a-0"), Path("/logs/a-1")):
        disk.make_directory(log)
        segments.append(Segment(disk, log, BASE, config))
    appended, walked = segments
    for step in scan_vectorised(file_of(b"".join(parts)), ScanRange(base_offset=BASE), window_bytes=window_bytes):
        if isinstance(step, BatchRun):
            walked.index_run(step)
            for position, header in step.headers():
                appended.index_batch(position, header)
    assert walked.mark() == appended.mark()
    for segment in segments:
        segment.write_indexes()
    for suffix in (".index", ".timeindex"):
        theirs, ours = (read_whole(disk, segment.path.with_suffix(suffix), 1 << 16) for segment in segments)
        assert ours == theirs
