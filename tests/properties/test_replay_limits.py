"""Position, length and bound, exact: whatever the batches, blocks, credit and bounds, just what a plain loop picks."""

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from pushrep.log.published import LogOffsets
from pushrep.replay import events as e
from pushrep.replay.events import ReplayState
from pushrep.replay.plan import ReplayPlan, ReplaySettings, Span
from pushrep.replay.session import ReplaySession
from pushrep.wire.replay_messages import ReplayEndReason


@st.composite
def logs(draw):
    """Batches as (base, next, size, offsets of records of data)."""
    batches, at = [], 0
    for _ in range(draw(st.integers(0, 8))):
        length = draw(st.integers(1, 7))
        is_control = draw(st.sampled_from([False, False, False, True]))
        offsets = [] if is_control else list(range(at, at + length))
        batches.append((at, at + length, draw(st.integers(1, 100)), offsets))
        at += length
    return batches, at


class Run:
    """One session over such a log, driven to its end or to where nothing moves."""

    def __init__(self, batches, plan, settings, draw):
        self.batches, self.draw, self.got, self.now = batches, draw, [], 0
        self.session = ReplaySession(1, plan, settings, 0)
        self.session.handle(e.SegmentOpened(), 0)
        self.session.handle(e.SubscriberAttached(draw(st.integers(0, 50))), 0)

    def turn(self, facts, counter=None, *, is_live=True):
        """Run one turn; returns whether it did something."""
        self.now += 1
        effects = self.session.handle(e.Turn(facts, counter, is_live), self.now)
        for effect in effects:
            if isinstance(effect, e.ReadBlock):
                self.read(effect, facts)
        return bool(effects)

    def read(self, wanted, facts):
        assert wanted.limit <= facts.end
        found = [batch for batch in self.batches if batch[1] > wanted.position and batch[0] < wanted.limit]
        found = found[: self.draw(st.integers(1, 3))]
        spans = tuple(Span(base, end, size, len(offsets)) for base, end, size, offsets in found)
        for effect in self.session.handle(e.BlockRead(spans), self.now):
            if isinstance(effect, e.SendBlock):
                assert effect.spans == 1 or effect.size_bytes <= wanted.max_bytes
                for _, _, _, offsets in found[: effect.spans]:
                    self.got += [offset for offset in offsets if effect.start <= offset < effect.end]
                self.session.handle(e.BlockSent(), self.now)

    def exhaust(self, facts, counter=None, *, is_live=True):
        """Turns until nothing moves; credit comes in drops."""
        idle = 0
        while self.session.state is ReplayState.REPLAY and idle < 3:
            before = (self.session.position, len(self.got))
            self.session.handle(e.Credited(60), self.now)
            self.turn(facts, counter, is_live=is_live)
            idle = idle + 1 if before == (self.session.position, len(self.got)) else 0


def at_rest(end):
    return LogOffsets(0, end, end, end)


def picked(batches, position, stop, count):
    """The answer, by looking at every record."""
    offsets = [offset for batch in batches for offset in batch[3] if offset >= position]
    return [offset for offset in offsets if stop is None or offset < stop][:count]


ONE_LOG = [
    (0, 2, 20, [0, 1]),
    (2, 7, 50, [2, 3, 4, 5, 6]),
    (7, 8, 30, [7]),
    (8, 9, 40, []),
    (9, 18, 90, [*range(9, 18)]),
    (18, 22, 70, [18, 19, 20, 21]),
]


def test_every_position_and_length_of_one_log():
    chosen = random.Random(3)
    for position, length in itertools.product(range(23), [*range(16), "follow", *(f"<{end}" for end in range(23))]):
        count = length if isinstance(length, int) else None
        stop = int(length[1:]) if isinstance(length, str) and length != "follow" else None
        if stop is not None and stop < position:
            continue
        plan = ReplayPlan(recording=1, position=position, end=stop, records=count)
        run = Run(ONE_LOG, plan, ReplaySettings(block_bytes=chosen.choice([1, 100, 1000])), AnyOf(chosen))
        run.exhaust(at_rest(22), is_live=False)
        assert run.got == picked(ONE_LOG, position, stop, count), f"from {position}, length {length}"


class AnyOf:
    """Draws as hypothesis does, from a plain source: of these strategies only integers(low, high) is used here."""

    def __init__(self, source):
        self.source = source

    def __call__(self, _strategy):
        return self.source.randint(1, 3)


@given(logs(), st.data())
def test_length_and_position_give_what_a_plain_loop_picks(log, data):
    batches, end = log
    position = data.draw(st.sampled_from(range(end + 1)))
    count = data.draw(st.none() | st.sampled_from(range(15)))
    stop = None if count is not None else data.draw(st.none() | st.integers(position, end))
    plan = ReplayPlan(recording=1, position=position, end=stop, records=count)
    run = Run(batches, plan, ReplaySettings(block_bytes=data.draw(st.integers(1, 250))), data.draw)
    run.exhaust(at_rest(end), is_live=False)
    wanted = picked(batches, position, stop, count)
    assert run.got == wanted
    if plan.end is None and plan.records is None:
        assert run.session.state is ReplayState.REPLAY, "it waits at the tip"
        assert run.session.position == end
    else:
        assert run.session.end_reason is ReplayEndReason.LIMIT_REACHED
    if count is not None:
        assert run.session.records_sent == len(wanted)


@given(logs(), st.data())
def test_a_rising_bound_lets_whole_batches_out_and_never_more(log, data):
    batches, end = log
    bound = data.draw(st.sampled_from(["stable", "high_watermark", "flushed", "written", "applied"]))
    count = data.draw(st.none() | st.integers(1, 20))
    plan = ReplayPlan(recording=1, position=0, records=count, bound=bound)
    run = Run(batches, plan, ReplaySettings(block_bytes=data.draw(st.integers(1, 250))), data.draw)
    written = flushed = watermark = counter = 0
    for _ in range(data.draw(st.integers(1, 5))):
        written = data.draw(st.integers(written, end))
        # The log's own offsets stand between batches; somebody's counter stands anywhere.
        ends = [0, *(batch[1] for batch in batches if batch[1] <= written)]
        written = max(ends)
        flushed = data.draw(st.sampled_from([one for one in ends if one >= flushed]))
        watermark = data.draw(st.sampled_from([one for one in ends if one >= watermark]))
        counter = data.draw(st.integers(counter, end + 5))
        facts = LogOffsets(0, written, flushed, watermark)
        run.exhaust(facts, counter)
        limit = {
            "stable": facts.stable,
            "high_watermark": watermark,
            "flushed": flushed,
            "written": written,
            "applied": min(counter, facts.stable),
        }[bound]
        wanted = [offset for _, last, _, offsets in batches if last <= limit for offset in offsets][:count]
        assert run.got == wanted, f"bound {bound} at {limit}"
