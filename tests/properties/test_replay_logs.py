"""Replays of real logs, exact: every position, length and bound gives what a plain loop over all records picks."""

import tempfile
from pathlib import Path

import hypothesis
from hypothesis import settings
from hypothesis import strategies as st

from pushrep.log import Durability, LogConfig, SegmentLog
from pushrep.records import Codec, encode_batch
from pushrep.replay import FOLLOW, TO_END, AtTime, ReplayClient, ReplayRefused, ReplayRequest, ReplaySettings
from pushrep.wire.error_codes import ErrorCode

EXAMPLES = 500 if settings().max_examples == 500 else 20  # the long form is torture's
# A busy machine may be slow to attach, or to read.
PATIENT = ReplaySettings(block_bytes=300, connect_timeout_ms=60_000, liveness_timeout_ms=60_000)
BATCHES = st.lists(
    st.tuples(st.sampled_from(Codec), st.lists(st.integers(0, 30), min_size=1, max_size=9)), min_size=0, max_size=12
)
POSITIONS = st.none() | st.integers(0, 60) | st.integers(0, 40).map(AtTime)
LENGTHS = st.sampled_from([FOLLOW, TO_END]) | st.integers(0, 30)
REQUESTS = st.lists(st.tuples(POSITIONS, LENGTHS, st.sampled_from(["stable", "written", "counter"])), max_size=25)


def answer(times, start, position, length, bound_ends, recorded):
    """Offsets, or the refusal, by looking at every record; the log is stopped, so nothing more comes."""
    if isinstance(position, AtTime):
        since = [n for n in range(start, len(times)) if times[n] >= position.timestamp_ms]
        first = min([*since, recorded])
    else:
        first = start if position is None else position
    if not start <= first <= recorded:
        return ErrorCode.INVALID_POSITION
    if length != 0 and first == recorded and length is not FOLLOW:
        return ErrorCode.EMPTY_RECORDING if length is TO_END and start == recorded else ErrorCode.INVALID_POSITION
    offsets = list(range(first, min(recorded, bound_ends)))
    return offsets if not isinstance(length, int) else offsets[:length]


def given(client, request):
    """The records that come, or the refusal."""
    try:
        replay = client.replay(request)
    except ReplayRefused as refused:
        return refused.code
    with replay:
        got, idle = [], 0
        while idle < 2:
            more = replay.poll()
            got += more
            idle = 0 if more else idle + 1
    return got


@settings(max_examples=EXAMPLES)
@hypothesis.given(BATCHES, REQUESTS, st.integers(0, 60), st.integers(100, 2_000), st.integers(0, 70))
def test_every_request_gives_just_its_records(batches, requests, purge_at, segment_bytes, counter):
    times = [time for _, group in batches for time in group]
    with tempfile.TemporaryDirectory() as directory:
        with SegmentLog.open(Path(directory, "t-0"), LogConfig(segment_bytes=max(segment_bytes, 1024))) as log:
            for codec, group in batches:
                values = [b"%d" % time + b"." * 30 for time in group]
                log.append(encode_batch(values, timestamps_ms=group, codec=codec), durability=Durability.BUFFERED)
            log.flush()
            log.delete_records(min(purge_at, log.log_end_offset))
            start, end = log.log_start_offset, log.log_end_offset
        ends = [0]
        for _, group in batches:
            ends.append(ends[-1] + len(group))
        counted = max(one for one in ends if one <= counter)  # a batch that crosses the counter waits
        client = ReplayClient(directory, counters={"counter": lambda: counter}, settings=PATIENT)
        for position, length, bound in requests:
            wanted = answer(times, start, position, length, counted if bound == "counter" else end, end)
            request = ReplayRequest("t-0", position, length, bound)
            got = given(client, request)
            if isinstance(got, list):
                assert [record.timestamp_ms for record in got] == [times[record.offset] for record in got]
                got = [record.offset for record in got]
            assert got == wanted, request
