"""What is checked for a list of records at once is what is checked for each alone."""

from operator import sub

import hypothesis.strategies as st
from hypothesis import given

from filtering import METADATA_HEADER
from pushrep.outbox.columns import RecordRules
from pushrep.outbox.errors import RecordRefused

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
        many = list(zip(many.headers, map(sub, many.ends[1:], many.ends), strict=True))
    assert many == alone


def outcome(call):
    """What it returns, or the name of the argument that it refuses."""
    try:
        return call()
    except RecordRefused as refused:
        return refused.argument
