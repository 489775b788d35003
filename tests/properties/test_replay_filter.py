"""The rule against a model that follows the definition word by word, in both forms and through any cut."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from filtering import HighwaterMarks, PairSplit, ReplayFilter, StreamMetadata
from filtering.rule import group_pairs

WINDOWS = st.sampled_from([0, 0, 1, 3, 7, 8, 9, 16, 64, 100])
FAR = 2**63 - 1 - 40
OFFSETS = st.one_of(st.integers(0, 12), st.integers(0, 200), st.integers(0, 20).map(lambda n: FAR + n))
PIDS = st.sampled_from([1, -1, 2**63 - 1, -(2**63), 77])
METADATA = st.builds(StreamMetadata, PIDS, st.sampled_from([0, 1, 2**31 - 1]), OFFSETS)
ODD = st.one_of(
    st.none(),
    st.binary(max_size=30),
    METADATA.map(lambda m: m.pack()[:8] + b"\xff" * 4 + m.pack()[12:]),
    METADATA.map(lambda m: m.pack()[:12] + b"\x80" + m.pack()[13:]),
)
# One pair in four keys of ten, so that there are long stretches of one pair too.
KEYS = st.lists(
    st.one_of(METADATA.map(StreamMetadata.pack), OFFSETS.map(lambda o: StreamMetadata(7, 0, o).pack()), ODD),
    max_size=60,
)
CUTS = st.lists(st.integers(0, 60), max_size=6)
ONLY = st.one_of(st.none(), st.sets(PIDS | st.just(7)))


class Model:
    """The contract's rule, with a set of all offsets ever seen of a pair."""

    def __init__(self, window, only_pids):
        self.window, self.only_pids = window, only_pids
        self.seen = {}

    def admit(self, key):
        metadata = StreamMetadata.try_unpack(key)
        if metadata is None or (self.only_pids is not None and metadata.pid not in self.only_pids):
            return True
        seen = self.seen.setdefault((metadata.pid, metadata.partition), set())
        offset, mark = metadata.offset, max(seen, default=-1)
        inside = mark - self.window <= offset and offset not in seen and self.window > 0
        seen.add(offset)
        return offset > mark or inside

    def marks(self):
        return {
            pair: (max(seen), {o for o in seen if max(seen) - self.window <= o}) for pair, seen in self.seen.items()
        }


def marks_as_sets(marks):
    answer = {}
    for pair, entry in marks.items():
        bits = int.from_bytes(entry.bitmap, "little")
        below = {entry.offset - 1 - i for i in range(8 * len(entry.bitmap)) if bits >> i & 1}
        answer[pair] = (entry.offset, below | {entry.offset})
    return answer


def as_sequence(keys):
    return keys


def as_arrow(kind):
    return lambda keys: pa.array(keys, kind)


def as_slice(keys):
    return pa.array([b"before", None, *keys, b"after"], pa.binary())[2 : 2 + len(keys)]


def as_chunks(keys):
    middle = len(keys) // 2
    return pa.chunked_array([pa.array(keys[:middle], pa.binary()), pa.array([], pa.binary()), as_slice(keys[middle:])])


def as_fixed(keys):
    """Such a column can't hold keys of another length; the filter treats null like them."""
    return pa.array([None, *(k if k is not None and len(k) == 20 else None for k in keys)], pa.binary(20))[1:]


FORMS = st.sampled_from(
    [as_sequence, as_arrow(pa.binary()), as_arrow(pa.large_binary()), as_slice, as_chunks, as_fixed]
)


def cut(keys, cuts):
    places = sorted({0, len(keys), *(c % (len(keys) + 1) for c in cuts)})
    return [keys[a:b] for a, b in pairwise(places)]


@given(KEYS, WINDOWS, ONLY)
def test_one_by_one_agrees_with_the_definition(keys, window, only_pids):
    replay_filter, model = ReplayFilter(window=window, only_pids=only_pids), Model(window, only_pids)
    assert [replay_filter.admit(key) for key in keys] == [model.admit(key) for key in keys]
    assert marks_as_sets(replay_filter.marks()) == model.marks()


