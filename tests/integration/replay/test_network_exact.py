"""Exactness over a real node: every position, length and bound gives just the records of a brute-force answer.

The logs are drawn: batches of any size and codec, control batches, cuts by another leader, a start that retention has
moved. The answer looks at every record. The same requests go to the node and to the directory of the same log.
"""

from contextlib import ExitStack
from typing import NamedTuple
from uuid import uuid4

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from pushrep.records import Codec, encode_batch
from pushrep.replay import (
    FOLLOW,
    TO_END,
    AtTime,
    ReplayClient,
    ReplayEndReason,
    ReplayRefused,
    ReplayRequest,
    ReplaySettings,
)
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from tests.integration.replay.conftest import QUICK, World, control, open_log, until

EXAMPLES = 200 if settings().max_examples == 500 else 12  # the long form is torture's
PATIENT = {"block_bytes": 300, "connect_timeout_ms": 60_000, "liveness_timeout_ms": 60_000}
"""A busy machine may be slow to attach, or to read, here and at the node."""
TIMES = st.lists(st.integers(0, 30), min_size=1, max_size=9)
STEPS = st.lists(
    st.tuples(st.just("batch"), st.sampled_from(Codec), TIMES)
    | st.tuples(st.just("batch"), st.just(Codec.NONE), TIMES)
    | st.tuples(st.just("control"), st.just(Codec.NONE), st.just([0]))
    | st.tuples(st.just("cut"), st.floats(0, 1), st.none())
    | st.tuples(st.just("start"), st.integers(0, 60), st.none()),
    max_size=14,
)
POSITIONS = st.none() | st.integers(0, 60) | st.integers(0, 40).map(AtTime)
LENGTHS = st.sampled_from([FOLLOW, TO_END]) | st.integers(0, 30)
BOUNDS = st.sampled_from(["stable", "high_watermark", "flushed", "written", "gate"])
REQUESTS = st.lists(st.tuples(POSITIONS, LENGTHS, BOUNDS), min_size=1, max_size=12)


class Log(NamedTuple):
    """The content of a log. times: of each offset, None if it has no record. ends: offsets where a batch may end."""

    times: list[int | None]
    ends: list[int]
    start: int
    watermark: int
    gate: int
    is_live: bool


class Answer(NamedTuple):
    """offsets: of the records that come; is_over: and then it ends, else it waits for more."""

    offsets: list[int]
    is_over: bool


def answer(log: Log, request: ReplayRequest) -> Answer | ErrorCode:
    """The expected answer, computed from every record."""
    position, length = request.position, request.length
    end = len(log.times)
    recorded = max(log.start, log.watermark if request.bound in {"stable", "high_watermark", "gate"} else end)
    first = log.start if position is None else position
    if isinstance(position, AtTime):
        since = [n for n in range(log.start, end) if log.times[n] is not None and log.times[n] >= position.timestamp_ms]
        first = min([*since, recorded])
    if not log.start <= first <= recorded:
        return ErrorCode.INVALID_POSITION
    if first >= recorded and length != 0:
        if length is TO_END and log.start == recorded:
            return ErrorCode.EMPTY_RECORDING
        if not log.is_live and length is not FOLLOW:
            return ErrorCode.INVALID_POSITION
        if length is TO_END:
            return ErrorCode.EMPTY_RECORDING
    bound = min(recorded, log.gate) if request.bound == "gate" else recorded
    passed = max(one for one in log.ends if one <= bound)  # a batch that crosses the bound waits
    offsets = [n for n in range(first, passed) if log.times[n] is not None]
    if isinstance(length, int):
        has_all = len(offsets) >= length
        ends_at_a_stop = not log.is_live and bound == recorded
        return Answer(offsets[:length], has_all or ends_at_a_stop)
    return Answer(offsets, length is TO_END and (passed >= recorded or (not log.is_live and bound == recorded)))


