"""What is checked, and kept, of a list of records at once is what it is of each alone."""

from operator import sub

import hypothesis.strategies as st
import pytest
from hypothesis import given

from filtering import METADATA_HEADER
from pushrep.outbox.batch import PendingBatch
from pushrep.outbox.columns import RecordRules
from pushrep.outbox.errors import RecordRefused
from pushrep.records import Codec
from pushrep.records.encoder import given_columns, header_columns, header_rows

NAMES = st.sampled_from(["a", "b", "ü", "\ud800", METADATA_HEADER, b"a"])
VALUES = st.sampled_from([b"", b"v", None, bytearray(b"w"), "text"])
HEADER = (
    st.tuples(NAMES, VALUES) | st.tuples(NAMES, VALUES).map(list) | st.sampled_from([("a",), ("a", b"", b""), "ab"])
)
LIKE = st.tuples(st.tuples(st.just("a"), VALUES), st.tuples(st.just("ü"), VALUES))
HEADERS = st.lists(HEADER, max_size=3) | LIKE | LIKE.map(list) | st.just({("a", b"v"): 1})


@given(st.sampled_from(["key", "header"]), st.lists(LIKE, min_size=1) | st.lists(HEADERS, min_size=1, max_size=5))
def test_headers_of_many_are_those_of_each(carrier, headers):
    rules = RecordRules(carrier, 1 << 20)
    alone = []
    for at, some in enumerate(headers):
        found = outcome(lambda some=some: rules.one(b"v", None, some, None, None))
        if isinstance(found, str):
            alone = found.replace("headers", f"headers[{at}]")
            break
        alone.append(((found.headers or [()])[0], found.size_bytes))
    many = outcome(lambda: rules.many([b"v"] * len(headers), None, headers, None, None))
    if not isinstance(many, str):
        many = list(zip(rows_of(many.headers, len(headers)), map(sub, many.ends[1:], many.ends), strict=True))
    assert many == alone


def rows_of(headers, count):
    return [()] * count if not headers else headers if given_columns(headers) is None else header_rows(headers)


@given(st.sampled_from(["key", "header"]), st.lists(LIKE, min_size=1))
def test_columns_of_headers_are_checked_as_those_of_each_record(carrier, headers):
    rules = RecordRules(carrier, 1 << 20)
    columns = header_columns(headers)
    by_row, by_column = (
        outcome(lambda given=given: rules.many([b"v"] * len(headers), None, given, None, None))
        for given in (headers, columns)
    )
    if isinstance(by_row, str):
        assert by_column == by_row
    else:
        assert (by_column.headers, by_column.ends) == (by_row.headers, by_row.ends)
    with pytest.raises(RecordRefused, match="headers: has"):
        rules.many([b"v"] * (len(headers) + 1), None, columns, None, None)


PLAIN = st.sampled_from([None, b"", b"v", b"other"])
APPEND = st.sampled_from([(), ("a",), ("a", "b"), ("b", "a"), None]).flatmap(
    lambda names: (
        st.none()
        if names is None
        else st.lists(st.tuples(*(st.tuples(st.just(name), PLAIN) for name in names)), min_size=1, max_size=4)
    )
)


@given(st.sampled_from(["key", "header"]), st.lists(st.tuples(APPEND, st.integers(1, 4)), min_size=1, max_size=4))
def test_a_batch_keeps_the_headers_of_each_append_whatever_came_before(carrier, appends):
    rules, batch, expected = RecordRules(carrier, 1 << 20), PendingBatch(None, 5, 0.0), []
    for headers, cut in appends:
        count = 2 if headers is None else len(headers)
        columns = rules.many([b"v"] * count, None, headers, None, None)
        for start, end in ((0, min(cut, count)), (min(cut, count), count)):
            if start < end:
                batch.extend(columns, start, end)
        expected += [()] * count if headers is None else headers
    sealed = batch.seal(0, pid=7, partition=0, carrier=carrier, codec=Codec.NONE)
    own = 1 if carrier == "header" else 0
    assert [record.headers[: len(record.headers) - own] for record in sealed.records()] == expected


def outcome(call):
    """What it returns, or the name of the argument that it refuses."""
    try:
        return call()
    except RecordRefused as refused:
        return refused.argument