@settings(max_examples=settings().max_examples * 3 // 2)
@given(KEYS, WINDOWS, ONLY, FORMS, st.tuples(CUTS, st.sampled_from([0, 5, 64, None])))
@example([StreamMetadata(7, 0, o).pack() for o in (FAR, 0, FAR + 20)], 100, None, as_slice, ([2], 64))
def test_the_array_form_is_the_one_by_one_form(keys, window, only_pids, form, history):
    (cuts, older_window), before = history, HighwaterMarks()
    if older_window is not None:  # go on from marks of a filter that may have had another window
        older = ReplayFilter(window=older_window)
        older.admit_batch(keys[::3])
        before = older.marks(1_000)
    given_bytes = before.to_bytes()
    one, array = (ReplayFilter(before, window=window, only_pids=only_pids) for _ in range(2))
    answers = [one.admit(key) for key in keys]
    passes = [array.admit_batch(form(part)) for part in cut(keys, cuts)]
    assert [bool(p) for part in passes for p in part] == answers
    assert array.counts == one.counts
    assert array.gaps == one.gaps
    assert array.marks(2_000).to_bytes() == one.marks(2_000).to_bytes()
    assert array.marks(2_000) == HighwaterMarks.from_bytes(one.marks(2_000).to_bytes())
    assert before.to_bytes() == given_bytes, "the filter never changes the marks it was given"


@given(KEYS, WINDOWS)
def test_the_two_forms_may_take_turns_on_one_filter(keys, window):
    mixed, one = ReplayFilter(window=window), ReplayFilter(window=window)
    answers = []
    for number, part in enumerate(cut(keys, range(0, 60, 5))):
        answers += [mixed.admit(key) for key in part] if number % 2 else mixed.admit_batch(part).tolist()
    assert answers == [one.admit(key) for key in keys]
    assert mixed.counts == one.counts
    assert mixed.marks(5) == one.marks(5)


@given(st.lists(METADATA, max_size=40))
def test_a_contiguous_buffer_is_the_same_column(metadata):
    keys = [m.pack() for m in metadata]
    buffer = b"".join(keys)
    expected = ReplayFilter().admit_batch(keys).tolist()
    for column in (buffer, np.frombuffer(buffer, np.uint8), np.frombuffer(buffer, np.uint8).reshape(-1, 20)):
        assert ReplayFilter().admit_batch(column).tolist() == expected


@given(KEYS, WINDOWS, CUTS)
def test_slices_are_filtered_alone_from_marks_that_were_merged(keys, window, cuts):
    """As Spark does it: first the marks of each slice, then their merge as starting marks, then each slice alone."""
    whole = ReplayFilter(window=window)
    expected = whole.admit_batch(keys).tolist()
    start, answers = HighwaterMarks(), []
    for part in cut(keys, cuts):
        answers += ReplayFilter(start, window=window).admit_batch(part).tolist()
        alone = ReplayFilter(window=window)
        alone.admit_batch(part)
        start = start.merge(HighwaterMarks.from_columns(**alone.marks().to_columns()._asdict()))
    assert answers == expected
    assert start == whole.marks()


@given(st.lists(st.tuples(PIDS, st.integers(0, 3)), max_size=80))
def test_grouping_brings_pairs_together_in_their_order(pairs):
    pids, partitions = (np.array([pair[k] for pair in pairs], np.int64) for k in (0, 1))
    if not pairs:
        return
    groups = group_pairs(pids, partitions)
    rows = groups.together(np.arange(len(pairs)))
    found = {}
    for start, size, pid, partition in zip(groups.starts, groups.sizes, groups.pids, groups.partitions, strict=True):
        found[(int(pid), int(partition))] = rows[start : start + size].tolist()
    expected = {}
    for row, pair in enumerate(pairs):
        expected.setdefault(pair, []).append(row)
    assert found == expected
    assert groups.back(rows).tolist() == list(range(len(pairs)))


@pytest.mark.parametrize("count", [300, 70_000, 400_000])
def test_pairs_that_share_a_hash_are_told_apart(count):
    """Enough pairs for collisions of the 16-bit hash, then of the 32-bit one."""
    rng = np.random.default_rng(count)
    pids = np.repeat(rng.integers(-(2**63), 2**63 - 1, count), 2)
    rng.shuffle(pids)
    groups = group_pairs(pids, np.zeros(len(pids), np.int64))
    assert len(np.unique(groups.pids)) == len(groups.pids) == len(np.unique(pids))
    together = groups.together(pids)
    assert (together == np.repeat(groups.pids, groups.sizes)).all()


@given(KEYS, st.lists(st.integers(0, 3), min_size=60, max_size=60))
def test_a_split_pair_is_found_wherever_it_is_and_the_batch_leaves_no_trace(keys, destinations):
    destinations = destinations[: len(keys)]
    one, array = ReplayFilter(window=8), ReplayFilter(window=8)
    failure = None
    for key, destination in zip(keys, destinations, strict=True):
        try:
            one.admit(key, destination)
        except PairSplit as error:
            failure = error
            break
    fresh = array.counts
    if failure is None:
        array.admit_batch(keys, destinations)
        assert array.marks(3) == one.marks(3)
        return
    with pytest.raises(PairSplit) as refusal:
        array.admit_batch(keys, np.array(destinations))
    assert vars(refusal.value) == vars(failure), "the first row that lies elsewhere is named, as one by one"
    assert array.counts == fresh
    assert len(array.marks()) == 0
