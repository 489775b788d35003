"""Where a startpoint starts, for any log: against an answer found by looking at every record."""

from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from pushrep.startpoints import LogFacts, OutOfRange, Resolved, Startpoint, Unresolved, resolve

POLICIES = st.sampled_from(list(OutOfRange))
SMALL = st.integers(0, 40)


@st.composite
def logs(draw):
    """[start, end) with holes, and times out of order: {offset: ms}."""
    start = draw(st.integers(0, 20))
    offsets = draw(st.sets(st.integers(start, start + 15)))
    end = max(offsets, default=start - 1) + 1 + draw(st.integers(0, 3))
    return start, end, {offset: draw(SMALL) for offset in sorted(offsets)}


def facts_of(log):
    start, end, times = log
    # As a log answers: what lies above the readable end may be found, too.
    every = times | {end + 1: 1 << 60}
    return LogFacts(start=start, end=end, first_at=lambda ms: next((o for o, t in every.items() if t >= ms), None))


startpoints = st.one_of(
    st.builds(Startpoint.specific, SMALL, out_of_range=POLICIES),
    st.builds(Startpoint.timestamp, SMALL, out_of_range=POLICIES),
    st.builds(Startpoint.earliest),
    st.builds(Startpoint.latest),
    st.builds(Startpoint.bootstrap),
    st.builds(
        lambda n, policy: Startpoint.relative(records=n, out_of_range=policy),
        st.integers(-40, 40).filter(bool),
        POLICIES,
    ),
    st.builds(lambda n, policy: Startpoint.relative(ms=-n, out_of_range=policy), st.integers(1, 60), POLICIES),
)


def brute_force(startpoint, log, created_ms, position):
    """The offset, None where it does not fit."""
    start, end, times = log
    wished = {
        "EARLIEST": start,
        "BOOTSTRAP": start,
        "LATEST": end,
        "SPECIFIC_OFFSET": startpoint.value,
        "RELATIVE_RECORDS": None if position is None or startpoint.value is None else position + startpoint.value,
    }
    if startpoint.kind in wished:
        offset = wished[startpoint.kind]
        return offset if offset in range(start, end + 1) else None
    ms = startpoint.value if startpoint.kind == "TIMESTAMP" else created_ms + startpoint.value
    return min((offset for offset in range(start, end) if offset in times and times[offset] >= ms), default=None)


@given(startpoints, logs(), SMALL, st.none() | SMALL)
def test_it_starts_where_looking_at_every_record_says(startpoint, log, created_ms, position):
    answer = resolve(startpoint, facts_of(log), created_ms=created_ms, position=position)
    start, end, _ = log
    wanted = brute_force(startpoint, log, created_ms, position)
    if wanted is not None:
        assert isinstance(answer, Resolved)
        assert (answer.offset, answer.by_policy) == (wanted, None)
    elif startpoint.out_of_range is OutOfRange.ERROR:
        assert isinstance(answer, Unresolved)
        assert answer.why
    else:
        assert isinstance(answer, Resolved)
        assert answer.offset == (start if startpoint.out_of_range is OutOfRange.EARLIEST else end)
        assert answer.by_policy, "never silently"
    until = getattr(answer, "until", None)
    assert until == (end if startpoint.kind == "BOOTSTRAP" and end > start else None)


@given(startpoints)
def test_a_startpoint_survives_its_json(startpoint):
    assert Startpoint.from_json(asdict(startpoint)) == startpoint