def given(client: ReplayClient, request: ReplayRequest, wanted: Answer | ErrorCode) -> object:
    """What the client gets: as many records as requested, the rest of their batch, and whether the replay ended."""
    try:
        replay = client.replay(request)
    except ReplayRefused as refused:
        return refused.code
    with replay:
        assert isinstance(wanted, Answer), f"{request} is not refused"
        if wanted.is_over:
            records = list(replay)
            assert replay.end_reason is ReplayEndReason.LIMIT_REACHED
        else:
            records = []
            until(lambda: records.extend(replay.poll()) or len(records) >= len(wanted.offsets), str(request))
            records += replay.poll()
            assert replay.end_reason is None
    return records


class Built:
    """A log on the node, written step by step; nothing of it is watermarked before `Log` is asked for."""

    def __init__(self, leader, log_of):
        self.leader, self._log_of = leader, log_of
        self.times, self.bases, self.start = [], [], 0

    def take(self, step):
        kind, what, times = step
        if kind == "cut":
            self._cut(what)
        elif kind == "start":
            self.start = max(self.start, min(what, len(self.times)))
        else:
            made = encode_batch([b"%d" % n for n in times], timestamps_ms=times, codec=what)
            made = control(made) if kind == "control" else made
            made.stamp(self.leader.end, self.leader.epoch)
            self.bases.append(len(self.times))
            self.times += times if kind == "batch" else [None]
            self.leader.say(made, watermark=0)

    def _cut(self, share):
        """Another leader has fewer records, and continues under its epoch; records that retention removed were
        acknowledged.
        """
        bases = [base for base in self.bases if base >= self.start]
        if not bases:
            return
        at = bases[int(share * (len(bases) - 1))]
        leader = self.leader
        leader.epoch_before = self._log_of(leader.tp).leader_epochs.epoch_of(at - 1) if at else -1
        leader.epoch += 256
        leader.end = leader.start_offset = at
        del self.times[at:]
        self.bases = [base for base in self.bases if base < at]
        self.take(("batch", Codec.NONE, [7, 3]))

    def log(self, watermark, gate, *, is_live):
        end = len(self.times)
        watermark = max(self.start, min(watermark, end))
        self.leader.say(watermark=watermark)
        self.leader.say(watermark=watermark, log_start_offset=self.start)
        if not is_live:
            self.leader.say(watermark=watermark, end_session_reason=0)
        return Log(self.times, [0, *self.bases[1:], end], self.start, watermark, gate, is_live)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A node, its client, and the value of the node's counter."""
    world, gate = World(tmp_path_factory.mktemp("exact")), [0]
    with world.opened:
        node = world.node(
            replay=PATIENT | {"max_sessions": 100}, replay_counters={"gate": lambda: gate[0]}, connections_max=1_000
        )
        yield world, node, world.client(node, QUICK), gate


@settings(max_examples=EXAMPLES)
@hypothesis.given(STEPS, REQUESTS, st.integers(0, 60), st.integers(0, 60), st.booleans())
def test_every_request_gives_just_its_records_of_a_node_and_of_its_directory(
    place, steps, requests, watermark, gate, is_live
):
    """Position, length, bound; TO_END, n, FOLLOW; a time is the first record by offset at or after it."""
    world, node, far, counter = place
    outbox, tp = uuid4(), TopicIdPartition(uuid4(), f"t{uuid4().hex[:12]}", 0)
    with ExitStack() as opened:
        leader = world.leader(node, tp, outbox=outbox)
        opened.callback(leader.close)
        built = Built(leader, lambda of: open_log(node, of))
        for step in steps:
            built.take(step)
        log = built.log(watermark, gate, is_live=is_live)
        counter[0] = gate
        there = open_log(node, tp)
        near = opened.enter_context(
            ReplayClient(
                there.path.parent,
                logs=[there],
                counters={"gate": lambda: gate},
                settings=ReplaySettings(**PATIENT),
            )
        )
        for position, length, bound in requests:
            request = ReplayRequest(f"{tp.topic}-0", position, length, bound)
            compare(far, request, log)
            compare(near, request, log._replace(is_live=True))  # this process has it open for writing


def compare(client, request, log):
    wanted = answer(log, request)
    got = given(client, request, wanted)
    if isinstance(got, list):
        assert [record.timestamp_ms for record in got] == [log.times[record.offset] for record in got]
        got = [record.offset for record in got]
        assert got == wanted.offsets, request
    else:
        assert got == wanted, request
