"""A sealed batch in pieces: the same records, none larger than the limit."""

from hypothesis import given
from hypothesis import strategies as st

from pushrep.kafka.pipeline import pieces_of
from pushrep.kafka.progress import OffsetRanges
from pushrep.records import Codec, encode_batch

NONE = OffsetRanges()


def batch_of(values, codec=Codec.NONE, base_offset=100):
    return encode_batch(
        values,
        keys=[b"k%d" % n for n in range(len(values))],
        headers=[[("h", b"%d" % n)] for n in range(len(values))],
        timestamps_ms=[1000 + n for n in range(len(values))],
        codec=codec,
        base_offset=base_offset,
    )


def contents(records):
    return [(one.key, one.value, one.headers, one.timestamp_ms) for one in records]


def test_a_batch_that_fits_is_not_touched():
    batch = batch_of([b"a", b"b"])
    (piece,) = pieces_of(batch, 100, batch.header.size_bytes, NONE)
    assert piece.batch is batch
    assert (piece.start, piece.end) == (100, 102)


@given(
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=30),
    limit=st.integers(600, 3000),
    codec=st.sampled_from(Codec),
)
def test_pieces_hold_every_record_once_and_none_is_too_large(sizes, limit, codec):
    batch = batch_of([bytes(size) for size in sizes], codec)
    pieces = list(pieces_of(batch, 100, limit, NONE))
    assert all(piece.batch.header.size_bytes <= limit for piece in pieces)
    assert [piece.start for piece in pieces] == [100, *(piece.end for piece in pieces[:-1])]
    assert pieces[-1].end == batch.header.next_offset
    found = [record for piece in pieces for record in piece.batch.records()]
    assert contents(found) == contents(batch.records())


def test_a_record_above_the_limit_is_a_piece_of_its_own():
    """faults B4: a learned limit cuts batches; what is too large is for who sends the record alone to say."""
    batch = batch_of([b"a", b"b", bytes(5000), b"c"])
    assert [piece[:2] for piece in pieces_of(batch, 100, 1000, NONE)] == [(n, n + 1) for n in range(100, 104)]


def test_a_refused_record_goes_alone_behind_those_before_it():
    batch = batch_of([b"a", b"b", b"c", b"d", b"e"])
    pieces = list(pieces_of(batch, 100, 1000, OffsetRanges([(103, 104)]), OffsetRanges([(102, 104)])))
    assert [piece[:2] for piece in pieces] == [(100, 102), (102, 104), (104, 105)]
    assert [len(piece.batch.records()) for piece in pieces] == [2, 1, 1]


def test_a_skipped_record_is_left_out_and_the_rest_goes_on():
    batch = batch_of([b"a", bytes(5000), b"c"])
    pieces = list(pieces_of(batch, 100, 1000, OffsetRanges([(101, 102)])))
    assert [piece[:2] for piece in pieces] == [(100, 103)]
    assert contents(pieces[0].batch.records()) == [one for n, one in enumerate(contents(batch.records())) if n != 1]


def test_where_all_are_skipped_the_offsets_still_count_as_sent():
    batch = batch_of([b"a", b"b"])
    assert list(pieces_of(batch, 101, 1000, OffsetRanges([(101, 102)]))) == [(101, 102, None)]


def test_going_on_in_the_middle_of_a_batch():
    batch = batch_of([b"a", b"b", b"c"])
    (piece,) = pieces_of(batch, 102, 1000, NONE)
    assert contents(piece.batch.records()) == contents(batch.records())[2:]
